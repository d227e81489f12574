# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Plans of jobs that encode at each step, against the encoder that such a job opens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import pytest
import tiny_pipelines
import torch
from test_plan import Census, config_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchditan.config.options import Autoencoder
from torchditan.extras.autoencoders import open_autoencoder
from torchditan.extras.autoencoders.catalogue import PUBLISHED
from torchditan.extras.latents.latent_space import open_encoder
from torchditan.extras.planner.plan import plan_run

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.(trace|save|trace_method)` is deprecated")
BATCH_SIZE = 8
ONLINE = ["--autoencoder.online", f"--training.batch_size={BATCH_SIZE}", "--activation_checkpoint.mode=full"]
ONLINE += ["--dataset.image_size=64", "--model.input_channels=none"]


class TracedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patchify, self.mix = nn.Conv2d(3, 32, 8, 8), nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, images: Tensor) -> Any:
        half = torch.full((3, 1, 1, 1), 0.5, dtype=images.dtype)  # on the device of the trace, as NVIDIA's wavelets
        images = nn.functional.conv2d(nn.functional.interpolate(images, scale_factor=2.0), half, groups=3)
        mean, logvar = self.mix(nn.functional.silu(self.patchify(images[..., ::2, ::2]))).chunk(2, dim=1)
        return mean + torch.exp(0.5 * logvar), (mean, logvar)


def save_kl(folder: Path) -> None:
    tiny_pipelines.vae().save_pretrained(folder)


def save_rae(folder: Path) -> None:
    sizes = {"encoder_hidden_size": 64, "encoder_num_hidden_layers": 2, "encoder_input_size": 56, "patch_size": 16}
    decoder = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_intermediate_size": 48}
    diffusers.AutoencoderRAE(**sizes, **decoder, decoder_num_attention_heads=2).save_pretrained(folder)


def save_cosmos(folder: Path) -> None:
    folder.mkdir()
    for file in ("encoder.jit", "decoder.jit"):
        torch.jit.trace(TracedEncoder().eval(), torch.zeros(1, 3, 64, 64)).save(str(folder / file))


@pytest.mark.parametrize(
    ("name", "save", "flags"),
    [
        ("diffusers", save_kl, ["--autoencoder.sample_posterior"]),
        ("rae", save_rae, ["--autoencoder.dtype=bfloat16"]),
        ("cosmos", save_cosmos, ["--autoencoder.shift=0.0", "--autoencoder.scale=1.0"]),
    ],
)
def test_the_plan_has_the_bytes_the_flops_and_the_peak_of_the_encoder(
    name: str, save: Callable[[Path], None], flags: list[str], tmp_path: Path
) -> None:
    save(tmp_path / "saved")
    config = config_of(*ONLINE, f"--autoencoder.name={name}", f"--autoencoder.path={tmp_path / 'saved'}", *flags)
    plan = plan_run(config, device="cpu", num_devices=1)
    space = open_encoder(config.autoencoder, image_shape=(3, 64, 64), device=torch.device("cpu"))
    weights = [*space.autoencoder.networks.parameters(), *space.autoencoder.networks.buffers()]
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    assert plan.model.spec.sample_shape == space.sample_shape
    assert plan.parts["frozen networks"] == num_bytes > 0

    def encode(images: Tensor) -> Tensor:
        noise = torch.zeros(len(images), *space.sample_shape) if space.draws_posterior else None
        return space.prepare({"sample": images}, noise)["sample"]

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it knows no kernel of the CPU
        encode(torch.zeros(1, 3, 64, 64))
    assert plan.model.encoder.flops == counter.get_total_flops() > 0

    images = torch.zeros(BATCH_SIZE, 3, 64, 64)
    with torch.no_grad(), Census(*weights, images) as census:
        encode(images)
    latents = 4 * BATCH_SIZE * math.prod(space.sample_shape)  # these and their noise are in the plan's batch
    planned = num_bytes + plan.model.frozen[0].peak(BATCH_SIZE) + (1 + space.draws_posterior) * latents
    assert census.peak == planned


def test_a_plan_peaks_where_it_encodes(tmp_path: Path) -> None:
    """The peak is that of encoding or that of the model, not their sum: encoding frees its memory."""
    save_kl(tmp_path / "saved")
    flags = [*ONLINE, "--autoencoder.name=diffusers", f"--autoencoder.path={tmp_path / 'saved'}"]
    small, large = (
        plan_run(config_of(*flags, f"--dataset.image_size={size}"), device="h100", num_devices=1) for size in (64, 512)
    )
    assert small.model.spec.sample_shape == (16, 8, 8) and large.model.spec.sample_shape == (16, 64, 64)
    assert large.peak.label == "frozen networks"
    assert large.peak.parts["activations"] == 0
    assert 60 < large.parts["working memory"] / small.model.frozen[0].peak(BATCH_SIZE) < 68


def test_the_catalogue_opens_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    rae = {"name": "rae", "path": "nyu-visionx/RAE-dinov2-wReg-base-ViTXL-n08"}
    millions = {}
    for section in [rae, *({"name": name} for name, entry in PUBLISHED.items() if entry.config)]:
        opened = open_autoencoder(Autoencoder(**section), device=torch.device("meta"))  # refuses other channels
        opened.drop_decoder()
        millions[opened.name] = sum(weight.numel() for weight in opened.networks.parameters()) // 1_000_000
    assert (millions["rae"], millions["sd-vae"]) == (86, 34), "DINOv2-B, and that of Stable Diffusion"
