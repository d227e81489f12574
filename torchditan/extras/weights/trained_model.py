# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A trained model, ready to sample, from weights at any address (opening.py).

`torchditan.load` is the short way from Python (docs/checkpoints.md).
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

import torch
from torch import nn

from torchditan.checkpoint.weights import Kind
from torchditan.config.loader import override
from torchditan.config.options import Config, cache_folder, dataset_channels
from torchditan.data_stream.datasets import ImageDataset
from torchditan.data_stream.sample_space import SampleSpace
from torchditan.data_stream.stored_latents import complete_from_index
from torchditan.datasets import build_dataset
from torchditan.datasets.options import Split
from torchditan.diffusion.objectives import Objective, build_objective
from torchditan.distributed.process_group import Rank
from torchditan.errors import ConfigError, did_you_mean, option_error, some
from torchditan.extras.autoencoders import name_it, runs_code
from torchditan.extras.latents.latent_space import DecodedLatents, decode_with, open_decoder
from torchditan.extras.weights.initial import load_initial_weights
from torchditan.extras.weights.opening import open_weights
from torchditan.extras.weights.shared import check_address
from torchditan.models import ModelSpec, model_spec_of
from torchditan.sampling.drawing import Drawing, SampleRows
from torchditan.sampling.reconstruction import to_8_bit
from torchditan.sampling.sampler import Sampler, ToPixels

if TYPE_CHECKING:
    from typing_extensions import Unpack

OUTPUTS = Path("outputs")
"""Where commands write about weights that belong to no run, in the working directory."""
_MOST_NAMES = 20
"""Names of classes in a message."""
_REPLACEABLE = ("sampling", "autoencoder", "text_encoder", "cache.folder", "dataset.root_dir", "model.path")


class SamplingOptions(TypedDict, total=False):
    """Options of [sampling] that `TrainedModel.sample` takes by name; config/options.py explains them."""

    sampler: str
    num_steps: int
    spacing: Literal["trailing", "leading", "linspace"]
    timestep_shift: float | None
    clip_sample: bool | None
    guidance_scale: float
    guidance_interval: Sequence[float]
    guidance_channels: int | None
    embedded_guidance: float
    negative_prompt: str


