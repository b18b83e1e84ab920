"""Examine an environment in a process of its own, which another one watches: it may hang, die, or print megabytes.

`python -m dppo.tools.doctor.examination DESCRIPTOR` reads JSON from stdin, and writes lines to the descriptor: `m`
before a constructor and `d` after it, `r` before a reset, `s` before a step, facts as JSON objects, and stacks of
threads.
"""

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import cycle
from multiprocessing import resource_tracker
from statistics import median
from typing import Any

import numpy as np
import psutil

from dppo.config import Config, plain_settings
from dppo.config.memory import batch_memory_in_words
from dppo.config.plain import plain
from dppo.config.resolve import facts_of, resolve
from dppo.engine.ledger import ReplayLedger
from dppo.envs.checks.faults import gymnasium_says
from dppo.envs.closing import close_all
from dppo.envs.instance import Instance
from dppo.envs.kinds import joint_kind
from dppo.envs.make import make_env
from dppo.envs.statistics import running_statistics
from dppo.errors import ConfigError, DppoError, EnvironmentFault
from dppo.hosts.builders import build_sampler
from dppo.hosts.plans import trainer_plan
from dppo.numerics.portable import limit_blas
from dppo.policies.policy import spaces_summary
from dppo.ppo.acting.sampler import PPOSampler
from dppo.ppo.exchange.records import Experience, PolicySnapshot
from dppo.ppo.exchange.statistics import no_statistics
from dppo.ppo.networks.choice import choose_network
from dppo.process_state.borders import dppo_computes, forget_notes, take_changes
from dppo.signals import StopSignals
from dppo.spaces.actions import clipped_off_centre, describe_rescaling
from dppo.spaces.spaces import leaves
from dppo.tools.doctor.playing import (
    WITH_SECOND,
    agreement,
    global_state,
    guarded,
    in_order,
    plan_of,
    restored,
    segments,
    spread,
    steps_of,
)
from dppo.transports.in_process import InProcessCollector
from dppo.transports.ray.pickling import pack
from dppo.user_code import in_a_line

FIRST, LATER, MOST = 16, 64, 10_000  # steps of the first segment, of later ones, of all
KEPT = FIRST + 2  # answers to be played back: of steps that were checked as the first of a run are
CHECKED = 12  # resets, and as many steps, of Gymnasium's checker
ELSEWHERE_S = 30.0  # for another process to make an instance
MOST_MB = 1024  # growth that ends playing
NO_FIRST: Any = math.inf  # samplers of a run, of which no step is among the first ones, where a fault ends it


