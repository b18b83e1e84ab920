"""A trained policy, without torch and without Ray."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from dppo.config.aliases import MODEL_METHODS, no_attribute
from dppo.config.arguments import with_answers
from dppo.config.groups import flattened
from dppo.envs.checks.masks import check_allows, checked_masks
from dppo.envs.checks.observations import check_inside
from dppo.envs.checks.returned import BadResult, leaf_packer, packer
from dppo.errors import counted
from dppo.policies.described import network_summary
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.networks.network import NetworkOutputs, NetworkSpec
from dppo.records.comparison import BaselineComparison
from dppo.spaces.spaces import MASK, Spaces, dtype_summary, leaves, masks_of, parts_of, row_of

ACT = (
    "Use act(obs), which returns the most likely action, or act(obs, generator=np.random.default_rng(1)), which "
    "samples, or outputs(obs) for logits and values."
)
ELSEWHERE = {
    **MODEL_METHODS,
    "predict": ACT,
    "get_action": ACT,
    "get_action_and_value": ACT,
    "compute_single_action": ACT,
    "forward": ACT,
    "get_value": ACT,
    "predict_values": ACT,
    "evaluate_actions": ACT,
    "observation_space": "Use spaces, which describes observations and actions.",
    "action_space": "Use spaces, which describes observations and actions.",
}
"""Attributes in other libraries, and what to use here."""


class Policy:
    """A trained policy: turns observations into actions of the environment's own action space."""

    def __init__(
        self, spaces: Spaces, agent: PPOAgent, snapshot: PolicySnapshot, state: dict[str, Any]
    ) -> None:
        self.spaces = spaces
        self.weights = snapshot.weights
        """[P] all parameters, flat."""
        self.state = state
        """The checkpoint's description of itself: iteration, global_step, config, versions."""
        self.comparison: BaselineComparison | None = None
        """Difference between the best evaluation of the run and the baseline; None without a baseline."""
        self.spec = agent.spec
        self.obs_scale = snapshot.obs_scale
        self._snapshot = snapshot
        self._agent = agent
        self._agent.load(snapshot)

    def __repr__(self) -> str:
        """Show environment, spaces, network, number of parameters and training iteration in one line."""
        config = self.state.get("config")
        env = "?"
        if isinstance(config, dict):
            env = config.get("env_id", "?")
        return (
            f"Policy({env}: {spaces_summary(self.spaces)}; {network_summary(self._agent.spec)}, "
            f"{counted(self.weights.size, 'parameter')}; iteration {self.state['iteration']})"
        )

    def __reduce__(self) -> Any:
        """Pickle what the policy is made from: its layers are classes of their own, which pickle does not find."""
        return made_from, (self.spaces, self.spec, self._snapshot, self.state, self.comparison)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> NoReturn:
            """Answer a method that other libraries have."""
            raise no_attribute(self, name, ELSEWHERE)

    @property
    def state_size(self) -> int:
        """Size of the memory's state; 0 without memory."""
        return self._agent.state_size

    @with_answers
    def act(
        self,
        obs: Any,
        state: np.ndarray | None = None,
        *,
        action_mask: Any = None,
        generator: np.random.Generator | None = None,
    ) -> Any:
        """Return the action for one observation [*O], or actions for a batch of observations [n, *O].

        In a batch of a Dict or a Tuple space, each leaf has the axis n in front, also in the actions. A policy with
        memory returns a pair of action and state, and takes this state with the next observation.

        Args:
            state: of the memory, [state_size], or [n, state_size] for a batch; None starts an episode.
            action_mask: the allowed choices, [M] or [n, M], or in the form in which the environment returns them, with
                the axis n in front of each array of a batch. Only for a policy that was trained with masks from
                `info["action_mask"]` or `env.action_masks()`.
            generator: sample the action from the policy with it; None takes the most likely action.

        Raise ValueError if `obs` is not an observation of the environment: another shape or kind of number, a number
        that is not finite or does not fit its dtype, an invalid category; or `action_mask` is missing, allows nothing,
        or is not used by this policy; or `state` does not fit, or there is no memory.
        """
        rows, states, single = self._stored(obs, state, action_mask)
        actions, outputs = self.decide(rows, states, generator)
        if single:
            outputs = _first(outputs)
            action = self.spaces.actions.each(actions)[0]
        else:
            action = self.spaces.actions.to_env(actions)
        if outputs.state is None:
            return action
        return action, outputs.state

    @with_answers
    def outputs(
        self, obs: Any, state: np.ndarray | None = None, *, action_mask: Any = None
    ) -> NetworkOutputs:
        """Return the network's outputs for one observation or a batch: head, values, and the next state or None.

        The head holds masked logits, or means and then logs of deviations, before the bounds. Values are in units of
        scaled rewards; NaN with algo=sac, which has none, and with critic_obs. Args and errors are those of `act`.
        """
        rows, states, single = self._stored(obs, state, action_mask)
        outputs = self._agent.outputs(rows, states)
        if self.spaces.critic_obs or settings_of(self).get("algo") == "sac":
            outputs = outputs._replace(values=np.full_like(outputs.values, np.nan))
        if single:
            outputs = _first(outputs)
        return outputs

    def _stored(
        self, obs: Any, state: np.ndarray | None, action_mask: Any
    ) -> tuple[np.ndarray, np.ndarray | None, bool]:
        """Return observations [n] as stored, states [n, S] or None, and whether `obs` is a single one; see `act`."""
        rows, single = _rows_of(obs, self.spaces)
        states = self._before(state, len(rows), single=single)
        self._check_mask_argument(action_mask)
        return self._with_masks(rows, action_mask, single=single), states, single

    @property
    def _takes_masks(self) -> bool:
        """True if masks are passed separately, not as a part of observations."""
        return self.spaces.mask in ("method", "info")

    def start(self, rows: int) -> np.ndarray | None:
        """Return the state [rows, S] with which episodes start; None without memory."""
        if not self.state_size:
            return None
        return self._agent.start(rows)

    def decide(
        self,
        rows: np.ndarray,
        states: np.ndarray | None,
        generator: np.random.Generator | None = None,
    ) -> tuple[np.ndarray, NetworkOutputs]:
        """Return actions, not brought into bounds, and the outputs, for observations as stored [n]; see `act`."""
        if generator is None:
            return self._agent.decide(rows, states)
        if not isinstance(generator, np.random.Generator):
            raise ValueError(
                f"generator={generator!r} is not a NumPy generator. Pass np.random.default_rng(1), and the same one "
                f"to each call."
            )
        noise = self._agent.distribution.noise(generator, 1, len(rows), self._agent.spec.dtype)[0]
        return self._agent.act(rows, noise, states)

    def _before(self, state: np.ndarray | None, rows: int, *, single: bool) -> np.ndarray | None:
        if state is None:
            return self.start(rows)
        if not self.state_size:
            if self._takes_masks:
                raise ValueError(
                    "state has no effect on this policy, which has no memory. Pass a mask by its name: action_mask=..."
                )
            raise ValueError(
                "this policy has no memory: act() returns the action alone. Leave state out."
            )
        expected = (self.state_size,) if single else (rows, self.state_size)
        state = np.asarray(state, self._agent.spec.dtype)
        if state.shape != expected:
            raise ValueError(
                f"state has shape {state.shape}. Pass that of the last act(), {expected}, or None."
            )
        return state.reshape(rows, -1)

    def _check_mask_argument(self, masks: Any) -> None:
        """Raise ValueError if masks are missing, or are given to a policy that does not take them."""
        if self._takes_masks and masks is None:
            source = 'info["action_mask"]'
            if self.spaces.mask == "method":
                source = "env.action_masks()"
            raise ValueError(
                f"action_mask is missing: this policy was trained with masks. Pass action_mask={source}."
            )
        if masks is not None and not self._takes_masks:
            why = "it was trained without masks"
            if self.spaces.mask:
                why = "it reads masks from the observation"
            raise ValueError(f"action_mask has no effect on this policy: {why}. Leave it out.")

    def _with_masks(self, rows: np.ndarray, masks: Any, *, single: bool) -> np.ndarray:
        """Return observations [n, *O] with their masks, as they are stored in training.

        Raise ValueError if a mask does not fit the actions, or allows none.
        """
        spaces = self.spaces
        try:
            if spaces.mask == "leaf":
                check_allows(masks_of(rows), spaces.actions)
            elif spaces.mask is not None:
                stored = np.empty(len(rows), spaces.obs)
                stored["obs"] = rows
                stored[MASK] = checked_masks(masks, () if single else (len(rows),), spaces.actions)
                rows = stored
        except BadResult as error:
            raise ValueError(f"action_mask is {error}.") from None
        return rows


