# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Tables with a column of encoded images: parquet files, and datasets of the hub, which `datasets` stores as Arrow."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from torchditan.config.optional_libraries import import_optional
from torchditan.datasets.encoded import Cell, EncodedImages, read_bytes
from torchditan.datasets.images import Crop
from torchditan.errors import first_line, option_error


def read_parquet(path: Path, *, shown: str) -> Any:
    """The table in a file, not read into memory. `shown` is the value of `dataset.root_dir` in an error."""
    parquet = import_optional("pyarrow.parquet", extra="hub")
    pyarrow = import_optional("pyarrow", extra="hub")
    try:
        return parquet.read_table(path, memory_map=True)
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # of damage in a page of data, OSError
        right = f"{path.name} is not a readable parquet file ({first_line(error)})"
        raise option_error("dataset.root_dir", shown, right) from error


def type_of(schema: Any, option: str, key: str, *, where: str) -> Any:
    """The type of the column that `dataset.<option>` names."""
    if key not in schema.names:
        right = f"must be one of the columns of {where}: {', '.join(schema.names)}"
        if option == "label_key":
            right += "; --dataset.num_classes 0 trains without labels"
        raise option_error(f"dataset.{option}", key, right)
    return schema.field(key).type


def check_images(schema: Any, key: str, *, where: str) -> None:
    """Refuse a column that does not hold encoded images."""
    types = import_optional("pyarrow", extra="hub").types
    kind = type_of(schema, "image_key", key, where=where)
    has_bytes = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    if not has_bytes and not types.is_binary(kind) and not types.is_large_binary(kind):
        raise option_error("dataset.image_key", key, f"holds {kind} in {where}; must be images")


def check_labels(schema: Any, key: str, *, where: str) -> None:
    """Refuse a column that does not hold integers."""
    types = import_optional("pyarrow", extra="hub").types
    kind = type_of(schema, "label_key", key, where=where)
    if not types.is_integer(kind):
        raise option_error("dataset.label_key", key, f"holds {kind} in {where}; must be integers from 0")


class TableImages(EncodedImages):
    """The images of a table.

    Args:
        label_key: None for images without labels.
        class_names: of labels; None names them by their numbers.
    """

    def __init__(
        self,
        table: Any,
        *,
        name: str,
        where: str,
        image_key: str,
        label_key: str | None,
        class_names: list[str] | None,
        sample_shape: tuple[int, ...],
        crop: Crop = "center",
    ) -> None:
        check_images(table.schema, image_key, where=where)
        self.table = table  # of the hub, pickled as its path; a column would be copied
        self.name = name
        self.where = where
        self.image_key = image_key
        self.sample_shape = sample_shape
        self.crop = crop
        self.class_names = []
        if label_key is not None:
            check_labels(table.schema, label_key, where=where)
            labels = table.column(label_key)
            if labels.null_count:
                right = f"holds {labels.null_count} row(s) without a label; must be integers from 0"
                raise option_error("dataset.label_key", label_key, right)
            self.class_labels = labels.to_numpy().astype(np.int64)
            num_classes = int(self.class_labels.max(initial=-1)) + 1
            self.class_names = class_names or [f"class {label}" for label in range(num_classes)]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def name_of(self, index: int) -> str:
        return f"{self.where}, row {index}"

    def content_of(self, index: int) -> bytes:
        return read_bytes(Cell(self._images, index), where=self.name_of(index))

    @functools.cached_property
    def _images(self) -> Any:
        return self.table.column(self.image_key)

    def __getstate__(self) -> dict[str, Any]:  # for a worker that is not forked
        return {name: value for name, value in vars(self).items() if name != "_images"}
