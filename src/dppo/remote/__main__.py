"""Print the folder of dppo.h and dppo_module.f90."""

from pathlib import Path

print(Path(__file__).parent)
