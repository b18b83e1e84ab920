"""A run folder that a stranger wrote is refused or used; nothing in it runs, writes elsewhere, hangs or draws."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from builders import tiny_run
from recorder import Recorder

import dppo
from dppo.__main__ import main
from dppo.errors import DppoError
from dppo.records.files import checkpoint as checkpoints
from dppo.records.metrics.reading import read_metrics

ESCAPE = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e"
Trick = Callable[[Path], object]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with one iteration left."""
    run = tmp_path_factory.mktemp("honest") / "run"
    config = tiny_run(run, iterations=2, hidden_sizes=(4,))
    dppo.train(config, observers=[Recorder(interrupt_at=1)])
    (run / "checkpoints" / "iter_000000.safetensors").unlink()
    return run


# ------------------------------------------------------------------ tricks


def settings(text: str = "", **changes: Any) -> Trick:
    """Change settings in config.yaml and in the checkpoint alike, and append a text to config.yaml."""

    def trick(run: Path) -> None:
        content = yaml.safe_load((run / "config.yaml").read_text())
        for group in content.values():
            group |= {name: value for name, value in changes.items() if name in group}
        (run / "config.yaml").write_text(yaml.safe_dump(content) + text)
        forged(lambda state, arrays: state["config"].update(changes))(run)

    return trick


def forged(change: Callable[[dict[str, Any], dict[str, dict[str, np.ndarray]]], object]) -> Trick:
    """Write a checkpoint with wrong content and right checksums."""

    def trick(run: Path) -> None:
        (path,) = (run / "checkpoints").glob("iter_*")
        loaded = checkpoints.load(path)
        change(loaded.state, loaded.arrays)
        path.unlink()
        checkpoints.save(path.parent, 1, loaded, keep=checkpoints.Keep(1), score=None)

    return trick


def state(**changes: Any) -> Trick:
    """Forge values of the checkpoint."""
    return forged(lambda state, arrays: state.update(changes))


def model(**changes: Any) -> Trick:
    """Forge the description of the network, also as one of encoders."""
    return forged(lambda state, arrays: state["model"].update(changes))


def layers(**changes: Any) -> Trick:
    described = {
        "image_encoder": None,
        "image_features": 0,
        "hidden_sizes": [4],
        "activation": "tanh",
    } | changes
    return forged(
        lambda state, arrays: (
            state["model"].pop("hidden_sizes"),
            state["model"].update(layers=described),
        )
    )


def array(part: str, name: str, value: Any) -> Trick:
    """Forge one array, or leave it out."""

    def change(state: dict[str, Any], arrays: dict[str, dict[str, np.ndarray]]) -> None:
        if value is None:
            del arrays[part][name]
        else:
            arrays[part][name] = np.asarray(value)

    return forged(change)


def placed(name: str, make: Callable[[Path], object]) -> Trick:
    """Make something in place of a file."""

    def trick(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        make(run / name)

    return trick


def written(name: str, content: str | bytes) -> Trick:
    """Replace a file."""
    data = content.encode() if isinstance(content, str) else content
    return placed(name, lambda path: path.write_bytes(data))


def appended(line: str) -> Trick:
    """Append a line to metrics.jsonl."""
    return lambda run: (run / "metrics.jsonl").write_text(
        (run / "metrics.jsonl").read_text() + line + "\n"
    )


def sparse(name: str, size: int) -> Trick:
    """Make a file as large as a disk, without content."""
    return lambda run: os.truncate(run / name, size)


def metadata(name: str, text: str) -> Trick:
    """Forge a part of the header as text, which the writer of checkpoints would not write."""

    def trick(run: Path) -> None:
        from dppo.records.files import sealed

        (path,) = (run / "checkpoints").glob("iter_*")
        arrays, described = sealed.read_all(path)
        header, body = sealed.seal(arrays, described | {name: text})
        path.write_bytes(header + bytes(body))

    return trick


ALIASES = "x: &a0 [0]\n" + "".join(
    f"y{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)
)
MERGES = "m0: &m0 {k: 0}\n" + "".join(
    f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 9)
)
OWN_ALIASES = (
    f"env:\n  env_id: CartPole-v1\n  env_kwargs:\n{re.sub('^', '    ', ALIASES, flags=re.M)}"
)
BOMB = {"x": 1}
for _ in range(300):
    BOMB = {"x": BOMB}  # type: ignore[dict-item]
CODE = "hostile_code:make"

