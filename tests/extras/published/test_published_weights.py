# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reading published weights: every layout on disk gives the same predictions, and invalid files give one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from debugmodels import built, inputs_of, pristine, spec_of
from refusals import refused

from torchditan.config.options import LoRA, Model
from torchditan.errors import ConfigError
from torchditan.extras.published import stored_weights
from torchditan.extras.published.families import family
from torchditan.models import build_model_spec

pytest.importorskip("diffusers")
safetensors = pytest.importorskip("safetensors.torch")


def source(name: str, flavor: str = "debugmodel", **options: Any) -> tuple[Any, torch.Tensor]:
    """diffusers' transformer with other weights than a run starts from, and what it predicts."""
    spec = spec_of(name, flavor, **options)
    model = built(spec, seed=7)
    with torch.no_grad():
        return pristine(model, spec), model(*inputs_of(spec))


def prediction_from(path: Path, name: str, flavor: str = "debugmodel", **options: Any) -> torch.Tensor:
    spec = spec_of(name, flavor, path=path, **options)
    with torch.no_grad():
        return built(spec)(*inputs_of(spec))


def line_of(path: Path, name: str = "sd3") -> str:
    with pytest.raises(ConfigError) as error:
        prediction_from(path, name)
    line = str(error.value)
    assert "\n" not in line
    assert path.name in line
    return line


@pytest.mark.parametrize("name", ["sd3", "sdxl", "wan"])  # images, a folder of another name, videos
def test_a_pipeline_folder_gives_the_predictions_of_its_transformer(name, tmp_path):
    transformer, expected = source(name)
    transformer.save_pretrained(tmp_path / family(name).subfolder)
    assert torch.equal(prediction_from(tmp_path, name), expected)


def test_several_files_are_as_good_as_one(tmp_path):
    transformer, expected = source("sd3")
    transformer.save_pretrained(tmp_path, max_shard_size="500KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(prediction_from(tmp_path, "sd3"), expected)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("wan", ""), ("sd3", "model.diffusion_model."), ("qwen_image", "transformer."), ("z_image", "")],
)
def test_one_file_in_the_names_of_diffusers(name, prefix, tmp_path):
    transformer, expected = source(name)
    tensors = {prefix + key: value.contiguous() for key, value in transformer.state_dict().items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(prediction_from(tmp_path / "model.safetensors", name), expected)


def in_names_of_stability(tensors: dict[str, torch.Tensor], *, num_layers: int) -> dict[str, torch.Tensor]:
    """SD3's weights as their publisher has them: q, k and v in one, shift before scale."""
    found = {"pos_embed": tensors["pos_embed.pos_embed"]}
    layers = {"x_embedder.proj": ("pos_embed.proj",), **family("sd3").original_layers}
    for template, templates in layers.items():
        for block in map(str, range(num_layers if "*" in template else 1)):
            name, parts = template.replace("*", block), [part.replace("*", block) for part in templates]
            for kind in ("weight", "bias"):
                values = [tensors[f"{part}.{kind}"] for part in parts if f"{part}.{kind}" in tensors]
                if values:
                    found[f"{name}.{kind}"] = torch.cat(values)
    last = f"joint_blocks.{num_layers - 1}.context_block.adaLN_modulation.1"
    for name in (
        f"{layer}.{kind}" for layer in (last, "final_layer.adaLN_modulation.1") for kind in ("weight", "bias")
    ):
        found[name] = torch.cat(found[name].chunk(2)[::-1])
    return {f"model.diffusion_model.{name}": value.contiguous() for name, value in found.items()}


def test_one_file_in_the_names_of_its_publisher(tmp_path):
    transformer, expected = source("sd3")
    tensors = in_names_of_stability(transformer.state_dict(), num_layers=3)
    tensors["first_stage_model.decoder.conv_in.weight"] = torch.zeros(1)  # the rest of a pipeline, in the same file
    safetensors.save_file(tensors, tmp_path / "sd3.safetensors")
    assert torch.equal(prediction_from(tmp_path / "sd3.safetensors", "sd3"), expected)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        ("x_block.attn.qkv.scale_weight", torch.float8_e4m3fn),  # ComfyUI
        ("x_block.attn.qkv.weight_scale", torch.float8_e4m3fn),
        ("x_block.attn.qkv.SCB", torch.int8),  # bitsandbytes
        (None, torch.uint8),
    ],
)
def test_one_file_of_quantized_weights_is_refused(scale, dtype, tmp_path):
    tensors = in_names_of_stability(source("sd3")[0].state_dict(), num_layers=3)
    prefix = "model.diffusion_model.joint_blocks.0."
    tensors[f"{prefix}x_block.attn.qkv.weight"] = tensors[f"{prefix}x_block.attn.qkv.weight"].to(dtype)
    if scale:
        tensors[prefix + scale] = torch.ones(())
    safetensors.save_file(tensors, tmp_path / "sd3.safetensors")
    assert "quantized" in line_of(tmp_path / "sd3.safetensors")


