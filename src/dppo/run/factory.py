"""Make the parts of a run that have processes, files or threads: in this process, or on Ray."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dppo.config import Config
from dppo.engine.collector import Collector, OnProgress
from dppo.engine.ledger import ReplayLedger
from dppo.errors import ConfigError, counted
from dppo.hosts.plans import TrainerPlan, sampler_plan, trainer_plan
from dppo.log import logger
from dppo.machine import cores_in_words, usable_cores
from dppo.numerics.fingerprint import Expected
from dppo.policies.acting import ActingFor, PlaySettings, PolicyActingFor
from dppo.policies.playing import EpisodePlayer
from dppo.ppo.networks.network import NetworkSpec
from dppo.records.instance_lines import hang_line
from dppo.run.in_process_players import InProcessPlayers
from dppo.signals import StopSignals
from dppo.slots.layout import CORES_REMEDY
from dppo.spaces.spaces import Spaces
from dppo.transports.in_process import InProcessCollector

if TYPE_CHECKING:
    from dppo.engine.actor_players import ActorPlayers
    from dppo.engine.playing import PlayLimits
    from dppo.envs.state_files import StatePlace
    from dppo.learners.ranks import RayTrainers
    from dppo.learners.tracing import Trace
    from dppo.learners.trainers import LocalTrainer, Trainers
    from dppo.transports.ray.core_use import CoreUse
    from dppo.transports.ray.session import RaySession

# parameters of an unknown network: enough for an encoder of images, if not for any network of a user
PARAMETERS_OF_A_MODEL = 4_000_000


def open_session(
    config: Config, variables: dict[str, str], stop: StopSignals, stack: ExitStack
) -> RaySession:
    """Connect to Ray, whose processes get `variables`, until `stack` is closed."""
    from dppo.transports.ray.connecting import claimed
    from dppo.transports.ray.session import RaySession, demand_of, store_bytes_for
    from dppo.transports.ray.upload import check_there_is_a_cluster, environment_of

    stop.check()
    check_there_is_a_cluster(config.upload, config.address)
    stack.enter_context(claimed())
    segments = (config.lag + config.stored_iterations) * config.batch_size
    parameters = (1 + config.lag) * max_parameters(config)
    actors = config.actors.placed(config.sampling)
    if actors.elastic:
        fewest = max(actors.actor_bounds[0], actors.fewest_for(config.num_samplers))
        actors = replace(actors, num_actors=f"{fewest}..{config.most_actors}")
    session = RaySession(
        actors,
        demand_of(actors, config.learners, config.evaluators),
        store_bytes=store_bytes_for(segments, parameters),
        notify=logger.warning,
        check=stop.check,
        env_threads=config.env_threads,
    )
    stack.callback(session.close)
    stop.add_check(session.check)
    stop.check()  # while Ray started, a signal may have arrived
    if not session.started_here:  # a Ray that was started here has inherited the variables
        session.options = environment_of(variables, config.upload, logger.info)
    return session


def max_parameters(config: Config) -> int:
    """Return a bound of the network's parameters, to size the object store before the spaces are known."""
    weights = sum(inputs * units for inputs, units in pairwise(config.hidden_sizes))
    return PARAMETERS_OF_A_MODEL + 2 * weights


def check_cores(config: Config) -> None:
    """Raise ConfigError if this machine has fewer cores than the ranks of all environments of this process."""
    environments = config.envs_of_sampler * config.num_samplers + config.evaluators
    needed = environments * config.layout.cores
    cores = usable_cores()
    if needed <= cores:
        return
    fit = cores // config.layout.cores
    raise ConfigError(
        f"{config.layout}: {counted(environments, 'environment')} of this process need {counted(needed, 'core')}, and "
        f"it may use {cores_in_words()}, enough for {fit}. {CORES_REMEDY}"
    )


