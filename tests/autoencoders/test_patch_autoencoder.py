# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Our small autoencoder: it learns, stores weights bitwise, and reports invalid folders. Also its training script."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from PIL import Image
from refusals import assert_refused

from torchditan.autoencoders.patch import (
    NAMED,
    PatchAutoencoder,
    PatchAutoencoderConfig,
    PatchNetwork,
    reconstruction_loss,
)
from torchditan.config.errors import ConfigError
from torchditan.evaluation.reconstruction import channel_statistics, normalization_of, psnr

if TYPE_CHECKING:
    from tests.conftest import RunScript

CPU = torch.device("cpu")
SCRIPT = ("torchditan", "autoencoder")
SMALL = PatchAutoencoderConfig(image_channels=3, latent_channels=8, patch_size=4, width=16, depth=1)


def smooth_images(count: int, *, side: int = 16, seed: int = 0) -> torch.Tensor:
    """(count, 3, side, side) in [-1, 1]: random colours, blurred."""
    draws = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(draws, size=side, mode="bicubic").clamp(-1, 1)


def build(seed: int = 0, config: PatchAutoencoderConfig = SMALL) -> PatchAutoencoder:
    """An untrained autoencoder with the normalisation of a few images."""
    network = PatchNetwork(config)
    network.init_weights(seed)
    autoencoder = PatchAutoencoder(network, device=CPU)
    images = smooth_images(8)[:, : config.image_channels]
    shift, scale = normalization_of(*channel_statistics([autoencoder.moments(images)[0]]))
    autoencoder.set_normalization(shift=shift, scale=scale)
    return autoencoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "autoencoder"
    build().save(path, training={})
    return path


