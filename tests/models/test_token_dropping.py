# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Token dropping: what the model computes, which patches it keeps, its start, its FLOPs, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_models import random_model
from refusals import refused
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from torchditan.config.loader import load_config
from torchditan.config.options import Diffusion, Model
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.objectives import build_objective
from torchditan.diffusion.token_dropping import TokenDropping, few_tokens_warning, kept_tokens
from torchditan.distributed.parallelize import CompileOptions, parallelize
from torchditan.models import ModelSpec, build_model_spec
from torchditan.models.dit import DiT, DiTBlock, DiTConfig, rope_table, unpatchify
from torchditan.models.flops import count_model_flops
from torchditan.models.token_dropping import TokenDroppingDiT
from torchditan.optim.optimizers import parameters_without_decay
from torchditan.randomness import Randomness, draw, uniform
from torchditan.registry import BLOCKS, OBJECTIVES

TEXT = {"num_classes": 0, "text_tokens": 4, "text_width": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "adaLN": {},
    "not square": {"image_size": (8, 12)},
    "patches of 4, sincos": {"image_size": (16, 16), "patch_size": 4, "position": "rope_sincos"},
    "sincos only": {"position": "sincos", "norm_type": "np_layernorm", "mlp": "gelu"},
    "in context": {"conditioning": "in_context"},
    "text in context": {"text": "in_context", **TEXT},
    "cross-attention": {"text": "cross_attention", **TEXT},
    "value residual": {"block": "value_residual", "conditioning": "in_context"},
    "adaLN-single": {"conditioning": "adaln_single"},
}
KEPT = torch.tensor([[0, 3, 7, 8], [1, 2, 3, 15], [4, 9, 10, 11]])


def tiny_config(**options: Any) -> DiTConfig:
    sizes = {"depth": 5, "width": 32, "num_heads": 2, "patch_size": 2, "input_channels": 3, "image_size": (8, 8)}
    dropping = {"token_dropping": 0.75, "token_dropping_blocks": 2}
    return DiTConfig(**{**sizes, **dropping, "num_classes": 10, **options})


def inputs(config: DiTConfig) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x_t, t = torch.randn(3, 3, *config.image_size, generator=generator), torch.rand(3, generator=generator)
    if config.text is None:
        return x_t, t, {"class_label": torch.tensor([1, 2, 10])}
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    words = torch.randn(3, config.text_tokens, config.text_width, generator=generator)
    return x_t, t, {"prompt_embeds": words, "prompt_attention_mask": mask}


def plain_loop(model: TokenDroppingDiT, number: int, kept: list[int]) -> torch.Tensor:
    """The prediction (1, C, H, W) for one sample of `inputs`, one token list at a time. No padding enters a block."""
    config = model.config
    x_t, t, cond = inputs(config)
    x_t, t, cond = x_t[number, None], t[number, None], {name: value[number, None] for name, value in cond.items()}
    tokens = model.x_embedder(x_t)[0]
    if "sincos" in config.position:
        tokens = tokens + model.pos_embed[0]
    vector = model.t_embedder(t)
    if config.num_classes:
        label = model.y_embedder(cond["class_label"])
    context, c, text = [], None, None
    if config.conditioning == "in_context":
        context = [vector[0], label[0]]
    else:
        c = vector + label if config.num_classes else vector
    if config.text is not None:
        words = model.text_embedder(cond["prompt_embeds"])[:, : int(cond["prompt_attention_mask"].sum())]
        context, text = ([*words[0]], None) if config.text == "in_context" else ([], words)
    modulation = model.adaLN_modulation(c) if config.conditioning == "adaln_single" else c
    rope = None
    if "rope" in config.position:  # context tokens are not rotated, so that padding may be left out
        table = rope_table(config, *config.image_size, torch.device("cpu"))
        rope = [*table[: len(context)], *table[config.num_context_tokens :]]
    everyone = list(range(len(context) + len(tokens)))
    some = [*range(len(context)), *(len(context) + place for place in kept)]
    rows = [*context, *tokens]  # T rows (D,)

    def run(block: Any, rows: list[torch.Tensor], places: list[int], *carried: torch.Tensor) -> Any:
        angles = None if rope is None else torch.stack([rope[place] for place in places])
        return block(torch.stack(rows)[None], modulation, angles, text, None, *carried)

    carried: list[torch.Tensor] = []
    for block in model.blocks[:2]:
        out = run(block, rows, everyone, *carried)
        if isinstance(out, tuple):
            out, carried = out[0], [out[1]]
        rows = [*out[0]]
    dense = rows
    middle, kept_carried = [dense[place] for place in some], [tensor[:, some] for tensor in carried]
    for block in model.blocks[2:-2]:
        middle = [*run(block, middle, some, *kept_carried)[0]]
    sparse = [middle[some.index(place)] if place in some else model.fusion.mask_token for place in everyone]
    rows = [
        model.fusion.proj.weight @ torch.cat([first, second]) + model.fusion.proj.bias
        for first, second in zip(dense, sparse, strict=True)
    ]
    for block in model.blocks[-2:]:
        rows = [*run(block, rows, everyone, *carried)[0]]
    patches = torch.stack(rows[len(context) :])[None]
    return unpatchify(model.final_layer(patches, c), config.patch_size, *config.image_size)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_is_that_of_a_plain_loop_over_samples(variant: str) -> None:
    model = random_model(tiny_config(**VARIANTS[variant]), TokenDroppingDiT)
    x_t, t, cond = inputs(model.config)
    found = model(x_t, t, {**cond, "kept_tokens": KEPT})
    of_all = model(x_t, t, cond)
    for number, kept in enumerate(KEPT.tolist()):
        expected = plain_loop(model, number, kept)
        torch.testing.assert_close(found[number, None], expected, atol=1e-5, rtol=1e-4)
        assert (of_all[number] - found[number]).abs().max() > 1e-2  # dropping changes the prediction
        expected = plain_loop(model, number, list(range(model.config.num_patches)))
        torch.testing.assert_close(of_all[number, None], expected, atol=1e-5, rtol=1e-4)


