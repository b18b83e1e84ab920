"""StateFiles: files that `get_state` returns as paths, kept in the folder of the run by hard links.

    states/SAMPLER/MOMENT-HASH/listing        a line for each file: its hash, or size and time of change; its path
    states/SAMPLER/MOMENT-HASH/content/NAME   the file or folder
    states/needed/iter_000123                 the names that this checkpoint needs, a line each

A moment is the number of segments that the sampler has made. HASH is the SHA-256 of the listing, shortened.
"""

import hashlib
import os
import re
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dppo.envs.linked import NotRegular, first_change, link, listing
from dppo.files import SCRATCH, read_file
from dppo.plain_data import NotPlain

NAME = re.compile(r"\d{1,12}-[0-9a-f]{32}")
MAX_LISTING_BYTES = 1 << 24
NEW = ".new-"
STATES = "states"
NEEDED = "needed"
LISTING = "listing"
CONTENT = "content"


class NotKept(NotPlain):
    """A path that cannot be kept; the message has the reason."""


class StateLost(Exception):
    """The files of a state are missing or were changed; the message names the first of them."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Place in which the run keeps the files of states."""

    lock: Path
    """A file in the folder of the run."""
    owner: bytes
    """Content of the lock file, by which another host sees that it has the same folder."""
    moments: int
    """Number of a sampler's newest states that are kept, to replace an actor."""
    state_folder: Path | None = None
    """The folder below which environments may write such files, besides their `scratch_dir`."""

    @property
    def run_dir(self) -> Path:
        return self.lock.parent

    @property
    def states(self) -> Path:
        return self.run_dir / STATES

    def is_visible(self) -> bool:
        """Return whether this host sees the folder of the run, as its lock file has the same content here."""
        try:
            return read_file(self.lock) == self.owner
        except OSError:
            return False


class StateFiles:
    """Keeps the files of a sampler's states, checks them before use, and removes those that are not needed."""

    def __init__(self, place: StatePlace, sampler_id: int) -> None:
        self.folder = place.states / str(sampler_id)
        self.copied_bytes = 0
        """Bytes that were copied for the last path, because hard links were not possible; 0 if they were."""
        self._place = place
        self._names: dict[int, list[str]] = {}  # by moment

    def keep(self, path: Path, moment: int) -> str:
        """Keep a file or folder as it is now, and return its name; raise `NotKept`, or an OSError."""
        source = self._checked(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        new_folder = Path(tempfile.mkdtemp(prefix=f"{NEW}{moment}-", dir=self.folder))
        try:
            content = new_folder / CONTENT
            content.mkdir()
            self.copied_bytes = link(source, content / source.name)
            text = listing(content)
            (new_folder / LISTING).write_bytes(text)
            name = f"{moment}-{_hash(text)}"
            self._name(new_folder, name)
        except NotRegular as error:
            raise NotKept(f"holds the path {path}, and {error}") from None
        finally:
            shutil.rmtree(new_folder, ignore_errors=True)
        self._names.setdefault(moment, []).append(f"{self.folder.name}/{name}")
        return name

    def _checked(self, path: Path) -> Path:
        """Resolve the path of a file or folder, and check that it may be kept."""
        if not self._place.is_visible():
            raise NotKept(
                f"holds the path {path}, but {socket.gethostname()} does not see the folder of the run, "
                f"{self._place.run_dir}, which has to be on a disk that all hosts share"
            )
        if path.is_symlink():
            raise NotKept(f"holds the path {path}, which is a symbolic link")
        if not path.exists():
            raise NotKept(f"holds the path {path}, which does not exist")
        real = path.resolve()
        folders = [self.folder, self._place.state_folder]
        if any(folder and folder.resolve() in real.parents for folder in folders):
            return real
        temporary = Path(tempfile.gettempdir()).resolve()
        parts = real.relative_to(temporary).parts if temporary in real.parents else ()
        if len(parts) > 1 and parts[0].startswith(SCRATCH):
            return real
        raise NotKept(
            f"holds the path {path}, which is neither below the scratch_dir of an environment nor below state_folder"
        )

    def _name(self, new_folder: Path, name: str) -> None:
        """Give `new_folder` its name; keep an equal folder that has this name, perhaps from another process."""
        try:
            new_folder.rename(self.folder / name)
        except OSError:
            if self._problem(name):
                shutil.rmtree(self.folder / name, ignore_errors=True)
                new_folder.rename(self.folder / name)

    def kept(self, name: str) -> Path:
        """Return the path of the file or folder that was kept under a name; raise `StateLost`."""
        problem = self._problem(name)
        if problem:
            raise StateLost(problem)
        (path,) = (self.folder / name / CONTENT).iterdir()
        return path

    def _problem(self, name: str) -> str:
        entry = self.folder / name
        if not NAME.fullmatch(name) or entry.is_symlink():
            return f"{entry} is no folder of kept files"
        if not entry.exists():
            return f"{entry} does not exist on {socket.gethostname()}"
        try:
            recorded = read_file(entry / LISTING, MAX_LISTING_BYTES)
            now = listing(entry / CONTENT)
        except (NotRegular, OSError) as error:
            return f"{entry} cannot be used ({error})"
        if not name.endswith(_hash(recorded)):
            return f"{entry / LISTING} was changed since get_state returned it"
        change = first_change(recorded, now)
        if change:
            path = entry / CONTENT / change
            verb = "changed" if path.exists() else "deleted"
            return f"{path} was {verb} since get_state returned it"
        return ""

    def names(self, moment: int) -> list[str]:
        """Return the names that a state of this moment and its proof need: `SAMPLER/MOMENT-HASH`."""
        return [*self._names.get(moment - 1, []), *self._names.get(moment, [])]

    def collect(self, moment: int) -> None:
        """Remove old files that no checkpoint needs; files of the newest states up to this moment stay."""
        oldest = moment - self._place.moments
        self._names = {number: names for number, names in self._names.items() if number >= oldest}
        if not self.folder.is_dir():
            return
        outdated = [entry for entry in os.scandir(self.folder) if _moment(entry.name) < oldest]
        if outdated:
            remove_unneeded(outdated, needed_names(self._place.run_dir))


def _moment(name: str) -> int:
    digits = name.removeprefix(NEW).partition("-")[0]
    if digits.isdecimal():
        return int(digits)
    return sys.maxsize


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:32]


def needed_names(run_dir: Path) -> set[str]:
    """Read which states the checkpoints of a run need."""
    names: set[str] = set()
    folder = run_dir / STATES / NEEDED
    if folder.is_dir():
        for entry in os.scandir(folder):
            names.update(read_file(Path(entry.path)).decode("utf-8", "replace").splitlines())
    return names


def remove_unneeded(entries: list[os.DirEntry[str]], needed: set[str]) -> None:
    """Remove folders `SAMPLER/MOMENT-HASH` that are not in `needed`."""
    for entry in entries:
        path = Path(entry.path)
        if f"{path.parent.name}/{path.name}" not in needed:
            shutil.rmtree(path, ignore_errors=True)
