#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Train and score an entry of the speedrun: `python speedrun/run.py flow_matching`. Rules: speedrun/README.md.

python speedrun/run.py muon --seeds 0 1 2 --jobs 2             # three seeds, two at a time, one thread each
python speedrun/run.py muon --seeds 0 --check                  # repeat a committed result and compare
python speedrun/run.py muon --seeds 100 --set optimizer.lr=3e-3 --ema_widths 0.05 0.1     # a tuning trial

A result is written to speedrun/results/ENTRY/seed-0.json, a trial to speedrun/results/tuning/. Results that exist
are not made again. If the command was interrupted, run it again: it continues.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entries import FIRST_TUNING_SEED, METRIC, MODEL_EVALUATIONS, NUM_SAMPLES, NUM_THREADS, SAMPLING_SEED, Entry, load

from torchditan.ablation.grid import as_flags, parse_setting
from torchditan.config.command_line import ScriptParser, count
from torchditan.config.errors import ConfigError, option_error
from torchditan.run.atomic_files import write_file

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
RESULTS = FOLDER / "results"
TOLERANCE = 0.01
"""Largest relative difference of a repeated Fréchet distance. Another CPU rounds differently; training amplifies it."""
FIGURES = {
    "fd": METRIC,
    "kid": "KID-EffNetLite0",
    "kid_held_out": "KID to held-out-EffNetLite0",
    "recall": "recall-EffNetLite0",
    "coverage": "coverage-EffNetLite0",
    "nearest_distance": "copies: distance-EffNetLite0",
    "held_out_nearest_distance": "copies: held-out distance-EffNetLite0",
    "closer_than_held_out": "copies: closer than held-out-EffNetLite0",
}
"""Names in a result's JSON, and in a card."""


@dataclass(frozen=True)
class Trial:
    """One training of an entry and the averages of its weights to score."""

    entry: Entry
    seed: int
    widths: tuple[float | None, ...]
    """None is the run's own average, or its weights."""
    changes: dict[str, Any]
    """For tuning, settings that differ from the entry's."""
    outputs: Path
    results: Path

    @property
    def run(self) -> Path:
        """The run directory. Changes that matter only when samples are drawn use the same one."""
        changes = {option: value for option, value in self.changes.items() if not option.startswith("sampling.")}
        return self.outputs / "_".join([self.entry.name, *_words(changes), f"seed-{self.seed}"])

    def result_path(self, width: float | None) -> Path:
        if self.seed < FIRST_TUNING_SEED:
            return self.results / self.entry.name / f"seed-{self.seed}.json"
        ema = [] if width is None else [f"ema-{width:g}"]
        return (
            self.results
            / "tuning"
            / ("_".join([self.entry.name, *_words(self.changes), *ema, f"seed-{self.seed}"]) + ".json")
        )

    def scored_run(self, width: float | None) -> Path:
        return self.run if width is None else self.run.with_name(f"{self.run.name}_ema_{width:g}")


def _words(changes: dict[str, Any]) -> list[str]:
    """Changes as parts of a file name."""
    return [
        re.sub(r"[^A-Za-z0-9.,+-]", "-", f"{option.split('.')[-1]}-{value}")
        for option, value in sorted(changes.items())
    ]


def make(trial: Trial) -> list[dict[str, Any]]:
    """Train, score and write the results of a trial; those that exist are read.

    Raises:
        ConfigError: a step failed; the message names its log.
    """
    missing = [width for width in trial.widths if not trial.result_path(width).exists()]
    if missing:
        place = [f"--job.dump_folder={trial.outputs}", f"--metrics.experiment_name={trial.run.name}"]
        started = time.perf_counter()
        _call(trial, "train.py", [*trial.entry.flags(seed=trial.seed), *place])
        seconds = time.perf_counter() - started
        for width in missing:
            result = {**_of_training(trial, seconds), **_score(trial, width), "ema_width": width}
            write_file(trial.result_path(width), json.dumps(result, indent=2).encode() + b"\n")
            print(f"{trial.result_path(width).name}: {METRIC} {result['figures']['fd']:.2f}", flush=True)
    return [json.loads(trial.result_path(width).read_bytes()) for width in trial.widths]


