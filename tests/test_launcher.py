"""`./dppo`, with interpreters that are small shell scripts, and `dppo test`. No network, nothing installed.

A fake interpreter answers `-m venv` and `-m pip` by itself and notes that it was asked. What the launcher
runs with `-c` (what are you? take the lock) is run by the real one, with the version that the fake claims.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
TOOLS = """
    awk cat chmod cksum cp df dirname env find grep id ln ls mkdir mv readlink rm sed sh sleep tail touch
"""
PYPROJECT = """\
[project]
name = "dppo"
dependencies = ["one"]

[tool.ruff]
line-length = 110

[tool.hatch.build]
x = 1
"""
FAKE = """\
#!/bin/sh
case $0 in
    */bin/python) venv=${0%/bin/python}; me=FOLDER/NAME ;;
    *) me=$0 ;;
esac
while :; do case $1 in -E | -s | -I) shift ;; *) break ;; esac; done
case "$1 $2" in
    "-m venv")
        echo "venv" >>"FOLDER/calls"
        mkdir -p "$3/bin" && ln -s "$me" "$3/bin/python" && touch "$3/pyvenv.cfg"
        ;;
    "-m pip")
        shift 2
        echo "pip $* in $(pwd) PYTHONPATH=${PYTHONPATH-unset} PIP_TARGET=${PIP_TARGET-unset}" >>"FOLDER/calls"
        [ ! -e "FOLDER/pip" ] || . "FOLDER/pip"
        cp "FOLDER/command" "$venv/bin/dppo"
        chmod +x "$venv/bin/dppo"
        ;;
    "-c "*)
        code=$2
        shift 2
        exec "REAL" -I -S -c "
import sys
sys.version_info, sys.executable, sys.prefix = VERSION, '$me', sys.base_prefix
PATCH
$code" "$@"
        ;;
    *) exit 9 ;;
