# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""CIFAR-10 from its binary files, parquet and the hub; hub datasets downloaded and streamed. All offline."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from torchditan.config.options import Dataset
from torchditan.data_stream.datasets import CorruptImageError
from torchditan.datasets import build_dataset
from torchditan.errors import ConfigError

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
LABELS = [3, 0, 9, 1, 1, 7, 2]


def open_cifar10(root: Path, split: Any = "train", input_channels: int | None = None, **options: Any) -> Any:
    config = Dataset(dataset_name="cifar10", root_dir=str(root), **options)
    return build_dataset(config, split=split, input_channels=input_channels)


def pixels_of(item: dict[str, Any]) -> np.ndarray:
    return ((item["sample"].numpy() + 1) * 127.5).round().astype(np.uint8).transpose(1, 2, 0)


def refuse(message: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)


def write_binary(path: Path, chosen: slice) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    planes = IMAGES[chosen].transpose(0, 3, 1, 2).reshape(-1, 3072)
    path.write_bytes(np.concatenate([np.array(LABELS, np.uint8)[chosen, None], planes], axis=1).tobytes())


def test_binary_files_are_read_in_order(tmp_path: Path) -> None:
    folder = "cifar-10-batches-bin"  # other tests have them in the folder itself
    write_binary(tmp_path / folder / "data_batch_1.bin", slice(0, 3))
    write_binary(tmp_path / folder / "data_batch_2.bin", slice(3, 5))
    write_binary(tmp_path / folder / "test_batch.bin", slice(5, 7))
    train, validation = open_cifar10(tmp_path), open_cifar10(tmp_path, "validation")
    assert [train[i]["class_label"] for i in range(5)] == LABELS[:5]
    assert [validation[i]["class_label"] for i in range(2)] == LABELS[5:]
    assert all((pixels_of(train[i]) == IMAGES[i]).all() for i in range(5))
    assert train.class_names[3] == "cat"
    assert train.sample_shape == (3, 32, 32)


def test_one_channel_is_luma(tmp_path: Path) -> None:
    write_binary(tmp_path / "data_batch_1.bin", slice(0, 1))
    grey = pixels_of(open_cifar10(tmp_path, input_channels=1)[0])[..., 0]
    assert (grey == np.asarray(Image.fromarray(IMAGES[0]).convert("L"))).all()


def test_what_a_cifar10_folder_cannot_be_is_refused(tmp_path: Path) -> None:
    refuse(r"data_batch_\*\.bin .*parquet", open_cifar10, tmp_path)
    (tmp_path / "data_batch_1").write_bytes(b"pickle")
    refuse("Python version.*download cifar-10-binary.tar.gz", open_cifar10, tmp_path)
    (tmp_path / "data_batch_1").unlink()
    (tmp_path / "data_batch_1.bin").write_bytes(b"short")
    refuse(r"data_batch_1\.bin\": .*5 bytes", open_cifar10, tmp_path)
    write_binary(tmp_path / "data_batch_1.bin", slice(0, 2))
    refuse(r"dataset.image_size = \[64\]: cifar10 .*32 x 32", open_cifar10, tmp_path, image_size=[64])
    refuse(r"test_batch\*\.bin", open_cifar10, tmp_path, "validation")
    refuse("dataset.streaming = true: .*hub", open_cifar10, tmp_path, streaming=True)
    (tmp_path / "data_batch_2.bin").write_bytes(bytes([10]) + bytes(3072))
    refuse("labels .*cifar10 range .*0 to 10; .*0 to 9, .*10 classes", open_cifar10, tmp_path)


