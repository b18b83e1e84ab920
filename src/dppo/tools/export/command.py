"""`dppo export`: write a trained policy as ONNX, or with a model card as a folder for Hugging Face."""

import sys
from collections.abc import Callable
from pathlib import Path

from dppo.commands.flags import TRUST, Parser, UsageError
from dppo.config.parts.processes import EVAL_EPISODES
from dppo.invocation import as_called
from dppo.records.terminal.streams import showing_log
from dppo.tools.export.policies import export_folder, export_onnx

PROG = "dppo export"
DESCRIPTION = (
    "Write a trained policy for use without dppo. policy.onnx: a file for ONNX Runtime, observations in, actions out. "
    "FOLDER/: a folder for Hugging Face, with this file, the weights, the settings, and a model card made from the run."
)
FLAGS = {
    "--model MODULE:CLASS": "Use this class for the run's own network.",
    "--trust": TRUST,
    "--episodes INT": f"Episodes to play for the model card; 0: none. Of a FOLDER/ only. (default: {EVAL_EPISODES})",
}
USAGE = "RUN policy.onnx [--flag value ...]\nRUN FOLDER/ [--flag value ...]"


def main(argv: list[str]) -> int:
    """Export, and print what was written; return the exit code."""
    flags, words = Parser(PROG, USAGE, DESCRIPTION, {"network and model card": FLAGS}).split(argv)
    if len(words) != 2:
        raise UsageError(
            f"{len(words)} words instead of RUN and a target. For example: {as_called(PROG)} runs/NAME policy.onnx"
        )
    run, target = words
    export: Callable[..., str] = export_folder
    if Path(target).suffix == ".onnx":
        export = export_onnx
        if "episodes" in flags:
            raise UsageError(
                "--episodes has no effect on an ONNX file, only on a FOLDER/. Leave it out."
            )
    elif not target.endswith("/") and not Path(target).is_dir():
        raise UsageError(
            f"{target}: is neither NAME.onnx nor a folder. End the name of a new folder with /."
        )
    with showing_log(sys.stdout):
        print(export(run, target, **flags))
    return 0
