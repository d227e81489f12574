# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Initial weights of a new run: from a checkpoint, an exported file or a published model."""

from __future__ import annotations

import shlex
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from torchditan.checkpoint.trained_weights import load_weights
from torchditan.config.errors import ConfigError, option_error
from torchditan.config.loader import from_dict, to_dict
from torchditan.config.options import Config
from torchditan.config.trajectory import differences
from torchditan.distributed.process_group import raise_on_all_ranks
from torchditan.finetune.lora import start_from
from torchditan.finetune.lora_file import is_lora, stated_model
from torchditan.models.initialization import fill
from torchditan.models.saved_weights import OPTIONAL, required_names, saved_weights
from torchditan.registry import FAMILIES, FORMATS
from torchditan.run.reading import similar_folder
from torchditan.weights.exported import StoredWeights, describe_file, describe_weights, find_weights, read_weights
from torchditan.weights.safetensors_files import is_of_diffusers, is_pickle, open_file
from torchditan.weights.shared import is_shared, open_shared, shipped_models

_NUM_SHOWN = 3
_OF_PREDICTION = ("objective", "prediction", "noise_schedule")
_HOW_TO_IMPORT = (
    "import weights of another project first: torchditan import WEIGHTS RUN --format "
    f"{'|'.join(FORMATS)}, then start from RUN"
)


def load_initial_weights(model: nn.Module, path: str, *, config: Config) -> str:
    """Load the weights of a file, of a run's newest checkpoint, or of a checkpoint into a model of any sharding.

    Works in place; every rank calls it. If a run has averaged and raw weights, the averaged ones are used.

    Args:
        model: its parameters have memory; their values do not matter.
        path: `checkpoint.initial_load_path`.
        config: of this run, to report options that differ from those of the weights.

    Returns:
        A description for the log: `weights of outputs/x, step 100 (ema)`.

    Raises:
        ConfigError: there are no weights, or they do not match this model.
    """
    found: list[Any] = [None]
    mistake: ConfigError | None = None
    try:
        if not dist.is_initialized() or dist.get_rank() == 0:
            found = [_describe(Path(path))]
    except ConfigError as error:
        right = str(error).removeprefix(f"{Path(path)} ")
        mistake = option_error("checkpoint.initial_load_path", path, right)
    _raise_on_all_ranks(mistake)
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    stored: StoredWeights = found[0]
    if is_shared(path) and not stored.path.exists():  # downloaded by rank 0 on another machine
        stored = replace(stored, path=open_shared(path).weights)
    differing = _other_options(stored, config)
    try:
        if config.lora.rank or is_lora(stored.shapes):
            notes = _fill_lora(model, stored, config)
        else:
            notes = _fill_all(model, stored, config, differing)
    except ConfigError as error:
        right = str(error).removeprefix(f"{Path(path)} ")
        mistake = option_error("checkpoint.initial_load_path", path, right)
    _raise_on_all_ranks(mistake)  # a rank may be the only one that reads a damaged tensor
    step = "" if stored.step is None else f", step {stored.step} ({stored.weights})"
    return "; ".join([f"weights of {path}{step}", *notes, *differing])


def identity_of(path: str) -> str | None:
    """What identifies the LoRA at this path by its matrices, whatever their names; None for other weights."""
    try:
        stored = None if is_shared(path) else _describe(Path(path))
        if stored is None or not is_lora(stored.shapes):
            return None
        tensors = read_weights(stored).values()
    except ConfigError:  # a run that continues does not need it any more
        return None
    hashes = sorted(sha256(tensor.float().numpy().tobytes()).hexdigest() for tensor in tensors if tensor.ndim > 1)
    return f"lora-{sha256(' '.join(hashes).encode()).hexdigest()[:16]}"


