# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Decoupled heads: their formulas on official names, sizes, one curve in every mode, resume, and refusals.

Exact gradients of split tokens, forward derivatives, bits of one process and planned memory have rows of DDT in the
tests of those parts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from own_ddt import DDT, DIT_DH, Decoupled, forward, random_weights
from refusals import refused
from tiny_runs import KEEP, assert_same_state, job

import torchditan
from torchditan.checkpoint.weights import Weights
from torchditan.config.loader import from_dict, load_config
from torchditan.config.options import Model
from torchditan.diffusion.timesteps import Timesteps
from torchditan.extras.weights.trained_model import stored_spec
from torchditan.models import ModelSpec, build_model_spec
from torchditan.models.flops import count_model_flops
from torchditan.registry import FORMATS, registered
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript, Train

HEAD = "ddt head_depth=2 head_width=96 head_heads=4"
WIDE = "ddt head_depth=2 head_width=2048 head_heads=16"


def spec_of(name: str, *, sample_shape: tuple[int, int, int] = (4, 8, 8), **options: Any) -> ModelSpec:
    model = Model(**{"name": name, "flavor": "debugmodel", **options})
    return build_model_spec(model, sample_shape=sample_shape, num_classes=1000)


@pytest.mark.parametrize(
    ("format", "model", "given"),
    [("ddt", DDT, {"sample_size": (8, 8), "head_depth": 2}), ("dit_dh", DIT_DH, {})],
    ids=["ddt", "dit_dh"],
)
def test_an_imported_model_computes_what_an_own_reading_computes(
    format: str, model: Decoupled, given: dict[str, Any]
) -> None:
    """In float64, but for the tables of RoPE and, in DiT-DH, the weights that reverse time, in float32."""
    weights = random_weights(model)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    converted: Weights = registered(FORMATS, format)(Weights.of(Path("a.pt"), weights), **given)
    config = from_dict(converted.config or {})
    ours = stored_spec(config).build()
    ours.load_state_dict(converted.tensors(), strict=True)
    t, y = torch.tensor([0.0, 0.031, 0.5, 0.777, 1.0], dtype=torch.float64), torch.tensor([0, 3, 9, 10, 5])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, model.channels, model.side, model.side, generator=generator, dtype=torch.float64)
    wide = {name: tensor.double() for name, tensor in weights.items()}
    theirs = forward(wide, model, x, t, y) if model.is_ddt else -forward(wide, model, x, 1 - t, y)
    difference = (ours.double()(x, t, {"class_label": y}) - theirs).abs().max()
    print(f"{format}: largest difference {difference:.1e} of {theirs.std():.2f}")  # shown by pytest -s
    assert theirs.std() > 0.3 and difference < 1e-6
    assert all(torch.equal(before[name], weights[name]) for name in before), "a converter changed the tensors it read"
    if not model.is_ddt:  # 50 points of a grid with shift sqrt(C H W / 4096) of noise levels
        sampling, even = config.diffusion, torch.linspace(1, 0, 50, dtype=torch.float64)
        shift = (model.channels * model.side**2 / 4096) ** 0.5
        grid = Timesteps("uniform").grid(config.sampling.num_steps, shift=sampling.timestep_shift)
        assert grid == pytest.approx((1 - shift * even / (1 + (shift - 1) * even)).tolist())


def test_sizes_and_flops_are_those_that_are_published() -> None:
    """DDT-XL/2 with 22 + 6 blocks, and DiT-DH-XL on latents of 768 x 16 x 16."""
    narrow = spec_of("ddt", sample_shape=(4, 32, 32), flavor="DiT-XL", overrides=["depth=22"])
    wide = spec_of(WIDE, sample_shape=(768, 16, 16), flavor="DiT-XL", patch_size=1)
    assert count_model_flops(narrow).forward / 2e9 == pytest.approx(131.5, rel=5e-4)
    assert count_model_flops(wide).forward / 2e9 == pytest.approx(161.7, rel=5e-4)
    with torch.device("meta"):
        model = wide.build()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(838.6, abs=0.05)


FLAGS = [
    f"--model.name={HEAD}",
    *("--model.timestep_frequencies=gaussian", "--model.timestep_scale=1", "--lr_scheduler.warmup_steps=0"),
    *("--optimizer.lr=1e-2", "--metrics.enable_sampling=true", "--metrics.sample_freq=6", "--sampling.num_steps=2"),
    *("--validation.freq=3", "--validation.num_images=8", *KEEP, "--checkpoint.interval=3"),
]
REPLICATE, FULL = "--training.data_parallel_replicate_degree", "--activation_checkpoint.mode=full"
NTH, OP = "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"
COMPILED = ["--training.compile", "--compile.backend=aot_eager"]
MODES = {
    "FSDP": [f"{REPLICATE}=1", "--training.batch_size=2", FULL],
    "context": ["--training.context_parallel_degree=2", "--training.batch_size=4", NTH],
}
SLOW_MODES = {
    "FSDP": [f"{REPLICATE}=1", "--training.batch_size=2", NTH, OP, *COMPILED],
    "DDP": [f"{REPLICATE}=2", *COMPILED, "--compile.scope=model"],
}


def assert_same_curve(run: Path, expected: Path) -> None:
    for record, reference in zip(read_metrics(run), read_metrics(expected), strict=True):
        for key in record.keys() & {"loss", "grad_norm", "validation_loss"}:
            assert record[key] == pytest.approx(reference[key], rel=1e-5), (run.name, record["step"], key)


def test_one_curve_in_every_mode_resumed_exported_and_drawn(
    tmp_path: Path, train: Train, run_script: RunScript, run_distributed: RunDistributed
) -> None:
    train("alone", *FLAGS)
    for copy in ("resumed", "resumed on two"):
        shutil.copytree(tmp_path / "alone", tmp_path / copy)
        shutil.rmtree(tmp_path / copy / "checkpoint/step-00000006")
    jobs = [job(tmp_path / name, *FLAGS, *mode) for name, mode in MODES.items()]
    jobs.append(job(tmp_path / "resumed on two", *FLAGS, f"{REPLICATE}=1"))
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], 2)
    assert result.returncode == 0, result.stderr
    for name in (*MODES, "resumed on two"):
        assert_same_curve(tmp_path / name, tmp_path / "alone")
    assert "resumed at step 3" in train("resumed", *FLAGS).out
    assert_same_state(tmp_path / "resumed", tmp_path / "alone", step=6)

    assert run_script("torchditan", "export", "alone", "weights.safetensors").code == 0
    assert run_script("torchditan", "import", "weights.safetensors", "imported").code == 0
    first, second = (torchditan.load(run).sample(classes=4, seed=3) for run in ("alone", "imported"))
    assert torch.equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "modes"), [(2, SLOW_MODES), (4, {"HSDP": [f"{REPLICATE}=2"]})], ids=["2", "4"])
def test_one_curve_compiled_and_on_four_ranks(
    world_size: int, modes: dict[str, list[str]], tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    train("alone", *FLAGS[:5])
    jobs = [job(tmp_path / name, *FLAGS[:5], *mode) for name, mode in modes.items()]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size)
    assert result.returncode == 0, result.stderr
    for name in modes:
        assert_same_curve(tmp_path / name, tmp_path / "alone")


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.mixed_precision_param=bfloat16", *COMPILED],
        ["--float8.enable_float8_linear", "--float8.emulate"],
        ["--diffusion.objective=imf", "--training.mixed_precision_param=bfloat16", FULL],
    ],
    ids=["bfloat16, compiled", "float8", "one step"],
)
def test_other_precisions_change_the_numbers_a_little(flags: list[str], tmp_path: Path, train: Train) -> None:
    if "--float8.emulate" in flags:
        pytest.importorskip("torchao")
    shared = [*FLAGS[:5], "--training.steps=3", *(flag for flag in flags if "objective" in flag)]
    train("plain", *shared)
    train("other", *shared, *flags)
    found, expected = (
        torch.tensor([[record[key] for key in ("loss", "grad_norm")] for record in read_metrics(tmp_path / run)])
        for run in ("other", "plain")
    )
    assert 1e-6 < ((found - expected).abs() / expected).max() < 0.1


@pytest.mark.parametrize(
    ("name", "options", "about", "mentions"),
    [
        (HEAD, {"text": "in_context", "text_tokens": 4, "text_width": 8}, 'model.text = "in_context"', ["ddt"]),
        (HEAD, {"conditioning": "in_context"}, 'model.conditioning = "in_context"', ["adaln"]),
        ("ddt head_width=50", {}, 'model.name = "ddt head_width=50"', ["16", "50"]),
        ("ddt head_dept=2", {}, 'model.name = "ddt head_dept=2"', ["head_dept", "head_depth"]),
        ("dit depth=2", {}, 'model.name = "dit depth=2"', ["depth", "none"]),
    ],
)
def test_what_cannot_work_is_refused(name: str, options: dict[str, Any], about: str, mentions: list[str]) -> None:
    with refused(about, *mentions):
        spec_of(name, **options)


def test_options_are_checked_before_a_model_is_built() -> None:
    with refused('model.name = "ddt head_width=0"', "head_width", "1"):
        load_config(["--model.name=ddt head_width=0"])
    with refused("model.timestep_scale = 1000.0", "1", "gaussian"):
        load_config(["--model.timestep_frequencies=gaussian"])
