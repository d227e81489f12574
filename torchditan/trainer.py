# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The trainer: construction in readable order, a loop of about 50 lines, and a step that reads like the paper.

Notable:
- a step is the same code on a laptop and on a node: every mode uses one `parallelize`;
- inside a step the host waits only for the verdict of the previous one, or of this one with an optimizer that cannot
  skip on the device (divergence.py); it reads numbers at log steps;
- supervision/, periodic_tasks.py and checkpoint/run_checkpoints.py contain everything outside the step.
"""

from __future__ import annotations

import gc
import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from torchditan import announcements
from torchditan.checkpoint.manager import CheckpointManager
from torchditan.checkpoint.run_checkpoints import Rollback, RunCheckpoints, StopPoint
from torchditan.checkpoint.run_state import ModelState, OptimizerState, RunState
from torchditan.config.loader import to_dict
from torchditan.data_stream.datasets import Batch, GroupedDataset, SequentialDataset
from torchditan.data_stream.loader import TrainingStream
from torchditan.data_stream.workers import awaited_worker, end_loader_workers
from torchditan.diffusion.objectives import split
from torchditan.distributed.parallelize import parallelize
from torchditan.distributed.process_group import (
    forget_process_groups,
    from_rank_0,
    init_process_group,
    mean_over_ranks,
    raise_on_all_ranks,
)
from torchditan.errors import ConfigError, option_error
from torchditan.job.check_files import check_files, compare_files, record_files
from torchditan.job.prepare import Job
from torchditan.job.targets import describe_targets
from torchditan.models.flops import count_model_flops
from torchditan.models.peak_flops import peak_flops
from torchditan.optim.divergence import DivergenceError, DivergenceGuard, LossSpikes
from torchditan.optim.ema import EMA
from torchditan.optim.optimizers import build_optimizer, clip_grad_norm, optimizer_flops
from torchditan.optim.schedules import build_schedule
from torchditan.periodic_tasks import PeriodicTasks, StepResult
from torchditan.randomness import Randomness
from torchditan.registry import job_part
from torchditan.run.metrics import MetricsLogger
from torchditan.supervision.exit_status import Interrupted
from torchditan.supervision.preemption import StopRequest
from torchditan.supervision.rank_status import write_rank_status
from torchditan.supervision.supervision import Supervision

if TYPE_CHECKING:
    from torchditan.data_stream.streamed import SequentialStream
    from torchditan.optim.loss_scaling import LossScaler

_SHARED_WITHIN_S = 60.0
"""A file server may show a new file to other machines only after its attribute cache expires."""


class Trainer:
    """Trains one model on one dataset, from the newest checkpoint in its run directory: `Trainer(job).train()`.

    The constructor locks the run directory, opens the process group and builds the model, optimizer, data and metrics.
    Every rank calls it. status.json always records how the run ended.

    Args:
        job: settings, data and plan.

    Raises:
        ConfigError: weights or checkpoints cannot be read, or belong to another model.
    """

    def __init__(self, job: Job) -> None:
        compare_files(job)
        job.run_directory.open(
            to_dict(job.config),
            trajectory=job.trajectory,
            class_names=job.dataset.class_names,
            device=str(job.device),
            world_size=job.rank.world_size,
        )
        self.job = job
        self.config = job.config
        self.rank = job.rank
        self.device = job.device
        self.plan = job.plan
        self.space = job.space
        self.objective = job.objective
        self.targets = job.targets
        self.stop_request = StopRequest()
        self.supervision = Supervision(job.rank, job.run_directory)
        self.progress = self.supervision.progress
        # Until the very end: if a rank fails, torchrun sends SIGTERM to the others, which must not interrupt them while
        # they write down the reason.
        self.resources = ExitStack()
        self.resources.callback(torch.set_float32_matmul_precision, "highest")  # for what the process does after it
        self.resources.enter_context(self.stop_request)
        self.resources.callback(self.supervision.close)
        self.resources.callback(end_loader_workers)
        self.stop_request.record = self.supervision.record_stop
        with self.recording_failures():
            if self.rank.rank == 0:
                job.run_directory.write_status("running")
            self.connect()
            self.build()

    @contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Record how the run ends if the body raises, and release what the trainer holds."""
        try:
            yield
        except Interrupted as stop:
            self.end("interrupted", str(stop), exit_code=75)
            self.resources.close()
            raise
        except BaseException as error:
            if isinstance(error, (Exception, KeyboardInterrupt)):
                self.supervision.record_failure(error)
            self.resources.close()
            if self.supervision.rank.world_size == 1 and dist.is_initialized():  # a notebook may train again
                with suppress(RuntimeError):  # of NCCL, if the device has failed
                    dist.destroy_process_group()
            raise

    def connect(self) -> None:
        """Prepare torch, connect the ranks and start to watch them."""
        training, comm = self.config.training, self.config.comm
        torch.manual_seed(training.seed)  # our code draws nothing from torch's global generators
        if training.deterministic:  # `prepare` has set up cuBLAS
            torch.use_deterministic_algorithms(True)
            # In deterministic mode torch fills every tensor of torch.empty with NaN, one kernel each. Our code never
            # reads memory before it writes it.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(training.float32_matmul_precision)
        if self.rank.world_size > 1:
            from torchditan.supervision.watchdog import record_collectives

            record_collectives(self.job.run_directory.path / "flight_recorder")
        init_process_group(self.rank, timeout_seconds=comm.init_timeout_seconds)
        self.supervision.connect(timeout_seconds=comm.init_timeout_seconds)
        if self.rank.world_size > 1:
            check_shared_folder(self.job)

    def build(self) -> None:
        """Build the parts in order, and continue from the newest checkpoint. All ranks call it."""
        job, config, supervision = self.job, self.config, self.supervision
        timeout_seconds = config.comm.init_timeout_seconds
        self.model, notes = self.build_model()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.schedule = build_schedule(config.lr_scheduler)
        self.guard = DivergenceGuard(self.optimizer)
        self.scaler: LossScaler | None = None
        if config.training.mixed_precision_param == "float16":
            from torchditan.optim.loss_scaling import LossScaler

            self.scaler = LossScaler(self.parameters[0].device)  # the host with CPU offload
        self.spikes: LossSpikes | None = None
        if config.training.on_nonfinite == "rollback":
            self.spikes = LossSpikes(self.device)
        self.ema: EMA | None = None
        if config.ema.enable:
            self.ema = EMA(
                self.model,
                decay=config.ema.decay,
                warmup=config.ema.warmup,
                width=config.ema.width,
                only_trained=config.lora.rank > 0,
            )
        self.stream = self.build_stream()

        manager = CheckpointManager(
            job.run_directory.path / config.checkpoint.folder,
            self.run_state(),
            config=config,
            trajectory=job.trajectory,
            timeout_seconds=timeout_seconds,
            warn=supervision.warn,
        )
        self.checkpoints = RunCheckpoints(manager, supervision=supervision, guard=self.guard)
        load_weights = None
        if (path := config.checkpoint.initial_load_path) is not None:
            load_weights = partial(job_part("checkpoint.initial_load_path"), self.model, path, config=config)
        with supervision.reporting("reading weights"):
            source = self.checkpoints.resume(job.run_directory, ema=self.ema, load_weights=load_weights)
        notes += [] if source is None else [f"started from the {source}"]
        self.stop_point = StopPoint(self.stop_request, config, self.checkpoints)
        self.rollback = Rollback(config, self.checkpoints, global_batch_size=self.plan.global_batch_size)
        flops_per_image = self.flops_per_image()
        notes += describe_targets(job.objective, flops_per_image=flops_per_image)
        self.logger = MetricsLogger(
            config.metrics,
            job.run_directory,
            self.progress,
            world_size=self.rank.world_size,
            device=self.device,
            flops_per_image=flops_per_image,
            peak_flops=peak_flops(torch.cuda.get_device_name()) if self.device.type == "cuda" else None,
            total_steps=config.training.steps,
            tokens_per_image=job.spec.num_tokens,
        )
        supervision.log_with(self.logger)
        self.tasks = PeriodicTasks(
            job,
            model=self.model,
            ema=self.ema,
            guard=self.guard,
            scaler=self.scaler,
            logger=self.logger,
            checkpoints=self.checkpoints,
            supervision=supervision,
        )
        for message in announcements.opening(job, self.tasks, notes=notes):
            self.logger.message(message)

    def build_model(self) -> tuple[Any, list[str]]:
        """The sharded model with its initial weights, in training mode, and messages about it."""
        job, config, training = self.job, self.config, self.config.training
        mesh = job.parallel_dims.build_mesh(self.device.type)
        self.resources.callback(forget_process_groups, mesh)
        with torch.device("meta"):
            model = job.spec.build()
        notes = []
        if (degree := job.parallel_dims.context) > 1:
            from torchditan.distributed.context_parallel import split_tokens_over_ranks

            split_tokens_over_ranks(model, degree=degree, timeout_seconds=config.comm.init_timeout_seconds)
        if config.float8.enable_float8_linear:
            from torchditan.distributed.float8 import convert_to_float8

            described = convert_to_float8(
                model=model,
                spec=job.spec,
                config=config.float8,
                batch_size=self.plan.batch_size,
                varied_shapes=isinstance(job.dataset, GroupedDataset) and len(job.dataset.groups()) > 1,
            )
            notes.append(described)
        sharded: Any = parallelize(  # has init_weights and set_requires_gradient_sync
            model,
            blocks=job.spec.blocks(model),
            mesh=mesh,
            activation_checkpoint=config.activation_checkpoint.mode,
            selective_ac_option=config.activation_checkpoint.selective_ac_option,
            checkpoint_fraction=config.activation_checkpoint.fraction,
            compile=config.compile if training.compile else None,
            param_dtype=getattr(torch, training.mixed_precision_param),
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            cpu_offload=training.enable_cpu_offload,
            reshard_after_forward=training.reshard_after_forward,
        )
        sharded.to_empty(device="cpu" if training.enable_cpu_offload else self.device)
        with self.supervision.reporting("loading the model"):
            sharded.init_weights(training.seed)
        for buffer in sharded.buffers():  # offloading moves only parameters
            buffer.data = buffer.data.to(self.device)
        return sharded.train(), notes

    def build_stream(self) -> TrainingStream | SequentialStream:
        """Batches of the training data, in the order given by the seed."""
        job, options = self.job, self.config.dataset
        shared: dict[str, Any] = {
            "plan": self.plan,
            "seed": self.config.training.seed,
            "num_classes": len(job.dataset.class_names),
            "horizontal_flip": options.horizontal_flip,
            "num_workers": options.num_workers,
            "pin_memory": self.device.type == "cuda",
            "sample_shape": self.space.sample_shape,
            "numbers": {**self.objective.numbers, **({"posterior": "normal"} if self.space.draws_posterior else {})},
        }
        if options.streaming:
            from torchditan.data_stream.streamed import SequentialStream

            return SequentialStream(cast(SequentialDataset, job.dataset), **shared)
        return TrainingStream(
            job.dataset,
            corrupt_images=options.corrupt_images,
            targets=self.targets.cached,
            **shared,
        )

    def flops_per_image(self) -> float:
        """FLOPs of training on one sample: loss, backward, and its part of the optimizer's matrix products (Muon)."""
        job = self.job
        if job.objective.computes_more:
            from torchditan.diffusion.loss_flops import training_flops

            flops = training_flops(self.config.diffusion, job.spec, warn=self.supervision.warn)
        else:
            flops = count_model_flops(job.spec).total
        weights = self.model.named_parameters()
        trained = [(name, tuple(weight.shape)) for name, weight in weights if weight.requires_grad]
        return flops + optimizer_flops(self.config.optimizer, trained) / self.plan.global_batch_size

    def run_state(self) -> RunState:
        """The parts of a checkpoint, each registered here once."""
        return RunState(
            self.progress,
            tensors={
                "model": ModelState(self.model, only_trained=self.config.lora.rank > 0),
                "optimizer": OptimizerState(self.model, self.optimizer),
                "ema": self.ema,
            },
            numbers=[self.spikes, self.scaler],
            per_rank={"loader": self.stream},
        )

    def train(self) -> None:
        """Train from the current step to the last one, and close the run.

        Raises:
            Interrupted: all ranks agreed to stop, and the state is saved.
        """
        with self.recording_failures():
            with attention_backend(self.job):
                self.train_steps()
            self.end("completed")
        self.resources.close()

    def train_steps(self) -> None:
        """The loop over steps, with what comes before and after it."""
        config, tasks = self.config, self.tasks
        first_step = self.progress.step + 1
        if self.progress.step < config.training.steps:
            tasks.unreadable.update(check_files(self.job, warn=self.supervision.warn))
        batches = self.open_stream()
        self.supervision.start_step = self.progress.step
        write_rank_status("running", step=self.progress.step, first_step_at=time.time())
        gc.disable()
        self.resources.callback(gc.enable)
        self.stop_point.begin()
        self.stop_point.stop_if_asked()
        if config.training.on_nonfinite == "rollback" and self.checkpoints.saved_step < 0:
            self.checkpoints.save()  # a rollback needs it
        if config.metrics.enable_sampling and config.sampling.at_start and self.progress.step == 0:
            tasks.sample()
        tasks.repeat_unfinished()
        if config.training.compile and self.progress.step < config.training.steps:
            self.logger.message("compiling in the first step, about a minute")
        with self.profiling() as profiler:
            self.logger.timer.restart()
            while self.progress.step < config.training.steps:
                try:
                    is_first = self.progress.step + 1 == first_step
                    what = "compiling" if config.training.compile else "first step"
                    with self.supervision.reporting(what) if is_first else nullcontext():
                        result = self.train_step(batches)
                    if is_first:
                        record_files(self.job)
                        self.set_timeout(config.comm.train_timeout_seconds)
                    tasks.run_periodic_tasks(result, is_first=is_first)
                    if profiler is not None:
                        profiler.step(self.progress.step)
                    self.stop_point.stop_if_asked()
                except DivergenceError as divergence:
                    batches = self.roll_back(divergence)
        self.guard.wait()
        # Rank 0 may need longer for its last tasks, such as uploads.
        self.set_timeout(config.comm.init_timeout_seconds)
        self.checkpoints.wait_for_last()
        self._announce_end()

    def profiling(self) -> AbstractContextManager[Any]:
        """Context manager around the loop: a `Profiler`, or None if `[profiling]` asks for nothing."""
        config = self.config.profiling
        if not (config.enable_profiling or config.enable_memory_snapshot):
            return nullcontext()
        from torchditan.run.profiling import Profiler

        return Profiler(
            config,
            self.job.run_directory,
            self.rank.rank,
            device=self.device,
            start_step=self.progress.step,
            excluded=self.profiling_excluded,
        )

    def train_step(self, batches: Iterator[tuple[Batch, Randomness]]) -> StepResult:
        """One optimizer step: batch, loss, backward, clip, update, average."""
        step = self.progress.step + 1
        lr = self.set_learning_rate(step)
        means: dict[str, torch.Tensor] = {}
        for micro_batch in range(self.plan.num_micro_batches):
            batch, randomness = self.next_batch(batches, step)
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(micro_batch == self.plan.num_micro_batches - 1)
            losses, numbers = split(self.objective.loss(self.model, batch, randomness))  # (B,)
            # Gradients are averaged over ranks, so each rank divides by its number of samples of the global batch.
            num_samples = self.plan.global_batch_size // self.plan.world_size
            loss = losses.sum() / num_samples
            (loss if self.scaler is None else loss * self.scaler.scale).backward()
            for name, values in numbers.items():
                mean = values.detach().sum() / num_samples
                means[name] = means[name] + mean if name in means else mean
        self.supervision.note(step, "gradient norm and optimizer")
        self.stop_point.begin()  # in the background; the loop reads the answer after the step
        if self.scaler is not None:
            self.scaler.unscale(self.parameters)
        grad_norm = clip_grad_norm(self.parameters, max_norm=self.config.training.max_norm)
        is_spike = None
        if self.spikes is not None:
            is_spike = self.spikes.judge(mean_over_ranks(means["loss"], self.rank.world_size))
        is_overflow = None if self.scaler is None else self.scaler.judge(grad_norm)
        with self.tasks.measuring(step):
            self.guard.step(step, grad_norm, is_spike, is_overflow)  # updates the weights, unless the step diverged
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(step)
        self.count_step()
        return StepResult(means, grad_norm, lr)

    def next_batch(self, batches: Iterator[tuple[Batch, Randomness]], step: int) -> tuple[Batch, Randomness]:
        """This rank's next micro-batch on the device, as model inputs, with its noise and timesteps."""
        self.supervision.note(step, "data loading")
        with self.logger.timer.data_loading(), self.stop_request.waiting_for_data(self.describe_wait):
            batch, randomness = next(batches)
        self.supervision.note(step, "forward and backward")
        skipped: Any = batch.pop("skipped")
        self.tasks.leave_out(skipped)
        is_pinned = self.device.type == "cuda"
        batch = {key: tensor.to(self.device, non_blocking=is_pinned) for key, tensor in batch.items()}
        randomness = randomness.to(self.device)
        with self.logger.timer.encoding() if self.space.is_encoding or self.targets.online else nullcontext():
            targets = self.targets.compute(batch)  # from the images, which `prepare` may encode
            return {**self.space.prepare(batch, randomness.get("posterior")), **targets}, randomness

    def describe_wait(self) -> str:
        """Who waits for which data, for messages."""
        return f"rank {self.rank.rank} waits for {awaited_worker()} on dataset {self.job.dataset.name}"

    def set_learning_rate(self, step: int) -> float:
        config = self.config
        lr = self.schedule.rate(step, steps=config.training.steps, peak=config.optimizer.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        return lr

    def count_step(self) -> None:
        size = self.plan.global_batch_size
        self.progress.step += 1
        self.progress.images_seen += size
        self.progress.position += size
        self.logger.show_step()

    def open_stream(self) -> Iterator[tuple[Batch, Randomness]]:
        """Batches from the position of the run.

        Errors in the data usually appear in the first batch of a rank. All ranks then stop before the first step and
        leave no files behind.
        """
        batches = self.stream.batches(self.progress.position)
        first: list[tuple[Batch, Randomness]] = []
        mistake: ConfigError | None = None
        try:
            with self.stop_request.waiting_for_data(self.describe_wait):
                first.append(next(batches))
        except ConfigError as error:
            mistake = error
        raise_on_all_ranks(mistake)
        return itertools.chain(first, batches)

    def roll_back(self, divergence: DivergenceError) -> Iterator[tuple[Batch, Randomness]]:
        """Return to the last checkpoint; the batches continue after those of the step that diverged.

        Raises:
            DivergenceError: the run does not roll back, or returned to the same checkpoint too often.
        """
        warning = self.rollback.to_last_checkpoint(divergence)
        self.logger.roll_back()
        self.supervision.warn(warning)
        return self.open_stream()

    @contextmanager
    def profiling_excluded(self) -> Iterator[None]:
        """Exclude the time of the body, on the slowest rank, from the training time."""
        self.supervision.note(self.progress.step, "profiling")
        with self.logger.timer.excluded("profiling"):
            yield
            dist.barrier()

    def set_timeout(self, seconds: int) -> None:
        """Set the timeout between ranks, except for the group that saves."""
        self.supervision.set_timeout(seconds, but=self.checkpoints.manager.group)

    def end(self, status: str, reason: str | None = None, *, exit_code: int = 0) -> None:
        """Write the status that all ranks share, and close all open resources."""
        self.supervision.record_end(status, reason, exit_code=exit_code, **self.tasks.memory())
        # A job that must stop has little time left.
        self.checkpoints.manager.close(patience_s=None if status == "completed" else 5)

    def _announce_end(self) -> None:
        has_saved = self.checkpoints.saved_step == self.progress.step
        folder = self.checkpoints.manager.folder / f"step-{self.progress.step:08d}"
        weights = folder if folder.exists() else folder.with_suffix(".safetensors")
        for message in announcements.closing(self.job, self.tasks, weights=weights if has_saved else None):
            self.logger.message(message)


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


def check_shared_folder(job: Job) -> None:
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
