# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Image datasets of the Hugging Face hub, downloaded first (map style) or streamed.

Notable:
- Images stay encoded in Arrow; data/images.py decodes them like all other images.
- The token comes from `hf auth login` or the environment variable HF_TOKEN, as in the hub's own tools.
- A streamed dataset has no positions, so it cannot be shuffled, and its resume has limits. See `StreamingImages`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import torch

from torchditan.config import options
from torchditan.config.optional_libraries import import_optional
from torchditan.data_stream.datasets import CorruptImageError, ImageDataset, SequentialDataset
from torchditan.datasets.images import Crop, corrupt_image, load_sample
from torchditan.datasets.splits import PARTS, Division, Part, describe_parts, part_of, part_of_file
from torchditan.errors import ConfigError, first_line, option_error


@dataclass(kw_only=True, eq=False)
class HubRows:
    """Rows of a hub dataset with encoded images, and the shape of a sample."""

    name: str
    rows: Any
    image_key: str
    label_key: str | None
    class_names: list[str]
    sample_shape: tuple[int, ...]
    horizontal_flip: bool
    crop: Crop
    reading: Sequence[str]

    def encoded(self, row: dict[str, Any], *, where: str) -> bytes:
        image = row[self.image_key]  # {"bytes", "path"}, undecoded; of a folder of images only the path
        if image is None or (image["bytes"] is None and not image["path"]):
            raise corrupt_image(where, "no data")
        if image["bytes"] is not None:
            return bytes(image["bytes"])
        with importlib.import_module("fsspec").open(image["path"], "rb") as file:
            return bytes(file.read())

    def to_item(self, row: dict[str, Any], *, where: str, number: int = 0) -> dict[str, Any]:
        data, path = self.encoded(row, where=where), row[self.image_key]["path"]
        where = f"{where} ({path})" if path else where
        sample = load_sample(data, sample_shape=self.sample_shape, where=where, crop=self.crop, number=number)
        item: dict[str, Any] = {"sample": torch.from_numpy(sample)}
        if self.label_key is not None:
            item["class_label"] = int(row[self.label_key])
        return item


@dataclass(kw_only=True, eq=False)
class HubImages(HubRows, ImageDataset):
    """Map-style view of a downloaded hub dataset."""

    def __post_init__(self) -> None:
        column = None if self.label_key is None else self.rows.data.column(self.label_key)
        self.class_labels = None if column is None else np.asarray(column.to_numpy())
        self.fingerprint = self.name  # identifies the list of images by its place

    def __len__(self) -> int:
        return len(self.rows)

    def content_of(self, index: int) -> bytes:
        """The encoded image.

        Raises:
            CorruptImageError: there is none.
        """
        return self.encoded(self.rows[index], where=f"{self.name}, row {index}")

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.to_item(self.rows[index], where=f"{self.name}, row {index}", number=index)


@dataclass(kw_only=True, eq=False)
class StreamingImages(HubRows, SequentialDataset):
    """A hub dataset read over the network in its stored order, one part per rank.

    Resume: the state is a place in the files (shard and row), restored by skipping to it. No row is lost or repeated.
    Limits:

    - resuming needs the same number of ranks and of loader workers, because each reads its own part of the files;
    - rows keep their stored order, because a shuffle buffer would lose its content on resume; store them shuffled;
    - the row at a position depends on ranks and workers, so loss curves of different world sizes differ;
    - `len` is unknown.

    If any of this matters, download the dataset (`dataset.streaming = false`).
    """

    corrupt_images: Literal["error", "skip"]

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        item = self.to_item(row, where=self.name)
        if self.class_names and not 0 <= item["class_label"] < len(self.class_names):
            last = len(self.class_names) - 1
            raise option_error("dataset.hub_name", self.name, f"has label {item['class_label']}; must be 0 to {last}")
        return item

    def iterate(self, *, rank: int, world_size: int) -> StreamShard:
        """This rank's part, without end, for torchdata's StatefulDataLoader."""
        from datasets.distributed import split_dataset_by_node

        return StreamShard(self, split_dataset_by_node(self.rows, rank=rank, world_size=world_size))


