"""Names in other libraries: of settings that we have under another name, and of what we do in another way.

`docs/COMPARISON.md` is printed from `other_names.yaml` and these tables, and suggestions for unknown names are taken
from them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from dppo.errors import ConfigError


@dataclass(frozen=True)
class FlagNames:
    """A flag of ours, and its names in other libraries, with - between the words."""

    ours: str
    sb3: str = ""
    """Names in Stable-Baselines3 and its zoo; "same" is our own name."""
    rllib: str = ""
    cleanrl: str = ""
    guesses: str = ""
    """Names in other libraries, and usual guesses."""

    @property
    def theirs(self) -> set[str]:
        names = f"{self.sb3} {self.rllib} {self.cleanrl} {self.guesses}".split()
        return {*names} - {"same"}


@cache
def other_names() -> list[FlagNames]:
    """Read `other_names.yaml`."""
    import yaml

    rows: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_bytes())
    return [FlagNames(ours, **names) for ours, names in rows.items()]


class Replacement(NamedTuple):
    """Names in other libraries of something that has no setting here, or one with another meaning."""

    names: str
    answer: str
    """One sentence; settings are between backticks, as in errors."""
    libraries: str = ""
    """Library and name there, for the documents."""


REPLACEMENTS = (
    Replacement(
        "policy-kwargs model-config",
        "The layers are `hidden_sizes` and `activation`; arguments of a network of your own are `model_kwargs`.",
        "SB3 policy_kwargs, RLlib model",
    ),
    Replacement(
        "normalize vec-normalize normalize-kwargs observation-filter",
        "Observations and rewards are normalized by default, and the statistics are saved with the policy; "
        "`norm_obs=False` and `norm_reward=False` turn it off.",
        "SB3 VecNormalize, zoo normalize, RLlib MeanStdFilter",
    ),
    Replacement(
        "num-minibatches num-mini-batch nminibatches",
        "`minibatch_size` is the number of rows of a minibatch, not the number of minibatches: divide the batch, "
        "num_samplers x envs_per_sampler x num_steps, by that number.",
        "CleanRL num_minibatches",
    ),
    Replacement(
        "train-batch-size train-batch-size-per-learner",
        "The batch is num_samplers x envs_per_sampler x num_steps: set `num_samplers` and `num_steps`.",
        "RLlib train_batch_size",
    ),
    Replacement(
        "tensorboard-log tensorboard tb-log tb",
        "TensorBoard events are always written into the folder of the run: `tensorboard --logdir runs`.",
        "SB3 tensorboard_log",
    ),
    Replacement("algorithm", "`algo` is ppo or sac.", "RLlib PPOConfig, SACConfig"),
    Replacement(
        "vec-env vec-env-type vec-env-class vec-env-cls vec-env-kwargs dummy-vec-env subproc-vec-env",
        "Environments run in this process with `num_actors=0`, in processes of their own with `num_actors=8`.",
        "SB3 DummyVecEnv, SubprocVecEnv",
    ),
    Replacement(
        "capture-video record-video video-folder",
        "Any training episode can be filmed afterwards: `dppo replay RUN --episode 3 --video out.mp4`.",
        "CleanRL capture_video",
    ),
    Replacement(
        "wandb-project-name wandb-project wandb-entity",
        "W&B reads these from its environment variables: set WANDB_PROJECT and WANDB_ENTITY, and use `track`.",
        "CleanRL wandb_project_name",
    ),
    Replacement("n", "The number of env steps is `total_timesteps`.", "zoo -n"),
    Replacement(
        "callback callbacks",
        "Pass observers, which are called at each iteration: dppo.train(config, observers=[...]).",
        "SB3 callback, RLlib callbacks",
    ),
    Replacement(
        "env-wrapper wrapper-class",
        "`wrappers` takes the import paths of wrappers: package.module:Class.",
        "SB3 wrapper_class, zoo env_wrapper",
    ),
    Replacement(
        "torch-deterministic deterministic-torch",
        "Runs are equal to the last bit without any setting. Leave it out.",
        "CleanRL torch_deterministic",
    ),
    Replacement(
        "use-sde use-sde-at-warmup sde-sample-freq",
        "Noise that is correlated over steps is `noise=pink`, or with `algo=sac` the default, `noise=wide`.",
        "SB3 use_sde",
    ),
    Replacement(
        "stats-window-size metrics-num-episodes-for-smoothing",
        "Returns are means of the last 100 episodes; an observer gets each episode.",
        "SB3 stats_window_size",
    ),
    Replacement(
        "save-model checkpoint-at-end save-freq checkpoint-freq save-interval checkpoint-interval",
        "Checkpoints are always written: every `checkpoint_interval_s` seconds (not env steps), and at the end.",
        "SB3 CheckpointCallback, save_freq, RLlib checkpoint_freq, CleanRL save_model",
    ),
    Replacement(
        "best-model-save-path eval-callback callback-on-new-best",
        "The checkpoint of the best evaluation is kept as checkpoints/best.json, with `eval_every`.",
        "SB3 EvalCallback",
    ),
    Replacement(
        "reset-num-timesteps",
        "`dppo train --resume RUN`, or dppo.train(config, resume=run), continues a run; `total_timesteps` counts from "
        "its start.",
        "SB3 learn(reset_num_timesteps=False)",
    ),
    Replacement(
        "policy policy-class features-extractor features-extractor-class features-extractor-kwargs",
        "The default network fits the observations; `model` is for a network of your own.",
        "SB3 policy, features_extractor_class",
    ),
    Replacement(
        "clip-range-vf vf-clip-param",
        "`clip_vloss=True` clips the value loss, with the range of `clip_coef`.",
        "SB3 clip_range_vf, RLlib vf_clip_param",
    ),
    Replacement(
        "hyperparams hyperparameters hyper-params",
        "Each hyperparameter is a setting of its own, such as `gamma=0.98`.",
        "zoo --hyperparams",
    ),
    Replacement(
        "deterministic",
        "Policy.act and `dppo eval` take the most likely actions; to sample, use "
        "act(obs, generator=np.random.default_rng(1)).",
        "SB3 predict(deterministic=True)",
    ),
    Replacement(
        "monitor monitor-dir monitor-wrapper monitor-kwargs",
        "Returns and lengths of training episodes are recorded without a wrapper, in episodes.jsonl of the run.",
        "SB3 Monitor",
    ),
    Replacement(
        "set-attr get-attr env-method set-env",
        "An observer changes the options with which environments are reset: run.set_env(difficulty=2).",
        "SB3 set_attr, env_method",
    ),
    Replacement(
        "early-stop early-stopping stop reward-threshold stop-reward",
        "An observer whose on_iteration returns True stops the run: examples/early_stop.py.",
        "SB3 StopTrainingOnRewardThreshold, RLlib stop",
    ),
    Replacement(
        "optimizer optimizer-class optimizer-kwargs weight-decay adam-eps",
        "The optimizer is Adam, with `learning_rate` and `max_grad_norm`.",
        "SB3 optimizer_class",
    ),
    Replacement(
        "train-freq",
        "`gradient_steps` is a number per env step: divide the one of Stable-Baselines3 by train_freq x n_envs.",
        "SB3 train_freq, gradient_steps",
    ),
    Replacement(
        "n-critics target-update-interval",
        "Soft actor-critic has two critics, whose targets move by `tau` in each gradient step.",
        "SB3 n_critics, target_update_interval",
    ),
    Replacement(
        "eval-freq eval-interval evaluation-interval evaluation-freq",
        "`eval_every` counts the env steps of all environments together, not those of one environment or iterations.",
        "SB3 eval_freq, RLlib evaluation_interval",
    ),
)


ABSENT_NAMES = {
    "PPO": "Train with dppo.train(dppo.Config(env_id='CartPole-v1')).",
    "BaseCallback": "Observers are subclasses of dppo.Observer: dppo.train(config, observers=[...]).",
    "CheckpointCallback": "Checkpoints are always written, and dppo.train(config, resume=run) continues from one.",
    "DummyVecEnv": "Pass the environment's id: dppo.Config(env_id='CartPole-v1', num_samplers=8).",
    "EvalCallback": "Evaluations are a setting: dppo.Config(env_id='CartPole-v1', eval_every=50_000).",
    "Monitor": "Returns and lengths of training episodes are recorded without a wrapper.",
    "StopTrainingOnRewardThreshold": "An observer whose on_iteration returns True stops: examples/early_stop.py.",
    "SubprocVecEnv": "Environments run in processes: dppo.Config(env_id='CartPole-v1', num_actors=8).",
    "A2C": "PPO is closest: dppo.train(dppo.Config(env_id='CartPole-v1')).",
    "SAC": "Train with dppo.train(dppo.Config(env_id='Pendulum-v1', algo='sac')).",
    "check_env": "`dppo doctor module:Name` examines an environment.",
    "evaluate_policy": "Use dppo.evaluate(result), which returns returns and lengths.",
    "load": "Use dppo.load_policy(run_dir).",
    "make_vec_env": "Pass the environment's id: dppo.Config(env_id='CartPole-v1', num_samplers=8).",
    "VecNormalize": "Observations and rewards are normalized by default, and the statistics are saved with the policy.",
}
"""Names that other libraries have at their top, and what to use here."""

MODEL_METHODS = {
    "learn": "Use dppo.train(config, resume=run), which continues a run.",
    "load": "Use dppo.load_policy(run_dir).",
    "predict": "Use dppo.load_policy(run), whose act(obs) returns the action.",
    "save": "The folder of the run holds the policy: copy the folder.",
    "set_env": "Use dppo.evaluate(run, env=...), which plays in another environment.",
}
"""Methods of a model in other libraries, and what to use here."""

METRICS = {
    "rollout/ep_rew_mean": "charts/episodic_return",
    "rollout/ep_len_mean": "charts/episodic_length",
    "rollout/success_rate": "charts/success_rate",
    "eval/mean_reward": "eval/episodic_return",
    "eval/mean_ep_length": "eval/episodic_length",
    "time/total_timesteps": "global_step",
    "time/fps": "charts/SPS",
    "train/policy_gradient_loss": "losses/policy_loss",
    "train/value_loss": "losses/value_loss",
    "train/approx_kl": "losses/approx_kl",
    "train/clip_fraction": "losses/clipfrac",
}
"""Metrics of Stable-Baselines3, and ours."""


def no_attribute(owner: object, name: str, answers: Mapping[str, str]) -> AttributeError:
    """Return the error of an attribute that `owner` does not have, with what to use here if `answers` has it."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in answers:
        return AttributeError(f"{message}. {answers[name]}")
    return AttributeError(message, name=name, obj=owner)  # Python suggests similar names


