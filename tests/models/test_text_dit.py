# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The native DiT that reads text: padding is not seen, words have an order, and the rest is as without text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_models import random_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchditan.config.options import Compile, Model
from torchditan.distributed.parallelize import parallelize
from torchditan.errors import ConfigError
from torchditan.models import ModelSpec, TextEmbeddings, build_model_spec
from torchditan.models.dit import PRESETS, DiT, DiTConfig, _ConvolveWords
from torchditan.models.flops import count_model_flops

WAYS = ["in_context", "cross_attention", "joint"]
KINDS = [
    ("in_context", "adaln"),
    ("in_context", "in_context"),
    ("cross_attention", "adaln"),
    ("joint", "adaln"),
    ("joint", "in_context"),
]
"""(text, conditioning) that go together."""
TOKENS, WIDTH, POOLED = 5, 12, 7


def tiny_config(text: str | None = "in_context", conditioning: str = "adaln", **options: Any) -> DiTConfig:
    sizes = {"depth": 2, "width": 32, "num_heads": 2, "patch_size": 2, "input_channels": 3, "image_size": (8, 8)}
    of_text = {"text_tokens": TOKENS, "text_width": WIDTH, "pooled_width": POOLED, "text_blocks": 1, "text_kernel": 3}
    of_text["block"] = "joint" if text == "joint" else "dit"
    return DiTConfig(num_classes=0, text=text, conditioning=conditioning, **{**sizes, **of_text, **options})  # type: ignore[arg-type]


def inputs(config: DiTConfig, batch_size: int = 3) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    cond = {"prompt_embeds": torch.randn(batch_size, config.text_tokens, config.text_width, generator=draw)}
    if config.pooled_width:
        cond["pooled_prompt_embeds"] = torch.randn(batch_size, config.pooled_width, generator=draw)
    x_t = torch.randn(batch_size, config.input_channels, *config.image_size, generator=draw)
    return x_t, torch.rand(batch_size, generator=draw), cond


@pytest.mark.parametrize(("text", "conditioning"), KINDS)
def test_every_parameter_learns_from_any_size_of_image(text, conditioning):
    for preset, pooled, size in [("torchditan", 0, (8, 8)), ("official", POOLED, (4, 12))]:
        options = PRESETS[preset] | {"conditioning": conditioning}
        config = tiny_config(text=text, image_size=size, pooled_width=pooled, **options)
        model = random_model(config, DiT)
        prediction = model(*inputs(config))
        assert prediction.shape == (3, config.output_channels, *size)
        prediction.square().mean().backward()
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        unread = "blocks.1.text."  # nothing reads the text of the last joint block
        assert [name for name, p in trainable.items() if not p.grad.abs().sum() > 0 and unread not in name] == []


@pytest.mark.parametrize(("text", "conditioning"), KINDS)
@pytest.mark.parametrize(
    ("name", "dtype"), [("prompt_attention_mask", torch.bool), ("prompt_embeds_mask", torch.int64)]
)
def test_padding_is_not_seen(text, conditioning, name, dtype):
    config = tiny_config(text, conditioning)
    model = random_model(config, DiT)
    x_t, t, cond = inputs(config)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1]])
    masked = cond | {name: mask.to(dtype)}
    other = masked | {"prompt_embeds": torch.where(mask[..., None] == 1, cond["prompt_embeds"], 1e3)}
    prediction = model(x_t, t, masked)
    assert torch.equal(model(x_t, t, other), prediction)
    unmasked = model(x_t, t, cond)
    torch.testing.assert_close(unmasked[0], prediction[0])
    assert (unmasked - prediction).abs().amax(dim=(1, 2, 3))[1:].min() > 1e-3
    shorter = DiT(tiny_config(text, conditioning, text_tokens=2))
    shorter.load_state_dict(model.state_dict())
    cut = {"prompt_embeds": cond["prompt_embeds"][1:2, :2], "pooled_prompt_embeds": cond["pooled_prompt_embeds"][1:2]}
    torch.testing.assert_close(shorter(x_t[1:2], t[1:2], cut), prediction[1:2])


