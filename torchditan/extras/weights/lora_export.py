# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Export a trained LoRA as one .safetensors file, with the layer names of diffusers or of kohya's scripts.

Notable:
- diffusers: `transformer.<layer>.lora_A.weight` (`unet.` for SDXL) and the adapter's metadata. B is multiplied by
  alpha / rank, and the metadata state alpha = rank, as tools that ignore the metadata assume. The loaders of diffusers
  refuse `.alpha` tensors together with the metadata;
- kohya: `lora_unet_<layer of the original model>.lora_down.weight`, `.lora_up.weight` and `.alpha`. The original model
  may have one layer for several of diffusers' (queries, keys and values). Their matrices are then stacked,
  block-diagonally in `lora_up`, and alpha grows with the rank, so that the product is unchanged;
- from kohya's FLUX files diffusers reads the blocks but not the embedders and the final layer. sd-scripts ignores the
  final layer (`ignored_by_sd_scripts`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchditan.checkpoint.safetensors_files import TensorToWrite, write_weights
from torchditan.checkpoint.weights import Kind
from torchditan.config.loader import from_dict
from torchditan.errors import ConfigError, option_error
from torchditan.extras.published.families import family
from torchditan.extras.published.lora import DEFAULT
from torchditan.extras.published.lora_layers import (
    OriginalLayer,
    families_with_original_layers,
    original_layer,
    rows_of_parts,
    swap_shift_and_scale,
)
from torchditan.extras.weights.opening import open_weights


def ignored_by_sd_scripts(model_name: str, layers: Sequence[str]) -> list[str]:
    """Kohya names of the LoRA layers that sd-scripts does not load. Its samples differ without them."""
    found = [original_layer(model_name, layer) for layer in layers]
    names = [original.name for original in found if original is not None]
    ignored = [name for name in dict.fromkeys(names) if name.startswith(family(model_name).not_in_sd_scripts)]
    return [kohya_name(name) for name in ignored]


def export_lora(
    state: Mapping[str, Tensor],
    *,
    model_name: str,
    rank: int,
    alpha: float,
    path: Path,
    format: Literal["diffusers", "kohya"] = "diffusers",
    step: int | None = None,
    base: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Write the LoRA tensors of a checkpoint to a file, atomically.

    Args:
        state: parameters by name, `<layer>.lora_A.default.weight` (rank, in) and `lora_B` (out, rank). Other
            parameters are left out.
        model_name: `flux`, `sd3`, ...; kohya's names are known for families with `original_layers`.
        rank, alpha: those of the training.
        path: an existing file is replaced. diffusers finds a single .safetensors file in a folder by any name.
        format: whose layer names, see the top of this file.
        step, base: training step and base model, stored in the metadata.
        dtype: float32 or bfloat16.

    Returns:
        The layers of the model that are in the file.

    Raises:
        ConfigError: the state has no LoRA, the format does not support the model, or the file cannot be written.
    """
    pairs = _pairs_of(state)
    if format == "diffusers":
        pairs = {layer: (down, up * (alpha / rank)) for layer, (down, up) in pairs.items()}
        alpha = rank
    metadata = {"format": "pt", "model": model_name, "rank": str(rank), "alpha": f"{alpha:g}"}
    metadata |= {"step": str(step)} if step is not None else {}
    metadata |= {"base": base} if base is not None else {}
    if format == "diffusers":
        part = family(model_name).subfolder
        tensors = {
            f"{part}.{layer}.lora_{name}.weight": matrix
            for layer, pair in pairs.items()
            for name, matrix in zip("AB", pair, strict=True)
        }
        # Options of peft's LoraConfig from which the loaders of diffusers rebuild the adapter.
        options = {"r": rank, "lora_alpha": rank, "target_modules": list(pairs), "lora_dropout": 0.0, "bias": "none"}
        metadata["lora_adapter_metadata"] = json.dumps({f"{part}.{name}": value for name, value in options.items()})
    else:
        if not family(model_name).original_layers:
            known = families_with_original_layers()
            right = f"is known for {' and '.join(known)}, not for {model_name}; must be diffusers"
            raise option_error("--format", format, right)
        tensors = _in_kohya_names(pairs, model_name=model_name, rank=rank, alpha=alpha)
        metadata |= {"ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}"}
    entries = [
        TensorToWrite(name, tuple(tensor.shape), torch.float32 if name.endswith(".alpha") else dtype, tensor.detach)
        for name, tensor in tensors.items()
    ]
    try:
        write_weights(path, entries, metadata)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return list(pairs)


def _pairs_of(state: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer -> (A, B)."""
    ending = f".lora_A.{DEFAULT}.weight"
    pairs = {}
    for stem in (name.removesuffix(ending) for name in state if name.endswith(ending)):
        down, up = (state[f"{stem}.lora_{part}.{DEFAULT}.weight"].cpu() for part in "AB")
        pairs[stem.removeprefix("transformer.")] = (down, up)  # PublishedModel's name of the diffusers model
    if not pairs:
        raise ConfigError(f"there is no LoRA among the {len(state)} weights; is it a run with [lora]?")
    return pairs


def _in_kohya_names(
    pairs: Mapping[str, tuple[Tensor, Tensor]], *, model_name: str, rank: int, alpha: float
) -> dict[str, Tensor]:
    fused: dict[OriginalLayer, list[str]] = {}
    for layer in pairs:
        original = original_layer(model_name, layer)
        if original is None:
            raise ConfigError(f"kohya's format has no name for the layer {layer}; export with --format diffusers")
        fused.setdefault(original, []).append(layer)
    tensors = {}
    for original, present in fused.items():
        down, up = _fuse(original, {layer: pairs[layer] for layer in present})
        layer_alpha = alpha * down.shape[0] / rank
        if original.name.startswith("final_layer."):  # the importer of diffusers drops its alpha
            up, layer_alpha = up * (alpha / rank), float(down.shape[0])
        name = kohya_name(original.name)
        tensors[f"{name}.lora_down.weight"] = down
        tensors[f"{name}.lora_up.weight"] = up
        tensors[f"{name}.alpha"] = torch.tensor(layer_alpha)
    return tensors


def kohya_name(original: str) -> str:
    """The kohya name of a layer, from its publisher's name."""
    return f"lora_unet_{original.replace('.', '_')}"


def _fuse(original: OriginalLayer, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A stacked (ranks, in) and B block-diagonal (rows of all parts, ranks). Rows of parts without a LoRA are zero."""
    if len(original.parts) == 1:
        layer, (down, up) = next(iter(pairs.items()))
        return down, swap_shift_and_scale(layer, down, up)
    present = [part for part in original.parts if part in pairs]
    down = torch.cat([pairs[part][0] for part in present])
    rows = rows_of_parts(original.parts, unit=down.shape[1])
    up = torch.zeros(sum(rows), down.shape[0], dtype=down.dtype)
    row = column = 0
    for part, height in zip(original.parts, rows, strict=True):
        if part in pairs:
            block = pairs[part][1]
            up[row : row + height, column : column + block.shape[1]] = block
            column += block.shape[1]
        row += height
    return down, up


def export_run(
    run: Path,
    path: Path,
    *,
    format: Literal["diffusers", "kohya"] = "diffusers",
    step: int | None = None,
    weights: Kind | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[str], int, list[str]]:
    """Write the LoRA of a run directory to a file.

    Args:
        run: an address of `open_weights`.
        path: see `export_lora`.
        step: of the checkpoint. None: the newest.
        weights: averaged or raw. None: averaged if the run kept an average.

    Returns:
        (layers in the file, step of the checkpoint, kohya names of layers that sd-scripts does not load)

    Raises:
        ConfigError: the folder is not a run, the run did not train a LoRA, or it lacks the checkpoint or weights.
    """
    opened = open_weights(run, step=step, kind=weights)
    config = from_dict(opened.config or {})
    lora = config.lora
    if not lora.rank:
        right = "trained all weights; export them with torchditan export"
        raise option_error("RUN", str(run), right)
    assert opened.step is not None
    layers = export_lora(
        {name: opened.tensor(name) for name in opened.shapes},
        model_name=config.model.name,
        rank=lora.rank,
        alpha=lora.rank if lora.alpha is None else lora.alpha,
        path=path,
        format=format,
        step=opened.step,
        base=config.model.path or config.model.flavor,
        dtype=dtype,
    )
    ignored = ignored_by_sd_scripts(config.model.name, layers) if format == "kohya" else []
    return layers, opened.step, ignored
