# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Traces one training step on the meta device: the memory it keeps and allocates.

Notable:
- the trace runs the real forward of the model, the real loss of the objective, activation checkpointing as in training
  and the backward of autograd. No values are computed, so a step of any size takes milliseconds;
- live memory is counted by storage: each counts once, however many views it has, from the operator that creates it
  until autograd or Python frees it. Parameters and the batch are not included;
- of each sequence of equal blocks three are traced, each on its own: the first, one for all in between, and the last;
- every number is affine in the batch size, so two traces give it for all batch sizes;
- the meta device has no attention and norm kernels, so the trace uses those of the target device. On a GPU these are
  the fused RMSNorm, and attention by cuDNN or flash where they can compute it (not in float32; flash not with a mask),
  else memory-efficient attention; on a CPU its flash attention, or the products of `models.attention`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from torchditan.config.options import Diffusion
from torchditan.diffusion.loss_flops import example_batch
from torchditan.diffusion.objectives import Objective, build_objective, split
from torchditan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchditan.distributed.context_parallel import split_tokens
from torchditan.extras.planner.recorder import StepRecorder, list_tensors
from torchditan.models.attention import attention_by_products, is_faster_by_products
from torchditan.models.dit import DiT
from torchditan.models.frozen import FrozenNetwork
from torchditan.models.rms_norm import RMSNorm
from torchditan.models.spec import ModelSpec

Checkpointing = Literal["none", "full", "op"]
"""Tensors that a block keeps for backward: all (none), its inputs (full), or outputs of products and attention (op)."""

NUM_KEPT_BLOCKS = 3
_BATCHES = (4, 6)  # a loss may halve them, and a dimension of size 1 can be contiguous when larger ones are not

_DIFFUSION = Diffusion()


@dataclass(frozen=True)
class Segment:
    """A part of the step, operator by operator. A pair (fixed, per image) means fixed + per image * batch size."""

    live: np.ndarray
    """(n, 2) bytes alive above the start of the segment, right after each operator."""
    net: np.ndarray
    """(2,) bytes that remain at the end of the segment; negative if it frees more than it allocates."""

    def peak(self, batch_size: int) -> float:
        """Highest bytes above the start, at least 0."""
        return max(0.0, float((self.live @ [1, batch_size]).max(initial=0)))

    def left(self, batch_size: int) -> float:
        return float(self.net @ [1, batch_size])


@dataclass(frozen=True)
class StepTrace:
    """The segments of a step around one block, in execution order."""

    embed: Segment
    """From the batch to the input of the first block: x_t, velocity, embedders."""
    forward: Segment
    """One block."""
    output: Segment
    """Forward of the final layer: the first part of `head`."""
    head: Segment
    """Final layer and loss, forward and backward."""
    backward: Segment
    """One block. Its weight gradients, in the dtype of the weights, are live during the segment but not at its end."""
    tail: Segment
    """Backward of the embedders."""


@dataclass(frozen=True)
class FrozenTrace:
    """Memory of a frozen network."""

    num_bytes: int
    """Of its weights."""
    live: np.ndarray
    """(n, 2) bytes alive after each operator, fixed and per image, above the plan's batch."""

    def peak(self, batch_size: int) -> float:
        return float((self.live @ [1, batch_size]).max())


def trace_frozen(
    network: FrozenNetwork, *, example: Callable[[int], torch.Tensor], beside: int, kernels: str
) -> FrozenTrace:
    """Trace what a frozen network computes for a batch, without gradients.

    Args:
        example: batch size -> images, on the meta device or on a CPU.
        beside: bytes of an image that are alive then, minus those that the plan's batch counts.
        kernels: see `trace_blocks`.
    """
    weights = [*network.module.parameters(), *network.module.buffers()]
    live = []
    for batch in _BATCHES:
        images = example(batch)
        recorder = StepRecorder(ignored=[*weights, images])
        with without_values(images.device), DeviceKernels(kernels, is_own=False):
            network(images)  # the first call may make constants that stay
            with recorder:
                network(images)
        live.append(np.array(recorder.live_after, dtype=np.float64) + batch * beside)
    return FrozenTrace(sum(weight.numel() * weight.element_size() for weight in weights), _affine(*live))


