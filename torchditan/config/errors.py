# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""User errors: one line with the option, its value and a correct value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A user error, in one line that includes how to fix it. `train.py` exits with code 2."""

    is_of_this_rank = False
    """True if a rank found it before the ranks were connected, so that no other rank can report it."""


def option_error(option: str, value: Any, right: str) -> ConfigError:
    """The format of every user error: `training.steps = 0: must be at least 1`."""
    shown = "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return ConfigError(f"{option} = {shown}: {right}")


def some(names: Iterable[str], *, most: int = 3) -> str:
    """`a, b, c and 4 more`: the first of these names."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most similar to `name`, ignoring case, or None if none is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`; did you mean DiT-XL?`, or an empty string if no choice is similar."""
    found = nearest(name, choices)
    return f"; did you mean {found}?" if found else ""
