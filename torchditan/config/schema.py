# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The options that options.py declares, by name: their types, rules and help texts, and the conversion of values.

TOML values and flags share one conversion, so that both give the same error message. This file must not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torchditan.config import options as config_module
from torchditan.config.declarations import Idle, Needs, OtherWords, Rule
from torchditan.config.options import Config
from torchditan.errors import ConfigError, did_you_mean, is_finite_number, nearest, option_error
from torchditan.registry import Registries, Registry, entry_name

_EXAMPLES = {int: "32, or [32, 48]", float: "[0.3, 1.0]", str: '["one", "another"]'}
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_LISTS = {int: "integers", float: "numbers", str: "texts"}


@dataclass(frozen=True)
class Option:
    """One option, as its dataclass field declares it."""

    kind: type
    """bool, int, float or str; the element type of a list."""
    name: str = ""
    default: Any = None
    description: str = ""
    """The text under the field."""
    is_list: bool = False
    optional: bool = False
    choices: Collection[str] = ()
    """The allowed values of a str; for an int, words that are allowed instead of a number (`auto`). A `Registry`
    also takes `module:name` and options after the name."""
    element_rules: tuple[Rule, ...] = ()
    rules: tuple[Rule, ...] = ()
    needs: tuple[Needs, ...] = ()
    other_words: OtherWords | None = None

    @property
    def takes_plug_ins(self) -> bool:
        """Whether the value may be `module:name`, a part of the user's."""
        return isinstance(self.choices, (Registry, Registries))

    @property
    def limits(self) -> str:
        """What the rules say: "at least 0, below 1". Empty without rules."""
        of_elements = [f"each {rule.text}" for rule in self.element_rules]
        return ", ".join([*of_elements, *(rule.text for rule in self.rules)])

    @property
    def value(self) -> str:
        """What the value is: "an integer, at least 1, or auto"."""
        words = ", ".join(self.choices)
        if self.takes_plug_ins:
            words += ", or module:name" if words else "module:name"
        limits = f", {self.limits}" if self.limits else ""
        if words and self.kind is not int:
            return f"{'one of ' if ', ' in words else ''}{words}{limits}"
        if self.is_list:
            return f"{_LISTS[self.kind]}{limits}: {_EXAMPLES[self.kind]}"
        return f"{_KINDS[self.kind]}{limits}{f', or {words}' if words else ''}"

    @property
    def expected(self) -> str:
        """What the value must be, for a message."""
        return f"must be {self.value}"

    @property
    def shown_default(self) -> str:
        """The default without quotes; empty for an option that is left open."""
        if self.default in (None, "", []):
            return ""
        return self.default if isinstance(self.default, str) else json.dumps(self.default)

    @property
    def help(self) -> str:
        """The text under the field, and what its declaration says about other options."""
        effects = [
            f"{'No effect without' if isinstance(need, Idle) else 'Needs'} {need.what}."
            for need in self.needs
            if need.what not in self.description
        ]
        return " ".join([self.description, *effects])

    def convert(self, value: Any) -> Any:
        """The value of this option for `value`, from TOML or from a flag. Raises ConfigError for another type."""
        if self.optional and (value is None or (isinstance(value, str) and value.lower() == "none")):
            return None
        elements = value if self.is_list and isinstance(value, list) else [value]
        found = [self._convert_one(element, value) for element in elements]
        return found if self.is_list else found[0]

    def _convert_one(self, element: Any, value: Any) -> Any:
        # In Python bool is a subclass of int, but `steps = true` is an error.
        if self.kind is float and type(element) in (int, float):
            if not is_finite_number(element):
                raise option_error(self.name, value, "must be a finite number")
            return float(element)
        if self.other_words is not None:
            element = self.other_words.get(str(element).lower(), str(element))
        if self.kind is int and isinstance(element, str) and element in self.choices:
            return element
        if type(element) is not self.kind:
            raise option_error(self.name, value, self.expected)
        if isinstance(self.choices, (Registry, Registries)):
            name = entry_name(str(element))
            is_known = self.choices.place(name) is not None  # it is imported when the job is checked
        else:
            name = str(element)
            is_known = not self.choices or self.kind is int or name in self.choices
        if not is_known:
            names = self.choices.names() if isinstance(self.choices, (Registry, Registries)) else self.choices
            raise option_error(self.name, value, self.expected + did_you_mean(name, names))
        return element

    def allows(self, value: Any) -> bool:
        """Whether a converted value follows the rules. None and words in place of a number do."""
        if value is None or (self.kind is int and value in self.choices):
            return True
        of_elements = all(rule.holds(element) for rule in self.element_rules for element in value)
        return of_elements and all(rule.holds(value) for rule in self.rules)

    def parse(self, text: str) -> Any:
        """One value from text, as TOML reads it. Text that is not a value stays text, which `convert` refuses."""
        if self.kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        try:
            return self.kind(text)
        except ValueError:
            return text


