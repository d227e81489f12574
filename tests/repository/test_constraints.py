# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""constraints.txt holds one version of every dependency, within the ranges of pyproject.toml."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

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


def requirements(texts: list[str]) -> list[Requirement]:
    """Those of Python 3.11, with our extras in place of their names."""
    extras, found = project()["optional-dependencies"], []
    for one in map(Requirement, texts):
        if one.name == "torchditan":
            found += requirements([text for extra in sorted(one.extras) for text in extras[extra]])
        elif one.marker is None or one.marker.evaluate({"python_version": "3.11"}):
            found.append(one)
    return found


def test_a_dependency_has_one_version_within_its_range() -> None:
    for dependency in requirements([*project()["dependencies"], "torchditan[nightly]"]):
        constraint = CONSTRAINTS[canonicalize_name(dependency.name)]
        assert str(constraint.specifier).removeprefix("==") in dependency.specifier, dependency


def test_a_constraint_names_a_public_version_and_no_place() -> None:
    for line in LINES:
        assert re.fullmatch(r'[\w.-]+==[\w.]+( ; python_version >= "3\.11")?', line), line
    names = [canonicalize_name(Requirement(line).name) for line in LINES]
    assert len(set(names)) == len(names)
