"""Every key of metrics.jsonl, with its unit and meaning. docs/METRICS.md is generated from this table."""

from dataclasses import dataclass

from dppo.ppo.exchange.records import IncidentKind


@dataclass(frozen=True, slots=True)
class Metric:
    """One key of a row; capital letters and numbers in a key stand for names that a run decides."""

    key: str
    unit: str
    meaning: str
    condition: str = ""
    """Condition under which a row has the key; empty if every row has it."""


SHARE = "0 to 1"
SCALED = "scaled reward"
"""Unit of what critics learn from: normalized rewards, unless a run has `norm_reward=False`."""
STEPS = "env steps"
WITH_ACTORS = "with actors"

PROGRESS = (
    Metric("iteration", "count", "1, 2, ...: one collection and one update"),
    Metric(
        "global_step",
        STEPS,
        "actions taken so far, over all environments; the x axis of every plot",
    ),
    Metric("time/wall_s", "s", "since `train` was called, including the start of Ray and actors"),
    Metric("time/training_s", "s", "since the first request for segments"),
    Metric("charts/policy_version", "count", "updates applied so far"),
    Metric("charts/SPS", "env steps / s", "speed of this call: its steps over `time/training_s`"),
    Metric("charts/SPS_iteration", "env steps / s", "speed of this iteration"),
    Metric("charts/learning_rate", "", "Adam's step size in this iteration"),
    Metric(
        "actors/alive",
        "count",
        "actors that are running when the last segment arrives",
        WITH_ACTORS,
    ),
    Metric(
        "actors/memory_gb",
        "GB",
        "resident memory of the largest actor with its children",
        WITH_ACTORS,
    ),
    Metric(
        "actors/memory_gb/3", "GB", "the same for actor 3", f"{WITH_ACTORS}, for up to 64 of them"
    ),
)

ONE_EPISODE = "once an episode has ended"
EPISODES = (
    Metric("charts/episodes", "count", "episodes that have ended"),
    Metric(
        "charts/recent_episodes",
        "count",
        "the last 100 of them at most, without those of up to 3,072 steps with wide exploration (`--noise wide`), and "
        "without those that a controller began (`--prior`)",
        ONE_EPISODE,
    ),
    Metric(
        "charts/episodic_return",
        "reward",
        "mean undiscounted return of these recent episodes",
        ONE_EPISODE,
    ),
    Metric(
        "charts/episodic_return_std", "reward", "standard deviation of these returns", ONE_EPISODE
    ),
    Metric("charts/episodic_length", STEPS, "mean length of the recent episodes", ONE_EPISODE),
    Metric(
        "charts/success_rate",
        SHARE,
        'share of the recent episodes with a true `info["is_success"]` in their last step',
        "if an episode reports it",
    ),
)

PPO_ONLY = "with `--algo ppo`"
SAC_ONLY = "with `--algo sac`"
LEARNING = (
    Metric(
        "losses/policy_loss",
        "",
        "clipped surrogate, or the loss of soft actor-critic; that of cloning while the controller of `--prior` acts",
    ),
    Metric(
        "losses/value_loss", f"{SCALED}^2", "half the mean squared error of the values", PPO_ONLY
    ),
    Metric(
        "losses/value_mean", "reward", "mean of the value targets so far", "with `--norm-value`"
    ),
    Metric(
        "losses/value_std",
        "reward",
        "standard deviation of the value targets so far, the unit of `losses/value_loss`",
        "with `--norm-value`",
    ),
    Metric("losses/entropy", "nats", "entropy of the policy; may be negative for a Gaussian"),
    Metric(
        "losses/approx_kl",
        "nats",
        "estimate k3 of KL(old, new), never negative; with a policy lag or `--reuse`, a weighted mean",
        PPO_ONLY,
    ),
    Metric(
        "losses/old_approx_kl",
        "nats",
        "estimate k1, the mean of log old - log new; noisier",
        PPO_ONLY,
    ),
    Metric(
        "losses/clipfrac",
        SHARE,
        "share of rows whose ratio is outside the clipping range",
        PPO_ONLY,
    ),
    Metric(
        "losses/total_variation",
        SHARE,
        "distance of the policies after and before the update, on all its rows, as is then `losses/clipfrac`",
        "with `--reuse`",
    ),
    Metric(
        "losses/explained_variance",
        "at most 1",
        "share of the variance of returns that the values before the update explain; `null` if they do not vary",
        PPO_ONLY,
    ),
    Metric(
        "losses/clone_kl",
        "nats",
        "KL divergence of the clone from the controller with its noise, on a tenth of its rows that were held out",
        "with `--prior`, in the iteration of the clone",
    ),
    Metric(
        "losses/clone_distance",
        "nats",
        "estimate k2 of KL(policy, clone)",
        "with `--prior`, while the policy is held near the clone",
    ),
    Metric("losses/grad_norm", "", "global norm of the gradient before clipping"),
    Metric(
        "losses/minibatches",
        "count",
        "SGD steps taken; fewer than planned where `--target-kl` stopped the epochs",
        PPO_ONLY,
    ),
    Metric(
        "losses/critic_loss",
        f"{SCALED}^2",
        "half the mean squared error of both critics, added. `null` before `--learning-starts`",
        SAC_ONLY,
    ),
    Metric(
        "losses/critic_grad_norm", "", "global norm of their gradient before clipping", SAC_ONLY
    ),
    Metric(
        "losses/q_mean",
        SCALED,
        "mean value of the policy's actions, by the lower critic. If it rises without the return, "
        "actions are overestimated. Missing while the controller of `--prior` acts",
        SAC_ONLY,
    ),
    Metric("losses/temperature", "", "weight of the entropy", SAC_ONLY),
    Metric(
        "losses/action_std",
        "",
        "mean standard deviation of the actions before they are squashed",
        SAC_ONLY,
    ),
    Metric(
        "losses/target_steps",
        STEPS,
        "mean number of rewards that a target adds up before it uses the critics, 1 to 3: more where the policy would "
        "still act as it did",
        SAC_ONLY,
    ),
    Metric("losses/kept_rows", STEPS, "in the replay buffer", SAC_ONLY),
    Metric("losses/gradient_steps", "count", "gradient steps of this iteration", SAC_ONLY),
)

