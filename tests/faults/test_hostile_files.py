# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Malicious files that try to run code or to access other folders are refused in one line without any effect.

Every payload would create a folder called `ran` in its working directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pickle
import re
import resource
import shutil
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cards
import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from refusals import assert_refused, refused
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torchditan import load
from torchditan.ablation.grid import load_grid
from torchditan.autoencoders import open_autoencoder
from torchditan.autoencoders.published import CLASSES
from torchditan.checkpoint.files import INDEX, MANIFEST, read_manifest, write_manifest
from torchditan.config.errors import ConfigError
from torchditan.config.loader import load_config, to_dict
from torchditan.config.options import Autoencoder, Dataset
from torchditan.data_stream.datasets import CorruptImageError
from torchditan.datasets import build_dataset
from torchditan.datasets.images import load_sample
from torchditan.evaluation.card_tables import markdown
from torchditan.evaluation.grid_picture import save_grid
from torchditan.evaluation.sample_batches import read_statistics
from torchditan.report.page import data_uri
from torchditan.run.reading import read_config, read_metrics, read_status
from torchditan.weights.exported import export_weights
from torchditan.weights.importing import import_weights

if TYPE_CHECKING:
    from tests.conftest import RunScript

RAN = "ran"
SMALL = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.batch_size=2"]
FEW = ["--sampling.num_steps=1", "--sampling.images_per_class=1", "--sampling.max_classes=1", "--model.patch_size=2"]
SMALL += ["--metrics.enable_sampling=false", "--checkpoint.enable_checkpoint", "--metrics.experiment_name=run"]

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.tensor results are registered as constants"),
]


