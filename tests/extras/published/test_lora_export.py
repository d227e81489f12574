# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Exported LoRAs give the predictions of the trained model when the loaders and converters of diffusers read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import diffusers
import tiny_pipelines
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_published import flux_inputs, predict, sd3_inputs, seeded, tiny_flux, tiny_sd3

from torchditan.errors import ConfigError
from torchditan.extras.published.base import build_transformer
from torchditan.extras.published.families import family
from torchditan.extras.published.lora import add_lora, find_target_modules, load_assistant, lora_parameters
from torchditan.extras.published.lora_layers import original_layer
from torchditan.extras.weights.lora_export import export_lora, ignored_by_sd_scripts

FAMILIES = {"flux": (tiny_flux, flux_inputs), "sd3": (tiny_sd3, sd3_inputs)}
ALL_LINEARS = [r".*"]
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


def trained(build: Any, *, rank: int, alpha: float, targets: list[str], **options: Any) -> Any:
    """A model whose LoRA has weights as if it had been trained."""
    model = seeded(build, **options)
    add_lora(model, rank=rank, alpha=alpha, target_modules=targets)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in lora_parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model.eval()


def pipeline_around(transformer: Any) -> Any:
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    if type(transformer).__name__.startswith("SD3"):
        parts |= dict.fromkeys(("text_encoder_3", "tokenizer_3"))
        return diffusers.StableDiffusion3Pipeline(transformer=transformer, **parts)
    return diffusers.FluxPipeline(transformer=transformer, **parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rank", "alpha", "targets"), [(4, 8, ATTENTION), (3, 5, ALL_LINEARS)])
def test_diffusers_loads_exactly_what_was_trained(
    family: str, rank: int, alpha: float, targets: list[str], tmp_path: Path
) -> None:
    build, inputs = FAMILIES[family]
    model = trained(build, rank=rank, alpha=alpha, targets=targets)
    layers = export_lora(
        dict(model.named_parameters()), model_name=family, rank=rank, alpha=alpha, path=tmp_path / "lora.safetensors"
    )
    assert len(layers) == sum(1 for _ in lora_parameters(model)) / 2
    expected = predict(model, inputs())
    # Alpha is in B, so that a reader without the metadata (ComfyUI) loads the same.
    for source in (str(tmp_path), load_file(tmp_path / "lora.safetensors")):
        published = seeded(build).eval()
        pipeline_around(published).load_lora_weights(source)
        assert torch.allclose(predict(published, inputs()), expected, rtol=0, atol=0 if alpha % rank == 0 else 2e-6)
    assert not torch.allclose(predict(seeded(build).eval(), inputs()), expected, atol=1e-3)


def test_diffusers_loads_a_lora_of_sdxl_and_we_read_it_back(tmp_path: Path) -> None:
    def build() -> Any:
        return tiny_pipelines.transformer("sdxl")

    def noise_of(unet: Any) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        added = {"text_embeds": torch.randn(2, 16, generator=draw), "time_ids": torch.full((2, 6), 64.0)}
        x, tokens = torch.randn(2, 4, 8, 8, generator=draw), torch.randn(2, 77, 32, generator=draw)
        with torch.no_grad():
            return unet(x, 500, encoder_hidden_states=tokens, added_cond_kwargs=added).sample

    model = trained(build, rank=3, alpha=5, targets=ATTENTION)
    path = tmp_path / "lora.safetensors"
    export_lora(dict(model.named_parameters()), model_name="sdxl", rank=3, alpha=5, path=path)
    again, expected = seeded(build).eval(), noise_of(model)
    parts = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    for source in (str(tmp_path), load_file(path)):
        published = seeded(build).eval()
        pipeline = diffusers.StableDiffusionXLPipeline(unet=published, scheduler=diffusers.DDIMScheduler(), **parts)
        pipeline.load_lora_weights(source)
        assert torch.allclose(noise_of(published), expected, rtol=0, atol=2e-6)
    load_assistant(again, path)
    assert torch.allclose(noise_of(again), expected, atol=2e-5)
    assert not torch.allclose(noise_of(seeded(build).eval()), expected, atol=1e-3)


def products_of(path: Path) -> dict[str, Tensor]:
    """Kohya's file as a reader adds it: name of the original layer -> alpha / rows of A * B A."""
    tensors = load_file(path)
    products = {}
    for name in tensors:
        if name.endswith(".alpha"):
            stem = name.removesuffix(".alpha")
            down, up = tensors[f"{stem}.lora_down.weight"], tensors[f"{stem}.lora_up.weight"]
            products[stem.removeprefix("lora_unet_")] = tensors[name] / down.shape[0] * (up @ down)
    assert len(tensors) == 3 * len(products)
    return products


def updates_of(model: Any, *, scale: float) -> dict[str, Tensor]:
    """Layer -> alpha / rank * B A."""
    weights = {name: parameter.detach() for name, parameter in lora_parameters(model)}
    layers = {name.split(".lora_")[0] for name in weights}
    return {
        layer: scale * weights[f"{layer}.lora_B.default.weight"] @ weights[f"{layer}.lora_A.default.weight"]
        for layer in layers
    }


def original_sd3(num_layers: int) -> dict[str, Tensor]:
    """A checkpoint of the original SD3 with the sizes of `tiny_sd3`, all zeros."""
    sizes = {"x_embedder.proj": (32, 4, 2, 2), "context_embedder": (32, 32)}
    sizes |= {f"{name}_embedder.mlp.{i}": (32, 256 if (name, i) == ("t", 0) else 32) for name in "ty" for i in (0, 2)}
    sizes |= {"final_layer.linear": (16, 32), "final_layer.adaLN_modulation.1": (64, 32)}
    for i in range(num_layers):
        is_last = i == num_layers - 1
        for side in ("x_block", "context_block"):
            block = f"joint_blocks.{i}.{side}"
            chunks = 2 if is_last and side == "context_block" else 9 if i == 0 and side == "x_block" else 6
            sizes |= {f"{block}.attn.qkv": (96, 32), f"{block}.adaLN_modulation.1": (chunks * 32, 32)}
            if not (is_last and side == "context_block"):
                sizes |= {f"{block}.attn.proj": (32, 32), f"{block}.mlp.fc1": (128, 32), f"{block}.mlp.fc2": (32, 128)}
    sizes |= {"joint_blocks.0.x_block.attn2.qkv": (96, 32), "joint_blocks.0.x_block.attn2.proj": (32, 32)}
    state = {"pos_embed": torch.zeros(1, 64, 32)}
    for name, size in sizes.items():
        state |= {f"{name}.weight": torch.zeros(size), f"{name}.bias": torch.zeros(size[0])}
    return state


def test_kohya_for_sd3_changes_the_layers_of_the_original_as_the_lora_does(tmp_path: Path) -> None:
    """diffusers imports no such LoRA, but whole checkpoints of the original: its converter maps the products back."""
    model = trained(tiny_sd3, rank=3, alpha=5, targets=ALL_LINEARS)
    path = tmp_path / "lora.safetensors"
    export_lora(dict(model.named_parameters()), model_name="sd3", rank=3, alpha=5, path=path, format="kohya")
    original = original_sd3(num_layers=2)
    by_kohya_name = {name.removesuffix(".weight").replace(".", "_"): name for name in original if "weight" in name}
    for name, product in products_of(path).items():
        assert original[by_kohya_name[name]].shape == product.shape, name
        original[by_kohya_name[name]] = product
    converted = convert_sd3_transformer_checkpoint_to_diffusers(original)
    updates = updates_of(model, scale=5 / 3)
    for name, tensor in converted.items():
        expected = updates.pop(name.removesuffix(".weight"), torch.zeros_like(tensor))
        assert torch.allclose(tensor, expected, atol=1e-6), name
    assert updates == {}


@pytest.mark.parametrize(("family", "targets"), [("flux", ALL_LINEARS), ("sd3", ["to_k", "to_v", "proj_out"])])
def test_we_read_both_formats_back(family: str, targets: list[str], tmp_path: Path) -> None:
    build, inputs = FAMILIES[family]
    model = trained(build, rank=3, alpha=5, targets=targets)
    for format in ("diffusers", "kohya"):
        path = tmp_path / f"{format}.safetensors"
        kind: Any = format
        export_lora(dict(model.named_parameters()), model_name=family, rank=3, alpha=5, path=path, format=kind)
        again = seeded(build).eval()
        load_assistant(again, path)
        assert torch.allclose(predict(again, inputs()), predict(model, inputs()), atol=2e-5), format


@pytest.mark.parametrize(
    ("name", "flavor", "count"),
    [
        ("flux", "FLUX.1-dev", 912),
        ("sd3", "SD3.5-medium", 789),
    ],
)
def test_the_blocks_have_as_many_keys_as_sd_scripts_writes(name: str, flavor: str, count: int) -> None:
    cls = family(name)
    smaller = {"pos_embed_max_size": 8} if name == "sd3" else {}  # a table that takes seconds to compute
    model = build_transformer(cls.model_class, {**cls.flavors[flavor].config, **smaller})
    layers = find_target_modules(model, [r"(single_)?transformer_blocks\..*"])
    originals = {original_layer(name, layer) for layer in layers}
    assert None not in originals
    assert 3 * len(originals) == count


def one_block_of_flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(16, 56, 56),
        guidance_embeds=True,
    )


