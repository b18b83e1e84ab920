"""Build the parts of a run in order, and restore the state that it continues from."""

from __future__ import annotations

import importlib
import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dppo.config import Config
from dppo.config.atari import describe_atari
from dppo.config.memory import batch_memory_in_words, check_replay_disk
from dppo.config.resolve import Choice, resolve
from dppo.engine.collector import Collector, OnProgress
from dppo.engine.ledger import ReplayLedger
from dppo.errors import ConfigError, EnvironmentFault
from dppo.hosts.plans import trainer_plan
from dppo.hosts.sac import networks_in_words
from dppo.log import logger
from dppo.numerics.fingerprint import Expected, Probe, fingerprint
from dppo.numerics.portable import VARIABLES, has_avx2, in_force
from dppo.policies.described import model_state
from dppo.policies.policy import spaces_summary
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.scales import Statistics
from dppo.records.files.checkpoint import find
from dppo.records.files.run_folder import RunFolder
from dppo.records.instance_lines import instances_line
from dppo.run.env_faults import EnvFaults
from dppo.run.factory import PartsFactory, open_session
from dppo.run.learner import PPOLearner
from dppo.run.loading import load_start
from dppo.run.needed_states import state_place
from dppo.run.parts import Parts
from dppo.run.warm_start import warm_start
from dppo.signals import StopSignals
from dppo.spaces.actions import continuous_width
from dppo.spaces.bounds import describe_rescaling, stuck_beside_unbounded
from dppo.spaces.spaces import Spaces

if TYPE_CHECKING:
    from dppo.learners.tracing import Trace

MAX_PROBE_WIDTH = 512  # units; wider layers have the fingerprint of this width

NOT_REPLAYED = "lost or resumed samplers start new episodes; EnvPool with its fixed seed starts its first ones again"


def build(
    config: Config, folder: RunFolder, stop: StopSignals, stack: ExitStack, on_progress: OnProgress
) -> Parts:
    """Start Ray, actors, environments and learners; load the checkpoint to continue from; `stack` closes all parts.

    Raise CheckpointError if the environment differs from the environment of the run to continue.
    """
    start = folder.start or folder.origin
    variables = _set_numerics(config, stack)
    if start is None and config.freeze_norm_after == 0 and config.init_from is None:
        raise ConfigError(
            "freeze_norm_after=0: a new run has no statistics to keep. Use a larger number, or branch."
        )
    warm = find(config.init_from) if config.init_from and start is None else None
    torch_import = _import_torch(stack)
    place = state_place(config, folder)
    session = None if config.num_actors == 0 else open_session(config, variables, stop, stack)
    resumed_at = folder.resumed_from.get("iteration")
    factory = PartsFactory(config, stop, stack, session, f"{folder.path}/logs", place, resumed_at)
    ledger = _ledger(config)
    collector = factory.collector(ledger, on_progress)
    spaces = _spaces(collector, config, stop)
    _warn_about_start(folder)
    _limit_replays(ledger, config, spaces)
    torch_import.join()

    numerics = _expected_numerics(config, spaces)
    collector.expected = numerics
    resolved, choices = resolve(config, continuous_width(spaces.actions))
    _log_choices(resolved, choices, spaces, folder)
    trace = _trace(resolved)
    trainers = factory.trainers(resolved, spaces, numerics, trace)
    statistics = _no_statistics(config, spaces, resumed=folder.start is not None)
    model = model_state(spaces, trainers.spec)
    if warm is not None:
        statistics = warm_start(trainers, statistics, warm, config)
    learner = PPOLearner(
        collector,
        trainers,
        ledger,
        statistics,
        policy_lag=config.lag,
        freeze_norm_after=resolved.freeze_norm_after,
    )
    learner.prior_versions = config.sizes.prior_iterations
    learner.env_faults = EnvFaults(ledger, config.env_faults, config.env.fault_budget)
    parts = Parts(
        collector=collector,
        learner=learner,
        model=model,
        numerics=numerics,
        epochs=resolved.update_epochs,
        choices=tuple(choices),
        trace=None if trace is None else trace.line,
        players=factory.players(spaces, trainers.spec),
        core_use=factory.core_use(),
    )
    if start is not None:
        load_start(start, parts, config, branch=folder.start is None)
    return parts


def _limit_replays(ledger: ReplayLedger, config: Config, spaces: Spaces) -> None:
    """Abandon open episodes instead of replaying them if the environment is nondeterministic."""
    if not spaces.deterministic and config.replay:
        ledger.replays = False
        logger.warning(
            "%s is nondeterministic, or resets sub-environments by itself: %s",
            config.env_name,
            NOT_REPLAYED,
        )


