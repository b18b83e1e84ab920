"""The site that MkDocs builds, in a browser, from a folder: its pages, signatures and search."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parents[1]
PROSE = "[...document.querySelectorAll('article p, article li, article td, article h1, article h2, article h3')]"
MARKUP = f"{PROSE}.map(e => e.innerText).filter(t => /:::|```|\\]\\(|<!--|(^|\\s)\\*\\*(?!kwargs|settings)\\w/.test(t))"
SIGNATURES = "[...document.querySelectorAll('.doc-signature')].map(e => e.innerText)"


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None or find_spec("mkdocstrings") is None,
    reason="needs Chromium and the extra `docs`",
)
def test_every_page_is_whole_and_the_search_works_without_a_server(tmp_path: Path) -> None:
    site = tmp_path / "site"
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    subprocess.run(
        [sys.executable, *words, str(site)], cwd=ROOT, env=quiet, check=True, timeout=120
    )
    with Browser(tmp_path / "profile") as browser:
        for page in sorted(site.rglob("*.html")):
            if page.name == "404.html":  # a server's: its paths begin at the root
                continue
            browser.open(page)
            assert browser.complaints() == [], page.name
            assert browser.evaluate(MARKUP) == [], page.name
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.name
            assert browser.evaluate("[...document.images].every(image => image.naturalWidth)"), (
                page.name
            )
            assert [
                url for url in browser.requests() if not url.startswith(("file:", "data:", "blob:"))
            ] == []
        browser.open(site / "API.html")
        signatures = [" ".join(text.split()) for text in browser.evaluate(SIGNATURES)]
        assert any(
            text.startswith("train( config: Config, *, resume: Result | str | Path | None = None,")
            for text in signatures
        )
        assert not [text for text in signatures if "field(" in text]
        browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
        browser.call("Input.insertText", text="standby_envs")
        deadline = time.monotonic() + 30
        results = ""
        while "matching document" not in results and time.monotonic() < deadline:
            time.sleep(0.1)
            results = browser.evaluate("document.querySelector('.md-search-result').innerText")
    assert "Maximum number of environments that exist at once" in results
