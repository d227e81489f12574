# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Exported LoRAs give the predictions of the trained model when the loaders and converters of diffusers read them."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import diffusers
from debugmodels import built, inputs_of, spec_of
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_published import flux_inputs, predict, sd3_inputs, seeded, tiny_flux, tiny_sd3

from torchditan.errors import ConfigError
from torchditan.extras.published.base import build_transformer
from torchditan.extras.published.families import family
from torchditan.extras.published.lora import add_lora, find_target_modules, load_assistant, lora_parameters
from torchditan.extras.published.lora_file import read_adapter
from torchditan.extras.published.lora_layers import original_layer
from torchditan.extras.weights.lora_export import export_lora, readers_of
from torchditan.registry import FAMILIES

ALL_LINEARS = [r".*"]
FORMATS = [(name, format) for name in FAMILIES for format in family(name).lora_readers]


def trained(build: Any, *, rank: int, alpha: float, targets: list[str], **options: Any) -> Any:
    """A model whose LoRA has weights as if it had been trained."""
    model = seeded(build, **options)
    add_lora(model, rank=rank, alpha=alpha, target_modules=targets)
    draw_lora(model)
    return model.eval()


def draw_lora(model: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in lora_parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)


def pipeline_around(name: str, transformer: Any) -> Any:
    """The pipeline of a family without its other parts."""
    cls = family(name)
    kind = getattr(diffusers, cls.pipeline_class)
    parts = [key for key, given in inspect.signature(kind).parameters.items() if given.default is given.empty]
    return kind(**{**dict.fromkeys(parts), cls.subfolder: transformer})


RENAMED = {
    "flux": {
        r"^transformer_blocks\.(\d+)\.attn\.to_([qkv])$": r"double_blocks.\1.img_attn.qkv",
        r"^transformer_blocks\.(\d+)\.attn\.to_out\.0": r"double_blocks.\1.img_attn.proj",
        r"single_transformer_blocks\.(\d+)\.attn\.to_([qkv])$": r"single_blocks.\1.linear1",
    },
    "sd3": {
        r"transformer_blocks\.(\d+)\.attn\.to_([qkv])": r"joint_blocks.\1.x_block.attn.qkv",
        r"transformer_blocks\.(\d+)\.attn\.to_out\.0": r"joint_blocks.\1.x_block.attn.proj",
    },
    "sdxl": {
        r"down_blocks\.(\d)\.attentions\.(\d)": lambda at: f"input_blocks.{3 * int(at[1]) + int(at[2]) + 1}.1",
        r"mid_block\.attentions\.0": "middle_block.1",
        r"up_blocks\.(\d)\.attentions\.(\d)": lambda at: f"output_blocks.{3 * int(at[1]) + int(at[2])}.1",
    },
    "mochi": {
        r"transformer_blocks\.(\d+)\.attn1\.to_([qkv])": r"blocks.\1.attn.qkv_x",
        r"transformer_blocks\.(\d+)\.attn1\.to_out\.0": r"blocks.\1.attn.proj_x",
    },
    "z_image": {
        r"attention\.to_([qkv])": "attention.qkv",
        r"attention\.to_out\.0": "attention.out",
    },
    "wan": {
        r"attn1\.to_([qkv])": r"self_attn.\1",
        r"attn2\.to_([qkv])": r"cross_attn.\1",
        r"attn1\.to_out\.0": "self_attn.o",
        r"attn2\.to_out\.0": "cross_attn.o",
    },
}
RENAMED["flux2"] = {
    **RENAMED["flux"],
    r"single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj": r"single_blocks.\1.linear1",
    r"single_transformer_blocks\.(\d+)\.attn\.to_out$": r"single_blocks.\1.linear2",
}
RENAMED["hunyuan_video"] = {
    **RENAMED["flux"],
    r"context.*\.(\d+)\.attn\.to_([qkv])": r"txt_in.individual_token_refiner.blocks.\1.self_attn.qkv",
    r"context.*\.(\d+)\.attn\.to_out\.0": r"txt_in.individual_token_refiner.blocks.\1.self_attn.proj",
}
"""Layer of diffusers -> name in ComfyUI, which has one layer for the three of an attention in some families."""
AS_IN_DIFFUSERS = {
    **dict.fromkeys(("flux", "flux2", "sd3"), ("transformer.{}",)),
    **dict.fromkeys(("qwen_image", "z_image"), ("{}", "transformer.{}", "diffusion_model.{}")),
}
"""How else ComfyUI lets a file name a layer of diffusers."""


