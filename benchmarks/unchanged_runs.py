"""The table of `unchanged.py`: short runs over everything there is, by the public settings of dppo alone."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym

Settings = dict[str, Any]

WORLDS = {  # the modules of environments and networks in tests/, which a later change may move
    "acting": "worlds.acting",
    "faulty": "worlds.faulty",
    "memory": "worlds.memory",
    "observed": "worlds.observed",
    "priors": "worlds.priors",
    "models": "worlds.models",
    "memory_models": "worlds.memory_models",
    "here": "unchanged_runs",
}
MARKER = "MARKER"  # stands for the path of a file of the run that the environment may create


@dataclass(frozen=True)
class Run:
    """One run, or two where the second continues or branches from the first."""

    settings: Settings
    then: Literal["resume", "auto", "older", "branch"] | None = None
    """Resume the first call's folder, the same by "auto", resume its first checkpoint, or branch from it."""
    changes: Settings = field(default_factory=dict)
    """Settings that the second call changes."""
    stop_after: int = 2
    """Iterations after which the first call is stopped, if there is a second."""
    preset: bool = False

    @property
    def on_ray(self) -> bool:
        return bool(self.settings.get("num_actors"))


def world(name: str, **kwargs: Any) -> Settings:
    """Return the settings of an environment in tests/, as `acting:Masked`."""
    return {"env_id": path_of(name), "env_kwargs": kwargs}


def path_of(name: str) -> str:
    module, _, attribute = name.partition(":")
    return f"{WORLDS[module]}:{attribute}"