def test_a_whole_pipeline_may_have_a_quantized_text_encoder(tmp_path):
    transformer, expected = source("sd3")
    tensors = in_names_of_stability(transformer.state_dict(), num_layers=3)
    tensors["text_encoders.t5xxl.transformer.scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    safetensors.save_file(tensors, tmp_path / "sd3.safetensors")
    assert torch.equal(prediction_from(tmp_path / "sd3.safetensors", "sd3"), expected)


def test_weights_stored_in_bf16_are_read_as_they_are(tmp_path):
    transformer, _ = source("wan")
    transformer.bfloat16().save_pretrained(tmp_path)
    model = built(spec_of("wan", path=tmp_path))
    for name, parameter in model.transformer.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, transformer.get_parameter(name).float()), name


def test_a_folder_of_another_size_says_so_itself(tmp_path):
    """Its config.json goes before the flavor's sizes, and `model.overrides` before both."""
    transformer, expected = source("sd3", overrides=["num_layers=2"])
    transformer.save_pretrained(tmp_path)
    assert torch.equal(prediction_from(tmp_path, "sd3"), expected)
    with refused("model.path", "another model"):
        prediction_from(tmp_path, "sd3", overrides=["num_layers=3"])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    source("sd3")[0].save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("transformer_blocks.1.attn.to_q.weight", None, "must be [64, 64] and is missing"),
        ("proj_out.bias", torch.zeros(3), "must be [64] and is [3]"),
    ],
)
def test_a_missing_tensor_and_another_shape_are_named(name, value, right, saved):
    file = saved / "diffusion_pytorch_model.safetensors"
    tensors = {**safetensors.load_file(file), name: value}
    safetensors.save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, file)
    assert f"{name} {right}" in line_of(saved)


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_the_file_of_another_model_is_refused(name, saved):
    diffusers_names = saved / "diffusion_pytorch_model.safetensors"
    assert "is another model than model.flavor: " in line_of(diffusers_names, name)
    original = saved / "sd3.safetensors"
    safetensors.save_file(in_names_of_stability(safetensors.load_file(diffusers_names), num_layers=3), original)
    line_of(original, name)


@pytest.mark.parametrize("leave", [(), ("config.json",), ("config.json", "model.bin")])
def test_a_folder_without_weights_is_refused(leave, saved):
    (saved / "model.bin").write_bytes(b"\x80\x04.")
    for file in saved.iterdir():
        if file.name not in leave:
            file.unlink()
    assert ("no .safetensors file" if leave else "neither config.json") in line_of(saved)


def test_damaged_and_missing_files_are_refused(saved):
    weights = saved / "diffusion_pytorch_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    assert "is truncated" in line_of(saved)
    weights.write_bytes(content)
    (saved / "model.ckpt").write_bytes(b"\x80\x04.")
    assert "must be a .safetensors file, or a folder" in line_of(saved / "model.ckpt")
    assert "does not exist; fetch it with torchditan download" in line_of(saved / "nothing")
    index = saved / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"proj_out.bias": "model-00001-of-00002.safetensors"}}))
    assert "has no model-00001-of-00002.safetensors" in line_of(saved)


