# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Export a full fine-tune of a published model, or the model with a LoRA folded in, as a folder for diffusers.

Notable:
- if all other parts of the pipeline are on this machine, the folder is a whole pipeline. The parts are copied from
  the places that the run used (`text_encoder.path`, `model.path`, `autoencoder.path`, the hub's cache);
- otherwise the folder holds only the transformer, which you pass to the stock pipeline as an argument;
- tensors are copied one at a time, so that the export needs little host memory.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from torchditan.checkpoint.safetensors_files import TensorToWrite, write_weights
from torchditan.checkpoint.weights import Weights
from torchditan.config.loader import from_dict
from torchditan.config.options import Autoencoder, Config
from torchditan.errors import ConfigError, option_error
from torchditan.extras.autoencoders.published import open_published
from torchditan.extras.captions.encode import TEXT_PARTS
from torchditan.extras.published.base import build_transformer
from torchditan.extras.published.families import PublishedModel, family
from torchditan.extras.published.stored_weights import find_published
from torchditan.extras.weights.lora_export import lora_pairs
from torchditan.extras.weights.trained_model import stored_spec
from torchditan.models.saved_weights import saved_weights
from torchditan.run.atomic_files import new_folder
from torchditan.run.hub import fetch

INDEX_FILE = "model_index.json"
WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


@dataclass(frozen=True)
class ExportedPipeline:
    """Result of an export to diffusers."""

    how_to_open: str
    """A line of Python."""
    left_out: str | None
    """Reason why only the transformer was exported; None for a whole pipeline."""
    notes: tuple[str, ...] = ()
    """How the samples of the pipeline differ from those of the run."""

    def as_line(self) -> str:
        """The line for the terminal."""
        why = f" (the transformer alone: {self.left_out})" if self.left_out else ""
        return f"in diffusers: {self.how_to_open}{why}"


@dataclass(frozen=True)
class _OtherParts:
    """The parts of a pipeline other than the transformer, on this machine."""

    index: Path
    folders: dict[str, Path]


def export_pipeline(weights: Weights, folder: Path, *, dtype: torch.dtype) -> ExportedPipeline:
    """`diffusers_export.export_to_diffusers` for a full fine-tune of a published model."""
    assert weights.config is not None
    config = from_dict(weights.config)
    with torch.device("meta"):
        model = cast(PublishedModel, stored_spec(config).build())
    weights.check(model)
    metadata = {"step": str(weights.step), "weights": str(weights.kind)}
    return _write_pipeline(
        config, folder, model.transformer, _transformer_tensors(model, weights, dtype), metadata=metadata
    )


def merge_lora(weights: Weights, folder: Path, *, dtype: torch.dtype) -> tuple[ExportedPipeline, float]:
    """Write the published model with the LoRA of a run folded into its weights: W + alpha / rank * B A, in float32.

    Args:
        weights: from `open_weights`, of a LoRA run.
        folder: the folder to create, in diffusers' layout. It must not exist.
        dtype: that the sums are rounded to.

    Returns:
        (what was written, what the rounding changes relative to the update: root mean square over the adapted layers).

    Raises:
        ConfigError: the run did not train a LoRA of published weights, or `folder` exists or cannot be written.
    """
    config = from_dict(weights.config or {})
    if not config.lora.rank or config.model.path is None:
        right = (
            "did not train a LoRA of published weights (lora.rank and model.path), so that there is nothing to merge"
        )
        raise option_error("RUN", str(weights.path), right)
    cls, sizes = family(config.model.name), stored_spec(config).config
    transformer = build_transformer(cls.model_class, sizes)
    base = find_published(config.model.path, subfolder=cls.subfolder).readers(model_class=cls.model_class, config=sizes)
    pairs = lora_pairs({name: weights.tensor(name) for name in weights.shapes})
    scale = 1 if config.lora.alpha is None else config.lora.alpha / config.lora.rank
    squares = {"lost": 0.0, "update": 0.0}

    def merged(name: str) -> Tensor:
        weight = base[name]().float()
        layer = name.removesuffix(".weight")
        if layer not in pairs:
            return weight
        down, up = pairs[layer]
        update = scale * (up.float() @ down.float())
        exact = weight + update
        squares["lost"] += (exact.to(dtype).float() - exact).square().sum().item()
        squares["update"] += update.square().sum().item()
        return exact

    tensors = [
        TensorToWrite(name, tuple(value.shape), dtype, partial(merged, name) if name in base else value.detach)
        for name, value in transformer.state_dict().items()
    ]
    metadata = {"step": str(weights.step), "weights": str(weights.kind), "lora": str(weights.path)}
    written = _write_pipeline(config, folder, transformer, tensors, metadata=metadata)
    return written, math.sqrt(squares["lost"] / squares["update"]) if squares["update"] else 0.0


def _write_pipeline(
    config: Config, folder: Path, transformer: Any, tensors: list[TensorToWrite], *, metadata: dict[str, str]
) -> ExportedPipeline:
    """A folder with the transformer and, if they are on this machine, all other parts of its pipeline."""
    cls, flavor = family(config.model.name), family(config.model.name).flavors[config.model.flavor]
    pipeline_class = flavor.pipeline_class or cls.pipeline_class
    parts = _find_other_parts(config, pipeline_class=pipeline_class, subfolder=cls.subfolder)
    metadata = {"format": "pt", "base": config.model.path or config.model.flavor, **metadata}
    with new_folder(folder) as new:
        inner = new
        if isinstance(parts, _OtherParts):
            inner = new / cls.subfolder
            shutil.copyfile(parts.index, new / INDEX_FILE)
            for name, part in parts.folders.items():
                shutil.copytree(part, new / name)
        transformer.save_config(inner)
        write_weights(inner / WEIGHTS_FILE, tensors, metadata)
    if isinstance(parts, _OtherParts):
        return ExportedPipeline(f'{pipeline_class}.from_pretrained("{folder}")', left_out=None)
    base = config.text_encoder.path or config.model.path or flavor.hub_name or "BASE"
    argument = f'{cls.subfolder}={cls.model_class}.from_pretrained("{folder}")'
    return ExportedPipeline(f'{pipeline_class}.from_pretrained("{base}", {argument})', left_out=parts)


def _transformer_tensors(model: PublishedModel, weights: Weights, dtype: torch.dtype) -> list[TensorToWrite]:
    """All tensors of the diffusers state dict. Buffers that were not weights come from the model."""
    return [
        TensorToWrite(
            name.removeprefix("transformer."),
            tuple(tensor.shape),
            dtype,
            partial(weights.tensor, name) if name in weights.shapes else tensor.detach,
        )
        for name, tensor in saved_weights(model).items()
    ]


def _find_other_parts(config: Config, *, pipeline_class: str, subfolder: str) -> _OtherParts | str:
    """All other parts of the pipeline, as the run used them; the reason as a string if some are missing here."""
    place = config.text_encoder.path or config.model.path
    if place is None:
        return "the run started from random weights, without a pipeline"
    encoders = _open_index(place, pipeline_class)
    if isinstance(encoders, str):
        return encoders
    opened = encoders if config.model.path is None else _open_index(config.model.path, pipeline_class)
    folder, index = encoders if isinstance(opened, str) else opened
    names = [
        name for name, value in index.items() if isinstance(value, list) and value and value[0] and name != subfolder
    ]
    folders = {name: (encoders[0] if name.startswith((*TEXT_PARTS, "vae")) else folder) / name for name in names}
    own_vae = config.autoencoder.path
    if "vae" in folders and own_vae is not None and own_vae != place:
        try:
            vae = fetch(own_vae, patterns=[INDEX_FILE], what=INDEX_FILE, option="model.path")
        except ConfigError:
            return f"{own_vae} is not on this machine"
        folders["vae"] = vae / "vae" if (vae / "vae/config.json").is_file() else vae
    missing = [path for path in folders.values() if not path.is_dir()]
    if missing:
        return f"{missing[0].parent} has no {missing[0].name}/"
    differs = _own_normalization(folders["vae"], config.autoencoder) if "vae" in folders else None
    return differs or _OtherParts(folder / INDEX_FILE, folders)


def _open_index(place: str, pipeline_class: str) -> tuple[Path, dict[str, Any]] | str:
    """The folder of a pipeline of this class and its model_index.json, or what it is instead."""
    try:
        folder = fetch(place, patterns=[INDEX_FILE, "scheduler/*"], what=INDEX_FILE, option="model.path")
        index: dict[str, Any] = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8-sig"))
        found = index.get("_class_name")
    except (ConfigError, OSError, ValueError, AttributeError, RecursionError):
        return f"{place} has no {INDEX_FILE}"
    return (folder, index) if found == pipeline_class else f"{place} is a {found}"


def _own_normalization(vae: Path, section: Autoencoder) -> str | None:
    """How the shift and scale of the run differ from those of the autoencoder in this folder, which diffusers uses."""
    if section.shift is None or section.scale is None:  # a run without an autoencoder
        return None
    published = replace(section, path=str(vae), shift=None, scale=None)
    try:
        opened = open_published(published, device=torch.device("cpu"), image_channels=None)
    except ConfigError as error:
        return str(error)
    for theirs, ours in ((opened.shift, section.shift), (opened.scale, section.scale)):
        if theirs is None or not torch.allclose(theirs, torch.tensor(ours).expand_as(theirs)):
            return "the run has another autoencoder.shift or autoencoder.scale than the pipeline's autoencoder"
    return None