@dataclass
class TrainedModel:
    """A run's model in one process, ready to sample."""

    config: Config
    spec: ModelSpec
    model: nn.Module
    sample_shape: tuple[int, ...]
    num_classes: int
    step: int
    weights: Kind
    device: torch.device
    dtype: torch.dtype = torch.float32
    images_seen: int = 0
    run_id: str | None = None
    """Identifies the run, also after its folder moved; for other weights `sha256-` and the start of their hash."""
    class_names: list[str] = field(default_factory=list)
    """By label; numbers if the run stores none."""
    content: dict[str, Any] = field(default_factory=dict)
    """What config.json of the run says, or the file about its weights: `config`, `run_id`, `git_commit`, ..."""
    missing_decoder: str | None = None
    """Why latents are not decoded, if that would run code that the user did not name; then `to_pixels` refuses."""
    folder: Path = OUTPUTS
    """Where commands write their pictures and cards: the run directory, or `outputs/NAME`."""

    def __post_init__(self) -> None:
        if len(self.class_names) != self.num_classes:
            self.class_names = [str(label) for label in range(self.num_classes)]

    @classmethod
    def open(
        cls,
        place: str | os.PathLike[str],
        *,
        step: int | None = None,
        weights: Kind | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = torch.float32,
        flags: Sequence[str] | Mapping[str, Any] = (),
    ) -> TrainedModel:
        """Open a model at any address of `open_weights`. Needs neither the training data nor the run's first folder.

        Args:
            place: the address.
            step: of a run's checkpoint; None takes the newest.
            weights: averaged or raw; None takes the averaged ones if there are any.
            device: where to put the model; None takes the GPU if there is one, else the CPU.
            dtype: of the weights; None takes float32, and bfloat16 for a published model trained in half precision.
            flags: `["--sampling.key", "value"]` or `{"autoencoder.path": value}`, which override the run's own options.

        Raises:
            ConfigError: it cannot be opened, or a flag is wrong.
        """
        device = _device(device)
        opened = open_weights(place, step=step, kind=weights)
        config = with_flags(opened.checked_config(), flags)
        spec = stored_spec(config)
        assert opened.step is not None and opened.images_seen is not None and opened.kind is not None
        assert config.dataset.num_classes is not None
        only_trained = spec.turn_off_adapter is not None
        with torch.device("meta"):
            model = spec.build()
        opened.check(model, only_trained=only_trained)
        model.to_empty(device=device)
        spec.init_unsaved(model, config.training.seed)
        opened.fill(model, only_trained=only_trained)
        if dtype is None:
            is_half = spec.is_sampled_in_half and config.training.mixed_precision_param != "float32"
            dtype = torch.bfloat16 if is_half else torch.float32
        for parameter in model.parameters():  # not buffers: positions need float32
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        own = {"config": opened.config, "git_commit": opened.git_commit, "run_id": opened.run_id}
        return cls(
            config=config,
            spec=spec,
            model=model.eval().requires_grad_(False),
            sample_shape=spec.sample_shape,
            num_classes=config.dataset.num_classes,
            step=opened.step,
            weights=opened.kind,
            device=device,
            dtype=dtype,
            images_seen=opened.images_seen,
            run_id=opened.run_id,
            class_names=opened.class_names,
            content=opened.content or own,
            missing_decoder=_why_not_decoded(config, flags),
            folder=opened.run or _folder_of_no_run(opened.name),
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
        return DecodedLatents.real_heading if is_decoded else SampleSpace.real_heading

    def to_pixels(self, samples: torch.Tensor) -> torch.Tensor:
        """Samples of the model (..., C, H, W) -> pictures (..., 1 or 3, H', W'), on the CPU.

        Raises:
            ConfigError: the decoder of the latents is not available, is another one, or runs code (`missing_decoder`).
        """
        return self.open_decoder()(samples)

    def open_decoder(self) -> ToPixels:
        """`to_pixels` for many batches: it opens the decoder once. Call it before slow work that ends in pictures."""
        if not self.is_latent:
            return lambda samples: samples
        if self.missing_decoder is not None:
            raise ConfigError(self.missing_decoder)
        decoder = open_decoder(self.config.autoencoder, channels=self.sample_shape[0], device=self.device)
        at_once = self.config.metrics.sample_batch_size
        return partial(decode_with, decoder, sample_dims=len(self.sample_shape), at_once=at_once)

    def open_images(self, split: Split) -> ImageDataset:
        """The images of the run.

        Raises:
            ConfigError: they are not there, or have other classes or another latent space than those of the training.
        """
        config = self.config
        places: dict[str, Any] = {"input_channels": dataset_channels(config), "cache_folder": cache_folder(config)}
        dataset = build_dataset(config.dataset, split=split, **places)
        if dataset.index is not None:
            complete_from_index(config.autoencoder, dataset.index)
        are_named = self.class_names != [str(label) for label in range(self.num_classes)]
        if self.num_classes and are_named and dataset.class_names != self.class_names:
            found, trained = some(dataset.class_names), some(self.class_names)
            right = f"has the classes {found}; must have those of the training, {trained}"
            raise option_error("dataset.root_dir", config.dataset.root_dir, right)
        return dataset

    def sample(
        self,
        *,
        classes: int | str | Iterable[int | str] | None = None,
        prompts: str | Iterable[str] | None = None,
        samples_per_class: int = 1,
        num_samples: int | None = None,
        seed: int = 0,
        batch_size: int = 64,
        **sampling: Unpack[SamplingOptions],
    ) -> torch.Tensor:
        """Draw images: the same ones as torchditan generate with the same classes or prompts, seed and batch size.

        A sample depends on the seed, its class and its number within the class, not on the other classes. For prompts,
        the place in the list is the class.

        Args:
            classes: labels or names, each class at most once. None: the first `sampling.max_classes` ones.
            prompts: texts, for a model of captions. None: those of `sampling.prompts`.
            samples_per_class: images of each class or prompt.
            num_samples: images of an unconditional model; None: `samples_per_class`.
            seed: of the starting noise, an integer.
            batch_size: images at once. It determines the memory, and may change the last bits of float32.
            **sampling: options of [sampling] for this call; the others are those of the run.

        Returns:
            (N, C, H, W) uint8 on the CPU, from 0 to 255; C is 1 (grey) or 3 (RGB). Videos are (N, 3, F, H, W). Latents
            are decoded. The images of a class follow each other, in the order of `classes` or `prompts`. NaN becomes
            black; a line on stderr says how many images have values that are not finite.

        Raises:
            ConfigError: a class is unknown, the model has no classes or no prompts, or an option is wrong.
        """
        for name, count in (("samples_per_class", samples_per_class), ("num_samples", num_samples)):
            if count is not None and count < 1:
                raise option_error(name, count, "must be an integer of at least 1")
        changed = {f"sampling.{name}": value for name, value in sampling.items()}
        drawn = replace(self, config=override(self.config, _plain(changed), sections=("sampling",)))
        if num_samples is not None and (self.takes_prompts or self.num_classes):
            raise option_error("num_samples", num_samples, "this model is conditional; give samples_per_class")
        to_pixels = drawn.open_decoder()
        rows = drawn.rows(classes=classes, prompts=prompts)
        per_row = operator.index(num_samples or samples_per_class)
        samples = drawn.generate_rows(rows, samples_per_row=per_row, seed=operator.index(seed), batch_size=batch_size)
        images = to_pixels(samples).flatten(0, 1)  # (N, C, H, W)
        num_bad = int((~images.isfinite()).flatten(1).any(1).sum())
        if num_bad:
            print(f"warning: {num_bad} of {len(images)} images have values that are not finite", file=sys.stderr)
        return to_8_bit(images.nan_to_num(nan=-1.0)).byte()  # rounded as in the PNGs of grid_picture.py

    def rows(
        self,
        *,
        classes: int | str | Iterable[int | str] | None = None,
        prompts: str | Iterable[str] | None = None,
    ) -> SampleRows:
        """The rows to draw: these classes (labels or names) or prompts, or else those that the run's [sampling] names.

        Raises:
            ConfigError: a class is unknown, the model has no classes or no prompts, or its text encoders are missing.
        """
        sampling = self.config.sampling
        if self.takes_prompts:
            if classes is not None:
                raise option_error("classes", classes, "this run was trained on captions; give prompts")
            texts = [prompts] if isinstance(prompts, str) else list(prompts or sampling.prompts)
            if not texts:
                raise option_error("prompts", None, "must be given: this run's configuration has no sampling.prompts")
            return self.encode_prompts(texts)
        if prompts:
            right = "classes; give classes" if self.num_classes else "neither captions nor classes; give num_samples"
            raise option_error("prompts", prompts, f"this run was trained on {right}")
        if classes is None:
            return SampleRows.first_classes(sampling.max_classes, class_names=self.class_names)
        if not self.num_classes:
            raise option_error("classes", classes, "this run was trained without classes; leave it out")
        labels = self.labels_of(classes)
        if len(set(labels)) < len(labels):
            raise option_error("classes", classes, "must list each class once; samples_per_class draws several of each")
        return SampleRows.of_classes(labels, class_names=self.class_names)

    def labels_of(self, classes: int | str | Iterable[int | str]) -> list[int]:
        """Labels of these classes, given as labels or names; a list, or one of them.

        Raises:
            ConfigError: the run has no such class.
        """
        names = f" ({some(self.class_names, most=_MOST_NAMES)})" if self.class_names else ""
        right = f"must be names{names}, or integers from 0 to {self.num_classes - 1}"
        # Scalars of numpy and torch are integers too, and have an __iter__ that fails.
        is_one = isinstance(classes, str) or not isinstance(classes, Iterable) or getattr(classes, "ndim", 1) == 0
        given = [cast("int | str", classes)] if is_one else list(cast("Iterable[int | str]", classes))
        labels = []
        for each in given:
            if not isinstance(each, str):
                labels.append(operator.index(each))
            elif each in self.class_names:
                labels.append(self.class_names.index(each))
            else:
                hint = did_you_mean(each, self.class_names) or f"; {right}"
                raise option_error("classes", each, f"this run has no class {each}{hint}")
        if not labels or not all(0 <= label < self.num_classes for label in labels):
            raise option_error("classes", labels, right)
        return labels

    def drawing(self, rows: SampleRows, order: torch.Tensor, *, seed: int) -> Drawing:
        """Samples of these rows, with the run's `[sampling]` options."""
        model = [self.run_id, self.config.model.path, self.device.type, str(self.dtype)]
        return Drawing(rows, order, self.config.sampling, seed, model=model, step=self.step, weights=self.weights)

    def generate_rows(self, rows: SampleRows, *, samples_per_row: int, seed: int, batch_size: int) -> torch.Tensor:
        """Draw a grid: (rows, samples_per_row, *sample_shape), pixels or latents."""
        drawing = self.drawing(rows, rows.each(samples_per_row), seed=seed)
        return self.sampler.draw_all(self.model, drawing, batch_size=batch_size).unflatten(0, (-1, samples_per_row))

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.spec, self.objective, self.device)

    def turn_off_adapter(self) -> None:
        """Restore the published model without the LoRA.

        Raises:
            ConfigError: this run trained no LoRA.
        """
        if self.spec.turn_off_adapter is None:
            raise option_error("--without_lora", True, "this run trained all weights; must be --original")
        self.spec.turn_off_adapter(self.model)

    def check_original(self) -> None:
        """Refuse a run without original weights, before sampling.

        Raises:
            ConfigError: it started from random weights, or its initial weights no longer exist.
        """
        if self._initial_weights is not None:
            check_address(self._initial_weights)
        elif self.spec.restore_published is None:
            raise option_error("--original", True, "this run started from random weights; leave it out")

    def restore_original(self) -> str:
        """Restore, in place, the model that the run started from: without its LoRA, or with its initial weights.

        Returns:
            Description of these weights, for the log.

        Raises:
            ConfigError: the weights no longer exist.
        """
        if self._initial_weights is not None:
            cast(Any, self.model).init_weights(self.config.training.seed)  # for weights that the file lacks
            return load_initial_weights(self.model, self._initial_weights, config=self.config)
        assert self.spec.restore_published is not None
        self.spec.restore_published(self.model, self.config.training.seed)
        return f"weights of {self.config.model.path}"

    @property
    def _initial_weights(self) -> str | None:
        """Address of the whole weights that the run started from, instead of published ones or random numbers."""
        return self.config.checkpoint.initial_load_path if self.spec.turn_off_adapter is None else None

    @property
    def objective(self) -> Objective:
        """The training objective, which also samples."""
        return build_objective(self.config.diffusion, self.spec)

    @property
    def takes_prompts(self) -> bool:
        """Whether the model is conditioned on captions."""
        return self.spec.takes_prompts

    def encode_prompts(self, prompts: Sequence[str]) -> SampleRows:
        """A row for each text, encoded by the run's text encoders; an empty caption gives the null condition.

        Raises:
            ConfigError: the text encoders are not available.
        """
        from torchditan.extras.captions.dataset import rows_of_prompts

        return rows_of_prompts(self.spec, self.config, prompts)


