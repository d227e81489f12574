#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One loss curve on any ranks: the quickstart in five ways, drawn over each other: `python benchmarks/one_curve.py`.

One process; DDP on 2 ranks; FSDP on 4; HSDP on 2 x 2; and one run that is killed twice (SIGKILL to every process) and
continued on other ranks. All in float32, with the same global batch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed works too

from torchditan.run import provenance
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_metrics

DDP = ["--training.data_parallel_replicate_degree=2", "--training.data_parallel_shard_degree=1"]
HSDP = ["--training.data_parallel_replicate_degree=2", "--training.data_parallel_shard_degree=2"]
WAYS: dict[str, list[tuple[int, list[str], float]]] = {
    "one process": [(1, [], 1)],
    "DDP, 2 ranks": [(2, DDP, 1)],
    "FSDP, 4 ranks": [(4, [], 1)],
    "HSDP, 2 x 2 ranks": [(4, HSDP, 1)],
    "killed twice: 4, then 1, then 2 ranks": [(4, [], 0.36), (1, [], 0.71), (2, [], 1)],
}
"""Name -> parts of the run: ranks, options, and the share of the steps after which it is killed."""


def train(ranks: int, options: list[str], run: Path, *, kill_after: int | None) -> None:
    """Start or continue a run, and kill all its processes once it has logged `kill_after` steps."""
    program = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--rdzv_backend=c10d"]
    program += ["--rdzv_endpoint=localhost:0", "-m", "torchditan", "train", "quickstart", *options]
    log = run.with_suffix(".log").open("ab")
    process = subprocess.Popen(program, stdout=log, stderr=log, start_new_session=True)
    while process.poll() is None:
        time.sleep(0.05)
        if kill_after is not None and last_step(run) >= kill_after:
            os.killpg(process.pid, signal.SIGKILL)
            subprocess.run(["pkill", "-KILL", "-f", f"experiment_name={run.name}"], check=False)  # ranks lead groups
            process.wait()
            return
    if process.returncode:
        sys.exit(f"{' '.join(program)} failed, see {run.with_suffix('.log')}")


def last_step(run: Path) -> int:
    return max((row["step"] for row in read_metrics(run)), default=0) if (run / "metrics.jsonl").exists() else 0


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(run) if "loss" in row}


def draw(result: dict[str, Any], path: Path) -> None:
    """The curves over each other, and below how far each is from that of one process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
    first, *others = result["losses"].items()
    for place, (name, curve) in enumerate((first, *others)):
        width = 7 - 1.4 * place
        above.plot(result["steps"], curve, linewidth=width, label=name, solid_capstyle="butt")
        if place:
            relative = [abs(a - b) / b or None for a, b in zip(curve, first[1], strict=True)]
            below.semilogy(result["steps"], relative, ".", markersize=9 - 1.7 * place, color=f"C{place}")
    for step, ranks in result["kills"]:
        above.axvline(step, color="0.6", linewidth=0.8, linestyle="--")
        above.text(step, above.get_ylim()[1], f" kill -9, then {ranks}", va="top", fontsize=7, color="0.35")
    above.set_ylabel("loss")
    above.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.93))
    below.set_ylabel("relative\ndifference")
    below.set_xlabel(f"step; largest difference {result['largest_difference']:.1e}")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("outputs/one_curve"), help="of the runs, replaced")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/one_curve.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/one_curve.png"))
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    found, kills = {}, []
    for number, (name, parts) in enumerate(WAYS.items()):
        run = args.folder / f"way{number}"
        for place, (ranks, options, share) in enumerate(parts):
            common = [f"--training.steps={args.steps}", f"--metrics.log_freq={max(1, args.steps // 100)}"]
            common += ["--training.mixed_precision_param=float32", "--metrics.enable_sampling=false"]
            common += [f"--checkpoint.interval={max(1, args.steps // 6)}", f"--job.dump_folder={args.folder}"]
            common += [f"--metrics.experiment_name={run.name}", f"--validation.freq={args.steps}"]
            kill_after = None if share == 1 else round(share * args.steps)
            train(ranks, [*options, *common], run, kill_after=kill_after)
            if kill_after is not None:
                ranks_after = parts[place + 1][0]
                kills.append((last_step(run), "one process" if ranks_after == 1 else f"{ranks_after} ranks"))
        found[name] = losses(run)
        print(f"{name}: loss {found[name][args.steps]:.7f} at step {args.steps}", flush=True)
    steps = [*found["one process"]]
    curves = {name: [curve[step] for step in steps] for name, curve in found.items()}
    one = curves["one process"]
    largest = max(abs(a - b) / b for curve in curves.values() for a, b in zip(curve, one, strict=True))
    result = {
        "commit": provenance.git_commit(),
        "cpu": provenance.cpu_name(),
        "versions": provenance.versions("torch"),
        "steps": steps,
        "kills": kills,
        "largest_difference": largest,
        "losses": curves,
    }
    draw(result, args.picture)
    write_file(args.out, json.dumps(result).encode() + b"\n")
    print(f"largest relative difference {largest:.2e}; {args.picture}")


if __name__ == "__main__":
    main()
