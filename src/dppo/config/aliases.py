"""Our flags, and the names of the same thing in other libraries."""

ALIASES = {
    "--actors": "workers num-workers n-workers num-env-runners num-rollout-workers n-jobs num-cpus n-actors",
    "--num-actors": "workers num-workers n-workers num-env-runners num-rollout-workers n-jobs num-cpus n-actors",
    "--seeds": "n-seeds num-seeds repeats n-runs num-runs",
    "--out": "out-dir output output-dir outdir save-path",
    "--episodes": "n-eval-episodes num-episodes n-episodes num-eval-episodes",
    "--eval-every": "eval-freq eval-interval evaluation-interval evaluation-freq",
    "--eval-episodes": "n-eval-episodes num-eval-episodes evaluation-duration",
    "--stochastic": "sample",
    "--env-id": "env env-name environment gym-id task",
    "--on-env-fault": "on-bad-step",
    "--learning-rate": "lr step-size alpha",
    "--num-samplers": "n-envs num-envs num-env nenvs n-env",
    "--envs-per-sampler": "num-envs-per-worker num-envs-per-env-runner envs-per-worker envs-per-actor",
    "--num-steps": "n-steps rollout-length rollout-fragment-length rollout-steps horizon unroll-length nsteps",
    "--total-timesteps": "timesteps n-timesteps num-timesteps total-steps max-steps steps num-env-steps",
    "--update-epochs": "n-epochs num-epochs epochs num-sgd-iter k-epochs ppo-epoch ppo-epochs noptepochs",
    "--minibatch-size": "batch-size sgd-minibatch-size mini-batch-size num-minibatches num-mini-batch nminibatches "
    "train-batch-size",
    "--clip-coef": "clip clip-range clip-param clip-ratio eps-clip cliprange clip-eps",
    "--clip-vloss": "clip-range-vf vf-clip-param",
    "--ent-coef": "entropy-coeff entropy-coef entropy-cost entropy entropy-bonus",
    "--vf-coef": "vf-loss-coeff value-loss-coef value-coef value-coeff",
    "--gae-lambda": "lambda lam gae lambda-",
    "--gamma": "discount discount-factor",
    "--max-grad-norm": "grad-clip clip-grad gradient-clip",
    "--target-kl": "kl-target kl",
    "--norm-adv": "normalize-advantage normalize-advantages norm-advantage",
    "--norm-obs": "normalize-obs normalize-observations norm-observations obs-norm",
    "--norm-reward": "normalize-reward normalize-rewards norm-rewards reward-norm",
    "--hidden-sizes": "net-arch hidden-dims hidden-dim hidden-layers fcnet-hiddens hidden-size layers",
    "--model": "policy network",
    "--device": "cuda gpu num-gpus",
    "--name": "exp-name experiment-name run-name",
    "--run-dir": "logdir log-dir save-dir output-dir outdir save-path log-folder out",
    "--checkpoint-interval-s": "checkpoint-freq save-freq save-interval checkpoint-interval",
    "--segment-timeout-s": "timeout",
    "--progress": "verbose quiet progress-bar",
    "--resume": "load restore load-checkpoint checkpoint trained-agent",
}


def meant_by(name: str) -> list[str]:
    """Return our flags for the name `n-steps` of another library; the first that a command has is suggested."""
    return [flag for flag, theirs in ALIASES.items() if name in theirs.split()]
