# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""RAE: latents and pictures of diffusers' `AutoencoderRAE`, positions of every grid, and a run on such latents."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import pytest
import tiny_runs
import torch
import transformers
import zoo as zoo_of_runs
from safetensors.torch import load_file, save_file
from torch import Tensor

from torchditan import load
from torchditan.config.options import Autoencoder as AutoencoderConfig
from torchditan.errors import ConfigError
from torchditan.extras.autoencoders import open_autoencoder
from torchditan.extras.autoencoders.rae import Decoder, position_table
from torchditan.extras.latents.shared import link_latents
from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunScript

CPU = torch.device("cpu")
CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
DECODER = {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_intermediate_size": 48}
SIZES: dict[str, Any] = {**DECODER, "decoder_num_attention_heads": 2, "encoder_hidden_size": 64}


def tiny(*, grid: int = 4, patch_size: int = 4, **options: Any) -> Any:
    """A random AutoencoderRAE of a DINOv2 whose images have `grid` x `patch_size` pixels along each side."""
    torch.manual_seed(0)
    sizes = {**SIZES, "encoder_num_hidden_layers": 2, "encoder_input_size": 14 * grid, "patch_size": patch_size}
    model = diffusers.AutoencoderRAE(**sizes, **options).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def statistics(*shape: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1)
    mean, deviation = (torch.rand(shape, generator=draws) for _ in range(2))
    return {"latents_mean": mean, "latents_std": deviation + 0.5}


def save(model: Any, folder: Path, **changes: Tensor | None) -> Path:
    """The folder as diffusers saves it, with other tensors; None drops one."""
    model.save_pretrained(folder)
    if changes:
        weights = load_file(folder / WEIGHTS) | changes
        save_file({name: weight for name, weight in weights.items() if weight is not None}, folder / WEIGHTS)
    return folder


def open_rae(path: Path, *, name: str = "rae", **options: Any) -> Any:
    return open_autoencoder(AutoencoderConfig(name=name, path=str(path), **options), device=CPU)


def random_images(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@torch.no_grad()
def test_latents_and_pictures_are_those_of_diffusers_with_the_papers_deviation(tmp_path: Path) -> None:
    normalised = statistics(64, 16, 16)
    model = tiny(grid=16, **normalised, scaling_factor=0.5)
    opened = open_rae(save(model, tmp_path))
    images = random_images(3, 3, 64, 64)  # the encoder sees them at 224 pixels
    theirs = model.encode((images + 1) / 2).latent
    expected = theirs * (normalised["latents_std"] + 1e-5) / normalised["latents_std"]
    latents = opened.encode(images)
    assert opened.latent_shape(64, 64) == latents.shape[1:] == (64, 16, 16)
    torch.testing.assert_close(latents, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(opened.decode(expected), model.decode(theirs).sample * 2 - 1, rtol=1e-5, atol=1e-5)


def positions_by_definition(width: int, grid: int) -> Tensor:
    """The decoder's table in the code of MAE, cell by cell: cells are counted from 0, columns come first."""
    table = torch.zeros(1, 1 + grid * grid, width, dtype=torch.float64)
    quarter = width // 4
    for row in range(grid):
        for column in range(grid):
            for i in range(quarter):
                frequency = 1.0 / 10000 ** (i / quarter)
                values = [f(place * frequency) for place in (column, row) for f in (math.sin, math.cos)]
                table[0, 1 + row * grid + column, i::quarter] = torch.tensor(values, dtype=torch.float64)
    return table.float()


@pytest.mark.parametrize("grid", [16, 32])
@torch.no_grad()
def test_the_decoder_is_that_of_diffusers_with_the_positions_of_the_paper(grid: int) -> None:
    reference = tiny(grid=grid, patch_size=2).decoder.double()
    table = positions_by_definition(32, grid)
    is_theirs = torch.equal(reference.decoder_pos_embed, table.double())
    assert is_theirs == (grid == 16), "diffusers spreads 16 positions over any grid"
    reference.decoder_pos_embed = table.double()
    decoder = Decoder(channels=64, grid=grid, patch_size=2, width=32, depth=2, num_heads=2, mlp_width=48).double()
    decoder.load_state_dict({**reference.state_dict(), "decoder_pos_embed": position_table(32, grid).double()})
    tokens = torch.randn(2, grid * grid, 64, dtype=torch.float64)
    expected = reference.unpatchify(reference(tokens).logits)
    torch.testing.assert_close(decoder(tokens), expected, rtol=0, atol=1e-12)


def in_earlier_versions(name: str) -> str:
    """Name of a tensor of the encoder in the published files."""
    name = re.sub(r"attention\.(q|k|v)_proj", r"attention.attention.\1", name)
    for short, long in {"attention.q.": "attention.query.", "attention.k.": "attention.key."}.items():
        name = name.replace(short, long)
    return name.replace("attention.v.", "attention.value.").replace("attention.o_proj", "attention.output.dense")


def test_files_of_earlier_versions_of_transformers_open(tmp_path: Path) -> None:
    path, images = save(tiny(), tmp_path), random_images(2, 3, 16, 16)
    expected = open_rae(path).encode(images)
    weights = load_file(path / WEIGHTS)
    renamed = {in_earlier_versions(name): weight for name, weight in weights.items()}
    assert "encoder.encoder.layer.0.attention.attention.query.weight" in renamed
    save_file({**renamed, "decoder.decoder_pos_embed": position_table(32, 4)}, path / WEIGHTS)
    assert torch.equal(open_rae(path).encode(images), expected)


OF_ENCODER: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 1, "num_hidden_layers": 2}
SIGLIP = {**OF_ENCODER, "patch_size": 16}


def vit(**changes: Any) -> Any:
    sizes = {**OF_ENCODER, "intermediate_size": 64, "image_size": 56, "patch_size": 14, **changes}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes)).eval()
    torch.nn.init.normal_(model.layernorm.bias)
    return model


