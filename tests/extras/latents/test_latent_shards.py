# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Shards of latents: read data equals written data at any size, and errors name the problem of a folder."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import resource
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from refusals import refused
from safetensors.torch import load, save, save_file

from torchditan.data_stream import latent_index
from torchditan.data_stream.latent_index import Encoding, LatentIndex, index_to_json, mean_and_std, standardizing
from torchditan.data_stream.latent_shards import LatentShards, to_sample
from torchditan.errors import ConfigError
from torchditan.extras.latents.verifying import verify
from torchditan.extras.latents.writer import LatentWriter, Shard, shard_file

SHAPE = (4, 2, 3)
ENCODING = Encoding(
    dataset="made up",
    split="train",
    num_source_images=10,
    source=None,
    image_size=(16, 24),
    crop="center",
    autoencoder_name="none",
    autoencoder_path=None,
    downsampling=8,
    fingerprint="none-1",
    image_channels=3,
    autoencoder_dtype=None,
    latent_shape=SHAPE,
    dtype="bf16",
    flipped=True,
    posterior=True,
    shard_size=4,
    class_names=("a", "b", "c"),
    published_shift=None,
    published_scale=None,
)


def write(folder: Path, shards: list[dict[str, torch.Tensor]], **settings: Any) -> LatentIndex:
    encoding = dataclasses.replace(ENCODING, num_source_images=4 * len(shards), **settings)
    writer = LatentWriter(folder, encoding)
    writer.open()
    for number, tensors in enumerate(shards):
        writer.write(number, Shard(tensors, ()))
    index = writer.finalise()
    assert index is not None
    return index


def make(count: int, number: int, *, dtype: str = "bf16") -> dict[str, torch.Tensor]:
    """A shard of `count` random latents."""
    draws = torch.Generator().manual_seed(number)
    tensors: dict[str, torch.Tensor] = {
        name: torch.randn(count, *SHAPE, generator=draws).bfloat16()
        for name in ("latents", "latents_flipped", "logvar", "logvar_flipped")
    }
    if dtype == "int8":
        for name in ("latents", "latents_flipped"):
            tensors[name] = torch.randint(-127, 128, (count, *SHAPE), generator=draws, dtype=torch.int8)
        tensors["scale"] = torch.rand(SHAPE[0], generator=draws) + 0.1
    tensors["labels"] = torch.arange(count) % 3
    tensors["index"] = torch.arange(4 * number, 4 * number + count)
    return tensors


LABELS = "labels.npy"
COUNTS = (4, 0, 3, 4)
"""Latents of four shards: in the second no image was readable, in the third one was not."""


