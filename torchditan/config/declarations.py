# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What an option declares at its field in options.py: what its value must be, and what it needs to have an effect.

    steps: Annotated[int, AtLeast(1)] = 1000
    keep_latest_k: Annotated[int, AtLeast(0), Idle(unless="checkpoint.enable_checkpoint")] = 2

The message for a wrong value, `--help` and docs/options.md are generated from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import PurePath
from typing import Any


class Rule:
    """What a value must be: `Rule("odd", lambda value: value % 2 == 1)`. The text follows "must be"."""

    def __init__(self, text: str, holds: Callable[[Any], bool]) -> None:
        self.text, self.holds = text, holds


class AtLeast(Rule):
    """A number from this one on."""

    def __init__(self, least: float) -> None:
        super().__init__(f"at least {least}", lambda value: value >= least)


class Above(Rule):
    """A greater number."""

    def __init__(self, limit: float) -> None:
        super().__init__(f"above {limit}", lambda value: value > limit)


class Below(Rule):
    """A smaller number."""

    def __init__(self, limit: float) -> None:
        super().__init__(f"below {limit}", lambda value: value < limit)


class Between(Rule):
    """A number between two, which are included."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__(f"between {low} and {high}", lambda value: low <= value <= high)


class Length(Rule):
    """The number of values in a list: `Length(1)` one or more, `Length(2, 3)` two or three."""

    def __init__(self, least: int, most: int | None = None) -> None:
        several = str(least) if most == least else f"{least} or {'more' if most is None else most}"
        super().__init__(f"{several} of them", lambda values: least <= len(values) <= (most or len(values)))


class OtherWords(dict[str, Any]):
    """What other values of an option of text mean: `OtherWords(true="always")`. A number is read as its digits."""


class Needs:
    """What an option needs to have an effect. Without it, a value other than the default is refused.

    Args:
        what: an option that must be set ("model.text") or have a value ("optimizer.name = Muon"), or words for `test`.
        test: whether a configuration has it. Default: as `what` says.
    """

    def __init__(self, what: str, test: Callable[[Any], bool] | None = None) -> None:
        self.what, self._test = what, test

    def is_missing(self, config: Any, *, device: str | None = None) -> bool:
        """Whether these settings lack it."""
        if self._test is not None:
            return not self._test(config)
        option, _, value = self.what.partition(" = ")
        found = attrgetter(option)(config)
        return str(found).lower() != value.lower() if value else not found


class Idle(Needs):
    """The same for an option that a job accepts without an effect, so that a file for GPUs also runs on a CPU.

    The first lines of the run list it. A grid refuses it as an axis.

    Args:
        unless: as `what` of `Needs`.
        test: as in `Needs`.
        on: the type of device that lacks it. Default: any.
    """

    def __init__(self, *, unless: str, test: Callable[[Any], bool] | None = None, on: str | None = None) -> None:
        super().__init__(unless, test)
        self._on = on

    def is_missing(self, config: Any, *, device: str | None = None) -> bool:
        return self._on in (None, device) and super().is_missing(config)


def is_inner_folder(name: str) -> bool:
    """Whether this is the name of a folder, or a path of folders, inside another folder."""
    parts = PurePath(name).parts
    return bool(parts) and not PurePath(name).is_absolute() and ".." not in parts and name.isprintable()


def is_plain_name(name: str) -> bool:
    """Whether every file system takes this as the name of one folder."""
    return is_inner_folder(name) and len(name.encode()) <= 200 and "/" not in name and "\\" not in name
