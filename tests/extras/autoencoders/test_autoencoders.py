# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Every autoencoder behind the common interface encodes exactly like the code of its publisher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load, save_file
from torch import Tensor, nn

from torchditan.config.options import Autoencoder as AutoencoderConfig
from torchditan.errors import ConfigError
from torchditan.extras.autoencoders import Autoencoder, kind_of, open_autoencoder
from torchditan.extras.autoencoders.catalogue import PUBLISHED
from torchditan.extras.autoencoders.cosmos import CosmosAutoencoder

REPOSITORY = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
PUBLISHED_NUMBERS = {
    "sd-vae": ("stabilityai/sd-vae-ft-ema", "", 4, 8, 0.0, 0.18215),
    "sdxl": ("stabilityai/sdxl-vae", "", 4, 8, 0.0, 0.13025),
    "sd3": ("stabilityai/stable-diffusion-3-medium-diffusers", "vae", 16, 8, 0.0609, 1.5305),
    "flux": ("black-forest-labs/FLUX.1-schnell", "vae", 16, 8, 0.1159, 0.3611),
    "dc-ae": ("mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers", "", 32, 32, 0.0, 0.41407),
    "cosmos-ci8x8": ("nvidia/Cosmos-0.1-Tokenizer-CI8x8", "", 16, 8, None, None),
    "cosmos-ci16x16": ("nvidia/Cosmos-0.1-Tokenizer-CI16x16", "", 16, 16, None, None),
}
FROM_DIFFUSERS = [name for name in PUBLISHED if kind_of(name) == "diffusers"]


def open_as(name: str, *, image_channels: int | None = 3, **options: Any) -> Autoencoder:
    options = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    config = AutoencoderConfig(name=name, **options)
    return open_autoencoder(config, device=CPU, image_channels=image_channels)


