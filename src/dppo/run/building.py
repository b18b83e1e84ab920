"""Build the parts of a run (Ray, actors, environments, learners) and restore the state it continues from."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dppo.config import Config
from dppo.config.atari import describe_atari
from dppo.config.memory import batch_memory_in_words
from dppo.config.resolve import Choice, facts_of, resolve
from dppo.engine.collector import Collector, OnProgress
from dppo.engine.ledger import ReplayLedger
from dppo.errors import CheckpointError, ConfigError, DppoError, EnvironmentFault, printable
from dppo.hosts.plans import sampler_plan, trainer_plan
from dppo.log import logger
from dppo.numerics.fingerprint import Expected, Fingerprint, Probe, fingerprint
from dppo.numerics.portable import VARIABLES, in_force
from dppo.policies.described import model_state
from dppo.policies.playing import EpisodePlayer, PlaySettings
from dppo.ppo.exchange.statistics import Statistics, no_statistics
from dppo.ppo.networks.choice import choose_network
from dppo.ppo.networks.network import NetworkSpec
from dppo.records.files.checkpoint import Found, find
from dppo.records.files.run_folder import RunFolder
from dppo.records.instance_lines import instances_line, together_line
from dppo.run.env_faults import EnvFaults
from dppo.run.evaluations import InProcessPlayers
from dppo.run.learner import PPOLearner
from dppo.run.state import RunState
from dppo.run.warm_start import warm_start
from dppo.signals import StopSignals
from dppo.spaces.actions import rescaled_in_words
from dppo.spaces.spaces import Spaces
from dppo.transports.in_process import InProcessCollector

if TYPE_CHECKING:
    from dppo.learners.tracing import Trace
    from dppo.learners.trainers import Trainers
    from dppo.transports.ray.core_use import CoreUse
    from dppo.transports.ray.evaluating import RayPlayers
    from dppo.transports.ray.session import RaySession

NOT_REPLAYED = "lost or resumed samplers start new episodes; those of EnvPool, with a fixed seed, their first ones"
PARAMETERS_OF_A_MODEL = 4_000_000  # enough for an encoder of images, if not for any network of a user


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run that the runner works with."""

    collector: Collector
    learner: PPOLearner
    ledger: ReplayLedger
    model: dict[str, Any]
    """Spaces and network as JSON values, as checkpoints store them."""
    numerics: Expected
    epochs: int
    """K of the updates."""
    choices: tuple[Choice, ...]
    """The defaults that depend on the task."""
    trace: Callable[..., dict[str, Any]] | None
    """Returns the line of trace.jsonl for a row of metrics; None if there is no such file."""
    players: InProcessPlayers | RayPlayers | None = None
    """Plays the episodes of evaluations; None without evaluations."""
    core_use: CoreUse | None = None
    """Measures whether the cores are busy; None without a Ray that was started here."""


