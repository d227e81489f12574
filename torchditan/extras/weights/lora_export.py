# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Export a trained LoRA as one .safetensors file, with the layer names of diffusers, kohya's scripts or ComfyUI.

Notable:
- diffusers: `transformer.<layer>.lora_A.weight` (`unet.` for SDXL) and the adapter's metadata. B is multiplied by
  alpha / rank, and the metadata state alpha = rank, as tools that ignore the metadata assume. The loaders of diffusers
  refuse `.alpha` tensors together with the metadata;
- kohya: `lora_unet_<layer of the original model>.lora_down.weight`, `.lora_up.weight` and `.alpha`. The original model
  may have one layer for several of diffusers' (queries, keys and values). Their matrices are then stacked,
  block-diagonally in `lora_up`, and alpha grows with the rank, so that the product is unchanged;
- comfyui: `diffusion_model.<layer of the original model>.lora_A.weight`, stacked in the same way. ComfyUI ignores
  metadata and adds B A, so that B includes alpha / rank here too;
- `PublishedModel.lora_readers` has the programs that read each format. A layer that one of them would drop without a
  word is refused.
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
from torchditan.extras.published.families import PublishedModel, family
from torchditan.extras.published.lora import DEFAULT
from torchditan.extras.published.lora_layers import (
    OriginalLayer,
    original_layer,
    shares_of_parts,
    swap_shift_and_scale,
)
from torchditan.extras.weights.opening import open_weights
from torchditan.run.atomic_files import refuse_unwritable

Format = Literal["diffusers", "kohya", "comfyui"]
Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""Layer -> A (rank, in) and B (out, rank)."""


def readers_of(model_name: str, format: Format, layers: Sequence[str]) -> str:
    """Which programs read all of an exported LoRA with these layers: a line for the terminal."""
    cls = family(model_name)
    readers, others = list(cls.lora_readers[format]), []
    for program in ("diffusers", "ComfyUI"):
        formats = [each for each, programs in cls.lora_readers.items() if program in programs]
        if formats and format not in formats:
            others.append(f"; {program} needs --format {formats[0]}")
    # ComfyUI maps diffusers' names to the publisher's, and drops the layers that it does not know.
    originals = [original_layer(cls.original_layers, layer) for layer in layers] if cls.original_layers else []
    is_whole = all(original and not original.name.startswith(cls.dropped_layers) for original in originals)
    if format == "diffusers" and "ComfyUI" in readers and not is_whole:
        readers.remove("ComfyUI")
    return f"read by {', '.join(readers)}{''.join(others)}"


def export_lora(
    state: Mapping[str, Tensor],
    *,
    model_name: str,
    rank: int,
    alpha: float,
    path: Path,
    format: Format = "diffusers",
    step: int | None = None,
    base: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Write the LoRA tensors of a checkpoint to a file, atomically.

    Args:
        state: parameters by name, `<layer>.lora_A.default.weight` (rank, in) and `lora_B` (out, rank). Other
            parameters are left out.
        model_name: `flux`, `sd3`, ...; its `lora_readers` has the formats.
        rank, alpha: those of the training.
        path: an existing file is replaced. diffusers finds a single .safetensors file in a folder by any name.
        format: whose layer names, see the top of this file.
        step, base: training step and base model, stored in the metadata.
        dtype: float32 or bfloat16.

    Returns:
        The layers of the model that are in the file.

    Raises:
        ConfigError: the state has no LoRA, the format does not support the model or one of its layers, or the file
            cannot be written.
    """
    cls, pairs = family(model_name), lora_pairs(state)
    if format not in cls.lora_readers:
        raise option_error("--format", format, f"must be {' or '.join(cls.lora_readers)} for {model_name}")
    if format != "kohya":
        pairs = {layer: (down, up * (alpha / rank)) for layer, (down, up) in pairs.items()}
        alpha = rank
    metadata = {"format": "pt", "model": model_name, "rank": str(rank), "alpha": f"{alpha:g}"}
    metadata |= {"step": str(step)} if step is not None else {}
    metadata |= {"base": base} if base is not None else {}
    if format == "diffusers":
        prefix = f"{cls.subfolder}."
        # Options of peft's LoraConfig from which the loaders of diffusers rebuild the adapter.
        options = {"r": rank, "lora_alpha": rank, "target_modules": list(pairs), "lora_dropout": 0.0, "bias": "none"}
        metadata["lora_adapter_metadata"] = json.dumps({f"{prefix}{name}": value for name, value in options.items()})
        tensors = _peft_tensors(prefix, pairs)
    elif format == "comfyui":
        tensors = _peft_tensors("diffusion_model.", _in_original_layers(pairs, cls, format))
    else:
        tensors = _kohya_tensors(_in_original_layers(pairs, cls, format), scale=alpha / rank)
        metadata |= {"ss_network_dim": str(rank), "ss_network_alpha": f"{alpha:g}"}
    entries = [
        TensorToWrite(name, tuple(tensor.shape), torch.float32 if name.endswith(".alpha") else dtype, tensor.detach)
        for name, tensor in tensors.items()
    ]
    with refuse_unwritable(path):
        write_weights(path, entries, metadata)
    return list(pairs)


