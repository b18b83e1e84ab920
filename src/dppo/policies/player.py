"""The policy of a run, a loaded one, or a controller of the user's, and its environment, for an evaluation."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dppo.config import flattened
from dppo.config.field import FlatSettings
from dppo.config.parts import Env
from dppo.config.plain import objects_in
from dppo.config.programs import MAIN, definitions_of_program, refusal
from dppo.config.trust import code_named_by, require_trust
from dppo.envs.arguments import check_arguments
from dppo.envs.checks.faults import making
from dppo.envs.instance import Instance
from dppo.envs.names import check_env_id
from dppo.envs.preparation import PREPARING, make_prepared
from dppo.envs.sharing import begin_use
from dppo.errors import CheckpointError, ConfigError, NotBetter, counted, refuse
from dppo.files import user_path
from dppo.log import logger
from dppo.policies.acting import ActingFor, PlaySettings, PolicyActingFor
from dppo.policies.controller import Controller
from dppo.policies.controller_acting import controller_acting_for
from dppo.policies.loading import log_chosen, model_name, policy_from, read
from dppo.policies.policy import Policy, settings_of
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.networks.network import ModelClass
from dppo.records.files.checkpoint import find
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.observer import Result
from dppo.slots.layout import Layout
from dppo.user_code import import_path


@dataclass(frozen=True, slots=True)
class Player:
    """A policy or a controller, and the environment that it will play."""

    policy: Policy | Controller
    env: Any
    env_kwargs: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the run, by which frames are prepared as in training; empty without a run."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Python objects passed to `train`; empty when the run was loaded from disk."""

    @property
    def env_name(self) -> str:
        """Return the environment's id, or the import path of its callable or class."""
        env_id = getattr(getattr(self.env, "spec", None), "id", None)
        if env_id:
            return str(env_id)
        if is_made(self.env):
            return import_path(type(self.env))
        return import_path(self.env)

    @property
    def snapshot(self) -> PolicySnapshot:
        """Message to actors for each evaluation: the weights of a policy, or nothing for a controller."""
        policy = self.policy
        if isinstance(policy, Controller):
            return PolicySnapshot(0, np.empty(0, np.float32))
        return PolicySnapshot(policy.state["iteration"], policy.weights, policy.obs_scale)

    def acting_for(self, settings: PlaySettings) -> ActingFor:
        """Return what plays episodes, given a snapshot; it can be sent to other processes."""
        if isinstance(self.policy, Controller):
            return controller_acting_for(self.policy, settings)
        return PolicyActingFor(self.policy.spaces, self.policy.spec, settings)

    def describe(self, settings: PlaySettings) -> str:
        """Name what plays, and how it takes actions."""
        mode = "sampling actions"
        if settings.deterministic:
            mode = "taking the most likely action"
        if isinstance(self.policy, Controller):
            if self.policy.samples:
                return f"{self.policy.name}, {mode}"
            return self.policy.name
        steps = counted(self.policy.state["global_step"], "step")
        return f"policy after {steps}, {mode}"

    def check(self, settings: PlaySettings) -> None:
        """Raise ConfigError if actions cannot be taken as these settings ask."""
        policy = self.policy
        if isinstance(policy, Controller) and not (settings.deterministic or policy.samples):
            raise ConfigError(
                f"deterministic=False: a controller samples actions in `predict`, and {policy.name} has none. Leave it "
                f"out."
            )

    def check_env(self) -> None:
        """Raise ConfigError if there is no such environment, or it does not take its arguments."""
        check_env_id(self.env)
        check_arguments(self.env, self.env_kwargs)

    def make(self, mode: str | None, seed: int) -> Any:
        """Return the environment, with a render_mode if it is to be shown; raise as `evaluate` does."""
        if is_made(self.env):
            if mode == "human":
                raise ConfigError(
                    "render=True has no effect on an environment that is already made. Make it with "
                    "render_mode='human'."
                )
            begin_use(self.env, "env: is", "Pass another environment.")
            return self.env
        self.check_env()
        settings = self.settings | self.objects
        instance = Instance(
            settings.get("num_samplers", 0),
            seed=seed,
            num_sub_envs=1,
            render_mode=mode,
            layout=Layout.by_names(settings),
        )
        with making(self.env_name):
            return make_prepared(self.env_settings, instance)

    @property
    def env_settings(self) -> Env:
        """The environment, and the settings by which it is prepared as in training; a stored tuple is a list."""
        settings = self.settings | self.objects
        preparing: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
            if name in PREPARING
        }
        return Env(env_id=self.env, env_kwargs=self.env_kwargs, **preparing)


