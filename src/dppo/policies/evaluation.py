"""Play episodes with a trained policy; `dppo.evaluate` and the command `dppo eval` share this code."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dppo import streams
from dppo.config import flattened
from dppo.config.trust import code_named_by, require_trust
from dppo.envs.checks.faults import BadResult, constructor_fault, user_traceback
from dppo.envs.frames import make_prepared
from dppo.envs.make import EnvId, check_display, check_env_id, close_all, make_env, make_rendered
from dppo.envs.masks import MaskReader, MaskSetting
from dppo.envs.spaces.observation_spaces import describe_spaces
from dppo.errors import CheckpointError, ConfigError, DppoError, EnvironmentFault, counted
from dppo.log import logger
from dppo.policies.policy import Policy, model_name, policy_from, read, spaces_summary
from dppo.ppo.networks.user.model_class import ModelClass
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.result import Evaluation, Result
from dppo.records.video import Video, check_video
from dppo.spaces.spaces import holds_float64
from dppo.streams import Stream
from dppo.user_code import import_path, in_a_line

REPORT_EVERY_S = 5.0


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
    made = player.make("human" if render else "rgb_array" if video else None)
    try:
        _check_spaces(player.policy, made, player.env_name)
        logger.info(
            "%s, policy after %s, %s, %s",
            player.env_name,
            counted(player.policy.state["global_step"], "step"),
            "taking the most likely action" if deterministic else "sampling actions",
            counted(episodes, "episode"),
        )
        film = Video(None if video is None else Path(video), made, episodes, player.settings.get("action_repeat", 1))
        playing = _Playing(player, made, seed, deterministic, episodes, film)
        for episode in range(episodes):
            playing.play(episode)
        film.write()
        return Evaluation(player.env_name, tuple(playing.returns), tuple(playing.lengths))
    finally:
        if not _is_made(player.env):
            close_all([made])


@dataclass(frozen=True, slots=True)
class _Player:
    """A policy and the environment that it will play."""

    policy: Policy
    env: Any
    env_kwargs: dict[str, Any]

    @property
    def env_name(self) -> str:
        """Return the environment's id, or the import path of its callable or class."""
        if isinstance(self.env, str):
            return self.env
        spec = getattr(self.env, "spec", None)
        named = type(self.env) if _is_made(self.env) else self.env
        return str(getattr(spec, "id", None) or import_path(named))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, by which frames are prepared as in training."""
        return flattened(self.policy.state.get("config") or {})

    def make(self, mode: str | None) -> Any:
        """Return the environment, with a render_mode if it is to be shown; raise as `evaluate` does."""
        if _is_made(self.env):
            if mode == "human":
                raise ConfigError(
                    "render=True has no effect on an environment that is already made. Make it with "
                    "render_mode='human'."
                )
            return self.env
        check_env_id(self.env)
        make = partial(make_rendered, env_name=self.env_name, mode=mode) if mode else make_env
        try:
            return make_prepared(self.env, self.env_kwargs, self.settings, make)
        except DppoError:
            raise
        except Exception as error:
            raise constructor_fault(self.env_name, error) from None


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
        return _Player(policy, env, dict(env_kwargs or {}))
    if isinstance(policy, Result):
        run, trust = policy.checkpoint, True  # this process has just run its code
    else:
        run = Path(policy)
    found = read(run)
    own = model_name(found)
    if model is not None and own is None:
        raise ConfigError(f"model={model}: has no effect: {run} has the default network. Leave it out.")
    named = {name: value for name, value in (("env_id", env), ("model", model)) if value is not None}
    kept = env_kwargs is None and not _is_made(env)
    settings = settings_to_resume(run, None if kept else {"env_kwargs": env_kwargs or {}})
    stored = {"env_kwargs": {}} | settings | {"model": own} | _wrappers_of(found.checkpoint.state, env)
    require_trust(stored, named, run, trust=trust)
    settings = stored | named
    if "env_id" not in settings or not isinstance(settings["env_kwargs"], dict):
        raise CheckpointError(f"{run}: has settings that are not of dppo. Pass `env_id` and `env_kwargs`.")
    for name, action in code_named_by(settings).items():
        logger.info("%s %s.", f"{name}={named[name]}" if name in named else run, action)
    return _Player(policy_from(found, model), settings["env_id"], dict(settings["env_kwargs"]))


def _wrappers_of(state: Mapping[str, Any], env: Any) -> dict[str, Any]:
    """Return the setting of a policy that names code, if its environment is to be made."""
    settings = {} if _is_made(env) else state.get("config")
    return {"wrappers": flattened(settings).get("wrappers", ()) if isinstance(settings, dict) else ()}


def _check_spaces(policy: Policy, env: Any, env_name: str) -> None:
    """Refuse an environment that the policy was not trained for."""
    trained = policy.spaces
    setting: MaskSetting = "off" if trained.mask is None else "info" if trained.mask == "info" else "auto"
    obs_dtype = "float64" if holds_float64(trained.obs) else "float32"
    found = describe_spaces(env, drop_obs=trained.dropped, action_mask=setting, obs_dtype=obs_dtype)
    if not trained.same_observations(found) or str(found.actions) != str(trained.actions):
        raise CheckpointError(
            f"{env_name} has {spaces_summary(found)}; the policy was trained with {spaces_summary(trained)}. Use the "
            f"environment of the run."
        )


@dataclass(slots=True)
class _Playing:
    """Plays episodes one after the other, and reports progress every few seconds."""

    player: _Player
    env: Any
    seed: int
    deterministic: bool
    episodes: int
    film: Video
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    reported: float = field(default_factory=time.monotonic)

    def play(self, episode: int) -> None:
        policy, spaces = self.player.policy, self.player.policy.spaces
        masks = MaskReader(self.env, spaces) if spaces.mask in ("method", "info") else None
        generator = None if self.deterministic else streams.generator(self.seed, Stream.EVALUATION, episode)
        seed = streams.integer(self.seed, Stream.EVALUATION, episode)
        where = f"of episode {episode} (seed {seed})"
        episode_return, length, done, state = 0.0, 0, False, None
        obs, info = self._call(f"reset {where}", self.env.reset, seed=seed)
        mask = self._mask(masks, f"reset {where}", info)
        self.film.add(episode)
        while not done:
            action = policy.act(obs, state, action_mask=mask, generator=generator)
            if policy.state_size:
                action, state = action
            step = f"step {length} {where}"
            obs, reward, terminated, truncated, info = self._call(step, self.env.step, action)
            episode_return += float(reward)
            length += 1
            done = terminated or truncated
            mask = None if done else self._mask(masks, step, info)
            self.film.add(episode)
            self._report(length, episode_return)
        self.returns.append(episode_return)
        self.lengths.append(length)

    def _mask(self, masks: MaskReader | None, where: str, info: Any) -> np.ndarray | None:
        try:
            return None if masks is None else masks.read(info)
        except BadResult as error:
            raise EnvironmentFault(f"{self.player.env_name}: {where} returned {error}.") from None

    def _call(self, where: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            fault = f"{self.player.env_name}: {where} raised {in_a_line(error)}"
            raise EnvironmentFault(fault, user_traceback(error)) from None

    def _report(self, length: int, episode_return: float) -> None:
        if time.monotonic() - self.reported < REPORT_EVERY_S:
            return
        self.reported = time.monotonic()
        mean = f", mean return {fmean(self.returns):.1f}" if self.returns else ""
        played = f"{len(self.returns)} of {self.episodes} episodes{mean}"
        logger.info("%s; the current one: %s, return %.1f so far", played, counted(length, "step"), episode_return)
