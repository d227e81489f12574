# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A stand-in for an Apple GPU: tensors that say `mps`, compute on the CPU, and refuse what MPS refuses.

Notable:
- every operation passes through `AppleGpu.__torch_dispatch__`, below autograd. It fails for an operation that has no
  kernel for MPS in torch's list (native_functions.yaml), for float64, and if an operand is on the CPU;
- the fused optimizers ignore `found_inf`, as torch's kernels for MPS do;
- functions of torch.cuda fail if code outside of torch calls them, except for the question whether there is a GPU;
- no Metal kernel runs. Only hardware shows whether those compute the right numbers;
- autograd does not run backward: its engine asks torch for an accelerator, and on Linux there is none. Drawing and
  evaluation run as a whole, a training step does not.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

_TAKES_CPU_INDICES = {"index", "index_put_", "_index_put_impl_"}
_QUESTIONS = {"is_available", "device_count"}
"""Functions of torch.cuda that any code may call."""


class MpsTensor(torch.Tensor):
    """A tensor that reports the device mps:0; `values` are on the CPU."""

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> MpsTensor:
        made: MpsTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device("mps", 0),
        )
        made.values = values
        return made

    def __repr__(self, **_: Any) -> str:
        return f"MpsTensor({self.values})"

    def __setitem__(self, index: Any, value: Any) -> None:
        """torch copies a list of numbers to the device without asking the mode."""
        super().__setitem__(torch.tensor(index).to("mps") if isinstance(index, list) else index, value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on an Apple GPU outside of the mode")


class AppleGpu(TorchDispatchMode):
    """Runs operations on `MpsTensor`, and counts them in `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        operands = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        on_gpu = [isinstance(x, MpsTensor) for x in operands]
        name = func._schema.name.removeprefix("aten::")
        device = kwargs.get("device")
        makes = device is not None and torch.device(device).type == "mps"
        if not any(on_gpu) and not makes:
            return func(*args, **kwargs)
        self.calls[name] += 1
        copies = name in ("_to_copy", "copy_")
        if not copies and name not in _TAKES_CPU_INDICES and any(on_gpu):
            strangers = [x for x, is_on in zip(operands, on_gpu, strict=True) if not is_on and x.dim() > 0]
            assert not strangers, f"{func}: {strangers[0].shape} is on {strangers[0].device}, the rest on mps"
        assert has_kernel(func), f"{func} is not implemented for MPS"
        dtype = kwargs.get("dtype")
        if dtype is torch.float64:
            raise TypeError(f"{func}: MPS has no float64")
        if copies:
            assert not kwargs.get("non_blocking") and not (name == "copy_" and len(args) > 2 and args[2]), (
                f"{func}: not pinned, and nothing waits for the copy"
            )
        if name.startswith("_fused_"):
            kwargs["found_inf"] = None
        if makes:
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            raise AssertionError(f"{func}: pinned memory")

        def inside(x: Any) -> Any:
            return x.values if isinstance(x, MpsTensor) else x

        result = func(*tree_map(inside, args), **tree_map(inside, kwargs))
        stays = makes if device is not None else (on_gpu[0] if name == "copy_" else True)
        if name == "_local_scalar_dense" or not stays:
            return result

        def outside(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if x.dtype is torch.float64:
                raise TypeError(f"{func}: MPS has no float64")
            return MpsTensor(x)

        return return_and_correct_aliasing(func, args, kwargs, tree_map(outside, result))


_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS> guard;
extern "C" void install() {
    c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::MPS)].store(&guard);
}
"""
"""torch's methods switch to the device of a tensor. On Linux torch cannot do that for MPS, until this is installed."""


@cache
def _install_device_guard() -> None:
    library = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(_GUARD)
        links = [f"-I{library / 'include'}", f"-L{library / 'lib'}", "-lc10"]
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", built, *links], check=True)
        ctypes.CDLL(str(built)).install()


@cache
def _kernels() -> dict[str, tuple[str, str | None]]:
    """For each operator of torch's list: the keys of its `dispatch`, and the operator that it delegates to."""
    import torchgen

    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    found = {}
    for entry in re.split(r"^- func: ", text, flags=re.M)[1:]:
        delegate = re.search(r"^  structured_delegate: (\S+)", entry, flags=re.M)
        keys = re.search(r"^  dispatch:\n((?:    .*\n)+)", entry, flags=re.M)
        names = " ".join(line.split(":")[0] for line in keys[1].splitlines()) if keys else "CompositeImplicitAutograd"
        found[entry.split("(")[0]] = (names, delegate[1] if delegate else None)
    return found


@cache
def has_kernel(func: Any) -> bool:
    """Whether torch's list of operators has a kernel of this one for MPS, or composes it from others."""
    name = func._schema.name.removeprefix("aten::")
    full = f"{name}.{func._schema.overload_name}" if func._schema.overload_name else name
    keys, delegate = _kernels()[full]
    if delegate is not None:
        keys, _ = _kernels()[delegate]
    return "MPS" in re.split(r"[ ,]+", keys) or "Composite" in keys


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention by plain products. torch asks the device to choose a kernel, which is compiled into torch."""
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
    return result


@contextmanager
def apple_gpu() -> Iterator[AppleGpu]:
    """Make this process find an Apple GPU, and no CUDA."""

    def refuse(name: str, value: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            assert caller.split(".")[0] == "torch", f"{caller} calls torch.cuda.{name}"
            return value(*args, **kwargs)

        return called

    _install_device_guard()
    synchronized = Counter[str]()
    with ExitStack() as stack:
        enter = stack.enter_context
        for name, value in list(vars(torch.cuda).items()):
            if (isinstance(value, types.FunctionType) and name not in _QUESTIONS) or name == "Event":
                enter(patch.object(torch.cuda, name, refuse(name, value)))
        enter(patch.object(torch.cuda, "is_available", lambda: False))
        enter(patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention))
        enter(patch.object(torch.backends.mps, "is_available", lambda: True))
        enter(patch.object(torch.mps, "synchronize", lambda: synchronized.update(["synchronize"])))
        enter(patch.object(torch.mps, "driver_allocated_memory", lambda: 3 * 2**30))
        enter(patch.object(torch.mps, "recommended_max_memory", lambda: 12 * 2**30))
        gpu = enter(AppleGpu())
        gpu.calls = synchronized
        yield gpu
