#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Change files at random and open them as a user would. Nothing may run, leak, crash or fill the memory.

python tools/fuzz.py --minutes 10 --out outputs/fuzz
python tools/fuzz.py --only npz tar --minutes 1 --seed 7
python tools/fuzz.py --only npz --case 1234 --keep /tmp/case

A case is a function of (kind, seed, number). `--case` repeats one and prints what happened; `--keep` leaves its files.
The changes that a finding does not need are left out. Results are in `report.md` and `report.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fuzz_cases import Kind, Opener, Outcome, steps_of
from fuzz_kinds import KINDS

from torchditan.run.atomic_files import write_file


def fuzz(kind: Kind, *, seed: int, seconds: float, most: int | None = None, out: Path | None = None) -> dict[str, Any]:
    """Open cases until the time is over. Returns the counts and the findings, one of each place in the code."""
    number = 0
    counts: Counter[str] = Counter()
    peak = 0.0
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        opener = Opener(kind, Path(folder))
        try:
            untouched = opener.open([])
            assert untouched.verdict == "ok", (kind.name, untouched)
            start = time.monotonic()
            while time.monotonic() - start < seconds and (most is None or number < most):
                steps = steps_of(kind.name, seed, number)
                outcome = opener.open(steps)
                counts[outcome.verdict] += 1
                peak = max(peak, outcome.megabytes)
                if outcome.is_found:
                    key = (
                        f"{outcome.verdict} {outcome.place or outcome.reason[:40]} {outcome.reason.split(':')[0][:30]}"
                    )
                    if key in found:
                        found[key]["count"] += 1
                    else:
                        found[key] = _finding(opener, outcome, steps, seed=seed, number=number)
                        print(
                            f"  {kind.name} case {number}: {outcome.verdict} {outcome.reason[:200]} {outcome.place}",
                            flush=True,
                        )
                        if out is not None:
                            _save(out / kind.name / str(number), opener, found[key])
                number += 1
        finally:
            opener.close()
    return {
        "kind": kind.name,
        "cases": number,
        "seconds": round(time.monotonic() - start, 1),
        "ok": counts["ok"],
        "refused": counts["refused"],
        "found": list(found.values()),
        "most_megabytes": round(peak, 1),
    }


def _finding(opener: Opener, outcome: Outcome, steps: list[int], *, seed: int, number: int) -> dict[str, Any]:
    smallest = opener.smallest(steps, outcome) if len(steps) > 1 else steps
    repeated = opener.open(smallest)
    command = f"python tools/fuzz.py --only {opener.kind.name} --seed {seed} --case {number}"
    return {"count": 1, "command": command, "steps": smallest, **(repeated if repeated.is_found else outcome)._asdict()}


def _save(folder: Path, opener: Opener, finding: dict[str, Any]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_file(folder / "finding.json", json.dumps(finding, indent=2).encode())
    (folder / "details.txt").write_text(
        "\n".join([*finding["changes"], finding["reason"], finding["details"]]), errors="backslashreplace"
    )


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "| kind | cases | opened | refused | found | minutes | most memory (MB) |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        found = sum(finding["count"] for finding in result["found"])
        row = [result["kind"], result["cases"], result["ok"], result["refused"], found, f"{result['seconds'] / 60:.1f}"]
        lines.append(f"| {' | '.join(map(str, [*row, result['most_megabytes']]))} |")
    return "\n".join(lines) + "\n"


def repeat(kind: Kind, *, seed: int, case: int, keep: Path | None) -> Outcome:
    """Open one case again."""
    with tempfile.TemporaryDirectory() as folder:
        opener = Opener(kind, Path(folder))
        try:
            outcome = opener.open(steps_of(kind.name, seed, case))
        finally:
            opener.close()
            if keep is not None:
                shutil.copytree(Path(folder) / "case", keep, symlinks=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each kind")
    parser.add_argument("--only", nargs="+", choices=tuple(KINDS), metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="repeat this case")
    parser.add_argument("--keep", type=Path, help="folder for the files of --case")
    parser.add_argument("--out", type=Path, default=Path("outputs/fuzz"), help="folder of the report and the findings")
    given = parser.parse_args()
    if given.minutes <= 0:
        parser.error(f"--minutes {given.minutes:g}: must be above 0")
    kinds = [KINDS[name] for name in given.only or KINDS]
    if given.case is not None:
        outcome = repeat(kinds[0], seed=given.seed, case=given.case, keep=given.keep)
        print(*outcome.changes, outcome.verdict, outcome.reason, outcome.place, outcome.details, sep="\n")
        return int(outcome.is_found)
    results = []
    for kind in kinds:
        results.append(fuzz(kind, seed=given.seed, seconds=60 * given.minutes, out=given.out))
        print(table(results).splitlines()[-1], flush=True)
        write_file(given.out / "report.json", json.dumps({"seed": given.seed, "results": results}, indent=2).encode())
        write_file(given.out / "report.md", table(results).encode())
    return int(any(result["found"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
