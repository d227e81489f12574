# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""adaLN-single: what it computes, how it starts, its costs, and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from random_models import random_model
from refusals import refused

from torchditan.config.options import Model
from torchditan.models import ModelSpec, build_model_spec
from torchditan.models.dit import Block, DiT, DiTConfig
from torchditan.optim.optimizers import parameters_without_decay
from torchditan.registry import BLOCKS


def tiny_config(**options: Any) -> DiTConfig:
    sizes = {"depth": 3, "width": 32, "num_heads": 2, "patch_size": 2, "input_channels": 3, "image_size": (8, 8)}
    return DiTConfig(**{**sizes, "num_classes": 10, **options})


def inputs() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x_t, t = torch.randn(3, 3, 8, 8, generator=generator), torch.rand(3, generator=generator)
    return x_t, t, {"class_label": torch.tensor([1, 2, 10])}


def spec_of(**options: Any) -> ModelSpec:
    return build_model_spec(Model(**options), sample_shape=(4, 32, 32), num_classes=1000)


def test_adaln_single_is_adaln_with_one_matrix_and_a_bias_for_each_block() -> None:
    """PixArt-alpha: S_i = MLP(c) + E_i in block i; the final layer's shift and scale are c + E."""
    single = random_model(tiny_config(conditioning="adaln_single"), DiT)
    each = DiT(dataclasses.replace(single.config, conditioning="adaln"))
    weights = single.state_dict()
    shared = {kind: weights.pop(f"adaLN_modulation.1.{kind}") for kind in ("weight", "bias")}
    final_table = weights.pop("final_layer.adaLN_modulation.table")
    for i in range(3):
        table = weights.pop(f"blocks.{i}.adaLN_modulation.table")
        weights[f"blocks.{i}.adaLN_modulation.1.weight"] = shared["weight"]
        weights[f"blocks.{i}.adaLN_modulation.1.bias"] = shared["bias"] + table
    missing, unexpected = each.load_state_dict(weights, strict=False)
    assert (unexpected, len(missing)) == ([], 2) and all("final_layer.adaLN" in name for name in missing)
    names = [f"blocks.{i}" for i in range(3)]
    x_t, t, cond = inputs()
    prediction, found = single(x_t, t, cond, features=names)
    _, expected = each(x_t, t, cond, features=names)
    for name in names:
        torch.testing.assert_close(found[name], expected[name])
    c = single.t_embedder(t) + single.y_embedder(cond["class_label"])
    shift, scale = (c + part for part in final_table.view(2, 32))
    x = single.final_layer.norm_final(found["blocks.2"]) * (1 + scale[:, None]) + shift[:, None]
    patches = single.final_layer.linear(x).view(3, 4, 4, 2, 2, 3)  # rows, columns, a patch's rows and columns, channels
    torch.testing.assert_close(prediction, patches.permute(0, 5, 1, 3, 2, 4).reshape(3, 3, 8, 8))


def test_adaln_single_starts_with_blocks_that_are_the_identity() -> None:
    model = DiT(tiny_config(conditioning="adaln_single"))
    model.init_weights(0)
    x = torch.randn(3, 16, 32)
    modulation = model.adaLN_modulation(torch.randn(3, 32))
    assert modulation.shape == (3, 6 * 32) and torch.equal(model.blocks[0](x, modulation, None), x)
    tables = {name for name, _ in model.named_parameters() if name.endswith("adaLN_modulation.table")}
    assert len(tables) == 3 + 1 and tables <= parameters_without_decay(model)


def test_adaln_single_saves_the_modulations_of_all_blocks_but_one() -> None:
    counts = []
    for conditioning in ("adaln", "adaln_single"):
        with torch.device("meta"):
            model = spec_of(flavor="DiT-XL", preset="official", conditioning=conditioning).build()
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    depth, width = 28, 1152
    in_blocks, in_final_layer = 6 * width**2 + 6 * width, 2 * width**2 + 2 * width
    assert counts[0] - counts[1] == (depth - 1) * in_blocks - depth * 6 * width + in_final_layer - 2 * width


class PlugIn(Block):
    """With the conditionings that are the default of a block."""

    def forward(self, x: Any, c: Any, rope: Any, text: Any = None, mask: Any = None) -> Any:
        return x


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "plug_in", f"{__name__}:PlugIn")
    assert spec_of(block="plug_in").build()
    with refused('model.conditioning = "adaln_single"', "plug_in", "adaln", "in_context"):
        spec_of(block="plug_in", conditioning="adaln_single")
    with refused('model.text = "cross_attention"', "in_context"):
        spec_of(conditioning="in_context", text="cross_attention", text_tokens=4, text_width=8)
