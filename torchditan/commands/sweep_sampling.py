# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Evaluate runs at several sampling settings: one table, a plot against model evaluations and one against guidance.

torchditan sweep outputs/quickstart --guidance_scale 1 1.5 2 4 --num_steps 10 25 50
torchditan sweep outputs/a outputs/b --sampler euler heun --weights ema raw --out outputs/sweep \
    --num_samples 5000 --seeds 3

Each point is one process of torchditan evaluate, which gets all other options. The same command continues an
interrupted sweep; with more values it adds points. A setting without values stays as the run has it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torchditan.config.options import Config
    from torchditan.evaluation.sweep import Point
    from torchditan.report.sweep_folder import SweepFolder, SweptRun
    from torchditan.supervision.exit_status import Verdict

EVALUATE = ("-m", "torchditan", "evaluate")
"""Program of a point, in the words that follow `python` or `torchrun`."""
AXES = ("sampler", "num_steps", "guidance_scale", "guidance_interval")
"""Options of `[sampling]` that a sweep varies."""
WEIGHTS = ("ema", "raw")
LOG_NAME = "evaluate.log"
_STOP_S = 10.0
_LONGEST_REASON = 200
_OF_A_POINT = ("run", "step", "weights", "out")
_WITHOUT_EFFECT = ("batch_size", "save_images", "inception_weights")
"""Options of torchditan evaluate that may differ between the points of a sweep: the figures do not depend on them."""
_NOT_IN_A_SWEEP = ("card", "images")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Arguments of this command, and the options for torchditan evaluate.

    Raises:
        ConfigError: no run is given, an axis has no value, or an option belongs elsewhere.
    """
    from torchditan.config.command_line import ScriptParser, count
    from torchditan.config.errors import ConfigError, did_you_mean, option_error

    # Runs come first: after an unknown option, argparse would take its value for a run.
    runs = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    parser = ScriptParser(__doc__, options=("sampling", "autoencoder.path"))
    parser.usage = "torchditan sweep RUN [RUN ...] [options] [options of torchditan evaluate]"
    for axis in AXES:
        example = {"guidance_interval": "LOW,HIGH"}.get(axis, "VALUE")
        parser.add_argument(
            f"--{axis}", nargs="+", metavar=example, help=f"values of sampling.{axis} (default: the run's)"
        )
    parser.add_argument(
        "--weights", nargs="+", metavar="NAME", help="ema, raw or both (default: ema if the run has it)"
    )
    parser.add_argument("--step", type=count, help="step of the checkpoint (default: the newest)")
    parser.add_argument("--figure", help="figure to compare points by (default: FID, else FD-EffNetLite0)")
    parser.add_argument("--out", type=Path, help="folder of the sweep (default: RUN/evaluation/sweep)")
    parser.add_argument("--nproc_per_node", type=count, default=1, help="ranks that draw a point together (default: 1)")
    parser.add_argument("--dry_run", action="store_true", help="list the points and their model evaluations")
    args, further = parser.parse_known_args(argv[len(runs) :])
    if not runs:
        raise ConfigError("no run: name at least one before all options, outputs/quickstart for example")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError("the sweep itself needs no torchrun: --nproc_per_node starts the ranks of each point")
    for word in further:
        name = word.split("=")[0].removeprefix("--")
        if word.startswith("--") and name in _NOT_IN_A_SWEEP:
            raise ConfigError(f"--{name} is not for sweeps; torchditan evaluate has it")
        if name.removeprefix("sampling.") in AXES:
            raise ConfigError(f"--{name} is varied here; must be --{name.removeprefix('sampling.')} VALUE ...")
    for name in args.weights or ():
        if name not in WEIGHTS:
            raise option_error("--weights", name, f"must be one of {', '.join(WEIGHTS)}{did_you_mean(name, WEIGHTS)}")
    args.runs = list({Path(run).resolve(): Path(run) for run in runs}.values())
    if args.out is None:
        if len(args.runs) > 1:
            raise ConfigError("--out is missing: several runs need a folder for their sweep")
        args.out = args.runs[0] / "evaluation" / "sweep"
    return args, further


def open_runs(args: argparse.Namespace, flags: list[str]) -> tuple[dict[str, SweptRun], dict[str, Config]]:
    """The runs with their checkpoints, and their configurations with the flags, both by label.

    A sweep keeps its checkpoints if training continues.

    Raises:
        ConfigError: a run or its checkpoint does not exist, or a flag is wrong.
    """
    from torchditan.checkpoint.files import step_of
    from torchditan.checkpoint.trained_weights import find_checkpoint
    from torchditan.config.loader import from_dict, override
    from torchditan.report.sweep_folder import SweptRun, read_sweep
    from torchditan.run.reading import read_config

    stored = [read_config(path) for path in args.runs]
    known = read_sweep(args.out).get("runs", {})
    runs, configs = {}, {}
    for path, label, content in zip(args.runs, labels_of(args.runs), stored, strict=True):
        config = override(from_dict(content["config"]), flags, sections=("sampling", "autoencoder", "text_encoder"))
        step = args.step or known.get(label, {}).get("step")
        checkpoint = find_checkpoint(path / config.checkpoint.folder, step)
        run_id = content.get("run_id") or str(path.resolve())
        runs[label], configs[label] = SweptRun(path, run_id, step_of(checkpoint)), config
    return runs, configs


def labels_of(runs: Sequence[Path]) -> list[str]:
    """Short unique names: those of the folders, or else their paths below the folder that contains all."""
    paths = [run.resolve() for run in runs]
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    common = os.path.commonpath([path.parent for path in paths])
    return ["-".join(path.relative_to(common).parts) for path in paths]


def points_of(label: str, config: Config, args: argparse.Namespace) -> list[Point]:
    """The points of a run, with their model evaluations.

    Raises:
        ConfigError: a value is wrong, or the run cannot have it.
    """
    import torch

    from torchditan.config.errors import ConfigError, option_error
    from torchditan.config.loader import override
    from torchditan.diffusion.objectives import build_objective
    from torchditan.evaluation.sampler import Sampler
    from torchditan.evaluation.sweep import WHOLE_INTERVAL, grid_points
    from torchditan.weights.trained_model import stored_spec

    values: dict[str, list[Any]] = {}
    for axis in AXES:
        words = getattr(args, axis)
        try:
            given = [override(config, [f"--sampling.{axis}={word}"], sections=("sampling",)) for word in words or ()]
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"sampling.{axis}", f"--{axis}")) from None
        values[axis] = [getattr(changed.sampling, axis) for changed in given or [config]]
    is_conditional = bool(config.dataset.num_classes) or config.model.text is not None
    if not is_conditional:
        for axis in ("guidance_scale", "guidance_interval"):
            if getattr(args, axis):
                right = f"has no effect on {label}, which was trained without classes or captions; leave it out"
                raise option_error(f"--{axis}", " ".join(getattr(args, axis)), right)
        values |= {"guidance_scale": [1.0], "guidance_interval": [list(WHOLE_INTERVAL)]}
    has_ema = config.ema.enable
    if not has_ema and "ema" in (args.weights or ()):
        raise option_error("--weights", "ema", f"{label} kept no average; must be raw")
    spec = stored_spec(config)
    objective = build_objective(config.diffusion, spec)
    points = grid_points(
        label,
        samplers=values["sampler"],
        num_steps=values["num_steps"],
        guidance_scales=values["guidance_scale"],
        guidance_intervals=[(low, high) for low, high in values["guidance_interval"]],
        weights=args.weights or (["ema"] if has_ema else ["raw"]),
    )
    counted = []
    for point in points:
        sampling = replace(config.sampling, **point.sampling)
        number = Sampler(spec, objective, sampling, torch.device("cpu")).evaluations_per_sample()
        counted.append(replace(point, model_evaluations=number))
    return counted


def shared_options(args: argparse.Namespace, further: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(options of torchditan evaluate that all points share, flags for the runs' configurations).

    Raises:
        ConfigError: torchditan evaluate does not accept the options.
    """
    from torchditan.commands import evaluate

    own, flags = evaluate.parse([str(args.runs[0]), *further])
    skipped = {*_OF_A_POINT, *_WITHOUT_EFFECT, *_NOT_IN_A_SWEEP}
    options = {name: value for name, value in vars(own).items() if name not in skipped}
    plain: dict[str, Any] = json.loads(json.dumps({**options, "flags": flags}, default=str))
    return plain, flags


