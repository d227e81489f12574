# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on the linear layers of a published model, through peft.

A layer W x becomes W x + alpha / rank * B (A x) with A (rank, in) and B (out, rank). Only A and B are trained.

Notable:
- adapters are added while the model is on the meta device. After sharding, `init_lora` fills them from the seed and
  `fill_adapter` from a file. On a model that is already on a device, you can call these at any time;
- initial values are a function of (seed, parameter name), the same on every mesh;
- switching adapters on and off never changes `requires_grad`, because FSDP has already read it;
- an assistant is a second, frozen adapter that is active in training and inactive in sampling. It serves models such as
  FLUX.1-schnell, whose distillation a LoRA without an assistant would unlearn.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchditan.config.errors import ConfigError, option_error
from torchditan.finetune.lora_layers import (
    families_with_original_layers,
    original_layer,
    rows_of_parts,
    swap_shift_and_scale,
)
from torchditan.models.initialization import fill, named_parameters_to_fill, weight_generator
from torchditan.weights.safetensors_files import open_file

DEFAULT = "default"
ASSISTANT = "assistant"
_PREFIXES = ("transformer.", "unet.", "diffusion_model.", "base_model.model.")
"""Prefixes of module names in LoRA files."""
_DOWN = (".lora_A.weight", ".lora_A.default.weight", ".lora_down.weight", ".lora.down.weight")
_UP = (".lora_B.weight", ".lora_B.default.weight", ".lora_up.weight", ".lora.up.weight")


@dataclass(frozen=True)
class AdapterWeights:
    """Matrices of a LoRA file: layer name -> A (rank, in) and B (out, rank). B includes alpha: the update is B A."""

    down: dict[str, Tensor]
    up: dict[str, Tensor]


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    adapter_name: str = DEFAULT,
) -> list[str]:
    """Add a trainable adapter, in place. Afterwards only its float32 parameters are trainable.

    Args:
        model: usually on the meta device; the new parameters are created there too. On another device they are
            uninitialised until `init_lora`.
        rank, alpha: as in the formula at the top of this file.
        target_modules: ends of names of linear layers (`to_q`, `attn.to_out.0`), or regular expressions for whole
            names. Each must match a layer. A convolution matches only by the end of its name (`pos_embed.proj`).
        adapter_name: of this adapter.

    Returns:
        Names of the adapted layers.

    Raises:
        ConfigError: a pattern matches nothing or is not a valid regular expression.
    """
    layers = find_target_modules(model, target_modules)
    _inject(model, dict.fromkeys(layers, rank), alpha=alpha, adapter_name=adapter_name)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{adapter_name}." in name and ".lora_" in name)
    return layers


def find_target_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Linear layers that any pattern matches, and convolutions matched by the end of their name, in model order.

    Raises:
        ConfigError: a pattern matches no layer, or is not a valid regular expression.
    """
    names, all_names = _layers_of(model, nn.Linear), _layers_of(model, nn.Linear, nn.Conv2d)
    found: set[str] = set()
    for pattern in patterns:
        try:
            whole = re.compile(pattern)
        except re.error as error:
            raise option_error("lora.target_modules", pattern, f"is not a valid regular expression: {error}") from None
        ending = {name for name in all_names if f".{name}".endswith(f".{pattern}")}
        linear = {name for name in names if name in ending or whole.fullmatch(name)}
        matching = linear or ending  # convolutions only if no linear layer matches: older patterns keep their meaning
        if not matching:
            ends = ", ".join(sorted({_last_part(name) for name in names}))
            raise option_error("lora.target_modules", pattern, f"matches no linear layer; their names end in {ends}")
        found |= matching
    if not found:
        raise option_error("lora.target_modules", list(patterns), "must name at least one layer")
    return [name for name in all_names if name in found]


def _layers_of(model: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """Names of the layers of these kinds in the model without adapters. Adapted layers are included."""
    from peft.tuners.lora import LoraLayer

    names, wrapped = [], None
    for name, module in model.named_modules():
        if wrapped is not None and name.startswith(wrapped):
            continue
        if isinstance(module, LoraLayer):
            wrapped = f"{name}."
        if isinstance(getattr(module, "base_layer", module), kinds):
            names.append(name)
    return names


def _last_part(name: str) -> str:
    """`to_q`; `to_out.0` if the last part is a number."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _inject(model: nn.Module, ranks: Mapping[str, int], *, alpha: float, adapter_name: str) -> None:
    """Let peft wrap the named layers. The new float32 parameters are uninitialised."""
    from peft import LoraConfig, inject_adapter_in_model

    most = max(ranks.values())
    config = LoraConfig(
        r=most,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft divides by the rank, whatever the number
        target_modules=list(ranks),
        rank_pattern={f"^{re.escape(name)}": rank for name, rank in ranks.items() if rank != most},
    )
    # peft matches the names of a state dict exactly, and names in a list only by their ends.
    names = {f"{name}.lora_A.weight": torch.empty(0) for name in ranks}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # a second adapter is intended
        inject_adapter_in_model(config, model, adapter_name=adapter_name, low_cpu_mem_usage=True, state_dict=names)
    for name in ranks:
        layer: Any = model.get_submodule(name)
        for part in (layer.lora_A[adapter_name], layer.lora_B[adapter_name]):
            part.float()
            if layer.weight.device.type != "meta":
                part.to_empty(device=layer.weight.device)


