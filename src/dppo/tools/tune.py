"""`dppo tune`: search for good settings with Optuna, in a study that can be continued and shared by processes."""

import json
import math
import signal
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dppo.commands.flags import as_words
from dppo.commands.train import Command, arguments_of
from dppo.config import Config, plain_settings, read_settings
from dppo.config.parts import about, settings_by_name
from dppo.config.presets import merge_preset
from dppo.errors import ConfigError, TrainingDiverged, unknown_name
from dppo.invocation import command
from dppo.records.files.disk import writing
from dppo.records.files.run_folder import as_file_name
from dppo.records.observer import Observer
from dppo.user_code import require_package

SPACE = Path(__file__).with_name("search_space.yaml")
TRIALS = 50
REPORTS = 20  # of a trial, after equal shares of its env steps, at which trials are compared
FIRST_TRIALS = 5  # that are never stopped early
ALIVE_S = 60  # between the signs of life of a trial; one of a killed process does not count
COMMAND = Command(
    prog="dppo tune",
    usage="ENV_ID [--trials N] [--flag value ...]",
    description="Train with settings that Optuna proposes, and print the best as a command. Trials that are worse than "
    "the median of the others stop early. Settings that you give are not tuned. The study is a file in the folder of "
    "--out: the same command continues it, and several at once, also on one Ray cluster, share the trials.",
    title="tuning",
    own={
        "--trials N": f"Trials of the study in all. (default: {TRIALS})",
        "--out DIR": "Folder of the study. (default: runs/tune__ENV)",
        "--space FILE": f"YAML file of the search space. (default: {SPACE.name} of dppo)",
    },
    refused=dict.fromkeys(("run_dir", "resume", "branch", "trust"), "trials are new runs in the folder of --out"),
    defaults={"progress": "off"},
)


def main(argv: list[str]) -> int:
    """Run trials until the study has enough of them; print the best as a command; return the exit code."""
    options, given, env_id = COMMAND.split(argv)
    if options.get("trials", 1) < 1:
        raise ConfigError(f"trials={options['trials']}: must be at least 1.")
    training = arguments_of(given, env_id, COMMAND.prog)
    require_package("tune", "optuna")
    config = Config(**training.settings)  # refused, if at all, before the first trial
    out = Path(options.get("out", f"runs/tune__{as_file_name(config.env_name)}")).absolute()
    found = read_settings(Path(options.get("space", SPACE)))
    own = {**(read_settings(Path(given["config"])) if given.get("config") else {}), **given}
    space = {name: of for name, of in found.items() if name not in own}
    for name in found.keys() - settings_by_name().keys():
        raise ConfigError(f"space: {unknown_name('setting', name, settings_by_name())}")
    if not space:
        raise ConfigError("tune: all settings of the search space are given, so none is left to tune. Leave some out.")
    base = {"progress": "off"} | {name: one for name, one in training.settings.items() if name not in space}
    study, wanted = _study(out, base, config), options.get("trials", TRIALS)
    import optuna

    states = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
    if len(study.get_trials(states=states)) < wanted:
        enough = optuna.study.MaxTrialsCallback(wanted, states=states)
        trial = partial(_train, base=base, space=space, out=out)
        study.optimize(trial, callbacks=[enough, _print_trial])
    if not study.get_trials(states=states[:1]):
        raise ConfigError(f"{out}: no trial has finished with an episode. Raise `total_timesteps`.")
    settings = study.best_trial.user_attrs["settings"]
    words = as_words({name: settings.get(name, given.get(name)) for name in (*given, *space)})
    print(f"Best of {len(study.trials)} trials in {out}: {study.best_value:.1f}, in trial {study.best_trial.number}:")
    print(command("train", config.env_name, *words))
    return 0


def _study(out: Path, base: Collection[str], config: Config) -> Any:
    """Return the study in the folder `out`, perhaps a new one; raise ConfigError if its settings `base` differ."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with writing(f"out={out}"):
        out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sign of life is experimental
        storage = optuna.storages.RDBStorage(f"sqlite:///{out}/study.db", heartbeat_interval=ALIVE_S)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS, n_warmup_steps=REPORTS // 4)
    how: dict[str, Any] = {"direction": "maximize", "load_if_exists": True, "pruner": pruner}
    study = optuna.create_study(storage=storage, study_name="dppo", **how)
    same = {
        name: value for name, value in plain_settings(config).items() if name in base and about(name).resume != "free"
    }
    if study.user_attrs.get("settings", same) != same:
        raise ConfigError(f"out={out}: has a study with other settings. Use another folder.")
    study.set_user_attr("settings", same)
    return study


def _train(trial: Any, base: dict[str, Any], space: dict[str, Any], out: Path) -> float:
    """Train with the settings of a trial; return the mean return of its last 100 episodes."""
    import optuna

    from dppo.run.runner import train

    settings, notes = merge_preset(base, {name: _suggested(trial, name, of) for name, of in space.items()})
    for note in notes:  # such as minibatches larger than the batch
        print(f"trial {trial.number}: {note.removeprefix('preset: ')}")
    try:
        config = Config(**settings | {"run_dir": out / f"trial_{trial.number:04d}"})
    except ConfigError as error:  # such as a batch larger than the run
        print(f"trial {trial.number}: {error}")
        raise optuna.TrialPruned from None
    trial.set_user_attr("settings", plain_settings(config))
    try:
        result = train(config, observers=[_Pruner(trial, config.iterations * config.batch_size)])
    except TrainingDiverged as error:  # counts as one of the trials
        print(f"trial {trial.number}: {error}")
        raise optuna.TrialPruned from None
    if (stopped_by := signal.Signals.__members__.get(result.stopped_by or "")) is not None:
        raise KeyboardInterrupt if stopped_by is signal.SIGINT else SystemExit(128 + stopped_by)
    if result.stopped_by is not None or math.isnan(result.episodic_return):
        raise optuna.TrialPruned
    return result.episodic_return


def _suggested(trial: Any, name: str, of: Any) -> Any:
    """Return a value that Optuna proposes; lists, which it does not know, are choices as JSON."""
    try:
        if isinstance(of, list):
            return json.loads(trial.suggest_categorical(name, [json.dumps(one) for one in of]))
        limits = {"one_minus": False} | of
        one_minus, whole = limits.pop("one_minus"), isinstance(of["low"], int) and isinstance(of["high"], int)
        value = (trial.suggest_int if whole else trial.suggest_float)(name, **limits)
        return 1 - value if one_minus else value
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"space: {name}={of}: {error}. Write a list of choices, or {{low: 1, high: 2}}.") from None


@dataclass
class _Pruner(Observer):
    """Reports the mean return of a trial after equal shares of its steps; stops it if the others were better."""

    trial: Any
    total_steps: int
    reported: int = 0

    def on_iteration(self, row: dict[str, float]) -> bool:
        """Return whether to stop."""
        share, value = int(REPORTS * row["global_step"] / self.total_steps), row.get("charts/episodic_return", math.nan)
        if share == self.reported or math.isnan(value):
            return False
        self.reported = share
        self.trial.report(value, share)
        return bool(self.trial.should_prune())


def _print_trial(study: Any, trial: Any) -> None:
    last = trial.intermediate_values[max(trial.intermediate_values)] if trial.intermediate_values else math.nan
    value, state = last if trial.value is None else trial.value, trial.state.name.lower()
    print(f"trial {trial.number}: {state}, mean return {value:.1f}", flush=True)