class Payload:
    """An object whose pickle makes the folder `ran` in the working folder when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, (RAN,)


PICKLE = pickle.dumps(Payload(), protocol=2)


def torch_file(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


TORCH_PICKLE = torch_file({"weight": Payload()})


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str | Path, content: bytes | str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refuse(call: Callable[[], object], about: str, *mentions: str) -> None:
    """`call` is refused in such a line (tests/refusals.py), and no payload ran."""
    with refused(about, *mentions):
        call()
    assert not Path(RAN).exists()


def test_the_payload_runs_where_nothing_stops_it() -> None:
    pickle.loads(PICKLE)
    assert Path(RAN).is_dir()
    os.rmdir(RAN)
    torch.load(io.BytesIO(TORCH_PICKLE), weights_only=False)
    assert Path(RAN).is_dir()


# Datasets


def open_dataset(name: str, **options: Any) -> Any:
    return build_dataset(Dataset(dataset_name=name, **options), split="train")


def test_the_pickles_of_cifar10_are_refused() -> None:
    write("cifar/data_batch_1", PICKLE)
    refuse(lambda: open_dataset("cifar10", root_dir="cifar"), 'dataset.root_dir = "cifar"', "cifar-10-binary.tar.gz")


def test_a_pickled_type_in_a_parquet_file_is_no_type() -> None:
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": PICKLE}
    labels = pyarrow.field("label", pyarrow.binary(), metadata=metadata)
    image = pyarrow.field("image", pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    columns = [pyarrow.array([{"bytes": b"", "path": ""}], image.type), pyarrow.array([b"x"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, schema=pyarrow.schema([image, labels])), "train.parquet")
    refuse(
        lambda: open_dataset("cifar10", root_dir="train.parquet"),
        'dataset.label_key = "label"',
        "binary",
        "integers",
    )


@pytest.mark.parametrize(
    ("file", "content"),
    [("hostile.py", f"import os\nos.mkdir({RAN!r})\n"), ("train.pkl", PICKLE), ("train.parquet", PICKLE)],
)
def test_a_hub_dataset_that_is_code_or_a_pickle_is_refused(
    file: str, content: bytes, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    write(f"hostile/{file}", content)
    refuse(lambda: open_dataset("imagenet_hub", hub_name="hostile", image_size=[8, 8]), 'dataset.hub_name = "hostile"')


def test_images_of_a_hub_dataset_are_never_read_from_a_path(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    Image.new("RGB", (8, 8)).save("private.png")
    Path("hub").mkdir()
    table = {"image": [{"bytes": None, "path": str(here / "private.png")}], "label": [0]}
    parquet.write_table(pyarrow.table(table), "hub/train.parquet")
    dataset = open_dataset("imagenet_hub", hub_name="hub", image_size=[8, 8])
    refuse(lambda: dataset[0], "hub, row 0", "no data", "--dataset.corrupt_images skip")


def test_postscript_that_calls_itself_a_png_is_not_given_to_ghostscript(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import EpsImagePlugin

    ghostscript = write("bin/gs", f"#!/bin/sh\nmkdir -p {here / RAN}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # looked for once in a process
    postscript = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    Image.init()
    with contextlib.suppress(OSError), Image.open(write("images/1.png", postscript)) as image:
        image.load()
    assert Path(RAN).exists(), "Pillow alone runs it"
    os.rmdir(RAN)
    dataset = open_dataset("folder", root_dir="images", image_size=[8, 8])
    refuse(lambda: dataset[0], "images/1.png", "unknown format", "--dataset.corrupt_images skip")


# Latents


@pytest.fixture
def latents(run_script: RunScript) -> Path:
    """Latents of the digits: `latents/train` has one shard."""
    flags = ["--autoencoder.name=haar", "--autoencoder.downsampling=2", "--dataset.num_workers=0", "--no_flip"]
    assert run_script("torchditan", "encode", "latents", *flags, "--split=train").code == 0
    return Path("latents/train")


def open_latents() -> Any:
    return open_dataset("latents", root_dir="latents")


def test_labels_of_latents_are_never_unpickled(latents: Path) -> None:
    archive = io.BytesIO()
    np.savez(archive, labels=np.array([Payload()], dtype=object))
    objects = io.BytesIO()
    np.save(objects, np.array([Payload()], dtype=object))
    for content in (PICKLE, objects.getvalue(), archive.getvalue()):
        (latents / "labels.npy").write_bytes(content)
        refuse(open_latents, 'dataset.root_dir = "latents/train"', "labels.npy", "damaged")


@pytest.mark.parametrize("name", ["../shard.safetensors", "/shard.safetensors", "a/b.safetensors", "..", ".", "", 7])
def test_no_name_in_an_index_leaves_its_folder(latents: Path, name: Any) -> None:
    index = json.loads((latents / "index.json").read_text())
    shard = latents / index["shards"][0]["file"]
    shutil.copy(shard, latents.parent / "shard.safetensors")
    index["shards"][0]["file"] = str(latents.parent.resolve()) + name if str(name).startswith("/") else name
    (latents / "index.json").write_text(json.dumps(index))
    refuse(open_latents, "latents/train/index.json", "damaged", "restore")


@pytest.mark.parametrize(
    "change",
    [
        {"num_images": float("inf")},
        {"shards": 3},
        {"statistics": []},
        {"autoencoder": "haar"},
        {"latent_shape": ["4", None]},
        {"class_names": 3},
        {"format_version": True},
        {"shards": []},
        {"num_images": 2**40},
        {"latent_shape": [4, 4, 0]},
        {"latent_shape": [4, 4, -4]},
        {"latent_shape": [4, 2**40, 4]},
    ],
)
def test_an_index_of_other_types_is_one_line(latents: Path, change: dict[str, Any]) -> None:
    content = json.loads((latents / "index.json").read_text())
    (latents / "index.json").write_text(json.dumps({**content, **change}))
    refuse(open_latents, "latents/train/index.json", "damaged", "restore")


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [-64, 100]},
        {"data_offsets": [100, 0]},
        {"data_offsets": [0, 1]},
        {"data_offsets": [0, float("inf")]},
        {"data_offsets": 7},
        {"shape": [-1, 4, 4, 4]},
        {"shape": "long"},
    ],
)
def test_a_shard_whose_header_points_elsewhere_is_one_line(latents: Path, entry: dict[str, Any]) -> None:
    path = latents / "shard-00000.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["latents"] |= entry
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])
    index = json.loads((latents / "index.json").read_text())
    index["shards"][0] |= {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (latents / "index.json").write_text(json.dumps(index))
    refuse(lambda: open_latents()[0], str(path), "safetensors")


@pytest.mark.parametrize("file", ["index.json", "encoding.json"])
def test_json_nested_beyond_measure_is_one_line(latents: Path, file: str, run_script: RunScript) -> None:
    (latents / "index.json").unlink()
    (latents / file).write_text("[" * 100_000)
    flags = ["--autoencoder.name=haar", "--autoencoder.downsampling=2", "--dataset.num_workers=0", "--no_flip"]
    code, _, errors = run_script("torchditan", "encode", "latents", *flags, "--split=train")
    assert code == 2
    assert_refused(errors, f"latents/train/{file}", ["damaged"])


# Autoencoders


def open_as(name: str, path: str) -> Any:
    config = Autoencoder(name=name, path=path)
    return open_autoencoder(config, device=torch.device("cpu"), image_channels=3)


def test_weights_of_diffusers_are_never_unpickled() -> None:
    config = {"_class_name": "AutoencoderKL", "in_channels": 3, "latent_channels": 4}
    write("vae/config.json", json.dumps(config))
    write("vae/diffusion_pytorch_model.bin", TORCH_PICKLE)
    where = 'autoencoder.path = "vae"'
    refuse(
        lambda: open_as("diffusers", "vae"),
        where,
        "config.json",
        "diffusion_pytorch_model.safetensors",
    )
    write("vae/diffusion_pytorch_model.safetensors", TORCH_PICKLE)
    refuse(lambda: open_as("diffusers", "vae"), where, "diffusion_pytorch_model.safetensors", "complete")


@pytest.mark.parametrize("class_name", ["os.system", "DiffusionPipeline", "AutoencoderTiny", ["AutoencoderKL"]])
def test_a_config_names_no_class_but_ours(class_name: Any) -> None:
    write("vae/config.json", json.dumps({"_class_name": class_name, "auto_map": {"AutoModel": "x.py"}}))
    write("vae/diffusion_pytorch_model.safetensors", b"")
    refuse(
        lambda: open_as("diffusers", "vae"),
        'autoencoder.path = "vae"',
        "config.json",
        *CLASSES,
    )


class Saves(nn.Module):
    """Writes the file `ran` when it is loaded."""

    def forward(self, images: Tensor) -> Tensor:
        return images

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, bool]:
        return torch.zeros(1), self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, bool]) -> None:
        torch.save(state[0], "ran")
        self.training = state[1]


@pytest.mark.parametrize("name", ["cosmos", "torchditan.autoencoders.cosmos:open_cosmos"])
def test_torchscript_runs_only_if_the_user_names_it(latents: Path, name: str, run_script: RunScript) -> None:
    for file in ("encoder.jit", "decoder.jit"):
        write(f"hostile/{file}", b"")
        torch.jit.script(Saves()).save(f"hostile/{file}")
    Path(RAN).unlink(missing_ok=True)
    index = json.loads((latents / "index.json").read_text())
    index["autoencoder"] |= {"name": name, "path": "hostile", "fingerprint": "cosmos-0123456789abcdef"}
    (latents / "index.json").write_text(json.dumps(index))
    data = ["--dataset.dataset_name=latents", "--dataset.root_dir=latents"]
    job = [*SMALL, "--metrics.enable_sampling", *data, "--training.steps=1", "--job.dump_folder=runs", *FEW]
    trained = run_script("torchditan", "train", *job)
    assert trained.code == 0, trained.err
    assert (trained.out + trained.err).count("--autoencoder.path") == 1
    assert list(Path("runs/run/samples").glob("*.png")), "of latent channels"
    with pytest.raises(ConfigError, match=r"--autoencoder\.path"):
        load("runs/run").sample(classes=[1])
    assert load("runs/run").generate([1], samples_per_label=1, seed=0, batch_size=1).shape == (1, 1, 4, 4, 4)
    assert "--autoencoder.path" in run_script("torchditan", "evaluate", "runs/run", "--num_samples=4").err
    shared = run_script("torchditan", "share", "runs/run", "shared")
    assert shared.code == 0 and not Path("shared/samples.png").exists(), shared.err
    manifest = json.loads(Path("shared/config.json").read_text())
    with safe_open("shared/model.safetensors", framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    manifest["config"]["autoencoder"] |= {"name": name, "path": "hostile"}
    save_file(tensors, "shared/model.safetensors", {**metadata, "config": json.dumps(manifest["config"])})
    content = Path("shared/model.safetensors").read_bytes()
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"]["model.safetensors"] = entry
    write("shared/config.json", json.dumps(manifest))
    for place in ("runs/run", "shared", "shared/model.safetensors"):
        drawn = run_script("torchditan", "generate", place, "--out=drawn.png")
        assert drawn.code == 0 and drawn.err.count("--autoencoder.path") == 1, drawn.err
    again = run_script("torchditan", "train", *job)  # its config.json names it, not the user
    assert again.code == 0 and not Path(RAN).exists(), again.err
    named = run_script("torchditan", "generate", "runs/run", "--autoencoder.path=hostile")
    assert named.code == 2 and Path(RAN).exists(), named.err


# Runs and checkpoints


@pytest.mark.parametrize("content", ["[1]", "3", "null", '{"config": 3}', '{"config": {"model": 3}}', "[" * 100_000])
def test_a_run_whose_settings_are_none_is_one_line(run_script: RunScript, content: str) -> None:
    write("run/config.json", content)
    code, _, errors = run_script("torchditan", "generate", "run")
    assert code == 2
    assert_refused(errors, "run/config.json")


@pytest.mark.parametrize("folder", ["../elsewhere", "/tmp", ".."])
def test_the_checkpoints_of_a_run_are_inside_it(run_script: RunScript, folder: str) -> None:
    config = to_dict(load_config(["--model.flavor=debugmodel"]))
    config["checkpoint"]["folder"] = folder
    write("run/config.json", json.dumps({"config": config}))
    code, out, err = run_script("torchditan", "generate", "run")
    assert (code, out) == (2, "")
    assert_refused(err, f'checkpoint.folder = "{folder}"', ["folder name", "inside the run directory"])


@pytest.mark.parametrize(
    ("name", "flags", "mentions"),
    [
        ("weights.safetensors", [], ["PyTorch", "--format"]),
        ("weights.safetensors", ["--format=dit"], ["PyTorch", "safetensors"]),
        ("weights.pt", ["--format=dit"], ["execute code"]),
    ],
)
def test_weights_to_import_are_never_unpickled(
    name: str, flags: list[str], mentions: list[str], run_script: RunScript
) -> None:
    write(name, TORCH_PICKLE)
    code, out, err = run_script("torchditan", "import", name, "imported", *flags)
    assert (code, out) == (2, "")
    assert_refused(err, name, mentions)
    assert not Path(RAN).exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `outputs` of a run of one step, with a checkpoint."""
    import runpy

    import torch.distributed as dist

    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setattr(sys, "argv", ["train.py", *SMALL, "--training.steps=1"])
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(Path(__file__).parent.parent.parent / "train.py"), run_name="__main__")
        if dist.is_initialized():
            dist.destroy_process_group()
    assert stop.value.code == 0
    return folder / "outputs"


