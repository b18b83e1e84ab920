"""Build what a run is made of: Ray, actors, environments, learners; in the state that the run goes on from."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

from dppo.assemble import network_spec, sampler_plan, trainer_plan
from dppo.cluster.collecting.collector import Collector, make_collector
from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.config import Config
from dppo.errors import CheckpointError
from dppo.learner import PPOLearner
from dppo.policy import model_state
from dppo.ppo.choice import choose_network
from dppo.ppo.inputs import measured_shape
from dppo.ppo.normalizer import Moments, Statistics
from dppo.records.run_folder import RunFolder, Start
from dppo.signals import StopSignals
from dppo.spaces import Spaces

PARAMETERS_OF_A_MODEL = 4_000_000  # room for them; how many a user's network has depends on the environment

logger = logging.getLogger("dppo")


@dataclass(frozen=True, slots=True)
class Parts:
    """All that a run is made of."""

    collector: Collector
    learner: PPOLearner
    spaces: Spaces


def build(config: Config, folder: RunFolder, stop: StopSignals, stack: ExitStack) -> Parts:
    """Make Ray, actors, environments and learners, and put them where the run goes on from, or branches off.

    Args:
        stack: closes them.

    Raises:
        CheckpointError: the environment is another than that of the run to go on from.
    """
    start = folder.start or folder.origin
    for problem in start.damaged if start else ():
        logger.warning("passed over a damaged checkpoint: %s", problem)
    for change in start.close_changes if start else ():
        logger.warning("%s", change)
    torch_import = threading.Thread(target=_import_torch, daemon=True)  # beside Ray, which mostly waits
    torch_import.start()
    stack.callback(torch_import.join)  # Python must not end in the middle of it
    if config.num_actors > 0:
        stop.check()
        _open_session(config, stop, stack)
        stop.check()  # Ray has started meanwhile
    ledger = ReplayLedger(config.num_samplers, replay=config.replay)
    collector = _make_collector(config, ledger, stack)
    spaces = collector.describe(stop)
    if not spaces.deterministic and config.replay:
        ledger.give_up_replay()
        logger.warning("%s says it is nondeterministic: lost samplers begin fresh episodes", config.env_name)
    torch_import.join()
    logger.info("%s", choose_network(config.network, spaces).in_words())
    parts = Parts(collector, _make_learner(config, spaces, collector, ledger, stop, stack), spaces)
    if start is not None:
        _load(start, config, parts, branch=folder.start is None)
    return parts


def _open_session(config: Config, stop: StopSignals, stack: ExitStack) -> None:
    from dppo.cluster.session import RaySession, store_bytes_for

    parameters = 2 * sum(inputs * units for inputs, units in pairwise(config.hidden_sizes))
    if config.model is not None:
        parameters = PARAMETERS_OF_A_MODEL
    store_bytes = store_bytes_for(config.batch_size, parameters)
    session = RaySession(config.actors, config.learners, store_bytes=store_bytes, notify=logger.warning)
    stack.callback(session.close)
    stop.add_check(session.check)


def _make_collector(config: Config, ledger: ReplayLedger, stack: ExitStack) -> Collector:
    collector = make_collector(
        sampler_plan(config),
        config.actors,
        ledger,
        by_reference=config.num_learners > 0,
        notify=logger.warning,
    )
    stack.callback(collector.close)
    return collector


def _make_learner(
    config: Config, spaces: Spaces, collector: Collector, ledger: ReplayLedger, stop: StopSignals, stack: ExitStack
) -> PPOLearner:
    from dppo.cluster.learning.trainers import make_trainers

    trainers = make_trainers(trainer_plan(config), spaces, logger.warning, stop.check)
    stack.callback(trainers.close)
    statistics = Statistics(
        obs=Moments.empty(measured_shape(spaces.obs)) if config.norm_obs else None,
        returns=Moments.empty(()) if config.norm_reward else None,
    )
    return PPOLearner(collector, trainers, ledger, statistics, overlap=config.overlap, notify=logger.warning)


def _load(start: Start, config: Config, parts: Parts, *, branch: bool) -> None:
    """Put the learner where `start` was; with `branch`, let it begin with what was learnt there."""
    model = model_state(parts.spaces, network_spec(config.network, parts.spaces))
    found = start.state.get("model")
    before = found if isinstance(found, dict) else {}
    differing = [name for name in model if before.get(name) != model[name] and not (branch and name == "deterministic")]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{start.checkpoint}: its {name} is {before.get(name)}, that of {config.env_name} is {model[name]}. "
            f"{'Branch' if branch else 'Resume'} with the environment that the run began with."
        )
    try:
        if branch:
            parts.learner.adopt(start.arrays)
        else:
            parts.learner.load(start.arrays, start.state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{start.checkpoint}: is not a checkpoint that this dppo can go on from ({error!r}). Use the version that "
            f"wrote it."
        ) from error


def _import_torch() -> None:
    import torch  # noqa: F401