def test_a_folder_of_several_models_is_refused(saved):
    file = saved / "diffusion_pytorch_model.safetensors"
    for name in ("model.fp16.safetensors", "model.non_ema.safetensors"):
        shutil.copy(file, saved / name)
    assert spec_of("sd3", path=saved).build() is not None  # the plain name is read
    file.unlink()
    line = line_of(saved)
    assert "model.fp16.safetensors" in line and "model.non_ema.safetensors" in line


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_a_pipeline_of_sdxl_that_predicts_no_noise_is_refused(prediction, tmp_path):
    transformer, expected = source("sdxl")
    transformer.save_pretrained(tmp_path / "unet")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler/scheduler_config.json").write_text(json.dumps({"prediction_type": prediction}))
    if prediction == "epsilon":
        assert torch.equal(prediction_from(tmp_path, "sdxl"), expected)
    else:
        with refused(f'model.path = "{tmp_path / "unet"}"', "v_prediction", "epsilon"):
            prediction_from(tmp_path, "sdxl")


def test_a_lora_on_the_hub_is_named_by_its_file_if_there_are_several(tmp_path, monkeypatch):
    for name in ("v1", "v2"):
        (tmp_path / f"{name}.safetensors").touch()
    monkeypatch.setattr(stored_weights, "fetch", lambda place, **_: {"some/adapter": tmp_path}[place])
    find_lora = stored_weights.find_lora
    assert find_lora("some/adapter/v2.safetensors") == tmp_path / "v2.safetensors"
    with refused('lora.assistant_path = "some/adapter"', "v1.safetensors", "v2.safetensors"):
        find_lora("some/adapter")
    with refused('lora.assistant_path = "some/adapter/v3.safetensors"', "does not exist"):
        find_lora("some/adapter/v3.safetensors")


@pytest.mark.parametrize(
    ("name", "flavor", "missing"),
    [("flux", "debugmodel", "axes_dims_rope"), ("flux2", "debugmodel-dev", "guidance_embeds")],
)
def test_a_config_may_leave_out_some_sizes_and_have_old_ones(name, flavor, missing, tmp_path):
    """The released ones of FLUX.1-dev and FLUX.2-dev do."""
    model = built(spec_of(name, flavor))
    model.transformer.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    del content[missing]
    content["of_an_older_version"] = 768
    file.write_text(json.dumps(content))
    assert spec_of(name, flavor, path=tmp_path).config[missing] == spec_of(name, flavor).config[missing]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_layers", 2**64, "its config.json has num_layers = 18446744073709551616, and its files have"),
        ("joint_attention_dim", 2**40, r"context_embedder.weight must be \[\d+, 1099511627776\] and is \[\d+, \d+\]"),
    ],
)
def test_sizes_that_are_not_those_of_the_files_are_refused_before_memory_is_allocated(saved, name, value, message):
    config = saved / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
    with pytest.raises(ConfigError, match=message):
        spec_of("sd3", path=saved).build()


@pytest.mark.parametrize("assistant", [None, "assistant.safetensors"])
def test_schnell_is_trained_without_a_warning_only_with_an_assistant(assistant, tmp_path):
    source("flux", overrides=["guidance_embeds=false"])[0].save_pretrained(tmp_path / "schnell")
    (tmp_path / "assistant.safetensors").touch()
    model = Model(name="flux", flavor="FLUX.1-schnell", path=str(tmp_path / "schnell"))
    lora = LoRA(rank=2, assistant_path=assistant and str(tmp_path / assistant))
    warning = build_model_spec(model, sample_shape=(16, 8, 8), num_classes=0, lora=lora).warning
    assert (warning is None) == (assistant is not None)
    assert assistant or warning.endswith("train a LoRA with --lora.assistant_path")
