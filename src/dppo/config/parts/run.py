"""The settings of a run: its length, folder and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dppo.config.field import setting


@dataclass(frozen=True, kw_only=True)
class Run:
    """Length, folder and checkpoints of the run."""

    total_timesteps: int = setting(
        500_000, "Env steps to train for, summed over all environments; 1e6 is accepted.", resume="raised", gt=0
    )
    seed: int = setting(1, "Seed of every random number of the run.", ge=0)
    name: str = setting("ppo", "Name of the experiment, used in the name of the run's folder.", min_length=1)
    run_dir: Path | None = setting(None, "Folder of the run. Default: runs/ENV__NAME__sSEED__TIME.", resume="free")
    checkpoint_interval_s: float = setting(
        60.0,
        "Seconds between checkpoints; 0: one in each iteration. One is always written at the end.",
        resume="free",
        ge=0,
    )
    keep_checkpoints: int = setting(
        3, "Number of newest checkpoints to keep, besides the best one.", resume="free", gt=0
    )
    progress: Literal["auto", "live", "plain", "off"] = setting(
        "auto", "A live panel, plain lines or nothing; auto: the panel on a terminal, else lines.", resume="free"
    )
