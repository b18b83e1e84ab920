"""Play episodes with a trained policy; `dppo.evaluate` and the command `dppo eval` share this code."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from dppo.config import flattened
from dppo.config.arguments import with_answers
from dppo.config.files import objects_in
from dppo.config.trust import code_named_by, require_trust
from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.faults import making
from dppo.envs.frames import make_prepared
from dppo.envs.make import EnvId, check_env_id, close_in_time
from dppo.envs.silence import SilenceWatch, of_one
from dppo.envs.statistics import kept_in_words, running_statistics
from dppo.errors import CheckpointError, ConfigError, counted, printable
from dppo.invocation import command
from dppo.log import logger
from dppo.numerics.portable import limit_blas
from dppo.policies.bounds import NAMED, most_at_bound
from dppo.policies.playing import Playing
from dppo.policies.policy import Policy, model_name, policy_from, read
from dppo.ppo.exchange.records import Episode
from dppo.ppo.networks.network import ModelClass
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.observer import Evaluation, Result
from dppo.records.video import Video, check_display, check_video
from dppo.signals import ending_on_signals
from dppo.user_code import import_path

REPORT_EVERY_S = 5.0


@with_answers
def evaluate(
    policy: Policy | Result | str | Path,
    env: EnvId | Any = None,
    episodes: int = 10,
    *,
    seed: int = 0,
    deterministic: bool = True,
    env_kwargs: Mapping[str, Any] | None = None,
    model: ModelClass | None = None,
    trust: bool = False,
    render: bool = False,
    video: str | Path | None = None,
) -> Evaluation:
    """Play episodes with a trained policy in this process, and return their returns and lengths.

    Args:
        policy: a policy, the result of a run, the folder of a run, or one of its checkpoints.
        env: an id, a callable that returns an environment, or an environment, which stays open; None: the run's own.
        seed: seed of the episodes and of sampled actions; independent of the seed of the training.
        deterministic: take the most likely action; False samples actions, as in training.
        env_kwargs: arguments of the environment, in place of those of the run.
        model: the class of the run's own network, in place of the one that the checkpoint names.
        trust: import and call what the settings of a run's folder name. Not needed for plain Gymnasium ids, for a
            `Result`, or for an `env` and a `model` that you name.
        render: show the environment in a window.
        video: an MP4 file to write, with the first 9 episodes side by side; needs PyAV, and no display.

    Raises:
        ConfigError: an invalid argument, or a run whose code is not trusted.
        CheckpointError: there is no checkpoint, or the environment's spaces are not those of the policy.
        EnvironmentFault: the environment raised; carries its traceback.
    """
    if episodes < 1:
        raise ConfigError(f"episodes={episodes}: must be at least 1.")
    if seed < 0:
        raise ConfigError(f"seed={seed}: must be at least 0.")
    if video is not None:
        check_video(Path(video), render=render)
    if render:
        check_display()
    player = _find_player(policy, env, env_kwargs, model, trust=trust)
    wanted = _Wanted(episodes, seed, deterministic, render=render, video=None if video is None else Path(video))
    played = list[Episode]()
    with ending_on_signals(lambda: _summary(played, episodes)) as check_signals:
        _play_here(player, wanted, played, check_signals)
    returns = tuple(episode.episode_return for episode in played)
    lengths = tuple(episode.length for episode in played)
    return Evaluation(player.env_name, returns, lengths)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The arguments of `evaluate` that say what is played, and how it is shown."""

    episodes: int
    seed: int
    deterministic: bool
    render: bool
    video: Path | None

    @property
    def render_mode(self) -> str | None:
        """Return the render_mode that the environment needs."""
        if self.render:
            return "human"
        return None if self.video is None else "rgb_array"


