# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Evaluates the model in training at `evaluation.freq`, on all ranks, with the metrics of scripts/evaluate.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from torchditan.config.errors import option_error
from torchditan.config.options import Config
from torchditan.data_stream.datasets import ImageDataset
from torchditan.diffusion.objectives import Objective
from torchditan.evaluation.drawing import SamplePlan, draw_samples, plan_samples
from torchditan.evaluation.evaluator import compute, feature_cache_folder, numbers_of, real_pictures, show
from torchditan.evaluation.metric import Evaluation, Metric, Pictures, Source, ToPixels
from torchditan.latents.latent_space import decode_with, open_decoder
from torchditan.latents.sample_space import SampleSpace
from torchditan.models.spec import Conditioning
from torchditan.registry import METRICS, registered


class TrainingEvaluation:
    """Metrics of a run's samples against its training and held-out images.

    Args:
        config: the completed configuration.
        dataset, held_out: images of both splits.
        space: decodes samples and real images.
        conditioning: of the model.
        device: where metrics run their networks.

    Raises:
        ConfigError: a metric cannot be computed for this run, or an extractor is missing.
    """

    def __init__(
        self,
        config: Config,
        *,
        dataset: ImageDataset,
        held_out: ImageDataset,
        space: SampleSpace,
        conditioning: Conditioning,
        device: torch.device,
    ) -> None:
        self.config = config
        self.datasets: dict[Source, ImageDataset] = {"train": dataset, "held_out": held_out}
        self.space = space
        self.conditioning = conditioning
        self.device = device
        options = config.evaluation
        self.has_labels = bool(config.dataset.num_classes)
        self._to_pixels = self._open_decoder()
        self.metrics = self._build_metrics()
        self._plan: SamplePlan | None = None
        """Known when the training images were read, with their classes."""
        factor = (config.autoencoder.downsampling or 1) if config.autoencoder.name is not None else 1
        image_size = (space.sample_shape[-2] * factor, space.sample_shape[-1] * factor)
        counts: dict[Source, int] = {"generated": options.num_samples}
        counts |= {source: len(images) for source, images in self.datasets.items()}
        for metric in self.metrics:
            metric.check(counts, image_size=image_size)

    def _open_decoder(self) -> ToPixels:
        """Opened once, and before training: a missing decoder must not end a run at its first evaluation."""
        config = self.config
        if config.autoencoder.name is None:
            return self.space.to_pixels
        decoder = open_decoder(config.autoencoder, channels=self.space.sample_shape[0], device=self.device)
        return partial(decode_with, decoder, at_once=config.metrics.sample_batch_size)

    def _build_metrics(self) -> list[Metric]:
        config, options = self.config, self.config.evaluation
        classes = [registered(METRICS, name) for name in options.metrics]
        for name, cls in zip(options.metrics, classes, strict=True):
            if cls.needs_labels and not self.has_labels:
                raise option_error("evaluation.metrics", name, "needs labels, and this run has none; leave it out")
        evaluation = Evaluation(
            class_names=self.datasets["train"].class_names if self.has_labels else [],
            seed=options.seed,
            device=str(self.device),
            cache_folder=feature_cache_folder(config),
            inception_weights=None if options.inception_weights is None else Path(options.inception_weights),
        )
        return [cls(evaluation) for cls in classes]

    def __call__(
        self, model: nn.Module, *, objective: Objective, say: Callable[[str], None] | None = None
    ) -> dict[str, float]:
        """Draw samples with the model and return the figures by name. All ranks call it and get the same ones."""
        if self._plan is None:
            self._plan = self._read_real_images()
        show(self.metrics, self._draw(model, self._plan, objective=objective, say=say), "generated")
        results = numbers_of(compute(self.metrics))
        for metric in self.metrics:
            metric.forget("generated")
        return results

    def _read_real_images(self) -> SamplePlan:
        """Show the real images to the metrics, and plan samples of their classes."""
        shown = {}
        for source, dataset in self.datasets.items():
            pictures = real_pictures(
                dataset,
                source,
                to_pixels=self.space.real_to_pixels if self.config.autoencoder.online else self._to_pixels,
                has_labels=self.has_labels,
                corrupt_images=self.config.dataset.corrupt_images,
            )
            shown[source] = show(self.metrics, pictures, source)
        options = self.config.evaluation
        return plan_samples(
            options.num_samples,
            num_classes=self.config.dataset.num_classes or 0,
            class_balance=options.class_balance,
            class_counts=shown["train"].class_counts,
            seed=options.seed,
        )

    def _draw(
        self, model: nn.Module, plan: SamplePlan, *, objective: Objective, say: Callable[[str], None] | None
    ) -> Iterator[Pictures]:
        config = self.config
        return draw_samples(
            model,
            plan,
            seed=config.evaluation.seed,
            batch_size=config.metrics.sample_batch_size,
            rounding="nearest",
            parts=None,
            to_pixels=self._to_pixels,
            sample_shape=self.space.sample_shape,
            conditioning=self.conditioning,
            objective=objective,
            sampling=config.sampling,
            device=self.device,
            say=say,
        )
