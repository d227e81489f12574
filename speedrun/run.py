# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Train and score an entry of the speedrun, or print its leaderboards, in a checkout. Rules: speedrun/README.md.

torchditan speedrun                                             # the tracks, their entries and results
torchditan speedrun laptop scenes                               # make the results that are missing, and print the row
torchditan speedrun earth muon --seeds 0 --check                # repeat a committed result and compare
torchditan speedrun laptop scenes --time                        # the ratio of step times to that of the baseline
torchditan speedrun earth flow_matching --seeds 100 --set optimizer.lr=3e-3 --ema_widths 0.05 0.1     # a tuning trial
torchditan speedrun --board                                     # write speedrun/LEADERBOARD.md

A result is written to speedrun/TRACK/results/ENTRY/seed-0.json, a trial to speedrun/TRACK/results/tuning/. Results that
exist are not made again. If the command was interrupted, run it again: it continues.
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

import torch

from speedrun.entries import (
    FIRST_TUNING_SEED,
    FOLDER,
    Entry,
    Track,
    load,
    load_track,
    register,
    split_sampling,
    track_names,
)
from speedrun.ladder import Result, read_result
from speedrun.leaderboard import read_board, table, write_page
from speedrun.step_times import measure_and_write
from torchditan.config.command_line import ScriptParser, count
from torchditan.config.loader import as_flags, load_config
from torchditan.errors import ConfigError, option_error
from torchditan.extras.ablation.grid import parse_setting
from torchditan.extras.ablation.launch import Job, execute
from torchditan.extras.evaluation.card import spread_of
from torchditan.optim.divergence import DivergenceError
from torchditan.run.atomic_files import write_file
from torchditan.run.reading import read_metrics, read_status


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

    def read_result(self) -> Result | None:
        """The result of this definition, if it exists. ConfigError: it belongs to an older version of the entry."""
        return read_result(self.result_path, self.entry) if self.result_path.exists() else None


def _words(changes: dict[str, Any]) -> list[str]:
    """Changes as parts of a file name."""
    return [re.sub(r"[^A-Za-z0-9.,+-]", "-", f"{option}-{value}") for option, value in sorted(changes.items())]


def make(trial: Trial) -> Result:
    """Train, score and write the result of a trial; one that exists is read.

    A tuning trial whose training failed, or that did not reach the target, has a result too, with the reason.

    Raises:
        ConfigError: an existing result is of an older version of the entry, a rule is broken, or a step failed.
    """
    result = trial.read_result()
    if result is not None:
        print(f"{trial.result_path} exists; to repeat it: --check, or delete it", flush=True)
        return result
    found: dict[str, Any] = _train(trial) or _score(trial)
    score = trial.entry.track.score
    if "failed" in found and trial.seed < FIRST_TUNING_SEED:
        raise ConfigError(f"{trial.run.name}: {found['failed']}")
    result = {
        "entry": trial.entry.name,
        "seed": trial.seed,
        "changes": trial.changes,
        "ema_width": trial.entry.ema_width,
        "definition": trial.entry.definition(),
        **found,
    }
    write_file(trial.result_path, json.dumps(result, indent=2).encode() + b"\n")
    shown = found.get("failed") or f"{score} {found['figures'][score]:.4g}"
    print(f"{trial.result_path.name}: {shown}", flush=True)
    return result


def _train(trial: Trial) -> dict[str, str]:
    """Train to the end, from where an earlier call stopped. Returns why the training failed, if it did."""
    if trial.run.exists() and (read_status(trial.run) or {}).get("state") == "completed":
        return {}
    place = [f"--job.dump_folder={trial.outputs}", f"--metrics.experiment_name={trial.run.name}"]
    trained = replace(trial.entry, settings=split_sampling(trial.entry.settings)[0])  # runs are shared by samplers
    try:
        call(trial, "train", [*trained.flags(seed=trial.seed), *place])
    except ConfigError:
        reason = str((read_status(trial.run) or {}).get("reason"))
        if trial.seed < FIRST_TUNING_SEED or not reason.startswith(DivergenceError.__name__):
            raise
        return {"failed": reason}
    return {}


