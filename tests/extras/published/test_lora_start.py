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
from refusals import assert_refused, refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_whole_path import assert_same, job, opened

from torchditan.config.loader import from_dict
from torchditan.config.trajectory import INITIAL_WEIGHTS, differences
from torchditan.errors import ConfigError
from torchditan.extras.weights.initial import identity_of, load_initial_weights
from torchditan.extras.weights.lora_export import export_run
from torchditan.extras.weights.trained_model import stored_spec
from torchditan.run.reading import read_config, read_metrics

pytest.importorskip("diffusers")
pytest.importorskip("peft")

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript
    from tests.zoo import Zoo

AS_IT_IS = ["--training.steps=1", "--optimizer.lr=0", "--training.mixed_precision_param=float32"]
"""A run that ends with its initial weights."""


@pytest.fixture(scope="module")
def first(zoo: Zoo) -> Path:
    """A LoRA of FLUX of rank 2 and alpha 4, which tests only read."""
    return zoo("flux lora")


def started(first: Path, source: Path, **options: Any) -> tuple[Any, str]:
    """A model like that of `first` with other options that starts from a source, and what the log says."""
    config = from_dict(read_config(first)["config"]).replace(options)
    model: Any = stored_spec(config).build().to_empty(device="cpu")
    model.init_weights(1)
    said = load_initial_weights(model, str(source), config=config)
    return model.requires_grad_(False), said


def prediction(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    cond = {"prompt_embeds": (2, 8, 32), "pooled_prompt_embeds": (2, 16)}
    given = {name: torch.randn(shape, generator=generator) for name, shape in cond.items()}
    x_t, t = torch.randn(2, 16, 8, 8, generator=generator), torch.tensor([0.25, 0.5])
    return model(x_t, t, {**given, "guidance": torch.full((2,), 3.5)})


def update(model: Any) -> dict[str, torch.Tensor]:
    """Layer -> what the LoRA of a model adds to its weight."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            down, up = module.lora_A.default.weight, module.lora_B.default.weight
            found[name] = module.scaling["default"] * (up.flatten(1) @ down.flatten(1))
    return found


def exported(first: Path, path: Path, format: Any = "diffusers") -> Path:
    export_run(first, path, format=format)
    return path


def test_a_run_starts_from_a_run_or_a_file_whatever_its_alpha(first: Path, tmp_path: Path) -> None:
    source = opened(first).model
    expected = prediction(source)
    sources = {
        "run": first,
        "checkpoint": first / "checkpoint/step-00000006",
        "file": exported(first, tmp_path / "diffusers/lora.safetensors"),
        "folder": tmp_path / "diffusers",
        "kohya": exported(first, tmp_path / "kohya.safetensors", "kohya"),
    }
    for name, path in sources.items():
        model, said = started(first, path, **{"lora.alpha": 1.0})
        assert said.startswith(f"weights of {path}") and "start at zero" not in said
        assert torch.allclose(prediction(model), expected, atol=1e-5), name
    same, _ = started(first, first)
    assert_same(same.state_dict(), source.state_dict())  # to the bit
    earlier, _ = started(first, first / "checkpoint/step-00000003")
    assert not torch.allclose(prediction(earlier), expected, atol=1e-4)


def test_a_lora_over_int8_starts_and_resumes_without_its_source(
    first: Path, run_script: RunScript, tmp_path: Path
) -> None:
    source = shutil.copytree(first, tmp_path / "source")
    base = ["--lora.rank=2", "--quantize.base=int8"]
    flags = [*base, f"--checkpoint.initial_load_path={source}"]
    begun = run_script("train.py", *job("flux", tmp_path / "more", *flags, *AS_IT_IS))
    assert begun.code == 0 and "started from" in begun.out, begun.err
    expected = update(opened(first).model)
    for name, found in update(opened(tmp_path / "more").model).items():
        assert found.abs().max() > 0 and torch.allclose(found, expected[name], atol=1e-6)

    shutil.rmtree(source)
    again = run_script("train.py", *job("flux", tmp_path / "more", *flags, "--optimizer.lr=0"))
    assert again.code == 0 and "resumed at step 1" in again.out and "started from" not in again.out, again.err
    other = run_script("train.py", *job("flux", tmp_path / "more", *base, "--optimizer.lr=0"))
    assert other.code == 2 and "checkpoint.initial_load_path" in other.err


def test_a_file_with_fewer_layers_leaves_the_others_at_zero(first: Path, tmp_path: Path) -> None:
    path = exported(first, tmp_path / "all.safetensors")
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    part = tmp_path / "part.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if ".to_q." in name}, part, metadata)
    model, said = started(first, part)
    found, expected = update(model), update(opened(first).model)
    others = [name for name in found if not name.endswith(".to_q")]
    assert f"{len(others)} of {len(found)} layers" in said
    assert all(not found[name].any() for name in others)
    for name in found.keys() - others:
        assert found[name].any() and torch.allclose(found[name], expected[name], atol=1e-7)


@pytest.mark.parametrize(
    ("stem", "down", "up", "alpha"),
    [
        ("diffusion_model.double_blocks.1.img_attn.qkv", "lora_A", "lora_B", None),  # ai-toolkit
        ("double_blocks.1.img_attn.qkv", "lora_A", "lora_B", None),  # the publisher
        ("lora_unet_double_blocks_1_img_attn_qkv", "lora_down", "lora_up", 6.0),  # kohya
    ],
)
def test_a_fused_layer_of_another_tool_is_split(
    stem: str, down: str, up: str, alpha: float | None, first: Path, tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 64, generator=draw), torch.randn(192, 2, generator=draw)
    tensors = {f"{stem}.{down}.weight": a, f"{stem}.{up}.weight": b}
    tensors |= {} if alpha is None else {f"{stem}.alpha": torch.tensor(alpha)}
    save_file(tensors, tmp_path / "other.safetensors")
    model, said = started(first, tmp_path / "other.safetensors")
    assert "start at zero" in said
    found = update(model)
    expected = (alpha or 2) / 2 * (b @ a)
    for name, rows in zip("qkv", expected.split(64), strict=True):
        assert torch.allclose(found.pop(f"transformer.transformer_blocks.1.attn.to_{name}"), rows, atol=1e-5)
    assert not any(value.any() for value in found.values())


def edited(first: Path, run: Path, section: str, **options: Any) -> Path:
    """A copy of the run whose configuration has other options."""
    content = json.loads((shutil.copytree(first, run) / "config.json").read_text())
    content["config"][section] |= options
    (run / "config.json").write_text(json.dumps(content))
    return run


def test_a_run_continues_wherever_its_first_lora_lies(first: Path, tmp_path: Path) -> None:
    """It is known by its matrices, also where it was exported since."""
    run = edited(first, tmp_path / "moved", "lora", alpha=2)
    known, file = identity_of(str(run)), identity_of(str(exported(run, tmp_path / "lora.safetensors")))
    assert known is not None and known == file and identity_of(str(tmp_path / "gone")) is None
    key, there = "checkpoint.initial_load_path", {"checkpoint.initial_load_path": "a", INITIAL_WEIGHTS: known}
    assert differences(there, {key: "b", INITIAL_WEIGHTS: file}) == []
    assert len(differences(there, {key: "b", INITIAL_WEIGHTS: None})) == 1


def test_a_file_with_more_layers_names_the_option_that_adds_them(first: Path, tmp_path: Path) -> None:
    path = exported(first, tmp_path / "more.safetensors", "kohya")
    only = {"lora.target_modules": ["norm.linear", "attn.to_q"]}
    with pytest.raises(ConfigError) as caught:
        started(first, path, **only)
    assert_refused(str(caught.value), f'checkpoint.initial_load_path = "{path}"', ["attn.to_k"])
    suggestion = re.search("--lora.target_modules (.*)", str(caught.value))
    assert suggestion is not None
    model, _ = started(first, path, **{"lora.target_modules": shlex.split(suggestion[1])})
    found, expected = update(model), update(opened(first).model)
    assert found.keys() > expected.keys()
    for name, value in found.items():
        assert torch.allclose(value, expected.get(name, torch.zeros(1)), atol=1e-6), name


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("lora", {"lora.rank": 3}, ["rank 2", "lora.rank", "--lora.rank 2"]),
    ("kohya.safetensors", {"lora.rank": 1}, ["rank 2", "lora.rank", "--lora.rank 2"]),
    ("mixed.safetensors", {}, ["ranks", "lora.rank"]),
    ("lora", {"model.path": None, "model.overrides": ["num_attention_heads=4"]}, ["another model"]),
    ("of sd3", {}, ["another model", "model.name", "flux", "sd3"]),
    ("of_sd3.safetensors", {}, ["another model", "flux", "sd3"]),
    ("kohya_of_sd3.safetensors", {}, ["another model"]),
    ("lora", {"lora.rank": 0, "lora.alpha": None}, ["--lora.rank"]),
    ("digits", {}, ["--model.path"]),
]


def test_what_does_not_fit_is_refused_in_one_line(first: Path, zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "lora").symlink_to(first)
    (tmp_path / "digits").symlink_to(zoo("digits"))
    exported(first, tmp_path / "kohya.safetensors", "kohya")
    edited(first, tmp_path / "of sd3", "model", name="sd3")
    tensors = load_file(exported(first, tmp_path / "diffusers.safetensors"))
    save_file(tensors, tmp_path / "of_sd3.safetensors", {"model": "sd3"})
    layer = "transformer.transformer_blocks.0.attn.to_q"
    for part in ("lora_A", "lora_B"):
        tensors[f"{layer}.{part}.weight"] = torch.ones({"lora_A": (3, 64), "lora_B": (64, 3)}[part])
    save_file(tensors, tmp_path / "mixed.safetensors")
    layer = "lora_unet_joint_blocks_0_x_block_attn2_proj"
    sd3 = {f"{layer}.lora_down.weight": torch.ones(2, 64), f"{layer}.lora_up.weight": torch.ones(64, 2)}
    save_file(sd3, tmp_path / "kohya_of_sd3.safetensors")
    for source, options, mentions in REFUSED:
        with refused(f'checkpoint.initial_load_path = "{tmp_path / source}"', *mentions):
            started(first, tmp_path / source, **options)


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