class StreamShard(torch.utils.data.IterableDataset):
    """Items of one rank, restarting at the end. Several loader workers divide its files.

    An item has `sample`, `class_label` if there are labels, and `skipped`, the unreadable rows before it with their
    reasons. Errors that stop the run (an unreadable image, a label out of range) are yielded, not raised, because a
    worker would add a traceback to the message.
    """

    def __init__(self, images: StreamingImages, rows: Any) -> None:
        self.images = images
        self.rows = rows
        self.row = 0
        self.skipped: dict[int, str] = {}

    def __iter__(self) -> Iterator[dict[str, Any] | ConfigError]:
        images, worker = self.images, torch.utils.data.get_worker_info()
        first = 0 if worker is None else worker.id << 40  # rows of other workers have other numbers
        while True:
            num_yielded = 0
            for row in self.rows:
                self.row += 1
                try:
                    item = images.read(row)
                except ConfigError as error:
                    while images.corrupt_images == "error" or not isinstance(error, CorruptImageError):
                        yield error  # until the batch is full: an incomplete one would be dropped with the error
                    self.skipped[first + self.row] = error.named
                    continue
                item["skipped"], self.skipped = self.skipped, {}
                num_yielded += 1
                yield item
            self.rows.load_state_dict({})  # the next pass starts at the first row
            self.row = 0
            if num_yielded == 0:
                return  # more workers than files: this one has no files

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows.state_dict(), "row": self.row, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.load_state_dict(state["rows"])
        self.row, self.skipped = state["row"], state["skipped"]


def open_hub(
    config: options.Dataset,
    *,
    hub_name: str,
    split: Literal["train", "validation"],
    image_key: str,
    sample_shape: tuple[int, ...],
    horizontal_flip: bool,
) -> HubImages | StreamingImages:
    """Open one split of a hub dataset (or of a local folder in the hub's layout)."""
    if config.streaming and config.crop == "random":
        right = "needs an image's number, which a streamed dataset does not have; must be center or adm"
        raise option_error("dataset.crop", config.crop, right)
    names = find_splits(hub_name)
    if not names["validation"]:  # of CIFAR-10 and many others, only test images are held out
        names = {**names, "validation": names["test"], "test": []}
    chosen = names[split]
    if not chosen:
        right = f"has no validation split, only {', '.join(names['train'])}"
        raise option_error("dataset.hub_name", hub_name, right)
    rows = load_rows(hub_name, chosen[0], streaming=config.streaming)
    if rows.features is None:
        rows = rows._resolve_features()
    columns = list(rows.features)
    right = f"must be one of the columns of {hub_name}: {', '.join(columns)}"
    if image_key not in columns:
        raise option_error("dataset.image_key", image_key, right)
    label_key = None if config.num_classes == 0 else config.label_key
    if label_key is not None and label_key not in columns:
        right += "; --dataset.num_classes 0 trains without labels"
        raise option_error("dataset.label_key", label_key, right)
    datasets = importlib.import_module("datasets")
    stored = rows.features[image_key]
    try:
        rows = rows.cast_column(image_key, datasets.Image(decode=False))
    except (NotImplementedError, TypeError, ValueError) as error:  # from pyarrow, for values that are not images
        right = f"holds {getattr(stored, 'dtype', stored)}; must be images"
        raise option_error("dataset.image_key", image_key, right) from error
    rows = rows.select_columns([image_key] if label_key is None else [image_key, label_key])
    if label_key is not None and not config.streaming:
        num_missing = rows.data.column(label_key).null_count
        if num_missing:
            right = f"holds {num_missing} row(s) without a label; must be integers from 0"
            raise option_error("dataset.label_key", label_key, right)
    arguments: dict[str, Any] = {
        "name": hub_name,
        "rows": rows,
        "image_key": image_key,
        "label_key": label_key,
        "class_names": [] if label_key is None else _class_names(config, rows, label_key),
        "sample_shape": sample_shape,
        "horizontal_flip": horizontal_flip,
        "crop": config.crop,
        "reading": describe_parts(names, what="split"),
    }
    if config.streaming:
        import_optional("torchdata", extra="hub")
        return StreamingImages(**arguments, corrupt_images=config.corrupt_images)
    return HubImages(**arguments)