def encode(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def write_parquet(path: Path, chosen: range, *, image_key: str = "img", labels: Any = None, bad: int = -1) -> None:
    """The layout of the hub; its class names travel in the schema's metadata."""
    datasets = pytest.importorskip("datasets")
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": b"bad" if i == bad else encode(IMAGES[i % 7]), "path": f"{i}.png"} for i in chosen]
    label_type = datasets.ClassLabel(num_classes=10) if labels is None else datasets.Value("int64")
    rows = datasets.Dataset.from_dict(
        {image_key: images, "label": [LABELS[i % 7] for i in chosen] if labels is None else labels},
        features=datasets.Features({image_key: datasets.Image(), "label": label_type}),
    )
    rows.to_parquet(str(path))


@pytest.mark.parametrize("name", ["{}-00000-of-00001.parquet", "{}/0000.parquet"])
def test_parquet_files_of_test_data_are_validation(name: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "plain_text" / name.format("train"), range(5), bad=2)
    write_parquet(tmp_path / "plain_text" / name.format("test"), range(5, 7))
    train, validation = open_cifar10(tmp_path), open_cifar10(tmp_path, "validation")
    assert (len(train), len(validation)) == (5, 2)
    assert (pixels_of(train[4]) == IMAGES[4]).all()
    assert (pixels_of(validation[1]) == IMAGES[6]).all() and validation[1]["class_label"] == LABELS[6]
    with pytest.raises(CorruptImageError, match=r"0000.*\.parquet, row 2: .*readable image"):
        train[2]


def test_one_parquet_file_is_training_data(tmp_path: Path) -> None:
    path = tmp_path / "cifar10.parquet"
    write_parquet(path, range(4), image_key="image")
    assert len(open_cifar10(path)) == 4
    refuse(r"test-\*\.parquet", open_cifar10, path, "validation")
    refuse('dataset.label_key = "name": .*columns .*: image, label', open_cifar10, path, label_key="name")
    write_parquet(path, range(2), image_key="picture")
    refuse('dataset.image_key = "image": .*columns .*: picture, label', open_cifar10, path)
    path.write_bytes(b"no parquet at all")
    refuse(r"cifar10\.parquet .*readable parquet file", open_cifar10, path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the hub's layout, which `load_dataset` reads like a name on the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    write_parquet(tmp_path / "hub" / "train-0.parquet", range(6), image_key="image")
    write_parquet(tmp_path / "hub" / "train-1.parquet", range(6, 12), image_key="image")
    write_parquet(tmp_path / "hub" / "test-0.parquet", range(12, 14), image_key="image")
    return tmp_path / "hub"


def open_hub(hub: Path, split: Any = "train", **options: Any) -> Any:
    config = Dataset(dataset_name="imagenet_hub", hub_name=str(hub), image_size=[32], **options)
    return build_dataset(config, split=split)


def test_hub_rows_are_decoded_and_labelled(hub: Path) -> None:
    train, validation = open_hub(hub), open_hub(hub, "validation")
    assert (len(train), len(validation)) == (12, 2)
    assert (pixels_of(train[8]) == IMAGES[1]).all()
    assert train[8]["class_label"] == LABELS[1]
    assert train.class_names == [str(label) for label in range(10)]
    assert len(pickle.dumps(train)) < 10_000, "a worker that is not forked gets the path of the images"
    assert set(open_hub(hub, num_classes=0)[0]) == {"sample"}
    refuse('dataset.image_key = "photo": .*: image, label', open_hub, hub, image_key="photo")
    refuse('dataset.label_key = "kind": .*num_classes 0', open_hub, hub, label_key="kind")
    refuse("dataset.num_classes = 5: .*10 classes", open_hub, hub, num_classes=5)
    write_parquet(hub / "train-0.parquet", range(3))  # its column is img, the others' is image
    refuse('dataset.hub_name = ".*":', open_hub, hub)
    for name in ("train-1.parquet", "test-0.parquet"):
        (hub / name).unlink()
    refuse("has no validation split, only train", open_hub, hub, "validation", image_key="img")
    config = Dataset(dataset_name="cifar10", hub_name=str(hub), root_dir="/nowhere")  # the hub instead of the folder
    dataset = build_dataset(config, split="train")
    assert (pixels_of(dataset[2]) == IMAGES[2]).all()
    assert dataset.sample_shape == (3, 32, 32)


def test_integer_labels_make_as_many_classes_as_they_need(hub: Path) -> None:
    write_parquet(hub / "train-0.parquet", range(3), image_key="image", labels=[0, 4, 1])
    (hub / "train-1.parquet").unlink()
    (hub / "test-0.parquet").unlink()
    assert open_hub(hub).class_names == [f"class {label}" for label in range(5)]
    refuse("dataset.num_classes = 3: .*has 5 classes", open_hub, hub, num_classes=3)
    refuse("dataset.num_classes = none: must be set", open_hub, hub, streaming=True)
    found = draw(open_hub(hub, streaming=True, num_classes=3).iterate(rank=0, world_size=1), 3)
    assert b"has label 4; must be 0 to 2" in found[1]
    assert found[2] == found[1]  # repeated, so that the batch it is in becomes whole


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("DatasetNotFoundError:Dataset 'a/b' is a gated dataset on the Hub.\nVisit", "is gated: accept its terms"),
        ("DatasetNotFoundError:Dataset 'a/b' doesn't exist", "HF_TOKEN"),
        ("ConnectionError:Couldn't reach the Hub\nmore", r"hub_name = \"a/b\".*Couldn't reach the Hub\); go online"),
        ("ValueError:Config name is missing.\nPick one", 'hub_name = "a/b": Config name is missing'),
    ],
)
def test_what_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch, error: str, message: str) -> None:
    datasets = pytest.importorskip("datasets")
    kind, text = error.split(":", 1)
    classes = {"ConnectionError": ConnectionError, "ValueError": ValueError}

    def load_dataset(*args: Any, **options: Any) -> None:
        raise classes.get(kind, datasets.exceptions.DatasetNotFoundError)(text)

    monkeypatch.setattr(datasets, "get_dataset_split_names", load_dataset)
    refuse(message, open_hub, Path("a/b"))


