"""What `scale.py --real` and `scale.py --costs` measure: the driver's costs with real actors on Ray, and those of rows.

The actors are those of a run, without torch: each hosts one sampler of CartPole whose steps sleep for log-normal times.
Segments take longer with more actors, so that the same number of answers arrive per second. The figures are CPU time of
the driver after a warm-up, so that other processes on the same cores hardly change them.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from measure import ours_environment, run_json

STEPS = 4  # of a segment
ANSWERS_PER_S = 250
WARM_UP, REPEATS, UPDATES = 3, 3, 3
ANSWERS = 600  # of a repeat, about
CALLS, ARGUMENTS = 200, (1000, 40_000, 90_000, 105_000, 130_000, 1_000_000, 30_000_000)
# hidden layers: 0.04, 0.14, 1 and 30 MB
POLICIES = ((64, 64), (130, 130), (350, 350), (1930, 1930))


def real(
    num_actors: int,
    *,
    lag: int = 1,
    hidden: Sequence[int] = (64, 64),
    by_reference: bool = False,
    pending: int = 0,
) -> dict[str, Any]:
    """Measure the driver with `num_actors` on Ray, in a process of its own.

    Args:
        hidden: sizes of the policy's hidden layers.
        pending: further calls that are never answered, in the place of as many actors.
    """
    work = {
        "num_actors": num_actors,
        "lag": lag,
        "hidden": list(hidden),
        "by_reference": by_reference,
    }
    work |= {"pending": pending}
    return run_json(
        [sys.executable, __file__, json.dumps(work)],
        ours_environment() | {"RAY_worker_niceness": "0"},
    )


def once(
    num_actors: int, lag: int, hidden: list[int], by_reference: bool, pending: int = 0
) -> dict[str, float]:
    """Start Ray and the actors, collect for a while, and return figures of the driver."""
    from dppo.config import Config
    from dppo.engine.ledger import ReplayLedger
    from dppo.hosts.plans import sampler_plan
    from dppo.ppo.exchange.records import PolicySnapshot
    from dppo.ppo.networks.choice import choose_network
    from dppo.signals import StopSignals
    from dppo.transports.ray.collecting import ActorFiles, collector_on_ray
    from dppo.transports.ray.session import RaySession, demand_of, store_bytes_for

    config = Config(
        env_id="bench_envs:uneven_cartpole",
        env_kwargs={"mean_s": num_actors / ANSWERS_PER_S / STEPS},
        num_actors=num_actors,
        num_samplers=num_actors,
        num_steps=STEPS,
        hidden_sizes=tuple(hidden),
        cpus_per_actor=0.01,
    )
    began = time.monotonic()
    store = store_bytes_for(num_actors * STEPS, 10**7)
    session = RaySession(
        config.actors,
        demand_of(config.actors, config.learners),
        store_bytes=store,
        notify=lambda text: None,
    )
    ray_s = time.monotonic() - began
    stop, ledger = StopSignals(), ReplayLedger(num_actors, replay=True, policy_lag=lag)
    files = ActorFiles(tempfile.gettempdir(), by_reference=by_reference)
    plan = sampler_plan(config)
    collector = collector_on_ray(plan, config.actors, ledger, session, files, lambda progress: None)
    began = time.monotonic()
    spaces = collector.describe(stop)
    first_s = time.monotonic() - began
    add_pending(collector, pending)
    weights = np.zeros(choose_network(config.network, spaces).spec.num_parameters, np.float32)
    asked, received = Spent(), Spent()
    for index in range(lag):
        collector.request(PolicySnapshot(0, weights), index)
    iterations, index, all_s = max(2, ANSWERS // num_actors), lag, 0.0
    rows: list[tuple[float, ...]] = []
    for repeat in range(REPEATS + 1):
        asked.seconds = received.seconds = 0.0
        cpu_s, since = time.process_time(), time.monotonic()
        count = iterations if repeat else WARM_UP
        for _ in range(count):
            asked.run(collector.request, PolicySnapshot(max(0, index - lag), weights), index)
            received.run(collector.receive, stop)
            all_s = all_s or time.monotonic() - began
            index += 1
        answers, cpu_s = count * num_actors, time.process_time() - cpu_s
        others_s = cpu_s - asked.seconds - received.seconds
        rate = answers / (time.monotonic() - since)
        rows.append(
            (*(1e6 * one / answers for one in (asked.seconds, received.seconds, others_s)), rate)
        )
    for _ in range(lag):
        collector.receive(stop)
    medians = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
    names = ("question_us", "answer_us", "other_threads_us", "answers_per_s")
    collector.close()
    session.close()
    starts = {"ray_s": ray_s, "first_question_s": first_s, "first_segments_s": all_s}
    return dict(zip(names, medians, strict=True)) | {"policy_mb": weights.nbytes / 1e6} | starts


def add_pending(collector: Any, number: int) -> None:
    """Let the transport expect the ends of calls that are queued behind one that does not end."""
    import ray

    from dppo.engine.messages import Process, Start

    if number == 0:
        return
    remote: Any = ray.remote(Sleeper)
    sleeper = remote.options(num_cpus=0, enable_task_events=False).remote()
    sleeper.sleep.remote()
    for at in range(number):
        collector._transport._expect(sleeper.sleep.remote(), Start(Process(10**6 + at, 1)))


class Sleeper:
    """An actor that does nothing for a day, or takes in arguments."""

    def sleep(self) -> None:
        time.sleep(86_400)

    def take(self, argument: Any) -> None:
        pass


def print_arguments() -> None:
    """Print the cost of arguments of some sizes, in each call or stored once, to the thread that calls."""
    from dppo.config import Actors, Learners
    from dppo.transports.ray.session import RaySession, demand_of

    actors = Actors(num_actors=1)
    demand = demand_of(actors, Learners())
    session = RaySession(actors, demand, store_bytes=512 * 2**20, notify=lambda text: None)
    import ray

    remote: Any = ray.remote(Sleeper)
    actor = remote.options(num_cpus=1, enable_task_events=False).remote()
    ray.get(actor.take.remote(None), timeout=60)

    def calls(argument: Any) -> float:
        spent, refs = Spent(), []
        for _ in range(CALLS):
            refs.append(spent.run(actor.take.remote, argument))
        ray.wait(refs, num_returns=CALLS, timeout=60)
        return 1e6 * spent.seconds / CALLS

    print(
        "bytes: microseconds of a call with them; of storing them once, also elapsed; of a call with a reference"
    )
    for size in ARGUMENTS:
        array, spent, began = np.zeros(size, np.uint8), Spent(), time.monotonic()
        ref = spent.run(ray.put, array)
        elapsed_s = time.monotonic() - began
        inline = calls(array.tobytes()) if size <= 10**6 else float("nan")
        print(
            f"{size:,}: {inline:.0f}; {1e6 * spent.seconds:.0f}, {1e6 * elapsed_s:.0f}; {calls(ref):.0f}",
            flush=True,
        )
    session.close()


class Spent:
    """CPU seconds of this thread in some calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        began = time.thread_time()
        result = call(*arguments, **named)
        self.seconds += time.thread_time() - began
        return result


