#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Kill small runs at random times and restart them. Checks bitwise equality and measures the cost of a kill.

python tests/faults/chaos.py --num_runs 200 --seed 0 --folder outputs/chaos

Each run is killed one to five times by SIGKILL (only torchrun, only one rank, or every process) and restarted each time
with the same command. Then it is compared with a run that was never stopped. In a third of the runs the mode and the
number of ranks change after every kill. Notable:
- the plan of a run is a function of (seed, number); the speed of the machine affects only the times;
- half of the moments are uniform over the lifetime of an attempt, which is mostly start-up for steps this small. The
  others are uniform over its training, or up to 50 ms after a checkpoint started to be written or was published;
- a repeated call continues after the runs in `results.jsonl`. After a change of the code, choose another folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chaos_attempts import REFERENCE_FLAGS, Attempt, RunFailedError, finish, launch, stopping, strike
from chaos_checks import largest_difference, problems_of
from chaos_plans import LAYOUTS, Pace, Plan, plan_of
from chaos_results import Results, line, table

from torchditan.ablation.launch import end_processes
from torchditan.config.command_line import ScriptParser, count
from torchditan.config.errors import ConfigError, option_error
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_metrics


def make_reference(folder: Path, layout: str) -> Pace:
    """The run of this layout that nobody stops, made once; how long it took."""
    home = folder / "references" / layout
    pace_path = home / "pace.json"
    if not pace_path.exists():
        clear(home)
        attempt = launch(home, LAYOUTS[layout], REFERENCE_FLAGS)
        try:
            finish(attempt)
        finally:
            end(attempt)
        pace = attempt.pace()
        assert pace is not None
        write_file(pace_path, json.dumps(asdict(pace)).encode())
    return Pace(**json.loads(pace_path.read_bytes()))


def execute(plan: Plan, folder: Path, paces: dict[str, Pace], *, keep: bool) -> dict[str, Any]:
    """Do what the plan says, and check what came of it.

    Args:
        plan: of the run.
        folder: of all runs; this one's is deleted where nothing failed.
        paces: of every layout in the plan; those seen here are written back.
        keep: leave the run's folder also where nothing failed.
    """
    home, reference = folder / f"run-{plan.number:04d}", folder / "references" / plan.reference / "run"
    clear(home)
    kills: list[dict[str, Any]] = []
    resumes: list[float] = []
    problems: dict[str, str] = {}
    clock, difference = time.monotonic(), None
    try:
        for index, layout in enumerate(plan.layouts):
            attempt = launch(home, LAYOUTS[layout], plan.flags)
            try:
                if index < len(plan.kills):
                    kills.append(strike(attempt, plan.kills[index], paces[layout]))
                else:
                    finish(attempt)
                    paces[layout] = attempt.pace() or paces[layout]
            finally:
                end(attempt)
            begun = attempt.first_step_at()
            if begun is not None and attempt.resumed.step:
                resumes.append(begun - attempt.started)
        problems = problems_of(home / "run", reference, plan)
        difference = largest_difference(read_metrics(home / "run"), read_metrics(reference))
    except RunFailedError as error:
        check, what = error.args
        problems[check] = what
    except Exception as error:  # of a run that nobody can read any more, and 199 others wait
        problems["unreadable"] = f"{type(error).__name__}: {error}"
    if not problems and not keep:
        shutil.rmtree(home)
    return {
        **asdict(plan),
        "is_elastic": plan.is_elastic,
        "problems": problems,
        "folder": str(home) if problems or keep else None,
        "loss_difference": difference,
        "kills": [{**asdict(kill), **seen} for kill, seen in zip(plan.kills, kills, strict=False)],
        "resumes_s": resumes,
        "elapsed_s": time.monotonic() - clock,
    }


def clear(home: Path) -> None:
    """Nothing is left of what an earlier call of this script did not finish."""
    end_processes(home / "ranks")
    shutil.rmtree(home, ignore_errors=True)


def end(attempt: Attempt) -> None:
    end_processes(attempt.ranks, attempt.process)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = ScriptParser(__doc__, options=())
    parser.epilog = None
    parser.add_argument("--num_runs", type=count, default=10, help="runs, numbered from 0 (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the plans (default: 0)")
    parser.add_argument("--folder", type=Path, default=Path("outputs/chaos"), help="default: outputs/chaos")
    parser.add_argument("--jobs", type=count, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that passed")
    args, rest = parser.parse(argv)
    if rest:
        raise ConfigError(f"{rest[0]} belongs to no option of this script")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    folder = args.folder.resolve()
    results = Results(folder, seed=args.seed)
    if sys.platform != "linux":
        raise option_error("--folder", str(folder), "processes are found through /proc, which only Linux has")
    plans = [plan_of(args.seed, number) for number in range(args.num_runs)]
    todo = [plan for plan in plans if plan.number not in results.by_number]
    layouts = {layout for plan in todo for layout in (*plan.layouts, plan.reference)}
    paces = {layout: make_reference(folder, layout) for layout in LAYOUTS if layout in layouts}
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(execute, plan, folder, paces, keep=args.keep) for plan in todo]
        try:
            for future in as_completed(futures):
                results.add(future.result())
                print(line(future.result()), flush=True)
        except BaseException:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    summary = results.write_summary(plan.number for plan in plans)
    print(f"\n{table(summary)}\n\n{folder / 'results.jsonl'}")
    failed = [str(plan.number) for plan in plans if results.by_number[plan.number]["problems"]]
    if failed:
        print(f"error: run {', '.join(failed)} failed: see above, and the folders named there", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
