"""The page of a run: valid HTML without scripts, whatever the folder holds, and what it shows of the rows."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from builders import written_run
from commandline import Typed, parse
from remedies import executes

from dppo.__main__ import main
from dppo.config import Config, plain_settings
from dppo.files import sha256_of
from dppo.records.files.lock import locked
from dppo.records.metrics import reading
from dppo.records.metrics.reading import last_row, sampled_metrics
from dppo.records.terminal.view import PHASES
from dppo.tools.report import charts
from dppo.tools.report.command import facts_of
from dppo.tools.report.page import page

VOID = {"path", "line", "rect"}  # elements that are closed by themselves here
PLACES = {"d", "x", "y", "width", "height", "points", "x1", "x2", "y1", "y2"}  # numbers
ACTIVE = re.compile("script|iframe|object|embed|link|img|image|use|base|form|a|foreignobject")
EVIL = "<script>alert(1)</script>\"' onload=x \x1b[2J\u202e&amp;"


def policy_of(page: ElementTree.Element) -> list[str]:
    policy = page.find(".//meta[@http-equiv='Content-Security-Policy']")
    assert policy is not None
    return str(policy.get("content")).split("; ")


def checked(html: str) -> ElementTree.Element:
    """Return the page, whose policy allows nothing but its own style sheet."""
    assert set(re.findall(r"<(\w+)[^>]*/>", html)) <= VOID
    closed = re.sub("<meta [^>]*", r"\g<0>/", html.removeprefix("<!doctype html>"))
    page = ElementTree.fromstring(closed)  # finds wrong nesting, and an attribute twice
    for element in page.iter():
        assert not ACTIVE.fullmatch(element.tag)
        for name, value in element.items():
            assert not re.match("on|style$|href$|src$", name)
            assert not (name in PLACES and re.search("nan|inf", value))

    style = str(page.findtext(".//style"))
    digest = hashlib.sha256(style.encode()).digest()
    assert policy_of(page) == [
        "default-src 'none'",
        f"style-src 'sha256-{base64.b64encode(digest).decode()}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    assert "http" not in html.replace("http-equiv", "")
    assert all(character.isprintable() or character in "\n\t" for character in html)
    return page


def words_of(page: ElementTree.Element) -> str:
    return "".join(page.itertext())


def rows(count: int) -> list[dict[str, float]]:
    shares = {f"perf/{name}_frac": 1 / 6 for name in PHASES}
    metrics = []
    for i in range(1, count + 1):
        row: dict[str, Any] = {
            "iteration": i,
            "global_step": 256 * i,
            "time/training_s": 0.1 * i,
            "charts/SPS": 2560,
            "perf/iteration_s": 0.1,
            "losses/approx_kl": 0.01 / i,
        }
        if i > 2:
            row["charts/episodic_return"] = 100 * math.tanh(i / 50)
            row["charts/episodic_return_std"] = 7.0
        metrics.append(row | shares)
    return metrics


def a_run(folder: Path, lines: list[dict[str, float]], **settings: Any) -> Path:
    return written_run(folder, lines, total_timesteps=51_200, **{"num_steps": 32} | settings)


def incident(run: Path, **facts: Any) -> None:
    folder = run / "incidents" / "001"
    folder.mkdir(parents=True)
    (folder / "incident.json").write_text(json.dumps(facts))


def log_of_actor(run: Path, text: str) -> None:
    (run / "logs").mkdir()
    (run / "logs" / "actor-0.log").write_text(text)


def reported(run: Path) -> str:
    """Return the page that the command writes."""
    assert main(["report", str(run)]) == 0
    return (run / "report.html").read_text(encoding="utf8")


@pytest.mark.parametrize(("count", "figures"), [(0, 0), (1, 4), (200, 6), (6000, 6)])
def test_a_run_of_any_length_is_a_valid_page(count: int, figures: int, tmp_path: Path) -> None:
    lines = [row | {"actors/alive": 3} for row in rows(count)]
    html = reported(a_run(tmp_path / "run", lines))
    page = checked(html)
    words = words_of(page)

    # return twice, the only loss, shares, times and actors
    assert len(page.findall(".//figure")) == figures
    assert ("No episode of the policy has finished yet" in words) == (count == 1)
    assert ("No iteration has finished yet" in words) == (count == 0)
    assert f"{256 * count:,} of 51,200" in words
    assert len(html) < 250_000, "lines are thinned out"


def test_a_page_marks_what_happened_and_shows_what_was_measured(tmp_path: Path) -> None:
    lines = rows(100)
    for number, row in enumerate(lines, 1):
        if number % 20 == 0:
            row["eval/episodic_return"] = 5.0
            row["eval/return_std"] = 1.0
            row["eval/global_step"] = 256 * number - 9
        if number >= 30:
            row["incidents/actor_lost"] = 1.0
        if number >= 40:
            row["incidents/env_raised"] = 2.0
            row["info/energy"] = 0.5
        if number > 50:
            row["time/training_s"] -= 5.0
    run = a_run(tmp_path / "run", lines, num_actors=2)
    log_of_actor(
        run,
        "\n2026-11-23 09:00:00 dppo: process 7 began\n\ndppo: process 7 ended by SIGKILL\n"
        "\n2026-11-23 09:01:00 dppo: process 8 began\nhello\n",
    )
    incident(run, kind="env_raised", message="sampler 3 raised", time="noon")
    facts = facts_of(run)
    html = page(facts)
    shown = words_of(checked(html))
    for kind, marks in (("actor", 2), ("env", 2), ("resume", 2), ("other", 0)):
        assert html.count(f'class="mark {kind}"') == marks
    assert "resumed before step 13,056" in shown
    for words in (
        "band: mean +- standard deviation",
        "eval/episodic_return",
        "info/energy",
        "sampler 3 raised",
        "<b>Z80</b>",
        "stopped early",
    ):
        assert words in shown
    assert "eval/global_step" not in shown, "it is the place, not a value"

    evaluated = html[html.index("eval/episodic_return") :]
    band = re.findall(r"M([^Z]*)Z", evaluated)[0]
    points = set(band.split("L"))
    assert len(points) == 10, "five, above and below the mean"

    begins = [begin for begin, *_ in facts.actors["actor-0"]]

    assert begins == [0.0, 60.0]
    assert "process 7 ended by SIGKILL" in shown


def test_spread_is_that_of_the_keys_beside_a_mean(tmp_path: Path) -> None:
    x = np.array([0.0, 1.0, 2.0])
    mean = np.array([1.0, 2.0, 3.0])
    low = mean - 1
    high = mean + 1
    html = charts.chart("title", charts.Line(x, mean, low, high), "env steps")
    [band, *_] = re.findall(r'class="band f0" d="M([^Z]*)Z"', html)
    heights = [float(point.split()[1]) for point in band.split("L")]

    lows = 100 - 100 * low / 4.2
    highs = 100 - 100 * high / 4.2
    there = heights[:3]
    back = heights[:2:-1]
    assert there == pytest.approx(lows, abs=0.01)
    assert back == pytest.approx(highs, abs=0.01)
    assert html.count("h0") == 3, "few points are drawn as dots"

    nan = np.full(2, np.nan)
    empty = charts.Line(np.zeros(2), nan, nan, nan)
    assert charts.chart("title", empty, "env steps") == ""


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.5, 4.5, "better"), (-4.5, -0.5, "worse"), (-1.0, 1.0, "not clearly different")],
)
def test_a_page_compares_the_policy_with_the_controller_of_the_user(
    low: float, high: float, verdict: str, tmp_path: Path
) -> None:
    lines = rows(4)
    lines[-1] |= {
        "eval/iteration": 4,
        "eval/global_step": 1024,
        "eval/episodes": 20,
        "eval/s": 3.0,
        "eval/episodic_return": 12.5,
        "eval/baseline_return": 10.0,
        "eval/baseline_difference": (low + high) / 2,
        "eval/baseline_difference_low": low,
        "eval/baseline_difference_high": high,
        "eval/baseline_pairs": 20,
    }
    run = a_run(tmp_path / "run", lines, eval_every=1024, baseline="<b>pi:PI")
    html = page(facts_of(run))
    shown = words_of(checked(html))

    assert "The baseline <b>pi:PI has a mean return of 10.0" in shown
    assert f"20 pairs of episodes): the policy is {verdict}." in shown
    # both charts of the return, that of the evaluations, and that of the difference
    assert html.count('class="level"') == 4
    assert "baseline, on the evaluations' episodes 10" in shown
    titles = ("eval/episodic_return", "eval/baseline_difference", "eval/episodes", "eval/s")
    places = [shown.index(title) for title in titles]
    assert places == sorted(places)


def cards_of(run: Path) -> dict[str, str]:
    page_of_run = checked(page(facts_of(run)))
    return {
        card.findtext("dt", ""): card.findtext("dd", "")
        for card in page_of_run.findall(".//dl/div")
    }


def evaluated(number: int, mean_return: float, difference: float) -> dict[str, float]:
    """Return the metrics of an evaluation after an iteration of 256 env steps."""
    return {
        "eval/iteration": number,
        "eval/global_step": 256 * number,
        "eval/episodic_return": mean_return,
        "eval/baseline_return": -10.0,
        "eval/baseline_difference": difference,
        "eval/baseline_difference_low": difference - 1,
        "eval/baseline_difference_high": difference + 1,
    }


def compared_run(folder: Path, best: dict[str, Any], **settings: Any) -> Path:
    """Return a run of nine iterations with three evaluations, the second of which is the best."""
    lines = rows(9)
    for number, mean_return in ((2, -12.0), (4, -5.0), (8, -14.0)):
        lines[number] |= evaluated(number, mean_return, mean_return + 10)
    compared = {"num_samplers": 8, "eval_every": 512, "baseline": "pi:PI"}
    run = a_run(folder, lines, **compared | settings)
    (run / "checkpoints").mkdir()
    for number in (4, 9):
        (run / "checkpoints" / f"iter_{number:06}.safetensors").touch()
    (run / "checkpoints" / "best.json").write_text(json.dumps(best))
    return run


def test_the_cards_show_the_deployed_policy_and_the_evaluations(tmp_path: Path) -> None:
    best = {"score": -5.0, "iteration": 4, "deployed": "policy"}
    cards = cards_of(compared_run(tmp_path / "run", best))
    shown = {
        "last evaluation": "-14.0, step 2,048",
        "best evaluation": "-5.00, step 1,024",
        "baseline": "-10.0",
        "difference": "-4.00, worse",
        "deployed": "policy, step 2,304",
    }
    assert shown.items() <= cards.items()

    cards = cards_of(compared_run(tmp_path / "better", best, never_worse=True))
    assert cards["deployed"] == "policy, step 1,024"

    none = {"score": None, "iteration": None, "deployed": "baseline"}
    cards = cards_of(compared_run(tmp_path / "none", none, never_worse=True))
    assert cards["deployed"] == "baseline"

    # the best one is not in the sample of rows
    unseen = {"score": 3.0, "iteration": 6}
    cards = cards_of(compared_run(tmp_path / "unseen", unseen))
    assert cards["best evaluation"] == "3.00, step 1,536"


@pytest.mark.parametrize(
    "best",
    [
        {"score": [], "iteration": 4},
        {"score": 1e999, "iteration": 4},
        {"score": 9, "iteration": 10**400},
        [],
    ],
)
def test_the_best_checkpoint_of_a_stranger_may_be_anything(best: Any, tmp_path: Path) -> None:
    cards = cards_of(compared_run(tmp_path / "run", best))
    assert cards["best evaluation"] == "-5.00, step 1,024"


def test_the_fault_that_ended_a_run_is_counted(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [])
    incident(run, kind="env_raised", message="sampler 3 raised", time="noon")
    assert cards_of(run)["incidents"] == "1"


def test_a_run_without_evaluations_has_no_cards_about_them(tmp_path: Path) -> None:
    cards = cards_of(a_run(tmp_path / "run", rows(4)))
    assert not cards.keys() & {"last evaluation", "best evaluation", "baseline", "deployed"}


def test_evaluations_are_points_beside_the_return_with_noise_also_without_a_controller(
    tmp_path: Path,
) -> None:
    lines = rows(4)
    lines[-1] |= {"eval/iteration": 4, "eval/global_step": 1024, "eval/episodic_return": 12.5}
    for stochastic, noise, changes, left_out in (
        (False, "without noise", {}, ""),
        (True, "with noise", {"algo": "sac"}, ", without episodes of wide exploration"),
    ):
        evaluating = {"eval_every": 1024, "eval_stochastic": stochastic}
        run = a_run(tmp_path / noise, lines, **evaluating, **changes)
        html = page(facts_of(run))
        assert html.count('class="points"') == 2
        # in the colour of the line
        assert html.count(f'<span class="k2">points: evaluations, {noise} <b>12.5</b>') == 2
        assert html.count(f"line: training, with noise{left_out} <b>") == 2


@pytest.mark.parametrize(("norm_reward", "unit"), [(True, " scaled reward<"), (False, " reward<")])
def test_values_have_the_unit_of_the_rewards_that_critics_learn_from(
    norm_reward: bool, unit: str, tmp_path: Path
) -> None:
    lines = [row | {"losses/q_mean": 7.5, "actors/memory_gb": 3.0} for row in rows(900)]
    lines[-1]["losses/q_mean"] = -2.5  # the end of the line is a mean of several rows
    html = page(facts_of(a_run(tmp_path / "run", lines, algo="sac", norm_reward=norm_reward)))
    drawn = html[html.index(">losses/q_mean<") :].partition("</figure>")[0]
    assert f"last <b>-2.5</b>{unit}" in drawn
    assert "last <b>3</b> GB<" in html


def test_actors_are_not_drawn_in_a_run_without_any(tmp_path: Path) -> None:
    old = {"actors/alive": 0.0, "actors/memory_gb": 0.0}
    html = page(facts_of(a_run(tmp_path / "run", [row | old for row in rows(9)])))
    assert "actors/" not in html


def test_the_best_return_is_that_of_the_policy_and_not_of_its_controller(tmp_path: Path) -> None:
    lines = rows(6)
    for number, row in enumerate(lines):
        row["charts/episodic_return"] = 70.0 if number < 2 else 5.0
    sizes = {"num_samplers": 8, "num_steps": 32}
    run = a_run(tmp_path / "run", lines, prior="pi:PI", prior_steps=2 * 256, **sizes)
    assert "best training return5.00" in words_of(checked(page(facts_of(run))))


def test_settings_are_written_as_flags_and_compared_with_the_defaults_of_the_algorithm(
    tmp_path: Path,
) -> None:
    lines = rows(4)
    lines[-1] |= {"charts/recent_episodes": 40, "time/eval_wait_s": 61.0}
    run = a_run(tmp_path / "run", lines, eval_every=1024, update_epochs=20, norm_adv=True)
    html = page(facts_of(run))
    assert "<td>update_epochs</td><td>20</td><td>depends on the task</td>" in html
    assert "<td>norm_adv</td><td>true</td><td>depends on the task</td>" in html
    assert "<td>eval_every</td><td>1024</td><td>none</td>" in html
    assert not re.search("<td>(None|True|False)</td>", html)
    assert "<dt>training return, last 40</dt>" in html
    assert "waiting for evaluations1:01" in words_of(checked(html))

    lines = rows(4)
    lines[-1]["time/eval_wait_s"] = 0.5
    html = page(facts_of(a_run(tmp_path / "sac", lines, algo="sac")))
    assert "waiting for" not in html
    assert "<td>algo</td><td>sac</td><td>ppo</td>" in changed_settings(html)
    assert "learning_rate" not in changed_settings(html)

    html = page(facts_of(a_run(tmp_path / "game", rows(4), **PONG, clip_coef=0.3)))
    assert "<td>clip_coef</td><td>0.3</td><td>0.1</td>" in changed_settings(html)
    assert "frame_stack" not in changed_settings(html)


def changed_settings(html: str) -> str:
    return html[html.index("<h2>Settings</h2>") : html.index("<details>")]


def test_the_memory_of_all_actors_is_one_chart_and_reported_numbers_have_no_band(
    tmp_path: Path,
) -> None:
    lines = rows(30)
    for row in lines:
        row["actors/memory_gb"] = 3.0
        row["actors/memory_gb/0"] = 3.0
        row["actors/memory_gb/1"] = 1.0
        row["info/energy"] = 0.5
        row["info/energy_min"] = -1e6
        row["info/energy_max"] = 1e6
    html = reported(a_run(tmp_path / "run", lines))
    assert "actors/memory_gb<" in html
    assert "actors/memory_gb/" not in html

    energy = html[html.index(">info/energy<") :].partition("</figure>")[0]

    assert not re.search(r"1(\.0)?M", energy), "the axis is that of the mean"


@pytest.mark.parametrize("key", ["torque_max", "torque_std", "torque"])
def test_a_reported_number_is_drawn_once_whatever_its_name(key: str, tmp_path: Path) -> None:
    measured = {
        f"info/{key}": 2.0,
        f"info/{key}_min": 1.0,
        f"info/{key}_max": 3.0,
        "info/speed": 1.0,
    }
    run = a_run(tmp_path / "run", [row | measured for row in rows(9)])
    drawn = re.findall(r"<figcaption>(info/[^<]*)", page(facts_of(run)))
    assert drawn == [f"info/{key}", "info/speed"]


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 1),
        (256, 40_192),
        (-3.3, 2.8),
        (1e-9, 3e-9),
        (5, 5),
        (0, 0),
        (-1e30, 1e30),
        (1e30, 1e30),
        (0.999, 1),
    ],
)
def test_an_axis_has_some_round_numbers_inside(low: float, high: float) -> None:
    axis = charts._axis(np.array([low, high]), 0.05)
    ticks = list(axis.ticks())
    assert 2 <= len(ticks) <= 6
    for at, _ in ticks:
        assert -1e-6 <= at <= 100 + 1e-6
    labels = {label for _, label in ticks}
    assert len(labels) == len(ticks)
    assert axis.high > (0.9 if low == high else 0)  # not 1e-12 where all are zero
    assert axis.low <= low <= high <= axis.high


def test_rows_of_a_large_file_are_a_sample_with_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SMALL_FILE_BYTES", 50_000)
    monkeypatch.setattr(reading, "SAMPLED_ROWS", 300)
    run = a_run(tmp_path / "run", rows(5000))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 5001, "global')  # a row that is being written
    iterations = [row["iteration"] for row in sampled_metrics(run)]

    assert iterations == sorted(set(iterations))
    assert iterations[0] == 1
    assert iterations[-1] == 5000
    assert 250 < len(iterations) < 700
    assert np.diff(iterations).max() < 50
    assert last_row(run)["iteration"] == 5000
    assert sampled_metrics(tmp_path) == [], "without a file"
    assert last_row(tmp_path) == {}


def test_long_rows_of_a_large_file_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose environments have failed in many ways counts each in a key of its own."""
    monkeypatch.setattr(reading, "SMALL_FILE_BYTES", 500_000)
    monkeypatch.setattr(reading, "SAMPLED_ROWS", 30)
    faults = {
        f"faults/sampler {i // 16}, env {i % 16}: ValueError in step": 1.0 for i in range(1500)
    }
    lines = [row | faults for row in rows(20)]
    run = a_run(tmp_path / "run", lines)
    assert (run / "metrics.jsonl").stat().st_size > 20 * 2**16

    iterations = [row["iteration"] for row in sampled_metrics(run)]

    assert iterations == list(range(1, 21))
    assert last_row(run)["iteration"] == 20


