# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Tasks between steps: collect garbage, log, save, validate, sample, evaluate. All ranks run them together.

Notable:
- the record and the checkpoint of a step come first: a task that fails, or takes too long, does not cost the step;
- its figures are added to that record. A resumed run repeats the tasks of its step that did not finish;
- the throughput excludes the time of validating, sampling, evaluating and saving (`timer.excluded`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torchditan.checkpoint.run_checkpoints import RunCheckpoints
from torchditan.diffusion.objectives import uniform_objective, validation_objective
from torchditan.distributed.process_group import max_over_ranks, mean_over_ranks
from torchditan.job.prepare import Job
from torchditan.optim.divergence import DivergenceGuard
from torchditan.optim.ema import EMA
from torchditan.optim.meters import Meter, build_meters, measuring
from torchditan.run.directory import UNREADABLE_FILE
from torchditan.run.metrics import MetricsLogger
from torchditan.sampling.drawing import Drawing
from torchditan.sampling.sample_grids import Grids
from torchditan.sampling.sampler import Sampler
from torchditan.sampling.validation import validation_losses
from torchditan.supervision.supervision import Supervision

if TYPE_CHECKING:
    from torchditan.optim.loss_scaling import LossScaler

_EVALUATION_TIMEOUT_S = 3600
"""Rank 0 compares features while the other ranks wait."""
_GC_FREQ = 50
"""Steps between two garbage collections, which all ranks make at once."""
_MOST_NAMED = 10


class StepResult(NamedTuple):
    """Results of one optimizer step; the tensors are on the device."""

    means: dict[str, torch.Tensor]
    """() means over this rank's share of the global batch: `loss`, and what else the objective logs."""
    grad_norm: torch.Tensor
    """() over all parameters and ranks, before clipping."""
    lr: float


class PeriodicTasks:
    """Validation, samples, log records and checkpoints of one run, each at its own frequency."""

    def __init__(
        self,
        job: Job,
        *,
        model: nn.Module,
        ema: EMA | None,
        guard: DivergenceGuard,
        scaler: LossScaler | None,
        logger: MetricsLogger,
        checkpoints: RunCheckpoints,
        supervision: Supervision,
    ) -> None:
        self.job = job
        self.config = job.config
        self.rank = job.rank
        self.model = model
        self.ema = ema
        self.sampler = Sampler(job.spec, job.objective, job.device)
        self.guard = guard
        self.scaler = scaler
        self.logger = logger
        self.checkpoints = checkpoints
        self.supervision = supervision
        self.progress = supervision.progress
        self.grids = Grids(job.config, job.dataset, job.validation_dataset, space=job.space)
        self.meters = build_meters(job.config.metrics, model)
        self.measured: list[Meter] = []
        self.has_logged = False
        self.unreadable: set[int] = set()
        """Numbers of the images that cannot be read: those that the check found, and those that this rank drew."""
        self.named: set[str] = set()
        """Those that this rank drew and named, held-out ones included."""
        self.peak_memory_gib = 0.0
        self.last_grid: Path | None = None
        self.last_validation: dict[str, float] = {}

    def run_periodic_tasks(self, result: StepResult, *, is_first: bool) -> None:
        """Run all tasks that are due after this step. The first step is always logged."""
        step = self.progress.step
        if step % _GC_FREQ == 0:
            gc.collect(1)
        if is_first or self.is_log_due(step):
            self.log(result)
        due = self.due_tasks()
        if self.is_save_due():
            self.checkpoints.save(complete=bool(due))
        for name in due:
            self.run(name)

    def due_tasks(self) -> list[str]:
        """The tasks that are due at this step and give figures, in their order."""
        return [name for name, freq in self.task_freqs().items() if self.is_due(freq)]

    def task_freqs(self) -> dict[str, int]:
        """Name of each task that gives figures -> its frequency; 0 is only at the last step."""
        config, freqs = self.config, {}
        if config.validation.freq:
            freqs["validation"] = config.validation.freq
        if config.metrics.enable_sampling:
            freqs["sampling"] = config.metrics.sample_freq
        if config.evaluation.freq:
            freqs["evaluation"] = config.evaluation.freq
        return freqs

    def run(self, name: str) -> None:
        """Run a task, and add its figures to the record of this step."""
        tasks: dict[str, Callable[[], dict[str, float]]] = {
            "validation": self.validate,
            "sampling": self.sample,
            "evaluation": self.evaluate,
        }
        self.logger.add_figures(self.progress.step, name, tasks[name]())

    def measuring(self, step: int) -> AbstractContextManager[None]:
        """Context manager around the update of this step: the meters measure it, if it will be logged."""
        self.measured = self.meters if not self.has_logged or self.is_log_due(step) else []
        return measuring(self.measured) if self.measured else nullcontext()

    def repeat_unfinished(self) -> None:
        """Repeat the tasks that were due at the step that the run continues from, and did not finish."""
        step, due = self.progress.step, self.due_tasks()
        if self.checkpoints.has_only_average:  # other tasks would get other figures than with the trained weights
            due = [name for name in due if name != "validation"]
        missing = [[name for name in due if self.logger.lacks_figures(step, name)]]
        dist.broadcast_object_list(missing, src=0)  # only rank 0 reads the records
        for name in missing[0]:
            self.logger.message(f"step {step} lacks its {name}, which runs now")
            self.run(name)

    def is_log_due(self, step: int) -> bool:
        """Whether this step is logged: also where a validation, a grid or an evaluation gives numbers."""
        return any(self.is_due(freq, step) for freq in (self.config.metrics.log_freq, *self.task_freqs().values()))

    def is_due(self, freq: int, step: int | None = None) -> bool:
        """Every `freq` steps and at the last step; with a frequency of 0 only at the last step.

        Args:
            step: None for the step that was counted last.
        """
        step = self.progress.step if step is None else step
        return step == self.config.training.steps or (freq > 0 and step % freq == 0)

    def is_save_due(self) -> bool:
        checkpoint = self.config.checkpoint
        if checkpoint.enable_checkpoint:
            return self.is_due(checkpoint.interval)
        return checkpoint.save_final and self.progress.step == self.config.training.steps

    def leave_out(self, skipped: Mapping[int, str]) -> None:
        """Count and name training images that this rank drew and could not read: index -> name and reason."""
        self.name_unreadable([named for index, named in skipped.items() if index not in self.unreadable])
        self.unreadable.update(skipped)

    def name_unreadable(self, images: Iterable[str]) -> None:
        """Name images that this rank left out, each once: the first few in the console, all in a file of the run."""
        new = [named for named in dict.fromkeys(images) if named not in self.named]
        if not new:
            return
        path = self.job.run_directory.path / UNREADABLE_FILE
        with suppress(OSError):  # a full disk
            known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []  # of other ranks, too
            with path.open("a", encoding="utf-8") as file:
                file.writelines(f"{named}\n" for named in new if named not in known)
        for named in new[: max(0, _MOST_NAMED - len(self.named))]:
            self.named.add(named)
            more = f"; further ones are only listed in {path}" if len(self.named) == _MOST_NAMED else ""
            self.supervision.warn_here(f"warning: {named} cannot be read; the next image replaces it{more}")
        self.named.update(new)

    def log(self, result: StepResult) -> None:
        self.guard.wait()
        self.has_logged = True
        extra: dict[str, float] = {}
        if self.unreadable:
            extra["corrupt_images_rank0"] = len(self.unreadable)
        if self.scaler is not None:
            extra["loss_scale"], extra["overflows"] = self.scaler.scale.item(), self.scaler.num_skipped.item()
        if self.progress.rollbacks:
            extra["rollbacks"] = self.progress.rollbacks
        means = {name: mean_over_ranks(mean, self.rank.world_size).item() for name, mean in result.means.items()}
        loss = means.pop("loss")
        for numbers in (*(meter.read() for meter in self.measured), means):
            extra |= numbers
        record = self.logger.log(
            loss=loss,
            grad_norm=result.grad_norm.item(),
            lr=result.lr,
            extra=extra,
            max_loss=max_over_ranks(result.means["loss"].clone()).item() if self.config.metrics.legacy_tags else None,
        )
        self.peak_memory_gib = max(self.peak_memory_gib, record["peak_memory_gib"])

    def memory(self) -> dict[str, Any]:
        """This rank's peak memory in GiB, the memory of the device, and the number of allocator retries."""
        device = self.job.device
        if device.type != "cuda":
            return {"peak_memory_gib": self.peak_memory_gib}
        capacity = torch.cuda.get_device_properties(device).total_memory / 1024**3
        retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
        return {"peak_memory_gib": self.peak_memory_gib, "capacity_gib": capacity, "alloc_retries": retries}

    def validate(self) -> dict[str, float]:
        """Loss on held-out images."""
        job, config = self.job, self.config
        self.supervision.note(self.progress.step, "validation")
        assert job.validation_dataset is not None
        with self.logger.timer.excluded("validation"), self.supervision.reporting("validating"):
            self.last_validation = validation_losses(
                self.model,
                objective=validation_objective(config.diffusion, job.spec),
                uniform=uniform_objective(config.diffusion, job.spec),
                dataset=job.validation_dataset,
                space=job.space,
                num_images=self.config.validation.num_images,
                batch_size=job.plan.batch_size,
                corrupt_images=self.config.dataset.corrupt_images,
                leave_out=lambda skipped: self.name_unreadable(skipped.values()),
                device=job.device,
            )
        return self.last_validation

    @contextmanager
    def _sampling_model(self, task: str, *, timeout_seconds: int) -> Iterator[None]:
        """Sample with the average, if the run keeps one; `task` is excluded from the throughput.

        Other ranks may wait for rank 0 as long as `timeout_seconds`.
        """
        self.supervision.note(self.progress.step, task)
        self.guard.wait()
        averaged = self.ema.swapped_in() if self.ema is not None else nullcontext()
        previous, group = self.supervision.timeout_seconds, self.checkpoints.manager.group
        self.supervision.set_timeout(max(previous, timeout_seconds), but=group)
        with self.logger.timer.excluded(task), averaged:
            yield
            dist.barrier()
        self.supervision.set_timeout(previous, but=group)

    def evaluate(self) -> dict[str, float]:
        """Measure samples of the model with `evaluation.metrics`."""
        assert self.job.evaluation is not None
        with self._sampling_model("evaluation", timeout_seconds=_EVALUATION_TIMEOUT_S):
            return self.job.evaluation(self.model, self.sampler, say=self.logger.message)

    def sample(self) -> dict[str, float]:
        """Draw the grid of generated and real images of this step."""
        likeness: dict[str, float] = {}
        # Rank 0 decodes while the others wait.
        with self._sampling_model("sampling", timeout_seconds=self.config.comm.init_timeout_seconds):
            drawing = self.grids.drawing(self.progress.step)
            batch_size = self.config.metrics.sample_batch_size
            start = time.perf_counter()
            # On the CPU: all queued work is done.
            samples = self.sampler.draw_all(self.model, drawing, batch_size=batch_size, say=self.logger.message)
            seconds = time.perf_counter() - start
            if self.rank.rank == 0:
                with self.supervision.reporting("decoding samples"):
                    likeness = self.write_grid(samples, drawing)
        return {"seconds_per_image": seconds / len(drawing), **likeness}

    def write_grid(self, samples: torch.Tensor, drawing: Drawing) -> dict[str, float]:
        """Decode samples and write the grid. Returns their likeness to real images."""
        path = self.job.run_directory.sample_path(self.progress.step)
        try:
            likeness = self.grids.write(path, self.job.space.to_pixels(samples), drawing)
        except OSError as error:  # a full disk must not end the run
            self.supervision.warn(f"warning: no grid of step {self.progress.step}: {error.strerror}. The run goes on")
            return {}
        self.logger.log_image("samples", path, self.progress.step)
        self.last_grid = path
        return likeness
