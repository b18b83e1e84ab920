"""The promise as a table: kinds of runs, and what disturbs them at which moment. test_promise.py runs each cell."""

from __future__ import annotations

from dataclasses import dataclass

from kinds import ITERATIONS, KINDS, SAC, SMALL, Settings


def sized(settings: Settings, iterations: int = ITERATIONS) -> Settings:
    """Return the settings of a small run of so many iterations."""
    merged = SMALL | settings
    rows = merged["num_samplers"] * merged["envs_per_sampler"] * merged["num_steps"]
    return merged | {"total_timesteps": iterations * rows}


def single(num_samplers: int, num_steps: int) -> Settings:
    return {"num_samplers": num_samplers, "envs_per_sampler": 1, "num_steps": num_steps}


CARTPOLE = {"env_id": "CartPole-v1"}
OVERLAP = {"overlap": True}
DISCRETE = CARTPOLE | single(8, 64)
CONTINUOUS = {
    "env_id": "Pendulum-v1",
    "env_kwargs": {"max_episode_steps": 30},
    "gamma": 0.9,
    "norm_obs": True,
    "norm_reward": True,
} | single(8, 40)
LAG = CARTPOLE | single(6, 32) | {"policy_lag": 3, "norm_obs": True, "norm_value": True}

EVERY_OPTION: Settings = (
    CARTPOLE
    | single(4, 40)
    | {
        "update_epochs": 3,
        "learning_rate": 1e-3,
        "anneal_lr": False,
        "desired_kl": 0.001,
        "anneal_clip": True,
        "anneal_ent": True,
        "ent_coef": 0.01,
        "recompute_advantages": True,
        "norm_obs": True,
        "norm_reward": True,
        "norm_value": True,
        "freeze_norm_after": 2 * 4 * 40,
        "clip_reward": 0.7,
    }
)
# With overlap, the policy in flight has the unit of an earlier update.
UNIT_OF_VALUES = EVERY_OPTION | {
    "overlap": True,
    "norm_reward": False,
    "freeze_norm_after": None,
    "scale_reward": 100.0,
    "clip_reward": None,
}

REUSE: Settings = (
    CARTPOLE
    | single(2, 40)
    | {
        "reuse": 3,
        "minibatch_size": 40,
        "learning_rate": 1e-3,
        "norm_obs": True,
        "norm_reward": True,
        "norm_value": True,
        "recompute_advantages": True,
    }
)

# Half of the runs of three iterations and more is collected by a controller: one with a state, or of choices.
PRIOR: Settings = CONTINUOUS | {
    "prior": "worlds.priors:Integrator",
    "num_samplers": 2,
    "prior_steps": 2 * 2 * 40,
}
SAC_AFTER_PRIOR: Settings = {
    name: value for name, value in (SAC | PRIOR).items() if name != "learning_starts"
}
PRIOR_OF_CHOICES: Settings = (
    CARTPOLE
    | single(2, 40)
    | {
        "prior": "worlds.priors:balance",
        "prior_steps": 2 * 2 * 40,
        "policy_lag": 2,
        "norm_value": True,
    }
)

REBUILD: Settings = {"on_env_fault": "rebuild", "env_faults": "unlimited"}
UNRELIABLE = REBUILD | {"env_id": "worlds.faulty:Unreliable", "num_samplers": 4, "num_steps": 32}
INVALID = REBUILD | {
    **{"env_id": "worlds.faulty:Faulty", "recompute_advantages": True},
    "env_kwargs": {"reward": None, "episodes": [1, 2, 5], "length": 30, "at_step": 17},
}
DRAWN = {"env_id": "worlds.drawn:Drawn"} | single(4, 16)
THREE_SUB_ENVS = {"envs_per_sampler": 3}
VECTOR = THREE_SUB_ENVS | {"env_id": "worlds.joint:vector"}
MASKED_VECTOR = VECTOR | {"env_kwargs": {"of": "masked"}, "action_mask": "info"}
AGENTS = THREE_SUB_ENVS | {"env_id": "worlds.joint:agents", "memory": "gru", "memory_size": 4}
INFORMED = {
    "env_id": "worlds.informed:Informed",
    "num_samplers": 3,
    "info_keys": ("energy", "flow", "total", "absent"),
}
GRADED = {"env_id": "worlds.graded:Graded", "num_samplers": 3}
EVALUATED_KINDS = ("mask and lstm", "own memory", "dict observation")
EVALUATED = {"eval_every": 80, "eval_episodes": 3, "eval_stochastic": True}
SHARES = {
    "some": {"steps": 0.03, "resets": 0.1},
    "few": {"steps": 1e-3},
    "many": {"steps": 0.5, "resets": 0.25},
}
WITH_FAULTS: dict[str, Settings] = {
    "": {},
    ", lag": {"policy_lag": 2},
    ", memory": {"memory": "gru", "memory_size": 8, "norm_obs": True, "norm_reward": True},
    ", reuse": {"recompute_advantages": True, "reuse": 2},
}

