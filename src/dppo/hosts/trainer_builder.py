"""Build trainers from their plans, in any process that trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from dppo import streams
from dppo.config.parts import ResolvedPPO
from dppo.errors import ConfigError
from dppo.hosts.plans import TrainerPlan
from dppo.ppo.exchange.phase import ControllerPhase
from dppo.ppo.networks.choice import choose_network
from dppo.spaces.spaces import Spaces
from dppo.streams import Stream

if TYPE_CHECKING:
    from dppo.hosts.trainer import Trainer
    from dppo.ppo.learning.parallel import Parallel
    from dppo.ppo.learning.stages import Stage
    from dppo.ppo.learning.trainer import PPOTrainer
    from dppo.ppo.networks.network import NetworkSpec
    from dppo.sac.trainer import SACTrainer

FEW_ROWS = 64  # rows of zeros with which a GPU is tested before the first segment
# Buffers of cuBLAS with which a product has the same bits in each run; it reads the variable at its first product.
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE = ":4096:8"


def build_trainer(plan: TrainerPlan, spaces: Spaces, parallel: Parallel | None = None) -> Trainer:
    """Build the trainer of a run, or one of several ranks; imports torch."""
    from dppo.ppo.learning.gpu import repeatable_on, starting_on
    from dppo.ppo.learning.parallel import Parallel

    device = _device(plan.learners.device)
    spec = choose_network(plan.network, spaces).spec
    with starting_on(device, spec.as_json().get("model", "the built-in network")):
        trainer = TRAINERS[plan.ppo.algo](device, plan, spec, parallel or Parallel())
        if device != "cpu":
            with repeatable_on(trainer.device):
                trainer.rehearse(FEW_ROWS)
    return trainer


def _sac_trainer(
    device: str, plan: TrainerPlan, spec: NetworkSpec, parallel: Parallel
) -> SACTrainer:
    from dppo.hosts.sac import sac_trainer

    assert device == "cpu"
    return sac_trainer(plan, spec, parallel)


def _ppo_trainer(
    device: str, plan: TrainerPlan, spec: NetworkSpec, parallel: Parallel
) -> PPOTrainer:
    from dppo.ppo.learning.adam import MAX_RATE
    from dppo.ppo.learning.model import PPOModel
    from dppo.ppo.learning.trainer import PPOTrainer
    from dppo.ppo.networks.modules import learn_in_bfloat16

    model = PPOModel(
        spec,
        streams.integer(plan.seed, Stream.WEIGHTS),
        device=device,
        zeros_like=parallel.zeros_like,
        log_std=plan.network.log_std_init,
    )
    assert isinstance(plan.ppo, ResolvedPPO)
    if plan.learners.precision == "bfloat16":
        learn_in_bfloat16(model.network, device)
    starts_from_clone = plan.sizes.prior_iterations > 0
    return PPOTrainer(
        model,
        plan.ppo,
        minibatches=plan.sizes.minibatches_per_epoch,
        micro_batch_size=plan.learners.micro_batch_size,
        parallel=parallel,
        sequence_length=plan.sizes.sequence_length,
        stages=stages_of(plan, parallel, spec),
        iterations=plan.sizes.iterations,
        seed=plan.seed,
        max_rate=plan.ppo.learning_rate if starts_from_clone else MAX_RATE,
    )


TRAINERS: dict[str, Callable[[str, TrainerPlan, NetworkSpec, Parallel], Trainer]] = {
    "ppo": _ppo_trainer,
    "sac": _sac_trainer,
}
"""The trainer of each value of `algo`."""


def stages_of(plan: TrainerPlan, parallel: Parallel, spec: NetworkSpec) -> list[Stage]:
    """Make the stages that a run adds to its updates; by default none."""
    from dppo.ppo.learning.prior import Prior
    from dppo.ppo.learning.reuse import OlderPolicies
    from dppo.ppo.learning.stages import LagCorrection, RecomputedAdvantages

    stages: list[Stage] = []
    if plan.ppo.reuse > 1:
        stages.append(OlderPolicies(plan.ppo, parallel))
    elif plan.policy_lag > 0:
        stages.append(LagCorrection())
    if plan.ppo.recompute_advantages:
        stages.append(RecomputedAdvantages(plan.ppo))
    if plan.sizes.prior_iterations > 0:
        phase = ControllerPhase.of(
            spec.spaces.actions, plan.sizes.prior_iterations, plan.sizes.prior_noise
        )
        stages.append(Prior(plan.ppo, phase))
    return stages


def _device(setting: str) -> str:
    """Choose the device to train on; called only in the process that trains."""
    import torch

    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={setting}: torch {torch.__version__} sees no GPU in this process. Use `device=cpu`, or "
            f"`num_learners=1` with `learner_gpus=1`."
        )
    os.environ.setdefault(CUBLAS, FIXED_WORKSPACE)
    return "cuda"
