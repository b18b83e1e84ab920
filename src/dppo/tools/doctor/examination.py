"""Examine an environment in a process of its own, which may hang, die, or print megabytes; another process watches it.

`python -m dppo.tools.doctor.examination DESCRIPTOR` reads JSON from stdin, and writes lines to the descriptor: `m`
before a constructor and `d` after it, `r` before a reset, `s` before a step, facts as JSON objects, and stacks of
threads.
"""

import atexit
import faulthandler
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, cycle
from typing import Any

import numpy as np

from dppo.config import Config, plain_settings
from dppo.config.memory import batch_memory_in_words
from dppo.config.plain import plain
from dppo.envs.checks.faults import gymnasium_warnings
from dppo.envs.statistics import running_statistics
from dppo.errors import ConfigError, DppoError, EnvironmentFault
from dppo.hosts.sac import networks_in_words
from dppo.hosts.sampler_builder import BuiltSampler
from dppo.machine import usable_cores
from dppo.numerics.arithmetic import limit_blas
from dppo.policies.policy import spaces_summary
from dppo.ppo.acting.sampler import PPOSampler
from dppo.process_state.borders import dppo_computes, guarded_steps
from dppo.spaces.actions import boxes
from dppo.spaces.bounds import bounds_described
from dppo.spaces.spaces import Spaces
from dppo.tools.doctor.controllers import (
    ask_baseline,
    check_names,
    play_controllers,
    reason_to_leave_out,
)
from dppo.tools.doctor.instances import MAX_STORED_ANSWERS, Instances
from dppo.tools.doctor.needed import fails_mostly
from dppo.tools.doctor.playing import (
    FIRST_SIZES,
    WITH_SECOND,
    Played,
    difference_after_restoring,
    guard_each,
    segments,
    spread,
    steps_of,
)
from dppo.tools.doctor.process import (
    CoreClock,
    ProcessWatch,
    release_unused_memory,
    threads_that_hold_the_process,
)
from dppo.tools.doctor.repetitions import nothing_repeated, with_repetition
from dppo.tools.doctor.updating import facts_of_algorithms, iteration_times
from dppo.transports.ray.pickling import pack
from dppo.user_code import in_a_line

# Shares of the time left that stages may take. The environment is examined first, and updates are timed last.
PLAY_SHARE = 0.35
CONTROLLERS_SHARE = 0.4
# with a baseline, by which the user asks for returns
PLAY_SHARE_WITH_BASELINE = 0.15
CONTROLLERS_SHARE_WITH_BASELINE = 0.75
COMPARE_SHARE = 0.6
ITERATE_SHARE = 0.5  # for the algorithm of the settings; others get the rest
LEAST_S = 1.0  # seconds that each check of the environment gets, also when the time is up
START_SHARE = 0.5  # share of the time that starting this process may take from the examination

FIRST_STEPS, SECOND_STEPS = FIRST_SIZES  # the time of the first shows how many steps can follow
LATER_STEPS = 64
MAX_STEPS = 10_000
REPETITIONS = 4  # samplers that repeat the segments in `_compare`, at most
CALLS_OF_CHECKER = 12  # resets of Gymnasium's checker, which makes as many steps
ELSEWHERE_S = 30.0  # time limit of another process for making an instance
MAX_GROWTH_MB = 1024  # growth of memory that ends playing
# Measuring memory takes some milliseconds: measure after each of the first segments, later after every eighth.
MEMORY_EACH_SEGMENT = 3
MEMORY_EVERY = 8


