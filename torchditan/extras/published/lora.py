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

import math
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchditan.checkpoint.weights import Weights
from torchditan.config.loader import from_dict
from torchditan.config.options import Config
from torchditan.errors import ConfigError, option_error
from torchditan.extras.published.lora_file import AdapterWeights, is_lora, read_adapter, stated_model
from torchditan.extras.published.lora_layers import Table
from torchditan.models.initialization import fill, weight_generator

DEFAULT = "default"
ASSISTANT = "assistant"


def add_lora(model: nn.Module, *, rank: int, alpha: float, target_modules: Sequence[str]) -> list[str]:
    """Add a trainable adapter, in place. Afterwards only its float32 parameters are trainable.

    Args:
        model: usually on the meta device; the new parameters are created there too. On another device they are
            uninitialised until `init_lora`.
        rank, alpha: as in the formula at the top of this file.
        target_modules: ends of names of linear layers (`to_q`, `attn.to_out.0`), or regular expressions for whole
            names. Each must match a layer.

    Returns:
        Names of the adapted layers.

    Raises:
        ConfigError: a pattern matches nothing or is not a valid regular expression.
    """
    layers = find_target_modules(model, target_modules)
    _inject(model, dict.fromkeys(layers, rank), alpha=alpha, adapter_name=DEFAULT)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f".{DEFAULT}." in name and ".lora_" in name)
    return layers


def find_target_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Linear layers that any pattern matches, in model order.

    Raises:
        ConfigError: a pattern matches no layer, or is not a valid regular expression.
    """
    names = _linear_layers(model)
    found: set[str] = set()
    for pattern in patterns:
        try:
            whole = re.compile(pattern)
        except re.error as error:
            raise option_error("lora.target_modules", pattern, f"is not a valid regular expression: {error}") from None
        matching = {name for name in names if f".{name}".endswith(f".{pattern}") or whole.fullmatch(name)}
        if not matching:
            ends = ", ".join(sorted({_last_part(name) for name in names}))
            raise option_error("lora.target_modules", pattern, f"matches no linear layer; their names end in {ends}")
        found |= matching
    return [name for name in names if name in found]


def _linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers in the model without adapters. Adapted layers are included."""
    from peft.tuners.lora import LoraLayer

    names, wrapped = [], None
    for name, module in model.named_modules():
        if wrapped is not None and name.startswith(wrapped):
            continue
        if isinstance(module, LoraLayer):
            wrapped = f"{name}."
        if isinstance(getattr(module, "base_layer", module), nn.Linear):
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
    for name, parameter in model.named_parameters():
        if name.endswith((f".lora_A.{adapter_name}.weight", f".lora_B.{adapter_name}.weight")):
            yield name, parameter


def init_lora(model: nn.Module, seed: int) -> None:
    """Initialise A uniformly in +-1/sqrt(in) (Kaiming with a = sqrt(5), as in peft) and B with zeros.

    The adapter is therefore the identity at first. Values are a function of (seed, parameter name) for any sharding;
    no communication.
    """
    for name, parameter in lora_parameters(model):
        if ".lora_B." in name:
            fill(parameter, torch.zeros(parameter.shape))
        else:
            bound = 1 / math.sqrt(parameter.shape[1])
            draw = weight_generator(seed, name).random(tuple(parameter.shape), dtype="float32")
            fill(parameter, torch.from_numpy(draw).mul_(2 * bound).sub_(bound))


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
def without_assistant(model: nn.Module) -> Iterator[None]:
    """Context manager for sampling: the base with the trained adapter, without the assistant."""
    before = active_adapters(model)
    set_active_adapters(model, [name for name in before if name != ASSISTANT])
    try:
        yield
    finally:
        set_active_adapters(model, before)


def load_assistant(model: nn.Module, source: Path, *, table: Table) -> AdapterWeights:
    """Add a frozen second adapter, active together with the first one. Fills its values unless the model is on meta.

    Args:
        model: with or without the trained adapter.
        source: a .safetensors file in the names that `read_adapter` reads.
        table: `original_layers` of the model's family.

    Returns:
        Its weights; pass them to `fill_adapter` after sharding a model on meta.

    Raises:
        ConfigError: the file cannot be read, is not a LoRA, or is a LoRA for another model.
    """
    try:
        weights = _read_for(model, source, table=table, shown=str(source))
    except ConfigError as error:
        raise option_error("lora.assistant_path", str(source), str(error).removeprefix(f"{source} ")) from None
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
        fill_adapter(model, weights)
    return weights


def _inside_wrapper(model: nn.Module, name: str) -> str:
    """The name of a parameter after its layer was wrapped."""
    path, _, leaf = name.rpartition(".")
    return f"{path}.base_layer.{leaf}" if hasattr(model.get_submodule(path), "base_layer") else name


