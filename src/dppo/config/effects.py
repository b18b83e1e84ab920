"""Settings that have an effect under a condition only."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dppo.config.parts import default_of
from dppo.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Need:
    """A condition without which settings have no effect."""

    names: str
    """The settings, separated by spaces."""
    holds: Callable[[Settings], Any]
    otherwise: str
    """The reason why the settings have no effect, and a remedy; `config` is replaced."""


def _is_ppo(config: Settings) -> bool:
    return config.algo == "ppo"


NEEDS = (
    Need(
        "state_folder",
        lambda c: c.env_state != "off",
        "env_state=off asks for no states. Leave it out, or use `env_state=auto`",
    ),
    Need(
        "replay_rows gradient_steps learning_starts tau target_entropy critic_sizes critic_learning_rate",
        lambda c: not _is_ppo(c),
        "algo=ppo has no critics that learn from earlier env steps. Use `algo=sac`, or leave it out",
    ),
    Need(
        "noise",
        lambda c: c.noise != "wide" or not _is_ppo(c),
        "algo=ppo learns only from actions of its policy, not from others. Use `noise=pink`, or `algo=sac`",
    ),
    Need(
        "gae_lambda norm_adv adv_floor recompute_advantages",
        _is_ppo,
        "algo=sac estimates no advantages. Leave it out, or use `algo=ppo`",
    ),
    Need(
        "vf_coef clip_vloss norm_value",
        _is_ppo,
        "algo=sac learns the value of actions by critics with a loss of their own. Leave it out, or use `algo=ppo`",
    ),
    Need(
        "loss clip_coef anneal_clip target_kl desired_kl",
        _is_ppo,
        "algo=sac has no ratio of probabilities to limit. Leave it out, or use `algo=ppo`",
    ),
    Need(
        "reuse",
        _is_ppo,
        "algo=sac learns from earlier env steps by itself, as many as replay_rows. Leave it out",
    ),
    Need(
        "update_epochs",
        _is_ppo,
        "algo=sac draws rows at random, and gradient_steps says how often. Leave it out",
    ),
    Need(
        "ent_coef anneal_ent",
        _is_ppo,
        "algo=sac adapts the weight of the entropy to target_entropy. Leave it out",
    ),
    Need("anneal_lr max_grad_norm", _is_ppo, "algo=sac has none. Leave it out, or use `algo=ppo`"),
    Need(
        "trunk",
        _is_ppo,
        "the policy of algo=sac shares no layers with its critics. Leave it out, or use `algo=ppo`",
    ),
    Need(
        "device precision micro_batch_size",
        _is_ppo,
        "algo=sac learns in small minibatches on the CPU. Leave it out, or use `algo=ppo`",
    ),
    Need(
        "obs_dtype",
        lambda c: c.norm_obs or c.dtype == "float64",
        "the network reads float32. Use `norm_obs=True`, which normalizes before rounding, or `dtype=float64`",
    ),
    Need(
        "desired_kl",
        lambda c: c.desired_kl == 0 or not c.anneal_lr,
        "anneal_lr sets the learning rate. Use `anneal_lr=False`, or leave it out",
    ),
    Need(
        "desired_kl",
        lambda c: c.desired_kl == 0 or c.reuse == 1,
        "reuse={config.reuse} adapts the learning rate to the total variation. Leave one of them out",
    ),
    Need(
        "desired_kl",
        lambda c: c.desired_kl == 0 or c.update_epochs != 1 or c.sizes.minibatches_per_epoch > 1,
        "an update is a single SGD step here. Leave it out, or raise `update_epochs`",
    ),
    Need(
        "target_kl",
        lambda c: c.target_kl == 0 or c.update_epochs != 1 or c.sizes.minibatches_per_epoch > 1,
        "an update is a single SGD step here. Leave it out, or raise `update_epochs`",
    ),
    Need(
        "recompute_advantages",
        lambda c: c.update_epochs != 1,
        "advantages of the only epoch are fresh. Leave it out, or raise `update_epochs`",
    ),
    Need(
        "adv_floor",
        lambda c: c.norm_adv is not False and c.norm_reward,
        "advantages are not standardized, or have no unit. Use `norm_adv=True` and `norm_reward=True`, or leave it out",
    ),
    Need(
        "clip_vloss",
        lambda c: c.loss == "ppo",
        "loss={config.loss} clips nothing. Leave one of them out",
    ),
    Need(
        "reuse",
        lambda c: c.loss == "ppo",
        "loss={config.loss} is not defined for older policies. Leave one of them out",
    ),
    Need(
        "clip_vloss norm_value",
        lambda c: c.vf_coef > 0,
        "vf_coef=0 disables the value loss. Leave it out, or raise `vf_coef`",
    ),
    Need(
        "anneal_ent",
        lambda c: bool(c.ent_coef),
        "ent_coef=0 leaves the entropy out, and a default is not lowered. Leave it out, or raise `ent_coef`",
    ),
    Need(
        "norm_obs_keys",
        lambda c: c.norm_obs,
        "norm_obs=False normalizes nothing. Use `norm_obs=True`, or leave it out",
    ),
    Need(
        "freeze_norm_after",
        lambda c: c.norm_obs or c.norm_reward,
        "there are no statistics to freeze. Use `norm_obs=True` or `norm_reward=True`, or leave it out",
    ),
    Need(
        "clip_reward",
        lambda c: not c.sign_reward,
        "sign_reward leaves -1, 0 and 1. Leave one of them out",
    ),
    Need(
        "scale_reward",
        lambda c: not c.norm_reward,
        "norm_reward divides by a deviation that has the same factor. Use `norm_reward=False`, or leave it out",
    ),
    Need(
        "model_kwargs",
        lambda c: c.model is not None,
        "it applies to a model of your own only. Set `model`, or leave it out",
    ),
    Need(
        "hidden_sizes activation image_encoder image_features trunk layer_norm state_dependent_std log_std_init memory "
        "critic_obs",
        lambda c: c.model is None,
        "it applies to the default network only, not to model={config.model_name}. Leave it out",
    ),
    Need(
        "prior_steps prior_noise",
        lambda c: c.prior is not None,
        "there is no controller to start from. Set `prior`, or leave it out",
    ),
    Need(
        "log_std_init",
        lambda c: c.prior is None,
        "the clone of a prior starts with the deviation of its noise. Use `prior_noise`, or leave it out",
    ),
    Need(
        "learning_starts",
        lambda c: c.prior is None,
        "soft actor-critic learns from the first env steps of a prior on. Leave it out",
    ),
    Need(
        "init_from",
        lambda c: c.prior is None,
        "the clone of a prior replaces the weights. Leave one of them out",
    ),
    Need(
        "log_std_init",
        lambda c: not c.state_dependent_std,
        "with state_dependent_std the network starts with its own. Leave one of them out",
    ),
    Need(
        "critic_obs",
        lambda c: c.trunk != "shared",
        "with trunk=shared the policy reads what the value reads. Leave one of them out",
    ),
    Need(
        "activation layer_norm",
        lambda c: bool(c.hidden_sizes),
        "hidden_sizes is empty. Leave it out",
    ),
    Need(
        "memory_size",
        lambda c: c.memory != "none",
        "memory=none has no state. Set `memory`, or leave it out",
    ),
    Need(
        "sequence_length",
        lambda c: c.memory != "none" or c.model is not None,
        "only a network with memory learns from sequences. Set `memory`, or leave it out",
    ),
    Need(
        "address upload cpus_per_actor nodes_per_env actor_gpus actor_resources actors_per_node segment_timeout_s "
        "start_timeout_s reset_timeout_s step_timeout_s max_actor_restarts on_other_cpu dashboard",
        lambda c: c.num_actors != 0,
        "num_actors=0 starts no actors. Use `num_actors=1` or more",
    ),
    Need(
        "nodes_per_env",
        lambda c: c.ranks_per_env > 1,
        "a single rank is on one node. Raise `ranks_per_env`, or leave it out",
    ),
    Need(
        "nodes_per_env",
        lambda c: c.cores_per_rank > 0,
        "cores_per_rank=0 lets ranks share the cores of one node. Use `cores_per_rank=1`, or leave it out",
    ),
    Need(
        "recycle_after",
        lambda c: c.recycling and c.num_actors != 0,
        "num_actors=0 starts no actors. Use `num_actors=1` or more",
    ),
    Need(
        "actors_per_node",
        lambda c: (c.actors_per_node or 1) < c.most_actors + c.evaluators,
        "there are never more than {config.most_actors} actors, and {config.evaluators} of evaluations. Leave it out",
    ),
    Need(
        "backup_requests",
        lambda c: c.num_actors not in (0, 1),
        "num_actors={config.num_actors} leaves no other actor to ask. Use `num_actors=2` or more, or leave it out",
    ),
    Need(
        "backup_requests",
        lambda c: c.replay,
        "replay=False abandons the open episodes of a sampler that is rebuilt. Leave one of them out",
    ),
    Need("replay_limit", lambda c: c.replay, "replay=False replays nothing. Leave one of them out"),
    Need(
        "env_threads",
        lambda c: c.num_samplers > max(1, c.actor_bounds[0]),
        "each process has a single sampler, and so a single thread. Use fewer actors than samplers, or leave it out",
    ),
    Need(
        "num_learners",
        lambda c: c.num_actors != 0,
        "num_actors=0 runs everything in this process. Use `num_actors=1` or more",
    ),
    Need(
        "learner_cpus learner_gpus",
        lambda c: c.num_learners > 0,
        "num_learners=0 trains in this process. Use `num_learners=1` or more",
    ),
    Need(
        "env_faults",
        lambda c: c.fault_budget[0] > 0 and c.on_env_fault != "raise",
        "on_env_fault=raise survives no fault. Leave one of them out",
    ),
    Need(
        "eval_episodes eval_stochastic eval_env_kwargs eval_actors eval_timeout_s",
        lambda c: c.eval_every is not None,
        "eval_every=None evaluates nothing. Set `eval_every`, or leave it out",
    ),
    Need(
        "eval_actors",
        lambda c: c.num_actors != 0,
        "num_actors=0 evaluates in this process. Use `num_actors=1` or more",
    ),
    Need(
        "eval_actors",
        lambda c: c.eval_actors <= c.eval_episodes,
        "each plays an episode at a time, and an evaluation has {config.eval_episodes}. Use as many or fewer",
    ),
    Need(
        "baseline",
        lambda c: c.eval_every is not None,
        "the policy is compared with it in evaluations, and eval_every=None makes none. Set `eval_every`, perhaps to a "
        "tenth of the run, or leave it out",
    ),
    Need(
        "never_worse",
        lambda c: c.baseline is not None or c.eval_every is not None,
        "there is no baseline to fall back to, and no evaluation to compare with it. Set `baseline` and `eval_every`, "
        "or leave it out",
    ),
    Need(
        "never_worse",
        lambda c: c.baseline is not None or c.eval_every is None,
        "there is no baseline to fall back to. Set `baseline`, or leave it out",
    ),
    Need(
        "dashboard",
        lambda c: c.address is None,
        "a running cluster has its own dashboard. Leave it out",
    ),
    Need(
        "precision",
        lambda c: c.numerics != "strict",
        "numerics=strict forbids the instructions of AVX-512 for bfloat16. Leave one of them out",
    ),
    Need(
        "precision",
        lambda c: c.dtype == "float32",
        "dtype={config.dtype} asks for more precision than float32. Leave one of them out",
    ),
    Need(
        "micro_batch_size",
        lambda c: (c.micro_batch_size or 0) * max(1, c.num_learners) < c.sizes.minibatch_rows,
        "a minibatch has {config.sizes.minibatch_rows} rows. Use a smaller one, or leave it out",
    ),
    Need(
        "reuse",
        lambda c: c.frame_stack == 1,
        "frame_stack={config.frame_stack} stores stacks of frames in parts, which are not kept. Leave one of them out",
    ),
    Need(
        "learner_gpus",
        lambda c: c.device != "cpu",
        "device=cpu trains on the CPU. Use `device=cuda`",
    ),
)


def ineffective(config: Settings) -> set[str]:
    """Return the names of the settings that have no effect, at any value, because of other settings."""
    needs = [need for need in NEEDS if not need.holds(config)]
    return {name for need in needs for name in need.names.split()}


def without_effect(config: Settings) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting that differs from its default but has no effect, and the reason."""
    for need in NEEDS:
        for name in need.names.split():
            if getattr(config, name) != default_of(name) and not need.holds(config):
                yield name, need.otherwise.format(config=config)
