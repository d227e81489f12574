# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Evaluates the model in training at `evaluation.freq`, on all ranks, with the metrics of torchditan evaluate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from torchditan.config.errors import ConfigError, option_error
from torchditan.config.options import Config
from torchditan.data_stream.datasets import ImageDataset
from torchditan.distributed.precision import float64_device
from torchditan.evaluation.drawing import draw_pictures, plan_prompts, plan_samples
from torchditan.evaluation.evaluator import (
    Evaluator,
    RealImages,
    feature_cache_folder,
    is_judged_by_prompts,
    numbers_of,
)
from torchditan.evaluation.metric import Evaluation, Source, ToPixels
from torchditan.evaluation.sampler import SamplePlan, Sampler
from torchditan.latents.latent_space import decode_with, open_decoder
from torchditan.latents.sample_space import SampleSpace


class TrainingEvaluation:
    """Metrics of a run's samples against its training and held-out images.

    Args:
        config: the completed configuration.
        dataset, held_out: images of both splits. Those with captions have them in `source`.
        space: decodes samples and real images.
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
        device: torch.device,
    ) -> None:
        self.config = config
        self.dataset = dataset
        options, num_classes = config.evaluation, config.dataset.num_classes or 0
        self.reads_captions = config.model.text is not None
        self.to_pixels = _open_decoder(config, space, device)
        real = RealImages(
            _real_images(config, dataset, held_out),
            to_pixels=space.real_to_pixels if config.autoencoder.online else self.to_pixels,
            has_labels=num_classes > 0,
            corrupt_images=config.dataset.corrupt_images,
        )
        evaluation = Evaluation(
            class_names=dataset.class_names if num_classes else [],
            seed=options.seed,
            device=str(float64_device(device)),
            cache_folder=feature_cache_folder(config),
            samples_name="evaluation.num_samples",
        )
        factor = (config.autoencoder.downsampling or 1) if config.autoencoder.name is not None else 1
        self.evaluator = Evaluator(
            options.metrics,
            evaluation,
            real,
            num_samples=options.num_samples,
            image_size=(space.sample_shape[-2] * factor, space.sample_shape[-1] * factor),
            without_labels=None if num_classes else "needs labels, and this run has none; leave it out",
            prompts_of=dataset.name if self.reads_captions else None,
            option="evaluation.metrics",
        )

    def __call__(
        self, model: nn.Module, sampler: Sampler, *, say: Callable[[str], None] | None = None
    ) -> dict[str, float]:
        """Draw samples with the model and return the figures by name. All ranks call it and get the same ones."""
        options = self.config.evaluation
        self.evaluator.read_real_images()
        plan = self._plan()
        batch_size = self.config.metrics.sample_batch_size
        pictures = draw_pictures(
            sampler, model, plan, seed=options.seed, batch_size=batch_size, to_pixels=self.to_pixels, say=say
        )
        self.evaluator.show(pictures)
        return numbers_of(self.evaluator.compute())

    def _plan(self) -> SamplePlan:
        options = self.config.evaluation
        if self.reads_captions:
            prompts = self.evaluator.prompts([], num_samples=options.num_samples)
            return plan_prompts(options.num_samples, prompts, cast(Any, self.dataset).rows_of(prompts))
        return plan_samples(
            options.num_samples,
            num_classes=self.config.dataset.num_classes or 0,
            class_balance="data",
            class_counts=self.evaluator.class_counts,
            seed=options.seed,
        )


def _real_images(config: Config, dataset: Any, held_out: Any) -> dict[Source, ImageDataset]:
    """What samples are compared with: nothing, if a metric judges them by their prompts.

    Raises:
        ConfigError: the model reads captions, and the dataset has none.
    """
    if config.model.text is None:
        return {"train": dataset, "held_out": held_out}
    if is_judged_by_prompts(config.evaluation.metrics, dataset.name, option="evaluation.metrics"):
        return {}
    if not hasattr(dataset, "source"):
        right = f"draws training captions, and the dataset {dataset.name} has none; must be 0"
        raise option_error("evaluation.freq", config.evaluation.freq, right)
    return {"train": dataset.source, "held_out": held_out.source}


def _open_decoder(config: Config, space: SampleSpace, device: torch.device) -> ToPixels:
    """Opened once, and before training: a missing decoder must not end a run at its first evaluation."""
    if config.autoencoder.name is None:
        return space.to_pixels
    if space.missing_decoder is not None:
        raise ConfigError(space.missing_decoder)
    decoder = open_decoder(config.autoencoder, channels=space.sample_shape[0], device=device)
    return partial(decode_with, decoder, at_once=config.metrics.sample_batch_size)