def _play_here(player: _Player, wanted: _Wanted, played: list[Episode], check_signals: Callable[[], None]) -> None:
    """Play all episodes in an environment of this process, and add them to `played`."""
    progress = ActivityRecord()
    with (
        limit_blas(1),  # as in the evaluations of a run, whose returns are the same
        SilenceWatch(progress, of_one(player.env_name)),
    ):
        progress.enter(place_of(Phase.MAKE))
        made = player.make(wanted.render_mode, wanted.seed)
        progress.enter(place_of(Phase.IDLE))
        try:
            playing = Playing(player.policy, made, player.env_name, wanted.seed, deterministic=wanted.deterministic)
            playing.progress = progress
            steps = counted(player.policy.state["global_step"], "step")
            how = "taking the most likely action" if wanted.deterministic else "sampling actions"
            if wrappers := running_statistics(made):
                problem = kept_in_words(wrappers)
                logger.warning("%s: %s: what the policy sees or gets is not as in training", player.env_name, problem)
            logger.info("%s, policy after %s, %s, %s", player.env_name, steps, how, counted(wanted.episodes, "episode"))
            film = Video(wanted.video, made, wanted.episodes, player.settings.get("action_repeat", 1))
            for so_far in _episodes(playing, wanted.episodes, played):
                check_signals()
                film.add(so_far.index)
            film.write()
            _log_actions_at_bound(player.policy, played)
        finally:
            progress.enter(place_of(Phase.CLOSE))
            if not _is_made(player.env):
                close_in_time([made])


@dataclass(frozen=True, slots=True)
class _Player:
    """A policy and the environment that it will play."""

    policy: Policy
    env: Any
    env_kwargs: dict[str, Any]
    objects: dict[str, Any] = field(default_factory=dict)
    """Of the run, if this process has made it."""

    @property
    def env_name(self) -> str:
        """Return the environment's id, or the import path of its callable or class."""
        spec = getattr(self.env, "spec", None)
        return str(getattr(spec, "id", None) or import_path(type(self.env) if _is_made(self.env) else self.env))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, by which frames are prepared as in training."""
        return flattened(self.policy.state.get("config") or {})

    def make(self, mode: str | None, seed: int) -> Any:
        """Return the environment, with a render_mode if it is to be shown; raise as `evaluate` does."""
        if _is_made(self.env):
            if mode == "human":
                raise ConfigError(
                    "render=True has no effect on an environment that is already made. Make it with "
                    "render_mode='human'."
                )
            return self.env
        check_env_id(self.env)
        with making(self.env_name):
            how: dict[str, Any] = {"place": (self.settings.get("num_samplers", 0), 0), "rows": 1, "seed": seed}
            return make_prepared(self.env, self.env_kwargs, self.settings | self.objects, mode, **how)


def _is_made(env: Any) -> bool:
    """Return whether `env` is an environment, not the name of one or a way to make one."""
    return not isinstance(env, str | type) and hasattr(env, "reset") and hasattr(env, "step")


def _find_player(
    policy: Policy | Result | str | Path,
    env: Any,
    env_kwargs: Mapping[str, Any] | None,
    model: ModelClass | None,
    *,
    trust: bool,
) -> _Player:
    """Return the policy and its environment; import nothing that only a run's folder names, unless it is trusted."""
    if _is_made(env) and env_kwargs is not None:
        raise ConfigError("env_kwargs: have no effect on an environment that is already made. Leave them out.")
    if isinstance(policy, Policy):
        if env is None:
            raise ConfigError(
                "env: is missing, and a Policy cannot make one. Pass env, or the run in place of the policy."
            )
        if model is not None:
            raise ConfigError("model: has no effect on a policy that is already loaded. Leave it out.")
        require_trust(_wrappers_of(policy.state, env), (), "the policy", trust=trust)
        return _Player(policy, env, dict(_own_kwargs(policy, env) if env_kwargs is None else env_kwargs))
    held: dict[str, Any] = policy.objects if isinstance(policy, Result) else {}
    if isinstance(policy, Result):
        policy, trust = policy.checkpoint, True  # this process has just run its code
    run = Path(policy)
    found = read(run)
    own = model_name(found, model)
    named = held | {name: value for name, value in (("env_id", env), ("model", model)) if value is not None}
    kept = env_kwargs is None and not _is_made(env)
    settings = settings_to_resume(run, None if kept else {"env_kwargs": env_kwargs or {}})
    stored = {"env_kwargs": {}} | settings | {"model": own} | _wrappers_of(found.checkpoint.state, env)
    _check_program(stored, named, found.checkpoint.state, run)
    require_trust(stored, named, run, trust=trust)
    settings = stored | named
    if "env_id" not in settings or not isinstance(settings["env_kwargs"], dict):
        raise CheckpointError(f"{run}: has settings that are not of dppo. Pass `env_id` and `env_kwargs`.")
    for name, action in code_named_by(settings).items():
        logger.info("%s %s.", f"{name}={named[name]}" if name in named else run, action)
    return _Player(policy_from(found, named.get("model")), settings["env_id"], dict(settings["env_kwargs"]), held)


