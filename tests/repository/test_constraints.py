# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""constraints.txt holds one version of every dependency, within the ranges of pyproject.toml."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
LINES = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
CONSTRAINTS = {canonicalize_name(one.name): one for one in map(Requirement, LINES)}


def project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def direct_dependencies() -> list[Requirement]:
    """Of the package and of the extras that `dev` installs, on Python 3.11."""
    extras = project()["optional-dependencies"]
    dev = {extra for text in extras["dev"] for extra in Requirement(text).extras} | {"dev"}
    texts = [*project()["dependencies"], *(text for extra in sorted(dev) for text in extras[extra])]
    found = [one for one in map(Requirement, texts) if one.name != "torchditan"]
    return [one for one in found if one.marker is None or one.marker.evaluate({"python_version": "3.11"})]


@pytest.mark.parametrize("dependency", direct_dependencies(), ids=str)
def test_a_dependency_has_one_version_within_its_range(dependency: Requirement) -> None:
    constraint = CONSTRAINTS[canonicalize_name(dependency.name)]
    version = str(constraint.specifier).removeprefix("==")
    assert version in dependency.specifier


def test_a_constraint_names_a_public_version_and_no_place() -> None:
    for line in LINES:
        assert re.fullmatch(r'[\w.-]+==[\w.]+( ; python_version >= "3\.11")?', line), line
    names = [canonicalize_name(Requirement(line).name) for line in LINES]
    assert len(set(names)) == len(names)


@pytest.mark.skipif("TORCHDITAN_CONSTRAINED" not in os.environ, reason="only CI has to have these versions")
def test_ci_runs_with_the_constraints() -> None:
    for name, constraint in CONSTRAINTS.items():
        assert metadata.version(name).split("+")[0] in constraint.specifier, name
        if (needed := metadata.metadata(name)["Requires-Python"]) and constraint.marker is None:
            assert "3.10" in Requirement(f"python{needed}").specifier, f"{name} needs a marker: Python {needed}"
