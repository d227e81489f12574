# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Read a LoRA with the layer names of diffusers, of peft, of kohya's scripts or of the model's publisher."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchditan.checkpoint.safetensors_files import open_file
from torchditan.errors import ConfigError
from torchditan.extras.published.base import require
from torchditan.extras.published.lora_layers import Table, original_layers, shares_of_parts, swap_shift_and_scale

PEFT_CONFIG = "adapter_config.json"
"""File of peft in the same folder as the matrices, with alpha."""
_PREFIXES = ("transformer.", "unet.", "diffusion_model.", "base_model.model.")
"""Prefixes of module names in LoRA files."""
_DOWN = (".lora_A.weight", ".lora_A.default.weight", ".lora_down.weight", ".lora.down.weight")
_UP = (".lora_B.weight", ".lora_B.default.weight", ".lora_up.weight", ".lora.up.weight")
_MATCH_SECONDS = 30.0
"""Longest time for the regular expressions of a file, which may be written to take forever."""
_OTHER_KIND = "must be one in the names of diffusers, peft, kohya or the model's publisher"


@dataclass(frozen=True)
class AdapterWeights:
    """Matrices of a LoRA: layer name -> A (rank, in) and B (out, rank). B includes alpha, see `read_adapter`."""

    down: dict[str, Tensor]
    up: dict[str, Tensor]


def is_lora(names: Iterable[str]) -> bool:
    """Whether some of these tensors are the matrices of a LoRA."""
    return any(_split_key(name)[0] in ("down", "up") for name in names)


def stated_model(path: Path) -> str | None:
    """The model that an exported LoRA was trained for, if the file states it."""
    with open_file(path) as file:
        model: str | None = (file.metadata() or {}).get("model")
    return model


def read_adapter(
    source: Path | Mapping[str, Tensor],
    layers: Sequence[str],
    *,
    table: Table,
    shown: str,
    alpha: float | None = None,
    scale: float = 1,
) -> AdapterWeights:
    """The matrices of a LoRA for a model with these linear layers.

    Accepts the names of diffusers and peft (`transformer.<layer>.lora_A.weight`), and those of the publisher as kohya's
    scripts (`lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight`) or ai-toolkit and ComfyUI
    (`diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight`) write them. Alpha comes from `<layer>.alpha`, from
    diffusers' metadata, or from peft's adapter_config.json in the same folder.

    Args:
        source: a .safetensors file, or the tensors of one.
        layers: names of the model's layers.
        table: `original_layers` of its family.
        shown: the source in messages, which start with it.
        alpha: used if the source states none. None: the rank.
        scale: the model that gets the matrices computes scale * B A. This equals the update of the source.

    Raises:
        ConfigError: the source is not a LoRA, or has layers that the model does not have.
    """
    state, peft = _open(source, layers, shown) if isinstance(source, Path) else (source, _PeftOptions(None, {}))
    known = _layers_by_stem(layers, table)
    own = {name.replace(".", "_") for name in layers}
    publishers: set[str] = set()
    down: dict[str, Tensor] = {}
    up: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    for key, tensor in state.items():
        kind, stem = _split_key(key)
        if kind is None:
            raise ConfigError(f"{shown} is not a LoRA of linear layers: it has {key}; {_OTHER_KIND}")
        if stem.startswith(("lora_te", "text_encoder")):
            raise ConfigError(f"{shown} also adapts a text encoder, which is not trained here: it has {key}")
        name = stem.replace(".", "_")
        parts = known.get(name)
        if parts is None:
            raise ConfigError(f"{shown} is a LoRA for another model: this one has no linear layer {stem}")
        publishers |= set() if name in own else set(parts)
        if kind == "alpha":
            alphas |= dict.fromkeys(parts, float(tensor))
        elif kind == "down":
            down |= dict.fromkeys(parts, tensor.float())
        else:
            shares = shares_of_parts(parts)
            unit, rest = divmod(tensor.shape[0], sum(shares))
            if rest:
                raise ConfigError(f"{shown} is a LoRA for another model: {key} has {tensor.shape[0]} rows")
            up |= dict(zip(parts, tensor.float().split([unit * share for share in shares]), strict=True))
    if not down or down.keys() != up.keys():
        raise ConfigError(f"{shown} is not a LoRA: it has no pairs of lora_A and lora_B; {_OTHER_KIND}")
    for layer, matrix in down.items():
        rank = matrix.shape[0]
        if layer in publishers:
            up[layer] = swap_shift_and_scale(layer, matrix, up[layer])
        stated = (alphas.get(layer), peft.alpha_of(layer, rank), alpha, rank)
        up[layer] = up[layer] * (next(value for value in stated if value is not None) / rank / scale)
    return AdapterWeights(down, up)


