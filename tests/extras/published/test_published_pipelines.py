# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Predictions of published models are bitwise equal to those in their diffusers pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny_pipelines
import torch
import torch.nn.functional as F
from debugmodels import GUIDANCE, built, inputs_of, pristine, spec_of
from torch import nn

from torchditan.config.options import Autoencoder, Diffusion, Model, Sampling
from torchditan.diffusion.objectives import build_objective
from torchditan.diffusion.samplers import guided_prediction
from torchditan.diffusion.timesteps import Timesteps
from torchditan.extras.autoencoders import open_autoencoder
from torchditan.extras.published.families import family
from torchditan.extras.published.flux import pack, unpack
from torchditan.extras.published.wan import first_frame_condition
from torchditan.models import build_model_spec
from torchditan.randomness import Randomness, draw

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

SIGMAS = [0.75, 0.5]  # exact, as is a thousandfold of them
TEXT = ("text_encoder", "tokenizer")
TWO_TEXTS = (*TEXT, "text_encoder_2", "tokenizer_2")
THREE_TEXTS = (*TWO_TEXTS, "text_encoder_3", "tokenizer_3")


class Call:
    """One call of a transformer: what came in, and what went out."""

    def __init__(self, arguments: dict[str, Any], output: torch.Tensor) -> None:
        self.arguments, self.output = arguments, output


def record(transformer: nn.Module) -> list[Call]:
    """All later calls of a transformer."""
    calls, forward = [], transformer.forward

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        names = ("sample", "timestep")  # what the pipelines of SDXL and Z-Image give by position
        output = forward(*args, **kwargs)
        predicted = torch.stack(output[0]) if isinstance(output[0], list) else output[0].clone()
        calls.append(Call(dict(zip(names, args, strict=False)) | kwargs, predicted))
        return output

    transformer.forward = recorded  # type: ignore[method-assign]
    return calls


def pipeline_around(name: str, transformer: nn.Module, *, scheduler: Any, empty: tuple[str, ...], **parts: Any) -> Any:
    """The family's own pipeline, without encoders."""
    cls = family(name)
    parts = {"vae": None, **dict.fromkeys(empty), **parts, cls.subfolder: transformer, "scheduler": scheduler}
    pipeline = getattr(diffusers, cls.pipeline_class)(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def frames_of(name: str, x: torch.Tensor) -> int:
    return (x.shape[2] - 1) * family(name).temporal_downsampling + 1


def assert_equal_predictions(name: str, calls: list[Call], *, thousand: bool = True) -> None:
    """Our `predict` and `forward` on what the pipeline's transformer saw give what it gave, exactly."""
    spec = spec_of(name)
    model = built(spec)
    x, _, cond = inputs_of(spec)
    height, width = x.shape[-2:]
    assert len(calls) == 2
    for call in calls:
        noise_level = call.arguments["timestep"].float() / (1000 if thousand else 1)
        seen, given = call.arguments["hidden_states"], call.output
        if seen.dim() == 3:  # packed
            assert torch.equal(pack(unpack(seen, height, width)), seen)
            seen, given = unpack(seen, height, width), unpack(given, height, width)
        seen = seen[:, : x.shape[1]]
        with torch.no_grad():
            assert torch.equal(model.predict(seen, noise_level, cond), given)
            assert torch.equal(model(seen, 1 - noise_level, cond), -given)
    assert not torch.equal(calls[0].output, calls[1].output)


@dataclass(frozen=True)
class Drawing:
    """How a family's pipeline draws from given embeddings."""

    scheduler: Callable[[], Any]
    empty: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=lambda: {"sigmas": SIGMAS})
    has_packed_latents: bool = False
    has_timesteps_of_thousand: bool = True


def plain_euler() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)


def unipc() -> Any:
    """The scheduler of Wan's pipelines."""
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


GUIDED, UNGUIDED = ({"sigmas": SIGMAS, "guidance_scale": scale} for scale in (GUIDANCE, 1.0))
DRAWINGS = {
    "flux": Drawing(plain_euler, (*TWO_TEXTS, "image_encoder", "feature_extractor"), GUIDED, True, False),
    "sd3": Drawing(plain_euler, THREE_TEXTS, UNGUIDED),
    "hunyuan_video": Drawing(plain_euler, TWO_TEXTS, GUIDED),
    "qwen_image": Drawing(plain_euler, TEXT, has_packed_latents=True, has_timesteps_of_thousand=False),
    "wan": Drawing(unipc, TEXT, {"guidance_scale": 1.0}),
}


