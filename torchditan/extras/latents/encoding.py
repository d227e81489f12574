# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Images -> latents on disk: encodes a dataset into shards (data_stream/latent_shards.py), on any number of ranks.

Notable:
- a shard is a function of its source images and the settings: its batches start at its first image. Rank r of W
  encodes shards r, r + W, ... So any number of ranks, stopped and rerun at any point, produces the same bytes;
- ranks do not communicate: writer.py records progress in the folder;
- while a thread writes one shard, the next is encoded; loader workers decode images ahead of both;
- an image that cannot be read stops the job, or is skipped, and the index lists it with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torchditan.data_stream.datasets import CaptionedPixels, CorruptImageError, GroupedDataset, ImageDataset
from torchditan.data_stream.latent_index import Encoding, LatentIndex
from torchditan.data_stream.loader import PREFETCH
from torchditan.distributed.process_group import Rank
from torchditan.errors import ConfigError, option_error
from torchditan.extras.autoencoders.autoencoder import Autoencoder
from torchditan.extras.latents.writer import LatentWriter, Shard
from torchditan.sampling.reconstruction import to_8_bit

_INT8_MAX = 127
Moments = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""(B, C, H, W) -> mean and log-variance of the latents before normalisation, as `Autoencoder.moments`."""


def describe_encoding(
    dataset: ImageDataset,
    autoencoder: Autoencoder,
    *,
    split: str,
    crop: str,
    dtype: str,
    flipped: bool,
    posterior: bool,
    shard_size: int,
    shard_format: str = "safetensors",
    images: bool = False,
    is_encoded: bool = False,
) -> Encoding:
    """Describe the latents of a dataset before encoding it.

    Args:
        is_encoded: the dataset has latents of this autoencoder instead of images.

    Raises:
        ConfigError: the samples do not match the autoencoder, or it has no variance to store.
    """
    if isinstance(dataset, GroupedDataset) and len(dataset.groups()) > 1:
        right = "latent shards hold samples of one shape; leave it out (training on captions caches its own latents)"
        raise option_error("dataset.aspect_buckets", True, right)
    if isinstance(dataset, CaptionedPixels) and not dataset.class_names:
        raise option_error(
            "dataset.dataset_name",
            dataset.name,
            "has captions without classes, so it cannot be encoded; train on its pixels",
        )
    channels, height, width = dataset.sample_shape
    if is_encoded:
        if channels != (expected := autoencoder.latent_channels):
            right = f"has latents of {expected} channel(s), and {dataset.name} has {channels}"
            raise option_error("autoencoder.name", autoencoder.name, right)
        height, width = height * autoencoder.downsampling, width * autoencoder.downsampling
    if posterior and not autoencoder.has_posterior:
        raise option_error("--posterior", True, f"{autoencoder.name} has no variance; leave it out")
    shift, scale = autoencoder.shift, autoencoder.scale
    return Encoding(
        dataset=dataset.name,
        split=split,
        num_source_images=len(dataset),
        source=dataset.fingerprint,
        image_size=(height, width),
        crop=crop,
        autoencoder_name=autoencoder.name,
        autoencoder_path=autoencoder.path,
        downsampling=autoencoder.downsampling,
        fingerprint=autoencoder.fingerprint,
        image_channels=autoencoder.image_channels,
        autoencoder_dtype=None if is_encoded else str(autoencoder.dtype).removeprefix("torch."),
        latent_shape=autoencoder.latent_shape(height, width),
        dtype=dtype,
        flipped=flipped,
        posterior=posterior,
        shard_size=shard_size,
        shard_format=shard_format,
        class_names=tuple(dataset.class_names),
        published_shift=None if shift is None else tuple(shift.tolist()),
        published_scale=None if scale is None else tuple(scale.tolist()),
        images=images,
    )


def as_stored(latents: Tensor) -> tuple[Tensor, None]:
    """`Moments` of samples that are latents before normalisation."""
    return latents, None


def denormalize(autoencoder: Autoencoder) -> Moments:
    """`Moments` of samples that are latents after the normalisation of this autoencoder, such as 0.18215 z.

    Raises:
        ConfigError: it publishes no normalisation.
    """
    if autoencoder.shift is None or autoencoder.scale is None:
        right = f"{autoencoder.name} publishes no normalization; must be mean"
        raise option_error("--latents", "normalized", right)
    shift, scale = (values.to(autoencoder.device)[:, None, None] for values in (autoencoder.shift, autoencoder.scale))
    return lambda latents: (latents / scale + shift, None)


def encode(
    dataset: ImageDataset,
    autoencoder: Autoencoder,
    writer: LatentWriter,
    *,
    rank: Rank,
    batch_size: int,
    num_workers: int,
    report: Callable[[int], None],
    moments: Moments | None = None,
    skips_corrupt: bool = False,
) -> LatentIndex | None:
    """Encode this rank's missing shards, and finish the folder if no other rank has work left.

    Args:
        dataset: the source images, in their own order.
        autoencoder: on this rank's device.
        moments: used in place of the autoencoder's, for samples that are latents already.
        writer: open.
        rank: encodes every world_size-th shard.
        batch_size: images in one forward pass.
        num_workers: processes that decode images ahead; with 0, this process decodes.
        report: called with the number of images after each batch.
        skips_corrupt: leave unreadable images out.

    Returns:
        The index; None while other ranks still have work.

    Raises:
        CorruptImageError: an image is unreadable, without `skips_corrupt`.
        ConfigError: the disk is full, or the dataset fails for more than single images.
    """
    encoding = writer.encoding
    moments = moments or autoencoder.moments
    numbers = [number for number in writer.missing() if number % rank.world_size == rank.rank]
    batches = _load(
        dataset,
        itertools.chain.from_iterable(_batches_of(number, encoding, batch_size) for number in numbers),
        num_workers=num_workers if numbers else 0,
        pin_memory=autoencoder.device.type == "cuda",
        skips_corrupt=skips_corrupt,
    )
    with ThreadPoolExecutor(max_workers=1) as executor:
        writing: Future[None] | None = None
        for number, shard_batches in itertools.groupby(batches, key=lambda batch: batch.start // encoding.shard_size):
            parts, skipped = _encode_shard(shard_batches, autoencoder.device, encoding, moments=moments, report=report)
            if writing is not None:
                writing.result()
            writing = executor.submit(_write_shard, writer, number, parts, skipped)
        if writing is not None:
            writing.result()
    return writer.finalise()


class _SourceBatch(NamedTuple):
    """Decoded images of one shard, in their order."""

    start: int
    """Number of the first source image, readable or not."""
    images: Tensor
    """(B, C, H, W) float32 in [-1, 1]; B may be 0."""
    labels: Tensor
    """(B,) int64; zeros without labels."""
    numbers: Tensor
    """(B,) int64, numbers of the source images."""
    skipped: list[tuple[int, str]]

    @property
    def num_sources(self) -> int:
        return len(self.numbers) + len(self.skipped)


class _SourceImages(Dataset):
    """Map-style view of the dataset for loader workers; errors are returned as values (data_stream/loader.py)."""

    def __init__(self, dataset: ImageDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, number: int) -> tuple[int, dict[str, Any] | ConfigError]:
        try:
            return number, self.dataset[number]
        except ConfigError as error:
            return number, error


class _Collate:
    """Items -> batch. A corrupt image is left out with `skips_corrupt`; any other error replaces the batch."""

    def __init__(self, sample_shape: tuple[int, ...], *, skips_corrupt: bool) -> None:
        self.sample_shape = sample_shape
        self.skips_corrupt = skips_corrupt

    def __call__(self, items: list[tuple[int, dict[str, Any] | ConfigError]]) -> _SourceBatch | ConfigError:
        skipped, numbers, labels, images = [], [], [], []
        for number, item in items:
            if self.skips_corrupt and isinstance(item, CorruptImageError):
                skipped.append((number, item.named))
            elif isinstance(item, ConfigError):
                return item
            else:
                numbers.append(number)
                labels.append(item.get("class_label", 0))
                images.append(item["sample"])
        stacked = torch.stack(images) if images else torch.empty(0, *self.sample_shape)
        return _SourceBatch(items[0][0], stacked, torch.tensor(labels).long(), torch.tensor(numbers).long(), skipped)


def _load(
    dataset: ImageDataset,
    batches: Iterable[list[int]],
    *,
    num_workers: int,
    pin_memory: bool,
    skips_corrupt: bool,
) -> Iterator[_SourceBatch]:
    loader = DataLoader(
        _SourceImages(dataset),
        batch_sampler=batches,
        collate_fn=_Collate(dataset.sample_shape, skips_corrupt=skips_corrupt),
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        pin_memory=pin_memory,
    )
    for batch in loader:
        if isinstance(batch, ConfigError):
            raise batch
        yield batch


def _batches_of(number: int, encoding: Encoding, batch_size: int) -> Iterator[list[int]]:
    """Numbers of the source images in each batch of a shard."""
    start = number * encoding.shard_size
    end = min(start + encoding.shard_size, encoding.num_source_images)
    for first in range(start, end, batch_size):
        yield list(range(first, min(first + batch_size, end)))


def _encode_shard(
    batches: Iterable[_SourceBatch],
    device: torch.device,
    encoding: Encoding,
    *,
    moments: Moments,
    report: Callable[[int], None],
) -> tuple[dict[str, list[Tensor]], list[tuple[int, str]]]:
    """Encode the images of one shard. Nothing here waits for the device, so a GPU stays busy.

    Returns:
        Its tensors by name, one part per batch, latents still on the device; and the skipped images.
    """
    kept_dtype = torch.bfloat16 if encoding.dtype == "bf16" else torch.float32  # int8 needs the whole shard's maximum
    empty = torch.empty(0, *encoding.latent_shape, dtype=torch.bfloat16)  # if no image of the shard is readable
    views = ["", "_flipped"] if encoding.flipped else [""]
    kinds = ["latents", "logvar"] if encoding.posterior else ["latents"]
    parts: dict[str, list[Tensor]] = {f"{kind}{view}": [empty] for kind in kinds for view in views}
    parts |= {"labels": [], "index": []}
    if encoding.images:
        parts["images"] = [torch.empty(0, *encoding.image_shape, dtype=torch.uint8)]
    skipped: list[tuple[int, str]] = []
    for batch in batches:
        if encoding.images:
            parts["images"].append(to_8_bit(batch.images).to(torch.uint8))
        parts["labels"].append(batch.labels)
        parts["index"].append(batch.numbers)
        skipped += batch.skipped
        images = batch.images.to(device, non_blocking=True)
        for view in views if len(images) else ():
            mean, logvar = moments(images.flip(-1) if view else images)
            parts[f"latents{view}"].append(mean.to(kept_dtype))
            if encoding.posterior:
                assert logvar is not None
                parts[f"logvar{view}"].append(logvar.to(torch.bfloat16))
        report(batch.num_sources)
    return parts, skipped


def _write_shard(
    writer: LatentWriter, number: int, parts: dict[str, list[Tensor]], skipped: list[tuple[int, str]]
) -> None:
    # Move to the CPU first: computing a shard's scale needs several float32 copies of it.
    tensors = {name: torch.cat([part.cpu() for part in of_batches]) for name, of_batches in parts.items()}
    if writer.encoding.dtype == "int8":
        tensors |= _quantize({name: latents for name, latents in tensors.items() if name.startswith("latents")})
    if not writer.encoding.class_names:
        del tensors["labels"]
    writer.write(number, Shard({name: tensor.contiguous() for name, tensor in tensors.items()}, tuple(skipped)))


def _quantize(latents: dict[str, Tensor]) -> dict[str, Tensor]:
    """float32 (n, C, h, w) each -> int8, and their common `scale` (C,) = max |z| / 127."""
    scale = torch.stack([_largest(z) for z in latents.values()]).amax(dim=0) / _INT8_MAX  # (C,)
    scale[scale == 0] = 1.0
    stored = {name: (z / scale[:, None, None]).round().to(torch.int8) for name, z in latents.items()}
    return {**stored, "scale": scale}


def _largest(z: Tensor) -> Tensor:
    """Largest magnitude of each channel of (n, C, h, w), (C,); 0 where n is 0."""
    if len(z) == 0:
        return torch.zeros(z.shape[1])
    return torch.maximum(z.amax((0, 2, 3)), -z.amin((0, 2, 3)))
