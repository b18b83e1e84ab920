"""Texts with an instruction that no test carries out, and why.

A text goes here only if carrying it out takes a cluster, a package, a device or a person; else write a row.
"""

from __future__ import annotations

NOT_EXECUTED: tuple[tuple[str, str, str], ...] = (
    (
        "plugins.py",
        "Install dppo again: python -m pip install dppo",
        "it takes a damaged installation",
    ),
    (
        "transports/ray/actor.py",
        "env_id: the environment cannot be loaded in an actor: {}. It must be i",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "engine/balancing.py",
        "actor {}{} needs {} s for a segment, a typical actor {} s, which costs",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "engine/advice.py",
        "If it may have no more, use `num_actors={}`",
        "as in test_single_instances.py",
    ),
    (
        "engine/advice.py",
        "Look for the reason in the simulator's own log",
        "it is the user's simulator",
    ),
    (
        "engine/hosting.py",
        "Make room in the cluster (see `ray status`), and resume",
        "it takes a cluster",
    ),
    (
        "engine/hosting.py",
        "lower `num_actors` or `cpus_per_actor`; if starting takes longer, rais",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "hosts/keeper.py",
        "Use fewer actors there, or set recycle_after",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/collecting.py",
        "Pass module:factory, or a function that holds no open files, locks or ",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/transport.py",
        "the weights could not be sent to the actors: {}. Free memory or disk s",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "engine/actors.py",
        "made no environment within {}; if its constructor takes longer, raise ",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "engine/actors.py",
        "{} and counts as hung; if a single step or reset takes longer, raise {}",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "learners/ranks.py",
        "Lower `num_learners`, `learner_cpus` or `learner_gpus`.",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "learners/ranks.py",
        "the optimizer's state was lost with the learners' nodes ({}). Use --re",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "learners/ranks.py",
        "{} The group of {} learners was rebuilt {} times in a row without fini",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/capacity.py",
        "Set `address`, or name the resources of one.",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/capacity.py",
        "Use at most `num_actors={}`, raise",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/capacity.py",
        "Use at most {}, {}",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/capacity.py",
        "Use fewer processes, a fraction such as `actor_gpus=0.25` to share a G",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/capacity.py",
        "Use fewer, or lower `learner_cpus` or `cpus_per_actor`.",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/capacity.py",
        "actors_per_node={}: this machine is the only node, and {} actors{} are",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/capacity.py",
        "lower `cpus_per_actor` (0.5 lets two share a CPU)",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/capacity.py",
        "raise `actors_per_node`",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/capacity.py",
        "{}, or add nodes.",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/connecting.py",
        "Check it with `ray status --address {}`, or {} to start Ray here.",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/connecting.py",
        "Check it with `ray status --address {}`. If the cluster uses tokens, s",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/connecting.py",
        "dashboard=True has no effect: this process is connected to the Ray clu",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/connecting.py",
        "dashboard=True has no effect: {}={} is a running cluster with its own ",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/session.py",
        "the disk of {} is {} full: Ray stops creating objects at {}. Free disk",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/connecting.py",
        "unset RAY_ADDRESS",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/connecting.py",
        "use that one, or call ray.shutdown() first.",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/session.py",
        "{} MiB free, too little for Ray's object store ({} MiB): it moves to d",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/session.py",
        "{} MiB free; {}. In Docker, use a larger --shm-size.",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/versions.py",
        "install the cluster's Ray here",
        "it takes a second version of Ray",
    ),
    (
        "transports/ray/calls.py",
        "Ray has failed: {}. Resume from the last checkpoint (--resume).",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/watch.py",
        "{} has not answered for {} s. The run waits where it has to, {} s at m",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/watch.py",
        "{}, and the run cannot continue without it. Resume ",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/failures.py",
        "An actor failed in dppo itself; please report this. {}",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/failures.py",
        "Install the same dppo on every node.",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/pickling.py",
        "Pass it as module:Class",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/failures.py",
        "Use fewer actors there, or set recycle_after",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "transports/ray/pickling.py",
        "Use plain data",
        "it takes a cluster, or a fault of one: see docs/FAULTS.md and tests/cluster",
    ),
    (
        "tools/compare/__init__.py",
        "If the environment is deterministic for a given seed, this is a bug in",
        "there is nothing to carry out",
    ),
    (
        "tools/compare/__init__.py",
        "Noise: an efficiency above 100 %, or a speed-up above that of perfect ",
        "what the user changes at the machine",
    ),
    (
        "tools/compare/__init__.py",
        "Report the time until the mean episode return reaches this value, e.g.",
        "a help text",
    ),
    (
        "tools/compare/__init__.py",
        "To compare runs that exist",
        "carried out by tests/commands/test_plot.py::test_compare_leads_from_folders_of_runs_to_plot",
    ),
    (
        "tools/compare/__init__.py",
        "Train with several numbers of actors, and compare the mean episode ret",
        "a help text",
    ),
    (
        "tools/doctor/run_findings.py",
        ". Use {}",
        "the beginning of advice of tools/doctor/findings.py; test_doctor.py runs the command that it prints",
    ),
    (
        "commands/eval.py",
        "Use this class for the run's own network instead of the one that the c",
        "a help text",
    ),
    (
        "tools/plot.py",
        "label={}: pass one name for each line",
        "carried out by tests/commands/test_plot.py: the names that it asks for are accepted",
    ),
    (
        "tools/report/command.py",
        "{}: {} kB. Open it in a browser.",
        "a browser shows it: tests/records/test_report.py",
    ),
    (
        "tools/seeds.py",
        "seeds_at_once={}: must be at least 1. Leave it out.",
        "several processes train then: tests/commands/test_seeds.py",
    ),
    (
        "commands/test.py",
        "{}: dppo was installed without its tests. Run ./dppo test in a clone.",
        "it takes an installation without a checkout",
    ),
    (
        "commands/train.py",
        "Train a policy with PPO, and write checkpoints, metrics and a learning",
        "a help text",
    ),
    (
        "commands/train.py",
        "Train a run for each of these seeds, in processes of their own and in ",
        "a help text",
    ),
    (
        "tools/tune.py",
        "Train with settings that Optuna proposes, and print the best as a comm",
        "a help text",
    ),
    (
        "tools/tune.py",
        "Write a list of choices, or {low: 1, high: 2}.",
        "tests/commands/test_tune.py refuses and accepts such studies",
    ),
    (
        "tools/tune.py",
        "out={}: has a study with other settings. Use another folder.",
        "tests/commands/test_tune.py refuses and accepts such studies",
    ),
    (
        "tools/tune.py",
        "tune: all settings of the search space are given, so none is left to t",
        "tests/commands/test_tune.py refuses and accepts such studies",
    ),
    (
        "tools/tune.py",
        "{}: no trial has finished with an episode. Raise `total_timesteps`.",
        "tests/commands/test_tune.py refuses and accepts such studies",
    ),
    (
        "commands/versions.py",
        "cd {} && {}/bin/python -m pip install -c constraints.txt -e '.[test]'",
        "it installs packages; tests/test_versions.py has the command",
    ),
    (
        "config/settings.py",
        "a Config does not change. Make a copy",
        "carried out by tests/commands/test_coming_from.py",
    ),
    (
        "config/config.py",
        "settings are passed by their names. Use dppo.Config(env_id={}{}).",
        "carried out by tests/commands/test_coming_from.py",
    ),
    (
        "config/aliases.py",
        "Train with dppo.train(dppo.Config(env_id='Pendulum-v1', algo='sac')).",
        "carried out by tests/commands/test_coming_from.py",
    ),
    (
        "config/aliases.py",
        "Pass observers, which are called at each iteration",
        "carried out by tests/commands/test_coming_from.py",
    ),
    (
        "config/aliases.py",
        "Pass the environment's id",
        "carried out by tests/commands/test_coming_from.py",
    ),
    (
        "config/aliases.py",
        "Runs are equal to the last bit without any setting. Leave it out.",
        "there is nothing to carry out",
    ),
    (
        "config/aliases.py",
        "The batch is num_samplers x envs_per_sampler x num_steps",
        "carried out by tests/commands/test_coming_from.py",
    ),
    (
        "config/aliases.py",
        "Train with dppo.train(dppo.Config(env_id='CartPole-v1')).",
        "the line of the README's example",
    ),
    ("config/aliases.py", "Use dppo.evaluate(result)", "the line of the README's example"),
    ("config/aliases.py", "Use dppo.load_policy(run_dir).", "the line of the README's example"),
    (
        "config/aliases.py",
        "set WANDB_PROJECT and WANDB_ENTITY",
        "variables of W&B; tests/records/test_tracking.py sets others of them",
    ),
    (
        "config/arguments.py",
        "{} Did you mean {}?",
        "carried out by tests/commands/test_coming_from.py",
    ),
    (
        "config/checks.py",
        ", or unset {} to start Ray here",
        "with a variable of the cluster: tests/cluster/test_session.py",
    ),
    (
        "config/reading.py",
        "as in files of rl-baselines3-zoo",
        "carried out by tests/commands/test_coming_from.py",
    ),
    (
        "config/resume.py",
        "use another `run_dir`",
        "several processes train then: tests/commands/test_seeds.py",
    ),
    ("config/values.py", "Use a number.", "carried out by tests/commands/test_coming_from.py"),
    (
        "config/values.py",
        "for a linear decay to 0, or `desired_kl` to adapt it.",
        "carried out by tests/commands/test_coming_from.py",
    ),
    (
        "tools/doctor/findings.py",
        ", or use --no-replay",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "Give it a time limit (gymnasium.wrappers.TimeLimit)",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "Give it a timeout: a run leaves it alone",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "Return float32, or scale them to about 1",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "Return from get_state all that later steps depend on, and set all of i",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "Use fewer --num-samplers, or more machines",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "Use smaller --num-steps for the doctor",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "a second instance cannot be made, nor in another process",
        "it is the user's simulator",
    ),
    (
        "tools/doctor/findings.py",
        "goes on, so that the process does not end; without actors, neither doe",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "and another process could make one meanwhile",
        "test_doctor.py makes the command's settings",
    ),
    (
        "tools/doctor/findings.py",
        "instances in one process disturb each other",
        "test_doctor.py makes the command's settings",
    ),
    (
        "tools/doctor/findings.py",
        "it may stay at a bound. Use --action-bounds rescale",
        "carried out by tests/test_doctor.py: with rescale, the warning is gone",
    ),
    (
        "tools/doctor/findings.py",
        "its episodes were not played again, for lack of time. Raise --seconds",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "memory grows by {} MB in 1,000 steps, {} GB in a whole run. Free it, r",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "playing changes {}, which other code of the process relies on. Restore",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "rewards or returns reach {}; values are learned best from about 1. Use",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "set all of it in reset. Else a replaced actor changes the result",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "use actors (--num-actors), which are replaced: without them, it ends t",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "use actors, which are replaced, with --start-timeout-s, --reset-timeou",
        "what the user changes in a simulator; test_doctor.py has environments with and without each",
    ),
    (
        "tools/doctor/findings.py",
        "with a second instance in its process: {}",
        "test_doctor.py makes the command's settings",
    ),
    (
        "envs/checks/first_segment.py",
        "leave SDL_VIDEODRIVER unset)",
        "a person looks at the picture",
    ),
    (
        "envs/preparation.py",
        "Install it: {} -m pip install opencv-python-headless",
        "it takes a package that the tests do not install",
    ),
    (
        "envs/names.py",
        "Install ale-py, and write ale_py:{}.",
        "it takes a package that the tests do not install",
    ),
    (
        "envs/kinds.py",
        "Return a single environment here; training also takes vectors with the",
        "tests/test_joint_envs.py trains with vectors",
    ),
    (
        "envs/kinds.py",
        "Return pettingzoo.utils.aec_to_parallel(env), if its agents may act at",
        "it takes a package that the tests do not install",
    ),
    (
        "envs/kinds.py",
        "a dm_env environment ({}). Wrap it with shimmy.DmControlCompatibilityV",
        "it takes a package that the tests do not install",
    ),
    (
        "envs/names.py",
        "env_id={}: was a function defined in a program, which cannot be found ",
        "dppo.train(config, resume=...) is carried out by tests/remedies/test_policies.py",
    ),
    (
        "envs/names.py",
        "env_id={}: {}. Use the pip of {}.",
        "it takes a package that the tests do not install",
    ),
    (
        "envs/own_state.py",
        "{}: get_state takes {}, {} of its time. Raise `num_steps`.",
        "it depends on the time that the methods take",
    ),
    (
        "numerics/fingerprint.py",
        "Use one type of CPU, `numerics=portable` or `on_other_cpu=warn`",
        "it takes two types of CPU; tests/test_numerics.py simulates them",
    ),
    (
        "policies/bounds.py",
        "Unless an on-off controller is right here",
        "carried out by tests/test_at_bounds.py",
    ),
    (
        "policies/player.py",
        "Pass `env_id` and `env_kwargs`.",
        "a checkpoint that no version of dppo writes",
    ),
    (
        "tools/export/policies.py",
        "Write obs.shape[0] in place of len(obs)",
        "tests/ppo/test_export.py exports such networks",
    ),
    (
        "tools/export/policies.py",
        "{}: the model card. Look at it, and at {} for what is private, then up",
        "a person looks at the card",
    ),
    (
        "policies/policy.py",
        "{}: {}. Pass the folder of a run.",
        "a checkpoint that no version of dppo writes",
    ),
    ("ppo/learning/gpu.py", "End what else uses it (`nvidia-smi`), or use", "needs a GPU"),
    (
        "policies/player.py",
        "not passed to another environment; pass those it needs",
        "carried out by test_evaluate.py",
    ),
    (
        "ppo/learning/gpu.py",
        "If it does not fit, use `micro_batch_size={}`",
        "test_gpu.py does so once it did not fit",
    ),
    (
        "ppo/learning/gpu.py",
        "Lower `num_steps`, `num_samplers` or the network's",
        "a limit in bytes differs by machine",
    ),
    (
        "ppo/learning/gpu.py",
        "Resume the run with `device=cpu`, or on another GPU",
        "benchmarks/gpu.py does, on a GPU",
    ),
    ("ppo/learning/gpu.py", "on the device of the observations (device=obs.device)", "needs a GPU"),
    (
        "ppo/learning/gpu.py",
        "the GPU cannot be used ({}). Use `device=cpu`.",
        "needs a GPU that is broken",
    ),
    (
        "ppo/networks/modules.py",
        "Use `precision=float32`, or `device=cuda`.",
        "it depends on the CPU or GPU: tests/ppo/test_precision.py",
    ),
    (
        "ppo/networks/modules.py",
        "precision=bfloat16: {} has no instructions for bfloat16, which came wi",
        "it depends on the CPU or GPU: tests/ppo/test_precision.py",
    ),
    ("records/files/disk.py", "Check the disk.", "it is a disk of the user that fails"),
    ("records/files/disk.py", "Free some disk space.", "it is a disk of the user that fails"),
    (
        "records/files/disk.py",
        "Delete files of yours on this disk, or use a folder on another one.",
        "it is a quota of a disk, which only an administrator sets",
    ),
    (
        "records/files/disk.py",
        "Its file system takes no file of this size. Use a folder on another disk.",
        "it is a file system such as FAT32, which only an administrator mounts",
    ),
    (
        "records/files/disk.py",
        "Its file system is mounted read-only. Use a folder on another disk.",
        "only an administrator mounts a file system read-only",
    ),
    ("records/files/disk.py", "Restore it from a backup.", "it is a disk of the user that fails"),
    (
        "records/files/episode_writer.py",
        "%s: at %d MB, its older half is dropped. Record fewer to keep more.",
        "after 64 MB of episodes",
    ),
    (
        "records/metrics/writer.py",
        "{}: contains a run already. Resume it, or choose another folder.",
        "the folder of a run is refused before",
    ),
    ("tools/pictures/style.py", "lower left", "a place in a picture, no instruction"),
    ("tools/pictures/learning_curve.py", "lower right", "a place in a picture, no instruction"),
    (
        "tools/curves.py",
        "metric={}: is not in {}. Did you mean {}?",
        "carried out by tests/commands/test_plot.py",
    ),
    (
        "records/instance_lines.py",
        "If a node may have few, use actors_per_node",
        "it takes several nodes",
    ),
    (
        "records/instance_lines.py",
        "If a process may have only {}, use {}.",
        "test_single_instances.py makes such runs, and trains",
    ),
    (
        "records/instance_lines.py",
        "If it may have only one, use {}",
        "as in test_single_instances.py",
    ),
    (
        "records/notes.py",
        "Raise ent_coef ({} now), or lower learning_rate",
        "what it does shows in long runs; its settings exist: see test_flags_and_settings_that_texts_name_exist",
    ),
    (
        "records/notes.py",
        "Raise learning_rate ({} now) or update_epochs, and check that actions ",
        "what it does shows in long runs; its settings exist: see test_flags_and_settings_that_texts_name_exist",
    ),
    (
        "records/notes.py",
        "Use norm_obs and norm_reward if they are off, else more update_epochs,",
        "what it does shows in long runs; its settings exist: see test_flags_and_settings_that_texts_name_exist",
    ),
    (
        "records/notes.py",
        "Use norm_reward=True (--norm-reward)",
        "what it does shows in long runs; its settings exist: see test_flags_and_settings_that_texts_name_exist",
    ),
    (
        "records/notes.py",
        "lower learning_rate ({} now)",
        "what it does shows in long runs; its settings exist: see test_flags_and_settings_that_texts_name_exist",
    ),
    (
        "records/notes.py",
        "no return other than {} in {} env steps ({} episodes): there is nothin",
        "what it does shows in long runs; its settings exist: see test_flags_and_settings_that_texts_name_exist",
    ),
    (
        "records/instance_lines.py",
        "use {}: {} instances, and a smaller batch.",
        "tests/test_single_instances.py makes such runs, and trains",
    ),
    (
        "run/building.py",
        "Set DPPO_NUMERICS=native before Python starts.",
        "a variable of a new process: tests/test_numerics.py",
    ),
    ("run/loading.py", "Use the version that wrote it.", "it takes another version of dppo"),
    (
        "run/building.py",
        "norm_value=True without norm_adv=True: values are learned in units of ",
        "what it does shows in long runs; its settings exist: see test_flags_and_settings_that_texts_name_exist",
    ),
    (
        "run/building.py",
        "set numerics=native to say so.",
        "a variable of a new process: tests/test_numerics.py",
    ),
    (
        "run/evaluations.py",
        "use more eval_actors, or a larger eval_every",
        "it depends on the time that evaluations take",
    ),
    (
        "run/outputs.py",
        "Earlier checkpoints are untouched. Check the disk.",
        "tests/records/test_outside.py unblocks it",
    ),
    ("run/outputs.py", "Run folder: {}", "a name, no instruction"),
    (
        "run/outputs.py",
        "run_dir: {}. Check the disk, or use another folder.",
        "it is a disk of the user that blocks",
    ),
    ("tools/replay/episode.py", ". See report.txt beside it", "a person reads the report"),
    (
        "run/warm_start.py",
        "{}: has weights that are not finite. Use another checkpoint.",
        "a checkpoint that no version of dppo writes",
    ),
    (
        "user_code.py",
        "Correct the module",
        "it is the user's module; tests/envs/test_make.py breaks some",
    ),
    ("user_code.py", "{} -m pip install {}", "it takes a package that the tests do not install"),
    (
        "user_code.py",
        "{}: needs the package {}. Install it: {}",
        "it takes a package that the tests do not install",
    ),
)
"""File below src/dppo, words of the text, and the reason."""
