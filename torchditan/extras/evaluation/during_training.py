# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Evaluates the model in training at `evaluation.freq`, on all ranks, with the metrics of torchditan evaluate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from torchditan.config.options import Config
from torchditan.data_stream.datasets import ImageDataset
from torchditan.data_stream.sample_space import SampleSpace
from torchditan.errors import ConfigError, option_error
from torchditan.extras.evaluation.evaluator import Evaluator, is_judged_by_prompts, numbers_of
from torchditan.extras.evaluation.metric import Source
from torchditan.extras.evaluation.sample_parts import draw_pictures
from torchditan.extras.latents.latent_space import decode_with, open_decoder
from torchditan.sampling.drawing import Drawing, SampleRows
from torchditan.sampling.sampler import Sampler, ToPixels


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
        self, config: Config, *, dataset: Any, held_out: Any, space: SampleSpace, device: torch.device
    ) -> None:
        self.config = config
        self.dataset = dataset
        options, factor = config.evaluation, config.autoencoder.downsampling or 1
        self.to_pixels = _open_decoder(config, space, device)
        real = _real_images(config, dataset, held_out)
        self.evaluator = Evaluator(
            config,
            options.metrics,
            real,
            class_names=dataset.class_names if config.dataset.num_classes else [],
            prompts_of=None if config.model.text is None else dataset.name,
            captioned=None if real else ("held_out", held_out.source),
            num_samples=options.num_samples,
            image_size=(space.sample_shape[-2] * factor, space.sample_shape[-1] * factor),
            decode=self.to_pixels,
            device=device,
            option="evaluation.metrics",
            seed=options.seed,
            samples_name="evaluation.num_samples",
        )

    def __call__(
        self, model: nn.Module, sampler: Sampler, *, say: Callable[[str], None] | None = None
    ) -> dict[str, float]:
        """Draw samples with the model and return the figures by name. All ranks call it and get the same ones."""
        config, options = self.config, self.config.evaluation
        self.evaluator.read_real_images()
        if config.model.text is not None:
            rows = self.dataset.rows_of(self.evaluator.prompts())
            order = rows.in_turn(options.num_samples)
        else:
            rows = SampleRows.all_classes(self.evaluator.class_names)
            order = self.evaluator.classes("data", seed=options.seed)
        pictures = draw_pictures(
            sampler,
            model,
            Drawing(rows, order, config.sampling, seed=options.seed),
            batch_size=config.metrics.sample_batch_size,
            to_pixels=self.to_pixels,
            say=say,
        )
        self.evaluator.show(pictures)
        return numbers_of(self.evaluator.compute())


def _real_images(config: Config, dataset: Any, held_out: Any) -> dict[Source, ImageDataset]:
    """What samples are compared with: nothing, if a metric judges them by their prompts.

    Raises:
        ConfigError: the model reads captions, and the dataset has none.
    """
    if config.model.text is None:
        return {"train": dataset, "held_out": held_out}
    if not hasattr(dataset, "source"):
        right = f"draws training captions, and the dataset {dataset.name} has none; must be 0"
        raise option_error("evaluation.freq", config.evaluation.freq, right)
    if is_judged_by_prompts(config.evaluation.metrics, dataset.name, option="evaluation.metrics"):
        return {}
    return {"train": dataset.source, "held_out": held_out.source}


def _open_decoder(config: Config, space: SampleSpace, device: torch.device) -> ToPixels:
    """Opened once, and before training: a missing decoder must not end a run at its first evaluation."""
    if config.autoencoder.name is None:
        return space.to_pixels
    if space.missing_decoder is not None:
        raise ConfigError(space.missing_decoder)
    decoder = open_decoder(config.autoencoder, channels=space.sample_shape[0], device=device)
    return partial(decode_with, decoder, at_once=config.metrics.sample_batch_size)
