# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Text-to-image from scratch, through train.py: samples have the colour that their prompt names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import tiny_pipelines

from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunDistributed, RunScript
    from tests.zoo import Zoo

COLOURS = {"red": (230, 30, 30), "green": (30, 200, 30), "blue": (40, 60, 230)}
PROMPTS = [f"a {colour} ball" for colour in COLOURS]
TINY = [
    "--model.flavor=debugmodel",
    "--model.patch_size=4",
    "--dataset.dataset_name=captions",
    "--dataset.image_size=16",
    "--dataset.num_workers=0",
    "--text_encoder.max_length=16",
    "--training.mixed_precision_param=float32",
    "--training.global_batch_size=8",
    "--optimizer.lr=3e-3",
    "--metrics.log_freq=1",
    "--sampling.num_steps=2",
    "--sampling.images_per_class=1",
]


@pytest.fixture(scope="module")
def balls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 balls of three colours on black, of any size and place, each with its caption beside it."""
    folder, draws, scale = tmp_path_factory.mktemp("balls"), np.random.default_rng(0), 4
    for number in range(20):
        colour = list(COLOURS)[number % 3]
        image = Image.new("RGB", (16 * scale, 16 * scale), (20, 20, 20))
        radius = draws.uniform(3, 6) * scale
        x, y = draws.uniform(radius, 16 * scale - radius, 2)
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
        image.resize((16, 16), Image.Resampling.BOX).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"a {colour} ball")
    return folder


@pytest.fixture(scope="module")
def flux(zoo: Zoo) -> Path:
    """A pipeline with T5 tokens, a CLIP vector and an autoencoder."""
    return zoo("flux lora").parent / "inputs/pipeline"


@pytest.fixture(scope="module")
def mochi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text encoders whose embeddings come with a mask, and without a vector."""
    from diffusers import FlowMatchEulerDiscreteScheduler, MochiPipeline

    torch.manual_seed(0)
    pipeline: Any = MochiPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=tiny_pipelines.t5(24),
        tokenizer=tiny_pipelines.t5_tokenizer(),
        transformer=None,
    )
    return tiny_pipelines.save(pipeline, tmp_path_factory.mktemp("mochi"))


def job(run: Path, data: Path, encoders: Path, *flags: str) -> list[str]:
    places = [f"--dataset.root_dir={data}", f"--text_encoder.path={encoders}", f"--cache.folder={run.parent / 'cache'}"]
    return [*TINY, *places, *flags, f"--job.dump_folder={run.parent}", f"--metrics.experiment_name={run.name}"]


def share_of_right_colour(samples: torch.Tensor) -> list[float]:
    """Of pictures (3 prompts, n, 3, H, W), how many of each prompt have most of the colour that it names."""
    strongest = samples.clamp(-1, 1).mean((-2, -1)).argmax(-1)  # (3, n)
    return (strongest == torch.arange(3)[:, None]).float().mean(1).tolist()


@pytest.mark.parametrize(
    ("text", "encoder"),
    [
        pytest.param("in_context", "wordllama", marks=pytest.mark.slow),
        pytest.param("cross_attention", "pipeline", marks=pytest.mark.slow),
        pytest.param("joint", "pipeline", marks=pytest.mark.nightly),
    ],
)
def test_the_colour_drawn_is_the_one_the_prompt_names(
    text: str, encoder: str, balls: Path, flux: Path, tmp_path: Path, run_script: RunScript
) -> None:
    if encoder == "wordllama":
        pytest.importorskip("wordllama")
    run = tmp_path / text
    flags = [
        f"--model.text={text}",
        "--training.global_batch_size=32",
        "--training.steps=150",
        "--optimizer.beta2=0.99",
    ]
    flags += ["--ema.decay=0.95", "--checkpoint.enable_checkpoint", "--sampling.num_steps=20"]
    if encoder == "wordllama":
        flags.append("--text_encoder.path=none")
    outcome = run_script("train.py", *job(run, balls, flux, *flags, "--metrics.enable_sampling=false"))
    assert outcome.code == 0, outcome.err
    trained = TrainedModel.open(run, device=torch.device("cpu"))
    rows, shares = trained.encode_prompts(PROMPTS), {}
    for guidance_scale in (0.0, 1.0, 3.0):
        trained.config = trained.config.replace({"sampling.guidance_scale": guidance_scale})
        samples = trained.generate_rows(rows, samples_per_row=16, seed=0, batch_size=48)
        shares[guidance_scale] = share_of_right_colour(samples)
    picture = tmp_path / "out.png"
    drawn = run_script("torchditan", "generate", run, "--prompts", "a blue ball", f"--out={picture}")
    assert drawn.code == 0, drawn.err
    assert picture.is_file()
    print(f"{text}, {encoder}: of each prompt in its colour, by guidance scale: {shares}")
    assert np.mean(shares[0.0]) < 0.6  # without a caption a third by chance, whichever colours the model likes
    assert min(shares[1.0]) >= 0.75
    assert min(shares[3.0]) >= 0.9


ALONE = ["--training.steps=6", "--training.batch_size=8"]


