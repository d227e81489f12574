# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan encode --latents`: tar shards of others that hold latents become a folder that trains."""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import assert_refused
from safetensors.torch import save

from torchditan.data_stream.latent_index import read_index
from torchditan.data_stream.latent_shards import LatentShards
from torchditan.data_stream.npy_files import read_array
from torchditan.extras.latents.encoding import denormalize

if TYPE_CHECKING:
    from tests.conftest import RunScript

SCRIPT = ("torchditan", "encode")
HAAR = ["--autoencoder.name=haar", "--autoencoder.downsampling=4", "--dataset.num_workers=0"]
TARS = ["--dataset.dataset_name=webdataset", "--dataset.root_dir=shards", *HAAR]
NUM = 12


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def latent(number: int, *, shape: tuple[int, ...] = (48, 2, 2)) -> np.ndarray:
    return np.random.default_rng(number).normal(size=shape).astype(np.float32)


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def write_shards(folder: Path, form: Any = npy, *, train: int = NUM) -> None:
    """Latent n has label n % 3; two training shards, and one of two held-out latents."""
    names = {n: f"{'train' if n < train else 'val'}/{n % 2 if n < train else 0}.tar" for n in range(train + 2)}
    for name in sorted(set(names.values())):
        members: dict[str, bytes] = {}
        for number in [n for n in names if names[n] == name]:
            suffix = "npy" if form is npy else "safetensors"
            members |= {f"{number:03d}.{suffix}": form(latent(number)), f"{number:03d}.cls": b"%d" % (number % 3)}
        write_tar(folder / name, members)


def read_all(folder: Path) -> torch.Tensor:
    shards = LatentShards.open(folder)
    return shards.read(np.arange(len(shards)), np.zeros(len(shards), dtype=bool))["latent"].float()


def as_safetensors(array: np.ndarray) -> bytes:
    """A file of safetensors: float16, with a batch dimension of 1, and a second tensor that is no latent."""
    tensors = {"latents": torch.from_numpy(array)[None].half(), "seed": torch.zeros(1)}
    return save(tensors)


@pytest.mark.parametrize("form", [npy, as_safetensors])
def test_latents_of_tars_are_stored_as_they_are(run_script: RunScript, tmp_path: Path, form: Any) -> None:
    write_shards(tmp_path / "shards", form)
    code, out, err = run_script(*SCRIPT, "out", "--latents=mean", *TARS)
    assert (code, err) == (0, "")
    assert out.startswith(f"out/train: complete, {NUM} latents of 48 x 2 x 2")
    stored = {0: "train", NUM: "validation"}
    order = [*range(0, NUM, 2), *range(1, NUM, 2)]  # the shards in the order of their names
    expected = torch.from_numpy(np.stack([latent(n) for n in order]))
    if form is as_safetensors:
        expected = expected.half().float()
    assert torch.equal(read_all(tmp_path / "out" / stored[0]), expected.bfloat16().float())
    assert len(read_all(tmp_path / "out" / stored[NUM])) == 2
    train = LatentShards.open(tmp_path / "out/train")
    assert np.asarray(train.labels).tolist() == [n % 3 for n in order]
    index = train.index
    assert (index.image_size, index.image_channels, index.autoencoder_name) == ((8, 8), 3, "haar")
    assert (index.flipped, index.autoencoder_dtype, index.normalization) == (False, None, "statistics")
    assert index.mean == pytest.approx(expected.bfloat16().double().mean((0, 2, 3)).tolist(), abs=1e-9)
    assert run_script(*SCRIPT, "out", "--verify").code == 0


def test_they_equal_latents_that_were_encoded_here(run_script: RunScript, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for number in range(14):
        path = tmp_path / "photos" / ("train" if number < 12 else "val") / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(256, size=(8, 8, 3), dtype=np.uint8)).save(path)
    photos = ["--dataset.dataset_name=folder", "--dataset.root_dir=photos", "--dataset.image_size=8", *HAAR]
    assert run_script(*SCRIPT, "encoded", *photos, "--no_flip").code == 0
    for split, name in (("train", "train"), ("validation", "val")):
        shards = LatentShards.open(tmp_path / "encoded" / split)
        latents, labels = read_all(tmp_path / "encoded" / split).numpy(), np.asarray(shards.labels)
        members = [(f"{n:05d}.npy", npy(z)) for n, z in enumerate(latents)]
        members += [(f"{n:05d}.cls", b"%d" % label) for n, label in enumerate(labels)]
        write_tar(tmp_path / "shards" / name / "0.tar", dict(members))
    assert run_script(*SCRIPT, "stored", "--latents=mean", *TARS).code == 0
    for split in ("train", "validation"):
        encoded, stored = ((tmp_path / name / split) for name in ("encoded", "stored"))
        assert torch.equal(read_all(stored), read_all(encoded))
        assert np.array_equal(LatentShards.open(stored).labels, LatentShards.open(encoded).labels)
        assert read_index(stored).shift == read_index(encoded).shift
        assert read_index(stored).scale == read_index(encoded).scale


