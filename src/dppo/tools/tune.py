"""`dppo tune`: search for good settings with Optuna, in a study that can be continued and shared by processes."""

import json
import math
import sqlite3
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dppo.commands.flags import as_words
from dppo.commands.train import Command, arguments_of
from dppo.config import Config, plain_settings, read_settings
from dppo.config.parts import about, default_of, settings_by_name
from dppo.config.presets import merge_preset
from dppo.config.settings import Settings
from dppo.errors import (
    ConfigError,
    DppoError,
    TrainingDiverged,
    counted,
    refusals_of,
    refuse,
    unknown_name,
)
from dppo.invocation import command
from dppo.records.files.disk import writing
from dppo.records.files.run_folder import as_file_name
from dppo.records.observer import Observer
from dppo.records.terminal.figures import number
from dppo.signals import ending_on_signals
from dppo.tools.whole_time import SeveralRuns, WholeTime
from dppo.user_code import require_package

SPACES = {
    "ppo": Path(__file__).with_name("search_space.yaml"),
    "sac": Path(__file__).with_name("search_space_sac.yaml"),
}
"""Files with the ranges to search, by algorithm."""
TRIALS = 50
# reports of a trial, after equal shares of its env steps; trials are compared at these
REPORTS = 20
FIRST_TRIALS = 5  # these are never stopped early
BEST = 3  # trials of which a command is printed: a single one may be best by luck
FINISHED = ("COMPLETE", "PRUNED")
"""States of the trials that count."""
SIGN_OF_LIFE_S = 60
"""Interval of signs of life: a trial whose process gives none for twice as long was killed, and does not count."""
COMMAND = Command(
    prog="dppo tune",
    usage="ENV_ID [--trials N] [--flag value ...]",
    description="Train with settings that the package optuna proposes, and print the best as a command. Trials that "
    "are worse than the median of the others stop early. Settings that you give are not tuned. The study is a file in "
    "the folder of --out: the same command continues it, and several at once, also on one Ray cluster, share the "
    "trials.",
    title="tuning",
    flags={
        "--trials N": f"Trials of the study in all. (default: {TRIALS})",
        "--out DIR": "Folder of the study. (default: runs/tune__ENV)",
        "--space FILE": "YAML file of the search space. (default: the one of dppo for the algorithm)",
    },
    refused=dict.fromkeys(
        ("run_dir", "resume", "branch", "trust"), "trials are new runs in the folder of --out"
    ),
    defaults={"progress": "off"},
)


def main(argv: list[str]) -> int:
    """Run trials until the study has enough of them; print the best as commands; return the exit code."""
    options, flags, env_id = COMMAND.split(argv)
    num_trials = options.get("trials", TRIALS)
    if num_trials < 1:
        raise ConfigError(f"trials={num_trials}: must be at least 1.")
    training = arguments_of(flags, env_id, COMMAND.prog)
    require_package("the search", "optuna")
    config = Config(**training.settings)  # refused, if at all, before the first trial
    out = Path(options.get("out", f"runs/tune__{as_file_name(config.env_name)}")).absolute()
    fixed = set(flags)
    if flags.get("config"):
        fixed |= read_settings(Path(flags["config"])).keys()
    space = _search_space(Path(options.get("space", SPACES[config.algo])), fixed)
    base = {"progress": "off"} | {
        name: value for name, value in training.settings.items() if name not in space
    }
    _check_space(space, base)
    with _naming_database(out):
        study = _study(out, training.settings, space, config)
        import optuna

        def progress() -> str:
            return f"the same command continues the study\n{_result(study, config.env_name, out, flags)}".rstrip()

        finished_states = tuple(optuna.trial.TrialState[name] for name in FINISHED)
        num_left = num_trials - len(_trials(study, FINISHED))
        if num_left > 0:
            enough = optuna.study.MaxTrialsCallback(num_trials, states=finished_states)
            trials_left = SeveralRuns(num_left, config.total_steps, "trial", some_stop_early=True)
            whole_time = WholeTime(trials_left, partial(print, flush=True))
            with ending_on_signals(progress) as check_signals:
                try:
                    study.optimize(
                        lambda trial: _train(trial, base, space, out, whole_time, check_signals),
                        callbacks=[enough, _print_trial, lambda *_: check_signals()],
                    )
                except UnboundLocalError:  # of Optuna, after a signal while it stores a result
                    check_signals()
                    raise
        result = _result(study, config.env_name, out, flags)
    if not result:
        raise ConfigError(
            f"{out}: no trial has finished with an episode. Raise `total_timesteps`, with another --out."
        )
    print(result)
    return 0


