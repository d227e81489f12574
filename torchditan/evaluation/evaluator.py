# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Shows pictures to metrics on all ranks, and computes the results on rank 0.

Notable:
- every rank takes a part of the batches; rank 0 merges what the others gathered, one rank at a time;
- metrics order pictures by their numbers, so results do not depend on the number of ranks;
- several sampling seeds share the real images.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from torchditan.config.errors import ConfigError
from torchditan.config.options import Config
from torchditan.data_stream.datasets import ImageDataset
from torchditan.distributed.float32_products import ieee_float32
from torchditan.evaluation.metric import Figure, Metric, Pictures, Source, ToPixels, batches_of
from torchditan.evaluation.ranks import from_rank_0, gather_on_rank_0, rank_and_world_size
from torchditan.evaluation.reconstruction import to_8_bit
from torchditan.run.progress import report_progress


class Shown(NamedTuple):
    """The pictures of a source, over all ranks."""

    num_images: int
    content: str
    """SHA-256 of the SHA-256 of each picture, in order."""
    class_counts: list[int] | None
    """Pictures of each class; None without labels."""


def show(metrics: Sequence[Metric], batches: Iterable[Pictures], source: Source) -> Shown:
    """Show this rank's pictures to its metrics, and merge all ranks' data on rank 0. All ranks call it.

    Args:
        metrics: of this rank, in the same order on every rank.
        batches: this rank's part of the pictures, all of `source`.
    """
    hashes: dict[int, bytes] = {}
    counts: Counter[int] = Counter()
    for pictures in batches:
        with ieee_float32():  # the model that draws may compute in a lower precision
            for metric in metrics:
                metric.update(pictures)
        for number, image in zip(pictures.numbers.tolist(), pictures.images.contiguous().numpy(), strict=True):
            hashes[number] = hashlib.sha256(image.data).digest()
        if pictures.labels is not None:
            counts.update(pictures.labels.tolist())
    is_sender = rank_and_world_size()[0] > 0  # a state is a copy
    states = [metric.state(source) for metric in metrics] if is_sender else [{} for _ in metrics]
    for gathered in gather_on_rank_0([hashes, counts, *states]):
        hashes |= gathered[0]
        counts.update(gathered[1])
        for metric, state in zip(metrics, gathered[2:], strict=True):
            metric.merge(state, source)
    content = hashlib.sha256(b"".join(hashes[number] for number in sorted(hashes))).hexdigest()
    class_counts = [counts[label] for label in range(max(counts) + 1)] if counts else None
    return from_rank_0(Shown(len(hashes), content, class_counts))


def real_pictures(
    dataset: ImageDataset,
    source: Source,
    *,
    to_pixels: ToPixels,
    has_labels: bool,
    corrupt_images: Literal["error", "skip"],
    batch_size: int = 256,
) -> Iterator[Pictures]:
    """This rank's pictures of a dataset, decoded and in 8 bits."""
    rank, world_size = rank_and_world_size()
    batches = batches_of(
        dataset, batch_size=batch_size, rank=rank, world_size=world_size, corrupt_images=corrupt_images
    )
    total = -(-len(dataset) // world_size)  # of this rank, within a batch
    with report_progress(f"reading {source.replace('_', '-')} images", total=total, unit="images") as advance:
        for samples, labels, indices in batches:
            images = to_8_bit(to_pixels(samples)).byte()
            yield Pictures(images, labels if has_labels else None, indices, source)
            advance(len(images))


def pictures_of(
    dataset: ImageDataset, to_pixels: ToPixels, *, corrupt_images: Literal["error", "skip"]
) -> Iterator[Tensor]:
    """All pictures of a dataset in order, (B, 1 or 3, H, W) uint8."""
    for samples, _, _ in batches_of(dataset, corrupt_images=corrupt_images):
        yield to_8_bit(to_pixels(samples)).byte()


def compute(metrics: Sequence[Metric]) -> dict[str, Any]:
    """Results of all metrics by name, computed on rank 0 and sent to all ranks, as is a mistake that it finds."""
    results: dict[str, Any] = {}
    error = None
    if rank_and_world_size()[0] == 0:
        try:
            for metric in metrics:
                with ieee_float32():
                    found = metric.compute()
                assert not found.keys() & results.keys(), f"two metrics give {', '.join(found.keys() & results.keys())}"
                results |= found
        except ConfigError as mistake:
            error = mistake
    results, error = from_rank_0((results, error))
    if error is not None:
        raise error
    return results


def numbers_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers among the results of metrics."""
    values = {name: result.value if isinstance(result, Figure) else result for name, result in results.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}


def feature_cache_folder(config: Config) -> Path:
    """Where features of real images are kept: in the cache folder that runs share."""
    return Path(config.cache.folder or Path(config.job.dump_folder) / "cache").expanduser() / "features"
