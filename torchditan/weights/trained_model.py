# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Opens a finished or running run for reading: its configuration, and its model with a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from torchditan.checkpoint.loading import find_checkpoint, load_weights, read_progress
from torchditan.config.errors import option_error
from torchditan.config.loader import from_dict, override
from torchditan.config.options import Config
from torchditan.diffusion.objectives import build_objective
from torchditan.distributed.process_group import Rank
from torchditan.evaluation.drawing import SamplePlan, draw_samples
from torchditan.evaluation.generate import generate
from torchditan.evaluation.metric import Pictures
from torchditan.evaluation.reconstruction import Rounding
from torchditan.evaluation.sample_parts import SampleParts
from torchditan.evaluation.sample_rows import SampleRows
from torchditan.finetune.captions.dataset import encode_prompts
from torchditan.finetune.lora import set_active_adapters
from torchditan.finetune.published import PublishedModel
from torchditan.job.complete import with_empty_caption
from torchditan.latents.latent_space import StoredLatents, decode_latents, decode_with, open_decoder
from torchditan.latents.sample_space import SampleSpace
from torchditan.models import ModelSpec, TextEmbeddings, model_spec_of
from torchditan.run.reading import read_config
from torchditan.weights.initial import load_initial_weights


@dataclass
class TrainedModel:
    """A run's model in one process, in float32, ready to sample."""

    config: Config
    spec: ModelSpec
    model: nn.Module
    sample_shape: tuple[int, ...]
    num_classes: int
    step: int
    weights: Literal["ema", "raw"]
    device: torch.device
    images_seen: int = 0
    run_id: str | None = None
    """Identifies the run, also after its folder moved."""

    @classmethod
    def load(
        cls,
        run: Path,
        *,
        step: int | None = None,
        weights: Literal["ema", "raw"] | None = None,
        device: torch.device,
        flags: Sequence[str] = (),
    ) -> TrainedModel:
        """Load a checkpoint of a run directory.

        Args:
            run: the run directory.
            step: step of the checkpoint; None takes the newest.
            weights: averaged or raw; None takes the averaged ones if the run kept them.
            device: where to put the model.
            flags: `--sampling.key value` and `--autoencoder.path value`, which override the run's own options.

        Raises:
            ConfigError: the run, checkpoint or weights do not exist, or a flag is wrong.
        """
        sections = ("sampling", "autoencoder", "text_encoder")
        stored = read_config(run)
        config = override(from_dict(stored["config"]), list(flags), sections=sections)
        if config.autoencoder.name is None and config.autoencoder.path is not None:
            right = "this run was trained on pixels, so there is nothing to decode; leave it out"
            raise option_error("autoencoder.path", config.autoencoder.path, right)
        if weights == "ema" and not config.ema.enable:
            raise option_error("--weights", weights, "this run kept no average; must be raw")
        weights = weights or ("ema" if config.ema.enable else "raw")
        checkpoint = find_checkpoint(run / config.checkpoint.folder, step)
        progress = read_progress(checkpoint)
        spec = stored_spec(config)
        channels, num_classes = spec.sample_shape[0], config.dataset.num_classes
        assert num_classes is not None
        if config.autoencoder.name is not None:
            # Check that the decoder opens, so that a missing one is reported now and not after sampling.
            open_decoder(config.autoencoder, channels=channels, device=device)
        with torch.device("meta"):
            model = spec.build()
        model.to_empty(device=device)
        if config.lora.rank:  # the checkpoint has only the LoRA
            cast(Any, model).init_weights(config.training.seed)
        elif isinstance(model, PublishedModel):  # weights that are not stored
            model.fill_buffers()
        load_weights(model, checkpoint, ema=weights == "ema", only_trained=config.lora.rank > 0)
        return cls(
            config=config,
            spec=spec,
            model=model.eval().requires_grad_(False),
            sample_shape=spec.sample_shape,
            num_classes=num_classes,
            step=progress.step,
            images_seen=progress.images_seen,
            run_id=stored.get("run_id"),
            weights=weights,
            device=device,
        )

    @property
    def image_size(self) -> tuple[int, int]:
        """(H, W) of decoded samples, in pixels."""
        factor = (self.config.autoencoder.downsampling or 1) if self.is_latent else 1
        return self.sample_shape[-2] * factor, self.sample_shape[-1] * factor

    @property
    def is_latent(self) -> bool:
        """Whether samples are latents, encoded before training or at each step."""
        return self.config.autoencoder.name is not None

    @property
    def real_heading(self) -> str:
        """Heading of the dataset's samples in a grid."""
        is_decoded = self.is_latent and not self.config.autoencoder.online
        return StoredLatents.real_heading if is_decoded else SampleSpace.real_heading

    def to_pixels(self, samples: torch.Tensor) -> torch.Tensor:
        """Samples of the model (..., C, H, W) -> pictures (..., 1 or 3, H', W'), on the CPU.

        Raises:
            ConfigError: the decoder of the latents is not available, or is another one.
        """
        if not self.is_latent:
            return samples
        return decode_latents(
            self.config.autoencoder,
            samples,
            device=self.device,
            sample_dims=len(self.sample_shape),
            at_once=self.config.metrics.sample_batch_size,
        )

    def real_to_pixels(self, samples: torch.Tensor) -> torch.Tensor:
        """Samples of the dataset (..., C, H, W) -> pictures."""
        return samples if self.config.autoencoder.online else self.to_pixels(samples)

    def generate(self, labels: list[int], *, samples_per_label: int, seed: int, batch_size: int) -> torch.Tensor:
        """Samples of these classes: (len(labels), samples_per_label, C, H, W), pixels or latents."""
        rows = SampleRows.of_classes(labels, class_names=[str(label) for label in range(self.num_classes)])
        return self.generate_rows(rows, samples_per_row=samples_per_label, seed=seed, batch_size=batch_size)

    def generate_rows(self, rows: SampleRows, *, samples_per_row: int, seed: int, batch_size: int) -> torch.Tensor:
        """Sample with the run's `[sampling]` options: (rows, samples_per_row, *sample_shape), pixels or latents."""
        with self.spec.sampling(self.model):
            return generate(
                self.model,
                rows=rows,
                samples_per_row=samples_per_row,
                sample_shape=self.sample_shape,
                conditioning=self.spec.conditioning,
                objective=build_objective(self.config.diffusion, self.spec),
                sampling=self.config.sampling,
                seed=seed,
                batch_size=batch_size,
                device=self.device,
            )

    def draw_samples(
        self, plan: SamplePlan, *, seed: int, batch_size: int, rounding: Rounding, parts: SampleParts | None
    ) -> Iterator[Pictures]:
        """This rank's share of the samples of an evaluation, decoded; see `evaluation.drawing.draw_samples`."""
        to_pixels = self.to_pixels
        if self.is_latent:
            decoder = open_decoder(self.config.autoencoder, channels=self.sample_shape[0], device=self.device)
            to_pixels = partial(decode_with, decoder, at_once=self.config.metrics.sample_batch_size)
        with self.spec.sampling(self.model):
            yield from draw_samples(
                self.model,
                plan,
                seed=seed,
                batch_size=batch_size,
                rounding=rounding,
                parts=parts,
                to_pixels=to_pixels,
                sample_shape=self.sample_shape,
                conditioning=self.spec.conditioning,
                objective=build_objective(self.config.diffusion, self.spec),
                sampling=self.config.sampling,
                device=self.device,
            )

    def drop_lora(self) -> None:
        """Restore the published model without the LoRA.

        Raises:
            ConfigError: this run trained no LoRA.
        """
        if not self.config.lora.rank:
            raise option_error("--without_lora", True, "this run trained all weights; must be --original")
        set_active_adapters(self.model, [])

    def check_original(self) -> None:
        """Refuse a run without original weights, before sampling.

        Raises:
            ConfigError: it started from random weights, or its initial weights no longer exist.
        """
        given = self.config.checkpoint.initial_load_path
        if self.config.model.path is None and given is None:
            raise option_error("--original", True, "this run started from random weights; leave it out")
        if given is not None and not self.config.lora.rank and not Path(given).exists():
            raise option_error("--original", True, f"the run started from {given}, which does not exist; leave it out")

    def restore_original(self) -> str:
        """Restore, in place, the model that the run started from: without its LoRA, or with its initial weights.

        Returns:
            Description of these weights, for the log.

        Raises:
            ConfigError: the weights no longer exist.
        """
        if self.config.lora.rank:
            self.drop_lora()
            return f"weights of {self.config.model.path}"
        given = self.config.checkpoint.initial_load_path
        if given is None:
            cast(Any, self.model).init_weights(self.config.training.seed)
            return f"weights of {self.config.model.path}"
        return load_initial_weights(self.model, given, config=self.config)

    @property
    def takes_prompts(self) -> bool:
        """Whether the model is conditioned on captions."""
        return isinstance(self.spec.conditioning, TextEmbeddings)

    def encode_prompts(self, prompts: Sequence[str]) -> SampleRows:
        """A row for each text, encoded by the run's text encoders; an empty caption gives the null condition.

        Raises:
            ConfigError: the text encoders are not available.
        """
        assert isinstance(self.spec.conditioning, TextEmbeddings)
        if self.spec.conditioning.kept & self.spec.conditioning.tensors.keys():
            right = "this model continues a first frame; export the LoRA, and sample with the model's own pipeline"
            raise option_error("--prompts", list(prompts), right)
        rows, null = encode_prompts(self.config, prompts, rank=Rank(0, 0, 1))
        self.spec = with_empty_caption(self.spec, null, self.config, device=self.device)
        return rows


def stored_spec(config: Config) -> ModelSpec:
    """The model spec of a complete configuration, as runs store it."""
    size, channels, num_classes = config.dataset.image_size, config.model.input_channels, config.dataset.num_classes
    assert size is not None and channels is not None and num_classes is not None, "runs store resolved configs"
    factor = (config.autoencoder.downsampling or 1) if config.autoencoder.online else 1
    inner = config.model.sample_size or [size[0] // factor, size[-1] // factor]  # older runs do not store it
    sample_shape = (channels, *inner)
    return model_spec_of(config, sample_shape=sample_shape, num_classes=num_classes)