class Succeeding(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole in which an episode of 20 steps is a success."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._steps = 0

    def reset(self, **keywords: Any) -> Any:
        self._steps = 0
        return self.env.reset(**keywords)

    def step(self, action: Any) -> Any:
        self._steps += 1
        *rest, info = self.env.step(action)
        return *rest, info | {"is_success": self._steps >= 20}


class Deadly(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that kills its process in its 25th step, unless the file `marker` shows that this has happened."""

    def __init__(self, marker: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._marker, self._steps = Path(marker), 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 25 and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.env.step(action)


def cartpole() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


# ------------------------------------------------------------------ settings that several runs share

SMALL: Settings = {
    "num_samplers": 4,
    "envs_per_sampler": 2,
    "num_steps": 20,
    "update_epochs": 2,
    "total_timesteps": 4 * 2 * 20 * 3,
    # Not the defaults, so that each option below changes something.
    "learning_rate": 2.5e-4,
    "anneal_lr": True,
    "ent_coef": 0.01,
    "norm_obs": False,
    "norm_reward": False,
    "progress": "off",
}
TEXTS = ("mission", "robot.note")
EVERYTHING = world("observed:Everything") | {"drop_obs": TEXTS, "image_features": 32}
MASKED = world("acting:Masked", source="method", several=True)
DISCRETE = world("acting:Combined", obs="numbers", act="discrete", masked=False)
BOX = world("acting:Combined", obs="numbers", act="box", masked=False) | {"action_bounds": "clip"}
GUIDED: Settings = {"env_id": "Pendulum-v1", "env_kwargs": {}, "prior": path_of("priors:swing_up")}
LSTM = world("memory:Recalls") | {"memory": "lstm", "memory_size": 8}
OWN_MEMORY = world("memory:Recalls") | {
    "model": path_of("memory_models:Running"),
    "sequence_length": 10,
}
NORMED: Settings = {"norm_obs": True, "norm_reward": True, "norm_value": True}
EVERY_OPTION: Settings = DISCRETE | {
    "anneal_lr": False,
    "desired_kl": 0.001,
    "anneal_clip": True,
    "anneal_ent": True,
    "recompute_advantages": True,
    "freeze_norm_after": 320,
    "clip_reward": 0.7,
    **NORMED,
}
SAC = BOX | {
    "algo": "sac",
    "action_bounds": "squash",
    "norm_obs": True,
    "norm_reward": True,
    "learning_starts": 80,
    "replay_rows": 320,
    "gradient_steps": 0.1,
    "minibatch_size": 32,
    "critic_sizes": (8, 8),
    # settings of PPO, which it refuses
    "update_epochs": None,
    "ent_coef": None,
    "anneal_lr": False,
}
BAD = world("faulty:Faulty", reward=None, episodes=[1, 2, 5], length=10, at_step=4) | {
    "on_bad_step": "drop"
}
CARTPOLE: Settings = {"env_id": "CartPole-v1"}

KINDS: dict[str, Settings] = {  # of tests/kinds.py
    "image": world("observed:Picture") | {"image_encoder": "impala", "image_features": 32},
    "dict observation": EVERYTHING | {"norm_obs": True, "norm_obs_keys": ("robot.arm.0",)},
    "dict action": world("acting:Actuated", kind="dict"),
    "mask": MASKED,
    "mask and lstm": MASKED | {"memory": "lstm", "memory_size": 8, "recompute_advantages": True},
    "reuse": MASKED | {"memory": "gru", "memory_size": 8, "reuse": 2, "norm_obs": True},
    "lstm": LSTM | {"overlap": True},
    "gru": world("memory:Named") | {"memory": "gru", "memory_size": 8, "norm_value": True},
    "own memory": OWN_MEMORY | {"norm_obs": True},
}

# Each changes one setting, or one and those that it needs.
OF_SAMPLING: dict[str, Settings] = {
    "num_samplers": {"num_samplers": 3},
    "envs_per_sampler": {"envs_per_sampler": 1},
    "num_steps": {"num_steps": 30},
    "overlap": {"overlap": True},
    "seed": {"seed": 7},
    "steps that fill no batch": {"total_timesteps": 401},
}
OF_PPO: dict[str, Settings] = {
    "learning_rate": {"learning_rate": 1e-2},
    "anneal_lr": {"anneal_lr": False},
    "desired_kl": {"anneal_lr": False, "desired_kl": 1e-5},
    "gamma": {"gamma": 0.9},
    "gae_lambda": {"gae_lambda": 0.5},
    "update_epochs": {"update_epochs": 1},
    "minibatch_size": {"minibatch_size": 64},
    "norm_adv": {"norm_adv": False},
    "recompute_advantages": {"recompute_advantages": True},
    "reuse": {"reuse": 2},
    "clip_coef": {"clip_coef": 0.01, "learning_rate": 1e-2},
    "anneal_clip": {"anneal_clip": True, "clip_coef": 0.01, "learning_rate": 1e-2},
    "clip_vloss": {"clip_vloss": True, "clip_coef": 0.01},
    "ent_coef": {"ent_coef": 0.0},
    "anneal_ent": {"anneal_ent": True},
    "vf_coef": {"vf_coef": 0.1},
    "no value loss": {"vf_coef": 0.0},
    "max_grad_norm": {"max_grad_norm": 0.1},
    "target_kl": {"target_kl": 1e-4, "learning_rate": 1e-2},
    "norm_obs": {"norm_obs": True},
    "norm_reward": {"norm_reward": True},
    "norm_value": {"norm_value": True},
    "freeze_norm_after": {"norm_obs": True, "norm_reward": True, "freeze_norm_after": 160},
    "sign_reward": {"sign_reward": True},
    "clip_reward": {"clip_reward": 0.3},
    "scale_reward": {"scale_reward": 0.1},
}
OF_NETWORK: dict[str, Settings] = {
    "hidden_sizes": {"hidden_sizes": (16, 8, 4)},
    "no hidden layers": {"hidden_sizes": ()},
    "activation": {"activation": "relu"},
    "trunk": {"trunk": "shared"},
    "layer_norm": {"layer_norm": True},
    "float64": {"dtype": "float64"},
    "gru": {"memory": "gru"},
    "memory_size": {"memory": "lstm", "memory_size": 5},
    "sequence_length": {"memory": "lstm", "sequence_length": 4, "minibatch_size": 24},
    "own network": {"model": path_of("models:Plain"), "model_kwargs": {"units": 5}},
    "own network with buffers": {"model": path_of("models:Residual")},
}
OF_LEARNING: dict[str, Settings] = {
    "learner_threads": {"learner_threads": 2},
    "bfloat16, own network": {"precision": "bfloat16", "model": path_of("models:Plain")},
    "micro_batch_size": {"micro_batch_size": 16},
    "micro batches of sequences": {"micro_batch_size": 25, "memory": "gru"},
}
OF_ACTIONS: dict[str, Settings] = {
    **{
        f"space {kind}": world("acting:Actuated", kind=kind)
        for kind in (
            "dials",
            "table",
            "switches",
            "integers",
            "number",
            "integer",
            "wide",
            "free",
            "tuple",
            "choices",
        )
    },
    "clip": BOX,
    "squash": BOX | {"action_bounds": "squash"},
    "rescale": BOX | {"action_bounds": "rescale"},
    "state_dependent_std": BOX | {"state_dependent_std": True},
    "dict and lstm": world("acting:Combined", obs="named", act="dict", masked=False)
    | {"memory": "lstm"},
    "own network": BOX | {"model": path_of("models:Plain")},
    "prior": GUIDED,
    "prior and pink noise": GUIDED | {"noise": "pink", "overlap": True},
}
OF_OBSERVATIONS: dict[str, Settings] = {
    **{
        f"space {kind}": world("observed:Plain", kind=kind)
        for kind in (
            "discrete",
            "many",
            "multidiscrete",
            "multibinary",
            "number",
            "grid",
            "one of",
            "tuple",
        )
    },
    "codes": world("observed:Codes") | {"hidden_sizes": ()},
    "film": world("observed:Film") | {"image_features": 16},
    "nature": world("observed:Picture", size=36)
    | {"image_encoder": "nature", "image_features": 16},
    "grid": world("observed:Picture") | {"image_features": 16, "trunk": "separate"},
    "flatten": world("observed:Picture") | {"image_encoder": "flatten"},
    "bfloat16": world("observed:Picture") | {"precision": "bfloat16", "micro_batch_size": 16},
    "images and lstm": world("memory:Pictured") | {"memory": "lstm", "image_features": 16},
    "everything, normalized": EVERYTHING | NORMED,
    "float64": world("observed:Numbers") | {"obs_dtype": "float64", "norm_obs": True},
    "float64 network": world("observed:Numbers") | {"obs_dtype": "float64", "dtype": "float64"},
    "own memory": world("memory:Named")
    | {"model": path_of("memory_models:Running"), "sequence_length": 5},
}
OF_SAC: dict[str, Settings] = {
    "defaults": {},
    "tau": {"tau": 0.2},
    "target_entropy": {"target_entropy": -3.0},
    "white noise": {"noise": "white"},
    "pink noise": {"noise": "pink"},
    "prior and wide noise": GUIDED | {"noise": "wide", "overlap": True, "learning_starts": 1000},
}
OF_ENVIRONMENTS: dict[str, Settings] = {
    "callable": {"env_id": cartpole},
    "Gymnasium": {"env_id": "Acrobot-v1"},
    "success": world("here:Succeeding"),
    "bad steps dropped": BAD,
    "bad steps dropped, recomputed": BAD
    | {"recompute_advantages": True, "overlap": True, **NORMED},
    "mask of the observation": world("acting:Masked", source="leaf"),
    "mask of the info": world("acting:Masked", source="info", several=True)
    | {"action_mask": "info"},
    "mask not used": world("acting:Combined", obs="numbers", act="discrete", masked=True)
    | {"action_mask": "off"},
    "mask and image": world("acting:Combined", obs="picture", act="multidiscrete", masked=True)
    | {"image_features": 16},
}
PRESETS: dict[str, Settings] = {
    "CartPole-v1": {"total_timesteps": 512},
    "dppo/SlowCartPole-v0": {"total_timesteps": 256, "env_kwargs": {"step_s": 1e-6}},
    "Pendulum-v1": {"total_timesteps": 2048, "update_epochs": 2},
}

# ------------------------------------------------------------------ the table

CONTINUED: dict[str, Run] = {
    "resume": Run(DISCRETE, then="resume"),
    "resume auto": Run(DISCRETE, then="auto", stop_after=1),
    "resume in flight": Run(DISCRETE | NORMED | {"overlap": True}, then="resume"),
    "resume with every option": Run(EVERY_OPTION, then="resume", stop_after=1),
    "resume with every option in flight": Run(EVERY_OPTION | {"overlap": True}, then="resume"),
    "resume an older checkpoint": Run(
        DISCRETE | {"checkpoint_interval_s": 0, "keep_checkpoints": 99, "norm_value": True},
        then="older",
    ),
    "resume longer": Run(
        DISCRETE | {"anneal_lr": False}, then="resume", changes={"total_timesteps": 800}
    ),
    "resume after dropped steps": Run(BAD, then="resume"),
    "resume lstm in flight": Run(KINDS["lstm"], then="resume"),
    "resume own memory": Run(KINDS["own memory"], then="resume"),
    "resume sac in flight": Run(SAC | {"overlap": True}, then="resume"),
    "branch": Run(DISCRETE, then="branch", changes={"seed": 3, "gamma": 0.9}),
    "branch normalized": Run(
        EVERY_OPTION, then="branch", changes={"freeze_norm_after": 0, "learning_rate": 2e-4}
    ),
    "branch with overlap": Run(DISCRETE | NORMED | {"overlap": True}, then="branch"),
    "branch gru": Run(KINDS["gru"], then="branch", changes={"num_samplers": 3}),
}
LEARNERS: Settings = {"num_learners": 2, "learner_cpus": 0.25}
# each takes seconds, since processes start: few, and each of several things
ON_RAY: dict[str, Run] = {
    **{f"kind {name}": Run(settings) for name, settings in KINDS.items()},
    "callable, overlap": Run({"env_id": cartpole, "overlap": True}),
    "bad steps dropped": Run(BAD),
    "resume in flight": Run(
        EVERY_OPTION | {"overlap": True}, then="resume", changes={"num_actors": 2}
    ),
    "resume here": Run(
        KINDS["own memory"], then="resume", changes={"num_actors": 0, "cpus_per_actor": 1.0}
    ),
    "actor killed": Run(world("here:Deadly", marker=MARKER) | {"num_samplers": 2, "num_actors": 2}),
    "two learners, every option": Run(EVERY_OPTION | LEARNERS),
    "two learners, overlap": Run(DISCRETE | NORMED | LEARNERS | {"overlap": True}),
    "two learners, own memory": Run(OWN_MEMORY | LEARNERS, then="resume"),
    "two learners, images": Run(
        KINDS["image"] | LEARNERS | {"precision": "bfloat16", "micro_batch_size": 10}
    ),
    "two learners, masks": Run(KINDS["mask and lstm"] | LEARNERS),
}


def _table() -> dict[str, Run]:
    groups: dict[str, dict[str, Run]] = {
        "kind": {name: Run(settings) for name, settings in KINDS.items()},
        "sampling": {name: Run(DISCRETE | settings) for name, settings in OF_SAMPLING.items()},
        "ppo": {name: Run(DISCRETE | settings) for name, settings in OF_PPO.items()},
        "sac": {name: Run(SAC | settings) for name, settings in OF_SAC.items()},
        "network": {name: Run(DISCRETE | settings) for name, settings in OF_NETWORK.items()},
        "learning": {name: Run(DISCRETE | settings) for name, settings in OF_LEARNING.items()},
        "action": {name: Run(settings) for name, settings in OF_ACTIONS.items()},
        "observation": {name: Run(settings) for name, settings in OF_OBSERVATIONS.items()},
        "environment": {name: Run(settings) for name, settings in OF_ENVIRONMENTS.items()},
        "options": {"none": Run(CARTPOLE), "every": Run(EVERY_OPTION)},
        "preset": {
            name: Run({"env_id": name, **settings}, preset=True)
            for name, settings in PRESETS.items()
        },
        "continued": CONTINUED,
        "ray": {
            name: replace(run, settings={"num_actors": 3, "cpus_per_actor": 0.25} | run.settings)
            for name, run in ON_RAY.items()
        },
    }
    return {f"{group}: {name}": run for group, runs in groups.items() for name, run in runs.items()}


TABLE: dict[str, Run] = _table()