@dataclass(frozen=True)
class _PeftOptions:
    """What a LoraConfig of peft states about alpha."""

    alpha: float | None
    by_layer: Mapping[str, float]
    """Alpha of the layers that have their own."""
    is_over_square_root: bool = False
    """Whether the update is scaled by alpha / sqrt(rank) (rsLoRA)."""

    def alpha_of(self, layer: str, rank: int) -> float | None:
        """The alpha that gives the same update as alpha / rank; None if it is not stated."""
        alpha = self.by_layer.get(layer, self.alpha)
        return alpha * math.sqrt(rank) if alpha is not None and self.is_over_square_root else alpha


def _open(path: Path, layers: Sequence[str], shown: str) -> tuple[dict[str, Tensor], _PeftOptions]:
    with open_file(path) as file:
        metadata = file.metadata() or {}
        state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  not a mapping
    beside = path.with_name(PEFT_CONFIG)
    text: str | bytes = metadata.get("lora_adapter_metadata", "{}")
    if path.name == "adapter_model.safetensors" and beside.is_file():  # as peft saves it
        text = beside.read_bytes()
    stated = json.loads(text)
    found: dict[str, Any] = {}
    for prefix in ("", *_PREFIXES):
        found |= {key.removeprefix(prefix): value for key, value in stated.items() if key.startswith(prefix)}
    by_layer = _alphas_by_layer(found.get("alpha_pattern") or {}, layers, shown)
    return state, _PeftOptions(found.get("lora_alpha"), by_layer, bool(found.get("use_rslora")))


def _alphas_by_layer(alphas: Mapping[str, float], layers: Sequence[str], shown: str) -> dict[str, float]:
    """Layer -> alpha of the first regular expression that matches the end of its name, as `get_pattern_key` of peft.

    Raises:
        ConfigError: a text is not a regular expression, or matching takes longer than `_MATCH_SECONDS`.
    """
    found: dict[str, float] = {}
    if not alphas:
        return found
    regex = require("regex")  # like re, with a time limit
    end_time = time.monotonic() + _MATCH_SECONDS
    for end, alpha in alphas.items():
        try:
            pattern = regex.compile(rf"(.*\.)?({end})$")
            for layer in layers:
                if layer not in found and pattern.match(layer, timeout=max(0.0, end_time - time.monotonic())):
                    found[layer] = alpha
        except (regex.error, RecursionError, TimeoutError) as error:
            why = "takes too long to match" if isinstance(error, TimeoutError) else "is not a regular expression"
            right = f"which {why}; must be the end of a layer's name, such as to_q"
            raise ConfigError(f"{shown} has {json.dumps(end)} in alpha_pattern, {right}") from None
    return found


def _layers_by_stem(layers: Sequence[str], table: Table) -> dict[str, tuple[str, ...]]:
    """Name of a layer in a file, with _ for each dot -> layers of the model: several if the file fuses them."""
    originals = {original for name in layers for original in original_layers(table, name)}
    present = set(layers)
    known = {name.replace(".", "_"): parts for name, parts in originals if present.issuperset(parts)}
    return known | {name.replace(".", "_"): (name,) for name in layers}


def _split_key(key: str) -> tuple[str | None, str]:
    """('down', 'up' or 'alpha', name of the layer in the file). The first is None if the key is not a LoRA's."""
    for kind, endings in (("down", _DOWN), ("up", _UP), ("alpha", (".alpha",))):
        for ending in endings:
            if key.endswith(ending):
                stem = key.removesuffix(ending)
                for prefix in (*_PREFIXES, "lora_transformer_", "lora_unet_"):
                    stem = stem.removeprefix(prefix)
                return kind, stem
    return None, key
