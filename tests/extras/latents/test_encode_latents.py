# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Encoding a dataset into shards: the same bytes for any ranks, workers and interruptions, and its errors."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import assert_refused
from safetensors.torch import load_file
from torch import Tensor

from torchditan.config.loader import read_toml
from torchditan.data_stream.datasets import CorruptImageError, ImageDataset, images_of
from torchditan.data_stream.latent_index import LatentIndex, read_index
from torchditan.data_stream.latent_shards import LatentShards, to_sample
from torchditan.datasets.folder import ImageFolder
from torchditan.distributed.process_group import Rank
from torchditan.errors import ConfigError
from torchditan.extras.autoencoders.autoencoder import Autoencoder
from torchditan.extras.autoencoders.haar import HaarAutoencoder
from torchditan.extras.latents import writer as latent_writer
from torchditan.extras.latents.encoding import describe_encoding, encode
from torchditan.extras.latents.verifying import verify
from torchditan.extras.latents.writer import LatentWriter, shard_file

if TYPE_CHECKING:
    from tests.conftest import RunAlone, RunDistributed, RunScript

SCRIPT = ("torchditan", "encode")
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class Corners(Autoencoder):
    """Upper left pixel and mean of each 2 x 2 cell: the latents of a mirrored image are not the mirrored latents."""

    name = "corners"
    path = None
    fingerprint = "corners-1"
    image_channels = 3
    latent_channels = 2
    downsampling = 2
    dtype = torch.float32
    device = torch.device("cpu")
    has_posterior = True
    times = 1.0

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        mean = torch.stack([images[:, 0, ::2, ::2], torch.nn.functional.avg_pool2d(images, 2).mean(1)], dim=1)
        return mean * self.times, mean - 3

    def _decode(self, latents: Tensor) -> Tensor:
        raise AssertionError("encoding decodes nothing")


class OtherCorners(Corners):
    fingerprint = "corners-2"


class Noise(ImageDataset):
    """Image i is noise of its own with label i % 3; `broken` ones cannot be read."""

    name = "noise"
    sample_shape = (3, 4, 6)
    class_names: ClassVar[list[str]] = ["a", "b", "c"]
    horizontal_flip = True

    def __init__(self, length: int = 11, *, broken: tuple[int, ...] = ()) -> None:
        self.length = length
        self.broken = broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise CorruptImageError(f"images/{index}.png: not a readable image")
        draws = torch.Generator().manual_seed(index)
        return {"sample": torch.rand(self.sample_shape, generator=draws) * 2 - 1, "class_label": index % 3}


def begin(
    folder: Path, dataset: Noise | None = None, autoencoder: Autoencoder | None = None, **settings: Any
) -> LatentWriter:
    options = {"split": "train", "crop": "center", "dtype": "bf16", "flipped": True, "posterior": False}
    encoding = describe_encoding(
        dataset or Noise(), autoencoder or Corners(), **{**options, "shard_size": 4, **settings}
    )
    writer = LatentWriter(folder, encoding)
    writer.open()
    return writer


def run(
    folder: Path,
    dataset: Noise | None = None,
    autoencoder: Autoencoder | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
    report: Callable[[int], None] = lambda count: None,
    **settings: Any,
) -> LatentIndex | None:
    """Encode as the script does; batches of three, shards of four."""
    return encode(
        dataset or Noise(),
        autoencoder or Corners(),
        begin(folder, dataset, autoencoder, **settings),
        rank=Rank(rank, rank, world_size),
        batch_size=3,
        num_workers=num_workers,
        report=report,
        skips_corrupt=True,
    )


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_stored_images_are_those_of_the_latents_mirrored_or_not(tmp_path: Path) -> None:
    assert run(tmp_path / "plain") is not None
    for shard_format in ("safetensors", "webdataset"):
        folder = tmp_path / shard_format
        assert run(folder, images=True, shard_format=shard_format) is not None
        shards, flips = LatentShards.open(folder), np.arange(11) % 2 == 0
        batch = shards.read(np.arange(11), flips, with_image=True)
        mean, _ = Corners().moments(images_of(batch))
        assert torch.allclose(batch["latent"].float(), mean, atol=0.01)
        assert batch["image"].shape == (11, 3, 4, 6)
        assert "image" not in shards.read(np.arange(11), flips) and verify(folder) == []
    with pytest.raises(ConfigError, match="images is False there and True here"):
        begin(tmp_path / "plain", images=True)
    assert "images" not in json.loads((tmp_path / "plain/index.json").read_bytes())