@pytest.fixture
def checkpoint(trained: Path, here: Path) -> Path:
    shutil.copytree(trained, "outputs")
    return Path("outputs/run/checkpoint/step-00000001")


def sign(checkpoint: Path) -> None:
    """Rewrite the manifest to fit the files, as an attacker would."""
    write_manifest(checkpoint, step=1, trajectory=read_manifest(checkpoint)["trajectory"])
    assert read_manifest(checkpoint)["step"] == 1


def replace_entry(checkpoint: Path, name: str, payload: bytes) -> None:
    """Have an entry of the index point to `payload`, appended to its file."""
    metadata = pickle.loads((checkpoint / INDEX).read_bytes())
    (key,) = [key for key in metadata.storage_data if key.fqn == name][:1]
    place = metadata.storage_data[key]
    file = checkpoint / place.relative_path
    offset = file.stat().st_size
    file.write_bytes(file.read_bytes() + payload)
    metadata.storage_data[key] = dataclasses.replace(place, offset=offset, length=len(payload))
    (checkpoint / INDEX).write_bytes(pickle.dumps(metadata))


def hostile_index(checkpoint: Path) -> None:
    (checkpoint / INDEX).write_bytes(PICKLE)


def hostile_entry_of_bytes(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / INDEX).read_bytes())
    entries = metadata.state_dict_metadata.items()
    name = next(name for name, entry in entries if type(entry).__name__ == "BytesStorageMetadata")
    replace_entry(checkpoint, name, TORCH_PICKLE)


