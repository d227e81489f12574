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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import torch

from torchditan.config import options
from torchditan.config.optional_libraries import import_optional
from torchditan.data_stream.datasets import CorruptImageError, SequentialDataset
from torchditan.datasets.encoded import Stored, read_bytes
from torchditan.datasets.images import Crop, load_sample
from torchditan.datasets.options import Split
from torchditan.datasets.splits import PARTS, Division, Part, describe_parts, part_of, part_of_file
from torchditan.datasets.tables import TableImages, check_images, check_labels
from torchditan.errors import ConfigError, first_line, option_error


@dataclass(kw_only=True, eq=False)
class StreamingImages(SequentialDataset):
    """A hub dataset read over the network in its stored order, one part per rank.

    Resume: the state is a place in the files (shard and row), restored by skipping to it. No row is lost or repeated.
    Limits:

    - resuming needs the same number of ranks and of loader workers, because each reads its own part of the files;
    - rows keep their stored order, because a shuffle buffer would lose its content on resume; store them shuffled;
    - the row at a position depends on ranks and workers, so loss curves of different world sizes differ;
    - `len` is unknown.

    If any of this matters, download the dataset (`dataset.streaming = false`).
    """

    horizontal_flip = True
    name: str
    rows: Any
    image_key: str
    label_key: str | None
    class_names: list[str]
    sample_shape: tuple[int, ...]
    crop: Crop
    corrupt_images: Literal["error", "skip"]

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        image = row[self.image_key]  # {"bytes", "path"}
        stored = Stored(None, None) if image is None else Stored(image["bytes"], image["path"])
        where = f"{self.name} ({stored.path})" if stored.path else self.name
        data = read_bytes(stored, where=where)
        sample = load_sample(data, sample_shape=self.sample_shape, where=where, crop=self.crop)
        item: dict[str, Any] = {"sample": torch.from_numpy(sample)}
        if self.label_key is not None:
            label = item["class_label"] = int(row[self.label_key])
            if not 0 <= label < len(self.class_names):
                last = len(self.class_names) - 1
                raise option_error("dataset.hub_name", self.name, f"has label {label}; must be 0 to {last}")
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
            num_yielded = self.row  # a resumed pass may be at its end
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
    config: options.Dataset, *, hub_name: str, split: Split, image_key: str, sample_shape: tuple[int, ...]
) -> TableImages | StreamingImages:
    """Open one split of a hub dataset (or of a local folder in the hub's layout)."""
    if config.streaming and config.crop == "random":
        right = "needs an image's number, which a streamed dataset does not have; must be center or adm"
        raise option_error("dataset.crop", config.crop, right)
    names = find_splits(hub_name)
    if not names["validation"]:  # of CIFAR-10 and many others, only test images are held out
        names = {**names, "validation": names["test"], "test": []}
    if not names[split]:
        right = f"has no validation split, only {', '.join(names['train'])}"
        raise option_error("dataset.hub_name", hub_name, right)
    rows = load_rows(hub_name, names[split][0], streaming=config.streaming)
    label_key = None if config.num_classes == 0 else config.label_key
    shared: dict[str, Any] = {
        "name": hub_name,
        "image_key": image_key,
        "label_key": label_key,
        "sample_shape": sample_shape,
        "crop": config.crop,
    }
    dataset: TableImages | StreamingImages
    if config.streaming:
        import_optional("torchdata", extra="hub")
        rows = rows if rows.features is not None else rows._resolve_features()
        class_names = _check_stream(config, rows.features, image_key, label_key)
        rows = rows.cast_column(image_key, importlib.import_module("datasets").Image(decode=False))
        rows = rows.select_columns([image_key] if label_key is None else [image_key, label_key])
        dataset = StreamingImages(**shared, rows=rows, class_names=class_names, corrupt_images=config.corrupt_images)
    else:
        names_of_labels = getattr(rows.features.get(label_key), "names", None)
        dataset = TableImages(rows.data, where=hub_name, class_names=names_of_labels, **shared)
        dataset.fingerprint = hub_name  # identifies the list of images by its place
    dataset.reading = describe_parts(names, what="split")
    return dataset


def _check_stream(config: options.Dataset, features: Any, image_key: str, label_key: str | None) -> list[str]:
    """The names of the classes, after the columns are checked."""
    assert config.hub_name is not None
    check_images(features.arrow_schema, image_key, where=config.hub_name)
    if label_key is None:
        return []
    check_labels(features.arrow_schema, label_key, where=config.hub_name)
    names = getattr(features[label_key], "names", None)
    if names is None and config.num_classes is None:
        raise option_error("dataset.num_classes", None, "must be set: the streamed dataset does not name its classes")
    return [f"class {label}" for label in range(config.num_classes or 0)] if names is None else list(names)


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
