# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""diffusers' DiTTransformer2DModel and DiTPipeline: imported and exported, they compute what ours computes.

All weights are random and different, so that an exchange of two shows.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers

from torchditan.config.loader import build_config
from torchditan.models import model_spec_of
from torchditan.weights.formats import Converted, Given
from torchditan.weights.formats.diffusers_dit import convert
from torchditan.weights.formats.foreign_files import read_foreign_weights

STATED = Given(noise_schedule="linear", prediction="epsilon")
LEVELS = torch.tensor([0, 1, 250, 500, 998, 999])
LABELS = torch.tensor([0, 3, 9, 10, 5, 6])  # 10 is the null class
SIZES: dict[str, Any] = {
    "num_layers": 3,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 8,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
}


def random_transformer(seed: int = 0, **options: Any) -> Any:
    """All weights are drawn; the embedders of all blocks are equal, as in released models."""
    model = diffusers.DiTTransformer2DModel(**{**SIZES, **options}).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    tensors = model.state_dict()
    for name, tensor in tensors.items():
        is_copy = ".norm1.emb." in name and not name.startswith("transformer_blocks.0.")
        first = tensors["transformer_blocks.0." + name.split(".", 2)[2]] if is_copy else None
        std = 0.2 if ".to_q." in name or ".to_k." in name else 0.05  # attention that is far from uniform
        tensor.copy_(std * torch.randn(tensor.shape, generator=generator) if first is None else first)
    return model


def converted_from(model: Any, folder: Path) -> Converted:
    model.save_pretrained(folder)
    foreign = read_foreign_weights(folder)
    return convert(foreign.tensors, content=foreign.content, given=STATED)


def build(converted: Converted, **changed: Any) -> torch.nn.Module:
    of_model = {name: value for name, value in converted.options.items() if name.startswith("model.")}
    config = build_config({**of_model, **changed})
    with torch.device("meta"):
        model = model_spec_of(config, sample_shape=converted.sample_shape, num_classes=converted.num_classes).build()
    model.load_state_dict(converted.tensors, assign=True)
    return model.eval().requires_grad_(False)


def difference(theirs: Any, ours: torch.nn.Module, *, flipped: bool = False) -> float:
    """The largest one over levels, labels and values."""
    x = torch.randn(len(LEVELS), 4, 8, 8, generator=torch.Generator().manual_seed(1))
    expected = theirs(x, LEVELS, LABELS).sample
    t = LEVELS / 1000  # the paper's time: 0 is data
    found = ours(x, 1 - t if flipped else t, {"class_label": LABELS})
    assert expected.std() > 0.1
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("options", [{}, {"out_channels": 4}, {"norm_eps": 1e-6}, {"num_layers": 2, "patch_size": 4}])
def test_an_imported_transformer_predicts_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = random_transformer(**options)
    ours = build(converted_from(theirs, tmp_path))
    print(difference(theirs, ours))
    assert difference(theirs, ours) < 1e-5


def test_a_wrong_convention_shows(tmp_path: Path) -> None:
    theirs = random_transformer()
    converted = converted_from(theirs, tmp_path)
    print(difference(theirs, build(converted, **{"model.timestep_frequencies": "dit"})))
    print(difference(theirs, build(converted, **{"model.timestep_scale": 1.0})))
    print(difference(theirs, build(converted), flipped=True))
    swapped = dict(converted.tensors)
    for kind in ("weight", "bias"):
        q, k, v = swapped[f"blocks.1.attn.qkv.{kind}"].chunk(3)
        swapped[f"blocks.1.attn.qkv.{kind}"] = torch.cat([k, q, v])
    print(difference(theirs, build(dataclasses.replace(converted, tensors=swapped))))
    swapped = dict(converted.tensors)
    for kind in ("weight", "bias"):
        shift, scale = swapped[f"final_layer.adaLN_modulation.1.{kind}"].chunk(2)
        swapped[f"final_layer.adaLN_modulation.1.{kind}"] = torch.cat([scale, shift])
    print(difference(theirs, build(dataclasses.replace(converted, tensors=swapped))))
