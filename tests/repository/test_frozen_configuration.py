# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Configurations are frozen: nothing assigns to an option, and changing one is an error."""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchditan.config.options import Config, flatten

REPOSITORY = Path(__file__).resolve().parents[2]
SECTIONS = typing.get_type_hints(Config)
CLASSES = {"Config", *(section.__name__ for section in SECTIONS.values())}
NAMES = {*SECTIONS, *(option.split(".")[1] for option in flatten(Config()))}
FILES = [
    *(file for folder in ("torchditan", "data", "scripts") for file in sorted((REPOSITORY / folder).rglob("*.py"))),
    REPOSITORY / "train.py",
]
MUTATIONS = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort", "update"}


def test_nothing_assigns_to_an_option() -> None:
    found = {str(file.relative_to(REPOSITORY)): assignments_to_options(file.read_text("utf-8")) for file in FILES}
    assert {file: statements for file, statements in found.items() if statements} == {}
    assert len(found) > 150


@pytest.mark.parametrize(
    "code",
    [
        "job.config.training.steps = 2",
        "config.training.steps += 1",
        "config.model.flavor, found = 'DiT-S', 1",
        "config.training = training",
        "del config.training",
        "training = config.training\ntraining.steps = 2",
        "steps, training = 2, self.config.training\ntraining.steps = steps",
        "def complete(training: Training) -> None:\n    training.steps = 2",
        "def complete(section: AutoencoderConfig) -> None:\n    section.name = 'haar'",
        "def complete(section: options.Autoencoder | None) -> None:\n    section.name = 'haar'",
        "setattr(getattr(config, section), key, value)",
        "setattr(config.training, 'steps', 2)",
        "object.__setattr__(config.training, 'steps', 2)",
        "vars(config.autoencoder).update(name='haar')",
        "config.dataset.image_size[0] = 32",
        "config.sampling.prompts.append('a dog')",
        "for config.training.steps in (1, 2): pass",
    ],
)
def test_the_check_finds_each_way_to_change_an_option(code: str) -> None:
    imports = "from torchditan.config import options\n"
    imports += "from torchditan.config.options import Autoencoder as AutoencoderConfig, Training\n"
    assert len(assignments_to_options(imports + code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "self.training = config.training",
        "autoencoder = open_autoencoder(config.autoencoder)\nautoencoder.name = config.autoencoder.name",
        "def first(config):\n    model = config.model\ndef second(model):\n    model.path = None",
        "changed = config.replace({'training.steps': 2})",
        "size = config.dataset.image_size\nsize = [size[0], size[0]]",
    ],
)
def test_the_check_accepts_what_changes_no_option(code: str) -> None:
    assert assignments_to_options(code) == []


@pytest.mark.parametrize("name", ["", *SECTIONS])
def test_a_configuration_and_its_sections_are_frozen(name: str) -> None:
    frozen = getattr(Config(), name) if name else Config()
    for field in dataclasses.fields(frozen):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field.name, None)


def test_replace_and_fill_in_return_a_changed_copy() -> None:
    config = Config()
    changed = config.replace({"training.steps": 2, "training.seed": 3, "model.text_width": 64})
    assert (changed.training.steps, changed.training.seed, changed.model.text_width) == (2, 3, 64)
    assert flatten(config) == flatten(Config())
    filled = changed.fill_in({"model.text_width": 32, "model.text_tokens": 7})
    assert (filled.model.text_width, filled.model.text_tokens) == (64, 7), "only what is left open"
    for unknown in ("training.stepz", "trainin.steps", "training"):
        with pytest.raises((AttributeError, TypeError)):
            config.replace({unknown: 2})


def assignments_to_options(source: str) -> list[str]:
    """The statements that change a configuration or one of its sections, by the names and annotations in the code."""
    tree = ast.parse(source)
    classes = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torchditan.config.options"
        for alias in node.names
        if alias.name in CLASSES
    }
    found = []
    for scope in _scopes(tree):
        nodes = [node for statement in scope for node in ast.walk(statement)]
        names = _names_of_sections(nodes, classes)
        found += [ast.unparse(node) for node in nodes if _changes_an_option(node, names)]
    return found


def _scopes(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Each function and method with the functions inside it; and what is outside of all."""
    functions, outside = [], []
    for statement in tree.body:
        members = statement.body if isinstance(statement, ast.ClassDef) else [statement]
        for member in members:
            (functions if isinstance(member, ast.FunctionDef) else outside).append(member)
    yield from ([function] for function in functions)
    yield outside


def _names_of_sections(nodes: list[ast.AST], classes: set[str]) -> set[str]:
    """Variables that hold a section or a configuration: annotated as one, or assigned from `config.training`."""
    names = {"config"}
    for node in nodes:
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            if any(_is_config_class(part, classes) for part in ast.walk(node.annotation)):
                names.add(name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names |= {name for name, value in _pairs(target, node.value) if _is_section(value, set())}
    return names


def _is_config_class(node: ast.AST, classes: set[str]) -> bool:
    """`Training` where the file imports it from the options, or `options.Training`."""
    if isinstance(node, ast.Attribute):
        return node.attr in CLASSES and ast.unparse(node.value).split(".")[-1] == "options"
    return isinstance(node, ast.Name) and node.id in classes


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
    """(name, value) of `a = value` and of `a, b = one, two`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return [pair for one, other in zip(target.elts, value.elts, strict=False) for pair in _pairs(one, other)]
    return [(target.id, value)] if isinstance(target, ast.Name) else []


def _is_section(node: ast.expr, names: set[str]) -> bool:
    """`training` if the name holds a section, `config.training`, `job.config`, `getattr(config, section)`."""
    if isinstance(node, ast.Name):
        return node.id in names
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("getattr", "vars") and _is_section(node.args[0], {*names, "config"})
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr == "config" or (node.attr in SECTIONS and _is_section(node.value, {"config"}))


def _is_option(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in NAMES and _is_section(node.value, names)


def _changes_an_option(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        changed = node.value if isinstance(node, ast.Subscript) else node
        return _is_option(changed, names)
    if not isinstance(node, ast.Call):
        return False
    if ast.unparse(node.func) in ("setattr", "object.__setattr__"):
        return _is_section(node.args[0], names)
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in MUTATIONS:
        return False
    changed = node.func.value
    return _is_option(changed, names) or (isinstance(changed, ast.Call) and _is_section(changed, names))
