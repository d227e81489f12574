# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The int8 base of a LoRA: arithmetic, memory, filling by name, FSDP, recomputation and compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from tiny_published import blocks_of, flux_inputs, predict, seeded, tiny_flux

from torchditan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchditan.extras.published.int8 import Int8Linear, base_names, fill_parameter, quantize_base
from torchditan.extras.published.lora import add_lora, init_lora, lora_parameters

TARGETS = ["to_q", "to_v", "attn.to_out.0", "ff.net.2"]


def some_weight(rows: int = 48, columns: int = 64) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, rows)[:, None]


def test_a_weight_is_kept_to_half_a_step_of_its_row() -> None:
    weight = some_weight()
    quantized, scale = Int8Linear.quantize(weight)
    assert (quantized.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (48,))
    assert ((quantized * scale[:, None] - weight).abs() <= 0.501 * scale[:, None]).all()
    assert (quantized.abs().amax(dim=1) == 127).all()
    assert (scale / (weight.abs().amax(dim=1) / 127) - 1).abs().max() < 2**-8
    assert torch.equal(scale.bfloat16().float(), scale)  # so that FSDP's cast loses nothing


def test_a_row_of_zeros_stays_one() -> None:
    quantized, scale = Int8Linear.quantize(torch.zeros(2, 4))
    assert not (quantized * scale[:, None]).any()
    assert scale.isfinite().all()


@pytest.mark.parametrize(("dtype", "bias"), [(torch.float32, False), (torch.bfloat16, True)])
def test_forward_and_backward_are_those_of_the_dequantised_layer(dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(64, 48, bias=bias, dtype=dtype)
    layer = Int8Linear(linear)
    with torch.no_grad():
        linear.weight.copy_((layer.weight * layer.scale[:, None]).to(dtype))
    x = torch.randn(2, 3, 64, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(value) for module, value in zip((linear, layer), inputs, strict=True)]
    assert outputs[1].dtype == dtype
    assert torch.equal(outputs[0], outputs[1])
    for output in outputs:
        output.float().square().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_nothing_of_the_size_of_a_float_weight_is_saved_for_backward() -> None:
    layer = Int8Linear(nn.Linear(64, 48))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(2, 64, requires_grad=True))
    assert sorted((tensor.dtype, tuple(tensor.shape)) for tensor in saved if tensor.dtype != torch.float32) == [
        (torch.int8, (48, 64))
    ]
    assert all(tensor.numel() <= 48 for tensor in saved if tensor.dtype == torch.float32)


@pytest.mark.parametrize("base", ["float32", "bfloat16", "int8"])
def test_a_base_is_frozen_and_has_the_dtypes_it_says(base: Any) -> None:
    with torch.device("meta"):
        model = tiny_flux()
    published = list(model.state_dict())
    buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
    quantize_base(model, blocks_of(model), base=base)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == buffers
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, Int8Linear) and not name.endswith("bias"):
            assert parameter.dtype == (torch.float32 if name.endswith("scale") else torch.int8), name
        else:
            assert parameter.dtype == (torch.float32 if base == "float32" else torch.bfloat16), name
    converted = [name for name, module in model.named_modules() if isinstance(module, Int8Linear)]
    assert bool(converted) == (base == "int8")
    assert all("transformer_blocks." in name for name in converted)
    add_lora(model, rank=2, alpha=2, target_modules=["to_q"])
    assert base_names(model) == published


def build_lora(build: Any, *, base: Any, state: dict[str, Tensor]) -> Any:
    """On meta first, then filled by name, as the trainer does it."""
    with torch.device("meta"):
        model = build()
    quantize_base(model, blocks_of(model), base=base)
    add_lora(model, rank=4, alpha=8, target_modules=TARGETS)
    model.to_empty(device="cpu")
    for name in base_names(model):
        fill_parameter(model, name, state[name])
    init_lora(model, seed=0)
    return model.train()


def test_a_model_filled_by_name_predicts_what_the_published_one_does() -> None:
    build, inputs = tiny_flux, flux_inputs
    published = seeded(build)
    state = published.state_dict()
    expected = predict(published, inputs())
    filled = build_lora(build, base="float32", state=state)
    assert torch.equal(predict(filled, inputs()), expected)
    errors = {}
    for base in ("bfloat16", "int8"):
        prediction = predict(build_lora(build, base=base, state=state), inputs(dtype=torch.bfloat16)).float()
        errors[base] = ((prediction - expected).norm() / expected.norm()).item()
    assert 0 < errors["int8"] < 0.06, errors


def train(model: Any, inputs: Any, *, steps: int) -> list[float]:
    target = torch.randn(predict(model, inputs).shape, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    losses = []
    for _ in range(steps):
        loss = (predict(model, inputs).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_int8_trains_as_bfloat16_does() -> None:
    state = seeded(tiny_flux).state_dict()
    curves = {}
    for base in ("bfloat16", "int8"):
        model = build_lora(tiny_flux, base=base, state=state).to(torch.bfloat16)  # as FSDP computes
        for _, parameter in lora_parameters(model):
            parameter.data = parameter.data.float()
        curves[base] = train(model, flux_inputs(dtype=torch.bfloat16), steps=20)
    assert curves["int8"][-1] < 0.95 * curves["int8"][0]
    for int8, bfloat16 in zip(curves["int8"], curves["bfloat16"], strict=True):
        assert int8 == pytest.approx(bfloat16, rel=0.02)


@pytest.mark.parametrize("mode", ["full", "op"])
def test_recomputed_activations_change_no_gradient(mode: str) -> None:
    state = seeded(tiny_flux).state_dict()
    gradients = []
    for checkpointed in (False, True):
        model = build_lora(tiny_flux, base="int8", state=state)
        for _, parameter in lora_parameters(model):
            nn.init.constant_(parameter, 0.02)
        if checkpointed:
            for blocks in (model.transformer_blocks, model.single_transformer_blocks):
                kind: Any = "full" if mode == "full" else "selective"
                apply_activation_checkpoint(blocks, mode=kind, selective_option="op")
        predict(model, flux_inputs(dtype=torch.bfloat16)).float().square().mean().backward()
        gradients.append([parameter.grad for _, parameter in lora_parameters(model)])
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


def test_a_weight_that_was_gathered_in_the_precision_of_the_run_gives_the_same() -> None:
    """What FSDP of torch 2.11 does with int8, and every FSDP with the scales."""
    layer = Int8Linear(nn.Linear(64, 48))
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    gathered = {name: parameter.to(torch.bfloat16) for name, parameter in layer.named_parameters()}
    assert torch.equal(torch.func.functional_call(layer, gathered, (x,)), layer(x))
