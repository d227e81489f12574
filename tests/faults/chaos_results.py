# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Results of chaos.py: the file with a line for each run, the figures of all, and both as text."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos_attempts import PHASES
from chaos_checks import ELASTIC_TOLERANCE
from chaos_plans import TARGETS

from torchditan.config.errors import option_error
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file


class Results:
    """`results.jsonl` and `summary.json` of a folder; both are replaced as a whole."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        path = folder / "results.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self.by_number = {result["number"]: result for result in map(json.loads, lines)}
        seeds = {result["seed"] for result in self.by_number.values()} - {seed}
        if seeds:
            right = f"{folder} holds runs of seed {min(seeds)}; name another folder"
            raise option_error("--seed", seed, right)

    def add(self, result: Mapping[str, Any]) -> None:
        self.by_number[result["number"]] = {**result, "seed": self.seed}
        lines = (json.dumps(each) + "\n" for each in self.by_number.values())
        write_file(self.folder / "results.jsonl", "".join(lines).encode())

    def write_summary(self, numbers: Iterable[int]) -> dict[str, Any]:
        summary = summarize([self.by_number[number] for number in numbers])
        where = {
            "command": sys.argv,
            "seed": self.seed,
            "versions": provenance.versions("torch", "torchditan"),
            "git_commit": provenance.git_commit(),
        }
        write_file(self.folder / "summary.json", json.dumps({**where, **summary}, indent=2).encode())
        return summary


def summarize(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all runs; seconds as {median, max} over the kills that met a living run."""
    elastic = [result for result in results if result["is_elastic"]]
    bitwise = [result for result in results if not result["is_elastic"]]
    kills = [kill for result in results for kill in result["kills"]]
    hits = [kill for kill in kills if kill["phase"] != "ended already"]
    differences = [result["loss_difference"] for result in elastic if result["loss_difference"] is not None]
    return {
        "num_runs": len(results),
        "passed": sum(not result["problems"] for result in results),
        "survived": sum(not {"exit", "processes", "unreadable"} & result["problems"].keys() for result in results),
        "bitwise_runs": len(bitwise),
        "bitwise_equal": sum(is_equal(result, "curve", "tensors") for result in bitwise),
        "elastic_runs": len(elastic),
        "elastic_within_tolerance": sum(is_equal(result, "elastic") for result in elastic),
        "largest_elastic_difference": max(differences, default=None),
        "num_kills": len(kills),
        "kills_by_target": {name: sum(kill["target"] == name for kill in hits) for name in TARGETS},
        "kills_by_phase": {name: sum(kill["phase"] == name for kill in kills) for name in PHASES},
        "lost_s": spread(kill["lost_s"] for kill in hits),
        "lost_after_start_up_s": spread(kill["lost_s"] for kill in hits if kill["phase"] != "start-up"),
        "until_nothing_is_left_s": spread(kill["ended_s"] for kill in hits),
        "resume_to_first_step_s": spread(seconds for result in results for seconds in result["resumes_s"]),
        "elapsed_s": sum(result["elapsed_s"] for result in results),
    }


def is_equal(result: Mapping[str, Any], *checks: str) -> bool:
    """Whether a run reached its end, with every step once and the numbers that it should have."""
    needed = {*checks, "steps", "progress", "checkpoint", "exit", "processes", "unreadable"}
    return not needed & result["problems"].keys()


def spread(seconds: Iterable[float]) -> dict[str, float] | None:
    values = list(seconds)
    return {"median": statistics.median(values), "max": max(values)} if values else None


def table(summary: Mapping[str, Any]) -> str:
    """The summary for people."""

    def counts(key: str) -> str:
        return ", ".join(f"{name} {number}" for name, number in summary[key].items())

    def seconds(key: str) -> str:
        value = summary[key]
        return "-" if value is None else f"{value['median']:.1f} median, {value['max']:.1f} at most"

    difference = summary["largest_elastic_difference"]
    furthest = "" if difference is None else f", {difference:.1e} at most"
    rows = {
        "runs that passed every check": f"{summary['passed']} of {summary['num_runs']}",
        "survived": f"{summary['survived']} of {summary['num_runs']}",
        "bitwise equal": f"{summary['bitwise_equal']} of {summary['bitwise_runs']}",
        f"elastic within {ELASTIC_TOLERANCE:g}": (
            f"{summary['elastic_within_tolerance']} of {summary['elastic_runs']}{furthest}"
        ),
        "kills": f"{summary['num_kills']} ({counts('kills_by_target')})",
        "kills by phase": counts("kills_by_phase"),
        "seconds lost per kill": seconds("lost_s"),
        "  after start-up": seconds("lost_after_start_up_s"),
        "seconds until all had ended": seconds("until_nothing_is_left_s"),
        "seconds to resume": seconds("resume_to_first_step_s"),
    }
    return "\n".join(f"{name:<30}{text}" for name, text in rows.items())


def line(result: Mapping[str, Any]) -> str:
    """A run in one line, and one for each check it failed."""
    kills = ", ".join(f"{kill['target']} in {kill['phase']}" for kill in result["kills"])
    layouts = dict.fromkeys(result["layouts"]) if not result["is_elastic"] else result["layouts"]
    passed = "elastic within tolerance" if result["is_elastic"] else "bitwise equal"
    text = f"run {result['number']}  {' > '.join(layouts)}  killed {kills or '-'}  "
    text += f"{'FAILED' if result['problems'] else passed}  {result['elapsed_s']:.0f} s"
    for check, what in result["problems"].items():
        text += f"\n    {check}: {what}"
    return text + (f"\n    kept in {result['folder']}" if result["problems"] else "")