def images(dataset: Noise, numbers: list[int]) -> Tensor:
    return torch.stack([dataset[number]["sample"] for number in numbers])


def test_a_shard_holds_the_mean_of_image_and_mirrored_image(tmp_path: Path) -> None:
    dataset = Noise()
    index = run(tmp_path, posterior=True)
    assert index is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "index.json",
        "labels.npy",
        *(shard_file(number) for number in range(3)),
    ]
    mean, logvar = Corners().moments(images(dataset, [8, 9, 10]))
    mirrored, mirrored_logvar = Corners().moments(images(dataset, [8, 9, 10]).flip(-1))
    assert not torch.equal(mirrored, mean.flip(-1))
    last = load_file(tmp_path / shard_file(2))
    assert logvar is not None and mirrored_logvar is not None
    for name, tensor in (
        ("latents", mean),
        ("latents_flipped", mirrored),
        ("logvar", logvar),
        ("logvar_flipped", mirrored_logvar),
    ):
        assert torch.equal(last[name], tensor.bfloat16())
    assert last["index"].tolist() == [8, 9, 10]
    assert last["labels"].tolist() == [2, 0, 1]
    assert np.load(tmp_path / "labels.npy").tolist() == [number % 3 for number in range(11)]


def test_int8_is_within_half_a_step_of_the_mean(tmp_path: Path) -> None:
    dataset = Noise()
    run(tmp_path, dtype="int8")
    shards = LatentShards.open(tmp_path)
    raw = shards.read(np.arange(11), np.zeros(11, dtype=bool))
    found = to_sample(raw, shift=torch.zeros(2), scale=torch.ones(2))
    exact, _ = Corners().moments(images(dataset, list(range(11))))
    step = raw["latent_scale"][:, :, None, None]
    assert raw["latent"].dtype == torch.int8
    assert ((found - exact).abs() <= step / 2 * 1.001).all()
    maxima = [max(abs(int(value)) for value in load_file(tmp_path / shard_file(0))[name].flatten()) for name in NAMES]
    assert max(maxima) == 127, "the scale is the largest value's"


NAMES = ("latents", "latents_flipped")


def test_corrupt_images_are_skipped_counted_and_listed(tmp_path: Path) -> None:
    index = run(tmp_path, Noise(broken=(1, 4, 5, 6, 7, 10)))
    assert index is not None
    assert (index.num_images, index.num_skipped) == (5, 6)
    assert [shard.num_images for shard in index.shards] == [3, 0, 2]
    listed = [entry for shard in index.shards for entry in shard.skipped]
    assert listed[:2] == [
        (1, "images/1.png: not a readable image"),
        (4, "images/4.png: not a readable image"),
    ]
    shards = LatentShards.open(tmp_path)
    assert shards.labels is not None and shards.labels.tolist() == [0, 2, 0, 2, 0]
    exact, _ = Corners().moments(images(Noise(), [0, 2, 3, 8, 9]))
    assert torch.equal(shards.read(np.arange(5), np.zeros(5, dtype=bool))["latent"], exact.bfloat16())
    assert verify(tmp_path) == []


def test_a_dataset_without_labels_stores_none(tmp_path: Path) -> None:
    class Unlabelled(Noise):
        class_names: ClassVar[list[str]] = []

    run(tmp_path, Unlabelled())
    assert not (tmp_path / "labels.npy").exists()
    assert "labels" not in load_file(tmp_path / shard_file(0))
    assert LatentShards.open(tmp_path).labels is None
    assert verify(tmp_path) == []


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_ranks_and_workers_change_no_byte(tmp_path: Path, dtype: str) -> None:
    dataset = Noise(22, broken=(3, 9))
    run(tmp_path / "one", dataset, dtype=dtype)
    expected = hashes(tmp_path / "one")
    for world_size, num_workers in ((1, 2), (2, 0), (9, 0)):
        folder = tmp_path / f"{world_size}x{num_workers}"
        indices = [
            run(folder, dataset, rank=rank, world_size=world_size, num_workers=num_workers, dtype=dtype)
            for rank in reversed(range(world_size))
        ]
        assert hashes(folder) == expected, (world_size, num_workers)
        assert indices[-1] is not None, "the last rank writes the index"


