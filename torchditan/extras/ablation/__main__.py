# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Run an ablation grid, or show the ledger of one.

torchditan ablate debug
torchditan ablate 0.5B --axes.parallel 1,1 --axes.model.patch_size 2 --name one_gpu
torchditan ablate 7B --dry-run --device a100-80gb
torchditan ablate my_grid.toml --launcher slurm --slurm.slurm_partition gpu
torchditan ablate show outputs/debug
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from torchditan.config.command_line import ScriptParser
from torchditan.errors import ConfigError
from torchditan.extras.ablation.grid import BATCH_SIZE, OPTIONS, Grid, Run, load_grid, parse_axis, parse_setting
from torchditan.registry import LAUNCHERS, build, resolve
from torchditan.supervision.exit_status import reader_may_leave

_EPILOG = """\
--axes.KEY VALUES adds an axis or replaces one of the file: --axes.training.batch_size 1,2,4, --axes.parallel 1,8 8,1.
--settings.KEY VALUE sets an option of every run: --settings.dataset.num_workers 0.
--slurm.KEY VALUE sets a parameter of submitit: --slurm.slurm_partition gpu.

If you repeat the command, it makes only the runs that are missing or failed.
"""
_AMD_HELP = "also write amd/runs_summary.csv, with the columns of AMD's diffusion benchmark (docs/compatibility.md)"
_OF_FILE = ("steps", "window", "repeats", "timeout_s", "autotune", "memory_limit_gib")


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """(arguments, values of the `--axes.`, `--settings.` and `--slurm.` flags by name)."""
    if argv[:1] == ["show"]:
        parser = ScriptParser("Print the ledger of a grid, one row per run, as a table.", options=())
        parser.add_argument("show", type=Path, metavar="FOLDER", help="folder of the grid, for example outputs/debug")
        parser.add_argument("--amd_summary", action="store_true", help=_AMD_HELP)
        return parser.parse(argv[1:])[0], {}
    parser = ScriptParser(__doc__, options=("axes", "settings", "slurm"))
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("grid", help="grid file: a path, or a name in train_configs/ablations/")
    add("--name", help="folder name of the grid in the dump folder (default: name of the file)")
    add("--dump_folder", type=Path, default=Path("outputs"), help="default: outputs")
    for option in (OPTIONS[key] for key in _OF_FILE):
        add(f"--{option.name}", type=option.parse, help=f"{option.description} (default: from the file)")
    add("--launcher", default="local", help=f"{', '.join(LAUNCHERS)}, or module:name (default: local)")
    add("--slurm_jobs", type=int, default=16, help="maximum number of submitted jobs (default: 16)")
    add("--amd_summary", action="store_true", help=_AMD_HELP)
    add("--dry-run", action="store_true", help="list the runs, their commands and their planned memory")
    add("--device", help="device of the planner with --dry-run, for example a100-80gb")
    arguments, rest = parser.parse(argv[1:] if argv[:1] == ["run"] else argv)
    flags: dict[str, list[str]] = {}
    for word in rest:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = [value] if equals else []
        elif flags:
            flags[name].append(word)
        else:
            raise ConfigError(f"{word} is not expected")
    empty = [name for name, words in flags.items() if not "".join(words).strip(", ")]
    if empty:
        raise ConfigError(f"--{empty[0]} needs a value")
    return arguments, flags


def _of_section(flags: dict[str, list[str]], section: str) -> dict[str, list[str]]:
    return {name.removeprefix(section): words for name, words in flags.items() if name.startswith(section)}


def _load(arguments: argparse.Namespace, flags: dict[str, list[str]]) -> Grid:
    axes = {name: parse_axis(name, words) for name, words in _of_section(flags, "axes.").items()}
    settings = {name: parse_setting(name, " ".join(words)) for name, words in _of_section(flags, "settings.").items()}
    given = {key: getattr(arguments, key) for key in _OF_FILE if getattr(arguments, key) is not None}
    grid = load_grid(arguments.grid, axes=axes, overrides={**settings, **given})
    if arguments.name is None:
        return grid
    if not arguments.name or "/" in arguments.name or arguments.name in (".", ".."):
        raise ConfigError(f"--name = {arguments.name!r}: must be a folder name without slashes")
    return replace(grid, name=arguments.name)


def _run(arguments: argparse.Namespace, flags: dict[str, list[str]]) -> None:
    from torchditan.extras.ablation.amd_summary import write_amd_summary
    from torchditan.extras.ablation.ledger import STATUSES
    from torchditan.extras.ablation.runner import run_grid

    grid = _load(arguments, flags)
    if grid.left_out is not None:
        print(f"note: {grid.left_out}", file=sys.stderr)
    path = arguments.dump_folder / grid.name
    if arguments.dry_run:
        with reader_may_leave():
            _dry_run(grid, path, device=arguments.device)
        return
    kind, own = resolve(LAUNCHERS, "--launcher", arguments.launcher)
    parameters = {name: _plain(words) for name, words in _of_section(flags, "slurm.").items()}
    given = {"parameters": parameters, "max_parallel": arguments.slurm_jobs, **own}
    launcher = build(kind, "--launcher", arguments.launcher, path, **given)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        rows = run_grid(grid, path=path, launcher=launcher)
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


def _dry_run(grid: Grid, path: Path, *, device: str | None) -> None:
    from torchditan.extras.ablation.maker import Maker
    from torchditan.extras.planner.devices import device_named

    if device not in (None, "cpu"):
        device_named(device)
    maker, runs = Maker(grid, path), grid.runs()
    print(f"{grid.name}: {len(runs)} runs of {grid.steps} steps, the last {grid.window} measured, into {path}")
    for number, run in enumerate(runs, start=1):
        expected = "batch size from autotune" if run.axes[BATCH_SIZE] == "auto" else _expected(run, device)
        print(f"{number:{len(str(len(runs)))}}  {run.name}  {expected}")
        print(f"    {shlex.join(maker.job(run).command())}")


def _expected(run: Run, device: str | None) -> str:
    """The planner's estimate of a run's memory, as far as available."""
    from torchditan.extras.planner.plan import plan_run

    try:
        plan = plan_run(run.config, device=device, num_devices=run.num_devices)
    except ConfigError as error:
        return f"no estimate: {error}"
    return f"expected {plan.peak_memory_gib:.2f} GiB{', does not fit' if plan.fits is False else ''}"


@reader_may_leave()
def show(folder: Path, *, amd_summary: bool) -> None:
    from torchditan.extras.ablation.amd_summary import write_amd_summary
    from torchditan.extras.ablation.board import Board
    from torchditan.extras.ablation.ledger import read_ledger
    from torchditan.extras.ablation.runner import stored_grid

    grid = stored_grid(folder)
    rows = read_ledger(folder, axes=grid.columns)
    if not rows:
        print(f"{folder}: no run has finished")
        return
    board = Board(sys.stdout, num_runs=len(rows), name_width=max(len(row["run_name"]) for row in rows))
    board.begin(f"{grid.name}: {len(rows)} rows")
    for row in rows:
        board.row(row, is_new=False)
    if amd_summary:
        print(f"AMD's summary: {write_amd_summary(grid, folder)}")


def main() -> None:
    arguments, flags = parse(sys.argv[1:])
    if "show" in arguments:
        show(arguments.show, amd_summary=arguments.amd_summary)
    else:
        _run(arguments, flags)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