def load(
    run: str | os.PathLike[str],
    *,
    step: int | None = None,
    weights: Kind | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
) -> TrainedModel:
    """Load a trained run, to draw images: `load("outputs/run").sample(classes=[3, 5], seed=0)`.

    The run's folder is enough, wherever you moved it; the training data is not needed. A published model that the run
    names by its path must still be there, and for pictures its autoencoder, which is opened when it is used. If you
    moved them too, give their new paths in `options`.

    Args:
        run: the run directory, one of its checkpoints (`outputs/run/checkpoint/step-00000600`), a file that
            `torchditan export` wrote, or a shared model: a folder of `torchditan share`, `hub:owner/name` (also with
            `@revision`), or the name of one that ships with the package.
        step: step of the checkpoint; None takes the newest complete one.
        weights: averaged or raw; None takes the averaged ones if the run kept them.
        device: where to put the model; None takes the GPU if there is one, else the CPU.
        dtype: of the weights; None takes float32, and bfloat16 for a published model trained in half precision.
        options: replace the run's own, such as `{"autoencoder.path": "/data/vae", "sampling.num_steps": 25}`. These
            can be replaced: sampling.*, autoencoder.*, text_encoder.*, cache.folder, dataset.root_dir, model.path.

    Raises:
        ConfigError: a ValueError, in one line. The run, checkpoint or weights do not exist or are damaged; an option is
            unknown or wrong; a published model is missing.
    """
    return TrainedModel.open(run, step=step, weights=weights, device=device, dtype=dtype, flags=_plain(options or {}))


