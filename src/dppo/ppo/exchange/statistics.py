"""Running moments of observations and returns, from which the learner makes scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dppo.ppo.exchange.inputs import normalized_part
from dppo.ppo.exchange.moments import Moments
from dppo.ppo.exchange.scales import ObsScale
from dppo.spaces.spaces import Spaces


@dataclass(frozen=True, slots=True)
class Statistics:
    """Moments of observations and of discounted returns; None for a normalizer that is off.

    The moments of observations do not change within an iteration: a segment and the update that uses it are normalized
    alike, which keeps the first probability ratio at one.
    """

    obs: Moments | None = None
    returns: Moments | None = None
    obs_names: tuple[str, ...] | None = None
    """Names of the leaves that `obs` measures, of several; None: all that hold floats."""

    def merged(self, segments: list[Statistics]) -> Statistics:
        """Return these statistics merged with those of an iteration's segments, in the order given."""
        obs = self.obs
        returns = self.returns
        for segment in segments:
            if obs is not None and segment.obs is not None:
                obs = obs.merge(segment.obs)
            if returns is not None and segment.returns is not None:
                returns = returns.merge(segment.returns)
        return replace(self, obs=obs, returns=returns)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the statistics as named arrays, for a checkpoint."""
        arrays: dict[str, np.ndarray] = {}
        for name, moments in self._moments().items():
            arrays[f"{name}.count"] = np.asarray(moments.count)
            arrays[f"{name}.mean"] = np.asarray(moments.mean)
            arrays[f"{name}.m2"] = np.asarray(moments.m2)
        return arrays

    def loaded(self, arrays: dict[str, np.ndarray]) -> Statistics:
        """Return the statistics stored in `arrays`, for the normalizers that are on here; ValueError if they misfit."""
        loaded: dict[str, Any] = {}
        for name, moments in self._moments().items():
            count = np.asarray(arrays[f"{name}.count"], np.float64)
            mean = np.asarray(arrays[f"{name}.mean"], np.float64)
            m2 = np.asarray(arrays[f"{name}.m2"], np.float64)
            fits = mean.shape == m2.shape == moments.mean.shape
            if not fits or not count >= 0 or (m2 < 0).any():
                raise ValueError(f"{name} has statistics of {count} samples of shape {mean.shape}")
            loaded[name] = Moments(float(count), mean, m2)
        return replace(self, **loaded)

    def _moments(self) -> dict[str, Moments]:
        named = {"obs": self.obs, "returns": self.returns}
        return {name: moments for name, moments in named.items() if moments is not None}

    def obs_scale(self) -> ObsScale | None:
        """Return the scale of observations; None if they are not normalized."""
        if self.obs is None:
            return None
        mean, std = self.obs.mean_and_std()
        return ObsScale(mean, std, self.obs_names)

    def reward_scale(self) -> float | None:
        """Return the divisor of rewards: the standard deviation of the discounted return (detail 30)."""
        if self.returns is None:
            return None
        _, std = self.returns.mean_and_std()
        return float(std)


def no_statistics(spaces: Spaces, *, obs: bool, returns: bool) -> Statistics:
    """Return the statistics of a new run that normalizes observations, as far as they are floats, and returns."""
    network_spaces = spaces.of_network()
    shape = normalized_part(np.zeros(1, network_spaces.obs), spaces.normalized).shape[1:]
    has_several_leaves = network_spaces.obs.names is not None
    is_continuous = 0 not in shape and (has_several_leaves or network_spaces.is_vector)
    return Statistics(
        obs=Moments.empty(shape) if obs and is_continuous else None,
        returns=Moments.empty(()) if returns else None,
        obs_names=spaces.normalized,
    )
