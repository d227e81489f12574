# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Text encoders other than a pipeline's: those of transformers, and wordllama, against their own code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

import tiny_pipelines
import tiny_runs
import zoo as zoo_of_runs
from refusals import refused

from torchditan.config.loader import load_config
from torchditan.extras.captions.encode import find_text_encoder
from torchditan.run.reading import read_config

if TYPE_CHECKING:
    from tests.conftest import Outcome, RunScript
    from tests.zoo import Zoo

CAPTIONS = ["a red ball", "", "ball", "a very long caption about a red ball and a blue ball"]
CPU = torch.device("cpu")


def whole_t5() -> tuple[Any, Any, Callable[[Any], Any]]:
    """A T5 with its decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0)).eval()
    return model, tiny_pipelines.t5_tokenizer(), lambda model: model.encoder


def whole_clip() -> tuple[Any, Any, Callable[[Any], Any]]:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 54, "max_position_embeddings": 77, "bos_token_id": 0, "eos_token_id": 1}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={**sizes, "image_size": 32, "patch_size": 16})).eval()
    return model, tiny_pipelines.clip_tokenizer(), lambda model: model.text_model


def qwen3() -> tuple[Any, Any, Callable[[Any], Any]]:
    """A decoder: a token sees those before it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=30, num_key_value_heads=1, head_dim=8, **sizes)
    return Qwen3ForCausalLM(config).eval(), tiny_pipelines.t5_tokenizer(), lambda model: model.model


def t5gemma() -> tuple[Any, Any, Callable[[Any], Any]]:
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration, T5GemmaModuleConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    # Two objects: transformers marks the decoder's as causal, and 5.20 then masks an encoder that shares it.
    encoder, decoder = (
        T5GemmaModuleConfig(vocab_size=30, num_key_value_heads=1, head_dim=8, **sizes) for _ in range(2)
    )
    model = T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=30)).eval()
    return model, tiny_pipelines.t5_tokenizer(), lambda model: model.model.encoder


ENCODERS = [whole_t5, whole_clip, qwen3, t5gemma]


def encode(captions: list[str], *flags: str, memory: Path) -> dict[str, torch.Tensor]:
    config = load_config(["--text_encoder.dtype=float32", *flags])
    with torch.no_grad():
        return find_text_encoder(config, memory=memory).open(CPU)(captions)


