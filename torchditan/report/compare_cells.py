# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Formats values of compared runs for the tables of compare.html. Missing measurements are labelled as such."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from torchditan.report.compare import CurvePair
from torchditan.report.compared_run import Run, Sampling

UNKNOWN = "not measured"
_STATES = {"oom": "out of memory", "running": "running, or killed", "error": "failed"}


def duration(seconds: float | None) -> str:
    """`3.55 s`, `12 min 5 s`, `3 h 12 min`. Lines can break only between the units."""
    if seconds is None:
        return UNKNOWN
    if seconds < 100:
        parts = [f"{seconds:.3g} s"]
    elif seconds < 7200:
        parts = [f"{round(seconds) // 60} min", f"{round(seconds) % 60} s"]
    else:
        parts = [f"{seconds // 3600:,.0f} h", f"{seconds % 3600 // 60:.0f} min"]
    return " ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def figure(value: float | None) -> str:
    """A number with at least three significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else figure(value)


def decimals(value: float | None, digits: int) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:#.4g}"


def text(value: Any) -> str:
    return "unknown" if value is None else str(value)


def steps(run: Run) -> str:
    planned = "?" if run.planned_steps is None else f"{run.planned_steps:,}"
    return (
        "none"
        if run.steps is None
        else f"{run.steps:,}"
        if run.steps == run.planned_steps
        else f"{run.steps:,} of {planned}"
    )


def state(run: Run) -> str:
    return _STATES.get(run.state, run.state) + (", resumed" if run.was_resumed else "")


def scores(sampling: Sampling) -> str:
    known = [
        f"{sampling.psnr:.2f} dB" if sampling.psnr is not None else "",
        f"SSIM {sampling.ssim:.4f}" if sampling.ssim is not None else "",
    ]
    return ", ".join(filter(None, known))


def relative(pair: CurvePair) -> str:
    return f"{pair.difference:.1e}" if pair.difference else "0"


def setting_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def version(run: Run, package: str) -> str:
    return text(run.content.get("versions", {}).get(package))


def commit(run: Run) -> str:
    commit = run.content.get("git_commit") or "unknown"
    return str(commit[:12]) + ("-dirty" if commit.endswith("-dirty") else "")


def distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def shorten(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