def build(config: Config, folder: RunFolder, stop: StopSignals, stack: ExitStack, on_progress: OnProgress) -> Parts:
    """Start Ray, actors, environments and learners; load the checkpoint to continue from; `stack` closes all parts.

    Raise CheckpointError if the environment differs from that of the run to continue.
    """
    start, variables = folder.start or folder.origin, _variables(config, stack)
    if start is None and config.freeze_norm_after == 0 and config.init_from is None:
        raise ConfigError("freeze_norm_after=0: a new run has no statistics to keep. Use a larger number, or branch.")
    warm = find(config.init_from) if config.init_from and start is None else None
    # In parallel with the start of Ray, which mostly waits. Python must not exit in the middle of an import.
    torch_import = threading.Thread(target=importlib.import_module, args=("torch",), daemon=True)
    torch_import.start()
    stack.callback(torch_import.join)
    session = _open_session(config, variables, stop, stack) if config.num_actors != 0 else None
    sets_states = config.env_state == "own"
    ledger = ReplayLedger(config.num_samplers, replay=config.replay, policy_lag=config.lag, sets_states=sets_states)
    site = _Site(config, stop, stack, session, f"{folder.path}/logs")
    collector = site.collector(ledger, on_progress)
    spaces = _spaces(collector, config, stop)
    damaged = [f"skipped a damaged checkpoint: {problem}" for problem in (start.damaged if start else ())]
    for note in (*damaged, *folder.close_changes):
        logger.warning("%s", note)
    if not spaces.deterministic and config.replay:
        ledger.replays = False
        logger.warning("%s is nondeterministic, or resets rows by itself: %s", config.env_name, NOT_REPLAYED)
    torch_import.join()
    collector.expected = expected = _numerics(config, spaces)
    resolved, choices = resolve(config, facts_of(spaces.actions))
    for choice in choices:
        if choice.line:
            logger.info("%s", choice.line)
    _log_network(resolved, spaces)
    trace = _trace(resolved)
    trainers = site.trainers(resolved, spaces, expected, trace)
    statistics = _no_statistics(config, spaces, resumed=folder.start is not None)
    model = model_state(spaces, trainers.spec)
    if warm is not None:
        statistics = warm_start(trainers, statistics, warm, model["obs"], config)
    more: dict[str, Any] = {"policy_lag": config.lag, "freeze_norm_after": config.freeze_norm_after}
    learner = PPOLearner(collector, trainers, ledger, statistics, **more)
    learner.env_faults = EnvFaults(ledger, config.env_faults, config.env.fault_budget)
    more = {"trace": None if trace is None else trace.line, "players": site.players(spaces, trainers.spec)}
    epochs = resolved.update_epochs
    assert epochs is not None
    parts = Parts(collector, learner, ledger, model, expected, epochs, tuple(choices), core_use=site.core_use(), **more)
    if start is not None:
        _load(start, config, parts, ledger, trainers.spec, branch=folder.start is None)
    return parts


def _trace(config: Config) -> Trace | None:
    """Return what takes checksums of each update, with `trace_hashes`."""
    if not config.trace_hashes:
        return None
    from dppo.learners.tracing import Trace  # imports torch

    return Trace(trainer_plan(config))


def _spaces(collector: Collector, config: Config, stop: StopSignals) -> Spaces:
    """Return the spaces of the environments; add a remedy to the fault of one that cannot be made beside another."""
    try:
        return collector.describe(stop)
    except EnvironmentFault as fault:
        if fault.place is not None and fault.place.others:
            fault.message += instances_line(config, fault.place)
        raise


def _variables(config: Config, stack: ExitStack) -> dict[str, str]:
    variables = stack.enter_context(in_force(config.numerics))
    if config.numerics != "native" and not variables:
        logger.info(
            "results are equal on this type of CPU only: it has no AVX2, or NumPy was loaded with other code. Call "
            "dppo.portable_numerics() before NumPy is imported, or set numerics=native to say so."
        )
    if config.numerics == "native" and VARIABLES.items() <= os.environ.items():
        logger.warning(
            "numerics=native: portable code was loaded already. Set DPPO_NUMERICS=native before Python starts."
        )
    return variables


def _numerics(config: Config, spaces: Spaces) -> Expected:
    images = any(len(leaf.shape) == 3 for leaf in spaces.leaves().values())
    probe = Probe(config.envs_per_sampler, tuple(min(width, 512) for width in config.hidden_sizes), images)
    return Expected(probe, fingerprint(probe, torch=True), config.on_other_cpu == "refuse")


def _open_session(config: Config, variables: dict[str, str], stop: StopSignals, stack: ExitStack) -> RaySession:
    """Connect to Ray, whose processes get `variables`."""
    from dppo.transports.ray.claim import claimed
    from dppo.transports.ray.session import RaySession, store_bytes_for
    from dppo.transports.ray.upload import check_there_is_a_cluster, environment_of

    stop.check()
    check_there_is_a_cluster(config.upload, config.address)
    stack.enter_context(claimed())
    segments = (config.lag + config.reuse) * config.batch_size
    store_bytes = store_bytes_for(segments, (1 + config.lag) * most_parameters(config))
    fewest = max(config.actor_bounds[0], config.fewest_for(config.num_samplers))
    bounds = f"{fewest}..{config.most_actors}" if config.elastic else config.num_actors
    actors = replace(config.actors, num_actors=bounds)
    more: dict[str, Any] = {"notify": logger.warning, "check": stop.check, "env_threads": config.env_threads}
    session = RaySession(actors, config.learners, config.evaluators, store_bytes=store_bytes, **more)
    stack.callback(session.close)
    stop.add_check(session.check)
    stop.check()  # Ray has started meanwhile
    if not session.started_here:  # else it has inherited the variables, and its first processes exist already
        session.options = environment_of(variables, config.upload, logger.info)
    return session


