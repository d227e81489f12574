# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Converters of other projects' checkpoints: our model computes what our own reading of theirs computes.

No released weights can be used in a test. tests/own_reading.py is an independent reading of each model; the
weights are random and asymmetric, so that an exchange of two of them shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_reading
import pytest
import torch
from own_reading import DIT, LIGHTNINGDIT, REPA, SIT, Model, Weights, forward, random_weights
from refusals import refused
from torch import Tensor

from torchditan.checkpoint.weights import Weights as Converted
from torchditan.config.loader import from_dict
from torchditan.config.options import Config
from torchditan.diffusion.timesteps import Timesteps
from torchditan.errors import ConfigError
from torchditan.extras.weights.formats.layout import read_sizes, size_options
from torchditan.extras.weights.importing import import_weights
from torchditan.extras.weights.trained_model import stored_spec
from torchditan.registry import FORMATS, registered

TOLERANCE = 1e-5
TIMES = torch.tensor([0.0, 0.031, 0.25, 0.5, 0.777, 0.999])
L_LIKE = replace(LIGHTNINGDIT, width=96, depth=2)

CASES: dict[str, tuple[str, Model]] = {
    "dit": ("dit", DIT),
    "dit without variance": ("dit", replace(DIT, output_channels=4)),
    "sit": ("sit", SIT),
    "sit without variance": ("sit", replace(SIT, output_channels=4)),
    "repa": ("repa", REPA),
    "repa with two projectors": ("repa", replace(REPA, num_projectors=2, patch_size=4)),
    "lightningdit": ("lightningdit", LIGHTNINGDIT),
    "lightningdit of another width": ("lightningdit", L_LIKE),
    "lightningdit, normalized queries": ("lightningdit", replace(LIGHTNINGDIT, qk_norm=True)),
    "lightningdit, rope alone": ("lightningdit", replace(LIGHTNINGDIT, table=False)),
    "lightningdit, gelu": ("lightningdit", replace(LIGHTNINGDIT, mlp="gelu")),
    "lightningdit, layernorm": ("lightningdit", replace(LIGHTNINGDIT, norm="layernorm without parameters")),
    "lightningdit, sigma": ("lightningdit", replace(LIGHTNINGDIT, output_channels=16)),
}


def convert(format: str, weights: Weights, **given: Any) -> Converted:
    source = Converted.of(Path("a.pt"), weights)
    converted: Converted = registered(FORMATS, format)(source, **({"num_heads": 4} if given == {} else given))
    return converted


def config_of(converted: Converted) -> Config:
    return from_dict(converted.config or {})


def our_model(converted: Converted) -> torch.nn.Module:
    """The model of the options, with the converted weights; its names are exactly those."""
    model = stored_spec(config_of(converted)).build()
    model.load_state_dict(converted.tensors(), strict=True)
    return model.eval().requires_grad_(False)


def inputs(model: Model) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(TIMES), model.channels, model.side, model.side, generator=generator)
    return x, torch.tensor([0, 3, 9, 10, 5, 1])  # 10 is the null class


def expected(format: str, model: Model, weights: Weights) -> Tensor:
    """What the project computes, in our convention: DiT's noise and variance, or the velocity data - noise."""
    x, y = inputs(model)
    if format == "dit":  # t = level / 1000
        return forward(weights, model, x, (TIMES * 1000).round(), y)
    if format == "repa":  # t = 1 is noise, velocity = noise - data
        return -forward(weights, model, x, 1 - TIMES, y)
    return forward(weights, model, x, TIMES, y)[:, : model.channels]


def difference(format: str, model: Model, weights: Weights, converted: Converted) -> float:
    x, y = inputs(model)
    times = (TIMES * 1000).round() / 1000 if format == "dit" else TIMES
    ours = our_model(converted)(x, times, {"class_label": y})
    theirs = expected(format, model, weights)
    assert theirs.std() > 0.3
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_our_model_computes_the_same(case: str) -> None:
    format, model = CASES[case]
    weights = random_weights(model)
    assert all(tensor.abs().max() > 0 for tensor in weights.values())
    before = {name: tensor.clone() for name, tensor in weights.items()}
    converted = convert(format, weights)
    assert difference(format, model, weights, converted) < TOLERANCE
    config = config_of(converted)
    assert (config.model.input_channels, config.model.sample_size) == (model.channels, [model.side, model.side])
    assert config.dataset.num_classes == model.num_classes
    assert all(torch.equal(before[name], weights[name]) for name in before), "a converter changed the tensors it read"


def test_lightningdit_samples_at_the_250_points_of_its_grid() -> None:
    sampling = config_of(convert("lightningdit", random_weights(LIGHTNINGDIT))).sampling
    found = Timesteps("uniform").grid(sampling.num_steps, shift=sampling.timestep_shift)
    even = torch.linspace(0, 1, 250, dtype=torch.float64)
    assert found == pytest.approx((0.3 * even / (1 - 0.7 * even)).tolist())


