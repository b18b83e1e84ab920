"""Export a trained policy as ONNX, checked against the policy; or as a folder for Hugging Face, with a model card."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from dppo.config.parts.processes import EVAL_EPISODES
from dppo.config.trust import require_trust, trust_flags
from dppo.errors import ConfigError, NotBetter, counted, printable
from dppo.files import read_file, user_path
from dppo.policies.described import model_state, network_summary
from dppo.policies.evaluation import evaluate
from dppo.policies.loading import log_chosen, model_name, policy_from, read
from dppo.policies.policy import Policy, settings_of, spaces_summary
from dppo.ppo.exchange.inputs import leaf_scales
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.network import ModelClass
from dppo.records.comparison import BaselineComparison
from dppo.records.files.checkpoint import BEST, LoadedCheckpoint, has_any
from dppo.records.files.disk import check_writable, make_folder, write_file, writing
from dppo.records.files.run_files import CONFIG, METRICS
from dppo.records.files.run_folder import as_file_name, run_dir_of, versions
from dppo.records.metrics.reading import Row, read_metrics
from dppo.records.observer import Evaluation
from dppo.records.terminal.figures import deviation, number
from dppo.spaces.spaces import MASK, leaves
from dppo.user_code import in_a_line, require_package

if TYPE_CHECKING:
    from dppo.tools.export.modules import ExportedPolicy

OPSET = 18  # the oldest that torch's exporter writes; ONNX Runtime 1.14 and later read it
CHECK_ROWS = 1000  # made-up observations of the check
CHUNK_ROWS = 100  # rows that are compared at a time
MAX_OTHER_CHOICES = CHECK_ROWS // 10  # so few are ties but for rounding
TOLERANCE = 1e-3  # largest difference of logits, means and states, per unit of the largest; float32 leaves about 1e-6
# settings of the preparation of observations
PREPARED = ("grayscale", "resize", "frame_stack", "action_repeat", "atari")

CURVE = "learning_curve.png"
CARD = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md")
FIGURES = {
    "charts/episodic_return": "mean return of the last {recent:.0f} training episodes",
    "charts/SPS": "env steps per second",
    "time/training_s": "seconds of training",
}


def _trusted(
    run_files: LoadedCheckpoint, run: str | Path, model: ModelClass | None, *, trust: bool
) -> Policy:
    """Return the policy of a run; raise ConfigError if its own network is neither trusted nor named by `model`."""
    log_chosen(user_path(run), run_files)
    named_by_caller = () if model is None else ("model",)
    require_trust({"model": model_name(run_files, model)}, named_by_caller, run, trust=trust)
    return policy_from(run_files, model)


def read_exported(run: str | Path) -> LoadedCheckpoint:
    """Return the checkpoint that a run deploys, or the one that `run` names.

    Raise NotBetter if the run deploys its baseline: a controller is Python code, which cannot be exported.
    """
    try:
        return read(run)
    except NotBetter as error:
        raise NotBetter(
            f"{error} Nothing was exported: a controller is Python code, which ONNX does not hold.",
            error.comparison,
        ) from None


def export_onnx(
    policy: Policy | str | Path,
    path: str | Path,
    *,
    model: ModelClass | None = None,
    trust: bool = False,
) -> str:
    """Write a policy to an ONNX file: observations in, the most likely actions out; return the facts in words.

    The file does all that `Policy.act` does: normalizer, network, mask, memory and bounds of the actions. Its inputs
    and outputs have an axis of n observations in front; docs/DEPLOY.md lists them. If ONNX Runtime is installed, it is
    compared with the policy on 1,000 made-up observations before the file is written.

    Args:
        policy: a policy, or the folder of a run, or one of its checkpoints.
        model: the class of the run's own network, in place of the one that the checkpoint names.
        trust: import the network of your own that a run's folder names.

    Raises:
        ConfigError: a package is missing, torch cannot export a network of your own, the results differ, or the file
            cannot be written.
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    for package in ("onnx", "onnxscript"):
        require_package("an ONNX file", package, "onnx onnxscript onnxruntime")
    if not isinstance(policy, Policy):
        policy = _trusted(read_exported(policy), policy, model, trust=trust)
    from dppo.tools.export.modules import ExportedPolicy

    module = ExportedPolicy(policy.spaces, policy.spec, policy.weights, policy.obs_scale)
    check_writable(user_path(path).absolute().parent, path)
    data = _as_onnx(policy, module)
    checked = _check(policy, module, data)
    with writing(path):
        write_file(user_path(path), data)
    inputs = []
    for name, dtype in module.inputs.items():
        shape = ", ".join(map(str, ("n", *dtype.shape)))
        inputs.append(f"{name} {dtype.base}[{shape}]")
    facts = f"{path}: {', '.join(inputs)} -> {', '.join(module.output_names)}. {checked}"
    return f"{facts}\n{statement_on(policy)}".rstrip()