def is_made(env: Any) -> bool:
    """Return whether `env` is an environment, not the name of one or a way to make one."""
    return not isinstance(env, str | type) and hasattr(env, "reset") and hasattr(env, "step")


def is_controller(policy: Any) -> bool:
    """Return whether `policy` is, or names, a controller: not a policy, and no path of a run."""
    if isinstance(policy, str):
        return ":" in policy and not user_path(policy).exists()
    return not isinstance(policy, Policy | Result | Path)


def find_player(
    policy: Policy | Result | str | Path | Any,
    env: Any,
    env_kwargs: Mapping[str, Any] | None,
    model: ModelClass | None,
    *,
    trust: bool,
) -> Player:
    """Return a policy or controller with its environment; code that only the run's folder names needs `trust`."""
    if is_made(env) and env_kwargs is not None:
        raise ConfigError(
            "env_kwargs: have no effect on an environment that is already made. Leave them out."
        )
    if is_controller(policy):
        if model is not None:
            raise ConfigError("model: has no effect on a controller. Leave it out.")
        if not isinstance(policy, Controller):
            policy = Controller(policy)
        return _player_of_controller(policy, env, env_kwargs, trust=trust)
    if isinstance(policy, Policy):
        if model is not None:
            raise ConfigError(
                "model: has no effect on a policy that is already loaded. Leave it out."
            )
        return _player_of_policy(policy, env, env_kwargs, trust=trust)
    return _player_of_run(policy, env, env_kwargs, model, trust=trust)


def _player_of_controller(
    controller: Controller, env: Any, env_kwargs: Mapping[str, Any] | None, *, trust: bool
) -> Player:
    """Return a controller with an environment: the one of a run, prepared as in training, or another one."""
    if env is None:
        raise ConfigError(
            "env: is missing, and a controller has none. Pass env, or a run that has one."
        )
    if not isinstance(env, Result | Path):
        return Player(controller, env, _checked_kwargs(env_kwargs))
    run: Result | Path
    if isinstance(env, Result):
        # whichever of its own policy and its baseline it deploys
        run = replace(env, baseline=None)
    else:
        run = find(user_path(env)).path
    return replace(_player_of_run(run, None, env_kwargs, None, trust=trust), policy=controller)


def _player_of_policy(
    policy: Policy, env: Any, env_kwargs: Mapping[str, Any] | None, *, trust: bool
) -> Player:
    if env is None:
        raise ConfigError(
            "env: is missing, and a Policy cannot make one. Pass env, or the run in place of the policy."
        )
    require_trust(_wrappers_of(policy.state, env), (), "the policy", trust=trust)
    kwargs = _own_kwargs(policy, env, _checked_kwargs(env_kwargs))
    return Player(policy, env, kwargs, settings_of(policy))


def _player_of_run(
    policy: Result | str | Path,
    env: Any,
    env_kwargs: Mapping[str, Any] | None,
    model: ModelClass | None,
    *,
    trust: bool,
) -> Player:
    objects: dict[str, Any] = {}
    if isinstance(policy, Result):
        objects = policy.objects
        policy = policy.deployed
        trust = True  # this process has just run its code
    run = user_path(policy)
    not_better = None
    try:
        run_files = read(run)
    except NotBetter as error:
        not_better = error
        run_files = find(run)
    state = run_files.checkpoint.state
    user_settings = dict(objects)
    if env is not None:
        user_settings["env_id"] = env
    if model is not None:
        user_settings["model"] = model
    user_settings["prior"] = None  # acts at the start of training only
    if not_better is None:
        user_settings["baseline"] = None  # does not play
    stored_settings = {"env_kwargs": {}} | _settings_with(run, env, env_kwargs)
    stored_settings |= {"model": model_name(run_files, model)} | _wrappers_of(state, env)
    _check_program(stored_settings, user_settings, state, run)
    require_trust(stored_settings, user_settings, run, trust=trust)
    settings = stored_settings | user_settings
    if "env_id" not in settings or not isinstance(settings["env_kwargs"], dict):
        raise CheckpointError(
            f"{run}: has settings that are not of dppo. Pass `env_id` and `env_kwargs`."
        )
    _log_code(settings, user_settings, run)
    loaded = policy_from(run_files, user_settings.get("model"))
    kwargs = dict(settings["env_kwargs"])
    player = Player(loaded, settings["env_id"], kwargs, settings_of(loaded), objects)
    if not_better is None:
        log_chosen(run, run_files)
        return player
    logger.warning("the baseline plays. %s", not_better)
    return replace(player, policy=Controller(settings["baseline"], "baseline"))


