"""Open the folder of a run: of a new one, of one to resume, or of a new one that branches from another."""

import errno
import json
import os
import platform
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from dppo.config import Config, flattened, grouped, plain_settings, read_settings
from dppo.config.plain import objects_in
from dppo.config.programs import named_as_now
from dppo.config.reading import check_file
from dppo.config.resolve import Choice
from dppo.config.resume import changes_on_resume, check_branch, for_branch, leave_out_ineffective
from dppo.config.trust import resume_call
from dppo.errors import CheckpointError, CheckpointNotWritten, ConfigError, refuse
from dppo.files import user_path
from dppo.invocation import flag
from dppo.records.files.checkpoint import LoadedCheckpoint, find, has_any, paths_in, saved_iteration
from dppo.records.files.disk import remedy, write_file, writing
from dppo.records.files.lock import locked
from dppo.records.files.run_files import CHECKPOINTS, CONFIG, METRICS, PARTS, check_run_files
from dppo.records.metrics.reading import last_row


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run, which `open_run` keeps locked."""

    path: Path
    """Absolute: an environment may change the current directory."""
    owner: bytes
    """Content of its lock."""
    start: LoadedCheckpoint | None = None
    """The checkpoint to continue from; None for a new run."""
    close_changes: tuple[str, ...] = ()
    """Changed settings that make results differ from `start` on, in words."""
    origin: LoadedCheckpoint | None = None
    """The checkpoint of another run that this new one branches from, or None."""

    @property
    def resumed_from(self) -> dict[str, Any]:
        """The values in the checkpoint that the run continues; {} for a new run."""
        if self.start is None:
            return {}
        return self.start.checkpoint.state

    @property
    def branched_from(self) -> dict[str, Any] | None:
        """The origin as JSON values, kept when the run is resumed."""
        if self.origin is not None:
            return {
                "checkpoint": str(self.origin.path),
                "global_step": self.origin.checkpoint.state["global_step"],
            }
        return self.resumed_from.get("branched_from")

    def write_settings(
        self, config: Config, numerics: dict[str, str], choices: Sequence[Choice] = ()
    ) -> None:
        """Write config.yaml, with all versions and `numerics`, on which the result depends.

        The `choices` follow as comments: in a copy of the file for another run, these settings are open again.

        Raises CheckpointNotWritten, for example if the disk is full, and keeps an earlier file.
        """
        content = grouped(plain_settings(config)) | {"versions": versions() | numerics}
        text = yaml.safe_dump(content, sort_keys=False)
        if choices:
            text += "# Defaults of this task:\n" + "".join(map(_comment, choices))
        if self.branched_from is not None:
            text = f"# branched from {json.dumps(self.branched_from)}\n{text}"
        with writing(self.path / CONFIG, CheckpointNotWritten):
            write_file(self.path / CONFIG, text.encode())


def _comment(choice: Choice) -> str:
    text = f"#   {choice.setting}: {json.dumps(choice.value)}"
    if choice.because:
        text += f", because {choice.because}"
    return f"{text}\n"


@contextmanager
def open_run(
    config: Config, resume: str | Path | None, *, branch: bool = False
) -> Iterator[RunFolder]:
    """Open and lock the folder of a new run, or of one to resume. Leaving it removes folders that were not used.

    Args:
        resume: a run folder or one of its checkpoints; "auto": the run in `config.run_dir`, if there is one.
        branch: open a new folder, `config.run_dir`, for a run that starts with the weights of `resume`.

    Raises:
        ConfigError: the folder cannot be used, or a changed setting would change the result.
        CheckpointError: there is no good checkpoint to resume, or a part of the folder is a link or a pipe.
    """
    if resume not in (None, "auto"):
        resume = user_path(resume)
    with ExitStack() as stack:
        if branch:
            origin = _origin(config, resume)
            yield RunFolder(*_created(config, stack), origin=origin)
            return
        if resume == "auto":
            if config.run_dir is None:
                raise ConfigError("resume=auto: needs a fixed folder. Set `run_dir`.")
            resume = config.run_dir if has_any(config.run_dir) else None
        if resume is None:
            yield RunFolder(*_created(config, stack))
        else:
            yield _resumed(config, Path(resume), stack)


def is_over(config: Config, resume: str | Path) -> bool:
    """Return whether nothing is left to do in a run to resume, not even evaluations; raise as `open_run`."""
    run = Path(resume)
    if resume == "auto" and config.run_dir is not None:
        run = Path(config.run_dir)
    last_iterations = map(saved_iteration, paths_in(run)[-1:])
    if config.iterations not in last_iterations:  # without reading a large checkpoint
        return False
    with open_run(config, resume) as folder:
        state = folder.resumed_from
    evaluations = state.get("evaluations", {"open": []})
    are_over = isinstance(evaluations, dict) and evaluations.get("open") == []
    return are_over and state["iteration"] == config.iterations


def _origin(config: Config, resume: str | Path | None) -> LoadedCheckpoint:
    """Find the checkpoint to branch from; raise ConfigError if the settings do not allow it."""
    if resume in (None, "auto"):
        raise ConfigError(
            f"branch=True: needs a run to branch from, not resume={resume}. Pass its folder as `resume`."
        )
    origin = find(Path(str(resume)))
    check_branch(_settings_named_as_in(config, origin), config, origin.path)
    return replace(origin, path=Path(os.path.abspath(origin.path)))


def _resumed(config: Config, resume: Path, stack: ExitStack) -> RunFolder:
    """Lock the folder of a run, until `stack` is closed, and return it with the checkpoint to continue from."""
    run_dir = Path(os.path.abspath(run_dir_of(resume)))
    if config.run_dir is not None and os.path.realpath(config.run_dir) != os.path.realpath(run_dir):
        raise ConfigError(
            f"run_dir={config.run_dir}: has no effect with resume={resume}, which continues a run in its own "
            f"folder. Leave it out, or start a new run there: `branch=True`."
        )
    with writing(run_dir, CheckpointNotWritten):
        owner = stack.enter_context(locked(run_dir))
    start = find(resume)
    iteration = start.checkpoint.state["iteration"]
    stored_settings = _settings_named_as_in(config, start)
    changes = changes_on_resume(stored_settings, config, start.path, iteration)
    return RunFolder(run_dir, owner, start=start, close_changes=changes)


def _created(config: Config, stack: ExitStack) -> tuple[Path, bytes]:
    """Create the folder of a new run and lock it; return it with the content of its lock.

    `stack` unlocks it, and removes what was created and not used.
    """
    run_dir = Path(config.run_dir or new_folder(config.env_name, config.name, f"s{config.seed}"))
    path = Path(os.path.abspath(run_dir))
    try:
        check_run_files(path)
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        if missing:
            stack.callback(_remove_empty, (path / CHECKPOINTS, *missing))
        owner = stack.enter_context(locked(path))
    except OSError as error:
        advice = "Use another folder."
        if error.errno in (errno.EFBIG, errno.EMFILE):
            advice = remedy(error)  # a limit of this process is the same for every folder
        raise ConfigError(
            f"run_dir={run_dir}: cannot be written ({error.strerror or error}). {advice}"
        ) from None
    if (path / METRICS).exists() or has_any(path):
        if not last_row(path) and not any(map(saved_iteration, paths_in(path))):
            raise ConfigError(
                f"run_dir={run_dir}: contains a run already, of which no iteration has finished. Use another folder, "
                f"or delete this one."
            )
        call = resume_call(run_dir, plain_settings(config))
        raise ConfigError(
            f"run_dir={run_dir}: contains a run already. Continue it with `{call}`, or use another folder."
        )
    if (path / CONFIG).exists():
        raise ConfigError(
            f"run_dir={run_dir}: contains a {CONFIG}, which the run would overwrite. Move it."
        )
    for metrics in path.glob(f"*/{METRICS}"):
        raise ConfigError(
            f"run_dir={run_dir}: contains the run {metrics.parent.name}, which plots and reports would leave out. "
            f"Use another folder, such as {run_dir / 'NAME'}."
        )
    return path, owner


def new_folder(*names: str) -> Path:
    """Return the path of a folder of `runs` that does not exist: two runs may start in the same second."""
    name = "__".join([*map(as_file_name, names), time.strftime("%Y%m%d-%H%M%S")])
    path = Path("runs") / name
    number = 2
    while path.exists():
        path = Path("runs") / f"{name}-{number}"
        number += 1
    return path


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it is in use; other runs have used the outer ones meanwhile
            folder.rmdir()


def as_file_name(name: str) -> str:
    """Return the name of an environment or a run without characters that a folder should not have in its name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")