@dataclass(frozen=True, slots=True)
class _Site:
    """Makes the parts of a run that are closed with `stack`, on Ray if there is a session."""

    config: Config
    stop: StopSignals
    stack: ExitStack
    session: RaySession | None
    logs: str

    def collector(self, ledger: ReplayLedger, on_progress: OnProgress) -> Collector:
        """Return the collector, which makes the environments."""
        config, plan = self.config, sampler_plan(self.config)
        if self.session is None:
            return self.stack.enter_context(
                closing(InProcessCollector(plan, ledger, on_progress, together_line(config)))
            )
        from dppo.transports.ray.transport import collector_on_ray

        here = config.reuse > 1 or config.trace_hashes  # this process needs the arrays, too
        more = {"by_reference": config.num_learners > 0 and not here, "logs": self.logs}
        on_ray = collector_on_ray(plan, config.actors, ledger, on_progress, self.session, **more)
        return self.stack.enter_context(closing(on_ray))

    def core_use(self) -> CoreUse | None:
        """Return what measures, from now on, how busy the cores of this machine are, if all actors run here."""
        if self.session is None or not self.session.started_here:
            return None
        from dppo.transports.ray.core_use import CoreUse

        return CoreUse(self.session.demand.num_actors)

    def trainers(self, config: Config, spaces: Spaces, expected: Expected, trace: Trace | None) -> Trainers:
        """Return what trains on the segments, with the settings `config`, which suit the spaces."""
        from dppo.learners.staged import RunStage, StagedTrainers
        from dppo.learners.stored_segments import StoredSegments
        from dppo.learners.trainers import LocalTrainer

        plan = trainer_plan(config)
        trainers: Trainers
        if self.session is None or config.num_learners == 0:
            trainers = local = self.stack.enter_context(closing(LocalTrainer(plan, spaces)))
            local.interruptible = self.stop.interruptible
            local.check_gpu(config.batch_size * config.reuse)
        else:
            from dppo.learners.ranks import RayTrainers
            from dppo.learners.worth import worth_in_words

            more = {"expected": expected, **self.session.options}
            link = self.session.link("learners")
            trainers = ranks = RayTrainers(plan, spaces, logger.warning, self.stop.check, link, **more)
            self.stack.callback(ranks.close)
            if config.num_learners > 1:
                logger.warning("%s", worth_in_words(plan, ranks.spec, *ranks.worth(config.sizes.minibatch_rows)))
        stages: list[RunStage] = [] if trace is None else [trace]  # first, as it is about the newest segments alone
        if config.reuse > 1:
            stages.append(StoredSegments(config.reuse, spaces.of_network().obs))
        return StagedTrainers(trainers, stages) if stages else trainers

    def players(self, spaces: Spaces, spec: NetworkSpec) -> InProcessPlayers | RayPlayers | None:
        """Return what plays the episodes of evaluations, on actors if the run has any; None without evaluations."""
        config = self.config
        if config.eval_every is None:
            return None
        env = replace(config.env, env_kwargs={**config.env_kwargs, **config.eval_env_kwargs})
        settings = PlaySettings(config.seed, not config.eval_stochastic, config.info_keys)
        player = EpisodePlayer(env, spaces, spec, settings, config.num_samplers)
        if self.session is None:
            self.stack.callback(player.close)
            return InProcessPlayers(player, config.eval_episodes, config.eval_timeout_s, self.stop.interruptible)
        from dppo.engine.patience import SETTINGS
        from dppo.transports.ray.evaluating import RayPlayers

        of: dict[str, Any] = {"episodes": config.eval_episodes, "actors": config.eval_actors, "logs": self.logs}
        longest_s = max(config.segment_timeout_s, *(getattr(config, name) or 0.0 for name in SETTINGS.values()))
        of |= {"timeout_s": config.eval_timeout_s, "hung_s": longest_s, **self.session.options}
        link, licensed = self.session.link("evaluations"), config.licences is not None
        players = RayPlayers(player, self.session.demand.actor, link, licensed=licensed, **of)
        return self.stack.enter_context(closing(players))


