# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""From captioned images to a LoRA in diffusers' own pipeline, with tiny random FLUX, SD3 and Wan pipelines."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import tiny_pipelines
import tiny_runs
import zoo as zoo_of_runs
from refusals import refused
from safetensors.torch import save_file

from torchditan import load
from torchditan.extras.published.flux import pack, unpack
from torchditan.extras.report.stored_grids import read_cells
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.randomness import normal
from torchditan.run.reading import read_config, read_metrics

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lora(zoo) -> Path:
    """A LoRA of FLUX, which tests only read; `inputs` next to it has its pipeline and its captioned images."""
    return zoo("flux lora")


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pipelines.save(tiny_pipelines.sd3(), tmp_path_factory.mktemp("sd3"))


def job(run: Path, inputs: Path, *flags: str) -> list[str]:
    """Three steps of the zoo's LoRA, with a cache of its own. The last of equal flags counts."""
    base = [flag.format(inputs=inputs) for flag in zoo_of_runs.JOBS["flux lora"]]
    own = ["--training.steps=3", f"--cache.folder={run.parent / 'cache'}"]
    return tiny_runs.job(run, *tiny_runs.KEEP, *base, *own, *flags)


FULL = ["--lora.rank=0", "--lora.alpha=none"]


def write_videos(folder: Path, *, count: int) -> list[str]:
    """Videos of five frames, and the flags that read them."""
    for number in range(count):
        clip = folder / f"clip{number}"
        clip.mkdir(parents=True)
        for frame in range(5):
            Image.new("RGB", (32, 32), (80 * number, 50 * frame, 128)).save(clip / f"{frame:03d}.png")
        (folder / f"clip{number}.txt").write_text(f"clip {'abc'[number]}")
    return [f"--dataset.root_dir={folder}", "--dataset.image_size=32", "--dataset.num_frames=5"]


def test_a_lora_that_is_trained_draws_the_same_in_the_stock_pipeline(lora, run_script, tmp_path) -> None:
    run, inputs, file = tmp_path / "run", lora.parent / "inputs", tmp_path / "lora/squares.safetensors"
    flags = ["--lora.rank=64", "--lora.alpha=32", "--training.steps=40", "--optimizer.lr=6e-3"]
    flags += ["--diffusion.timestep_shift=1", "--sampling.num_steps=4", "--lora.target_modules=.*"]
    outcome = run_script("train.py", *job(run, inputs, *flags))
    assert outcome.code == 0, outcome.err
    curve = [record["loss"] for record in read_metrics(run)]
    assert sum(curve[-5:]) / 5 < 0.6 * curve[0], curve
    outcome = run_script("torchditan", "export_lora", run, file)
    assert outcome.code == 0, outcome.err

    import diffusers

    trained = TrainedModel.open(run, device=CPU)
    rows = trained.encode_prompts(["a red square"])
    ours = trained.generate_rows(rows, samples_per_row=1, seed=0, batch_size=1)[0]
    pipeline = diffusers.DiffusionPipeline.from_pretrained(inputs / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    base = draw(pipeline, "a red square", trained)
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    theirs = draw(pipeline, "a red square", trained)
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


def test_a_lora_of_z_image_over_int8_continues_and_draws_the_same_in_the_stock_pipeline(
    lora, run_script, tmp_path
) -> None:
    inputs, file = lora.parent / "inputs", tmp_path / "squares.safetensors"
    pipeline = tiny_pipelines.z_image()
    tiny_pipelines.save(pipeline, tmp_path / "pipeline")
    matrices = {"lora_A": torch.randn(2, 64), "lora_B": 0.1 * torch.randn(64, 2)}
    names = [f"diffusion_model.{place}.attention.to_q" for place in ("layers.1", "noise_refiner.0")]  # of ai-toolkit
    assistant = {f"{name}.{part}.weight": matrix.clone() for name in names for part, matrix in matrices.items()}
    save_file(assistant, tmp_path / "assistant.safetensors")
    flags = ["--model.name=z_image", f"--model.path={tmp_path / 'pipeline'}", "--text_encoder.max_length=40"]
    over_int8 = ["--quantize.base=int8", f"--lora.assistant_path={tmp_path / 'assistant.safetensors'}"]
    outcome = run_script("train.py", *job(tmp_path / "int8", inputs, *flags, *over_int8, "--optimizer.lr=1e-2"))
    assert outcome.code == 0, outcome.err
    assert run_script("torchditan", "export_lora", tmp_path / "int8", file).code == 0
    as_it_is = [f"--checkpoint.initial_load_path={file}", "--training.steps=1", "--optimizer.lr=0"]
    drawn = ["--sampling.guidance_scale=4", "--sampling.num_steps=4"]
    outcome = run_script("train.py", *job(tmp_path / "run", inputs, *flags, *as_it_is, *drawn))
    assert outcome.code == 0 and "start at zero" not in outcome.out, outcome.err

    trained = TrainedModel.open(tmp_path / "run", device=CPU)
    rows = trained.encode_prompts(["a red square"])
    ours = trained.generate_rows(rows, samples_per_row=1, seed=0, batch_size=1)[0]
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 4, "height": 64, "width": 64, "max_sequence_length": 40, "output_type": "latent"}
    options |= {"latents": normal(0, "sample", [0], trained.sample_shape), "guidance_scale": 3.0}  # 1 less than ours
    base = pipeline("a red square", **options).images
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    assert (ours - base).abs().max() > 0.01, "the LoRA changes nothing"
    torch.testing.assert_close(ours, pipeline("a red square", **options).images, rtol=0, atol=1e-5)