def _trials(study: Any, states: Collection[str]) -> list[Any]:
    return [trial for trial in study.trials if trial.state.name in states]


def _result(study: Any, env_name: str, out: Path, flags: Mapping[str, Any]) -> str:
    """Return the mean returns of the best trials, and commands that train with them; "" if no trial is complete."""
    best = sorted(_trials(study, ["COMPLETE"]), key=lambda trial: trial.value)[-BEST:]
    if not best:
        return ""
    num_finished = len(_trials(study, FINISHED))
    lines = [f"Best of {counted(num_finished, 'trial')} in {out}, the best last:"]
    for trial in best:
        settings = flags | trial.user_attrs["settings"]
        # names of this trial, as a study may have had several search spaces
        tuned = [parameter.partition("=")[0] for parameter in trial.params]
        words = as_words({name: settings[name] for name in (*flags, *tuned)})
        lines.append(f"{number(trial.value)}, in trial_{trial.number:04d}:")
        lines.append(command("train", env_name, *words))
    return "\n".join(lines)


@contextmanager
def _naming_database(out: Path) -> Iterator[None]:
    """Raise a DppoError for an error of the study's database, in place of exceptions of Optuna and SQLAlchemy."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, sqlite3.Error):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise DppoError(
            f"{out}/study.db: {cause}. The trials that have finished are in it. Once this is corrected, the same "
            f"command continues the study."
        ) from None


def _search_space(path: Path, fixed: Collection[str]) -> dict[str, Any]:
    """Return the range or the choices of each setting to tune: those in the file, except for `fixed` ones."""
    try:
        space = read_settings(path)
    except ConfigError as error:
        raise ConfigError(f"space={str(error).removeprefix('config=')}") from None
    refuse(
        ConfigError(f"space: {unknown_name('setting', name, settings_by_name())}")
        for name in space
        if name not in settings_by_name()
    )
    tuned = {name: values for name, values in space.items() if name not in fixed}
    if not tuned:
        raise ConfigError(
            "all settings of the search space are given, so none is left to tune. Leave some out."
        )
    return tuned


def _check_space(space: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raise ConfigError, before the study exists, for a range that Optuna refuses, or values that a setting does."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    draws = optuna.create_study().ask()
    for name, values in space.items():
        _suggested(draws, name, values)
        ends = values
        if not isinstance(values, list):
            ends = [_in_range(values[end], values) for end in ("low", "high")]
        refuse(refusals_of(partial(Settings, **{**base, name: end}) for end in ends))


def _study(out: Path, names: Collection[str], tuned: Collection[str], config: Config) -> Any:
    """Return the study in the folder `out`, perhaps a new one; raise ConfigError if its settings `names` differ.

    An earlier version did not store values of presets for settings that are `tuned`, which no trial uses.
    """
    import optuna

    with writing(f"out={out}"):
        out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sign of life is experimental
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{out}/study.db", heartbeat_interval=SIGN_OF_LIFE_S
        )
        pruner = optuna.pruners.MedianPruner(FIRST_TRIALS, n_warmup_steps=REPORTS // 4)
        study = optuna.create_study(
            storage=storage,
            study_name="dppo",
            direction="maximize",
            load_if_exists=True,
            pruner=pruner,
        )
        optuna.storages.fail_stale_trials(study)
    settings = plain_settings(config)
    shared = {
        name: value
        for name, value in settings.items()
        if name in names and about(name).resume != "free"
    }
    stored_settings = study.user_attrs.get("settings", shared)
    differing = [
        f"{name}={stored_settings.get(name, 'not given')}"
        for name in sorted(stored_settings.keys() | (shared.keys() - set(tuned)))
        if stored_settings.get(name, "not given") != shared.get(name, "not given")
    ]
    if differing and _trials(study, [*FINISHED, "RUNNING"]):
        wait = ""
        if not _trials(study, FINISHED):
            wait = f", or wait for {2 * SIGN_OF_LIFE_S} s if the process of its trial was killed"
        raise ConfigError(
            f"out={out}: has a study with other settings: {', '.join(differing)}. Use another folder{wait}."
        )
    study.set_user_attr("settings", shared)
    return study


def _train(
    trial: Any,
    base: dict[str, Any],
    space: dict[str, Any],
    out: Path,
    whole_time: Observer,
    check_signals: Callable[[], None],
) -> float:
    """Train with the settings of a trial; return the mean return of its last 100 episodes."""
    import optuna

    from dppo.run.runner import train

    suggestions = {name: _suggested(trial, name, values) for name, values in space.items()}
    settings, notes = _merged_with(base, suggestions)
    for note in notes:  # such as minibatches larger than the batch
        print(f"trial {trial.number}: {note.removeprefix('preset: ')}")
    try:
        config = Config(**settings | {"run_dir": out / f"trial_{trial.number:04d}"})
    except ConfigError as error:  # such as a batch larger than the run
        print(f"trial {trial.number}: {error}")
        raise optuna.TrialPruned from None
    trial.set_user_attr("settings", plain_settings(config))
    try:
        result = train(config, observers=[_Pruner(trial, config.total_steps), whole_time])
    except TrainingDiverged as error:  # counts as one of the trials
        print(f"trial {trial.number}: {error}")
        raise optuna.TrialPruned from None
    if result.stopped_by is not None:
        check_signals()
    if result.stopped_by is not None or math.isnan(result.episodic_return):
        raise optuna.TrialPruned
    return result.episodic_return


def _merged_with(
    base: Mapping[str, Any], suggestions: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings of a trial, and notes on suggestions that do not go together with them."""
    algo = base.get("algo", default_of("algo"))
    return merge_preset(base, {"algo": algo, **suggestions})


