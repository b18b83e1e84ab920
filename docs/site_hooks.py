"""Hooks of mkdocs.yml: pages from outside docs/ (README, examples, ...), their links, and the table of settings."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {  # of the repository -> of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples/index.md",
    **{
        f"examples/{file.name}": f"examples/{file.stem}.md"
        for kind in ("py", "sh", "yaml")
        for file in sorted((ROOT / "examples").glob(f"*.{kind}"))
    },
}
ORIGINS = {page: origin for origin, page in PAGES.items()}
SETTINGS = "<!-- settings -->"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for origin, page in PAGES.items():
        files.append(File.generated(config, page, content=_as_markdown(ROOT / origin)))
    for file in files:
        if file.src_uri.startswith("examples/") and file.src_uri != "examples/index.md":
            file.inclusion = file.inclusion.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to the pages of the site, and fill in the settings."""
    origin = posixpath.dirname(ORIGINS.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    here = posixpath.dirname(page.file.src_uri)

    def on_the_site(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(origin, target))
        uri = PAGES.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(uri, here or '.')}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", on_the_site, markdown).replace(SETTINGS, _settings())


def _as_markdown(file: Path) -> str:
    text = file.read_text(encoding="utf8")
    if file.suffix == ".md":
        return text
    language = file.suffix.removeprefix(".")  # py, sh, yaml
    return f"# {file.name}\n\n```{language}\n{text}```\n"


def _settings() -> str:
    """Return every setting with its default and help, a table for each part."""
    sys.path.insert(0, os.fspath(ROOT / "src"))
    from dppo.config.parts import PARTS, default_of, help_by_name, settings_by_name

    tables = []
    texts = {name: text.replace("|", "&#124;") for name, text in help_by_name().items()}
    for name, part in PARTS.items():
        own = [setting for setting in settings_by_name() if setting in part.__dataclass_fields__]  # type: ignore[attr-defined]
        rows = [f"| `{one}` | {_default(default_of(one))} | {texts[one]} |" for one in own]
        tables.append("\n".join([f"#### {name}", "", "| setting | default | |", "|---|---|---|", *rows]))
    return "\n\n".join(tables)


def _default(value: Any) -> str:
    return "required" if repr(value).startswith("<dataclasses") else f"`{value!r}`"