def hostile_tensor(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / INDEX).read_bytes())
    name = next(name for name in metadata.state_dict_metadata if name.startswith("ema."))
    replace_entry(checkpoint, name, TORCH_PICKLE)


def rename_file(name: str) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        metadata = pickle.loads((checkpoint / INDEX).read_bytes())
        for key, place in metadata.storage_data.items():
            metadata.storage_data[key] = dataclasses.replace(place, relative_path=name)
        (checkpoint / INDEX).write_bytes(pickle.dumps(metadata))

    return change


def place_without_length(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / INDEX).read_bytes())
    for place in metadata.storage_data.values():
        del place.__dict__["length"]
    (checkpoint / INDEX).write_bytes(pickle.dumps(metadata))


def index_without(owner: Callable[[Any], Any], name: str) -> Callable[[Path], None]:
    """Leave an attribute out of an object of the index, as a pickle with a renamed attribute does."""

    def change(checkpoint: Path) -> None:
        metadata = pickle.loads((checkpoint / INDEX).read_bytes())
        del owner(metadata).__dict__[name]
        (checkpoint / INDEX).write_bytes(pickle.dumps(metadata))

    return change


def _a_tensor(metadata: Any) -> Any:
    return next(entry for name, entry in metadata.state_dict_metadata.items() if name.startswith("model."))


