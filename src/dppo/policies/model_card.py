"""A folder for Hugging Face: policy, weights, settings, learning curve, and a model card made from the run."""

from __future__ import annotations

import math
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from dppo.config import flattened
from dppo.errors import ConfigError, counted, printable
from dppo.files import read_file
from dppo.policies.described import network_summary
from dppo.policies.evaluation import evaluate
from dppo.policies.export import export_onnx, load_trusted
from dppo.policies.policy import Policy, read, spaces_summary
from dppo.ppo.networks.network import ModelClass
from dppo.records.files.disk import make_folder, write_file, writing
from dppo.records.files.run_folder import CONFIG, as_file_name, run_dir_of, versions
from dppo.records.metrics.reading import FILE, read_metrics
from dppo.records.observer import Evaluation

EPISODES = 20
CURVE, CARD = "learning_curve.png", "README.md"
TEMPLATE = Path(__file__).with_suffix(".md")
FIGURES = {
    "charts/episodic_return": "mean return of the last 100 training episodes",
    "charts/SPS": "env steps per second",
    "time/training_s": "seconds of training",
}


def export_folder(
    run: str | Path,
    folder: str | Path,
    *,
    episodes: int = EPISODES,
    model: ModelClass | None = None,
    trust: bool = False,
) -> str:
    """Write a folder for Hugging Face; return the command that uploads it, and what to look at before.

    Args:
        episodes: to play, greedily, for the model card; 0: none, and the code of the environment does not run.
        model, trust: as in `evaluate`.

    Raises:
        ConfigError: as `export_onnx` and `evaluate`; or the folder is that of the run, or cannot be written.
    """
    run_dir, target, found = run_dir_of(Path(run)), Path(folder), read(run)
    if target.resolve() == run_dir.resolve():
        raise ConfigError(f"{folder}: is the folder of the run. Use another one.")
    policy = load_trusted(run, model, trust=trust)
    played = evaluate(Path(run), episodes=episodes, model=model, trust=trust) if episodes else None
    kept = [name for name in (CONFIG, FILE, CURVE) if (run_dir / name).is_file()]
    rows = read_metrics(run_dir)[-1:] if FILE in kept else []
    with writing(folder):
        make_folder(target / "checkpoints")
        checked = export_onnx(policy, target / "policy.onnx")
        for name, source in {
            f"checkpoints/{found.path.name}": found.path,
            **{name: run_dir / name for name in kept},
        }.items():
            write_file(target / name, read_file(source))
        picture = f"![Learning curve]({CURVE})\n\n" if CURVE in kept else ""
        card = _card(policy, played, rows, checked=checked.removeprefix(f"{target}/"), curve=picture)
        write_file(target / CARD, card.encode())
    command = f"hf upload YOUR_NAME/ppo-{as_file_name(_env_name(policy))} {quote(str(target))}"
    look = f"{target / CARD}: the model card. Look at it, and at {CONFIG} for what is private, then upload the folder:"
    return f"{checked}\n{look}\n{command}"


def _env_name(policy: Policy) -> str:
    return " ".join(printable(str(flattened(policy.state["config"]).get("env_id", "policy"))).split())


def _card(policy: Policy, played: Evaluation | None, rows: list[dict[str, float]], **more: str) -> str:
    """Return the card with the figures of an evaluation and of the last row of metrics."""
    env, figures = _env_name(policy), {}
    tags = ["reinforcement-learning", "ppo", "dppo", "onnx", env]
    front: dict[str, Any] = {"library_name": "dppo", "pipeline_tag": tags[0], "tags": tags}
    if played is not None:
        score = f"{played.mean_return:.2f} +/- {played.std_return:.2f}"
        figures = {f"mean return of {counted(len(played.returns), 'greedy episode')}": score}
        figures["mean length of these"] = f"{played.mean_length:.1f}"
        result = {"task": {"type": tags[0], "name": tags[0]}, "dataset": {"type": env, "name": env}}
        metric = {"type": "mean_reward", "name": "mean_reward", "value": score, "verified": False}
        front["model-index"] = [{"name": f"PPO on {env}", "results": [result | {"metrics": [metric]}]}]
    for row in rows:
        known = {words: row[name] for name, words in FIGURES.items() if math.isfinite(row.get(name, math.nan))}
        figures |= {words: f"{value:,.1f}" for words, value in known.items()}
    return TEMPLATE.read_text(encoding="utf8").format(
        front=yaml.safe_dump(front, sort_keys=False),
        env=env,
        version=versions()["dppo"],
        steps=counted(policy.state["global_step"], "env step"),
        network=network_summary(policy.spec),
        parameters=counted(policy.weights.size, "parameter"),
        spaces=printable(spaces_summary(policy.spaces)),
        table="\n".join(f"| {name} | {value} |" for name, value in figures.items()),
        **more,
    )
