"""`./dppo` with fake interpreters, and `dppo test`. Nothing is installed and no network is used.

A fake interpreter is a shell script that answers `-m venv` and `-m pip` itself and records the call. Code that the
launcher passes with `-c` is run by the real interpreter, with the version that the fake claims.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes import wait_until

REPO = Path(__file__).resolve().parents[1]
TOOLS = "awk cat chmod cksum cp dirname env find ln ls mkdir readlink rm sed sh sleep tail touch"
PYPROJECT = '[project]\ndependencies = ["one"]\n\n[tool.ruff]\nline-length = 110\n\n[tool.hatch.build]\nx = 1\n'
FAKE = """\
#!/bin/sh
case $0 in */bin/python) me=FOLDER/NAME venv=${0%/bin/python} ;; *) me=$0 ;; esac
while :; do case $1 in -E | -s | -I) shift ;; *) break ;; esac; done
case "$1 $2" in
    "-m venv")
        echo venv >>FOLDER/calls
        [ ! -e FOLDER/venv-fails ] && [ ! -h "$3" ] || { echo broken; exit 1; }
        mkdir -p "$3/bin" && ln -s "$me" "$3/bin/python" ;;
    "-m pip")
        shift 2
        echo "pip $* in $(pwd) PYTHONPATH=${PYTHONPATH-unset} PIP_TARGET=${PIP_TARGET-unset}" >>FOLDER/calls
        [ ! -e FOLDER/pip ] || . FOLDER/pip
        cp FOLDER/command "$venv/bin/dppo" && chmod +x "$venv/bin/dppo" ;;
    "-c "*)
        code=$2
        shift 2
        exec REAL -I -S -c "import sys; sys.version_info, sys.executable = VERSION, '$me'; PATCH
$code" "$@" ;;
    *) exit 9 ;;
