# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Estimates the memory of a run without its device, bounds the time of its steps, and finds the settings that fit.

Notable:
- a plan needs only a configuration of train.py. It reads no data and builds nothing large;
- published models are planned like our own, including LoRA and quantised weights;
- model state is exact arithmetic; other memory is traced (trace.py) with eager blocks. Compiled ones need less;
- of the time only a lower bound is known (step_bound.py);
- traces and FLOPs of a model are cached, so that further plans of the same model take milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchditan.config.options import Config, Diffusion, dataset_channels, flatten
from torchditan.config.rules import validate
from torchditan.diffusion.loss_flops import count_loss_flops
from torchditan.diffusion.objectives import batch_multiple, build_objective
from torchditan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchditan.distributed.parallel_dims import ParallelDims
from torchditan.distributed.precision import automatic, precision_for
from torchditan.errors import option_error
from torchditan.extras.planner.batch_size import allowed_batch_sizes, largest_that_fits
from torchditan.extras.planner.devices import Device, device_named
from torchditan.extras.planner.encoder import Encoder, encoder_of
from torchditan.extras.planner.memory import Instant, Layout, model_parameters, model_state, timeline
from torchditan.extras.planner.step_bound import StepBound, step_bound
from torchditan.extras.planner.trace import Checkpointing, FrozenTrace, StepTrace, trace_blocks, trace_frozen
from torchditan.extras.published.resolutions import latent_channels
from torchditan.models import ModelSpec, model_spec_of
from torchditan.models.flops import count_model_flops
from torchditan.optim.optimizers import optimizer_flops
from torchditan.registry import FAMILIES, TEXT_ENCODERS, registered

GIB = 1024**3
USABLE_MEMORY = 0.92
"""Usable share of the device's memory. The rest is for the CUDA context, NCCL and fragmentation."""

SAMPLE_SHAPES: dict[str, tuple[int, int, int, int | None]] = {
    "captions": (3, 256, 256, None),
    "cifar10": (3, 32, 32, 10),
    "digits": (1, 8, 8, 10),
    "dummy": (4, 32, 32, 1000),
    "earth": (3, 32, 32, 7),
    "folder": (3, 256, 256, None),
    "imagenet": (3, 256, 256, 1000),
    "scenes": (3, 32, 32, 0),
    "webdataset": (3, 256, 256, None),
}
"""Channels, height, width and classes of pixels, for options that the configuration does not set. None: unknown."""

_DTYPES = {"float32": torch.float32, "float16": torch.bfloat16, "bfloat16": torch.bfloat16}
"""dtypes of the traces. float16 has the kernels and sizes of bfloat16."""
_MODEL_SECTIONS = ("model", "lora", "quantize", "text_encoder", "diffusion")
"""Sections that determine the traces of a model, in addition to shape and precision."""


@dataclass(frozen=True)
class Plan:
    """Expected memory of one run, per device, and a lower bound of its time."""

    config: Config = field(repr=False)
    """That of the run, with all values filled in."""
    device: Device | None
    """None if not given or a CPU; then the plan has no bound and no memory limit."""
    num_devices: int
    dims: ParallelDims
    model: TracedModel = field(repr=False)
    state: dict[str, int]
    """Bytes of the model's state on the fullest rank: parameters, gradients, optimizer, ema."""
    peak: Instant
    """The moment of highest memory."""
    activations: float
    """Bytes kept from forward to backward."""

    @property
    def mode(self) -> str:
        """DDP, FSDP, HSDP or one process."""
        if self.dims.world_size == 1:
            return "one process"
        if self.dims.num_shards == 1:
            return "DDP"
        return "FSDP" if self.dims.replicate == 1 else "HSDP"

    @property
    def checkpointing(self) -> str:
        """none, full, `selective op`, `selective 2` (every second block), or `fraction 0.5`."""
        checkpointing = self.config.activation_checkpoint
        option = {"selective": f" {checkpointing.selective_ac_option}", "fraction": f" {checkpointing.fraction:g}"}
        return f"{checkpointing.mode}{option.get(checkpointing.mode, '')}"

    @property
    def batch_size(self) -> int:
        """Images per device in one forward pass, or per group of devices that share their tokens."""
        assert isinstance(self.config.training.batch_size, int)
        return self.config.training.batch_size

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // (self.batch_size * self.dims.replicate * self.dims.shard)

    @property
    def global_batch_size(self) -> int:
        return self.config.training.global_batch_size or self.batch_size * self.dims.replicate * self.dims.shard

    @property
    def num_parameters(self) -> int:
        return sum(weight.local(1, 0) for weight in self.model.parameters.all)

    @property
    def num_trained_parameters(self) -> int:
        return sum(weight.local(1, 0) for weight in self.model.parameters.all if weight.is_trained)

    @property
    def parts(self) -> dict[str, float]:
        """Bytes on the device at the peak, by category. Their sum is the peak."""
        return self.peak.parts

    @property
    def peak_memory_gib(self) -> float:
        return self.peak.total / GIB

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the usable memory; None if the device is unknown."""
        return None if self.device is None else self.peak_memory_gib <= USABLE_MEMORY * self.device.memory_gib

    @property
    def model_flops(self) -> float:
        """FLOPs of a device for the model in a step: forward and backward, as in the MFU (models/flops.py)."""
        return self.model.flops_per_image * self.global_batch_size / self.num_devices

    @property
    def optimizer_flops(self) -> int:
        """FLOPs of the matrix products of an optimizer step on the rank with the most of them: Muon's."""
        shapes = self.model.parameters.trained_shapes
        return optimizer_flops(self.config.optimizer, shapes, num_ranks=self.num_devices)

    @functools.cached_property
    def bound(self) -> StepBound | None:
        """Lower bound of the time of a step; None if the device is unknown.

        Counts the FLOPs of the model on first use, which takes seconds for 7B.
        """
        if self.device is None:
            return None
        return step_bound(
            self.config,
            self.device,
            model_flops=self.model_flops,
            optimizer_flops=self.optimizer_flops,
            state_bytes=sum(self.state.values()),
        )

    @property
    def min_step_time_s(self) -> float | None:
        """No step takes less; None if the device is unknown."""
        return None if self.bound is None else self.bound.seconds

    @property
    def min_seconds_per_image(self) -> float | None:
        """`min_step_time_s` over the images of a step, of all devices together."""
        return None if self.bound is None else self.bound.seconds / self.global_batch_size