def lora_pairs(state: Mapping[str, Tensor]) -> Pairs:
    """The LoRA among the parameters of a run, by diffusers' layer names.

    Raises:
        ConfigError: there is none.
    """
    ending = f".lora_A.{DEFAULT}.weight"
    pairs = {}
    for stem in (name.removesuffix(ending) for name in state if name.endswith(ending)):
        down, up = (state[f"{stem}.lora_{part}.{DEFAULT}.weight"].cpu() for part in "AB")
        pairs[stem.removeprefix("transformer.")] = (down, up)  # PublishedModel's name of the diffusers model
    if not pairs:
        raise ConfigError(f"there is no LoRA among the {len(state)} weights; is it a run with [lora]?")
    return pairs


def _peft_tensors(prefix: str, pairs: Pairs) -> dict[str, Tensor]:
    return {
        f"{prefix}{layer}.lora_{part}.weight": matrix
        for layer, pair in pairs.items()
        for part, matrix in zip("AB", pair, strict=True)
    }


def _kohya_tensors(pairs: Pairs, *, scale: float) -> dict[str, Tensor]:
    tensors = {}
    for layer, (down, up) in pairs.items():
        name = f"lora_unet_{layer.replace('.', '_')}"
        tensors[f"{name}.lora_down.weight"] = down
        tensors[f"{name}.lora_up.weight"] = up
        tensors[f"{name}.alpha"] = torch.tensor(scale * down.shape[0])
    return tensors


def _in_original_layers(pairs: Pairs, cls: type[PublishedModel], format: Format) -> Pairs:
    """The matrices by the publisher's layer names.

    Raises:
        ConfigError: a reader of the format drops a layer.
    """
    originals: dict[OriginalLayer, None] = {}
    for layer in pairs:
        original = original_layer(cls.original_layers, layer)
        if original is None or original.name.startswith(cls.dropped_layers):
            right = f"some programs drop {layer} from such a file; must be diffusers, or train without that layer"
            raise option_error("--format", format, right)
        originals[original] = None
    return {original.name: _fuse(original, pairs) for original in originals}


def _fuse(original: OriginalLayer, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """A stacked (ranks, in) and B block-diagonal (rows of all parts, ranks). Rows of parts without a LoRA are zero."""
    present = [part for part in original.parts if part in pairs]
    down, up = pairs[present[0]]
    if len(original.parts) == 1:
        return down, swap_shift_and_scale(present[0], down, up)
    shares = dict(zip(original.parts, shares_of_parts(original.parts), strict=True))
    unit = up.shape[0] // shares[present[0]]
    blocks = [pairs[part][1] if part in pairs else up.new_zeros(unit * shares[part], 0) for part in original.parts]
    return torch.cat([pairs[part][0] for part in present]), torch.block_diag(*blocks)


def export_run(
    run: Path,
    path: Path,
    *,
    format: Format = "diffusers",
    step: int | None = None,
    weights: Kind | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[str], int, str]:
    """Write the LoRA of a run directory to a file.

    Args:
        run: an address of `open_weights`.
        path: see `export_lora`.
        step: of the checkpoint. None: the newest.
        weights: averaged or raw. None: averaged if the run kept an average.

    Returns:
        (layers in the file, step of the checkpoint, a line on the programs that read the file)

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
    return layers, opened.step, readers_of(config.model.name, format, layers)