def index_of_other_names(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / INDEX).read_bytes())
    metadata.state_dict_metadata = dict(enumerate(metadata.state_dict_metadata.values()))
    (checkpoint / INDEX).write_bytes(pickle.dumps(metadata))


def tensor_of_type_seven(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / INDEX).read_bytes())
    _a_tensor(metadata).properties.dtype = 7
    (checkpoint / INDEX).write_bytes(pickle.dumps(metadata))


def write_progress(content: Any) -> Callable[[Path], None]:
    def change(checkpoint: Path) -> None:
        (checkpoint / "progress.json").write_text(json.dumps(content))

    return change


HOSTILE_CHECKPOINTS = {
    "index": hostile_index,
    "entry of bytes": hostile_entry_of_bytes,
    "tensor": hostile_tensor,
    "file above": rename_file("../../../../outside"),
    "file elsewhere": rename_file("/etc/passwd"),
    "file of another type": rename_file(7),  # type: ignore[arg-type]
    "place without length": place_without_length,
    "index without its tensors": index_without(lambda index: index, "state_dict_metadata"),
    "index of numbers": index_of_other_names,
    "tensor without size": index_without(_a_tensor, "size"),
    "tensor of another type": tensor_of_type_seven,
    "tensor without chunks": index_without(_a_tensor, "chunks"),
    "chunk without offsets": index_without(lambda index: _a_tensor(index).chunks[0], "offsets"),
    "progress of a list": write_progress([1]),
    "progress of texts": write_progress({"step": "1", "images_seen": "2", "elapsed_s": "3"}),
    "progress with more": write_progress({"step": 1, "__class__": "x"}),
    "progress beyond measure": write_progress({"step": 1, "images_seen": 10**400, "elapsed_s": 1e308}),
    "progress backwards": write_progress({"step": -1, "images_seen": -5, "elapsed_s": 0.0}),
}


