"""A wheel and an sdist can be built, and the wheel works where nothing else of the repository is."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from extras import EXTRAS

import dppo

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
DATA = {
    path.relative_to(SOURCE).as_posix()
    for path in (SOURCE / "dppo").rglob("*")
    if path.is_file() and path.suffix != ".pyc"
}


SCRIPT = """
import dppo

sizes = {"num_samplers": 1, "num_steps": 32, "total_timesteps": 64}
if __name__ == "__main__":
    result = dppo.train(dppo.Config(env_id="CartPole-v1", **sizes))
    print(dppo.evaluate(result, episodes=1))
"""


def call(*words: str | Path, cwd: Path) -> str:
    """Run a command without our import path; return its output."""
    env = os.environ.copy()
    for name in ("PYTHONPATH", "PYTHONHOME"):
        env.pop(name, None)
    done = subprocess.run(
        [*map(str, words)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment_and_holds_its_data(tmp_path: Path) -> None:
    """Dependencies come from the environment of the tests by a .pth file; pip fetches the build backend."""
    call(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    [sdist] = tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as files:
        assert set(files.namelist()) >= DATA
        assert any(name.endswith("licenses/LICENSE") for name in files.namelist())
    with tarfile.open(sdist) as files:
        inside = {name.partition("/")[2] for name in files.getnames()}
    assert inside >= {f"src/{name}" for name in DATA} | {
        "README.md",
        "LICENSE",
        "constraints.txt",
        "dppo",
    }

    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh", cwd=tmp_path)
    python = tmp_path / "fresh" / "bin" / "python"
    site = Path(
        call(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    install = ["install", "--no-deps", "--no-index"]
    call(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=tmp_path)
    (site / "libraries.pth").write_text(
        os.pathsep.join(path for path in sys.path if path.endswith("-packages"))
    )
    command = tmp_path / "fresh" / "bin" / "dppo"
    assert call(command, "--version", cwd=tmp_path) == f"dppo {dppo.__version__}\n"
    assert str(site) in call(python, "-c", "import dppo; print(dppo.__file__)", cwd=tmp_path)
    assert "CartPole-v1" in call(command, "presets", cwd=tmp_path)

    words = ["train", "CartPole-v1", "--total-timesteps", "512", "--run-dir", "run"]
    trained = call(command, *words, cwd=tmp_path)
    assert "Done after 512 steps" in trained

    (tmp_path / "first.py").write_text(SCRIPT)
    assert "Evaluation(CartPole-v1" in call(python, "first.py", cwd=tmp_path)
    call(command, "report", "run", cwd=tmp_path)
    assert "<style>" in (tmp_path / "run" / "report.html").read_text(encoding="utf8")


def on_github(name: str) -> Any:
    return yaml.safe_load((ROOT / ".github" / name).read_text(encoding="utf8"))


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_workflows_have_steps_that_exist(name: str) -> None:
    workflow = on_github(f"workflows/{name}")
    assert workflow.keys() >= {"name", True, "permissions", "jobs"}  # YAML 1.1 reads `on` as true
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            for word in step.get("run", "").split():
                if word.startswith((".ci/", "./", "tests/")):
                    assert (ROOT / word.rstrip(")\"'")).exists(), word


def test_a_test_that_asks_for_no_extra_runs_as_without_it() -> None:
    """`tests/extras.py` hides the packages of `dev`, with which the tests usually run."""
    for name in chain(*EXTRAS):
        with pytest.raises(ModuleNotFoundError):
            import_module(name)
        assert find_spec(name) is None