@pytest.mark.parametrize(
    ("encoder_type", "kind", "settings"),
    [
        ("siglip2", transformers.SiglipVisionModel, transformers.SiglipVisionConfig(**SIGLIP, image_size=256)),
        ("mae", transformers.ViTMAEModel, transformers.ViTMAEConfig(**SIGLIP, image_size=224, mask_ratio=0.0)),
    ],
)
@torch.no_grad()
def test_other_encoders_give_their_patches_in_order(
    encoder_type: str, kind: Any, settings: Any, tmp_path: Path
) -> None:
    path, encoder = save(tiny(), tmp_path), kind(settings).eval()
    described = json.loads((path / CONFIG).read_text())
    described |= {"encoder_type": encoder_type, "encoder_patch_size": 16, "encoder_input_size": 64}
    (path / CONFIG).write_text(json.dumps(described))
    rest = {name: weight for name, weight in load_file(path / WEIGHTS).items() if not name.startswith("encoder.")}
    save_file({**rest, **{f"encoder.{name}": weight for name, weight in encoder.state_dict().items()}}, path / WEIGHTS)
    images = random_images(2, 3, 16, 16)
    pixels = torch.nn.functional.interpolate((images + 1) / 2, size=(64, 64), mode="bicubic", align_corners=False)
    pixels = (pixels - rest["encoder_mean"]) / rest["encoder_std"]
    noise = {"noise": torch.arange(16.0).expand(2, -1)} if encoder_type == "mae" else {}
    tokens = encoder(pixels, interpolate_pos_encoding=True, **noise).last_hidden_state[:, -16:]  # new norms are 1, 0
    torch.testing.assert_close(open_rae(path).encode(images), tokens.transpose(1, 2).unflatten(2, (4, 4)))


@torch.no_grad()
def test_any_vision_model_of_transformers_replaces_the_encoder(tmp_path: Path) -> None:
    path = save(tiny(), tmp_path / "rae")
    encoders = [vit(), vit()]
    for number, encoder in enumerate(encoders):
        encoder.save_pretrained(tmp_path / f"vit{number}")
    opened, other = (open_rae(path, name=f"rae encoder={tmp_path}/vit{number}") for number in range(2))
    described = AutoencoderConfig(name=f"rae encoder={tmp_path}/vit0", path=str(path))
    planned = open_autoencoder(described, device=torch.device("meta"))
    assert planned.moments(torch.empty(2, 3, 16, 16))[0].shape == (2, 64, 4, 4)
    assert len({opened.fingerprint, other.fingerprint, open_rae(path).fingerprint}) == 3
    images = random_images(2, 3, 16, 16)
    weights = load_file(path / WEIGHTS)
    pixels = torch.nn.functional.interpolate((images + 1) / 2, size=(56, 56), mode="bicubic", align_corners=False)
    tokens = encoders[0]((pixels - weights["encoder_mean"]) / weights["encoder_std"]).last_hidden_state[:, 1:]
    expected = (tokens - encoders[0].layernorm.bias) / encoders[0].layernorm.weight
    torch.testing.assert_close(opened.encode(images), expected.transpose(1, 2).unflatten(2, (4, 4)))
    vit(hidden_size=128).save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match="gives 16 of 128 values at 56 px; the decoder reads 16 of 64"):
        open_rae(path, name=f"rae encoder={tmp_path}/wide")
    with pytest.raises(ConfigError, match=r"autoencoder.name = .*nowhere cannot be opened"):
        open_rae(path, name=f"rae encoder={tmp_path}/nowhere")