class Examination:
    """Finds the facts about an environment; each stage leaves time for the stages after it."""

    def __init__(
        self,
        config: Config,
        seconds: float,
        report: Callable[..., Any],
        on_call: Mapping[str, Callable[[], Any]],
    ) -> None:
        """Prepare; `report` takes new facts as keywords, `on_call["step"]` is called before a step."""
        if config.on_env_fault == "raise":  # faults are counted, and playing goes on
            config = replace(config, on_env_fault="auto")
        self._config = config
        self._play_share = PLAY_SHARE
        self._controllers_share = CONTROLLERS_SHARE
        if config.baseline is not None:
            self._play_share = PLAY_SHARE_WITH_BASELINE
            self._controllers_share = CONTROLLERS_SHARE_WITH_BASELINE
        self._report = report
        self._until = time.monotonic() + seconds
        self._process = ProcessWatch()
        self._instances = Instances(self._config, on_call, self._process)

    def run(self, sizes: Sequence[int] = (), *, updates: bool = True) -> None:
        """Run all stages; with `sizes`, the segment sizes of an earlier examination, only repeat these segments.

        Exceptions of the environment, and of settings that do not fit it, are reported as facts.

        Args:
            updates: time updates, after everything else.
        """
        try:
            self._examine(sizes, updates)
        except (Exception, SystemExit) as error:  # user code may raise anything
            text = str(error) if isinstance(error, DppoError) else in_a_line(error)
            self._report(error=text)
        self._report(stage="closing")
        began = time.monotonic()
        self._instances.close()
        self._report(close_s=time.monotonic() - began, left=self._process.usage().children)

    def _examine(self, sizes: Sequence[int], updates: bool) -> None:
        built = self._make()
        began = time.monotonic()
        played = self._play(built, sizes)
        step_s = (time.monotonic() - began) / len(played.trace)
        try:
            if not sizes:
                self._play_controllers(built, played, step_s)
                self._compare(built.spaces, played, step_s)
        finally:
            env_steps = len(played.trace) * built.sampler.envs.num_envs
            faults = sum(incident.fault is not None for incident in played.incidents)
            self._iterate(built, updates and not fails_mostly(faults, env_steps))

    def _end_of_stage(self, share: float) -> float:
        """Return the time at which a stage must end if it may take `share` of the time left."""
        return share * self._until + (1 - share) * time.monotonic()

    def _end_of_check(self, share: float) -> float:
        """Return the time at which a check of the environment must end, which always gets some time."""
        return max(self._end_of_stage(share), time.monotonic() + LEAST_S)

    def _make(self) -> BuiltSampler:
        self._report(stage="making")
        check_names(self._config)
        try:
            built = self._instances.sampler(0)
        except ConfigError:
            if not self._instances.has_sub_envs:
                raise
            # the instance turned out to have sub-environments and was closed: make it again for them
            self._instances.forget()
            built = self._instances.sampler(0)
        spaces = built.spaces
        num_sub_envs = built.sampler.envs.num_envs
        summary = spaces_summary(spaces)
        if self._instances.has_sub_envs:
            summary += f", in each of {num_sub_envs} sub-environments"
            self._report(rows=num_sub_envs)
        process = self._process
        self._report(
            make_s=self._instances.seconds["make"][0],
            env_mb=self._instances.env_mb / num_sub_envs,
            changed_by_making=process.take_changes(),
            threads=process.new_threads(),
            packages=process.new_packages(self._instances.first()),
            children=process.usage().children,
            shared_cores=process.shared_cores(),
            spaces=summary,
            statistics=running_statistics(built.envs.sub_envs.envs[0].env),
            network=networks_in_words(self._config, spaces),
            deterministic=spaces.deterministic,
            batch=batch_memory_in_words(self._config, spaces),
            continuous=any(boxes(spaces.actions)),
            **bounds_described(spaces.actions),
        )
        return built

    def _play(self, built: BuiltSampler, sizes: Sequence[int]) -> Played:
        """Let an untrained policy play, through the sampler of a run with all of its checks."""
        self._report(stage="playing")
        num_sub_envs = built.sampler.envs.num_envs
        usage_before = self._process.usage()
        played = Played(memory=[(0, usage_before.mb)])
        core = CoreClock()
        sizes_to_play = sizes or self._segment_sizes(self._end_of_stage(self._play_share))
        for report, segment in guard_each(segments([built.sampler], sizes_to_play)):
            played.add(report, segment, built.spaces)
            num_segments = len(played.sizes)
            is_due = num_segments % MEMORY_EVERY == 0
            if is_due or num_segments <= MEMORY_EACH_SEGMENT:
                release_unused_memory()
                usage = self._process.usage()
                played.memory.append((len(played.trace) * num_sub_envs, usage.mb))
            if played.growth_mb() > MAX_GROWTH_MB:
                break
        self._report_share_of_cpu(usage_before.children_cpu_s, core.share())
        self._report_played(played, built.spaces, num_sub_envs)
        return played

    def _report_share_of_cpu(self, children_cpu_before_s: float, core_share: float) -> None:
        """Report how much the environment computes, without the time for which it wanted a core and had none."""
        instances = self._instances
        wall_s = sum(sum(instances.seconds[name]) for name in instances.answers)
        cpu_s = instances.cpu_s + self._process.usage().children_cpu_s - children_cpu_before_s
        quiet_s = max(wall_s - cpu_s * (1 / core_share - 1), min(wall_s, cpu_s))
        self._report(
            core_share=core_share,
            undisturbed=quiet_s / wall_s,
            busy=min(1.0, cpu_s / quiet_s),
            own_busy=min(1.0, instances.cpu_s / quiet_s),
        )

    def _report_played(self, played: Played, spaces: Spaces, num_sub_envs: int) -> None:
        instances = self._instances
        faults = [(incident, incident.fault) for incident in played.incidents if incident.fault]
        stored_rows = MAX_STORED_ANSWERS + 3 * LATER_STEPS
        stored_mb = stored_rows * num_sub_envs * spaces.obs.itemsize / 2**20
        self._report(
            **{call: spread(times) for call, times in instances.seconds.items()},
            steps=len(played.trace),
            sizes=played.sizes,
            trace=played.trace,
            lengths=[episode.length for episode in played.episodes],
            returns=[episode.episode_return for episode in played.episodes],
            rewards=[min(played.rewards), max(played.rewards)] if played.rewards else [],
            incidents=[incident.message for incident in played.incidents if not incident.fault],
            observed=played.observed,
            faults=Counter(f"{fault.error} in {fault.phase}" for _, fault in faults),
            first_fault=[
                f"{incident.message}\n{fault.traceback}".rstrip() for incident, fault in faults[:1]
            ],
            lost=sum(incident.lost_steps for incident, _ in faults),
            leak_mb=played.leak_mb(stored_mb),
            changed_by_playing=self._process.take_changes(),
        )

    def _play_controllers(self, built: BuiltSampler, played: Played, step_s: float) -> None:
        """Play some episodes with zero, random and baseline actions, unless they fail or take too long."""
        config = self._config
        if self._instances.has_sub_envs:
            return
        if any(incident.fault for incident in played.incidents):
            if config.baseline is not None:
                self._report(controllers_left_out="the environment failed while a policy played")
            return
        until = self._end_of_check(self._controllers_share)
        lengths = [episode.length for episode in played.episodes]
        share = (1 - self._play_share) * self._controllers_share
        left_out = reason_to_leave_out(lengths, len(played.trace), step_s, until, share, config)
        if left_out:
            self._report(controllers_left_out=left_out)
            if config.baseline is None:
                return
            self._report(stage="asking the baseline")
        else:
            self._report(stage="playing controllers")
        env = built.envs.sub_envs.envs[0].env
        with guarded_steps("a step or reset"):
            facts = ask_baseline(env, config) if left_out else play_controllers(env, config, until)
        self._report(**facts)
        if "controllers_failed" in facts:
            self._instances.discard(0)

    def _segment_sizes(self, until: float) -> Iterator[int]:
        """Yield sizes of segments until the time is up; the first segments show how many steps there is time for."""
        began = time.monotonic()
        yield FIRST_STEPS
        while True:
            steps = len(self._instances.seconds["step"])
            if not 0 < steps < MAX_STEPS:
                return
            now = time.monotonic()
            affordable = int((until - now) * steps / (now - began))
            if affordable < 1 and steps > FIRST_STEPS:
                return
            size = LATER_STEPS
            if steps == FIRST_STEPS:
                size = SECOND_STEPS
            yield max(1, min(size, affordable))

    def _compare(self, spaces: Spaces, played: Played, step_s: float) -> None:
        """Repeat the segments after other episodes and in other instances, then run Gymnasium's checker."""
        until = self._end_of_check(COMPARE_SHARE)
        self._report(stage="comparing with other episodes")
        if not spaces.deterministic:
            return
        make_s = self._instances.seconds["make"][0]
        if until < time.monotonic() + make_s:
            return
        affordable = int((until - time.monotonic()) / REPETITIONS / step_s)
        affordable = max(affordable, played.sizes[0])
        ends = accumulate(played.sizes)
        sizes = [size for size, end in zip(played.sizes, ends, strict=True) if end <= affordable]
        facts = nothing_repeated(sum(sizes))
        self._report(sizes=sizes)

        def compare(place: str, *samplers: PPOSampler) -> None:
            steps = (
                step
                for report_and_segment in segments(samplers, sizes)
                for step in steps_of(*report_and_segment)
            )
            facts.update(with_repetition(facts, place, played.trace, steps))
            self._report(**facts)

        instances = self._instances
        compare("after other episodes", instances.sampler(0).sampler)
        second = self._second()
        if second is not None:
            compare("in a new instance", second)
            first = instances.sampler(0).sampler
            compare("beside another instance", first, instances.sampler(1, 1).sampler)
            first = instances.sampler(0).sampler
            second_sampler = instances.sampler(1).sampler
            second_sampler.num_steps = second.num_steps
            self._report(state=difference_after_restoring(second_sampler, first))
        self._ask_checker(instances.last(), spaces)

    def _second(self) -> PPOSampler | None:
        """Return the sampler of a second instance; None if one process or this machine cannot have two."""
        if self._config.samplers_per_actor == 1 and self._config.envs_per_sampler == 1:
            return None
        if 2 * self._config.layout.cores > usable_cores():
            return None
        self._report(stage=WITH_SECOND)
        began = time.monotonic()
        try:
            second = self._instances.sampler(1).sampler
        except EnvironmentFault as fault:
            if not fault.in_constructor:
                raise
            reason = fault.message.partition("raised ")[2].splitlines()[0]
            self._report(single=reason, elsewhere=self._elsewhere())
            return None
        self._report(next_make_s=time.monotonic() - began)
        return second

    def _elsewhere(self) -> bool:
        """Return whether another process can make an instance while this one has its own."""
        from dppo.tools.doctor.watching import examine_apart

        self._report(stage="making a second instance in another process")
        settings = plain(plain_settings(self._config))
        return "trace" in examine_apart(settings, ELSEWHERE_S, [FIRST_STEPS])

    def _ask_checker(self, env: Any, spaces: Spaces) -> None:
        """Run Gymnasium's checker on an instance if there is time, and try to pickle the instance.

        The checker takes actions that a mask does not allow, so environments with masks are not checked.
        """
        call_s = sum(float(np.mean(times)) for times in self._instances.seconds.values())
        has_time = CALLS_OF_CHECKER * call_s < self._until - time.monotonic()
        if has_time and spaces.mask is None and not self._instances.has_sub_envs:
            self._report(stage="asking Gymnasium's checker")
            self._report(gymnasium=gymnasium_warnings(env))
        # remove the wrappers of `Instances`, so that only the instance itself is pickled
        del env.reset, env.step
        try:
            pack(env)
        except Exception as error:  # pickling may raise anything
            self._report(pickle=in_a_line(error))

    def _iterate(self, built: BuiltSampler, updates: bool) -> None:
        """Time collecting and updating with the settings of the run; the environment returns stored answers at once."""
        answers = self._instances.answers
        has_answers = all(answers.values()) or self._instances.has_sub_envs
        if not updates or not has_answers:
            return
        self._report(stage="updating")
        env = self._instances.first()
        if self._instances.has_sub_envs:  # the first stands for a single environment
            env = built.envs.sub_envs.envs[0].env
            obs, info = env.last_reset
            step = (obs, 0.0, False, False, info)
            answers = {"reset": [env.last_reset], "step": [step]}
        reset_method = env.reset
        step_method = env.step
        resets = cycle(answers["reset"])
        steps = cycle(answers["step"])
        env.reset = lambda **_: next(resets)
        env.step = lambda _: next(steps)
        core = CoreClock()
        until = self._end_of_stage(ITERATE_SHARE)
        self._report(**iteration_times(self._config, env, built.spaces, until))
        algorithms = facts_of_algorithms(self._config, env, built.spaces, self._until)
        self._report(algorithms=algorithms, core_share_of_updates=core.share())
        env.reset = reset_method
        env.step = step_method


@dppo_computes()
def main(descriptor: int, request: dict[str, Any]) -> None:
    """Examine the environment of `request["settings"]`; write the facts to the file descriptor."""
    os.set_inheritable(descriptor, False)  # processes of a simulator must not keep it open
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGUSR1, descriptor)

    def report(**facts: Any) -> None:
        line = json.dumps(facts, default=float).encode() + b"\n"
        while line:
            written = os.write(descriptor, line)
            line = line[written:]

    limit_blas(1)
    on_call = {}
    for name in ("make", "done", "reset", "step"):
        on_call[name] = partial(os.write, descriptor, f"{name[0]}\n".encode())
    config = Config(**request["settings"])
    seconds = request["seconds"]
    start_s = time.time() - request["asked_at"]
    seconds -= min(max(0.0, start_s), START_SHARE * seconds)
    examination = Examination(config, seconds, report, on_call)
    examination.run(request["sizes"], updates=request["updates"])
    atexit.register(report, threads_ended=True)  # Python joins threads before
    report(stage="over", threads_left=threads_that_hold_the_process())


if __name__ == "__main__":
    main(int(sys.argv[1]), json.load(sys.stdin))