def test_keeping_all_patches_is_the_forward_without_dropping() -> None:
    model = random_model(tiny_config(conditioning="in_context"), TokenDroppingDiT)
    x_t, t, cond = inputs(model.config)
    all_patches = torch.arange(16).expand(3, -1)
    torch.testing.assert_close(model(x_t, t, {**cond, "kept_tokens": all_patches}), model(x_t, t, cond))


def test_without_the_option_the_model_is_the_plain_one() -> None:
    plain = build_model_spec(Model(flavor="DiT-Ti"), sample_shape=(4, 32, 32), num_classes=10)
    dropping = build_model_spec(Model(flavor="DiT-Ti", token_dropping=0.5), sample_shape=(4, 32, 32), num_classes=10)
    models = []
    for spec in (plain, dropping):
        model = spec.build()
        model.init_weights(0)
        models.append(model)
    assert type(models[0]) is DiT and plain.token_dropping == 0
    added = {"fusion.mask_token": (192,), "fusion.proj.weight": (192, 384), "fusion.proj.bias": (192,)}
    weights = dict(models[1].named_parameters())
    assert {name: tuple(weights.pop(name).shape) for name in added} == added
    assert all(torch.equal(weights.pop(name), value) for name, value in models[0].named_parameters()) and not weights
    token, bound = models[1].fusion.mask_token, (6 / (192 + 384)) ** 0.5
    assert token.std().item() == pytest.approx(0.02, rel=0.2)
    assert 0.99 * bound < models[1].fusion.proj.weight.abs().max() <= bound
    assert {"fusion.mask_token", "fusion.proj.bias"} <= parameters_without_decay(models[1])


def test_kept_tokens_are_a_function_of_seed_and_position() -> None:
    index = torch.tensor([7, 0, 2**40, 3, 7])
    kept = kept_tokens(5, index, num_tokens=256, num_kept=64)
    assert kept.shape == (5, 64) and kept.dtype == torch.int64
    assert (kept.diff(dim=1) > 0).all() and kept.min() >= 0 and kept.max() < 256
    for row, number in zip(kept, index.tolist(), strict=True):  # the 64 smallest numbers of the stream
        numbers = uniform(5, "token_dropping", [number * 2**20 + token for token in range(256)])
        assert set(row.tolist()) == set(numbers.argsort()[:64].tolist())
        assert torch.equal(kept_tokens(5, torch.tensor([number]), num_tokens=256, num_kept=64)[0], row)
    assert not torch.equal(kept, kept_tokens(6, index, num_tokens=256, num_kept=64))
    assert not torch.equal(kept[0], kept[1])


def test_each_token_and_each_pair_is_equally_likely_to_be_kept() -> None:
    """With 4 of 16 kept: a token with 1/4, a pair with (4 x 3) / (16 x 15) = 1/20. Bounds of 5 standard deviations."""
    kept = kept_tokens(0, torch.arange(20_000), num_tokens=16, num_kept=4)
    is_kept = torch.zeros(20_000, 16).scatter(1, kept, 1.0)
    together = is_kept.T @ is_kept / 20_000
    assert (together.diagonal() - 1 / 4).abs().max() < 5 * (1 / 4 * 3 / 4 / 20_000) ** 0.5
    pairs = together[~torch.eye(16, dtype=torch.bool)]
    assert (pairs - 1 / 20).abs().max() < 5 * (1 / 20 * 19 / 20 / 20_000) ** 0.5


