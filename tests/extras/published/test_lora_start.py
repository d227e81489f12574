# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A LoRA run that starts from another one computes at first what the other computes, wherever it is stored."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import assert_refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_whole_path import assert_same, drawn, job, opened

from torchditan.config.trajectory import INITIAL_WEIGHTS, differences
from torchditan.extras.weights.initial import identity_of
from torchditan.run.reading import read_metrics

pytest.importorskip("diffusers")
pytest.importorskip("peft")

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript

FAMILIES = ["flux", "sd3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sdxl", "wan"))]
AS_IT_IS = ["--training.steps=1", "--optimizer.lr=0", "--training.mixed_precision_param=float32"]
"""A run that ends with its initial weights."""


def update(run: Path) -> dict[str, torch.Tensor]:
    """Layer -> what the LoRA of a run adds to its weight."""
    trained, found = opened(run), {}
    for name, module in trained.model.named_modules():
        if hasattr(module, "lora_A"):
            down, up = module.lora_A.default.weight, module.lora_B.default.weight
            found[name] = module.scaling["default"] * (up.flatten(1) @ down.flatten(1))
    return found


def change(path: Path, *, to: Path, keep: Any = lambda name: True) -> Path:
    """A copy of a LoRA file with some of its tensors."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({name: tensor for name, tensor in load_file(path).items() if keep(name)}, to, metadata)
    return to


@pytest.mark.parametrize("model", FAMILIES)
def test_a_run_starts_from_a_run_or_a_file_whatever_its_alpha(
    model: str, run_script: RunScript, tmp_path: Path
) -> None:
    def train(name: str, *flags: str) -> str:
        outcome = run_script("train.py", *job(model, tmp_path / name, "--lora.rank=2", *flags))
        assert outcome.code == 0, outcome.err
        return outcome.out

    train("first", "--lora.alpha=4", "--ema.decay=0.5")
    samples, weights = drawn(opened(tmp_path / "first")), opened(tmp_path / "first").model.state_dict()
    sources = {"run": tmp_path / "first", "checkpoint": tmp_path / "first/checkpoint/step-00000002"}
    for format in ("diffusers", "kohya") if model in ("flux", "sd3") else ("diffusers",):
        sources[format] = tmp_path / f"{format}/{model}.safetensors"
        arguments = [tmp_path / "first", sources[format], f"--format={format}"]
        assert run_script("torchditan", "export_lora", *arguments).code == 0
    sources["folder"] = sources["diffusers"].parent
    for name, source in sources.items():
        line = train(name, *AS_IT_IS, "--lora.alpha=1", f"--checkpoint.initial_load_path={source}")
        assert f"started from the weights of {source}" in line and "start at zero" not in line
        assert torch.allclose(drawn(opened(tmp_path / name)), samples, atol=1e-5), name
    train("same", *AS_IT_IS, "--lora.alpha=4", f"--checkpoint.initial_load_path={tmp_path / 'first'}")
    assert_same(opened(tmp_path / "same").model.state_dict(), weights)  # the averaged ones, to the bit
    train("other", *AS_IT_IS)
    assert not torch.allclose(drawn(opened(tmp_path / "other")), samples, atol=1e-4)


def test_a_lora_over_int8_starts_and_resumes_without_its_source(run_script: RunScript, tmp_path: Path) -> None:
    base = ["--lora.rank=2", "--quantize.base=int8"]
    assert run_script("train.py", *job("flux", tmp_path / "first", *base, "--ema.enable=false")).code == 0
    # Without checkpoints the run keeps the weights of its last step alone, and its configuration with alpha.
    kept = [*base, "--lora.alpha=6", "--checkpoint.enable_checkpoint=false", "--checkpoint.save_final"]
    start = [f"--checkpoint.initial_load_path={tmp_path / 'first'}"]
    assert run_script("train.py", *job("flux", tmp_path / "kept", *kept, *start)).code == 0
    flags = [*base, f"--checkpoint.initial_load_path={tmp_path / 'kept'}"]
    begun = run_script("train.py", *job("flux", tmp_path / "more", *flags, *AS_IT_IS))
    assert begun.code == 0 and "started from" in begun.out, begun.err
    expected = update(tmp_path / "kept")
    for name, found in update(tmp_path / "more").items():
        assert found.abs().max() > 0 and torch.allclose(found, expected[name], atol=1e-6)

    shutil.rmtree(tmp_path / "kept")
    again = run_script("train.py", *job("flux", tmp_path / "more", *flags, "--optimizer.lr=0"))
    assert again.code == 0 and "resumed at step 1" in again.out and "started from" not in again.out, again.err
    other = run_script("train.py", *job("flux", tmp_path / "more", *base, "--optimizer.lr=0"))
    assert other.code == 2 and "checkpoint.initial_load_path" in other.err


def test_a_file_with_fewer_layers_leaves_the_others_at_zero(run_script: RunScript, tmp_path: Path) -> None:
    assert run_script("train.py", *job("sd3", tmp_path / "first", "--lora.rank=2")).code == 0
    path = tmp_path / "all.safetensors"
    assert run_script("torchditan", "export_lora", tmp_path / "first", path).code == 0
    # A run continues where its LoRA lies elsewhere, or was exported since: it is known by its matrices.
    known, file = identity_of(str(tmp_path / "first")), identity_of(str(path))
    assert known is not None and known == file and identity_of(str(tmp_path / "gone")) is None
    key, there = "checkpoint.initial_load_path", {"checkpoint.initial_load_path": "a", INITIAL_WEIGHTS: known}
    assert differences(there, {key: "b", INITIAL_WEIGHTS: file}) == []
    assert len(differences(there, {key: "b", INITIAL_WEIGHTS: None})) == 1
    part = change(path, to=tmp_path / "part.safetensors", keep=lambda name: ".to_q." in name)
    flags = ["--lora.rank=2", *AS_IT_IS, f"--checkpoint.initial_load_path={part}"]
    outcome = run_script("train.py", *job("sd3", tmp_path / "more", *flags))
    found, expected = update(tmp_path / "more"), update(tmp_path / "first")
    others = [name for name in found if not name.endswith(".to_q")]
    assert f"{len(others)} of {len(found)} layers" in outcome.out
    assert all(not found[name].any() for name in others)
    for name in found.keys() - others:
        assert found[name].any() and torch.allclose(found[name], expected[name], atol=1e-7)


def test_a_file_with_more_layers_names_the_option_that_adds_them(run_script: RunScript, tmp_path: Path) -> None:
    more = ["--lora.target_modules", "to_q", "ff.net.2", "pos_embed.proj", "norm1.linear"]
    assert run_script("train.py", *job("sd3", tmp_path / "first", "--lora.rank=2", *more)).code == 0
    path = tmp_path / "more.safetensors"
    assert run_script("torchditan", "export_lora", tmp_path / "first", path, "--format=kohya").code == 0
    start = ["--lora.rank=2", *AS_IT_IS, f"--checkpoint.initial_load_path={path}"]
    outcome = run_script("train.py", *job("sd3", tmp_path / "second", *start))
    assert outcome.code == 2
    assert_refused(outcome.err, f'checkpoint.initial_load_path = "{path}"', ["--lora.target_modules", "ff.net.2"])
    option = shlex.split(re.search("--lora.target_modules .*", outcome.err).group())
    outcome = run_script("train.py", *job("sd3", tmp_path / "third", *start, *option))
    assert outcome.code == 0, outcome.err
    found, expected = update(tmp_path / "third"), update(tmp_path / "first")
    assert found.keys() > expected.keys()
    for name, value in found.items():
        assert torch.allclose(value, expected.get(name, torch.zeros(1)), atol=1e-6), name


REFUSED = [
    ("lora", ["--lora.rank=3"], ["rank 2", "lora.rank", "--lora.rank 2"]),
    ("lora_kohya.safetensors", ["--lora.rank=1"], ["rank 2", "lora.rank", "--lora.rank 2"]),
    ("mixed.safetensors", ["--lora.rank=2"], ["ranks", "lora.rank"]),
    ("lora", ["--lora.rank=2", "--model.overrides", "num_attention_heads=4"], ["another model"]),
    ("flux", ["--lora.rank=2"], ["another model", "model.name", "flux", "sd3"]),
    ("flux_diffusers.safetensors", ["--lora.rank=2"], ["another model", "flux", "sd3"]),
    ("flux_kohya.safetensors", ["--lora.rank=2"], ["another model"]),
    ("lora", [], ["--lora.rank"]),
    ("all", ["--lora.rank=2"], ["--model.path"]),
]


def test_what_does_not_fit_is_refused_in_one_line(run_script: RunScript, tmp_path: Path) -> None:
    assert run_script("train.py", *job("sd3", tmp_path / "all")).code == 0
    for name, model in (("lora", "sd3"), ("flux", "flux")):
        assert run_script("train.py", *job(model, tmp_path / name, "--lora.rank=2")).code == 0
        for format in ("diffusers", "kohya"):
            file = tmp_path / f"{name}_{format}.safetensors"
            assert run_script("torchditan", "export_lora", tmp_path / name, file, f"--format={format}").code == 0
    layer = "transformer.transformer_blocks.0.attn.to_q"
    tensors = load_file(tmp_path / "lora_diffusers.safetensors")
    for part in ("lora_A", "lora_B"):
        tensors[f"{layer}.{part}.weight"] = torch.ones({"lora_A": (3, 64), "lora_B": (64, 3)}[part])
    save_file(tensors, tmp_path / "mixed.safetensors")
    for source, flags, mentions in REFUSED:
        flags = [*AS_IT_IS, f"--checkpoint.initial_load_path={tmp_path / source}", *flags]
        outcome = run_script("train.py", *job("sd3", tmp_path / "run", *flags))
        assert outcome.code == 2, source
        assert_refused(outcome.err, f'checkpoint.initial_load_path = "{tmp_path / source}"', mentions)


@pytest.mark.slow
def test_two_ranks_train_a_lora_over_int8_as_one_and_start_from_the_same_weights(
    run_script: RunScript, run_distributed: RunDistributed, tmp_path: Path
) -> None:
    lora = ["--lora.rank=3", "--quantize.base=int8", "--metrics.log_freq=1"]
    shards = [*lora, "--training.data_parallel_shard_degree=2", "--training.batch_size=1"]
    start = [*AS_IT_IS, f"--checkpoint.initial_load_path={tmp_path / 'first'}"]
    jobs = [job("sd3", tmp_path / "first", *shards), job("sd3", tmp_path / "second", *shards, *start)]
    result = run_distributed(
        ["tests/trainer/test_training.py", json.dumps([list(map(str, flags)) for flags in jobs])], 2
    )
    assert result.returncode == 0, result.stderr
    assert_same(opened(tmp_path / "second").model.state_dict(), opened(tmp_path / "first").model.state_dict())
    assert run_script("train.py", *job("sd3", tmp_path / "alone", *lora)).code == 0
    curves = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("first", "alone")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5) and len(curves[0]) == 2