def draw_two_steps(pipeline: Any, x: torch.Tensor, cond: dict[str, torch.Tensor], **options: Any) -> None:
    """From these embeddings."""
    given = {key: value for key, value in cond.items() if key.startswith(("prompt", "pooled"))}
    options = {"latents": x, "num_inference_steps": 2, "output_type": "latent", **options}
    pipeline(**given, **options, height=8 * x.shape[-2], width=8 * x.shape[-1])


@pytest.mark.parametrize("name", DRAWINGS)
def test_predictions_are_those_of_the_pipeline(name):
    drawing, spec = DRAWINGS[name], spec_of(name)
    transformer = pristine(built(spec), spec)
    pipeline = pipeline_around(name, transformer, scheduler=drawing.scheduler(), empty=drawing.empty)
    x, _, cond = inputs_of(spec)
    calls = record(transformer)
    frames = {"num_frames": frames_of(name, x)} if x.dim() == 5 else {}
    draw_two_steps(pipeline, x, cond, latents=pack(x) if drawing.has_packed_latents else x, **frames, **drawing.options)
    assert_equal_predictions(name, calls, thousand=drawing.has_timesteps_of_thousand)


def test_wan_from_an_image():
    spec = spec_of("wan", "debugmodel-i2v")
    transformer = pristine(built(spec), spec)
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).eval()
    pipeline = diffusers.WanImageToVideoPipeline(
        vae=vae,
        transformer=transformer,
        scheduler=unipc(),
        **dict.fromkeys((*TEXT, "image_encoder", "image_processor")),
    )
    pipeline.set_progress_bar_config(disable=True)
    x, _, cond = inputs_of(spec)
    pipeline.encode_image = lambda *_: cond["image_embeds"][:1]  # CLIP's part
    calls = record(transformer)
    image = torch.rand(1, 3, 8 * x.shape[-2], 8 * x.shape[-1])
    draw_two_steps(pipeline, x, cond, image=image, num_frames=frames_of("wan", x), guidance_scale=1.0)
    condition = calls[0].arguments["hidden_states"][:, 16:]
    assert condition.shape[1] == 20
    assert torch.equal(first_frame_condition(condition[:, 4:]), condition)

    model = built(spec)
    cond |= {"condition": condition, "image_embeds": calls[0].arguments["encoder_hidden_states_image"]}
    for call in calls:
        seen, noise_level = call.arguments["hidden_states"][:, :16], call.arguments["timestep"] / 1000
        with torch.no_grad():
            assert torch.equal(model.predict(seen, noise_level, cond), call.output)


def test_wan_2_2_and_its_autoencoder(tmp_path):
    """Its pipeline gives each token a timestep, which are equal without a first frame."""
    folder = tiny_pipelines.save(tiny_pipelines.wan(is_ti2v=True), tmp_path)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    spec = spec_of("wan", "debugmodel-ti2v", path=folder)
    model = built(spec)
    x, _, cond = inputs_of(spec)
    calls, options = record(pipeline.transformer), {"num_frames": frames_of("wan", x), "guidance_scale": 1.0}
    size = {"height": 16 * x.shape[-2], "width": 16 * x.shape[-1]}
    given = {"latents": x, "num_inference_steps": 2, **options, **size, **cond}
    latents, video = (pipeline(**given, output_type=kind).frames for kind in ("latent", "pt"))
    for call in calls:
        noise_level = call.arguments["timestep"][:, 0] / 1000  # (B, N) -> (B,)
        with torch.no_grad():
            ours = model.predict(call.arguments["hidden_states"], noise_level, cond)
        assert torch.allclose(ours, call.output, rtol=0, atol=1e-6)

    autoencoder = open_autoencoder(
        Autoencoder(name="diffusers", path=str(folder)), device=torch.device("cpu"), image_channels=3
    )
    assert (autoencoder.latent_channels, autoencoder.downsampling) == (48, 16)
    assert torch.allclose(autoencoder.decode(latents).movedim(2, 1) / 2 + 0.5, video, rtol=0, atol=1e-5)
    pixels = torch.rand(2, 3, 5, 32, 64) * 2 - 1
    with torch.no_grad():
        encoded = pipeline.vae.encode(pixels).latent_dist.mode()
    mean, std = (torch.tensor(pipeline.vae.config[key]).view(1, 48, 1, 1, 1) for key in ("latents_mean", "latents_std"))
    assert torch.allclose(autoencoder.encode(pixels), (encoded - mean) * (1 / std), rtol=0, atol=1e-6)