@pytest.mark.slow
def test_two_ranks_follow_the_curve_of_one(
    balls: Path, mochi: Path, tmp_path: Path, run_script: RunScript, run_distributed: RunDistributed
) -> None:
    shared = ["--model.text=joint", "--metrics.enable_sampling=false"]
    alone = tmp_path / "alone"
    outcome = run_script("train.py", *job(alone, balls, mochi, *shared, *ALONE))
    assert outcome.code == 0, outcome.err
    ways = {
        "fsdp": ["--training.batch_size=4", "--activation_checkpoint.mode=full"],
        "ddp": ["--training.batch_size=2", "--training.data_parallel_replicate_degree=2"],
    }
    jobs = [job(tmp_path / way, balls, mochi, *shared, *flags, "--training.steps=6") for way, flags in ways.items()]
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], 2)
    assert result.returncode == 0, result.stderr
    expected = [record["loss"] for record in read_metrics(alone)]
    for way in ways:
        losses = [record["loss"] for record in read_metrics(tmp_path / way)]
        difference = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        print(f"{way}: largest relative difference {difference:.1e}")
        assert difference < 1e-6
    assert expected[-1] < 0.99 * expected[0]


def test_sizes_and_mask_are_those_of_the_encoder_and_a_run_goes_on(
    balls: Path, mochi: Path, tmp_path: Path, run_script: RunScript
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = ["--model.text=cross_attention", "--validation.freq=2", "--checkpoint.enable_checkpoint"]
    assert run_script("train.py", *job(whole, balls, mochi, *flags, "--training.steps=4")).code == 0
    for steps in (2, 4):
        outcome = run_script("train.py", *job(parts, balls, mochi, *flags, f"--training.steps={steps}"))
        assert outcome.code == 0, outcome.err
    assert [record["loss"] for record in read_metrics(whole)] == [record["loss"] for record in read_metrics(parts)]
    model = read_config(whole)["config"]["model"]
    assert (model["text_tokens"], model["text_width"], model["pooled_width"]) == (16, 24, None)
    trained = TrainedModel.open(whole, device=torch.device("cpu"))
    rows = trained.encode_prompts(["a red ball", ""])
    assert rows.tensors["prompt_attention_mask"].sum(1).tolist() == [12, 1]  # letters, and the end of the text
    assert trained.generate_rows(rows, samples_per_row=1, seed=0, batch_size=2).isfinite().all()


def test_latents_are_trained_on_and_drawn_as_pictures(
    balls: Path, flux: Path, tmp_path: Path, run_script: RunScript
) -> None:
    run = tmp_path / "run"
    flags = ["--model.text=in_context", "--model.patch_size=2", f"--autoencoder.path={flux}", "--training.steps=2"]
    flags += ["--dataset.image_size=32", "--dataset.upscale", "--checkpoint.enable_checkpoint"]
    outcome = run_script("train.py", *job(run, balls, flux, *flags))
    assert outcome.code == 0, outcome.err
    assert (run / "samples" / "step_00000002.png").is_file()
    trained = TrainedModel.open(run, device=torch.device("cpu"))
    assert trained.sample_shape == (16, 4, 4)
    assert trained.spec.config.pooled_width == 16
    samples = trained.generate_rows(trained.encode_prompts(PROMPTS[:1]), samples_per_row=2, seed=0, batch_size=2)
    assert trained.to_pixels(samples).shape == (1, 2, 3, 32, 32)


def test_the_dummy_takes_the_place_of_captions_of_any_size(tmp_path: Path, run_script: RunScript) -> None:
    flags = ["--dataset.dataset_name=dummy", "--model.text=in_context", "--model.input_channels=4"]
    flags += ["--training.steps=2", f"--job.dump_folder={tmp_path}", "--metrics.experiment_name=dummy"]
    sizes = ["--model.text_tokens=7", "--model.text_width=24", "--model.pooled_width=5"]
    outcome = run_script("train.py", *TINY, *flags, *sizes, "--validation.freq=2", "--validation.num_images=4")
    assert outcome.code == 0, outcome.err
    outcome = run_script("train.py", *TINY, *flags, "--metrics.experiment_name=open")
    assert outcome.code == 2
    assert "model.text_tokens = none: must be set if the data has no captions, as for the dataset dummy" in outcome.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "model.text = none: must be in_context, cross_attention or joint to train on captions"),
        (
            ["--model.text=in_context", "--model.text_width=24"],
            "model.text_width = 24: is 32 for this data; leave it out",
        ),
        (
            ["--dataset.dataset_name=digits", "--model.text=in_context", "--dataset.root_dir=none"],
            'model.text = "in_context": digits has no captions; leave it out, or set --dataset.dataset_name captions',
        ),
        (
            ["--model.text=cross_attention", "--text_encoder.name=pipeline", "--text_encoder.path=none"],
            "text_encoder.path = none: must be given",
        ),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], message: str, balls: Path, flux: Path, tmp_path: Path, run_script: RunScript
) -> None:
    if "--dataset.dataset_name=digits" in flags:
        flags = [*flags, "--dataset.image_size=8"]
    outcome = run_script("train.py", *job(tmp_path / "run", balls, flux, *flags))
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.strip().split("\n")) == 1
    assert not (tmp_path / "run").exists()