RUNS: dict[str, Settings] = {
    "discrete": sized(DISCRETE),
    "discrete, overlap": sized(DISCRETE | OVERLAP),
    "continuous": sized(CONTINUOUS),
    "continuous, overlap": sized(CONTINUOUS | OVERLAP),
    "memory, overlap": sized(DISCRETE | OVERLAP | {"memory": "gru", "memory_size": 8}),
    **{kind: sized(settings) for kind, settings in KINDS.items()},
    "sac, lag": sized(KINDS["sac"] | {"policy_lag": 2}, 5),
    "sac of 8": sized(KINDS["sac"] | single(8, 20)),
    "lag": sized(LAG, 6),
    "every option": sized(EVERY_OPTION, 4),
    "unit of values": sized(UNIT_OF_VALUES, 4),
    "reuse of 3": sized(REUSE, 5),
    "reuse of 3, overlap": sized(REUSE | OVERLAP, 5),
    "prior": sized(PRIOR, 5),
    "prior, memory": sized(PRIOR | {"memory": "lstm", "memory_size": 8}, 5),
    "prior, reuse of 3": sized(PRIOR | {"reuse": 3, "recompute_advantages": True}, 5),
    "prior of choices, lag": sized(PRIOR_OF_CHOICES, 7),
    "prior, sac": sized(SAC_AFTER_PRIOR, 5),
    "evaluations": sized(
        CARTPOLE | single(2, 32) | {"norm_obs": True, "eval_every": 128, "eval_episodes": 4}, 6
    ),
    **{f"{kind}, evaluated": sized(KINDS[kind] | EVALUATED) for kind in EVALUATED_KINDS},
    "recorded episodes": sized(DRAWN, 10),
    "recorded episodes, lag": sized(DRAWN | {"policy_lag": 1}, 10),
    "best episodes": sized(DRAWN | {"record_episodes": "best"}, 10),
    "vector": sized(VECTOR),
    "vector, masks": sized(MASKED_VECTOR, 5),
    "agents": sized(AGENTS),
    "late agents": sized(AGENTS | {"env_kwargs": {"late": True}}),
    "info": sized(INFORMED),
    "graded": sized(GRADED, 5),
    "graded, lag": sized(GRADED | {"policy_lag": 2}, 5),
    "invalid steps": sized(INVALID | single(4, 40), 6),
    **{
        f"{share} faults{suffix}": sized(UNRELIABLE | {"env_kwargs": kwargs} | settings)
        for share, kwargs in SHARES.items()
        for suffix, settings in WITH_FAULTS.items()
    },
}