esac
"""
COMMAND = '#!/bin/sh\nprintf "ran:%s\\n" "$@"\necho "in:$(pwd)"\necho "path:${PYTHONPATH-unset}"\n'
BLOCKED_PIP = (
    "echo $$ >FOLDER/pip-pid; touch FOLDER/pip-began; while [ ! -e FOLDER/go ]; do sleep 0.02; done"
)
Call = subprocess.Popen[str]
WAITING = "Waiting for another call that is setting up .venv ...\n"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Checkout:
    """A copy of the launcher with a stub of a project, and its fakes in a sibling folder."""

    def __init__(self, root: Path, fakes: Path) -> None:
        self.root = root
        self.fakes = fakes
        self.venv = root / ".venv"
        self.launcher = str(root / "dppo")
        self.cwd = root
        self.started: list[Call] = []

    def calls(self) -> list[str]:
        return [line.split()[0] for line in (self.fakes / "calls").read_text().splitlines()]

    def python(self, name: str, version: str, patch: str = "") -> None:
        """Put a fake interpreter of that name on PATH."""
        text = FAKE.replace("NAME", name).replace("REAL", sys.executable).replace("PATCH", patch)
        self.script(name, text.replace("VERSION", f"({version.replace('.', ', ')})"))

    def script(self, name: str, text: str) -> None:
        (self.fakes / name).write_text(text.replace("FOLDER", str(self.fakes)))
        (self.fakes / name).chmod(0o755)

    def start(self, *words: str, **env: str) -> Call:
        env = {"PATH": str(self.fakes), "HOME": str(self.fakes), "LC_ALL": "C", **env}
        streams: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        words = (self.launcher, *words)
        call = subprocess.Popen(
            words, cwd=self.cwd, env=env, text=True, start_new_session=True, **streams
        )
        self.started.append(call)
        return call

    def start_until_pip(self) -> Call:
        """Start a call, and return when its pip has begun, which then waits for the file `go`."""
        self.script("pip", BLOCKED_PIP)
        return self.start_until("pip-began")

    def start_until(self, name: str) -> Call:
        """Start a call, and return when it has made this file in the folder of the fakes."""
        call = self.start()
        wait_until(lambda: (self.fakes / name).exists() or call.poll() is not None)
        assert call.poll() is None, call.communicate(timeout=60)
        return call

    def run(self, *words: str, **env: str) -> Outcome:
        call = self.start(*words, **env)
        out, err = call.communicate(timeout=60)
        return Outcome(call.returncode, out, err)

    def refuses(self, message: str, **env: str) -> None:
        done = self.run(**env)
        assert done.code == 2
        assert message in done.err


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    repository = Checkout(tmp_path / "odd [name] $HOME 'x", tmp_path / "fakes")
    repository.root.mkdir()
    repository.fakes.mkdir()
    shutil.copy2(REPO / "dppo", repository.root)
    (repository.root / "pyproject.toml").write_text(PYPROJECT)
    (repository.root / "constraints.txt").write_text("one==1\n")
    for tool in TOOLS.split():
        (repository.fakes / tool).symlink_to(shutil.which(tool) or f"missing {tool}")
    repository.script("command", COMMAND)
    repository.python("python3.12", "3.12.4")
    yield repository
    for call in repository.started:
        with suppress(ProcessLookupError):
            os.killpg(call.pid, signal.SIGKILL)
        call.communicate(timeout=60)


def test_the_first_call_installs_pinned_and_runs_the_command_in_the_callers_folder(
    checkout: Checkout,
) -> None:
    (checkout.fakes / "one").symlink_to(checkout.root / "dppo")
    (checkout.root.parent / "two").symlink_to("fakes/one")
    checkout.launcher = "../two"
    checkout.cwd = checkout.fakes
    done = checkout.run("x", "two words", PYTHONPATH="/mine", PIP_TARGET="/elsewhere")
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["ran:x", "ran:two words", f"in:{checkout.fakes}", "path:/mine"]
    assert done.err == "Setting up .venv with Python 3.12.4, a few minutes ...\n"

    venv, pip = (checkout.fakes / "calls").read_text().splitlines()
    assert venv == "venv"
    assert (
        f"-c constraints.txt -e .[test] in {checkout.root} PYTHONPATH=unset PIP_TARGET=unset" in pip
    )


def test_a_later_call_starts_no_interpreter_and_returns_the_commands_exit_code(
    checkout: Checkout,
) -> None:
    checkout.run()
    checkout.script("python3.12", "#!/bin/sh\nexit 9\n")
    (checkout.venv / "bin" / "dppo").write_text("#!/bin/sh\nexit 7\n")
    done = checkout.run("again")
    assert (done.code, done.err) == (7, "")


@pytest.mark.parametrize(
    ("version", "patch", "chosen", "message"),
    [
        ("3.9.18", "", "python3.12", "python3.12 is Python 3.9, but dppo needs 3.10 or newer"),
        ("3.12.4", "sys.modules['ensurepip'] = None", "", "apt install python3.12-venv"),
        ("3.12.4", "", "/not/there", "PYTHON=/not/there is not a Python that runs"),
        ("3.12.4", "", "ls", "PYTHON=ls is not a Python that runs"),
        ("3.12.4", "sys.exit(1)", "", "no Python found. Install Python 3.10 or newer"),
    ],
)
def test_unusable_pythons_are_reported(
    version: str, patch: str, chosen: str, message: str, checkout: Checkout
) -> None:
    checkout.python("python3.12", version, patch)
    checkout.refuses(message, PYTHON=chosen)
    assert not checkout.venv.exists()


def test_a_venv_is_rebuilt_for_another_version_or_if_its_python_is_gone(checkout: Checkout) -> None:
    checkout.python("python3", "3.9.18")
    assert "with Python 3.12.4" in checkout.run().err  # python3 is too old
    checkout.python("python3.13", "3.13.0")
    assert checkout.run(PYTHON="python3.12").err == ""
    assert (
        "with Python 3.13.0"
        in checkout.run(PYTHON=str(checkout.fakes / "python3.13"), DPPO_REBUILD="1").err
    )
    assert checkout.run().err == ""

    (checkout.fakes / "python3.13").unlink()  # as an upgrade of the system would
    assert "with Python 3.12.4" in checkout.run().err
    assert checkout.calls() == ["venv", "pip"] * 3


def install(checkout: Checkout, name: str) -> None:
    """Put a package into .venv, as a user's pip would."""
    (checkout.venv / "lib" / "python3.12" / "site-packages" / f"{name}-1.0.dist-info").mkdir(
        parents=True
    )


def test_another_patch_version_of_python_is_no_reason_to_rebuild(checkout: Checkout) -> None:
    checkout.run()
    install(checkout, "optuna")
    checkout.python("python3.12", "3.12.11")
    assert checkout.run(PYTHON="python3.12").err == ""
    assert checkout.calls() == ["venv", "pip"]


def test_another_minor_version_and_packages_of_the_user_need_a_word(checkout: Checkout) -> None:
    checkout.script("pip", 'mkdir -p "$venv/lib/python3.12/site-packages/one-1.dist-info"')
    checkout.run()
    checkout.python("python3.13", "3.13.0")
    checkout.refuses(
        ".venv has Python 3.12.4, and PYTHON is 3.13.0. Set DPPO_REBUILD=1", PYTHON="python3.13"
    )
    install(checkout, "Optuna")
    checkout.refuses(
        "removes what you have installed: optuna. Set DPPO_REBUILD=1", PYTHON="python3.13"
    )
    (checkout.root / "constraints.txt").write_text("one==2\n")
    checkout.refuses("removes what you have installed: optuna. Set DPPO_REBUILD=1")
    assert checkout.calls() == ["venv", "pip"]

    done = checkout.run(DPPO_REBUILD="1")
    assert (done.code, checkout.calls()) == (0, ["venv", "pip"] * 2)
    assert "pip install -c constraints.txt optuna" in done.err