def _own_kwargs(policy: Policy, env: Any) -> Mapping[str, Any]:
    """Return the arguments of the run's environment, if `env` is to make that; raise ConfigError if some are lost."""
    stored = flattened(policy.state.get("config") or {})
    own = stored.get("env_kwargs")
    if _is_made(env) or import_path(env) != stored.get("env_id") or not isinstance(own, Mapping):
        return {}
    for _, name, text in objects_in({"env_kwargs": own}):
        raise ConfigError(f"env_kwargs: {name} was {text} in training, which is not stored. Pass `env_kwargs`.")
    return own


def _check_program(stored: Mapping[str, Any], named: Mapping[str, Any], state: Mapping[str, Any], run: Path) -> None:
    """Refuse what a program has defined that is not this one, and say where it is."""
    program, path = sys.modules["__main__"], Path(printable(str(state.get("program") or "its program.py")))
    names = {name: str(stored.get(name)) for name in ("env_id", "model") if name not in named}
    names = {name: path[9:] for name, path in names.items() if path.startswith("__main__:") and "<" not in path}
    if all(hasattr(program, name.partition(".")[0]) for name in names.values()):
        return
    flags = " ".join(f"--{name.replace('_', '-')} {path.stem}:{value}" for name, value in names.items())
    raise ConfigError(
        f"{run}: {' and '.join(names.values())} was defined in {path}, which is another program. In the folder "
        f"{path.parent}: {command('eval', run)} {flags}. That imports the file, so it must train only below "
        f"`if __name__ == '__main__':`."
    )


def _wrappers_of(state: Mapping[str, Any], env: Any) -> dict[str, Any]:
    """Return the setting of a policy that names code, if its environment is to be made."""
    settings = {} if _is_made(env) else state.get("config")
    return {"wrappers": flattened(settings).get("wrappers", ()) if isinstance(settings, dict) else ()}


def _log_actions_at_bound(policy: Policy, played: list[Episode]) -> None:
    most = most_at_bound(policy.spaces.actions, played)
    if most is not None and most.share >= NAMED:
        logger.warning("%s", most)


def _episodes(playing: Playing, episodes: int, played: list[Episode]) -> Iterator[Episode]:
    """Play episodes: yield each after its reset and after each step, add it to `played`, report every few seconds."""
    reported = time.monotonic()
    for episode in range(episodes):
        for so_far in playing.play(episode):
            yield so_far
            if so_far.length and time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                current = f"{counted(so_far.length, 'step')}, return {so_far.episode_return:.1f} so far"
                logger.info("%s; the current one: %s", _summary(played, episodes), current)
        played.append(so_far)


def _summary(played: Sequence[Episode], episodes: int) -> str:
    """Return `5 of 100 episodes, mean return -1100.7`."""
    mean = f", mean return {fmean(episode.episode_return for episode in played):.1f}" if played else ""
    return f"{len(played)} of {episodes} episodes{mean}"
