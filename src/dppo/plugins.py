"""Parts that the core uses by name only: entry points of the group `dppo.plugins`, most of them in `dppo.tools`.

The core imports nothing of `dppo.tools`, so that training can be read, tested and changed without it.
"""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from dppo.errors import DppoError

GROUP = "dppo.plugins"


@cache  # reading the metadata of all packages takes as long as a tenth of a tiny run
def plugin(name: str) -> Any:
    """Import and return the object that an entry point names; raise a DppoError if no installed package has it."""
    for entry in entry_points(group=GROUP, name=name):
        return entry.load()
    raise DppoError(
        f"no installed package adds the plug-in {name}. Install dppo again: python -m pip install dppo"
    )
