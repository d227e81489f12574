# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""FSDP, HSDP and DDP on 1 to 8 GPUs of one machine, and a resume on half of them: `benchmarks/eight_gpus.sh`.

Notable:
- first, one rank of a run is killed. The run resumes on half of the ranks, and its losses are compared with those of a
  whole run. These runs are in float32, so that rounding hides no mistake;
- then come the runs of the grid train_configs/ablations/eight_gpus.toml; `torchditan report` reads their folder, too;
- no run of the grid starts that might not end within the 20 minutes. The same command makes what is missing or failed;
- `--fill JSON` writes the table of a file into docs/gpus.md and measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from gpu_hour import MARKS, PAGE_OF_FIGURES, table, write_between
from step_time import RESULTS, environment

from torchditan.extras.ablation.device import Device
from torchditan.extras.ablation.grid import FLAVOR, PARALLEL, PATCH_SIZE, load_grid, parallel_degrees
from torchditan.extras.ablation.launch import TRAIN, Job, LocalLauncher, Pending, execute, last_step
from torchditan.extras.ablation.ledger import Row
from torchditan.extras.ablation.maker import RUNS_FOLDER
from torchditan.extras.ablation.runner import run_grid
from torchditan.run.atomic_files import write_file
from torchditan.run.provenance import git_commit
from torchditan.run.reading import read_metrics
from torchditan.supervision.rank_status import read_rank_statuses

MINUTES = 20
TABLE_MARKS = ("<!-- figures of benchmarks/eight_gpus.sh -->\n", MARKS[1])
COLUMNS = {
    "GPUs": "{gpus}",
    "mode": "{mode}",
    "model": "{model}",
    "images/s": "{images_per_s:.0f}",
    "ms per step": "{step_ms:.1f}",
    "MFU": "{mfu:.1f}%",
    "peak memory": "{peak_memory_gib:.1f} GiB",
    "scaling": "{scaling_efficiency:.2f}",
    "data loading": "{data_loading_percent:.1f}%",
}
TINY_AXES = {
    PARALLEL: ["1,1", "1,4", "4,1", "2,2", "1,2", "2,1"],
    FLAVOR: ["debugmodel"],
    "training.compile": [False],
    "training.batch_size": [4],
}
LARGEST_DIFFERENCE = 0.001
"""Of a loss after the resume, relative."""


class UntilDeadline(LocalLauncher):
    """Starts no run whose time limit ends after the deadline."""

    def __init__(self, folder: Path, deadline: float) -> None:
        super().__init__(folder)
        self.deadline = deadline

    def submit(self, work: Callable[[], Any], *, timeout_s: float, **resources: Any) -> Pending:
        if time.monotonic() + timeout_s <= self.deadline:
            return super().submit(work)
        refused: Future[Any] = Future()
        refused.set_exception(TimeoutError(f"the {MINUTES} minutes are over; the same command continues"))
        return refused