@pytest.mark.parametrize("shard_format", ["safetensors", "webdataset"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_any_batch_is_read_as_it_was_written(tmp_path: Path, dtype: str, shard_format: str) -> None:
    written = [make(count, number, dtype=dtype) for number, count in enumerate(COUNTS)]
    write(tmp_path, written, dtype=dtype, shard_format=shard_format)
    assert verify(tmp_path) == []
    shards = LatentShards.open(tmp_path)
    assert len(shards) == 11
    draws = np.random.default_rng(0)
    indices, flips = draws.integers(0, 11, size=64), draws.random(64) < 0.5
    read = shards.read(indices, flips, with_logvar=True)
    for name in ("latents", "logvar"):
        both = [torch.cat([shard[f"{name}{suffix}"] for shard in written]) for suffix in ("", "_flipped")]
        expected = torch.stack([both[int(flip)][index] for index, flip in zip(indices, flips, strict=True)])
        assert torch.equal(read[{"latents": "latent", "logvar": "logvar"}[name]], expected)
    assert np.array_equal(np.asarray(shards.labels), torch.cat([shard["labels"] for shard in written]).numpy())
    assert ("latent_scale" in read) == (dtype == "int8")
    if dtype == "int8":
        owners = np.repeat([0, 2, 3], [4, 3, 4])[indices]
        assert torch.equal(read["latent_scale"], torch.stack([written[owner]["scale"] for owner in owners]))


def test_statistics_are_those_of_the_latents_as_they_are_read(tmp_path: Path) -> None:
    for dtype in ("bf16", "int8"):
        folder = tmp_path / dtype
        index = write(folder, [make(count, number, dtype=dtype) for number, count in enumerate(COUNTS)], dtype=dtype)
        shards = LatentShards.open(folder)
        rows = np.arange(11)
        zero, one = torch.zeros(4), torch.ones(4)
        read = [to_sample(shards.read(rows, np.full(11, flip)), shift=zero, scale=one) for flip in (False, True)]
        values = torch.cat(read).double().transpose(0, 1).flatten(1)
        torch.testing.assert_close(torch.tensor(index.mean).double(), values.mean(1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(index.std).double(), values.std(1, correction=0), atol=1e-6, rtol=1e-5)
        assert index.shift == index.mean and index.scale == tuple(1 / std for std in index.std)
        assert index.normalization == "statistics"


def test_a_published_normalisation_goes_before_statistics_and_no_channel_is_divided_by_zero(tmp_path: Path) -> None:
    index = write(tmp_path / "published", [make(4, 0)], published_shift=(0.5,) * 4, published_scale=(2.0,) * 4)
    assert (index.shift, index.scale, index.normalization) == ((0.5,) * 4, (2.0,) * 4, "published")
    assert index.mean != index.shift
    tensors = make(4, 0)
    for name in ("latents", "latents_flipped"):
        tensors[name][:, 1] = 3.0
    index = write(tmp_path / "measured", [tensors])
    assert (index.shift[1], index.scale[1]) == (3.0, 1.0)


def test_a_sample_is_dequantised_drawn_and_normalised() -> None:
    shift, scale = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 4.0])
    raw = {
        "latent": torch.tensor([[[[10]], [[-20]]]], dtype=torch.int8),
        "latent_scale": torch.tensor([[0.5, 0.1]]),
        "logvar": torch.tensor([[[[2.0]], [[-400.0]]]]).bfloat16(),
    }
    mean = to_sample(raw, shift=shift, scale=scale)
    torch.testing.assert_close(mean.flatten(), torch.tensor([(5 - 1) * 0.5, (-2 + 2) * 4.0]))
    noise = torch.tensor([[[[3.0]], [[1e6]]]])
    drawn = to_sample(raw, shift=shift, scale=scale, posterior_noise=noise)
    expected = [(5 + np.exp(1.0) * 3 - 1) * 0.5, np.exp(-15.0) * 1e6 * 4.0]  # logvar is clamped to -30
    torch.testing.assert_close(drawn.flatten(), torch.tensor(expected, dtype=torch.float32))


def test_a_worker_that_is_not_forked_opens_the_files_itself(tmp_path: Path) -> None:
    write(tmp_path, [make(4, 0), make(4, 1)])
    shards = LatentShards.open(tmp_path)
    rows, flips = np.arange(8), np.arange(8) % 2 == 0
    expected = shards.read(rows, flips)["latent"]
    pickled = pickle.dumps(shards)
    assert len(pickled) < 500
    assert torch.equal(pickle.loads(pickled).read(rows, flips)["latent"], expected)


def private_memory() -> int:
    """Bytes that this process shares with no file."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_imagenet_opens_in_a_moment_and_takes_neither_memory_nor_too_many_open_files(tmp_path: Path) -> None:
    """1.28 M entries in 160 shards, with 100 files open at most; the files are holes of the right size."""
    num_images, num_shards, shape = 1_281_167, 160, (4, 32, 32)
    shard_size = -(-num_images // num_shards)
    row = 2 * int(np.prod(shape))
    small = write(tmp_path, [make(4, 0)])
    records = []
    for number in range(num_shards):
        count = min(shard_size, num_images - number * shard_size)
        header = json.dumps(
            {
                name: {
                    "dtype": "BF16",
                    "shape": [count, *shape],
                    "data_offsets": [i * count * row, (i + 1) * count * row],
                }
                for i, name in enumerate(("latents", "latents_flipped"))
            }
        ).encode()
        size = 8 + len(header) + 2 * count * row
        with open(tmp_path / shard_file(number), "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(size)
        records.append(dataclasses.replace(small.shards[0], file=shard_file(number), num_images=count, bytes=size))
    index = dataclasses.replace(
        small, num_images=num_images, latent_shape=shape, posterior=False, shards=tuple(records)
    )
    (tmp_path / "index.json").write_text(json.dumps(index_to_json(index)))
    np.lib.format.open_memmap(tmp_path / "labels.npy", mode="w+", dtype=np.int32, shape=(num_images,)).flush()
    before, start, limits = private_memory(), time.perf_counter(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        shards = LatentShards.open(tmp_path)
        assert time.perf_counter() - start < 2
        indices = np.random.default_rng(0).integers(0, num_images, size=2048)
        for batch in indices.reshape(8, 256):
            shards.read(batch, batch % 2 == 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert private_memory() - before < 16 * 2**20
    assert len(shards) == num_images


def refuse(path: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        LatentShards.open(path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_the_public_one_is_refused(tmp_path: Path) -> None:
    path, short = tmp_path / "a.safetensors", torch.zeros(2).short()
    latents = torch.zeros(2, 4, 4, 4, dtype=torch.int8)
    others: dict[str, dict[str, torch.Tensor]] = {
        r"must hold int8 `latents`.*it has latents F32 \[2, 4, 4, 4\]": {"latents": latents.float()},
        "must hold int8": {"latents": latents, "labels": torch.zeros(3).short()},
        "contains no latents": {"latents": latents[:0], "labels": short[:0]},
    }
    for message, tensors in others.items():
        save_file(tensors, path)
        refuse(path, message)
    for content in (b"", b"\x89PNG", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"):
        path.write_bytes(content)
        refuse(path, "a.safetensors is not a safetensors file")
    whole = save({"latents": latents, "labels": short})
    path.write_bytes(whole[:-1])
    refuse(path, f"is truncated: it has {len(whole) - 1} bytes, and should have {len(whole)}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "latents", [make(4, 0), make(4, 1)])
    return tmp_path / "latents"


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / "index.json").read_bytes())
    change(values)
    (folder / "index.json").write_text(json.dumps(values))


HEADER = b"{'descr': '<i4"  # numpy's reader has an error of its own for a header like this


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: append(folder / shard_file(1), b"x"),
            "shard-00001.* has [0-9]+ bytes, not .*; rerun",
        ),
        (lambda folder: (folder / shard_file(1)).unlink(), "shard-00001.safetensors is missing; rerun"),
        (lambda folder: np.save(folder / LABELS, np.zeros(3, np.int32)), "labels.npy has 3 labels, not 8; rerun"),
        (lambda folder: (folder / LABELS).write_bytes(b"x"), "labels.npy is damaged; rerun"),
        (lambda folder: (folder / LABELS).write_bytes(b"\x93NUMPY\1\0\x0e\0" + HEADER), "labels.npy is damaged; rerun"),
        (lambda folder: (folder / LABELS).unlink(), "labels.npy is missing; rerun"),
        (lambda folder: (folder / "index.json").write_text('{"format_version": 1,'), "index.json is damaged"),
        (lambda folder: (folder / "index.json").unlink(), "holds no latents"),
        # what only `verify` finds:
        (
            lambda folder: flip_last_bit(folder / shard_file(1)),
            "verify: shard-00001.* is not what was encoded",
        ),
        (lambda folder: (folder / "notes.txt").write_text("x"), "verify: notes.txt does not belong to these latents"),
        (
            lambda folder: np.save(folder / LABELS, np.zeros(8, np.int32)),
            "verify: labels.npy differs from the labels",
        ),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder)
    if not message.startswith("verify: "):
        refuse(folder, message)
    (found,) = verify(folder)
    assert re.search(message.removeprefix("verify: "), found), found
    assert str(folder) in found and "\n" not in found


def test_an_index_that_is_damaged_or_of_a_newer_version_is_refused(folder: Path) -> None:
    changes: tuple[Callable[[dict[str, Any]], Any], ...] = (
        lambda values: values.pop("shards"),
        lambda values: values["shards"][0].pop("file"),
        lambda values: values.update(dtype="float8"),
        lambda values: values["normalization"].update(shift=[]),
        lambda values: values["shards"][0]["sum"].append(0.0),
    )
    before = (folder / "index.json").read_bytes()
    for change in changes:
        change_index(folder, change)
        refuse(folder, "index.json is damaged")
        (folder / "index.json").write_bytes(before)
    change_index(folder, lambda values: values.update(format_version=latent_index.FORMAT_VERSION + 1))
    refuse(folder, "index.json is of format 2, and this TorchDiTan reads up to 1; update TorchDiTan")


def test_a_shard_that_is_not_its_indexs_is_named_when_it_is_met(folder: Path) -> None:
    shard = folder / shard_file(1)
    content = save({**make(4, 1), "latents": torch.zeros(4, *SHAPE, dtype=torch.float16)})
    change_index(folder, lambda values: values["shards"][1].update(bytes=len(content)))
    shard.write_bytes(content)
    shards = LatentShards.open(folder)
    shards.read(np.arange(4), np.zeros(4, dtype=bool))
    with pytest.raises(ConfigError, match=f"{shard.name} is not the shard that its index describes: latents differs"):
        shards.read(np.array([4]), np.zeros(1, dtype=bool))


def test_a_tar_has_a_file_and_a_label_for_each_image(tmp_path: Path) -> None:
    index = write(tmp_path, [make(4, 0, dtype="int8")], dtype="int8", shard_format="webdataset")
    tensors = make(4, 0, dtype="int8")
    with tarfile.open(tmp_path / "shard-00000.tar") as tar:
        members = {member.name: cast(Any, tar.extractfile(member)).read() for member in tar}
    keys = [f"{number:09d}" for number in tensors["index"].tolist()]
    assert list(members) == [f"{key}{suffix}" for key in keys for suffix in (".safetensors", ".cls")]
    found = load(members[f"{keys[2]}.safetensors"])
    expected = {name: tensor[2] for name, tensor in tensors.items() if name not in ("index", "labels", "scale")}
    expected["scale"] = tensors["scale"]
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert int(members[f"{keys[2]}.cls"]) == tensors["labels"][2]
    assert index_to_json(index)["shard_format"] == "webdataset"


def test_a_folder_keeps_its_format(tmp_path: Path) -> None:
    write(tmp_path, [make(4, 0)], shard_format="webdataset")
    with refused(str(tmp_path), "shard_format is webdataset there and safetensors here"):
        write(tmp_path, [make(4, 0)])


@pytest.mark.parametrize("place", [0, 520, 512 * 9])
def test_a_tar_of_something_else_is_refused(tmp_path: Path, place: int) -> None:
    write(tmp_path, [make(4, 0)], shard_format="webdataset")
    path = tmp_path / "shard-00000.tar"
    data = bytearray(path.read_bytes())
    data[place : place + 40] = (b"\xff" if place else b"\0") * 40
    path.write_bytes(data)
    shards = LatentShards.open(tmp_path)
    with refused(str(path)):
        shards.read(np.arange(4), np.zeros(4, dtype=bool))


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_scale_of_a_channel_without_variance_is_1() -> None:
    """int8 values times a float scale leave a rounding residue in the sums."""
    for value in range(-128, 128):
        total, squares = np.array([value * 0.0123 * 4096]), np.array([(value * 0.0123) ** 2 * 4096])
        mean, std = mean_and_std(total, squares, count=4096)
        assert standardizing(mean, std)[1] == (1.0,), value
    assert standardizing([3.0], [0.5]) == ((3.0,), (2.0,))
