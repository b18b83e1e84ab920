"""Simulators with configurable latency, for demonstrations and benchmarks: `dppo/SlowCartPole-v0`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from dppo.streams import Stream, generator

SLOW_CARTPOLE = "dppo/SlowCartPole-v0"
DEFAULT_CV = 0.5  # mild jitter, like that of ML-Agents and CARLA
DEFAULT_SPIKE_PROBABILITY = 0.01  # one step in 100 takes 50 times as long, like those of SUMO and MineRL
DEFAULT_SPIKE_FACTOR = 50.0


def check_number(setting: str, value: Any, why: str, least: float, most: float = math.inf) -> float:
    """Return `value` as a float.

    Raises:
        ValueError: it is not a finite number in [least, most].
    """
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        limit = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise ValueError(f"{setting}={value!r}: {why} must be a finite number {limit}.")
    return float(value)


def check_choice(setting: str, value: Any, known: tuple[str, ...]) -> None:
    """Check that `value` is one of `known`.

    Raises:
        ValueError: it is not.
    """
    if value not in known:
        raise ValueError(f"{setting}={value!r}: must be one of {', '.join(known)}.")


@dataclass(frozen=True, slots=True)
class Latency:
    """Distribution of a simulator's step time, with mean `step_s` in seconds."""

    step_s: float
    distribution: str = "constant"
    cv: float | None = None
    """Coefficient of variation (standard deviation over mean) of the log-normal distribution."""
    spike_probability: float | None = None
    """Share of slow steps."""
    spike_factor: float | None = None
    """Duration of a slow step, in durations of another."""

    def __post_init__(self) -> None:
        check_choice("distribution", self.distribution, ("constant", "lognormal", "spikes"))
        check_number("step_s", self.step_s, "the mean time of a step in seconds", 0)
        for setting, law, why, least, most in (
            ("cv", "lognormal", "standard deviation over mean", 0, math.inf),
            ("spike_probability", "spikes", "the share of slow steps", 0, 1),
            ("spike_factor", "spikes", "the duration of a slow step in durations of another", 1, math.inf),
        ):
            value = getattr(self, setting)
            if value is None:
                continue
            if self.distribution != law:
                raise ValueError(
                    f"{setting}={value!r} has no effect: distribution is {self.distribution!r}. "
                    f"Leave it out, or use distribution={law!r}."
                )
            check_number(setting, value, why, least, most)

    def draw(self, rng: np.random.Generator) -> float:
        """Draw a step time in seconds.

        log-normal:  exp(N(mu, sigma)), sigma^2 = ln(1 + cv^2), mu = ln(step_s) - sigma^2 / 2
        spikes:      base, or base * factor with probability p, where base = step_s / (1 + p * (factor - 1))
        """
        if self.distribution == "constant" or self.step_s == 0:
            return self.step_s
        if self.distribution == "lognormal":
            variance = math.log1p((DEFAULT_CV if self.cv is None else self.cv) ** 2)
            return float(rng.lognormal(math.log(self.step_s) - variance / 2, math.sqrt(variance)))
        share = DEFAULT_SPIKE_PROBABILITY if self.spike_probability is None else self.spike_probability
        factor = DEFAULT_SPIKE_FACTOR if self.spike_factor is None else self.spike_factor
        base = self.step_s / (1 + share * (factor - 1))
        return base * factor if rng.random() < share else base


class SlowSimulator(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Slow an environment down to a given latency, and change nothing else.

    Step times come from a stream of their own, which the seed of a reset restarts. So they are reproducible, and do not
    affect the randomness of the environment.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], latency: Latency, reset_s: float = 0.0, burn: bool = False
    ) -> None:
        check_number("reset_s", reset_s, "the time of a reset in seconds", 0)
        if not isinstance(burn, bool):
            raise ValueError(f"burn={burn!r}: must be true (use CPU) or false (sleep).")
        super().__init__(env)
        self._latency, self._reset_s, self._burn = latency, float(reset_s), burn
        self._clock = time.thread_time if burn else time.perf_counter
        self._latencies = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, in at least `reset_s` seconds."""
        started = self._clock()
        if seed is not None:
            self._latencies = generator(seed, Stream.SIMULATION)
        result = self.env.reset(seed=seed, options=options)
        self._spend(self._reset_s, started)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, in at least the time drawn for this step."""
        started = self._clock()
        result = self.env.step(action)
        self._spend(self._latency.draw(self._latencies), started)
        return result

    def _spend(self, seconds: float, started: float) -> None:
        """Sleep, or use this thread's CPU, for the rest of `seconds` since `started`."""
        if not self._burn:
            time.sleep(max(0.0, seconds - (self._clock() - started)))
        while self._burn and self._clock() - started < seconds:
            pass


def slow_cartpole(
    *,
    step_s: float = 0.003,
    distribution: str = "constant",
    cv: float | None = None,
    spike_probability: float | None = None,
    spike_factor: float | None = None,
    reset_s: float = 0.0,
    burn: bool = False,
    render_mode: str | None = None,
) -> SlowSimulator:
    """Return CartPole with a simulated latency: deterministic in everything but time.

    Args:
        step_s: mean time of a step in seconds, dynamics included.
        distribution: "constant", "lognormal" (with `cv`), or "spikes" (with `spike_probability` and
            `spike_factor`).
        reset_s: time of a reset in seconds.
        burn: use CPU instead of sleeping; times are then CPU times.

    Raises:
        ValueError: a number is out of range, or has no effect with this distribution.
    """
    latency = Latency(step_s, distribution, cv, spike_probability, spike_factor)
    return SlowSimulator(CartPoleEnv(render_mode=render_mode), latency, reset_s, burn)


def register() -> None:
    """Register `dppo/SlowCartPole-v0` with Gymnasium, once, with the time limit of CartPole-v1."""
    if SLOW_CARTPOLE not in gymnasium.registry:
        gymnasium.register(SLOW_CARTPOLE, entry_point="dppo.envs.simulated:slow_cartpole", max_episode_steps=500)