def _fill_all(model: nn.Module, stored: StoredWeights, config: Config, differing: list[str]) -> list[str]:
    """Load all weights of a model. Returns what to say about new ones."""
    refuse_unknown_convention(stored, config)
    refuse_other_time(stored, config)
    refuse_other_model(model, stored, differing, are_initial=True)
    if stored.path.is_dir():
        load_weights(model, stored.path, ema=stored.weights == "ema", are_initial=True)
    else:
        _fill_from_file(model, stored.path, are_initial=True)
    missing = [name for name in saved_weights(model).keys() - stored.shapes.keys() if name.startswith(OPTIONAL)]
    new = sorted({".".join(name.split(".")[:2]) for name in missing})
    return [f"new {', '.join(new)}"] if new else []


def _fill_lora(model: nn.Module, stored: StoredWeights, config: Config) -> list[str]:
    """Start the LoRA of a new run from another one. Returns what to say about layers without weights.

    The base is the published model in both, so that time and prediction are known.
    """
    if not config.lora.rank:
        raise ConfigError(f"{stored.path} is a LoRA, and this run trains all weights; train a LoRA with --lora.rank")
    if not is_lora(stored.shapes):
        right = "give them as --model.path (torchditan export RUN FOLDER --format diffusers)"
        raise ConfigError(f"{stored.path} has all weights of a model, and this run trains a LoRA; {right}")
    source: Path | dict[str, Tensor] = stored.path
    if stored.config is None:
        alpha, there = None, stated_model(stored.path)
    else:
        source, options = read_weights(stored), from_dict(stored.config)
        alpha, there = options.lora.alpha, options.model.name
    here = config.model.name
    if there in FAMILIES and there != here:
        raise ConfigError(f"{stored.path} is a LoRA for another model: model.name was {there}, and is {here} here")
    lora, published = config.lora, cast(Any, model)
    started, layers = start_from(
        published.transformer,
        source,
        rank=lora.rank,
        scale=1 if lora.alpha is None else lora.alpha / lora.rank,
        target_modules=lora.target_modules or published.lora_targets,
        alpha=alpha,
        shown=str(stored.path),
    )
    return [f"{layers - started} of {layers} layers are not in it and start at zero"] if started < layers else []


def _raise_on_all_ranks(error: ConfigError | None) -> None:
    if dist.is_initialized():
        raise_on_all_ranks(error)
    elif error is not None:
        raise error


def load_weights_file(model: nn.Module, path: Path, *, only_trained: bool = False) -> StoredWeights:
    """Load the weights of a file into a model of any sharding, in place; no rank holds more than one whole tensor.

    Args:
        only_trained: the file contains only the weights of a LoRA.

    Raises:
        ConfigError: it is not a safetensors file, is truncated, or does not match this model.
    """
    stored = check_sizes_of_file(model, path, only_trained=only_trained)
    _fill_from_file(model, path, only_trained=only_trained)
    return stored


def check_sizes_of_file(model: nn.Module, path: Path, *, only_trained: bool = False) -> StoredWeights:
    """Refuse a file whose names or sizes differ from those of a model, which may be on the meta device.

    Raises:
        ConfigError: they differ; it is not a safetensors file, or is truncated.
    """
    stored = describe_file(path)
    refuse_other_model(model, stored, [], only_trained=only_trained)
    return stored


def _describe(path: Path) -> StoredWeights:
    if is_shared(path):
        return describe_file(open_shared(path).weights)
    if path.is_file():
        if is_pickle(path):
            raise ConfigError(f"{path} is a PyTorch file, whose pickle may execute code; {_HOW_TO_IMPORT}")
        return describe_file(path)
    if not path.exists():
        shipped = f", or one of the shipped models {', '.join(shipped_models())}" if shipped_models() else ""
        right = (
            "a .safetensors file, a run directory or a checkpoint in one, a shared folder, hub:owner/name"
            f"{shipped}{similar_folder(path, mark='config.json')}"
        )
        raise ConfigError(f"{path} does not exist; must be {right}")
    if is_of_diffusers(path):
        right = "give it as --model.path, with its --model.name; import a DiT with torchditan import"
        raise ConfigError(f"{path} is a folder that diffusers saved; {right} import {path} RUN --format diffusers")
    if not (path / "config.json").is_file():
        files = list(path.glob("*.safetensors"))
        if len(files) == 1:  # the folder of a LoRA, as diffusers and peft save it
            return describe_file(files[0])
        raise ConfigError(f"{path} has no config.json; must be a run directory, or a checkpoint in one")
    return describe_weights(find_weights(path), weights=None)