def evaluate_point(folder: SweepFolder, point: Point, further: list[str], *, num_ranks: int) -> Verdict:
    """Run torchditan evaluate for a point. No process of it remains when this returns or raises."""
    from torchditan.ablation.launch import end_processes, environment, torchrun_command

    run, metrics = folder.runs[point.run], folder.options.get("metrics")
    arguments = [str(run.path), f"--step={run.step}", f"--out={folder.out(point)}", *point.flags, *further]
    arguments += ["--metrics", *metrics] if metrics else []
    command = [sys.executable, *EVALUATE, *arguments]
    if num_ranks > 1:
        command = torchrun_command(EVALUATE, arguments, num_ranks=num_ranks)
    logs = folder.logs(point)
    ranks = logs / "ranks"
    end_processes(ranks)  # of an earlier sweep that was just killed
    shutil.rmtree(ranks, ignore_errors=True)
    ranks.mkdir(parents=True)
    with open(logs / LOG_NAME, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(ranks),
            start_new_session=True,
            preexec_fn=_prepare,
        )
        try:
            process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            raise
        finally:
            end_processes(ranks, process)
    return judge_point(ranks, process.returncode, num_ranks=num_ranks, log=logs / LOG_NAME)


def _prepare() -> None:
    from torchditan.ablation.launch import prepare_child

    prepare_child()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it