@cache  # they take longer to find than a small checkpoint to write
def describe_process() -> dict[str, Any]:
    """Return the versions, and the file of the program, which `__main__:name` is in; None in a notebook or a pipe."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    if program is not None:
        program = os.path.abspath(program) if os.path.isfile(program) else None
    return {"versions": versions(), "program": program}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    installed = {"python": platform.python_version()}
    for package in ("dppo", "ray", "torch", "gymnasium", "numpy"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def _settings_of(start: LoadedCheckpoint) -> dict[str, Any]:
    return flattened(start.checkpoint.state["config"])


def _settings_named_as_in(config: Config, start: LoadedCheckpoint) -> dict[str, Any]:
    """Return the settings of a checkpoint, with the names in `config` for definitions in the same file."""
    program = describe_process()["program"]
    program_before = start.checkpoint.state.get("program")
    return named_as_now(_settings_of(start), program_before, plain_settings(config), program)


def settings_to_resume(
    path: Path, changes: dict[str, Any] | None = None, *, read_only: bool = False
) -> dict[str, Any]:
    """Return the settings of the run at `path` with `changes`, without those that the changes make ineffective.

    With a `run_dir`, for a branch, sizes that follow from other settings are left out, too. Without `changes`, the
    settings are not even checked, which is enough to play with the policy. Raises a CheckpointError if `path` is
    neither the folder of a run nor in one, a ConfigError if its environment was made with Python objects, unless they
    are `read_only`.
    """
    run_dir = run_dir_of(path)
    if _has_readable_config(run_dir):
        settings = read_settings(run_dir / CONFIG, trusted=False)
    else:  # the run was killed before it wrote the file, or long arguments make it too large
        settings = _settings_of(find(run_dir))
    settings = {"atari": "raw"} | settings  # a run from before there was this setting
    if changes is not None:
        if "run_dir" in changes:
            settings = for_branch(settings)
        settings = leave_out_ineffective(settings, changes, resume=("free", "close"))
    if not read_only:
        _refuse_objects(settings)
    return settings


def _refuse_objects(settings: dict[str, Any]) -> None:
    refuse(
        ConfigError(
            f"{setting}: {name} was {text}, and a run folder cannot hold Python objects, nor keys that are not text. "
            f"Pass `{setting}` again to resume the run: in Python with Config({setting}=...) and "
            f"train(config, resume=...), or with {flag(setting)}."
        )
        for setting, name, text in objects_in(settings)
    )


def check_stored_names(run: Path, replaced: Collection[str] = ()) -> None:
    """Raise ConfigError, with file and line, for invalid settings of a run, as those of another version of dppo.

    `replaced`: as in `check_file`.
    """
    run_dir = run_dir_of(run)
    if _has_readable_config(run_dir):
        check_file(run_dir / CONFIG, trusted=False, replaced=replaced)


def stored_config(run: Path) -> Config:
    """Return the settings of a run that is only looked at; raise as `check_stored_names`."""
    check_stored_names(run)
    return Config(**settings_to_resume(run, read_only=True))


def _has_readable_config(run_dir: Path) -> bool:
    file = run_dir / CONFIG
    return file.is_file() and file.stat().st_size <= PARTS[CONFIG].max_bytes


def run_dir_of(path: Path) -> Path:
    """Return the folder of the run that `path` is, or is in; raise CheckpointError without one, or with links in it."""
    for folder in (path, *path.absolute().parents[:2]):
        if (folder / CONFIG).is_file() or has_any(folder):
            check_run_files(folder)
            return folder
    problem = "does not exist"
    if path.exists():
        problem = f"is not a run folder (it contains no {CONFIG})"
    runs = sorted(config.parent.name for config in path.glob(f"*/{CONFIG}"))
    example = "runs/NAME"
    if runs:
        example = f"such as {path / runs[-1]}"
    raise CheckpointError(f"{path}: {problem}. Pass the folder of a run, {example}.")