def without_values(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager in which nothing is computed, also for a network that only opens on a CPU."""
    return nullcontext() if device.type == "meta" else FakeTensorMode(allow_non_fake_inputs=True)


def trace_blocks(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    checkpointing: Checkpointing,
    kernels: str,
    diffusion: Diffusion = _DIFFUSION,
    context: int = 1,
) -> list[StepTrace]:
    """Trace a step of `spec`, with the same checkpointing for every block.

    Operators between two blocks count to the earlier one. An objective that uses features gets the whole model.

    Args:
        spec: the model, with the heads of the objective.
        dtype: dtype of the gathered parameters in forward and backward.
        checkpointing: activation checkpointing of the blocks.
        kernels: those of attention and norms: cpu, or on a GPU a value of `training.attention_backend`.
        diffusion: the objective and its options. Label dropout above 0 masks the labels.
        context: ranks that share the tokens of a sample. The trace is that of the first.

    Returns:
        The trace of each block.
    """
    objective = build_objective(diffusion, spec)
    recorders = []
    for batch in _BATCHES:
        with torch.device("meta"):
            model = spec.build()
        is_whole = objective.computes_more
        stands_for = list(range(len(spec.blocks(model)))) if is_whole else keep_three_of_each_row(spec, model)
        if context > 1:
            split_tokens(model, degree=context, rank=0, group_name=None)
        blocks = spec.blocks(_computing_in(model, dtype))
        recorder = _record(
            spec, model, blocks, batch, checkpointing=checkpointing, kernels=kernels, objective=objective
        )
        recorders.append(recorder)
        _complete_marks(recorder, len(blocks))
    last = f"backward {len(blocks) - 1}"
    embed, output, head, tail = (
        _segment(recorders, *ends)
        for ends in (("start", "forward 0"), ("head", "loss"), ("head", last), ("tail", "end"))
    )
    traces = []
    for i in range(len(blocks)):
        following = f"forward {i + 1}" if i + 1 < len(blocks) else "head"
        before = f"backward {i - 1}" if i > 0 else "tail"
        forward, backward = (
            _segment(recorders, *ends) for ends in ((f"forward {i}", following), (f"backward {i}", before))
        )
        traces.append(StepTrace(embed=embed, forward=forward, output=output, head=head, backward=backward, tail=tail))
    return [traces[i] for i in stands_for]


def keep_three_of_each_row(spec: ModelSpec, model: nn.Module) -> list[int]:
    """Shorten a model in place: of more than three equal blocks in a row keep the first, second and last.

    Returns:
        For each block of the original model, the index of the kept block that represents it.
    """
    blocks = list(spec.blocks(model))
    own = {id(block) for block in blocks}
    stand_in = {id(block): id(block) for block in blocks}
    for row in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        if not all(id(block) in own for block in row):
            continue
        kept: list[nn.Module] = []
        for _, group in itertools.groupby(row, key=_kind):
            equal = list(group)
            kept += equal if len(equal) <= NUM_KEPT_BLOCKS else [equal[0], equal[1], equal[-1]]
            stand_in.update({id(block): id(equal[1]) for block in equal[1:-1]})
        del row[:]
        row.extend(kept)
    numbers = {id(block): i for i, block in enumerate(spec.blocks(model))}
    return [numbers[stand_in[id(block)]] for block in blocks]


def _kind(block: nn.Module) -> tuple[Any, ...]:
    parameters = ((name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters())
    return type(block), tuple(parameters)


def _computing_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model on meta, with floating-point parameters in the gathered dtype of FSDP. Buffers keep their dtype."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.to("meta")


def _complete_marks(recorder: StepRecorder, num_blocks: int) -> None:
    """Add marks that no gradient set: with a LoRA the inputs of the first blocks, or a whole block, may need none."""
    recorder.marks.setdefault("tail", recorder.marks["end"])
    for i in range(num_blocks):
        recorder.marks.setdefault(f"backward {i}", recorder.marks[f"backward {i - 1}" if i > 0 else "tail"])


def _record(
    spec: ModelSpec,
    model: nn.Module,
    blocks: nn.ModuleList,
    batch_size: int,
    *,
    checkpointing: Checkpointing,
    kernels: str,
    objective: Objective,
) -> StepRecorder:
    batch, randomness = example_batch(spec, objective, batch_size)
    replacing = functools.partial(DeviceKernels, kernels, is_own=isinstance(model, DiT))
    for block in blocks:  # backward recomputes blocks with the mode below switched off
        block.forward = _with_kernels(replacing, block.forward)
    if kernels == "cpu":
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.forward = module.forward_on_cpu  # type: ignore[method-assign]
    mode = "selective" if checkpointing == "op" else checkpointing
    apply_activation_checkpoint(blocks, mode=mode, selective_option="op")
    inputs = [*model.parameters(), *model.buffers(), *batch.values()]
    recorder = StepRecorder(ignored=[*inputs, *randomness.values()])
    model.register_forward_hook(lambda *_: recorder.mark("loss"))
    _mark_blocks(blocks, recorder)
    with recorder, replacing():
        recorder.mark("start")
        losses, _ = split(objective.loss(model, batch, randomness))
        loss = losses.sum() / batch_size
        loss.backward()
        recorder.mark("end")
    return recorder


def _mark_blocks(blocks: nn.ModuleList, recorder: StepRecorder) -> None:
    """Mark the start and end of each block, and drop there the weight gradients that FSDP reduces."""
    last = len(blocks) - 1

    def before(i: int, inputs: Any) -> None:
        recorder.mark(f"forward {i}")
        if i == 0:
            at_gradient(inputs, lambda: finish(0, "tail"))

    def after(i: int, output: Any) -> None:
        if i == last:
            recorder.mark("head")
            at_gradient(output, lambda: recorder.mark(f"backward {last}"))
        else:
            at_gradient(output, lambda: finish(i + 1, f"backward {i}"))

    def at_gradient(tensors: Any, act: Callable[[], None]) -> None:
        """Call `act` at the first gradient of these tensors: all later parts of the model have then run backward."""
        todo = [act]
        for tensor in list_tensors(tensors):
            if tensor.requires_grad:
                tensor.register_hook(lambda _gradient: todo.pop()() if todo else None)

    def finish(i: int, label: str) -> None:
        for parameter in blocks[i].parameters():
            parameter.grad = None
        recorder.mark(label)

    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda _module, args, kwargs, i=i: before(i, (args, kwargs)), with_kwargs=True)
        block.register_forward_hook(lambda _module, _args, output, i=i: after(i, output))


class DeviceKernels(TorchFunctionMode):
    """Replaces attention and norms by the kernels of a device, which save other tensors for the backward pass.

    Args:
        kernels: as in `trace_blocks`.
        is_own: the model attends by `models.attention`. Others, as those of diffusers, call torch's function.
    """

    def __init__(self, kernels: str, *, is_own: bool) -> None:
        super().__init__()
        self.kernels = kernels
        self.is_own = is_own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (F.scaled_dot_product_attention, F.rms_norm):
            return func(*args, **kwargs)
        if args and forward_ad.unpack_dual(args[0]).tangent is not None:
            return func(*args, **kwargs)  # a forward derivative, for which the kernels have none
        if func is F.scaled_dot_product_attention and self.kernels != "math":  # the meta device decomposes that
            return self._attention(*args, **kwargs)
        if func is F.rms_norm and self.kernels != "cpu":
            weight = args[2] if len(args) > 2 else kwargs.get("weight")
            return FusedRMSNorm.apply(args[0], args[0].new_ones(()) if weight is None else weight)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        **_options: Any,
    ) -> torch.Tensor:
        aten = torch.ops.aten
        if self.kernels == "cpu" and self.is_own and is_faster_by_products(query, value):
            return attention_by_products(query, key, value, attn_mask)
        if self.kernels == "cpu":
            bias = _attention_bias(query, key, attn_mask)
            return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias)[0]
        is_half = query.dtype != torch.float32
        if self.kernels in ("default", "flash") and is_half and attn_mask is None:
            return aten._scaled_dot_product_flash_attention(query, key, value)[0]
        bias = _attention_bias(query, key, attn_mask)
        if self.kernels == "cudnn" and is_half:
            return aten._scaled_dot_product_cudnn_attention(query, key, value, bias, True)[0]
        return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)[0]


def _attention_bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Additive bias (B, heads, N, M) in the dtype of the query, from a mask that broadcasts to this shape."""
    if mask is None:
        return None
    bias = mask if mask.dtype != torch.bool else torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, 0.0)
    return bias.expand(*query.shape[:-1], key.shape[-2])