def judge_point(ranks: Path, returncode: int, *, num_ranks: int, log: Path) -> Verdict:
    """How the process of a point ended."""
    from torchditan.ablation.launch import last_line
    from torchditan.config.errors import shorten
    from torchditan.run.rank_status import read_rank_statuses
    from torchditan.supervision.exit_status import Verdict, judge_ranks

    if returncode in (-signal.SIGTERM, -signal.SIGINT):
        return Verdict("interrupted", 75, f"ended by {signal.Signals(-returncode).name}")
    killed = last_line(log.read_text(encoding="utf-8", errors="replace"))
    if returncode < 0:
        why = ", as by the system when memory runs out" if returncode == -signal.SIGKILL else ""
        killed = f"ended by {signal.Signals(-returncode).name}{why}"
    verdict = judge_ranks(read_rank_statuses(ranks), num_ranks=num_ranks, killed=killed)
    reason = verdict.reason.removeprefix("rank 0: ") if num_ranks == 1 else verdict.reason
    return verdict._replace(reason=shorten(reason, most=_LONGEST_REASON))


class Sweep:
    """Evaluates the points of a folder that are not finished."""

    def __init__(self, folder: SweepFolder, further: list[str], args: argparse.Namespace) -> None:
        self.folder = folder
        self.further = further
        self.args = args
        self.exit_codes: list[int] = []
        """Of the points that failed."""

    def work(self, points: Sequence[Point]) -> None:
        """Evaluate the points that have no card.

        Raises:
            Interrupted: on Ctrl-C or SIGTERM.
            ConfigError: a mistake that concerns all points.
        """
        from torchditan.supervision.exit_status import Interrupted

        try:
            for number, point in enumerate(points, start=1):
                self._make(point, f"[{number}/{len(points)}] {point}")
        except KeyboardInterrupt:
            raise Interrupted(self._stopped()) from None

    def _stopped(self) -> str:
        results = self.folder.results()
        finished = sum(result.status == "finished" for result in results)
        self.folder.write(self.args.figure)
        return f"interrupted with {finished} of {len(results)} points finished; the same command continues"

    def _make(self, point: Point, what: str) -> None:
        from torchditan.config.errors import ConfigError
        from torchditan.run.progress import report_progress

        if self.folder.result(point).status == "finished":
            print(f"{what}: finished before", file=sys.stderr)
            return
        started = time.monotonic()
        with report_progress(what):
            verdict = evaluate_point(self.folder, point, self.further, num_ranks=self.args.nproc_per_node)
        seconds = time.monotonic() - started
        if verdict.exit_code == 75:
            raise KeyboardInterrupt
        if verdict.exit_code == 2 and not _concerns_only(point, verdict.reason):
            raise ConfigError(verdict.reason)
        if verdict.exit_code == 0 and self.folder.result(point).status != "finished":
            verdict = verdict._replace(
                exit_code=1, reason="torchditan evaluate wrote no card with the settings of this point"
            )
        if verdict.exit_code == 3 and not verdict.reason.startswith("out of memory"):
            verdict = verdict._replace(reason=f"out of memory: {verdict.reason}")
        if verdict.exit_code:
            self.folder.failures[point.name] = verdict.reason
            self.exit_codes.append(verdict.exit_code)
        self.folder.write(self.args.figure)
        self.folder.check_figure(self.args.figure)
        log = self.folder.logs(point) / LOG_NAME
        outcome = f"failed: {verdict.reason}; see {log}" if verdict.exit_code else f"done in {seconds:,.0f} s"
        print(f"{what}: {outcome}", file=sys.stderr)