def refuse(message: str, name: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        open_as(name, **options)
    assert "\n" not in str(error.value)


def random_images(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


# The interface: names and options


def test_unknown_name_lists_all_and_names_the_nearest() -> None:
    names = "haar, cosmos, diffusers, sd-vae, sdxl, sd3, flux, dc-ae, cosmos-ci8x8, cosmos-ci16x16"
    refuse(f'autoencoder.name = "sdxll": must be one of {names}, or module:name; did you mean sdxl?', "sdxll")


@pytest.mark.parametrize("name", ["cosmos", "diffusers"])
def test_place_of_the_weights_must_be_given(name: str) -> None:
    refuse("autoencoder.path = none: .*given: .*folder", name)


@pytest.mark.parametrize("name", [*PUBLISHED, "cosmos"])
def test_grey_images_are_refused_before_anything_is_fetched(name: str) -> None:
    refuse(f'name = "{name}": encodes images of 3 channel.s., and these have 1', name, image_channels=1, path="a/b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_another_downsampling_is_refused_before_anything_is_fetched(name: str) -> None:
    has = PUBLISHED[name].downsampling
    refuse(f"autoencoder.downsampling = 4: {name} has {has}; leave it out", name, downsampling=4)


def test_given_normalisation_is_one_number_or_one_per_channel() -> None:
    one = open_as("haar", downsampling=2, shift=[0.5], scale=[2.0])
    each = open_as("haar", downsampling=2, shift=[0.5] * 12, scale=[2.0] * 12)
    raw, _ = one.moments(random_images(1, 3, 8, 8))
    assert torch.equal(one.encode(random_images(1, 3, 8, 8)), (raw - 0.5) * 2)
    assert torch.equal(each.encode(random_images(1, 3, 8, 8)), (raw - 0.5) * 2)
    torch.testing.assert_close(one.decode(one.encode(random_images(1, 3, 8, 8))), random_images(1, 3, 8, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": [0.0] * 3, "scale": [1.0]}, "must be one number, or one for each of the 48 latent channels"),
        ({"shift": [0.0], "scale": [1.0] * 47}, "must be one number, or one for each of the 48 latent channels"),
        ({"shift": [], "scale": [1.0]}, "autoencoder.shift = .*: must be one number"),
        ({"shift": [0.0]}, "autoencoder.scale = none: must be given with the other .* haar publishes none"),
        ({"scale": [1.0]}, "autoencoder.shift = none: must be given with the other .* haar publishes none"),
        ({"downsampling": 3}, "autoencoder.downsampling = 3: must be one of 2, 4, 8 for haar"),
        ({"path": "somewhere"}, 'autoencoder.path = "somewhere": haar has no weights; leave it out'),
        ({"dtype": "bfloat16"}, 'autoencoder.dtype = "bfloat16": haar is exact in float32 only'),
        (
            {"fingerprint": "haar-8-3"},
            'autoencoder.name = "haar": the latents come from haar-8-3, this decoder is haar-4-3; give the autoencoder',
        ),
    ],
)
def test_what_haar_cannot_do_is_one_line(options: dict[str, Any], message: str) -> None:
    refuse(message, "haar", **options)


# haar


@pytest.mark.parametrize("downsampling", [2, 4, 8])
@pytest.mark.parametrize("channels", [1, 3])
def test_haar_gives_back_the_same_8_bit_pixels(downsampling: int, channels: int) -> None:
    pixels = torch.randint(0, 256, (4, channels, 16, 40), generator=torch.Generator().manual_seed(0))
    haar = open_as("haar", image_channels=channels, downsampling=downsampling, shift=[0.3], scale=[0.7])
    latents = haar.encode(pixels / 127.5 - 1)
    assert latents.shape[1:] == haar.latent_shape(16, 40)
    assert latents.shape[1:] == (channels * downsampling**2, 16 // downsampling, 40 // downsampling)
    decoded = haar.decode(latents)
    assert (decoded - (pixels / 127.5 - 1)).abs().max() < 3e-6
    assert torch.equal(((decoded + 1) * 127.5).round().clamp(0, 255).long(), pixels)


@pytest.mark.parametrize("downsampling", [2, 4, 8])
def test_haar_is_orthonormal(downsampling: int) -> None:
    haar = open_as("haar", downsampling=downsampling, image_channels=1)
    size = downsampling**2
    basis = torch.eye(size).view(size, 1, downsampling, downsampling)
    matrix = haar.moments(basis)[0].flatten(1)  # (pixels, bands)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))


def test_haar_puts_mean_edges_and_diagonal_of_a_channel_side_by_side() -> None:
    images = torch.tensor([[[[1.0, 2.0], [4.0, 8.0]]], [[[1.0, 1.0], [1.0, 1.0]]]])  # (2, 1, 2, 2)
    bands, logvar = open_as("haar", downsampling=2, image_channels=1).moments(images)
    assert bands.flatten(1).tolist() == [[7.5, -2.5, -4.5, 1.5], [2.0, 0.0, 0.0, 0.0]]
    assert logvar is None


def test_haar_publishes_no_normalisation_and_names_itself() -> None:
    haar = open_as("haar")
    assert (haar.downsampling, haar.latent_channels, haar.fingerprint) == (4, 48, "haar-4-3")
    assert haar.shift is None and haar.scale is None and haar.path is None and not haar.has_posterior
    assert open_as("haar", image_channels=None).fingerprint == "haar-4-3"
    assert open_as("haar", image_channels=1).fingerprint == "haar-4-1"
    assert open_as("haar", fingerprint="haar-4-3").fingerprint == "haar-4-3"


def test_size_that_is_no_multiple_of_the_downsampling_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"image_size = \[32, 30\]: .*multiple .*4, .*downsampling .*haar"):
        open_as("haar").latent_shape(32, 30)


# Cosmos


class TinyEncoder(nn.Module):
    """Patches of 8 to 16 channels; a kernel made in forward freezes the traced dtype, as NVIDIA's wavelets do."""

    def __init__(self, formulation: str = "VAE", *, patch_size: int = 8) -> None:
        super().__init__()
        self.formulation = formulation
        self.unused = nn.Parameter(torch.zeros(1))
        self.patchify = nn.Conv2d(3, 32, patch_size, patch_size)
        self.smooth = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, images: Tensor) -> Any:
        half = torch.full((3, 1, 1, 1), 0.5, dtype=images.dtype)
        hidden = self.patchify(nn.functional.conv2d(images, half, groups=3))
        mean, logvar = self.smooth(nn.functional.silu(hidden)).chunk(2, dim=1)
        if self.formulation == "VAE":
            return mean + torch.exp(0.5 * logvar) * torch.randn_like(mean), (mean, logvar)
        if self.formulation == "AE":  # what NVIDIA's files give that are no VAE
            return mean, (torch.tensor([0.0]), torch.tensor([0.0]))
        return mean


class TinyDecoder(nn.Module):
    def __init__(self, latent_channels: int = 16, *, patch_size: int = 8) -> None:
        super().__init__()
        self.unpatchify = nn.ConvTranspose2d(latent_channels, 3, patch_size, patch_size)

    def forward(self, latents: Tensor) -> Tensor:
        return torch.tanh(self.unpatchify(latents))


@pytest.fixture
def trace() -> Callable[..., None]:
    """Traces a module at one size, in the dtype of its weights, into a file."""

    def write(module: nn.Module, example: Tensor, file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        torch.jit.trace(module.eval(), example, check_trace=False).save(str(file))

    return write


@pytest.fixture
def cosmos(tmp_path: Path, trace: Callable[..., None]) -> Callable[..., Any]:
    """Writes a traced pair, 64 x 64, and gives the modules it was traced from."""

    def write(
        name: str = "cosmos", *, dtype: torch.dtype = torch.float32, formulation: str = "VAE", patch_size: int = 8
    ) -> SimpleNamespace:
        torch.manual_seed(0)
        encoder = TinyEncoder(formulation, patch_size=patch_size).to(dtype)
        decoder = TinyDecoder(patch_size=patch_size).to(dtype)
        cells = 64 // patch_size
        trace(encoder, torch.zeros(1, 3, 64, 64, dtype=dtype), tmp_path / name / "encoder.jit")
        trace(decoder, torch.zeros(1, 16, cells, cells, dtype=dtype), tmp_path / name / "decoder.jit")
        return SimpleNamespace(path=tmp_path / name, encoder=encoder, decoder=decoder)

    return write


pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.(trace|save|trace_method)` is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.tensor results are registered as constants"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (32, 32), (40, 96), (8, 8)])
@torch.no_grad()
def test_cosmos_gives_the_latents_of_the_module_it_was_traced_from(
    cosmos: Callable[..., Any], dtype: torch.dtype, height: int, width: int
) -> None:
    traced = cosmos(dtype=dtype)
    opened = open_as("cosmos", path=traced.path, shift=[0.25], scale=[2.0])
    images = random_images(3, 3, height, width)
    _, (mean, logvar) = traced.encoder(images.to(dtype))
    for _ in range(3):  # TorchScript optimises itself over the first calls
        opened_mean, opened_logvar = opened.moments(images)
        assert opened_mean.dtype == torch.float32
        assert torch.equal(opened_mean, mean.float())
        assert opened_logvar is not None and torch.equal(opened_logvar, logvar.float())
    assert torch.equal(opened.encode(images), (mean.float() - 0.25) * 2)
    assert opened.latent_shape(height, width) == mean.shape[1:]
    decoded = opened.decode(opened.encode(images))
    raw = ((mean.float() - 0.25) * 2) / 2 + 0.25
    assert torch.equal(decoded, traced.decoder(raw.to(dtype)).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosmos_dtype_channels_downsampling_and_posterior_are_probed(
    cosmos: Callable[..., Any], dtype: torch.dtype
) -> None:
    opened = open_as("cosmos", path=cosmos(dtype=dtype, patch_size=16).path)
    assert (opened.dtype, opened.latent_channels, opened.downsampling) == (dtype, 16, 16)
    assert opened.has_posterior and opened.shift is None and opened.scale is None
    assert open_as("cosmos", path=opened.path, dtype=str(dtype).removeprefix("torch.")).dtype == dtype


@pytest.mark.parametrize("formulation", ["AE", "tensor"])
@torch.no_grad()
def test_cosmos_without_a_variance_gives_its_latent_as_the_mean(cosmos: Callable[..., Any], formulation: str) -> None:
    traced = cosmos(formulation=formulation)
    opened = open_as("cosmos", path=traced.path)
    images = random_images(2, 3, 32, 48)
    output = traced.encoder(images)
    mean, logvar = opened.moments(images)
    assert torch.equal(mean, output if formulation == "tensor" else output[0])
    assert logvar is None and not opened.has_posterior


def test_cosmos_warns_nothing(cosmos: Callable[..., Any], recwarn: pytest.WarningsRecorder) -> None:
    path = cosmos().path
    recwarn.clear()
    open_as("cosmos", path=path).moments(random_images(1, 3, 64, 64))
    assert not recwarn.list


def test_cosmos_fingerprint_names_the_bytes_of_both_files(cosmos: Callable[..., Any], tmp_path: Path) -> None:
    path = cosmos().path
    fingerprint = open_as("cosmos", path=path).fingerprint
    assert fingerprint.startswith("cosmos-") and len(fingerprint) == len("cosmos-") + 16
    shutil.copytree(path, tmp_path / "copy")
    assert open_as("cosmos", path=tmp_path / "copy", fingerprint=fingerprint).fingerprint == fingerprint
    other = cosmos("other", formulation="AE").path
    for file in ("encoder.jit", "decoder.jit"):
        mixed = tmp_path / f"mixed_{file}"
        shutil.copytree(path, mixed)
        (mixed / file).write_bytes((other / file).read_bytes() + b"\0" * (file == "decoder.jit"))
        assert CosmosAutoencoder.open(mixed, device=CPU).fingerprint != fingerprint
    refuse(
        f"the latents come from {fingerprint}, this decoder is cosmos-", "cosmos", path=other, fingerprint=fingerprint
    )


@pytest.mark.parametrize(("dtype", "asked"), [(torch.float32, "bfloat16"), (torch.bfloat16, "float32")])
def test_cosmos_in_another_dtype_than_traced_is_one_line(
    cosmos: Callable[..., Any], dtype: torch.dtype, asked: str
) -> None:
    traced = str(dtype).removeprefix("torch.")
    message = f'autoencoder.dtype = "{asked}": encoder.jit of .* is traced in {traced} and computes only in it'
    refuse(message, "cosmos", path=cosmos(dtype=dtype).path, dtype=asked)


@pytest.mark.parametrize("file", ["encoder.jit", "decoder.jit"])
def test_cosmos_with_one_file_missing_names_it(cosmos: Callable[..., Any], file: str) -> None:
    path = cosmos().path
    (path / file).unlink()
    refuse(f"autoencoder.path = .*: has no {file}; must hold encoder.jit and decoder.jit", "cosmos", path=path)


@pytest.mark.parametrize("file", ["encoder.jit", "decoder.jit"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "state dict"])
def test_cosmos_file_that_is_no_torchscript_is_one_line(cosmos: Callable[..., Any], file: str, damage: str) -> None:
    path = cosmos().path
    content = (path / file).read_bytes()
    if damage == "state dict":
        torch.save({"weight": torch.zeros(1)}, path / file)
    else:
        damaged = {"truncated": content[: len(content) // 2], "empty": b"", "text": b"version 1\n"}
        (path / file).write_bytes(damaged[damage])
    refuse(
        f"autoencoder.path = .*: {file} is not a complete TorchScript file",
        "cosmos",
        path=path,
    )


class Pooled(TinyEncoder):
    def forward(self, images: Tensor) -> Any:
        return self.patchify(images).mean((2, 3))


@pytest.mark.parametrize(("encoder", "channels"), [(Pooled(), 3), (nn.Conv2d(1, 16, 8, 8), 1)])
def test_cosmos_encoder_of_something_else_is_one_line(
    cosmos: Callable[..., Any], trace: Callable[..., None], encoder: nn.Module, channels: int
) -> None:
    path = cosmos().path
    trace(encoder, torch.zeros(1, channels, 64, 64), path / "encoder.jit")
    refuse("autoencoder.path = .*: encoder.jit does not encode an image of 64 x 64", "cosmos", path=path)


def test_cosmos_under_a_published_name_must_be_that_one(cosmos: Callable[..., Any]) -> None:
    path = cosmos().path
    assert open_as("cosmos-ci8x8", path=path).name == "cosmos-ci8x8"
    message = "has 16 latent channels at 1/8, and cosmos-ci16x16 16 at 1/16; open it as --autoencoder.name cosmos$"
    refuse(message, "cosmos-ci16x16", path=path)


# diffusers


def kl(latent_channels: int = 4, *, widths: tuple[int, ...] = (4, 4), **options: Any) -> Any:
    torch.manual_seed(latent_channels)
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=widths,
        latent_channels=latent_channels,
        norm_num_groups=2,
        **options,
    ).eval()


def dc(latent_channels: int = 4, *, num_levels: int = 2, **options: Any) -> Any:
    torch.manual_seed(latent_channels)
    block_types = ("ResBlock",) * (num_levels - 1) + ("EfficientViTBlock",)
    multiscales = ((),) * (num_levels - 1) + ((5,),)
    return diffusers.AutoencoderDC(
        latent_channels=latent_channels,
        attention_head_dim=2,
        encoder_block_types=block_types,
        decoder_block_types=block_types,
        encoder_block_out_channels=(8,) * num_levels,
        decoder_block_out_channels=(8,) * num_levels,
        encoder_qkv_multiscales=multiscales,
        decoder_qkv_multiscales=multiscales,
        encoder_layers_per_block=(1,) * num_levels,
        decoder_layers_per_block=(1,) * num_levels,
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        **options,
    ).eval()


def of_published(name: str) -> Any:
    """A tiny random model with the latents of a published one."""
    return dc(32, num_levels=6) if name == "dc-ae" else kl(PUBLISHED[name].latent_channels, widths=(4, 4, 4, 4))


def save(model: Any, folder: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """As diffusers saves it, with keys of its config dropped or changed."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps({**kept, **changes}))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"latent_channels": 4, "scaling_factor": 0.18215},
        {
            "latent_channels": 16,
            "scaling_factor": 1.5305,
            "shift_factor": 0.0609,
            "use_quant_conv": False,
            "use_post_quant_conv": False,
        },
    ],
)
@torch.no_grad()
def test_autoencoder_kl_gives_what_diffusers_gives(tmp_path: Path, options: dict[str, Any]) -> None:
    model = kl(**options)
    opened = open_as("diffusers", path=save(model, tmp_path))
    assert (opened.downsampling, opened.has_posterior, opened.dtype) == (2, True, torch.float32)
    images = random_images(2, 3, 16, 24)
    posterior = model.encode(images).latent_dist
    mean, logvar = opened.moments(images)
    assert logvar is not None and torch.equal(mean, posterior.mean) and torch.equal(logvar, posterior.logvar)
    assert mean.shape[1:] == opened.latent_shape(16, 24)
    shift, factor = options.get("shift_factor", 0.0), options["scaling_factor"]
    latents = (posterior.mean - shift) * factor
    assert torch.equal(opened.encode(images), latents)
    assert torch.equal(opened.decode(latents), model.decode(latents / factor + shift).sample)


@pytest.mark.parametrize("changes", [{"scaling_factor": [1.0]}, {"shift_factor": 10**400}, {"layers_per_block": 2**40}])
def test_numbers_of_config_json_that_diffusers_does_not_check_are_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = save(kl(), tmp_path, **changes)
    with pytest.raises(ConfigError, match=r"config\.json "):
        open_as("diffusers", path=path)


def test_a_scale_beyond_64_bits_is_a_number(tmp_path: Path) -> None:
    opened = open_as("diffusers", path=save(kl(), tmp_path, scaling_factor=2**80, shift_factor=2**70))
    assert opened.scale.tolist() == [2.0**80] * 4 and opened.shift.tolist() == [2.0**70] * 4


@torch.no_grad()
def test_autoencoder_dc_gives_what_diffusers_gives(tmp_path: Path) -> None:
    model = dc(scaling_factor=0.41407)
    opened = open_as("diffusers", path=save(model, tmp_path))
    assert (opened.downsampling, opened.has_posterior, opened.latent_channels) == (2, False, 4)
    images = random_images(2, 3, 16, 24)
    mean, logvar = opened.moments(images)
    assert logvar is None and torch.equal(mean, model.encode(images).latent)
    latents = mean * 0.41407
    assert torch.equal(opened.encode(images), latents)
    assert torch.equal(opened.decode(latents), model.decode(latents / 0.41407).sample)


def test_means_and_deviations_per_channel_of_the_config_normalise(tmp_path: Path) -> None:
    """As StableDiffusionXLPipeline does it: (z - mean) x scaling_factor / std."""
    mean, std = [0.1, 0.2, 0.3, 0.4], [1.0, 2.0, 4.0, 8.0]
    model = kl(scaling_factor=0.5, latents_mean=mean, latents_std=std)
    opened = open_as("diffusers", path=save(model, tmp_path))
    assert opened.shift is not None and opened.scale is not None
    assert torch.equal(opened.shift, torch.tensor(mean))
    assert opened.scale.tolist() == [0.5, 0.25, 0.125, 0.0625]


def test_a_config_without_scaling_publishes_no_normalisation(tmp_path: Path) -> None:
    opened = open_as("diffusers", path=save(kl(), tmp_path, drop=("scaling_factor",)))
    assert opened.shift is None and opened.scale is None


def test_scale_alone_keeps_the_published_shift(tmp_path: Path) -> None:
    path = save(kl(scaling_factor=0.5, shift_factor=0.25), tmp_path)
    opened = open_as("diffusers", path=path, scale=[3.0])
    assert opened.shift is not None and opened.scale is not None
    assert opened.shift.tolist() == [0.25] * 4 and opened.scale.tolist() == [3.0] * 4
    opened = open_as("diffusers", path=path, shift=[1.0, 2.0, 3.0, 4.0])
    assert opened.shift is not None and opened.scale is not None
    assert opened.shift.tolist() == [1.0, 2.0, 3.0, 4.0] and opened.scale.tolist() == [0.5] * 4


def test_the_table_holds_the_published_numbers() -> None:
    table = {
        name: (
            entry.hub_name,
            entry.subfolder,
            entry.latent_channels,
            entry.downsampling,
            entry.shift,
            entry.scale,
        )
        for name, entry in PUBLISHED.items()
    }
    assert table == PUBLISHED_NUMBERS


@pytest.mark.parametrize("name", FROM_DIFFUSERS)
def test_published_name_is_fetched_and_normalised_as_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_name, subfolder, latent_channels, downsampling, shift, scale = PUBLISHED_NUMBERS[name]
    save(of_published(name), tmp_path / hub_name / subfolder, drop=("scaling_factor",))

    def download(repository: str, file: str, *, subfolder: str | None) -> str:
        path = tmp_path / repository / (subfolder or "") / file
        assert path.exists(), path
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    opened = open_as(name)
    assert (opened.name, opened.path) == (name, hub_name)
    assert (opened.latent_channels, opened.downsampling) == (latent_channels, downsampling)
    assert opened.shift is not None and opened.scale is not None
    assert torch.equal(opened.shift, torch.full((latent_channels,), shift))
    assert torch.equal(opened.scale, torch.full((latent_channels,), scale))


def test_own_config_goes_before_the_table(tmp_path: Path) -> None:
    path = save(of_published("sd-vae"), tmp_path, scaling_factor=0.75)
    opened = open_as("sd-vae", path=path)
    assert opened.scale is not None and opened.scale.tolist() == [0.75] * 4


def test_another_autoencoder_under_a_published_name_is_one_line(tmp_path: Path) -> None:
    path = save(of_published("flux"), tmp_path)
    message = "has 16 latent channels at 1/8, and sdxl 4 at 1/8; open it as --autoencoder.name diffusers"
    refuse(message, "sdxl", path=path)


def test_whole_pipeline_is_opened_by_its_vae_folder(tmp_path: Path) -> None:
    save(kl(), tmp_path / "vae")
    assert open_as("diffusers", path=tmp_path).latent_channels == 4
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    refuse("vae/diffusion_pytorch_model.safetensors; .*config.json", "diffusers", path=tmp_path)


@pytest.mark.parametrize(
    ("stored", "force_upcast", "asked", "dtype"),
    [
        (torch.float32, True, None, torch.float32),
        (torch.float16, True, None, torch.float32),
        (torch.float16, False, None, torch.float32),
        (torch.bfloat16, True, None, torch.float32),
        (torch.bfloat16, False, None, torch.bfloat16),
        (torch.bfloat16, False, "float32", torch.float32),
        (torch.float32, True, "bfloat16", torch.bfloat16),
    ],
)
def test_dtype_is_what_the_weights_need_or_what_is_asked_for(
    tmp_path: Path, stored: torch.dtype, force_upcast: bool, asked: str | None, dtype: torch.dtype
) -> None:
    path = save(kl(force_upcast=force_upcast).to(stored), tmp_path)
    opened = open_as("diffusers", path=path, dtype=asked)
    assert opened.dtype == dtype
    assert {weight.dtype for weight in opened._model.parameters()} == {dtype}
    mean, _ = opened.moments(random_images(1, 3, 8, 8))
    assert mean.dtype == torch.float32 and mean.isfinite().all()


def test_dc_in_bfloat16_computes_in_bfloat16(tmp_path: Path) -> None:
    assert open_as("diffusers", path=save(dc().to(torch.bfloat16), tmp_path)).dtype == torch.bfloat16


def test_diffusers_fingerprint_names_the_weights(tmp_path: Path) -> None:
    model = kl()
    fingerprint = open_as("diffusers", path=save(model, tmp_path / "a")).fingerprint
    assert fingerprint.startswith("diffusers-") and len(fingerprint) == len("diffusers-") + 16
    copied = open_as("diffusers", path=save(model, tmp_path / "b", scaling_factor=2.0), dtype="bfloat16")
    assert copied.fingerprint == fingerprint
    with torch.no_grad():
        model.decoder.conv_out.bias[0] += 1e-3
    changed = save(model, tmp_path / "c")
    assert open_as("diffusers", path=changed).fingerprint != fingerprint
    refuse(f"the latents come from {fingerprint}, this decoder is", "diffusers", path=changed, fingerprint=fingerprint)


def test_attention_names_of_2022_are_the_same_weights(tmp_path: Path) -> None:
    path = save(kl(), tmp_path)
    opened = open_as("diffusers", path=path)
    weights = load((path / "diffusion_pytorch_model.safetensors").read_bytes())
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for name, tensor in weights.items():
        for today, before in old.items():
            name = name.replace(f".{today}.", f".{before}.")
        renamed[name] = tensor
    assert len(renamed.keys() - weights.keys()) == 16  # two attention layers with four weights and biases
    save_file(renamed, path / "diffusion_pytorch_model.safetensors")
    reopened = open_as("diffusers", path=path)
    assert reopened.fingerprint == opened.fingerprint
    images = random_images(1, 3, 16, 16)
    assert torch.equal(reopened.encode(images), opened.encode(images))


def test_damaged_weights_are_one_line(tmp_path: Path) -> None:
    path = save(kl(), tmp_path)
    file = path / "diffusion_pytorch_model.safetensors"
    whole = file.read_bytes()
    weights = load(whole)
    for content in (whole[: len(whole) // 2], b"", b"version 1\n"):
        file.write_bytes(content)
        refuse("diffusion_pytorch_model.safetensors .*complete safetensors file", "diffusers", path=path)
    name = "decoder.conv_out.bias"
    without = {key: tensor for key, tensor in weights.items() if key != name}
    for wrong in (without, {**weights, name: torch.zeros(5)}):
        save_file(wrong, file)
        refuse(f"does not match config.json: 1 tensors are missing, .*, {name} first", "diffusers", path=path)
    save_file({**weights, "more": torch.zeros(1)}, file)
    refuse("match config.json: 1 tensors .*missing, .*, more first", "diffusers", path=path)


def test_weights_may_be_overwritten_while_the_autoencoder_is_open(tmp_path: Path) -> None:
    path = save(kl(), tmp_path)
    opened = open_as("diffusers", path=path)
    before, _ = opened.moments(random_images(1, 3, 8, 8))
    weights = path / "diffusion_pytorch_model.safetensors"
    size = weights.stat().st_size
    with open(weights, "r+b") as file:  # in place, as `cp` does it
        file.write(bytes(size))
    assert torch.equal(opened.moments(random_images(1, 3, 8, 8))[0], before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "config.json describes a model that is not from diffusers; must be AutoencoderKL or AutoencoderDC"),
        ('{"_class_name": "UNet2DModel"}', "config.json describes UNet2DModel; must be AutoencoderKL or AutoencoderDC"),
        (
            '{"_class_name": "AutoencoderKL", "down_block_types": ["Nonsense"]}',
            "config.json is not accepted by AutoencoderKL of diffusers",
        ),
        ('{"_class_name": "AutoencoderKL", "act_fn": 1.5}', "config.json is not accepted by AutoencoderKL"),
    ],
)
def test_config_of_something_else_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = save(kl(), tmp_path)
    (path / "config.json").write_text(content)
    refuse(message, "diffusers", path=path)


def test_images_of_other_channels_than_the_model_are_one_line(tmp_path: Path) -> None:
    path = save(kl(in_channels=1, out_channels=1), tmp_path)
    refuse("encodes images .*1 channel.s., .*3", "diffusers", path=path)
    assert open_as("diffusers", path=path, image_channels=1).image_channels == 1
    assert open_as("diffusers", path=path, image_channels=None).image_channels == 1


def test_diffusers_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(kl(), tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    refuse(r"package diffusers .*missing: pip install 'torchditan\[diffusers\]'", "diffusers", path=path)


# The hub


@pytest.mark.parametrize("place", ["nowhere", "./a/b", "a/b/c", "/nowhere"])
def test_place_that_is_no_folder_and_no_hub_name_is_one_line(place: str) -> None:
    right = "is not a folder; must be one with encoder.jit and decoder.jit, or owner/name on the Hugging Face hub"
    refuse(f'autoencoder.path = "{place}": {right}', "cosmos", path=place)


def test_file_where_a_folder_must_be_is_one_line(cosmos: Callable[..., Any]) -> None:
    refuse('encoder.jit": .*folder;', "cosmos", path=cosmos().path / "encoder.jit")


def failing(error: Exception) -> Callable[..., str]:
    def download(*args: Any, **options: Any) -> str:
        raise error

    return download


RESPONSE: Any = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("401\nlong", response=RESPONSE), "is gated: accept its terms on its page, then log in"),
        (
            errors.RepositoryNotFoundError("404\nlong", response=RESPONSE),
            "is not a folder here, and was not found on the",
        ),
        (
            errors.LocalEntryNotFoundError("offline"),
            "cannot be reached .no network, or HF_HUB_OFFLINE is set.; go online",
        ),
        (errors.RemoteEntryNotFoundError("404\nlong", response=RESPONSE), "has no .* on the Hugging Face hub"),
        (
            errors.HfHubHTTPError("500\nlong", response=RESPONSE),
            "cannot be fetched from the Hugging Face hub .500.; try",
        ),
        (OSError(28, "No space left on device"), "cannot be fetched .*No space left on device"),
        (RuntimeError("Connection\nbroken"), "cannot be fetched from the Hugging Face hub .Connection.; try again"),
    ],
)
@pytest.mark.parametrize("name", ["cosmos-ci8x8", "flux"])
def test_what_the_hub_refuses_is_one_line(
    name: str, error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", failing(error))
    refuse(f'autoencoder.path = "{PUBLISHED[name].hub_name}": .*{message}', name)


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, with HF_HUB_OFFLINE set."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["cosmos-ci8x8", "sd3"])
def test_offline_without_a_cached_copy_is_one_line(name: str, offline_cache: Path) -> None:
    refuse("in .*hub's cache, .*Hugging Face hub .*reached", name)


def test_offline_opens_what_was_fetched_before(offline_cache: Path, cosmos: Callable[..., Any]) -> None:
    def snapshot(hub_name: str) -> Path:
        repository = offline_cache / f"models--{hub_name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        return repository / "snapshots" / ("0" * 40)

    traced = cosmos().path
    shutil.copytree(traced, snapshot("nvidia/Cosmos-0.1-Tokenizer-CI8x8"))
    opened = open_as("cosmos-ci8x8")
    assert opened.path == "nvidia/Cosmos-0.1-Tokenizer-CI8x8"
    assert opened.fingerprint == open_as("cosmos", path=traced).fingerprint
    save(of_published("sd3"), snapshot("someone/pipeline") / "vae")
    assert open_as("diffusers", path="someone/pipeline").latent_channels == 16


def test_the_hub_is_asked_in_a_process_that_imported_nothing_of_it(tmp_path: Path) -> None:
    code = (
        "import torch; from torchditan.config.options import Autoencoder\n"
        "from torchditan.extras.autoencoders import open_autoencoder\n"
        "open_autoencoder(Autoencoder(name='cosmos-ci8x8'), device=torch.device('cpu'))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "ConfigError" in result.stderr and "go online once" in result.stderr, result.stderr
