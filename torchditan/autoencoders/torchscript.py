# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Interpreter for traced modules in TorchScript archives; no code of the file is run.

Notable:
- `torch.jit.load` executes what an archive contains, and TorchScript can write any file (`aten::save`). Here the code
  of the archive is parsed, never compiled. A trace is a straight-line sequence of tensor operations. Each operation is
  looked up in `_OPERATIONS`, which only compute tensors from tensors. Any other name refuses the file;
- the archive's pickles may contain tensors, modules and plain values, and no other class;
- the operations run in the order of the trace, so results are identical to the bit. A value is released after its last
  use, as in TorchScript;
- devices recorded in the trace are replaced by `device`.
"""

from __future__ import annotations

import ast
import operator
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Values = dict[str, Any]
Expression = Callable[[Values], Any]

_TENSOR_OPERATIONS = """
Int _convolution abs add add_ alias amax amin arange argmax as_strided avg_pool2d baddbmm bmm cat ceil chunk clamp
clamp_min clone constant_pad_nd contiguous conv2d conv_transpose2d cos detach div div_ dropout einsum empty empty_like
exp expand expand_as feature_dropout flatten flip floor floor_divide floordiv full full_like ge gelu group_norm gt
layer_norm le leaky_relu linear log log2 lt masked_fill matmul max max_pool2d maximum mean min minimum mul mul_ narrow
ne neg new_full new_ones new_zeros ones ones_like pad permute pixel_shuffle pixel_unshuffle pow rand_like randn
randn_like reflection_pad2d relu relu_ remainder repeat repeat_interleave replication_pad2d reshape rms_norm round
rsqrt rsub scaled_dot_product_attention select sigmoid silu silu_ sin size slice softmax split split_with_sizes sqrt
square squeeze stack sub sub_ sum tanh to transpose type_as unbind unsqueeze upsample_bilinear2d upsample_nearest2d
view view_as where zero_ zeros zeros_like
"""
_OPERATIONS = frozenset(_TENSOR_OPERATIONS.split())
_FORWARD = re.compile(r"forward\d*")  # forward1 belongs to a second call and may differ
_NUMBERS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "mul": operator.mul,
    "neg": operator.neg,
    "remainder": operator.mod,
    "sub": lambda a, b: a - b,
}
"""Operations that return a number if no argument is a tensor; torch would return a tensor."""
_CASTS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "bool": bool}
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
_TYPED_LISTS = ("build_boollist", "build_doublelist", "build_intlist", "build_tensorlist")
# Errors of zipfile, pickle and ast for damaged files, accidental or not.
_DAMAGED = (
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
    OSError,
    EOFError,
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class NotATrace(ValueError):
    """The file is not a complete traced module, or does something that no trace does; the message names it."""


class Module:
    """A module of the archive: its class, and its parameters, buffers and submodules by name."""

    class_name = ""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise NotATrace(f"{self.class_name} defines __setstate__, which no traced module needs")
        self.values = state


class Trace:
    """The root module of an archive. Call it like the traced module, without gradients.

    Args:
        file: such as `encoder.jit`.
        device: where its tensors are and where it computes.

    Raises:
        NotATrace: the archive cannot be interpreted.
    """

    def __init__(self, file: Path, *, device: torch.device) -> None:
        self.tensors: list[Tensor] = []
        """Parameters and buffers, in stored order."""
        self._device = device
        try:
            with zipfile.ZipFile(file) as archive:
                self._read(archive)
        except (NotATrace, torch.OutOfMemoryError):
            raise
        except _DAMAGED as error:
            raise NotATrace(" ".join(str(error).split()) or type(error).__name__) from error

    def __call__(self, *inputs: Tensor) -> Any:
        """Output of the traced module; RuntimeError from torch if the inputs do not match."""
        try:
            return self._run(self._root, "forward", inputs)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise NotATrace(f"its code fails: {' '.join(str(error).split())}") from error

    def _read(self, archive: zipfile.ZipFile) -> None:
        names = archive.namelist()
        root = names[0].split("/")[0] if names else ""
        self._root = self._unpickle(archive, f"{root}/data.pkl", tensors=f"{root}/data", found=self.tensors)
        if not isinstance(self._root, Module):
            raise NotATrace("it contains no module")
        self._constants = self._unpickle(archive, f"{root}/constants.pkl", tensors=f"{root}/constants", found=[])
        self._forwards: dict[str, Callable[..., Any]] = {}
        prefix = f"{root}/code/"
        for name in names:
            if name.startswith(prefix) and name.endswith(".py"):
                package = name.removeprefix(prefix).removesuffix(".py").replace("/", ".")
                for found in ast.parse(archive.read(name)).body:
                    self._add_class(found, package)

    def _unpickle(self, archive: zipfile.ZipFile, name: str, *, tensors: str, found: list[Tensor]) -> Any:
        with archive.open(name) as stream:
            return _Unpickler(stream, archive, tensors=tensors, device=self._device, found=found).load()

    def _add_class(self, node: ast.stmt, package: str) -> None:
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and _FORWARD.fullmatch(method.name):
                    self._forwards[f"{package}.{node.name}.{method.name}"] = self._function(method)

    def _run(self, module: Any, method: str, inputs: Sequence[Any]) -> Any:
        owner = module.class_name if isinstance(module, Module) else type(module).__name__
        if f"{owner}.{method}" not in self._forwards:
            raise NotATrace(f"{owner} has no {method}")
        return self._forwards[f"{owner}.{method}"](module, *inputs)

    def _function(self, node: ast.FunctionDef) -> Callable[..., Any]:
        """Compile a forward into a function of its module and its inputs."""
        *body, last = node.body
        if not isinstance(last, ast.Return) or last.value is None:
            raise _unknown(last)
        steps = [self._statement(statement) for statement in body]
        result = self._expression(last.value)
        names = [argument.arg for argument in node.args.args]
        unused = _dropped_after(node.body)

        def forward(*inputs: Any) -> Any:
            values = dict(zip(names, inputs, strict=True))
            for step, drops in zip(steps, unused, strict=False):
                step(values)
                for name in drops:
                    values.pop(name, None)
            return result(values)

        return forward

    def _statement(self, node: ast.stmt) -> Callable[[Values], None]:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            raise _unknown(node)
        value, target = self._expression(node.value), node.targets[0]
        if isinstance(target, ast.Name):
            return lambda values, name=target.id: values.update({name: value(values)})  # type: ignore[misc]
        if not isinstance(target, ast.Tuple):
            raise _unknown(target)
        names = [part.id for part in target.elts if isinstance(part, ast.Name)]
        if len(names) != len(target.elts):
            raise _unknown(target)
        return lambda values: values.update(zip(names, value(values), strict=True))

    def _expression(self, node: ast.expr) -> Expression:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | None):
            return lambda values, constant=node.value: constant  # type: ignore[misc]
        if isinstance(node, ast.Name):
            return operator.itemgetter(node.id)
        if isinstance(node, ast.List | ast.Tuple):
            parts = [self._expression(part) for part in node.elts]
            kind = list if isinstance(node, ast.List) else tuple
            return lambda values: kind(part(values) for part in parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self._expression(node.operand)
            return lambda values: -operand(values)
        if isinstance(node, ast.Subscript):
            sequence, index = self._expression(node.value), self._expression(node.slice)
            return lambda values: sequence(values)[index(values)]
        if isinstance(node, ast.Attribute):
            return self._attribute(node.value, node.attr)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise _unknown(node)

    def _attribute(self, node: ast.expr, name: str) -> Expression:
        if isinstance(node, ast.Name) and node.id == "CONSTANTS":
            constant = self._constants[int(name.removeprefix("c"))]
            return lambda values: constant
        owner = self._expression(node)
        return lambda values: _value_of(owner(values), name)

    def _call(self, node: ast.Call) -> Expression:
        words = ast.unparse(node.func)
        if words in ("annotate", "unchecked_cast") and len(node.args) == 2:
            return self._expression(node.args[1])  # the first is a type
        if words == "getattr" and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            return self._attribute(node.args[0], str(node.args[1].value))  # for names like "0"
        if any(isinstance(argument, ast.Starred) for argument in node.args) or any(
            k.arg is None for k in node.keywords
        ):
            raise _unknown(node)
        arguments = [self._expression(argument) for argument in node.args]
        keywords = {str(keyword.arg): self._expression(keyword.value) for keyword in node.keywords}
        if isinstance(node.func, ast.Attribute) and _FORWARD.fullmatch(node.func.attr):
            owner, method = self._expression(node.func.value), node.func.attr
            return lambda values: self._run(owner(values), method, [argument(values) for argument in arguments])
        function = self._operation(words)
        return lambda values: function(
            *(argument(values) for argument in arguments),
            **{name: value(values) for name, value in keywords.items()},
        )

    def _operation(self, words: str) -> Callable[..., Any]:
        if words == "torch.device":
            return lambda *_: self._device
        if words == "ops.prim.NumToTensor":
            return torch.tensor
        if words in _CASTS:
            return _CASTS[words]
        name = words.removeprefix("torch.")
        if words == name or name not in _OPERATIONS:
            raise NotATrace(f"it calls {words[:80]}, which no traced image tokenizer needs")
        compute = getattr(torch.ops.aten, name)
        if name not in _NUMBERS:
            return compute
        of_numbers = _NUMBERS[name]
        return lambda *values, **options: (
            compute(*values, **options) if any(isinstance(value, Tensor) for value in values) else of_numbers(*values)
        )


class _Unpickler(pickle.Unpickler):
    """Accepts tensors, modules of the archive and plain values."""

    def __init__(
        self, stream: Any, archive: zipfile.ZipFile, *, tensors: str, device: torch.device, found: list[Tensor]
    ) -> None:
        super().__init__(stream)
        self._archive, self._tensors, self._device, self._found = archive, tensors, device, found

    def find_class(self, module: str, name: str) -> Any:
        if module == "__torch__" or module.startswith("__torch__."):
            return type("Module", (Module,), {"class_name": f"{module}.{name}"})
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch.jit._pickle" and name in _TYPED_LISTS:
            return lambda values: list(values)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._tensor
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise NotATrace(f"it names {module}.{name}"[:120] + ", which no traced module needs")

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, _, count = pid
        content = self._archive.read(f"{self._tensors}/{key}")
        if len(content) != count * dtype.itemsize:
            raise NotATrace(f"{self._tensors}/{key} has {len(content)} bytes, not {count * dtype.itemsize}")
        return torch.frombuffer(bytearray(content), dtype=dtype) if count else torch.empty(0, dtype=dtype)

    def _tensor(self, storage: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> Tensor:
        tensor = storage.as_strided(size, stride, offset).to(self._device)
        self._found.append(tensor)
        return tensor


def _dropped_after(body: Sequence[ast.stmt]) -> list[list[str]]:
    """For each statement, the names that no later statement uses."""
    last_use: dict[str, int] = {}
    for number, statement in enumerate(body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                last_use[node.id] = number
    dropped: list[list[str]] = [[] for _ in body]
    for name, number in last_use.items():
        dropped[number].append(name)
    return dropped


def _value_of(owner: Any, name: str) -> Any:
    if not isinstance(owner, Module):
        raise NotATrace(f"it asks a {type(owner).__name__} for {name}")
    return owner.values[name]


def _unknown(node: ast.AST) -> NotATrace:
    return NotATrace(f"its code has `{ast.unparse(node).splitlines()[0][:80]}`, which is not what tracing writes")
