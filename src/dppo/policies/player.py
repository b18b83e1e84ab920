"""Find the policy and the environment of an evaluation, and import only code that is trusted."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo.config.trust import code_named_by, require_trust
from dppo.envs.checks.faults import constructor_fault
from dppo.envs.make import check_env_id, make_env, make_in_window
from dppo.errors import ConfigError, DppoError
from dppo.policies.policy import Policy, model_name, policy_from, read
from dppo.ppo.networks.user.module_spec import ModelClass
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.result import Result
from dppo.user_code import import_path

logger = logging.getLogger("dppo")


@dataclass(frozen=True, slots=True)
class Player:
    """A policy and the environment that it will play."""

    policy: Policy
    env: Any
    env_kwargs: dict[str, Any]

    @property
    def env_name(self) -> str:
        """Return the environment's id, or the import path of its callable or class."""
        if isinstance(self.env, str):
            return self.env
        spec = getattr(self.env, "spec", None)
        named = type(self.env) if is_made(self.env) else self.env
        return str(getattr(spec, "id", None) or import_path(named))

    def make(self, *, render: bool) -> Any:
        """Return the environment; with `render`, one that shows itself in a window.

        Raises:
            ConfigError: it is not one environment, or cannot be shown in a window.
            EnvironmentFault: its constructor raised.
        """
        if is_made(self.env):
            if render:
                raise ConfigError(
                    "render=True has no effect on an environment that is already made. Make it with "
                    "render_mode='human'."
                )
            return self.env
        check_env_id(self.env)
        try:
            if render:
                return make_in_window(self.env, self.env_name, self.env_kwargs)
            return make_env(self.env, self.env_kwargs)
        except DppoError:
            raise
        except Exception as error:
            raise constructor_fault(self.env_name, error) from None


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
    """Return the policy and its environment; import nothing that only a run's folder names, unless it is trusted.

    Raises:
        ConfigError: an argument has no effect, or is missing, or the run's code is not trusted.
        CheckpointError: there is no checkpoint.
    """
    if env is not None and is_made(env) and env_kwargs is not None:
        raise ConfigError("env_kwargs: have no effect on an environment that is already made. Leave them out.")
    if isinstance(policy, Result):  # this process has just run its code
        return _player_of(policy.checkpoint, env, env_kwargs, model, trust=True)
    if not isinstance(policy, Policy):
        return _player_of(Path(policy), env, env_kwargs, model, trust=trust)
    if env is None:
        raise ConfigError("env: is missing, and a Policy cannot make one. Pass env, or the run in place of the policy.")
    if model is not None:
        raise ConfigError("model: has no effect on a policy that is already loaded. Leave it out.")
    return Player(policy, env, dict(env_kwargs or {}))


def _player_of(
    run: Path, env: Any, env_kwargs: Mapping[str, Any] | None, model: ModelClass | None, *, trust: bool
) -> Player:
    found = read(run)
    own = model_name(found)
    if model is not None and own is None:
        raise ConfigError(f"model={model}: has no effect: {run} has the default network. Leave it out.")
    named = {name: value for name, value in (("env_id", env), ("model", model)) if value is not None}
    kept = env_kwargs is None and not is_made(env)
    settings = settings_to_resume(run, None if kept else {"env_kwargs": env_kwargs or {}})
    stored = {"env_kwargs": {}} | settings | {"model": own}
    require_trust(stored, named, run, trust=trust)
    settings = stored | named
    for name, action in code_named_by(settings).items():
        logger.info("%s %s.", f"{name}={named[name]}" if name in named else run, action)
    return Player(policy_from(found, model), settings["env_id"], dict(settings["env_kwargs"]))
