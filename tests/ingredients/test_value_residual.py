# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Value residuals: what they compute, how they start, what they keep."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from random_models import random_model

from torchditan.config.options import Model
from torchditan.models import build_model_spec
from torchditan.models.dit import DiT, DiTConfig, rotate
from torchditan.models.flops import count_model_flops
from torchditan.optim.optimizers import parameters_without_decay


def tiny_config(**options: Any) -> DiTConfig:
    sizes = {"depth": 3, "width": 32, "num_heads": 2, "patch_size": 2, "input_channels": 3, "image_size": (8, 8)}
    return DiTConfig(**{**sizes, "num_classes": 10, **options})


def inputs() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x_t, t = torch.randn(3, 3, 8, 8, generator=generator), torch.rand(3, generator=generator)
    return x_t, t, {"class_label": torch.tensor([1, 2, 10])}


@pytest.mark.parametrize("conditioning", ["adaln", "in_context"])
def test_value_residuals_mix_the_first_values_into_all_blocks(conditioning: str) -> None:
    """U_n = softmax(Q_n K_n^T / sqrt(K)) (a_n V_1 + b_n V_n), head by head."""
    model = random_model(tiny_config(block="value_residual", conditioning=conditioning), DiT)
    seen: list[tuple[torch.Tensor, ...]] = []
    for block in model.blocks:
        block.attn.register_forward_hook(lambda module, args, output: seen.append((*args[:2], output[0])))
    model(*inputs())
    first_values = None
    for block, (x, rope, output) in zip(model.blocks, seen, strict=True):
        attn = block.attn
        q, k, v = (part.unflatten(-1, (2, 16)) for part in attn.qkv(x).chunk(3, dim=-1))  # 3 of (B, N, H, K)
        q, k = rotate(attn.q_norm(q), rope), rotate(attn.k_norm(k), rope)
        first_values = v if first_values is None else first_values
        assert attn.first_scale.abs() > 1e-3 and (attn.own_scale - 1).abs() > 1e-3
        heads = []
        for head in range(2):
            weights = torch.softmax(q[:, :, head] @ k[:, :, head].mT / 4, dim=-1)
            heads.append(weights @ (attn.first_scale * first_values[:, :, head] + attn.own_scale * v[:, :, head]))
        torch.testing.assert_close(output, attn.proj(torch.cat(heads, dim=-1)))
    assert len(seen) == 3


@pytest.mark.parametrize("conditioning", ["adaln", "adaln_single", "in_context"])
def test_value_residuals_start_as_the_model_without_them_to_the_bit(conditioning: str) -> None:
    plain = random_model(tiny_config(conditioning=conditioning), DiT)
    mixed = DiT(dataclasses.replace(plain.config, block="value_residual"))
    mixed.init_weights(0)
    added = {name: parameter for name, parameter in mixed.named_parameters() if name.endswith("_scale")}
    assert len(added) == 2 * 3 and added.keys() <= parameters_without_decay(mixed)
    assert [added[f"blocks.1.attn.{name}_scale"].tolist() for name in ("first", "own")] == [[0.0], [1.0]]
    missing, unexpected = mixed.load_state_dict(plain.state_dict(), strict=False)
    assert (set(missing), unexpected) == (added.keys(), [])
    predictions = [model(*inputs()) for model in (plain, mixed)]
    assert torch.equal(*predictions)
    for prediction in predictions:
        prediction.square().mean().backward()
    gradients = dict(mixed.named_parameters())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, gradients[name].grad), name
    assert all(parameter.grad.abs() > 0 for parameter in added.values())


def test_the_first_values_keep_no_queries_and_keys() -> None:
    model = random_model(tiny_config(block="value_residual"), DiT)
    x, first = model.blocks[0](torch.randn(3, 16, 32), torch.randn(3, 32), None)
    assert first.untyped_storage().nbytes() == x.untyped_storage().nbytes()


def test_value_residuals_add_no_flops() -> None:
    plain, mixed = (
        count_model_flops(build_model_spec(Model(block=block), sample_shape=(4, 32, 32), num_classes=1000))
        for block in ("dit", "value_residual")
    )
    assert mixed == plain