def call(trial: Trial, command: str, arguments: list[str]) -> None:
    """Run a command of `torchditan` with the entry's code and the variables of its track, into a log."""
    job = Job(
        program=(*entry_program(trial.entry, trial.outputs), command, *arguments),
        folder=trial.outputs / "logs" / f"{trial.run.name}_{command}",
        variables=trial.entry.track.variables,
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
    return ["-m", "speedrun.launch", json.dumps(entry.registry), code]


def _score(trial: Trial) -> dict[str, Any]:
    """Draw samples of the last step and compare them. With a target, those of the first checkpoint that reaches it."""
    entry, track = trial.entry, trial.entry.track
    if not track.reach:
        return _score_step(trial, entry.num_steps, trial.evaluation)
    interval = load_config(entry.flags(seed=0)).checkpoint.interval
    for step in [*range(interval, entry.num_steps, interval), entry.num_steps]:
        found = _score_step(trial, step, trial.evaluation / f"step-{step}")
        if all(found["figures"][name] >= least for name, least in track.reach.items()):
            found["figures"]["seconds"] = found["training_seconds"]
            return found
    return {"failed": f"no checkpoint reached {track.reach}", **found}


def _score_step(trial: Trial, step: int, out: Path) -> dict[str, Any]:
    track = trial.entry.track
    if not (out / "card.json").exists():
        sampling = split_sampling(trial.entry.settings)[1]
        where = [f"--step={step}", f"--out={out}"]
        call(trial, "evaluate", [str(trial.run), *track.evaluate, *where, *as_flags(sampling)])
    card = json.loads((out / "card.json").read_bytes())
    if card["model_evaluations"] > track.model_evaluations:
        right = f"the track allows {track.model_evaluations}; lower sampling.num_steps"
        raise ConfigError(f"{trial.entry.name}: {card['model_evaluations']} model evaluations per sample; {right}")
    return {
        **_training_until(trial.run, step),
        "figures": {name: card["figures"][figure]["value"] for name, figure in track.figures.items()},
        "model_evaluations": card["model_evaluations"],
        "model_parameters": card["model_parameters"],
        "sampling": card["sampling"],
    }


def _training_until(run: Path, step: int) -> dict[str, Any]:
    """What a training took until a step; its time has all that the process did since the start, compilation too."""
    flops, previous = 0.0, 0
    for row in read_metrics(run):
        if "loss" in row and previous < step:  # a row averages the steps since the previous one
            flops += row["tflops_per_device"] * 1e12 * row["step_time_s"] * (row["step"] - previous)
            previous, last = row["step"], row
    stored = json.loads((run / "config.json").read_bytes())
    return {
        "steps": previous,
        "images": last["images_seen"],
        "training_flops": flops,
        "last_loss": last["loss"],
        "training_seconds": round(last["elapsed_s"], 1),
        "threads": stored["hardware"]["cpu_threads"],
        "cpu": stored["hardware"]["cpu"],
        "device": stored["hardware"]["device_name"],
        "versions": stored["versions"],
        "commit": stored["git_commit"],
        "date": stored["created"][:10],
    }


def compare(committed: Result, again: Result, track: Track, tolerance: float) -> bool:
    """Print a committed result next to its repetition. Whether both agree.

    On the same machine and commit, the last loss and all figures must be equal to the bit, except seconds. Elsewhere,
    the score may differ by `tolerance`.
    """
    print(f"{committed['entry']}, seed {committed['seed']}: committed, here")
    before, after = ({"last_loss": result["last_loss"], **result["figures"]} for result in (committed, again))
    for name, value in before.items():
        print(f"  {name:28} {value:10.5g} {after[name]:10.5g}")
    places = ("cpu", "device", "threads", "versions", "commit")
    moved = [name for name in places if committed.get(name) != again[name]]
    for name in moved:
        print(f"  {name:28} {committed.get(name)}, {again[name]}")
    is_near = abs(after[track.score] - before[track.score]) <= tolerance
    is_equal = all(after[name] == value for name, value in before.items() if name != "seconds")
    agrees = is_near and (is_equal or bool(moved))
    asked = f"{track.score} within {tolerance:.3g}" if moved else "equal to the bit, on the same machine and commit"
    print(f"  {'agrees' if agrees else 'DIFFERS'}: asked for {asked}")
    return agrees


def check(trials: list[Trial], *, jobs: int) -> bool:
    """Make committed results again and compare them. A finished check starts anew, an interrupted one continues."""
    entry, track = trials[0].entry, trials[0].entry.track
    committed = read_board(track).results[entry.name]
    for trial in trials:
        if trial.seed not in committed:
            raise ConfigError(f"no committed result of {entry.name}, seed {trial.seed}; leave --check out")
        if trial.result_path.exists():
            trial.result_path.unlink()
            shutil.rmtree(trial.run, ignore_errors=True)
    agreements = []
    scores = [committed[seed]["figures"][track.score] for seed in entry.seeds if seed in committed]
    for trial, again in zip(trials, make_all(trials, jobs=jobs), strict=True):
        one = committed[trial.seed]
        if track.tolerance is not None:
            tolerance = track.tolerance * one["figures"][track.score]
        else:
            tolerance = spread_of(scores).half_width if len(scores) > 1 else 0.0
        agreements.append(compare(one, again, track, tolerance))
    return all(agreements)


def make_all(trials: list[Trial], *, jobs: int) -> list[Result]:
    """`make`, some at the same time. After a failure or Ctrl-C no further trial starts."""
    pool = ThreadPoolExecutor(jobs)
    try:
        return [future.result() for future in [pool.submit(make, trial) for trial in trials]]
    finally:
        pool.shutdown(cancel_futures=True)


def parser() -> ScriptParser:
    parser = ScriptParser(__doc__, options=())
    add = parser.add_argument
    add("track", metavar="TRACK", nargs="?", help="a folder of speedrun/ with a track.toml")
    add("entry", metavar="ENTRY", nargs="?", help="name of a file in speedrun/TRACK/entries/")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    seeds = f"default: the track's; {FIRST_TUNING_SEED} and above are for tuning"
    add("--seeds", type=int, help=seeds, **several)
    add("--jobs", type=count, default=1, help="runs at the same time (default: 1); at most one per core")
    add("--set", metavar="OPTION=VALUE", default=[], help="for tuning: options that replace the entry's", **several)
    widths = "for tuning: one training each; 0: no ema.width"
    add("--ema_widths", type=float, metavar="WIDTH", help=widths, **several)
    add("--check", action="store_true", help="make committed results again and compare both")
    add("--time", action="store_true", help="measure the ratio of step times to the baseline's; on a quiet machine")
    add("--board", action="store_true", help="write the page of all leaderboards")
    add("--outputs", type=Path, default=Path("outputs/speedrun"), help="folder of runs and logs")
    add("--tracks", type=Path, default=FOLDER, help="folder of the tracks (default: speedrun/)")
    return parser


def trials_of(args: Any, track: Track) -> list[Trial]:
    """The trials that the arguments ask for.

    Raises:
        ConfigError: an argument or the entry breaks a rule, or something is not installed.
    """
    entry = load(track, args.entry)
    register(entry.registry, entry.code)
    seeds: list[int] = args.seeds or entry.seeds
    known = {*track.seeds, *entry.seeds}
    if len({*seeds}) < len(seeds) or any(seed < FIRST_TUNING_SEED and seed not in known for seed in seeds):
        right = f"must be different ones of {', '.join(map(str, sorted(known)))}, or trials from {FIRST_TUNING_SEED} on"
        raise option_error("--seeds", seeds, right)
    if args.jobs > (os.cpu_count() or 1):
        raise option_error("--jobs", args.jobs, f"must be at most the number of cores, {os.cpu_count()}")
    changes = dict(_setting(text) for text in args.set)
    if changes or args.ema_widths is not None:
        if min(seeds) < FIRST_TUNING_SEED:
            right = f"must be {FIRST_TUNING_SEED} or more with --set and --ema_widths"
            raise option_error("--seeds", seeds, right)
        if args.check:
            raise ConfigError("--check repeats the entry as it is; leave out --set and --ema_widths")
    entry = load(track, args.entry, changes)
    widths = [width or None for width in args.ema_widths or []] or [entry.ema_width]
    entries = [replace(entry, ema_width=width) for width in widths]
    for module, extra in track.needs.items():
        if not _is_installed(module):
            raise ConfigError(f"the track {track.name} needs pip install -e '.[{extra}]'")
    if track.needs_gpu and not torch.cuda.is_available():
        raise ConfigError(f"the track {track.name} needs a GPU")
    for each in entries:  # refuses wrong values before anything is written
        try:
            load_config(each.flags(seed=0))
        except ConfigError as error:
            raise ConfigError(f"{'--set' if changes else f'{each.name}.toml'}: {error}") from None
    outputs = args.outputs / track.name / ("check" if args.check else "")
    results = outputs / "results" if args.check else track.results
    return [Trial(each, seed, changes, outputs, results) for seed in seeds for each in entries]


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
    args = parser().parse(sys.argv[1:])[0]
    if args.board:
        write_page(args.tracks)
        return
    tracks = [load_track(name, args.tracks) for name in ([args.track] if args.track else track_names(args.tracks))]
    if (args.check or args.time) and (not args.entry or (args.check and args.time)):
        raise ConfigError("--check and --time need TRACK and ENTRY, and exclude each other")
    if not args.entry:
        for track in tracks:
            print(f"{track.name}: {track.title}", "", *table(read_board(track)), "", sep="\n")
        return
    (track,) = tracks
    trials = trials_of(args, track)
    entry = trials[0].entry
    if args.time:
        if not track.baseline:
            raise ConfigError(f"--time: the track {track.name} measures seconds in every run; leave it out")
        measure_and_write(load(track, track.baseline), entry)
    elif args.check:
        sys.exit(0 if check(trials, jobs=args.jobs) else 1)
    else:
        make_all(trials, jobs=args.jobs)
        print("", *table(read_board(track), [entry.name]), sep="\n")
