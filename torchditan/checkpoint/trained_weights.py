# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Find a checkpoint by its step, and load its weights into a model in one process."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from torchditan.checkpoint.files import (
    CheckpointReader,
    DamagedCheckpointError,
    final_weights,
    list_checkpoints,
    step_of,
)
from torchditan.checkpoint.loading import detached, load_safely
from torchditan.config.errors import ConfigError, option_error, printable
from torchditan.models.saved_weights import checkpoint_keys, required_names, saved_weights


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


def check_sizes(model: nn.Module, checkpoint: Path, *, ema: bool, only_trained: bool = False) -> None:
    """Refuse a checkpoint whose weights differ in size from those of a model on the meta device.

    `load_weights` would notice too, after the memory for the model was allocated.

    Raises:
        ConfigError: names the first such weight, or says that the checkpoint is damaged.
    """
    try:
        entries = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    except DamagedCheckpointError as error:
        raise cannot_be_read(checkpoint, error) from None
    weights = saved_weights(model, only_trained=only_trained)
    for name, key in checkpoint_keys(entries, ema=ema).items():
        entry = entries[key]
        if name in weights and isinstance(entry, TensorStorageMetadata) and entry.size != weights[name].shape:
            sizes = f"{name} with size {[*entry.size]}, where config.json asks for {[*weights[name].shape]}"
            raise ConfigError(f"{checkpoint} cannot be read: it has {sizes}")


def load_weights(
    model: nn.Module, checkpoint: Path, *, ema: bool, only_trained: bool = False, are_initial: bool = False
) -> None:
    """Load the weights of a checkpoint, averaged or raw, into a model, in place and in one process.

    Args:
        only_trained: the checkpoint contains only the weights of a LoRA.
        are_initial: a new run starts from them, so that new embedders may be missing.

    Raises:
        ConfigError: the checkpoint lacks these weights, or they do not match the model.
    """
    weights = saved_weights(model, only_trained=only_trained)
    required = required_names(model, only_trained=only_trained, are_initial=are_initial)
    try:
        reader = CheckpointReader(checkpoint)
        keys = checkpoint_keys(reader.read_metadata().state_dict_metadata, ema=ema)
        if not keys:
            raise option_error("--weights", "ema" if ema else "raw", f"{checkpoint} has only the other weights")
        state = {keys.get(name, name): tensor for name, tensor in weights.items() if name in keys or name in required}
        load_safely(detached(state), reader, no_dist=True)
    except DamagedCheckpointError as error:
        raise cannot_be_read(checkpoint, error) from None


def cannot_be_read(checkpoint: Path, error: DamagedCheckpointError) -> ConfigError:
    """The error for damage that was found when the weights were read, with the checkpoints to use instead."""
    others = sorted({step_of(path) for path in list_checkpoints(checkpoint.parent)} - {step_of(checkpoint)})
    return ConfigError(f"{checkpoint} cannot be read: {error}" + (f"; other steps are {others}" if others else ""))