class AbsentName:
    """Stands for a name of another library, and raises what to use here as soon as it is used."""

    def __init__(self, name: str) -> None:
        self._fact = f"dppo.{name} does not exist."
        self._answer = ABSENT_NAMES[name]

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise the answer."""
        raise ConfigError(f"{self._fact} {self._answer}")

    __mro_entries__ = __call__  # as a base class

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self._fact} {ABSENT_NAMES.get(name, self._answer)}")


def meant_by(name: str) -> list[str]:
    """Return our flags for the name `n-steps` of another library; the first that a command has is suggested."""
    return [row.ours for row in other_names() if name in row.theirs]


def answer_to(name: str, names: Collection[str]) -> str | None:
    """Return advice for `name`, a setting of another library that dppo does not have; None if there is no advice.

    Settings are between backticks. A name that is one of ours, in a command that lacks it, has no answer.
    """
    for row in REPLACEMENTS:
        if name in row.names.split() and name not in names:
            return row.answer
    return None


def tables() -> Iterator[str]:
    """Yield the lines of the tables of docs/COMPARISON.md."""
    yield "| dppo | Stable-Baselines3 | RLlib | CleanRL |"
    yield "|---|---|---|---|"
    for row in other_names():
        libraries = row.sb3, row.rllib, row.cleanrl
        if any(libraries):
            yield f"| `{row.ours}` | {' | '.join(map(_as_code, libraries))} |"
    yield ""
    yield "| there | here |"
    yield "|---|---|"
    for theirs, ours in METRICS.items():
        yield f"| SB3 {theirs} | The metric is {ours}. |"
    for different in REPLACEMENTS:
        yield f"| {different.libraries} | {different.answer} |"


def _as_code(names: str) -> str:
    codes = [f"`{name.replace('-', '_')}`" for name in names.split()]
    return ", ".join(codes).replace("`same`", "the same")
