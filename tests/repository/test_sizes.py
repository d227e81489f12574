# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""No long functions and no long files, except those listed here with the reason."""

from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 500

LONG_FILES = {
    "torchditan/config/options.py": "a table: every option with its help",
    "torchditan/models/dit.py": "the model reads top to bottom in one file",
}
LONG_FUNCTIONS: dict[str, str] = {}


def files() -> list[Path]:
    folders = ("torchditan", "data", "scripts")
    found = [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    return [REPOSITORY / "train.py", *found]


def name_of(file: Path) -> str:
    return file.relative_to(REPOSITORY).as_posix()


def lines_of_functions(file: Path) -> dict[str, int]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {f"{name_of(file)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1 for node in functions}


def test_no_function_is_long() -> None:
    sizes = {name: size for file in files() for name, size in lines_of_functions(file).items()}
    long = {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES and name not in LONG_FUNCTIONS}
    assert long == {}


def test_no_file_is_long() -> None:
    sizes = {name_of(file): len(file.read_text(encoding="utf-8").splitlines()) for file in files()}
    long = {name: size for name, size in sizes.items() if size > MAX_FILE_LINES and name not in LONG_FILES}
    assert long == {}
