# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Float8 in every model: the converted layers, and that CUDA accepts all of their products.

The models are tiny, so the products are tested with `any_size`, which converts layers too small to gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from debugmodels import MODELS, spec_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchditan.config.options import Compile, Float8, Model
from torchditan.distributed import float8
from torchditan.distributed.float8 import convert_to_float8
from torchditan.distributed.parallelize import parallelize
from torchditan.models import build_model_spec
from torchditan.models.spec import ModelSpec

pytest.importorskip("torchao")
pytest.importorskip("diffusers")
OWN: dict[str, dict[str, Any]] = {
    "labels": {},
    "labels in context": {"conditioning": "in_context"},
    "text in context": {"text": "in_context", "text_tokens": 7, "text_width": 24, "pooled_width": 16},
    "cross-attention": {"text": "cross_attention", "text_tokens": 7, "text_width": 24},
    "official": {"preset": "official"},
    "adaLN-single": {"conditioning": "adaln_single"},
}
NAMES = [*OWN, *(flavor if name == "wan" else name for name, flavor in MODELS)]
PER_IMAGE = ("adaLN_modulation.1", "norm.linear", "norm1.linear", "norm1_context.linear", "norm1_context.linear_1")
PER_IMAGE += ("img_mod.1", "txt_mod.1", "time_emb_proj")


def spec_by_name(name: str) -> ModelSpec:
    if name in OWN:
        config = Model(flavor="debugmodel", patch_size=2, **OWN[name])
        return build_model_spec(config, sample_shape=(4, 12, 12), num_classes=10)
    return spec_of("wan", name) if name.startswith("debugmodel") else spec_of(name)


def step(model: nn.Module, spec: ModelSpec, *, batch_size: int) -> None:
    """Forward and backward."""
    x_t, t, cond = spec.example_inputs(batch_size)
    model(x_t + torch.linspace(-1, 1, x_t.shape[-1]), t + 0.5, cond).float().square().sum().backward()


def filled(spec: ModelSpec) -> nn.Module:
    """In bfloat16 as FSDP gathers it, on the CPU."""
    with torch.device("meta"):
        model: Any = spec.build()
    model.to_empty(device="cpu")
    model.init_weights(0)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def layers_in_float8(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


class CudaRules:
    """Stands for `torch._scaled_mm`: computes on the CPU, and asks torch's own rules for CUDA about the sizes."""

    def __init__(self) -> None:
        self.num_products = 0
        self.refused: list[str] = []
        self._product = torch._scaled_mm
        self._verdicts: dict[Any, str | None] = {}

    def __call__(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        self.num_products += 1
        operands = tuple(
            (tensor.shape, tensor.stride(), tensor.dtype) for tensor in (a, b, options["scale_a"], options["scale_b"])
        )
        if operands not in self._verdicts:
            self._verdicts[operands] = self._verdict(operands, options["out_dtype"])
        if (verdict := self._verdicts[operands]) is not None:
            self.refused.append(verdict)
        return self._product(a, b, **options)

    def _verdict(self, operands: Any, out_dtype: torch.dtype) -> str | None:
        try:
            with FakeTensorMode():
                a, b, scale_a, scale_b = (
                    torch.empty_strided(shape, stride, dtype=dtype, device="cuda") for shape, stride, dtype in operands
                )
                self._product(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)
        except RuntimeError as error:
            return str(error)
        return None


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "is_large_enough", lambda linear: True)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch, any_size: None) -> CudaRules:
    found = CudaRules()
    monkeypatch.setattr(torch, "_scaled_mm", found)
    return found


@pytest.mark.parametrize(
    ("flavor", "converted", "emulated"),
    [("DiT-L", [], 4), ("DiT-XL", ["mlp.w12"], 4), ("DiT-7B", ["attn.proj", "attn.qkv", "mlp.w12", "mlp.w3"], 4)],
)
def test_only_layers_that_gain_are_converted(flavor: str, converted: list[str], emulated: int) -> None:
    spec = build_model_spec(
        Model(flavor=flavor, patch_size=2, overrides=["depth=1"]), sample_shape=(4, 32, 32), num_classes=10
    )

    def convert(*, emulate: bool) -> tuple[set[str], str]:
        with torch.device("meta"):
            model = spec.build()
        line = convert_to_float8(model=model, spec=spec, config=Float8(True, emulate=emulate), batch_size=2)
        return layers_in_float8(spec.blocks(model)), line

    layers, line = convert(emulate=False)
    assert layers == {f"0.{name}" for name in converted}
    assert line.startswith(f"float8: {len(converted)} of 5 ")
    assert ("trains without float8" in line) == (not converted)
    assert len(convert(emulate=True)[0]) == emulated