@pytest.mark.parametrize("kind", HOSTILE_CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused_in_one_line(kind: str, checkpoint: Path, run_script: RunScript) -> None:
    HOSTILE_CHECKPOINTS[kind](checkpoint)
    sign(checkpoint)
    code, _, errors = run_script("train.py", *SMALL, "--training.steps=2")
    assert not Path(RAN).exists()
    assert code == 2, errors
    assert_refused(errors, "", [str(checkpoint)])


@pytest.mark.parametrize("kind", ["index", "tensor", "file above"])
def test_nor_do_the_scripts_read_it(kind: str, checkpoint: Path, run_script: RunScript) -> None:
    HOSTILE_CHECKPOINTS[kind](checkpoint)
    sign(checkpoint)
    code, _, errors = run_script("torchditan", "generate", "outputs/run")
    assert not Path(RAN).exists()
    assert (code, len(errors.splitlines())) == (2, 1), errors


@pytest.mark.parametrize(
    "change",
    [
        {"step": "1"},
        {"step": 10**400},
        {"step": None},
        {"files": [1]},
        {"files": {"../../x": 1}},
        {"files": {"progress.json": "1"}},
        {"trajectory": 3},
    ],
)
def test_a_manifest_of_other_types_is_one_line(change: dict[str, Any], checkpoint: Path, run_script: RunScript) -> None:
    (checkpoint / MANIFEST).write_text(json.dumps({**read_manifest(checkpoint), **change}))
    code, _, errors = run_script("train.py", *SMALL, "--training.steps=2")
    assert code == 2, errors
    assert_refused(errors, "", [str(checkpoint), "manifest.json"])


def test_the_checkpoint_that_was_not_touched_goes_on(checkpoint: Path, run_script: RunScript) -> None:
    sign(checkpoint)
    code, _, errors = run_script("train.py", *SMALL, "--training.steps=2")
    assert (code, errors) == (0, "")


# What fuzz.py found


def test_a_damaged_number_of_a_checkpoint_is_one_line_for_load(checkpoint: Path) -> None:
    write_progress({"step": "1"})(checkpoint)
    sign(checkpoint)
    refuse(lambda: load("outputs/run"), str(checkpoint), "progress.json", "step")


def change_config(run: Path, **options: Any) -> None:
    """Change options of the model in the stored configuration of a run."""
    stored = json.loads((run / "config.json").read_text())
    stored["config"]["model"] |= options
    (run / "config.json").write_text(json.dumps(stored))


def test_a_run_whose_model_is_larger_than_its_weights_is_refused_before_memory_is_allocated(checkpoint: Path) -> None:
    change_config(Path("outputs/run"), patch_bottleneck=2**40)
    refuse(lambda: load("outputs/run"), str(checkpoint), "x_embedder.proj.weight", str(2**40))


@pytest.mark.parametrize("size", [[-8, 8], [0, 8], [8], [], [8, 10**60]])
def test_a_run_with_an_impossible_size_is_refused(size: list[int], checkpoint: Path) -> None:
    change_config(Path("outputs/run"), sample_size=size)
    refuse(lambda: load("outputs/run"), "model.sample_size", "two or three integers", "65536")


def test_a_run_of_another_size_than_its_data_is_drawn_without_real_images(
    checkpoint: Path, run_script: RunScript
) -> None:
    change_config(Path("outputs/run"), sample_size=[8, 12])
    code, output, errors = run_script("torchditan", "generate", "outputs/run", "--classes=0", "--out=grid.png")
    assert code == 0, errors
    assert "no real images" in errors and "8 x 8" in errors and "8 x 12" in errors
    assert "samples: grid.png" in output


def npy(descr: str, shape: str, data: bytes = b"") -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize(
    ("name", "descr", "shape"),
    [
        ("extractor", "'|S1000000000'", "()"),
        ("extractor", "'<M8[s]'", "()"),
        ("mu", "'<f8'", "(4000000000,)"),
        ("mu", "'|V8'", "(4,)"),
        ("mu", "'|O'", "(4,)"),
        ("mu", "'<f8'", "(" * 200),
        ("mu", "'<f8'", "(-4,)"),
        ("mu", "'<f8'", f"({10**30},)"),
        ("sigma", "'<f8'", "(30000, 30000)"),
        ("count", "'<i8'", "(4,)"),
    ],
)
def test_statistics_take_no_more_memory_than_their_file(name: str, descr: str, shape: str) -> None:
    arrays = {"extractor": npy("'<U1'", "()", b"E\0\0\0"), "count": npy("'<i8'", "()", bytes(8))}
    arrays |= {"mu": npy("'<f8'", "(2,)", bytes(16)), "sigma": npy("'<f8'", "(2, 2)", bytes(32))}

    def save(file: str) -> Path:
        with zipfile.ZipFile(file, "w") as archive:
            for key, data in arrays.items():
                archive.writestr(f"{key}.npy", data)
        return Path(file)

    assert read_statistics(save("whole.npz"), extractor="E")[0] is not None
    arrays[name] = npy(descr, shape, bytes(64))
    tracemalloc.start()
    refuse(lambda: read_statistics(save("hostile.npz"), extractor="E"), "hostile.npz", ".npz", "statistics")
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


def test_an_extractor_name_with_invalid_characters_is_one_line() -> None:
    with zipfile.ZipFile("hostile.npz", "w") as archive:
        archive.writestr("extractor.npy", npy("'<U1'", "()", b"\xff\xff\xff\xff"))
    refuse(lambda: read_statistics(Path("hostile.npz"), extractor="E"), "hostile.npz", ".npz", "statistics")


def test_names_of_classes_with_half_of_a_surrogate_pair_survive_export_and_import(checkpoint: Path) -> None:
    names = ["half \ud800 of a pair", *"\u732b23456789"]
    stored = json.loads(Path("outputs/run/config.json").read_text())
    Path("outputs/run/config.json").write_text(json.dumps({**stored, "class_names": names}))
    export_weights(checkpoint, Path("model.safetensors"))
    import_weights(Path("model.safetensors"), Path("imported"))
    for path in ("outputs/run", "model.safetensors", "imported"):
        assert load(path).class_names == names


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Reserving more memory, even without using it, raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    (size,) = re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_AS, (int(size) * 1024 + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def png_with_pixels_of_two_gigabytes() -> bytes:
    """Only by its own account. Pillow passes over them after the last pixel, and reserves them if it reads a file."""
    with io.BytesIO() as file:
        Image.new("RGB", (8, 8)).save(file, "PNG")
        data = bytearray(file.getvalue())
    start = data.index(b"IDAT") - 4
    data[start : start + 4] = (2**31 - 1).to_bytes(4, "big")
    return bytes(data)


def webp_of_268_megapixels() -> bytes:
    """Only by its own account."""
    with io.BytesIO() as file:
        Image.new("RGB", (8, 8)).save(file, "WEBP", lossless=True)
        data = bytearray(file.getvalue())
    data[21:25] = (2**28 - 1).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize("data", [png_with_pixels_of_two_gigabytes, webp_of_268_megapixels])
def test_a_picture_takes_no_more_memory_than_its_file(data: Callable[[], bytes]) -> None:
    for name in ("a.png", "b.png"):
        write(f"pictures/{name}", data())
    write("pictures/a.txt", "a caption")
    write("pictures/b.txt", "a caption")
    path = Path("pictures/a.png")
    with memory_limit(1 << 30):
        if data is png_with_pixels_of_two_gigabytes:
            assert data_uri(path, most_bytes=1 << 20) is not None
            assert load_sample(path, sample_shape=(3, 8, 8), where="a.png").shape == (3, 8, 8)
        else:
            with pytest.raises(CorruptImageError, match="limit"):
                load_sample(path, sample_shape=(3, 8, 8), where="a.png")
        with contextlib.suppress(ConfigError):
            open_dataset("captions", root_dir="pictures", image_size=[8, 8])


def test_a_listed_file_with_deep_brackets_is_one_line() -> None:
    write("pictures/metadata.jsonl", "[" * 100_000)
    about = 'dataset.root_dir = "pictures"'
    refuse(lambda: open_dataset("captions", root_dir="pictures", image_size=[8, 8]), about, "metadata.jsonl", "JSON")


@pytest.mark.parametrize("weights", [[0.5, 10**400], [1e308, 1e308], [float("inf"), 1], [True, 1], [0, 1]])
def test_caption_weights_without_a_finite_sum_are_one_line(weights: list[Any]) -> None:
    row = {"file_name": "a.png", "text": ["one", "two"], "weights": weights}
    write("pictures/metadata.jsonl", json.dumps(row))
    about = 'dataset.root_dir = "pictures"'
    refuse(lambda: open_dataset("captions", root_dir="pictures", image_size=[8, 8]), about, "weights", "2 positive")


@pytest.mark.parametrize("name", ["a" * 300 + ".png", "\u754c" * 200 + ".png", "nul\0.png"])
def test_a_listed_file_with_an_impossible_name_is_one_line(name: str) -> None:
    write("pictures/metadata.jsonl", json.dumps({"file_name": name, "text": "a caption"}))
    about = 'dataset.root_dir = "pictures"'
    refuse(lambda: open_dataset("captions", root_dir="pictures", image_size=[8, 8]), about, "does not exist")


@pytest.mark.parametrize("text", ["[" * 100_000, "[training]\nsteps = " + "1" * 5_000])
def test_toml_beyond_measure_is_one_line(text: str) -> None:
    write("job.toml", text)
    refuse(lambda: load_config(["--job.config_file=job.toml"]), "", "job.toml")
    refuse(lambda: load_grid("./job.toml"), "", "job.toml")


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "inf", "nan"])
def test_a_number_beyond_floating_point_is_one_line(number: str) -> None:
    write("job.toml", f"[optimizer]\nlr = {number}")
    refuse(lambda: load_config(["--job.config_file=job.toml"]), "optimizer.lr", "finite number")
    write("grid.toml", f'timeout_s = {number}\n[axes]\n"training.seed" = [0]')
    refuse(lambda: load_grid("./grid.toml"), "timeout_s", "number greater than 0")