def _log_code(settings: FlatSettings, user_settings: FlatSettings, run: Path) -> None:
    """Log the code that will be imported, and whether the user passed it or the run names it."""
    lines = []
    for name, action in code_named_by(settings).items():
        source = str(run)
        if name in user_settings:
            source = f"{name}={user_settings[name]}"
        lines.append(f"{source} {action}.")
    for line in dict.fromkeys(lines):  # a prior may also be the baseline
        logger.info("%s", line)


def _checked_kwargs(env_kwargs: Any) -> dict[str, Any]:
    if env_kwargs is None:
        return {}
    if not isinstance(env_kwargs, Mapping):
        raise ConfigError(
            f"env_kwargs={env_kwargs!r}: must be arguments by name. Use one such as {{'g': 9.8}}."
        )
    return dict(env_kwargs)


def _settings_with(run: Path, env: Any, env_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a run, with the arguments for `env`.

    They are those of the run's evaluations with the user's; only the user's, which is logged, if `env` is another
    environment. Raise ConfigError as `_merged`.
    """
    user_kwargs = _checked_kwargs(env_kwargs)
    settings = settings_to_resume(run, read_only=True)
    run_kwargs = _evaluated_kwargs(settings)
    if run_kwargs is None:
        return settings
    if env is None or _is_of_run(env, settings.get("env_id")):
        return settings | {"env_kwargs": _merged(run_kwargs, user_kwargs)}
    if not is_made(env):
        _log_unused_kwargs(run_kwargs.keys() - user_kwargs.keys())
    return settings | {"env_kwargs": user_kwargs}


def _evaluated_kwargs(settings: FlatSettings) -> dict[str, Any] | None:
    """Return the arguments of the environments of a run's evaluations; None if they are not of dppo."""
    kwargs = settings.get("env_kwargs", {})
    changes = settings.get("eval_env_kwargs", {})
    if not isinstance(kwargs, dict) or not isinstance(changes, dict):
        return None
    return kwargs | changes


def _merged(run_kwargs: dict[str, Any], user_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a run with the user's.

    Raise ConfigError if the run had a Python object as an argument, and none of the user's takes its place.
    """
    refuse(
        ConfigError(
            f"env_kwargs: {name} was {text} in the run, whose folder cannot hold it. Pass `env_kwargs`."
        )
        for _, name, text in objects_in({"env_kwargs": run_kwargs})
        if name not in user_kwargs
    )
    return run_kwargs | user_kwargs


def _log_unused_kwargs(names: Iterable[Any]) -> None:
    unused = ", ".join(map(str, names))
    if unused:
        logger.info(
            "env_kwargs of the run (%s) are not passed to another environment; pass those it needs",
            unused,
        )


def _is_of_run(env: Any, env_id: Any) -> bool:
    """Return whether `env` makes the run's own environment, perhaps imported from what was the main program."""
    if is_made(env):
        return False
    module, _, name = import_path(env).rpartition(":")
    stored_module, _, stored_name = str(env_id).rpartition(":")
    return name == stored_name and stored_module in (module, "__main__")


def _own_kwargs(policy: Policy, env: Any, user_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for `env`, as `_settings_with`; raise ConfigError as `_merged`."""
    stored = settings_of(policy)
    run_kwargs = _evaluated_kwargs(stored)
    if not _is_of_run(env, stored.get("env_id")) or run_kwargs is None:
        return user_kwargs
    return _merged(run_kwargs, user_kwargs)


def _check_program(
    stored_settings: FlatSettings, user_settings: FlatSettings, state: Mapping[str, Any], run: Path
) -> None:
    """Raise ConfigError if `stored_settings` name a definition of another program; the message names its file."""
    program = sys.modules["__main__"]
    not_in_commands = {"wrappers", "baseline", "prior"}  # the command has no flags for them
    definitions = definitions_of_program(stored_settings, {*user_settings, *not_in_commands})
    names = [
        name.removeprefix(MAIN) for setting_names in definitions.values() for name in setting_names
    ]
    if not all(hasattr(program, name.partition(".")[0]) for name in names):
        unchanged = {
            setting: value
            for setting, value in stored_settings.items()
            if setting not in user_settings
        }
        raise refusal(run, unchanged, definitions, state.get("program"), ["eval", str(run)])


def _wrappers_of(state: Mapping[str, Any], env: Any) -> dict[str, Any]:
    """Return the setting of a policy that names code, if its environment is to be made."""
    settings = state.get("config")
    if is_made(env) or not isinstance(settings, dict):
        return {"wrappers": ()}
    return {"wrappers": flattened(settings).get("wrappers", ())}
