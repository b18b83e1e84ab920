"""Collect on Ray: the engine's limits from the settings of a run, and the actors that host its samplers."""

from dataclasses import dataclass, replace

from dppo.config.parts import Actors
from dppo.engine.actor_collector import ActorCollector
from dppo.engine.collector import OnProgress
from dppo.engine.engine import CollectionEngine
from dppo.engine.hosting import shares
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import Limits
from dppo.engine.patience import SETTINGS
from dppo.errors import ConfigError
from dppo.hosts.plans import SamplerPlan
from dppo.transports.ray.actor import PPOActor
from dppo.transports.ray.actor_class import ActorClass
from dppo.transports.ray.pickling import pack_code, packed_model
from dppo.transports.ray.session import RaySession
from dppo.transports.ray.transport import ActorKind, RayTransport

JOIN_S = 20.0  # longest start of a joining actor, before others host its samplers


@dataclass(frozen=True, slots=True)
class ActorFiles:
    """Receivers of the data of actors."""

    logs: str
    """Folder of their logs on this node."""
    by_reference: bool = False
    """True if the arrays of segments stay with Ray, for learners that fetch them from the actors."""


def collector_on_ray(
    plan: SamplerPlan,
    actors: Actors,
    ledger: ReplayLedger,
    session: RaySession,
    files: ActorFiles,
    on_progress: OnProgress,
) -> ActorCollector:
    """Return a collector whose actors run on Ray.

    Raise ConfigError if the environment or the user's network cannot be pickled.
    """
    limits = _limits(plan, actors, session)
    samplers = shares(plan.sampling.num_samplers, session.demand.num_actors)
    engine = CollectionEngine(samplers, ledger, limits)
    link = session.link("actors")
    transport = RayTransport(_kind(plan, session, files), session.demand, link, session.pool)
    return ActorCollector(
        engine,
        transport,
        on_progress,
        batch_size=plan.sampling.batch_size,
        envs_of_sampler=plan.sampling.envs_of_sampler,
        clock=link.clock.patience,
    )


def _limits(plan: SamplerPlan, actors: Actors, session: RaySession) -> Limits:
    limits = Limits(
        segment_timeout_s=actors.segment_timeout_s,
        max_actor_restarts=actors.max_actor_restarts,
        backup_requests=actors.backup_requests,
        phase_timeouts_s={name: getattr(actors, name) for name in SETTINGS.values()},
        samplers_per_actor=actors.samplers_per_actor,
        most_hosted=plan.sampling.most_hosted,
        start_s=plan.sampling.start_s,
        resumed_at=plan.resumed_at,
    )
    if session.pool is None:
        return limits
    num_samplers = plan.sampling.num_samplers
    fewest, most = actors.actor_bounds
    return replace(
        limits,
        elastic=True,
        start_timeout_s=JOIN_S,
        fewest_actors=max(fewest, actors.fewest_for(num_samplers)),
        most_actors=min(most, num_samplers),
    )


def _kind(plan: SamplerPlan, session: RaySession, files: ActorFiles) -> ActorKind:
    """Pickle the plan, and the user's network, which it does not contain."""
    model = packed_model(plan.network.model)
    try:
        packed_plan = pack_code(replace(plan, network=replace(plan.network, model=None)))
    except Exception as error:  # pickling a user's object may raise anything
        raise ConfigError(
            f"env_id={plan.env.env_name}: cannot be sent to actors: {error}. Pass module:factory, or a function "
            f"that holds no open files, locks or simulators."
        ) from None
    options = session.options
    if plan.sampling.env_threads:
        # Threads take up the next question while others are at this one; `close` is not to wait for any.
        options = options | {"max_concurrency": plan.sampling.lag + 2}
    return ActorKind(
        name="actor",
        classes=[ActorClass(PPOActor, group, options) for group in session.demand.groups],
        arguments=lambda actor_id: (packed_plan, model),
        logs=files.logs,
        by_reference=files.by_reference,
        seed=plan.seed,
    )