def test_the_cache_is_filled_once_never_stale_and_names_a_damaged_file(lora, run_script, tmp_path) -> None:
    images = shutil.copytree(lora.parent / "inputs", tmp_path / "images", ignore=shutil.ignore_patterns("pipeline"))

    def encode(*flags: str) -> str:
        found = job(tmp_path / "run", lora.parent / "inputs", f"--dataset.root_dir={images}", "--cache_only", *flags)
        outcome = run_script("train.py", *found)
        assert outcome.code == 0, outcome.err
        return outcome.out

    first = encode()
    assert "encoding captions: 3/3" in first and "encoding images: 16/16" in first
    assert not (tmp_path / "run").exists()
    assert "encoding" not in encode()
    (images / "00.txt").write_text("a crimson square")
    Image.new("RGB", (64, 64)).save(images / "01.png")
    changed = encode()
    assert "encoding captions: 1/1" in changed and "encoding images: 1/1" in changed
    shorter_and_smaller = encode("--text_encoder.max_length=6", "--dataset.image_size=32")
    assert "encoding captions: 4/4" in shorter_and_smaller and "encoding images: 16/16" in shorter_and_smaller

    file = next((tmp_path / "cache/latents").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:100])
    outcome = run_script("train.py", *job(tmp_path / "run", lora.parent / "inputs"))
    assert outcome.code == 2 and str(file) in outcome.err and "Traceback" not in outcome.err


def test_samples_of_a_run_and_prompts_of_a_script(lora, run_script, tmp_path) -> None:
    run = tmp_path / "run"
    flags = ["--metrics.enable_sampling=true", "--metrics.sample_freq=2", "--sampling.at_start=true"]
    flags += ["--sampling.images_per_class=1", "--sampling.num_steps=2"]
    outcome = run_script("train.py", *job(run, lora.parent / "inputs", *flags))
    assert outcome.code == 0, outcome.err
    names = [f"step_{step:08d}.png" for step in (0, 2, 3)]
    assert all((run / "samples" / name).is_file() for name in [*names, "over_steps.png"])
    record = read_metrics(run)[1]
    assert record["step"] == 2 and record["seconds_per_image"] > 0 and "psnr" in record and "ssim" in record
    picture = tmp_path / "drawn.png"
    prompts = ["--prompts", "a red square", "a cat", f"--out={picture}"]
    outcome = run_script("torchditan", "generate", run, *prompts, "--without_lora")
    assert outcome.code == 0 and "s/image" in outcome.out, outcome.err
    assert read_cells(picture)[1] == ["a red square", "a cat"]
    outcome = run_script("torchditan", "generate", run, *prompts, "--original")
    assert outcome.code == 0 and "next to the original's, PSNR " in outcome.out, outcome.err