class Killed(BaseException):
    pass


def test_an_encoding_stopped_at_any_write_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before and after each rename, with the part written beside left lying there."""
    dataset = Noise(broken=(5,))
    run(tmp_path / "undisturbed", dataset)
    expected = hashes(tmp_path / "undisturbed")
    write_file = latent_writer.write_file
    num_writes = 9  # settings, three shards and their records, labels, index
    for stop in range(2 * num_writes):
        count = 0

        def write(path: Path, data: bytes, stop: int = stop) -> None:
            nonlocal count
            number, count = count, count + 1
            if number == stop // 2:
                if stop % 2:
                    write_file(path, data)
                else:
                    path.parent.mkdir(exist_ok=True, parents=True)
                    path.with_name(f".{path.name}.12345.partial").write_bytes(data[: len(data) // 2])
                raise Killed
            write_file(path, data)

        folder = tmp_path / str(stop)
        with monkeypatch.context() as patch:
            patch.setattr(latent_writer, "write_file", write)
            with pytest.raises(Killed):
                run(folder, dataset)
        if stop < 2 * num_writes - 1:  # the last stop comes after the index was renamed into its place
            with pytest.raises(ConfigError, match=r"not finished|holds no latents"):
                LatentShards.open(folder)
        run(folder, dataset)
        assert hashes(folder) == expected, stop
    assert count == num_writes


def test_a_rerun_encodes_only_what_is_missing(tmp_path: Path) -> None:
    encoded: list[int] = []
    writer = begin(tmp_path)
    run(tmp_path, rank=1, world_size=2)  # the second of three shards
    assert writer.missing() == [0, 2]
    run(tmp_path, report=encoded.append)
    assert sum(encoded) == 7
    before = hashes(tmp_path)
    index = run(tmp_path, report=encoded.append)
    assert index is not None and sum(encoded) == 7 and hashes(tmp_path) == before


def test_lost_and_short_shards_and_labels_of_a_finished_folder_are_repaired(tmp_path: Path) -> None:
    dataset = Noise(broken=(5,))
    run(tmp_path, dataset)
    before = hashes(tmp_path)
    for damage in (
        lambda: (tmp_path / shard_file(1)).unlink(),
        lambda: os.truncate(tmp_path / shard_file(2), 100),
        lambda: (tmp_path / "labels.npy").unlink(),
        lambda: [path.unlink() for path in tmp_path.glob("shard-*")],
    ):
        damage()
        assert run(tmp_path, dataset) is not None
        assert hashes(tmp_path) == before


def test_what_cannot_be_encoded_is_refused_by_name(tmp_path: Path) -> None:
    def refuse(message: str, *, folder: Path = tmp_path / "new", **settings: Any) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            run(folder, **settings)
        assert "\n" not in str(error.value)

    run(tmp_path / "half", rank=0, world_size=2)
    before = hashes(tmp_path / "half")
    others: dict[str, dict[str, Any]] = {
        "dtype is bf16 there and int8 here": {"dtype": "int8"},
        "num_source_images is 11 there and 12 here": {"dataset": Noise(12)},
        "autoencoder.fingerprint is corners-1 there and corners-2 here": {"autoencoder": OtherCorners()},
    }
    for line, settings in others.items():
        refuse(rf"half holds latents with other settings: {line}\. Use", folder=tmp_path / "half", **settings)
    assert hashes(tmp_path / "half") == before
    (tmp_path / "images/n01440764").mkdir(parents=True)
    refuse("contains other files; latents need a separate folder", folder=tmp_path / "images")
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["n01440764"]
    dataset, no_variance, infinite = Noise(), Corners(), Corners()
    dataset.sample_shape, no_variance.has_posterior, infinite.times = (3, 4, 5), False, float("nan")
    refuse(r"dataset.image_size = \[4, 5\]: .*multiple .*2", dataset=dataset)
    refuse(r"--posterior = true: corners .*variance; leave .*out", autoencoder=no_variance, posterior=True)
    assert not (tmp_path / "new").exists()
    refuse(r"autoencoder\.dtype = none: .*autoencoder .*numbers .*finite", autoencoder=infinite, dtype="int8")
    refuse(r"readable image .*5; images/0\.png:", folder=tmp_path / "bad", dataset=Noise(5, broken=(0, 1, 2, 3, 4)))
    for name in ("new", "bad"):
        assert not (tmp_path / name / "index.json").exists()


def test_a_full_disk_is_one_line_and_leaves_whole_shards_only(tmp_path: Path) -> None:
    dataset = Noise(11, broken=(0, 1, 2))  # the first shard is the smallest
    run(tmp_path / "undisturbed", dataset, posterior=True)
    sizes = [(tmp_path / "undisturbed" / shard_file(number)).stat().st_size for number in range(3)]
    assert sizes[0] < sizes[1]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[1] - 1, limits[1]))
    try:
        with pytest.raises(ConfigError) as error:
            run(tmp_path / "full", dataset, posterior=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(error.value) == (
        f"{tmp_path / 'full' / shard_file(1)} cannot be written: File too large; free disk "
        "space and rerun the same command; complete shards are kept"
    )
    found = sorted(path.name for path in (tmp_path / "full").iterdir())
    assert found == [".lock", "encoding.json", "shard-00000.json", shard_file(0)]
    run(tmp_path / "full", dataset, posterior=True)
    assert hashes(tmp_path / "full") == hashes(tmp_path / "undisturbed")


# The script


DIGITS = ["--dataset.dataset_name=digits", "--autoencoder.name=haar", "--dataset.num_workers=0"]


def test_a_dataset_becomes_two_folders_that_verify(run_script: RunScript, tmp_path: Path) -> None:
    assert run_script(*SCRIPT, "tars", *DIGITS, "--shard_size=500", "--format=webdataset", "--split=train").code == 0
    assert len(list((tmp_path / "tars" / "train").glob("*.tar"))) == 3
    code, output, errors = run_script(*SCRIPT, "out", *DIGITS, "--shard_size=500")
    assert (code, errors) == (0, "")
    assert [line.split(";")[0] for line in output.splitlines()] == [
        "out/train: complete, 1,498 latents of 16 x 2 x 2 in 0.2 MB",
        "out/validation: complete, 299 latents of 16 x 2 x 2 in 0.0 MB",
    ]
    assert "images/s" in output
    code, output, errors = run_script(*SCRIPT, "out", *DIGITS, "--shard_size=500")
    assert (code, errors) == (0, "") and "images/s" not in output, "nothing was left to do"
    assert run_script(*SCRIPT, "out", "--verify") == (
        0,
        "out/train: 1,498 latents in 3 shards, all as they were encoded\n"
        "out/validation: 299 latents in 1 shards, all as they were encoded\n",
        "",
    )
    (tmp_path / "out" / "validation" / "labels.npy").unlink()
    (tmp_path / "out" / "train" / shard_file(2)).unlink()
    code, output, errors = run_script(*SCRIPT, "out", "--verify")
    assert (code, output) == (2, "")
    shard, labels = errors.splitlines()
    assert_refused(shard, "out/train/shard-00002.safetensors", ["missing", "rerun"])
    assert_refused(labels, "out/validation/labels.npy", ["missing", "rerun"])


def write_photos(folder: Path, count: int) -> list[str]:
    """Flags that encode these photos."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.new("RGB", (8, 8), (30 * number, 0, 0)).save(folder / f"{number}.png")
    flags = ["--dataset.dataset_name=folder", "--dataset.root_dir=photos", "--dataset.image_size=8"]
    return [*flags, "--autoencoder.name=haar", "--dataset.num_workers=0"]