def most_parameters(config: Config) -> int:
    """Return a bound of the network's parameters, to size the object store before the spaces are known."""
    return PARAMETERS_OF_A_MODEL + 2 * sum(inputs * units for inputs, units in pairwise(config.hidden_sizes))


def _no_statistics(config: Config, spaces: Spaces, *, resumed: bool) -> Statistics:
    """Return the statistics of a new run; raise ConfigError if it is to freeze them, and has none."""
    statistics = no_statistics(spaces, obs=config.norm_obs, returns=config.norm_reward)
    none = statistics.obs is None and statistics.returns is None
    if none and config.freeze_norm_after is not None and not resumed:
        fact = f"norm_reward is off, and no observations of {config.env_name} are normalized"
        raise ConfigError(f"freeze_norm_after={config.freeze_norm_after} has no effect: {fact}. Leave it out.")
    return statistics


def _log_network(config: Config, spaces: Spaces) -> None:
    """Log the network, the preparation of frames, the mapping of actions, and the memory of a batch."""
    rescaled = rescaled_in_words(spaces.actions) if config.action_bounds == "auto" else None
    network, memory = choose_network(config.network, spaces), batch_memory_in_words(config, spaces)
    for line in (network, describe_atari(config.env), rescaled, memory):
        if line is not None:
            logger.info("%s", line)
    if config.norm_value and not config.norm_adv:
        logger.warning(
            "norm_value=True without norm_adv=True: values are learned in units of their deviation, advantages are "
            "not, so that large rewards still change what is learned. Use both."
        )


def _load(start: Found, config: Config, parts: Parts, ledger: ReplayLedger, spec: NetworkSpec, *, branch: bool) -> None:
    """Load `start` into the learner; with `branch`, only the weights, the optimizer and the normalizers."""
    arrays, state, model = start.checkpoint.arrays, start.checkpoint.state, parts.model
    for name in {**model, **state["model"]}:
        if state["model"].get(name) != model.get(name) and not (branch and name == "deterministic"):
            raise CheckpointError(
                f"{start.path}: its {name} is {state['model'].get(name)}, but that of {config.env_name} is "
                f"{model.get(name)}. {'Branch' if branch else 'Resume'} with the environment of the original run."
            )
    try:
        if branch:
            RunState(arrays, state).branch_off(parts.learner)
        else:
            if config.env_state == "off":
                left_out = ".states", ".proofs"
                samplers = arrays["samplers"].items()
                arrays["samplers"] = {name: array for name, array in samplers if not name.endswith(left_out)}
            RunState(arrays, state).restore(parts.learner)
            ledger.check(parts.learner.iteration, config.envs_per_sampler, spec)
        if (before := state.get("numerics")) is not None:
            then, now = Fingerprint(**before["own"]), parts.numerics.own
            asked = Probe(**before["probe"] | {"widths": tuple(before["probe"]["widths"])})  # other sizes: for a branch
            if asked == parts.numerics.probe and (difference := then.differences(now)):
                facts = f"was written on {then.cpu}, and this machine, {now.cpu}, computes {difference}"
                logger.warning("the checkpoint %s: from here on, results differ by rounding", printable(facts))
    except DppoError:
        raise
    except Exception as error:  # whatever the content of a checkpoint leads to: it may be anybody's
        raise CheckpointError(
            f"{start.path}: cannot be resumed by this version of dppo ({error!r}). Use the version that wrote it."
        ) from error