def comfyui_names(name: str, layer: str) -> tuple[list[str], list[str]]:
    """Names under which ComfyUI looks for the update of a layer: of this layer alone, and of one that contains it."""
    key = layer
    for pattern, new in RENAMED.get(name, {}).items():
        key = re.sub(pattern, new, key)
    alone = [form.format(layer) for form in AS_IN_DIFFUSERS.get(name, ())]
    around = [f"diffusion_model.{key}", f"lora_unet_{key.replace('.', '_')}"]
    if name == "sdxl":
        alone += [f"lora_unet_{layer.replace('.', '_')}", f"unet.{layer.replace('.to_', '.processor.to_')}"]
    if name == "hunyuan_video":
        around += [f"{prefix}.{key.replace('_attn.', '_attn_')}" for prefix in ("transformer", "diffusion_model")]
    return alone, around


def updates_in_comfyui(name: str, path: Path, rows: dict[str, int]) -> dict[str, Tensor]:
    """Layer -> its update by ComfyUI's rules, which ignore metadata: a scale of alpha / rank, or 1 without alpha.

    Args:
        rows: layer of diffusers -> number of its outputs.
    """
    tensors, found = load_file(path), {}
    kinds = [("lora_up", "lora_down"), ("lora_B", "lora_A")]
    products = {}
    for up, down in kinds:
        for stem in [key.removesuffix(f".{up}.weight") for key in tensors if key.endswith(f".{up}.weight")]:
            matrix = tensors[f"{stem}.{down}.weight"]
            alpha = tensors.get(f"{stem}.alpha")
            scale = 1.0 if alpha is None else alpha / matrix.shape[0]
            products[stem] = scale * tensors[f"{stem}.{up}.weight"] @ matrix
    for layer, height in rows.items():
        alone, around = comfyui_names(name, layer)
        for stem in products.keys() & alone:
            found[layer] = products[stem]
        for stem in products.keys() & around:
            first = "qkv".find(layer[-1]) * height if products[stem].shape[0] > height else 0
            found[layer] = products[stem][first : first + height]
    return found


@pytest.mark.parametrize(("name", "format"), FORMATS)
def test_a_file_means_the_same_to_every_program_that_reads_it(name: str, format: Any, tmp_path: Path) -> None:
    sizes = ["layers_per_block=2"] if name == "sdxl" else []  # from which the names of its publisher count
    spec, cls, path = spec_of(name, overrides=sizes), family(name), tmp_path / "lora.safetensors"
    models = {reader: built(spec) for reader in ("trained", "bare", "diffusers", "ours")}
    trained = models["trained"]
    add_lora(trained.transformer, rank=4, alpha=8, target_modules=cls.lora_targets)
    draw_lora(trained.transformer)
    layers = export_lora(
        dict(trained.transformer.named_parameters()), model_name=name, rank=4, alpha=8, path=path, format=format
    )
    assert len(layers) == sum(1 for _ in lora_parameters(trained.transformer)) / 2
    load_assistant(models["ours"].transformer, path, table=cls.original_layers)
    readers = cls.lora_readers[format]
    assert readers_of(name, format, layers).startswith(f"read by {', '.join(readers)}")
    if "diffusers" in readers and (name, format) != ("flux", "kohya"):  # which takes the real width only, see below
        pipeline_around(name, models["diffusers"].transformer).load_lora_weights(str(tmp_path))
    else:
        del models["diffusers"]
    inputs = inputs_of(spec)
    with torch.no_grad():
        predictions = {reader: model.eval()(*inputs) for reader, model in models.items()}
    assert not torch.allclose(predictions.pop("bare"), predictions["trained"], atol=1e-3)
    for reader, prediction in predictions.items():
        assert torch.allclose(prediction, predictions["trained"], rtol=0, atol=2e-5), reader

    expected = updates_of(trained.transformer, scale=2)
    found = updates_in_comfyui(name, path, {layer: len(update) for layer, update in expected.items()})
    assert ("ComfyUI" in readers) == (found.keys() == expected.keys())
    for layer, update in found.items():
        assert torch.allclose(update, expected[layer], rtol=0, atol=1e-6), layer


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