def statement_on(policy: Policy) -> str:
    """Return the checkpoint of a policy, and how its run compares with the baseline; "" without a baseline."""
    if policy.comparison is None:
        return ""
    return f"This is the policy of iter_{policy.state['iteration']:06d}. {policy.comparison}"


def _as_onnx(policy: Policy, module: ExportedPolicy) -> bytes:
    import torch

    rows = tuple({0: torch.export.Dim("n", min=1)} for _ in module.example)
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that torchvision is not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                module,
                module.example,
                input_names=list(module.inputs),
                output_names=module.output_names,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=(rows,),
                verbose=False,
            )
        model = program.model_proto
        if any(
            graph_input.type.tensor_type.shape.dim[0].HasField("dim_value")
            for graph_input in model.graph.input
        ):
            raise ValueError(
                "it computes with a fixed number of rows. Write obs.shape[0] in place of len(obs)"
            )
    except Exception as error:  # torch raises anything
        if isinstance(policy.spec, BuiltInSpec):
            raise
        name = policy.spec.as_json()["model"]
        raise ConfigError(
            f"model={name}: torch.onnx.export cannot export it: {in_a_line(error, 500)}."
        ) from error
    finally:
        log.setLevel(level)
    for node in model.graph.node:  # traces of the stack, with paths of this machine
        del node.metadata_props[:]
    for name, text in _metadata(policy, module).items():
        model.metadata_props.add(key=name, value=text)
    return bytes(model.SerializeToString(deterministic=True))


def _metadata(policy: Policy, module: ExportedPolicy) -> dict[str, str]:
    """Return the metadata of the file: environment, network, what makes observations, and which policy it is."""
    settings = settings_of(policy)
    inputs = {name: [str(dtype.base), list(dtype.shape)] for name, dtype in module.inputs.items()}
    prepared = {name: settings[name] for name in PREPARED if name in settings}
    return {
        "dppo_version": versions()["dppo"],
        "env_id": str(settings.get("env_id", "")),
        "model": json.dumps(model_state(policy.spaces, policy.spec)),
        "inputs": json.dumps(inputs),
        "prepared": json.dumps(prepared),
        "baseline": statement_on(policy),
        "iteration": str(policy.state["iteration"]),
        "weights_sha256": hashlib.sha256(policy.weights.tobytes()).hexdigest(),
    }


