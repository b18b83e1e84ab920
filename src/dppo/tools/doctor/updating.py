"""Times of acting and of updates, with an environment that takes none."""

import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

from dppo.config import Config
from dppo.config.resolve import facts_of, resolve
from dppo.config.ways import WAYS, suits_sac
from dppo.engine.ledger import ReplayLedger
from dppo.hosts.plans import trainer_plan
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import Experience, PolicySnapshot
from dppo.signals import StopSignals
from dppo.spaces.actions import BoxActions
from dppo.spaces.spaces import Spaces, is_image
from dppo.tools.doctor.playing import plan_of
from dppo.transports.in_process import InProcessCollector

MAX_ITERATIONS = 6
MAX_GRADIENT_STEPS = 256  # gradient steps of soft actor-critic in a timed iteration


def iteration_times(config: Config, env: Any, spaces: Spaces, until: float) -> dict[str, float]:
    """Return the median seconds of collecting an iteration and of its update, for facts."""
    _warm_up, *times = _iterations(config, env, spaces, until)
    collect_s = median(collect_s for collect_s, _ in times)
    update_s = median(update_s for _, update_s in times)
    return {"collect_s": collect_s, "update_s": config.reuse * update_s}


def times_of_algorithms(
    config: Config, env: Any, spaces: Spaces, until: float
) -> dict[str, dict[str, float]]:
    """Return the times of other algorithms that a run in this environment could use, by their name.

    Long updates are measured in part.
    """
    times = {}
    for way in WAYS:
        changed = way.within(config)
        actions = spaces.actions
        if way.algo == config.algo or changed is None or not _suits_sac(spaces):
            continue
        assert isinstance(actions, BoxActions)
        per_step = min(changed.gradient_steps, MAX_GRADIENT_STEPS / changed.batch_size)
        measured = replace(changed, learning_starts=0, gradient_steps=per_step)
        squashed_actions = replace(actions, bounds="squash")
        squashed = replace(spaces, actions=squashed_actions)
        of_algorithm = iteration_times(measured, env, squashed, until)
        of_algorithm["update_s"] *= changed.gradient_steps / per_step
        times[way.algo] = of_algorithm
    return times


def _suits_sac(spaces: Spaces) -> bool:
    leaves = spaces.of_network().leaves().values()
    has_images = any(map(is_image, leaves))
    return suits_sac(spaces.actions) and not has_images


def _iterations(
    config: Config, env: Any, spaces: Spaces, until: float
) -> Iterator[tuple[float, float]]:
    """Yield the seconds of collecting and updating of iterations until the time is up, at least of two."""
    from dppo.learners.trainers import LocalTrainer

    sizes = (config.num_samplers, config.envs_per_sampler, config.sizes.sequence_length)
    plan = plan_of(config, lambda **_: env, *sizes)
    ledger = ReplayLedger(config.num_samplers, replay=False)
    collector = InProcessCollector(plan, ledger)
    run_config, _ = resolve(config, facts_of(spaces.actions))
    trainer = LocalTrainer(trainer_plan(run_config), spaces)
    reward_scale = 1.0 if config.norm_reward else None
    obs_scale = no_statistics(spaces, obs=config.norm_obs, returns=False).obs_scale()
    last_s = 0.0
    for iteration in range(MAX_ITERATIONS):
        if iteration >= 2 and time.monotonic() + last_s >= until:
            return
        policy = PolicySnapshot(iteration, trainer.weights(), obs_scale)
        collector.request(policy, iteration)
        collected = collector.receive(StopSignals())
        began = time.monotonic()
        experience = Experience(collected.segments, policy, reward_scale, iteration)
        trainer.update(experience)
        update_s = time.monotonic() - began
        yield collected.collect_s, update_s
        last_s = collected.collect_s + update_s
