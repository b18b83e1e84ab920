"""Remedies for settings that contradict each other, or have no effect: `dppo.Config` refuses, then accepts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

E = "CartPole-v1"
ACTORS = {"num_actors": 2}
KL = {"desired_kl": 0.01}
PRIOR = {"prior": "worlds.priors:balance"}
SAC = {"algo": "sac"}
CHECKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Raise `num_steps`; 64 is usual", {"num_samplers": 1, "num_steps": 1}),
    ("Raise it, or lower `num_steps`", {"total_timesteps": 1000, "num_steps": 128}),
    (
        "Use `reuse={}` or less, or lower `num_steps`",
        {"reuse": 4, "total_timesteps": 2048, "num_steps": 128},
    ),
    ("overlap=True sets a lag of 1. Leave one of them out", {"policy_lag": 2, "overlap": True}),
    (
        "Raise `total_timesteps` to more than {}, or lower `policy_lag`",
        {"policy_lag": 4, "total_timesteps": 2048},
    ),
    ("Use at most {}, or raise `num_steps`", {"minibatch_size": 4096, "num_steps": 128}),
    (
        "Use one such as `num_actors=4..64`; `num_actors=0` collects",
        {"num_actors": "8..4", "num_samplers": 64},
    ),
    ("Use `num_actors={}` or fewer, or `num_samplers={}`", {"num_actors": 16, "num_samplers": 8}),
    ("raise `licences`", {"licences": 4, "num_samplers": 8}),
    ("use `num_samplers={}`, for a smaller batch", {"licences": 4, "num_samplers": 8}),
    (
        "use `num_samplers={}` with `num_actors={}`, for a smaller batch",
        {"licences": 4, "num_samplers": 8, "num_actors": 8},
    ),
    (
        "lower `envs_per_sampler`, for a smaller batch",
        {"licences": 4, "num_samplers": 1, "envs_per_sampler": 8},
    ),
    ("lower `standby_envs`", {"licences": 4, "num_samplers": 2, "standby_envs": 3}),
    (
        "lower `eval_actors`",
        {"licences": 4, "num_samplers": 2, "eval_every": 1, "eval_actors": 3} | ACTORS,
    ),
    ("leave `eval_every` out", {"licences": 2, "num_samplers": 2, "eval_every": 1}),
    (
        "a second time, whatever `licences`, `start_rate` and `ranks_per_env` allow",
        {"backup_requests": True, "licences": 64} | ACTORS,
    ),
    (
        "num_actors=0 starts no actors. Use `num_actors=1` or more",
        {"nodes_per_env": 2, "ranks_per_env": 4},
    ),
    ("a single rank is on one node", {"nodes_per_env": "auto"} | ACTORS),
    (
        "cores_per_rank=0 lets ranks share the cores of one node",
        {"nodes_per_env": 2, "ranks_per_env": 4, "cores_per_rank": 0} | ACTORS,
    ),
    (
        "cannot be divided evenly among {} nodes. Use `nodes_per_env={}` or `ranks_per_env={}`",
        {"nodes_per_env": 3, "ranks_per_env": 4} | ACTORS,
    ),
    (
        "no limit of actors_per_node. Leave one of them out",
        {"nodes_per_env": 2, "ranks_per_env": 4, "actors_per_node": 1} | ACTORS,
    ),
    (
        "num_actors=0 hosts all {} samplers in this process",
        {"samplers_per_actor": 1, "num_samplers": 4},
    ),
    (
        "num_actors={} hosts {} of {} samplers at most",
        {"samplers_per_actor": 1, "num_samplers": 4, "num_actors": 2},
    ),
    (
        "Use `num_actors={}`, or `num_samplers={}` for a smaller batch",
        {"samplers_per_actor": 1, "num_samplers": 4, "num_actors": "1..2"},
    ),
    (
        "where evaluations have processes of their own, or leave `eval_every` out",
        {"samplers_per_actor": 1, "num_samplers": 1, "eval_every": 1000},
    ),
    (
        ": makes {} of each environment in the same process",
        {"samplers_per_actor": 4, "standby_envs": 1} | ACTORS,
    ),
    (
        ": runs several samplers side by side",
        {"samplers_per_actor": 4, "env_threads": True} | ACTORS,
    ),
    (
        "whatever samplers_per_actor={} allows",
        {"samplers_per_actor": 4, "backup_requests": True} | ACTORS,
    ),
    ("Use `learner_gpus=1`, or `device=cpu`", {"num_learners": 2, "device": "cuda"} | ACTORS),
    (
        "and learners cannot share one. Use `learner_gpus=1`",
        {"num_learners": 2, "learner_gpus": 0.5, "device": "cuda"} | ACTORS,
    ),
    ("Use `learner_cpus={}`", {"num_learners": 2, "learner_threads": 4} | ACTORS),
    (
        "Use `norm_obs=True`, which normalizes before rounding, or `dtype=float64`",
        {"obs_dtype": "float64", "norm_obs": False},
    ),
    ("Use `anneal_lr=False`, or leave it out", KL | {"anneal_lr": True}),
    (
        "adapts the learning rate to the total variation. Leave one",
        KL | {"reuse": 2, "anneal_lr": False},
    ),
    (
        "an update is a single SGD step here. Leave it out, or raise",
        KL | {"update_epochs": 1, "minibatch_size": 512, "anneal_lr": False},
    ),
    ("advantages of the only epoch are fresh", {"recompute_advantages": True, "update_epochs": 1}),
    ("Use `norm_adv=True` and `norm_reward=True`, or leave", {"adv_floor": 0.5, "norm_adv": False}),
    ("clips nothing. Leave one of them out", {"clip_vloss": True, "loss": "spo"}),
    ("is not defined for older policies. Leave one of them out", {"reuse": 2, "loss": "spo"}),
    ("vf_coef=0 disables the value loss", {"clip_vloss": True, "vf_coef": 0.0}),
    ("ent_coef=0 leaves the entropy out", {"anneal_ent": True, "ent_coef": 0.0}),
    ("norm_obs=False normalizes nothing", {"norm_obs_keys": ("a",), "norm_obs": False}),
    (
        "there are no statistics to freeze",
        {"freeze_norm_after": 10, "norm_obs": False, "norm_reward": False},
    ),
    ("sign_reward leaves -1, 0 and 1", {"clip_reward": 1.0, "sign_reward": True}),
    ("norm_reward divides by a deviation", {"scale_reward": 2.0}),
    ("Set `model`, or leave it out", {"model_kwargs": {"units": 8}}),
    (
        "it applies to the default network only",
        {"model": "worlds.models:Plain", "layer_norm": True},
    ),
    (
        "with state_dependent_std the network starts",
        {"log_std_init": -1.0, "state_dependent_std": True},
    ),
    ("there is no controller to start from. Set `prior`, or leave it out", {"prior_steps": 5000}),
    ("the clone of a prior starts with the deviation", {"log_std_init": -1.0} | PRIOR),
    (
        "soft actor-critic learns from the first env steps of a prior on",
        {"algo": "sac", "learning_starts": 500} | PRIOR,
    ),
    ("the clone of a prior replaces the weights", {"init_from": "runs/other"} | PRIOR),
    ("stacks of frames in parts, which are not kept for cloning", {"frame_stack": 2} | PRIOR),
    ("sets states without a replay, by which the controller", {"env_state": "own"} | PRIOR),
    (
        "so that none is left to train. Raise `total_timesteps` to more than {}",
        {"prior_steps": 4096, "total_timesteps": 4096} | PRIOR,
    ),
    (", or lower {}", {"total_timesteps": 512} | PRIOR),
    ("with trunk=shared the policy reads", {"critic_obs": ("a",), "trunk": "shared"}),
    ("hidden_sizes is empty", {"hidden_sizes": (), "activation": "relu"}),
    ("env_state=off asks for no states", {"state_folder": "/tmp", "env_state": "off"}),
    ("memory=none has no state", {"memory_size": 8}),
    ("only a network with memory learns from sequences", {"sequence_length": 8}),
    ("num_actors=0 starts no actors", {"num_actors": 0, "cpus_per_actor": 2.0}),
    ("there are never more than {} actors", {"actors_per_node": 8} | ACTORS),
    ("leaves no other actor to ask", {"backup_requests": True, "num_actors": 1}),
    (
        "replay=False abandons the open episodes",
        {"backup_requests": True, "replay": False} | ACTORS,
    ),
    ("replay=False replays nothing", {"replay_limit": 100, "replay": False}),
    (
        "Use fewer actors than samplers, or leave it out",
        {"env_threads": True, "num_actors": 8, "num_samplers": 8},
    ),
    ("num_actors=0 runs everything in this process", {"num_learners": 2, "num_actors": 0}),
    ("num_learners=0 trains in this process", {"learner_cpus": 2.0} | ACTORS),
    ("on_env_fault=raise survives no fault", {"env_faults": "3/min", "on_env_fault": "raise"}),
    ("eval_every=None evaluates nothing", {"eval_episodes": 7}),
    (
        "the policy is compared with it in evaluations, and eval_every=None makes none",
        {"baseline": "worlds.plants:proportional"},
    ),
    ("there is no baseline to fall back to, and no evaluation", {"never_worse": True}),
    (
        "there is no baseline to fall back to. Set `baseline`",
        {"never_worse": True, "eval_every": 512},
    ),
    (
        "is too few to compare the policy with the baseline",
        {"baseline": "worlds.plants:proportional", "eval_every": 1000, "eval_episodes": 1},
    ),
    (
        "num_actors=0 evaluates in this process",
        {"eval_actors": 2, "eval_every": 1, "num_actors": 0},
    ),
    ("a running cluster has its own dashboard", {"dashboard": True, "address": "auto"} | ACTORS),
    ("numerics=strict forbids the instructions", {"precision": "bfloat16", "numerics": "strict"}),
    ("asks for more precision than float32", {"precision": "bfloat16", "dtype": "float64"}),
    ("Use a smaller one, or leave it out", {"micro_batch_size": 512, "minibatch_size": 256}),
    ("stores stacks of frames in parts", {"reuse": 2, "frame_stack": 2}),
    (
        "device=cpu trains on the CPU",
        {"num_learners": 1, "learner_gpus": 1, "device": "cpu"} | ACTORS,
    ),
    (
        "Raise it, or lower `sequence_length`",
        {"memory": "gru", "sequence_length": 16, "minibatch_size": 8},
    ),
    (
        "Use a `minibatch_size` of at least {} (64 is usual), or `norm_adv=False`",
        {"minibatch_size": 1},
    ),
    ("Use `{}={}`", {"memory": "gru", "sequence_length": 24, "num_steps": 128}),
    ("Ray counts in units of {}. Use `{}={}` or more", {"cpus_per_actor": 1e-6} | ACTORS),
    ("On a node of the cluster use `address=auto`", {"address": "ray://head:10001"} | ACTORS),
    ("without the memory of those before. Leave it out", SAC | {"memory": "gru"}),
    ("which only squash keeps. Leave it out", SAC | {"action_bounds": "clip"}),
    ("learns a deviation for each observation", SAC | {"state_dependent_std": False}),
    ("have discrete actions and images. Use `algo=ppo`", SAC | {"atari": "game"}),
    ("or more; the default keeps all", SAC | {"replay_rows": 100}),
    (
        "cannot be shared evenly by {} learners. Use `minibatch_size={}`",
        SAC | ACTORS | {"num_learners": 2, "minibatch_size": 129},
    ),
    ("has no critics that learn from earlier env steps", {"gradient_steps": 0.25}),
    ("algo=ppo learns only from actions of its policy", {"noise": "wide"}),
    ("algo=sac estimates no advantages", SAC | {"gae_lambda": 0.5}),
    ("critics with a loss of their own", SAC | {"vf_coef": 1.0}),
    ("has no ratio of probabilities to limit", SAC | {"clip_coef": 0.1}),
    ("learns from earlier env steps by itself", SAC | {"reuse": 2}),
    ("draws rows at random", SAC | {"update_epochs": 3}),
    ("adapts the weight of the entropy", SAC | {"ent_coef": 0.1}),
    ("algo=sac has none. Leave it out", SAC | {"anneal_lr": True}),
    ("shares no layers with its critics", SAC | {"trunk": "shared"}),
    ("learns in small minibatches on the CPU", SAC | {"precision": "bfloat16"}),
)
"""Words of src/dppo/config/checks.py or effects.py, and settings that it refuses with them."""

VALUES: dict[str, Any] = {
    "model": "worlds.models:Plain",
    "learner_gpus": 1,
    "baseline": "worlds.plants:proportional",
    "prior": "worlds.priors:balance",
}
"""Of settings that a remedy names without a value."""

BY_HAND: tuple[tuple[str, str, dict[str, Any], tuple[dict[str, Any], ...]], ...] = (
    (
        "config/checks.py",
        "are more than {} layers. Use fewer",
        {"hidden_sizes": (1,) * 1001},
        ({"hidden_sizes": (1,) * 1000},),
    ),
    (
        "config/checks.py",
        "Use a fraction below 1, or a whole number",
        {"actor_gpus": 1.5} | ACTORS,
        ({"actor_gpus": 0.5} | ACTORS, {"actor_gpus": 2} | ACTORS),
    ),
    (
        "config/checks.py",
        "Use numbers, text, lists, dicts",
        {"model": "worlds.models:Plain", "model_kwargs": {"a": {1}}},
        ({"model": "worlds.models:Plain", "model_kwargs": {"a": [1, "b", {}]}},),
    ),
    (
        "config/checks.py",
        "Use `cpus_per_actor` for CPUs and `actor_gpus` for GPUs",
        {"actor_resources": {"CPU": 2}} | ACTORS,
        (
            {"cpus_per_actor": 2} | ACTORS,
            {"actor_gpus": 1} | ACTORS,
            {"actor_resources": {"licence": 1}} | ACTORS,
        ),
    ),
    (
        "config/effects.py",
        "Use as many or fewer",
        {"eval_actors": 9, "eval_every": 1, "eval_episodes": 4} | ACTORS,
        ({"eval_actors": 4, "eval_every": 1, "eval_episodes": 4} | ACTORS,),
    ),
    (
        "config/refusals.py",
        "Use a number such as 0.001 or 1e-3",
        {"learning_rate": np.inf},
        ({"learning_rate": 0.001}, {"learning_rate": "1e-3"}),
    ),
    (
        "config/refusals.py",
        "Use one such as 1000 or 1e3",
        {"num_steps": "many"},
        ({"num_steps": 1000}, {"num_steps": "1e3"}),
    ),
    (
        "config/refusals.py",
        "Use one such as 0.001 or 1e-3",
        {"learning_rate": "fast"},
        ({"learning_rate": 0.001}, {"learning_rate": "1e-3"}),
    ),
    (
        "config/refusals.py",
        "Use true or false",
        {"anneal_lr": "perhaps"},
        ({"anneal_lr": "true"}, {"anneal_lr": "false"}),
    ),
    (
        "config/refusals.py",
        "with the range of `clip_coef`. Use `clip_vloss=True`",
        {"clip_vloss": 0.2},
        ({"clip_vloss": True},),
    ),
    (
        "config/refusals.py",
        "Use `gradient_steps=1` for as many as env steps",
        {"gradient_steps": -1, "algo": "sac"},
        ({"gradient_steps": 1, "algo": "sac"},),
    ),
    ("config/refusals.py", "Use one such as `seed=2`", {"seed": None}, ({"seed": 2},)),
    (
        "config/refusals.py",
        "Use `name: value` pairs",
        {"env_kwargs": 3},
        ({"env_kwargs": {"g": 1}},),
    ),
    ("config/refusals.py", "Use a list", {"hidden_sizes": 64}, ({"hidden_sizes": [64]},)),
    ("config/refusals.py", "Use at least one character", {"name": ""}, ({"name": "a"},)),
    (
        "config/refusals.py",
        "Use text or a pathlib.Path",
        {"run_dir": 3},
        ({"run_dir": "runs/a"}, {"run_dir": Path("runs/a")}),
    ),
    ("config/refusals.py", "Use text.", {"start_rate": 3}, ({"start_rate": "3/s"},)),
    ("config/refusals.py", "Use one such as CartPole-v1", {"env_id": 3}, ({"env_id": E},)),
    (
        "config/refusals.py",
        "Use one such as module:Wrapper",
        {"wrappers": [3]},
        ({"wrappers": ["module:Wrapper"]},),
    ),
    (
        "config/refusals.py",
        "Use one such as module:controller",
        {"prior": 3},
        ({"prior": "module:controller"},),
    ),
    (
        "config/refusals.py",
        "Use one such as module:Class",
        {"model": 3},
        ({"model": "module:Class"},),
    ),
    (
        "config/refusals.py",
        "Use one such as 8, auto or 4..64",
        {"num_actors": [8]},
        tuple({"num_actors": count, "num_samplers": 64} for count in (8, "auto", "4..64")),
    ),
    (
        "config/refusals.py",
        "Use one such as 2",
        {"nodes_per_env": [2], "ranks_per_env": 4} | ACTORS,
        ({"nodes_per_env": 2, "ranks_per_env": 4} | ACTORS,),
    ),
    (
        "config/refusals.py",
        "Use one such as 3",
        {"keep_checkpoints": [3]},
        ({"keep_checkpoints": 3}, {"keep_checkpoints": "every=100"}),
    ),
    (
        "config/refusals.py",
        "Use one such as {'licence': 1}",
        {"actor_resources": 3} | ACTORS,
        ({"actor_resources": {"licence": 1}} | ACTORS,),
    ),
    (
        "config/refusals.py",
        "Use a list: {}=[{}]",
        {"norm_obs_keys": "speed"},
        ({"norm_obs_keys": ["speed"]},),
    ),
    (
        "config/refusals.py",
        "is a list. Pass one id, or one function",
        {"env_id": [dict]},
        ({"env_id": E}, {"env_id": dict}),
    ),
    (
        "config/refusals.py",
        "the temperature adapts by itself to `target_entropy`: leave `ent_coef` out",
        {"ent_coef": "auto_0.1"},
        (SAC, SAC | {"target_entropy": -2}, {"ent_coef": 0.01}),
    ),
    (
        "config/refusals.py",
        "is the default, as there: leave `target_entropy` out",
        {"target_entropy": "auto"} | SAC,
        (SAC,),
    ),
    (
        "config/refusals.py",
        "Use `memory=lstm`, or `memory=gru`",
        {"memory": True},
        ({"memory": "lstm"}, {"memory": "gru"}),
    ),
    (
        "config/refusals.py",
        "Use a list such as [64, 64]; with `algo=sac`, critics have `critic_sizes`",
        {"hidden_sizes": [{"pi": [64], "vf": [64]}]},
        ({"hidden_sizes": [64, 64]}, {"hidden_sizes": [64, 64], "critic_sizes": [32]} | SAC),
    ),
    (
        "config/refusals.py",
        "Use `device=cuda`; CUDA_VISIBLE_DEVICES=1",
        {"device": "cuda:1"},
        ({"device": "cuda"},),
    ),
    (
        "config/refusals.py",
        "Use `precision=bfloat16`",
        {"precision": "bf16"},
        ({"precision": "bfloat16"},),
    ),
    (
        "config/refusals.py",
        "the name {} is not text. Use `name: value` pairs",
        {"env_kwargs": {1: 2}},
        ({"env_kwargs": {"g": 2}},),
    ),
    (
        "config/refusals.py",
        "Use {}, with `{}=True` for a linear decay to 0",
        {"clip_coef": "lin_0.2"},
        ({"clip_coef": "0.2", "anneal_clip": True}, {"learning_rate": 1e-3, "anneal_lr": True}),
    ),
    (
        "config/parts/env.py",
        "Use one such as {}",
        {"env_faults": "many"},
        ({"env_faults": "10/h"}, {"on_env_fault": "raise"}),
    ),
    (
        "config/parts/processes.py",
        "Use one such as 8, auto, 4.. or 4..64",
        {"num_actors": "some"},
        tuple({"num_actors": count, "num_samplers": 64} for count in (8, "auto", "4..", "4..64")),
    ),
)
"""File, words, settings that are refused with them, and what the text names instead of them."""