@pytest.mark.parametrize(("text", "conditioning"), KINDS)
def test_a_caption_that_is_all_padding_shows_its_first_token(text, conditioning):
    config = tiny_config(text, conditioning)
    model = random_model(config, DiT)
    x_t, t, cond = inputs(config)
    first = torch.zeros(3, TOKENS, dtype=torch.bool)
    first[:, 0] = True
    empty = model(x_t, t, cond | {"prompt_attention_mask": torch.zeros_like(first)})
    assert empty.isfinite().all()
    assert torch.equal(empty, model(x_t, t, cond | {"prompt_attention_mask": first}))


@pytest.mark.parametrize(("text", "conditioning"), KINDS)
@pytest.mark.parametrize("positions", [True, False])
def test_text_and_pooled_vector_change_the_prediction_and_positions_give_tokens_an_order(text, conditioning, positions):
    config = tiny_config(text, conditioning, text_positions=positions, text_kernel=0)
    model = random_model(config, DiT)
    x_t, t, cond = inputs(config)
    prediction = model(x_t, t, cond)
    for name, value in cond.items():
        changed = model(x_t, t, cond | {name: value.flip(0)})
        assert (changed - prediction).abs().amax(dim=(1, 2, 3))[[0, 2]].min() > 1e-3, name
        torch.testing.assert_close(changed[1], prediction[1])
    turned = model(x_t, t, cond | {"prompt_embeds": cond["prompt_embeds"].roll(1, dims=1)})
    if positions:
        assert (turned - prediction).abs().amax(dim=(1, 2, 3)).min() > 1e-3
    else:
        torch.testing.assert_close(turned, prediction, atol=1e-5, rtol=1e-4)
    scaled = {name: 100 * value for name, value in cond.items()}  # another encoder's habit
    torch.testing.assert_close(model(x_t, t, scaled), prediction, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("conditioning", ["adaln", "in_context"])
def test_joint_blocks_with_equal_streams_are_the_block_of_tokens_in_context(conditioning):
    joint = random_model(tiny_config("joint", conditioning), DiT)
    alike = DiT(tiny_config("in_context", conditioning))
    weights = {name: weight for name, weight in joint.state_dict().items() if ".patches." not in name}
    alike.load_state_dict({name.replace(".text.", "."): weight for name, weight in weights.items()})
    as_text = {name.replace(".text.", ".patches."): weight for name, weight in weights.items() if ".text." in name}
    joint.load_state_dict({**weights, **as_text})
    x_t, t, cond = inputs(joint.config)
    cond["prompt_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 1]]).bool()
    torch.testing.assert_close(joint(x_t, t, cond), alike(x_t, t, cond), atol=1e-5, rtol=1e-4)


def test_the_convolution_adds_the_words_around_each_word():
    """A written-out sum of neighbours. Padding is none of them."""
    model = random_model(tiny_config(text_blocks=0, text_positions=False), DiT)
    embeds = torch.randn(2, TOKENS, WIDTH)
    words = model.text_embedder(embeds)
    before, at, after = model.text_conv.weight.mT  # (D,) each
    sums = words.clone()
    for place in range(TOKENS):
        sums[:, place] += at * words[:, place]
        if place > 0:
            sums[:, place] += before * words[:, place - 1]
        if place + 1 < TOKENS:
            sums[:, place] += after * words[:, place + 1]
    read, _ = model.read_text({"prompt_embeds": embeds})
    torch.testing.assert_close(read, sums)
    mask = torch.tensor([[1, 1, 1, 0, 0]]).bool().expand(2, -1)
    read, _ = model.read_text({"prompt_embeds": embeds, "prompt_attention_mask": mask})
    sums[:, 2] -= after * words[:, 3]
    torch.testing.assert_close(read[:, :3], sums[:, :3])
    in_float64 = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 7, 8), (8, 5))]
    assert torch.autograd.gradcheck(_ConvolveWords.apply, in_float64)


def test_text_blocks_and_positions_bring_a_convolution() -> None:
    kernels = [spec_of(**options).config.text_kernel for options in ({}, {"text_positions": False}, {"text_kernel": 0})]
    assert kernels == [5, 0, 0], "captions without positions stay bags of words"