def _concerns_only(point: Point, reason: str) -> bool:
    """Whether a mistake names a setting that other points of the sweep may have differently."""
    return reason.startswith((*(f"sampling.{axis} = " for axis in point.sampling), "--weights = "))


def show(folder: SweepFolder) -> None:
    """List the points without evaluating any."""
    results = folder.results()
    for number, result in enumerate(results, start=1):
        state = "" if result.status == "missing" else f" ({result.status})"
        print(f"{number:{len(str(len(results)))}}  {result.point}: {result.model_evaluations:,}{state}")
    missing = [result.model_evaluations for result in results if result.status != "finished"]
    print(f"model evaluations per image; to evaluate: {len(missing)} of {len(results)} points, {sum(missing):,} in all")


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    args, further = parse(sys.argv[1:])

    from torchditan.config.errors import ConfigError
    from torchditan.report.sweep_folder import SWEEP_NAME, TABLE_NAME, SweepFolder
    from torchditan.supervision.exit_status import reader_may_leave

    options, flags = shared_options(args, further)
    runs, configs = open_runs(args, flags)
    if options["metrics"] is None and len({bool(config.dataset.num_classes) for config in configs.values()}) > 1:
        why = "some runs were trained with classes and others without, so their default metrics differ"
        raise ConfigError(f"--metrics is missing: {why}; must be metrics that all runs can have, effnet for example")
    points = [point for label, config in configs.items() for point in points_of(label, config, args)]
    folder = SweepFolder(args.out, runs, options, list(points))
    if args.dry_run:
        folder.add_earlier_points()
        with reader_may_leave():
            show(folder)
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with folder.hold():
            folder.settle_metrics()
            folder.check_figure(args.figure)
            folder.write(args.figure)
            sweep = Sweep(folder, further, args)
            sweep.work(points)
            print(folder.write(args.figure))
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"results: {args.out / TABLE_NAME}, {args.out / SWEEP_NAME}")
    if sweep.exit_codes:
        code = next(code for code in (3, 2, 1) if code in sweep.exit_codes)
        print(f"error: points that failed: {len(sweep.exit_codes)}; the same command tries them again", file=sys.stderr)
        sys.exit(code)