# The arguments of each disturbance, by the moment at which it happens. The functions are in tests/test_promise.py.
DISTURBANCES: dict[str, dict[str, Settings]] = {
    "actors": {
        "1": {"num_actors": 1, "longest_s": 0.001},
        "2": {"num_actors": 2},
        "3": {"num_actors": 3, "longest_s": 0.001},
        "8": {"num_actors": 8, "longest_s": 0.001},
        "3, threads": {"num_actors": 3, "env_threads": True},
        "2, standby copies": {"num_actors": 2, "standby_envs": 1},
        # It hosts all samplers, and works on two segments at once where the kind has a lag.
        "1, threads and standby copies": {"num_actors": 1, "env_threads": True, "standby_envs": 2},
        "2, and 2 for evaluations": {"num_actors": 2, "eval_actors": 2},
        "2, and a learner": {"num_actors": 2, "num_learners": 1, "cpus_per_actor": 0.5},
    },
    "resumed": {
        **{f"after {at}": {"at": at} for at in range(1, 5)},
        **{
            f"after {at}, from {before} to {after} actors": {
                "at": at,
                "before": before,
                "after": after,
            }
            for at in (1, 2, 4)
            for before in (0, 2, 3)
            for after in (0, 2, 3)
        },
    },
    # in which segment of an environment
    "interrupted": {f"in segment {number}": {"segment": number} for number in (1, 2, 3)},
    "older checkpoint": {"of 2, after 3": {"at": 3, "checkpoint": 2}},
    "segments lost": {
        "0 actors": {"num_actors": 0},
        "1 actor": {"num_actors": 1},
        "3 actors": {"num_actors": 3},
    },
    "killed": {
        "in a step": {"moments": ["step"]},
        "in constructor, reset and step": {"moments": ["constructor", "reset", "step"]},
        "in a step, threads": {"moments": ["step"], "env_threads": True},
        "in a step, standby copies": {"moments": ["step"], "standby_envs": 1},
        "of 3, in a step": {"moments": ["step"], "num_actors": 3},
        "of 6, in a step": {"moments": ["step"], "num_actors": 6},
        "from outside": {"moments": []},
    },
    "killed and resumed": {"after 3, without actors": {"at": 3}},
    "two learners": {
        "2 actors": {"num_actors": 2},
        "3 actors": {"num_actors": 3, "longest_s": 0.005},
        "8 actors": {"num_actors": 8},
        "3 actors, killed from outside": {"num_actors": 3, "moments": []},
    },
    "lost learner and resumed": {
        "after 2": {"at": 2},
        "after 2, beside 2 actors": {"at": 2, "num_actors": 2},
    },
}


@dataclass(frozen=True)
class Cell:
    kind: str
    disturbance: str
    moment: str

    def __str__(self) -> str:
        return f"{self.kind} - {self.disturbance} - {self.moment}"


def cells(table: dict[tuple[str, str], list[str]]) -> list[Cell]:
    """Return the cells of a table: for a disturbance and a moment, the kinds of runs."""
    return [
        Cell(kind, disturbance, moment)
        for (disturbance, moment), kinds in table.items()
        for kind in kinds
    ]


PLAIN = ["discrete", "discrete, overlap", "continuous", "continuous, overlap"]
POLICIES = list(KINDS)
FAULTS = ["few faults", "many faults"]
FAULTS_OF_LEARNING = [
    f"{share}{suffix}" for share in FAULTS for suffix in (", lag", ", memory", ", reuse")
]