def _check(policy: Policy, module: ExportedPolicy, data: bytes) -> str:
    """Compare ONNX Runtime with the policy; return the result in words, or raise ConfigError if they differ."""
    if find_spec("onnxruntime") is None:
        return "Not checked: onnxruntime is not installed."
    import onnxruntime

    runtime = f"ONNX Runtime {onnxruntime.__version__}"
    rng = np.random.default_rng(0)
    difference = 0.0
    other_choices = 0
    try:
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        for _ in range(CHECK_ROWS // CHUNK_ROWS):
            stored = _made_up(policy, rng)
            inputs = leaves(policy.spaces.as_returned(stored), name="obs")
            if MASK in module.inputs:
                inputs[MASK] = stored[MASK]
            state = None
            if policy.state_size:
                state = rng.uniform(-1, 1, (CHUNK_ROWS, policy.state_size)).astype(
                    policy.spec.dtype
                )
                inputs["state"] = state
            outputs = session.run(
                module.output_names,
                {name: np.ascontiguousarray(inputs[name]) for name in module.inputs},
            )
            largest, differing = _compared(
                _expected(policy, stored, state),
                dict(zip(module.output_names, outputs, strict=True)),
            )
            difference = max(difference, largest)
            other_choices += differing
    except Exception as error:  # it has no kernels for some types, such as convolutions of float64
        raise ConfigError(
            f"{runtime} cannot run the exported policy: {in_a_line(error, 500)}. Nothing was written."
        ) from error
    facts = (
        f"on {CHECK_ROWS:,} observations; the largest difference is {difference:.1g}, and {other_choices or 'no'} "
        f"choices differ"
    )
    if not difference <= TOLERANCE or other_choices > MAX_OTHER_CHOICES:
        raise ConfigError(f"{runtime} was compared with the policy {facts}. Nothing was written.")
    return f"Checked in {runtime} {facts}."


def _made_up(policy: Policy, rng: np.random.Generator) -> np.ndarray:
    """Return random observations as they are stored, with masks that allow at least the last choice."""
    spaces = policy.spaces
    stored = np.zeros(CHUNK_ROWS, spaces.obs)
    scales = {}
    if policy.obs_scale is not None:
        scales = leaf_scales(policy.obs_scale, spaces.of_network().obs)
    for key, leaf in leaves(spaces.as_returned(stored)).items():
        if key in spaces.categories:
            first, last = spaces.categories[key].limits(leaf.shape[1:])
            leaf[...] = rng.integers(first, last + 1, leaf.shape)
        elif leaf.dtype == np.uint8:
            leaf[...] = rng.integers(0, 256, leaf.shape)
        elif leaf.dtype.kind != "f":
            leaf[...] = rng.integers(0, 2, leaf.shape)
        else:
            drawn = rng.standard_normal(leaf.shape)
            if key in scales:
                drawn = scales[key].mean + 2 * scales[key].std * drawn
            leaf[...] = drawn
    if spaces.mask is not None:
        choices = spaces.actions.choices or ()
        last_choices = np.cumsum(choices) - 1
        allowed = rng.random((CHUNK_ROWS, sum(choices))) < 0.6
        allowed[:, last_choices] = True  # something is allowed
        for part in leaves(stored[MASK]).values():
            part[...], allowed = np.split(allowed, [part.shape[1]], axis=1)
    return stored


def _expected(
    policy: Policy, stored: np.ndarray, state: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Return by name the outputs that follow from what the policy computes in NumPy."""
    import torch

    from dppo.tools.export.modules import decided

    actions, outputs = policy.decide(stored, state)
    follows = decided(
        policy.spaces.actions, policy.spec.distribution, torch.from_numpy(outputs.head)
    )
    expected = {name: tensor.numpy() for name, tensor in follows}
    expected |= leaves(policy.spaces.actions.to_env(actions), name="action")
    if outputs.state is not None:
        expected["next_state"] = outputs.state
    return expected


def _compared(expected: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> tuple[float, int]:
    """Return the largest difference of floats, per unit of the largest one, and the number of rows with other choices.

    Args:
        expected: what the policy computes; `outputs` come from ONNX Runtime.
    """
    largest = 0.0
    is_different = np.zeros(CHUNK_ROWS, bool)
    for name, array in expected.items():
        if array.dtype.kind != "f":
            is_other = (array != outputs[name]).reshape(CHUNK_ROWS, -1)
            is_different |= is_other.any(axis=1)
            continue
        # impossible choices are -1e9
        possible = np.where(array < -1e8, 0, array)
        size = np.abs(possible).max(initial=1.0)
        difference = np.abs(array - outputs[name]).max(initial=0.0)
        largest = max(largest, float(difference / size))
    return largest, int(is_different.sum())


def export_folder(
    run: str | Path,
    folder: str | Path,
    *,
    episodes: int = EVAL_EPISODES,
    model: ModelClass | None = None,
    trust: bool = False,
) -> str:
    """Write a folder for Hugging Face; return the command that uploads it, and what to look at before.

    Args:
        episodes: to play, greedily, for the model card; 0: none, and the code of the environment does not run.
        model, trust: as in `evaluate`.

    Raises:
        ConfigError: as `export_onnx` and `evaluate`; or the folder is the run's own, or cannot be written.
    """
    run_dir = run_dir_of(user_path(run))
    target = user_path(folder)
    run_files = read_exported(run)
    if target.resolve() == run_dir.resolve():
        raise ConfigError(f"{folder}: is the folder of the run. Use another one.")
    if has_any(target):
        raise ConfigError(f"{folder}: contains a run, or an earlier export. Use another folder.")
    check_writable(next(path for path in (target, *target.parents) if path.exists()), folder)
    # the policy of the files read above: a running run may have written newer ones
    policy = _trusted(run_files, run, model, trust=trust)
    evaluation = None
    if episodes:
        evaluation = evaluate(run_files.path, episodes=episodes, model=model, trust=trust)
    copied = [name for name in (CONFIG, METRICS, CURVE) if (run_dir / name).is_file()]
    iteration = run_files.checkpoint.state["iteration"]
    rows = read_metrics(run_dir) if METRICS in copied else []
    last_row = {row["iteration"]: row for row in rows}.get(iteration, {})
    with writing(folder):
        make_folder(target / "checkpoints")
        checked = export_onnx(policy, target / "policy.onnx")
        write_file(target / "checkpoints" / run_files.path.name, read_file(run_files.path))
        for name in copied:
            write_file(target / name, read_file(run_dir / name))
        if policy.comparison is not None:
            write_file(target / "checkpoints" / BEST, _exported_best(run_files, policy.comparison))
        picture = ""
        if CURVE in copied:
            picture = f"![Learning curve]({CURVE})\n\n"
        card = _card(
            policy, evaluation, last_row, checked=checked.removeprefix(f"{target}/"), curve=picture
        )
        write_file(target / CARD, card.encode())
    name = as_file_name(_setting(policy, "env_id", "policy"))
    command = f"hf upload YOUR_NAME/ppo-{name} {quote(str(target))}"
    look = f"{target / CARD}: the model card. Look at it, and at {CONFIG} for what is private, then upload the folder:"
    return f"{checked}\n{look}\n{command}"


def _exported_best(exported: LoadedCheckpoint, comparison: BaselineComparison) -> bytes:
    """Return a best.json by which the folder deploys the exported policy, with the comparison of its run."""
    content = {
        "checkpoint": exported.path.name,
        "iteration": exported.checkpoint.state["iteration"],
        "score": None,
        "deployed": "policy",
        "baseline": comparison.as_json(),
    }
    return json.dumps(content).encode() + b"\n"


def _setting(policy: Policy, name: str, default: str) -> str:
    """Return a setting of the run as text without line breaks or control characters."""
    value = settings_of(policy).get(name, default)
    return " ".join(printable(str(value)).split())


def _card(
    policy: Policy, evaluation: Evaluation | None, row: Row, *, checked: str, curve: str
) -> str:
    """Return the card with the figures of an evaluation and of the last row of metrics.

    Args:
        checked: the facts about the ONNX file; `curve` is the picture, or empty.
    """
    env = _setting(policy, "env_id", "policy")
    algo = _setting(policy, "algo", "ppo")
    figures = dict[str, str]()
    tags = ["reinforcement-learning", algo, "dppo", "onnx", env]
    front: dict[str, Any] = {"library_name": "dppo", "pipeline_tag": tags[0], "tags": tags}
    if evaluation is not None:
        spread = deviation(evaluation.std_return, evaluation.mean_return)
        score = f"{number(evaluation.mean_return)} +/- {spread}"
        figures = {f"mean return of {counted(len(evaluation.returns), 'greedy episode')}": score}
        figures["mean length of these"] = f"{evaluation.mean_length:.1f}"
        task = {"type": tags[0], "name": tags[0]}
        result = {"task": task, "dataset": {"type": env, "name": env}}
        metric = {"type": "mean_reward", "name": "mean_reward", "value": score, "verified": False}
        front["model-index"] = [
            {"name": f"{algo.upper()} on {env}", "results": [result | {"metrics": [metric]}]}
        ]
    for name, words in FIGURES.items():
        if math.isfinite(row.get(name, math.nan)):
            recent = row.get("charts/recent_episodes", 0)
            figures[words.format(recent=recent)] = number(row[name])
    return TEMPLATE.read_text(encoding="utf8").format(
        front=yaml.safe_dump(front, sort_keys=False),
        algo=algo.upper(),
        env=env,
        version=versions()["dppo"],
        steps=counted(policy.state["global_step"], "env step"),
        network=network_summary(policy.spec),
        parameters=counted(policy.weights.size, "parameter"),
        spaces=printable(spaces_summary(policy.spaces)),
        table="\n".join(f"| {name} | {value} |" for name, value in figures.items()),
        checked=checked,
        play=" ".join([".", *trust_flags(settings_of(policy))]),
        curve=curve,
    )