TIME = (
    Metric("perf/iteration_s", "s", "from the end of the last iteration to the end of this one"),
    Metric(
        "perf/collect_s",
        "s",
        "from the request, or from the last segment of the iteration before if that is later, to the last segment",
    ),
    Metric(
        "perf/env_s",
        "s",
        "in the environments' constructors, `step` and `reset`, replays included; mean over the actors",
    ),
    Metric(
        "perf/act_s", "s", "the rest of making segments: policy, bookkeeping; mean over the actors"
    ),
    Metric(
        "perf/wait_s",
        "s",
        "the rest of the collection: waiting for slower actors, for actors with more samplers, and for Ray",
    ),
    Metric(
        "perf/transfer_s",
        "s",
        "in the driver: sending requests and taking in segments; 0 in process",
    ),
    Metric("perf/update_s", "s", "batch and SGD"),
    Metric(
        "perf/other_s",
        "s",
        "the rest of the iteration: writing metrics and checkpoints, showing progress",
    ),
    Metric("perf/env_frac", SHARE, "share of `perf/env_s`; the six shares add up to 1"),
    Metric("perf/act_frac", SHARE, "share of `perf/act_s`"),
    Metric("perf/wait_frac", SHARE, "share of `perf/wait_s`"),
    Metric("perf/transfer_frac", SHARE, "share of `perf/transfer_s`"),
    Metric("perf/update_frac", SHARE, "share of `perf/update_s`"),
    Metric("perf/other_frac", SHARE, "share of `perf/other_s`"),
    Metric("perf/slowest_actor_s", "s", "the longest time that one actor spent on its segments"),
    Metric(
        "perf/env_step_ms",
        "ms",
        "mean time of one env step inside the simulator, resets spread over the steps",
    ),
    Metric("replay/steps", STEPS, "repeated in this iteration, to restore open episodes"),
    Metric("replay/s", "s", "spent on replays, summed over actors; `perf/env_s` includes it"),
)

WITH_BASELINE = "with `--baseline`"
EVALUATIONS = (
    Metric("eval/iteration", "count", "the iteration whose policy was evaluated"),
    Metric(
        "eval/global_step",
        STEPS,
        "of training, at the end of that iteration; TensorBoard shows the result there",
    ),
    Metric("eval/episodic_return", "reward", "mean undiscounted return"),
    Metric("eval/return_std", "reward", "standard deviation of the returns"),
    Metric("eval/return_min", "reward", "lowest return"),
    Metric("eval/return_max", "reward", "highest return"),
    Metric("eval/episodic_length", STEPS, "mean length"),
    Metric(
        "eval/success_rate",
        SHARE,
        'share of episodes with a true `info["is_success"]` in their last step',
        "if an episode reports it",
    ),
    Metric("eval/episodes", "count", "episodes that ended without a fault"),
    Metric(
        "eval/at_bound_frac",
        SHARE,
        "share of the steps in which the greedy policy takes an element of a Box action at a bound, for the element "
        "and side with the largest share; a third or more is logged",
        "with Box actions",
    ),
    Metric("eval/s", "s", "from the request to the result"),
    Metric(
        "eval/baseline_return",
        "reward",
        "mean return of the controller of `--baseline` in its episodes, which have the same seeds",
        WITH_BASELINE,
    ),
    Metric(
        "eval/baseline_difference",
        "reward",
        "mean over pairs of episodes with the same seed of the policy's return minus the baseline's",
        WITH_BASELINE,
    ),
    Metric(
        "eval/baseline_difference_low",
        "reward",
        "where its 95 % interval (Student's t) begins; above 0, the policy is better",
        "with `--baseline`, from two episodes on",
    ),
    Metric(
        "eval/baseline_difference_high",
        "reward",
        "where its 95 % interval ends; below 0, the policy is worse",
        "with `--baseline`, from two episodes on",
    ),
    Metric(
        "eval/baseline_pairs",
        "count",
        "pairs of episodes that were compared; 0 if the environment is declared nondeterministic: then the difference "
        "is that of the means, and its interval Welch's",
        WITH_BASELINE,
    ),
)