def test_mirrored_latents_are_stored_of_training_images_where_the_dataset_allows(
    run_script: RunScript, tmp_path: Path
) -> None:
    flags = write_photos(tmp_path / "photos", 6)
    assert run_script(*SCRIPT, "a", *flags).code == 0
    assert run_script(*SCRIPT, "b", *flags, "--no_flip", "--split=train").code == 0
    assert [read_index(tmp_path / name).flipped for name in ("a/train", "a/validation")] == [True, False]
    assert not read_index(tmp_path / "b/train").flipped and not (tmp_path / "b" / "validation").exists()


def test_a_preview_measures_images_and_latents_and_writes_nothing(
    run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(6):
        Image.fromarray(draws.integers(30, 200, (16, 16, 3), dtype=np.uint8)).save(tmp_path / f"photos/{number}.png")
    command = ["encode", "out", "--dataset.dataset_name=folder", "--dataset.root_dir=photos", "--dataset.image_size=16"]
    command += ["--autoencoder.name=haar", "--autoencoder.downsampling=2", "--dataset.num_workers=0", "--no_flip"]
    exact = run_script("torchditan", *command, "--preview=1000", "--batch_size=2")
    assert (exact.code, exact.err) == (0, "")
    assert "5 images of folder, 3 x 16 x 16 -> 12 x 8 x 8: PSNR inf dB, SSIM 1.0000\n" in exact.out
    lossless = HaarAutoencoder._decode
    monkeypatch.setattr(HaarAutoencoder, "_decode", lambda self, latents: lossless(self, latents) + 20 / 127.5)
    first, *_ = run_script("torchditan", *command, "--preview=2").out.splitlines()
    assert "2 images" in first and "PSNR 22.11 dB" in first and "SSIM 0." in first, "20 log10(255 / 20)"
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]

    (tmp_path / "shown.toml").write_text(exact.out.partition("\n")[2])
    shown = read_toml(tmp_path / "shown.toml")
    assert run_script("torchditan", *command).code == 0
    index = read_index(tmp_path / "out/train")
    assert shown["autoencoder.shift"] == pytest.approx(list(index.shift), abs=4e-3)  # of bfloat16
    assert shown["autoencoder.scale"] == pytest.approx(list(index.scale), rel=4e-3)