def settings_of(policy: Policy) -> dict[str, Any]:
    return flattened(policy.state.get("config") or {})


def _first(outputs: NetworkOutputs) -> NetworkOutputs:
    return NetworkOutputs(*(part[0] for part in outputs if part is not None))


def _rows_of(obs: Any, spaces: Spaces) -> tuple[np.ndarray, bool]:
    """Return observations [n, *O] as they are stored in training, and whether `obs` is a single one.

    `obs`: an observation as an environment returns it, or a batch, whose leaves have one more axis in front. Raise
    ValueError, with the reason, if it is not an observation of `spaces`.
    """
    is_pair = isinstance(obs, tuple) and len(obs) == 2 and isinstance(obs[1], dict)
    if is_pair and "0" not in (spaces.returned.names or ()):
        raise ValueError(
            "obs is a pair of observation and info, as `reset` returns it. Pass the observation alone."
        )
    try:
        if spaces.returned.names is None:
            rows, single = _array_rows(obs, spaces.returned)
        else:
            rows, single = _packed_rows(obs, spaces.of_policy())
            if spaces.critic_obs:
                rows = _filled(rows, spaces.returned)
        limits = {}
        for name, category in spaces.categories.items():
            is_alternative = any(
                name.startswith(f"{choice}.") or not choice for choice in spaces.one_of
            )
            if not is_alternative:  # alternatives are zero where they are not chosen
                limits[name] = category.limits(leaves(spaces.returned)[name].shape)
        check_inside(limits, rows)
    except BadResult as error:
        raise ValueError(f"obs is {error}.") from None
    return rows, single


