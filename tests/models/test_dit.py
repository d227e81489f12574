# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The native DiT: parameter counts of the paper, shapes, and the numerics of its parts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from random_models import random_model

from torchditan.models.dit import (
    FLAVORS,
    PRESETS,
    DiT,
    DiTConfig,
    patchify,
    rope_table,
    rotate,
    sincos_position_table,
    timestep_embedding,
    unpatchify,
)

OFFICIAL_PARAMETERS = {
    ("DiT-S", 2): 32_963_360,
    ("DiT-B", 4): 130_475_648,
    ("DiT-L", 8): 458_594_816,
    ("DiT-XL", 2): 675_129_632,
}


def official_config(flavor: str, patch_size: int) -> DiTConfig:
    options = dataclasses.asdict(FLAVORS[flavor]) | PRESETS["official"] | {"patch_size": patch_size}
    return DiTConfig(input_channels=4, image_size=(32, 32), num_classes=1000, **options)


def tiny_config(**options) -> DiTConfig:
    options = {"image_size": (8, 8), "num_classes": 10, "patch_size": 2, "input_channels": 3} | options
    return DiTConfig(depth=2, width=32, num_heads=2, **options)


def inputs(config: DiTConfig, batch_size: int = 3, size: tuple[int, int] | None = None):
    generator = torch.Generator().manual_seed(1)
    x_t = torch.randn(batch_size, config.input_channels, *(size or config.image_size), generator=generator)
    t = torch.rand(batch_size, generator=generator)
    return x_t, t, {"class_label": torch.arange(batch_size)} if config.num_classes else {}


@pytest.mark.parametrize(("flavor", "patch_size"), OFFICIAL_PARAMETERS)
def test_official_preset_has_exactly_the_papers_parameters(flavor, patch_size):
    with torch.device("meta"):
        model = DiT(official_config(flavor, patch_size))
    assert sum(p.numel() for p in model.parameters()) == OFFICIAL_PARAMETERS[flavor, patch_size]


@pytest.mark.parametrize(("height", "width", "patch_size"), [(4, 12, 4), (9, 6, 3)])
def test_unpatchify_inverts_patchify(height, width, patch_size):
    x = torch.randn(2, 3, height, width)
    patches = patchify(x, patch_size)
    assert patches.shape == (2, height * width // patch_size**2, 3 * patch_size**2)
    assert torch.equal(unpatchify(patches, patch_size, height, width), x)
    # tokens run along rows, and a patch holds all channels of a pixel side by side
    assert torch.equal(patches[0, 1].view(patch_size, patch_size, 3)[0, 0], x[0, :, 0, patch_size])


def test_patch_embedding_is_the_convolution_its_weight_says():
    model = random_model(tiny_config(), DiT)
    x = torch.randn(2, 3, 8, 12)
    proj = model.x_embedder.proj
    convolution = F.conv2d(x, proj.weight, proj.bias, stride=2).flatten(2).transpose(1, 2)
    torch.testing.assert_close(model.x_embedder(x), convolution)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("conditioning", ["adaln", "adaln_single", "in_context"])
@pytest.mark.parametrize("num_classes", [0, 10])
def test_any_height_and_width_that_the_patch_divides(preset, conditioning, num_classes):
    options = PRESETS[preset] | {"conditioning": conditioning}
    for size in [(4, 12), (10, 2)]:
        config = tiny_config(image_size=size, num_classes=num_classes, **options)
        model = random_model(config, DiT)
        x_t, t, cond = inputs(config)
        prediction = model(x_t, t, cond)
        assert prediction.shape == (3, config.output_channels, *size)
        prediction.square().mean().backward()
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert [name for name, p in trainable.items() if not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize("conditioning", ["adaln", "adaln_single", "in_context"])
def test_label_and_timestep_change_the_prediction(conditioning):
    config = tiny_config(conditioning=conditioning)
    model = random_model(config, DiT)
    x_t, t, cond = inputs(config)
    prediction = model(x_t, t, cond)
    null = model(x_t, t, {"class_label": torch.full((3,), 10)})
    later = model(x_t, t * 0.9, cond)
    assert (prediction - null).abs().amax(dim=(1, 2, 3)).min() > 1e-3
    assert (prediction - later).abs().amax(dim=(1, 2, 3)).min() > 1e-3


@pytest.mark.parametrize("conditioning", ["adaln", "in_context"])
def test_rope_makes_attention_scores_depend_on_the_offset_alone(conditioning):
    config = tiny_config(conditioning=conditioning)
    rows, columns, context = 4, 6, config.num_context_tokens
    rope = rope_table(config, 2 * rows, 2 * columns, torch.device("cpu"))
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    num_tokens = rows * columns + context
    q, k = (rotate(x.expand(1, num_tokens, 1, 16), rope)[0, context:, 0] for x in (query, key))
    scores = (q @ k.T).view(rows, columns, rows, columns)
    by_offset: dict[tuple[int, int], list[float]] = {}
    for i, j, m, n in itertools.product(range(rows), range(columns), range(rows), range(columns)):
        by_offset.setdefault((m - i, n - j), []).append(scores[i, j, m, n].item())
    for values in by_offset.values():
        assert max(values) - min(values) < 1e-4
    means = torch.tensor([values[0] for values in by_offset.values()])
    assert len(means.round(decimals=4).unique()) > 0.9 * len(means), "other offsets, other scores"
    assert torch.equal(rope[:context, ..., 0], torch.ones(context, 1, 8)), "context tokens are not turned"


def test_rotation_is_the_same_in_eager_and_compiled_code():
    config = tiny_config()
    rope = rope_table(config, 8, 8, torch.device("cpu"))
    x = torch.randn(2, 16, 2, 16, dtype=torch.bfloat16)
    compiled = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    assert rotate(x, rope).dtype == torch.bfloat16
    assert torch.equal(compiled(x, rope), rotate(x, rope))
    x = x.float()
    torch.testing.assert_close(compiled(x, rope), rotate(x, rope))


def test_sincos_positions_put_the_column_first_and_sine_first():
    table = sincos_position_table(8, rows=3, columns=5)
    assert table.shape == (15, 8)
    row, column = 2, 4
    angles = torch.tensor([1.0, 10000**-0.5])
    expected = torch.cat([f(angles * position) for position in (column, row) for f in (torch.sin, torch.cos)])
    torch.testing.assert_close(table[row * 5 + column], expected)


def test_timestep_embedding_is_cosine_first_with_the_scale_and_the_frequencies_that_are_given():
    t = torch.tensor([0.7])
    frequency = 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 128)
    embedding = timestep_embedding(t)[0]
    torch.testing.assert_close(embedding[:128].double(), torch.cos(700 * frequency), atol=1e-4, rtol=0)
    torch.testing.assert_close(embedding[128:].double(), torch.sin(700 * frequency), atol=1e-4, rtol=0)
    unscaled = timestep_embedding(t, scale=1.0)[0]
    torch.testing.assert_close(unscaled[:128].double(), torch.cos(0.7 * frequency), atol=1e-6, rtol=0)
    frequency = 10000.0 ** (-torch.arange(128, dtype=torch.float64) / 127)
    of_diffusers = timestep_embedding(t, frequencies="diffusers")[0]
    torch.testing.assert_close(of_diffusers[128:].double(), torch.sin(700 * frequency), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{"timestep_scale": 1.0}, {"timestep_frequencies": "diffusers"}])
