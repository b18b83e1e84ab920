"""PPOTrainer: K epochs of minibatch SGD on each batch."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dppo.config.parts import ResolvedPPO, annealed
from dppo.errors import TrainingDiverged
from dppo.ppo.exchange.records import Experience, PolicySnapshot, TrainerState, Update
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.learning.adam import ADAPTED, MAX_RATE, adapted_rate, optimizer_for
from dppo.ppo.learning.batch import Batch, make_batch, zero_batch
from dppo.ppo.learning.losses import approximate_kl, weighted_mean
from dppo.ppo.learning.minibatches import aligned_with_ranks, draw_minibatches, minibatch_generator
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.objective import MAX_LOG_RATIO, Objective, Outputs, objective_class
from dppo.ppo.learning.parallel import Parallel, moments_of_all
from dppo.ppo.learning.popart import PopArt
from dppo.ppo.learning.stages import CurrentNetwork, Stage

# weight of the entropy bonus that is added where advantages are nothing but noise
NOISE_ENTROPY_WEIGHT = 0.01
FIGURES_OF_RATIOS = ("approx_kl", "old_approx_kl", "clipfrac")
NO_FIGURES = dict.fromkeys(
    ("policy_loss", "value_loss", "entropy", "grad_norm", *FIGURES_OF_RATIOS), math.nan
)
"""The figures of an update without any transition."""
NO_EXPERIENCE = Experience((), PolicySnapshot(0, np.zeros(0)), None, 0)


class _Losses(NamedTuple):
    """Results of the forward pass of a minibatch on this rank."""

    figures: dict[str, Tensor]
    """The parts of the loss, as means over transitions."""
    log_ratio: Tensor
    """[rows] as in `Outputs`."""


class _Step(NamedTuple):
    """Results of one step of SGD, for the metrics of the update."""

    figures: dict[str, Tensor]
    """Means over the transitions of this rank, and the norm of the gradient of all ranks, before clipping."""
    log_ratio: Tensor
    """[rows] as in `Outputs`."""
    importance: Tensor | None
    """[rows] as in `Batch`."""
    transitions: float
    """Transitions in the minibatch, per rank."""


@dataclass(eq=False)
class PPOTrainer:
    """Train a model on batches. It owns the weights and the optimizer; nothing else changes them.

    It may be one of several ranks with equal numbers of rows. Advantages, gradients, early stopping and metrics then
    cover the rows of all ranks, and the weights of all ranks stay equal.
    """

    model: PPOModel
    ppo: ResolvedPPO
    _: KW_ONLY
    minibatches: int
    """Minibatches of an epoch, for each iteration of a batch."""
    micro_batch_size: int | None = None
    """Most rows that go through the network at once; None for whole minibatches."""
    parallel: Parallel = field(default_factory=Parallel)
    """The group of ranks."""
    sequence_length: int = 1
    """L, the steps of each sequence of a batch."""
    stages: Sequence[Stage] = ()
    """Parts of an update that this run has and others have not."""
    iterations: int = 1
    """Iterations of the run, over which settings are annealed."""
    seed: int = 1
    """Seed of the run, from which the order of minibatches follows."""
    max_rate: float = MAX_RATE
    """Upper bound of a learning rate that `desired_kl` adapts."""

    def __post_init__(self) -> None:
        self.spec = self.model.spec
        self._parameters = self.model.parameters
        self.device = self._parameters.weights.device
        self._optimizer = optimizer_for(self.model, self.ppo)
        self._objective = objective_class(self.ppo.loss)
        self._adapted_rate = self.ppo.learning_rate  # changes with `desired_kl` only
        self.popart = PopArt(self.model) if self.ppo.norm_value else None

    def update(self, experience: Experience) -> Update:
        """Train on the segments of this rank with the settings of this iteration, as `train_on` does."""
        for stage in self.stages:
            update = stage.instead(experience, self)
            if update is not None:
                return update
        batch = make_batch(
            experience.segments,
            experience.policy.obs_scale,
            experience.reward_scale,
            self.ppo,
            self.sequence_length,
        )
        batch = replace(batch, iterations=min(experience.iteration + 1, self.ppo.reuse))
        settings = annealed(self.ppo, experience.iteration / self.iterations)
        generator = minibatch_generator(self.seed, experience.iteration, self.parallel)
        return self.train_on(batch, settings, generator, experience)

    # a gradient that is not finite is reported by number
    @np.errstate(invalid="ignore", over="ignore")
    def train_on(
        self,
        batch: Batch,
        ppo: ResolvedPPO,
        generator: np.random.Generator,
        experience: Experience = NO_EXPERIENCE,
    ) -> Update:
        """Train K epochs on `batch`, in minibatches drawn by `generator`; those without any transition are skipped.

        Args:
            ppo: the settings as they are now, annealed; with `desired_kl`, the trainer adapts its own learning rate.
            experience: the origin of the batch, for stages.

        Waits for: all ranks, in each minibatch.
        Returns: figures that are means over the transitions of all ranks (detail 12).

        Raise TrainingDiverged if a gradient is not finite; the weights are those from before that minibatch.
        """
        batch = batch.to(self.device)
        if self.parallel.size > 1:
            batch = aligned_with_ranks(batch, self.parallel)
        for stage in self.stages:
            ppo = stage.settings(ppo)
            batch = stage.prepare(batch, self._network(batch), experience)
        explained_variance = self._explained_variance(batch)
        if self.popart is not None:
            batch = self.popart.learn(batch, self.parallel)
        batch, steps = self._epochs(batch, ppo, generator, experience)
        figures = self._figures(steps, ppo.clip_coef) if steps else dict(NO_FIGURES)
        figures |= {"explained_variance": explained_variance, "minibatches": float(len(steps))}
        scale = self.value_scale()
        if scale is not None:
            figures |= scale.figures()
        for stage in self.stages:
            figures |= stage.finish(batch, self._network(batch), ppo)
        return Update(figures, self._learning_rate(ppo), scale)

    def _network(self, batch: Batch) -> CurrentNetwork:
        rows = self.micro_batch_size or math.ceil(
            len(batch) / (self.minibatches * batch.iterations)
        )
        return CurrentNetwork(self.model, rows, self.value_scale())

    def restart_optimizer(self) -> None:
        """Forget the gradients so far."""
        self._optimizer = optimizer_for(self.model, self.ppo)

    def value_scale(self) -> ValueScale | None:
        if self.popart is None:
            return None
        return self.popart.scale

    def _epochs(
        self, batch: Batch, ppo: ResolvedPPO, generator: np.random.Generator, experience: Experience
    ) -> tuple[Batch, list[_Step]]:
        """Take the steps of K epochs; return the batch of the last epoch, and the steps."""
        floor = _advantage_std_floor(ppo, batch)
        if floor and not any(batch.reward_range) and self.spec.distribution.integer:
            ppo = self._with_noise_entropy(ppo, batch, floor)
        objective = self._objective(ppo)
        for stage in self.stages:
            objective = stage.objective(objective)
        count = self.minibatches * batch.iterations
        steps: list[_Step] = []
        for epoch in range(ppo.update_epochs):
            if epoch > 0:
                for stage in self.stages:
                    batch = stage.renew(batch, self._network(batch), experience)
            for minibatch, transitions in draw_minibatches(
                batch, generator, count, floor=floor, parallel=self.parallel
            ):
                steps.append(self._step(minibatch, transitions, objective, ppo, len(steps)))
            if ppo.target_kl and steps and self._kl(steps[-1]) > ppo.target_kl:
                break
        return batch, steps

    def _with_noise_entropy(self, ppo: ResolvedPPO, batch: Batch, floor: float) -> ResolvedPPO:
        """Return the settings with a bonus that keeps discrete actions open where no reward came.

        It grows as the deviation of all advantages falls below half of the floor. However small gradients of noise are,
        Adam divides by their size: without the bonus, a policy drifts and becomes certain before its first reward.
        """
        (moments,) = moments_of_all(batch.advantages[None], batch.weights, self.parallel)
        count, _, squares = moments.tolist()
        deviation = math.sqrt(squares / max(1.0, count - 1))
        share = max(0.0, 1 - 2 * deviation / floor)
        return replace(ppo, ent_coef=ppo.ent_coef + NOISE_ENTROPY_WEIGHT * share)

    # ------------------------------------------------------------------ one step

    def _step(
        self,
        minibatch: Batch,
        transitions: float,
        objective: Objective,
        ppo: ResolvedPPO,
        number: int,
    ) -> _Step:
        """Take step `number` of the update on a minibatch, with one sum of gradients over all ranks."""
        losses = self._gradient(minibatch, objective)
        with torch.no_grad():
            gradient = self._parameters.gradient
            self.parallel.sum_(gradient)
            ranks = self.parallel.size
            grad_norm = torch.linalg.vector_norm(gradient) / ranks
            norm = grad_norm.item()
            if not math.isfinite(norm):
                raise _diverged(minibatch, number, losses, norm)
            # Clip (detail 11) and average over the ranks in at most one pass over memory.
            factor = min(1.0, ppo.max_grad_norm / (norm + 1e-6)) / ranks
            if factor != 1.0:
                gradient.mul_(factor)
            figures = losses.figures | {"grad_norm": grad_norm}
            step = _Step(figures, losses.log_ratio, minibatch.importance, transitions)
            # before the first step, all ratios are one
            if ppo.desired_kl > 0 and number > 0:
                self._adapted_rate = adapted_rate(
                    self._adapted_rate, self._kl(step), ppo.desired_kl, self.max_rate
                )
            self._optimizer.step(self._learning_rate(ppo))
        return step

    def _learning_rate(self, ppo: ResolvedPPO) -> float:
        if ppo.desired_kl > 0:
            return self._adapted_rate
        return ppo.learning_rate

    def sum_gradients(self) -> None:
        """Replace the gradient by its sum over all ranks."""
        self.parallel.sum_(self._parameters.gradient)

    def rehearse(self, rows: int) -> None:
        """Run forward and backward on `rows` rows of zeros, to measure the time; the weights do not change.

        With memory, the rows are whole sequences: fewer, or one.
        """
        batch = zero_batch(
            self.model.spec, max(1, rows // self.sequence_length), self.sequence_length
        )
        self._gradient(batch.to(self.device), self._objective(self.ppo))

    def _gradient_of(self, rows: Batch, objective: Objective) -> _Losses:
        """Store the gradient of the loss of a minibatch, or of a piece of one."""
        scored = self.model.forward(rows.obs, rows.actions, rows.masks, rows.recurrent)
        with torch.no_grad():
            log_ratio = _log_ratio(scored.policy.logprobs, rows)
            outputs = Outputs(log_ratio, scored.policy.entropies, scored.values)
            gradients, figures = objective.loss(outputs, rows)
        self.model.backward(scored, *gradients)
        return _Losses(figures, log_ratio)

    def _gradient(self, minibatch: Batch, objective: Objective) -> _Losses:
        """Store the gradient of a minibatch's loss, summed over pieces of at most `micro_batch_size` rows."""
        max_rows = self.micro_batch_size
        if max_rows is None or len(minibatch) <= max_rows:
            return self._gradient_of(minibatch, objective)
        pieces = list(minibatch.pieces(max_rows))
        gradient = self._parameters.gradient
        losses = [self._gradient_of(pieces[0], objective)]
        total = gradient.clone()
        for piece in pieces[1:]:
            losses.append(self._gradient_of(piece, objective))
            total += gradient
        gradient.copy_(total)
        return _merged_losses(losses, pieces)

    # ------------------------------------------------------------------ metrics of all ranks

    def _kl(self, step: _Step) -> float:
        """Return the approximate KL of a minibatch over all ranks, so that all ranks stop together."""
        kl = approximate_kl(step.log_ratio, step.log_ratio.exp(), step.importance)
        kl *= len(step.log_ratio) / step.transitions
        return float(self.parallel.gather(kl).mean())

    def _figures(self, steps: list[_Step], clip_coef: float) -> dict[str, float]:
        """Return means over the transitions of all steps and ranks.

        Called once per update, because computing them in each minibatch costs as much as a layer.
        """
        names = list(steps[0].figures)
        per_step = torch.stack(
            [torch.stack([step.figures[name] for step in steps]) for name in names]
        )
        transitions = torch.tensor(
            [step.transitions for step in steps], dtype=torch.float32, device=self.device
        )
        log_ratio = torch.cat([step.log_ratio for step in steps])
        ratio = log_ratio.exp()
        importance = None
        if steps[0].importance is not None:
            importance = torch.cat(
                [step.importance for step in steps if step.importance is not None]
            )
        kl = approximate_kl(log_ratio, ratio, importance)
        old_kl = -weighted_mean(log_ratio, importance)
        clipfrac = ((ratio - 1).abs() > clip_coef).to(ratio.dtype).mean()
        # Rows that are not transitions have ratio one: they add nothing to the sums, and are not counted.
        share = len(log_ratio) / sum(step.transitions for step in steps)
        means = per_step @ transitions.to(per_step.dtype) / transitions.sum()
        means = torch.cat([means, torch.stack([kl, old_kl, clipfrac]) * share])
        means = self.parallel.gather(means).mean(dim=0)
        return dict(zip([*names, *FIGURES_OF_RATIOS], means.tolist(), strict=True))

    def _explained_variance(self, batch: Batch) -> float:
        """Return 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 is no better than a constant."""
        samples = torch.stack([batch.returns - batch.values, batch.returns])
        moments = moments_of_all(samples, batch.weights, self.parallel)
        residual, total = moments[:, 2].tolist()
        if total > 0:
            return 1 - residual / total
        return math.nan

    # ------------------------------------------------------------------ weights and state

    def weights(self, *, copy: bool = True) -> np.ndarray:
        """Return all weights [P] in the order of `NetworkSpec.shapes`; without `copy`, updates overwrite them."""
        weights: np.ndarray = self._parameters.weights.numpy(force=True)
        return weights.copy() if copy else weights

    def state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return the state of optimizer, value scale and stages; `copy` as in `weights`."""
        state = self._optimizer.state()
        if self.ppo.desired_kl > 0:
            state[ADAPTED] = np.array(self._adapted_rate)
        if self.popart is not None:
            state |= self.popart.state()
        for stage in self.stages:
            state |= stage.state()
        if copy:
            return {name: array.copy() for name, array in state.items()}
        return state

    def learned_state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return all of `state`, because this trainer keeps no rows of older iterations."""
        return self.state(copy=copy)

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Restore `weights` [P] and the result of `state`."""
        with torch.no_grad():
            self._parameters.weights.copy_(torch.tensor(weights))
        self._optimizer.load(state)
        if self.ppo.desired_kl > 0:
            self._adapted_rate = float(state.get(ADAPTED, self.ppo.learning_rate))
        if self.popart is not None:
            self.popart.load(state)
        for stage in self.stages:
            stage.load(state)

    def snapshot(self) -> TrainerState:
        """Return copies of weights and state, to restore them if an update fails."""
        return TrainerState(self.weights(), self.state())

    def restore(self, snapshot: TrainerState) -> None:
        """Undo the update that followed `snapshot`."""
        self.load(snapshot.weights, snapshot.state)


def _log_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """Return new minus old log-probabilities [rows]: at most 20, and zero for rows that are not transitions."""
    log_ratio = logprobs - batch.logprobs
    # an infinite log ratio becomes nan, which is reported
    log_ratio -= (log_ratio - MAX_LOG_RATIO).clamp_(min=0)
    if batch.weights is not None:
        log_ratio = torch.where(batch.weights > 0, log_ratio, 0.0)
    return log_ratio


def _merged_losses(losses: list[_Losses], pieces: list[Batch]) -> _Losses:
    figures = {}
    for name in losses[0].figures:
        parts = [
            loss.figures[name] * piece.share for loss, piece in zip(losses, pieces, strict=True)
        ]
        figures[name] = torch.stack(parts).sum()
    return _Losses(figures, torch.cat([loss.log_ratio for loss in losses]))


def _advantage_std_floor(ppo: ResolvedPPO, batch: Batch) -> float | None:
    """Return the smallest deviation that the advantages of a batch are divided by; None if they are not divided."""
    if not ppo.norm_adv:
        return None
    if ppo.norm_reward and not batch.has_learning_signal:
        return ppo.adv_floor
    return 0.0


def _diverged(minibatch: Batch, number: int, losses: _Losses, norm: float) -> TrainingDiverged:
    """Return an error that describes the minibatch of SGD step `number` of its update, and its gradient's norm."""
    obs: Any = minibatch.obs
    leaves = obs if isinstance(obs, dict) else {"": obs}
    # uint16 has no min() in torch
    columns = {f"obs {name}".rstrip(): leaf.double() for name, leaf in leaves.items()}
    columns |= {"advantages": minibatch.advantages, "returns": minibatch.returns}
    ranges = [
        f"{name} from {float(column.min()):.3g} to {float(column.max()):.3g}"
        for name, column in columns.items()
    ]
    parts = [
        f"{name.replace('_', ' ')} {figure.item():.3g}" for name, figure in losses.figures.items()
    ]
    return TrainingDiverged(
        f"SGD step {number} of this update has {', '.join(parts)} and gradient norm {norm:.3g}; the weights from "
        f"before it are kept. The minibatch of {len(minibatch)} rows has {', '.join(ranges)}. Lower `learning_rate`, "
        f"or turn on `norm_obs` and `norm_reward` if these numbers are large."
    )
