"""`dppo export`: the ONNX model is the policy, for every kind; the folder for Hugging Face; what is refused."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from builders import contents, make_config, random_weights, tiny_run
from encoder_kinds import KINDS as ENCODERS
from kinds import KINDS as POLICIES
from kinds import SMALL
from numpy.random import default_rng
from numpy.testing import assert_allclose
from worlds.acting import SPACES
from worlds.models import Plain

import dppo
from dppo.__main__ import main
from dppo.config import plain_settings
from dppo.envs.preparation import make_prepared
from dppo.errors import ConfigError
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.policies.loading import read
from dppo.policies.policy import Policy, _rows_of
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.scales import ObsScale
from dppo.spaces.spaces import Spaces, leaves
from dppo.tools.export import policies as export
from dppo.tools.export.modules import ExportedPolicy

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PENDULUM = {"env_id": "Pendulum-v1", "norm_obs": True}
SQUASHED = PENDULUM | {"action_bounds": "squash", "state_dependent_std": True, "hidden_sizes": ()}
SINGLE = {"env_id": "worlds.observed:Level", "norm_obs": True}
ACTING: dict[str, dict[str, Any]] = {}
for _kind in SPACES:
    ACTING[_kind] = {"env_id": "worlds.acting:Actuated", "env_kwargs": {"kind": _kind}}
NUMBERS = {"pendulum": PENDULUM, "squashed": SQUASHED, "single": SINGLE}
KINDS = POLICIES | ENCODERS | ACTING | NUMBERS
EXPORTED = [
    *POLICIES,
    "nature",
    "film",
    "vector",
    "embedded",
    "one of",
    "tuple",
    "squashed",
    "pendulum",
    "wide",
    "free",
]
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def random_scale(spaces: Spaces, norm_obs: bool) -> ObsScale | None:
    """Return the scale of observations by random statistics."""
    statistics = no_statistics(spaces, obs=norm_obs, returns=False)
    if statistics.obs is None:
        return None
    rng = default_rng(1)
    shape = statistics.obs.mean.shape
    stored = {
        "obs.count": np.array(5.0),
        "obs.mean": rng.normal(size=shape),
        "obs.m2": rng.uniform(1, 9, shape),
    }
    return statistics.loaded(stored).obs_scale()


def policy_of(kind: str) -> tuple[Policy, Any]:
    """Return a policy with random weights and statistics, and its environment."""
    config = make_config(SMALL | KINDS[kind] | {"run_dir": None, "reuse": 1})
    built = build_sampler(sampler_plan(config), 0)
    spaces = built.spaces
    spec = built.sampler.agent.spec
    scale = random_scale(spaces, config.norm_obs)
    snapshot = PolicySnapshot(0, random_weights(spec), scale)
    state = {"iteration": 0, "global_step": 0, "config": plain_settings(config)}
    policy = Policy(spaces, PPOAgent(spec, spaces.mask), snapshot, state)
    return policy, make_prepared(config.env)


def random_mask(choices: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Return a mask in which the last choice of each is allowed."""
    mask = rng.random(sum(choices)) < 0.5
    last_choices = np.cumsum(choices) - 1
    mask[last_choices] = True
    return mask


def inputs_of(policy: Policy, obs: Any, mask: Any, state: Any) -> dict[str, np.ndarray]:
    """Return the inputs of an exported policy by name, each with one row."""
    rows, *_ = _rows_of(obs, policy.spaces)
    inputs = {f"obs.{name}".rstrip("."): leaf.copy() for name, leaf in leaves(rows).items()}
    if mask is not None:
        inputs["action_mask"] = mask[None].copy()
    if policy.state_size:
        if state is None:
            state = np.zeros(policy.state_size, policy.spec.dtype)
        inputs["state"] = state[None].copy()
    return inputs


assert_near = partial(assert_allclose, rtol=1e-4, atol=1e-5)


