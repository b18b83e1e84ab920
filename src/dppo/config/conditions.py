"""Conditions under which settings have an effect, and what to do where they have none."""

from __future__ import annotations

from dppo.config.field import When

WITH_ACTORS = When(lambda config: config.num_actors > 0, "num_actors=0 starts no actors. Use num_actors=1 or more")
WITH_LEARNERS = When(
    lambda config: config.num_learners > 0, "num_learners=0 trains in this process. Use num_learners=1 or more"
)
OWN_RAY = When(lambda config: config.address is None, "a running cluster has its own dashboard. Leave it out")
ON_GPU = When(lambda config: config.device != "cpu", "device=cpu trains on the CPU. Use device=cuda")
SMALLER_THAN_MINIBATCH = When(
    lambda config: (config.micro_batch_size or 0) * max(1, config.num_learners) < config.minibatch_rows,
    "a minibatch has {config.minibatch_rows} rows. Use a smaller one, or leave it out",
)
FLOAT32_NETWORK = When(
    lambda config: config.dtype == "float32",
    "dtype={config.dtype} asks for more precision than float32. Leave one of them out",
)
READ_EXACTLY = When(
    lambda config: config.norm_obs or config.dtype == "float64",
    "the network reads float32. Use norm_obs=True, which normalises before rounding, or dtype=float64",
)
WITH_VALUE_LOSS = When(
    lambda config: config.vf_coef > 0, "vf_coef=0 disables the value loss. Leave it out, or raise vf_coef"
)
WITH_HIDDEN_LAYERS = When(lambda config: bool(config.hidden_sizes), "hidden_sizes is empty. Leave it out")
DEFAULT_NETWORK = When(
    lambda config: config.model is None,
    "it applies to the default network only, not to model={config.model_name}. Leave it out",
)
OWN_NETWORK = When(
    lambda config: config.model is not None, "it applies to a model of your own only. Set model, or leave it out"
)
WITH_MEMORY = When(lambda config: config.memory != "none", "memory=none has no state. Set memory, or leave it out")
MAYBE_MEMORY = When(
    lambda config: config.memory != "none" or config.model is not None,
    "only a network with memory learns from sequences. Set memory, or leave it out",
)
SEVERAL_SGD_STEPS = When(
    lambda config: config.update_epochs * config.minibatches_per_epoch > 1,
    "an update is a single SGD step here. Leave it out, or raise update_epochs",
)
RATE_NOT_ANNEALED = When(
    lambda config: not config.anneal_lr, "anneal_lr sets the learning rate. Use anneal_lr=False, or leave it out"
)
WITH_ENTROPY = When(
    lambda config: config.ent_coef > 0, "ent_coef=0 leaves the entropy out. Leave it out, or raise ent_coef"
)
SEVERAL_EPOCHS = When(
    lambda config: config.update_epochs > 1,
    "advantages of the only epoch are fresh. Leave it out, or raise update_epochs",
)
REWARDS_NOT_SIGNS = When(lambda config: not config.sign_reward, "sign_reward leaves -1, 0 and 1. Leave one of them out")
REWARDS_NOT_NORMALISED = When(
    lambda config: not config.norm_reward,
    "norm_reward divides by a deviation that has the same factor. Leave one of them out",
)
WITH_OBS_NORMALISER = When(
    lambda config: config.norm_obs, "norm_obs=False normalises nothing. Use norm_obs=True, or leave it out"
)
WITH_NORMALISER = When(
    lambda config: config.norm_obs or config.norm_reward,
    "there are no statistics to freeze. Use norm_obs=True or norm_reward=True, or leave it out",
)
