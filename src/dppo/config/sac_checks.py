"""Settings with which soft actor-critic cannot learn, or that have no effect on it."""

from collections.abc import Iterator

from dppo.config.settings import Settings


def problems_with_sac(config: Settings) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting that contradicts algo=sac, and the problem, which follows its value."""
    if config.has_memory:
        yield (
            "sequence_length" if config.memory == "none" else "memory",
            ": algo=sac learns from single env steps, without the memory of those before. Leave it out, or use "
            "`algo=ppo`.",
        )
    if config.atari != "raw":
        yield "algo", ": games have discrete actions and images. Use `algo=ppo`."
    if config.action_bounds != "squash":
        yield (
            "action_bounds",
            ": algo=sac measures the entropy of actions within their bounds, which only squash keeps. Leave it out, or "
            "use `algo=ppo`.",
        )
    if config.model is None and not config.state_dependent_std:
        yield (
            "state_dependent_std",
            ": algo=sac learns a deviation for each observation. Leave it out, or use `algo=ppo`.",
        )
    if config.replay_rows is not None and config.replay_rows < config.batch_size:
        yield (
            "replay_rows",
            f" is less than the {config.batch_size} env steps of an iteration. Use `replay_rows={config.batch_size}` "
            f"or more; the default keeps all.",
        )
    learners = max(1, config.num_learners)
    rows = config.minibatch_size or learners
    if rows % learners:
        shared = rows // learners * learners or learners
        yield (
            "minibatch_size",
            f" cannot be shared evenly by {learners} learners. Use `minibatch_size={shared}`, or a different number "
            f"of learners.",
        )
