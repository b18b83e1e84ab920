"""Operate a power grid with Grid2Op: pip install grid2op lightsim2grid; dppo train grid:make.

    dppo train grid:make --env-kwargs '{"name": "l2rpn_case14_sandbox"}'

Without `test`, Grid2Op downloads the data of a grid on its first use: do that once on every node, before training.
"""

import warnings
from typing import Any

import gymnasium as gym

PARTS = ["rho", "gen_p", "load_p", "line_status", "topo_vect"]
MOST_STEPS = 200


def make(name: str = "rte_case5_example", test: bool = True) -> gym.Env[Any, Any]:
    """Return the environment: the load of lines, production, loads and topology; the action switches one element."""
    with warnings.catch_warnings():
        # about versions of optional packages, and the data of tests
        warnings.simplefilter("ignore")
        import grid2op
        from grid2op.gym_compat import BoxGymObsSpace, DiscreteActSpace, GymEnv

        grid = grid2op.make(name, test=test, **_backend())
        env = GymEnv(grid)
        env.observation_space.close()
        env.observation_space = BoxGymObsSpace(grid.observation_space, attr_to_keep=PARTS)
        env.action_space.close()
        env.action_space = DiscreteActSpace(grid.action_space, attr_to_keep=["set_bus"])
    return gym.wrappers.TimeLimit(env, MOST_STEPS)


def _backend() -> dict[str, Any]:
    try:
        from lightsim2grid import LightSimBackend
    except ImportError:
        return {}  # PandaPower's, which is ten times as slow
    return {"backend": LightSimBackend()}