def lora_parameters(model: nn.Module, adapter_name: str = DEFAULT) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of one adapter: `<layer>.lora_A.<adapter>.weight` and the same with `lora_B`."""
    for name, parameter in named_parameters_to_fill(model):
        if name.endswith((f".lora_A.{adapter_name}.weight", f".lora_B.{adapter_name}.weight")):
            yield name, parameter


def init_lora(model: nn.Module, seed: int, adapter_name: str = DEFAULT) -> None:
    """Initialise A uniformly in +-1/sqrt(in) (Kaiming with a = sqrt(5), as in peft) and B with zeros.

    The adapter is therefore the identity at first. Values are a function of (seed, parameter name) for any sharding;
    no communication.
    """
    for name, parameter in lora_parameters(model, adapter_name):
        if ".lora_B." in name:
            fill(parameter, torch.zeros(parameter.shape))
        else:
            fill(parameter, _draw_kaiming_uniform(seed, name, parameter.shape))


def _draw_kaiming_uniform(seed: int, name: str, shape: Sequence[int]) -> Tensor:
    """He et al. 2015 with negative slope sqrt(5): bound sqrt(6 / ((1 + 5) fan_in)). float32 on the CPU."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    draw = weight_generator(seed, name).random(tuple(shape), dtype="float32")
    return torch.from_numpy(draw).mul_(2 * bound).sub_(bound)


def lora_layers(model: nn.Module) -> list[Any]:
    """The peft layers that hold the adapters."""
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def active_adapters(model: nn.Module) -> list[str]:
    """Names of the active adapters; [] without adapters."""
    layers = lora_layers(model)
    return list(layers[0].active_adapters) if layers else []


def set_active_adapters(model: nn.Module, names: Sequence[str]) -> None:
    """Switch these adapters on and all others off. `requires_grad` does not change.

    A compiled model compiles its blocks once for each set of active adapters.
    """
    for layer in lora_layers(model):
        trainable = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
        layer.set_adapter(list(names))
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)


