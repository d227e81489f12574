# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Every autoencoder behind the common interface encodes exactly like the code of its publisher."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import huggingface_hub
import pytest
import tiny_pipelines
import torch
from huggingface_hub import errors
from safetensors.torch import load, save_file
from torch import Tensor, nn

from torchditan.config.options import Autoencoder as AutoencoderConfig
from torchditan.config.options import Dataset
from torchditan.datasets import build_dataset
from torchditan.errors import ConfigError
from torchditan.extras.autoencoders import Autoencoder, open_autoencoder
from torchditan.extras.autoencoders.catalogue import PUBLISHED
from torchditan.extras.latents.latent_space import EncodedPixels, build_sample_space

CPU = torch.device("cpu")
CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.(trace|save|trace_method)` is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.tensor results are registered as constants"),
]


def open_as(name: str, *, image_channels: int | None = 3, **options: Any) -> Any:
    options = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    config = AutoencoderConfig(name=name, **options)
    return open_autoencoder(config, device=CPU, image_channels=image_channels)


def refuse(message: str, name: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        open_as(name, **options)
    assert "\n" not in str(error.value)


def random_images(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


# Options and haar


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sdxll", {}, 'autoencoder.name = "sdxll": must be one of haar, .*; did you mean sdxl?'),
        ("cosmos", {}, "autoencoder.path = none: .*given: .*folder"),
        ("diffusers", {}, "autoencoder.path = none: .*given: .*folder"),
        # before anything is fetched:
        ("flux", {"image_channels": 1}, 'name = "flux": encodes images of 3 channel.s., and these have 1'),
        ("cosmos", {"image_channels": 1, "path": "a/b"}, "encodes images of 3 channel.s., and these have 1"),
        ("dc-ae", {"downsampling": 4}, "autoencoder.downsampling = 4: dc-ae has 32; leave it out"),
        ("cosmos", {"path": "nowhere"}, 'path = "nowhere": is not a folder; .*encoder.jit and decoder.jit, or owner'),
        ("cosmos", {"path": "/a/b"}, 'path = "/a/b": is not a folder'),
        ("haar", {"shift": [0.0] * 3, "scale": [1.0]}, "must be one number, or one for each of the 48 latent channels"),
        ("haar", {"shift": [], "scale": [1.0]}, "autoencoder.shift = .*: must be one number"),
        ("haar", {"shift": [0.0]}, "autoencoder.scale = none: must be given with the other .* haar publishes none"),
        ("haar", {"downsampling": 3}, "autoencoder.downsampling = 3: must be one of 2, 4, 8 for haar"),
        ("haar", {"path": "somewhere"}, 'autoencoder.path = "somewhere": haar has no weights; leave it out'),
        ("haar", {"dtype": "bfloat16"}, 'autoencoder.dtype = "bfloat16": haar is exact in float32 only'),
        ("haar", {"fingerprint": "haar-8-3"}, "the latents come from haar-8-3, this decoder is haar-4-3; give the"),
    ],
)
def test_mistakes(name: str, options: dict[str, Any], message: str) -> None:
    refuse(message, name, **options)


def test_a_given_normalisation_is_one_number_or_one_per_channel() -> None:
    images = random_images(1, 3, 8, 8)
    for count in (1, 12):
        haar = open_as("haar", downsampling=2, shift=[0.5] * count, scale=[2.0] * count)
        raw, _ = haar.moments(images)
        assert torch.equal(haar.encode(images), (raw - 0.5) * 2)
        torch.testing.assert_close(haar.decode(haar.encode(images)), images)


@pytest.mark.parametrize("downsampling", [2, 4, 8])
@pytest.mark.parametrize("channels", [1, 3])
def test_haar_is_orthonormal_and_gives_back_the_same_8_bit_pixels(downsampling: int, channels: int) -> None:
    pixels = torch.randint(0, 256, (4, channels, 16, 40), generator=torch.Generator().manual_seed(0))
    haar = open_as("haar", image_channels=channels, downsampling=downsampling, shift=[0.3], scale=[0.7])
    latents = haar.encode(pixels / 127.5 - 1)
    assert latents.shape[1:] == haar.latent_shape(16, 40)
    assert latents.shape[1:] == (channels * downsampling**2, 16 // downsampling, 40 // downsampling)
    decoded = haar.decode(latents)
    assert (decoded - (pixels / 127.5 - 1)).abs().max() < 3e-6
    assert torch.equal(((decoded + 1) * 127.5).round().clamp(0, 255).long(), pixels)
    size = channels * downsampling**2
    basis = torch.eye(size).view(size, channels, downsampling, downsampling)
    matrix = haar.moments(basis)[0].flatten(1)  # (pixels, bands)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))


def test_haar_puts_mean_edges_and_diagonal_of_a_channel_side_by_side() -> None:
    images = torch.tensor([[[[1.0, 2.0], [4.0, 8.0]]], [[[1.0, 1.0], [1.0, 1.0]]]])  # (2, 1, 2, 2)
    bands, logvar = open_as("haar", downsampling=2, image_channels=1).moments(images)
    assert bands.flatten(1).tolist() == [[7.5, -2.5, -4.5, 1.5], [2.0, 0.0, 0.0, 0.0]]
    assert logvar is None


def test_haar_publishes_no_normalisation_and_names_itself() -> None:
    haar = open_as("haar", fingerprint="haar-4-3", image_channels=None)
    assert (haar.downsampling, haar.latent_channels, haar.fingerprint) == (4, 48, "haar-4-3")
    assert haar.shift is None and haar.scale is None and haar.path is None and not haar.has_posterior
    assert open_as("haar", image_channels=1).fingerprint == "haar-4-1"
    with pytest.raises(ConfigError, match=r"image_size = \[32, 30\]: .*multiple .*4, .*downsampling .*haar"):
        haar.latent_shape(32, 30)


# Cosmos


class TinyEncoder(nn.Module):
    """Patches of 8 to 16 channels; a kernel made in forward freezes the traced dtype, as NVIDIA's wavelets do."""

    def __init__(self, formulation: str = "VAE", *, patch_size: int = 8) -> None:
        super().__init__()
        self.formulation = formulation
        self.patchify = nn.Conv2d(3, 32, patch_size, patch_size)
        self.smooth = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, images: Tensor) -> Any:
        half = torch.full((3, 1, 1, 1), 0.5, dtype=images.dtype)
        hidden = self.patchify(nn.functional.conv2d(images, half, groups=3))
        mean, logvar = self.smooth(nn.functional.silu(hidden)).chunk(2, dim=1)
        if self.formulation == "VAE":
            return mean + torch.exp(0.5 * logvar) * torch.randn_like(mean), (mean, logvar)
        if self.formulation == "AE":  # NVIDIA's files of autoencoders without a variance
            return mean, (torch.tensor([0.0]), torch.tensor([0.0]))
        return images.mean((2, 3)) if self.formulation == "pooled" else mean


class TinyDecoder(nn.Module):
    def __init__(self, *, patch_size: int = 8) -> None:
        super().__init__()
        self.unpatchify = nn.ConvTranspose2d(16, 3, patch_size, patch_size)

    def forward(self, latents: Tensor) -> Tensor:
        return torch.tanh(self.unpatchify(latents))


@pytest.fixture
def cosmos(tmp_path: Path) -> Callable[..., Any]:
    """Writes a traced pair, 64 x 64, and gives the modules it was traced from."""

    def write(
        name: str = "cosmos", *, dtype: torch.dtype = torch.float32, formulation: str = "VAE", patch_size: int = 8
    ) -> SimpleNamespace:
        torch.manual_seed(0)
        encoder = TinyEncoder(formulation, patch_size=patch_size).to(dtype)
        decoder = TinyDecoder(patch_size=patch_size).to(dtype)
        cells, folder = 64 // patch_size, tmp_path / name
        folder.mkdir()
        for module, shape, file in (
            (encoder, (1, 3, 64, 64), "encoder.jit"),
            (decoder, (1, 16, cells, cells), "decoder.jit"),
        ):
            torch.jit.trace(module.eval(), torch.zeros(shape, dtype=dtype), check_trace=False).save(str(folder / file))
        return SimpleNamespace(path=folder, encoder=encoder, decoder=decoder)

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_cosmos_gives_the_latents_of_the_module_it_was_traced_from(
    cosmos: Callable[..., Any], dtype: torch.dtype
) -> None:
    traced = cosmos(dtype=dtype)
    opened = open_as("cosmos", path=traced.path, shift=[0.25], scale=[2.0], dtype=str(dtype).removeprefix("torch."))
    for height, width in ((64, 64), (40, 96), (8, 8)):
        images = random_images(3, 3, height, width)
        _, (mean, logvar) = traced.encoder(images.to(dtype))
        for _ in range(3):  # TorchScript optimises itself over the first calls
            opened_mean, opened_logvar = opened.moments(images)
            assert opened_mean.dtype == torch.float32
            assert torch.equal(opened_mean, mean.float()) and torch.equal(opened_logvar, logvar.float())
        assert torch.equal(opened.encode(images), (mean.float() - 0.25) * 2)
        assert opened.latent_shape(height, width) == mean.shape[1:]
        raw = ((mean.float() - 0.25) * 2) / 2 + 0.25
        assert torch.equal(opened.decode(opened.encode(images)), traced.decoder(raw.to(dtype)).float())


@torch.no_grad()
def test_properties_of_cosmos_are_probed(cosmos: Callable[..., Any], recwarn: pytest.WarningsRecorder) -> None:
    path = cosmos(dtype=torch.bfloat16, patch_size=16).path
    recwarn.clear()
    opened = open_as("cosmos", path=path)
    assert (opened.dtype, opened.latent_channels, opened.downsampling) == (torch.bfloat16, 16, 16)
    assert opened.has_posterior and opened.shift is None and opened.scale is None
    assert not recwarn.list
    for formulation in ("AE", "tensor"):  # without a variance, the latent is the mean
        traced = cosmos(formulation, formulation=formulation)
        opened = open_as("cosmos", path=traced.path)
        output = traced.encoder(random_images(2, 3, 32, 48))
        mean, logvar = opened.moments(random_images(2, 3, 32, 48))
        assert torch.equal(mean, output if formulation == "tensor" else output[0])
        assert logvar is None and not opened.has_posterior


def test_the_fingerprint_of_cosmos_names_the_bytes_of_both_files(cosmos: Callable[..., Any], tmp_path: Path) -> None:
    path, other = cosmos().path, cosmos("other", formulation="AE").path
    fingerprint = open_as("cosmos", path=path).fingerprint
    shutil.copytree(path, tmp_path / "copy")
    assert open_as("cosmos", path=tmp_path / "copy", fingerprint=fingerprint).fingerprint == fingerprint
    for file in ("encoder.jit", "decoder.jit"):
        mixed = shutil.copytree(path, tmp_path / f"mixed_{file}")
        (mixed / file).write_bytes((other / file).read_bytes() + b"\0" * (file == "decoder.jit"))
        refuse(f"come from {fingerprint}, this decoder is cosmos-", "cosmos", path=mixed, fingerprint=fingerprint)


def test_files_that_are_not_cosmos_are_one_line(cosmos: Callable[..., Any], tmp_path: Path) -> None:
    path = cosmos().path
    refuse('encoder.jit": .*folder;', "cosmos", path=path / "encoder.jit")
    message = 'autoencoder.dtype = "bfloat16": encoder.jit of .* is traced in float32 and computes only in it'
    refuse(message, "cosmos", path=path, dtype="bfloat16")
    assert open_as("cosmos-ci8x8", path=path).name == "cosmos-ci8x8"
    message = "has 16 latent channels at 1/8, and cosmos-ci16x16 16 at 1/16; open it as --autoencoder.name cosmos$"
    refuse(message, "cosmos-ci16x16", path=path)
    torch.save({"weight": torch.zeros(1)}, tmp_path / "state")
    for file in ("encoder.jit", "decoder.jit"):
        whole = (path / file).read_bytes()
        for content in (whole[: len(whole) // 2], b"", b"version 1\n", (tmp_path / "state").read_bytes()):
            (path / file).write_bytes(content)
            refuse(f"autoencoder.path = .*: {file} is not a complete TorchScript file", "cosmos", path=path)
        (path / file).unlink()
        refuse(f"autoencoder.path = .*: has no {file}; must hold encoder.jit and decoder.jit", "cosmos", path=path)
        (path / file).write_bytes(whole)
    pooled = cosmos("pooled", formulation="pooled").path
    refuse("autoencoder.path = .*: encoder.jit does not encode an image of 64 x 64", "cosmos", path=pooled)


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
    config = json.loads((folder / CONFIG).read_text())
    kept = {key: value for key, value in config.items() if key not in drop}
    (folder / CONFIG).write_text(json.dumps({**kept, **changes}))
    return folder


SD3_LIKE = {"scaling_factor": 1.5305, "shift_factor": 0.0609, "use_quant_conv": False, "use_post_quant_conv": False}


@pytest.mark.parametrize("options", [{"scaling_factor": 0.18215}, {"latent_channels": 16, **SD3_LIKE}])
@torch.no_grad()
def test_autoencoder_kl_gives_what_diffusers_gives(tmp_path: Path, options: dict[str, Any]) -> None:
    model = kl(**options)
    opened = open_as("diffusers", path=save(model, tmp_path))
    assert (opened.downsampling, opened.has_posterior, opened.dtype) == (2, True, torch.float32)
    images = random_images(2, 3, 16, 24)
    posterior = model.encode(images).latent_dist
    mean, logvar = opened.moments(images)
    assert torch.equal(mean, posterior.mean) and torch.equal(logvar, posterior.logvar)
    assert mean.shape[1:] == opened.latent_shape(16, 24)
    shift, factor = options.get("shift_factor", 0.0), options["scaling_factor"]
    latents = (posterior.mean - shift) * factor
    assert torch.equal(opened.encode(images), latents)
    assert torch.equal(opened.decode(latents), model.decode(latents / factor + shift).sample)


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


@torch.no_grad()
def test_autoencoder_kl_flux2_gives_the_latents_of_its_pipeline(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = tiny_pipelines.flux2_vae(), random_images(2, 3, 32, 64)
    parts = dict.fromkeys(("text_encoder", "tokenizer", "transformer"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline: Any = diffusers.Flux2KleinPipeline(**parts, vae=model, scheduler=scheduler)
    opened = open_as("flux2", path=save(model, tmp_path / "vae"))
    latents = pipeline._encode_vae_image(images, generator=None)
    assert latents.shape[1:] == opened.latent_shape(32, 64) == (128, 2, 4)
    assert torch.allclose(opened.encode(images), latents, rtol=0, atol=1e-6)
    raw = latents * (model.bn.running_var + model.config.batch_norm_eps).sqrt()[:, None, None]
    raw = pipeline._unpatchify_latents(raw + model.bn.running_mean[:, None, None])
    assert torch.allclose(opened.decode(latents), model.decode(raw).sample, rtol=0, atol=1e-5)

    half = open_as("flux2", path=save(model.bfloat16(), tmp_path / "half"))  # except one count, an int64
    assert half.dtype == torch.bfloat16 and torch.equal(half.shift, model.bn.running_mean.float())


STATISTICS = {"latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 4.0, 8.0]}


@pytest.mark.parametrize(
    ("config", "options", "shift", "scale"),
    [
        # as StableDiffusionXLPipeline does it: (z - mean) x scaling_factor / std
        ({"scaling_factor": 0.5, **STATISTICS}, {}, [0.1, 0.2, 0.3, 0.4], [0.5, 0.25, 0.125, 0.0625]),
        ({"scaling_factor": None}, {}, None, None),
        ({"scaling_factor": 2**80, "shift_factor": 2**70}, {}, [2.0**70] * 4, [2.0**80] * 4),
        # an option given alone keeps the other's published value
        ({"scaling_factor": 0.5, "shift_factor": 0.25}, {"scale": [3.0]}, [0.25] * 4, [3.0] * 4),
        ({"scaling_factor": 0.5}, {"shift": [1.0, 2.0, 3.0, 4.0]}, [1.0, 2.0, 3.0, 4.0], [0.5] * 4),
    ],
)
def test_normalisation(tmp_path: Path, config: Any, options: Any, shift: Any, scale: Any) -> None:
    opened = open_as("diffusers", path=save(kl(), tmp_path, **config), **options)
    found = [None if values is None else values.tolist() for values in (opened.shift, opened.scale)]
    assert found == [None if shift is None else torch.tensor(shift).tolist(), scale]


@pytest.mark.parametrize("name", ["sd-vae", "sd3", "dc-ae"])
def test_a_published_name_is_fetched_and_normalised_as_published(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = PUBLISHED[name]
    path = save(of_published(name), tmp_path / entry.hub_name / entry.subfolder, drop=("scaling_factor",))

    def download(repository: str, file: str, *, subfolder: str | None) -> str:
        path = tmp_path / repository / (subfolder or "") / file
        assert path.exists(), path
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    opened = open_as(name)
    assert (opened.name, opened.path) == (name, entry.hub_name)
    assert (opened.latent_channels, opened.downsampling) == (entry.latent_channels, entry.downsampling)
    assert opened.shift.tolist() == torch.full((entry.latent_channels,), entry.shift).tolist()
    assert opened.scale.tolist() == torch.full((entry.latent_channels,), entry.scale).tolist()
    own = json.loads((path / CONFIG).read_text()) | {"scaling_factor": 0.75}
    (path / CONFIG).write_text(json.dumps(own))
    assert open_as(name).scale[0] == 0.75, "its own config goes first"


def test_another_autoencoder_under_a_published_name_is_one_line(tmp_path: Path) -> None:
    message = "has 16 latent channels at 1/8, and sdxl 4 at 1/8; open it as --autoencoder.name diffusers"
    refuse(message, "sdxl", path=save(of_published("flux"), tmp_path))


def test_a_whole_pipeline_is_opened_by_its_vae_folder(tmp_path: Path) -> None:
    save(kl(), tmp_path / "vae")
    assert open_as("diffusers", path=tmp_path).latent_channels == 4
    (tmp_path / "vae" / WEIGHTS).unlink()
    refuse(f"vae/{WEIGHTS}; .*config.json", "diffusers", path=tmp_path)


@pytest.mark.parametrize(
    ("stored", "force_upcast", "asked", "dtype"),
    [
        (torch.float32, True, None, torch.float32),
        (torch.float16, False, None, torch.float32),
        (torch.bfloat16, True, None, torch.float32),
        (torch.bfloat16, False, None, torch.bfloat16),
        (torch.bfloat16, False, "float32", torch.float32),
        (torch.float32, True, "bfloat16", torch.bfloat16),
    ],
)
def test_the_dtype_is_what_the_weights_need_or_what_is_asked_for(
    tmp_path: Path, stored: torch.dtype, force_upcast: bool, asked: str | None, dtype: torch.dtype
) -> None:
    opened = open_as("diffusers", path=save(kl(force_upcast=force_upcast).to(stored), tmp_path), dtype=asked)
    assert opened.dtype == dtype and {weight.dtype for weight in opened._model.parameters()} == {dtype}
    mean, _ = opened.moments(random_images(1, 3, 8, 8))
    assert mean.dtype == torch.float32 and mean.isfinite().all()


def test_the_fingerprint_names_the_weights_also_under_the_names_of_2022(tmp_path: Path) -> None:
    model = kl()
    opened = open_as("diffusers", path=save(model, tmp_path / "a"))
    copied = open_as("diffusers", path=save(model, tmp_path / "b", scaling_factor=2.0), dtype="bfloat16")
    assert copied.fingerprint == opened.fingerprint
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    renamed = {}
    for name, tensor in load((tmp_path / "a" / WEIGHTS).read_bytes()).items():
        for today, before in old.items():
            name = name.replace(f".{today}.", f".{before}.")
        renamed[name] = tensor
    assert sum("proj_attn" in name for name in renamed) == 4  # two attention layers with weight and bias
    save_file(renamed, tmp_path / "a" / WEIGHTS)
    reopened = open_as("diffusers", path=tmp_path / "a")
    assert reopened.fingerprint == opened.fingerprint
    assert torch.equal(reopened.encode(random_images(1, 3, 16, 16)), opened.encode(random_images(1, 3, 16, 16)))
    with torch.no_grad():
        model.decoder.conv_out.bias[0] += 1e-3
    refuse(
        f"the latents come from {opened.fingerprint}, this decoder is diffusers-",
        "diffusers",
        path=save(model, tmp_path / "c"),
        fingerprint=opened.fingerprint,
    )


def test_damaged_weights_are_one_line(tmp_path: Path) -> None:
    path = save(kl(), tmp_path)
    whole = (path / WEIGHTS).read_bytes()
    weights = load(whole)
    for content in (whole[: len(whole) // 2], b"", b"version 1\n"):
        (path / WEIGHTS).write_bytes(content)
        refuse(f"{WEIGHTS} .*complete safetensors file", "diffusers", path=path)
    name = "decoder.conv_out.bias"
    without = {key: tensor for key, tensor in weights.items() if key != name}
    more = {**weights, "x": torch.zeros(1)}
    for wrong, first in ((without, name), ({**weights, name: torch.zeros(5)}, name), (more, "x")):
        save_file(wrong, path / WEIGHTS)
        refuse(f"does not match config.json: 1 tensors are missing, .*, {first} first", "diffusers", path=path)


def test_weights_may_be_overwritten_while_the_autoencoder_is_open(tmp_path: Path) -> None:
    path = save(kl(), tmp_path) / WEIGHTS
    opened = open_as("diffusers", path=tmp_path)
    before, _ = opened.moments(random_images(1, 3, 8, 8))
    with open(path, "r+b") as file:  # in place, as `cp` does it
        file.write(bytes(path.stat().st_size))
    assert torch.equal(opened.moments(random_images(1, 3, 8, 8))[0], before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "config.json describes a model that is not from diffusers; must be AutoencoderKL or AutoencoderDC"),
        ({"_class_name": "UNet2DModel"}, "config.json describes UNet2DModel; must be AutoencoderKL or AutoencoderDC"),
        ({"down_block_types": ["Nonsense"]}, "config.json is not accepted by AutoencoderKL of diffusers"),
        ({"act_fn": 1.5}, "config.json is not accepted by AutoencoderKL"),
        ({"scaling_factor": [1.0]}, "config.json "),
        ({"shift_factor": 10**400}, "config.json "),
        ({"layers_per_block": 2**40}, "config.json has layers_per_block"),
        ({"in_channels": 1, "out_channels": 1}, "does not match config.json"),
    ],
)
def test_the_config_of_something_else_is_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = save(kl(), tmp_path, **(content if isinstance(content, dict) else {}))
    if isinstance(content, str):
        (path / CONFIG).write_text(content)
    refuse(message, "diffusers", path=path)


def test_images_of_other_channels_than_the_model_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(kl(in_channels=1, out_channels=1), tmp_path)
    refuse("encodes images .*1 channel.s., .*3", "diffusers", path=path)
    assert open_as("diffusers", path=path, image_channels=1).image_channels == 1
    assert open_as("diffusers", path=path, image_channels=None).image_channels == 1
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    refuse(r"package diffusers .*missing: pip install 'torchditan\[diffusers\]'", "diffusers", path=path)


def test_online_encoding_holds_no_decoder(tmp_path: Path) -> None:
    digits: Any = build_dataset(Dataset(), split="validation")
    save(kl(in_channels=1, out_channels=1), tmp_path)
    section = AutoencoderConfig(name="diffusers", path=str(tmp_path), online=True)
    space = build_sample_space(section, digits, device=CPU, needs_decoder=True)
    assert isinstance(space, EncodedPixels)
    held = {name.split(".")[0] for name, _ in space.autoencoder._model.named_parameters()}  # type: ignore[attr-defined]
    assert "encoder" in held and "decoder" not in held
    batch = space.prepare({"sample": digits[0]["sample"][None]})
    assert space.to_pixels(batch["sample"]).shape == (1, 1, 8, 8)


# The hub

RESPONSE: Any = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("401\nlong", response=RESPONSE), "is gated: accept its terms on its page, then log in"),
        (errors.RepositoryNotFoundError("404\nlong", response=RESPONSE), "is not a folder here, and was not found on"),
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached .no network, or HF_HUB_OFFLINE is set.; go"),
        (errors.RemoteEntryNotFoundError("404\nlong", response=RESPONSE), "has no .* on the Hugging Face hub"),
        (errors.HfHubHTTPError("500\nlong", response=RESPONSE), "cannot be fetched from the Hugging Face hub .500.; t"),
        (OSError(28, "No space left on device"), "cannot be fetched .*No space left on device"),
        (RuntimeError("Connection\nbroken"), "cannot be fetched from the Hugging Face hub .Connection.; try again"),
    ],
)
def test_what_the_hub_refuses_is_one_line(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    refuse(f'autoencoder.path = "{PUBLISHED["flux"].hub_name}": .*{message}', "flux")


def test_offline_opens_what_was_fetched_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cosmos: Callable[..., Any]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("cosmos-ci8x8", "sd3"):
        refuse("in .*hub's cache, .*Hugging Face hub .*reached", name)

    def snapshot(hub_name: str) -> Path:
        repository = tmp_path / "hub" / f"models--{hub_name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        return repository / "snapshots" / ("0" * 40)

    traced = cosmos().path
    shutil.copytree(traced, snapshot(PUBLISHED["cosmos-ci8x8"].hub_name))
    opened: Autoencoder = open_as("cosmos-ci8x8")
    assert opened.path == PUBLISHED["cosmos-ci8x8"].hub_name
    assert opened.fingerprint == open_as("cosmos", path=traced).fingerprint
    save(kl(), snapshot("someone/pipeline") / "vae")
    assert open_as("diffusers", path="someone/pipeline").latent_channels == 4
