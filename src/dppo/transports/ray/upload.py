"""Files of the user that the nodes of a cluster do not have: list them, limit their size, send them with Ray."""

import hashlib
import io
import os
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dppo.errors import ClusterError, ConfigError, counted
from dppo.transports.ray.connecting import is_connected, wanted_cluster
from dppo.transports.ray.failures import call_with_timeout
from dppo.transports.ray.pickling import UPLOADED
from dppo.user_code import in_a_line

MOST_BYTES = 100 * 10**6  # bytes of all files; Ray's GCS keeps them in memory
SEND_S = 60.0  # longest wait for the cluster to take the files
GIT_S = 20.0  # longest wait for git to list them
KEPT_S = 7 * 24 * 3600  # time for which the cluster keeps files that no actor uses
LARGEST = 3  # files that are named
LEFT_OUT = frozenset(
    [
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "venv",
        "node_modules",
        "__pycache__",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
    ]
)
"""Names of folders that are never sent."""
# date of all files in the archive, so that equal files make an equal archive
EARLIEST = (1980, 1, 1, 0, 0, 0)


def check_there_is_a_cluster(folders: Sequence[str | Path], address: str | None) -> None:
    """Raise ConfigError if there are folders to send, and Ray would start on this machine."""
    _, cluster = wanted_cluster(address)
    if folders and not is_connected() and cluster is None:
        names = " ".join(map(str, folders))
        raise ConfigError(
            f"upload={names} has no effect: Ray starts on this machine, which has the files. Leave it out, "
            f"or set `address`."
        )


def environment_of(
    variables: dict[str, str], folders: Sequence[str | Path], notify: Callable[[str], object]
) -> dict[str, Any]:
    """Return Ray's options of the processes of a run: variables, and the files in these folders, which are sent."""
    if folders:
        folder = uploaded(folders, notify)
        uploads = {"working_dir": folder, "env_vars": {**variables, UPLOADED: "1"}}
        return {"runtime_env": uploads}
    if variables:
        return {"runtime_env": {"env_vars": variables}}
    return {}


def files_to_send(folders: Sequence[str | Path]) -> dict[str, Path]:
    """Return the files in these folders by their names within them, without what git ignores and without run folders.

    Raises ConfigError if a folder does not exist or has no files, or if two have a file of the same name.
    """
    files: dict[str, Path] = {}
    for name in folders:
        folder = Path(name)
        if not folder.is_dir():
            raise ConfigError(
                f"upload={name}: is not a folder. Name the folder of your module, such as `upload=.`."
            )
        inside = list(_files_in(folder))
        if not inside:
            raise ConfigError(
                f"upload={name}: has no files, or git ignores all of them. Name another folder."
            )
        for path in inside:
            key = path.relative_to(folder).as_posix()
            if key in files:
                raise ConfigError(
                    f"upload: {files[key]} and {path} would have the same name. Rename one of them."
                )
            files[key] = path
    return files


def _files_in(folder: Path) -> Iterator[Path]:
    paths = _listed_by_git(folder)
    if paths is None:
        paths = _walked(folder)
    decisions: dict[Path, bool] = {folder: True}
    for path in sorted(paths):
        if path.is_file() and path.suffix != ".pyc" and _is_sent(path.parent, decisions):
            yield path


def _is_sent(folder: Path, decisions: dict[Path, bool]) -> bool:
    """Return whether files of this folder are sent; `decisions` holds the results so far."""
    if folder not in decisions:
        is_run = (folder / "run.lock").is_file() or (folder / "checkpoints").is_dir()
        decisions[folder] = (
            folder.name not in LEFT_OUT and not is_run and _is_sent(folder.parent, decisions)
        )
    return decisions[folder]


def _listed_by_git(folder: Path) -> list[Path] | None:
    """Return the files that git does not ignore; None if the folder is in no repository, or git is not there."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(
            command, cwd=folder, capture_output=True, timeout=GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listing.returncode != 0:
        return None
    return [folder / os.fsdecode(name) for name in set(listing.stdout.split(b"\0")) if name]


def _walked(folder: Path) -> list[Path]:
    paths = []
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        paths += [Path(path, name) for name in files]
    return paths


def described(files: dict[str, Path]) -> str:
    """Return number, size and the largest of these files in words; raise ConfigError if they are too large."""
    sizes = {name: path.stat().st_size for name, path in files.items()}
    total = sum(sizes.values())
    largest = sorted(sizes, key=lambda name: -sizes[name])[:LARGEST]
    listing = ", ".join(f"{name} ({_megabytes(sizes[name])})" for name in largest)
    text = f"{counted(len(files), 'file')}, {_megabytes(total)}; the largest: {listing}"
    if total > MOST_BYTES:
        raise ConfigError(
            f"upload: {text}. At most {_megabytes(MOST_BYTES)} are sent. Let git ignore what the environment does not "
            f"need (.gitignore), name a smaller folder, or share the folder between the nodes."
        )
    return text


def _megabytes(size: int) -> str:
    if size >= 50_000:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e3:.1f} kB"


def archive(files: dict[str, Path]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, path in sorted(files.items()):
            entry = zipfile.ZipInfo(name, EARLIEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (path.stat().st_mode & 0xFFFF) << 16
            zipped.writestr(entry, path.read_bytes())
    return data.getvalue()


def uploaded(folders: Sequence[str | Path], notify: Callable[[str], object]) -> str:
    """Send the files in these folders to the connected cluster; return the `working_dir` of Ray's runtime environment.

    Raises ConfigError as `files_to_send` and `described`, and ClusterError if the cluster does not take them.
    """
    files = files_to_send(folders)
    notify(
        f"upload: {described(files)}. They are sent to the nodes, and are the current folder of the actors there."
    )
    data = archive(files)
    uri = f"gcs://_ray_pkg_{hashlib.sha1(data).hexdigest()}.zip"  # as Ray names its own archives
    problem = f"no answer within {SEND_S:.0f} s"

    def send() -> None:
        nonlocal problem
        from ray._private.runtime_env import packaging

        try:
            packaging.pin_runtime_env_uri(uri, expiration_s=KEPT_S)
            if not packaging.package_exists(uri):
                packaging.upload_package_to_gcs(uri, data)
            problem = ""
        except Exception as error:  # Ray raises exceptions of many classes
            problem = in_a_line(error, 300)

    call_with_timeout(SEND_S, send)
    if problem:
        raise ClusterError(
            f"upload: the cluster has not taken the files: {problem}. Share the folder between the nodes."
        )
    return uri
