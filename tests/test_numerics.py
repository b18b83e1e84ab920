"""Portable numerics: equal weights on other types of CPU; fingerprints, which show where last bits differ."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import kinds
import numpy as np
import pytest
import torch
from builders import tiny_run
from commandline import fresh_environment
from recorder import Notes
from remedies import executes

import dppo
from dppo.errors import ClusterError
from dppo.numerics import arithmetic, portable
from dppo.numerics.fingerprint import Expected, Fingerprint, Probe, fingerprint
from dppo.run import building

# MKL asks these functions for the vendor: with them, it takes the code of an Intel CPU anywhere.
INTEL = """
int mkl_serv_intel_cpu_true(void) { return 1; }
int mkl_serv_intel_cpu(void) { return 1; }
int mkl_serv_cpuiszen(void) { return 0; }
"""
CPUS = {
    "prescott": {
        "OPENBLAS_CORETYPE": "Prescott",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "SSE4_2",
    },
    "skylake": {
        "OPENBLAS_CORETYPE": "SkylakeX",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_CBWR": "AVX2",
    },
    "intel": {"LD_PRELOAD": "intel.so"},
}
NAMED = {"a": "1", "b": "2"}
ONE = Fingerprint("n1", "AMD", {"numpy": "2.4"}, NAMED)
PROBE = Probe(2, (8,), images=True)
WEIGHTS_OF_KINDS = """
import sys
from pathlib import Path
import dppo
dppo.portable_numerics()
import kinds
for kind in sys.argv[2:]:
    print(kind, dppo.train(kinds.settings(kind, Path(sys.argv[1]) / kind)).weights_sha256)
"""

needs_avx2 = pytest.mark.skipif(not portable.has_avx2(), reason="portable numerics need AVX2")


def compiled_intel(folder: Path) -> str:
    """Return a library that makes MKL believe that it runs on a CPU of Intel."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = folder / "intel.c"
    library = folder / "intel.so"
    source.write_text(INTEL)
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    return str(library)


def weights_on(cpu: str, names: list[str], folder: Path) -> list[str]:
    """Return a line for each kind, trained where the libraries would choose the code of `cpu`."""
    chosen = {*portable.VARIABLES, "DPPO_NUMERICS"}
    variables = {name: value for name, value in fresh_environment().items() if name not in chosen}
    variables |= CPUS.get(cpu, {})
    if cpu == "intel":
        variables["LD_PRELOAD"] = compiled_intel(folder)
    command = [sys.executable, "-c", WEIGHTS_OF_KINDS, str(folder / (cpu or "own")), *names]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_avx2
@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
def test_weights_are_equal_on_other_types_of_cpu(
    cpu: str, run_of: kinds.RunOf, tmp_path: Path
) -> None:
    """This process has portable numerics, too, unless variables simulate another CPU: see conftest.py."""
    names = list(kinds.KINDS)
    if os.environ.get("DPPO_NUMERICS") == "native":
        here = weights_on("", names, tmp_path)
    else:
        here = [f"{name} {run_of(name).weights_sha256}" for name in names]
    assert weights_on(cpu, names, tmp_path) == here


def test_differences_name_operations_and_versions() -> None:
    elsewhere = replace(ONE, node="n2", cpu="Intel")
    assert ONE.differences(elsewhere) == ""
    only_a = replace(ONE, results={"a": "1"})
    assert ONE.differences(only_a) == "", "only what both computed counts"
    other = replace(ONE, versions={"numpy": "2.3"}, results=NAMED | {"b": "3"})
    assert ONE.differences(other) == "different last bits in b, numpy 2.3 instead of 2.4"
    without_torch = fingerprint(PROBE, torch=False)
    with_torch = fingerprint(PROBE, torch=True)
    assert without_torch.differences(with_torch) == ""


