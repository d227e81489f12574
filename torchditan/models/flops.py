# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Model FLOPs, counted, and the peak of the device: the two halves of MFU.

Notable:
- counted on the meta device at batch 1, forward and backward, without activation checkpointing's recomputation;
- a multiply-add is 2 FLOPs; matrix products only, as is the custom of MFU;
- what is done once per token, per image and per condition is kept apart: adaLN weights meet one vector per
  image, and counting them per token inflates the MFU of a DiT-L by nearly a half;
- frozen weights cost what they cost: their forward and the input gradient, not the weight gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from torchditan.models.spec import ModelSpec

PEAK_TFLOPS: dict[str, float] = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A40": 149.7,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    "NVIDIA H100 80GB HBM3": 989,  # the SXM part
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H200": 989,
    "NVIDIA H20": 148,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 120GB": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    "AMD Instinct MI250X": 191.5,  # per GCD, which is what a device is
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI325X": 1307,
    "NVIDIA GeForce RTX 4090": 165,
}
"""Dense bf16 TFLOP/s of the datasheets, by the exact name the driver reports."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of a device by its reported name; None where unknown, never a similar name's."""
    peak = PEAK_TFLOPS.get(device_name)
    return None if peak is None else peak * 1e12


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one sample's training step, forward and backward."""

    per_token: float
    """Linear layers that see the tokens, for one token of the image."""
    num_tokens: int
    attention: int
    """Attention's products, all tokens with all tokens."""
    per_image: int
    """Layers that see one vector per image: adaLN, the timestep's MLP."""
    per_condition: int
    """Linear layers on the condition's own tokens."""
    forward: int
    """The forward pass alone, all terms."""

    @property
    def total(self) -> int:
        return round(self.per_token * self.num_tokens + self.attention + self.per_image + self.per_condition)

    @property
    def forward_gmacs(self) -> float:
        """Forward multiply-adds / 1e9: what the DiT paper calls Gflops."""
        return self.forward / 2e9


class LinearCounter(TorchFunctionMode):
    """Adds up the FLOPs of linear layers, forward and the backward to come, by the rows that enter them.

    Args:
        apart: weights whose FLOPs are `flops_apart` instead.
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
            num_products = 1 + x.requires_grad + weight.requires_grad
            flops = 2 * x.numel() * weight.shape[0] * num_products
            if id(weight) in self._apart:
                self.flops_apart += flops
            else:
                self.flops_by_rows[x.numel() // x.shape[-1]] += flops
        return func(*args, **(kwargs or {}))


def count_model_flops(spec: ModelSpec) -> ModelFlops:
    """Count one sample's training step of a model, in seconds for 7B parameters: nothing is computed."""
    # Imported here because it is slow to import and needed once.
    from torch.utils.flop_counter import FlopCounterMode

    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with torch.device("meta"):
        model = spec.build().to("meta")  # the buffers too
        of_condition: list[Any] = [layer.weight for layer in spec.condition_layers(model)]
        linears = LinearCounter(apart=of_condition)
        x_t, t, cond = spec.example_inputs(batch_size=1)
        with forward, linears:
            prediction = model(x_t, t, cond)
        with backward:
            prediction.sum().backward()

    tokens, condition_tokens = spec.num_tokens, spec.num_condition_tokens
    per_image = linears.flops_by_rows[1]
    per_condition = linears.flops_apart
    if condition_tokens > 1 and not of_condition:
        per_condition += linears.flops_by_rows[condition_tokens]
    if condition_tokens:  # layers that see both share their FLOPs
        shared = linears.flops_by_rows[tokens + condition_tokens]
        per_condition += shared * condition_tokens // (tokens + condition_tokens)
    total = forward.get_total_flops() + backward.get_total_flops()
    attention = attention_flops(forward) + attention_flops(backward)
    return ModelFlops(
        per_token=(total - attention - per_image - per_condition) / tokens,
        num_tokens=tokens,
        attention=attention,
        per_image=per_image,
        per_condition=per_condition,
        forward=forward.get_total_flops(),
    )


def attention_flops(counter: FlopCounterMode) -> int:
    """On meta attention decomposes into batched products; linear layers make plain ones."""
    aten = torch.ops.aten
    by_operator = counter.get_flop_counts().get("Global", {})
    return sum(flops for operator, flops in by_operator.items() if operator in (aten.bmm, aten.baddbmm))