esac
"""
COMMAND = """\
#!/bin/sh
printf 'ran:%s\\n' "$@"
echo "in:$(pwd)"
echo "path:$PYTHONPATH"
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the launcher with a stub of a project, in a folder of its own, and its fakes beside it."""

    root: Path
    fakes: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def ready(self) -> Path:
        return self.venv / ".dppo-ready"

    def calls(self) -> list[str]:
        """What the fakes were asked so far, and forget it."""
        notes = self.fakes / "calls"
        lines = notes.read_text().splitlines() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return [line.split()[0] for line in lines]

    def python(self, name: str = "python3.12", version: str = "3.12.4", patch: str = "") -> Path:
        """Put a fake interpreter of that name on PATH."""
        path = self.fakes / name
        numbers = f"({version.replace('.', ', ')}, 'final', 0)"
        text = FAKE.replace("FOLDER", str(self.fakes)).replace("NAME", name).replace("REAL", sys.executable)
        path.write_text(text.replace("VERSION", numbers).replace("PATCH", patch))
        path.chmod(0o755)
        return path

    def pip_does(self, script: str) -> None:
        """Shell commands that the fake pip runs before it installs; `exit 1` makes it fail."""
        (self.fakes / "pip").write_text(script)

    def environment(self, **extra: str) -> dict[str, str]:
        return {"PATH": str(self.fakes), "HOME": str(self.fakes), "LC_ALL": "C", **extra}

    def run(self, *arguments: str, launcher: Path | None = None, cwd: Path | None = None, **extra: str) -> Outcome:
        done = subprocess.run(
            [str(launcher or self.root / "dppo"), *arguments],
            cwd=cwd or self.root,
            env=self.environment(**extra),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    @contextmanager
    def started(self, *arguments: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
        """A launcher in a session of its own, once its pip has begun; whatever is left of it is killed."""
        process = subprocess.Popen(
            [str(self.root / "dppo"), *arguments],
            cwd=self.root,
            env=self.environment(**extra),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            end = time.monotonic() + 20
            while not (self.fakes / "pip-began").exists():
                assert time.monotonic() < end, "the launcher did not come to pip in 20 s"
                assert process.poll() is None, process.communicate()
                time.sleep(0.01)
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=20)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def make_checkout(base: Path, name: str = "check out") -> Checkout:
    root, fakes = base / name, base / "fakes"
    root.mkdir()
    fakes.mkdir()
    shutil.copy2(REPO / "dppo", root / "dppo")
    (fakes / "command").write_text(COMMAND)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "constraints.txt").write_text("one==1\n")
    for tool in TOOLS.split():
        found = shutil.which(tool)
        assert found, f"this test needs {tool}"
        (fakes / tool).symlink_to(found)
    return Checkout(root, fakes)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = make_checkout(tmp_path)
    made.python()
    return made


# --- the good way ---------------------------------------------------------------------------------


def test_first_call_installs_pinned_and_runs_the_command_where_the_caller_is(checkout: Checkout) -> None:
    here = checkout.root.parent
    done = checkout.run("train", "two words", cwd=here)

    assert done.code == 0, done.err
    assert done.out.splitlines() == ["ran:train", "ran:two words", f"in:{here}", "path:"]
    assert done.err == "Setting up .venv (once, a few minutes)  done\n"
    venv, pip = (checkout.fakes / "calls").read_text().splitlines()
    assert venv == "venv"
    assert pip.startswith("pip install ")
    assert f"-c constraints.txt -e .[test] in {checkout.root} " in pip


def test_second_call_asks_no_interpreter_and_says_nothing(checkout: Checkout) -> None:
    checkout.run()
    checkout.calls()
    (checkout.fakes / "python3.12").rename(checkout.fakes / "away")
    (checkout.venv / "bin" / "python").unlink()
    (checkout.venv / "bin" / "python").write_text("#!/bin/sh\nexit 9\n")  # must not even be started
    (checkout.venv / "bin" / "python").chmod(0o755)

    done = checkout.run("again")

    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("ran:again\n")
    assert checkout.calls() == []


def test_second_call_costs_less_than_50_ms_of_shell(checkout: Checkout) -> None:
    checkout.run()
    times = []
    for _ in range(8):
        start = time.perf_counter()
        checkout.run()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05


def test_works_through_a_chain_of_symlinks_and_with_odd_names(tmp_path: Path) -> None:
    checkout = make_checkout(tmp_path, "odd [name] $HOME 'x")
    checkout.python()
    (tmp_path / "bin dir").mkdir()
    (tmp_path / "bin dir" / "one").symlink_to(checkout.root / "dppo")
    (tmp_path / "two").symlink_to("bin dir/one")

    done = checkout.run("x", launcher=tmp_path / "two", cwd=tmp_path / "bin dir")

    assert done.code == 0, done.err
    assert done.out.splitlines()[:2] == ["ran:x", f"in:{tmp_path}/bin dir"]
    assert checkout.ready.exists()


def test_exit_code_of_the_command_is_ours(checkout: Checkout) -> None:
    checkout.run()
    (checkout.venv / "bin" / "dppo").write_text("#!/bin/sh\nexit 7\n")
    assert checkout.run().code == 7


def test_callers_python_settings_reach_the_command_but_not_pip(checkout: Checkout) -> None:
    done = checkout.run(PYTHONPATH="/mine", PIP_TARGET="/elsewhere")
    assert done.out.splitlines()[-1] == "path:/mine"
    assert (checkout.fakes / "calls").read_text().endswith("PYTHONPATH=unset PIP_TARGET=unset\n")


# --- which Python ---------------------------------------------------------------------------------


def test_python_too_old_is_named_with_its_version(checkout: Checkout) -> None:
    old = checkout.python("python3.9", "3.9.18")
    done = checkout.run(PYTHON=str(old))
    assert done.code == 2
    assert f"{old} is Python 3.9.18; dppo needs 3.10 or newer" in done.err
    assert not checkout.venv.exists()


def test_an_old_python3_is_passed_over_for_a_newer_one(checkout: Checkout) -> None:
    checkout.python("python3", "3.9.18")
    assert checkout.run().code == 0
    assert checkout.ready.read_text().splitlines()[2] == "3.12.4"


def test_missing_venv_module_names_the_package_to_install(checkout: Checkout) -> None:
    checkout.python(patch="sys.modules['ensurepip'] = None")
    done = checkout.run()
    assert done.code == 2
    assert "python3.12 is Python 3.12.4, but its modules venv and ensurepip are not both there" in done.err
    assert "python3.12-venv" in done.err
    assert not checkout.venv.exists()


def test_no_python_at_all_is_said(checkout: Checkout) -> None:
    (checkout.fakes / "python3.12").unlink()
    done = checkout.run()
    assert done.code == 2
    assert "no Python was found" in done.err


@pytest.mark.parametrize("name", ["/not/there", "ls"])
def test_a_python_that_is_none_is_said(checkout: Checkout, name: str) -> None:
    done = checkout.run(PYTHON=name)
    assert done.code == 2
    assert f"PYTHON={name}: " in done.err


def test_another_version_asked_for_makes_it_again_and_the_same_does_not(checkout: Checkout) -> None:
    checkout.run()
    checkout.calls()
    assert checkout.run(PYTHON="python3.12").code == 0
    assert checkout.calls() == []

    newer = checkout.python("python3.13", "3.13.0")
    done = checkout.run(PYTHON=str(newer))
    assert "again: it was made by Python 3.12.4" in done.err
    assert checkout.calls() == ["venv", "pip"]
    assert checkout.run().err == ""  # without PYTHON, what is there will do


def test_a_python_replaced_by_the_system_makes_it_again(checkout: Checkout) -> None:
    generic = checkout.fakes / "python3"
    generic.symlink_to("python3.12")
    checkout.run()
    (checkout.venv / "bin" / "python").unlink()
    (checkout.venv / "bin" / "python").symlink_to(generic)  # as venv does it for /usr/bin/python3
    assert checkout.run().err == ""

    checkout.python("python3.13", "3.13.0")
    generic.unlink()
    generic.symlink_to("python3.13")
    done = checkout.run()
    assert done.code == 0
    assert "again: the Python that made it is gone" in done.err
    assert checkout.ready.read_text().splitlines()[2] == "3.13.0"


# --- what makes it again --------------------------------------------------------------------------


def test_changed_pins_or_dependencies_install_again_and_tool_settings_do_not(checkout: Checkout) -> None:
    checkout.run()
    checkout.calls()

    (checkout.root / "constraints.txt").write_text("one==2\n")
    assert "again: pyproject.toml or constraints.txt has changed" in checkout.run().err
    assert checkout.calls() == ["venv", "pip"]

    (checkout.root / "pyproject.toml").write_text(PYPROJECT.replace('["one"]', '["one", "two"]'))
    assert checkout.run().code == 0
    assert checkout.calls() == ["venv", "pip"]

    text = (checkout.root / "pyproject.toml").read_text()
    (checkout.root / "pyproject.toml").write_text(text.replace("line-length = 110", "line-length = 90"))
    assert checkout.run().err == ""
    assert checkout.calls() == []

    (checkout.root / "pyproject.toml").write_text(text.replace("x = 1", "x = 2"))
    assert checkout.run().code == 0
    assert checkout.calls() == ["venv", "pip"]


def test_a_half_made_venv_is_emptied_and_made_again(checkout: Checkout) -> None:
    checkout.run()
    checkout.calls()
    checkout.ready.unlink()  # as if the power had gone
    leftover = checkout.venv / "lib" / "half.py"
    leftover.parent.mkdir()
    leftover.touch()

    done = checkout.run()

    assert done.code == 0
    assert "again: the last setup did not end well" in done.err
    assert checkout.calls() == ["venv", "pip"]
    assert not leftover.exists()


def test_a_moved_checkout_makes_it_again(checkout: Checkout) -> None:
    checkout.run()
    moved = Checkout(checkout.root.rename(checkout.root.parent / "moved"), checkout.fakes)
    moved.calls()
    done = moved.run()
    assert done.code == 0
    assert f"again: it was made in {checkout.root}" in done.err
    assert moved.calls() == ["venv", "pip"]


def test_a_venv_of_somebody_else_is_refused_and_left_alone(checkout: Checkout) -> None:
    (checkout.venv / "bin").mkdir(parents=True)
    (checkout.venv / "bin" / "dppo").write_text("mine")
    before = sorted(checkout.venv.rglob("*"))

    done = checkout.run()

    assert done.code == 2
    assert "was not made by this launcher" in done.err
    assert sorted(checkout.venv.rglob("*")) == before
    assert checkout.calls() == []


def test_an_empty_folder_or_a_link_to_one_is_taken(checkout: Checkout) -> None:
    large_disk = checkout.root.parent / "large disk"
    large_disk.mkdir()
    checkout.venv.symlink_to(large_disk)
    assert checkout.run().code == 0
    assert (large_disk / ".dppo-ready").exists()
    checkout.calls()
    assert checkout.run().err == ""
    assert checkout.calls() == []


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_failing_pip_shows_its_last_lines_and_leaves_nothing_usable(checkout: Checkout) -> None:
    checkout.pip_does('for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17; do echo "line-$i-"; done; exit 1\n')
    done = checkout.run("train")
    assert done.code == 2
    assert done.out == ""
    assert "line-17-" in done.err
    assert "line-1-" not in done.err
    assert "pip could not install dppo" in done.err
    log = checkout.venv / "setup.log"
    assert f"The whole log: {log}" in done.err
    assert "line-1-" in log.read_text()
    assert not checkout.ready.exists()

    (checkout.fakes / "pip").unlink()
    checkout.calls()
    assert checkout.run().code == 0
    assert checkout.calls() == ["venv", "pip"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        (
            "NewConnectionError: Temporary failure in name resolution",
            "the package index could not be reached",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "has no file of that for Python 3.12.4"),
    ],
)
def test_known_causes_of_a_failing_pip_are_told(checkout: Checkout, words: str, told: str) -> None:
    checkout.pip_does(f"echo '{words}'; exit 1\n")
    done = checkout.run()
    assert done.code == 2
    assert told in done.err
    assert not checkout.ready.exists()


def test_a_failing_venv_stops_before_pip(checkout: Checkout) -> None:
    python = checkout.fakes / "python3.12"
    python.write_text(python.read_text().replace('mkdir -p "$3/bin"', "echo broken; exit 1"))
    done = checkout.run()
    assert done.code == 2
    assert "broken" in done.err
    assert "making .venv with" in done.err
    assert checkout.calls() == ["venv"]


def test_too_little_space_is_said_before_anything_is_fetched(checkout: Checkout) -> None:
    (checkout.fakes / "df").unlink()
    (checkout.fakes / "df").write_text(
        "#!/bin/sh\necho Filesystem 1024-blocks Used Available Capacity Mounted on\n"
        "echo /dev/some disk 9000000 8000000 1000000 89% /mnt/my disk\n"
    )
    (checkout.fakes / "df").chmod(0o755)
    done = checkout.run()
    assert done.code == 2
    assert "only 1000 MB are free" in done.err
    assert "2000 MB are needed" in done.err
    assert checkout.calls() == []


def test_a_folder_that_cannot_be_written_is_said() -> None:
    # Not in tmp_path, which another user cannot enter; root may write everywhere, so it steps down to nobody.
    with tempfile.TemporaryDirectory() as name:
        base = Path(name).resolve()
        base.chmod(0o755)
        checkout = make_checkout(base)
        (checkout.fakes / "python3").write_text("#!/bin/sh\nprintf 'fit 3.12.4 /usr/bin/python3'\n")
        (checkout.fakes / "python3").chmod(0o755)
        checkout.root.chmod(0o555)
        try:
            done = subprocess.run(
                [str(checkout.root / "dppo")],
                env=checkout.environment(),
                capture_output=True,
                text=True,
                timeout=30,
                user=65534 if os.geteuid() == 0 else None,
            )
        finally:
            checkout.root.chmod(0o755)
    assert done.returncode == 2
    assert f"cannot write in {checkout.venv}: Permission denied" in done.stderr


def test_a_checkout_without_its_pins_is_said(checkout: Checkout) -> None:
    (checkout.root / "constraints.txt").unlink()
    done = checkout.run()
    assert done.code == 2
    assert "constraints.txt cannot be read" in done.err


# --- two at once, and signals ---------------------------------------------------------------------


def test_concurrent_first_calls_install_once(checkout: Checkout) -> None:
    checkout.pip_does("sleep 0.6")
    command, environment = [str(checkout.root / "dppo"), "x"], checkout.environment()
    calls = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [call.communicate(timeout=30) for call in calls]
    assert [call.returncode for call in calls] == [0, 0, 0], outputs
    assert all(out.startswith("ran:x\n") for out, _ in outputs)
    assert sum("Setting up" in err for _, err in outputs) == 1
    assert sum("Waiting for process" in err for _, err in outputs) == 2
    assert checkout.calls() == ["venv", "pip"]


def test_waiting_for_another_setup_has_a_deadline(checkout: Checkout) -> None:
    checkout.pip_does(f"touch '{checkout.fakes}/pip-began'; exec sleep 30")
    with checkout.started() as first:
        done = checkout.run(DPPO_SETUP_WAIT_S="0.2")
        assert done.code == 2
        assert f"waited 0.2 s for process {first.pid}, which is still setting up .venv" in done.err
        assert first.poll() is None


@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)],
    ids=["Ctrl-C", "SIGTERM to the launcher alone"],
)
def test_an_interrupted_setup_ends_at_once_with_its_pip(
    checkout: Checkout, number: signal.Signals, to_all: bool, code: int
) -> None:
    checkout.pip_does(f"echo $$ >'{checkout.fakes}/pid'; touch '{checkout.fakes}/pip-began'; exec sleep 30")
    with checkout.started() as call:
        (os.killpg if to_all else os.kill)(call.pid, number)
        _, err = call.communicate(timeout=5)
    assert call.returncode == code
    assert "interrupted; .venv is half made" in err
    assert not checkout.ready.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int((checkout.fakes / "pid").read_text()), 0)

    (checkout.fakes / "pip").unlink()
    assert checkout.run().code == 0


def test_a_launcher_killed_outright_leaves_a_lock_only_while_its_pip_writes(checkout: Checkout) -> None:
    checkout.pip_does(f"touch '{checkout.fakes}/pip-began'; rm '{checkout.fakes}/pip'; sleep 0.8")
    with checkout.started() as call:
        call.kill()
        call.wait(timeout=5)
        checkout.calls()
        done = checkout.run()
    assert done.code == 0
    assert "Waiting for process" in done.err  # for the pip that was left over
    assert checkout.calls() == ["venv", "pip"]


# --- dppo test ------------------------------------------------------------------------------------


def run_test_command(script: Path, *arguments: str, cwd: Path, flags: tuple[str, ...] = ()) -> Outcome:
    code = "import runpy, sys; sys.exit(runpy.run_path(sys.argv[1])['main'](sys.argv[2:]))"
    command = [sys.executable, *flags, "-c", code, str(script), *arguments]
    env = os.environ | {"PYTHONPATH": str(REPO / "src")}  # with -S nothing else is installed
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small source tree with the real pytest settings; returns its copy of the command."""
    commands = tmp_path / "src" / "dppo" / "commands"
    commands.mkdir(parents=True)
    shutil.copy(REPO / "src" / "dppo" / "commands" / "test.py", commands)
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(
        "import pytest\n"
        "def test_fast(): pass\n"
        "@pytest.mark.slow\ndef test_slow(): pass\n"
        "@pytest.mark.slow\ndef test_bad(): assert False\n"
    )
    return commands / "test.py"


def test_test_command_runs_the_fast_set_from_anywhere(tree: Path) -> None:
    done = run_test_command(tree, "-q", cwd=Path("/"))
    assert done.code == 0, done.out + done.err
    assert "1 passed, 2 deselected" in done.out


def test_test_command_runs_everything_with_slow_and_returns_pytests_code(tree: Path) -> None:
    done = run_test_command(tree, "--slow", cwd=tree.parent)
    assert done.code == 1
    assert "1 failed, 2 passed" in done.out
    assert run_test_command(tree, "-k", "nothing", cwd=tree.parent).code == 5


def test_test_command_without_a_source_tree_says_so(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    nowhere = tmp_path_factory.mktemp("nowhere")
    alone = shutil.copy(tree, nowhere / "test.py")
    done = run_test_command(Path(alone), cwd=nowhere)
    assert done.code == 2
    assert "installed without its source tree" in done.err
    found = run_test_command(Path(alone), "-q", cwd=tree.parent)  # then the tree that one stands in is taken
    assert found.code == 0, found.out + found.err


def test_test_command_without_pytest_says_so(tree: Path) -> None:
    done = run_test_command(tree, cwd=tree.parent, flags=("-S",))
    assert done.code == 2
    assert "pytest is not installed" in done.err
