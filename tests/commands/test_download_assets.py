# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""torchditan download brings only the files of a hub repository that the job needs."""

from __future__ import annotations

from typing import Any

import pytest

from torchditan.commands.download_assets import wanted
from torchditan.config.options import Autoencoder, Config, Dataset, LoRA, Model, TextEncoder

PIPELINE = [
    "model_index.json",
    "flux1-schnell.safetensors",
    "ae.safetensors",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/vocab.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model-00001-of-00003.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "vae/config.json",
    "vae/diffusion_pytorch_model.safetensors",
]
ALONE = ["config.json", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors", "sdxl_vae.safetensors"]
COSMOS = ["config.json", "autoencoder.jit", "encoder.jit", "decoder.jit", "model.pt"]


def brought(repository: list[str], **sections: Any) -> dict[str, tuple[str, list[str]]]:
    """Option -> (hub name, those of the files that come), as the hub's client filters them."""
    filter_repo_objects = pytest.importorskip("huggingface_hub.utils").filter_repo_objects
    assets = wanted(Config(**sections))
    return {
        option: (name, list(filter_repo_objects(repository, allow_patterns=patterns)))
        for option, name, patterns in assets
    }


VAE = ["vae/config.json", "vae/diffusion_pytorch_model.safetensors"]


@pytest.mark.parametrize(
    ("options", "repository", "files"),
    [
        ({"name": "flux"}, PIPELINE, VAE),
        ({"name": "sdxl"}, ALONE, ["config.json", "diffusion_pytorch_model.safetensors"]),
        ({"name": "cosmos-ci8x8"}, COSMOS, ["encoder.jit", "decoder.jit"]),
        ({"name": "cosmos", "path": "some/tokenizer"}, COSMOS, ["encoder.jit", "decoder.jit"]),
        ({"name": "flux", "path": "some/pipeline"}, PIPELINE, VAE),
        ({"path": "some/pipeline"}, PIPELINE, VAE),
        ({"name": "diffusers", "path": "some/vae"}, ALONE, ["config.json", "diffusion_pytorch_model.safetensors"]),
    ],
)
def test_an_autoencoder_brings_its_own_files_alone(
    options: dict[str, str], repository: list[str], files: list[str]
) -> None:
    found = brought(repository, autoencoder=Autoencoder(**options))
    assert found.keys() == {"autoencoder.path"}
    assert sorted(found["autoencoder.path"][1]) == sorted(files)


def test_rae_brings_its_files_and_its_encoder() -> None:
    section = Autoencoder(name="rae encoder=some/vit", path="some/rae")
    found = brought([*ALONE, "model.safetensors", "pytorch_model.bin"], autoencoder=section)
    assert found["autoencoder.path"] == ("some/rae", ["config.json", "diffusion_pytorch_model.safetensors"])
    assert found["autoencoder.name"] == ("some/vit", ["config.json", "model.safetensors"])


def test_an_autoencoder_without_weights_brings_nothing() -> None:
    assert brought(PIPELINE, autoencoder=Autoencoder(name="haar")) == {}


def test_text_encoders_bring_no_transformer_and_no_second_autoencoder() -> None:
    sections = {"dataset": Dataset(dataset_name="captions"), "text_encoder": TextEncoder(path="some/pipeline")}
    text = PIPELINE[:1] + PIPELINE[3:7]
    found = brought(PIPELINE, **sections, autoencoder=Autoencoder(name="flux"))
    assert (found["text_encoder.path"][1], found["autoencoder.path"][1]) == (text, VAE)
    assert brought(PIPELINE, **sections)["text_encoder.path"][1] == text + VAE


def test_a_published_model_brings_its_pipeline_but_not_its_single_file() -> None:
    model = Model(name="flux", flavor="FLUX.1-schnell", path="some/pipeline")
    lora = LoRA(rank=4, assistant_path="some/adapter")
    found = brought(PIPELINE, model=model, lora=lora, dataset=Dataset(dataset_name="captions"))
    assert found["model.path"][1] == [name for name in PIPELINE if name not in PIPELINE[1:3]]
    assert found["lora.assistant_path"][0] == "some/adapter"


def test_a_lora_named_by_its_file_comes_alone() -> None:
    files = ["adapter_v1.safetensors", "adapter_v2.safetensors", "old/adapter_v2.safetensors", "README.md"]
    model = Model(name="z_image", flavor="Z-Image-Turbo")
    for path, expected in (("some/adapter", files[:3]), ("some/adapter/adapter_v2.safetensors", files[1:2])):
        found = brought(files, model=model, lora=LoRA(rank=4, assistant_path=path))
        assert found["lora.assistant_path"] == ("some/adapter", expected)


def test_a_lora_of_peft_comes_with_the_file_that_states_its_alpha() -> None:
    files = ["adapter_config.json", "adapter_model.safetensors", "README.md"]
    files += ["v2/adapter_config.json", "v2/adapter_model.safetensors"]
    model = Model(name="z_image", flavor="Z-Image-Turbo")
    for path, expected in (
        ("some/adapter", [*files[:2], files[4]]),
        ("some/adapter/adapter_model.safetensors", files[:2]),
        ("some/adapter/v2/adapter_model.safetensors", files[3:]),
    ):
        found = brought(files, model=model, lora=LoRA(rank=4, assistant_path=path))
        assert found["lora.assistant_path"] == ("some/adapter", expected)


def test_a_model_comes_with_its_scheduler_where_another_pipeline_encodes() -> None:
    found = brought(PIPELINE, model=Model(name="flux", path="some/turbo"), text_encoder=TextEncoder(path="some/base"))
    assert found["model.path"][1] == [name for name in PIPELINE if name.startswith(("model_i", "sched", "transf"))]


def test_a_single_text_encoder_brings_its_weights_once_and_its_tokenizer() -> None:
    """The root of google/flan-t5-base, with a folder of another format."""
    good = ["config.json", "model.safetensors", "special_tokens_map.json", "spiece.model", "tokenizer.json"]
    good.append("tokenizer_config.json")
    other = ["flax_model.msgpack", "pytorch_model.bin", "tf_model.h5", "README.md", "onnx/model.safetensors"]
    found = brought([*good, *other], text_encoder=TextEncoder(path="some/t5"), dataset=Dataset(dataset_name="captions"))
    assert sorted(found["text_encoder.path"][1]) == good
