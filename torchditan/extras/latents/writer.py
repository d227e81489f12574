# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Writes a folder of latents: shards, their records, and finally the index.

Notable:
- a shard is written to a temporary file, synced and renamed. Its record `shard-00000.json` follows in the same way.
  Only a shard with a record counts, and it is kept however the run stops;
- the rank that finds all records writes labels and index, the index last, and removes the remaining files;
- if a finished folder lost a shard, the next run writes it again: the index has the records of the others.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import itertools
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from torchditan.config.trajectory import flatten_tree
from torchditan.data_stream.latent_index import (
    INDEX_FILE,
    SETTINGS_FILE,
    Encoding,
    LatentIndex,
    ShardRecord,
    channel_sums,
    index_to_json,
    mean_and_std,
    read_as,
    read_index,
    read_record,
    record_to_json,
    standardizing,
)
from torchditan.data_stream.latent_shards import LABELS_FILE, map_shard, size_problems
from torchditan.errors import ConfigError, option_error, shorten
from torchditan.run.atomic_files import refuse_unwritable, write_file
from torchditan.run.directory import to_json

LOCK_FILE = ".lock"


class Shard(NamedTuple):
    """The content of one shard before it is serialised."""

    tensors: dict[str, Tensor]
    skipped: tuple[tuple[int, str], ...]