def test_the_model_embeds_the_timestep_as_its_options_say(options):
    config = tiny_config()
    models = [DiT(config), DiT(dataclasses.replace(config, **options))]
    for model in models:
        model.init_weights(0)
    t = torch.tensor([0.3, 0.9])
    features = timestep_embedding(t, **{name.removeprefix("timestep_"): value for name, value in options.items()})
    torch.testing.assert_close(models[1].t_embedder(t), models[0].t_embedder.mlp(features))
    assert (models[1].t_embedder(t) - models[0].t_embedder(t)).abs().max() > 1e-3


def test_rope_sincos_adds_the_table_and_rotates():
    config = tiny_config(position="rope_sincos")
    x_t, t, cond = inputs(config)
    model = random_model(config, DiT)
    predictions = {"rope_sincos": model(x_t, t, cond)}
    for position in ("rope", "sincos"):
        other = DiT(dataclasses.replace(config, position=position))
        other.load_state_dict(model.state_dict(), strict="sincos" in position)
        predictions[position] = other(x_t, t, cond)
    assert (predictions["rope_sincos"] - predictions["rope"]).abs().max() > 1e-3
    assert (predictions["rope_sincos"] - predictions["sincos"]).abs().max() > 1e-3
    with torch.no_grad():
        model.pos_embed.zero_()
    torch.testing.assert_close(model(x_t, t, cond), predictions["rope"])


def test_the_prediction_is_zero_at_initialisation_and_adaln_blocks_are_identities():
    config = tiny_config()
    model = DiT(config)
    model.init_weights(0)
    x_t, t, cond = inputs(config)
    assert not model(x_t, t, cond).any()
    x = torch.randn(3, 16, 32)
    rope = rope_table(config, 8, 8, x.device)
    assert torch.equal(model.blocks[0](x, model.t_embedder(t), rope), x)


@pytest.mark.parametrize("preset", ["torchditan", "official"])
def test_bfloat16_weights_follow_float32_closely(preset):
    config = tiny_config(**PRESETS[preset])
    model = random_model(config, DiT)
    x_t, t, cond = inputs(config)
    exact = model(x_t, t, cond)
    rounded = model.bfloat16()(x_t, t, cond)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("conditioning", ["adaln", "in_context"])
def test_features_are_the_patch_tokens_after_a_block_and_change_no_number(conditioning: str) -> None:
    model = random_model(tiny_config(conditioning=conditioning), DiT)
    outputs: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    inputs = torch.randn(3, 3, 8, 8), torch.rand(3), {"class_label": torch.tensor([1, 2, 10])}
    expected = model(*inputs)
    assert isinstance(expected, torch.Tensor)
    prediction, features = model(*inputs, features=["blocks.1"])
    assert torch.equal(prediction, expected) and list(features) == ["blocks.1"]
    assert torch.equal(features["blocks.1"], outputs[1][:, -16:]) and features["blocks.1"].shape == (3, 16, 32)
    features["blocks.1"].sum().backward()
    assert model.blocks[0].attn.qkv.weight.grad.abs().max() > 0 and model.final_layer.linear.weight.grad is None