def _suggested(trial: Any, name: str, values: Any) -> Any:
    """Return a value that Optuna proposes; lists, which it does not know, are choices as JSON.

    The range is part of the parameter's name: in another search space of the same study, Optuna refuses other choices.
    """
    parameter = f"{name}={values}"
    try:
        if isinstance(values, list):
            return json.loads(
                trial.suggest_categorical(parameter, [json.dumps(choice) for choice in values])
            )
        limits = {name: limit for name, limit in values.items() if name != "one_minus"}
        if isinstance(values["low"], int) and isinstance(values["high"], int):
            value = trial.suggest_int(parameter, **limits)
        else:
            value = trial.suggest_float(parameter, **limits)
            return float(f"{_in_range(value, values):.6g}")
        return _in_range(value, values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"space: {parameter}: {str(error).rstrip('.')}. Write a list of choices, or {{low: 1, high: 2}}."
        ) from None


def _in_range(value: Any, limits: Mapping[str, Any]) -> Any:
    """Return the value of a setting for a value between the limits."""
    return 1 - value if limits.get("one_minus") else value


@dataclass
class _Pruner(Observer):
    """Reports the mean return of a trial after equal shares of its steps; stops it if the others were better."""

    trial: Any
    total_steps: int
    reported: int = 0

    def on_iteration(self, row: dict[str, float]) -> bool:
        share = int(REPORTS * row["global_step"] / self.total_steps)
        mean_return = row.get("charts/episodic_return", math.nan)
        if share == self.reported or math.isnan(mean_return):
            return False
        self.reported = share
        self.trial.report(mean_return, share)
        return bool(self.trial.should_prune())


def _print_trial(study: Any, trial: Any) -> None:
    value = trial.value
    if value is None:
        reports = trial.intermediate_values
        value = reports[max(reports)] if reports else math.nan
    print(
        f"trial {trial.number}: {trial.state.name.lower()}, mean return {number(value)}", flush=True
    )