def dropping_of(*flags: str, sample_shape: tuple[int, ...] = (1, 8, 8)) -> TokenDropping:
    config = load_config(["--model.flavor=DiT-Ti", "--model.token_dropping=0.75", "--training.steps=10", *flags])
    spec = build_model_spec(config.model, sample_shape=sample_shape, num_classes=10)
    return TokenDropping.of(config, spec)


def test_the_loss_gives_the_model_its_kept_tokens_until_the_dense_steps() -> None:
    dropping = dropping_of("--training.dense_ratio=0.3", "--training.seed=3")
    assert dropping.steps == 7
    assert [dropping_of(f"--training.dense_ratio={ratio}").steps for ratio in (0, 0.1, 1)] == [10, 9, 0]
    calls: list[dict[str, Any]] = []

    def model(x_t: Any, t: Any, cond: Any, features: Any = ()) -> Any:
        calls.append({**cond, "features": features})
        return x_t

    def loss(model: Any, batch: Any, randomness: Randomness, teacher: Any = model) -> torch.Tensor:
        model(batch["sample"], randomness.timestep, {"class_label": 1}, features=("blocks.0",))
        return teacher(batch["sample"], randomness.timestep, {"class_label": 2}).sum((1, 2, 3))

    batch = {"sample": torch.randn(4, 1, 8, 12), "index": torch.arange(4) + 9}  # a bucket of 24 patches
    randomness = draw(0, range(4), (1, 8, 12))
    dropping.loss_at(7, loss)(model, batch, randomness)
    kept = kept_tokens(3, batch["index"], num_tokens=24, num_kept=6)
    assert torch.equal(calls[0].pop("kept_tokens"), kept)
    assert calls == [{"class_label": 1, "features": ("blocks.0",)}, {"class_label": 2, "features": ()}]
    assert dropping.loss_at(8, loss) is loss

    def loss_of_two(model: Any, batch: Any, randomness: Randomness) -> torch.Tensor:
        return model(batch["sample"].repeat(2, 1, 1, 1), None, {})

    with refused("model.token_dropping = 0.75", "8", "4"):
        dropping.loss_at(1, loss_of_two)(model, batch, randomness)


@pytest.mark.parametrize("conditioning", ["adaln", "in_context"])
def test_flops_are_those_of_the_closed_form_and_of_torchs_counter(conditioning: str) -> None:
    options = Model(flavor="DiT-Ti", token_dropping=0.75, conditioning=conditioning)
    spec = build_model_spec(options, sample_shape=(4, 32, 32), num_classes=10)
    width, hidden, context = 192, 512, 0 if conditioning == "adaln" else 2
    tokens, kept = 256 + context, 64 + context
    of_block = 2 * width * (4 * width + 3 * hidden)  # of one token: qkv and proj, w12 and w3
    attention = 2 * 2 * width
    outside = 2 * 16 * width * 2 * 256 + 2 * 2 * width * width * tokens  # patches in and out, and the fusion
    embedder = 2 * (256 * width + width**2)
    modulations = (6 * 6 + 2) * 2 * width**2 if conditioning == "adaln" else 0
    for middle, num_kept in ((kept, 64), (tokens, None)):
        forward = of_block * (4 * tokens + 2 * middle) + attention * (4 * tokens**2 + 2 * middle**2)
        forward += outside + embedder + modulations
        flops = count_model_flops(spec, num_kept_tokens=num_kept)
        assert flops.forward == forward
        no_gradient = 2 * 16 * width * 256 + 2 * 256 * width  # of the image, and of the features of t
        assert flops.total == 3 * forward - no_gradient
        with torch.device("meta"), FlopCounterMode(display=False) as counter:
            x_t, t, cond = spec.example_inputs(batch_size=2)
            if num_kept is not None:
                cond["kept_tokens"] = torch.zeros(2, num_kept, dtype=torch.int64)
            spec.build()(x_t, t, cond).sum().backward()
        assert counter.get_total_flops() == 2 * flops.total
    if context:
        dense = count_model_flops(spec)
        assert dense.per_condition == 3 * 2 * (6 * of_block + 4 * width**2)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def gradients_of_steps(config: DiTConfig, mesh: DeviceMesh | None, **options: Any) -> dict[str, torch.Tensor]:
    """Gradients summed over two steps that drop tokens and two that do not."""
    model: Any = random_model(config, TokenDroppingDiT)
    if mesh is not None:
        parallelize(model, blocks=model.blocks, mesh=mesh, param_dtype=torch.float32, **options)
    x_t, t, cond = inputs(config)
    for kept in ({"kept_tokens": KEPT}, {"kept_tokens": KEPT.flip(0)}, {}, {}):
        model(x_t, t, {**cond, **kept}).square().mean().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: getattr(grad, "to_local", lambda g=grad: g)() for name, grad in found.items()}


