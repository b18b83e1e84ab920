"""The instances of an environment that is examined: their calls are timed, and their first answers are stored."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dppo.config import Config
from dppo.envs.closing import close_all
from dppo.envs.instance import Instance
from dppo.envs.kinds import joint_kind
from dppo.envs.make import make_env
from dppo.envs.state_files import StatePlace
from dppo.files import make_scratch_dir
from dppo.hosts.sampler_builder import BuiltSampler, build_sampler
from dppo.records.files.run_files import LOCK
from dppo.tools.doctor.playing import plan_of
from dppo.tools.doctor.process import ProcessWatch

# stored answers: a first segment, and the steps that are checked as the first steps of a run
MAX_STORED_ANSWERS = 18
# number of samplers with which no step counts as a first step, in which a fault ends a run
NO_FIRST_STEPS: Any = math.inf


class Instances:
    """The instances of one process, by number."""

    def __init__(
        self, config: Config, on_call: Mapping[str, Callable[[], Any]], process: ProcessWatch
    ) -> None:
        """Prepare; `on_call["step"]` is called before a step, `on_call["done"]` after a constructor."""
        self._config = config
        self._on_call = on_call
        self._process = process
        self._envs = dict[int, Any]()
        self._newest_answer = ""  # name of the call whose answer was stored last
        self.seconds: dict[str, list[float]] = {"make": [], "reset": [], "step": []}
        self.answers: dict[str, list[Any]] = {"reset": [], "step": []}
        self.cpu_s = 0.0
        """CPU seconds of this process in resets and steps."""
        self.env_mb = 0.0
        """Memory that the newest instance took that replaced no other, without the network, which is built later."""
        self.has_sub_envs = False
        """True if an instance steps several sub-environments at once."""
        self._folders = ExitStack()
        # in place of a run folder
        lock = Path(make_scratch_dir(self._folders), LOCK)
        lock.touch()
        self._state_place = StatePlace(lock, b"", 1, config.env.state_folder)

    def sampler(self, number: int, sampler_id: int = 0) -> BuiltSampler:
        """Return a sampler of the instance with this number, which is made if it is not there, and after a fault."""
        existing = [self._envs[number]] if number in self._envs else []

        def make(**env_kwargs: Any) -> Any:
            if existing:
                return existing.pop()
            return self._make(number, env_kwargs)

        num_sub_envs = self._config.envs_per_sampler if self.has_sub_envs else 1
        plan = plan_of(self._config, make, NO_FIRST_STEPS, num_sub_envs)
        return build_sampler(replace(plan, state_place=self._state_place), sampler_id)

    def first(self) -> Any:
        """Return instance 0; make it again if it was discarded."""
        if 0 not in self._envs:
            self.sampler(0)
        return self._envs[0]

    def last(self) -> Any:
        return self._envs[max(self._envs)]

    def forget(self) -> None:
        """Forget the instances, which have been closed."""
        self._envs.clear()

    def discard(self, number: int) -> None:
        """Close an instance, which may be broken; another one is made when it is needed."""
        close_all([self._envs.pop(number)])

    def close(self) -> None:
        """Close all instances."""
        close_all(list(self._envs.values()))
        self._folders.close()

    def _make(self, number: int, env_kwargs: dict[str, Any]) -> Any:
        """Make an instance in the place of an earlier one with this number, which has failed, if there is one."""
        failed = self._envs.pop(number, None)
        usage_before = None
        # a measurement reads the table of all processes, and a failed instance may still hold memory
        if failed is None:
            usage_before = self._process.usage()
        instance = Instance(
            seed=self._config.seed,
            num_sub_envs=self._config.envs_per_sampler,
            layout=self._config.layout,
        )
        make = partial(self._call, "make", make_env, self._config.env_id, env_kwargs)
        try:
            env = make(instance)
        except Exception:
            if number == 0:
                raise
            # instance 0 may hold the port of sampler 0
            env = make(replace(instance, sampler_id=number))
        self._envs[number] = env
        self._on_call["done"]()  # from here on, it is not the constructor that takes long
        if usage_before is not None:
            self.env_mb = max(0.0, self._process.usage().mb - usage_before.mb)
        self.has_sub_envs = joint_kind(env) is not None
        for name in self.answers:
            setattr(env, name, partial(self._call, name, getattr(env, name)))
        return env

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "make" and self._newest_answer:  # a fault: what was returned last was invalid
            self.answers[self._newest_answer].pop()
        self._newest_answer = ""
        self._on_call[name]()
        cpu_began = time.process_time()
        began = time.perf_counter()
        try:
            answer = method(*args, **kwargs)
        finally:
            self.seconds[name].append(time.perf_counter() - began)
            if name in self.answers:
                self.cpu_s += time.process_time() - cpu_began
        if (
            isinstance(answer, tuple)
            and not self.has_sub_envs
            and len(self.answers[name]) < MAX_STORED_ANSWERS
        ):
            self.answers[name].append((deepcopy(answer[0]), *answer[1:]))
            self._newest_answer = name
        return answer
