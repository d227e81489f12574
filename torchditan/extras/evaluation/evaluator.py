# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Shows real and generated pictures to metrics on all ranks, and computes the results on rank 0.

Notable:
- every rank takes a part of the batches; rank 0 merges what the others gathered, one rank at a time;
- metrics order pictures by their numbers, so results do not depend on the number of ranks;
- several sampling seeds, and several evaluations of one training, share the real images.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchditan.config.options import Config, cache_folder
from torchditan.data_stream.datasets import CaptionedPixels, ImageDataset
from torchditan.distributed.float32_products import ieee_float32
from torchditan.distributed.precision import float64_device
from torchditan.distributed.process_group import from_rank_0, gather_on_rank_0, rank_and_world_size
from torchditan.errors import ConfigError, option_error
from torchditan.extras.evaluation.class_balance import ClassBalance, order_of_classes
from torchditan.extras.evaluation.metric import (
    Evaluation,
    Figure,
    Metric,
    Pictures,
    PromptMetric,
    Source,
    batches_of,
)
from torchditan.randomness import Permutation
from torchditan.registry import METRICS, build, registered, resolve
from torchditan.run.progress import report_progress
from torchditan.sampling.reconstruction import to_8_bit
from torchditan.sampling.sampler import ToPixels


class Shown(NamedTuple):
    """The pictures of a source, over all ranks."""

    num_images: int
    content: str
    """SHA-256 of the SHA-256 of each picture, in order."""
    class_counts: list[int] | None
    """Pictures of each class; None without labels."""