def check(policy: Policy, env: Any, run: Any, steps: int = 6) -> None:
    """Compare `run`, of arrays by name, with `Policy.act` on sampled observations, masks and the states that follow."""
    spaces = policy.spaces
    choices = spaces.actions.choices or ()
    rng = default_rng(2)
    env.observation_space.seed(3)
    state = None
    for _ in range(steps):
        obs = env.observation_space.sample()
        mask = None
        if spaces.mask is not None:
            mask = random_mask(choices, rng)
        if spaces.mask == "leaf":
            assert mask is not None
            obs = obs | {"action_mask": mask.astype(obs["action_mask"].dtype)}
            mask = None
        computed = run(inputs_of(policy, obs, mask, state))

        action = policy.act(obs, state, action_mask=mask)
        if policy.state_size:
            action, state = action
            assert_near(computed["next_state"][0], state)
        for name, part in leaves(action).items():
            key = f"action.{name}".rstrip(".")
            rows = computed[key]
            assert rows.shape == (1, *np.shape(part))
            assert rows.dtype == np.asarray(part).dtype
            assert_near(rows[0], part)


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_module_is_the_policy(kind: str) -> None:
    policy, env = policy_of(kind)
    module = ExportedPolicy(policy.spaces, policy.spec, policy.weights, policy.obs_scale)
    assert not any(parameter.requires_grad for parameter in module.parameters())

    def run(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        inputs = {name: torch.from_numpy(leaf) for name, leaf in rows.items()}
        outputs = module.outputs(inputs)
        return {name: value.numpy() for name, value in outputs.items()}

    check(policy, env, run)


@pytest.mark.parametrize("kind", ["wide", "free"])
def test_bounds_of_several_elements_can_be_traced(kind: str) -> None:
    """With one element, torch knows a constant's value while it traces; with several, no branch may depend on it."""
    policy, _ = policy_of(kind)
    module = ExportedPolicy(policy.spaces, policy.spec, policy.weights, policy.obs_scale)
    torch.export.export(module, module.example, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPORTED)
def test_onnx_runtime_acts_as_the_policy(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    policy, env = policy_of(kind)
    file = tmp_path / "policy.onnx"
    message = dppo.export_onnx(policy, file)
    words = (
        r"Checked in ONNX Runtime \S+ on 1,000 observations; the largest difference is \S+, and no"
    )
    assert re.search(words, message)

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    inputs = [value.name for value in session.get_inputs()]
    outputs = [output.name for output in session.get_outputs()]

    def run(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = session.run(None, rows)
        return dict(zip(outputs, values, strict=True))

    check(policy, env, run)

    metadata = session.get_modelmeta().custom_metadata_map
    assert metadata["env_id"] == policy.state["config"]["env_id"]
    assert list(json.loads(metadata["inputs"])) == inputs
    assert metadata["iteration"] == str(policy.state["iteration"])
    weights_sha256 = hashlib.sha256(policy.weights.tobytes()).hexdigest()
    assert metadata["weights_sha256"] == weights_sha256

    repository = Path(__file__).parents[2]
    assert str(repository) not in file.read_bytes().decode("latin1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    dppo.train(tiny_run(run, steps=50, iterations=1, model="worlds.models:Plain"))
    (run / "learning_curve.png").write_bytes(b"drawn")  # tests draw none
    return run


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("{run} policy.onnx", "and imports worlds.models and calls Plain(). Add --trust"),
        ("{run}", "1 words instead of RUN and a target"),
        ("{run} policy.onxx", "policy.onxx: is neither NAME.onnx nor a folder"),
        ("missing policy.onnx", "missing: does not exist"),
        ("{run} card/", "and imports worlds.models"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(
    words: str, refusal: str, trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dppo.user_code.find_spec", lambda name: name)
    arguments = [word.format(run=trained) for word in words.split()]
    assert main(["export", *arguments]) == 2
    assert refusal in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_written_is_refused_before_episodes_are_played(
    trained: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """20 episodes of a slow simulator may take hours."""
    for function in ("evaluate", "_as_onnx"):
        monkeypatch.setattr(export, function, lambda *_, **__: pytest.fail("too early"))
    monkeypatch.setattr("dppo.user_code.find_spec", lambda name: name)
    (tmp_path / "file").write_text("")
    words = "cannot be written: Not a directory"
    with pytest.raises(ConfigError, match=words):
        export.export_folder(trained, tmp_path / "file" / "card", trust=True)
    with pytest.raises(ConfigError, match=words):
        dppo.export_onnx(trained, tmp_path / "file" / "policy.onnx", trust=True)


def test_a_folder_with_a_run_or_an_earlier_export_is_not_written_into(
    trained: Path, tmp_path: Path
) -> None:
    """The newest checkpoint in a folder counts, and files of the other run would be lost."""
    copy = shutil.copytree(trained, tmp_path / "other")
    before = contents(copy)
    words = r"other: contains a run, or an earlier export\. Use another folder"
    with pytest.raises(ConfigError, match=words):
        export.export_folder(trained, copy, episodes=0, trust=True)
    assert contents(copy) == before


def test_a_run_that_goes_on_is_exported_as_it_was_first_read(
    trained: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The checkpoint in the folder, the ONNX file and the evaluation are of one policy."""
    run = shutil.copytree(trained, tmp_path / "run")
    exported = dict[str, int]()

    def read_before_another_iteration(path: Any) -> Any:
        files = read(path)
        if files.checkpoint.state["iteration"] == 1:
            dppo.train(
                tiny_run(run, steps=50, iterations=2, model="worlds.models:Plain"), resume=run
            )
        return files

    def note(policy: Policy, path: Path) -> str:
        exported["policy"] = policy.state["iteration"]
        return f"{path}: not written"

    def play(policy: Any, **arguments: Any) -> dppo.Evaluation:
        exported["evaluation"] = dppo.load_policy(policy, trust=True).state["iteration"]
        return dppo.Evaluation("CartPole-v1", (1.0,), (1,))

    monkeypatch.setattr(export, "read", read_before_another_iteration)
    monkeypatch.setattr(export, "export_onnx", note)
    monkeypatch.setattr(export, "evaluate", play)
    export.export_folder(run, tmp_path / "card", episodes=1, trust=True)
    assert exported == {"policy": 1, "evaluation": 1}
    files = (tmp_path / "card" / "checkpoints").glob("*.safetensors")
    assert [file.stem for file in files] == ["iter_000001"]


def test_a_missing_package_is_named(trained: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("dppo.user_code.find_spec", lambda name: None)
    words = (
        r"^an ONNX file needs the package onnx\. Install it: .* -m pip install .*onnx onnxscript"
    )
    with pytest.raises(ConfigError, match=words):
        dppo.export_onnx(trained, tmp_path / "policy.onnx")


class Fixed(Plain):
    """Breaks the graph: the number of rows becomes a constant."""

    def forward(self, obs: Any) -> Any:
        return super().forward(obs.reshape(len(obs), -1))


class Branching(Plain):
    def forward(self, obs: Any) -> Any:
        return super().forward(-obs if obs.sum() > 1e9 else obs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "refusal"),
    [(Fixed, "Write obs.shape[0] in place of len"), (Branching, "cannot export it: ")],
)
def test_a_network_that_torch_cannot_export_is_refused(
    model: Any, refusal: str, trained: Path, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    policy = dppo.load_policy(trained, model=model)
    with pytest.raises(ConfigError, match=rf"^model=.*{re.escape(refusal)}"):
        dppo.export_onnx(policy, tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_file_that_differs_from_the_policy_is_not_written(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    expected = export._expected

    def differing(*arguments: Any) -> Any:
        return {name: value * 1.01 for name, value in expected(*arguments).items()}

    monkeypatch.setattr(export, "_expected", differing)
    policy, _ = policy_of("pendulum")
    words = r"compared with the policy on 1,000 observations; the largest .*Nothing was"
    with pytest.raises(ConfigError, match=words):
        dppo.export_onnx(policy, tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


CARD = {
    "README.md",
    "policy.onnx",
    "config.yaml",
    "metrics.jsonl",
    "learning_curve.png",
    "checkpoints",
}


@pytest.mark.slow
def test_the_example_plays_without_dppo_and_the_folder_with_it(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(trained), "policy.onnx", "--trust"]) == 0

    example = EXAMPLES / "onnx_policy.py"
    assert "import dppo" not in example.read_text()

    monkeypatch.setattr(sys, "argv", ["onnx_policy.py", "policy.onnx", "CartPole-v1"])
    runpy.run_path(str(example), run_name="__main__")
    assert re.search(r"episode 2: return \d+\.0", capsys.readouterr().out)

    assert main(["export", str(trained), "card/", "--episodes", "3", "--trust"]) == 0
    assert re.search(r"(?m)^hf upload YOUR_NAME/ppo-CartPole-v1 card$", capsys.readouterr().out)

    card = tmp_path / "card"
    assert {path.name for path in card.iterdir()} == CARD

    readme = (card / "README.md").read_text()
    _, front, body = readme.split("---\n")
    [result] = yaml.safe_load(front)["model-index"][0]["results"]
    assert result["dataset"]["name"] == "CartPole-v1"

    mean_return = result["metrics"][0]["value"]
    assert re.fullmatch(r"[\d.]+ \+/- [\d.]+", mean_return)
    assert "\ndppo eval . --trust\n" in body  # its network is a class of its own
    assert f"| mean return of 3 greedy episodes | {mean_return} |" in body

    exported = dppo.load_policy("card")
    original = dppo.load_policy(trained)
    assert exported.weights.tobytes() == original.weights.tobytes()
