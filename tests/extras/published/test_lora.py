# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""LoRA on tiny published transformers: layers, trained parameters, adapters on and off, assistants from files."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from refusals import refused
from safetensors.torch import save_file
from tiny_published import blocks_of, flux_inputs, predict, seeded, tiny_flux

from torchditan.distributed.parallelize import drop_gathered_weights, parallelize
from torchditan.errors import ConfigError
from torchditan.extras.published import lora_file
from torchditan.extras.published.flux import Flux
from torchditan.extras.published.int8 import base_names, fill_parameter, quantize_base
from torchditan.extras.published.lora import (
    ASSISTANT,
    active_adapters,
    add_lora,
    fill_adapter,
    find_target_modules,
    init_lora,
    load_assistant,
    lora_parameters,
    set_active_adapters,
    without_assistant,
)
from torchditan.extras.published.lora_file import read_adapter
from torchditan.extras.weights.lora_export import export_lora


def with_lora(build: Any, *, rank: int = 4, alpha: float = 8, targets: tuple[str, ...] = ("to_q", "to_v")) -> Any:
    model = seeded(build)
    add_lora(model, rank=rank, alpha=alpha, target_modules=targets)
    init_lora(model, seed=0)
    return model


def randomise(model: Any, adapter_name: str = "default", seed: int = 0) -> dict[str, Tensor]:
    """Weights as if it had been trained; returns a copy of them."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in lora_parameters(model, adapter_name):
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return {name: parameter.detach().clone() for name, parameter in lora_parameters(model, adapter_name)}


def train(model: Any, inputs: Any, *, steps: int = 20) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    target = torch.randn(predict(model, inputs).shape, generator=draw)
    drop_gathered_weights(model)  # the optimizer is to see the shards
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = (predict(model, inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_lowers_the_loss_and_changes_the_lora_alone() -> None:
    build, inputs = tiny_flux, flux_inputs
    published = seeded(build)
    model = with_lora(build)
    assert torch.equal(predict(model, inputs()), predict(published, inputs()))  # B is zero
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = train(model, inputs())
    assert losses[-1] < 0.95 * losses[0]
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name, _ in lora_parameters(model)}
    trained = predict(model, inputs())
    set_active_adapters(model, [])
    assert torch.equal(predict(model, inputs()), predict(published, inputs()))
    set_active_adapters(model, ["default"])
    assert torch.equal(predict(model, inputs()), trained)
    assert not torch.equal(trained, predict(published, inputs()))


def test_on_meta_the_lora_alone_is_trainable_and_float32() -> None:
    with torch.device("meta"):
        model = tiny_flux()
    quantize_base(model, blocks_of(model), base="int8")
    layers = add_lora(model, rank=3, alpha=6, target_modules=["to_q", "proj_mlp"])
    assert sorted(layers) == [
        "single_transformer_blocks.0.attn.to_q",
        "single_transformer_blocks.0.proj_mlp",
        "transformer_blocks.0.attn.to_q",
    ]
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(trainable) == {f"{layer}.lora_{part}.default.weight" for layer in layers for part in "AB"}
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in trainable.values())
    assert trainable["single_transformer_blocks.0.proj_mlp.lora_A.default.weight"].shape == (3, 32)
    assert trainable["single_transformer_blocks.0.proj_mlp.lora_B.default.weight"].shape == (128, 3)


def test_patterns_are_ends_of_names_or_whole_regular_expressions() -> None:
    with torch.device("meta"):
        model = tiny_flux(num_blocks=2)
    found = find_target_modules(model, ["attn.to_out.0"])
    assert found == ["transformer_blocks.0.attn.to_out.0", "transformer_blocks.1.attn.to_out.0"]
    assert find_target_modules(model, [r"transformer_blocks\.1\.ff.*"]) == [
        "transformer_blocks.1.ff.net.0.proj",
        "transformer_blocks.1.ff.net.2",
        "transformer_blocks.1.ff_context.net.0.proj",
        "transformer_blocks.1.ff_context.net.2",
    ]
    assert len(find_target_modules(model, ["to_q", r".*\.to_q"])) == 4
    assert find_target_modules(model, ["proj_out"])[-1] == "proj_out"  # a whole name, too


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["to_q", "to_qq"], 'lora.target_modules = "to_qq": matches no linear layer; their names end in add_k_proj, '),
        (["to_(q"], r'lora.target_modules = "to_\(q": is not a valid regular expression'),
    ],
)
def test_a_pattern_without_layers_is_refused(patterns: list[str], message: str) -> None:
    with torch.device("meta"):
        model = tiny_flux()
    with pytest.raises(ConfigError, match=message):
        add_lora(model, rank=2, alpha=2, target_modules=patterns)


def test_initial_values_are_those_of_peft_and_depend_on_seed_and_name_alone() -> None:
    model = with_lora(tiny_flux, rank=16)
    first = {name: parameter.detach().clone() for name, parameter in lora_parameters(model)}
    for name, value in first.items():
        if ".lora_B." in name:
            assert not value.any()
        else:
            bound = 1 / math.sqrt(value.shape[1])
            assert 0.97 * bound < value.abs().max() <= bound
            assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    deeper = seeded(tiny_flux, num_blocks=2)
    add_lora(deeper, rank=16, alpha=1, target_modules=["to_v", "to_k", "to_q"])
    torch.manual_seed(7)
    init_lora(deeper, seed=0)
    there = dict(lora_parameters(deeper))
    assert all(torch.equal(value, there[name]) for name, value in first.items())
    init_lora(model, seed=1)
    assert not torch.equal(first[next(iter(first))], next(lora_parameters(model))[1])


def assistant_file(build: Any, path: Path, *, rank: int = 2, alpha: float = 3.0, **options: Any) -> Any:
    """A LoRA file of other layers, rank and alpha than the trained one; returns the model that it came from."""
    teacher = with_lora(build, rank=rank, alpha=alpha, targets=("to_v", "attn.to_out.0", "ff.net.2"))
    state = randomise(teacher, seed=3)
    export_lora(state, path=path, model_name="flux", rank=rank, alpha=alpha, **options)
    return teacher


def test_an_assistant_acts_in_training_only_and_never_changes(tmp_path: Path) -> None:
    build, inputs = tiny_flux, flux_inputs
    teacher = assistant_file(build, tmp_path / "assistant.safetensors", format="kohya")
    model = with_lora(build)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    load_assistant(model, tmp_path / "assistant.safetensors", table=Flux.original_layers)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trainable
    assert active_adapters(model) == ["default", ASSISTANT]
    # The trained one changes nothing yet, so this is the teacher.
    assert torch.allclose(predict(model, inputs()), predict(teacher, inputs()), atol=1e-5)
    frozen = {name: parameter.detach().clone() for name, parameter in lora_parameters(model, ASSISTANT)}
    losses = train(model, inputs())
    assert losses[-1] < losses[0]
    for name, parameter in lora_parameters(model, ASSISTANT):
        assert torch.equal(parameter, frozen[name])

    with_both = predict(model, inputs())
    alone = with_lora(build)
    trained = dict(lora_parameters(model))
    with torch.no_grad():
        for name, parameter in lora_parameters(alone):
            parameter.copy_(trained[name])
    with without_assistant(model):
        assert active_adapters(model) == ["default"]
        assert torch.equal(predict(model, inputs()), predict(alone, inputs()))
    assert torch.equal(predict(model, inputs()), with_both)
    assert not torch.allclose(with_both, predict(alone, inputs()), atol=1e-4)


def test_a_sharded_recomputing_int8_model_switches_its_assistant(tmp_path: Path) -> None:
    assistant_file(tiny_flux, tmp_path / "assistant.safetensors")
    state = seeded(tiny_flux).state_dict()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        models = []
        for is_sharded in (False, True):
            with torch.device("meta"):
                model = tiny_flux()
            quantize_base(model, blocks_of(model), base="int8")
            add_lora(model, rank=4, alpha=4, target_modules=["to_q", "to_v"])
            weights = load_assistant(model, tmp_path / "assistant.safetensors", table=Flux.original_layers)
            if is_sharded:
                mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
                blocks = torch.nn.ModuleList(blocks_of(model))
                parallelize(model, blocks=blocks, mesh=mesh, activation_checkpoint="full", param_dtype=torch.bfloat16)
            model.to_empty(device="cpu")
            for name in base_names(model):
                fill_parameter(model, name, state[name])
            init_lora(model, seed=0)
            fill_adapter(model, weights)
            models.append(model)
        plain, sharded = models
        inputs = flux_inputs(dtype=torch.bfloat16)
        before = {name: parameter.full_tensor() for name, parameter in lora_parameters(sharded, ASSISTANT)}
        losses = train(sharded, inputs)
        assert losses[-1] < losses[0]
        assert all(torch.equal(p.full_tensor(), before[name]) for name, p in lora_parameters(sharded, ASSISTANT))
        trained = dict(lora_parameters(sharded))
        with torch.no_grad():
            for name, parameter in lora_parameters(plain):
                parameter.copy_(trained[name].full_tensor())
            with_both = predict(sharded, inputs)
            with without_assistant(sharded), without_assistant(plain):
                assert torch.allclose(predict(sharded, inputs), predict(plain, inputs), atol=0.05)
                assert not torch.equal(predict(sharded, inputs), with_both)
            assert torch.equal(predict(sharded, inputs), with_both)
        assert train(sharded, inputs, steps=1)[0] < losses[0]  # gradients flow as before
    finally:
        dist.destroy_process_group()


def test_one_process_copies_no_frozen_weight_that_needs_no_cast() -> None:
    model, copied = seeded(tiny_flux), set()
    quantize_base(model, blocks_of(model), base="int8")
    add_lora(model, rank=4, alpha=4, target_modules=["to_q", "to_v"])
    init_lora(model, seed=0)
    stored = {name: weight.data_ptr() for name, weight in model.named_parameters()}

    def compare(path: str, module: torch.nn.Module, _inputs: Any) -> None:
        for name, weight in module.named_parameters(path, recurse=False):
            if not weight.requires_grad and weight.data_ptr() != stored[name]:
                copied.add(name)

    for path, module in model.named_modules():
        module.register_forward_pre_hook(partial(compare, path))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        blocks, mesh = torch.nn.ModuleList(blocks_of(model)), init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        parallelize(model, blocks=blocks, mesh=mesh, activation_checkpoint="full", param_dtype=torch.bfloat16)
        losses = train(model, flux_inputs(dtype=torch.bfloat16), steps=5)
    finally:
        dist.destroy_process_group()
    assert {name.rpartition(".")[2] for name in copied} == {"scale"} and losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("alpha", "place"),
    [(2, "none"), (3, "tensors"), (3, "metadata"), (3, "by layer"), (3, "peft"), (3 / math.sqrt(2), "rsLoRA")],
)
def test_alpha_is_found_where_other_programs_state_it(alpha: float, place: str, tmp_path: Path) -> None:
    """The update is 1.5 B A of rank 2, and B A if alpha is stated nowhere."""
    teacher = with_lora(tiny_flux, rank=2, alpha=2 if place == "none" else 3)
    state = {name.replace(".default.", "."): value for name, value in randomise(teacher).items()}
    path, metadata = tmp_path / "adapter_model.safetensors", {}
    prefix = "base_model.model." if place in ("peft", "rsLoRA") else "transformer."
    layers = [name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")]
    if place == "metadata":
        metadata = {"transformer.lora_alpha": alpha}
    elif place == "by layer":
        metadata = {"transformer.lora_alpha": 7, "transformer.alpha_pattern": {"to_q": alpha, "attn.to_v": alpha}}
    elif place in ("peft", "rsLoRA"):
        options = {"lora_alpha": alpha, "use_rslora": place == "rsLoRA"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    tensors = {f"{prefix}{name}": value for name, value in state.items()}
    if place == "tensors":
        tensors |= {f"{prefix}{layer}.alpha": torch.tensor(alpha) for layer in layers}
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps(metadata)} if metadata else None)
    model = with_lora(tiny_flux)
    load_assistant(model, path, table=Flux.original_layers)
    assert torch.allclose(predict(model, flux_inputs()), predict(teacher, flux_inputs()), atol=1e-5)


LAYERS = ["layer.to_q", "layer.to_k", "layer.add_to_q"]


def adapter_of_peft(folder: Path, alphas: dict[str, float]) -> Path:
    """A LoRA of rank 2 whose matrices are ones, with alpha 2 for the layers that have none of their own."""
    matrices = {"lora_A": torch.ones(2, 8), "lora_B": torch.ones(8, 2)}
    tensors = {f"{layer}.{part}.weight": value.clone() for layer in LAYERS for part, value in matrices.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2, "alpha_pattern": alphas}))
    return folder / "adapter_model.safetensors"


@pytest.mark.parametrize("end", ["to_q", "to_(q|k)", r"^layer\.to_q", "^to_q", ".*to_q", "layer.*to_q", "lay"])
def test_a_layer_gets_the_alpha_that_peft_gives_it(end: str, tmp_path: Path) -> None:
    from peft.utils.other import get_pattern_key

    file = adapter_of_peft(tmp_path, {end: 6, "to_k": 8})
    expected = [{end: 3.0, "to_k": 4.0}.get(get_pattern_key([end, "to_k"], layer), 1.0) for layer in LAYERS]
    up = read_adapter(file, LAYERS, table={}, shown="LoRA").up
    assert [up[layer][0, 0].item() for layer in LAYERS] == expected


@pytest.mark.parametrize("end", ["(", r"(.|\w)+[!?]"])
def test_an_expression_that_cannot_be_matched_is_refused_in_time(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_file, "_MATCH_SECONDS", 0.2)
    long = "blocks.transformer_blocks.attention_projections.to_q"
    with refused("LoRA", "alpha_pattern"):
        read_adapter(adapter_of_peft(tmp_path, {end: 6}), [*LAYERS, long], table={}, shown="LoRA")


TO_V = "transformer.transformer_blocks.0.attn.to_v"
OTHER = "transformer.transformer_blocks.7.attn.to_v"
REFUSED: list[tuple[dict[str, tuple[int, ...]], str]] = [
    ({f"{OTHER}.lora_A.weight": (2, 32)}, "another model: this one has no linear layer transformer_blocks.7.attn.to_v"),
    ({f"{TO_V}.lora_A.weight": (2, 48), f"{TO_V}.lora_B.weight": (48, 2)}, "maps 32 to 32 here, 48 to 48 there"),
    ({f"{TO_V}.lora_A.weight": (2, 32), f"{TO_V}.lora_B.weight": (32, 3)}, "another model: transformer_blocks.0"),
    ({f"{TO_V}.lora_A.weight": (2, 32)}, "is not a LoRA: it has no pairs of lora_A and lora_B"),
    ({"proj_out.weight": (2, 2)}, "is not a LoRA of linear layers: it has proj_out.weight"),
    ({}, "is not a safetensors file, or is truncated"),
]


@pytest.mark.parametrize(("shapes", "message"), REFUSED)
def test_a_file_that_does_not_fit_is_refused_in_one_line(
    shapes: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "assistant.safetensors"
    path.write_text("no tensors")
    if shapes:
        save_file({name: torch.ones(shape) for name, shape in shapes.items()}, path)
    model = with_lora(tiny_flux)
    before = list(model.state_dict())
    with pytest.raises(ConfigError, match=message) as caught:
        load_assistant(model, path, table=Flux.original_layers)
    assert "\n" not in str(caught.value)
    assert list(model.state_dict()) == before
