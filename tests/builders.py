"""Real parts in small sizes, for tests: nothing here stands in for a class of ours."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import yaml

from dppo import streams
from dppo.config import PPO, Config, grouped, plain_settings
from dppo.config.parts import ResolvedPPO
from dppo.config.resolve import resolve
from dppo.envs.episode import GroupSettings
from dppo.envs.group import EnvGroup
from dppo.envs.repairs import FaultPolicy
from dppo.envs.spaces import describe_spaces
from dppo.envs.sub_envs.serial import SerialSubEnvs
from dppo.hosts.plans import TrainerPlan, sampler_plan, trainer_plan
from dppo.hosts.sampler_builder import BuiltSampler, build_sampler
from dppo.hosts.trainer_builder import build_trainer
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.noise import WhiteNoise
from dppo.ppo.acting.sampler import PPOSampler
from dppo.ppo.exchange.records import PolicySnapshot, Segment, SegmentReport, SegmentRequest
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.layers import Layers
from dppo.ppo.networks.network import NetworkSpec
from dppo.records.files.disk import Disk
from dppo.records.observer import Result
from dppo.spaces.actions import Actions, BoxActions, DiscreteActions, continuous_width
from dppo.spaces.spaces import Spaces
from dppo.streams import Stream

DISCRETE = DiscreteActions(3)
BOX = BoxActions(np.full(2, -1.0, np.float32), np.full(2, 1.0, np.float32))
PLAIN = ResolvedPPO(update_epochs=3, norm_adv=True, ent_coef=0.0, target_kl=0.0, desired_kl=0.0)
"""An update; tests change a setting or two."""


def make_config(settings: Mapping[str, Any]) -> Config:
    return Config(**settings)


def tiny_run(
    run_dir: Path | None, *, samplers: int = 1, steps: int = 16, iterations: int = 3, **changes: Any
) -> Config:
    """The settings of a run of CartPole that takes no time, with `changes`."""
    sizes: dict[str, Any] = {
        "num_samplers": samplers,
        "num_steps": steps,
        "total_timesteps": samplers * steps * iterations,
        "update_epochs": 1,
    }
    place = {"env_id": "CartPole-v1", "run_dir": run_dir, "progress": "off"}
    return make_config(place | sizes | changes)


def spec_of(
    actions: Actions = DISCRETE,
    *,
    obs_size: int = 4,
    hidden_sizes: tuple[int, ...] = (16, 8),
    activation: str = "tanh",
    dtype: str = "float64",
) -> BuiltInSpec:
    return mlp_of(
        Spaces(np.dtype((np.float32, (obs_size,))), actions), hidden_sizes, activation, dtype
    )


def mlp_of(
    spaces: Spaces, hidden_sizes: tuple[int, ...], activation: str, dtype: str
) -> BuiltInSpec:
    layers = Layers(
        image_encoder=None, hidden_sizes=hidden_sizes, activation=activation, shared=False
    )
    return BuiltInSpec(spaces, layers, dtype)


def random_weights(spec: NetworkSpec, seed: int = 0, scale: float = 0.4) -> np.ndarray:
    """Weights in which no part is zero, so that none can be left out unnoticed."""
    normal = np.random.default_rng(seed).normal(size=spec.num_parameters)
    return (normal * scale).astype(spec.dtype)


def agent_of(
    spec: NetworkSpec, obs_scale: ObsScale | None = None, *, spread: float = 0.4
) -> PPOAgent:
    """An agent with random weights."""
    agent = PPOAgent(spec)
    agent.load(PolicySnapshot(3, random_weights(spec, scale=spread), obs_scale))
    return agent


def at_rate(trainer: PPOTrainer, learning_rate: float) -> ResolvedPPO:
    """The settings for an update with this learning rate."""
    return dataclasses.replace(trainer.ppo, learning_rate=learning_rate)


def plan_of(config: Config, actions: Actions) -> TrainerPlan:
    """The settings of the trainer of a run."""
    resolved, _ = resolve(config, continuous_width(actions))
    return trainer_plan(resolved)


def parts_of(config: Config, num_samplers: int = 2) -> tuple[list[BuiltSampler], PPOTrainer]:
    """The samplers and the trainer of a run, in this process."""
    samplers = [
        build_sampler(sampler_plan(config), sampler_id) for sampler_id in range(num_samplers)
    ]
    spaces = samplers[0].spaces
    trainer = build_trainer(plan_of(config, spaces.actions), spaces)
    assert isinstance(trainer, PPOTrainer)  # of a run without reuse
    return samplers, trainer


def collect(
    samplers: Sequence[BuiltSampler], snapshot: PolicySnapshot
) -> tuple[list[SegmentReport], list[Segment]]:
    """A segment of each sampler, of the iteration that is the version of the policy, and its report."""
    requests = [SegmentRequest(sampler_id, snapshot.version) for sampler_id in range(len(samplers))]
    results = [
        built.sampler.collect(request, snapshot)
        for built, request in zip(samplers, requests, strict=True)
    ]
    return [report for report, _ in results], [segment for _, segment in results]


def group_of(
    envs: Sequence[gym.Env[Any, Any]],
    *,
    seed: int = 1,
    sampler_id: int = 0,
    rebuild: bool = False,
    drop_obs: Sequence[str] = (),
) -> EnvGroup:
    settings = GroupSettings(
        f"sampler {sampler_id} (Test-v0)",
        describe_spaces(envs[0], drop_obs=drop_obs),
        partial(streams.integer, seed, Stream.EPISODES, sampler_id),
        sampler_id,
        limits=rebuild,
    )
    sub_envs = SerialSubEnvs(envs, settings, make=envs.__getitem__)  # the same one again
    return EnvGroup(sub_envs, FaultPolicy(raise_before=0 if rebuild else math.inf))


def sampler_of(
    envs: Sequence[gym.Env[Any, Any]],
    *,
    num_steps: int,
    seed: int = 1,
    sampler_id: int = 0,
    gamma: float = 0.9,
    hidden_sizes: tuple[int, ...] = (),
    dtype: str = "float64",
    track: bool = True,
    rebuild: bool = False,
    agent: PPOAgent | None = None,
    **changes: Any,
) -> tuple[PPOSampler, NetworkSpec]:
    """A sampler of these environments, and what its model is made of."""
    agent = agent or PPOAgent(mlp_of(describe_spaces(envs[0]), hidden_sizes, "tanh", dtype))
    ppo = {
        field.name: changes.pop(field.name)
        for field in dataclasses.fields(PPO)
        if field.name in changes
    }
    generators = partial(streams.generator, seed, Stream.ACTIONS, sampler_id)
    spec = agent.spec
    white = WhiteNoise(generators, spec.distribution, len(envs), spec.dtype)
    sampler = PPOSampler(
        sampler_id,
        agent,
        group_of(envs, seed=seed, sampler_id=sampler_id, rebuild=rebuild),
        num_steps=num_steps,
        ppo=PPO(gamma=gamma, norm_reward=track, **ppo),
        noise=white.of_segment,
        **changes,
    )
    return sampler, spec


def linear_snapshot(spec: NetworkSpec, version: int = 0) -> PolicySnapshot:
    """A uniform policy, and the value 100 + 10 * obs of an observation [1]; for a model without hidden layers."""
    named = spec.unflatten(np.zeros(spec.num_parameters, spec.dtype))
    named["value.0.weight"][:] = 10
    named["value.0.bias"][:] = 100
    return PolicySnapshot(version, spec.flatten(named))


def bits_of(arrays: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in arrays.items()}


def assert_same_bytes(record: Any, other: Any, *, but: Sequence[str] = ()) -> None:
    """Records of arrays, however nested, are equal bit for bit, apart from the fields named in `but`."""
    assert type(record) is type(other)
    if isinstance(record, np.ndarray):
        assert (record.dtype, record.shape, record.tobytes()) == (
            other.dtype,
            other.shape,
            other.tobytes(),
        )
    elif isinstance(record, tuple):
        assert len(record) == len(other)
        for a, b in zip(record, other, strict=True):
            assert_same_bytes(a, b, but=but)
    elif dataclasses.is_dataclass(record):
        for field in dataclasses.fields(record):
            if field.name not in but:
                assert_same_bytes(getattr(record, field.name), getattr(other, field.name), but=but)
    else:
        assert record == other


def written_run(folder: Path, rows: Iterable[Mapping[str, Any]], **settings: Any) -> Path:
    """The folder of a run with these settings and rows of metrics."""
    folder.mkdir(parents=True)
    config = make_config({"env_id": "CartPole-v1"} | settings)
    versions = {"python": "3.11.7", "cpu": "<b>Z80</b>"}
    content = grouped(plain_settings(config)) | {"versions": versions}
    (folder / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    lines = [f"{json.dumps(row)}\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def finished(run_dir: Path = Path("run"), **changes: Any) -> Result:
    """The result of a finished run, with `changes`."""
    facts: dict[str, Any] = {
        "iterations": 2,
        "resumed_at": 0,
        "global_step": 512,
        "episodes": 321,
        "recent_episodes": 100,
        "episodic_return": 34.2,
        "wall_s": 1.5,
        "training_s": 1.0,
        "steps_per_s": 512.0,
        "weights_sha256": "ab" * 32,
        "incidents": {},
        "env_name": "E-v0",
        "stopped_by": None,
        "run_dir": run_dir,
        "checkpoint": run_dir / "c",
    }
    return Result(**facts | changes)


SLOW_STEPS: dict[str, Any] = {
    "step": {"mean": 0.02, "median": 0.02, "worst": 0.02},
    "reset": {"mean": 0.0},
    "lengths": [100],
    "busy": 0.05,
    "own_busy": 0.05,
    "cpus": 2,
    "collect_s": 0.02,
    "update_s": 0.06,
    "env_mb": 1,
    "available_mb": 8000,
    "continuous": True,
}
"""Facts of the doctor about an environment whose steps take 20 ms."""


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the files of a folder and below."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class FullDisk(Disk):
    """Has no room for the files that a test chooses by their names."""

    def __init__(self, is_refused: Callable[[str], bool]) -> None:
        self.is_refused = is_refused

    def write(self, path: Path, *parts: bytes | memoryview) -> None:
        if self.is_refused(path.name):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, *parts)
