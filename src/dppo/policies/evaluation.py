"""Play episodes with a trained policy; `dppo.evaluate` and the command `dppo eval` share this code."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dppo import streams
from dppo.envs.checks.faults import BadResult, user_traceback
from dppo.envs.make import EnvId, check_display, close_all
from dppo.envs.masks import MaskReader, MaskSetting
from dppo.envs.spaces.observation_spaces import describe_spaces
from dppo.errors import CheckpointError, ConfigError, EnvironmentFault, counted
from dppo.policies.player import Player, find_player, is_made
from dppo.policies.policy import Policy, spaces_summary
from dppo.ppo.networks.user.module_spec import ModelClass
from dppo.records.result import Evaluation, Result
from dppo.spaces.spaces import holds_float64
from dppo.streams import Stream
from dppo.user_code import in_a_line

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
    player = find_player(policy, env, env_kwargs, model, trust=trust)
    made = player.make(render=render)
    try:
        _check_spaces(player.policy, made, player.env_name)
        logger.info(
            "%s, policy after %s, %s, %s",
            player.env_name,
            counted(player.policy.state["global_step"], "step"),
            "taking the most likely action" if deterministic else "sampling actions",
            counted(episodes, "episode"),
        )
        playing = _Playing(player, made, seed, deterministic, episodes)
        for episode in range(episodes):
            playing.play(episode)
        return Evaluation(player.env_name, tuple(playing.returns), tuple(playing.lengths))
    finally:
        if not is_made(player.env):
            close_all([made])


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

    player: Player
    env: Any
    seed: int
    deterministic: bool
    episodes: int
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