@pytest.mark.parametrize(
    ("line", "about"),
    [("base = []", "base = []"), ("exclude = [1]", "exclude = [1]"), ("[axes]\nprecision = [[]]", "precision")],
)
def test_a_grid_with_other_types_is_one_line(line: str, about: str) -> None:
    write("grid.toml", line)
    refuse(lambda: load_grid("./grid.toml"), about)


def test_a_card_adds_no_markup_and_no_escapes() -> None:
    hostile = "\x1b[2J <img src=x onerror=ran()> [a](javascript:ran())"
    text = markdown(cards.card(run=hostile, precision=hostile, training_hardware=hostile))
    shown = re.sub(r"\n\n    torchditan .*", "", text)  # a block of code
    assert "onerror" in shown and "<img" not in shown and "](javascript" not in shown and "\x1b" not in text


def test_a_long_caption_does_not_widen_a_picture() -> None:
    save_grid(Path("grid.png"), torch.zeros(1, 1, 3, 8, 8), None, ["a" * 100_000], title="b" * 100_000)
    with Image.open("grid.png") as picture:
        assert picture.width < 4_000
    assert "a" * 100_000 in Path("grid.labels.txt").read_text()


def test_a_parquet_file_with_file_names_that_are_not_utf8_is_read() -> None:
    names = pyarrow.StringArray.from_buffers(
        1, pyarrow.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0])), pyarrow.py_buffer(b"\xb1")
    )
    with io.BytesIO() as file:
        Image.new("RGB", (32, 32)).save(file, "PNG")
        data = pyarrow.array([file.getvalue()])
    images = pyarrow.StructArray.from_arrays([data, names], ["bytes", "path"])
    parquet.write_table(pyarrow.table({"image": images, "label": [0]}), "train.parquet")
    assert open_dataset("cifar10", root_dir="train.parquet")[0]["sample"].shape == (3, 32, 32)