class LatentWriter:
    """One folder of latents while it is written: its settings, the records of its shards, and finally its index."""

    def __init__(self, folder: Path, encoding: Encoding) -> None:
        self.folder = folder
        self.encoding = encoding
        self.num_shards = -(-encoding.num_source_images // encoding.shard_size)

    def open(self) -> None:
        """Start the folder, or continue an existing one.

        Raises:
            ConfigError: the folder contains latents of other settings or other files, or cannot be written. It is
                unchanged.
        """
        if not (self.folder / INDEX_FILE).exists() and not (self.folder / SETTINGS_FILE).exists():
            self._refuse_other_files()
            _write(self.folder / SETTINGS_FILE, index_to_json(self.encoding))
        with self._lock():
            path = self.folder / SETTINGS_FILE
            self._refuse_other(read_as(Encoding, path) if path.exists() else read_index(self.folder))

    def missing(self) -> list[int]:
        """Numbers of the shards that are not written yet; empty for a finished folder."""
        with self._lock():  # the rank that finishes removes the records
            return [number for number, record in enumerate(self._records()) if record is None]

    def write(self, number: int, shard: Shard) -> None:
        """Write a shard, then its record; a shard without a record does not count.

        Raises:
            ConfigError: the disk is full, or the latents are not finite. Earlier shards are kept.
        """
        path = self._shard_path(number)
        for stale in self.folder.glob(f".{path.stem}.*.partial"):  # from a killed run
            stale.unlink()
        self._record_path(number).unlink(missing_ok=True)
        data = save(shard.tensors) if path.suffix == ".safetensors" else _to_tar(shard.tensors)
        record = _describe(path.name, shard, data)
        _write(path, data)
        _write(self._record_path(number), record_to_json(record))

    def finalise(self) -> LatentIndex | None:
        """Write labels and index if every shard exists. Otherwise other ranks are still working: returns None.

        Raises:
            ConfigError: no image could be read.
        """
        with self._lock():
            records = self._records()
            if None in records:
                return None
            index = self._summarise(tuple(cast(list[ShardRecord], records)))
            is_written = (self.folder / INDEX_FILE).exists() and read_index(self.folder) == index
            if not is_written or size_problems(self.folder, index):
                if index.class_names:
                    _write(self.folder / LABELS_FILE, self._labels(index))
                _write(self.folder / INDEX_FILE, index_to_json(index))
            records_left = [self._record_path(number) for number in range(self.num_shards)]
            for path in [*records_left, self.folder / SETTINGS_FILE, *self.folder.glob(".*.partial")]:
                path.unlink(missing_ok=True)
            return index

    def _summarise(self, records: tuple[ShardRecord, ...]) -> LatentIndex:
        encoding = self.encoding
        num_images = sum(record.num_images for record in records)
        skipped = [entry for record in records for entry in record.skipped]
        if num_images == 0:
            right = f"has no readable image among {len(skipped)}; {skipped[0][1]}"
            raise option_error("dataset.dataset_name", encoding.dataset, right)
        _, height, width = encoding.latent_shape
        mean, std = mean_and_std(
            np.sum([record.sum for record in records], axis=0),
            np.sum([record.sum_of_squares for record in records], axis=0),
            count=num_images * (2 if encoding.flipped else 1) * height * width,
        )
        shift, scale = standardizing(mean, std)
        is_published = encoding.published_shift is not None and encoding.published_scale is not None
        return LatentIndex(
            **vars(encoding),
            num_images=num_images,
            num_skipped=len(skipped),
            mean=mean,
            std=std,
            shift=encoding.published_shift or shift,
            scale=encoding.published_scale or scale,
            normalization="published" if is_published else "statistics",
            shards=records,
        )

    def _labels(self, index: LatentIndex) -> bytes:
        labels = np.concatenate([map_shard(self.folder / shard.file).array("labels") for shard in index.shards])
        buffer = io.BytesIO()
        np.save(buffer, labels.astype(np.int32))
        return buffer.getvalue()

    def _records(self) -> list[ShardRecord | None]:
        """The record of each shard, None without a file of the recorded size. Those of a finished folder are in its
        index."""
        indexed = read_index(self.folder).shards if (self.folder / INDEX_FILE).exists() else ()
        records = itertools.zip_longest(map(read_record, map(self._record_path, range(self.num_shards))), indexed)
        return [self._if_whole(own or old) for own, old in records]

    def _if_whole(self, record: ShardRecord | None) -> ShardRecord | None:
        if record is None or not (self.folder / record.file).is_file():
            return None
        return record if (self.folder / record.file).stat().st_size == record.bytes else None

    def _record_path(self, number: int) -> Path:
        return self._shard_path(number).with_suffix(".json")

    def _shard_path(self, number: int) -> Path:
        return self.folder / shard_file(number, self.encoding.shard_format)

    def _refuse_other(self, stored: Encoding) -> None:
        there, here = (
            {"images": False, **flatten_tree(index_to_json(encoding))} for encoding in (stored, self.encoding)
        )
        differing = [
            f"{key} is {shorten(str(there[key]), most=80)} there and {shorten(str(here[key]), most=80)} here"
            for key in here
            if there[key] != here[key]
        ]
        if differing:
            raise ConfigError(
                f"{self.folder} holds latents with other settings: {'; '.join(differing)}. "
                "Use its settings to continue it, or choose another folder"
            )

    def _refuse_other_files(self) -> None:
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        is_ours = SETTINGS_FILE in names or INDEX_FILE in names  # another rank has started
        if not is_ours and any(not name.startswith(".") for name in names):
            raise ConfigError(f"{self.folder} contains other files; latents need a separate folder")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock out other ranks. On a file system without locks, ranks that finish together write the same bytes."""
        path = self.folder / LOCK_FILE
        with refuse_unwritable(path):
            path.touch()
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
            try:
                yield
            finally:
                if (self.folder / INDEX_FILE).exists():
                    path.unlink(missing_ok=True)


def shard_file(number: int, shard_format: str = "safetensors") -> str:
    return f"shard-{number:05d}.{'tar' if shard_format == 'webdataset' else 'safetensors'}"


def _to_tar(tensors: Mapping[str, Tensor]) -> bytes:
    """A shard as a tar with a safetensors file for each sample, named by its `index`, and its label as `.cls`."""
    buffer = io.BytesIO()
    names = [name for name in tensors if name not in ("index", "labels", "scale")]
    whole = {"scale": tensors["scale"]} if "scale" in tensors else {}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for row, number in enumerate(tensors["index"].tolist()):
            files = {".safetensors": save({name: tensors[name][row].clone() for name in names} | whole)}
            if "labels" in tensors:
                files[".cls"] = str(int(tensors["labels"][row])).encode()
            for suffix, data in files.items():
                member = tarfile.TarInfo(f"{number:09d}{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _describe(file: str, shard: Shard, data: bytes) -> ShardRecord:
    """The record of a serialised shard.

    Raises:
        ConfigError: its latents are not finite.
    """
    tensors = shard.tensors
    total, squares = np.zeros((2, tensors["latents"].shape[1]))  # (C,) float64 each
    for name in ("latents", "latents_flipped"):
        if name in tensors:
            stored = tensors[name]
            bits = stored if stored.dtype == torch.int8 else stored.view(torch.uint16)
            part = channel_sums(bits.numpy())
            total, squares = total + part[0], squares + part[1]
    if "scale" in tensors:
        scale = tensors["scale"].double().numpy()
        total, squares = total * scale, squares * scale**2
    logvars = [tensors[name] for name in ("logvar", "logvar_flipped") if name in tensors]
    if not np.isfinite([total, squares]).all() or not all(bool(logvar.isfinite().all()) for logvar in logvars):
        right = "the autoencoder gives numbers that are not finite; float32 may help"
        raise option_error("autoencoder.dtype", None, right)
    return ShardRecord(
        file=file,
        num_images=len(tensors["index"]),
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        sum=tuple(total.tolist()),
        sum_of_squares=tuple(squares.tolist()),
        skipped=shard.skipped,
    )


def _write(path: Path, content: bytes | dict[str, Any]) -> None:
    """Like `write_file`, JSON for a dictionary, with one-line errors for disk failures during a long job."""
    with refuse_unwritable(path, right="free disk space and rerun the same command; complete shards are kept"):
        write_file(path, content if isinstance(content, bytes) else to_json(content, indent=1) + b"\n")