TRICKS: dict[str, Trick] = {
    "nested aliases": written("config.yaml", OWN_ALIASES),
    "nested merges": written("config.yaml", f"env: {{env_id: CartPole-v1}}\n{MERGES}"),
    "deep YAML that ends": written(
        "config.yaml", "env: {env_kwargs: " + "{a: " * 900 + "1" + "}" * 901
    ),
    "an object of Python": written(
        "config.yaml", f"x: !!python/object/apply:{CODE.replace(':', '.')} []"
    ),
    "a long number": written("config.yaml", "seed: 1" + ":1" * 500_000),
    "a config.yaml of a terabyte": sparse("config.yaml", 2**40),
    "blank lines": written("config.yaml", "\n" * 1_000_000),
    "escapes in a name": settings(env_id=f"odd-v0{ESCAPE}"),
    "escapes in an import path": settings(env_id=f"hostile{ESCAPE}:make"),
    "escapes in arguments": settings(env_kwargs={f"x{ESCAPE}": ESCAPE}),
    "escapes in a setting": settings(f"odd{json.dumps(ESCAPE)}: 1\n"),
    "escapes in YAML": written("config.yaml", f"x: [{ESCAPE}"),
    "code as the environment": settings(env_id=CODE),
    "code as the network": forged(
        lambda state, arrays: state["model"].update(model=CODE, model_kwargs={})
    ),
    "a run folder elsewhere": settings("run_dir: ../elsewhere\n"),
    "a total in words": settings(total_timesteps="many"),
    "many samplers": settings(num_samplers=10**12),
    "long segments": settings(num_steps=10**12, total_timesteps=10**15),
    "wide layers": settings(hidden_sizes=[10**6, 10**6]),
    "a negative iteration": state(iteration=-1),
    "a huge iteration": state(iteration=10**30, global_step=10**30),
    "no iteration": forged(lambda state, arrays: state.pop("iteration")),
    "incidents with escapes": state(incidents={ESCAPE: 3}),
    "a million layers": model(hidden_sizes=[1] * 1_000_000),
    "large layers": model(hidden_sizes=[10**9, 10**9]),
    "large layers of an encoder": layers(hidden_sizes=[10**6, 10**6]),
    "a large memory": layers(memory="lstm", memory_size=10**6, shared=False),
    "an activation with escapes": model(activation=ESCAPE),
    "an observation of objects": model(obs={"dtype": "O", "shape": [4]}),
    "a large observation": model(obs={"dtype": "float32", "shape": [10**6, 10**6]}),
    "an observation that is deep": model(obs=BOMB),
    "many choices": model(actions={"discrete": {"n": 10**12, "start": 0}}),
    "another network": layers(),
    "numerics of a large network": forged(
        lambda state, arrays: state["numerics"]["probe"].update(widths=[10**6] * 9)
    ),
    "a CPU with escapes": forged(
        lambda state, arrays: state["numerics"]["own"].update(
            cpu=ESCAPE, results={f"x{ESCAPE}": "1"}
        )
    ),
    "an origin with escapes": state(branched_from={"checkpoint": f"{ESCAPE}\nenv: evil"}),
    "no samplers": forged(lambda state, arrays: arrays["samplers"].clear()),
    "weights of text": array("model", "policy.0.weight", np.full((4, 4), np.nan)),
    "moments of another shape": array("normalizer", "obs.mean", np.zeros(3)),
    "an optimizer of another shape": array("optimizer", "first", np.zeros(3)),
    "more environments": array("samplers", "0.episodes", np.zeros(1000, np.int64)),
    "actions of another shape": array("samplers", "0.actions.0", np.zeros((3, 3))),
    "one action without an axis": array("samplers", "0.actions.0", np.int64(1)),
    "actions outside": array("samplers", "0.actions.0", np.full(3, 10**6)),
    "deep parts": metadata("parts", "[" * 100_000),
    "a deep score": metadata("score", "[" * 100_000),
    "deep state": metadata("state", '{"config":' + "[" * 100_000),
    "long numbers": metadata("iteration", "9" * 100_000),
    "a format that is a letter": metadata("format", "²"),
    "a checkpoint of a terabyte": lambda run: os.truncate(
        run / "checkpoints" / "iter_000001.safetensors", 2**40
    ),
    "a row without numbers": appended('{"iteration": 1}'),
    "markup in a row": appended(
        '{"iteration": 2, "global_step": 32, "eval/</svg><script>alert(1)</script>": 1}'
    ),
    "a link as the report": placed(
        "report.html", lambda path: path.symlink_to("../../precious/file")
    ),
    "a folder as the report": placed("report.html", Path.mkdir),
    "links as incidents": placed("incidents/001", lambda path: path.symlink_to("/dev")),
    "a pipe as an incident": placed("incidents/001/incident.json", os.mkfifo),
    "an incident of markup": written(
        "incidents/001/incident.json", json.dumps({"kind": [ESCAPE], "message": "<script>"})
    ),
    "a log of an actor with escapes": written(
        "logs/actor-0.log", f"\n9999-99-99 99:99:99 dppo: process 1 began {ESCAPE}<img>\n"
    ),
    "a row of words": appended(
        json.dumps({"iteration": 1, "global_step": ESCAPE, "time/training_s": [1]})
    ),
    "a deep row": appended('{"iteration": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "rows of a terabyte": sparse("metrics.jsonl", 2**40),
    "episodes of a terabyte": sparse("episodes.jsonl", 2**40),
    "episodes of words": written(
        "episodes.jsonl", json.dumps({"iteration": 0, "global_step": 0, "env": ESCAPE}) + "\n"
    ),
    "a lock with escapes": written(
        "run.lock", json.dumps({"pid": 1, "host": ESCAPE, "since": ESCAPE})
    ),
}


COMMANDS: dict[str, list[str]] = {
    "eval": ["eval", "run", "--episodes", "1"],
    "help": ["train", "--resume", "run", "--help"],
    "branch": ["train", "--resume", "run", "--branch", "new", "--total-timesteps", "16"],
    "resume": ["train", "--resume", "run", "--total-timesteps", "32"],
    "report": ["report", "run"],
    "plot": ["plot", "run", "--out", "run/plot.png"],
    "diff": ["diff", "run", "run"],
}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, with code that a run folder may name, next to a folder that must not change."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "hostile_code.py").write_text("open('../precious/ran', 'w')\n")
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(desk)
    return desk


def check(
    desk: Path, capsys: pytest.CaptureFixture[str], commands: Iterable[str] = COMMANDS
) -> None:
    """Open the folder `run` with several commands, and read its rows."""
    for command in commands:
        with suppress(SystemExit):  # of --help
            assert main(COMMANDS[command]) in (0, 1, 2)
        printed = capsys.readouterr()
        text = printed.out + printed.err
        assert text.replace("\n", "").isprintable(), printed
        assert len(printed.err) < 10_000

    page = desk / "run" / "report.html"
    if page.is_file():
        html = page.read_text(encoding="utf8")
        assert re.sub("[\n\t]", "", html).isprintable()
        assert not re.search("(?i)<(script|img|iframe|a|link)\\b|javascript:| on[a-z]+=", html)
    with suppress(DppoError):
        for row in read_metrics(desk / "run"):
            assert math.isfinite(row["iteration"] + row["global_step"])

    elsewhere = set()
    for path in desk.parent.rglob("*"):
        if "run" not in path.parts and "new" not in path.parts:
            elsewhere.add(path.name)
    assert elsewhere <= {"desk", "hostile_code.py", "precious", "file", "run", "new"}
    assert (desk.parent / "precious" / "file").read_text() == "precious"


SLOW = {  # slow themselves, or like another one
    "a long number", "escapes in a setting", "a run folder elsewhere", "many samplers", "long segments",
    "wide layers", "a huge iteration", "a million layers", "large layers", "a large memory",
    "an activation with escapes", "a large observation", "an origin with escapes", "weights of text",
    "actions of another shape", "actions outside", "deep parts", "deep state", "long numbers",
    "a format that is a letter", "rows of a terabyte", "a lock with escapes", "blank lines",
    "a folder as the report", "links as incidents", "a log of an actor with escapes",
    "episodes of a terabyte",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in TRICKS],
)
def test_a_hostile_folder_is_refused_or_used(
    name: str, honest: Path, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TRICKS[name](Path(shutil.copytree(honest, desk / "run")))
    check(desk, capsys, COMMANDS if name in SLOW else ("eval", "report", "resume"))


VALUES: list[Any] = [
    None,
    -1,
    0,
    2**63,
    10**30,
    0.5,
    -1e300,
    "",
    "x",
    ESCAPE,
    [],
    {},
    [[]],
    [ESCAPE],
    {ESCAPE: 1},
]
DTYPES = ["int8", "int64", "uint32", "float32", "float64", "bool"]


def mutated(tree: Any, draw: random.Random) -> Any:
    """Return JSON values with one of them, at any depth, replaced or left out."""
    keys = (
        list(tree)
        if isinstance(tree, dict)
        else list(range(len(tree)))
        if isinstance(tree, list)
        else []
    )
    if not keys or draw.random() < 0.15:
        return draw.choice(VALUES)
    key = draw.choice(keys)
    if draw.random() < 0.1:
        del tree[key]
    else:
        tree[key] = mutated(tree[key], draw)
    return tree


def mutate_array(parts: dict[str, dict[str, np.ndarray]], draw: random.Random) -> None:
    """Replace one array, or leave it out."""
    part = parts[draw.choice(list(parts))]
    if not part:
        return
    name = draw.choice(list(part))
    array = part.pop(name)
    if draw.random() < 0.8:
        shape = draw.choice([array.shape, (), (0,), (3,), (1, 1), (7, *array.shape)])
        part[name] = np.full(shape, draw.choice([-1, 0, 1, 100])).astype(draw.choice(DTYPES))


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 300))]
)
def test_a_folder_with_something_wrong_anywhere(
    seed: int, honest: Path, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In config.yaml, and in what a checkpoint with right checksums holds."""
    run = Path(shutil.copytree(honest, desk / "run"))
    draw = random.Random(seed)
    where = draw.choice(["config", "state", "arrays"])
    if where == "config":
        described = mutated(yaml.safe_load((run / "config.yaml").read_text()), draw)
        (run / "config.yaml").write_text(yaml.safe_dump(described))
    elif where == "state":
        forged(lambda state, arrays: mutated(state, draw))(run)
    else:
        forged(lambda state, arrays: mutate_array(arrays, draw))(run)
    check(desk, capsys)
