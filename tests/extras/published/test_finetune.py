# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From five captioned images to a LoRA in diffusers' own pipeline, with tiny random FLUX and SD3 pipelines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import tiny_pipelines
from refusals import refused

from torchditan import load
from torchditan.extras.published.flux import pack, unpack
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.randomness import normal

CPU = torch.device("cpu")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "gold": (230, 210, 40),
    "black": (9, 9, 9),
}


def write_balls(folder: Path, *, size: int = 64) -> Path:
    """Five pictures, each with its caption in a text file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, colour) in enumerate(COLOURS.items()):
        picture = Image.new("RGB", (size, size), (240, 240, 240))
        ImageDraw.Draw(picture).ellipse((8 + 2 * number, 8, 40 + 2 * number, 40), fill=colour)
        picture.save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a {name} ball")
    return folder


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pipelines")
    makers = {"flux": tiny_pipelines.flux, "sd3": tiny_pipelines.sd3}
    return {name: tiny_pipelines.save(make(), folder / name) for name, make in makers.items()}


def flags(name: str, pipeline: Path, images: Path, out: Path, **options: Any) -> list[str]:
    values: dict[str, Any] = {
        "job.dump_folder": out,
        "metrics.experiment_name": "run",
        "model.name": name,
        "model.flavor": "debugmodel",
        "model.path": pipeline,
        "dataset.dataset_name": "captions",
        "dataset.root_dir": images,
        "dataset.image_size": 64,
        "dataset.num_workers": 0,
        "text_encoder.max_length": 8,
        "text_encoder.dtype": "float32",
        "training.mixed_precision_param": "float32",
        "training.batch_size": 5,
        "training.steps": 3,
        "diffusion.label_dropout": 0,
        "ema.enable": "false",
        "checkpoint.enable_checkpoint": "true",
        "metrics.log_freq": 1,
        "metrics.enable_sampling": "false",
        "sampling.guidance_scale": 1,
        "sampling.num_steps": 4,
        **options,
    }
    return [f"--{option}={value}" for option, value in values.items()]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_five_images_to_a_lora_that_draws_the_same_in_the_stock_pipeline(pipelines, run_script, tmp_path) -> None:
    images = write_balls(tmp_path / "balls")
    options = {"lora.rank": 64, "lora.alpha": 32, "training.steps": 120, "optimizer.lr": 6e-3}
    options["diffusion.timestep_shift"] = 1
    found = flags("flux", pipelines["flux"], images, tmp_path / "out", **options)
    outcome = run_script("train.py", *found, "--lora.target_modules=.*", "--lr_scheduler.schedule=cosine")
    assert outcome.code == 0, outcome.err
    curve = losses(tmp_path / "out/run")
    end = sum(curve[-10:]) / 10
    print(f"loss {curve[0]:.3f} -> {end:.3f} ({end / curve[0]:.1%})")
    assert end < 0.2 * curve[0]

    file = tmp_path / "lora/balls.safetensors"
    outcome = run_script("torchditan", "export_lora", tmp_path / "out/run", file)
    assert outcome.code == 0, outcome.err

    import diffusers

    trained = TrainedModel.open(tmp_path / "out/run", device=CPU)
    rows = trained.encode_prompts(["a red ball"])
    ours = trained.generate_rows(rows, samples_per_row=1, seed=0, batch_size=1)[0]
    pipeline = diffusers.DiffusionPipeline.from_pretrained(pipelines["flux"])
    pipeline.set_progress_bar_config(disable=True)
    base = draw(pipeline, "a red ball", trained)
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    theirs = draw(pipeline, "a red ball", trained)
    assert (ours - base).abs().max() > 0.1, "the LoRA changes nothing"
    assert torch.allclose(ours, theirs, atol=1e-4), (ours - theirs).abs().max()

    x, t, cond = trained.spec.example_inputs(2)
    x, cond = torch.randn(x.shape), {key: torch.randn(value.shape) for key, value in cond.items()}
    with torch.no_grad():
        expected = trained.model(x, t + 0.25, cond)
        trained.model.transformer = pipeline.transformer
        assert torch.equal(trained.model(x, t + 0.25, cond), expected)


def draw(pipeline: Any, prompt: str, trained: TrainedModel) -> torch.Tensor:
    """The latents (1, C, H, W) that diffusers' pipeline makes of our noise, on our timesteps."""
    noise = normal(0, "sample", [0], trained.sample_shape)
    common = {"num_inference_steps": 4, "height": 64, "width": 64, "max_sequence_length": 8, "output_type": "latent"}
    # Ours were drawn without a shift of the timesteps.
    pipeline.scheduler = type(pipeline.scheduler).from_config(
        pipeline.scheduler.config, use_dynamic_shifting=False, shift=1.0
    )
    latents = pipeline(prompt, latents=pack(noise), guidance_scale=3.5, **common).images
    return unpack(latents, *noise.shape[-2:])


