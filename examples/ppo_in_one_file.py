"""Distributed PPO on one page: the algorithm of `dppo`, without the code that makes it fast, safe and distributed.

Read it from top to bottom. N samplers of E environments each collect a segment of T steps with the current
policy; the learner trains on all of them for K epochs; then it repeats. In `dppo` the samplers run in other
processes, possibly on other machines; here they take turns. The resulting weights are equal up to rounding;
tests/test_oracle.py compares them.

    python examples/ppo_in_one_file.py                          trains on CartPole-v1 in about half a minute
    python examples/ppo_in_one_file.py --env-id Acrobot-v1      trains on Acrobot-v1; --help lists all options

The algorithm: arXiv:1707.06347, algorithm 1. (#n) is detail n of "The 37 Implementation Details of Proximal
Policy Optimization" (ICLR Blog Track 2022). `Deviation:` marks differences from CleanRL's ppo.py.
"""

from __future__ import annotations

import argparse
import ast
import math
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal


@dataclass(frozen=True)
class Args:
    env_id: str = "CartPole-v1"  # a Gymnasium id, with Discrete or Box actions
    total_timesteps: int = 500_000  # env steps to train for, over all environments
    seed: int = 1  # seed of all randomness
    num_samplers: int = 8  # N
    envs_per_sampler: int = 1  # E
    num_steps: int = 64  # T, steps of one segment
    policy_lag: int = 0  # segment i is collected with policy max(0, i - lag): collecting need not wait for learning
    learning_rate: float = 3e-4  # Adam's step size at the start
    anneal_lr: bool = False  # decay the learning rate linearly to zero
    gamma: float = 0.99  # discount per env step
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    # K, passes over each batch; None: 20 with discrete actions and no lag, else 10
    update_epochs: int | None = None
    # most rows of a minibatch; None: 64, or a 32nd of a large batch
    minibatch_size: int | None = None
    # standardize advantages; None: unless actions are real and norm_reward is on
    norm_adv: bool | None = None
    # smallest deviation to divide by before the first reward, in the unit of norm_reward
    adv_floor: float = 0.1
    clip_coef: float = 0.2  # clipping range of the probability ratio
    clip_vloss: bool = False  # clip the value loss around the old value
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # limit of the gradient's global norm
    # stop the epochs when the KL exceeds this; 0: never; None: 0.04 with real actions
    target_kl: float | None = None
    norm_obs: bool = True  # normalize observations by their running mean and deviation
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return
    # hidden layers of the policy network, and of the value network
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: Literal["tanh", "relu"] = "tanh"  # between hidden layers
    dtype: Literal["float32", "float64"] = "float32"  # float64 is for comparing implementations


# ------------------------------------------------------------------------------------------- randomness
# Instead of carrying a generator along, each use has a stream of its own, named by its purpose. So it does not
# matter where or in which order streams are used: more actors change the time, but never the result.
WEIGHTS, EPISODES, ACTIONS, MINIBATCHES = range(4)


def stream(args: Args, *name: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(args.seed, spawn_key=name))


def seed_of(args: Args, *name: int) -> int:
    return int(np.random.SeedSequence(args.seed, spawn_key=name).generate_state(1)[0] >> 1)


# -------------------------------------------------------------------------------------------- the agent
class Moments:
    """Count, mean and sum of squared deviations of all samples so far."""

    def __init__(self, *shape: int) -> None:
        self.count, self.mean, self.m2 = 0, np.zeros(shape), np.zeros(shape)

    def std(self) -> np.ndarray:
        return np.sqrt(self.m2 / self.count + 1e-8) if self.count else np.ones_like(self.mean)

    def add(self, samples: np.ndarray) -> None:
        """Add samples [n, *shape], exactly (Chan, Golub, LeVeque 1979)."""
        n, mean = len(samples), samples.mean(axis=0)
        delta, total = mean - self.mean, self.count + n
        self.m2 = (
            self.m2
            + np.square(samples - mean).sum(axis=0)
            + np.square(delta) * self.count * n / total
        )
        self.mean = self.mean + delta * n / total
        self.count = total


