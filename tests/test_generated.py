"""The parts of the documents that docs/generate.py writes are those of the source, the tests and the measurements."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from builders import tiny_run
from proofs import proofs

import dppo
from dppo.numerics import portable
from dppo.ppo.exchange.records import IncidentKind
from dppo.records.metrics.registry import incident_kinds, metrics

ROOT = Path(__file__).resolve().parents[1]
STORED: dict[str, Any] = json.loads(
    (ROOT / "benchmarks/results/numerics.json").read_text(encoding="utf8")
)


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """Return docs/generate.py as a module."""
    return imported(ROOT / "docs" / "generate.py")


def imported(file: Path) -> ModuleType:
    """Return a script as a module."""
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current(generate: ModuleType) -> None:
    """Where one is not, run `python docs/generate.py`."""
    outdated = [
        name for name, text in generate.pages() if (ROOT / name).read_text(encoding="utf8") != text
    ]
    assert outdated == []


def test_each_proof_belongs_to_a_fault_or_a_formula(generate: ModuleType) -> None:
    names = {*generate.faults(), *(formula.name for formula in generate.found_formulas())}
    assert [key for key in proofs() if key not in names] == []


def test_each_fault_of_a_simulator_has_a_proof(generate: ModuleType) -> None:
    """Only rows of the network may have been measured by hand."""
    network_fault = re.compile(r".*: .*, .*")
    unproved = [
        fault
        for fault in generate.faults()
        if fault not in proofs() and not network_fault.fullmatch(fault)
    ]
    assert unproved == []


def test_registered_metrics_are_those_of_a_run(tmp_path: Path) -> None:
    """Of a run with an evaluation, and without options that add further keys."""
    evaluated: dict[str, Any] = {
        "env_id": "worlds.simple:point_mass",
        "eval_every": 60,
        "eval_episodes": 1,
    }
    result = dppo.train(tiny_run(tmp_path / "run", steps=60, iterations=2, **evaluated))
    usual = {
        metric.key
        for group in metrics().values()
        for metric in group
        if metric.condition == "with `--algo ppo`" or not metric.condition.startswith("with ")
    }
    option_metrics = {
        metric.key
        for heading in ("Numbers from info", "Incidents")
        for metric in metrics()[heading]
    }
    assert set(result.metrics[-1]) == usual - option_metrics | {"eval/at_bound_frac"}
    assert set(incident_kinds()) == set(IncidentKind)


@pytest.mark.slow
@pytest.mark.skipif(not portable.has_avx2(), reason="portable numerics need AVX2")
@pytest.mark.parametrize("command", STORED["weights"])
def test_hashes_of_reproducibility_are_those_of_this_machine(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks with convolutions have different last bits in `portable` without AVX-512: there, `strict` counts."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    numerics = imported(ROOT / "benchmarks" / "numerics.py")
    if numerics.installed_versions() != STORED["versions"]:
        pytest.skip("the hashes belong to other versions of NumPy, torch or Gymnasium")
    kind = "strict" if "Squares" in command else "portable"
    for name in (*portable.VARIABLES, "DPPO_NUMERICS"):
        monkeypatch.delenv(name, raising=False)
    assert numerics.hash_of(command, kind) == STORED["weights"][command][kind]


def test_the_interquartile_mean_of_the_guide_prints_its_interval(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "RUNS.md").read_text(encoding="utf8")
    [snippet] = re.findall(r"^```python\n(import numpy.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(snippet, "RUNS.md", "exec"), {})
    # of 0.49, 0.52, 0.85 and 0.91
    assert capsys.readouterr().out.startswith("0.69, 95 % interval 0.6")
