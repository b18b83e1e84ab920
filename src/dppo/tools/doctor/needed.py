"""Settings that a run in an environment needs: to survive its faults, and to have each instance in its own process."""

from typing import Any

from dppo.config import Config
from dppo.config.parts.env import rate_above
from dppo.envs.repairs import FIRST_STEPS
from dppo.errors import counted
from dppo.tools.doctor.speed import Facts, env_step_s, recommended

FAILS_MOSTLY = 0.5  # faults in a step


def faults(facts: Facts, config: Config) -> tuple[dict[str, str] | None, str]:
    """Return the settings with which a run would survive the faults, if it does not already, and a text about them.

    The settings are None if none help.
    """
    if not facts.get("faults"):
        return {}, ""
    number = sum(facts["faults"].values())
    kinds = ", ".join(f"{times} x {kind}" for kind, times in facts["faults"].items())
    text = (
        f"{facts['first_fault'][0]}\nIt is the first of {counted(number, 'fault')} in {facts['steps']:,} steps "
        f"({kinds})"
    )
    if fails_mostly(number, facts["steps"] * facts.get("rows", 1)):
        return None, f"{text}: no run learns from so few valid steps. Correct the environment"
    per_step = min(1.0, number / facts["steps"] / facts.get("rows", 1))
    steps_per_s = recommended(facts, config).speed if "update_s" in facts else 1 / env_step_s(facts)
    per_hour = 3600 * per_step * steps_per_s
    if config.on_env_fault == "rebuild":
        ends_early = 0.0
    elif config.on_env_fault == "raise":
        ends_early = 1.0
    else:
        ends_early = 1 - (1 - per_step) ** FIRST_STEPS
    needed = dict[str, str]()
    if ends_early > 0.5:
        needed["on_env_fault"] = "rebuild"
    max_faults, within_s = config.env.fault_budget
    if per_hour > max_faults * 3600 / within_s:
        needed["env_faults"] = rate_above(per_hour)
    hourly = f"{per_hour:,.2f}" if per_hour < 10 else f"{per_hour:,.0f}"
    text += (
        f", about {hourly} an hour. Each costs {facts['lost'] / number:.3g} steps of an episode, and "
        f"{facts['make']['mean'] + facts['reset']['mean']:.2g} s to make the environment again. "
    )
    if not needed:
        return needed, f"{text}A run goes on after each."
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in needed.items())
    return needed, (
        f"{text}With on_env_fault={config.on_env_fault}, env_faults={config.env_faults}: {ends_early:.0%} of runs end "
        f"in their first {FIRST_STEPS} env steps, others later. With {flags}, a run goes on after each."
    )


def fails_mostly(faults: int, env_steps: int) -> bool:
    """Return whether there are so many faults in these steps that no run could learn between them."""
    return faults > FAILS_MOSTLY * env_steps


def in_processes_of_their_own(facts: Facts, config: Config) -> dict[str, Any]:
    """Return the settings with which each instance is in a process of its own, if that is needed."""
    if not facts.get("elsewhere"):
        return {}
    instances_per_sampler = 1 if "rows" in facts else config.envs_per_sampler
    instances = config.num_samplers * instances_per_sampler
    return {
        "num_samplers": instances,
        "num_actors": instances,
        "samplers_per_actor": 1,
        "envs_per_sampler": config.envs_per_sampler // instances_per_sampler,
        "standby_envs": 0,
        "backup_requests": False,
    }


def one_process_each(facts: Facts, config: Config) -> str:
    settings = in_processes_of_their_own(facts, config)
    names = ("samplers_per_actor", "num_actors", "num_samplers", "envs_per_sampler")
    return ", ".join(f"`{name}={settings[name]}`" for name in names)