def _read_for(model: nn.Module, source: Path | Mapping[str, Tensor], *, shown: str, **options: Any) -> AdapterWeights:
    """`read_adapter` for a model that has or gets adapters, with matrices of the sizes of its layers."""
    weights = read_adapter(source, _linear_layers(model), shown=shown, **options)
    for name, down in weights.down.items():
        layer: Any = model.get_submodule(name)
        out_size, in_size = getattr(layer, "base_layer", layer).weight.shape
        up = weights.up[name]
        if down.shape[1:] != (in_size,) or up.shape != (out_size, down.shape[0]):
            right = f"is a LoRA for another model: {name} maps {in_size} to {out_size} here"
            raise ConfigError(f"{shown} {right}, {down.shape[-1]} to {up.shape[0]} there")
    return weights


def fill_adapter(model: nn.Module, weights: AdapterWeights, adapter_name: str = ASSISTANT) -> None:
    """Copy matrices into an adapter, sharded or not; no communication. Layers without matrices keep their values."""
    for name, parameter in lora_parameters(model, adapter_name):
        layer, _, part = name.removesuffix(f".{adapter_name}.weight").rpartition(".")
        matrices = weights.down if part == "lora_A" else weights.up
        if layer in matrices:
            fill(parameter, matrices[layer])


def start_from(model: Any, weights: Weights, config: Config) -> list[str]:
    """Fill the trained adapter of a new run, sharded or not, so that it computes what another LoRA computes.

    Layers that the other LoRA lacks keep their zeros in B. No communication. The base is the published model in both,
    so that time and prediction are known.

    Args:
        model: a `PublishedModel` whose trained adapter has initial values.
        weights: the other LoRA, of a run or a file.
        config: of this run.

    Returns:
        What to say about layers without weights.

    Raises:
        ConfigError: the source is not a LoRA, is for another model, or has another rank or layers without an adapter.
    """
    shown, lora = str(weights.path), config.lora
    if not is_lora(weights.shapes):
        right = "give them as --model.path (torchditan export RUN FOLDER --format diffusers)"
        raise ConfigError(f"{shown} has all weights of a model, and this run trains a LoRA; {right}")
    source: Path | dict[str, Tensor] = weights.path
    if weights.config is None:
        alpha, there = None, stated_model(weights.path)
    else:
        source, options = weights.tensors(), from_dict(weights.config)
        alpha, there = options.lora.alpha, options.model.name
    if there not in (None, config.model.name):
        here = config.model.name
        raise ConfigError(f"{shown} is a LoRA for another model: model.name was {there}, and is {here} here")
    rank, scale = lora.rank, 1 if lora.alpha is None else lora.alpha / lora.rank
    table = model.original_layers
    found = _read_for(model.transformer, source, table=table, shown=shown, alpha=alpha, scale=scale)
    trained = {name.partition(".lora_")[0] for name, _ in lora_parameters(model.transformer)}
    # A file in kohya's names has zeros for those parts of a fused layer that were not trained.
    if further := [name for name, up in found.up.items() if name not in trained and up.any()]:
        ends = sorted({re.split(r"(?:blocks|layers|refiner)\.\d+\.", name)[-1] for name in further})
        targets = shlex.join([*(lora.target_modules or model.lora_targets), *ends])
        right = f"does not train; add them with --lora.target_modules {targets}"
        raise ConfigError(f"{shown} has {len(further)} layers, such as {further[0]}, that this run {right}")
    down, up = {}, {}
    for name in trained & found.up.keys():
        down[name], up[name] = _without_zeros(found.down[name], found.up[name], rank)
    ranks = sorted({matrix.shape[0] for matrix in down.values()})
    if len(ranks) > 1:
        raise ConfigError(f"{shown} has ranks from {ranks[0]} to {ranks[-1]}; must be lora.rank in all layers")
    if ranks not in ([], [rank]):
        raise ConfigError(f"{shown} has rank {ranks[0]}, and lora.rank is {rank} here; set --lora.rank {ranks[0]}")
    fill_adapter(model.transformer, AdapterWeights(down, up), DEFAULT)
    missing = len(trained) - len(down)
    return [f"{missing} of {len(trained)} layers are not in it and start at zero"] if missing else []


def _without_zeros(down: Tensor, up: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The same product of lower rank: without columns of zeros in B, as a fused layer in kohya's names has them."""
    if down.shape[0] <= rank:
        return down, up
    is_used = up.any(dim=0)
    kept = torch.argsort((~is_used).int(), stable=True)[: max(rank, int(is_used.sum()))]
    return down[kept], up[:, kept]
