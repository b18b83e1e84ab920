"""Milliseconds of CPU per gradient step of soft actor-critic: by hand, and by autograd as other libraries compute it.

    python benchmarks/sac_step.py
    python benchmarks/sac_step.py --peer    beside Stable-Baselines3 itself, in a virtual environment that is made once

Sizes are those of HalfCheetah (17 numbers, 6 actions). The last column has the sizes of Stable-Baselines3's defaults,
without layer norm. All take turns in one process on one thread, and the least of five rounds counts, so that a busy
machine changes less. With `--peer`, the sizes of both libraries' defaults take turns, each in its own process, and the
last line has medians of pairs.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from dppo.numerics.portable import portable_numerics

portable_numerics()

import numpy as np  # noqa: E402  after the choice of its code
import torch  # noqa: E402
from measure import sb3_python  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from dppo.config.parts import SAC, Network  # noqa: E402
from dppo.numerics.arithmetic import limit_blas  # noqa: E402
from dppo.ppo.exchange.records import Experience, PolicySnapshot, Segment  # noqa: E402
from dppo.ppo.networks.choice import choose_network  # noqa: E402
from dppo.sac.policy import sample  # noqa: E402
from dppo.sac.settings import SACSettings  # noqa: E402
from dppo.sac.trainer import SACTrainer  # noqa: E402
from dppo.spaces.actions import BoxActions  # noqa: E402
from dppo.spaces.spaces import Spaces  # noqa: E402

OBS = 17
ACTIONS = 6
STEPS = 64  # of a segment, and gradient steps of a round
ENVS = 8
ROUNDS = 5
SIZES = ((128, 128, 128), (128, 256, 256), (256, 256, 256))  # rows, units of critics, of the policy
SB3 = (256, 256, 256)
PAIRS = 15


def by_hand(rows: int, units: int, policy_units: int) -> Callable[[], None]:
    """Return a function that takes STEPS gradient steps, with the drawing of their rows."""
    network = Network(
        state_dependent_std=True, hidden_sizes=(policy_units, policy_units), activation="relu"
    )
    actions = BoxActions(np.full(ACTIONS, -1.0), np.full(ACTIONS, 1.0), bounds="squash")
    spec = choose_network(network, Spaces(np.dtype((np.float32, (OBS,))), actions)).spec
    settings = SACSettings(
        critic_sizes=(units, units), minibatch_size=rows, first_rows=0, gradient_steps=1 / ENVS
    )
    trainer = SACTrainer(spec, settings, seed=1)
    random = np.random.default_rng(1)
    shape = (STEPS, ENVS)
    column = np.zeros(shape)
    ends = np.zeros(shape, bool)
    segment = Segment(
        random.normal(size=(*shape, OBS)).astype(np.float32),
        random.normal(size=(*shape, ACTIONS)).astype(np.float32),
        column,
        column,
        column,
        random.normal(size=shape),
        ends,
        ends,
        ~ends,
        successors=np.zeros((ENVS, OBS), np.float32),
    )
    policy = PolicySnapshot(0, np.zeros(0))

    def take_steps() -> None:
        trainer.update(Experience([segment], policy, None, 0))

    return take_steps


def by_autograd(
    rows: int, units: int, policy_units: int, *, norm: bool = True
) -> Callable[[], None]:
    """Return a function that takes STEPS gradient steps on the same rows, in plain torch."""
    policy = mlp(OBS, policy_units, 2 * ACTIONS, norm=False)
    critics = [mlp(OBS + ACTIONS, units, 1, norm=norm) for _ in range(2)]
    targets = copy.deepcopy(critics)
    weights: list[Tensor] = [weight for critic in critics for weight in critic.parameters()]
    slow_weights: list[Tensor] = [weight for target in targets for weight in target.parameters()]
    log_temperature = torch.zeros(1, requires_grad=True)
    optimizers = [
        torch.optim.Adam(parameters)
        for parameters in (weights, policy.parameters(), [log_temperature])
    ]
    obs = torch.randn(rows, OBS)
    actions = torch.tanh(torch.randn(rows, ACTIONS))
    rewards = torch.randn(rows)

    def least(networks: list[nn.Module], drawn: Tensor) -> Tensor:
        inputs = torch.cat([obs, drawn], dim=1)
        return torch.cat([network(inputs) for network in networks], dim=1).amin(dim=1)

    def move(number: int, loss: Tensor) -> None:
        optimizers[number].zero_grad()
        loss.backward()
        optimizers[number].step()

    def take_steps() -> None:
        for _ in range(STEPS):
            temperature = log_temperature.detach().exp()
            with torch.no_grad():
                following = sample(policy(obs), torch.randn(rows, ACTIONS))
                values = least(targets, following.actions) - temperature * following.logprobs
                aims = (rewards + 0.99 * values).unsqueeze(1)
            inputs = torch.cat([obs, actions], dim=1)
            errors = [critic(inputs) - aims for critic in critics]
            move(0, sum((0.5 * error.square().mean() for error in errors), torch.zeros(())))
            drawn = sample(policy(obs), torch.randn(rows, ACTIONS))
            values = least(critics, drawn.actions)
            move(1, (temperature * drawn.logprobs - values).mean())
            move(2, -(log_temperature * (drawn.logprobs.detach() - ACTIONS)).mean())
            with torch.no_grad():
                torch._foreach_lerp_(slow_weights, weights, 0.005)

    return take_steps


def mlp(inputs: int, units: int, outputs: int, *, norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for width in (inputs, units):
        layers.append(nn.Linear(width, units))
        if norm:
            layers.append(nn.LayerNorm(units, elementwise_affine=False))
        layers.append(nn.SiLU() if norm else nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(units, outputs))


def milliseconds(take_steps: Callable[[], None]) -> float:
    began = time.process_time()
    take_steps()
    return 1e3 * (time.process_time() - began) / STEPS


def beside_peer(python: str) -> None:
    """Print medians of pairs of our defaults and Stable-Baselines3's, whose interpreter is `python`."""
    script = str(Path(__file__).with_name("sac_step_sb3.py"))
    take_steps = by_hand(*SIZES[0])
    pairs = []
    with subprocess.Popen(
        [python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        for _ in range(1 + PAIRS):
            peer.stdin.write("\n")
            peer.stdin.flush()
            peer_ms = float(peer.stdout.readline())
            pairs.append((milliseconds(take_steps), peer_ms))
    pairs = pairs[1:]  # the first is a warm-up
    steps = SAC().gradient_steps  # per env step; Stable-Baselines3 takes one
    ratio = median(ours / peers for ours, peers in pairs)
    ours_ms, peer_ms = (median(times) for times in zip(*pairs, strict=True))
    print(
        f"a gradient step: {ours_ms:.2f} ms, Stable-Baselines3 {peer_ms:.2f} ms; of its time, in the median of {PAIRS} "
        f"pairs: {ratio:.2f}, per env step with {steps:g} gradient steps {steps * ratio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-python", help="an interpreter that has stable-baselines3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    limit_blas(1)
    if options.peer or options.peer_python:
        beside_peer(options.peer_python or sb3_python())
        return
    print("rows  critics      policy         by hand   autograd   SB3's sizes")
    for rows, units, policy_units in SIZES:
        sides = [
            by_hand(rows, units, policy_units),
            by_autograd(rows, units, policy_units),
            by_autograd(*SB3, norm=False),
        ]
        rounds = [[milliseconds(side) for side in sides] for _ in range(ROUNDS)]
        hand, autograd, sb3 = (min(times) for times in zip(*rounds, strict=True))
        sizes = f"{rows:4d}  {units} x {units}    {policy_units} x {policy_units}"
        print(f"{sizes}    {hand:5.2f} ms   {autograd:5.2f} ms   {sb3:5.2f} ms")


if __name__ == "__main__":
    main()
