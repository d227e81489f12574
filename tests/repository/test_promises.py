# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""docs/promises.md names a test for each promise; each test exists, in the tier that the page states."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "promises.md"
ROW = re.compile(r"\| (?P<promise>.+) \| \[.+\]\((?P<page>\S+)\) \| `(?P<test>\S+)` \| (?P<tier>.+) \|")


def rows(text: str) -> list[dict[str, str]]:
    return [match.groupdict() for match in ROW.finditer(text)]


@functools.cache
def syntax_of(file: str) -> ast.Module:
    return ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))


def tier_of(test: str) -> str:
    """fast, slow, gpu, or "fast + slow" where some parameters are slow; KeyError for a test that does not exist."""
    file, name = test.split("::")
    body = syntax_of(file).body
    function = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}[name]
    whole = [ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and is_mark(node)]
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    for tier in ("gpu", "slow"):
        if f"pytest.mark.{tier}" in [*whole, *decorators]:
            return tier
    lists = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in body if isinstance(node, ast.Assign)}
    parameters = " ".join(lists.get(word, word) for text in decorators for word in [text, *re.findall(r"\w+", text)])
    return "fast + slow" if "pytest.mark.slow" in parameters else "fast"


def is_mark(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) == "pytestmark"


def test_every_test_of_the_page_exists_in_its_tier() -> None:
    table = rows(PAGE.read_text(encoding="utf-8"))
    assert len(table) > 100
    found = {row["test"]: tier_of(row["test"]) for row in table}
    assert {row["test"]: row["tier"] for row in table} == found


def test_the_first_nine_promises_have_a_fast_test() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## ")[1]
    assert section.startswith("The first nine\n")
    assert len(rows(section)) == 9
    assert [row["promise"] for row in rows(section) if not row["tier"].startswith("fast")] == []


def test_every_page_that_promises_has_a_row() -> None:
    named = {row["page"].removesuffix(".md") for row in rows(PAGE.read_text(encoding="utf-8"))}
    assert named >= {"../README", "reliability", "parallelism", "configuration", "data", "finetune", "text_to_image"}
    assert named >= {"ablations", "planner", "benchmark", "compatibility", "extending", "adding_a_model"}


def test_a_slow_test_and_a_missing_one_are_told_apart() -> None:
    assert tier_of("tests/faults/test_chaos.py::test_killed_runs_end_as_if_never_stopped") == "slow"
    assert tier_of("tests/finetune/test_whole_path.py::test_train_save_resume_generate_export_import_continue") == (
        "fast + slow"
    )
    assert tier_of("tests/trainer/test_gpu.py::test_a_run_on_a_gpu_resumes_to_the_bit") == "gpu"
    with pytest.raises(KeyError):
        tier_of("tests/faults/test_chaos.py::test_that_is_not_there")