def test_a_parquet_file_that_is_damaged_inside_is_one_line() -> None:
    table = pyarrow.table({"image": [{"bytes": b"abc" * 9_000, "path": "x"}], "label": [0]})
    parquet.write_table(table, "train.parquet", compression="gzip")
    data = Path("train.parquet").read_bytes()
    write("train.parquet", data.replace(b"\x1f\x8b", b"\xff\xff"))
    refuse(lambda: open_dataset("cifar10", root_dir="train.parquet"), 'dataset.root_dir = "train.parquet"', "readable")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.REGTYPE])
@pytest.mark.parametrize("size", [1 << 33, 1 << 62])
def test_a_tar_header_of_an_endless_member_takes_no_memory(kind: bytes, size: int) -> None:
    info = tarfile.TarInfo("0.png")
    info.type, info.size = kind, size
    write("tars/0.tar", info.tobuf(tarfile.GNU_FORMAT) + bytes(2_048))
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"0\.tar|0\.png"):
        open_dataset("webdataset", root_dir="tars", image_size=[8])[0]
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()


def test_a_chain_of_tar_headers_is_one_line() -> None:
    info = tarfile.TarInfo("0.png")
    info.type = tarfile.XHDTYPE
    write("tars/0.tar", info.tobuf(tarfile.GNU_FORMAT) * 3_000 + bytes(2_048))
    with pytest.raises(ConfigError, match=r"0\.tar"):
        open_dataset("webdataset", root_dir="tars", image_size=[8])[0]


@pytest.mark.parametrize("content", ["[1]", "3", '{"state": 3}', "{", "[" * 100_000])
def test_a_status_that_is_none_counts_as_missing(content: str) -> None:
    write("run/status.json", content)
    assert read_status("run") is None
    write("run/metrics.jsonl", f'{content}\n{{"step": "1"}}\n{{"step": 2, "loss": 1{"0" * 400}, "lr": 3}}\n')
    assert read_metrics("run") == [{"step": 2, "loss": None, "lr": 3}]


@pytest.mark.parametrize("change", [{"hardware": 3}, {"versions": [1]}, {"class_names": "a"}, {"git_commit": {}}])
def test_values_of_other_types_in_a_run_count_as_null(change: dict[str, Any]) -> None:
    write("run/config.json", json.dumps({"config": {}, **change}))
    (name,) = change
    assert read_config("run")[name] is None
