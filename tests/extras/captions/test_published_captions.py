# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`encode_captions` through `encode_prompt` of each pipeline, with fake text encoders."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny_pipelines
import torch
from debugmodels import spec_of

from torchditan.extras.captions.encode import PipelineEncoders
from torchditan.extras.published.families import family

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

CAPTIONS = ["a red fox", "", "two words"]
TEXTS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")


def pipeline_of(name: str, *encoders: str, **parts: Any) -> Any:
    """The real pipeline, as captions are encoded with: without transformer and autoencoder."""
    cls = family(name)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    empty = dict.fromkeys(("vae", cls.subfolder, *encoders))
    return getattr(diffusers, cls.pipeline_class)(**empty, scheduler=scheduler, **parts)


def tokens_of(captions: list[str], length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each letter and one at the end; what a token is depends on its caption alone."""
    mask = torch.stack([torch.arange(length) <= len(caption) for caption in captions])
    values = torch.tensor([float(sum(caption.encode())) for caption in captions])
    return values[:, None, None] + torch.arange(width) + mask[..., None], mask.long()


def encoded(name: str, pipeline: Any, captions: list[str], *, length: int = 8) -> dict[str, torch.Tensor]:
    """What is encoded fits what the model takes."""
    tensors = spec_of(name).conditioning.tensors
    found = family(name).encode_captions(pipeline, captions, max_length=length)
    assert {key: (value.shape[1:], value.dtype) for key, value in found.items()} == dict(tensors)
    assert {len(value) for value in found.values()} == {len(captions)}
    return found


def test_mochi_empties_empty_captions_only():
    pipeline = pipeline_of("mochi", *TEXTS[:2], force_zeros_for_empty_prompt=True)

    def encode(prompt: list[str], max_sequence_length: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, mask = tokens_of(prompt, max_sequence_length, 32)
        return tokens, (mask * (prompt[-1] != "")).bool()  # as its pipeline does it, to all of a batch

    pipeline._get_t5_prompt_embeds = encode
    for captions in (CAPTIONS, CAPTIONS[::-1], ["a", ""], ["", "a"]):
        found = encoded("mochi", pipeline, captions)
        assert found["prompt_attention_mask"].any(1).tolist() == [caption != "" for caption in captions]
        assert torch.equal(found["prompt_embeds"], tokens_of(captions, 8, 32)[0])


def test_hunyuan_video():
    pipeline = pipeline_of("hunyuan_video", *TEXTS)
    pipeline._get_llama_prompt_embeds = lambda prompt, *_, max_sequence_length, **__: tokens_of(
        prompt, max_sequence_length, 32
    )
    pipeline._get_clip_prompt_embeds = lambda prompt, *_, **__: tokens_of(prompt, 1, 16)[0][:, 0]
    found = encoded("hunyuan_video", pipeline, CAPTIONS)
    assert found["prompt_attention_mask"].sum(1).tolist() == [8, 1, 8]
    assert torch.equal(found["pooled_prompt_embeds"], tokens_of(CAPTIONS, 1, 16)[0][:, 0])


@pytest.mark.parametrize(("captions", "lengths"), [(["a", "", "bcd"], [2, 1, 4]), (["ab", "cd"], [3, 3])])
def test_qwen_image_pads_captions_to_one_length(captions, lengths):
    pipeline = pipeline_of("qwen_image", *TEXTS[:2])

    def encode(prompt: list[str], *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens_of(prompt, max(map(len, prompt)) + 1, 32)  # no longer than the longest

    pipeline._get_qwen_prompt_embeds = encode
    found = encoded("qwen_image", pipeline, captions)
    assert found["prompt_embeds_mask"].sum(1).tolist() == lengths
    assert torch.equal(found["prompt_embeds"][:, : max(lengths)], encode(captions)[0])
    assert not found["prompt_embeds"][:, max(lengths) :].any()
    cut = encoded("qwen_image", pipeline, ["a very long caption"])
    assert cut["prompt_embeds_mask"].all()


def test_z_image_pads_captions_with_zeros():
    pipeline, captions = tiny_pipelines.z_image(), ["abc", "", "a long caption"]
    found = encoded("z_image", pipeline, captions)
    mask = found["prompt_embeds_mask"]
    assert mask.sum(1).tolist() == [5, 2, 8]  # the template adds two tokens
    expected, _ = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False, max_sequence_length=8)
    for row, tokens in enumerate(expected):
        assert torch.equal(found["prompt_embeds"][row, mask[row]], tokens)
    assert not found["prompt_embeds"][~mask].any()


def test_sdxl_has_zeros_for_the_empty_caption_where_its_pipeline_has():
    for zeros in (True, False):
        pipeline = tiny_pipelines.sdxl()
        pipeline.register_to_config(force_zeros_for_empty_prompt=zeros)
        for value in encoded("sdxl", pipeline, CAPTIONS).values():
            assert value.flatten(1).any(1).tolist() == [True, not zeros, True]


def test_embeddings_of_another_empty_caption_are_not_used(tmp_path):
    """The identity is that of earlier versions where the empty caption is as published."""
    options = {"pipeline_class": "StableDiffusionXLPipeline", "max_length": 77, "dtype": torch.float32}
    found = []
    for index in ({}, {"force_zeros_for_empty_prompt": True}, {"force_zeros_for_empty_prompt": False}):
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        found.append(PipelineEncoders(family("sdxl"), tmp_path, memory=tmp_path / "memory", **options).identity)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("is_dev", [False, True])
def test_flux2_attends_the_padding_of_its_captions(is_dev):
    """Mistral 3 is replaced, and Qwen 3 is tiny."""
    pipeline = tiny_pipelines.flux2()
    if is_dev:
        parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
        pipeline = diffusers.Flux2Pipeline(**parts)
        pipeline._get_mistral_3_small_prompt_embeds = lambda prompt, max_sequence_length, **_: tokens_of(
            prompt, max_sequence_length, 48
        )[0]
    found = encoded("flux2", pipeline, CAPTIONS)["prompt_embeds"]
    assert found[1].any(1).all() and not torch.equal(found[0], found[2])