def _array_rows(obs: Any, leaf: np.dtype[Any]) -> tuple[np.ndarray, bool]:
    if isinstance(obs, Mapping):
        parts = ", ".join(map(repr, obs))
        raise ValueError(
            f"obs is a dict of {parts}, and this policy reads an array. Pass {leaf.shape}, or (n, "
            f"{', '.join(map(str, leaf.shape))}); of several agents, the observation of each."
        )
    shape = np.shape(obs)
    single = shape == leaf.shape
    if not single and shape[1:] != leaf.shape:
        raise ValueError(
            f"obs has shape {shape}. Pass {leaf.shape}, or (n, {', '.join(map(str, leaf.shape))})."
        )
    rows = leaf_packer(leaf.base, shape)(obs).astype(leaf.base, copy=False)
    return rows.reshape(-1, *leaf.shape), single


def _packed_rows(obs: Any, spaces: Spaces) -> tuple[np.ndarray, bool]:
    first = obs
    leaf = spaces.returned
    while leaf.names is not None:  # down to the first leaf, whose axes say whether there are many
        name = leaf.names[0]
        parts = parts_of(tuple(first) if isinstance(first, list) else first)
        first = dict(parts or ()).get(name)
        leaf = leaf[name]
    single = bool(spaces.one_of) or np.ndim(first) != len(leaf.shape) + 1
    pack = packer(spaces.returned, one_of=spaces.one_of, dropped=spaces.dropped)
    if single:
        return np.array([pack(obs)], spaces.returned), True
    try:
        obs_rows = [row_of(obs, index, spaces.dropped) for index in range(len(first))]
        names = leaves(spaces.returned)
        if len({len(rows) for name, rows in leaves(obs).items() if name in names}) > 1:
            raise IndexError
    except (IndexError, TypeError):
        raise BadResult(
            f"{len(first)} observations in one leaf, and another number in another"
        ) from None
    return np.array([pack(row) for row in obs_rows], spaces.returned), False


def _filled(rows: np.ndarray, obs: np.dtype[Any]) -> np.ndarray:
    """Return rows of the dtype `obs`, with zeros for the leaves that `rows` lack: only values depend on them."""
    filled = np.zeros(len(rows), obs)
    targets = leaves(filled)
    for name, leaf in leaves(rows).items():
        targets[name][...] = leaf
    return filled


def made_from(
    spaces: Spaces,
    spec: NetworkSpec,
    snapshot: PolicySnapshot,
    state: dict[str, Any],
    comparison: BaselineComparison | None,
) -> Policy:
    policy = Policy(spaces, PPOAgent(spec, spaces.mask), snapshot, state)
    policy.comparison = comparison
    return policy


def spaces_summary(spaces: Spaces) -> str:
    count = sum(sum(categories.counts) for categories in spaces.categories.values())
    text = f"obs {dtype_summary(spaces.of_network().obs)}"
    if count:
        text += f" of {count:,} categories"
    text += f", actions {spaces.actions}"
    sources = {"leaf": "the observation", "method": "action_masks()", "info": "info"}
    if spaces.mask:
        text += f" with masks from {sources[spaces.mask]}"
    return text