OF_INFO = (
    Metric("info/NAME", "", "mean over all env steps of the iteration that have the number"),
    Metric("info/NAME_min", "", "lowest value"),
    Metric("info/NAME_max", "", "highest value"),
    Metric(
        "eval/info/NAME_sum",
        "",
        "sum over the steps of an episode, mean over the episodes of an evaluation",
    ),
    Metric("eval/info/NAME", "", "mean over the steps of an episode, mean over the episodes"),
    Metric("eval/info/NAME_last", "", "value in the last step that has it, mean over the episodes"),
)

INCIDENTS: dict[IncidentKind, str] = {
    IncidentKind.ACTOR_LOST: "an actor's process or node died; it was replaced, and its samplers were rebuilt",
    IncidentKind.ACTOR_HUNG: "an actor stayed too long in one step, reset or constructor; it was killed and replaced",
    IncidentKind.ACTOR_RECYCLED: "an actor exceeded `--recycle-after`; it was replaced between two segments",
    IncidentKind.SAMPLERS_MOVED: "an actor could not be replaced for a while; other actors rebuilt its samplers",
    IncidentKind.REPLAY_MISMATCH: "the replay of an open episode ended in another state; the episode was abandoned, "
    "and a new one began",
    IncidentKind.EPISODE_ABANDONED: "an open episode was abandoned instead of replayed: with `--no-replay`, if the "
    "environment is declared nondeterministic, or if a vector resets its sub-environments by itself or had "
    "to start again",
    IncidentKind.BAD_STEP: "an environment returned something invalid; it was rebuilt, and a new episode started",
    IncidentKind.ENV_RAISED: "an environment raised; it was rebuilt, and a new episode started",
    IncidentKind.OUTSIDE_SPACE: "an observation exceeded the limits of its space and was used; reported once for each "
    "sampler",
    IncidentKind.OWN_STATE: "the `get_state` of an environment failed, takes a tenth of its time, or does not restore "
    "the environment together with `set_state`",
    IncidentKind.MASK_NOT_USED: "the info of the first reset has an `action_mask` that `--action-mask auto` does not "
    "read, or the actions have no choices",
    IncidentKind.IMAGE_CONSTANT: "in the first segment, an image never changed: the simulator may draw nothing",
    IncidentKind.LARGE_OBSERVATIONS: "with `--no-norm-obs`, in the first segment, an element of the observation was "
    "beyond 10 most of the time",
    IncidentKind.GLOBAL_STATE: "the code of an environment changed the state of the whole process, such as NumPy's "
    "error state or the current folder; reported once for each state. dppo continues with its own state",
    IncidentKind.SMALL_OBSERVATIONS: "in the first segment, all numbers of the observation were tiny with "
    "`--no-norm-obs`, or a single one beside others, which normalization leaves tiny",
    IncidentKind.PRECISION_LOST: "in the first segment, a float64 observation changed by less than float32, in which "
    "it is stored, can show",
    IncidentKind.OTHER_CPU: "an actor or learner computes different last bits than the process that drives the run, so "
    "the result depends on which process runs where",
    IncidentKind.LEARNERS_REBUILT: "a learner died or stopped answering; all were restarted, and repeated the update",
    IncidentKind.SEGMENTS_LOST: "a node was lost with segments that no learner had fetched; all actors were restarted, "
    "and the same segments were collected again",
    IncidentKind.EVALUATION_FAULT: "an episode of an evaluation failed, or the rest of an evaluation was left out",
    IncidentKind.CHECKPOINT_FAILED: "a checkpoint in the middle of the run could not be written; the next interval "
    "tries again",
}

FAULTS = (
    Metric(
        "incidents/KIND",
        "count",
        "incidents of a kind, listed below, since the start of the run",
        "if there were any",
    ),
    Metric(
        "faults/NAME",
        "count",
        "faults of one environment and kind, such as `faults/sampler 3, env 0: ValueError in step`",
        "if there were any",
    ),
    Metric(
        "faults/steps lost",
        STEPS,
        "in episodes that were abandoned after a fault",
        "if there were any",
    ),
)

METRICS: dict[str, tuple[Metric, ...]] = {
    "Progress": PROGRESS,
    "Episodes": EPISODES,
    "Learning": LEARNING,
    "Where the time goes": TIME,
    "Evaluations": EVALUATIONS,
    "Numbers from info": OF_INFO,
    "Incidents": FAULTS,
}
"""The metrics under the headings of their page."""
