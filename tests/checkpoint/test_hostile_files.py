# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One hostile file for each reader: it is refused in one line, runs nothing and reserves no memory.

tools/fuzz.py tries many more. Shared folders are in tests/extras/sharing/test_share.py, markup in tests/extras/report/.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import datasets
import pyarrow
import pytest
import torch
from PIL import EpsImagePlugin
from pyarrow import parquet
from refusals import refused

from torchditan import load
from torchditan.checkpoint.files import MANIFEST, write_manifest
from torchditan.checkpoint.loading import INDEX, read_manifest
from torchditan.config.loader import load_config
from torchditan.config.options import Autoencoder, Dataset
from torchditan.config.prompts import read_prompts
from torchditan.datasets import build_dataset
from torchditan.extras.ablation.grid import load_grid
from torchditan.extras.autoencoders import open_autoencoder
from torchditan.extras.evaluation.card import read_card
from torchditan.extras.evaluation.sample_batches import read_statistics
from torchditan.extras.weights.importing import import_weights
from torchditan.run.reading import read_metrics, read_status

if TYPE_CHECKING:
    from zoo import Zoo

RAN = "ran"
DEEP = b"[" * 100_000


class Payload:
    """Its pickle makes the folder `ran` in the working folder when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, (RAN,)


PICKLE = pickle.dumps(Payload(), protocol=2)
_FILE = io.BytesIO()
torch.save({"weight": Payload()}, _FILE)
TORCH_PICKLE = _FILE.getvalue()


def data(name: str, **options: Any) -> Any:
    """The first sample of a dataset."""
    return build_dataset(Dataset(dataset_name=name, **options), split="train")[0]


def write_parquet(path: Path) -> None:
    """The label column has a pickled type."""
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": PICKLE}
    label = pyarrow.field("label", pyarrow.binary(), metadata=metadata)
    image = pyarrow.field("image", pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    columns = [pyarrow.array([{"bytes": b"", "path": ""}], image.type), pyarrow.array([b"x"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, schema=pyarrow.schema([image, label])), path)


def write_postscript(path: Path) -> None:
    """Called a PNG. Pillow alone would have Ghostscript run it."""
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n")


def write_tar(path: Path) -> None:
    """Its first header announces 8 GB of names."""
    info = tarfile.TarInfo("0.png")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 33
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2_048))


def write_statistics(path: Path) -> None:
    """A covariance of 7 GB in a file of some bytes."""
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (30000, 30000), }\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("extractor", "mu", "sigma"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(64))


class Hostile(NamedTuple):
    file: str
    content: bytes | Callable[[Path], None]
    open: Callable[[], object]
    about: str
    mentions: tuple[str, ...] = ()


def autoencoder() -> Any:
    Path("vae/config.json").write_text('{"_class_name": "AutoencoderKL", "in_channels": 3, "latent_channels": 4}')
    config = Autoencoder(name="diffusers", path="vae")
    return open_autoencoder(config, device=torch.device("cpu"), image_channels=3)


FILES = {
    "cifar10": Hostile(
        "cifar/data_batch_1", PICKLE, lambda: data("cifar10", root_dir="cifar"), 'dataset.root_dir = "cifar"'
    ),
    "parquet": Hostile(
        "a.parquet", write_parquet, lambda: data("cifar10", root_dir="a.parquet"), 'dataset.label_key = "label"'
    ),
    "hub": Hostile(
        "hub/hub.py",
        b"import os\nos.mkdir('ran')\n",
        lambda: data("imagenet_hub", hub_name="hub", image_size=[8, 8]),
        'dataset.hub_name = "hub"',
    ),
    "image": Hostile(
        "images/1.png",
        write_postscript,
        lambda: data("folder", root_dir="images", image_size=[8, 8]),
        "images/1.png",
        ("unknown format",),
    ),
    "captions": Hostile(
        "captions/metadata.jsonl",
        DEEP,
        lambda: data("captions", root_dir="captions", image_size=[8, 8]),
        'dataset.root_dir = "captions"',
        ("metadata.jsonl",),
    ),
    "tar": Hostile("tars/0.tar", write_tar, lambda: data("webdataset", root_dir="tars", image_size=[8]), "0.tar"),
    "statistics": Hostile(
        "a.npz", write_statistics, lambda: read_statistics(Path("a.npz"), extractor="E"), "a.npz", ("statistics",)
    ),
    "autoencoder": Hostile(
        "vae/diffusion_pytorch_model.safetensors", TORCH_PICKLE, autoencoder, 'autoencoder.path = "vae"'
    ),
    "weights to import": Hostile(
        "a.pt",
        TORCH_PICKLE,
        lambda: import_weights(Path("a.pt"), Path("imported"), format="dit"),
        "a.pt",
        ("execute code",),
    ),
    "exported weights": Hostile("a.safetensors", TORCH_PICKLE, lambda: load("a.safetensors"), "a.safetensors"),
    "run": Hostile("run/config.json", DEEP, lambda: load("run"), "run/config.json"),
    "card": Hostile("card.json", DEEP, lambda: read_card("card.json"), "card.json"),
    "configuration": Hostile(
        "a.toml", b"a = " + DEEP, lambda: load_config(["--job.config_file=a.toml"]), "", ("a.toml",)
    ),
    "grid": Hostile("a.toml", b"base = []", lambda: load_grid("./a.toml"), "base = []"),
    "prompts": Hostile("a.txt", b"\xff\xff", lambda: read_prompts("--prompts", ["@a.txt"]), '--prompts = "@a.txt"'),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a Ghostscript that would make the folder `ran`."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gs").write_text(f"#!/bin/sh\nmkdir -p {tmp_path / RAN}\n")
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # looked for once in a process
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("reader", FILES)
def test_a_hostile_file_is_refused_in_one_line_and_runs_nothing(reader: str) -> None:
    file, content, open_file, about, mentions = FILES[reader]
    path = Path(file)
    path.parent.mkdir(exist_ok=True)
    content(path) if callable(content) else path.write_bytes(content)
    if reader in ("tar", "statistics"):  # tracing makes imports slow
        tracemalloc.start()
    try:
        with refused(about, *mentions):
            open_file()
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert not Path(RAN).exists()


def test_the_payload_runs_where_nothing_stops_it() -> None:
    torch.load(io.BytesIO(TORCH_PICKLE), weights_only=False)
    assert Path(RAN).is_dir()


def test_hostile_status_and_metrics_count_as_missing() -> None:
    Path("status.json").write_bytes(DEEP)
    Path("metrics.jsonl").write_bytes(DEEP + b'\n{"step": 2, "loss": 1' + b"0" * 400 + b"}\n")
    assert read_status(".") is None
    assert read_metrics(".") == [{"step": 2, "loss": None}]


def test_the_index_of_latents_names_no_file_outside(zoo: Zoo) -> None:
    shutil.copytree(zoo("latents").parent / "inputs" / "latents", "latents")
    folder = Path("latents/train")
    index = json.loads((folder / "index.json").read_text())
    shutil.copy(folder / index["shards"][0]["file"], "latents/shard.safetensors")
    index["shards"][0]["file"] = "../shard.safetensors"
    (folder / "index.json").write_text(json.dumps(index))
    with refused("latents/train/index.json", "damaged"):
        data("latents", root_dir="latents")


@pytest.mark.parametrize("what", ["index", "tensor", "file outside", "nothing"])
def test_a_checkpoint_runs_nothing_and_reads_no_file_outside(what: str, zoo: Zoo) -> None:
    shutil.copytree(zoo("digits"), "run")
    shutil.rmtree("run/checkpoint/step-00000003")
    checkpoint = Path("run/checkpoint/step-00000006")
    index = pickle.loads((checkpoint / INDEX).read_bytes())
    for key, place in index.storage_data.items():
        if what == "file outside":
            index.storage_data[key] = dataclasses.replace(place, relative_path="../../../../outside")
        elif what == "tensor" and key.fqn.startswith("ema."):
            file = checkpoint / place.relative_path
            index.storage_data[key] = dataclasses.replace(place, offset=file.stat().st_size, length=len(TORCH_PICKLE))
            file.write_bytes(file.read_bytes() + TORCH_PICKLE)
    (checkpoint / INDEX).write_bytes(PICKLE if what == "index" else pickle.dumps(index))
    sign(checkpoint)
    if what == "nothing":
        assert load("run").step == 6
        return
    with refused("", str(checkpoint)):
        load("run")
    assert not Path(RAN).exists()


def sign(checkpoint: Path) -> None:
    """Rewrite the manifest to fit the files, as an attacker would."""
    trajectory = json.loads((checkpoint / MANIFEST).read_text())["trajectory"]
    write_manifest(checkpoint, step=6, trajectory=trajectory)
    assert read_manifest(checkpoint)["step"] == 6
