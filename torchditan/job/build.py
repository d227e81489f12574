# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Builders of the Trainer's parts. The Trainer's constructor calls them in order."""

from __future__ import annotations

import pkgutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchditan.config.errors import option_error
from torchditan.config.options import Config
from torchditan.data_stream.datasets import GroupedDataset, SequentialDataset
from torchditan.data_stream.loader import TrainingStream
from torchditan.distributed.parallelize import parallelize
from torchditan.distributed.process_group import from_rank_0, init_process_group, raise_on_all_ranks
from torchditan.job.prepare import Job
from torchditan.models.flops import count_model_flops
from torchditan.optim.divergence import LossSpikes
from torchditan.optim.ema import EMA
from torchditan.optim.optimizers import optimizer_flops
from torchditan.registry import LOAD_INITIAL_WEIGHTS
from torchditan.run.metrics import MetricsLogger
from torchditan.run.training_progress import Progress
from torchditan.supervision.supervision import Supervision

if TYPE_CHECKING:
    from torchditan.data_stream.streamed import SequentialStream
    from torchditan.optim.loss_scaling import LossScaler

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHARED_WITHIN_S = 60.0
"""A file server may show a new file to other machines only after its attribute cache expires."""


def open_process_group(job: Job, supervision: Supervision) -> None:
    """Connect the ranks and start to monitor them."""
    config = job.config
    set_determinism(config.training.seed, deterministic=config.training.deterministic)
    torch.set_float32_matmul_precision(config.training.float32_matmul_precision)
    if job.rank.world_size > 1:
        from torchditan.supervision.watchdog import record_collectives

        record_collectives(job.run_directory.folder("flight_recorder"), buffer_size=config.comm.trace_buf_size)
    init_process_group(job.rank, timeout_seconds=config.comm.init_timeout_seconds)
    supervision.connect(timeout_seconds=config.comm.init_timeout_seconds)
    if job.rank.world_size > 1:
        _check_shared_folder(job)


def _check_shared_folder(job: Job) -> None:
    """Refuse a dump folder that is not the same folder for all ranks, where checkpoints would lack files."""
    opened = from_rank_0(job.run_directory.start_mark())
    deadline, error = time.monotonic() + _SHARED_WITHIN_S, None
    while error is None and job.run_directory.start_mark() != opened:
        if time.monotonic() > deadline:
            place = f"rank {job.rank.rank} on {socket.gethostname()} does not see the run that rank 0 opened there"
            right = f"{place}; must be shared by all machines"
            error = option_error("job.dump_folder", job.config.job.dump_folder, right)
        time.sleep(0.1)
    raise_on_all_ranks(error)


def attention_backend(job: Job) -> AbstractContextManager[None]:
    """Context manager of training, with the kernels of `training.attention_backend`.

    The default of a GPU leaves out cuDNN, which torch prefers on an H100: its backward pass gives NaN for some shapes
    (pytorch issue 196678, and 24 tokens without a mask). On a CPU only math differs from torch's choice.
    """
    backend = job.config.training.attention_backend
    if job.device.type != "cuda" and backend != "math":
        return nullcontext()
    from torchditan.distributed.attention_backend import preferring

    return preferring("flash" if backend == "default" else backend)


def build_model(job: Job, supervision: Supervision, mesh: DeviceMesh) -> tuple[Any, str | None]:
    """Return the sharded model with its weights, in training mode, and which layers compute in float8."""
    config, spec = job.config, job.spec
    with torch.device("meta"):
        model = spec.build()
    if (degree := job.parallel_dims.context) > 1:
        from torchditan.distributed.context_parallel import split_tokens_over_ranks

        split_tokens_over_ranks(model, degree=degree, timeout_seconds=config.comm.init_timeout_seconds)
    float8_layers = _convert_to_float8(job, model) if config.float8.enable_float8_linear else None
    sharded: Any = parallelize(  # has init_weights and set_requires_gradient_sync
        model,
        blocks=spec.blocks(model),
        mesh=mesh,
        activation_checkpoint=config.activation_checkpoint.mode,
        selective_ac_option=config.activation_checkpoint.selective_ac_option,
        checkpoint_fraction=config.activation_checkpoint.fraction,
        compile=config.compile if config.training.compile else None,
        param_dtype=DTYPES[config.training.mixed_precision_param],
        reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
        cpu_offload=config.training.enable_cpu_offload,
        reshard_after_forward=config.training.reshard_after_forward,
    )
    sharded.to_empty(device="cpu" if config.training.enable_cpu_offload else job.device)
    with supervision.reporting("loading the model"):
        sharded.init_weights(config.training.seed)
    for buffer in sharded.buffers():  # offloading moves only parameters
        buffer.data = buffer.data.to(job.device)
    return sharded.train(), float8_layers


