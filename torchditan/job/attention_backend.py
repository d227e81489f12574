# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Chooses the kernel of `F.scaled_dot_product_attention` for a run (`training.attention_backend`).

Notable:
- a backend is a preference: calls that it cannot compute, for their dtype or mask, use the next one of `BACKENDS`;
- with auto, rank 0 measures forward and backward of the model's attention calls once, before the first step. All ranks
  use its choice. config.json records it, and a resumed run reuses it if its device has that backend;
- the settings are those of the process. torch's caches of compiled code do not know them, although a graph contains the
  kernel that was chosen while it was traced. The backend therefore becomes part of their key.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.compiler.config as compiler_config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from torchditan.config.errors import ConfigError, option_error
from torchditan.distributed.process_group import raise_on_all_ranks
from torchditan.job.prepare import Job
from torchditan.models import ModelSpec
from torchditan.run import provenance
from torchditan.run.reading import read_config

OPTION = "training.attention_backend"
ENTRY = "attention_backend"
"""Of config.json."""
BACKENDS: dict[str, Any] = {  # torch's type of them is incomplete
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Each with what replaces it where it cannot compute a call: the following ones, in this order."""
CANDIDATES = ("cudnn", "flash", "efficient")
"""Of auto. math keeps the matrix of all pairs of tokens, which may not fit the memory."""
_AS_FAST = 0.97
"""torch's own choice stays unless another backend takes less than this share of its time."""
_WARM_UP, _REPEATS, _ROUNDS = 2, 5, 3


class Layout(NamedTuple):
    """Of one tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype) -> Layout:
        return cls(tuple(tensor.shape), tensor.stride(), dtype if tensor.is_floating_point() else tensor.dtype)

    def tensor(self, device: torch.device) -> Tensor:
        """With this layout: random numbers, or True."""
        size = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        if self.dtype == torch.bool:
            return torch.ones(size, dtype=torch.bool, device=device).as_strided(self.shape, self.stride)
        return torch.randn(size, device=device).to(self.dtype).as_strided(self.shape, self.stride)


class Call(NamedTuple):
    """The arguments of an attention call."""

    query: Layout
    key: Layout
    value: Layout
    mask: Layout | None
    is_causal: bool

    def arguments(self, device: torch.device) -> dict[str, Any]:
        query, key, value = (layout.tensor(device).requires_grad_() for layout in self[:3])
        mask = None if self.mask is None else self.mask.tensor(device)
        return {"query": query, "key": key, "value": value, "attn_mask": mask, "is_causal": self.is_causal}


class _Recorder(TorchFunctionMode):
    """Counts the attention calls of a forward pass. Floating-point tensors get the dtype of the run's blocks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.calls: Counter[Call] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self._record(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _record(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_options: Any,
    ) -> None:
        mask = None if attn_mask is None else Layout.of(attn_mask, self.dtype)
        layouts = [Layout.of(tensor, self.dtype) for tensor in (query, key, value)]
        self.calls[Call(layouts[0], layouts[1], layouts[2], mask, is_causal)] += 1


def attention_calls(
    spec: ModelSpec, *, batch_size: int, dtype: torch.dtype, context_parallel_degree: int = 1
) -> Counter[Call]:
    """The calls of a forward pass, each with its number. It runs on the meta device and computes nothing.

    Args:
        spec: the model. Data of several sizes has other shapes too, which are not listed.
        batch_size: of a micro-batch.
        dtype: of the blocks, `training.mixed_precision_param`.
        context_parallel_degree: ranks that share the heads of a call.
    """
    with torch.device("meta"), torch.set_grad_enabled(context_parallel_degree > 1), _Recorder(dtype) as recorder:
        model = spec.build().to("meta")
        if context_parallel_degree > 1:  # only a forward with gradients is split
            from torchditan.distributed.context_parallel import split_tokens

            split_tokens(model, degree=context_parallel_degree, rank=0, group_name=None)
        model(*spec.example_inputs(batch_size))
    return recorder.calls


@contextmanager
def preferring(backend: str) -> Iterator[None]:
    """Attention by this backend inside the body, or by a following one where it cannot compute a call.

    Earlier ones are disabled: torch puts cuDNN first on some GPUs, and priorities alone may not change that.
    """
    names = list(BACKENDS)
    enabled = [BACKENDS[name] for name in names[names.index(backend) :]]
    tag = f"{compiler_config.cache_key_tag}attention:{backend}"
    with sdpa_kernel(enabled, set_priority=True), compiler_config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield


def chosen_by_torch(call: Call, device: torch.device, *, only: str | None = None) -> str | None:
    """The backend that torch chooses for a call here, among all or for `only` one; None if it cannot compute it."""
    arguments = call.arguments(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says why each backend is out
        try:
            if only is None:
                found = torch._fused_sdp_choice(**arguments)
            else:
                with sdpa_kernel(BACKENDS[only]):
                    found = torch._fused_sdp_choice(**arguments)
        except RuntimeError:
            return None
    return next((name for name, backend in BACKENDS.items() if int(backend) == found), None)


def measure(call: Call, backend: str, device: torch.device) -> float | None:
    """Microseconds of forward and backward of a call on a GPU; None if the backend cannot compute it."""
    if chosen_by_torch(call, device, only=backend) is None:
        return None
    arguments = call.arguments(device)
    inputs = [arguments[name] for name in ("query", "key", "value")]
    times = []
    with sdpa_kernel(BACKENDS[backend]):
        try:
            out = F.scaled_dot_product_attention(**arguments)
            gradient = torch.randn_like(out)
            for round_ in range(_ROUNDS + 1):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(_REPEATS if round_ else _WARM_UP):
                    torch.autograd.grad(F.scaled_dot_product_attention(**arguments), inputs, gradient)
                end.record()
                end.synchronize()
                times.append(1000 * start.elapsed_time(end) / _REPEATS)
        except RuntimeError:  # of a kernel that accepted the call, or of the memory
            return None
    return statistics.median(times[1:])


Times = Mapping[Call, Mapping[str, float | None]]
"""Microseconds of each call with each of `CANDIDATES`."""


def totals(calls: Mapping[Call, int], times: Times) -> dict[str, float]:
    """Microseconds of all calls, by the candidate that is preferred. Candidates that compute no call are left out."""
    found = {}
    for i, candidate in enumerate(CANDIDATES):
        if all(times[call][candidate] is None for call in calls):
            continue
        of_calls = {call: [times[call][name] for name in CANDIDATES[i:]] for call in calls}
        # A call that none of them can compute goes to math, whatever the preference.
        first = {call: next((time for time in row if time is not None), 0.0) for call, row in of_calls.items()}
        found[candidate] = sum(count * first[call] for call, count in calls.items())
    return found


def fastest(microseconds: Mapping[str, float], *, by_torch: str | None) -> str:
    best = min(microseconds, key=lambda name: microseconds[name])
    if by_torch is not None and by_torch in microseconds and microseconds[best] > _AS_FAST * microseconds[by_torch]:
        return by_torch
    return best


@dataclass(frozen=True)
class _Choice:
    backend: str
    how: str
    """The reason, for the log."""
    microseconds: dict[str, float]
    """Of the candidates that were measured; {} for a backend that was set."""


@contextmanager
def chosen_backend(job: Job, say: Callable[[str], None]) -> Iterator[None]:
    """Attention by the backend of `training.attention_backend` inside the body, recorded in config.json.

    Every rank calls it, with a value other than default.

    Args:
        job: its run directory is open.
        say: prints a line on rank 0.

    Raises:
        ConfigError: the backend that was set can compute no attention call of the model on this device.
    """
    choice: _Choice | None = None
    mistake: ConfigError | None = None
    try:
        choice = _choose(job)
    except ConfigError as error:
        mistake = error
    raise_on_all_ranks(mistake)
    sent = [choice]
    dist.broadcast_object_list(sent, src=0)
    choice = sent[0]
    if choice is None:  # no attention in the model, or none that a candidate computes
        yield
        return
    record = {"backend": choice.backend, "device_name": provenance.device_name(str(job.device))}
    job.run_directory.record(ENTRY, {**record, "microseconds": choice.microseconds})
    say(f"attention: {choice.backend}, {choice.how}")
    with preferring(choice.backend):
        yield


def _choose(job: Job) -> _Choice | None:
    """The choice of rank 0; others only check an option that was set. None without a backend that applies."""
    option, device = job.config.training.attention_backend, job.device
    if option == "auto" and job.rank.rank > 0:
        return None
    precision = job.config.training.mixed_precision_param
    calls = attention_calls(
        job.spec,
        batch_size=job.plan.batch_size,
        dtype=getattr(torch, precision),
        context_parallel_degree=job.parallel_dims.context,
    )

    def applies(backend: str | None) -> bool:
        return backend in BACKENDS and any(chosen_by_torch(call, device, only=backend) for call in calls)

    if option != "auto":
        if calls and not applies(option):
            shape = list(next(iter(calls)).query.shape)
            right = f"cannot compute queries of {shape} in {precision} here; must be auto or default"
            raise option_error(OPTION, option, right)
        return _Choice(option, f"as {OPTION} says", {})
    stored = read_config(job.run_directory.path).get(ENTRY) or {}
    if stored.get("microseconds") and applies(stored.get("backend")):  # measured by auto, not set by an option
        return _Choice(stored["backend"], "as this run measured before", stored["microseconds"])
    return _measured(calls, device)


def _measured(calls: Mapping[Call, int], device: torch.device) -> _Choice | None:
    times = {call: {name: measure(call, name, device) for name in CANDIDATES} for call in calls}
    torch.cuda.empty_cache()
    microseconds = totals(calls, times)
    if not microseconds:  # also of a model without attention
        return None
    largest = max(calls, key=lambda call: math.prod(call.query.shape) * call.key.shape[-2])
    backend = fastest(microseconds, by_torch=chosen_by_torch(largest, device))
    figures = ", ".join(f"{name} {time / 1000:.2f} ms" for name, time in microseconds.items())
    return _Choice(backend, f"measured per micro-batch: {figures}", microseconds)
