# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Files, options, keys and exit codes in the documentation exist in the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from torchditan.config.legacy_keys import LEGACY_KEYS, RENAMED_KEYS
from torchditan.config.loader import load_config
from torchditan.config.schema import options

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = sorted((REPOSITORY / "results").glob("*.md"))  # history: it keeps the names of its day
PAGES = [path for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")) if path.exists()]
SECTIONS = {option.split(".")[0] for option in options()}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Addresses of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^):#]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    missing = [
        f"{file}#{anchor}" for file, anchor in links if anchor not in anchors(page.parent / file if file else page)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"--([a-z_0-9]+\.[a-z_0-9]+)", text))
    named |= {name for name in re.findall(r"`([a-z_0-9]+\.[a-z_0-9]+)[` ]", text) if name.split(".")[0] in SECTIONS}
    named = {name for name in named if name.split(".")[0] not in ("axes", "settings", "slurm")}  # of the grid runner
    files = {name for name in named if name.endswith((".json", ".jsonl", ".py", ".safetensors", ".toml"))}
    assert named - files - options().keys() - LEGACY_KEYS.keys() - RENAMED_KEYS.keys() - {"sampling.key"} == set()


def training_commands(page: Path) -> list[list[str]]:
    """The arguments of each training command in the code of a page that can be typed as it is."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = []
    for line in [*text.splitlines(), *re.findall(r"\| `([^`]+)` \|", text)]:  # code of a cell, too
        start = r"\s*(?:[A-Z_]+=|python |torchrun |pip |torchditan )"
        command = re.match(start + r"(?:[^`]*(?:train\.py|launch\.sh|torchditan train) |train )([^`]+)$", line)
        if command and "..." not in line:
            flags = [flag for flag in shlex.split(command[1], comments=True) if flag != "--preview"]
            commands.append(flags if flags[0].startswith("-") else ["--job.config_file", *flags])
    missing = ("--help", "my_finetune.toml", "continue.toml", "my_lab.midpoint:Midpoint")  # files that the reader makes
    return [flags for flags in commands if not any(flag.endswith(missing) for flag in flags)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_training_commands_are_accepted(page: Path) -> None:
    """As far as the options alone say: data and devices are not opened.

    The examples of extending.md add names of their own first: test_extending.py.
    """
    commands = training_commands(page) if page.name != "extending.md" else []
    assert len(commands) > 5 or page.name != "README.md"
    for flags in commands:
        load_config(flags)


def test_the_tests_that_pages_name_exist() -> None:
    pages = [*PAGES, REPOSITORY / "CONTRIBUTING.md"]
    named = {name for page in pages for name in re.findall(r"tests/[\w/]+\.py", page.read_text(encoding="utf-8"))}
    assert named
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []
