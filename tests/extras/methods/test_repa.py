# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""REPA and iREPA: their terms by hand, runs with a tiny random encoder, and what they refuse."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import assert_refused, refused
from tiny_runs import KEEP, assert_same_state, job
from torch import Tensor

import torchditan
from torchditan.checkpoint.loading import read_state
from torchditan.config.loader import load_config
from torchditan.config.options import Diffusion, Model
from torchditan.data_stream.latent_index import read_index
from torchditan.diffusion.loss_flops import count_loss_flops
from torchditan.diffusion.objectives import build_objective
from torchditan.extras.methods.image_features import EFFICIENTNET, ImageFeatures
from torchditan.extras.planner.plan import plan_run
from torchditan.models import ModelSpec, build_model_spec
from torchditan.models.flops import count_model_flops
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript, Train
    from tests.zoo import Zoo

SIZE, PATCH, WIDTH = 12, 3, 8
MEAN, STD = [0.5, 0.4, 0.3], [0.25, 0.5, 1.0]


def save_encoder(folder: Path, *, registers: int = 2, seed: int = 0) -> Path:
    """A random DINOv2 that reads 12 x 12 pixels: CLS, registers, and 4 x 4 patches of width 8."""
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2}
    config = Dinov2WithRegistersConfig(**sizes, image_size=2 * SIZE, patch_size=PATCH, num_register_tokens=registers)
    torch.manual_seed(seed)
    model = Dinov2WithRegistersModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    settings = {"size": {"shortest_edge": 16}, "crop_size": {"height": SIZE, "width": SIZE}}
    settings |= {"image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoder") / "dino")


def aligned(encoder: Path | str, options: str = "block=2", name: str = "irepa") -> str:
    return f"--diffusion.ingredients={name} encoder={encoder} {options}"


def spec_of(**options: Any) -> ModelSpec:
    shapes: dict[str, Any] = {"sample_shape": (3, 8, 16), "num_classes": 10, **options}
    return build_model_spec(Model(flavor="debugmodel"), **shapes)


def curve(run: Path) -> list[tuple[float, ...]]:
    return [tuple(record[key] for key in ("loss", "similarity", "grad_norm")) for record in read_metrics(run)]


def mean_cosine(a: Tensor, b: Tensor) -> float:
    rows = zip(a.tolist(), b.tolist(), strict=True)
    norms = [(math.sqrt(sum(x * x for x in p)), math.sqrt(sum(y * y for y in q)), p, q) for p, q in rows]
    return sum(sum(x * y for x, y in zip(p, q, strict=True)) / (m * n) for m, n, p, q in norms) / len(norms)


def test_the_terms_are_those_of_the_papers() -> None:
    spec, draws = spec_of(), torch.Generator().manual_seed(0)
    tokens, features = (torch.randn(2, 32, d, generator=draws, dtype=torch.float64) + 1 for d in (64, 5))
    repa, irepa = (build_objective(Diffusion(ingredients=[f"{n} encoder=x block=1"]), spec) for n in ("repa", "irepa"))

    mlp: Any = repa.projector(64, 5).double()  # type: ignore[attr-defined]
    assert mlp[0].out_features == mlp[2].out_features == 2048
    hidden = torch.nn.functional.silu(tokens @ mlp[0].weight.T + mlp[0].bias)
    hidden = torch.nn.functional.silu(hidden @ mlp[2].weight.T + mlp[2].bias)
    projected = hidden @ mlp[4].weight.T + mlp[4].bias
    expected = [-mean_cosine(p, y) for p, y in zip(projected, features, strict=True)]
    assert repa.distance(mlp(tokens), features).tolist() == pytest.approx(expected, abs=1e-12)  # type: ignore[attr-defined]

    convolution: Any = irepa.projector(64, 5).double()  # type: ignore[attr-defined]
    grid = torch.zeros(2, 6, 10, 64, dtype=torch.float64)  # 4 x 8 tokens and a border of zeros
    grid[:, 1:-1, 1:-1] = tokens.unflatten(1, (4, 8))
    rows, columns = range(4), range(8)
    patches = torch.stack([grid[:, i : i + 3, j : j + 3] for i in rows for j in columns], dim=1)  # (2, 32, 3, 3, 64)
    projected = torch.einsum("bnijd,cdij->bnc", patches, convolution.weight) + convolution.bias
    mean = features.sum(1, keepdim=True) / 32
    std = ((features - mean).square().sum(1, keepdim=True) / 31).sqrt()
    target = (features - mean) / (std + 1e-6)
    expected = [-mean_cosine(p, y) for p, y in zip(projected, target, strict=True)]
    assert irepa.distance(convolution(tokens), features).tolist() == pytest.approx(expected, abs=1e-12)  # type: ignore[attr-defined]


def test_an_encoder_reads_normalised_images_and_gives_its_patches(encoder: Path) -> None:
    from transformers import AutoModel

    images = torch.rand(2, 3, SIZE, SIZE) * 2 - 1
    shift, scale = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(encoder)(((images + 1) / 2 - shift) / scale).last_hidden_state
    network = ImageFeatures(str(encoder), (4, 4)).open(torch.device("cpu"), torch.float32)
    assert torch.allclose(network(images), hidden[:, 3:], atol=1e-6)
    other = ImageFeatures(str(encoder), (2, 8)).open(torch.device("cpu"), torch.float32)
    assert other(images).shape == (2, 16, WIDTH) and other.identity == network.identity
    assert not any(parameter.requires_grad for parameter in network.module.parameters())


def test_efficientnet_gives_its_map_at_a_sixteenth() -> None:
    features = ImageFeatures(EFFICIENTNET, (4, 8))
    network = features.open(torch.device("cpu"), torch.float32)
    assert features.tensor.shape == network(torch.zeros(1, 1, 16, 32)).shape[1:] == (32, 112)


def test_a_run_resumes_to_the_bit_and_needs_its_encoder_only_to_train(
    encoder: Path, tmp_path: Path, train: Train, run_script: RunScript
) -> None:
    shutil.copytree(encoder, tmp_path / "encoder")
    flags = [aligned(tmp_path / "encoder"), *KEEP, "--checkpoint.interval=3", "--activation_checkpoint.mode=full"]
    out = train("whole", *flags).out
    assert "0.0M parameters" in out and "GMAC an image" in out
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoint/step-00000006")
    assert "resumed at step 3" in train("parts", *flags).out
    assert curve(parts) == curve(whole) and curve(whole)[-1][1] > curve(whole)[0][1]
    assert_same_state(whole, parts, step=6)
    first, last = (read_state(whole / f"checkpoint/step-{step:08d}") for step in (3, 6))
    name = "heads.alignment.weight"
    assert all(not torch.equal(first[f"{part}.{name}"], last[f"{part}.{name}"]) for part in ("model", "ema"))
    assert not [key for key in last if "encoder" in key or "layer.0" in key]

    shutil.rmtree(tmp_path / "encoder")
    save_encoder(tmp_path / "encoder", seed=1)
    outcome = run_script("train.py", *job(whole, *flags, "--training.steps=9"))
    assert outcome.code == 2
    assert_refused(outcome.err, str(whole), [f"weights of {tmp_path / 'encoder'}"])

    shutil.rmtree(tmp_path / "encoder")
    assert run_script("torchditan", "export", "whole", "w.safetensors").code == 0
    model = torchditan.load("w.safetensors").model
    assert not [key for key in model.state_dict() if key.startswith("heads.")]
    assert run_script("torchditan", "generate", "whole", "--sampling.num_steps=2").code == 0