@pytest.mark.parametrize("hides", [False, True])
def test_mochi(hides, monkeypatch):
    spec = spec_of("mochi")
    transformer = pristine(built(spec), spec)
    pipeline = pipeline_around(
        "mochi", transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True), empty=TEXT
    )
    # Its schedule is not at numbers that a thousandfold keeps exact.
    monkeypatch.setattr("diffusers.pipelines.mochi.pipeline_mochi.linear_quadratic_schedule", lambda *_: SIGMAS)
    x, _, cond = inputs_of(spec)
    if not hides:
        cond["prompt_attention_mask"].fill_(True)
    calls = record(transformer)
    draw_two_steps(pipeline, x, cond, num_frames=frames_of("mochi", x), guidance_scale=1.0)
    model = built(spec)
    for call, sigma in zip(calls, SIGMAS, strict=True):
        t = call.arguments["timestep"] / 1000
        assert torch.equal(t, torch.full((2,), 1 - sigma))  # it grows towards data, as ours
        with torch.no_grad():
            ours = model(call.arguments["hidden_states"], t, cond)
        # It removes hidden tokens where we mask them: another order of sums on some CPUs (1.3e-6 there, 0 elsewhere).
        assert torch.allclose(ours, call.output, rtol=0, atol=1e-5 if hides else 0)


def test_sdxl():
    spec = spec_of("sdxl")
    unet = pristine(built(spec), spec)
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="leading", steps_offset=1
    )
    pipeline = pipeline_around("sdxl", unet, scheduler=scheduler, empty=TWO_TEXTS)
    x, _, cond = inputs_of(spec)
    calls = record(unet)
    draw_two_steps(pipeline, x, cond, guidance_scale=1.0)
    model = built(spec)
    assert [call.arguments["timestep"].item() for call in calls] == [501, 1]
    for call in calls:
        t = call.arguments["timestep"].repeat(2) / 1000  # as in the paper, unlike the other models
        with torch.no_grad():
            assert torch.equal(model(call.arguments["sample"], t.float(), cond), call.output)


@pytest.mark.parametrize("is_guided", [False, True])
def test_z_image_with_captions_of_different_lengths(is_guided):
    spec = build_model_spec(
        Model(name="z_image", flavor="debugmodel"), sample_shape=(16, 8, 12), num_classes=0, text_length=64
    )
    model = built(spec)
    transformer = pristine(model, spec)
    pipeline = pipeline_around("z_image", transformer, scheduler=plain_euler(), empty=TEXT)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([17, 18, 63, *([9, 9, 9] if is_guided else [])])
    embeds = torch.randn(len(lengths), 64, 32, generator=generator)
    captions = [caption[:length] for caption, length in zip(embeds, lengths, strict=True)]
    calls = record(transformer)
    pipeline(
        prompt_embeds=captions[:3],
        negative_prompt_embeds=captions[3:],
        guidance_scale=3.0 if is_guided else 0.0,
        latents=torch.randn(3, 16, 8, 12, generator=generator),
        num_inference_steps=2,
        sigmas=SIGMAS,
        height=64,
        width=96,
        output_type="latent",
    )
    cond = {"prompt_embeds": embeds, "prompt_embeds_mask": torch.arange(64) < lengths[:, None]}
    for call, sigma in zip(calls, SIGMAS, strict=True):
        t = call.arguments["timestep"]
        assert torch.equal(t, torch.full((len(lengths),), 1 - sigma))  # it grows towards data, as ours
        with torch.no_grad():
            ours = model(torch.stack(call.arguments["sample"]).squeeze(2), t, cond)
        assert torch.equal(ours, call.output.squeeze(2))