def plan_run(config: Config, *, device: str | None, num_devices: int) -> Plan:
    """Plan a run of `config`. A batch size of "auto" is planned as the largest that fits.

    Args:
        config: configuration of train.py; it is not changed.
        device: a short name (a100-80gb) or the driver's name. "cpu" or None plans only memory.
        num_devices: ranks of the run.

    Raises:
        ConfigError: the device is unknown, the settings are inconsistent, or neither the configuration nor the dataset
            defines a required option.
    """
    known = None if device in (None, "cpu") else device_named(str(device))
    config = _with_precision(config, known)
    if config.training.batch_size == "auto":
        if known is None:
            right = "needs a device whose memory is known; name one, or give a number"
            raise option_error("training.batch_size", "auto", right)
        batch_size = max(batch_multiple(config.diffusion), largest_batch(config, known.name, num_devices))
        config = config.replace({"training.batch_size": batch_size})
    kernels = "cpu" if device == "cpu" else config.training.attention_backend
    return _plan(_resolve(config, num_devices), known, kernels, num_devices)


def largest_batch(config: Config, device: str, num_devices: int) -> int:
    """Largest `training.batch_size` that fits on the device and that the job can have; 0 if there is none.

    If `training.global_batch_size` is open, a step has one micro-batch.

    Raises:
        ConfigError: see `plan_run`.
    """
    known = device_named(device)
    config = _with_precision(config, known)
    total = config.training.global_batch_size
    resolved = _resolve(config.replace({"training.batch_size": batch_multiple(config.diffusion)}), num_devices)
    base = resolved.replace({"training.global_batch_size": total})
    kernels = config.training.attention_backend

    def fits(batch_size: int) -> bool:
        return bool(_plan(base.replace({"training.batch_size": batch_size}), known, kernels, num_devices).fits)

    sizes = allowed_batch_sizes(config, num_devices=num_devices)
    # One micro-batch first: several may need more memory, because unsharded gradients wait for the last.
    return largest_that_fits(fits, sizes, guess=total) or 0


def _with_precision(config: Config, device: Device | None) -> Config:
    """Replace each precision of "auto" by that of the device. Without one it is this machine's CPU."""
    precision = "bfloat16" if device is not None else precision_for(torch.device("cpu"))
    return config.replace(dict.fromkeys(automatic(config), precision))


def _resolve(config: Config, num_devices: int) -> Config:
    """A copy with all values filled in that the trainer would fill in."""
    from torchditan.distributed.process_group import Rank
    from torchditan.job.complete import complete_batches

    validate(config)
    if config.model.name in FAMILIES:
        config = _resolve_latents(config)
    name = config.dataset.dataset_name
    is_stored = config.autoencoder.is_given and not config.autoencoder.online
    channels, *size, num_classes = (None, None) if is_stored else SAMPLE_SHAPES.get(name, (None, None))
    config = config.fill_in({"dataset.image_size": size or None})
    if (encoder := _encoder_of(config)) is not None:
        channels = encoder.space.sample_shape[0]
    by_dataset = {
        "dataset.image_size": None,
        "model.input_channels": channels,
        "dataset.num_classes": num_classes if config.model.text is None else 0,
    }
    config = config.fill_in({**by_dataset, "model.text_blocks": _text_blocks(config)})
    values = flatten(config)
    for option in by_dataset:
        if values[option] is None:
            raise option_error(option, None, f"must be given: the planner does not open the dataset {name}")
    dims = ParallelDims.resolve(config.training, world_size=num_devices)
    return complete_batches(config, dims.data_rank(Rank(rank=0, local_rank=0, world_size=num_devices)))


