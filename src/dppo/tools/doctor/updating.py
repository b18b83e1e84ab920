"""Times of acting and of updates, with an environment that takes none."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from dppo.config import Config
from dppo.config.resolve import resolve
from dppo.config.ways import WAYS, suits_sac
from dppo.engine.ledger import ReplayLedger
from dppo.hosts.plans import trainer_plan
from dppo.hosts.sac import networks_in_words
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import Experience, PolicySnapshot
from dppo.signals import StopSignals
from dppo.spaces.actions import BoxActions, continuous_width
from dppo.spaces.bounds import bounds_described
from dppo.spaces.spaces import Spaces, is_image
from dppo.tools.doctor.playing import plan_of
from dppo.tools.doctor.speed import Facts
from dppo.transports.in_process import InProcessCollector

MAX_ITERATIONS = 6
UPDATE_SHARE = 0.3  # of the time left, for an update; a longer one is measured in part
SUMS_OF_SAC = 3  # sums of gradients in a step: critics, policy, temperature
MAX_GRADIENT_STEPS = 256  # gradient steps of soft actor-critic in a timed iteration


def iteration_times(config: Config, env: Any, spaces: Spaces, until: float) -> dict[str, float]:
    """Return the median seconds of collecting an iteration and of its update, for facts.

    These are seconds of CPU time, unless a GPU learns: other work on the machine does not change them. Updates that
    take longer than there is time are measured in part.
    """
    config = _without_a_start(config)
    _warm_up, *times = _iterations(config, env, spaces, until)
    collect_s = median(collect_s for collect_s, _ in times)
    update_s = median(update_s for _, update_s in times)
    return {"collect_s": collect_s, "update_s": config.reuse * update_s}


def _without_a_start(config: Config) -> Config:
    """Return settings with which the first iterations are like all later ones: no controller acts, and SGD begins."""
    changes: dict[str, Any] = {"prior": None, "prior_steps": None, "prior_noise": None}
    if config.algo == "sac":
        changes["learning_starts"] = 0
    return replace(config, **changes)


def facts_of_algorithms(config: Config, env: Any, spaces: Spaces, until: float) -> dict[str, Facts]:
    """Return the facts that differ with other algorithms that a run here could use, by their name.

    Long updates are measured in part.
    """
    facts = dict[str, Facts]()
    for way in WAYS:
        changed = way.within(config)
        actions = spaces.actions
        if way.algo == config.algo or changed is None or not _suits_sac(spaces):
            continue
        assert isinstance(actions, BoxActions)
        per_step = min(changed.gradient_steps, MAX_GRADIENT_STEPS / changed.batch_size)
        measured = replace(changed, gradient_steps=per_step)
        squashed_actions = replace(actions, bounds="squash")
        squashed = replace(spaces, actions=squashed_actions)
        algorithm_facts: Facts = {**iteration_times(measured, env, squashed, until)}
        algorithm_facts["update_s"] *= changed.gradient_steps / per_step
        algorithm_facts["network"] = networks_in_words(changed, squashed)
        facts[way.algo] = algorithm_facts | bounds_described(squashed_actions)
    return facts


def _suits_sac(spaces: Spaces) -> bool:
    leaves = spaces.of_network().leaves().values()
    has_images = any(map(is_image, leaves))
    return suits_sac(spaces.actions) and not has_images


def _iterations(
    config: Config, env: Any, spaces: Spaces, until: float
) -> Iterator[tuple[float, float]]:
    """Yield the seconds of collecting and updating of iterations until the time is up, at least of two."""
    from dppo.learners.trainers import LocalTrainer
    from dppo.tools.doctor.sgd_clock import SGDClock

    sizes = (config.num_samplers, config.envs_per_sampler, config.sizes.sequence_length)
    plan = plan_of(config, lambda **_: env, *sizes)
    # the stored answers of the environment have no state
    plan = replace(plan, env=replace(plan.env, env_state="off"))
    ledger = ReplayLedger(config.num_samplers, replay=False)
    collector = InProcessCollector(plan, ledger)
    run_config, _ = resolve(config, continuous_width(spaces.actions))
    sgd = SGDClock()
    trainer = LocalTrainer(trainer_plan(run_config), spaces, sgd)
    if trainer.device.type != "cpu":
        sgd.seconds = time.perf_counter
    reward_scale = 1.0 if config.norm_reward else None
    obs_scale = no_statistics(spaces, obs=config.norm_obs, returns=False).obs_scale()
    last_s = 0.0
    for iteration in range(MAX_ITERATIONS):
        if iteration >= 2 and time.monotonic() + last_s >= until:
            return
        began = time.monotonic()
        cpu_began = time.thread_time()
        policy = PolicySnapshot(iteration, trainer.weights(), obs_scale)
        collector.request(policy, iteration)
        collected = collector.receive(StopSignals())
        collect_s = time.thread_time() - cpu_began
        experience = Experience(collected.segments, policy, reward_scale, iteration)
        update_until = time.monotonic() + UPDATE_SHARE * (until - time.monotonic())
        update = partial(trainer.update, experience)
        update_s = sgd.measure(update, _sums(run_config, iteration), update_until)
        yield collect_s, update_s
        last_s = time.monotonic() - began


def _sums(config: Config, iteration: int) -> int:
    """Return the sums of gradients in an update, of which there is one for each set of weights in a step of SGD."""
    if config.algo == "sac":
        return SUMS_OF_SAC * int(config.batch_size * config.gradient_steps)
    assert config.update_epochs is not None
    iterations_of_batch = min(iteration + 1, config.reuse)
    return config.update_epochs * config.sizes.minibatches_per_epoch * iterations_of_batch