def kill_and_resume(folder: Path, num_ranks: int, *, flavor: str, timeout_s: float) -> dict[str, Any]:
    """Kill rank 1 of a run, resume it on half of the ranks, and compare its losses with those of a whole run."""
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["quickstart", f"--model.flavor={flavor}", "--training.mixed_precision_param=float32"]
    flags += ["--training.steps=60", "--optimizer.lr=3e-4", "--checkpoint.interval=20"]
    flags += ["--metrics.log_freq=1", "--metrics.enable_sampling=false", "--validation.freq=0"]
    killed_at: list[float] = []

    def kill() -> None:
        if not killed_at and last_step(folder / "cut") >= 25:
            pids = {status["rank"]: status["pid"] for status in read_rank_statuses(folder / "cut" / "ranks")}
            os.kill(pids[1], signal.SIGKILL)
            killed_at.append(time.monotonic())

    record: dict[str, Any] = {"ranks": num_ranks, "resumed_on": num_ranks // 2, "git_commit": git_commit()}
    for name, count, on_tick in (("whole", num_ranks, None), ("cut", num_ranks, kill), ("cut", num_ranks // 2, None)):
        place = [f"--job.dump_folder={folder}", f"--metrics.experiment_name={name}"]
        job = Job([*TRAIN, *flags, *place], folder / name, num_ranks=count, timeout_s=timeout_s)
        outcome = execute(job, on_tick=on_tick)
        if outcome.status != ("error" if on_tick and killed_at else "completed"):
            return {**record, "status": "failed", "reason": f"{name} on {count} ranks: {outcome.reason}"}
        if on_tick:
            record |= {"killed": outcome.reason, "ended_after_s": time.monotonic() - killed_at[0]}
    whole, cut = ([line["loss"] for line in read_metrics(folder / name)] for name in ("whole", "cut"))
    resumed = re.search(r"resumed at step (\d+)", outcome.log)
    difference = max(abs(b / a - 1) for a, b in zip(whole, cut, strict=False))
    return {
        **record,
        "status": "ok" if resumed and len(whole) == len(cut) and difference <= LARGEST_DIFFERENCE else "failed",
        "resumed_at_step": int(resumed[1]) if resumed else None,
        "first_step_after_s": outcome.start_up_s,
        "largest_difference": difference,
        "losses": {"whole": whole, "cut": cut},
    }


def rows_of(ledger: Sequence[Row], runs: Path) -> list[Row]:
    """The rows of the table, by number of GPUs. What was not measured is None."""
    speeds = {(row[FLAVOR], row[PARALLEL]): row["images_per_second_mean"] for row in ledger}
    rows = []
    for row in sorted(ledger, key=lambda row: row["num_devices"]):
        (replicate, shard), num_gpus = parallel_degrees(row[PARALLEL]), row["num_devices"]
        mode = "one process" if num_gpus == 1 else "DDP" if shard == 1 else "FSDP"
        speed, alone, seconds = row["images_per_second_mean"], speeds[row[FLAVOR], "1,1"], row["step_time_s_mean"]
        loading = [line["data_loading_percent"] for line in read_metrics(runs / row["run_name"])] if speed else []
        rows.append(
            {
                "gpus": num_gpus,
                "mode": f"HSDP {replicate} x {shard}" if min(replicate, shard) > 1 else mode,
                "model": f"{row[FLAVOR]}/{row[PATCH_SIZE]}",
                "batch_per_gpu": row["training.batch_size"],
                "status": row["status"] if row["started"] else "not run",
                "reason": row["reason"],
                "images_per_s": speed,
                "step_ms": 1000 * seconds if seconds else None,
                "mfu": row["mfu_mean"],
                "peak_memory_gib": row["peak_memory_gib"],
                "scaling_efficiency": speed / alone / num_gpus if speed and alone else None,
                "data_loading_percent": fmean(loading[-row["window"] :]) if loading else None,
                **{key: row[key] for key in ("git_commit", "torch_version", "start_up_s", "elapsed_s")},
            }
        )
    return rows


def fill(document: dict[str, Any], target: Path, *, source: str) -> None:
    """Write the table between the marks of `target`. Cells of what was not measured are empty."""
    lines = []
    for row in document["rows"]:
        cells = dict.fromkeys(COLUMNS, "")
        for name, text in COLUMNS.items():
            with contextlib.suppress(TypeError):  # None
                cells[name] = text.format_map(row)
        if row["status"] not in ("completed", "not run"):
            cells["images/s"] = row["status"]
        lines.append(cells)
    versions, resume = document["versions"], document["resume"]
    head = f"{document['gpus']} x {document['device_name']}, driver {document['driver']}, torch {versions['torch']}, "
    head += f"{document['date'][:10]} ({source}):"
    end = f"Kill and resume: {resume['status']}" + (f" ({resume['reason']})" if "reason" in resume else "")
    if "losses" in resume:
        end += f". Rank 1 of {resume['ranks']} was killed, and {resume['resumed_on']} ranks continued from step "
        end += f"{resume['resumed_at_step']}. Largest relative difference of a loss: {resume['largest_difference']:.1g}"
    write_between(target, TABLE_MARKS, [head, "", *table(lines), "", f"{end}."])


def output_of(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="eight_gpus.sh", description="Measures 1 to 8 GPUs of one machine.")
    parser.add_argument("--tiny", action="store_true", help="tiny models on 1, 2 and 4 CPU processes, as a check")
    parser.add_argument("--dump_folder", type=Path, default=Path("outputs"), help="of the runs (default: outputs)")
    parser.add_argument("--fill", type=Path, metavar="JSON", help="write the table of this file into docs/gpus.md")
    args = parser.parse_args(argv)
    if args.fill:
        document = json.loads(args.fill.read_text())
        if document["tiny"]:
            parser.error(f"--fill {args.fill}: is of tiny models; must be measured")
        fill(document, PAGE_OF_FIGURES, source=f"[JSON](../benchmarks/results/{args.fill.name})")
        return 0
    deadline = time.monotonic() + 60 * MINUTES
    if args.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    device = Device.here()
    if device.count is None and not args.tiny:
        parser.error("this machine has no CUDA device; --tiny checks that everything runs")
    num_gpus = device.count or 4
    name = "eight_gpus_" + ("tiny" if args.tiny else re.sub(r"[^a-z0-9]+", "-", device.name.lower()))
    small: dict[str, Any] = {"steps": 6, "window": 3, "dataset.num_workers": 0}
    grid = load_grid("eight_gpus", axes=TINY_AXES, overrides=small) if args.tiny else load_grid("eight_gpus")
    folder, out = args.dump_folder / name, (args.dump_folder if args.tiny else RESULTS) / f"{name}.json"
    nothing: dict[str, Any] = {"commands": [], "resume": {"status": "not run"}, "rows": []}
    earlier = json.loads(out.read_text()) if out.exists() else nothing
    document = {
        "benchmark": "eight_gpus",
        "tiny": args.tiny,
        **environment("cpu"),
        "device": device.type,
        "device_name": device.name,
        "gpus": num_gpus,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "topology": output_of("nvidia-smi", "topo", "-m"),
        "commands": [*earlier["commands"], shlex.join(["benchmarks/eight_gpus.sh", *argv])],
        "resume": earlier["resume"],
        "rows": earlier["rows"],
    }
    num_ranks = max(count for count in (1, 2, 4, 8) if count <= num_gpus)
    if document["resume"]["status"] != "ok" and num_ranks > 1:
        print(f"a run on {num_ranks} ranks, a kill, and a resume on {num_ranks // 2} ...", flush=True)
        flavor = "debugmodel" if args.tiny else "DiT-B"
        place = args.dump_folder / f"{name}_resume"
        document["resume"] = found = kill_and_resume(place, num_ranks, flavor=flavor, timeout_s=grid.timeout_s)
        print({key: value for key, value in found.items() if key != "losses"}, flush=True)
        write_file(out, (json.dumps(document, indent=1) + "\n").encode())
    ledger = run_grid(replace(grid, name=name), path=folder, launcher=UntilDeadline(folder, deadline))
    document["rows"] = rows_of(ledger, folder / RUNS_FOLDER)
    write_file(out, (json.dumps(document, indent=1) + "\n").encode())
    share = "attach it to an issue of the project, or use --fill and open a pull request"
    print(f"wrote {out}; {'tiny models, not to be shared' if args.tiny else share}")
    statuses = {document["resume"]["status"], *(row["status"] for row in document["rows"])}
    return 1 if statuses & {"failed", "error", "timeout"} else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
