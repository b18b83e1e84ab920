"""Place: the step of a sampler in which a process was lost."""

from typing import NamedTuple

from dppo.envs.activity import Activity, Phase
from dppo.ppo.exchange.records import FatalStep


class Place(NamedTuple):
    """A step of a sampler in which a process was lost."""

    sampler_id: int
    step: FatalStep

    def __str__(self) -> str:
        env, episode, step = self.step
        phase = f"step {step}" if step else "the reset"
        return f"{phase} of episode {episode} of env {env} of sampler {self.sampler_id}"


def place_in(activity: Activity | None) -> Place | None:
    """Return the step or reset that a process was in; None if it did something else, or if that is not known."""
    if activity is None or activity.phase not in (Phase.STEP, Phase.RESET):
        return None
    step = activity.length + 1 if activity.phase is Phase.STEP else 0
    return Place(activity.sampler_id, FatalStep(activity.env, activity.episode, step))