def test_unreadable_images_are_all_named_before_any_work_or_skipped(run_script: RunScript, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos" / "val", 4)
    flags = write_photos(tmp_path / "photos" / "train", 4)
    names = [os.fsdecode(name) for name in (b"1.png", b"2\xe4.png")]
    for name in names:
        (tmp_path / "photos" / "train" / name).write_bytes(b"no image")
    shown = ["photos/train/1.png (unknown format)", r"photos/train/2\xe4.png (unknown format)"]
    code, _, errors = run_script(*SCRIPT, "out", *flags)
    assert code == 2
    assert_refused(errors, "2 files cannot be read", [*shown, "--dataset.corrupt_images"])
    assert not list(tmp_path.rglob("shard-*"))
    code, output, errors = run_script(*SCRIPT, "out", *flags, "--dataset.corrupt_images=skip")
    assert code == 0
    assert all(name in output + errors for name in shown)
    index = json.loads((tmp_path / "out/train/index.json").read_bytes())
    assert [entry["reason"] for entry in index["shards"][0]["skipped"]] == shown
    assert (index["num_images"], index["num_skipped"]) == (3, 2)


@pytest.mark.parametrize("command", ["encode", "pack"])
def test_ctrl_c_says_how_to_continue(
    run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    flags = write_photos(tmp_path / "photos", 8)
    flags = [*flags, "--shard_size=2"] if command == "encode" else [*flags[:2], "--images_per_shard=2"]
    read = ImageFolder.content_of

    def shards() -> list[Path]:
        return [*tmp_path.glob("out/train/shard-*.safetensors"), *tmp_path.glob("out/train/shard-*.tar")]

    def interrupted(dataset: ImageFolder, index: int) -> bytes:
        if shards():  # after the first
            raise KeyboardInterrupt
        return read(dataset, index)

    monkeypatch.setattr(ImageFolder, "content_of", interrupted)
    code, _, errors = run_script("torchditan", command, "out", *flags)
    assert code == 75
    assert "out" in errors and "continues" in errors and len(errors.splitlines()) == 1
    assert len(shards()) < 4
    monkeypatch.setattr(ImageFolder, "content_of", read)
    assert run_script("torchditan", command, "out", *flags).code == 0


@pytest.mark.parametrize(
    ("arguments", "about", "mentions"),
    [
        ([], "", ["out"]),
        (["out", "--dtyp=int8"], "--dtyp", ["--dtype?"]),
        (["out", "--shard_size=0"], "--shard_size", ["0", "1"]),
        (["out", "--split=test"], '--split = "test"', ["train", "validation"]),
        (["out", "--training.steps=3"], "--training.steps", ["--dataset.key", "--autoencoder.key"]),
        (["out"], "autoencoder.name = none", ["images"]),
        (["out", *DIGITS, "--autoencoder.online"], "autoencoder.online = true", ["training"]),
        (["out", *DIGITS, "--dataset.dataset_name=latents"], 'dataset.dataset_name = "latents"', ["images"]),
        (["out", *DIGITS, "--autoencoder.downsampling=8", "--posterior"], "--posterior = true", ["haar"]),
        (["out", "--latents=mean", "--preview=3"], "--preview = 3", ["--latents"]),
        (["gone", "--verify"], 'dataset.root_dir = "gone"', ["index.json", "torchditan encode"]),
    ],
)
def test_a_mistake_is_one_line(
    run_script: RunScript, tmp_path: Path, arguments: list[str], about: str, mentions: list[str]
) -> None:
    code, out, err = run_script(*SCRIPT, *arguments)
    assert (code, out) == (2, "")
    assert_refused(err, about, mentions)
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_captions_are_measured_but_not_encoded_because_latents_store_none(
    run_script: RunScript, tmp_path: Path
) -> None:
    flags = write_photos(tmp_path / "photos", 3)
    for number in range(3):
        (tmp_path / f"photos/{number}.txt").write_text("red")
    flags[0] = "--dataset.dataset_name=captions"
    code, _, err = run_script(*SCRIPT, "out", *flags)
    assert code == 2
    assert_refused(err, 'dataset.dataset_name = "captions"', ["train"])
    assert run_script(*SCRIPT, "out", *flags, "--preview=3").code == 0
    assert not (tmp_path / "out").exists()


def earth_command(out: Path) -> list[str]:
    flags = ["--dataset.dataset_name=earth", "--autoencoder.name=haar", "--split=train", "--shard_size=64"]
    return [*SCRIPT, str(out), *flags, "--dataset.num_workers=0", "--batch_size=8"]


@pytest.mark.slow
def test_an_encoding_killed_three_times_at_random_ends_byte_identical(tmp_path: Path, run_alone: RunAlone) -> None:
    environment = {**os.environ, **WITHOUT_GPU}
    run_alone(*earth_command(tmp_path / "undisturbed"))
    draws = random.Random()
    for _ in range(3):
        command = [sys.executable, "-m", *earth_command(tmp_path / "killed")]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        already = len(list((tmp_path / "killed" / "train").glob("shard-*.safetensors")))
        while len(list((tmp_path / "killed" / "train").glob("shard-*.safetensors"))) <= already + 5:
            time.sleep(0.01)
            assert process.poll() is None
        time.sleep(draws.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(ConfigError, match="not finished"):
        LatentShards.open(tmp_path / "killed" / "train")
    run_alone(*earth_command(tmp_path / "killed"))
    assert hashes(tmp_path / "killed") == hashes(tmp_path / "undisturbed")


@pytest.mark.slow
def test_ranks_of_torchrun_write_the_bytes_of_one_process(
    tmp_path: Path, run_alone: RunAlone, run_distributed: RunDistributed
) -> None:
    run_alone(*earth_command(tmp_path / "one"))
    for world_size in (2, 4):
        result = run_distributed(earth_command(tmp_path / str(world_size)), world_size)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count(": complete, ") >= 1
        assert hashes(tmp_path / str(world_size)) == hashes(tmp_path / "one")