def test_the_cache_is_filled_once_and_never_stale(pipelines, run_script, tmp_path) -> None:
    images, out = write_balls(tmp_path / "balls"), tmp_path / "out"
    found = flags("flux", pipelines["flux"], images, out)
    outcome = run_script("train.py", *found, "--cache_only")
    assert outcome.code == 0 and "encoding captions: 6/6" in outcome.out and "encoding images: 5/5" in outcome.out
    assert not (out / "run").exists()
    assert "encoding" not in run_script("train.py", *found, "--cache_only").out

    (images / "red.txt").write_text("a crimson ball")
    outcome = run_script("train.py", *found, "--cache_only")
    assert "encoding captions: 1/1" in outcome.out and "encoding images" not in outcome.out
    Image.new("RGB", (64, 64)).save(images / "red.png")
    assert "encoding images: 1/1" in run_script("train.py", *found, "--cache_only").out
    assert "encoding captions: 6/6" in run_script("train.py", *found, "--cache_only", "--text_encoder.max_length=6").out
    larger = [flag.replace("image_size=64", "image_size=32") for flag in found]
    assert "encoding images: 5/5" in run_script("train.py", *larger, "--cache_only").out


def test_a_damaged_file_of_the_cache_is_named(pipelines, run_script, tmp_path) -> None:
    found = flags("flux", pipelines["flux"], write_balls(tmp_path / "balls"), tmp_path / "out")
    assert run_script("train.py", *found, "--cache_only").code == 0
    file = next((tmp_path / "out/cache/latents").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    outcome = run_script("train.py", *found)
    assert outcome.code == 2 and str(file) in outcome.err and "Traceback" not in outcome.err


def test_other_captions_are_refused_on_resume(pipelines, run_script, tmp_path) -> None:
    images = write_balls(tmp_path / "balls")
    found = flags("flux", pipelines["flux"], images, tmp_path / "out", **{"lora.rank": 2})
    assert run_script("train.py", *found).code == 0
    (images / "red.txt").write_text("a crimson ball")
    outcome = run_script("train.py", *found, "--training.steps=4")
    assert outcome.code == 2 and "dataset.fingerprint" in outcome.err


def test_samples_of_a_run_and_prompts_of_a_script(pipelines, run_script, tmp_path) -> None:
    options = {"lora.rank": 2, "metrics.enable_sampling": "true", "metrics.sample_freq": 2, "sampling.at_start": "true"}
    found = flags("flux", pipelines["flux"], write_balls(tmp_path / "balls"), tmp_path / "out", **options)
    outcome = run_script("train.py", *found, "--sampling.images_per_class=1")
    assert outcome.code == 0, outcome.err
    run = tmp_path / "out/run"
    names = [f"step_{step:08d}.png" for step in (0, 2, 3)]
    assert all((run / "samples" / name).is_file() for name in [*names, "over_steps.png"])
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert record["step"] == 2 and record["seconds_per_image"] > 0 and "psnr" in record and "ssim" in record
    outcome = run_script("torchditan", "generate", run, "--prompts", "a red ball", "a cat", "--without_lora")
    assert outcome.code == 0 and "s/image" in outcome.out
    assert run_script("torchditan", "generate", run, "--classes", "1").code == 2


def test_a_moved_lora_draws_prompts_without_its_images_and_names_a_missing_base_model(
    pipelines, run_script, tmp_path, monkeypatch
) -> None:
    images, pipeline = write_balls(tmp_path / "balls"), shutil.copytree(pipelines["flux"], tmp_path / "pipeline")
    found = flags("flux", pipeline, images, tmp_path / "out", **{"lora.rank": 2, "training.steps": 1})
    assert run_script("train.py", *found).code == 0
    shutil.rmtree(images)
    run = Path(shutil.move(tmp_path / "out/run", tmp_path / "moved"))

    trained = load(run, dtype=torch.float32)
    drawn = trained.sample(prompts=["a dog", "a cat"], samples_per_class=2, seed=3)
    assert drawn.shape == (4, 3, 64, 64) and drawn.dtype == torch.uint8
    samples = trained.generate_rows(
        trained.encode_prompts(["a dog", "a cat"]), samples_per_row=2, seed=3, batch_size=64
    )
    pixels = trained.to_pixels(samples).flatten(0, 1).clamp(-1, 1)
    assert (drawn - (pixels + 1) * 127.5).abs().max() <= 0.5001
    with refused("classes = 3", "prompts"):
        trained.sample(classes=3)
    with refused("prompts = none", "sampling.prompts"):
        trained.sample()

    there = shutil.move(pipeline, tmp_path / "there")
    with refused(f'model.path = "{pipeline}"', "does not exist"):
        load(run)
    found = load(run, dtype=torch.float32, options={"model.path": there, "cache.folder": tmp_path / "cache"})
    assert torch.equal(found.sample(prompts="a dog", samples_per_class=2, seed=3, batch_size=4), drawn[:2])


@pytest.mark.slow
def test_own_prompts_are_compared_with_the_original_models_samples(pipelines, run_script, tmp_path) -> None:
    options = {"lora.rank": 2, "optimizer.lr": 0.1, "metrics.enable_sampling": "true", "metrics.sample_freq": 1}
    options |= {"sampling.images_per_class": 1, "training.steps": 2}
    found = flags("flux", pipelines["flux"], write_balls(tmp_path / "balls"), tmp_path / "out", **options)
    found += ["--sampling.prompts", "a cat", "a dog"]
    run = tmp_path / "out/run"

    outcome = run_script("train.py", *found, "--sampling.at_start")
    assert outcome.code == 0, outcome.err
    assert (
        run_script("train.py", *found, "--sampling.at_start", "--training.steps=3").code == 0
    )  # a resume compares too
    first, second, third = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    assert first["psnr_to_original"] > second["psnr_to_original"] > third["psnr_to_original"], "it moves away"
    assert 0 < third["ssim_to_original"] < 1
    assert "psnr" not in third
    assert (
        run_script("train.py", *found, "--sampling.at_start", "--training.steps=4", "--sampling.num_steps=2").code == 0
    )
    fourth = json.loads((run / "metrics.jsonl").read_text().splitlines()[3])
    assert "psnr_to_original" not in fourth, "drawn in another way"

    outcome = run_script("train.py", *found, "--metrics.experiment_name=without")
    assert outcome.code == 0, outcome.err
    assert "psnr" not in (tmp_path / "out/without/metrics.jsonl").read_text()


@pytest.mark.parametrize("kind", ["lora", "continued"])
def test_the_original_is_drawn_next_to_its_fine_tune(kind, pipelines, run_script, tmp_path) -> None:
    images, out, drawn = write_balls(tmp_path / "balls"), tmp_path / "out", tmp_path / "drawn.png"
    options: dict[str, Any] = {"lora.rank": 2} if kind == "lora" else {}
    if kind == "continued":
        assert run_script("train.py", *flags("flux", pipelines["flux"], images, tmp_path / "first")).code == 0
        options = {"checkpoint.initial_load_path": tmp_path / "first/run"}
    found = flags("flux", pipelines["flux"], images, out, **options, **{"optimizer.lr": 1e-2})
    assert run_script("train.py", *found).code == 0
    drawing = ["--prompts", "a red ball", "--sampling.images_per_class=2", f"--out={drawn}"]
    outcome = run_script("torchditan", "generate", out / "run", *drawing, "--original")
    assert outcome.code == 0, outcome.err
    assert "next to the original's, PSNR " in outcome.out and ", SSIM " in outcome.out
    assert drawn.is_file()

    trained = TrainedModel.open(out / "run", device=CPU)
    rows = trained.encode_prompts(["a red ball"])
    trained.restore_original()
    original = TrainedModel.open(tmp_path / "first/run" if kind == "continued" else out / "run", device=CPU)
    if kind != "continued":
        import diffusers

        published = diffusers.FluxTransformer2DModel.from_pretrained(pipelines["flux"] / "transformer").eval()
        original.model.transformer = published.requires_grad_(False)
    original.spec = trained.spec
    ours, theirs = (one.generate_rows(rows, samples_per_row=1, seed=0, batch_size=1) for one in (trained, original))
    assert torch.equal(ours, theirs)


def test_a_run_from_random_weights_has_no_original(pipelines, run_script, tmp_path) -> None:
    options = {"model.path": "none", "text_encoder.path": pipelines["flux"], "training.steps": 1}
    found = flags("flux", "none", write_balls(tmp_path / "balls"), tmp_path / "out", **options)
    assert run_script("train.py", *found).code == 0
    outcome = run_script("torchditan", "generate", tmp_path / "out/run", "--prompts", "a red ball", "--original")
    assert outcome.code == 2 and "--original = true" in outcome.err and "random weights" in outcome.err
    outcome = run_script("torchditan", "generate", tmp_path / "out/run", "--original", "--without_lora")
    assert outcome.code == 2 and "leave --without_lora out" in outcome.err
    outcome = run_script("torchditan", "generate", tmp_path / "out/run", "--without_lora")
    assert outcome.code == 2 and "must be --original" in outcome.err


BAD = [
    ({"model.path": "nowhere/at/all"}, "does not exist"),
    ({"model.path": "{sd3}"}, "model.path"),
    ({"model.path": "{sd3}/transformer", "text_encoder.path": "{flux}"}, "is a SD3Transformer2DModel"),
    ({"model.flavor": "FLUX.1-schnell"}, "another flavor of flux"),
    ({"dataset.horizontal_flip": "true"}, "cannot be mirrored"),
    ({"model.path": "none"}, "text_encoder.path = none: must be given"),
    ({"text_encoder.path": "{sd3}"}, "encoders do not match flux"),
    ({"lora.rank": 4, "lora.target_modules": "to_qq"}, "their names end in"),
    ({"lora.rank": 4, "lora.assistant_path": "nothing.safetensors"}, "lora.assistant_path"),
    ({"quantize.base": "int8"}, "needs lora.rank"),
    ({"lora.rank": 4, "float8.enable_float8_linear": "true"}, "float8.enable_float8_linear"),
    ({"dataset.dataset_name": "digits", "dataset.root_dir": "none", "dataset.image_size": "none"}, "input_channels"),
    ({"model.overrides": "num_layers=4"}, "is another model"),
    ({"dataset.image_size": 60}, "dataset.image_size = [60, 60]: must be a multiple of 8, the downsampling of diff"),
    ({"diffusion.objective": "ddpm"}, "flux was trained with flow_matching"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_line(options, message, pipelines, run_script, tmp_path) -> None:
    values = {key: str(value).format(**pipelines) for key, value in options.items()}
    found = flags("flux", pipelines["flux"], write_balls(tmp_path / "balls"), tmp_path / "out", **values)
    outcome = run_script("train.py", *found)
    assert outcome.code == 2, (outcome.out, outcome.err)
    lines = [line for line in outcome.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and message in lines[0] and "Traceback" not in outcome.err, outcome.err


@pytest.mark.parametrize("step", [12, 16])
def test_every_bucket_is_checked_before_anything_is_encoded(step, pipelines, run_script, tmp_path) -> None:
    images = write_balls(tmp_path / "balls")
    with Image.open(images / "red.png") as square:
        square.resize((80, 64)).save(images / "red.png")
    options = {"dataset.image_size": 64, "dataset.aspect_buckets": "true", "dataset.bucket_step": step}
    options |= {"dataset.upscale": "true", "cache.only": "true"}
    outcome = run_script("train.py", *flags("flux", pipelines["flux"], images, tmp_path / "out", **options))
    assert outcome.code == (0 if step == 16 else 2), outcome.err
    if step != 16:
        assert f"dataset.bucket_step = {step}: makes samples of " in outcome.err
        assert "must be a multiple of 16, the pixels of a patch" in outcome.err
        assert not list((tmp_path / "out/cache").glob("latents/*"))


@pytest.mark.parametrize("flavor", ["debugmodel", "debugmodel-i2v"])
def test_videos_train_wan_from_text_and_from_their_first_frame(flavor, run_script, tmp_path) -> None:
    pipeline = tiny_pipelines.save(tiny_pipelines.wan(from_image=flavor.endswith("i2v")), tmp_path / "wan")
    for number in range(3):
        folder = tmp_path / f"videos/clip{number}"
        folder.mkdir(parents=True)
        for frame in range(5):
            Image.new("RGB", (32, 32), (80 * number, 50 * frame, 128)).save(folder / f"{frame:03d}.png")
        (tmp_path / f"videos/clip{number}.txt").write_text(f"clip {'abc'[number]}")
    options = {
        "model.flavor": flavor,
        "dataset.image_size": 32,
        "dataset.num_frames": 5,
        "text_encoder.max_length": "none",
        "training.batch_size": 3,
        "lora.rank": 2,
        "quantize.base": "int8",
        "metrics.enable_sampling": "true",
        "sampling.images_per_class": 1,
    }
    found = flags("wan", pipeline, tmp_path / "videos", tmp_path / "out", **options)
    outcome = run_script("train.py", *found)
    assert outcome.code == 0, outcome.err
    assert ("encoding first frames: 3/3" in outcome.out) == flavor.endswith("i2v")
    assert (tmp_path / "out/run/samples/step_00000003.png").is_file()
    shape = json.loads((tmp_path / "out/run/config.json").read_text())["config"]["model"]["sample_size"]
    assert shape == [2, 4, 4]  # a latent frame, and one for each four more
    assert run_script("torchditan", "export_lora", tmp_path / "out/run", tmp_path / "wan.safetensors").code == 0
    drawn = run_script("torchditan", "generate", tmp_path / "out/run", "--prompts", "clip a")
    assert drawn.code == (2 if flavor.endswith("i2v") else 0), drawn.err
    outcome = run_script("train.py", *found, "--dataset.num_frames=4")
    assert outcome.code == 2 and "1 more than a multiple of 4" in outcome.err


def test_encoders_of_another_width_are_told_in_a_line(run_script, tmp_path) -> None:
    pipeline = tiny_pipelines.flux()
    pipeline.text_encoder_2 = tiny_pipelines.t5(64)
    wide = tiny_pipelines.save(pipeline, tmp_path / "wide")
    outcome = run_script("train.py", *flags("flux", wide, write_balls(tmp_path / "balls"), tmp_path / "out"))
    assert outcome.code == 2 and "its encoders give prompt_embeds of shape [8, 64]" in outcome.err, outcome.err


def test_a_video_model_trained_in_full_is_sampled_with_its_tables_of_positions(run_script, tmp_path) -> None:
    """They are in no checkpoint, and not the zeros or the rubbish of empty memory."""
    pipeline = tiny_pipelines.save(tiny_pipelines.wan(), tmp_path / "wan")
    (tmp_path / "videos/clip").mkdir(parents=True)
    for frame in range(5):
        Image.new("RGB", (32, 32), (0, 50 * frame, 128)).save(tmp_path / f"videos/clip/{frame:03d}.png")
    (tmp_path / "videos/clip.txt").write_text("a clip")
    options = {"dataset.image_size": 32, "dataset.num_frames": 5, "text_encoder.max_length": "none"}
    found = flags("wan", pipeline, tmp_path / "videos", tmp_path / "out", **options, **{"training.batch_size": 1})
    assert run_script("train.py", *found).code == 0
    model = TrainedModel.open(tmp_path / "out/run", device=CPU).model
    expected = tiny_pipelines.transformer("wan")
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.transformer.get_buffer(name), buffer), name


@pytest.mark.slow
def test_a_mistake_that_one_rank_alone_meets_is_told(pipelines, run_distributed, tmp_path) -> None:
    images = write_balls(tmp_path / "balls")
    for number in range(6):  # so that either rank has some to encode
        Image.effect_noise((64, 64), 20.0 + number).convert("RGB").save(images / f"noise{number}.jpg")
        (images / f"noise{number}.txt").write_text("noise")
        data = (images / f"noise{number}.jpg").read_bytes()
        if number == 5:
            (images / f"noise{number}.jpg").write_bytes(data[: len(data) // 2])
    found = flags("flux", pipelines["flux"], images, tmp_path / "out", **{"training.batch_size": 1})
    result = run_distributed(["train.py", *found, "--cache_only"], 2)
    lines = [line for line in result.stderr.splitlines() if "error: " in line and "noise5.jpg" in line]
    assert result.returncode != 0 and len(lines) == 1, result.stderr