class Evaluator:
    """Computes metrics of generated pictures. All ranks build it and call its methods together.

    Args:
        config: of the run whose images are compared; None without a run.
        metrics: names in `METRICS`.
        datasets: training and held-out images of the run; empty if they are not needed.
        class_names: of the generated pictures; empty if their classes are not known.
        prompts_of: the captioned dataset whose prompts the generated pictures have; None if they have none.
        captioned: the images whose captions are the prompts, if no metric has its own; None for the training images.
        num_samples, image_size: number of generated pictures, and their (H, W).
        decode: decodes samples of the datasets.
        device: where metrics run their networks.
        option: the one that names the metrics.
        arguments: see `Evaluation`.

    Raises:
        ConfigError: a metric cannot be computed, or an extractor is missing. Raised before images are drawn.
    """

    def __init__(
        self,
        config: Config | None,
        metrics: Sequence[str],
        datasets: Mapping[Source, ImageDataset],
        *,
        class_names: Sequence[str],
        prompts_of: str | None,
        captioned: tuple[Source, Any] | None = None,
        num_samples: int,
        image_size: tuple[int, int],
        decode: ToPixels,
        device: torch.device,
        option: str = "--metrics",
        **arguments: Any,
    ) -> None:
        self.names = list(metrics)
        self.datasets = datasets
        self.class_names = list(class_names)
        self.prompts_of = prompts_of
        self.captioned = captioned
        self.prompts_from: str | None = None
        """Origin of the prompts, in words, after `prompts`."""
        self.num_samples = num_samples
        self.image_size = image_size
        self.to_pixels: ToPixels = decode
        if config is not None and config.autoencoder.online:
            self.to_pixels = lambda samples: samples  # of a dataset of pixels
        self.corrupt_images = "error" if config is None else config.dataset.corrupt_images
        self.shown: dict[Source, Shown] = {}
        """Real images that the metrics have seen."""
        evaluation = Evaluation(
            class_names=self.class_names,
            device=str(float64_device(device)),
            cache_folder=None if config is None else cache_folder(config) / "features",
            **arguments,
        )
        self.metrics: list[Metric] = []
        for name in metrics:
            cls, given = resolve(METRICS, option, name)
            self._check_samples(cls, option, name)
            self.metrics.append(build(cls, option, name, evaluation, **given))
        counts: dict[Source, int] = {"train": 0, "held_out": 0, "generated": num_samples}
        counts |= {source: len(dataset) for source, dataset in datasets.items()}
        for metric in self.metrics:
            metric.check(counts, image_size=image_size)

    def _check_samples(self, cls: Any, option: str, name: str) -> None:
        """Refuse a metric that cannot judge samples of this kind."""
        is_of_prompts, judged = hasattr(cls, "needs_dataset"), getattr(cls, "needs_dataset", None)
        if is_of_prompts and (self.prompts_of is None or judged not in (None, self.prompts_of)):
            kind = "captions" if judged is None else f"the dataset {judged}"
            raise option_error(option, name, f"needs samples of a model of {kind}; leave it out")
        if not is_of_prompts and self.prompts_of is not None and "train" not in self.datasets:
            right = "use prompts" if _is_scored_by_prompts(self.prompts_of) else "leave it out"
            right = f"compares with real images, which are not read here for captions of {self.prompts_of}; {right}"
            raise option_error(option, name, right)
        if cls.needs_labels and not self.class_names:
            raise option_error(option, name, "needs samples with labels, and these are without labels; leave it out")

    def prompts(self, given: Sequence[str] = ()) -> list[str]:
        """The prompts of the generated pictures, which are drawn in turn.

        They are those that the user gave, which the metrics check, or those of the first metric that has some, or else
        captions of the dataset, each once before any occurs again.

        Raises:
            ConfigError: a metric cannot judge a prompt.
        """
        judges = [metric for metric in self.metrics if isinstance(metric, PromptMetric)]
        for metric in judges:
            metric.check_prompts(given)
        if given:
            self.prompts_from = "given"
            return list(given)
        if own := next(filter(None, (metric.draw_prompts(self.num_samples) for metric in judges)), None):
            self.prompts_from = "the metric's"
            return own
        found: tuple[Source, Any] = self.captioned or ("train", self.datasets["train"])
        source, dataset = found
        self.prompts_from = "held-out captions" if source == "held_out" else "training captions"
        order = Permutation(0, "caption_order", 0, length=len(dataset))
        chosen = order(np.arange(self.num_samples) % len(dataset)).tolist()
        caption_of = dataset.caption_of if isinstance(dataset, CaptionedPixels) else dataset.captions.__getitem__
        return [caption_of(index) for index in chosen]

    def classes(self, class_balance: ClassBalance, *, seed: int) -> Tensor:
        """The class of each generated picture, after `read_real_images`; see `order_of_classes`."""
        return order_of_classes(
            self.num_samples,
            num_classes=len(self.class_names),
            class_balance=class_balance,
            class_counts=self.shown["train"].class_counts if "train" in self.shown else None,
            seed=seed,
        )

    def real_pictures(self, source: Source, *, rank: int, world_size: int) -> Iterator[Pictures]:
        """The real pictures of a source that a rank reads, decoded and in 8 bits."""
        dataset = self.datasets[source]
        batches = batches_of(dataset, rank=rank, world_size=world_size, corrupt_images=self.corrupt_images)
        total = -(-len(dataset) // world_size)  # of this rank, within a batch
        with report_progress(f"reading {source.replace('_', '-')} images", total=total, unit="images") as advance:
            for samples, labels, indices in batches:
                images = to_8_bit(self.to_pixels(samples)).byte()
                yield Pictures(images, labels if self.class_names else None, indices, source)
                advance(len(images))

    def read_real_images(self) -> None:
        """Show this rank's part of all real images to its metrics; does nothing the second time."""
        rank, world_size = rank_and_world_size()
        for source in self.datasets:
            if source not in self.shown:
                pictures = self.real_pictures(source, rank=rank, world_size=world_size)
                self.shown[source] = self.show(pictures, source)

    def show(self, batches: Iterable[Pictures], source: Source = "generated") -> Shown:
        """Show this rank's pictures to its metrics, and merge all ranks' data on rank 0."""
        hashes: dict[int, bytes] = {}
        counts: Counter[int] = Counter()
        for pictures in batches:
            with ieee_float32():  # the model that draws may compute in a lower precision
                for metric in self.metrics:
                    if source == "generated" or not isinstance(metric, PromptMetric):
                        metric.update(pictures)
            for number, image in zip(pictures.numbers.tolist(), pictures.images.contiguous().numpy(), strict=True):
                hashes[number] = hashlib.sha256(image.data).digest()
            if pictures.labels is not None:
                counts.update(pictures.labels.tolist())
        is_sender = rank_and_world_size()[0] > 0  # a state is a copy
        states = [metric.state(source) if is_sender else {} for metric in self.metrics]
        for gathered in gather_on_rank_0([hashes, counts, *states]):
            hashes |= gathered[0]
            counts.update(gathered[1])
            for metric, state in zip(self.metrics, gathered[2:], strict=True):
                metric.merge(state, source)
        content = hashlib.sha256(b"".join(hashes[number] for number in sorted(hashes))).hexdigest()
        class_counts = [counts[label] for label in range(max(counts) + 1)] if counts else None
        return from_rank_0(Shown(len(hashes), content, class_counts))

    def compute(self) -> dict[str, Any]:
        """Results of all metrics by name, computed on rank 0 and sent to all ranks, as is a mistake that it finds.

        The generated pictures are then forgotten.
        """
        results: dict[str, Any] = {}
        error = None
        if rank_and_world_size()[0] == 0:
            try:
                for metric in self.metrics:
                    with ieee_float32():
                        found = metric.compute()
                    taken = found.keys() & results.keys()
                    assert not taken, f"two metrics give {', '.join(taken)}"
                    results |= found
            except ConfigError as mistake:
                error = mistake
        results, error = from_rank_0((results, error))
        if error is not None:
            raise error
        for metric in self.metrics:
            metric.forget("generated")
        return results


def is_judged_by_prompts(metrics: Sequence[str], prompts_of: str | None, *, option: str = "--metrics") -> bool:
    """Whether the samples are judged by their prompts alone, without real images.

    Args:
        metrics: the chosen names.
        prompts_of: see `Evaluator`. If our metric `prompts` is for it, nothing else judges it: it is without end.
        option: the one that names the metrics.

    Raises:
        ConfigError: a name is wrong.
    """
    if prompts_of is None:
        return False
    chosen = [resolve(METRICS, option, name)[0] for name in metrics]
    by_prompts = bool(chosen) and all(hasattr(cls, "needs_dataset") for cls in chosen)
    return by_prompts or _is_scored_by_prompts(prompts_of)


def _is_scored_by_prompts(dataset: str) -> bool:
    """Whether our metric `prompts` is for this dataset."""
    return dataset == registered(METRICS, "prompts").needs_dataset


def numbers_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers among the results of metrics."""
    values = {name: result.value if isinstance(result, Figure) else result for name, result in results.items()}
    return {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