def find_splits(hub_name: str) -> dict[Part, list[str]]:
    """Part -> the name of its split in a hub dataset, if it has one; "beside" has the other splits.

    `train` comes before `train_small`, which may be a part of it.
    """
    names: list[str] = _on_hub(hub_name, "get_dataset_split_names")
    found: dict[Part, list[str]] = {part: [] for part in PARTS}
    for name in sorted(names, key=lambda name: part_of(name) is None):
        part = part_of(name) or part_of_file(name) or "beside"
        found[part if not found[part] else "beside"].append(name)
    if not found["train"]:
        raise option_error("dataset.hub_name", hub_name, f"has no train split; its splits are {', '.join(names)}")
    if mixed := _files_of_other_parts(hub_name, found["train"][0]):
        right = (
            f"its split {found['train'][0]} has {mixed[0]}, because `datasets` reads lower-case names of splits only"
        )
        raise option_error("dataset.hub_name", hub_name, f"{right}; rename the folders, or read them as root_dir")
    return found


def _files_of_other_parts(hub_name: str, split: str) -> list[str]:
    """Files of a split in folders that are named after another one: `Test/cat/0.png` next to `Train/`."""
    files = [
        PurePath(name) for name in (_on_hub(hub_name, "load_dataset_builder").config.data_files or {}).get(split, [])
    ]
    if len(files) < 2:
        return []
    root = os.path.commonpath(files)
    inside = [file.relative_to(root) for file in files]
    division = Division((file.parent.parts for file in inside), has_classes=True)
    return [str(file) for file in inside if division.place(file.parent.parts)[0] != "train"]


def load_rows(hub_name: str, name: str, *, streaming: bool) -> Any:
    """The rows of a split of this name."""
    return _on_hub(hub_name, "load_dataset", split=name, streaming=streaming)


def _on_hub(hub_name: str, function: str, **options: Any) -> Any:
    """Call a function of `datasets`, whose errors become one line."""
    datasets = import_optional("datasets", extra="hub")
    try:
        return getattr(datasets, function)(hub_name, **options)
    except ValueError as error:
        raise option_error("dataset.hub_name", hub_name, first_line(error)) from error
    except datasets.exceptions.DatasetNotFoundError as error:
        if "gated" in str(error):
            right = "is gated: accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
            raise option_error("dataset.hub_name", hub_name, right) from error
        right = "was not found on the Hugging Face hub (a private dataset needs HF_TOKEN)"
        raise option_error("dataset.hub_name", hub_name, right) from error
    except (datasets.exceptions.DatasetsError, FileNotFoundError, RuntimeError) as error:
        # A RuntimeError means that the dataset is a script, which is refused.
        raise option_error("dataset.hub_name", hub_name, f"cannot be read: {first_line(error)}") from error
    except OSError as error:  # including ConnectionError
        right = (
            f"the Hugging Face hub cannot be reached ({first_line(error)}); go online, or use local files "
            "with --dataset.root_dir"
        )
        raise option_error("dataset.hub_name", hub_name, right) from error


def _class_names(config: options.Dataset, rows: Any, label_key: str) -> list[str]:
    names = getattr(rows.features[label_key], "names", None)
    if names is not None:
        return list(names)
    if not rows.features[label_key].dtype.startswith(("int", "uint")):
        right = f"holds {rows.features[label_key].dtype}; must be integers from 0"
        raise option_error("dataset.label_key", label_key, right)
    if config.num_classes is None and config.streaming:
        raise option_error("dataset.num_classes", None, "must be set: the streamed dataset does not name its classes")
    num_classes = config.num_classes or max(rows[label_key], default=-1) + 1
    return [f"class {label}" for label in range(num_classes)]