def test_evaluations_that_end_in_one_iteration_are_all_read(tmp_path: Path) -> None:
    third: dict[str, float] = {"iteration": 2, "global_step": 128}
    measured: list[dict[str, float]] = [
        {"iteration": 1, "global_step": 64},
        third,
        third | {"eval/iteration": 1, "eval/mean_return": 3.0},
        third | {"eval/iteration": 2, "eval/mean_return": 4.0},
    ]
    lines = [f"{json.dumps(row)}\n" for row in measured]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert sampled_metrics(tmp_path) == measured


def test_a_damaged_run_does_not_keep_others_from_their_pages(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        a_run(Path("runs", name), rows(3))
    Path("runs", "b", "config.yaml").write_text("env_id: [")
    assert main(["report", "runs"]) == 2
    printed = capsys.readouterr()
    assert "dppo report: config=runs/b/config.yaml: cannot be read" in printed.err
    assert re.findall(r"runs/(\w)/report.html", printed.out) == ["a", "c"]


def test_infinity_in_a_row_is_left_out(tmp_path: Path) -> None:
    lines = rows(9)
    lines[4]["losses/approx_kl"] = math.inf
    checked(reported(a_run(tmp_path / "run", lines)))


def test_the_folder_of_checkpoints_is_that_of_its_run(desk: Path, typed: Typed) -> None:
    run = a_run(Path("run"), rows(3))
    (run / "checkpoints").mkdir()
    typed("report run/checkpoints")
    assert "No iteration has finished yet" not in (run / "report.html").read_text()


def test_a_certificate_is_shown_and_whether_the_files_are_still_those(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", rows(3))
    hashes = {name: sha256_of(run / name) for name in ("config.yaml", "metrics.jsonl")}
    certificate = {"verified": ["iterations 1 to 2", "iterations 3 to 4"], "files": hashes}
    (run / "certificate.json").write_text(json.dumps(certificate))
    for words in ("unchanged", "changed: metrics.jsonl"):
        page = reported(run)
        assert "iterations 1 to 2, iterations 3 to 4" in page
        assert f"<td>{words}</td>" in page
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b" ")


def test_a_short_iteration_has_a_small_part_in_the_shares_of_the_time(tmp_path: Path) -> None:
    shares = {f"perf/{name}_frac": float(name == "update") for name in PHASES}
    collecting = {f"perf/{name}_frac": float(name == "env") for name in PHASES}
    long, *short = rows(9)
    lines = [long | shares | {"perf/iteration_s": 7.2}, *(row | collecting for row in short)]
    html = page(facts_of(a_run(tmp_path / "run", lines)))
    assert "env <b>10%<" in html
    assert "update <b>90%<" in html


def test_everything_is_text_that_comes_from_a_folder(tmp_path: Path) -> None:
    lines = rows(9)
    for i, row in enumerate(lines):
        row[f"eval/{EVIL}"] = 1.0
        row[f"incidents/{EVIL}"] = float(i)
        row["losses/entropy"] = 1e308
    run = a_run(tmp_path / "run", lines, env_kwargs={EVIL: EVIL}, name=EVIL)
    incident(run, kind=EVIL, message=EVIL, time=[EVIL])
    certificate = {EVIL: [EVIL], "machine": {EVIL: EVIL}, "files": {f"../{EVIL}": EVIL}}
    (run / "certificate.json").write_text(json.dumps(certificate))
    log_of_actor(
        run, f"\n2026-11-23 09:00:00 dppo: process 7 began\ndppo: process 7 ended {EVIL}\n"
    )

    page = checked(reported(run))
    assert words_of(page).count("<script>alert(1)</script>") >= 6


PONG = {"env_id": "ALE/Pong-v5"}
RAW = PONG | {"atari": "raw"}


@pytest.mark.parametrize(
    "settings",
    [
        {"hidden_sizes": (8, 4), "norm_obs": False, "target_kl": 0.02, "seed": 3},
        {"num_actors": "2..4", "actor_resources": {"licence": 1.0}, "env_kwargs": {"a b": [1]}},
        PONG,
        # those of other environments
        PONG | {"num_steps": 64, "learning_rate": 3e-4, "update_epochs": 10},
        RAW,
        # as games have them
        RAW | {"num_steps": 128, "frame_stack": 4, "grayscale": True},
        PONG | {"atari": "game", "frame_stack": 1},
        RAW | {"norm_reward": False, "clip_reward": 1.0},
        PONG | {"env_kwargs": {"frameskip": 2}, "action_repeat": 4},
        PONG | {"env_kwargs": {"obs_type": "ram"}},
        # the default of the other algorithm
        {"algo": "sac", "learning_rate": 3e-4},
    ],
)
def test_the_command_gives_the_same_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    facts = facts_of(a_run(tmp_path / "run", [], **settings))
    words = shlex.split(facts.command)
    assert words[:2] == ["dppo", "train"]
    again = Config(**parse(words[2:]).settings)
    assert plain_settings(again) == plain_settings(facts.config)


def test_a_run_with_objects_can_be_looked_at(desk: Path, typed: Typed) -> None:
    """No command that only reads needs the objects."""
    a_run(Path("run"), rows(9), env_kwargs={"thing": threading.Lock()})
    for command in ("plot", "report", "doctor"):
        typed(f"{command} run")


def test_a_run_that_goes_on_has_finished_or_has_ended_early_is_told_apart(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", rows(200))
    assert facts_of(run).state == "finished"
    (run / "metrics.jsonl").write_text("")
    assert facts_of(run).state == "stopped early"
    incident(run, kind="run_failed", message="the losses are not finite", ended_after=0)
    assert facts_of(run).state == "failed"
    (run / "metrics.jsonl").write_text(f"{json.dumps(rows(1)[0])}\n")
    assert facts_of(run).state == "stopped early", "it was resumed, and stopped"
    with locked(run):
        assert facts_of(run).state == "running"
    (run / "run.lock").touch()  # of a process that was killed

    assert facts_of(run).state == "stopped early"


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("", "RUN is missing"),
        ("nowhere", "does not exist"),
        ("run --out no/such/folder.html", "out=no/such/folder.html: cannot be written"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused(
    words: str, refusal: str, desk: Path, refused: Typed
) -> None:
    a_run(Path("run"), rows(3))
    assert refusal in refused(f"report {words}")


@executes("tools/report/command.py: contains {} runs. Leave it out, or pass {}")
def test_a_folder_of_seeds_gets_a_report_in_each_of_its_runs(
    desk: Path, typed: Typed, refused: Typed
) -> None:
    pages = [f"seeds/seed_{seed}/report.html" for seed in (1, 2)]
    for page_of_seed in pages:
        a_run(Path(page_of_seed).parent, rows(3))
    assert re.findall(r"^\S+\.html(?=: )", typed("report seeds"), re.M) == pages
    for page_of_seed in pages:
        assert "Learning" in Path(page_of_seed).read_text()
    words = (
        "out=a.html: is one page, and seeds contains 2 runs. Leave it out, or pass seeds/seed_1."
    )
    assert words in refused("report seeds --out a.html")
    assert typed("report seeds/seed_1 --out a.html").startswith("a.html: ")


OVERLAPS = """[...document.querySelectorAll('svg.plot')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()])
    return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
        p.left < q.right && q.left < p.right && p.top < q.bottom && q.top < p.bottom).map(([b]) => a + ' on ' + b))
})"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_it_on_a_screen_a_phone_and_paper(tmp_path: Path) -> None:
    lines = rows(120)
    for i, row in enumerate(lines):
        row[f"eval/{EVIL}"] = 1.0
        row["incidents/actor_lost"] = float(i > 50)
    run = a_run(tmp_path / "run", lines, num_actors=2, env_kwargs={"a_long_name" * 9: "x" * 300})
    reported(run)
    path = run / "report.html"
    with Browser(tmp_path / "profile") as browser:
        for screen in ({}, {"dark": True}, {"width": 360}, {"media": "print", "width": 794}):
            browser.open(path, **screen)
            assert browser.complaints() == []
            assert browser.requests() == [path.resolve().as_uri()]
            # nothing is beside the page
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert browser.evaluate("document.querySelectorAll('figure').length") == 6
            assert browser.evaluate(OVERLAPS) == []
            ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            expected = "rgb(13, 17, 23)" if "dark" in screen else "rgb(255, 255, 255)"
            assert ground == expected
            fill = browser.evaluate("getComputedStyle(document.querySelector('path.line')).fill")
            assert fill == "none"