def refuse_unknown_convention(stored: StoredWeights, config: Config) -> None:
    """Refuse weights with unknown time and prediction: names and shapes do not determine them.

    Raises:
        ConfigError: neither a configuration nor the user states them.
    """
    if stored.config is not None or config.checkpoint.initial_load_convention is not None:
        return
    unknown = f"{stored.path} has no TorchDiTan configuration, so its time and its prediction are unknown"
    if config.model.name in FAMILIES:
        raise ConfigError(
            f"{unknown}; give published weights as --model.path, or add --checkpoint.initial_load_convention "
            f"torchditan if this project trained them as {config.model.name}"
        )
    raise ConfigError(
        f"{unknown}; add --checkpoint.initial_load_convention torchditan if t = 0 is noise and t = 1 is data (times "
        "1000 in its embedding) and it predicts the velocity data - noise. Others differ: SiT and LightningDiT "
        f"(unscaled time), REPA (t = 1 is noise), DiT and other DDPMs (predict noise); {_HOW_TO_IMPORT}"
    )


def refuse_other_time(stored: StoredWeights, config: Config) -> None:
    """Refuse weights whose embedding of t has another scale: the model would see other times.

    Raises:
        ConfigError: the two scales differ.
    """
    if stored.config is None or config.model.name in FAMILIES:
        return
    here = config.model.timestep_scale
    there = stored.config.get("model", {}).get("timestep_scale", here)
    if there != here:
        right = f"set --model.timestep_scale={there:g}"
        if here == 1:
            path = shlex.quote(str(stored.path))
            right = f"refit them first: torchditan refit_time {path} FILE.safetensors"
        raise ConfigError(f"{stored.path} has model.timestep_scale {there:g}, and this run {here:g}; {right}")


def refuse_other_model(
    model: nn.Module,
    stored: StoredWeights,
    differing_options: list[str],
    *,
    only_trained: bool = False,
    are_initial: bool = False,
) -> None:
    """Refuse weights whose names and shapes differ from the model's; only buffers may be missing."""
    required = required_names(model, only_trained=only_trained, are_initial=are_initial)
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in saved_weights(model).items()
        if name in required or name in stored.shapes
    }
    there: dict[str, Any] = {name: str(shape) for name, shape in stored.shapes.items()}
    phrases = differences(there, {name: str(shape) for name, shape in expected.items()})
    if phrases:
        more = [f"{len(phrases) - _NUM_SHOWN} more"] if len(phrases) > _NUM_SHOWN else []
        raise ConfigError(
            f"{stored.path} holds another model: {'; '.join([*differing_options, *phrases[:_NUM_SHOWN], *more])}. "
            "Use its options, or weights of this model"
        )


def _other_options(stored: StoredWeights, config: Config) -> list[str]:
    """Options of the model and of its prediction that differ between the weights and this run."""
    if stored.config is None:
        return []
    here = to_dict(config)
    return differences(_model_options(stored.config), _model_options(here))


def _model_options(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    diffusion = config.get("diffusion", {})
    return {
        "model": config.get("model"),
        "dataset": {"num_classes": config.get("dataset", {}).get("num_classes")},
        "diffusion": {name: diffusion[name] for name in _OF_PREDICTION if name in diffusion},
    }


def _fill_from_file(model: nn.Module, path: Path, *, only_trained: bool = False, are_initial: bool = False) -> None:
    required = required_names(model, only_trained=only_trained, are_initial=are_initial)
    for name, tensor in saved_weights(model, only_trained=only_trained).items():
        # Reopened for each tensor: pages of a memory map that were read count as memory of the process.
        with open_file(path) as file:
            if name in required or name in file.keys():  # noqa: SIM118  not a mapping
                fill(tensor, file.get_tensor(name))