def test_a_moved_lora_draws_prompts_and_names_a_missing_base_model(lora, tmp_path) -> None:
    run = shutil.copytree(lora, tmp_path / "moved")
    pipeline = shutil.copytree(lora.parent / "inputs/pipeline", tmp_path / "there")
    with refused(f'model.path = "{tmp_path}/gone"', "does not exist"):
        load(run, options={"model.path": tmp_path / "gone"})
    options = {"model.path": pipeline, "cache.folder": tmp_path / "cache", "sampling.num_steps": 2}
    trained = load(run, dtype=torch.float32, options=options)
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

    import diffusers

    trained.restore_original()
    ours = trained.generate_rows(trained.encode_prompts(["a dog"]), samples_per_row=1, seed=0, batch_size=1)
    published = diffusers.FluxTransformer2DModel.from_pretrained(pipeline / "transformer").eval()
    trained.model.transformer = published.requires_grad_(False)
    theirs = trained.generate_rows(trained.encode_prompts(["a dog"]), samples_per_row=1, seed=0, batch_size=1)
    assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_own_prompts_are_compared_with_the_original_models_samples(lora, run_script, tmp_path) -> None:
    flags = ["--optimizer.lr=0.02", "--metrics.enable_sampling=true", "--metrics.sample_freq=1"]
    flags += ["--sampling.images_per_class=1", "--sampling.num_steps=4", "--sampling.prompts", "a cat", "a dog"]

    def train(name: str, steps: int, *more: str) -> str:
        found = job(tmp_path / name, lora.parent / "inputs", *flags, f"--training.steps={steps}", *more)
        outcome = run_script("train.py", *found)
        assert outcome.code == 0, outcome.err
        return outcome.out

    train("run", 2, "--sampling.at_start")
    train("run", 3, "--sampling.at_start")  # a resume compares too
    first, second, third = read_metrics(tmp_path / "run")
    assert first["psnr_to_original"] > second["psnr_to_original"] > third["psnr_to_original"], "it moves away"
    assert 0 < third["ssim_to_original"] < 1
    assert "psnr" not in third
    train("run", 4, "--sampling.at_start", "--sampling.num_steps=2")
    assert "psnr_to_original" not in read_metrics(tmp_path / "run")[3], "drawn in another way"

    train("without", 2)
    assert "psnr" not in (tmp_path / "without/metrics.jsonl").read_text()


def test_a_run_from_random_weights_has_no_original(zoo) -> None:
    trained = TrainedModel.open(zoo("digits"), device=CPU)
    with refused("--original = true", "random weights"):
        trained.check_original()
    with refused("--without_lora = true", "--original"):
        trained.turn_off_adapter()


