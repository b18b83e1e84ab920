"""Find the remedies in the source: texts that tell the user to do something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from sources import trees

VERBS = (
    "Accept|Add|Ask|Avoid|Call|Change|Check|Choose|Clear|Continue|Convert|Copy|Correct|Create|Declare|Delete|Derive|"
    "Drop|Free|Give|Import|Increase|Install|Keep|Leave|Let|Look|Lower|Make|Move|Name|Omit|Open|Pad|Pass|Prefer|Raise|"
    "Read|Record|Reduce|Remove|Rename|Replace|Repeat|Report|Restart|Restore|Resume|Return|Reward|Run|Save|Set|Shorten|"
    "Start|Stop|Subtract|Switch|Train|Try|Turn|Unset|Upgrade|Use|Wait|Wrap|Write"
)
LATER = (
    "use|set|raise|lower|leave|pass|add|install|unset|call|wrap|give|make|turn|name|train|resume|"
    "choose|restart|free"
)
BEGINNING = re.compile(rf"(?:^|[.:;)}}] )(?:{VERBS})\b")
WITHIN = re.compile(
    rf"(?:[,;:] |\bor |^)(?!train (?:--|ENV_ID))(?:{LATER}) (?!to\b)|start a new run|start the run again|pip install"
)
OTHERS = re.compile(
    "Did you mean|See |please report|Better, |: dppo |\\buse `|begin again|or widen"
)
"""Further words that tell the user to do something."""
HELP = {
    "DESCRIPTION",
    "USAGE",
    "FLAGS",
    "OPTIONS",
    "COMMANDS",
    "SOURCES",
    "RENDER",
    "TRUST",
    "EXTRA",
    "LIST",
    "MEANT",
}
"""Names of constants that hold help texts, which describe commands and flags."""


@dataclass(frozen=True)
class Text:
    """A text of the source that names a remedy."""

    file: str
    """Below src/dppo."""
    text: str
    """In one line, with {} for each value that is filled in."""


@cache
def remedies() -> tuple[Text, ...]:
    """Return all remedies of the source."""
    texts: dict[Text, None] = {}
    for path, tree in trees().items():
        for text in _texts(tree):
            if is_remedy(text):
                texts[Text(path, text)] = None
    return tuple(texts)


def is_remedy(text: str) -> bool:
    """Return whether a text tells the user to do something."""
    if " " not in text:
        return False
    return any(pattern.search(text) for pattern in (BEGINNING, WITHIN, OTHERS))


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yield each text of a module, but for docstrings and help texts."""
    nodes = list(ast.walk(tree))
    skipped = set[int]()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
        elif (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and _names(node) & HELP
            and node.value is not None
        ):
            skipped.update(map(id, ast.walk(node.value)))
    for node in nodes:
        if isinstance(node, ast.JoinedStr) and id(node) not in skipped:
            parts = (
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
            yield _in_a_line("".join(parts))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield _in_a_line(re.sub(r"\{[^{} ]*[a-z][^{} ]*\}", "{}", node.value))


def _names(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _in_a_line(text: str) -> str:
    return " ".join(text.split())