def _convert_to_float8(job: Job, model: nn.Module) -> str:
    from torchditan.distributed.float8 import convert_to_float8

    return convert_to_float8(
        model=model,
        spec=job.spec,
        config=job.config.float8,
        batch_size=job.plan.batch_size,
        varied_shapes=isinstance(job.dataset, GroupedDataset) and len(job.dataset.groups()) > 1,
    )


def build_loss_scaler(config: Config, parameters: Sequence[nn.Parameter]) -> LossScaler | None:
    """The scaler of a float16 run, on the device of the gradients (the host with CPU offload)."""
    if config.training.mixed_precision_param != "float16":
        return None
    from torchditan.optim.loss_scaling import LossScaler

    return LossScaler(parameters[0].device)


def build_loss_spikes(config: Config, device: torch.device) -> LossSpikes | None:
    """The detector of loss spikes, for a run with rollback."""
    factor = config.training.loss_spike_factor
    return LossSpikes(factor, device) if config.training.on_nonfinite == "rollback" and factor else None


def build_ema(config: Config, model: nn.Module) -> EMA | None:
    options = config.ema
    if not options.enable:
        return None
    only_trained = config.lora.rank > 0
    return EMA(model, decay=options.decay, warmup=options.warmup, width=options.width, only_trained=only_trained)


def build_stream(job: Job) -> TrainingStream | SequentialStream:
    """Batches of the training data, in the order given by the seed."""
    options = job.config.dataset
    shared: dict[str, Any] = {
        "plan": job.plan,
        "seed": job.config.training.seed,
        "num_classes": len(job.dataset.class_names),
        "horizontal_flip": options.horizontal_flip,
        "num_workers": options.num_workers,
        "pin_memory": job.device.type == "cuda",
        "sample_shape": job.space.sample_shape,
        "numbers": {**job.objective.numbers, **({"posterior": "normal"} if job.space.draws_posterior else {})},
    }
    if options.streaming:
        from torchditan.data_stream.streamed import SequentialStream

        return SequentialStream(cast(SequentialDataset, job.dataset), checks_first_item=True, **shared)
    return TrainingStream(
        job.dataset,
        corrupt_images=options.corrupt_images,
        prefetch_factor=options.prefetch_factor,
        **shared,
    )


def initial_weights_loader(job: Job, model: nn.Module) -> Callable[[], str] | None:
    """A function that loads `checkpoint.initial_load_path` and returns its description; None without the option."""
    path = job.config.checkpoint.initial_load_path
    if path is None:
        return None
    return partial(pkgutil.resolve_name(LOAD_INITIAL_WEIGHTS), model, path, config=job.config)


def build_logger(job: Job, model: nn.Module, progress: Progress, supervision: Supervision) -> MetricsLogger:
    """The logger of a run at position `progress`. FLOPs of the optimizer (Muon's) count as those of training."""
    trained = [(name, tuple(weight.shape)) for name, weight in model.named_parameters() if weight.requires_grad]
    optimizer = optimizer_flops(job.config.optimizer, trained) / job.plan.global_batch_size
    return MetricsLogger(
        job.config.metrics,
        job.run_directory,
        world_size=job.rank.world_size,
        device=job.device,
        flops_per_image=_count_flops(job, supervision.warn) + optimizer,
        peak_flops=_peak_flops(job.device),
        total_steps=job.config.training.steps,
        tokens_per_image=job.spec.num_tokens,
        start_step=progress.step,
        images_seen=progress.images_seen,
        elapsed_s=progress.elapsed_s,
    )


def _count_flops(job: Job, warn: Callable[[str], None]) -> int:
    """FLOPs of the loss of one sample, forward and backward."""
    if not job.objective.computes_more:
        return count_model_flops(job.spec).total
    from torchditan.diffusion.loss_flops import training_flops

    return training_flops(job.config.diffusion, job.spec, warn=warn)


def _peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    from torchditan.models.peak_flops import peak_flops

    return peak_flops(torch.cuda.get_device_name())


def set_determinism(seed: int, *, deterministic: bool) -> None:
    """Seed torch's global generators, which our code does not use, and select deterministic kernels.

    cuBLAS needs its setting earlier: see `prepare`.
    """
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        # In deterministic mode torch fills every tensor of torch.empty with NaN, one kernel each. Our code never reads
        # memory before it writes it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
