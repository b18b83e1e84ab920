"""Remedies for command lines: the words that are refused, and those that the message tells to type instead.

`RUN` is a run that has finished, `TMP` an empty folder, `FULL` one with a file.
"""

from __future__ import annotations

TINY = "--num-samplers 1 --num-steps 16 --total-timesteps 16 --minibatch-size 16 --update-epochs 1 --progress off"
TRAIN = f"train CartPole-v1 --preset none {TINY}"
COMPARE = "compare CartPole-v1 --out FULL"
PLANNED = "compare CartPole-v1 --out TMP/new --minibatch-size 1000000"

COMMANDS: tuple[tuple[str, str, str, str], ...] = (
    (
        "tools/compare/__init__.py: contains a number twice. Use different numbers",
        f"{COMPARE} --actors 1 1",
        f"{COMPARE} --actors 1 2",
        "is not an empty folder",
    ),
    (
        "tools/compare/__init__.py: must not be negative. Use 0",
        f"{COMPARE} --actors -1",
        f"{COMPARE} --actors 0",
        "is not an empty folder",
    ),
    (
        "tools/compare/__init__.py: Use 3 or more to show a spread",
        f"{COMPARE} --actors 0 --seeds 0",
        f"{COMPARE} --actors 0 --seeds 3",
        "is not an empty folder",
    ),
    (
        "tools/compare/__init__.py: Add numbers of actors, or more seeds",
        f"{COMPARE} --actors 0 --seeds 1",
        f"{COMPARE} --actors 0 1 --seeds 1",
        "is not an empty folder",
    ),
    (
        "tools/compare/__init__.py: Add numbers of actors, or more seeds",
        f"{COMPARE} --actors 0 --seeds 1",
        f"{COMPARE} --actors 0 --seeds 2",
        "is not an empty folder",
    ),
    (
        "tools/compare/__init__.py: is not an empty folder. Use a new folder",
        f"{COMPARE} --actors 0 1 --equal segment --num-samplers 2",
        "compare CartPole-v1 --out TMP/new --actors 0 1 --equal segment --num-samplers 2",
        "has no effect with --equal segment",
    ),
    (
        "tools/compare/__init__.py: each actor has one sampler. Leave it out",
        "compare CartPole-v1 --out TMP/new --actors 0 1 --equal segment --num-samplers 2 --gamma 2",
        "compare CartPole-v1 --out TMP/new --actors 0 1 --equal segment --gamma 2",
        "gamma=",
    ),
    (
        "tools/compare/__init__.py: Use numbers up to {}, or `num_samplers={}`",
        f"{PLANNED} --actors 0 4 --num-samplers 2",
        f"{PLANNED} --actors 0 2 --num-samplers 2",
        "is larger than the batch",
    ),
    (
        "tools/compare/__init__.py: Use numbers up to {}, or `num_samplers={}`",
        f"{PLANNED} --actors 0 4 --num-samplers 2",
        f"{PLANNED} --actors 0 4 --num-samplers 4",
        "is larger than the batch",
    ),
    (
        "tools/compare/__init__.py: use --actors, e.g. --actors 1 8",
        f"{COMPARE} --num-actors 8",
        f"{COMPARE} --actors 1 8",
        "is not an empty folder",
    ),
    (
        "tools/compare/__init__.py: use --out, which is the folder of all runs",
        "compare CartPole-v1 --run-dir FULL",
        f"{COMPARE} --actors 0 1",
        "is not an empty folder",
    ),
    (
        "commands/train.py: {} has no effect here: {}. Leave it out",
        "compare CartPole-v1 --out FULL --trust",
        "compare CartPole-v1 --out FULL",
        "is not an empty folder",
    ),
    (
        "tools/doctor/command.py: the files of a run are only read. Leave it out",
        "doctor RUN --seconds 3",
        "doctor RUN",
        "",
    ),
    (
        "tools/export/command.py: only on a FOLDER/. Leave it out",
        "export RUN TMP/policy.onnx --episodes 3 --trust",
        "export RUN UNTRACED --episodes 3 --trust",
        "contains a run, or an earlier export",
    ),
    (
        "tools/replay/episode.py: Add `episode=NUMBER`, for one of its {} recorded episodes",
        "replay RUN --trust",
        "replay RUN --trust --episode 1",
        "",
    ),
    (
        "tools/replay/command.py: has no effect with --episodes, which plays none. Leave it out",
        "replay RUN --episodes --trust",
        "replay RUN --episodes",
        "",
    ),
    (
        "commands/flags.py: is not JSON ({}). Write it like",
        f"{TRAIN} --run-dir TMP/r --env-kwargs licence:1 --trust",
        f"{TRAIN} --run-dir TMP/r --env-kwargs '{{\"licence\": 1}}' --trust",
        "--trust has no effect",
    ),
    (
        "tools/seeds.py: Name 2 to {} different ones: 1..5, or 1,3,7",
        f"{TRAIN} --seeds 1,1 --seeds-at-once 0",
        f"{TRAIN} --seeds 1,3,7 --seeds-at-once 0",
        "must be at least 1. Leave it out",
    ),
    (
        "tools/seeds.py: is not a seed. Use --seeds 1..5 or --seeds 1,3,7",
        f"{TRAIN} --seeds five --seeds-at-once 0",
        f"{TRAIN} --seeds 1..5 --seeds-at-once 0",
        "must be at least 1. Leave it out",
    ),
    (
        "tools/seeds.py: has no effect without --seeds. Leave it out",
        f"{TRAIN} --run-dir TMP/r --seeds-at-once 2",
        f"{TRAIN} --run-dir TMP/r",
        "",
    ),
    (
        "tools/seeds.py: contains a single run. Use another folder for several seeds",
        f"{TRAIN} --run-dir RUN --seeds 1..2 --seeds-at-once 0",
        f"{TRAIN} --run-dir TMP/other --seeds 1..2 --seeds-at-once 0",
        "must be at least 1. Leave it out",
    ),
    (
        "commands/train.py: Add --run-dir",
        f"{TRAIN} --resume auto",
        f"{TRAIN} --resume auto --run-dir TMP/r",
        "",
    ),
    (
        "commands/train.py: needs a run to branch from. Name it with --resume RUN",
        "train --branch TMP/branch --progress off",
        "train --branch TMP/branch --progress off --resume RUN --trust",
        "",
    ),
    (
        "commands/train.py: it applies to the code of a run to resume. Leave it out",
        f"{TRAIN} --trust --gamma 2",
        f"{TRAIN} --gamma 2",
        "gamma=",
    ),
    (
        "commands/train.py: has no effect with --seeds, which names all seeds and continues their runs. Leave it out",
        f"{TRAIN} --seeds 1..2 --seed 4 --seeds-at-once 0",
        f"{TRAIN} --seeds 1..2 --seeds-at-once 0",
        "must be at least 1. Leave it out",
    ),
    (
        "commands/train.py: has no effect with --resume, which {}, with its own settings. Leave it out",
        "train --resume RUN --trust --run-dir TMP/x --progress off",
        "train --resume RUN --trust --progress off",
        "",
    ),
    (
        "config/trust.py: Add `trust=True` if you trust that folder",
        "eval RUN --episodes 1",
        "eval RUN --episodes 1 --trust",
        "",
    ),
    (
        "config/trust.py: or name the {} yourself",
        "eval RUN --episodes 1",
        "eval RUN --episodes 1 --env-id remedies.worlds:Fine",
        "",
    ),
    (
        "config/resume.py: {}={}: {}. Leave it out, or {}.",
        "train --resume RUN --trust --gamma 0.5 --progress off",
        "train --resume RUN --trust --progress off",
        "",
    ),
    (
        "config/resume.py: start a new run",
        "train --resume RUN --trust --gamma 0.5 --progress off",
        "train --resume RUN --trust --gamma 0.5 --branch TMP/branch --progress off",
        "",
    ),
    (
        "config/resume.py: Leave it out, or start a new run from scratch",
        "train --resume RUN --trust --hidden-sizes 8 --branch TMP/branch --progress off",
        "train --resume RUN --trust --branch TMP/branch --progress off",
        "",
    ),
    (
        "records/files/run_folder.py: Continue it with `{}`, or use another folder",
        f"{TRAIN} --run-dir RUN",
        f"{TRAIN} --run-dir TMP/other",
        "",
    ),
    (
        "records/files/run_folder.py: Pass the folder of a run",
        "report TMP",
        "report RUN --out TMP/report.html",
        "",
    ),
    (
        "records/files/checkpoint.py: contains no checkpoint. Pass the folder of {}",
        "eval TMP",
        "eval RUN --trust --episodes 1",
        "",
    ),
    (
        "records/files/checkpoint.py: Pass the folder of a run, or one of its checkpoints.",
        "eval TMP/none",
        "eval RUN --trust --episodes 1",
        "",
    ),
    (
        "records/files/run_folder.py: Use another folder.",
        f"{TRAIN} --run-dir /proc/none/run",
        f"{TRAIN} --run-dir TMP/run",
        "",
    ),
    (
        "tools/video.py: an environment is shown in a window or in a video. Leave one of them out",
        "eval RUN --trust --episodes 1 --render --video TMP/out.mp4",
        "eval RUN --trust --episodes 1 --video TMP/out.mp4",
        "",
    ),
    (
        "tools/video.py: is not the name of a video. Use one such as out.mp4",
        "eval RUN --trust --episodes 1 --video TMP/out.gif",
        "eval RUN --trust --episodes 1 --video TMP/out.mp4",
        "",
    ),
    (
        "tools/video.py: is not a folder that can be written to. Use another one",
        "eval RUN --trust --episodes 1 --video TMP/none/out.mp4",
        "eval RUN --trust --episodes 1 --video TMP/out.mp4",
        "",
    ),
    (
        "tools/export/policies.py: is the folder of the run. Use another one",
        "export RUN RUN --trust",
        "export RUN UNTRACED --trust",
        "contains a run, or an earlier export",
    ),
    (
        "tools/export/policies.py: contains a run, or an earlier export. Use another folder",
        "export RUN UNTRACED --trust",
        "export RUN TMP/exported/ --episodes 1 --trust",
        "",
    ),
    (
        "policies/acting.py: the policy was trained with {}. Use the environment of the run",
        "eval RUN --episodes 1 --env-id CartPole-v1",
        "eval RUN --episodes 1 --trust",
        "",
    ),
    (
        "config/reading.py: contains {}, not settings. Write `name: value` lines",
        f"{TRAIN} --config FULL/file --gamma 2",
        f"{TRAIN} --config FULL/settings.yaml --gamma 2",
        "gamma=",
    ),
    (
        "records/metrics/reading.py: Pass the folder of a run",
        "plot FULL --out TMP/x.png",
        "plot RUN --out TMP/x.png",
        "",
    ),
    (
        "tools/diff.py: have no iteration in common. Continue the shorter run",
        "diff RUN YOUNG",
        "diff RUN UNTRACED",
        "",
    ),
)
"""A remedy, the words after `dppo` that are refused with it, words that follow it, and what is refused then, if so."""
