# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One version in every file, and workflows whose commands, files and versions exist."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import torchditan
from torchditan.commands import COMMANDS
from torchditan.config.loader import load_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml")

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_file_states_the_version_of_the_package() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "torchditan.__version__"}
    citation = read(REPOSITORY / "CITATION.cff")
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    version, date = re.findall(r"^## (\d\S*) \((\S+)\)", changelog, flags=re.MULTILINE)[0]
    assert (citation["version"], str(citation["date-released"])) == (version, date)
    assert version == torchditan.__version__


def test_every_file_names_the_same_repository_and_license() -> None:
    (repository,) = PROJECT["project"]["urls"].values()
    citation = read(REPOSITORY / "CITATION.cff")
    assert f"repo_url: {repository} " in (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    license = PROJECT["project"]["license"].removesuffix(" AND Bitstream-Vera")  # of a font in the wheel
    assert (citation["repository-code"], citation["license"]) == (repository, license)


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in read(workflow)["jobs"].values() for step in job["steps"]]


def commands(workflow: Path) -> list[list[str]]:
    """Words of each command of a workflow, with `${{ ... }}` replaced by X."""
    lines = [line for step in steps(workflow) if "run" in step for line in step["run"].splitlines()]
    return [shlex.split(re.sub(r"\$\{\{.*?\}\}", "X", line), comments=True) for line in lines]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_commands_of_a_workflow_name_what_exists(workflow: Path) -> None:
    made = {"dist/*", "dist/*.whl", "outputs/quickstart", "quickstart.safetensors"}  # by a step before
    extras = PROJECT["project"]["optional-dependencies"]
    for words in commands(workflow):
        for word in words[1:]:
            if extra := re.fullmatch(r"\.\[([\w,]+)\]", word):
                assert set(extra[1].split(",")) <= extras.keys(), words
            elif re.fullmatch(r"[\w./*-]*(?:/[\w.*-]+|\.(?:py|sh|toml|txt|md))", word) and word not in made:
                assert (REPOSITORY / word).exists(), words
        if words[0] == "torchditan" and not words[1].startswith("-"):
            assert words[1] in COMMANDS, words
        if words[:2] == ["torchditan", "train"]:
            load_config(["--job.config_file", *words[2:]])


def test_ci_runs_what_the_local_script_runs() -> None:
    run = [" ".join(words) for words in commands(REPOSITORY / ".github" / "workflows" / "ci.yml")]
    script = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    local = re.findall(r"^((?:ruff|mypy|pytest)[^|\n]*?)(?: \|\|.*)?$", script, flags=re.MULTILINE)
    assert len(local) >= 5
    assert [command for command in local if command not in run] == []
