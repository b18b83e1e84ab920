"""`--trace-hashes` changes no result, and `dppo diff` names the first quantity in which two runs differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_run
from kinds import KINDS, small
from recorder import Recorder, stop_in_episode

import dppo
from dppo.__main__ import main
from dppo.learners.trainers import LocalTrainer
from dppo.records.metrics.reading import read_metrics

WORLD: dict[str, Any] = {
    "env_id": "worlds.faulty:Faulty",
    "norm_reward": False,
    "trace_hashes": True,
}


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    return tiny_run(run_dir, samplers=2, steps=8, iterations=4, **WORLD | changes)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dppo.Result:
    return dppo.train(settings(tmp_path_factory.mktemp("traced") / "run"))


def lines(result: dppo.Result) -> bytes:
    return (result.run_dir / "trace.jsonl").read_bytes()


def test_checksums_change_nothing_and_cost_nothing_where_they_are_off(
    traced: dppo.Result, tmp_path: Path
) -> None:
    untraced = dppo.train(settings(tmp_path / "run", trace_hashes=False))
    assert untraced.weights_sha256 == traced.weights_sha256
    assert not (tmp_path / "run" / "trace.jsonl").exists()
    assert lines(traced).count(b"\n") == traced.iterations == 4


def test_a_trace_does_not_copy_the_rows_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    state = LocalTrainer.state

    def counted(trainer: LocalTrainer, **options: Any) -> Any:
        copies.append(trainer)
        return state(trainer, **options)

    monkeypatch.setattr(LocalTrainer, "state", counted)
    dppo.train(small(tmp_path / "run", **KINDS["sac"], trace_hashes=True))
    traced = len(copies)
    copies.clear()
    dppo.train(small(tmp_path / "untraced", **KINDS["sac"]))
    assert traced == len(copies)  # those of checkpoints


@pytest.mark.parametrize("again", [True, False])
def test_lines_after_the_checkpoint_are_dropped_and_written_anew(
    again: bool, traced: dppo.Result, tmp_path: Path
) -> None:
    """A run that was killed has traced more iterations than its last checkpoint has."""
    dppo.train(settings(tmp_path / "run"), observers=[Recorder(interrupt_at=2)])
    with (tmp_path / "run" / "trace.jsonl").open("ab") as file:
        file.write(
            b'{"iteration": 3, "global_step": 48, "policy": "of another life"}\n{"iteration": 4, "glo'
        )
    resumed = dppo.train(settings(tmp_path / "run", trace_hashes=again), resume=tmp_path / "run")
    assert lines(resumed) == (
        lines(traced) if again else b"".join(lines(traced).splitlines(keepends=True)[:2])
    )


def test_an_evaluation_that_is_repeated_after_the_last_iteration_has_no_line(
    traced: dppo.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row, one of its own, comes before any update."""
    stop_in_episode(4, monkeypatch)  # the second one of the second and last evaluation
    config = settings(tmp_path / "run", eval_every=32, eval_episodes=2)
    assert dppo.train(config).stopped_by == "SIGTERM"
    resumed = dppo.train(config, resume=tmp_path / "run")
    assert resumed.resumed_at == 4
    assert resumed.stopped_by is None
    rows = read_metrics(resumed.run_dir)
    assert [row["eval/episodes"] for row in rows if "eval/episodes" in row] == [2, 2]
    assert lines(resumed) == lines(traced)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"num_learners": 1, "cpus_per_actor": 0.5}, {"policy_lag": 1, "reuse": 2}]
)
def test_traces_on_ray_are_those_in_process(
    changes: dict[str, Any], tmp_path: Path, ray_session: None
) -> None:
    alone = {name: value for name, value in changes.items() if name in ("policy_lag", "reuse")}
    expected = dppo.train(settings(tmp_path / "alone", **alone))
    assert lines(dppo.train(settings(tmp_path / "run", num_actors=2, **changes))) == lines(expected)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, "equal in 4 iterations, 1 to 4"),
        ({"seed": 2}, "iteration 1: policy\nseed: 1 and 2"),
        ({"env_kwargs": {"reward": 3.0}}, "iteration 1, sampler 0, step 2: rewards"),
        (
            {"env_kwargs": {"reward": 3.0, "episodes": [1]}},
            "iteration 2, sampler 0, step 0: rewards",
        ),
        ({"env_kwargs": {"length": 7}}, "iteration 1, sampler 0, step 5: truncated"),
        ({"gamma": 0.9}, "iteration 1, sampler 0: advantages\ngamma: 0.99 and 0.9"),
        ({"ent_coef": 0.1}, "iteration 1: gradients\nent_coef: None and 0.1"),
        ({"learning_rate": 1e-3}, "iteration 1: weights\nlearning_rate: 0.0003 and 0.001"),
        (
            {"num_samplers": 3, "total_timesteps": 96},
            "iteration 1: gradients\nnum_samplers: 2 and 3",
        ),
    ],
)
def test_the_first_difference_is_named(
    changes: dict[str, Any],
    difference: str,
    traced: dppo.Result,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dppo.train(settings(tmp_path / "run", **changes))
    assert main(["diff", str(traced.run_dir), str(tmp_path / "run")]) == bool(changes)
    assert capsys.readouterr().out.startswith(difference)


def test_without_traces_metrics_and_weights_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, gamma in (("a", 0.5), ("b", 0.75), ("again", 0.5)):
        dppo.train(settings(tmp_path / name, gamma=gamma, trace_hashes=False))
    first, second, again = (str(tmp_path / name) for name in ("a", "b", "again"))
    assert main(["diff", first, second]) == 1
    difference, gamma_line = capsys.readouterr().out.splitlines()
    assert difference.startswith("iteration 1: losses/")
    assert difference.endswith("Train both with --trace-hashes to get sampler, step and quantity")
    assert gamma_line == "gamma: 0.5 and 0.75"

    metrics = tmp_path / "again" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    earlier_rows = [
        json.dumps({name: row[name] for name in row if name != "charts/recent_episodes"})
        for row in rows
    ]
    metrics.write_text("\n".join([*earlier_rows, ""]))
    config = tmp_path / "again" / "config.yaml"
    config.write_text(re.sub("(  loss: ppo|  wrappers: .*)\n", "", config.read_text()))
    assert main(["diff", first, again]) == 0
    assert (
        capsys.readouterr().out
        == "equal in the metrics of 4 iterations, 1 to 4, and in the weights of iteration 4\n"
    )

    checkpoint = tmp_path / "b" / "checkpoints" / "iter_000004.safetensors"
    (tmp_path / "again" / "checkpoints" / checkpoint.name).write_bytes(checkpoint.read_bytes())
    assert main(["diff", first, again]) == 1
    assert capsys.readouterr().out.startswith("iteration 4: weights")

    (tmp_path / "again" / "metrics.jsonl").write_bytes(b"")
    assert main(["diff", first, again]) == 1
    assert "have no iteration in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (b'{"iteration": 9}\n', "have no iteration in common"),
        (b"[" * 10**5 + b'\n{"iteration": 1, "obs": {"\x1b": 1}, "policy": [[]]}\n', ""),
    ],
)
def test_other_traces_are_refused_or_differ(
    trace: bytes,
    words: str,
    traced: dppo.Result,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.yaml").write_bytes((traced.run_dir / "config.yaml").read_bytes())
    (tmp_path / "trace.jsonl").write_bytes(trace)
    assert main(["diff", str(traced.run_dir), str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert words in printed.err
    assert "\x1b" not in printed.out + printed.err