@pytest.mark.parametrize("name", NAMES)
def test_cuda_accepts_every_product_at_an_odd_batch_size(name: str, rules: CudaRules) -> None:
    spec = spec_by_name(name)
    model = filled(spec)
    convert_to_float8(model=model, spec=spec, config=Float8(True), batch_size=3)
    step(model, spec, batch_size=3)
    layers = layers_in_float8(model)
    assert not rules.refused, rules.refused[0]
    assert rules.num_products >= 2 * len(layers) > 0
    assert not any(layer.endswith(PER_IMAGE) for layer in layers), layers


def _cpu_scales_rows() -> bool:
    """Whether this torch has float8 products with a scale per row on a CPU: 2.11 has not."""
    a, b = (torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    try:
        torch._scaled_mm(a, b.t(), scale_a=torch.ones(16, 1), scale_b=torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


NEEDS_ROWS = pytest.mark.skipif(not _cpu_scales_rows(), reason="this torch has no rowwise float8 products on a CPU")


@NEEDS_ROWS
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_cuda_accepts_every_product_of_the_other_recipes(recipe: Any, rules: CudaRules) -> None:
    spec = spec_by_name("sd3")
    model = filled(spec)
    line = convert_to_float8(model=model, spec=spec, config=Float8(True, recipe_name=recipe), batch_size=3)
    step(model, spec, batch_size=3)
    assert rules.num_products > 0
    assert not rules.refused, rules.refused[0]
    assert ("padded" in line) == (recipe == "rowwise")  # the other one has its weight gradient in bfloat16


def test_samples_of_several_shapes_are_accepted_too(rules: CudaRules) -> None:
    spec = spec_by_name("sd3")
    model = filled(spec)
    convert_to_float8(model=model, spec=spec, config=Float8(True), batch_size=2, varied_shapes=True)
    for size in ((8, 12), (6, 10), (4, 14)):
        step(model, replace(spec, sample_shape=(16, *size)), batch_size=2)
    assert not rules.refused, rules.refused[0]


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=NEEDS_ROWS)])
def test_padding_changes_no_number(recipe: Any, any_size: None) -> None:
    def gradients(batch_size: int, *, pads: bool) -> dict[str, torch.Tensor]:
        spec = spec_by_name("sd3")
        model = filled(spec)
        config = Float8(True, recipe_name=recipe, emulate=not pads)
        convert_to_float8(model=model, spec=spec, config=config, batch_size=batch_size, varied_shapes=True)
        step(model, spec, batch_size=batch_size)
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    plain, padded = gradients(3, pads=False), gradients(3, pads=True)  # torchao's emulation leaves zeros out
    assert plain.keys() == padded.keys()
    for name, gradient in plain.items():
        assert torch.allclose(gradient, padded[name], rtol=0.02, atol=0.02 * gradient.abs().max().item()), name
        assert gradient.isfinite().all()


@pytest.mark.slow
def test_float8_is_right_sharded_checkpointed_and_compiled(mesh: DeviceMesh, any_size: None) -> None:
    torch.compiler.reset()
    spec = spec_by_name("sd3")

    def gradients(**options: Any) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model: Any = spec.build()
        convert_to_float8(model=model, spec=spec, config=Float8(True), batch_size=3)
        parallelize(model, blocks=spec.blocks(model), mesh=mesh, **options)
        model.to_empty(device="cpu")
        model.init_weights(0)
        step(model, spec, batch_size=3)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}

    plain = gradients()
    compiled = gradients(activation_checkpoint="full", compile=Compile(backend="aot_eager"))
    assert plain.keys() == compiled.keys()
    assert all(gradient.isfinite().all() for gradient in plain.values())
    for key, gradient in plain.items():
        assert torch.allclose(gradient, compiled[key], rtol=0.02, atol=0.02 * gradient.abs().max().item()), key