def mlp(
    args: Args, sizes: tuple[int, ...], head_gain: float, generator: torch.Generator
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [
            nn.Linear(inputs, outputs),
            nn.Tanh() if args.activation == "tanh" else nn.ReLU(),
        ]
    layers.pop()  # no activation after the head
    for layer in layers[::2]:
        assert isinstance(layer, nn.Linear)
        gain = head_gain if layer is layers[-1] else math.sqrt(2)
        nn.init.orthogonal_(layer.weight, gain, generator)  # (#2)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers).to(getattr(torch, args.dtype))


class Agent:
    """Map observations to a distribution of actions, and to values."""

    def __init__(self, args: Args, obs_space: Any, action_space: Any) -> None:
        self.dtype, self.action_space = getattr(torch, args.dtype), action_space
        self.discrete = isinstance(action_space, gym.spaces.Discrete)
        self.outputs = int(action_space.n) if self.discrete else math.prod(action_space.shape)
        inputs = math.prod(obs_space.shape)
        generator = torch.Generator().manual_seed(seed_of(args, WEIGHTS))
        # Two separate networks (#13, #26); the small gain makes the first policy nearly uniform (#2).
        self.policy = mlp(args, (inputs, *args.hidden_sizes, self.outputs), 0.01, generator)
        self.value = mlp(args, (inputs, *args.hidden_sizes, 1), 1.0, generator)
        self.parameters: list[Tensor] = [*self.policy.parameters(), *self.value.parameters()]
        if not self.discrete:  # one standard deviation for all states, initially exp(0) = 1 (#24)
            start = -0.5 if self.outputs > 1 else 0.0  # our default; 0 in (#24)
            self.log_std = torch.full((self.outputs,), start, dtype=self.dtype, requires_grad=True)
            self.parameters.append(self.log_std)
        self.obs_moments = Moments(inputs) if args.norm_obs else None

    def see(self, obs: np.ndarray) -> Tensor:
        """Convert observations to network inputs: normalized (#28) and clipped (#29)."""
        x = torch.as_tensor(obs, dtype=self.dtype)
        if self.obs_moments is None:
            return x
        mean, std = torch.as_tensor(self.obs_moments.mean), torch.as_tensor(self.obs_moments.std())
        return ((x - mean.to(self.dtype)) / std.to(self.dtype)).clamp(-10, 10)

    def distribution(self, x: Tensor) -> Distribution:
        if self.discrete:
            return Categorical(logits=self.policy(x))
        return Independent(Normal(self.policy(x), self.log_std.exp()), 1)  # (#23), (#25)

    @torch.no_grad()
    def act(self, obs: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Sample actions [E, ...]. The argmax of logits plus Gumbel noise is a sample from their softmax."""
        policy, z = self.policy(self.see(obs)), torch.as_tensor(noise, dtype=self.dtype)
        actions: Tensor = (
            (policy + z).argmax(-1) if self.discrete else policy + self.log_std.exp() * z
        )
        return actions.numpy()

    def for_env(self, action: np.ndarray) -> Any:
        """Clip the action for the environment; the unclipped one is stored for the ratio (#27)."""
        if self.discrete:
            return int(self.action_space.start + action)
        low, high = self.action_space.low, self.action_space.high
        return np.clip(action.reshape(low.shape), low, high).astype(low.dtype)


# ------------------------------------------------------------------------------------------- collecting
class Segment(NamedTuple):
    """T steps of E environments. Row t of `obs` precedes action t; row t of the others follows it."""

    obs: np.ndarray  # [T, E, O] float32
    actions: np.ndarray  # [T, E] or [T, E, A]
    rewards: np.ndarray  # [T, E]
    terminated: np.ndarray  # [T, E] the episode ended in a terminal state
    truncated: np.ndarray  # [T, E] the episode was cut off by a time limit
    # [T, E, O] the result of the action; never the first observation of a new episode
    next_obs: np.ndarray
    discounted_returns: np.ndarray  # [T, E] running sums, to scale rewards


class Sampler:
    """E environments whose episodes continue from one segment to the next, as T is shorter than an episode (#1)."""

    def __init__(self, args: Args, index: int) -> None:
        self.args, self.index, E = args, index, args.envs_per_sampler
        self.envs: list[gym.Env[Any, Any]] = [gym.make(args.env_id) for _ in range(E)]
        self.episodes_begun = [0] * E
        self.obs = [self.reset(e) for e in range(E)]
        self.discounted_return, self.episode_return = [0.0] * E, [0.0] * E
        self.finished: list[float] = []  # the returns of episodes that ended

    def reset(self, e: int) -> np.ndarray:
        """Start an episode with a seed of its own, so that any episode can be replayed anywhere."""
        seed = seed_of(self.args, EPISODES, self.index, e, self.episodes_begun[e])
        self.episodes_begun[e] += 1
        return np.array(self.envs[e].reset(seed=seed)[0], np.float32).ravel()

    def collect(self, agent: Agent, iteration: int) -> Segment:
        T, E = self.args.num_steps, self.args.envs_per_sampler
        rng, shape = stream(self.args, ACTIONS, self.index, iteration), (T, E, agent.outputs)
        noise = rng.gumbel(size=shape) if agent.discrete else rng.standard_normal(shape)
        rows = []
        for t in range(T):
            actions = agent.act(np.stack(self.obs), noise[t])
            for e, (env, obs, action) in enumerate(zip(self.envs, self.obs, actions, strict=True)):
                raw_obs, reward, terminated, truncated, _ = env.step(agent.for_env(action))
                # a copy, because environments reuse theirs
                next_obs = np.array(raw_obs, np.float32).ravel()
                self.episode_return[e] += float(reward)
                self.discounted_return[e] = self.args.gamma * self.discounted_return[e] + float(
                    reward
                )
                discounted = self.discounted_return[e]
                rows.append(
                    (obs, action, float(reward), terminated, truncated, next_obs, discounted)
                )
                self.obs[e] = next_obs
                if terminated or truncated:  # the next row belongs to the new episode
                    self.finished.append(self.episode_return[e])
                    self.episode_return[e] = self.discounted_return[e] = 0.0
                    self.obs[e] = self.reset(e)
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        return Segment(*(column.reshape(T, E, *column.shape[1:]) for column in columns))


# --------------------------------------------------------------------------------------------- learning
def make_batch(
    args: Args, acted: Agent, agent: Agent, segments: list[Segment], reward_scale: np.ndarray
) -> list[Tensor]:
    """Return inputs, actions, log-probabilities, importance, values, advantages and returns, one row per step."""
    # Segments in the order of their samplers, not of their arrival: [T, N * E, ...].
    seg = Segment(*(np.concatenate(arrays, axis=1) for arrays in zip(*segments, strict=True)))
    x, next_x, actions = acted.see(seg.obs), acted.see(seg.next_obs), torch.as_tensor(seg.actions)
    with torch.no_grad():  # `dppo` computes the values while acting
        values, next_values = acted.value(x).squeeze(-1), acted.value(next_x).squeeze(-1)
        # Deviation: where an older policy has acted, ratios are measured from the one to update, and rows are weighted:
        # the decoupled objective (arXiv:2110.00641). Without lag both are the same policy, and all weights are one.
        logprobs = agent.distribution(x).log_prob(actions)
        importance = (logprobs - acted.distribution(x).log_prob(actions)).exp().clamp(max=2)
    # Rewards are scaled but not shifted (#30), and clipped (#31).
    scaled = np.clip(seg.rewards / reward_scale, -10, 10) if args.norm_reward else seg.rewards
    rewards = torch.as_tensor(scaled, dtype=agent.dtype)
    goes_on = torch.as_tensor(~seg.terminated, dtype=agent.dtype)
    same_episode = torch.as_tensor(~(seg.terminated | seg.truncated), dtype=agent.dtype)
    # Generalized advantage estimation (#5). Where a segment or a time limit cuts an episode, the value of the next
    # observation replaces the rewards that were not seen. Deviation: CleanRL treats a time limit as terminal.
    deltas = rewards + args.gamma * next_values * goes_on - values
    advantages, later = torch.zeros_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(args.num_steps)):
        advantages[t] = later = deltas[t] + args.gamma * args.gae_lambda * same_episode[t] * later
    returns = advantages + values  # the targets of the value network: TD(lambda) (#5)
    return [
        c.flatten(0, 1) for c in (x, actions, logprobs, importance, values, advantages, returns)
    ]


def update(
    args: Args,
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: list[Tensor],
    floor: float,
    i: int,
) -> float:
    """Train K epochs of minibatch SGD on the batch of iteration i; return the last approximate KL."""
    rng, clip = stream(args, MINIBATCHES, i), args.clip_coef
    rows = len(batch[0])
    num_minibatches = math.ceil(rows / (args.minibatch_size or max(64, rows // 32)))
    # Deviation: as real actions get precise, the same step of the weights changes the policy ever more.
    largest_kl = args.target_kl if args.target_kl is not None else 0.0 if agent.discrete else 0.04
    # Deviation: a batch that teaches little then changes little; standardized, its noise would count as much.
    keeps_unit = args.norm_reward and not agent.discrete
    standardizes = not keeps_unit if args.norm_adv is None else args.norm_adv
    for _ in range(args.update_epochs or (20 if agent.discrete and not args.policy_lag else 10)):
        # Each row once per epoch, in a new order (#6). Deviation: sizes differ by at most one, so none is left over.
        for chosen in np.array_split(rng.permutation(rows), num_minibatches):
            x, actions, old_logprobs, importance, old_values, advantages, returns = (
                c[chosen] for c in batch
            )
            if standardizes:  # within the minibatch, not the batch (#7)
                advantages = (advantages - advantages.mean()) / (
                    advantages.std().clamp(min=floor) + 1e-8
                )
            advantages = importance * advantages
            policy, values = agent.distribution(x), agent.value(x).squeeze(-1)
            logratio = policy.log_prob(actions) - old_logprobs
            ratio = logratio.exp()
            # The larger loss of the two: moving a ratio beyond the clip gains nothing (#8, the paper's eq. 7).
            policy_loss = torch.max(
                -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)
            ).mean()
            squared_error = (values - returns) ** 2
            if args.clip_vloss:  # Deviation: off by default, as ablations found no benefit (#9)
                clipped = old_values + (values - old_values).clamp(-clip, clip)
                squared_error = torch.max(squared_error, (clipped - returns) ** 2)
            value_loss, entropy = 0.5 * squared_error.mean(), policy.entropy().mean()
            # One loss for both networks (#10).
            loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
            optimizer.zero_grad()
            loss.backward()
            # of all parameters together (#11)
            nn.utils.clip_grad_norm_(agent.parameters, args.max_grad_norm)
            optimizer.step()
        # k3 of joschu.net/blog/kl-approx.html (#12)
        approx_kl = (ratio - 1 - logratio).mean().item()
        if largest_kl and approx_kl > largest_kl:
            break
    return approx_kl


def train(args: Args) -> tuple[np.ndarray, list[float]]:
    """Return the final weights (policy, value, log_std) as one vector, and the mean return after each iteration."""
    samplers = [Sampler(args, index) for index in range(args.num_samplers)]
    agent = Agent(args, samplers[0].envs[0].observation_space, samplers[0].envs[0].action_space)
    # torch has 1e-8 (#3)
    optimizer = torch.optim.Adam(agent.parameters, lr=args.learning_rate, eps=1e-5)
    return_moments = Moments()
    episode_returns: list[float] = []
    mean_returns: list[float] = []
    batch_size = args.num_samplers * args.envs_per_sampler * args.num_steps
    iterations = math.ceil(args.total_timesteps / batch_size)
    policies = deque[Agent](maxlen=args.policy_lag + 1)  # the newest ones; the first of them acts
    for i in range(iterations):
        if args.anneal_lr:  # (#4)
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - i / iterations)
        policies.append(deepcopy(agent))
        # this line is what `dppo` distributes
        segments = [sampler.collect(policies[0], i) for sampler in samplers]
        # Deviation: CleanRL updates statistics with every step, this code once per iteration. Rewards are scaled with
        # all returns so far (#30). The statistics of observations are updated after training, so that training sees
        # the same inputs as acting did, and the first ratio is one.
        for segment in segments:
            return_moments.add(segment.discounted_returns.ravel())
        batch = make_batch(args, policies[0], agent, segments, return_moments.std())
        # Deviation: where all rewards are equal and nothing terminates, as before the first reward, the deviation of
        # the advantages is that of noise. Divided by it, noise would become a signal.
        informed = (
            any(seg.terminated.any() for seg in segments)
            or np.ptp([seg.rewards for seg in segments]) > 0
        )
        floor = args.adv_floor if args.norm_reward and not informed else 0.0
        now, rewarded = args, any(seg.rewards.any() for seg in segments)
        # Deviation: before the first reward, a bonus keeps discrete actions open, as Adam divides by the size of noise.
        if agent.discrete and floor > 0 and not rewarded and args.norm_adv is not False:
            now = replace(
                args,
                ent_coef=args.ent_coef + 0.01 * max(0.0, 1 - 2 * float(batch[5].std()) / floor),
            )
        approx_kl = update(now, agent, optimizer, batch, floor, i)
        if agent.obs_moments is not None:
            for segment in segments:
                agent.obs_moments.add(
                    segment.obs.astype(np.float64).reshape(-1, segment.obs.shape[-1])
                )
        for sampler in samplers:
            episode_returns += sampler.finished
            sampler.finished = []
        mean_returns.append(float(np.mean(episode_returns[-100:])) if episode_returns else math.nan)
        if i % math.ceil(iterations / 20) == 0 or i == iterations - 1:
            step = f"global_step={(i + 1) * batch_size:<8}"
            print(
                f"{step} episodic_return={mean_returns[-1]:<8.1f} approx_kl={approx_kl:.4f}",
                flush=True,
            )
    return nn.utils.parameters_to_vector(agent.parameters).detach().numpy(), mean_returns


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads are slower for networks this small
    sizes = Args(total_timesteps=100_000, num_steps=32, update_epochs=20, minibatch_size=256)
    defaults = replace(sizes, learning_rate=1e-3, anneal_lr=True, gamma=0.98, gae_lambda=0.8)
    defaults = replace(defaults, norm_obs=False, norm_reward=False)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # values in Python syntax: 3e-4, None, False, '(32, 32)'
    for name, default in vars(defaults).items():
        kind = str if isinstance(default, str) else ast.literal_eval
        parser.add_argument(
            f"--{name.replace('_', '-')}", default=default, type=kind, help=f"default: {default}"
        )
    train(Args(**vars(parser.parse_args())))