@contextmanager
def active_only(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Context manager in which only these adapters are active; `[]` is the published model."""
    before = active_adapters(model)
    set_active_adapters(model, names)
    try:
        yield
    finally:
        set_active_adapters(model, before)


@contextmanager
def without_assistant(model: nn.Module) -> Iterator[None]:
    """Context manager for sampling: the base with the trained adapter, without the assistant."""
    with active_only(model, [name for name in active_adapters(model) if name != ASSISTANT]):
        yield


def load_assistant(model: nn.Module, source: str | Path | Mapping[str, Tensor]) -> AdapterWeights:
    """Add a frozen second adapter, active together with the first one. Fills its values unless the model is on meta.

    Args:
        model: with or without the trained adapter.
        source: a .safetensors file in diffusers', peft's or kohya's names, or the tensors of one.

    Returns:
        Its weights; pass them to `fill_adapter` after sharding a model on meta.

    Raises:
        ConfigError: the file cannot be read, is not a LoRA, or is a LoRA for another model.
    """
    shown = str(source) if isinstance(source, str | Path) else "a state dict"
    weights = read_adapter(source, _layers_of(model, nn.Linear, nn.Conv2d), option="lora.assistant_path")
    for name, down in weights.down.items():
        _check_shapes(model, name, down, weights.up[name], shown)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = active_adapters(model)
    ranks = {name: down.shape[0] for name, down in weights.down.items()}
    # Scale 1: alpha is in B already, and the ranks of the layers may differ.
    _inject(model, ranks, alpha=1, adapter_name=ASSISTANT)
    for layer in lora_layers(model):
        if ASSISTANT in layer.scaling:
            layer.scaling[ASSISTANT] = 1.0
    wrapped = {_inside_wrapper(model, name) for name in trainable}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wrapped)
    set_active_adapters(model, [*before, ASSISTANT] if before else [ASSISTANT])
    if not any(parameter.is_meta for _, parameter in lora_parameters(model, ASSISTANT)):
        fill_adapter(model, weights, ASSISTANT)
    return weights


def _inside_wrapper(model: nn.Module, name: str) -> str:
    """The name of a parameter after its layer was wrapped."""
    path, _, leaf = name.rpartition(".")
    return f"{path}.base_layer.{leaf}" if hasattr(model.get_submodule(path), "base_layer") else name


def _check_shapes(model: nn.Module, name: str, down: Tensor, up: Tensor, shown: str) -> None:
    layer: Any = model.get_submodule(name)
    out_size, in_size, *kernel = getattr(layer, "base_layer", layer).weight.shape  # a convolution has a kernel
    fits_down = down.shape[1:] == (in_size, *kernel)
    if not (fits_down and up.shape == (out_size, down.shape[0], *(1 for _ in kernel))):
        right = f"is for another model: {name} maps {in_size} to {out_size} here"
        raise option_error("lora.assistant_path", shown, f"{right}, {down.shape[-1]} to {up.shape[0]} there")


def fill_adapter(model: nn.Module, weights: AdapterWeights, adapter_name: str = ASSISTANT) -> None:
    """Copy the matrices of a file into an adapter, sharded or not; no communication."""
    for name, parameter in lora_parameters(model, adapter_name):
        layer, _, part = name.removesuffix(f".{adapter_name}.weight").rpartition(".")
        fill(parameter, (weights.down if part == "lora_A" else weights.up)[layer])


def read_adapter(source: str | Path | Mapping[str, Tensor], layers: Sequence[str], *, option: str) -> AdapterWeights:
    """The matrices of a LoRA for a model with these linear layers and convolutions.

    Accepts the names of diffusers and peft (`transformer.<layer>.lora_A.weight`), and those of kohya for FLUX and SD3
    (`lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight`). Alpha comes from `<layer>.alpha` or from diffusers'
    metadata. Without either it equals the rank.

    Raises:
        ConfigError: names `option`; the file is not a LoRA, or has layers that the model does not have.
    """
    shown = "a state dict"
    metadata: Mapping[str, str] = {}
    if isinstance(source, str | Path):
        shown = str(source)
        with open_file(Path(source)) as file:
            metadata = file.metadata() or {}
            state: Mapping[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    else:
        state = source
    known = _layers_by_stem(layers)
    alphas = _alphas_of(metadata)
    is_kohya = any(key.startswith("lora_unet_") for key in state)
    down: dict[str, Tensor] = {}
    up: dict[str, Tensor] = {}
    factors: dict[str, float] = {}
    for key, tensor in state.items():
        kind, stem = _split_key(key)
        if kind is None:
            raise option_error(option, shown, f"is not a LoRA of linear layers: it has {key}")
        parts = known.get(stem)
        if parts is None:
            raise option_error(option, shown, f"is a LoRA for another model: this one has no linear layer {stem}")
        is_right = tensor.numel() == 1 if kind == "alpha" else tensor.ndim >= 2 and tensor.numel() > 0
        if not is_right:
            raise option_error(option, shown, f"is not a LoRA of linear layers: {key} has shape {list(tensor.shape)}")
        if kind == "alpha":
            factors |= dict.fromkeys(parts, float(tensor))
        elif kind == "down":
            down |= dict.fromkeys(parts, tensor.float())
        else:
            unit = tensor.shape[0] // sum(rows_of_parts(parts, unit=1))
            if unit * sum(rows_of_parts(parts, unit=1)) != tensor.shape[0]:
                raise option_error(option, shown, f"is a LoRA for another model: {key} has {tensor.shape[0]} rows")
            rows = [unit * height for height in rows_of_parts(parts, unit=1)]
            up |= dict(zip(parts, tensor.float().split(rows), strict=True))
    if not down or down.keys() != up.keys():
        raise option_error(option, shown, "is not a LoRA: it has no pairs of lora_A and lora_B")
    for layer, matrix in down.items():
        rank = matrix.shape[0]
        if is_kohya:
            up[layer] = swap_shift_and_scale(layer, matrix, up[layer])
        up[layer] = up[layer] * (factors.get(layer, alphas.get(layer, alphas.get("", rank))) / rank)
    return AdapterWeights(down, up)


def _layers_by_stem(layers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Name of a layer in a file -> layers of the model: several if the file fuses them into one."""
    known: dict[str, tuple[str, ...]] = {}
    for model_name in families_with_original_layers():
        for name in layers:
            original = original_layer(model_name, name)
            if original is not None and set(original.parts) <= set(layers):
                known[original.name.replace(".", "_")] = original.parts
    for name in layers:
        known[name] = known[name.replace(".", "_")] = (name,)
    return known


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


def _alphas_of(metadata: Mapping[str, str]) -> dict[str, float]:
    """Alpha by layer, from the metadata that diffusers writes; the key "" holds the default of all other layers."""
    try:
        adapter = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        alphas: dict[str, float] = {}
        for part in ("transformer", "unet"):
            if f"{part}.lora_alpha" in adapter:
                alphas[""] = float(adapter[f"{part}.lora_alpha"])
            patterns = adapter.get(f"{part}.alpha_pattern") or {}
            alphas |= {str(name).lstrip("^"): float(value) for name, value in patterns.items()}
        return alphas
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ConfigError("the metadata of the LoRA cannot be read; export it again") from None