def test_cached_features_are_those_computed_online(
    encoder: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of mirrored images; another run with the same encoder and images encodes nothing."""
    # The cache is float16, into which features of bfloat16 fit. On some CPUs the encoder computes in float32.
    monkeypatch.setattr("torchditan.job.targets.precision_for", lambda device: "bfloat16")
    flags = ["--dataset.horizontal_flip=true", f"--cache.folder={tmp_path / 'cache'}"]
    train("online", aligned(encoder), *flags)
    out = train("cached", aligned(encoder, "block=2 cache=true"), *flags).out
    assert "2,996 images, half of them mirrored: 0.7 MiB" in out and "encoding features: 2996/2996" in out
    for online, cached in zip(curve(tmp_path / "online"), curve(tmp_path / "cached"), strict=True):
        assert cached == pytest.approx(online, rel=1e-6)
    out = train("again", aligned(encoder, "block=1 cache=true"), *flags).out
    assert "2,996 images" in out and "encoding features" not in out


def test_stored_images_give_the_targets_of_latents_encoded_online(
    encoder: Path, tmp_path: Path, train: Train, run_script: RunScript
) -> None:
    """Also of mirrored images; the latents are stored in bfloat16."""
    draws = np.random.default_rng(0)
    (tmp_path / "photos/train").mkdir(parents=True)
    for number in range(12):
        pixels = draws.integers(256, size=(8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/train/{number}.png")
    haar = ["--autoencoder.name=haar", "--autoencoder.downsampling=2"]
    photos = ["--dataset.dataset_name=folder", f"--dataset.root_dir={tmp_path / 'photos'}", "--dataset.image_size=8"]
    photos += ["--dataset.horizontal_flip", *haar]
    outcome = run_script("torchditan", "encode", "latents", "--split=train", "--images", *photos)
    assert outcome.code == 0 and "with images" in outcome.out
    index = read_index(tmp_path / "latents/train")
    scale = [f"--autoencoder.{name}={list(getattr(index, name))}" for name in ("shift", "scale")]
    flags = ["--model.patch_size=1", "--training.steps=2"]
    stored = ["--dataset.dataset_name=latents", "--dataset.root_dir=latents", *flags]
    train("online", aligned(encoder), *photos, "--autoencoder.online", *scale, *flags)
    train("stored", aligned(encoder), *stored)
    train("cached", aligned(encoder, "block=2 cache=true"), *stored, f"--cache.folder={tmp_path / 'cache'}")
    for online, *others in zip(*(curve(tmp_path / name) for name in ("online", "stored", "cached")), strict=True):
        for found in others:
            assert found == pytest.approx(online, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("options", ["block=2", "block=2 cache=true"])
def test_two_ranks_train_as_one(
    options: str, encoder: Path, tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    flags = [aligned(encoder, options), "--training.steps=3"]
    train("one", *flags)
    shard = ["--training.data_parallel_replicate_degree=1", "--training.data_parallel_shard_degree=2"]
    finished = run_distributed(["train.py", *job(tmp_path / "two", *flags, *shard)], 2, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    for one, two in zip(curve(tmp_path / "one"), curve(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_compiled_blocks_and_latents_encoded_online(encoder: Path, tmp_path: Path, train: Train) -> None:
    latents = ["--autoencoder.name=haar", "--autoencoder.downsampling=2", "--autoencoder.online", "--training.steps=2"]
    latents += ["--model.patch_size=1", "--dataset.horizontal_flip=false"]
    scale = ["--autoencoder.shift=[0.0]", "--autoencoder.scale=[1.0]"]
    train("online", aligned(encoder, "block=2 width=16", name="repa"), *latents, *scale)
    train("compiled", aligned(encoder, "block=2 width=16", name="repa"), *latents, *scale, "--training.compile")
    for eager, compiled in zip(curve(tmp_path / "online"), curve(tmp_path / "compiled"), strict=True):
        assert compiled == pytest.approx(eager, rel=1e-4)


def test_stored_latents_align_with_themselves_only(
    encoder: Path, zoo: Zoo, tmp_path: Path, train: Train, run_script: RunScript
) -> None:
    folder = zoo("latents").parent / "inputs/latents"
    flags = ["--dataset.dataset_name=latents", f"--dataset.root_dir={folder}", "--model.patch_size=1"]
    flags += ["--dataset.horizontal_flip=false", "--training.steps=1"]
    train("itself", aligned("latents"), *flags)
    assert -1 < curve(tmp_path / "itself")[0][1] < 1
    outcome = run_script("train.py", *job(tmp_path / "run", aligned(encoder), *flags))
    assert_refused(outcome.err, "diffusion.ingredients = ", ["--images", "autoencoder.online", "encoder=latents"])


def test_flops_and_plan_count_projector_and_encoder(encoder: Path) -> None:
    spec = spec_of()
    config = Diffusion(ingredients=[f"irepa encoder={encoder} block=1"])
    trained = spec.with_heads(build_objective(config, spec).heads)
    head = 6 * 64 * WIDTH * 9  # forward, and gradients of input and weight
    assert count_loss_flops(config, trained).total == count_model_flops(spec).total + head * spec.num_tokens
    flags = ["--dataset.dataset_name=digits", "--model.flavor=debugmodel", "--training.batch_size=4"]
    plain, online, cached = (
        plan_run(load_config([*flags, *term]), device="a100-80gb", num_devices=1)
        for term in ([], [aligned(encoder)], [aligned(encoder, "block=2 cache=true")])
    )
    target: Any = online.model.objective.targets["alignment"]
    assert online.parts["frozen networks"] == 2 * target.num_parameters
    assert plain.parts["frozen networks"] == cached.parts["frozen networks"] == 0
    assert online.num_parameters == plain.num_parameters + 9 * 64 * WIDTH + WIDTH


def test_refusals_in_one_line(encoder: Path, tmp_path: Path, run_script: RunScript) -> None:
    with refused('diffusion.ingredients = "irepa block=9"', "1", "3"):
        build_objective(Diffusion(ingredients=[f"irepa encoder={encoder} block=9"]), spec_of())
    captions = ["--dataset.dataset_name=captions", "--dataset.root_dir=x", "--model.text=cross_attention"]
    with refused("dataset.aspect_buckets = true", "irepa"):
        load_config([aligned(encoder), *captions, "--dataset.aspect_buckets"])
    shutil.copytree(encoder, tmp_path / "bare")
    (tmp_path / "bare/preprocessor_config.json").unlink()
    for place, mention in ((tmp_path / "bare", "image_mean"), (tmp_path / "nowhere", EFFICIENTNET)):
        outcome = run_script("train.py", *job(tmp_path / "run", aligned(place)))
        assert_refused(outcome.err, f'diffusion.ingredients = "encoder={place}"', [mention])