def test_weights_in_half_precision_are_converted_in_float32() -> None:
    halves = {name: tensor.bfloat16() for name, tensor in random_weights(REPA).items()}
    converted = convert("repa", halves)
    assert converted.tensor("t_embedder.mlp.0.weight").dtype is torch.float32
    assert converted.tensor("blocks.0.attn.qkv.weight").dtype is torch.bfloat16
    rounded = {name: tensor.float() for name, tensor in halves.items()}
    as_float = converted.with_tensors({name: tensor.float() for name, tensor in converted.tensors().items()})
    assert difference("repa", REPA, rounded, as_float) < 0.05  # pos_embed is rounded


@pytest.mark.parametrize(
    ("width", "depth", "heads", "options"),
    [
        (384, 12, 6, ("DiT-S", [])),
        (1152, 28, 16, ("DiT-XL", [])),
        (1536, 24, 24, ("DiT-1B", ["depth=24"])),
        (1792, 28, 28, ("DiT-1B", ["depth=28", "width=1792", "num_heads=28"])),
    ],
    ids=["S", "XL", "1p0B", "1p6B"],
)
def test_sizes_come_from_the_shapes(width: int, depth: int, heads: int, options: tuple[str, list[str]]) -> None:
    shapes = {
        "x_embedder.proj.weight": (width, 32, 1, 1),
        "y_embedder.embedding_table.weight": (1001, width),
        "final_layer.linear.weight": (32, width),
        **{f"blocks.{number}.mlp.w3.weight": (width, 8) for number in range(depth)},
    }
    sizes = read_sizes({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, num_heads=None)
    assert (sizes.depth, sizes.width, sizes.num_heads, sizes.num_classes) == (depth, width, heads, 1000)
    found = size_options(sizes)
    assert (found["model.flavor"], found["model.overrides"], found["model.patch_size"]) == (*options, 1)


def test_a_size_that_is_not_published_needs_its_heads() -> None:
    model = replace(SIT, width=96)
    weights = random_weights(model)
    with refused("--num_heads = none", "3", "96"):
        convert("sit", weights, num_heads=None)
    # LightningDiT's table of rotations shows the size of a head.
    assert config_of(convert("lightningdit", random_weights(L_LIKE), num_heads=None)).model.overrides


def test_an_input_that_is_not_square_needs_its_size() -> None:
    weights = random_weights(SIT)
    table = own_reading.sincos_table(replace(SIT, side=16))[:, : 8 * 4]
    weights["pos_embed"] = table  # 8 x 4 patches are not the first rows of 8 x 8
    with refused("--sample_size = none", "32", "square"):
        convert("sit", weights)
    for wrong in ((16, 16), (16, 8)):
        with pytest.raises(ConfigError, match="pos_embed that is not the sin-cos table"):
            convert("sit", weights, num_heads=4, sample_size=wrong)
    assert config_of(convert("sit", weights, num_heads=4, sample_size=(8, 16))).model.sample_size == [8, 16]


def edit(name: str, tensor: Tensor | None) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor

    return change


@pytest.mark.parametrize(
    ("format", "model", "change", "mentions"),
    [
        ("dit", LIGHTNINGDIT, None, ["try --format lightningdit"]),
        ("dit", REPA, None, ["projectors.0.0.weight", "try --format repa"]),
        ("lightningdit", DIT, None, ["feat_rope.freqs_cos", "try --format dit", "try --format sit"]),
        ("dit", DIT, edit("pos_embed", None), ["pos_embed"]),
        ("dit", DIT, edit("pos_embed", torch.randn(1, 16, 64)), ["pos_embed", "sin-cos"]),
        ("dit", DIT, edit("blocks.1.attn.qkv.bias", None), ["blocks.1.attn.qkv.bias"]),
        ("dit", DIT, edit("final_layer.linear.weight", torch.ones(33, 64)), ["final_layer.linear.weight", "33"]),
        (
            "lightningdit",
            LIGHTNINGDIT,
            edit("feat_rope.freqs_cos", own_reading.rope_angles(LIGHTNINGDIT).flip(1).repeat_interleave(2, 1).cos()),
            ["feat_rope.freqs_cos", "RoPE"],
        ),
        ("lightningdit", LIGHTNINGDIT, edit("blocks.0.mlp.w3.weight", torch.ones(64, 200)), ["200", "192"]),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    format: str, model: Model, change: Callable[[Weights], None] | None, mentions: list[str], tmp_path: Path
) -> None:
    weights = random_weights(model)
    if change is not None:
        change(weights)
    torch.save(weights, tmp_path / "a.pt")
    with refused(str(tmp_path / "a.pt"), *mentions):
        import_weights(tmp_path / "a.pt", tmp_path / "run", format=format, given={"num_heads": 4})
    assert [file.name for file in tmp_path.iterdir()] == ["a.pt"]