def _with_kernels(
    replacing: Callable[[], DeviceKernels], forward: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def with_kernels(*args: Any, **kwargs: Any) -> torch.Tensor:
        with replacing():
            return forward(*args, **kwargs)

    return with_kernels


class FusedRMSNorm(torch.autograd.Function):
    """Saves, allocates and moves the same bytes as the fused RMSNorm on a GPU. Its values are meaningless."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inverse_rms = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, inverse_rms)
        return x.contiguous() * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _inverse_rms = ctx.saved_tensors
        return gradient.contiguous() * x.contiguous(), torch.empty_like(weight)


def _segment(recorders: list[StepRecorder], start: str, end: str) -> Segment:
    """The segment between two marks, with numbers as (fixed, per image) from two batch sizes."""
    live, net = [], []
    for recorder in recorders:
        (first, live_at_start), (stop, live_at_end) = recorder.marks[start], recorder.marks[end]
        live.append(np.array(recorder.live_after[first:stop], dtype=np.float64) - live_at_start)
        net.append(np.float64(live_at_end - live_at_start))
    assert len(live[0]) == len(live[1]), "the operators of a step do not depend on the batch"
    return Segment(live=_affine(*live), net=_affine(*net))


def _affine(small: Any, large: Any) -> np.ndarray:
    """(..., 2): fixed and per-image part, from values at the two batch sizes."""
    per_image = (large - small) / (_BATCHES[1] - _BATCHES[0])
    return np.stack([small - _BATCHES[0] * per_image, per_image], axis=-1)
