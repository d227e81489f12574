# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Read checkpoints: progress and states, with errors that name the damage."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchditan.checkpoint.files import (
    CheckpointReader,
    DamagedCheckpointError,
    SafeLoadPlanner,
    final_weights,
    list_checkpoints,
    step_of,
)
from torchditan.errors import ConfigError, first_line, option_error, printable
from torchditan.run.training_progress import Progress

PROGRESS_FILE = "progress.json"
CONFIG_FILE = "config.json"


def latest_checkpoint(folder: Path) -> Path | None:
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def find_checkpoint(folder: Path, step: int | None) -> Path:
    """The checkpoint of `step`, or the newest complete one. Newer damaged ones are reported.

    A run without checkpoints has a file of its final weights instead.

    Raises:
        ConfigError: the checkpoint does not exist or is damaged; the message lists the available steps.
    """
    kept = final_weights(folder)
    checkpoints = {step_of(path): path for path in [*list_checkpoints(folder), *([kept] if kept else [])]}
    if not checkpoints:
        raise ConfigError(
            f"{folder} holds no checkpoint: the run has not saved one yet (Ctrl-C in its training saves), or it was "
            "configured to keep no weights (checkpoint.save_final = false); train with --checkpoint.enable_checkpoint"
        )
    if step is not None and step not in checkpoints:
        raise option_error("--step", step, f"no such checkpoint in {folder}; there are {sorted(checkpoints)}")
    damages = []
    for number in sorted(checkpoints, reverse=True) if step is None else [step]:
        try:
            if checkpoints[number] != kept:
                CheckpointReader(checkpoints[number]).read_metadata()
        except DamagedCheckpointError as error:
            damages.append(f"{checkpoints[number]} is not used: {error}")
            continue
        for damage in damages:
            print(printable(f"warning: {damage}; {checkpoints[number].name} is"), file=sys.stderr)
        return checkpoints[number]
    others = f"; there are {sorted(checkpoints)}" if step is not None and len(checkpoints) > 1 else ""
    raise ConfigError(f"no checkpoint can be used: {'; '.join(damages)}{others}")


def cannot_be_read(checkpoint: Path, error: DamagedCheckpointError) -> ConfigError:
    """The error for damage that was found when the weights were read, with the checkpoints to use instead."""
    others = sorted({step_of(path) for path in list_checkpoints(checkpoint.parent)} - {step_of(checkpoint)})
    return ConfigError(f"{checkpoint} cannot be read: {error}" + (f"; other steps are {others}" if others else ""))


def read_numbers(checkpoint: Path) -> dict[str, int | float]:
    """The numbers in progress.json: those of the run's `Progress`, and those of other registered objects.

    Raises:
        DamagedCheckpointError: the file cannot be read.
    """
    try:
        numbers: dict[str, int | float] = json.loads((checkpoint / PROGRESS_FILE).read_bytes())
    except (OSError, ValueError):
        raise DamagedCheckpointError(f"{PROGRESS_FILE} cannot be read") from None
    return numbers


def read_progress(checkpoint: Path) -> Progress:
    """How far the run was.

    Raises:
        DamagedCheckpointError: progress.json is damaged.
    """
    numbers, progress = read_numbers(checkpoint), Progress()
    progress.load_state_dict({name: numbers.get(name, value) for name, value in progress.state_dict().items()})
    return progress


def read_state(checkpoint: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Read every full tensor of a checkpoint whose name starts with `prefix`, on the CPU, in one process.

    Names are `model.<parameter>`, `ema.<parameter>` and `optimizer.state.<parameter>.<key>`. AdamW has the keys
    exp_avg, exp_avg_sq and step.
    """
    reader = CheckpointReader(checkpoint)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    load_safely(state, reader, no_dist=True)
    return state


def load_safely(state: dict[str, Any], reader: CheckpointReader, **options: Any) -> None:
    """Fill the tensors of a state, which may be sharded, from a checkpoint.

    Raises:
        DamagedCheckpointError: tensors are missing or do not match.
    """
    try:
        with warnings.catch_warnings():
            # Loading in a single process is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, planner=SafeLoadPlanner(), **options)
    except (CheckpointException, DamagedCheckpointError) as error:
        failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
        cause = next(iter(failures))[0]
        kind = "" if isinstance(cause, DamagedCheckpointError) else f"{type(cause).__name__}: "
        raise DamagedCheckpointError(f"{kind}{first_line(cause)}") from None