WAYS: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpoint": "full"},
    "op": {"activation_checkpoint": "selective", "selective_ac_option": "op"},
    "compiled": {"compile": CompileOptions(backend="aot_eager"), "activation_checkpoint": "full"},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way == "compiled" else way for way in WAYS]
)
@pytest.mark.parametrize("variant", ["adaLN", "value residual"])
def test_checkpointed_and_compiled_blocks_give_the_same_gradients(variant: str, way: str, mesh: DeviceMesh) -> None:
    config = tiny_config(**VARIANTS[variant])
    expected = gradients_of_steps(config, None)
    torch._dynamo.reset()
    found = gradients_of_steps(config, mesh, **WAYS[way])
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-3)
    assert expected["fusion.mask_token"].abs().min() > 0


def test_the_switch_to_all_tokens_compiles_nothing(mesh: DeviceMesh) -> None:
    """The first blocks have compiled the shape of all tokens already."""
    config, graphs = tiny_config(), []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = random_model(config, TokenDroppingDiT)
    parallelize(
        model, blocks=model.blocks, mesh=mesh, param_dtype=torch.float32, compile=CompileOptions(backend="eager")
    )
    x_t, t, cond = inputs(config)
    for kept in ({"kept_tokens": KEPT}, {"kept_tokens": KEPT.flip(0)}, {}, {"kept_tokens": KEPT}):
        model(x_t, t, {**cond, **kept}).square().mean().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [2, 2, 2, 2]


class PassesOn(DiTBlock):
    """Every block passes a tensor on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args[:5], **kwargs), args[0]


def spec_of(**options: Any) -> ModelSpec:
    return build_model_spec(Model(token_dropping=0.75, **options), sample_shape=(4, 32, 32), num_classes=1000)


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for blocks, depth in ((2, 3), (2, 4), (3, 6)):
        with refused(f"model.token_dropping_blocks = {blocks}", "half", str(depth)):
            spec_of(flavor="debugmodel", token_dropping_blocks=blocks, overrides=(f"depth={depth}",))
    monkeypatch.setitem(BLOCKS, "passes_on", f"{__name__}:PassesOn")
    with refused("model.token_dropping = 0.75", "0"), torch.device("meta"):
        spec = spec_of(block="passes_on")
        spec.build()(*spec.example_inputs(batch_size=1))
    flags = ["--model.token_dropping=0.75", "--model.name=flux", "--model.flavor=debugmodel"]
    for arguments, about in (
        (["--model.token_dropping=1"], "model.token_dropping = 1.0"),
        (["--model.token_dropping=-0.1"], "model.token_dropping = -0.1"),
        (["--model.token_dropping_blocks=3"], "model.token_dropping_blocks = 3"),
        (["--training.dense_ratio=0.5"], "training.dense_ratio = 0.5"),
        (flags, "model.token_dropping = 0.75"),
    ):
        with refused(about):
            load_config(arguments)


class AsksForTheMiddle(FlowMatching):
    features = ("blocks.2",)


def test_only_blocks_that_always_see_all_patches_have_features(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(flavor="DiT-Ti")
    assert list(spec.features) == ["blocks.0", "blocks.1", "blocks.4", "blocks.5"]
    with torch.device("meta"):
        x_t, t, cond = spec.example_inputs(batch_size=2)
        _, found = spec.build()(x_t, t, {**cond, "kept_tokens": torch.zeros(2, 64).long()}, features=spec.features)
    assert {name: tuple(tokens.shape) for name, tokens in found.items()} == dict.fromkeys(spec.features, (2, 256, 192))
    monkeypatch.setitem(OBJECTIVES, "middle", f"{__name__}:AsksForTheMiddle")
    with refused('diffusion.objective = "middle"', "blocks.2", *spec.features):
        build_objective(Diffusion(objective="middle"), spec)


def test_few_tokens_are_warned_of() -> None:
    assert few_tokens_warning(dropping_of(sample_shape=(3, 32, 32)).spec) is None
    warning = few_tokens_warning(dropping_of(sample_shape=(3, 32, 30)).spec)
    assert warning is not None and "240 tokens" in warning and "256" in warning