class Examination:
    """Finds the facts about an environment; each stage leaves some of the time to the next ones."""

    def __init__(
        self, config: Config, seconds: float, report: Callable[..., Any], on_call: Mapping[str, Callable[[], Any]]
    ) -> None:
        """Prepare; `report` takes new facts as keywords, `on_call["step"]` is called before a step."""
        self._config = replace(config, on_env_fault="auto") if config.on_env_fault == "raise" else config
        self._report, self._on_call, self._envs = report, on_call, dict[int, Any]()
        self._until, self._cpu_s, self._joint, self._newest = time.monotonic() + seconds, 0.0, False, ""
        self._seconds: dict[str, list[float]] = {"make": [], "reset": [], "step": []}
        self._kept: dict[str, list[Any]] = {"reset": [], "step": []}
        self._me, self._threads, self._state = psutil.Process(), threading.active_count(), global_state()
        forget_notes()
        self._before = set(self._me.children(recursive=True))

    def run(self, sizes: Sequence[int] = ()) -> None:
        """Examine all; with the `sizes` of the segments of an earlier examination, only repeat these segments."""
        try:
            sampler = self._make()
            trace, used = self._play(sampler, sizes)
            if not sizes:
                if all(self._kept.values()) or self._joint:
                    self._iterate()
                self._compare(trace, used)
        except (Exception, SystemExit) as error:  # of the environment, or of a setting
            self._report(error=str(error) if isinstance(error, DppoError) else in_a_line(error))
        self._report(stage="closing")
        began = time.monotonic()
        close_all([*self._envs.values()])
        self._report(close_s=time.monotonic() - began, left=self._usage()[2])

    def _left(self, share: float) -> float:  # the end of a stage that may take this share of the time left
        return share * self._until + (1 - share) * time.monotonic()

    def _new(self, number: int, **env_kwargs: Any) -> Any:
        """Make an instance in the place of an earlier one with this number, which has failed, if there is one."""
        self._envs.pop(number, None)
        instance = Instance(seed=self._config.seed, num_rows=self._config.envs_per_sampler)
        before = self._usage()[0]
        make = partial(self._call, "make", make_env, self._config.env_id, env_kwargs)
        try:
            env = self._envs[number] = make(instance)
        except Exception:
            if number == 0:
                raise
            env = self._envs[number] = make(
                replace(instance, sampler_id=number)
            )  # the first one may hold the port of that place
        self._on_call["done"]()  # from here on, it is not the constructor that takes long
        self._env_mb = max(0.0, self._usage()[0] - before)  # without that of the network, which is built later
        self._joint = joint_kind(env) is not None
        for name in self._kept:
            setattr(env, name, partial(self._call, name, getattr(env, name)))
        return env

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "make" and self._newest:  # a fault: what was returned last was invalid
            self._kept[self._newest].pop()
        self._newest = ""
        self._on_call[name]()
        cpu, began = time.process_time(), time.perf_counter()
        try:
            answer = method(*args, **kwargs)
        finally:
            self._seconds[name].append(time.perf_counter() - began)
            self._cpu_s += (time.process_time() - cpu) * (name in self._kept)
        if isinstance(answer, tuple) and not self._joint and len(self._kept[name]) < KEPT:
            self._kept[name].append((deepcopy(answer[0]), *answer[1:]))
            self._newest = name
        return answer

    def _sampler(self, number: int, sampler_id: int = 0) -> PPOSampler:
        """Return a sampler of the instance with this number, which is made if it is not there, and after a fault."""
        held = [self._envs[number]] if number in self._envs else []

        def make(**env_kwargs: Any) -> Any:
            return held.pop() if held else self._new(number, **env_kwargs)

        rows = self._config.envs_per_sampler if self._joint else 1
        built = build_sampler(plan_of(self._config, make, NO_FIRST, rows), sampler_id)
        self._spaces, self._group = built.spaces, built.envs
        return built.sampler

    def _make(self) -> PPOSampler:
        self._report(stage="making")
        try:
            sampler = self._sampler(0)
        except ConfigError:
            if not self._joint:
                raise
            self._envs.clear()  # closed, as it has several rows
            sampler = self._sampler(0)
        rows, self._make_s, children = sampler.envs.num_envs, self._seconds["make"][0], self._usage()[2]
        self._report(
            make_s=self._make_s, env_mb=self._env_mb / rows, changed_by_making=self._changes(),
            threads=threading.active_count() - self._threads, children=children,
            spaces=spaces_summary(self._spaces) + f", in each of {rows} rows" * self._joint,
            statistics=running_statistics(self._group.rows.envs[0].env),
            network=str(choose_network(self._config.network, self._spaces)), deterministic=self._spaces.deterministic,
            batch=batch_memory_in_words(self._config, self._spaces), **({"rows": rows} if self._joint else {}),
            rescaled=describe_rescaling(self._spaces.actions), off_centre=clipped_off_centre(self._spaces.actions),
        )  # fmt: skip
        return sampler

    def _play(self, sampler: PPOSampler, sizes: Sequence[int]) -> tuple[list[Any], list[int]]:
        """Let a policy that knows nothing play, through the sampler of a run with all of its checks."""
        self._report(stage="playing")
        began = time.monotonic()
        trace, incidents, observed = list[Any](), list[Any](), dict[str, tuple[str, float, float]]()
        memory, cpu, episodes, used = [(0, self._usage()[0])], self._usage()[1], list[Any](), list[int]()
        for report, segment in guarded(segments([sampler], sizes or self._sizes(self._left(0.35)))):
            used.append(len(segment.rewards))
            trace += steps_of(report, segment)
            episodes += report.episodes
            incidents += report.incidents
            if len(used) < 4 or len(used) % 8 == 0:  # it takes some milliseconds
                memory.append((len(trace), self._usage()[0]))
            for name, leaf in leaves(segment.obs).items():
                kind = "category" if name in self._spaces.categories else leaf.dtype.kind
                _, low, high = observed.get(name, (kind, np.inf, -np.inf))
                observed[name] = kind, min(low, float(leaf.min())), max(high, float(leaf.max()))
            if memory[-1][1] - memory[0][1] > MOST_MB:
                break
        self._step_s = (time.monotonic() - began) / len(trace)
        wall, faults = sum(sum(self._seconds[name]) for name in self._kept), [one for one in incidents if one.fault]
        rewards = [reward for _, rewards, *_ in trace for reward in rewards]
        (at, mb), (last, end) = memory[(len(memory) + 1) // 2], memory[-1]  # growth that lasts, not that of a start
        own_mb = (KEPT + 3 * LATER) * self._spaces.obs.itemsize / 2**20  # answers and segments that this process holds
        self._report(
            **{call: spread(times) for call, times in self._seconds.items()}, steps=len(trace), sizes=used, trace=trace,
            busy=min(1.0, (self._cpu_s + self._usage()[1] - cpu) / wall), own_busy=min(1.0, self._cpu_s / wall),
            lengths=[one.length for one in episodes], returns=[one.episode_return for one in episodes],
            rewards=[min(rewards), max(rewards)], incidents=[one.message for one in incidents if not one.fault],
            observed=observed, faults=Counter(f"{one.fault.error} in {one.fault.phase}" for one in faults),
            first_fault=[f"{one.message}\n{one.fault.traceback}".rstrip() for one in faults[:1]],
            lost=sum(one.lost_steps for one in faults),
            leak_mb=1000 * (end - mb) / (last - at) if end - mb > 2 + own_mb else 0.0,
            changed_by_playing=self._changes(),
        )  # fmt: skip
        return trace, used

    def _sizes(self, until: float) -> Iterator[int]:
        """Yield sizes of segments until the time is up; the first shows how many steps there is time for."""
        began = time.monotonic()
        yield 2
        while 0 < (made := len(self._seconds["step"])) < MOST:
            most = int((until - time.monotonic()) * made / (time.monotonic() - began))
            if most < 1 and made > 2:
                return
            yield max(1, min(FIRST if made == 2 else LATER, most))

    def _compare(self, trace: list[Any], used: list[int]) -> None:
        """Play the same segments in other places, then ask Gymnasium's checker."""
        until = self._left(0.8)
        self._report(stage="comparing with other episodes")
        if not self._spaces.deterministic or until < time.monotonic() + self._make_s:
            return
        most = int((until - time.monotonic()) / 4 / self._step_s)
        sizes = [size for number, size in enumerate(used) if number == 0 or sum(used[: number + 1]) <= most]
        found = {"compared": sum(sizes), "same": {}, "unlike": []}
        self._report(sizes=sizes)

        def compare(where: str, *samplers: PPOSampler) -> None:
            again = (step for made in segments(samplers, sizes) for step in steps_of(*made))
            found.update(in_order(agreement(found, where, trace, again)))
            self._report(**found)

        compare("after other episodes", self._sampler(0))
        fresh = self._second()
        if fresh is not None:
            compare("in a new instance", fresh)
            compare("beside another instance", self._sampler(0), self._sampler(1, 1))
            self._report(state=restored(self._sampler(1), self._sampler(0)))
        self._ask_checker(self._envs[max(self._envs)])

    def _second(self) -> PPOSampler | None:
        """Return a sampler of a second instance; None if its process may not have one."""
        if self._config.samplers_per_actor == 1 and self._config.envs_per_sampler == 1:
            return None
        self._report(stage=WITH_SECOND)
        began = time.monotonic()
        try:
            fresh = self._sampler(1)
        except EnvironmentFault as fault:
            if not fault.in_constructor:
                raise
            self._report(single=fault.message.partition("raised ")[2].splitlines()[0], elsewhere=self._elsewhere())
            return None
        self._report(next_make_s=time.monotonic() - began)
        return fresh

    def _elsewhere(self) -> bool:
        """Return whether another process can make an instance while this one has its own."""
        from dppo.tools.doctor.watching import EXAMINATION, Watch

        self._report(stage="making a second instance in another process")
        wanted = {"settings": plain(plain_settings(self._config)), "seconds": ELSEWHERE_S, "sizes": [2]}
        facts = Watch(EXAMINATION, wanted, lambda stage: None).wait(ELSEWHERE_S)
        return "trace" in facts

    def _ask_checker(self, second: Any) -> None:
        """Ask Gymnasium's checker about an instance, and try to pickle it."""
        if not self._joint and CHECKED * sum(map(np.mean, self._seconds.values())) < self._until - time.monotonic():
            self._report(stage="asking Gymnasium's checker")
            self._report(gymnasium=gymnasium_says(second))
        del second.reset, second.step
        try:
            pack(second)
        except Exception as error:  # pickling may raise anything
            self._report(pickle=in_a_line(error))

    def _iterate(self) -> None:
        """Time collecting and updating with the settings of the run, and an environment that answers at once."""
        self._report(stage="updating")
        from dppo.learners.trainers import LocalTrainer

        config, until, times = self._config, self._left(0.4), list[tuple[float, float]]()
        env = self._envs[0]
        if self._joint:  # a row of it answers as a single environment does
            env = self._group.rows.envs[0].env
            obs, info = env.last_reset
            self._kept = {"reset": [env.last_reset], "step": [(obs, 0.0, False, False, info)]}
        resets, steps, before = cycle(self._kept["reset"]), cycle(self._kept["step"]), (env.reset, env.step)
        env.reset, env.step = lambda **_: next(resets), lambda _: next(steps)
        sizes = config.num_samplers, config.envs_per_sampler, config.sizes.sequence_length
        run_config, _ = resolve(config, facts_of(self._spaces.actions))
        collector = InProcessCollector(plan_of(config, lambda **_: env, *sizes), ReplayLedger(sizes[0], replay=False))
        trainer = LocalTrainer(trainer_plan(run_config), self._spaces)
        scale = 1.0 if config.norm_reward else None
        obs_scale = no_statistics(self._spaces, obs=config.norm_obs, returns=False).obs_scale()
        while len(times) < 2 or (len(times) < 6 and time.monotonic() + sum(times[-1]) < until):
            policy = PolicySnapshot(len(times), trainer.weights(), obs_scale)
            collector.request(policy, len(times))
            collected, began = collector.receive(StopSignals()), time.monotonic()
            trainer.update(Experience(collected.segments, policy, scale, len(times)))
            times.append((collected.collect_s, time.monotonic() - began))
        env.reset, env.step = before
        collect_s, update_s = (median(column) for column in zip(*times[1:], strict=True))
        self._report(collect_s=collect_s, update_s=config.reuse * update_s)

    def _usage(self) -> tuple[float, float, list[str]]:
        """Return the resident MB of this process and its children, the CPU seconds of these, and their names."""
        mb, cpu, names = self._me.memory_info().rss / 2**20, 0.0, list[str]()
        pythons = getattr(resource_tracker._resource_tracker, "_pid", None)  # of shared memory, until the process ends
        for child in set(self._me.children(recursive=True)) - self._before:
            if child.pid == pythons:
                continue
            with suppress(psutil.Error):
                mb, cpu = mb + child.memory_info().rss / 2**20, cpu + sum(child.cpu_times()[:2])
                names.append(child.name())
        return mb, cpu, names

    def _changes(self) -> list[str]:
        """Return the names of process-wide state that has changed since the last call."""
        before, self._state = self._state, global_state()
        names = [name for name, value in self._state.items() if before.get(name, value) != value]
        return [*names, *(name for change in take_changes() for name in change.names)]


@dppo_computes()
def main(to: int, wanted: dict[str, Any]) -> None:
    """Examine an environment, and report to the descriptor `to`."""
    os.set_inheritable(to, False)  # processes of a simulator must not keep it open
    faulthandler.enable(to)
    faulthandler.register(signal.SIGUSR1, to)

    def report(**facts: Any) -> None:
        line = json.dumps(facts, default=float).encode() + b"\n"
        while line:
            line = line[os.write(to, line) :]

    limit_blas(1)
    on_call = {name: partial(os.write, to, f"{name[0]}\n".encode()) for name in ("make", "done", "reset", "step")}
    Examination(Config(**wanted["settings"]), wanted["seconds"], report, on_call).run(wanted["sizes"])
    report(stage="over")


if __name__ == "__main__":
    main(int(sys.argv[1]), json.load(sys.stdin))
