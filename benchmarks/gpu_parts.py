"""The parts of benchmarks/gpu.py, each of which runs in a process of its own and yields rows for the table."""

from __future__ import annotations

import importlib
import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from measure import descendants

Row = dict[str, Any]  # what: in words; figures: text by name; passed: None where nothing is checked

UPDATES = 3  # after which weights are compared
REPEATS = 5  # of a time, after a first call that is not counted
# largest distance of weights, as a share of the way that they moved
CLOSE, CLOSE_IN_BFLOAT16 = (0.02, 0.5)
GRADIENT, GRADIENT_IN_BFLOAT16 = 1e-4, 0.1  # largest relative difference of the first gradient
EACH = 1024  # rows of a segment of the part `pong`
LONGEST_ON_CPU_S = 12.0  # of an update, beyond which no larger batch is timed there


@dataclass(frozen=True)
class Setting:
    """Where a part runs."""

    device: str
    cores: int
    folder: Path
    """For run folders."""

    @property
    def small(self) -> bool:
        """Return whether the sizes are those for a check on a CPU."""
        return self.device == "cpu"


class Part(NamedTuple):
    """A part and its limit."""

    limit_s: float
    rows: Callable[[Setting], Iterator[Row]]


def row(what: str, passed: bool | None = None, **figures: Any) -> Row:
    """Return a row of the table."""
    return {"what": what, "passed": passed, "figures": figures}


# ---------------------------------------------------------------------------------------------- one learner


# The smallest images of the Nature CNN: on 84 x 84 pixels of noise, rounding grows to a sixth of the way of the weights
# within three updates, also between two ways to compute convolutions on one CPU.
SMALL_PICTURES: dict[str, Any] = {"env_id": "gpu_tasks:Pictures", "env_kwargs": {"size": 36}}
KINDS: dict[str, dict[str, Any]] = {
    "MLP 2x64, real actions": {},
    "MLP 2x64, choice": {"env_kwargs": {"kind": "choice"}, "clip_vloss": True},
    "MLP 2x64, several choices": {"env_kwargs": {"kind": "choices"}},
    "MLP 2x64, a tuple of actions": {"env_kwargs": {"kind": "mixed"}},
    "MLP 2x64, squashed actions": {"action_bounds": "squash"},
    "MLP 3x1024": {"hidden_sizes": (1024, 1024, 1024)},
    "MLP 2x64, norm_value, recomputed advantages": {
        "norm_value": True,
        "norm_adv": True,
        "recompute_advantages": True,
    },
    "MLP 2x64, reuse of 2": {"reuse": 2},
    "MLP 2x64, desired_kl": {"desired_kl": 0.01},
    "Nature CNN": SMALL_PICTURES,
    "Nature CNN, micro batches of 48": SMALL_PICTURES | {"micro_batch_size": 48},
    "Nature CNN, bfloat16": SMALL_PICTURES | {"precision": "bfloat16"},
    "IMPALA CNN": SMALL_PICTURES | {"image_encoder": "impala"},
    # With seed 1, rounding turns one unit on or off: the gradient changes by 5e-4, on a CPU, too.
    "grid CNN": {"env_id": "gpu_tasks:Pictures", "env_kwargs": {"size": 16}, "seed": 2},
    "LSTM": {"memory": "lstm", "sequence_length": 16},
    "GRU": {"memory": "gru", "sequence_length": 16},
    "Nature CNN and LSTM": SMALL_PICTURES | {"memory": "lstm", "sequence_length": 16},
    "Nature CNN and LSTM, bfloat16": SMALL_PICTURES
    | {"memory": "lstm", "sequence_length": 16, "precision": "bfloat16"},
    "a module with awkward operations": {"model": "bench_models:Awkward"},
}
SMALL_KINDS = ("MLP 2x64, real actions", "LSTM", "grid CNN")


def config_of(device: str, **changes: Any) -> Any:
    """Return settings of one sampler of 8 environments, with batches of 512 rows."""
    from dppo.config import Config

    settings: dict[str, Any] = {
        "env_id": "gpu_tasks:Numbers",
        "num_samplers": 1,
        "envs_per_sampler": 8,
        "num_steps": 64,
        "minibatch_size": 128,
        "update_epochs": 4,
        "norm_obs": False,
        "norm_reward": False,
        "target_kl": 0.0,  # an early stop may come an epoch sooner on another device
        "device": device,
    }
    return Config(**settings | changes)


