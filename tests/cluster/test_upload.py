"""Files that are sent to the nodes: which ones, how many bytes at most, and only where there is a cluster."""

from __future__ import annotations

import os
import subprocess
import zipfile
from io import BytesIO
from pathlib import Path

import pytest
from builders import make_config
from remedies import executes

import dppo
from dppo.errors import ConfigError
from dppo.transports.ray import upload
from dppo.transports.ray.upload import archive, check_there_is_a_cluster, described, files_to_send

SENT = ["data/mesh.bin", "mysim.py", "tool.sh"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with files to send, and with others."""
    folder = tmp_path / "project"
    ignored = ("__pycache__/mysim.pyc", ".venv/pyvenv.cfg", "node_modules/a.js", "old.pyc")
    runs = (
        "runs/a/run.lock",
        "runs/a/logs/actor-0.log",
        "runs/b/checkpoints/iter_000001.safetensors",
        "runs/b/config.yaml",
    )
    for name in (*SENT, *ignored, *runs):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "tool.sh").chmod(0o755)
    return folder


@pytest.mark.parametrize("in_git", [False, True])
def test_files_are_sent_without_runs_environments_and_what_git_ignores(
    in_git: bool, folder: Path
) -> None:
    if in_git:
        subprocess.run(["git", "init", "-q", str(folder)], check=True)
        (folder / ".gitignore").write_text("/secret.txt\nruns/\n.gitignore\n")
        (folder / "secret.txt").write_text("a key")
    files = files_to_send([str(folder)])
    assert list(files) == SENT

    with zipfile.ZipFile(BytesIO(archive(files))) as zipped:
        assert zipped.namelist() == SENT
        assert zipped.read("data/mesh.bin") == b"data/mesh.bin"
        assert zipped.getinfo("tool.sh").external_attr >> 16 & 0o111 == 0o111
    before = archive(files)
    os.utime(folder / "mysim.py", (1, 1))
    assert archive(files_to_send([str(folder)])) == before
    assert (
        described(files)
        == "3 files, 0.0 kB; the largest: data/mesh.bin (0.0 kB), mysim.py (0.0 kB), tool.sh (0.0 kB)"
    )


@executes("transports/ray/upload.py: upload: {}. At most {} are sent.")
def test_too_many_bytes_are_refused_with_the_largest_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "data" / "mesh.bin").write_bytes(bytes(2_000_000))
    monkeypatch.setattr(upload, "MOST_BYTES", 1_000_000)
    fact = r"^upload: 3 files, 2\.0 MB; the largest: data/mesh\.bin \(2\.0 MB\), .* At most 1\.0 MB are sent\. Let git"
    with pytest.raises(ConfigError, match=fact):
        described(files_to_send([str(folder)]))
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".gitignore").write_text("data\n")
    described(files_to_send([str(folder)]))


@executes(
    "transports/ray/upload.py: upload={}: is not a folder.",
    "transports/ray/upload.py: upload={}: has no files",
    "transports/ray/upload.py: Rename one of them.",
)
def test_folders_that_cannot_be_sent_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"upload=/no/where: is not a folder\. Name the folder of your module"
    ):
        files_to_send(["/no/where"])

    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"upload=\.venv/empty: is not a folder"):
        files_to_send([".venv/empty"])

    Path("empty").mkdir()
    with pytest.raises(ConfigError, match="upload=empty: has no files, or git ignores all of them"):
        files_to_send(["empty"])

    Path("empty/tool.sh").touch()
    with pytest.raises(
        ConfigError, match=r"upload: tool\.sh and empty/tool\.sh would have the same name"
    ):
        files_to_send([".", "empty"])

    Path("empty/tool.sh").rename("empty/other.sh")
    assert list(files_to_send(["data", "empty"])) == ["mesh.bin", "other.sh"]


@executes("transports/ray/upload.py: upload={} has no effect: Ray starts on this machine")
def test_there_must_be_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "is_connected", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    refused = {
        "env_id": "CartPole-v1",
        "upload": ["."],
        "run_dir": tmp_path / "run",
        "progress": "off",
    }
    with pytest.raises(
        ConfigError, match=r"upload=\. has no effect: Ray starts on this machine.* or set `address`"
    ):
        dppo.train(make_config({**refused, "num_actors": 1}))

    check_there_is_a_cluster((), None)
    check_there_is_a_cluster((".",), "10.0.0.1:6379")
    with pytest.raises(
        ConfigError, match=r"upload=.* has no effect: num_actors=0 starts no actors"
    ):
        make_config(refused)
