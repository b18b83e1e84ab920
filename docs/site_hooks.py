"""Hooks of mkdocs.yml: pages from outside docs/ (README, examples, results, ...), and their links."""

from __future__ import annotations

import posixpath
import re
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
        f"benchmarks/results/{file.name}": f"results/{file.name}"
        for file in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    },
    **{
        f"examples/{file.name}": f"examples/{file.stem}.md"
        for kind in ("py", "sh", "yaml")
        for file in sorted((ROOT / "examples").glob(f"*.{kind}"))
    },
}
ORIGINS = {page: origin for origin, page in PAGES.items()}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for origin, page in PAGES.items():
        files.append(File.generated(config, page, content=_as_markdown(ROOT / origin)))
    for file in files:
        if (
            file.src_uri.startswith(("examples/", "results/"))
            and file.src_uri != "examples/index.md"
        ):
            file.inclusion = file.inclusion.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to the pages of the site."""
    origin = posixpath.dirname(ORIGINS.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    here = posixpath.dirname(page.file.src_uri)

    def on_the_site(link: re.Match[str]) -> str:
        target = link[1]
        anchor = link[2] or ""
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(origin, target))
        uri = PAGES.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(uri, here or '.')}{anchor})"

    return re.sub(r"\]\(([^)#\s]+)(#[^)\s]*)?\)", on_the_site, markdown)


def _as_markdown(file: Path) -> str:
    text = file.read_text(encoding="utf8")
    if file.suffix == ".md":
        return text
    language = file.suffix.removeprefix(".")  # py, sh, yaml
    return f"# {file.name}\n\n```{language}\n{text}```\n"
