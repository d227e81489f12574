# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Results of kills.py: a file with a line for each run, and a report of all."""

from __future__ import annotations

import json
import platform
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kills_attempts import MISSED, PHASES
from kills_checks import ELASTIC_TOLERANCE
from kills_plans import TARGETS, VARIANTS

from torchditan.errors import option_error
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

_SAMPLES, _FILES = {"steps", "samples", "progress"}, {"debris"}
_EQUALITY = {"curve", "tensors", "elastic loss", "elastic state"}


class Results:
    """`results.jsonl` and `report.md` of a folder; both are replaced as a whole."""

    def __init__(self, folder: Path, *, seed: int, num_kills: int) -> None:
        self.folder = folder
        self.seed = seed
        self.num_kills = num_kills
        path = folder / "results.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self.by_number = {result["number"]: result for result in map(json.loads, lines)}
        seeds = {result["seed"] for result in self.by_number.values()} - {seed}
        if seeds:
            right = f"{folder} holds runs of seed {min(seeds)}; name another folder"
            raise option_error("--seed", seed, right)

    @property
    def num_done(self) -> int:
        """Kills that met a living run."""
        return len(hits(self.by_number.values()))

    @property
    def num_missing(self) -> int:
        return self.num_kills - self.num_done

    def failed(self) -> list[int]:
        return sorted(number for number, result in self.by_number.items() if result["problems"])

    def add(self, result: Mapping[str, Any]) -> None:
        self.by_number[result["number"]] = {**result, "seed": self.seed}
        lines = (json.dumps(each) + "\n" for each in self.by_number.values())
        write_file(self.folder / "results.jsonl", "".join(lines).encode())
        self.write_report()

    def write_report(self) -> str:
        versions = {"python": platform.python_version(), **provenance.versions("torch", "torchditan")}
        where = {
            "command": f"python tools/kills.py --kills {self.num_kills} --seed {self.seed}",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "commit": provenance.git_commit(),
            "kills": f"{self.num_done} of {self.num_kills}",
        }
        text = report(list(self.by_number.values()), where)
        write_file(self.folder / "report.md", text.encode())
        return text


def hits(results: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The kills that met a living run."""
    return [kill for result in results for kill in result["kills"] if kill["phase"] != MISSED]


def report(results: Sequence[Mapping[str, Any]], where: Mapping[str, object]) -> str:
    """All figures, as Markdown.

    Args:
        results: of the runs.
        where: how and on what they were made, for the head.
    """
    lines = ["# Runs killed at random moments", "", *(f"- {name}: {value}" for name, value in where.items()), ""]
    rows = {name: [result for result in results if result["variant"] == name] for name in VARIANTS}
    rows["saves in the background"] = [result for result in results if result["saves_in_background"]]
    rows["started by their command line"] = [result for result in results if not result["is_forked"]]
    rows["all"] = list(results)
    lines += table("runs", ROW_NAMES, {name: row(chosen) for name, chosen in rows.items() if chosen})
    kills = hits(results)
    crossed = Counter((kill["phase"], f"{kill['signal']} {kill['target']}") for kill in kills)
    ways = [f"{signal} {target}" for signal in ("SIGKILL", "SIGTERM") for target in TARGETS]
    phases = [phase for phase in PHASES if phase != MISSED]
    counts = {phase: [str(crossed[phase, way]) for way in ways] for phase in phases}
    lines += ["", *table("hit during", ways, counts), ""]
    resumes = [seconds for result in results for seconds in result["resumes_s"]]
    missed = sum(len(result["kills"]) for result in results) - len(kills)
    lines += [
        "- a process without torchrun is its own launcher",
        f"- aimed, but the run had ended: {missed}, not counted",
        f"- seconds of training lost per SIGKILL: {spread(lost_seconds(kills))}",
        f"- seconds until all processes had ended: {spread(kill['ended_s'] for kill in kills)}",
        f"- seconds from a restart to its first step: {spread(resumes)}",
        f"- seconds in all: {sum(result['elapsed_s'] for result in results):.0f}",
    ]
    failed = [result for result in results if result["problems"]]
    lines += ["", "## Failures", "", *map(line, failed)] if failed else []
    return "\n".join(lines) + "\n"


ROW_NAMES = [
    "runs",
    "kills",
    "same ranks: equal to the bit",
    f"other ranks: within {ELASTIC_TOLERANCE:g}",
    "largest difference of losses",
    "of the state",
    "runs with lost or repeated samples",
    "with files left behind",
    "with another failure",
]


def row(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of these runs, the cells under ROW_NAMES."""
    elastic = [result for result in results if result["is_elastic"]]
    bitwise = [result for result in results if not result["is_elastic"]]
    problems = [set(result["problems"]) for result in results]
    return [
        str(len(results)),
        str(len(hits(results))),
        *(f"{sum(map(is_equal, group))} of {len(group)}" for group in (bitwise, elastic)),
        *(largest(elastic, what) for what in ("loss", "state")),
        *(str(sum(bool(names & kind) for names in problems)) for kind in (_SAMPLES, _FILES)),
        str(sum(bool(names - _SAMPLES - _FILES - _EQUALITY) for names in problems)),
    ]


def is_equal(result: Mapping[str, Any]) -> bool:
    """Whether a run reached its end, with every step once and the numbers that it should have."""
    return not result["problems"].keys() - _FILES - {"grids", "tensorboard"}


def largest(results: Sequence[Mapping[str, Any]], what: str) -> str:
    values = [result["differences"][what] for result in results if what in result["differences"]]
    return f"{max(values):.1e}" if values else "-"


def lost_seconds(kills: Iterable[Mapping[str, Any]]) -> list[float]:
    return [kill["lost_s"] for kill in kills if kill["signal"] == "SIGKILL" and kill["phase"] != "start-up"]


def spread(seconds: Iterable[float]) -> str:
    values = list(seconds)
    return f"{statistics.median(values):.1f} median, {max(values):.1f} at most" if values else "-"


def table(corner: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    head = ["| " + " | ".join([corner, *columns]) + " |", "|" + "---|" * (len(columns) + 1)]
    return head + ["| " + " | ".join([name, *cells]) + " |" for name, cells in rows.items()]


def line(result: Mapping[str, Any]) -> str:
    """A run in one line, and one for each check it failed."""
    kills = ", ".join(f"{kill['signal']} {kill['target']} in {kill['phase']}" for kill in result["kills"])
    layouts = dict.fromkeys(result["layouts"]) if not result["is_elastic"] else result["layouts"]
    passed = "within tolerance" if result["is_elastic"] else "equal to the bit"
    text = f"run {result['number']}  {result['variant']}  {' > '.join(layouts)}  {kills or '-'}  "
    text += f"{'FAILED' if result['problems'] else passed}  {result['elapsed_s']:.0f} s"
    for check, what in result["problems"].items():
        text += f"\n    {check}: {what}"
    return text + (f"\n    kept in {result['folder']}" if result["problems"] else "")
