#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Everything that waits for a GPU, in one command: `python benchmarks/gpu_hour.py`, planned for 25 minutes on an H100.

Notable:
- gpu_hour_sections.py lists the sections. Each one runs commands of this repository, with a time limit;
- sections that measure no time run first, side by side on a GPU. The others have the machine to themselves;
- the JSON is written after each section, and a Markdown page next to it. The same command continues a run that was
  killed or ran out of time;
- a section that fails records its last error line and what it measured before, and the others go on;
- `--fill` writes the figures of the JSON into docs/gpus.md and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

import torch
from gpu_hour_sections import FIGURES, Figure, Found, Row, Section, build_sections
from step_time import RESULTS, environment

from torchditan.errors import shorten
from torchditan.extras.ablation.launch import Job, execute
from torchditan.run import provenance
from torchditan.run.atomic_files import write_file

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE_OF_FIGURES = REPOSITORY / "docs" / "gpus.md"
MARKS = ("<!-- figures of benchmarks/gpu_hour.py -->\n", "<!-- end of the figures -->\n")
NOT_RUN = "not run"
SAME = ("device_name", "versions", "tiny", "emulated")
"""What has to agree before a run continues."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures on a GPU what the documentation lists as not measured.")
    add = parser.add_argument
    add("sections", nargs="*", metavar="section", help="only these, also if they are done (default: all that are not)")
    add("--minutes", type=float, default=25, help="time for this call; what no longer fits is not run (default: 25)")
    add("--tiny", action="store_true", help="tiny models, to check that everything runs (always without a GPU)")
    add("--emulated", action="store_true", help="the GPU does not compute: mark the results, and do not check figures")
    add("--out", type=Path, help="the JSON (default: benchmarks/results/gpu_hour_<device>.json, tiny: in outputs/)")
    add("--fill", action="store_true", help="write the figures of the JSON into docs/gpus.md")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    args.tiny = args.tiny or not cuda
    names = [section.name for section in build_sections(tiny=args.tiny, cuda=cuda)]
    if unknown := [name for name in args.sections if name not in names]:
        parser.error(f"section {unknown[0]}: must be one of {', '.join(names)}")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: must be above 0")
    if args.out is None:
        device = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()) if cuda else "cpu"
        real = cuda and not args.tiny and not args.emulated
        args.out = (RESULTS if real else REPOSITORY / "outputs") / f"gpu_hour_{device}.json"
    return args


def open_document(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """What the JSON contains so far, or its head. Exits with code 2 if it is of another device or version."""
    head = {
        "benchmark": "gpu_hour",
        "tiny": args.tiny,
        "emulated": args.emulated,
        **environment("cuda" if torch.cuda.is_available() else "cpu"),
        "commands": [],
        "sections": {},
    }
    document = json.loads(args.out.read_text()) if args.out.exists() else head
    for key in SAME:
        if document[key] != head[key]:
            print(f"--out {args.out}: its {key} is {document[key]}, here it is {head[key]}; name another file")
            raise SystemExit(2)
    document["commands"].append(shlex.join(["python", "benchmarks/gpu_hour.py", *argv]))
    return document


def save(document: dict[str, Any], out: Path) -> None:
    write_file(out, (json.dumps(document, indent=1) + "\n").encode())
    write_file(out.with_suffix(".md"), page(document).encode())


def run_sections(
    sections: Sequence[Section],
    document: dict[str, Any],
    out: Path,
    *,
    named: Sequence[str],
    minutes: float,
    side_by_side: bool,
) -> int:
    """Run what is not done, and save after each: first what measures no time (all `side_by_side`), then one by one.

    Returns the exit code: 1 if the record of any section is a failure.
    """
    deadline = time.monotonic() + 60 * minutes
    records = document["sections"]

    def run(section: Section) -> dict[str, Any]:
        left = deadline - time.monotonic()
        if left < section.expected_s:
            reason = f"needs about {section.expected_s:g} s; {max(left, 0):.0f} s were left"
            return {"title": section.title, "status": NOT_RUN, "error": reason}
        print(f"{section.name}: {section.title} ...", flush=True)
        return run_section(section, limit_s=min(section.limit_s, left), emulated=document["emulated"])

    def is_due(section: Section) -> bool:
        done = records.get(section.name, {"status": NOT_RUN})["status"] != NOT_RUN
        return section.name in named if named else not done

    due = [section for section in sections if is_due(section)]
    for timed in (False, True):
        with ThreadPoolExecutor(max(1, len(due)) if side_by_side and not timed else 1) as pool:
            names = {pool.submit(run, section): section.name for section in due if section.timed is timed}
            for future in as_completed(names):
                records[names[future]] = record = future.result()
                error = f": {record['error']}" if record["error"] else ""
                print(f"{names[future]}: {record['status']}{error}", flush=True)
                save(document, out)
    return 1 if any(record["status"] == "failed" for record in records.values()) else 0


def run_section(section: Section, *, limit_s: float, emulated: bool) -> dict[str, Any]:
    """The record of a section. Its commands share a folder and `limit_s`; the first that fails ends it."""
    start = time.monotonic()
    outputs: list[str] = []
    error, found = None, Found([])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (executable, *program) in enumerate(section.commands):
            job = Job(
                program=[part.replace("{folder}", name) for part in program],
                executable=executable,
                folder=folder / f".command-{number}",
                timeout_s=limit_s - (time.monotonic() - start),
                cwd=REPOSITORY,
            )
            outcome = execute(job)
            outputs.append(outcome.log)
            if outcome.exit_code not in section.exit_codes:
                failure = shorten(outcome.reason or "", most=300)
                error = f"the time limit of {limit_s:.0f} s was reached" if outcome.exit_code is None else failure
                break
        try:
            found = section.read(folder, outputs)
            if not emulated and error is None:
                error = found.problem
        except Exception as mistake:  # what a command that failed has not written
            error = error or traceback.format_exception_only(mistake)[-1].strip()
    return {
        "title": section.title,
        "status": "failed" if error else "ok",
        "error": error,
        "problem": found.problem,
        "seconds": round(time.monotonic() - start, 1),
        "git_commit": provenance.git_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commands": [
            shlex.join(["python" if part == sys.executable else part for part in c]) for c in section.commands
        ],
        "rows": found.rows,
        "results": found.results,
        "output_tail": without_paths(outputs[-1]).splitlines()[-30:] if error else [],
    }


def without_paths(output: str) -> str:
    """Without the folders of this machine: the JSON is meant to be shared."""
    return output.replace(f"{REPOSITORY}/", "").replace(sys.executable, "python")


def page(document: dict[str, Any]) -> str:
    """One page: what was measured on what, and a table for each section."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    lines = [f"# First hour on {document['device_name']}", ""]
    if document["emulated"]:
        lines += ["**Emulated: nothing computed. No time and no figure here is a measurement.**", ""]
    if document["tiny"]:
        lines += ["**Tiny models: this only checks that everything runs.**", ""]
    lines += [f"{versions}; commit {document['git_commit']}; {document['date']}", ""]
    for name, record in document["sections"].items():
        lines += [f"## {record['title']}", "", f"`{name}`: {record['status']}"]
        lines[-1] += f" in {record['seconds']:.0f} s" if "seconds" in record else ""
        lines += [*(["", f"> {record['error']}"] if record["error"] else []), ""]
        lines += [*table(record.get("rows", [])), ""]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if not columns:
        return []
    body = [[shown(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *body)]


def shown(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")


def fill(document: dict[str, Any], target: Path, *, source: str) -> None:
    """Replace what is between the marks of `target` by the figures of the JSON."""
    card = f"{document['device_name']}, {document['date'][:10]}, torch {document['versions']['torch']}"
    lines = [f"Measured by `python benchmarks/gpu_hour.py` on one {card} ({source}). Targets of MFU are computed.", ""]
    lines += ["| figure | target | measured | section |", "|---|---|---|---|"]
    missing = {}
    for figure in FIGURES:
        value = value_of(figure, document["sections"])
        if value.startswith(("not measured", "skipped")):
            missing[f"`{figure.section}`"] = None
            continue
        lines.append(f"| {figure.what} | {figure.target} | {value} | `{figure.section}` |")
    if missing:
        lines += ["", f"Not measured, or not in full: {', '.join(missing)}."]
    write_between(target, MARKS, lines)


def write_between(target: Path, marks: tuple[str, str], lines: Sequence[str]) -> None:
    before, begin, rest = target.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    assert begin and end, f"{target} has lost its marks"
    write_file(target, "".join([before, begin, "\n".join(lines), "\n", end, after]).encode())


def value_of(figure: Figure, records: dict[str, Any]) -> str:
    """The figure as text; else the status of its row, such as out of memory, or "not measured"."""
    rows = records.get(figure.section, {}).get("rows", [])
    found = [row for row in rows if all(row.get(key) == value for key, value in figure.where.items())]
    for row in found:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a row without the number
            return figure.text.format_map(row)
    return shown(found[0].get("status")) if found else "not measured"


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.fill:
        document = json.loads(args.out.read_text())
        if document["tiny"] or document["emulated"]:
            print(f"--fill: {args.out} is of tiny models or of an emulated GPU; must be measured")
            return 2
        fill(document, PAGE_OF_FIGURES, source=f"[JSON](../benchmarks/results/{args.out.name})")
        print(f"wrote {PAGE_OF_FIGURES}")
        return 0
    document = open_document(args, argv)
    sections = build_sections(tiny=args.tiny, cuda=torch.cuda.is_available())
    print(f"{document['device_name']}, torch {document['versions']['torch']}, {args.minutes:g} minutes")
    side_by_side = torch.cuda.is_available()  # the cores of a machine without a GPU are busy with one section
    code = run_sections(
        sections, document, args.out, named=args.sections, minutes=args.minutes, side_by_side=side_by_side
    )
    waiting = [name for name, record in document["sections"].items() if record["status"] == NOT_RUN]
    if waiting:
        print(f"not run: {', '.join(waiting)}; the same command continues")
    print(f"wrote {args.out} and the page {args.out.with_suffix('.md')}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