OVERLAPPED = ["discrete, overlap", "continuous, overlap"]
OPTIONS_OF_RESETS = ["graded", "graded, lag"]
ALWAYS = cells(
    {
        ("resumed", "after 1"): [
            *POLICIES,
            *("lag", "every option", "reuse of 3, overlap", "prior"),
            *("vector", "vector, masks", "agents", "late agents", "info", *OPTIONS_OF_RESETS),
        ],
        ("resumed", "after 2"): [
            "discrete",
            "continuous, overlap",
            "unit of values",
            "some faults",
            "evaluations",
        ],
        ("resumed", "after 3"): ["prior of choices, lag", "prior, sac", "prior, memory"],
        ("resumed", "after 4"): [
            *("lag", "reuse of 3, overlap", "sac, lag", "vector, masks"),
            *OPTIONS_OF_RESETS,
        ],
        ("resumed", "after 2, from 0 to 2 actors"): ["discrete"],
        ("interrupted", "in segment 1"): ["evaluations"],
        ("interrupted", "in segment 2"): ["lag"],
        ("interrupted", "in segment 3"): ["discrete, overlap", "sac"],
        ("older checkpoint", "of 2, after 3"): ["recorded episodes"],
        ("segments lost", "0 actors"): [
            *("continuous", "discrete, overlap", "lag", "some faults", "sac")
        ],
        ("actors", "3"): ["continuous"],
        ("actors", "1, threads and standby copies"): ["lstm"],
        ("actors", "2, and a learner"): ["every option"],
        ("actors", "1"): ["dict action"],
        ("actors", "2"): ["mask and lstm"],
        ("killed", "in constructor, reset and step"): ["memory, overlap"],
    }
)
SLOW = cells(
    {
        ("actors", "1"): [*PLAIN, "sac, lag"],
        ("actors", "2"): [
            *(kind for kind in POLICIES if kind != "mask and lstm"),
            *("invalid steps", "evaluations", "unit of values"),
            *("prior", "prior, memory", "prior, reuse of 3", "prior of choices, lag", "prior, sac"),
            *FAULTS_OF_LEARNING,
        ],
        ("actors", "3"): ["discrete", "discrete, overlap", "continuous, overlap", "lag"],
        ("actors", "8"): ["discrete", "continuous", "sac of 8"],
        ("actors", "3, threads"): FAULTS,
        ("actors", "2, standby copies"): [*FAULTS, "prior"],
        ("actors", "1, threads and standby copies"): [kind for kind in POLICIES if kind != "lstm"],
        ("actors", "2, and 2 for evaluations"): [f"{kind}, evaluated" for kind in EVALUATED_KINDS],
        ("actors", "2, and a learner"): ["reuse of 3"],
        ("resumed", "after 2"): [
            "best episodes",
            "discrete, overlap",
            "continuous",
            "reuse of 3",
            "reuse of 3, overlap",
        ],
        ("resumed", "after 3"): ["every option"],
        ("resumed", "after 4"): ["prior"],
        ("interrupted", "in segment 1"): ["continuous", "every option"],
        ("interrupted", "in segment 2"): ["prior"],
        ("segments lost", "0 actors"): ["discrete", "continuous, overlap"],
        ("resumed", "after 2, from 0 to 2 actors"): [*OVERLAPPED, "sac, lag", "vector", "agents"],
        ("resumed", "after 2, from 2 to 0 actors"): [*OVERLAPPED, "sac, lag"],
        ("resumed", "after 2, from 3 to 3 actors"): PLAIN,
        **{
            ("resumed", f"after {at}, from {actors} actors"): ["lag"]
            for at in (1, 4)
            for actors in ("3 to 3", "0 to 3", "3 to 0")
        },
        ("resumed", "after 2, from 3 to 0 actors"): OPTIONS_OF_RESETS,
        ("older checkpoint", "of 2, after 3"): ["best episodes", "lag", "every option", "sac, lag"],
        ("segments lost", "1 actor"): ["discrete", "discrete, overlap"],
        ("segments lost", "3 actors"): [*PLAIN, "lag"],
        ("killed", "in a step"): [
            *PLAIN,
            *POLICIES,
            *("every option", "reuse of 3", "recorded episodes", "some faults", "evaluations"),
            *("prior", "prior, memory", "prior of choices, lag"),
            *("sac, lag", "info", "vector", "vector, masks", "agents", *OPTIONS_OF_RESETS),
        ],
        ("killed", "in a step, threads"): ["recorded episodes, lag", "info", "graded"],
        ("killed", "in a step, standby copies"): ["info", "graded"],
        ("killed", "of 3, in a step"): ["lag"],
        ("killed", "of 6, in a step"): ["lag"],
        ("killed", "from outside"): ["discrete, overlap", "lag"],
        ("killed and resumed", "after 3, without actors"): ["some faults", "evaluations", "prior"],
        ("two learners", "2 actors"): [*POLICIES, *("every option", "prior", "prior, memory")],
        ("two learners", "3 actors"): ["lag", "continuous"],
        ("two learners", "8 actors"): ["continuous"],
        ("two learners", "3 actors, killed from outside"): ["continuous"],
        ("lost learner and resumed", "after 2"): ["reuse of 3", "sac of 8"],
        ("lost learner and resumed", "after 2, beside 2 actors"): ["reuse of 3"],
    }
)
