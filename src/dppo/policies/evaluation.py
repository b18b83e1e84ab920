"""Play episodes with a trained policy; `dppo.evaluate` and the command `dppo eval` share this code."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dppo import streams
from dppo.config.trust import code_named_by, require_import_paths, require_trust
from dppo.envs.checks.faults import BadResult, constructor_fault, user_traceback
from dppo.envs.make import EnvId, check_display, check_env_id, close_all, make_env, make_in_window
from dppo.envs.masks import MaskReader, MaskSetting
from dppo.envs.spaces.observation_spaces import describe_spaces
from dppo.errors import CheckpointError, ConfigError, DppoError, EnvironmentFault, counted
from dppo.policies.policy import Policy, evaluation_generator, read, spaces_in_words
from dppo.ppo.networks.user.module_spec import ModelClass
from dppo.records.files.run_folder import config_of, settings_to_resume
from dppo.records.result import Evaluation, Result
from dppo.streams import Stream
from dppo.user_code import import_path, in_a_line

REPORT_EVERY_S = 5.0

logger = logging.getLogger("dppo")


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

    Raises:
        ConfigError: an invalid argument, or a run whose code is not trusted.
        CheckpointError: there is no checkpoint, or the environment's spaces are not those of the policy.
        EnvironmentFault: the environment raised; carries its traceback.
    """
    if episodes < 1:
        raise ConfigError(f"episodes={episodes}: must be at least 1.")
    if seed < 0:
        raise ConfigError(f"seed={seed}: must be at least 0.")
    if render:
        check_display()
    player = _find(policy, env, env_kwargs, model, trust=trust)
    made = player.make(render=render)
    try:
        _check_spaces(player.policy, made, player.env_name)
        return _Playing(player, made, seed, deterministic).play(episodes)
    finally:
        if not player.is_made:
            close_all([made])


@dataclass(frozen=True, slots=True)
class _Player:
    """A policy and the environment that it will play."""

    policy: Policy
    env: Any
    env_kwargs: dict[str, Any]

    @property
    def is_made(self) -> bool:
        """Return whether `env` is an environment, not the name of one or a way to make one."""
        return _is_made(self.env)

    @property
    def env_name(self) -> str:
        """Return the environment's id, or the import path of its callable or class."""
        if isinstance(self.env, str):
            return self.env
        spec = getattr(self.env, "spec", None)
        named = type(self.env) if self.is_made else self.env
        return str(getattr(spec, "id", None) or import_path(named))

    def make(self, *, render: bool) -> Any:
        """Return the environment; with `render`, one that shows itself in a window.

        Raises:
            ConfigError: it is not one environment, or cannot be shown in a window.
            EnvironmentFault: its constructor raised.
        """
        if self.is_made:
            if render:
                raise ConfigError(
                    "render=True has no effect on an environment that is already made. Make it with "
                    "render_mode='human'."
                )
            return self.env
        check_env_id(self.env)
        try:
            if render:
                return make_in_window(self.env, self.env_name, self.env_kwargs)
            return make_env(self.env, self.env_kwargs)
        except DppoError:
            raise
        except Exception as error:
            raise constructor_fault(self.env_name, error) from None


def _is_made(env: Any) -> bool:
    return not isinstance(env, str | type) and hasattr(env, "reset") and hasattr(env, "step")


def _find(
    policy: Policy | Result | str | Path,
    env: Any,
    env_kwargs: Mapping[str, Any] | None,
    model: ModelClass | None,
    *,
    trust: bool,
) -> _Player:
    """Return the policy and its environment; import nothing that only a run's folder names, unless it is trusted."""
    if env is not None and _is_made(env) and env_kwargs is not None:
        raise ConfigError("env_kwargs: have no effect on an environment that is already made. Leave them out.")
    if isinstance(policy, Policy):
        if env is None:
            raise ConfigError(
                "env: is missing, and a Policy cannot make one. Pass env, or the run in place of the policy."
            )
        if model is not None:
            raise ConfigError("model: has no effect on a policy that is already loaded. Leave it out.")
        return _Player(policy, env, dict(env_kwargs or {}))
    if isinstance(policy, Result):  # this process has just run its code
        policy, trust = policy.checkpoint, True
    run = Path(policy)
    found = read(run)
    if model is not None and found.model_name is None:
        raise ConfigError(f"model={model}: has no effect: {run} has the default network. Leave it out.")
    named = {"env_id": env, "model": model}
    named = {name: value for name, value in named.items() if value is not None}
    stored = _settings(run, env, env_kwargs) | {"model": found.model_name}
    require_import_paths(stored, named, run)
    if not trust:
        require_trust(stored, named, run)
    settings = stored | named
    for name, action in code_named_by(settings).items():
        logger.info("%s %s.", f"{name}={named[name]}" if name in named else run, action)
    return _Player(found.policy(model), env if env is not None else settings["env_id"], dict(settings["env_kwargs"]))