def _encoder_of(config: Config) -> Encoder | None:
    """What encodes at each step. None if nothing does, or if the size of its images is unknown."""
    size = config.dataset.image_size
    if not config.autoencoder.online or size is None:
        return None
    channels, *_ = SAMPLE_SHAPES.get(config.dataset.dataset_name, (3,))
    return encoder_of(config.autoencoder, image_shape=(dataset_channels(config) or channels, size[0], size[-1]))


def _text_blocks(config: Config) -> int:
    """What `model.text_blocks` becomes if it is left open. Only the default encoder is known without opening it."""
    encoder, is_own = config.text_encoder, config.model.name not in FAMILIES
    is_default = encoder.name == "wordllama" or (encoder.name == "auto" and encoder.path is None)
    if config.model.text is None or config.dataset.dataset_name == "dummy" or not (is_own and is_default):
        return 0
    blocks: int = registered(TEXT_ENCODERS, "wordllama").text_blocks
    return blocks


def _resolve_latents(config: Config) -> Config:
    """Fill in channels and classes for a published model. The image size of its captions dataset is in pixels.

    Weights that are not on this disk are not downloaded: the flavor defines their sizes.
    """
    family, dataset = registered(FAMILIES, config.model.name), config.dataset
    values: dict[str, Any] = {}
    for option, place in (("model.path", config.model.path), ("lora.assistant_path", config.lora.assistant_path)):
        if place is not None and not Path(place).expanduser().exists():
            values[option] = None
    if dataset.dataset_name == "captions" and dataset.image_size is not None:
        cell = family.downsampling_of(config.model.flavor)
        values["dataset.image_size"] = [side // cell for side in dataset.image_size]
        if dataset.num_frames is not None and family.takes_videos():
            values["dataset.num_frames"] = 1 + (dataset.num_frames - 1) // family.temporal_downsampling
    config = config.replace(values)
    return config.fill_in({"model.input_channels": latent_channels(config.model), "dataset.num_classes": 0})


def _plan(config: Config, device: Device | None, kernels: str, num_devices: int) -> Plan:
    """The plan of a resolved configuration."""
    training = config.training
    dims = ParallelDims.resolve(training, world_size=num_devices)
    assert isinstance(training.batch_size, int)
    at_once = training.batch_size * num_devices // dims.context
    num_micro_batches = (training.global_batch_size or at_once) // at_once
    model = TracedModel.of(config, kernels)
    layout = Layout(
        num_shards=dims.num_shards,
        num_replicas=dims.replicate,
        param_bytes=_DTYPES[training.mixed_precision_param].itemsize,
        reduce_bytes=_DTYPES[training.mixed_precision_reduce].itemsize,
        num_micro_batches=num_micro_batches,
        cpu_offload=training.enable_cpu_offload,
        reshard_after_forward=training.reshard_after_forward,
    )
    traces = model.traces(config)
    averaged: Literal["all", "trained"] = "trained" if config.lora.rank else "all"
    ema = averaged if config.ema.enable else "none"
    state = model_state(model.parameters, num_shards=dims.num_shards, ema=ema, optimizer=config.optimizer)
    instants = timeline(
        model.parameters,
        traces,
        layout,
        state=state,
        batch_size=training.batch_size,
        batch_bytes=model.batch_bytes(training.batch_size),
        workspace=0 if device is None else device.workspace_mib * 2**20,
        frozen_bytes=sum(network.num_bytes for network in model.frozen),
        frozen_peak=max((network.peak(training.batch_size) for network in model.frozen), default=0),
    )
    return Plan(
        config=config,
        device=device,
        num_devices=num_devices,
        dims=dims,
        model=model,
        state=state,
        peak=max(instants, key=lambda instant: instant.total),
        activations=sum(trace.forward.left(training.batch_size) for trace in traces),
    )


class TracedModel:
    """Data that all plans of one model share: its parameters, FLOPs and traces."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, kernels: str, diffusion: Diffusion, encoder: Encoder | None
    ) -> None:
        self.encoder = encoder
        self.dtype = dtype
        self.kernels = kernels
        self.diffusion = diffusion
        self.objective = build_objective(diffusion, spec)
        self.spec = spec.with_heads(self.objective.heads)
        self.parameters = model_parameters(self.spec)
        self._traces: dict[tuple[Checkpointing, int], list[StepTrace]] = {}

    @classmethod
    def of(cls, config: Config, kernels: str) -> TracedModel:
        size = config.dataset.image_size or [0]
        frames = [] if config.dataset.num_frames is None else [config.dataset.num_frames]
        sample_shape = (config.model.input_channels or 0, *frames, size[0], size[-1])
        sections = {name: dataclasses.asdict(getattr(config, name)) for name in _MODEL_SECTIONS}
        if (encoder := _encoder_of(config)) is not None:
            sample_shape = encoder.space.sample_shape
        dtype, num_classes = _DTYPES[config.training.mixed_precision_param], config.dataset.num_classes or 0
        # The text of the options serves as the key.
        return _traced_model(json.dumps(sections), sample_shape, num_classes, dtype, kernels, encoder)

    @functools.cached_property
    def flops_per_image(self) -> int:
        if self.objective.computes_more:
            return count_loss_flops(self.diffusion, self.spec).total
        return count_model_flops(self.spec).total

    def batch_bytes(self, batch_size: int) -> float:
        """Bytes of samples and noise in float32, and of the condition. Other inputs are negligible."""
        condition = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.spec.conditioning.tensors.values())
        condition += sum(
            math.prod(target.tensor.shape) * target.tensor.dtype.itemsize for target in self.objective.targets.values()
        )
        num_normal = sum(kind == "normal" for kind in self.objective.numbers.values())
        num_normal += self.encoder is not None and self.encoder.space.draws_posterior
        return batch_size * ((1 + num_normal) * 4 * math.prod(self.spec.sample_shape) + condition + 16)

    @functools.cached_property
    def frozen(self) -> list[FrozenTrace]:
        """The frozen networks that compute in each step. Those of targets are in bfloat16, or on a CPU in what suits
        this one. What encodes comes last, when the results of the others are in the batch and the images still too."""
        dtype = torch.bfloat16 if self.kernels != "cpu" else getattr(torch, precision_for(torch.device("cpu")))
        trace = functools.partial(trace_frozen, kernels=self.kernels)
        traces = []
        more = 0  # bytes of an image that are alive beside the plan's batch, whose sample is the latent
        if self.encoder is not None:
            latent = 4 * math.prod(self.spec.sample_shape)
            noise = latent * self.encoder.space.draws_posterior
            more = 4 * math.prod(self.encoder.image_shape) - latent
            traces.append(trace(self.encoder.network, example=self.encoder.example, beside=more - noise))
        for target in self.objective.targets.values():
            if not target.is_cached:
                result = math.prod(target.tensor.shape) * target.tensor.dtype.itemsize
                network = target.open(torch.device("meta"), dtype)
                traces.append(trace(network, example=target.example, beside=more - result))
        return traces

    def traces(self, config: Config) -> list[StepTrace]:
        """The trace of each block, with the checkpointing that apply_activation_checkpoint chooses for it."""
        checkpointing, num_blocks = config.activation_checkpoint, len(self.parameters.blocks)
        trace = functools.partial(self._trace, context=config.training.context_parallel_degree)
        if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
            return trace("op")
        blocks = nn.ModuleList(nn.Identity() for _ in range(num_blocks))
        apply_activation_checkpoint(
            blocks,
            mode=checkpointing.mode,
            selective_option=checkpointing.selective_ac_option,
            fraction=checkpointing.fraction,
        )
        kinds: list[Checkpointing] = ["full" if "forward" in vars(block) else "none" for block in blocks]
        return [trace(kind)[i] for i, kind in enumerate(kinds)]

    def _trace(self, kind: Checkpointing, *, context: int) -> list[StepTrace]:
        """Traces of all blocks, with the same checkpointing for each."""
        key = kind, context
        if key not in self._traces:
            self._traces[key] = trace_blocks(
                self.spec,
                dtype=self.dtype,
                checkpointing=kind,
                kernels=self.kernels,
                diffusion=self.diffusion,
                context=context,
            )
        return self._traces[key]


@functools.lru_cache(maxsize=64)
def _traced_model(
    sections: str,
    sample_shape: tuple[int, ...],
    num_classes: int,
    dtype: torch.dtype,
    kernels: str,
    encoder: Encoder | None,
) -> TracedModel:
    from torchditan.config.loader import from_dict

    config = from_dict(json.loads(sections))
    spec = model_spec_of(config, sample_shape=sample_shape, num_classes=num_classes)
    return TracedModel(spec, dtype, kernels, config.diffusion, encoder)