REFUSED = [
    (["--model.path=nowhere/at/all"], "does not exist"),
    (["--model.path={sd3}"], "model.path"),
    (["--model.path={sd3}/transformer", "--text_encoder.path={flux}"], "is a SD3Transformer2DModel"),
    (["--model.flavor=FLUX.1-schnell"], "another flavor of flux"),
    (["--dataset.horizontal_flip=true"], "cannot be mirrored"),
    (["--text_encoder.path={sd3}"], "encoders do not match flux"),
    (["--lora.assistant_path=nothing.safetensors"], "lora.assistant_path"),
    (["--float8.enable_float8_linear=true"], "float8.enable_float8_linear"),
    (["--dataset.dataset_name=digits", "--dataset.root_dir=none", "--dataset.image_size=none"], "input_channels"),
    (["--dataset.image_size=60"], "dataset.image_size = [60, 60]: must be a multiple of 8, the downsampling of diff"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_input_is_one_line(flags, message, lora, sd3, run_script, tmp_path) -> None:
    inputs = lora.parent / "inputs"
    flags = [flag.format(flux=inputs / "pipeline", sd3=sd3) for flag in flags]
    outcome = run_script("train.py", *job(tmp_path / "run", inputs, *flags))
    assert outcome.code == 2, (outcome.out, outcome.err)
    lines = [line for line in outcome.err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and message in lines[0] and "Traceback" not in outcome.err, outcome.err


def test_every_bucket_is_checked_before_anything_is_encoded(lora, run_script, tmp_path) -> None:
    images = shutil.copytree(lora.parent / "inputs", tmp_path / "images", ignore=shutil.ignore_patterns("pipeline"))
    with Image.open(images / "00.png") as square:
        square.resize((80, 64)).save(images / "00.png")
    flags = [f"--dataset.root_dir={images}", "--dataset.aspect_buckets", "--dataset.bucket_step=12"]
    flags += ["--dataset.upscale", "--cache.only"]
    outcome = run_script("train.py", *job(tmp_path / "run", lora.parent / "inputs", *flags))
    assert outcome.code == 2 and "dataset.bucket_step = 12: makes samples of " in outcome.err
    assert "must be a multiple of 16, the pixels of a patch" in outcome.err
    assert not list((tmp_path / "cache").glob("latents/*"))


@pytest.mark.parametrize(("flavor", "side"), [("debugmodel", 4), ("debugmodel-ti2v", 2)])
def test_a_video_model_trained_in_full_draws_with_its_tables_of_positions(
    flavor, side, lora, run_script, tmp_path
) -> None:
    """They are in no checkpoint, and not the zeros or the rubbish of empty memory."""
    pipeline = tiny_pipelines.save(tiny_pipelines.wan(is_ti2v=flavor.endswith("ti2v")), tmp_path / "wan")
    flags = ["--model.name=wan", f"--model.flavor={flavor}", f"--model.path={pipeline}"]
    flags += ["--text_encoder.max_length=none", *FULL]
    flags += [*write_videos(tmp_path / "videos", count=2), "--training.steps=1", "--training.global_batch_size=1"]
    flags += ["--metrics.enable_sampling=true", "--sampling.images_per_class=1", "--sampling.num_steps=2"]
    outcome = run_script("train.py", *job(tmp_path / "run", tmp_path, *flags))
    assert outcome.code == 0 and "first frames" not in outcome.out, outcome.err
    assert (tmp_path / "run/samples/step_00000001.png").is_file()
    shape = read_config(tmp_path / "run")["config"]["model"]["sample_size"]
    assert shape == [2, side, side]  # a latent frame, and one for each four more
    model = TrainedModel.open(tmp_path / "run", device=CPU).model
    for name, buffer in tiny_pipelines.transformer("wan", flavor).named_buffers():
        assert torch.equal(model.transformer.get_buffer(name), buffer), name
    outcome = run_script("train.py", *job(tmp_path / "run", tmp_path, *flags, "--dataset.num_frames=4"))
    assert outcome.code == 2 and "1 more than a multiple of 4" in outcome.err


def test_videos_train_a_lora_of_wan_from_their_first_frame(lora, run_script, tmp_path) -> None:
    pipeline = tiny_pipelines.save(tiny_pipelines.wan(from_image=True), tmp_path / "wan")
    flags = ["--model.name=wan", "--model.flavor=debugmodel-i2v", f"--model.path={pipeline}"]
    flags += ["--text_encoder.max_length=none", "--quantize.base=int8", "--training.global_batch_size=3"]
    flags += ["--metrics.enable_sampling=true", "--sampling.images_per_class=1", "--sampling.num_steps=2"]
    flags += [*write_videos(tmp_path / "videos", count=3), "--training.steps=1"]
    outcome = run_script("train.py", *job(tmp_path / "run", tmp_path, *flags))
    assert outcome.code == 0 and "encoding first frames: 3/3" in outcome.out, outcome.err
    assert (tmp_path / "run/samples/step_00000001.png").is_file()
    assert run_script("torchditan", "export_lora", tmp_path / "run", tmp_path / "wan.safetensors").code == 0
    with refused('--prompts = ["clip a"]', "first frame"):
        TrainedModel.open(tmp_path / "run", device=CPU).encode_prompts(["clip a"])


def test_flux2_trains_on_its_base_and_draws_with_the_distilled_weights(lora, run_script, tmp_path) -> None:
    import diffusers

    pipeline, few_steps = tiny_pipelines.flux2(), tiny_pipelines.flux2(seed=1, is_distilled=True)
    few_steps.vae = pipeline.vae
    base = tiny_pipelines.save(pipeline, tmp_path / "base")
    distilled = tiny_pipelines.save(few_steps, tmp_path / "distilled")
    inputs, run, file = lora.parent / "inputs", tmp_path / "run", tmp_path / "lora/file.safetensors"
    flags = ["--model.name=flux2", f"--model.path={base}", "--lora.rank=4", "--lora.alpha=8", "--quantize.base=int8"]
    flags += ["--optimizer.lr=0.3", "--sampling.num_steps=2", "--sampling.images_per_class=1"]
    drawn = ["--metrics.enable_sampling=true", "--sampling.guidance_scale=4"]
    outcome = run_script("train.py", *job(run, inputs, *flags, *drawn))
    assert outcome.code == 0 and "distilled" not in outcome.out, outcome.err
    assert (run / "samples/step_00000003.png").is_file()
    again = [f"--model.path={distilled}", "--sampling.num_steps=4", "--sampling.guidance_scale=1"]
    outcome = run_script("torchditan", "generate", run, "--prompts", "a red square", *again)
    assert outcome.code == 0, outcome.err

    assert run_script("torchditan", "export_lora", run, file).code == 0
    trained = TrainedModel.open(run, device=CPU, flags=again[:1])
    pipeline = diffusers.DiffusionPipeline.from_pretrained(distilled)
    x, t, cond = trained.spec.example_inputs(2)
    inputs_of_both = torch.randn(x.shape), t + 0.25, {key: torch.randn(value.shape) for key, value in cond.items()}
    ours = trained.model(*inputs_of_both)
    pipeline.load_lora_weights(file.parent, weight_name=file.name)
    trained.model.transformer = pipeline.transformer
    with torch.no_grad():
        theirs = trained.model(*inputs_of_both)
        pipeline.unload_lora_weights()
        change = (trained.model(*inputs_of_both) - theirs).abs().max()
    assert (ours - theirs).abs().max() < 0.05 * change, "more than the rounding of int8"

    full = [*FULL, "--quantize.base=float32", f"--model.path={distilled}", "--training.steps=1"]
    outcome = run_script("train.py", *job(tmp_path / "full", inputs, *flags, *full))
    assert outcome.code == 0 and outcome.out.count("warning") == 1, (outcome.out, outcome.err)
    assert f"warning: {distilled} is distilled to a few steps, which training undoes; " in outcome.out


def test_encoders_of_another_width_are_told_in_a_line(lora, run_script, tmp_path) -> None:
    pipeline = tiny_pipelines.flux()
    pipeline.text_encoder_2 = tiny_pipelines.t5(64)
    wide = tiny_pipelines.save(pipeline, tmp_path / "wide")
    outcome = run_script("train.py", *job(tmp_path / "run", lora.parent / "inputs", f"--model.path={wide}"))
    assert outcome.code == 2 and "its encoders give prompt_embeds of shape [8, 64]" in outcome.err, outcome.err


@pytest.mark.slow
def test_a_mistake_that_one_rank_alone_meets_is_told(lora, run_distributed, tmp_path) -> None:
    images = shutil.copytree(lora.parent / "inputs", tmp_path / "images", ignore=shutil.ignore_patterns("pipeline"))
    (images / "noise.txt").write_text("noise")
    Image.effect_noise((64, 64), 25.0).convert("RGB").save(images / "noise.jpg")
    data = (images / "noise.jpg").read_bytes()
    (images / "noise.jpg").write_bytes(data[: len(data) // 2])
    found = job(tmp_path / "run", lora.parent / "inputs", f"--dataset.root_dir={images}", "--cache_only")
    result = run_distributed(["train.py", *found], 2)
    lines = [line for line in result.stderr.splitlines() if "error: " in line and "noise.jpg" in line]
    assert result.returncode != 0 and len(lines) == 1, result.stderr