def _settings(run: Path, env: Any, env_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the run's settings; arguments of the environment that are given replace the run's."""
    if env_kwargs is None and not _is_made(env):
        settings = config_of(run)
    else:
        settings = settings_to_resume(run, {"env_kwargs": {} if env_kwargs is None else env_kwargs})
    return {"env_kwargs": {}} | settings


def _check_spaces(policy: Policy, env: Any, env_name: str) -> None:
    """Refuse an environment that the policy was not trained for.

    Raises:
        CheckpointError: its spaces are others than the policy's.
        ConfigError: no policy of dppo can have been trained on its spaces.
    """
    trained = policy.spaces
    setting: MaskSetting = "off" if trained.mask is None else "info" if trained.mask == "info" else "auto"
    obs_dtype = "float64" if trained.has_float64 else "float32"
    found = describe_spaces(env, drop_obs=trained.dropped, action_mask=setting, obs_dtype=obs_dtype)
    if not trained.same_observations(found) or str(found.actions) != str(trained.actions):
        raise CheckpointError(
            f"{env_name} has {spaces_in_words(found)}; the policy was trained with {spaces_in_words(trained)}. Use the "
            f"environment of the run."
        )


class _Playing:
    """Plays episodes one after the other, and reports progress every few seconds."""

    def __init__(self, player: _Player, env: Any, seed: int, deterministic: bool) -> None:
        self._policy = player.policy
        self._env_name = player.env_name
        self._env = env
        spaces = player.policy.spaces
        self._masks = MaskReader(env, spaces) if spaces.mask in ("method", "info") else None
        self._seed = seed
        self._deterministic = deterministic
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._reported = time.monotonic()

    def play(self, episodes: int) -> Evaluation:
        logger.info(
            "%s, policy after %s, %s, %s",
            self._env_name,
            counted(self._policy.state["global_step"], "step"),
            "taking the most likely action" if self._deterministic else "sampling actions",
            counted(episodes, "episode"),
        )
        for episode in range(episodes):
            self._play(episode, episodes)
        return Evaluation(self._env_name, tuple(self._returns), tuple(self._lengths))

    def _play(self, episode: int, episodes: int) -> None:
        generator = None if self._deterministic else evaluation_generator(self._seed, episode)
        seed = streams.integer(self._seed, Stream.EVALUATION, episode)
        episode_return, length, done, state = 0.0, 0, False, None
        where = f"{self._env_name}: reset of episode {episode} (seed {seed})"
        obs, info = self._call(where, self._env.reset, seed=seed)
        while not done:
            action, state = self._act(obs, state, self._mask(where, info), generator)
            where = f"{self._env_name}: step {length} of episode {episode} (seed {seed})"
            obs, reward, terminated, truncated, info = self._call(where, self._env.step, action)
            episode_return += float(reward)
            length += 1
            done = terminated or truncated
            self._report(episodes, length, episode_return)
        self._returns.append(episode_return)
        self._lengths.append(length)

    def _act(self, obs: Any, state: Any, mask: np.ndarray | None, generator: Any) -> tuple[Any, Any]:
        """Return the action, and the state of a policy with memory."""
        if self._policy.state_size:
            action, state = self._policy.act(obs, state, action_mask=mask, generator=generator)
            return action, state
        return self._policy.act(obs, action_mask=mask, generator=generator), None

    def _mask(self, where: str, info: Any) -> np.ndarray | None:
        try:
            return None if self._masks is None else self._masks.read(info)
        except BadResult as error:
            raise EnvironmentFault(f"{where} returned {error}.") from None

    @staticmethod
    def _call(where: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise EnvironmentFault(f"{where} raised {in_a_line(error)}", user_traceback(error)) from None

    def _report(self, episodes: int, length: int, episode_return: float) -> None:
        if time.monotonic() - self._reported < REPORT_EVERY_S:
            return
        self._reported = time.monotonic()
        mean = f", mean return {fmean(self._returns):.1f}" if self._returns else ""
        logger.info(
            "%d of %d episodes%s; the current one: %s, return %.1f so far",
            len(self._returns),
            episodes,
            mean,
            counted(length, "step"),
            episode_return,
        )