def test_normalized_latents_are_brought_back() -> None:
    shift, scale = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 0.18215])
    autoencoder: Any = SimpleNamespace(name="x", shift=shift, scale=scale, device=torch.device("cpu"))
    mean = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    normalized = (mean - shift[:, None, None]) * scale[:, None, None]
    found, logvar = denormalize(autoencoder)(normalized)
    assert torch.allclose(found, mean, atol=1e-6)
    assert logvar is None


DAMAGED = {
    "cut": npy(latent(0))[:-3],
    "header": b"\x93NUMPY\x01\x00\x09\x00{'descr':",
    "objects": npy(np.array([[[None]]]), allow_pickle=True),
    "integers": npy(np.zeros((48, 2, 2), dtype=np.int64)),
    "flat": npy(latent(0, shape=(192,))),
    "nan": npy(np.full((48, 2, 2), np.nan, dtype=np.float32)),
    "many": npy(latent(0, shape=(2, 48, 2, 2))),
    "no": b"no array",
}


def test_what_cannot_be_read_is_skipped_and_listed(run_script: RunScript, tmp_path: Path) -> None:
    members = {f"{name}.npy": content for name, content in DAMAGED.items()}
    two = {"a": torch.zeros(48, 2, 2), "b": torch.zeros(48, 2, 2)}
    members |= {"two.safetensors": save(two), "good.npy": npy(latent(1)), "last.npy": npy(latent(2))}
    members |= {f"{name}.cls": b"1" for name in (*DAMAGED, "two", "good", "last", "bare")}
    write_tar(tmp_path / "shards/train/0.tar", members)
    write_tar(tmp_path / "shards/val/0.tar", {"a.npy": npy(latent(3))})
    code, out, err = run_script(*SCRIPT, "out", "--latents=mean", "--split=train", *TARS)
    assert code == 2 and "--dataset.corrupt_images" in err and "0.tar/bare" in err
    flags = ["--latents=mean", "--split=train", "--dataset.corrupt_images=skip", *TARS]
    code, out, err = run_script(*SCRIPT, "out", *flags)
    assert code == 0 and "0.tar/bare" in err
    assert f"2 latents of 48 x 2 x 2 in 0.0 MB, {len(DAMAGED) + 2} unreadable images skipped" in out
    skipped = json.loads((tmp_path / "out/train/index.json").read_bytes())["shards"][0]["skipped"]
    reasons = {Path(re.split("[: ]", entry["reason"])[0]).stem: entry["reason"] for entry in skipped}
    assert reasons.keys() == {*DAMAGED, "two", "bare"}
    assert "its latent is missing" in reasons.pop("bare")
    assert all(": no readable latent (" in reason for reason in reasons.values())
    assert "2 tensors, none called latents" in reasons["two"]
    assert "int64, not floating" in reasons["integers"]


def test_an_array_takes_no_more_memory_than_its_bytes() -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(16)
    with pytest.raises(ValueError, match=r"16 bytes for \[1000000, 1000000\] float32"):
        read_array(content)
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert np.array_equal(read_array(npy(fortran)), fortran)


@pytest.mark.parametrize(
    ("flags", "about", "mentions"),
    [
        (["--dataset.dataset_name=digits", *HAAR], 'dataset.dataset_name = "digits"', ["webdataset", "--latents"]),
        ([*TARS, "--posterior"], "--posterior = true", ["variance"]),
        ([*TARS, "--autoencoder.downsampling=2"], 'autoencoder.name = "haar"', ["12", "48"]),
        ([*TARS, "--latents=normalized"], '--latents = "normalized"', ["haar", "mean"]),
        ([*TARS, "--dataset.root_dir=images"], 'dataset.root_dir = "images"', [".npy", ".safetensors"]),
        ([*TARS, "--dataset.root_dir=mixed"], 'dataset.root_dir = "mixed"', ["b.npy", "[48, 1, 1]", "[48, 2, 2]"]),
    ],
)
def test_a_mistake_with_stored_latents_is_one_line(
    run_script: RunScript, tmp_path: Path, flags: list[str], about: str, mentions: list[str]
) -> None:
    write_shards(tmp_path / "shards", train=2)
    write_tar(tmp_path / "images/0.tar", {"a.png": b"", "a.cls": b"1"})
    mixed = {"a.npy": npy(latent(0)), "b.npy": npy(latent(1, shape=(48, 1, 1))), "c.npy": npy(latent(2))}
    write_tar(tmp_path / "mixed/train/0.tar", mixed)
    write_tar(tmp_path / "mixed/val/0.tar", {"a.npy": npy(latent(3))})
    code, out, err = run_script(*SCRIPT, "out", "--latents=mean", *flags)
    assert (code, out) == (2, "")
    assert_refused(err, about, mentions)
    assert not list((tmp_path / "out").glob("*/*.safetensors"))