@pytest.mark.parametrize(
    ("portable_here", "remedy"),
    [
        (True, "Set DPPO_NUMERICS=native before dppo"),
        (False, r"call dppo\.portable_numerics\(\) before NumPy"),
    ],
)
def test_other_numerics_of_a_process_on_the_same_cpu_are_named_with_the_remedy(
    portable_here: bool, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dppo.numerics.fingerprint.numpy_is_portable", lambda: portable_here)
    other = replace(ONE, results=NAMED | {"b": "3"})
    assert ONE.explanation(ONE) == ""
    assert re.search(f"on the same type of CPU: .*{remedy}", ONE.explanation(other))
    on_intel = ONE.explanation(replace(other, cpu="Intel"))
    assert on_intel.endswith(
        "Intel, computes different last bits in b, compared with AMD in the run."
    )


NATIVE_RUN = """
import numpy
import kinds
import dppo
dppo.train(kinds.small("run", env_id="CartPole-v1", keep_checkpoints="every=1"))
"""


@executes(
    "numerics/fingerprint.py: Set DPPO_NUMERICS=native before dppo",
    "numerics/fingerprint.py: Use numerics=portable; in Python, call dppo.portable_numerics() before",
)
@pytest.mark.parametrize("numerics", ["native", "portable"])
def test_a_run_of_a_program_that_imported_numpy_first_is_verified_by_the_remedy(
    numerics: str, tmp_path: Path
) -> None:
    env = fresh_environment()
    for name in ("DPPO_NUMERICS", *portable.VARIABLES):
        env.pop(name, None)
    program = NATIVE_RUN
    if numerics == "portable":
        program = f"import dppo\ndppo.portable_numerics()\n{program}"
    for words in (["-c", program], ["-m", "dppo", "verify", "run"]):
        subprocess.run([sys.executable, *words], env=env, cwd=tmp_path, check=True)
        env["DPPO_NUMERICS"] = numerics


def test_a_fingerprint_does_not_depend_on_the_threads_of_its_process() -> None:
    probe = Probe(8, (512, 512), images=True)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with arithmetic.limit_blas(threads):
            results.append(fingerprint(probe, torch=True))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert results[0].differences(results[1]) == ""


def test_native_numerics_without_effect_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in portable.VARIABLES.items():
        monkeypatch.setenv(name, value)
    dppo.train(kinds.small(tmp_path / "run", env_id="CartPole-v1", numerics="native"))
    assert any(
        "numerics=native: portable code was loaded already" in record.getMessage()
        for record in caplog.records
    )


def test_a_process_that_computes_otherwise_is_named_or_refused() -> None:
    ours = fingerprint(PROBE, torch=True)
    assert Expected(PROBE, ours, refuse=True).problem(torch=True) == ""
    changed = replace(ours, node="n1", cpu="other", results=ours.results | {"torch's Adam": ""})
    problem = Expected(PROBE, changed, refuse=False).problem(torch=True)
    for fact in (
        "different last bits in torch's Adam",
        "n1 (other)",
        ours.node,
        ours.cpu,
        "depends on which process",
    ):
        assert fact in problem
    with pytest.raises(ClusterError, match=r"on_other_cpu=warn"):
        Expected(PROBE, changed, refuse=True).problem(torch=True)


def test_fingerprints_see_another_code() -> None:
    """A process whose NumPy and torch are configured to compute as on an old CPU."""
    script = (
        "import json; from dataclasses import asdict; from dppo.numerics.fingerprint import Probe, fingerprint\n"
        "print(json.dumps(asdict(fingerprint(Probe(2, (8,)), torch=False))))"
    )
    inherited = {
        name: value for name, value in fresh_environment().items() if name not in portable.VARIABLES
    }
    results = []
    for variables in ({}, CPUS["prescott"]):
        environment = inherited | variables
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        results.append(Fingerprint(**json.loads(done.stdout)))
    if portable.has_avx2():
        assert "NumPy's matrix products" in results[0].differences(results[1])


def test_the_variables_raise_no_warning_where_warnings_are_errors() -> None:
    """Also in a process that this one starts, which loads NumPy before it loads `dppo`."""
    load_numpy = [sys.executable, "-c", "import numpy"]
    script = (
        "import subprocess, dppo; dppo.portable_numerics(); import numpy; "
        f"subprocess.run({load_numpy}, check=True)"
    )
    environment = {
        name: value for name, value in fresh_environment().items() if name not in portable.VARIABLES
    }
    environment["PYTHONWARNINGS"] = "error"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("extensions", "is_portable"),
    [
        ({"found": ["X86_V3"]}, True),
        ({"found": ["X86_V3", "X86_V4"]}, False),
        ({"found": ["AVX2", "AVX512_SKX"]}, False),
        ({"baseline": ["X86_V4"]}, False),
    ],
    ids=["disabled", "NumPy 2.4", "NumPy 1.26", "built for this CPU"],
)
def test_the_code_that_numpy_runs_is_known_without_names_that_only_numpy_2_has(
    extensions: dict[str, list[str]], is_portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    haswell = SimpleNamespace(info=lambda: [{"architecture": "Haswell"}])
    monkeypatch.setattr("dppo.numerics.arithmetic.openblas", lambda: haswell)
    monkeypatch.setattr(np, "show_config", lambda mode: {"SIMD Extensions": extensions})
    monkeypatch.setitem(sys.modules, "numpy._core._multiarray_umath", None)
    assert portable.numpy_is_portable() is is_portable


@pytest.mark.parametrize(
    ("words", "native"),
    [
        ("train E-v0", False),
        ("train E-v0 --numerics native", True),
        ("train E-v0 --numerics=native", True),
        ("train --numerics portable --config native.yaml", False),
        ("train --config native.yaml", True),
        ("train --config=native.yaml", True),
        ("train --resume run/checkpoints", True),
        ("eval run", True),
        ("replay run/incidents/001", True),
        ("eval run/checkpoints/000010", True),
        ("eval ''", False),
        ("train --config portable.yaml", False),
        ("train --resume other", False),
        ("train --config native.toml", True),
        ("train --config flow.yaml", True),
        ("train --numerics portable --numerics native", True),
        ("train --numerics native --numerics=portable", False),
        (f"train E-v0 --env-kwargs {'y' * 5000} --numerics", False),
    ],
    ids=lambda words: str(words)[:50],
)
def test_a_command_knows_its_numerics_before_it_loads_anything(
    words: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DPPO_NUMERICS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    files = {
        "native.yaml": "run:\n  numerics: native\n",
        "run/config.yaml": "run:\n  numerics: native\n",
        "config.yaml": "run:\n  numerics: native\n",  # nobody names this one
        "portable.yaml": "run:\n  numerics: portable\n",
        "other/config.yaml": "run:\n  numerics: portable\n",
        "native.toml": 'numerics = "native"\n',
        "flow.yaml": 'run: {"numerics": native}\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert portable._asks_for_native(shlex.split(words)) is native


@needs_avx2
@pytest.mark.parametrize("numerics", ["portable", "strict"])
def test_variables_are_set_while_a_run_lasts(
    numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in portable.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setattr(portable, "numpy_is_portable", lambda: True)
    with portable.in_force(numerics) as variables:
        assert os.environ["MKL_CBWR"] == "COMPATIBLE"
        assert ("ONEDNN_MAX_CPU_ISA" in variables) == (numerics == "strict")
    assert os.environ["MKL_CBWR"] == "AVX2"
    assert "OPENBLAS_CORETYPE" not in os.environ

    with portable.in_force("native") as variables:
        assert variables == {}
    monkeypatch.setattr(portable, "numpy_is_portable", lambda: False)
    with portable.in_force(numerics) as variables:
        assert variables == {}, "processes of a run compute alike"


@pytest.mark.parametrize(
    ("has_avx2", "reason"),
    [(True, "NumPy was imported before dppo could choose its code"), (False, "it has no AVX2")],
)
def test_a_run_says_why_its_results_are_equal_on_one_type_of_cpu_only(
    has_avx2: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "in_force", lambda numerics: nullcontext({}))
    monkeypatch.setattr(building, "has_avx2", lambda: has_avx2)
    with Notes() as notes, ExitStack() as stack:
        building._set_numerics(tiny_run(None), stack)
    (text,) = notes.texts
    assert f"on this type of CPU only: {reason}. " in text


def test_a_run_on_another_machine_is_noted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = kinds.small(tmp_path / "run", env_id="CartPole-v1")
    dppo.train(config)
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "cpu: " in text
    assert "numerics: " in text

    now = fingerprint

    def elsewhere(probe: Probe, *, torch: bool) -> Fingerprint:
        results = now(probe, torch=torch)
        return replace(results, cpu="another", results=results.results | {"NumPy's sums": "other"})

    longer = replace(config, total_timesteps=2 * config.total_timesteps, anneal_lr=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dppo.run.building.fingerprint", elsewhere)
        dppo.train(
            replace(longer, run_dir=tmp_path / "branch"), resume=tmp_path / "run", branch=True
        )
    notes = [
        record.getMessage()
        for record in caplog.records
        if "differ by rounding" in record.getMessage()
    ]
    assert len(notes) == 1
    assert "another, computes different last bits in NumPy's sums" in notes[0]