def test_a_venv_in_use_is_never_emptied(checkout: Checkout) -> None:
    checkout.script(
        "command", "#!/bin/sh\ntouch FOLDER/runs\nwhile [ ! -e FOLDER/go ]; do sleep 0.02; done\n"
    )
    busy = checkout.start_until("runs")
    (checkout.root / "constraints.txt").write_text("one==2\n")
    checkout.refuses(
        f".venv must be built again, and is in use by process {busy.pid} (", DPPO_REBUILD="1"
    )
    (checkout.fakes / "go").touch()
    busy.communicate(timeout=60)
    checkout.script("command", COMMAND)
    assert checkout.run().code == 0
    assert checkout.calls() == ["venv", "pip"] * 2


def test_a_copy_of_dppo_is_linked_to_the_clone_again_and_no_package_is_lost(
    checkout: Checkout,
) -> None:
    checkout.run()
    install(checkout, "onnx")
    copy = checkout.venv / "lib" / "python3.12" / "site-packages" / "dppo"
    copy.mkdir()  # as by `pip install '.[onnx]'`
    checkout.script("pip", "exit 1")
    checkout.refuses("pip could not link dppo to this clone. Fix what")
    checkout.script("pip", 'rm -r "$venv/lib/python3.12/site-packages/dppo"')
    done = checkout.run()
    assert (done.code, done.err.count("is linked to this clone again")) == (0, 1)
    assert checkout.run().err == ""
    assert checkout.calls() == ["venv", *["pip"] * 3]
    assert " --no-deps -c constraints.txt -e . " in (checkout.fakes / "calls").read_text()
    assert (copy.parent / "onnx-1.0.dist-info").exists()


def test_the_command_learns_how_it_was_called(checkout: Checkout) -> None:
    checkout.script("command", '#!/bin/sh\necho "as:$DPPO_CALLED_AS"\n')
    assert checkout.run().out == f"as:{checkout.root}/dppo\n"
    checkout.launcher = "./dppo"
    assert checkout.run().out == "as:./dppo\n"


def test_changed_pins_and_dependencies_rebuild_and_settings_of_tools_do_not(
    checkout: Checkout,
) -> None:
    checkout.run()
    pyproject = checkout.root / "pyproject.toml"
    for path, old, new, rebuilds in [
        (checkout.root / "constraints.txt", "one==1", "one==2", True),
        (pyproject, '["one"]', '["one", "two"]', True),
        (pyproject, "line-length = 110", "line-length = 90", False),
        (pyproject, "x = 1", "x = 2", True),
    ]:
        path.write_text(path.read_text().replace(old, new))
        assert ("Setting up" in checkout.run().err) == rebuilds, new


def test_an_incomplete_or_moved_venv_is_emptied_and_rebuilt(checkout: Checkout) -> None:
    checkout.run()
    (checkout.venv / ".dppo-ready").unlink()
    (checkout.venv / "lib").mkdir()
    (checkout.venv / "lib" / "half.py").touch()
    assert checkout.run().code == 0
    assert not (checkout.venv / "lib").exists()
    moved = Checkout(checkout.root.rename(checkout.root.parent / "moved"), checkout.fakes)
    assert moved.run().code == 0
    assert moved.calls() == ["venv", "pip"] * 3


@pytest.mark.slow
def test_setting_up_says_what_it_is_doing_and_for_how_long(checkout: Checkout) -> None:
    log = "Collecting one\n  Downloading https://host/one.whl.metadata (2 kB)\n  Downloading one-1.whl (190.2 MB)\n"
    site = 'mkdir -p "$venv/lib/python3.12/site-packages/one.dist-info"'
    script = f"printf '{log}'; sleep 1.5; printf 'Installing collected packages: one, two\\n'; {site}; sleep 1.5\n"
    checkout.script("pip", script)
    lines = checkout.run(DPPO_SETUP_REPORT_S="1").err.splitlines()
    assert lines[1] == "  0:01  1 packages found; Downloading one-1.whl (190.2 MB)"
    assert "  0:02  installing 2 packages, 50 %" in lines


