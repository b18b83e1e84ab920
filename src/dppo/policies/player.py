"""What an evaluation plays: the policy of a run, or a loaded one, and its environment."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dppo.config import flattened
from dppo.config.plain import objects_in
from dppo.config.trust import code_named_by, require_trust
from dppo.envs.checks.faults import making
from dppo.envs.instance import Instance
from dppo.envs.names import check_env_id
from dppo.envs.preparation import Preparation, make_prepared
from dppo.errors import CheckpointError, ConfigError, printable
from dppo.files import user_path
from dppo.invocation import command
from dppo.log import logger
from dppo.policies.policy import Policy, model_name, policy_from, read
from dppo.ppo.networks.network import ModelClass
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.observer import Result
from dppo.user_code import import_path


@dataclass(frozen=True, slots=True)
class Player:
    """A policy and the environment that it will play."""

    policy: Policy
    env: Any
    env_kwargs: dict[str, Any]
    objects: dict[str, Any] = field(default_factory=dict)
    """Of the run, if this process has made it."""

    @property
    def env_name(self) -> str:
        """Return the environment's id, or the import path of its callable or class."""
        spec = getattr(self.env, "spec", None)
        return str(getattr(spec, "id", None) or import_path(type(self.env) if is_made(self.env) else self.env))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, by which frames are prepared as in training."""
        return flattened(self.policy.state.get("config") or {})

    def make(self, mode: str | None, seed: int) -> Any:
        """Return the environment, with a render_mode if it is to be shown; raise as `evaluate` does."""
        if is_made(self.env):
            if mode == "human":
                raise ConfigError(
                    "render=True has no effect on an environment that is already made. Make it with "
                    "render_mode='human'."
                )
            return self.env
        check_env_id(self.env)
        settings = self.settings | self.objects
        instance = Instance(settings.get("num_samplers", 0), seed=seed, num_rows=1, render_mode=mode)
        with making(self.env_name):
            return make_prepared(self.env, self.env_kwargs, Preparation.by_names(settings), instance)


def is_made(env: Any) -> bool:
    """Return whether `env` is an environment, not the name of one or a way to make one."""
    return not isinstance(env, str | type) and hasattr(env, "reset") and hasattr(env, "step")


def find_player(
    policy: Policy | Result | str | Path,
    env: Any,
    env_kwargs: Mapping[str, Any] | None,
    model: ModelClass | None,
    *,
    trust: bool,
) -> Player:
    """Return the policy and its environment; import nothing that only a run's folder names, unless it is trusted."""
    if is_made(env) and env_kwargs is not None:
        raise ConfigError("env_kwargs: have no effect on an environment that is already made. Leave them out.")
    if isinstance(policy, Policy):
        if env is None:
            raise ConfigError(
                "env: is missing, and a Policy cannot make one. Pass env, or the run in place of the policy."
            )
        if model is not None:
            raise ConfigError("model: has no effect on a policy that is already loaded. Leave it out.")
        require_trust(_wrappers_of(policy.state, env), (), "the policy", trust=trust)
        return Player(policy, env, _own_kwargs(policy, env, env_kwargs or {}))
    held: dict[str, Any] = policy.objects if isinstance(policy, Result) else {}
    if isinstance(policy, Result):
        policy, trust = policy.checkpoint, True  # this process has just run its code
    run = user_path(policy)
    found = read(run)
    own = model_name(found, model)
    named = held | {name: value for name, value in (("env_id", env), ("model", model)) if value is not None}
    settings = _settings_with(run, env, env_kwargs)
    stored = {"env_kwargs": {}} | settings | {"model": own} | _wrappers_of(found.checkpoint.state, env)
    _check_program(stored, named, found.checkpoint.state, run)
    require_trust(stored, named, run, trust=trust)
    settings = stored | named
    if "env_id" not in settings or not isinstance(settings["env_kwargs"], dict):
        raise CheckpointError(f"{run}: has settings that are not of dppo. Pass `env_id` and `env_kwargs`.")
    for name, action in code_named_by(settings).items():
        logger.info("%s %s.", f"{name}={named[name]}" if name in named else run, action)
    return Player(policy_from(found, named.get("model")), settings["env_id"], dict(settings["env_kwargs"]), held)