def learner(num_samplers: int, num_steps: int, width: int) -> dict[str, float]:
    """Return CPU milliseconds of the learner in an iteration with the default settings: its parts, and their sum.

    Args:
        width: numbers of an observation.
    """
    import torch

    from dppo.config import Config
    from dppo.config.resolve import resolve
    from dppo.hosts.plans import trainer_plan
    from dppo.learners.trainers import LocalTrainer
    from dppo.ppo.exchange.inputs import no_statistics
    from dppo.ppo.learning.batch import make_batch
    from dppo.run.learner import PPOLearner
    from dppo.signals import StopSignals
    from dppo.spaces.actions import DiscreteActions
    from dppo.spaces.spaces import Spaces

    torch.set_num_threads(1)
    config = Config(
        env_id="CartPole-v1",
        num_samplers=num_samplers,
        num_steps=num_steps,
        total_timesteps=num_samplers * num_steps * (UPDATES + 1),
    )
    spaces = Spaces(np.dtype(("float32", (width,))), DiscreteActions(2))
    resolved, _ = resolve(config, action_dims=0)
    trainers, moments = (
        LocalTrainer(trainer_plan(resolved), spaces),
        no_statistics(spaces, obs=True, returns=True),
    )
    given: Any = Given(num_samplers, num_steps, width)
    loop = PPOLearner(given, trainers, given.ledger, moments)
    updating, whole = Spent(), Spent()
    trainers.update = partial(updating.run, trainers.update)  # type: ignore[method-assign]
    steps, found = loop.run(UPDATES + 1, StopSignals()), []
    for repeat in range(UPDATES + 1):
        updating.seconds = whole.seconds = 0.0
        whole.run(next, steps)
        batches = Spent()
        batches.run(
            make_batch, given.segments, loop.snapshot().obs_scale, 1.0, gamma=0.99, gae_lambda=0.95
        )
        if repeat:
            own_s = whole.seconds - updating.seconds
            found.append((batches.seconds, updating.seconds - batches.seconds, own_s))
    made, sgd, own = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
    return {"make_batch_ms": made, "sgd_ms": sgd, "learner_ms": own}


class Given:
    """A collector whose segments have been made beforehand."""

    def __init__(self, num_samplers: int, num_steps: int, width: int) -> None:
        from dppo.engine.ledger import ReplayLedger
        from dppo.ppo.exchange.records import SamplerCarry, Segment, SegmentReport
        from dppo.ppo.exchange.scales import Moments, Statistics

        rng, rows = np.random.default_rng(0), (num_steps, 1)
        one, episode = np.zeros(1), np.zeros(1, np.int64)
        carry = SamplerCarry(episode, one, episode, one, one.astype(np.uint32))
        self.ledger = ReplayLedger(num_samplers, replay=True)
        self.expected = None
        self._requests: list[Any] = []
        self.segments: list[Segment] = []
        self._reports: list[SegmentReport] = []
        for sampler in range(num_samplers):
            floats = rng.standard_normal((5, *rows)).astype(np.float32)
            done = rng.random(rows) < 0.01
            self.segments.append(
                Segment(
                    obs=rng.standard_normal((*rows, width)).astype(np.float32),
                    actions=rng.integers(2, size=rows),
                    logprobs=np.full(rows, -np.log(2), np.float32),
                    values=floats[0],
                    next_values=floats[1],
                    rewards=np.ones(rows),
                    terminated=done,
                    truncated=np.zeros(rows, bool),
                    valid=np.ones(rows, bool),
                )
            )
            seen = Statistics(
                Moments.of(self.segments[-1].obs.reshape(-1, width)), Moments.of(floats[2].ravel())
            )
            self._reports.append(
                SegmentReport(sampler, 0, 0, num_steps, carry, (episode,), (), seen)
            )

    def request(self, policy: Any, index: int) -> None:
        self._requests.append((policy, index))

    def receive(self, stop: Any) -> Any:
        from dppo.engine.collector import Collected

        policy, index = self._requests.pop(0)
        return Collected(index, policy, self._reports, self.segments, {}, 1.0)


if __name__ == "__main__":
    print(json.dumps(once(**json.loads(sys.argv[1]))))