@pytest.mark.parametrize(
    ("name", "build", "inputs", "targets"),
    [
        ("flux", tiny_flux, flux_inputs, [r"(single_)?transformer_blocks\..*"]),
        ("sd3", tiny_sd3, sd3_inputs, ALL_LINEARS),
        ("sd3", tiny_sd3, sd3_inputs, ["to_k", "to_v", "proj_out"]),
    ],
)
def test_we_read_all_layers_of_kohya_files_back(
    name: str, build: Any, inputs: Any, targets: list[str], tmp_path: Path
) -> None:
    model = trained(build, rank=3, alpha=5, targets=targets)
    path = tmp_path / "lora.safetensors"
    export_lora(dict(model.named_parameters()), model_name=name, rank=3, alpha=5, path=path, format="kohya")
    again = seeded(build).eval()
    load_assistant(again, path, table=family(name).original_layers)
    assert torch.allclose(predict(again, inputs()), predict(model, inputs()), atol=2e-5)


@pytest.mark.parametrize(
    ("name", "fused", "parts"),
    [
        ("z_image", "layers_0_attention_qkv", [f"layers.0.attention.to_{part}" for part in "qkv"]),
        ("flux2", "double_blocks_0_txt_attn_qkv", [f"transformer_blocks.0.attn.add_{part}_proj" for part in "qkv"]),
    ],
)
def test_a_fused_layer_is_split(name: str, fused: str, parts: list[str]) -> None:
    draw = torch.Generator().manual_seed(0)
    down, up = torch.randn(2, 64, generator=draw), torch.randn(192, 2, generator=draw)
    state = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(6.0)}
    state = {f"lora_unet_{fused}.{key}": value for key, value in state.items()}
    layers = find_target_modules(built(spec_of(name)).transformer, ALL_LINEARS)
    found = read_adapter(state, layers, table=family(name).original_layers, shown="it")
    for part, rows in zip(parts, (3 * up @ down).split(64), strict=True):
        assert torch.allclose(found.up.pop(part) @ found.down[part], rows, atol=1e-5)
    assert not found.up


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
    originals = {original_layer(cls.original_layers, layer) for layer in layers}
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
    draw_lora(published)
    with torch.no_grad():
        expected = predict(published, inputs)
    state = dict(published.named_parameters())
    layers = export_lora(state, model_name="flux", rank=4, alpha=8, path=tmp_path / "lora.safetensors", format="kohya")
    assert len(layers) == 20
    for _, parameter in lora_parameters(published):
        parameter.data.zero_()
    published.delete_adapters("default")
    pipeline_around("flux", published).load_lora_weights(str(tmp_path))
    with torch.no_grad():
        difference = (predict(published, inputs) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max(), difference
    assert (bare - expected).abs().max() > 0.1 * expected.abs().max()


def test_metadata_say_what_it_is(tmp_path: Path) -> None:
    state = dict(trained(tiny_flux, rank=2, alpha=2.5, targets=["to_q", "proj_out"]).named_parameters())
    path = tmp_path / "lora.safetensors"
    options = {"step": 700, "base": "black-forest-labs/FLUX.1-dev", "dtype": torch.bfloat16}
    export_lora(state, model_name="flux", rank=2, alpha=2.5, path=path, **options)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        kinds = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert kinds == {torch.bfloat16}
    expected = {"model": "flux", "rank": "2", "step": "700", "base": "black-forest-labs/FLUX.1-dev"}
    assert expected.items() <= metadata.items()
    assert json.loads(metadata["lora_adapter_metadata"])["transformer.lora_alpha"] == 2 == float(metadata["alpha"])


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    model = trained(tiny_flux, rank=2, alpha=2, targets=["to_q"])
    state = dict(model.named_parameters())
    path = tmp_path / "lora.safetensors"
    with refused('--format = "kohya"', "diffusers or comfyui", "wan"):
        export_lora(state, model_name="wan", rank=2, alpha=2, path=path, format="kohya")
    for layer in ("blocks.0.odd", "proj_out"):  # unknown, and ignored by sd-scripts
        odd = {f"{layer}.lora_{part}.default.weight": torch.ones(2, 2) for part in "AB"}
        with refused('--format = "kohya"', layer, "diffusers"):
            export_lora(odd, model_name="flux", rank=2, alpha=2, path=path, format="kohya")
    with pytest.raises(ConfigError, match=r"no LoRA .*1 weights"):
        export_lora({"proj_out.weight": torch.ones(2, 2)}, model_name="flux", rank=2, alpha=2, path=path)
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        export_lora(state, model_name="flux", rank=2, alpha=2, path=blocked / "lora.safetensors")
    assert list(tmp_path.iterdir()) == [blocked]