@dataclass(frozen=True, slots=True)
class PartsFactory:
    """Makes the parts of a run, on Ray if there is a session; closing `stack` closes them."""

    config: Config
    stop: StopSignals
    stack: ExitStack
    session: RaySession | None
    logs: str
    """The folder for the logs of actors."""
    state_place: StatePlace | None
    """Place of the files of environments' states; None: none are kept."""
    resumed_at: int | None
    """Iterations before this call; None: a new run."""

    def collector(self, ledger: ReplayLedger, on_progress: OnProgress) -> Collector:
        config = self.config
        plan = replace(
            sampler_plan(config), state_place=self.state_place, resumed_at=self.resumed_at
        )
        if self.session is None:
            check_cores(config)
            in_process = InProcessCollector(plan, ledger, on_progress, hang_line(config))
            return self.stack.enter_context(closing(in_process))
        from dppo.transports.ray.collecting import ActorFiles, collector_on_ray

        stores = config.stored_iterations > 1 or config.algo == "sac"
        needs_arrays = config.num_learners == 0 or stores or config.trace_hashes
        files = ActorFiles(self.logs, by_reference=not needs_arrays)
        on_ray = collector_on_ray(
            plan, config.actors.placed(config.sampling), ledger, self.session, files, on_progress
        )
        return self.stack.enter_context(closing(on_ray))

    def trainers(
        self, config: Config, spaces: Spaces, expected: Expected, trace: Trace | None
    ) -> Trainers:
        from dppo.learners.staged import RunStage, StagedTrainers
        from dppo.learners.stored_segments import StoredSegments

        plan = trainer_plan(config)
        trainers: Trainers
        if self.session is None or config.num_learners == 0:
            trainers = self._local_trainer(plan, spaces)
        else:
            trainers = self._ray_trainers(plan, spaces, expected, self.session)
            if plan.learners.num_learners > 1:
                self._log_speedup(plan, trainers)
        stages: list[RunStage] = []
        if trace is not None:  # first, as it is about the newest segments alone
            stages.append(trace)
        if config.stored_iterations > 1:
            obs = spaces.of_network().obs
            stages.append(StoredSegments(config.reuse, obs, config.collected_by_prior))
        if stages:
            return StagedTrainers(trainers, stages)
        return trainers

    def _local_trainer(self, plan: TrainerPlan, spaces: Spaces) -> LocalTrainer:
        from dppo.learners.trainers import LocalTrainer  # imports torch

        trainer = LocalTrainer(plan, spaces)
        self.stack.callback(trainer.close)
        trainer.interruptible = self.stop.interruptible
        trainer.check_gpu(self.config.batch_size * self.config.stored_iterations)
        return trainer

    def _ray_trainers(
        self, plan: TrainerPlan, spaces: Spaces, expected: Expected, session: RaySession
    ) -> RayTrainers:
        from dppo.learners.ranks import RayTrainers

        link = session.link("learners")
        trainers = RayTrainers(
            plan, spaces, logger.warning, self.stop.check, link, expected=expected
        )
        self.stack.callback(trainers.close)
        return trainers

    def _log_speedup(self, plan: TrainerPlan, trainers: RayTrainers) -> None:
        from dppo.learners.speedup import describe_speedup

        speedup = trainers.measure_speedup(plan.sizes.minibatch_rows)
        logger.warning("%s", describe_speedup(plan, trainers.spec, speedup))

    def players(self, spaces: Spaces, spec: NetworkSpec) -> InProcessPlayers | ActorPlayers | None:
        """Return the players of the episodes of evaluations; None without evaluations."""
        config = self.config
        run = config.run
        if run.eval_every is None:
            return None
        if self.session is not None:
            return self._ray_players(self._player(spaces, spec), self.session)
        players = [self._player(spaces, spec, number) for number in range(config.evaluators)]
        in_process = InProcessPlayers(
            players,
            run.eval_episodes,
            run.eval_timeout_s,
            self.stop.interruptible,
            hang_line(config),
        )
        return self.stack.enter_context(closing(in_process))

    def _player(self, spaces: Spaces, spec: NetworkSpec, number: int = 0) -> EpisodePlayer:
        """Return a player of episodes, whose environment has this number among those of evaluations."""
        config = self.config
        run = config.run
        settings = PlaySettings(
            run.seed, deterministic=not run.eval_stochastic, info_keys=config.info_keys
        )
        acting_for: ActingFor = PolicyActingFor(spaces, spec, settings)
        if run.baseline is not None:
            acting_for = _with_baseline(acting_for, run.baseline, settings)
        player = EpisodePlayer(
            replace(config.env, env_kwargs=config.env_kwargs | run.eval_env_kwargs),
            acting_for,
            settings,
            config.num_samplers,
            config.layout,
        )
        player.number = number
        return player

    def _ray_players(self, player: EpisodePlayer, session: RaySession) -> ActorPlayers:
        from dppo.transports.ray.evaluating import players_on_ray

        players = players_on_ray(player, session, play_limits(self.config), self.logs)
        return self.stack.enter_context(closing(players))

    def core_use(self) -> CoreUse | None:
        """Return a meter that measures from now on how busy the cores are; None if actors run on other machines."""
        if self.session is None or not self.session.started_here:
            return None
        from dppo.transports.ray.core_use import CoreUse

        return CoreUse(self.session.demand.num_actors)


def play_limits(config: Config) -> PlayLimits:
    """Return the limits of evaluations on actors: a call takes at most the longest timeout, as no phase is measured."""
    from dppo.engine.patience import SETTINGS
    from dppo.engine.playing import PlayLimits
    from dppo.engine.slots import ENDING_S

    phases_s = [getattr(config.actors, name) or 0.0 for name in SETTINGS.values()]
    return PlayLimits(
        episodes=config.eval_episodes,
        num_actors=config.eval_actors,
        timeout_s=config.eval_timeout_s,
        hung_s=max(config.segment_timeout_s, *phases_s),
        licence_s=0.0 if config.licences is None else ENDING_S,
    )


def _with_baseline(acting_for: ActingFor, baseline: Any, settings: PlaySettings) -> ActingFor:
    """Return a function that makes the player of a policy's or of the baseline's episodes."""
    from dppo.policies.controller import Controller
    from dppo.policies.controller_acting import acting_for_both, controller_acting_for

    controller = Controller(baseline, "baseline")
    # sampled actions of a controller would follow from no seed
    controller_for = controller_acting_for(controller, replace(settings, deterministic=True))
    return acting_for_both(acting_for, controller_for)
