"""Load the policy of a run, without torch and without Ray."""

import sys
import warnings
from pathlib import Path

from dppo.config.trust import require_trust
from dppo.errors import CheckpointError, ConfigError
from dppo.files import user_path
from dppo.log import logger
from dppo.policies.deployed import find_deployed, notes_on_best
from dppo.policies.described import model_from
from dppo.policies.policy import Policy, made_from
from dppo.ppo.exchange.inputs import no_statistics
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.networks.network import ModelClass
from dppo.records.files.checkpoint import LoadedCheckpoint, find
from dppo.records.files.lock import training_notes
from dppo.records.observer import Result


def load_policy(
    path: Result | str | Path, *, model: ModelClass | None = None, trust: bool = False
) -> Policy:
    """Return the policy of a result, of a run's newest good checkpoint, or of the checkpoint at `path`.

    A run with `never_worse` has the best checkpoint that an evaluation shows to be better than the baseline.

    Loading runs no code from the folder. A network of your own is stored as the import path of its class: pass `model`,
    or `trust`, unless this program has imported that module already.

    Args:
        path: of the run or the checkpoint.
        model: the class of the run's own network, or its import path, in place of the one that the checkpoint names.
        trust: import the module that the checkpoint names.

    Raise CheckpointError if there is no checkpoint, it is damaged, or its network cannot be built here; NotBetter if
    the baseline is to be used instead; ConfigError if its own network is not trusted.
    """
    if isinstance(path, Result):
        model = model or path.objects.get("model")
        path = path.deployed
        trust = True
    run = read(path)
    name = model_name(run, model)
    if model is None:
        trusted = trust or _is_imported(name or "")
        require_trust({"model": name}, (), path, trust=trusted)
    return policy_from(run, model)


def _is_imported(model: str) -> bool:
    """Return whether this program has imported a network of this import path, so that nothing new runs."""
    module, _, name = model.partition(":")
    network = getattr(sys.modules.get(module), name, None)
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(network, type) and issubclass(network, torch.nn.Module)


def read(path: str | Path) -> LoadedCheckpoint:
    """Return the checkpoint that a run deploys, or the one at `path`, importing nothing; raise as `find_deployed`.

    Raise CheckpointError if there is no good checkpoint.
    """
    run = find(user_path(path))
    for problem in run.damaged:
        warnings.warn(f"skipped a damaged newer checkpoint: {problem}", stacklevel=3)
    return find_deployed(run, user_path(path))


def log_chosen(run: Path, run_files: LoadedCheckpoint) -> None:
    """Log which policy of a run plays, or is exported, where the run is still training or has a better one."""
    notes = training_notes(run, content=f"its policy of {run_files.path.stem}")
    for note in (*notes, *notes_on_best(run, run_files)):
        logger.info("%s", note)


def model_name(run: LoadedCheckpoint, replaced_by: ModelClass | None = None) -> str | None:
    """Return the import path of the network that a checkpoint names; None for the default network.

    Raise ConfigError if a class is to take the place of the default network.
    """
    model = run.checkpoint.state.get("model")
    name = None
    if isinstance(model, dict):
        name = model.get("model")
    if name is None and replaced_by is not None:
        raise ConfigError(
            f"model={replaced_by}: has no effect: {run.path} has the default network. Leave it out."
        )
    if name is None:
        return None
    return str(name)


def policy_from(run: LoadedCheckpoint, model: ModelClass | None) -> Policy:
    """Return the policy of a checkpoint; import the module of its network, or use `model` in its place.

    Raise CheckpointError if it is not a checkpoint of a policy, or its network cannot be built here.
    """
    state = run.checkpoint.state
    arrays = run.checkpoint.arrays
    try:
        hidden = state["model"].get("layers", state["model"]).get("hidden_sizes", ())
        if len(hidden) > len(arrays["model"]):
            raise TypeError(f"{len(hidden):,} hidden layers")
        spaces, spec = model_from(state, model)
        weights = spec.flatten(arrays["model"])
        statistics = arrays["normalizer"]
        untrained = no_statistics(spaces, obs="obs.count" in statistics, returns=False)
        obs_scale = untrained.loaded(statistics).obs_scale()
        value_scale = ValueScale.from_state(arrays.get("optimizer", {}))
        snapshot = PolicySnapshot(state["iteration"], weights, obs_scale, value_scale)
        return made_from(spaces, spec, snapshot, state, run.comparison)
    except ConfigError as error:
        raise CheckpointError(
            f"{run.path}: its network cannot be built here: {error} Add the folder of its module to PYTHONPATH, "
            f"or pass the class: load_policy(path, model=Class)."
        ) from None
    except Exception as error:  # whatever the content of a checkpoint leads to
        name = model_name(run)
        if name is not None and isinstance(error, ValueError):
            raise CheckpointError(
                f"{run.path}: {name} is not the network that was trained: {error}. Use the class as it was at the "
                f"time of training."
            ) from None
        problem = f"is not a dppo checkpoint ({error!r})"
        raise CheckpointError(f"{run.path}: {problem}. Pass the folder of a run.") from None