class Learning:
    """Updates on the same segment, on a device."""

    def __init__(self, config: Any, segments: list[Any] | None = None) -> None:
        """Collect a segment in this process, unless `segments` are given."""
        from dppo.config.resolve import resolve
        from dppo.hosts.plans import sampler_plan, trainer_plan
        from dppo.hosts.sampler_builder import build_sampler
        from dppo.learners.staged import StagedTrainers
        from dppo.learners.stored_segments import StoredSegments
        from dppo.learners.trainers import LocalTrainer
        from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
        from dppo.spaces.actions import continuous_width

        built = build_sampler(sampler_plan(config), 0)
        config, _ = resolve(config, continuous_width(built.spaces.actions))
        self.local = LocalTrainer(trainer_plan(config), built.spaces)
        self.trainers: Any = self.local
        if config.reuse > 1:
            stored = StoredSegments(config.reuse, built.spaces.of_network().obs)
            self.trainers = StagedTrainers(self.local, [stored])
        self.first = self.trainers.weights()
        self.config = config
        self._snapshot = PolicySnapshot(0, self.first)
        if segments is None:
            segments = [built.sampler.collect(SegmentRequest(0, 0), self._snapshot)[1]]
        self.segments = segments

    def update(self, number: int) -> dict[str, float]:
        """Do update `number`, and return its figures."""
        from dppo.ppo.exchange.records import Experience

        policy = replace(self._snapshot, version=number)
        figures: dict[str, float] = self.trainers.update(
            Experience(self.segments, policy, None, number)
        ).figures
        return figures

    def gradient(self) -> Any:
        """Return the gradient of the whole batch, before any update."""
        from dppo.ppo.learning.batch import make_batch
        from dppo.ppo.learning.gpu import repeatable_on
        from dppo.ppo.learning.losses import ClippedLoss

        trainer: Any = self.local.trainer
        batch = make_batch(
            self.segments, None, None, self.config.ppo, self.config.sizes.sequence_length
        )
        with repeatable_on(self.local.device):
            trainer._gradient(batch.to(self.local.device), ClippedLoss(self.config.ppo))
        return trainer.model.parameters.gradient.numpy(force=True).copy()

    def times(self, first: int, repeats: int = REPEATS) -> float:
        """Return the median time of an update in milliseconds, after one that is not counted."""
        spent = []
        for number in range(repeats + 1):
            began = time.perf_counter()
            self.update(first + number)  # its last step waits for the device
            spent.append(1e3 * (time.perf_counter() - began))
        return median(spent[1:])


def learner(setting: Setting) -> Iterator[Row]:
    """Train each kind of network on the device, and compare three updates with the CPU."""
    for kind, changes in KINDS.items():
        if setting.small and kind not in SMALL_KINDS:
            continue
        try:
            yield compared(kind, setting, changes)
        except Exception as error:
            yield row(kind, False, error=f"{type(error).__name__}: {str(error)[:300]}")


