# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run an ablation grid.

torchditan ablate debug
torchditan ablate 0.5B --axes.parallel 1,1 --axes.model.patch_size 2 --name one_gpu
torchditan ablate 7B --dry-run --device a100-80gb
torchditan ablate my_grid.toml --launcher slurm --slurm.slurm_partition gpu
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from torchditan.config.errors import ConfigError, did_you_mean

_PREFIXES = ("--axes.", "--settings.", "--slurm.")
_EPILOG = """\
--axes.KEY VALUES adds an axis or replaces one of the file: --axes.training.batch_size 1,2,4, --axes.parallel 1,8 8,1.
--settings.KEY VALUE sets an option of every run: --settings.dataset.num_workers 0.
--slurm.KEY VALUE sets a parameter of submitit: --slurm.slurm_partition gpu.

If you repeat the command, it makes only the runs that are missing or failed.
"""
_AMD_HELP = "also write amd/runs_summary.csv, with the columns of AMD's diffusion benchmark (docs/compatibility.md)"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        raise ConfigError(message.replace("ignored explicit argument", "does not take a value, but got"))


def _parsers() -> tuple[_Parser, _Parser]:
    """(the whole parser, that of the command run)."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="torchditan ablate", description=__doc__, formatter_class=shown)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="make the runs of a grid",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=shown,
        allow_abbrev=False,
    )
    run.add_argument("grid", help="grid file: a path, or a name in train_configs/ablations/")
    run.add_argument("--name", help="folder name of the grid in the dump folder (default: name of the file)")
    run.add_argument("--dump_folder", type=Path, default=Path("outputs"), help="default: outputs")
    run.add_argument("--steps", type=int, help="optimizer steps per run (default: from the file)")
    run.add_argument("--window", type=int, help="number of last steps to measure (default: from the file)")
    run.add_argument("--repeats", type=int, help="number of times to run the whole grid (default: from the file)")
    run.add_argument("--timeout_s", type=float, help="time limit of a run in seconds (default: from the file)")
    run.add_argument("--autotune", help="search for the batch size: largest or fastest (default: from the file)")
    run.add_argument("--memory_limit_gib", type=float, help="memory limit of a rank on a CPU (default: from the file)")
    run.add_argument(
        "--retry", default="error,timeout", help="statuses of runs to retry, or none (default: error,timeout)"
    )
    run.add_argument("--launcher", choices=("local", "slurm"), default="local", help="default: local")
    run.add_argument("--slurm_jobs", type=int, default=16, help="maximum number of submitted jobs (default: 16)")
    run.add_argument("--amd_summary", action="store_true", help=_AMD_HELP)
    run.add_argument("--dry-run", action="store_true", help="list the runs, their commands and their planned memory")
    run.add_argument("--device", help="device of the planner with --dry-run, for example a100-80gb")
    text = "print the ledger of a grid, one row per run, as a table"
    show = commands.add_parser("show", help=text, description=f"{text.capitalize()}.", allow_abbrev=False)
    show.add_argument("folder", type=Path, help="folder of the grid, for example outputs/debug")
    show.add_argument("--amd_summary", action="store_true", help=_AMD_HELP)
    return parser, run


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """(arguments, values of the `--axes.`, `--settings.` and `--slurm.` flags by name)."""
    own: list[str] = []
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in argv:
        if word.startswith(_PREFIXES):
            name, equals, value = word[2:].partition("=")
            current = flags.setdefault(name, [])
            current += [value] if equals else []
        elif word.startswith("--"):
            current = None
            own.append(word)
        elif current is not None:
            current.append(word)
        else:
            own.append(word)
    parser, run = _parsers()
    if own and not own[0].startswith("-") and own[0] not in ("run", "show"):
        own.insert(0, "run")
    arguments, unknown = parser.parse_known_args(own)
    if unknown:
        if arguments.command == "show":
            raise ConfigError(f"{unknown[0]} is not an option of show")
        known = [option for action in run._actions for option in action.option_strings if option.startswith("--")]
        known += _PREFIXES
        raise ConfigError(f"{unknown[0]} is not an option here{did_you_mean(unknown[0], known) or '; see --help'}")
    empty = [name for name, words in flags.items() if not "".join(words).strip(", ")]
    if empty:
        raise ConfigError(f"--{empty[0]} needs a value")
    return arguments, flags


def _load(arguments: argparse.Namespace, flags: dict[str, list[str]]) -> Any:
    from dataclasses import replace

    from torchditan.ablation.grid import load_grid, parse_axis, parse_setting

    axes = {name[5:]: parse_axis(name[5:], words) for name, words in flags.items() if name.startswith("axes.")}
    settings = {
        name[9:]: parse_setting(name[9:], " ".join(words))
        for name, words in flags.items()
        if name.startswith("settings.")
    }
    keys = ("steps", "window", "repeats", "timeout_s", "autotune", "memory_limit_gib")
    given = {key: getattr(arguments, key) for key in keys if getattr(arguments, key) is not None}
    grid = load_grid(arguments.grid, axes=axes, overrides={**settings, **given})
    if arguments.name is None:
        return grid
    if not arguments.name or "/" in arguments.name or arguments.name in (".", ".."):
        raise ConfigError(f"--name = {arguments.name!r}: must be a folder name without slashes")
    return replace(grid, name=arguments.name)


def _run(arguments: argparse.Namespace, flags: dict[str, list[str]]) -> None:
    from torchditan.ablation.amd_summary import write_amd_summary
    from torchditan.ablation.device import probe
    from torchditan.ablation.launchers import LocalLauncher, slurm_launcher
    from torchditan.ablation.ledger import STATUSES
    from torchditan.ablation.runner import run_grid

    grid = _load(arguments, flags)
    if grid.left_out is not None:
        print(f"note: {grid.left_out}", file=sys.stderr)
    path = arguments.dump_folder / grid.name
    retry = [] if arguments.retry == "none" else arguments.retry.split(",")
    for status in retry:
        if status not in STATUSES:
            raise ConfigError(f"--retry = {status!r}: must be one or more of {', '.join(STATUSES)}, or none")
    if arguments.dry_run:
        _dry_run(grid, path, device=arguments.device)
        return
    launcher: Any = LocalLauncher()
    elsewhere = arguments.launcher == "slurm"
    parameters = {name[6:]: _plain(words) for name, words in flags.items() if name.startswith("slurm.")}
    if elsewhere:
        launcher = slurm_launcher(path, parameters=parameters, max_parallel=arguments.slurm_jobs)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        rows = run_grid(grid, path=path, launcher=launcher, retry=retry, find_device=None if elsewhere else probe)
    except KeyboardInterrupt:
        if arguments.amd_summary:  # covers the runs made so far
            write_amd_summary(grid, path)
        raise
    counts = {status: sum(row["status"] == status for row in rows) for status in STATUSES}
    print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    print(f"the ledger: {path / 'runs_summary.csv'}; the report: torchditan report {path}")
    if arguments.amd_summary:
        print(f"AMD's summary: {write_amd_summary(grid, path)}")


def _interrupt(signum: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def _plain(words: list[str]) -> Any:
    text = " ".join(words)
    return int(text) if text.isdecimal() else text


def _dry_run(grid: Any, path: Path, *, device: str | None) -> None:
    from torchditan.ablation.grid import BATCH_SIZE
    from torchditan.ablation.maker import maker_of

    maker = maker_of(grid, path)
    runs = grid.runs()
    print(f"{grid.name}: {len(runs)} runs of {grid.steps} steps, the last {grid.window} measured, into {path}")
    for number, run in enumerate(runs, start=1):
        expected = "batch size from autotune" if run.axes[BATCH_SIZE] == "auto" else _expected(run, device)
        print(f"{number:{len(str(len(runs)))}}  {run.name}  {expected}")
        print(f"    {shlex.join(maker.job(run).command())}")


def _expected(run: Any, device: str | None) -> str:
    """The planner's estimate of a run's memory, as far as available."""
    from torchditan.planner.plan import plan_run

    try:
        plan = plan_run(run.config, device=device, num_devices=run.num_devices)
    except ConfigError as error:
        return f"no estimate: {error}"
    return f"expected {plan.peak_memory_gib:.2f} GiB{', does not fit' if plan.fits is False else ''}"


def _show(folder: Path, *, amd_summary: bool) -> None:
    from torchditan.ablation.amd_summary import write_amd_summary
    from torchditan.ablation.board import Board
    from torchditan.ablation.ledger import read_ledger
    from torchditan.ablation.runner import read_grid, stored_grid

    stored = read_grid(folder)
    rows = read_ledger(folder, axes=list(stored["axes"]))
    if not rows:
        print(f"{folder}: no run has finished")
        return
    board = Board(sys.stdout, num_runs=len(rows), name_width=max(len(row["run_name"]) for row in rows))
    board.begin(f"{stored['name']}: {len(rows)} rows")
    for row in rows:
        board.row(row, is_new=False)
    if amd_summary:
        print(f"AMD's summary: {write_amd_summary(stored_grid(folder), folder)}")


def main() -> None:
    arguments, flags = parse(sys.argv[1:])
    from torchditan.supervision.exit_status import reader_may_leave

    if arguments.command == "show":
        with reader_may_leave():
            _show(arguments.folder, amd_summary=arguments.amd_summary)
    elif arguments.dry_run:
        with reader_may_leave():
            _run(arguments, flags)
    else:
        _run(arguments, flags)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