def test_a_folder_that_is_not_ours_is_left_alone(checkout: Checkout) -> None:
    checkout.venv.mkdir()
    (checkout.venv / "pyvenv.cfg").write_text("mine")
    checkout.refuses("was not created by this launcher")
    assert [path.read_text() for path in checkout.venv.iterdir()] == ["mine"]
    (checkout.root / "constraints.txt").unlink()
    checkout.refuses("is not a clone of dppo")


def test_a_link_to_an_empty_folder_is_filled_and_a_dangling_one_is_reported(
    checkout: Checkout,
) -> None:
    large_disk = checkout.root.parent / "large disk"
    checkout.venv.symlink_to(large_disk)
    checkout.refuses(f"cannot write to {checkout.venv}")
    large_disk.mkdir()
    assert checkout.run().code == 0
    assert (large_disk / ".dppo-ready").exists()
    assert checkout.run().err == ""


def test_a_failed_setup_shows_the_end_of_its_log_and_is_redone(checkout: Checkout) -> None:
    checkout.script("pip", 'for i in $LINES; do echo "line-$i-"; done; exit 1\n')
    done = checkout.run("train", LINES=" ".join(map(str, range(30))))
    assert (done.code, done.out) == (2, "")
    assert "line-29-" in done.err
    assert "line-5-" not in done.err

    log = checkout.venv / "setup.log"
    assert "pip could not install dppo into .venv" in done.err
    assert done.err.endswith(f"The whole log: {log}\n")
    assert "line-5-" in log.read_text()

    (checkout.fakes / "venv-fails").touch()
    checkout.refuses("    broken\ndppo: ")
    (checkout.fakes / "venv-fails").unlink()
    (checkout.fakes / "pip").unlink()
    assert checkout.run().code == 0
    assert checkout.calls() == ["venv", "pip", "venv", "venv", "pip"]


def test_concurrent_first_calls_install_once(checkout: Checkout) -> None:
    first = checkout.start_until_pip()
    second = checkout.start("x")
    third = checkout.start("x")
    for later in (second, third):
        assert later.stderr is not None
        assert later.stderr.readline() == WAITING
    (checkout.fakes / "go").touch()
    for call in (first, second, third):
        output = call.communicate(timeout=60)
        assert call.returncode == 0, output
    assert checkout.calls() == ["venv", "pip"]


@pytest.mark.parametrize(
    ("number", "kill"), [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)]
)
def test_an_interrupted_setup_ends_with_its_pip_and_is_redone(
    number: int, kill: Any, checkout: Checkout
) -> None:
    call = checkout.start_until_pip()
    kill(call.pid, number)
    _, err = call.communicate(timeout=60)
    assert call.returncode == 128 + number
    assert "interrupted. The next call sets up .venv again" in err
    with pytest.raises(ProcessLookupError):
        os.kill(int((checkout.fakes / "pip-pid").read_text()), 0)
    (checkout.fakes / "pip").unlink()
    assert checkout.run().code == 0


def test_a_killed_launcher_leaves_the_lock_only_while_its_pip_runs(checkout: Checkout) -> None:
    checkout.start_until_pip().kill()
    second = checkout.start()
    assert second.stderr is not None
    assert second.stderr.readline() == WAITING
    (checkout.fakes / "go").touch()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert checkout.calls() == ["venv", "pip"] * 2


TESTS_OF_A_CHECKOUT = """
import pytest

def test_fast(): pass

@pytest.mark.slow
def test_slow(): assert False
"""


def test_the_test_command_runs_the_tests_of_its_checkout(tmp_path: Path) -> None:
    script = tmp_path / "src" / "dppo" / "commands" / "test.py"
    script.parent.mkdir(parents=True)
    shutil.copy(REPO / "src" / "dppo" / "commands" / "test.py", script)
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    code = "import runpy, sys; sys.exit(runpy.run_path(sys.argv[1])['main'](sys.argv[2:]))"

    def dppo_test(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-c", code, str(script), *words]
        done = subprocess.run(
            command, cwd="/", capture_output=True, text=True, timeout=60, check=False
        )
        return done.returncode, done.stdout + done.stderr

    without_tests = "dppo was installed without its tests. Run ./dppo test in a clone."
    assert dppo_test() == (2, f"dppo test: {without_tests}\n")

    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").touch()
    (tests / "test_some.py").write_text(TESTS_OF_A_CHECKOUT)
    exit_code, printed = dppo_test("-q", "-n", "0")
    assert exit_code == 0, printed
    assert "1 passed, 1 deselected" in printed

    exit_code, printed = dppo_test("-q", "-n", "0", "--slow", "tests/test_some.py")
    assert exit_code == 1, printed
    assert "1 failed, 1 passed" in printed