def test_a_bottleneck_splits_the_patch_embedding_in_two():
    model = random_model(tiny_config(patch_bottleneck=3), DiT)
    x = torch.randn(2, 3, 8, 8)
    narrow = torch.nn.functional.conv2d(x, model.x_embedder.proj.weight, stride=2).flatten(2).mT  # (2, 16, 3)
    torch.testing.assert_close(model.x_embedder(x), model.x_embedder.expand(narrow))
    assert model.x_embedder.proj.bias is None


@pytest.mark.parametrize("text", WAYS)
def test_new_layers_start_as_documented_and_the_prediction_at_zero(text):
    config = tiny_config(text, width=64, text_width=512, pooled_width=512, norm_type="layernorm")
    with torch.device("meta"):
        model = DiT(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    model.init_weights(0)
    weights = dict(model.named_parameters())
    assert [name for name, weight in weights.items() if weight.isnan().any()] == []
    assert weights["pooled_embedder.proj.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    bound = math.sqrt(6 / (512 + 64))
    assert 0.98 * bound < weights["text_embedder.proj.weight"].abs().max().item() <= bound * (1 + 1e-6)
    assert (weights["text_embedder.norm.weight"] == 1).all()
    assert weights["text_conv.weight"].std().item() == pytest.approx(3**-0.5, rel=0.15)
    x_t, t, cond = inputs(config)
    assert not model(x_t, t, cond).any()
    if text == "cross_attention":
        assert not weights["blocks.0.cross_attn.proj.weight"].any()
        assert weights["blocks.0.cross_attn.kv.weight"].any()
        x = torch.randn(3, 16, 64)
        words = model.text_embedder(cond["prompt_embeds"])
        assert torch.equal(model.blocks[0](x, model.t_embedder(t), None, words), x)


def spec_of(text: str = "in_context", **options: Any) -> ModelSpec:
    sizes = {"text_tokens": TOKENS, "text_width": WIDTH, "pooled_width": POOLED, "text_blocks": 2} | options
    model = Model(flavor="debugmodel", text=text, **sizes)  # type: ignore[arg-type]
    return build_model_spec(model, sample_shape=(4, 16, 16), num_classes=0)


def closed_form_macs(text: str, conditioning: str, *, length: int, text_width: int, pooled: int) -> dict[str, int]:
    """Forward multiply-adds of the debugmodel with a GELU MLP on 16 x 16 x 4, by hand."""
    depth, width, tokens, patch = 3, 64, 64, 2 * 2 * 4
    read = length if text in ("in_context", "joint") else 0
    context = read + (conditioning == "in_context")
    cross = text == "cross_attention"
    in_blocks = 12 * width**2  # of each token that the blocks see: qkv 3, projection 1, MLP 4 + 4
    timestep = 256 * width + width**2
    return {
        "per_token": depth * (in_blocks + 2 * cross * width**2) + 2 * patch * width,
        "attention": (depth * (2 * (tokens + context) ** 2 + 2 * cross * tokens * length) + 2 * 2 * length**2) * width,
        "per_condition": (
            depth * (context * in_blocks + 2 * cross * length * width**2)
            + length * (text_width * width + 2 * in_blocks)  # two blocks of the text alone
        ),
        "per_image": (
            timestep
            + pooled * width
            + (conditioning == "adaln") * (depth * 6 * (2 if text == "joint" else 1) + 2) * width**2
        ),
    }


@pytest.mark.parametrize(("text", "conditioning"), KINDS)
def test_flops_equal_the_closed_form(text, conditioning):
    pooled, length = 24, 64  # as many as patches
    spec = spec_of(
        text, conditioning=conditioning, mlp="gelu", text_tokens=length, text_width=40, pooled_width=pooled or None
    )
    flops = count_model_flops(spec)
    macs = closed_form_macs(text, conditioning, length=length, text_width=40, pooled=pooled)
    convolution = 5 * 64  # of a word with its neighbours, of which there are as many as patches; forward and words
    # Patches and frequencies are data, without a gradient; embeddings of text go through a norm, which has weights.
    forward = 64 * macs["per_token"] + sum(macs.values()) - macs["per_token"]
    assert flops.forward == 2 * (forward + 64 * convolution)
    assert flops.total == 6 * forward - 2 * (64 * 16 + 256) * 64 + 64 * 4 * convolution


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def step(config: DiTConfig, mesh: DeviceMesh | None, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A prediction under a padding mask, and the gradients of its square."""
    model = random_model(config, DiT)
    weights = model.state_dict()
    if mesh is not None:
        parallelize(model, blocks=model.blocks, mesh=mesh, param_dtype=torch.float32, **options)
    x_t, t, cond = inputs(config)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]).bool()
    prediction = model(x_t, t, cond | {"prompt_attention_mask": mask})
    prediction.square().mean().backward()
    assert list(model.state_dict()) == list(weights)
    return prediction.detach(), {
        name: getattr(p.grad, "to_local", lambda p=p: p.grad)() for name, p in model.named_parameters()
    }


@pytest.mark.parametrize(("text", "conditioning"), [("cross_attention", "adaln_single"), ("joint", "adaln")])
def test_checkpointed_and_compiled_blocks_give_the_same_gradients(text, conditioning, mesh):
    config = tiny_config(text, conditioning)
    expected, gradients = step(config, None)
    ways = [
        {"activation_checkpoint": "full"},
        {"activation_checkpoint": "selective", "selective_ac_option": "op"},
        {"compile": Compile(backend="aot_eager")},  # one graph per block, or an error
    ]
    for options in ways:
        torch._dynamo.reset()
        prediction, found = step(config, mesh, **options)
        torch.testing.assert_close(prediction, expected, atol=1e-5, rtol=1e-4)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-3)


def test_the_condition_is_the_embeddings_with_the_mask_of_the_encoder():
    conditioning = spec_of().conditioning
    assert isinstance(conditioning, TextEmbeddings)
    assert {name: spec.shape for name, spec in conditioning.tensors.items()} == {
        "prompt_embeds": (TOKENS, WIDTH),
        "pooled_prompt_embeds": (POOLED,),
    }
    null = {
        "prompt_embeds": torch.ones(TOKENS, WIDTH),
        "pooled_prompt_embeds": torch.ones(POOLED),
        "prompt_attention_mask": torch.tensor([1, 0, 0, 0, 0]).bool(),
    }
    conditioning = conditioning.with_null(null)
    batch = {"index": torch.arange(2), "sample": torch.zeros(2, 4, 16, 16)}
    batch |= {name: torch.zeros(2, *value.shape, dtype=value.dtype) for name, value in null.items()}
    cond = conditioning.from_batch(batch)
    assert cond.keys() == null.keys()
    dropped = conditioning.drop(cond, torch.tensor([False, True]))
    for name, value in null.items():
        assert torch.equal(dropped[name][1], value)
        assert torch.equal(dropped[name][0], torch.zeros_like(value))
        assert torch.equal(conditioning.null(cond)[name], value.expand(2, *value.shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "in_context"}, "model.text_tokens = none: must be set if the data has no captions"),
        (
            {"text": "cross_attention", "conditioning": "in_context", "text_tokens": 4, "text_width": 8},
            'model.text = "cross_attention": needs adaLN for the timestep; must be in_context with',
        ),
        (
            {"text": "joint", "conditioning": "adaln_single", "text_tokens": 4, "text_width": 8},
            'model.conditioning = "adaln_single": the block joint does not support it; must be one of adaln, in_con',
        ),
        (
            {"text": "joint", "block": "torchditan.models.dit:DiTBlock", "text_tokens": 4, "text_width": 8},
            'model.block = "torchditan.models.dit:DiTBlock": does not support --model.text joint; leave it out',
        ),
        (
            {"text": "in_context", "block": "joint", "text_tokens": 4, "text_width": 8},
            'model.block = "joint": needs captions as tokens; set --model.text joint, or leave it out',
        ),
    ],
)
def test_a_model_of_text_needs_its_sizes(options, message):
    with pytest.raises(ConfigError) as error:
        build_model_spec(Model(**options), sample_shape=(4, 16, 16), num_classes=0)
    assert str(error.value).startswith(message)