def compared(kind: str, setting: Setting, changes: dict[str, Any]) -> Row:
    """Return how close weights on the device and on the CPU are, and the times of both."""
    on_cpu = Learning(
        config_of("cpu", learner_threads=max(1, setting.cores // 2), **in_float32(changes))
    )
    on_device = Learning(config_of(setting.device, **changes), on_cpu.segments)
    gradient = on_cpu.gradient()
    gradient_apart = relative(on_device.gradient() - gradient, gradient)
    finite = True
    for number in range(UPDATES):
        on_cpu.update(number)
        figures = on_device.update(number)
        finite = finite and all(math.isfinite(value) for value in figures.values())
    moved = on_cpu.trainers.weights() - on_cpu.first
    apart = on_device.trainers.weights() - on_cpu.trainers.weights()
    share = relative(apart, moved)
    lower = "precision" in changes
    close = share < (CLOSE_IN_BFLOAT16 if lower else CLOSE)
    close = close and gradient_apart < (GRADIENT_IN_BFLOAT16 if lower else GRADIENT)
    return row(
        kind,
        finite and close,
        update_ms=f"{on_device.times(UPDATES):.1f}",
        cpu_ms=f"{on_cpu.times(UPDATES, 2):.1f}",
        gradient=f"{gradient_apart:.1e}",
        weights=f"{np.abs(apart).max():.1e}",
        of_the_way=f"{100 * share:.4f} %",
    )


def relative(difference: Any, whole: Any) -> float:
    """Return the length of `difference` over that of `whole`."""
    return float(np.linalg.norm(difference) / np.linalg.norm(whole))


def in_float32(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without lower precision, which not every CPU has."""
    return {name: value for name, value in changes.items() if name != "precision"}


# ---------------------------------------------------------------------------------------------- Pong's sizes


def pong(setting: Setting) -> Iterator[Row]:
    """Time updates of the Nature CNN on 84 x 84 x 4 bytes: 4 epochs of 4 minibatches."""
    import torch

    batches = [EACH // 4] if setting.small else [1024, 4096, 16384, 65536]
    segments = Learning(pong_config("cpu", EACH, 1)).segments
    longest_s = 0.0
    for rows in batches:
        count = max(1, rows // EACH)
        figures: dict[str, str] = {}
        for precision in ("float32",) if setting.small else ("float32", "bfloat16"):
            one = Learning(pong_config(setting.device, rows, count, precision), segments * count)
            if setting.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            spent = one.times(0, 3)
            figures[precision + "_ms"] = f"{spent:,.0f}"
            figures[precision + "_rows_per_s"] = f"{1e3 * rows / spent:,.0f}"
            if setting.device == "cuda":
                figures[precision + "_gb"] = f"{torch.cuda.max_memory_allocated() / 1e9:.2f}"
            if precision == "float32":
                figures |= of_which(one)
            one.local.close()
            del one
        if longest_s < LONGEST_ON_CPU_S and not setting.small:
            on_cpu = Learning(
                pong_config("cpu", rows, count, threads=setting.cores), segments * count
            )
            spent = on_cpu.times(0, 1)
            on_cpu.local.close()
            longest_s = 4 * spent / 1e3  # of the next one
            figures[f"cpu_{setting.cores}_threads_ms"] = f"{spent:,.0f}"
        yield row(f"{rows:,} rows", True, **figures)
    if setting.device == "cuda":
        yield from choices_of_arithmetic(segments)


def pong_config(
    device: str, rows: int, samplers: int, precision: str = "float32", threads: int = 1
) -> Any:
    """Return settings with four minibatches in a batch of `rows` rows."""
    changes = {
        "env_id": "gpu_tasks:Pictures",
        "num_samplers": samplers,
        "num_steps": min(EACH, rows) // 8,
    }
    changes |= {"minibatch_size": rows // 4, "precision": precision, "learner_threads": threads}
    return config_of(device, **changes)


def of_which(learning: Learning) -> dict[str, str]:
    """Return the milliseconds that it takes to make the batch, and to move it to the device."""
    from dppo.ppo.learning.batch import make_batch

    began = time.perf_counter()
    batch = make_batch(learning.segments, None, None, learning.config.ppo)
    made = time.perf_counter()
    figures = {"of_it_make_batch_ms": f"{1e3 * (made - began):,.0f}"}
    if learning.local.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
        began = time.perf_counter()
        there = batch.to(learning.local.device)
        torch.cuda.synchronize()
        figures["of_it_move_ms"] = f"{1e3 * (time.perf_counter() - began):,.0f}"
        del there
    return figures


def choices_of_arithmetic(segments: list[Any]) -> Iterator[Row]:
    """Time what equal bits in each run and full float32 cost, with 16,384 rows."""
    module: Any = importlib.import_module("dppo.learners.trainers")

    usual = module.repeatable_on
    try:
        for rows in (1024, 16384):
            figures = {}
            for name, setting in (
                ("repeatable", usual),
                ("torchs_defaults", lambda _: nullcontext()),
            ):
                module.repeatable_on = setting
                learning = Learning(
                    pong_config("cuda", rows, rows // EACH), segments * (rows // EACH)
                )
                figures[f"{name}_ms"] = f"{learning.times(0, 5):,.1f}"
            yield row(
                f"{rows:,} rows: equal bits and no TF32, beside torch's defaults", None, **figures
            )
    finally:
        module.repeatable_on = usual


# ---------------------------------------------------------------------------------------------- whole runs


def run(setting: Setting, name: str, **changes: Any) -> Any:
    """Train in a folder of the name `name`."""
    import dppo

    settings: dict[str, Any] = {
        "env_id": "gpu_tasks:Numbers",
        "num_samplers": 4,
        "envs_per_sampler": 2,
        "num_steps": 32,
        "update_epochs": 2,
        "device": setting.device,
        "progress": "off",
        "run_dir": setting.folder / name,
    }
    settings |= changes
    iterations = settings.pop("iterations", 3)
    rows = settings["num_samplers"] * settings["envs_per_sampler"] * settings["num_steps"]
    resume = settings.pop("resume", None)
    result = dppo.train(dppo.Config(**settings, total_timesteps=rows * iterations), resume=resume)
    if result.stopped_by is not None:
        raise RuntimeError(f"the run was stopped by {result.stopped_by}")
    return result


def hash_of(setting: Setting, name: str, **changes: Any) -> str:
    """Return the first digits of the SHA-256 of the weights that a run ends with."""
    sha: str = run(setting, name, **changes).weights_sha256
    return sha[:12]


RUNS: dict[str, dict[str, Any]] = {
    "MLP": {},
    "Nature CNN": SMALL_PICTURES,
    "Nature CNN, bfloat16": SMALL_PICTURES | {"precision": "bfloat16"},
    "IMPALA CNN": SMALL_PICTURES | {"image_encoder": "impala"},
    "LSTM": {"memory": "lstm"},
    "several choices": {"env_kwargs": {"kind": "choices"}},
    "a module with awkward operations": {"model": "bench_models:Awkward"},
}


def repeat(setting: Setting) -> Iterator[Row]:
    """Compare the weights of two runs of the same seed; of runs with two actors; and where an actor is killed."""
    work: dict[str, Any] = {**SMALL_PICTURES, "iterations": 5}
    calm = hash_of(setting, "calm", **work)
    work["env_kwargs"] = {"size": 36, "step_s": 0.005}
    with_actors = hash_of(setting, "with actors", **work, num_actors=2)
    yield row(
        "Nature CNN: 0 and 2 actors", calm == with_actors, weights=in_words(calm, with_actors)
    )
    with ActorKilled() as killed:
        disturbed = run(setting, "killed", **work, num_actors=2)
    sha = disturbed.weights_sha256[:12]
    same = calm == sha and killed.pid is not None
    yield row(
        "an actor is killed", same, weights=in_words(calm, sha), incidents=str(disturbed.incidents)
    )
    for name, changes in RUNS.items():
        if setting.small and name not in ("MLP", "LSTM"):
            continue
        hashes = [hash_of(setting, f"{name} {number}", **changes) for number in range(2)]
        yield row(f"{name}: two runs", hashes[0] == hashes[1], weights=in_words(*hashes))


def in_words(*hashes: str) -> str:
    """Return equal hashes once."""
    return " ".join(dict.fromkeys(hashes))


class ActorKilled:
    """Kills one of the actors of this process's run, once, a moment after it has started."""

    def __enter__(self) -> ActorKilled:
        self.pid: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        import os

        while not self._over.wait(0.2):
            actors = [
                pid
                for pid, _, command in descendants(os.getpid())
                if "ray::PPOActor.make" in command
            ]
            if actors:
                with suppress(ProcessLookupError):
                    os.kill(actors[0], signal.SIGKILL)
                    self.pid = actors[0]
                    return

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def overlap(setting: Setting) -> Iterator[Row]:
    """Collect on CPUs while the device learns."""
    actors = 2 if setting.small else max(2, min(4, setting.cores - 2))
    work: dict[str, Any] = {
        "env_id": "gpu_tasks:Pictures",
        "num_samplers": actors,
        "num_actors": actors,
    }
    work |= {
        "envs_per_sampler": 4,
        "num_steps": 64,
        "update_epochs": 4,
        "minibatch_size": 64,
        "iterations": 6,
    }
    if setting.small:
        work |= {"env_kwargs": {"size": 36}, "num_steps": 8, "iterations": 3}
    in_turns = run(setting, "in turns", **work)
    yield row(
        f"{actors} actors, in turns with the {setting.device} learner", True, **rates(in_turns)
    )
    first = run(setting, "overlap", **work, overlap=True)
    yield row(f"{actors} actors, --overlap", True, **rates(first))
    again = run(setting, "again", **work | {"num_actors": actors - 1}, overlap=True)
    same = first.weights_sha256 == again.weights_sha256
    yield row(f"{actors - 1} actors, --overlap: the same weights", same, **rates(again))
    if not setting.small:
        on_cpu = run(setting, "on the CPU", **work, overlap=True, device="cpu")
        yield row(f"{actors} actors, --overlap, --device cpu with 1 thread", None, **rates(on_cpu))


def rates(result: Any) -> dict[str, str]:
    """Return the speed of a run, and where its time went."""
    steps = f"{result.steps_per_s:,.0f}"
    return {"env_steps_per_s": steps, "times": result.times, "weights": result.weights_sha256[:12]}


def learners(setting: Setting) -> Iterator[Row]:
    """Give learners of their own to the GPU: one, and two where there is one GPU."""
    gpu = {"learner_gpus": 1} if setting.device == "cuda" else {}
    none = hash_of(setting, "none")
    one = hash_of(setting, "one", num_learners=1, num_actors=1, **gpu)
    yield row("--num-learners 1 beside 0", one == none, weights=in_words(none, one))
    if setting.device == "cpu":
        two = run(setting, "two", num_learners=2, num_actors=1)
        yield row("--num-learners 2", two.iterations == 3, weights=two.weights_sha256[:12])
        return
    import torch

    if torch.cuda.device_count() > 1:
        again = [
            hash_of(setting, f"two {number}", num_learners=2, num_actors=1, **gpu)
            for number in range(2)
        ]
        yield row("two learners on two GPUs, twice", again[0] == again[1], weights=in_words(*again))
    else:
        yield refused(
            "two learners of one GPU each", setting, num_learners=2, num_actors=1, learner_gpus=1
        )
    yield refused(
        "two learners that share a GPU", setting, num_learners=2, num_actors=1, learner_gpus=0.5
    )
    yield refused("a learner without a GPU", setting, num_learners=1, num_actors=1)
    yield refused(
        "a learner's GPU and those of actors",
        setting,
        num_learners=1,
        num_actors=2,
        learner_gpus=1,
        actor_gpus=0.6,
    )


def refused(what: str, setting: Setting, **changes: Any) -> Row:
    """Return whether a run is refused in words, and the words."""
    from dppo.errors import ConfigError

    try:
        run(setting, what, **changes)
    except ConfigError as error:
        return row(f"{what}: refused", True, message=str(error))
    return row(f"{what}: refused", False, message="it ran")


# ---------------------------------------------------------------------------------------------- memory


def memory(setting: Setting) -> Iterator[Row]:
    """Compare the estimate of memory with what is used; and run out of memory."""
    if setting.device == "cuda":
        import torch

        segments = Learning(pong_config("cpu", EACH, 1)).segments
        for rows in (4096, 16384):
            learning = Learning(pong_config("cuda", rows, rows // EACH), segments * (rows // EACH))
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            learning.update(0)
            peak = torch.cuda.max_memory_allocated()
            estimate = learning.local.gpu_bytes(rows)
            near = 0.8 < estimate / peak < 1.25
            gb = {"estimate_gb": f"{estimate / 1e9:.2f}", "peak_gb": f"{peak / 1e9:.2f}"}
            yield row(f"Nature CNN, minibatches of {rows // 4:,}", near, **gb)
            del learning
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(0.7e9 / total)
    yield from out_of_memory(setting)


def out_of_memory(setting: Setting) -> Iterator[Row]:
    """Train until there is no memory, and go on as the message says: on a GPU, before the first segment."""
    from dppo.errors import ConfigError, OutOfMemory

    work: dict[str, Any] = {
        "env_id": "gpu_tasks:Pictures",
        "envs_per_sampler": 8,
        "iterations": 2,
        "update_epochs": 1,
    }
    work |= {"num_steps": 64, "minibatch_size": 2048}
    if setting.small:
        work |= {"env_kwargs": {"size": 36}, "num_steps": 8, "minibatch_size": 256}
    with Cramped(setting.small):
        message, kind = "it fitted", "none"
        try:
            run(setting, "full", **work)
        except (ConfigError, OutOfMemory) as error:
            message = str(error)
            kind = type(error).__name__
        remedy = re.search(r"`micro_batch_size=(\d+)`", message)
        yield row("out of memory: said in words", remedy is not None, error=kind, message=message)
        if remedy is None:
            return
        rows = int(remedy[1])
        more: dict[str, Any] = {"micro_batch_size": rows}
        saved = list((setting.folder / "full" / "checkpoints").glob("*.safetensors"))
        if saved:
            more["resume"] = setting.folder / "full"
        result = run(setting, "full" if saved else "again", **work, **more)
        done = result.iterations == 2
        yield row(
            "the remedy of the message, in the same process",
            done,
            micro_batch_size=rows,
            resumed=bool(saved),
        )


class Cramped:
    """On a CPU, more than 64 rows at once do not fit; on a GPU nothing changes."""

    def __init__(self, pretend: bool) -> None:
        self._pretend = pretend

    def __enter__(self) -> None:
        from dppo.ppo.learning.model import PPOModel

        self._forward = forward = PPOModel.forward
        if self._pretend:

            def cramped(model: PPOModel, obs: Any, actions: Any, *more: Any) -> Any:
                if len(actions) > 64:
                    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
                return forward(model, obs, actions, *more)

            PPOModel.forward = cramped  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        from dppo.ppo.learning.model import PPOModel

        PPOModel.forward = self._forward  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------- devices change


def resume(setting: Setting) -> Iterator[Row]:
    """Stop after two of four iterations, and go on: on the same device, and on the other one."""
    work: dict[str, Any] = {
        "env_id": "gpu_tasks:Pictures",
        "env_kwargs": {"size": 36},
        "num_steps": 16,
    }
    whole = hash_of(setting, "whole", **work, iterations=4)
    changes = ((setting.device, setting.device), (setting.device, "cpu"), ("cpu", setting.device))
    for first, then in dict.fromkeys(changes):
        name = f"{first} to {then}"
        run(setting, name, **work, iterations=2, device=first)
        result = run(setting, name, **work, iterations=4, device=then, resume=setting.folder / name)
        sha = result.weights_sha256[:12]
        finished = result.iterations == 4
        if first == then:
            yield row(
                f"{name}: as without a stop", finished and sha == whole, weights=f"{whole} {sha}"
            )
        else:
            yield row(name, finished, weights=sha)


def actors(setting: Setting) -> Iterator[Row]:
    """Run environments that compute on the GPU, in actors, beside a learner on the same GPU."""
    for gpus in (0.0, 0.5):
        if gpus and setting.device == "cpu":
            yield refused("--actor-gpus 0.5 without a GPU", setting, num_actors=2, actor_gpus=gpus)
            continue
        report = setting.folder / f"seen {gpus}"
        report.mkdir(parents=True)
        work = {"env_id": "gpu_tasks:OnGPU", "env_kwargs": {"report": str(report)}, "num_actors": 2}
        result = run(setting, f"actors {gpus}", **work, actor_gpus=gpus)
        seen = {path.read_text(encoding="utf8") for path in report.glob("*.txt")}
        expected = {"cuda 0"} if gpus else {"cpu "}
        what = f"--actor-gpus {gpus:g}: an environment sees"
        yield row(
            what, seen == expected, seen=str(sorted(seen)), weights=result.weights_sha256[:12]
        )


PARTS: dict[str, Part] = {
    "learner": Part(70, learner),
    "pong": Part(85, pong),
    "overlap": Part(95, overlap),
    "learners": Part(40, learners),
    "memory": Part(35, memory),
    "resume": Part(25, resume),
    "actors": Part(45, actors),
    "repeat": Part(80, repeat),
}