def _ledger(config: Config) -> ReplayLedger:
    sets_states = config.env_state == "own"
    return ReplayLedger(
        config.num_samplers, replay=config.replay, policy_lag=config.lag, sets_states=sets_states
    )


def _import_torch(stack: ExitStack) -> threading.Thread:
    """Import torch in parallel with the start of Ray, which mostly waits; return the thread, to join it.

    Python must not exit in the middle of an import, so `stack` joins the thread, too.
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch",), daemon=True)
    thread.start()
    stack.callback(thread.join)
    return thread


def _warn_about_start(folder: RunFolder) -> None:
    start = folder.start or folder.origin
    if start is not None:
        for problem in start.damaged:
            logger.warning("skipped a damaged checkpoint: %s", problem)
    for change in folder.close_changes:
        logger.warning("%s", change)


def _trace(config: Config) -> Trace | None:
    if not config.trace_hashes:
        return None
    from dppo.learners.tracing import Trace  # imports torch

    return Trace(trainer_plan(config))


def _spaces(collector: Collector, config: Config, stop: StopSignals) -> Spaces:
    """Return the spaces of the environments; add a remedy if a second one in a process cannot be made."""
    try:
        return collector.describe(stop)
    except EnvironmentFault as fault:
        if fault.place is not None and fault.place.others:
            fault.message += instances_line(config, fault.place)
        raise


def _set_numerics(config: Config, stack: ExitStack) -> dict[str, str]:
    """Set the variables that choose the code of NumPy and torch, until `stack` is closed.

    Return them, for the processes that the run starts; {} if they have no effect in this process.
    """
    variables = stack.enter_context(in_force(config.numerics))
    if config.numerics != "native" and not variables:
        reason = "it has no AVX2"
        remedy = "Set numerics=native to accept that."
        if has_avx2():
            reason = "NumPy was imported before dppo could choose its code"
            remedy = (
                "Call dppo.portable_numerics() before NumPy or Gymnasium is imported, or set numerics=native to accept "
                "that."
            )
        logger.info("results are equal on this type of CPU only: %s. %s", reason, remedy)
    are_variables_set = VARIABLES.items() <= os.environ.items()
    if config.numerics == "native" and are_variables_set:
        logger.warning(
            "numerics=native: portable code was loaded already. Set DPPO_NUMERICS=native before Python starts."
        )
    return variables


def _expected_numerics(config: Config, spaces: Spaces) -> Expected:
    widths = tuple(min(width, MAX_PROBE_WIDTH) for width in config.hidden_sizes)
    has_images = any(len(leaf.shape) == 3 for leaf in spaces.leaves().values())
    probe = Probe(config.envs_per_sampler, widths, has_images)
    return Expected(probe, fingerprint(probe, torch=True), refuse=config.on_other_cpu == "refuse")


def _no_statistics(config: Config, spaces: Spaces, *, resumed: bool) -> Statistics:
    """Return the statistics of a new run; raise ConfigError if it is to freeze them, and has none."""
    statistics = no_statistics(spaces, obs=config.norm_obs, returns=config.norm_reward)
    has_none = statistics.obs is None and statistics.returns is None
    if has_none and config.freeze_norm_after is not None and not resumed:
        fact = f"norm_reward is off, and no observations of {config.env_name} are normalized"
        raise ConfigError(
            f"freeze_norm_after={config.freeze_norm_after} has no effect: {fact}. Leave it out."
        )
    return statistics


def _log_choices(config: Config, choices: list[Choice], spaces: Spaces, folder: RunFolder) -> None:
    """Log defaults of the task, the network, the preparation of frames, the mapping of actions, and the memory.

    Raise ConfigError if memory or disk have no room for the run.
    """
    if config.algo == "sac":
        check_replay_disk(config, spaces, folder.path)
    for choice in choices:
        if choice.line:
            logger.info("%s", choice.line)
    rescaled = None
    stuck = None
    if config.action_bounds == "auto":
        rescaled = describe_rescaling(spaces.actions)
        stuck = stuck_beside_unbounded(spaces.actions)
    networks = networks_in_words(config, spaces)
    memory = batch_memory_in_words(config, spaces)
    masks = None
    if spaces.mask:
        masks = f"Spaces: {spaces_summary(spaces)}"
    for line in (networks, masks, describe_atari(config.env), rescaled, memory):
        if line is not None:
            logger.info("%s", line)
    if stuck is not None:
        logger.warning("%s", stuck)
    if config.norm_value and not config.norm_adv:
        logger.warning(
            "norm_value=True without norm_adv=True: values are normalized, but advantages are "
            "not, so that large rewards still change what is learned. Use both."
        )