def stored_spec(config: Config) -> ModelSpec:
    """The model spec of a complete configuration, as runs store it."""
    size, channels, num_classes = config.model.sample_size, config.model.input_channels, config.dataset.num_classes
    assert size is not None and channels is not None and num_classes is not None, "runs store resolved configs"
    sample_shape = (channels, *size)
    return model_spec_of(config, sample_shape=sample_shape, num_classes=num_classes)


def _folder_of_no_run(name: str) -> Path:
    """`outputs/NAME`, or `outputs/NAME-weights` if that is a run or a shared folder."""
    folder = OUTPUTS / name
    return folder.with_name(f"{name}-weights") if (folder / "config.json").exists() else folder


def with_flags(stored: Config, flags: Sequence[str] | Mapping[str, Any]) -> Config:
    """The configuration of a run with these options. The autoencoder of a published pipeline moves with its model."""
    config = override(stored, flags, sections=_REPLACEABLE) if flags else stored
    if config.autoencoder.name is None and config.autoencoder.path is not None:
        right = "this run was trained on pixels, so there is nothing to decode; leave it out"
        raise option_error("autoencoder.path", config.autoencoder.path, right)
    if stored.autoencoder.path == config.autoencoder.path == stored.model.path is not None:
        config = config.replace({"autoencoder.path": config.model.path})
    return config


def _why_not_decoded(config: Config, flags: Sequence[str] | Mapping[str, Any]) -> str | None:
    section = config.autoencoder
    given = {flag.removeprefix("--").partition("=")[0] for flag in flags}
    is_named = "autoencoder.path" in given or ("autoencoder.name" in given and section.path is None)
    return str(name_it(section)) if section.name is not None and runs_code(section.name) and not is_named else None


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as a TOML file has them: paths as texts, tuples as lists."""
    plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in values.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


def _device(given: torch.device | str | None) -> torch.device:
    """The device of this name. Raises ConfigError if it needs a GPU that this machine does not have."""
    if given is None:
        return Rank(0, 0, 1).device
    device = torch.device(given)
    if device.type == "cuda" and (device.index or 0) >= (num_gpus := torch.cuda.device_count()):
        raise option_error("device", str(given), f"this machine has {num_gpus} CUDA devices")
    return device
