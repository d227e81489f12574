# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The trainer: construction in readable order, a loop of about 50 lines, and a step that reads like the paper.

Notable:
- a step is the same code on a laptop and on a node: every mode uses one `parallelize`;
- inside a step the host waits only for the verdict of the previous one (divergence.py); it reads numbers at log steps;
- supervision/, periodic_tasks.py and checkpoint/run_checkpoints.py contain everything outside the step.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from torchditan.checkpoint.manager import CheckpointManager
from torchditan.checkpoint.run_checkpoints import Rollback, RunCheckpoints, StopPoint
from torchditan.checkpoint.run_state import ModelState, OptimizerState, RunState
from torchditan.config.errors import ConfigError
from torchditan.config.loader import to_dict
from torchditan.data_stream.datasets import Batch
from torchditan.data_stream.workers import awaited_worker
from torchditan.diffusion.objectives import split
from torchditan.distributed.process_group import forget_process_groups, raise_on_all_ranks
from torchditan.job import announcements
from torchditan.job.build import (
    attention_backend,
    build_ema,
    build_logger,
    build_loss_scaler,
    build_loss_spikes,
    build_model,
    build_stream,
    initial_weights_loader,
    open_process_group,
)
from torchditan.job.check_files import check_files, compare_files, record_files
from torchditan.job.prepare import Job
from torchditan.optim.divergence import DivergenceError, DivergenceGuard
from torchditan.optim.optimizers import build_optimizer, clip_grad_norm
from torchditan.optim.schedules import build_schedule
from torchditan.periodic_tasks import PeriodicTasks, StepResult, mean_over_ranks
from torchditan.randomness import Randomness
from torchditan.run.profiling import Profiler, profiling
from torchditan.run.rank_status import write_rank_status
from torchditan.supervision.exit_status import Interrupted
from torchditan.supervision.preemption import StopAgreement, StopRequest
from torchditan.supervision.supervision import Supervision


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
        self.stop_request = StopRequest()
        self.supervision = Supervision(job.rank, job.run_directory)
        # Until the very end: if a rank fails, torchrun sends SIGTERM to the others, which must not interrupt them while
        # they write down the reason.
        self.resources = ExitStack()
        self.resources.callback(torch.set_float32_matmul_precision, "highest")  # for what the process does after it
        self.resources.enter_context(self.stop_request)
        self.resources.callback(self.supervision.close)
        self.stop_request.record = self.supervision.record_stop
        with self.recording_failures():
            job.run_directory.write_status("running", step=0)
            self.build(job)

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

    def build(self, job: Job) -> None:
        """Build the parts in order, on all ranks."""
        config = job.config
        self.job = job
        self.config = config
        self.rank = job.rank
        self.device = job.device
        self.plan = job.plan
        self.space = job.space
        supervision, stop_request = self.supervision, self.stop_request
        self.progress = supervision.progress
        open_process_group(job, supervision)

        mesh = job.parallel_dims.build_mesh(self.device.type)
        self.resources.callback(forget_process_groups, mesh)
        self.model, float8_layers = build_model(job, supervision, mesh)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.schedule = build_schedule(config.lr_scheduler)
        self.guard = DivergenceGuard(self.optimizer)
        self.scaler = build_loss_scaler(config, self.parameters)
        self.spikes = build_loss_spikes(config, self.device)
        self.objective = job.objective
        self.ema = build_ema(config, self.model)
        self.stream = build_stream(job)

        manager = CheckpointManager(
            job.run_directory.folder(config.checkpoint.folder),
            self.run_state(),
            config=config,
            of_job=job.trajectory,
            timeout_seconds=config.comm.init_timeout_seconds,
            warn=supervision.warn,
        )
        self.checkpoints = RunCheckpoints(manager, supervision=supervision, guard=self.guard)
        with supervision.reporting("reading weights"):
            initial_weights = self.checkpoints.resume(
                job.run_directory, ema=self.ema, load_weights=initial_weights_loader(job, self.model)
            )
        agreement = StopAgreement(
            stop_request, world_size=self.rank.world_size, timeout_seconds=config.comm.init_timeout_seconds
        )
        self.stop_point = StopPoint(agreement, config, self.checkpoints, supervision)
        self.rollback = Rollback(
            config, global_batch_size=self.plan.global_batch_size, guard=self.guard, checkpoints=self.checkpoints
        )
        self.logger = build_logger(job, self.model, self.progress, supervision)
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
        for message in announcements.opening(
            job,
            self.model,
            self.progress,
            self.tasks.grids,
            float8_layers=float8_layers,
            initial_weights=initial_weights,
        ):
            self.logger.message(message)

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
            tasks.unreadable.update(check_files(self.job, self.supervision))
        batches = self.open_stream()
        self.supervision.start_step = self.progress.step
        write_rank_status("running", step=self.progress.step, first_step_at=time.time())
        gc.disable()
        self.stop_point.begin()
        self.stop_point.stop_if_asked()
        if config.training.on_nonfinite == "rollback" and self.checkpoints.saved_step < 0:
            self.checkpoints.save()  # a rollback needs it
        if config.metrics.enable_sampling and config.sampling.at_start and self.progress.step == 0:
            tasks.sample()
        tasks.repeat_unfinished()
        if config.training.compile and self.progress.step < config.training.steps:
            self.logger.message("compiling in the first step, about a minute")
        with profiling(
            config.profiling,
            self.job.run_directory,
            self.rank.rank,
            device=self.device,
            start_step=self.progress.step,
            excluded=self.profiling_excluded,
        ) as profiler:
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
                    profiler.step(self.progress.step)
                    self.stop_point.stop_if_asked()
                except DivergenceError as divergence:
                    batches = self.roll_back(divergence, profiler)
        self.guard.wait()
        # Rank 0 may need longer for its last tasks, such as uploads.
        self.set_timeout(config.comm.init_timeout_seconds)
        self.checkpoints.wait_for_last()
        self._announce_end()

    def train_step(self, batches: Iterator[tuple[Batch, Randomness]]) -> StepResult:
        """One optimizer step: batch, loss, backward, clip, update, average."""
        step = self.progress.step + 1
        lr = self.set_learning_rate(step)
        means: dict[str, torch.Tensor] = {}
        for micro_batch in range(self.plan.num_micro_batches):
            batch, randomness = self.next_batch(batches, step)
            if isinstance(self.model, FSDPModule):  # all but one process in float32
                self.model.set_requires_gradient_sync(micro_batch == self.plan.num_micro_batches - 1)
            losses, numbers = split(self.objective.loss(self.model, batch, randomness))  # (B,)
            # Gradients are averaged over ranks, so each rank computes the mean of its share.
            samples = self.plan.global_batch_size // self.plan.world_size
            share = losses.sum() / samples
            (share if self.scaler is None else share * self.scaler.scale).backward()
            for name, values in numbers.items():
                mean = share.detach() if values is losses else values.detach().sum() / samples
                means[name] = means[name] + mean if name in means else mean
        self.supervision.note(step, "gradient norm and optimizer")
        self.stop_point.begin()
        if self.scaler is not None:
            self.scaler.unscale(self.parameters)
        grad_norm = clip_grad_norm(self.parameters, max_norm=self.config.training.max_norm)
        loss = means["loss"]
        is_spike = None if self.spikes is None else self.spikes.judge(mean_over_ranks(loss, self.rank.world_size))
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
        with self.logger.timer.data_loading(), self.stop_request.waiting_for_data(self.describe_data):
            batch, randomness = next(batches)
        self.supervision.note(step, "forward and backward")
        skipped: Any = batch.pop("skipped")
        self.tasks.leave_out(skipped)
        is_pinned = self.device.type == "cuda"
        batch = {key: tensor.to(self.device, non_blocking=is_pinned) for key, tensor in batch.items()}
        randomness = randomness.to(self.device)
        with self.logger.timer.encoding() if self.space.is_encoding else nullcontext():
            return self.space.prepare(batch, randomness.get("posterior")), randomness

    def describe_data(self) -> str:
        """Who waits for which data, for messages."""
        return f"rank {self.rank.rank} waits for {awaited_worker()} on dataset {self.job.dataset.name}"

    def set_learning_rate(self, step: int) -> float:
        config = self.config
        lr = self.schedule.rate(step, steps=config.training.steps, peak=config.optimizer.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr

    def count_step(self) -> None:
        size = self.plan.global_batch_size
        self.progress.step += 1
        self.progress.images_seen += size
        self.progress.position += size
        self.logger.count_images(size)

    def open_stream(self) -> Iterator[tuple[Batch, Randomness]]:
        """Batches from the position of the run.

        Errors in the data usually appear in the first batch of a rank. All ranks then stop before the first step and
        leave no files behind.
        """
        batches = self.stream.batches(self.progress.position)
        first: list[tuple[Batch, Randomness]] = []
        mistake: ConfigError | None = None
        try:
            with self.stop_request.waiting_for_data(self.describe_data):
                first.append(next(batches))
        except ConfigError as error:
            mistake = error
        raise_on_all_ranks(mistake)
        return itertools.chain(first, batches)

    def roll_back(self, divergence: DivergenceError, profiler: Profiler) -> Iterator[tuple[Batch, Randomness]]:
        """Return to the last checkpoint; the batches continue after those of the step that diverged.

        Raises:
            DivergenceError: the run does not roll back, or returned to the same checkpoint too often.
        """
        warning = self.rollback.to_last_checkpoint(divergence)
        self.logger.roll_back(self.progress.step, self.progress.images_seen)
        profiler.return_to(self.progress.step)
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
        for message in announcements.closing(
            self.job,
            self.tasks.grids,
            last_grid=self.tasks.last_grid,
            last_validation=self.tasks.last_validation,
            weights=weights if has_saved else None,
        ):
            self.logger.message(message)