def _settings_with(run: Path, env: Any, env_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of a run, with the arguments for `env`; see `_arguments`.

    Raise ConfigError if the run had a Python object as an argument, and `env_kwargs` does not take its place.
    """
    if env_kwargs is not None and not isinstance(env_kwargs, Mapping):
        raise ConfigError(f"env_kwargs={env_kwargs!r}: must be arguments by name. Use one such as {{'g': 9.8}}.")
    given = dict(env_kwargs or {})
    stored = settings_to_resume(run, read_only=True)
    of_run = stored.get("env_kwargs", {})
    if not isinstance(of_run, dict):
        return stored
    lost = {name for _, name, _ in objects_in({"env_kwargs": of_run})}
    is_own = env is None or _is_of_run(env, stored.get("env_id"))
    replaced = bool(lost) and (lost <= given.keys() or not is_own)
    settings = settings_to_resume(run, {"env_kwargs": {}} if replaced else None)  # which refuses what is lost
    return settings | {"env_kwargs": _arguments(of_run, given, is_own=is_own, env=env)}


def _arguments(of_run: Mapping[str, Any], given: Mapping[str, Any], *, is_own: bool, env: Any) -> dict[str, Any]:
    """Return the arguments of the run's own environment with those `given`; only these for another environment."""
    if is_own:
        return {**of_run, **given}
    left_out = ", ".join(map(str, of_run.keys() - given.keys()))
    if left_out and not is_made(env):
        logger.info("env_kwargs of the run (%s) are not passed to another environment; pass those it needs", left_out)
    return dict(given)


def _is_of_run(env: Any, env_id: Any) -> bool:
    """Return whether `env` makes the run's own environment, perhaps imported from what was the main program."""
    if is_made(env):
        return False
    module, _, name = import_path(env).rpartition(":")
    stored_module, _, stored_name = str(env_id).rpartition(":")
    return name == stored_name and stored_module in (module, "__main__")


def _own_kwargs(policy: Policy, env: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for `env`, as `_settings_with`; raise ConfigError if some are lost."""
    stored = flattened(policy.state.get("config") or {})
    of_run = stored.get("env_kwargs")
    if is_made(env) or not _is_of_run(env, stored.get("env_id")) or not isinstance(of_run, Mapping):
        return dict(given)
    for _, name, text in objects_in({"env_kwargs": of_run}):
        if name not in given:
            raise ConfigError(f"env_kwargs: {name} was {text} in training, which is not stored. Pass `env_kwargs`.")
    return {**of_run, **given}


def _check_program(stored: Mapping[str, Any], named: Mapping[str, Any], state: Mapping[str, Any], run: Path) -> None:
    """Refuse what a program has defined that is not this one, and say where it is."""
    program, path = sys.modules["__main__"], Path(printable(str(state.get("program") or "its program.py")))
    names = {name: str(stored.get(name)) for name in ("env_id", "model") if name not in named}
    names = {name: path[9:] for name, path in names.items() if path.startswith("__main__:") and "<" not in path}
    if all(hasattr(program, name.partition(".")[0]) for name in names.values()):
        return
    flags = " ".join(f"--{name.replace('_', '-')} {path.stem}:{value}" for name, value in names.items())
    raise ConfigError(
        f"{run}: {' and '.join(names.values())} was defined in {path}, which is another program. In the folder "
        f"{path.parent}: {command('eval', run)} {flags}. That imports the file, so it must train only below "
        f"`if __name__ == '__main__':`."
    )


def _wrappers_of(state: Mapping[str, Any], env: Any) -> dict[str, Any]:
    """Return the setting of a policy that names code, if its environment is to be made."""
    settings = {} if is_made(env) else state.get("config")
    return {"wrappers": flattened(settings).get("wrappers", ()) if isinstance(settings, dict) else ()}