def test_bfloat16_keeps_the_statistics_in_float32(tmp_path: Path) -> None:
    path, images = save(tiny(**statistics(64, 1, 1)), tmp_path), random_images(2, 3, 16, 16)
    exact, rounded = open_rae(path), open_rae(path, dtype="bfloat16")
    assert (exact.dtype, rounded.dtype) == (torch.float32, torch.bfloat16)
    assert rounded.fingerprint == exact.fingerprint
    latents = exact.encode(images)
    assert 0 < (rounded.encode(images) - latents).square().mean() < 1e-3 * latents.square().mean()
    pictures = exact.decode(latents)
    assert 0 < (rounded.decode(latents) - pictures).square().mean() < 1e-3 * pictures.square().mean()


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        weights = load_file(path / WEIGHTS)
        weight = change(weights.pop(name, torch.zeros(1)))
        save_file(weights if weight is None else {**weights, name: weight}, path / WEIGHTS)

    return apply


def described_as(**changes: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | changes))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            changed("decoder.decoder_pred.bias", lambda weight: None),
            "missing, .* decoder.decoder_pred.bias first",
        ),
        (changed("decoder.decoder_pred.bias", lambda weight: weight[1:]), "of other shape, decoder.decoder_pred.bias"),
        (changed("encoder.embeddings.cls_token", lambda weight: None), "embeddings.cls_token first"),
        (changed("encoder.more", lambda weight: weight), "1 tensors are missing, unknown or .*, more first"),
        (changed("_latents_std", lambda weight: None), "1 tensors are missing, .*, _latents_std first"),
        (changed("_latents_std", lambda weight: torch.ones(64, 3, 3)), "does not describe an AutoencoderRAE"),
        (described_as(_class_name="AutoencoderKL"), "describes AutoencoderKL; must be AutoencoderRAE"),
        (described_as(encoder_type="clip"), "does not describe an AutoencoderRAE .'clip'.$"),
        (described_as(decoder_num_hidden_layers=10**9), "has 1000000000 layers, and"),
        (lambda path: (path / WEIGHTS).write_bytes(b"1"), "is not a safetensors file"),
    ],
)
def test_damaged_files_are_one_line(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    path = save(tiny(), tmp_path)
    damage(path)
    with pytest.raises(ConfigError, match=message) as error:
        open_rae(path)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, run_alone: RunAlone) -> Path:
    """16 pictures of 64 x 64."""
    folder = tmp_path_factory.mktemp("rae") / "pictures"
    zoo_of_runs.make_inputs("pictures", folder, run_alone)
    return folder


def test_a_model_trains_on_these_latents_stored_and_online(
    pictures: Path, tmp_path: Path, run_script: RunScript
) -> None:
    """Stored and online latents differ by bf16's rounding alone, and shared ones name no folder of this machine."""
    path = save(tiny(patch_size=16, **statistics(64, 4, 4)), tmp_path / "rae")
    data = ["--dataset.dataset_name=folder", f"--dataset.root_dir={pictures}", "--dataset.image_size=64"]
    data += ["--dataset.num_classes=0", "--dataset.num_workers=0", "--dataset.horizontal_flip=false"]
    vit().save_pretrained(tmp_path / "vit")
    name = f"rae encoder={tmp_path}/vit"
    rae = [f"--autoencoder.name={name}", f"--autoencoder.path={path}"]
    previewed = run_script("torchditan", "encode", "latents", *data, *rae, "--preview=4")
    assert previewed.code == 0 and "3 x 64 x 64 -> 64 x 4 x 4: PSNR" in previewed.out, previewed.err
    assert run_script("torchditan", "encode", "latents", *data, *rae).code == 0
    refused = run_script("torchditan", "encode", "latents", *data, *rae, "--dataset.image_size=32")
    assert refused.code == 2 and f"must be 64: {name} has latents of 4 x 4" in refused.err
    (tmp_path / "shared").mkdir()
    link_latents(tmp_path / "latents", tmp_path / "shared")
    index = (tmp_path / "shared" / "train" / "index.json").read_text()
    assert '"name": "rae"' in index and str(tmp_path) not in index
    flags = [*zoo_of_runs.KEPT, "--model.patch_size=1", "--training.steps=2", "--diffusion.timestep_shift=0.5"]
    flags += ["--metrics.enable_sampling=true", "--metrics.sample_freq=2", *zoo_of_runs.SMALL_GRID]
    losses = []
    for run, source in (
        ("stored", ["--dataset.dataset_name=latents", "--dataset.root_dir=latents", "--dataset.num_classes=0"]),
        ("online", [*data, *rae, "--autoencoder.online"]),
    ):
        trained = run_script("train.py", *tiny_runs.job(tmp_path / run, *flags, *source))
        assert trained.code == 0, trained.err
        assert (tmp_path / run / "samples" / "step_00000002.png").is_file()
        losses.append([record["loss"] for record in read_metrics(tmp_path / run)])
        section = read_config(tmp_path / run)["config"]["autoencoder"]
        assert section["fingerprint"] == open_rae(path, name=name).fingerprint
        assert load(tmp_path / run).sample(num_samples=1).shape == (1, 3, 64, 64)
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
