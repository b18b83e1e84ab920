"""Load YAML; refuse a text that would take much longer to load than to read, or has a key twice."""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from dppo.files import MAX_DEPTH

LONG_NUMBER = re.compile("[-+0-9:._]{1000,}")
OTHER_BASE = re.compile(r"[-+]?(0[0-7_]*[1-7][0-7_]+|[1-9][\d_]*(:[0-5]?\d)+(\.[\d_]*)?)")
"""Numbers of YAML 1.1 that readers take for decimal ones or times: 010 is 8, and 1:30 is 90."""
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load(text: str, *, aliases: bool) -> Any:
    """Return the data in a YAML text.

    Args:
        text: one document.
        aliases: False to refuse aliases, which may multiply.

    Raises:
        ValueError: the text is deeply nested, or has an alias, a very long number, or a key twice, or is not YAML; with
            the line.
        yaml.YAMLError: it has characters that YAML forbids.
    """
    try:
        _check(text, aliases)
        return yaml.load(text, LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1  # type: ignore[union-attr]
        raise ValueError(f"line {line}: {error.problem}") from None


@dataclass
class _Collection:
    """A mapping or sequence that has not ended."""

    is_mapping: bool
    keys: set[str] = field(default_factory=set)
    key_is_next: bool = True

    def repeats_key(self, value: str) -> bool:
        """Take up a node; return whether it is a key that the mapping already has."""
        if not self.is_mapping:
            return False
        is_key = self.key_is_next
        self.key_is_next = not is_key
        if not is_key:
            return False
        # "": a collection; "<<": a merge, one of several
        repeated = value in self.keys and value not in ("", "<<")
        self.keys.add(value)
        return repeated


def _check(text: str, aliases: bool) -> None:
    opened: list[_Collection] = []
    for event in yaml.parse(text, LOADER):
        problem = ""
        value = getattr(event, "value", "")
        if isinstance(event, yaml.NodeEvent) and opened and opened[-1].repeats_key(value):
            problem = f"{value} for the second time"
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append(_Collection(isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.CollectionEndEvent):
            opened.pop()
        elif isinstance(event, yaml.AliasEvent) and not aliases:
            problem = f"an alias, *{event.anchor}"
        if len(opened) > MAX_DEPTH or (_may_be_number(event) and LONG_NUMBER.fullmatch(value)):
            problem = f"more than {MAX_DEPTH} levels, or a very long number"
        elif _may_be_number(event) and OTHER_BASE.fullmatch(value):
            problem = (
                f"{value}, which is {yaml.load(value, LOADER)} in YAML: write that, or quote it"
            )
        if problem:
            line = event.start_mark.line + 1  # type: ignore[union-attr]
            raise ValueError(f"line {line} has {problem}")


def _may_be_number(event: Any) -> bool:
    # in quotes, or a block
    is_text = bool(getattr(event, "style", "")) and getattr(event, "tag", None) is None
    return not is_text