def draw(shard: Any, count: int) -> list[bytes]:
    """The next images of a shard, undecoded errors included by their text."""
    found = []
    for item in shard:
        found.append(str(item).encode() if isinstance(item, Exception) else pixels_of(item).tobytes())
        if len(found) == count:
            break
    return found


def test_ranks_of_a_stream_share_the_rows(hub: Path) -> None:
    stream = open_hub(hub, streaming=True)
    parts = [draw(stream.iterate(rank=rank, world_size=2), 6) for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == sorted(IMAGES[i % 7].tobytes() for i in range(12))


def test_a_stream_reads_stored_order_starts_over_and_resumes_at_the_next_row(hub: Path) -> None:
    stream = open_hub(hub, streaming=True)
    assert stream.sample_shape == (3, 32, 32) and len(stream.class_names) == 10
    whole = [IMAGES[i % 7].tobytes() for i in [*range(12), *range(12), 0]]
    shard = stream.iterate(rank=0, world_size=1)
    assert draw(shard, 15) == whole[:15]
    resumed = open_hub(hub, streaming=True, num_classes=0).iterate(rank=0, world_size=1)
    resumed.load_state_dict(shard.state_dict())
    assert draw(resumed, 10) == whole[15:]
    assert set(next(iter(resumed))) == {"sample", "skipped"}


@pytest.mark.parametrize("read", [4, 6])
def test_a_stateful_loader_with_workers_resumes_a_stream(hub: Path, read: int) -> None:
    """After six batches, both workers are at the end of their file of six rows."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def open_loader() -> Any:
        shard = open_hub(hub, streaming=True).iterate(rank=0, world_size=1)
        return loaders.StatefulDataLoader(shard, batch_size=2, num_workers=2)

    def batches(loader: Any, count: int) -> list[bytes]:
        return [batch["sample"].numpy().tobytes() for batch, _ in zip(loader, range(count), strict=False)]

    whole = batches(open_loader(), 12)
    loader = open_loader()
    iterator = iter(loader)
    for _ in range(read):
        next(iterator)
    state = loader.state_dict()
    del iterator
    resumed = open_loader()
    resumed.load_state_dict(state)
    assert batches(resumed, 12 - read) == whole[read:]


def test_an_unreadable_image_of_a_stream_stops_it_or_is_skipped_and_counted(hub: Path) -> None:
    write_parquet(hub / "train-0.parquet", range(6), image_key="image", bad=1)
    shard = open_hub(hub, streaming=True).iterate(rank=0, world_size=1)
    first, second, third = draw(shard, 3)
    assert first == IMAGES[0].tobytes()
    assert b"1.png): not a readable image" in second
    assert third == second  # repeated, so that the batch it is in becomes whole
    shard = open_hub(hub, streaming=True, corrupt_images="skip").iterate(rank=0, world_size=1)
    items = [item for item, _ in zip(shard, range(3), strict=False)]
    assert [list(item["skipped"]) for item in items] == [[], [2], []]
    assert "1.png" in items[1]["skipped"][2]
    assert (pixels_of(items[1]) == IMAGES[2]).all()
