#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Kill small runs at random moments and restart them, until so many kills were made; check what came of each run.

python tools/kills.py --kills 200

Each run is hit two to six times by SIGKILL or SIGTERM (the launcher, one rank, or every process) and restarted each
time with the same command. Then it is compared with a run that was never stopped. In about 4 of 10 runs the mode and
the number of ranks change after every kill. Notable:
- variants take turns: evaluations during training, Muon, one-step, tars, AdamW. Half of all runs save in
  the background;
- the plan of a run is a function of (seed, number); the speed of the machine affects only the times;
- kills aim at the start-up, a step, a save, the deletion of old checkpoints, an evaluation, or the end. The report
  counts what they hit. A kill that came after the end of the run does not count;
- `report.md` and `results.jsonl` are written after every run. A repeated call continues there. After a change of the
  code, choose another folder.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import forked_scripts
from kills_attempts import REFERENCE_FLAGS, Attempt, RunFailedError, finish, launch, strike
from kills_checks import compare
from kills_plans import LAYOUTS, VARIANTS, Pace, Plan, plan_of
from kills_report import Results, line

from torchditan.config.command_line import ScriptParser, count
from torchditan.errors import ConfigError, option_error
from torchditan.extras.ablation.launch import end_processes
from torchditan.run.atomic_files import new_folder, write_file
from torchditan.run.reading import read_status

_IMPORTS_S = 5.0
"""About what a start takes longer that is not forked, for each process."""
_END_S = 30.0
"""In which a process ends that got SIGKILL."""


class Campaign:
    """The runs of one folder, with their references and shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paces: dict[tuple[str, str, bool], Pace] = {}

    def variant_flags(self, variant: str) -> list[str]:
        shards = self.folder / "shards"
        if not shards.exists():
            write_shards(shards)
        return [flag.replace("SHARDS", str(shards)) for flag in VARIANTS[variant]]

    def reference(self, variant: str, layout: str) -> tuple[Path, Pace]:
        """The run of this variant and layout that nobody stops, made once; how long it took."""
        home = self.folder / "references" / f"{variant}-{layout}"
        pace_path = home / "pace.json"
        if not pace_path.exists():
            clear(home)
            attempt = launch(home, LAYOUTS[layout], [*self.variant_flags(variant), *REFERENCE_FLAGS])
            try:
                finish(attempt)
            finally:
                end(attempt)
            pace = attempt.pace()
            assert pace is not None
            write_file(pace_path, json.dumps(asdict(pace)).encode())
        return home / "run", Pace(**json.loads(pace_path.read_bytes()))

    def pace(self, plan: Plan, layout: str) -> Pace:
        """How fast such an attempt was last; before the first one, a guess."""
        if (known := self.paces.get((plan.variant, layout, plan.is_forked))) is not None:
            return known
        _, pace = self.reference(plan.variant, plan.reference)
        ranks = LAYOUTS[layout].world_size
        imports_s = 0.0 if plan.is_forked else _IMPORTS_S * ranks
        return Pace(pace.start_up_s * ranks / LAYOUTS[plan.reference].world_size + imports_s, pace.step_s)

    def execute(self, plan: Plan, *, keep: bool) -> dict[str, Any]:
        """Do what the plan says, and check what came of it. The run's folder is deleted where nothing failed."""
        home = self.folder / f"run-{plan.number:04d}"
        clear(home)
        kills: list[dict[str, Any]] = []
        resumes: list[float] = []
        problems: dict[str, str] = {}
        differences: dict[str, float] = {}
        clock = time.monotonic()
        try:
            reference, _ = self.reference(plan.variant, plan.reference)
            for index, layout in enumerate(plan.layouts):
                if index < len(plan.kills) and (read_status(home / "run") or {}).get("state") == "completed":
                    continue  # to the last attempt, which finds nothing to do
                flags = [*self.variant_flags(plan.variant), *plan.flags]
                attempt = launch(home, LAYOUTS[layout], flags, is_forked=plan.is_forked)
                try:
                    if index < len(plan.kills):
                        kills.append(strike(attempt, plan.kills[index], self.pace(plan, layout)))
                    else:
                        finish(attempt)
                        if (pace := attempt.pace()) is not None:
                            self.paces[plan.variant, layout, plan.is_forked] = pace
                finally:
                    end(attempt)
                begun = attempt.first_step_at()
                if begun is not None and attempt.resumed.step:
                    resumes.append(begun - attempt.started)
            problems, differences = compare(home / "run", reference, plan)
        except RunFailedError as error:
            check, what = error.args
            problems[check] = what
        except Exception as error:  # of a run that nobody can read any more, and the others wait
            problems["unreadable"] = f"{type(error).__name__}: {error}"
        if not problems and not keep:
            shutil.rmtree(home)
        return {
            **asdict(plan),
            "is_elastic": plan.is_elastic,
            "saves_in_background": plan.saves_in_background(),
            "problems": problems,
            "folder": str(home) if problems or keep else None,
            "differences": differences,
            "kills": [{**asdict(kill), **seen} for kill, seen in zip(plan.kills, kills, strict=False)],
            "resumes_s": resumes,
            "elapsed_s": time.monotonic() - clock,
        }


def write_shards(folder: Path) -> None:
    """Two shards of labelled 8 x 8 images in `train/`, and one in `val/`."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    with new_folder(folder) as partial:
        for name, keys in (("train/0.tar", range(40)), ("train/1.tar", range(40, 80)), ("val/0.tar", range(16))):
            (partial / name).parent.mkdir(exist_ok=True)
            with tarfile.open(partial / name, "w") as tar:
                for key in keys:
                    image = io.BytesIO()
                    Image.fromarray(draw.integers(0, 256, (8, 8), dtype=np.uint8)).save(image, "png")
                    for suffix, content in (("png", image.getvalue()), ("cls", str(key % 10).encode())):
                        member = tarfile.TarInfo(f"{key:04d}.{suffix}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))


def clear(home: Path) -> None:
    """Nothing is left of what an earlier call of this script did not finish."""
    end_processes(home / "ranks")
    shutil.rmtree(home, ignore_errors=True)


def end(attempt: Attempt) -> None:
    for pid in attempt.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end_processes(attempt.ranks)
    deadline = time.monotonic() + _END_S
    while attempt.processes() and time.monotonic() < deadline:
        time.sleep(0.02)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ScriptParser(__doc__, options=())
    parser.epilog = None
    parser.add_argument("--kills", type=count, default=5, help="kills to make in all (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the plans (default: 0)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/kills"), help="default: outputs/kills")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that passed")
    args, rest = parser.parse(argv)
    if rest:
        raise ConfigError(f"{rest[0]} belongs to no option of this script")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    folder = args.folder.resolve()
    results = Results(folder, seed=args.seed, num_kills=args.kills)
    if sys.platform != "linux":
        raise option_error("--folder", str(folder), "processes are found through /proc, which only Linux has")
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")  # of the process that is forked
    forked_scripts.start_server()
    campaign = Campaign(folder)
    for number in range(args.kills):  # a run makes one kill at least
        if results.num_missing <= 0:
            break
        if number in results.by_number:
            continue
        result = campaign.execute(plan_of(args.seed, number).first(results.num_missing), keep=args.keep)
        results.add(result)
        print(f"{line(result)}  {results.num_done}/{args.kills}", flush=True)
    print(f"\n{results.write_report()}")
    failed = results.failed()
    if failed or results.num_missing > 0:
        names = f"run {', '.join(map(str, failed))} failed: see above, and the folders named there"
        few = f"only {results.num_done} of {args.kills} kills met a run"
        print(f"error: {names if failed else few}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