def test_a_small_network_learns_sixteen_images() -> None:
    network, images = PatchNetwork(SMALL), smooth_images(16)
    network.init_weights(0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    losses = []
    for step in range(150):
        noise = torch.randn(16, 8, 4, 4, generator=torch.Generator().manual_seed(step))
        loss = reconstruction_loss(network, images, noise, latent_noise=0.05, latent_penalty=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20
    assert psnr(network.decode(network.encode(images)), images).mean() > 24


def test_noise_on_the_latents_is_a_share_of_their_spread() -> None:
    """Latents a hundred times as large get a hundred times the noise, so that training cannot outgrow it."""
    network, images = PatchNetwork(SMALL), smooth_images(4)
    network.init_weights(0)
    noise = torch.randn(4, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    before = reconstruction_loss(network, images, noise, latent_noise=0.5, latent_penalty=0.0)
    with torch.no_grad():
        network.encoder[-1].weight *= 100
        network.decoder[0].weight /= 100
    after = reconstruction_loss(network, images, noise, latent_noise=0.5, latent_penalty=0.0)
    silent = reconstruction_loss(network, images, noise, latent_noise=1e-9, latent_penalty=0.0)
    assert torch.isclose(before, after, rtol=1e-4) and not torch.isclose(after, silent, rtol=1e-2)


def test_the_penalty_counts_the_latents_mean_square() -> None:
    network, images = PatchNetwork(SMALL), smooth_images(4)
    network.init_weights(0)
    losses = [
        reconstruction_loss(network, images, torch.zeros(4, 8, 4, 4), latent_noise=0.1, latent_penalty=penalty)
        for penalty in (0.0, 0.5)
    ]
    assert torch.isclose(losses[1] - losses[0], 0.5 * network.encode(images).square().mean(), rtol=1e-4)


def test_initial_weights_are_a_function_of_seed_and_name() -> None:
    shallow, deep, other = (PatchNetwork(dataclasses.replace(SMALL, depth=depth)) for depth in (1, 2, 1))
    shallow.init_weights(0)
    deep.init_weights(0)
    other.init_weights(1)
    for name in ("encoder.1.weight", "encoder.2.conv1.weight", "decoder.0.weight"):
        weights = shallow.get_parameter(name)
        assert torch.equal(weights, deep.get_parameter(name))
        assert not torch.equal(weights, other.get_parameter(name))


@pytest.mark.parametrize("size", [(16, 16), (8, 24)])
def test_what_was_saved_opens_to_the_same_bits(folder: Path, size: tuple[int, int]) -> None:
    saved, opened = build(), PatchAutoencoder.open(folder, device=CPU)
    images = torch.rand(2, 3, *size) * 2 - 1
    latents = saved.encode(images)
    assert latents.shape == (2, *opened.latent_shape(*size)) == (2, 8, size[0] // 4, size[1] // 4)
    assert torch.equal(latents, opened.encode(images))
    assert torch.equal(saved.decode(latents), opened.decode(latents))
    assert (opened.fingerprint, opened.path) == (saved.fingerprint, str(folder))
    assert opened.shift is not None and saved.shift is not None and torch.equal(opened.shift, saved.shift)


def test_saving_twice_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    build().save(tmp_path / "again", training={})
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_the_fingerprint_is_that_of_the_weights(folder: Path) -> None:
    fingerprint = build().fingerprint
    assert fingerprint == build().fingerprint
    assert fingerprint != build(seed=1).fingerprint
    assert fingerprint == PatchAutoencoder.open(folder, device=CPU, dtype=torch.bfloat16).fingerprint
    network = PatchNetwork(SMALL)
    network.init_weights(0)
    with torch.no_grad():
        network.decoder[-2].bias[0] += 0.01
    assert PatchAutoencoder(network, device=CPU).fingerprint != fingerprint


def test_it_computes_in_bfloat16_where_asked_and_hands_out_float32(folder: Path) -> None:
    exact = PatchAutoencoder.open(folder, device=CPU)
    rounded = PatchAutoencoder.open(folder, device=CPU, dtype=torch.bfloat16)
    images = smooth_images(2)
    latents = rounded.encode(images)
    assert latents.dtype == rounded.decode(latents).dtype == torch.float32
    assert not torch.equal(latents, exact.encode(images))
    assert torch.allclose(latents, exact.encode(images), atol=0.1)


def test_its_normalised_latents_have_mean_0_and_standard_deviation_1() -> None:
    mean, std = channel_statistics([build().encode(smooth_images(8))])
    assert mean.abs().max() < 1e-4 and (std - 1).abs().max() < 1e-4


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return apply


def truncate(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return apply


def swap_weights(config: PatchAutoencoderConfig) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        build(1, config).save(folder / "other", training={})
        shutil.copy(folder / "other" / "model.safetensors", folder)

    return apply


@pytest.mark.parametrize(
    ("damage", "right"),
    [
        (shutil.rmtree, r"no such folder; must be earth or a folder that torchditan autoencoder wrote"),
        (lambda folder: (folder / "config.json").unlink(), r"holds no config.json; must be "),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors: No such file or directory"),
        (truncate("config.json"), "config.json is not JSON; it may be truncated"),
        (truncate("model.safetensors"), "model.safetensors is not a safetensors file, or is truncated; copy it again"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"weights"),
            "model.safetensors is not a safetensors file",
        ),
        (
            lambda folder: (folder / "config.json").write_text('{"_class_name": "AutoencoderKL"}'),
            "config.json does not belong to a torchditan patch autoencoder",
        ),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json does not belong to a torchditan"),
        (edit(lambda content: content.update(version=2)), "config.json has version 2, possibly of a newer TorchDiTan"),
        (
            edit(lambda content: content["architecture"].update(width="wide")),
            "architecture in config.json must be image_channels, latent_channels, patch_size, width, depth, "
            "each an integer from 1 to 1024",
        ),
        (edit(lambda content: content["architecture"].pop("depth")), "architecture in config.json must be "),
        (
            edit(lambda content: content["normalization"]["shift"].pop()),
            "normalization in config.json must be shift and scale, 8 numbers each",
        ),
        (edit(lambda content: content.pop("normalization")), "normalization in config.json must be "),
        (edit(lambda content: content["normalization"].update(scale=[0.0] * 8)), "normalization in config.json must "),
        (
            edit(lambda content: content["architecture"].update(width=17)),
            r"decoder.0.bias in model.safetensors is \(16,\); according to config.json it must be \(17,\)",
        ),
        (
            swap_weights(dataclasses.replace(SMALL, depth=2)),
            r"decoder.2.bias in model.safetensors is absent; according to config.json it must be \(48,\)",
        ),
        (
            swap_weights(SMALL),
            "config.json belongs to patch-[0-9a-f]{16}, model.safetensors is patch-[0-9a-f]{16}; copy or train both",
        ),
    ],
)
def test_a_folder_that_is_none_of_ours_is_refused_in_one_line(
    folder: Path, damage: Callable[[Path], None], right: str
) -> None:
    damage(folder)
    with pytest.raises(ConfigError, match=rf'autoencoder\.path = "{folder}": {right}') as caught:
        PatchAutoencoder.open(folder, device=CPU)
    assert "\n" not in str(caught.value)


def test_a_name_is_looked_up_in_train_configs_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "earth").mkdir()  # latents of the same name, say
    assert PatchAutoencoder.open("earth", device=CPU).path == "earth"
    with pytest.raises(ConfigError, match=r'autoencoder\.path = "erth": .*folder; .*; did you mean earth'):
        PatchAutoencoder.open("erth", device=CPU)
    with pytest.raises(ConfigError, match=r"autoencoder\.path = none: .*earth .*"):
        PatchAutoencoder.open(None, device=CPU)


def test_the_committed_earth_autoencoder_gives_held_out_crops_back() -> None:
    from torchditan.config.options import Dataset
    from torchditan.datasets import build_dataset
    from torchditan.evaluation.reconstruction import picture_batches

    assert sum(file.stat().st_size for file in (NAMED / "earth").iterdir()) < 3e6
    dataset = build_dataset(Dataset(dataset_name="earth", image_size=[64, 64]), split="validation")
    (images,) = picture_batches(dataset, num_images=32, batch_size=32, corrupt_images="error")
    autoencoder = PatchAutoencoder.open("earth", device=CPU)
    latents = autoencoder.encode(images)
    assert latents.shape == (32, 8, 16, 16)
    assert psnr(autoencoder.decode(latents), images).mean() > 29

    mean, std = channel_statistics([latents])
    assert mean.abs().max() < 0.3 and std.min() > 0.7 and std.max() < 1.3
    noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    assert psnr(autoencoder.decode(latents + 0.1 * noise), images).mean() > 27, "a diffusion model's errors show little"


QUICK = ["--steps=30", "--batch_size=16", "--width=16", "--depth=1", "--patch_size=2", "--log_freq=10"]
QUICK += ["--dtype=float32", "--dataset.num_workers=0"]


def test_the_script_trains_on_digits_and_says_how_to_use_the_folder(tmp_path: Path, run_script: RunScript) -> None:
    code, output, errors = run_script(*SCRIPT, "out", *QUICK)
    assert (code, errors) == (0, "")
    header, *steps, figures, use, picture = output.splitlines()
    assert header.startswith("1,498 images of digits, 1 x 8 x 8; ")
    decibels = [float(line.split("held-out ")[1].split(" dB")[0]) for line in steps]
    assert len(steps) == 3 and decibels[-1] > decibels[0]
    assert "latents 8 x 4 x 4" in figures and "SSIM" not in figures, "digits are smaller than its window"
    assert use == "autoencoder: out; use it with --autoencoder.name patch --autoencoder.path out"
    assert Image.open(tmp_path / "out" / "reconstructions.png").size[0] > 10 * 128
    assert picture == "originals above reconstructions: out/reconstructions.png"

    autoencoder = PatchAutoencoder.open(tmp_path / "out", device=CPU)
    held_out = json.loads((tmp_path / "out" / "config.json").read_text())["training"]["held_out"]
    assert held_out["num_images"] == 299
    assert f"PSNR {held_out['psnr_db']:.2f} dB" in figures and autoencoder.fingerprint in figures


def test_the_script_run_twice_writes_the_same_bytes(tmp_path: Path, run_script: RunScript) -> None:
    for out in ("a", "b"):
        assert run_script(*SCRIPT, out, *QUICK, "--steps=4")[0] == 0
    assert run_script(*SCRIPT, "c", *QUICK, "--steps=4", "--seed=1")[0] == 0
    a, b, c = ((tmp_path / out / "model.safetensors").read_bytes() for out in "abc")
    assert a == b != c
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()


def test_a_finished_autoencoder_is_replaced_only_when_asked(folder: Path, run_script: RunScript) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    code, output, errors = run_script(*SCRIPT, folder, *QUICK, "--steps=1")
    assert (code, output) == (2, "")
    right = "holds an autoencoder already; choose another folder, or replace it with --overwrite"
    assert errors == f'error: out = "{folder}": {right}\n'
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert run_script(*SCRIPT, folder, *QUICK, "--steps=1", "--overwrite")[0] == 0
    assert PatchAutoencoder.open(folder, device=CPU).image_channels == 1


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        ([], "", ["out"]),
        (
            ["--dataset.image_size=8", "out"],
            "OUT",
            ["torchditan autoencoder OUT", "--dataset.dataset_name NAME"],
        ),
        (["out", "--steps=0"], "--steps", ["0", "1"]),
        (["out", "--lr=-1"], "--lr", ["-1", "0"]),
        (["out", "--stepz=3"], "--stepz", ["--steps?"]),
        (
            ["out", "--training.seed=3"],
            "--training.seed",
            [
                "--help",
                "--steps",
                "--batch_size",
                "--lr",
                "--width",
                "--depth",
                "--latent_channels",
                "--patch_size",
                "--latent_noise",
                "--latent_penalty",
                "--seed",
                "--dtype",
                "--log_freq",
                "--overwrite",
                "--dataset.key",
            ],
        ),
        (["out", "--dataset.image_siz=3"], "dataset.image_siz", ["dataset.image_size?"]),
        (["out", "--patch_size=3"], "dataset.image_size = [8, 8]", ["--patch_size", "3"]),
        (
            ["file/out"],
            'out = "file/out"',
            ["FOLDER/file"],
        ),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    tmp_path: Path, run_script: RunScript, arguments: list[str], about: str, mentions: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, output, errors = run_script(*SCRIPT, *arguments)
    assert (code, output) == (2, "")
    assert_refused(errors, about, [mention.replace("FOLDER", str(tmp_path)) for mention in mentions])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_is_full_is_one_line(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torchditan.autoencoders.patch.write_file", fail)
    code, _, errors = run_script(*SCRIPT, "out", *QUICK, "--steps=1")
    assert code == 2
    assert_refused(errors, 'out = "out"', ["No space left on device"])