@pytest.mark.slow
def test_diffusers_imports_kohya_for_flux(tmp_path: Path) -> None:
    """Its importer knows the width of the real FLUX alone: one block of each kind, 520M parameters."""
    blocks = [r"(single_)?transformer_blocks\..*"]
    inputs = flux_inputs(batch=1, in_channels=64)
    published = one_block_of_flux().eval()
    with torch.no_grad():
        bare = predict(published, inputs)
    add_lora(published, rank=4, alpha=8, target_modules=blocks)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in lora_parameters(published):
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
        expected = predict(published, inputs)
    state = dict(published.named_parameters())
    layers = export_lora(state, model_name="flux", rank=4, alpha=8, path=tmp_path / "lora.safetensors", format="kohya")
    assert len(layers) == 20
    for _, parameter in lora_parameters(published):
        parameter.data.zero_()
    published.delete_adapters("default")
    pipeline_around(published).load_lora_weights(str(tmp_path))
    with torch.no_grad():
        difference = (predict(published, inputs) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max(), difference
    assert (bare - expected).abs().max() > 0.1 * expected.abs().max()


def test_metadata_say_what_it_is(tmp_path: Path) -> None:
    state = dict(trained(tiny_flux, rank=2, alpha=2.5, targets=["to_q", "proj_out"]).named_parameters())
    path = tmp_path / "lora.safetensors"
    options = {"step": 700, "base": "black-forest-labs/FLUX.1-dev", "dtype": torch.bfloat16}
    layers = export_lora(state, model_name="flux", rank=2, alpha=2.5, path=path, **options)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        kinds = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert kinds == {torch.bfloat16}
    expected = {"model": "flux", "rank": "2", "step": "700", "base": "black-forest-labs/FLUX.1-dev"}
    assert expected.items() <= metadata.items()
    assert json.loads(metadata["lora_adapter_metadata"])["transformer.lora_alpha"] == 2 == float(metadata["alpha"])
    assert ignored_by_sd_scripts("flux", layers) == ["lora_unet_final_layer_linear"]


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    model = trained(tiny_flux, rank=2, alpha=2, targets=["to_q"])
    state = dict(model.named_parameters())
    path = tmp_path / "lora.safetensors"
    with pytest.raises(ConfigError, match=r'--format = "kohya": .*known .*flux .*sd3, .*wan; .*diff'):
        export_lora(state, model_name="wan", rank=2, alpha=2, path=path, format="kohya")
    with pytest.raises(ConfigError, match=r"kohya's format .*layer blocks\.0\.odd; export with --format diffusers"):
        odd = {f"blocks.0.odd.lora_{part}.default.weight": torch.ones(2, 2) for part in "AB"}
        export_lora(odd, model_name="sd3", rank=2, alpha=2, path=path, format="kohya")
    with pytest.raises(ConfigError, match=r"no LoRA .*1 weights"):
        export_lora({"proj_out.weight": torch.ones(2, 2)}, model_name="flux", rank=2, alpha=2, path=path)
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        export_lora(state, model_name="flux", rank=2, alpha=2, path=blocked / "lora.safetensors")
    assert list(tmp_path.iterdir()) == [blocked]
