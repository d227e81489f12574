# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Model FLOPs, counted. With the peak of the device (peak_flops.py) they give the MFU.

Notable:
- counted on the meta device for one sample, or for as many as the objective needs at once; forward and backward,
  without the recomputation of activation checkpointing;
- a multiply-add is 2 FLOPs. As usual for MFU, only matrix products and convolutions count;
- work per token, per image and per condition is counted separately: adaLN weights multiply one vector per image, and
  counting them per token would inflate the MFU of a DiT-L by nearly a half;
- frozen weights count with their forward and the input gradient, without the weight gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from torchditan.models.spec import ModelSpec


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of the training step of one sample, forward and backward."""

    per_token: float
    """Linear layers over tokens, for one token of the image, with the few FLOPs that belong to no other term."""
    num_tokens: int
    attention: int
    """Matrix products of attention, all tokens with all tokens."""
    per_image: int
    """Layers over one vector per image: adaLN and the timestep's MLP."""
    per_condition: int
    """Linear layers over the condition's tokens only."""
    forward: int
    """The forward pass only, all terms."""

    @property
    def total(self) -> int:
        return round(self.per_token * self.num_tokens + self.attention + self.per_image + self.per_condition)


class LinearCounter(TorchFunctionMode):
    """Counts the FLOPs of linear layers, forward and backward, by the number of input rows of a sample.

    Args:
        apart: weights whose FLOPs count towards `flops_apart` instead.
    """

    def __init__(self, apart: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.flops_by_rows: Counter[int] = Counter()
        self.flops_apart = 0
        self._apart = {id(weight) for weight in apart}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            x, weight = args[:2]
            num_products = 1 + (x.requires_grad + weight.requires_grad) * torch.is_grad_enabled()
            flops = 2 * x.numel() * weight.shape[0] * num_products
            if id(weight) in self._apart:
                self.flops_apart += flops
            else:
                self.flops_by_rows[x.shape[-2] if x.dim() > 2 else 1] += flops
        return func(*args, **(kwargs or {}))


def count_model_flops(
    spec: ModelSpec, loss: Callable[[nn.Module], torch.Tensor] | None = None, *, batch_size: int = 1
) -> ModelFlops:
    """Count the training step of one sample. Computes nothing: seconds even for 7B parameters.

    Args:
        spec: the model.
        loss: all that a step computes with the model, on the meta device. None: the prediction, which is all but a few
            operations, unless the objective reads features.
        batch_size: number of samples that `loss` has. The FLOPs are their mean.
    """
    # Imported here because the import is slow and only needed once.
    from torch.utils.flop_counter import FlopCounterMode

    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with torch.device("meta"):
        model = spec.build().to("meta")  # the buffers too
        of_condition: list[Any] = [layer.weight for layer in spec.condition_layers(model)]
        linears = LinearCounter(apart=of_condition)
        x_t, t, cond = spec.example_inputs(batch_size)
        with forward, linears:
            result = model(x_t, t, cond) if loss is None else loss(model)
        with backward:
            result.sum().backward()

    tokens, condition_tokens = spec.num_tokens, spec.num_condition_tokens
    per_image = linears.flops_by_rows[1] // batch_size
    per_condition = linears.flops_apart // batch_size
    if condition_tokens > 1 and not of_condition:
        per_condition += linears.flops_by_rows[condition_tokens] // batch_size
    if condition_tokens:  # layers over both tokens share their FLOPs
        rows = tokens + condition_tokens
        per_condition += linears.flops_by_rows[rows] * condition_tokens // rows // batch_size
    total = (forward.get_total_flops() + backward.get_total_flops()) // batch_size
    attention = (attention_flops(forward) + attention_flops(backward)) // batch_size
    return ModelFlops(
        per_token=(total - attention - per_image - per_condition) / tokens,
        num_tokens=tokens,
        attention=attention,
        per_image=per_image,
        per_condition=per_condition,
        forward=forward.get_total_flops() // batch_size,
    )


def attention_flops(counter: FlopCounterMode) -> int:
    """On the meta device attention decomposes into batched products; linear layers use plain products."""
    aten = torch.ops.aten
    by_operator = counter.get_flop_counts().get("Global", {})
    return sum(flops for operator, flops in by_operator.items() if operator in (aten.bmm, aten.baddbmm))