def _call(trial: Trial, script: str, arguments: list[str]) -> None:
    """Run a script of the project with the entry's code, on one thread, into a log."""
    log = trial.outputs / "logs" / f"{trial.run.name}_{Path(script).stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = {name: str(NUM_THREADS) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    with open(log, "ab") as file:
        code = subprocess.run(
            [sys.executable, str(FOLDER / "launch.py"), trial.entry.name, script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
            check=False,
        ).returncode
    if code:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise ConfigError(f"{trial.entry.name}, seed {trial.seed}: {script} failed ({code}); see {log}: {last[0]}")


def _score(trial: Trial, width: float | None) -> dict[str, Any]:
    """Draw samples and compare them, as the protocol says."""
    run = trial.scored_run(width)
    if width is not None and not (run / "config.json").exists():
        _call(trial, "scripts/reconstruct_ema.py", [str(trial.run), "--width", f"{width:g}", "--overwrite"])
    sampling = {option: value for option, value in trial.entry.settings.items() if option.startswith("sampling.")}
    out = run / "evaluation" / "_".join(["speedrun", *_words(sampling)])
    if not (out / "card.json").exists():
        protocol = [
            f"--num_samples={NUM_SAMPLES}",
            f"--seed={SAMPLING_SEED}",
            "--class_balance=data",
            "--metrics=effnet",
        ]
        _call(trial, "scripts/evaluate.py", [str(run), *protocol, f"--out={out}", *as_flags(sampling)])
    card = json.loads((out / "card.json").read_bytes())
    if card["model_evaluations"] > MODEL_EVALUATIONS:
        right = f"the protocol allows {MODEL_EVALUATIONS}; lower sampling.num_steps"
        raise ConfigError(f"{trial.entry.name}: {card['model_evaluations']} model evaluations per sample; {right}")
    return {
        "figures": {name: card["figures"][figure]["value"] for name, figure in FIGURES.items()},
        "model_evaluations": card["model_evaluations"],
        "model_parameters": card["model_parameters"],
        "sampling": card["sampling"],
    }


def _of_training(trial: Trial, seconds: float) -> dict[str, Any]:
    run = trial.run
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    flops, previous = 0.0, 0
    for row in rows:  # a row averages the steps since the previous one
        flops += row["tflops_per_device"] * 1e12 * row["step_time_s"] * (row["step"] - previous)
        previous = row["step"]
    stored = json.loads((run / "config.json").read_bytes())
    return {
        "entry": trial.entry.name,
        "seed": trial.seed,
        "changes": trial.changes,
        "definition": trial.entry.definition(),
        "steps": previous,
        "images": rows[-1]["images_seen"],
        "training_flops": flops,
        "last_loss": rows[-1]["loss"],
        "training_seconds": round(seconds, 1),
        "threads": NUM_THREADS,
        "cpu": stored["hardware"]["cpu"],
        "versions": stored["versions"],
        "commit": stored["git_commit"],
        "date": stored["created"][:10],
    }


def compare(path: Path, trial: Trial) -> bool:
    """Print a committed result next to its repetition; whether both Fréchet distances agree within 1%."""
    there, here = json.loads(path.read_bytes()), json.loads(trial.result_path(trial.entry.ema_width).read_bytes())
    for name, value in there["figures"].items():
        print(f"{name:28} {value:10.5g} in results/   {here['figures'][name]:10.5g} here")
    for name in ("definition", "cpu", "versions", "commit"):
        if there[name] != here[name]:
            print(
                f"{name} differs: {there[name]} in results/, {here[name]} here"
                if name != "definition"
                else "the entry changed"
            )
    ratio = here["figures"]["fd"] / there["figures"]["fd"]
    print(f"{METRIC}: {ratio:.4f} of the committed one")
    return abs(ratio - 1) <= TOLERANCE


def parse(argv: list[str]) -> tuple[Any, list[Trial]]:
    """The arguments, and the trials that they ask for.

    Raises:
        ConfigError: an argument or the entry breaks a rule.
    """
    parser = ScriptParser(__doc__, options=())
    add = parser.add_argument
    add("entry", metavar="ENTRY", help="name of a file in speedrun/entries/")
    add("--seeds", type=int, nargs="+", default=[0], help=f"training seeds; {FIRST_TUNING_SEED} and above tune")
    add("--jobs", type=count, default=1, help="runs at the same time, each on one thread; at most one per core")
    add("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="for tuning: options that replace the entry's")
    add(
        "--ema_widths", type=float, nargs="+", metavar="WIDTH", help="for tuning: averages to score; 0 is the run's own"
    )
    add("--check", action="store_true", help="make results that exist again, in --outputs, and compare both")
    add("--outputs", type=Path, default=Path("outputs/speedrun"), help="folder of runs and logs")
    add("--results", type=Path, default=RESULTS, help="folder of the results")
    args, rest = parser.parse(argv)
    if rest:
        raise ConfigError(f"{rest[0]} is not expected; options of an entry are in its TOML, or --set for tuning")
    if len({*args.seeds}) < len(args.seeds) or min(args.seeds) < 0:
        raise option_error("--seeds", args.seeds, "must be different integers from 0")
    entry = load(args.entry)
    entry.register()
    changes = dict(_setting(text) for text in args.set)
    is_tuning = bool(changes) or args.ema_widths is not None
    if is_tuning and min(args.seeds) < FIRST_TUNING_SEED:
        raise option_error("--seeds", args.seeds, f"must be {FIRST_TUNING_SEED} or more with --set and --ema_widths")
    entry = load(args.entry, changes)
    widths = tuple(width or None for width in args.ema_widths) if args.ema_widths else (entry.ema_width,)
    if any(widths):  # snapshots for every width
        entry = replace(entry, ema_width=entry.ema_width or next(width for width in widths if width))
    results = args.outputs / "check" if args.check else args.results
    outputs = args.outputs / "check" if args.check else args.outputs
    return args, [Trial(entry, seed, widths, changes, outputs, results) for seed in args.seeds]


def _setting(text: str) -> tuple[str, Any]:
    option, equals, value = text.partition("=")
    if not equals:
        raise option_error("--set", text, "must be OPTION=VALUE, such as optimizer.lr=3e-3")
    return option, parse_setting(option, value)


def main() -> None:
    args, trials = parse(sys.argv[1:])
    if args.jobs > (os.cpu_count() or 1):
        raise option_error("--jobs", args.jobs, f"must be at most the number of cores, {os.cpu_count()}")
    with ThreadPoolExecutor(args.jobs) as pool:
        for future in [pool.submit(make, trial) for trial in trials]:
            future.result()
    if args.check:
        for trial in trials:
            path = replace(trial, results=args.results).result_path(trial.entry.ema_width)
            if not path.exists():
                raise ConfigError(f"{path} does not exist; leave --check out to make it")
            if not compare(path, trial):
                sys.exit(1)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
