# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""FLOP counts against the paper and an independent closed form; peaks against real device names."""

from __future__ import annotations

import dataclasses

import pytest

from torchditan.config.options import Model
from torchditan.models import ModelSpec, build_model_spec
from torchditan.models.flops import count_model_flops
from torchditan.models.peak_flops import peak_flops

PUBLISHED_GMACS = {("DiT-S", 2): 6.06, ("DiT-B", 4): 5.56, ("DiT-L", 8): 5.01, ("DiT-XL", 2): 118.64}
DEPTH_WIDTH = {"DiT-S": (12, 384), "DiT-B": (12, 768), "DiT-L": (24, 1024), "DiT-XL": (28, 1152)}


def official(flavor: str, patch_size: int, **options) -> ModelSpec:
    model = Model(flavor=flavor, preset="official", patch_size=patch_size, **options)
    return build_model_spec(model, sample_shape=(4, 32, 32), num_classes=1000)


def closed_form_macs(flavor: str, patch: int) -> dict[str, int]:
    """Forward multiply-adds of the paper's DiT on 32 x 32 x 4 latents, by hand."""
    depth, width = DEPTH_WIDTH[flavor]
    tokens = (32 // patch) ** 2
    embed, head = patch**2 * 4 * width, patch**2 * 8 * width
    return {
        # qkv 3, projection 1, MLP 4 + 4
        "per_token": depth * 12 * width**2 + embed + head,
        # scores and values: tokens^2 x width each
        "attention": depth * 2 * tokens**2 * width,
        # adaLN of the blocks and the final layer; timestep MLP
        "per_image": depth * 6 * width**2 + 2 * width**2 + 256 * width + width**2,
        # the patch embedding and the timestep MLP's first layer take data: they have no input gradient
        "no_input_gradient": tokens * embed + 256 * width,
    }


@pytest.mark.parametrize(("flavor", "patch_size"), PUBLISHED_GMACS)
def test_flops_equal_the_closed_form_and_the_published_gmacs(flavor, patch_size):
    flops = count_model_flops(official(flavor, patch_size))
    macs = closed_form_macs(flavor, patch_size)
    tokens = (32 // patch_size) ** 2
    forward = macs["per_token"] * tokens + macs["attention"] + macs["per_image"]
    assert flops.forward == 2 * forward
    assert flops.forward / 2e9 == pytest.approx(PUBLISHED_GMACS[flavor, patch_size], rel=0.01)
    # Each product of the forward pass has two in the backward pass, but for gradients of data.
    assert flops.total == 6 * forward - 2 * macs["no_input_gradient"]


def test_context_tokens_count():
    model = Model(flavor="debugmodel", conditioning="in_context", mlp="gelu")
    spec = build_model_spec(model, sample_shape=(4, 16, 16), num_classes=10)
    flops = count_model_flops(spec)
    width, tokens, blocks_per_token = 64, 64, 3 * 12 * 64**2
    in_blocks = (tokens + 2) * blocks_per_token + 3 * 2 * (tokens + 2) ** 2 * width
    timestep, ends = 256 * width + width**2, 2 * 16 * width * tokens
    assert flops.total == 6 * (in_blocks + timestep + ends) - 2 * (256 * width + 16 * width * tokens)


def test_frozen_weights_cost_forward_and_input_gradient():
    spec = official("DiT-S", 4)

    def build_partly_frozen():
        model = spec.build()
        for block in model.blocks:
            block.mlp.requires_grad_(False)
            block.adaLN_modulation.requires_grad_(False)
        return model

    trained, frozen = count_model_flops(spec), count_model_flops(dataclasses.replace(spec, build=build_partly_frozen))
    assert trained.total - frozen.total == 2 * 12 * (64 * 8 + 6) * 384**2
    assert trained.forward == frozen.forward


def test_the_peak_is_that_of_the_exact_name_of_a_device() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    for other in ("NVIDIA L40", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D", ""):
        assert peak_flops(other) is None
