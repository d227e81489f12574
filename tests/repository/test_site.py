# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The site of docs/ builds without a warning and refers to nothing on the network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

REPOSITORY = Path(__file__).resolve().parents[2]


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the repository in `folder`. A proxy that does not exist fails every access to the network."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module)
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(folder / "mkdocs.yml")]
    return subprocess.run(
        [*command, "--site-dir", str(site)],
        env={**os.environ, **dead, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(REPOSITORY, folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def pages(site: Path) -> dict[str, str]:
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_the_site_has_every_page_and_what_it_searches(site: Path) -> None:
    docs = REPOSITORY / "docs"
    expected = {path.relative_to(docs).with_suffix(".html").as_posix() for path in docs.rglob("*.md")}
    assert expected <= pages(site).keys()
    assert "learning rate" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


def test_pages_load_nothing_from_the_network(site: Path) -> None:
    loaded = r"<(?:script|img|iframe)[^>]* src=\"?(?:https?:)?//|<link[^>]* rel=\"?(?:stylesheet|preconnect)[^>]*//"
    assert [name for name, text in pages(site).items() if re.search(loaded, text)] == []