@functools.cache
def options() -> dict[str, Option]:
    """All options by full name, in the order of options.py."""
    texts = _field_texts()
    found = {}
    for section in dataclasses.fields(Config):
        section_type, *of_section = _unwrap(section.type)
        defaults = section_type()
        for field in dataclasses.fields(section_type):
            hint = _read(field.type)
            name = f"{section.name}.{field.name}"
            found[name] = dataclasses.replace(
                hint,
                name=name,
                default=getattr(defaults, field.name),
                description=texts[section_type.__name__, field.name],
                needs=(*of_section, *hint.needs),
            )
    return found


def convert_all(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert each value to the type of its option. Raises ConfigError for an unknown option or a wrong value."""
    converted = {}
    for name, value in values.items():
        if name not in options():
            raise unknown_option(name)
        converted[name] = options()[name].convert(value)
    return converted


def check_declared(found: Any, option: str, text: str, values: Mapping[str, Any]) -> None:
    """Check the options after the name of a registry's entry by what its parameters declare, as a field of options.py.

    Args:
        found: the entry. Parameters of a number, true or false, `Literal` or `Annotated` type are checked.
        values: of its options by name.

    Raises:
        ConfigError: a value has another type, or breaks a rule.
    """
    try:
        function = found.__init__ if isinstance(found, type) else found  # type: ignore[misc]
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError:  # a plug-in imports a type for type checkers only
        return
    for name, value in values.items():
        hint = hints.get(name)
        if hint not in (bool, int, float) and typing.get_origin(hint) not in (Annotated, Literal):
            continue
        declared = _read(hint)
        try:
            is_right = declared.allows(declared.convert(value))
        except ConfigError:
            is_right = False
        if not is_right:
            raise option_error(option, text, f"{name} {declared.expected}")


def unknown_option(name: str) -> ConfigError:
    """The error with the nearest option: the same key elsewhere, a similar key here, a similar key elsewhere."""
    if name in vars(Config()):
        return ConfigError(f"{name} must be a section, [{name}], with a line for each of its options")
    section, _, key = name.replace("-", "_").rpartition(".")
    by_key = {option.split(".")[1]: option for option in reversed(options())}
    here = {option.split(".")[1]: option for option in options() if option.split(".")[0] == section}
    same_key = [option for option in options() if option.split(".")[1] == key.lower()]
    found = nearest(f"{section}.{key}", same_key, cutoff=0.0) or here.get(nearest(key, here) or "")
    if found := found or by_key.get(nearest(key, by_key) or ""):
        return ConfigError(f"{name} is not an option; did you mean {found}?")
    sections = f"the sections are {', '.join(vars(Config()))}"
    return ConfigError(f"{name} is not an option; {f'[{section}] has ' + ', '.join(here) if here else sections}")


def _unwrap(hint: Any) -> tuple[Any, ...]:
    """(the type, what is declared with it)."""
    return typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)


def _read(hint: Any) -> Option:
    """What an annotation says, without a name."""
    hint, *declared = _unwrap(hint)
    found = Option(hint)
    parts = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        first, *words = (part for part in parts if part is not type(None))
        found = dataclasses.replace(_read(first), optional=type(None) in parts)
        if words:  # a number or one of these words
            found = dataclasses.replace(found, choices=typing.get_args(words[0]))
    elif typing.get_origin(hint) is Literal:
        found = Option(str, choices=parts)
    elif typing.get_origin(hint) is list:
        element = _read(parts[0])
        found = Option(element.kind, is_list=True, choices=element.choices, element_rules=element.rules)
    registry = [each for each in declared if isinstance(each, (Registry, Registries))]
    return dataclasses.replace(
        found,
        choices=registry[0] if registry else found.choices,
        rules=tuple(each for each in declared if isinstance(each, Rule)),
        needs=tuple(each for each in declared if isinstance(each, Needs)),
        other_words=next((each for each in declared if isinstance(each, OtherWords)), None),
    )


def _field_texts() -> dict[tuple[str, str], str]:
    """The string under each field of options.py, which Python does not keep. A search is faster than `ast.parse`."""
    texts, section = {}, ""
    for name, field, text in _CLASS_OR_FIELD.findall(inspect.getsource(config_module)):
        section = name or section
        texts[section, field] = inspect.cleandoc(text)
    return texts


_CLASS_OR_FIELD = re.compile(r'^class (\w+)|^ {4}(\w+): .*(?:\n(?! {4}["\w]).*)*\n {4}"""([\s\S]*?)"""', re.MULTILINE)
"""A class, or a field of any number of lines and the string under it."""