@pytest.mark.parametrize("kind", ENCODERS, ids=lambda kind: kind.__name__)
def test_an_encoder_of_transformers_gives_its_last_hidden_states(
    kind: Callable[[], tuple[Any, Any, Callable[[Any], Any]]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, tokenizer, encoder_of = kind()
    model.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    path = f"--text_encoder.path={tmp_path / 'encoder'}"
    found = encode(CAPTIONS, path, "--text_encoder.max_length=20", memory=tmp_path)
    embeds, mask = found["prompt_embeds"], found["prompt_attention_mask"]
    assert embeds.shape == (4, 20, 16) and mask.shape == (4, 20) and mask.dtype == torch.bool
    assert mask[:, 0].all() and mask[3].all() and not mask[0].all()
    for caption, row, real in zip(CAPTIONS, embeds, mask, strict=True):  # alone, without padding
        ids = tokenizer(caption, truncation=True, max_length=20, return_tensors="pt")["input_ids"]
        if ids.numel():
            expected = encoder_of(model)(input_ids=ids).last_hidden_state[0]
            assert int(real.sum()) == len(expected)
            torch.testing.assert_close(row[: len(expected)], expected.detach(), atol=1e-5, rtol=1e-5)


def test_an_empty_caption_without_tokens_and_a_tokenizer_without_limits(tmp_path: Path) -> None:
    """Qwen's tokenizers read nothing in the empty caption. Attention to nothing would be NaN."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "ball": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    assert tokenizer("")["input_ids"] == []
    torch.manual_seed(0)
    for name, model in (("qwen", qwen3()[0]), ("clip", tiny_pipelines.clip(16, projects=False))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    found = encode(["", "ball"], f"--text_encoder.path={tmp_path / 'qwen'}", memory=tmp_path)
    assert found["prompt_embeds"].shape == (2, 128, 16) and found["prompt_embeds"].isfinite().all()
    assert found["prompt_attention_mask"].sum(1).tolist() == [1, 1]
    clip = f"--text_encoder.path={tmp_path / 'clip'}"
    assert encode(["ball"], clip, memory=tmp_path)["prompt_embeds"].shape == (1, 77, 16)  # its positions
    with refused("text_encoder.max_length = 78: must be at most 77"):
        encode(["ball"], clip, "--text_encoder.max_length=78", memory=tmp_path)


def test_wordllama_gives_the_rows_of_its_table(tmp_path: Path) -> None:
    wordllama = pytest.importorskip("wordllama")
    folder = Path(wordllama.__file__).parent / "tokenizers"
    shutil.copytree(folder, tmp_path / "tokenizers")  # version 0.4 looks for it in a folder "tokenizer"
    their = wordllama.WordLlama.load(dim=256, cache_dir=tmp_path, disable_download=True)
    found = encode(CAPTIONS, memory=tmp_path)  # without a path, wordllama is the default
    embeds, mask = found["prompt_embeds"], found["prompt_attention_mask"]
    assert embeds.shape == (4, 64, 256)
    for caption, row, real in zip(CAPTIONS, embeds, mask, strict=True):
        ids = next(encoded.ids for encoded in their.tokenize([caption])) if caption else []
        length = int(real.sum())
        assert length == 1 + len(ids)  # the first token marks the beginning
        expected = torch.from_numpy(their.embedding[ids]).float() if ids else torch.zeros(0, 256)
        torch.testing.assert_close(row[1:length], expected, atol=0, rtol=0)
        assert not row[length:].any()


def test_other_words_lengths_and_encoders_have_other_identities(tmp_path: Path) -> None:
    pytest.importorskip("wordllama")

    def identity(*flags: str) -> str:
        return find_text_encoder(load_config(list(flags)), memory=tmp_path).identity

    torch.manual_seed(0)
    for name in ("a", "b"):
        tiny_pipelines.t5(16).save_pretrained(tmp_path / name)
        tiny_pipelines.t5_tokenizer().save_pretrained(tmp_path / name)
    paths = [[f"--text_encoder.path={tmp_path / name}"] for name in ("a", "b")]
    short, exact = "--text_encoder.max_length=8", "--text_encoder.dtype=float32"
    identities = [identity(), identity(short), identity(exact), *(identity(*path) for path in paths)]
    identities += [identity(*paths[0], short), identity(*paths[0], exact)]
    assert len(set(identities)) == len(identities)
    assert identity(*paths[0]) == identity(*paths[0]) == identity(*paths[0], "--text_encoder.name=transformers")


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*flags: str) -> None:
        find_text_encoder(load_config(list(flags)), memory=tmp_path)

    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "no_such_model"}')
    path = "--text_encoder.path="
    with refused("text_encoder.path = none: must be given"):
        find("--text_encoder.name=transformers")
    with refused(f'text_encoder.path = "{tmp_path / "empty"}": is neither', "pipeline", "transformers"):
        find(f"{path}{tmp_path / 'empty'}")
    with refused('text_encoder.name = "transformers": flux reads the embeddings of its own pipeline'):
        find("--text_encoder.name=transformers", "--model.name=flux", "--model.flavor=debugmodel")
    with refused("text_encoder.path", "cannot be opened"):
        encode(["a"], f"{path}{tmp_path / 'other'}", memory=tmp_path)
    tiny_pipelines.clip(16, projects=False).save_pretrained(tmp_path / "clip")
    tiny_pipelines.clip_tokenizer().save_pretrained(tmp_path / "clip")
    weights = load_file(tmp_path / "clip/model.safetensors")
    del weights[next(name for name in weights if "layers.1" in name)]
    save_file(weights, tmp_path / "clip/model.safetensors", metadata={"format": "pt"})
    with refused("text_encoder.path", "lacks 1 weights"):
        encode(["a"], f"{path}{tmp_path / 'clip'}", memory=tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with refused('text_encoder.name = "wordllama": needs wordllama'):
        find()


def test_a_run_keeps_its_encoder_and_its_captions(zoo: Zoo, tmp_path: Path, run_script: RunScript) -> None:
    """A resume finds them in the cache; one with another encoder or another caption is refused."""
    place = shutil.copytree(zoo("captions").parent, tmp_path / "captions")
    flags = [flag.format(inputs=place / "inputs") for flag in zoo_of_runs.JOBS["captions"]]
    torch.manual_seed(0)
    tiny_pipelines.t5(16).save_pretrained(tmp_path / "t5")
    tiny_pipelines.t5_tokenizer().save_pretrained(tmp_path / "t5")
    other = ["--text_encoder.name=auto", f"--text_encoder.path={tmp_path / 't5'}", "--model.text_width=none"]

    def train(run: Path, *more: str) -> Outcome:
        found = tiny_runs.job(run, *tiny_runs.KEEP, *flags, f"--cache.folder={place / 'cache'}", *more)
        return run_script("torchditan", "train", *found)

    resumed = train(place / "run", "--training.steps=7")
    assert resumed.code == 0 and "resumed at step 6" in resumed.out, resumed.err
    assert "encoding captions" not in resumed.out
    (place / "inputs/00.txt").write_text("a crimson square")
    refusal = train(place / "run", "--training.steps=8")
    assert refusal.code == 2 and "dataset.fingerprint" in refusal.err, refusal.err
    refusal = train(place / "run", "--training.steps=8", *other)
    assert refusal.code == 2 and len(refusal.err.splitlines()) == 1, refusal.err
    of_t5 = train(tmp_path / "of_t5", "--training.steps=1", *other)
    assert of_t5.code == 0, of_t5.err
    widths = [read_config(run)["config"]["model"]["text_width"] for run in (place / "run", tmp_path / "of_t5")]
    assert widths == [256, 16]