def test_the_loss_of_z_image_is_that_of_diffusers_training_script():
    spec = spec_of("z_image")
    model = built(spec)
    theirs = pristine(model, spec)
    x, _, cond = inputs_of(spec)
    batch, randomness = {"sample": x, **cond}, draw(0, [0, 1], spec.sample_shape)
    objective = build_objective(Diffusion(timestep_sampling="uniform", label_dropout=0), spec)
    sigma = 1 - objective.inputs(batch, randomness).t
    noise, sigma_wide = randomness.noise, sigma[:, None, None, None]
    noisy = (1 - sigma_wide) * x + sigma_wide * noise
    captions = [tokens[mask] for tokens, mask in zip(cond["prompt_embeds"], cond["prompt_embeds_mask"], strict=True)]
    with torch.no_grad():
        predicted = -torch.stack(theirs(list(noisy.unsqueeze(2)), 1 - sigma, captions, return_dict=False)[0]).squeeze(2)
        loss = objective.loss(model, batch, randomness)
    expected = (predicted - (noise - x)).square().flatten(1).mean(1)  # whose weight is 1
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def flux2_pipeline(transformer: Any, **options: Any) -> Any:
    """Of the kind that the transformer belongs to, with an autoencoder for its statistics alone."""
    kind = diffusers.Flux2Pipeline if transformer.config.guidance_embeds else diffusers.Flux2KleinPipeline
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**options)
    parts = {"vae": tiny_pipelines.flux2_vae(), "scheduler": scheduler, "transformer": transformer}
    pipeline = kind(**parts, **dict.fromkeys(TEXT))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_flux2(pipeline: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the pipeline draws from this noise, before its autoencoder."""
    height, width = (16 * size for size in x.shape[-2:])
    return pipeline(latents=x, output_type="latent", height=height, width=width, **options).images


@pytest.mark.parametrize("flavor", ["debugmodel", "debugmodel-dev"])
def test_flux2(flavor):
    spec = spec_of("flux2", flavor)
    model, (x, _, cond) = built(spec), inputs_of(spec)
    transformer = pristine(model, spec)
    pipeline, calls = flux2_pipeline(transformer, shift=1.0), record(transformer)
    scale = GUIDANCE if "guidance" in cond else 1.0
    draw_flux2(pipeline, x, prompt_embeds=cond["prompt_embeds"], sigmas=SIGMAS, guidance_scale=scale)
    assert [call.arguments["timestep"].tolist() for call in calls] == [[sigma] * 2 for sigma in SIGMAS]
    for call in calls:
        seen, noise_level, given = call.arguments["hidden_states"], call.arguments["timestep"], call.output
        seen, given = (tokens.transpose(1, 2).unflatten(2, x.shape[-2:]) for tokens in (seen, given))
        with torch.no_grad():
            assert torch.equal(model.predict(seen, noise_level, cond), given)
            assert torch.equal(model(seen, 1 - noise_level, cond), -given)


def test_samples_of_flux2_are_those_of_its_pipeline():
    spec = spec_of("flux2")
    model, (x, _, cond) = built(spec), inputs_of(spec)
    text, null = cond["prompt_embeds"], torch.randn(*cond["prompt_embeds"].shape[1:])
    pipeline = flux2_pipeline(pristine(model, spec), use_dynamic_shifting=True)
    texts = {"prompt_embeds": text, "negative_prompt_embeds": null.expand_as(text)}
    theirs = draw_flux2(pipeline, x, **texts, guidance_scale=4.0, num_inference_steps=4)
    mean, variance = (value[:, None, None] for value in (pipeline.vae.bn.running_mean, pipeline.vae.bn.running_var))
    theirs = (F.pixel_unshuffle(theirs, 2) - mean) / (variance + pipeline.vae.config.batch_norm_eps).sqrt()
    conditioning = spec.conditioning.with_null({"prompt_embeds": null})
    predict = guided_prediction(model, conditioning=conditioning, cond=cond, guidance_scale=4.0)
    objective = build_objective(Diffusion(), spec)
    with torch.no_grad():
        ours = objective.sample(predict, x, sampling=Sampling(num_steps=4), step_noise=lambda _: x)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5), (ours - theirs).abs().max()
    assert (ours - x).abs().max() > 0.1


def test_the_loss_of_flux2_is_that_of_the_training_script_of_diffusers():
    """train_dreambooth_lora_flux2_klein.py, with the weight 1 of its default scheme."""
    spec = spec_of("flux2")
    model, (sample, t, cond) = built(spec), inputs_of(spec)
    noise, sigmas = torch.randn_like(sample), (1 - t)[:, None, None, None]
    pipeline, transformer = diffusers.Flux2KleinPipeline, pristine(model, spec)
    with torch.no_grad():
        prediction = transformer(
            hidden_states=pipeline._pack_latents((1.0 - sigmas) * sample + sigmas * noise),
            timestep=1 - t,
            encoder_hidden_states=cond["prompt_embeds"],
            txt_ids=pipeline._prepare_text_ids(cond["prompt_embeds"]),
            img_ids=pipeline._prepare_latent_ids(sample),
            guidance=None,
            return_dict=False,
        )[0]
        ids = pipeline._prepare_latent_ids(sample)
        prediction = pipeline._unpack_latents_with_ids(prediction, ids)
        expected = ((prediction - (noise - sample)) ** 2).reshape(2, -1).mean(1)

        objective = build_objective(Diffusion(timestep_sampling="uniform", timestep_shift=1.0, label_dropout=0), spec)
        randomness = Randomness(noise=noise, timestep=t, label_dropout=torch.ones(2))
        ours = objective.loss(model, {"sample": sample, "prompt_embeds": cond["prompt_embeds"]}, randomness)
    assert torch.allclose(ours, expected, rtol=0, atol=1e-6), ours - expected


DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.5, "base_image_seq_len": 256}
EVEN = torch.linspace(1, 0, 29)[:-1].tolist()
"""What these pipelines hand to their scheduler: 28 even steps."""


@pytest.mark.parametrize(
    ("name", "flavor", "options"),
    [
        ("flux", "FLUX.1-dev", {**DYNAMIC, "max_shift": 1.15, "max_image_seq_len": 4096, "shift": 3.0}),
        ("flux", "FLUX.1-schnell", {"shift": 1.0}),
        ("hunyuan_video", "HunyuanVideo", {"shift": 7.0}),
        ("z_image", "Z-Image", {"shift": 6.0}),
        ("z_image", "Z-Image-Turbo", {"shift": 3.0}),
        ("qwen_image", "Qwen-Image", {**DYNAMIC, "max_shift": 0.9, "max_image_seq_len": 8192}),
    ],
)
def test_samples_are_drawn_at_the_noise_levels_of_the_pipeline(name, flavor, options):
    """With `shift_terminal` Qwen-Image's own would end at 0.02: left out here, and said in its file."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    spec = spec_of(name, flavor)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**options)
    limits = {key: options[key] for key in ("base_shift", "max_shift") if key in options}
    mu = None
    if limits:
        mu = calculate_shift(spec.num_tokens, 256, options["max_image_seq_len"], **limits)
    scheduler.set_timesteps(sigmas=EVEN, mu=mu)
    ours = torch.tensor([1 - t for t in Timesteps(kind="uniform", shift=spec.timestep_shift).grid(28)])
    assert (scheduler.sigmas - ours).abs().max() < 1e-6


@pytest.mark.parametrize("num_steps", [4, 50])
@pytest.mark.parametrize("size", [(8, 12), (64, 64), (64, 68)])  # the last has more than 4300 tokens
def test_samples_of_flux2_are_drawn_at_noise_levels_that_depend_on_the_steps(size, num_steps):
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    flux2 = Model(name="flux2", flavor="FLUX.2-klein-4B")
    spec = build_model_spec(flux2, sample_shape=(128, *size), num_classes=0)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    mu = compute_empirical_mu(spec.num_tokens, num_steps)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / num_steps, num_steps).tolist(), mu=mu)
    timesteps = build_objective(Diffusion(), spec).timesteps
    ours = torch.tensor([1 - t for t in timesteps.grid(num_steps)])
    assert (scheduler.sigmas - ours).abs().max() < 1e-6
    assert timesteps.shift == pytest.approx(timesteps.sampling_shift(200), rel=1e-4), "that of training"
