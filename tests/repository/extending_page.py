# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The examples of docs/extending.md: read from the page and added as it says, in a folder outside the repository."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torchditan import registry

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extending.md"


class Example(NamedTuple):
    """One section of the page."""

    path: str
    """Of the file, from the repository's root."""
    code: str
    registry: str
    line: str
    """Of the registry."""
    command: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("data/", "torchditan/datasets/").replace("/", ".")

    @property
    def entries(self) -> dict[str, Any]:
        """The registry that the line is for."""
        return getattr(registry, self.registry)


def examples() -> dict[str, Example]:
    """Of each section that has a file, a line and a command: "objective", "optimizer", ..."""
    found = {}
    for section in re.split(r"^## An? ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        if title in ("image format", "architecture"):  # without an example
            continue
        if title == "published model":  # tests/extras/published/test_adding_a_family.py
            break
        (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        (path,) = re.findall(r"^# ([\w/]+\.py)$", code.partition("\n")[0])
        ((name, line),) = re.findall(r"^In `(\w+)`: `(.*)`\.", text, flags=re.MULTILINE)
        (command,) = re.findall(r"^```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        found[title] = Example(path, code, name, line, command)
    return found


def add(titles: Sequence[str], folder: Path) -> None:
    """Do what these sections of the page say, with the files in `folder` instead of the repository."""
    for title in titles:
        example = examples()[title]
        file = folder / example.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(example.code, encoding="utf-8")
        importlib.import_module(example.module.rpartition(".")[0]).__path__.append(str(file.parent))
        example.entries.update(ast.literal_eval(f"{{{example.line}}}"))


@contextmanager
def added(titles: Sequence[str], folder: Path) -> Iterator[None]:
    """Context manager that adds the examples of these sections, and removes them at the end."""
    found = [examples()[title] for title in titles]
    packages = [importlib.import_module(example.module.rpartition(".")[0]) for example in found]
    entries = [dict(example.entries) for example in found]
    paths = [list(package.__path__) for package in packages]
    add(titles, folder)
    try:
        yield
    finally:
        for example, package, before, path in zip(found, packages, entries, paths, strict=True):
            example.entries.clear()
            example.entries.update(before)
            package.__path__[:] = path
            sys.modules.pop(example.module, None)
            vars(package).pop(example.module.rpartition(".")[2], None)
