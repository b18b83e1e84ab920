"""Play the episode of an incident again, in this process, up to its fault."""

import json
import stat
from functools import partial
from pathlib import Path

import numpy as np

from dppo.cluster.builders import spaces_of
from dppo.cluster.plans import sampler_plan
from dppo.config import Config
from dppo.config.trust import require_trust
from dppo.envs.checks.faults import constructor_fault
from dppo.envs.frames import SETTINGS, make_prepared
from dppo.envs.group import EnvGroup
from dppo.envs.make import check_display, close_all, make_env, make_in_window
from dppo.errors import CheckpointError, DppoError
from dppo.files import check_kind, read_file
from dppo.ppo.exchange.records import EnvLog, SamplerCarry
from dppo.records.files.disk import check_parts
from dppo.records.files.incidents import FILE
from dppo.records.files.run_folder import settings_to_resume

MOST_BYTES = 2**24  # of the file of an incident


def replay(folder: Path, *, trust: bool = False, render: bool = False) -> int:
    """Make the environment of a run, and repeat the actions of `folder`, an incident of it; return their number.

    Raises:
        ConfigError: the run's environment is not trusted.
        CheckpointError: `folder` is not an incident that can be played again.
        EnvironmentFault: the environment fails again; the cause is its context.
    """
    run = folder.absolute().parents[1]
    check_parts(run)
    seed, episode, actions, place, options = _read(folder)
    settings = settings_to_resume(run)
    require_trust({"env_kwargs": {}} | settings | {"model": None}, (), run, trust=trust)
    config = Config(**settings)
    if render:
        check_display()
    make = partial(make_in_window, env_name=config.env_name, place=place) if render else partial(make_env, place=place)
    try:
        env = make_prepared(config.env_id, config.env_kwargs, {name: getattr(config, name) for name in SETTINGS}, make)
    except Exception as error:
        raise error if isinstance(error, DppoError) else constructor_fault(config.env_name, error) from error
    try:
        spaces = spaces_of(sampler_plan(config), env)
        group = EnvGroup([env], spaces, episode_seed=lambda *_: seed, owner=config.env_name, limits=True)
        numbers = np.array([episode]), np.zeros(1), np.array([len(actions)]), np.zeros(1), np.zeros(1, np.uint32)
        group.restore(SamplerCarry(*numbers, options=options), (actions,), np.empty(1, group.obs), EnvLog())
    finally:
        close_all([env])
    return len(actions)


def _read(folder: Path) -> tuple[int, int, np.ndarray, tuple[int, int], np.ndarray]:
    """Return seed, episode, actions, sampler and environment, options; raise CheckpointError if they are not there."""
    try:
        check_kind(folder, stat.S_IFDIR)
        values = json.loads(read_file(folder / FILE, MOST_BYTES))
        dtype = {"int64": np.int64, "float32": np.float32, "float64": np.float64}[values["dtype"]]
        place = int(values["sampler_id"]), int(values["env"])
        options = np.frombuffer(json.dumps([values.get("options")]).encode(), np.uint8)
        return int(values["seed"]), int(values["episode"]), np.array(values["actions"], dtype), place, options
    except (KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "holds no actions of an episode; see its report.txt"
        raise CheckpointError(f"{folder / FILE}: {reason}. Pass a folder such as runs/NAME/incidents/001.") from None
