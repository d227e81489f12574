# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A user's mistake: one line that names the option, its value and what would be right."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """The user's mistake, in one line that says what would be right. `train.py` exits with code 2."""

    is_of_this_rank = False
    """Whether one rank alone found it, before the ranks knew each other, so that only it can say it."""


def option_error(option: str, value: Any, right: str) -> ConfigError:
    """The one form of a refusal: `training.steps = 0: must be at least 1`."""
    shown = "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    return ConfigError(f"{option} = {shown}: {right}")


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most like `name`, whatever its case, or None where none is alike."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`; did you mean DiT-XL?`, or nothing where no choice is alike."""
    found = nearest(name, choices)
    return f"; did you mean {found}?" if found else ""
