# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""How reports write and order axes, values and numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torchditan.errors import some
from torchditan.extras.ablation.grid import (
    BATCH_SIZE,
    CHECKPOINT_FRACTION,
    CHECKPOINTING,
    COMPILE,
    FLAVOR,
    PARALLEL,
    PATCH_SIZE,
    PRECISION,
    parallel_degrees,
)
from torchditan.extras.evaluation.card_tables import rounded

T = TypeVar("T")

MINUS = "\N{MINUS SIGN}"
UNKNOWN = "not measured"
_AXES = {
    COMPILE: "torch.compile",
    CHECKPOINTING: "activation checkpointing",
    CHECKPOINT_FRACTION: "share of blocks checkpointed",
    PRECISION: "precision",
    PARALLEL: "parallel mode",
    PATCH_SIZE: "patch size",
    FLAVOR: "model",
    BATCH_SIZE: "batch per device",
}
_ORDER = {
    COMPILE: ("false", "true"),
    CHECKPOINTING: ("none", "selective", "full"),
    PRECISION: ("float32", "float16", "bfloat16", "bfloat16_f8"),
}


def axis_name(axis: str) -> str:
    return _AXES.get(axis, axis)


def value_name(axis: str, value: str) -> str:
    """A value of an axis for readers: `on`, `FSDP 1,8`."""
    if axis == COMPILE:
        return {"true": "on", "false": "off"}.get(value, value)
    if axis == PARALLEL:
        return f"{parallel_mode(value)} {value}"
    return {"bfloat16_f8": "bfloat16 + float8", "": "(none)"}.get(value, value)


def change_name(axis: str, start: str, end: str) -> str:
    """`torch.compile: off → on`, or `a100 against a40` for two sources."""
    if axis == "source":
        return f"{end} against {start}"
    return f"{axis_name(axis)}: {value_name(axis, start)} → {value_name(axis, end)}"


def ordered_values(axis: str, values: Iterable[str]) -> list[str]:
    """Values of an axis from the baseline to the alternative.

    Known words have a fixed order, numbers ascend, and meshes go from most to least sharded. Others keep their order.
    """
    found = list(dict.fromkeys(values))
    known = _ORDER.get(axis, ())
    if axis == PARALLEL:
        return sorted(found, key=_mesh_order)
    if all(value in known for value in found):
        return sorted(found, key=known.index)
    try:
        return sorted(found, key=float)
    except ValueError:
        return found


def _mesh_order(value: str) -> tuple[int, int]:
    replicate, shard = parallel_degrees(value)
    return replicate * shard, -shard


def parallel_mode(value: str) -> str:
    """Name of a `replicate,shard` mesh."""
    replicate, shard = parallel_degrees(value)
    if replicate * shard == 1:
        return "one device"
    if replicate == 1:
        return "FSDP"
    return "DDP" if shard == 1 else "HSDP"


def percent(value: float) -> str:
    """`+70%`, `−4.2%`: signed, with only significant digits; empty for NaN."""
    if value != value:
        return ""
    digits = 0 if abs(value) >= 9.95 else 1
    text = f"{value:+,.{digits}f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text.replace("-", MINUS)


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits, and all of its integer part; empty for None and NaN."""
    if value is None or value != value:
        return ""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.{digits}g}".removesuffix(".")


def ratio_text(value: float) -> str:
    return f"{value:.2f}" if value < 10 else number(value)


def with_interval(mean: float, half_width: float) -> str:
    """`165 ± 37`, or the mean alone without an interval."""
    if not half_width > 0:
        return number(mean, 4)
    return f"{rounded(mean, half_width / 10)} ± {rounded(half_width, half_width / 10)}"


def listed(values: Iterable[str], *, most: int = 4) -> str:
    """The distinct values that are not empty, at most this many."""
    return some(filter(None, dict.fromkeys(values)), most=most)


def shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def evenly(values: Sequence[T], most: int) -> list[T]:
    """At most this many of the values, including the first and the last; the last, if only one."""
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]


def commit_name(commit: str | None) -> str:
    """The abbreviated commit, and whether files differed from it."""
    return (commit or "")[:12] + ("-dirty" if (commit or "").endswith("-dirty") else "")


def duration(seconds: float) -> str:
    """`3.55 s`, `12 min 5 s`, `3 h 12 min`."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    return f"{seconds // 3600:,.0f} h {seconds % 3600 // 60:.0f} min"


def setting_value(value: Any) -> str:
    """The value of an option for readers: text as it is, else JSON."""
    return shorten(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 300)
