# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The trainer: checks, then a build in readable order, then a loop of about 40 lines.

Notable:
- one step is the same code on a laptop and on a node: every mode goes through one `parallelize`;
- the host never waits for the device inside a step; it reads numbers at log steps only;
- sampling, validation and saving are called by all ranks and stay out of the throughput.
"""

from __future__ import annotations

import gc
import itertools
import os
import shlex
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from torchditan.checkpoint import CheckpointManager, Progress, check_async_mode, latest_checkpoint
from torchditan.config import Config, ConfigError, option_error
from torchditan.config_loader import to_dict
from torchditan.cpu_threads import set_cpu_threads
from torchditan.diffusion.objectives import build_objective
from torchditan.distributed.parallel_dims import ParallelDims
from torchditan.distributed.parallelize import CompileOptions, check_backend, compile_advice, parallelize
from torchditan.distributed.process_group import (
    Rank,
    check_devices,
    init_process_group,
    max_over_ranks,
    raise_on_all_ranks,
    set_timeout,
    sum_over_ranks,
)
from torchditan.distributed.watchdog import RankWatch, record_collectives
from torchditan.divergence import DivergenceError, DivergenceGuard, LossSpikes
from torchditan.ema import EMA
from torchditan.evaluation.generate import generate
from torchditan.evaluation.grids import Grids
from torchditan.evaluation.validation import validation_loss
from torchditan.flops import count_model_flops, peak_flops
from torchditan.host_memory import keep_freed_memory
from torchditan.metrics import CONSOLE_COLUMNS, MetricsLogger, check_trackers
from torchditan.models import TextEmbeddings, model_spec_of
from torchditan.optim import build_optimizer, clip_grad_norm, learning_rate
from torchditan.preemption import StopAgreement, StopRequest
from torchditan.profiling import check_profiling, profiling
from torchditan.progress import Advance, report_progress
from torchditan.randomness import Randomness
from torchditan.resolve import (
    check_steps,
    describe_batches,
    fill_in_from_dataset,
    keep_global_batch_size,
    keep_values_of_run,
    resolve_batches,
    with_condition_of,
)
from torchditan.run_directory import RunDirectory, read_status, run_path, write_rank_status
from torchditan.sample_space import SampleSpace, pixel_space
from torchditan.stream import (
    Batch,
    CaptionedDataset,
    GroupedDataset,
    ImageDataset,
    StreamedDataset,
    StreamedTraining,
    TrainingStream,
    end_loader_workers,
)
from torchditan.trajectory import trajectory
from torchditan.verdict import Interrupted, verdict_of

if TYPE_CHECKING:
    from torchditan.precision.loss_scaling import LossScaler

_NOT_SAVED = "checkpoint.enable_checkpoint and checkpoint.save_final are false"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Trainer:
    """Trains one model on one dataset.

    The constructor resolves and checks the settings and builds nothing large; `run` takes the run
    directory, builds, trains and records how it ended.

    Args:
        config: the job; what it leaves open is filled in from the dataset.
        dataset: training images.
        validation_dataset: held-out images, needed where `validation.freq` is set.
        open_captions, open_latents, tune_batch_size, load_initial_weights: parts that only some jobs need; see
            `optional_parts.choose_parts`.

    Raises:
        ConfigError: settings that cannot work together or on this machine.
    """

    def __init__(
        self,
        config: Config,
        dataset: ImageDataset,
        validation_dataset: ImageDataset | None = None,
        *,
        open_captions: Callable[..., Any] | None = None,
        open_latents: Callable[..., SampleSpace] | None = None,
        tune_batch_size: Callable[[Config, Rank], int] | None = None,
        load_initial_weights: Callable[..., str] | None = None,
    ) -> None:
        self.config = config
        if config.training.deterministic:
            # cuBLAS reads it when its handle is made, which encoding captions already does.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.load_initial_weights = load_initial_weights
        self.dataset = dataset
        self.validation_dataset = validation_dataset
        self.rank = Rank.from_environment()
        self.device = self.rank.device
        self.parallel_dims = ParallelDims.resolve(
            replicate=config.training.data_parallel_replicate_degree,
            shard=config.training.data_parallel_shard_degree,
            world_size=self.rank.world_size,
        )
        assert config.metrics.experiment_name is not None
        path = run_path(config.job.dump_folder, config.metrics.experiment_name)
        self.threads_changed = set_cpu_threads(path)
        check_devices(self.rank)
        if config.float8.enable_float8_linear:
            from torchditan.precision.float8 import check_float8

            check_float8(config.float8, device=self.device)
        if config.training.compile:
            check_backend(config.compile.backend)
        check_async_mode(config, device=self.device)
        check_trackers(config.metrics)
        check_profiling(config.profiling, self.device)
        if (kept := keep_values_of_run(config, path)) and self.rank.rank == 0:
            print(f"{path} keeps what it was started with: {', '.join(kept)}", file=sys.stderr)
        if config.cache.only and not isinstance(dataset, CaptionedDataset):
            raise option_error("cache.only", True, f"{dataset.name} has no captions to encode; leave it out")
        if isinstance(dataset, CaptionedDataset):
            assert open_captions is not None, "optional_parts.choose_parts gives it"
            dataset, validation_dataset, self.space = open_captions(config, dataset, validation_dataset, rank=self.rank)
            self.dataset, self.validation_dataset = dataset, validation_dataset
            if config.cache.only:
                return
        elif open_latents is None:
            self.space = pixel_space(config.autoencoder, dataset)
        else:
            with self.reporting("opening the autoencoder"):
                self.space = open_latents(
                    config.autoencoder, dataset, device=self.device, needs_decoder=config.metrics.enable_sampling
                )
        fill_in_from_dataset(config, dataset, sample_shape=self.space.sample_shape)
        asked_batch_size = config.training.batch_size
        keep_global_batch_size(config, path, world_size=self.rank.world_size)
        check_steps(config, path)
        self.plan = resolve_batches(config, self.rank, tune_batch_size=tune_batch_size)
        self.batches = describe_batches(self.plan, asked=asked_batch_size)
        self.spec = model_spec_of(config, sample_shape=self.space.sample_shape, num_classes=len(dataset.class_names))
        if config.diffusion.timestep_shift is None:
            config.diffusion.timestep_shift = self.spec.timestep_shift
        self.spec = with_condition_of(self.spec, dataset, config, device=self.device)
        if validation_dataset is not None:
            with_condition_of(self.spec, validation_dataset, config, device=self.device)  # where it is a stand-in too
        self.run_directory = RunDirectory(path, is_writer=self.rank.rank == 0)
        self.progress = Progress()
        self.extra_metrics: dict[str, float] = {}
        self.num_skipped = 0
        self.peak_memory_gib = 0.0
        self.start_step: int | None = None
        self.saved_step = -1
        self.tried_step: int | None = None
        self.num_tries = 0
        self.grids = Grids(config, dataset, validation_dataset, space=self.space)
        self.last_grid: Path | None = None

    def run(self) -> None:
        """Take the run directory, build, train; status.json says how it ended, whatever happens."""
        if self.config.cache.only:
            if self.rank.rank == 0:
                print(f"the cache has all {len(self.dataset)} samples and their captions")
            return
        self.run_directory.open(
            to_dict(self.config),
            trajectory=trajectory(self.config),
            device=str(self.device),
            world_size=self.rank.world_size,
        )
        # To the very end: the SIGTERM by which torchrun ends the others of a rank that failed is not to cut them short
        # while they write down why.
        with StopRequest() as self.stop_request:
            self.build_and_train()

    def build_and_train(self) -> None:
        try:
            self.run_directory.write_status("running", step=0)
            self.build()
            self.train()
            self.record_end("completed")
        except Interrupted as stop:
            self.record_end("interrupted", str(stop), exit_code=75)
            raise
        except (Exception, KeyboardInterrupt) as error:
            self.record_failure(error)
            raise
        finally:
            with ExitStack() as closing:  # from the last to the first, each though another one fails
                closing.callback(self.run_directory.close)
                closing.callback(end_loader_workers)
                for name in ("watch", "logger"):
                    if name in vars(self):
                        closing.callback(getattr(self, name).close)

    def record_end(self, status: str, reason: str | None = None, *, exit_code: int = 0) -> None:
        """Write the verdict that all ranks share."""
        self.run_directory.write_status(status, reason, step=self.progress.step)
        dist.barrier()
        write_rank_status(status, reason, step=self.progress.step, exit_code=exit_code, **self.memory())
        dist.destroy_process_group()
        # A job that is asked to stop has little time left.
        self.checkpoints.close(patience_s=None if status == "completed" else 5)

    def record_failure(self, error: BaseException) -> None:
        """Write the verdict. Any rank may, since the others are ended when this one exits; the first one stands.

        A mistake found before the first step is every rank's, and rank 0 alone deals with it.
        """
        verdict = verdict_of(error)
        status = verdict.status
        if status == "interrupted" and self.rank.world_size > 1:
            status = "error"  # the ranks did not agree to stop
        is_own = dist.is_initialized() and (self.start_step is not None or verdict.exit_code != 2)
        if is_own:
            self.exit_if_another_rank_failed()
        lost = self.watch.explain_lost_rank(error) if "watch" in vars(self) else None
        if lost is not None:
            self.record_lost(lost)
            raise SystemExit(f"rank {self.rank.rank}: {lost}") from None
        write_rank_status(status, verdict.reason, step=self.progress.step, exit_code=verdict.exit_code)
        if verdict.exit_code == 2 and self.start_step in (None, self.progress.step) and self.rank.rank == 0:
            self.run_directory.discard()
        elif is_own and self.run_directory.path.exists():
            self.run_directory.write_failure(status, verdict.reason, step=self.progress.step, rank=self.rank.rank)
        else:
            self.run_directory.write_status(status, verdict.reason, step=self.progress.step)

    def record_lost(self, reason: str) -> None:
        """Write that another rank was killed or is stuck; also called by the watching thread."""
        write_rank_status("error", reason, step=self.progress.step, exit_code=1)
        self.run_directory.write_failure("error", reason, step=self.progress.step, rank=self.rank.rank)

    def exit_if_another_rank_failed(self) -> None:
        """Its end shows here as a lost connection, which is no news: rank 0 repeats the reason in one line."""
        status = read_status(self.run_directory.path)
        if status is not None and status["state"] in ("error", "oom") and status["rank"] != self.rank.rank:
            stopped = f"stopped by rank {status['rank']}: {status['reason']}"
            write_rank_status("error", stopped, step=self.progress.step, exit_code=1)
            raise SystemExit(stopped if self.rank.rank == 0 else 1)

    def build(self) -> None:
        """Process group, model, optimizer, data and metrics, then the newest checkpoint over them."""
        config = self.config
        if self.device.type == "cpu":
            keep_freed_memory()
        set_determinism(config.training.seed, deterministic=config.training.deterministic)
        record_collectives(self.run_directory.folder("flight_recorder"), buffer_size=config.comm.trace_buf_size)
        init_process_group(self.rank, timeout_seconds=config.comm.init_timeout_seconds)
        self.watch = RankWatch(
            self.rank,
            timeout_seconds=config.comm.init_timeout_seconds,
            on_lost=self.record_lost,
            folder=self.run_directory.folder("flight_recorder"),
        )
        mesh = self.parallel_dims.build_mesh(self.device.type)

        with torch.device("meta"):
            model = self.spec.build()
        float8_layers = None
        if config.float8.enable_float8_linear:
            from torchditan.precision.float8 import convert_to_float8

            float8_layers = convert_to_float8(
                model=model,
                spec=self.spec,
                config=config.float8,
                batch_size=self.plan.batch_size,
                varied_shapes=isinstance(self.dataset, GroupedDataset) and len(self.dataset.groups()) > 1,
            )
        compile_options = CompileOptions(backend=config.compile.backend, mode=config.compile.mode)
        sharded: nn.Module = parallelize(
            model,
            blocks=self.spec.blocks(model),
            mesh=mesh,
            activation_checkpoint=config.activation_checkpoint.mode,
            selective_ac_option=config.activation_checkpoint.selective_ac_option,
            checkpoint_fraction=config.activation_checkpoint.fraction,
            compile=compile_options if config.training.compile else None,
            param_dtype=DTYPES[config.training.mixed_precision_param],
            reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
            cpu_offload=config.training.enable_cpu_offload,
        )
        self.model = cast(Any, sharded)  # it has init_weights, and the methods of an FSDPModule
        self.model.to_empty(device="cpu" if config.training.enable_cpu_offload else self.device)
        with self.reporting("loading the model"):
            self.model.init_weights(config.training.seed)
        for buffer in self.model.buffers():  # offloading moves parameters alone
            buffer.data = buffer.data.to(self.device)
        self.model.train()

        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.guard = DivergenceGuard(self.optimizer)
        self.scaler: LossScaler | None = None
        if config.training.mixed_precision_param == "float16":
            from torchditan.precision.loss_scaling import LossScaler

            self.scaler = LossScaler(self.parameters[0].device)  # of the gradients, with offloading the host
        self.spikes: LossSpikes | None = None
        if config.training.on_nonfinite == "rollback" and config.training.loss_spike_factor:
            self.spikes = LossSpikes(config.training.loss_spike_factor, self.device)
        self.ema = None
        if config.ema.enable:
            self.ema = EMA(
                self.model, decay=config.ema.decay, warmup=config.ema.warmup, only_trained=config.lora.rank > 0
            )
        self.objective = build_objective(config.diffusion, self.spec)
        self.stream = self.build_stream()
        self.checkpoints = CheckpointManager(
            self.run_directory.folder(config.checkpoint.folder),
            model=self.model,
            ema=self.ema,
            optimizer=self.optimizer,
            config=config,
            timeout_seconds=config.comm.init_timeout_seconds,
            warn=self.warn,
        )
        with self.reporting("reading weights"):
            begun_with = self.resume()
        self.stop = StopAgreement(
            self.stop_request,
            world_size=self.rank.world_size,
            timeout_seconds=config.comm.init_timeout_seconds,
        )
        self.logger = MetricsLogger(
            config.metrics,
            self.run_directory,
            world_size=self.rank.world_size,
            device=self.device,
            flops_per_image=count_model_flops(self.spec).total,
            peak_flops=peak_flops(torch.cuda.get_device_name()) if self.device.type == "cuda" else None,
            total_steps=config.training.steps,
            tokens_per_image=self.spec.num_tokens,
            start_step=self.progress.step,
            images_seen=self.progress.images_seen,
            elapsed_s=self.progress.elapsed_s,
        )
        self.logger.message(self.describe())
        if float8_layers is not None:
            self.logger.message(float8_layers)
        advice = compile_advice(
            compiles=config.training.compile, float8=config.float8.enable_float8_linear, device=self.device
        )
        if advice is not None:
            self.logger.message(advice)
        if self.progress.step and self.threads_changed is not None and self.device.type == "cpu":
            self.logger.message(self.threads_changed)
        if begun_with is not None:
            self.logger.message(f"begun with the {begun_with}")
        if self.progress.step < config.training.steps:
            if not self.keeps_weights:
                self.logger.message(f"this run keeps no weights: {_NOT_SAVED}")
        else:
            again = "to train again, name a new run with --metrics.experiment_name"
            self.logger.message(f"step {self.progress.step} was reached before: nothing is left to train; {again}")
        if config.metrics.enable_sampling and self.grids.why_no_scores is not None:
            self.logger.message(self.grids.why_no_scores)
        if self.space.missing_decoder is not None:
            self.logger.message(f"grids show latent channels, not pictures: {self.space.missing_decoder}")

    def build_stream(self) -> TrainingStream | StreamedTraining:
        options = self.config.dataset
        shared: dict[str, Any] = {
            "plan": self.plan,
            "seed": self.config.training.seed,
            "num_classes": len(self.dataset.class_names),
            "horizontal_flip": options.horizontal_flip,
            "num_workers": options.num_workers,
            "pin_memory": self.device.type == "cuda",
            "sample_shape": self.space.sample_shape,
            "posterior": self.space.draws_posterior,
        }
        if options.streaming:
            return StreamedTraining(cast(StreamedDataset, self.dataset), **shared)
        return TrainingStream(
            self.dataset,
            corrupt_images=options.corrupt_images,
            prefetch_factor=options.prefetch_factor,
            bucket_order=options.bucket_order,
            **shared,
        )

    def resume(self) -> str | None:
        """Continue from the newest whole checkpoint of this run directory; without one, begin with given weights.

        Whatever the options: a run that kept its weights never starts over them.

        Returns:
            What those were, for the log.
        """
        path, begun_with = self.config.checkpoint.initial_load_path, None
        if not self.load_checkpoint() and path is not None:
            assert self.load_initial_weights is not None, "optional_parts.choose_parts gives it"
            begun_with = self.load_initial_weights(self.model, path, config=self.config)
            if self.ema is not None:
                self.ema.restart()
        self.run_directory.truncate_metrics(self.progress.step)
        return begun_with

    def load_checkpoint(self) -> bool:
        """Stand where the newest whole checkpoint stands, if there is one."""
        loaded = self.checkpoints.load_latest()
        if loaded is None:
            return False
        self.progress, loader_state = loaded
        self.stream.load_state(loader_state)
        if self.spikes is not None:
            self.spikes.load_state(self.progress.mean_loss, self.progress.mean_loss_steps)
        if self.scaler is not None:
            self.scaler.load_state(self.progress.loss_scale, self.progress.loss_scale_steps)
        self.saved_step = self.progress.step
        return True

    @property
    def keeps_weights(self) -> bool:
        return self.config.checkpoint.enable_checkpoint or self.config.checkpoint.save_final

    def warn(self, text: str) -> None:
        """Say something on rank 0's terminal, before or after the logger is there."""
        if self.rank.rank == 0:
            self.logger.message(text) if "logger" in vars(self) else print(text, file=sys.stderr, flush=True)

    def reporting(self, what: str) -> AbstractContextManager[Advance]:
        """Lines about slow work, above the bar of the console where there is one."""
        return report_progress(what, say=self.logger.message if "logger" in vars(self) else None)

    def describe(self) -> str:
        config, count = self.config, sum(parameter.numel() for parameter in self.model.parameters())
        images = f"{len(self.dataset)} images" if hasattr(self.dataset, "__len__") else "streamed images"
        shape = "x".join(map(str, self.dataset.sample_shape))
        if self.space.is_encoding:
            shape += f", encoded to {'x'.join(map(str, self.space.sample_shape))}"
        start = f", resumed at step {self.progress.step}" if self.progress.step else ""
        lines = [
            f"{config.metrics.experiment_name}: {self.describe_model()}, {count / 1e6:.2f}M parameters, "
            f"{self.parallel_dims.mode} on {self.device.type}, {config.training.mixed_precision_param}",
            f"on {self.dataset.name}: {images} of {shape}",
            f"{config.training.steps} steps{start}",
            self.batches,
        ]
        wrap = partial(textwrap.fill, width=CONSOLE_COLUMNS, subsequent_indent="  ", break_long_words=False)
        return "\n".join(wrap(line, break_on_hyphens=False) for line in lines)

    def describe_model(self) -> str:
        model, lora = self.config.model, self.config.lora
        if self.spec.name == "dit":
            return f"{model.flavor}/{model.patch_size} ({model.preset})"
        weights = "random weights" if model.path is None else model.path
        trained = sum(parameter.numel() for parameter in self.parameters)
        how = (
            f", LoRA of rank {lora.rank} with {trained / 1e6:.2f}M over {self.config.quantize.base}"
            if lora.rank
            else ""
        )
        return f"{model.flavor} ({weights}{how})"

    def train(self) -> None:
        """The loop: from the step that was reached to the last one.

        Raises:
            Interrupted: all ranks agreed to stop; what was learned is saved.
        """
        config, progress = self.config, self.progress
        first_step = progress.step + 1
        batches = self.open_stream()
        self.start_step = progress.step
        write_rank_status("running", step=progress.step, first_step_at=time.time())
        gc.disable()
        self.stop.begin()
        self.stop_if_asked()
        if config.training.on_nonfinite == "rollback" and self.saved_step < 0:
            self.save()  # to return to
        if config.metrics.enable_sampling and config.sampling.at_start and progress.step == 0:
            self.sample()
        if config.training.compile and progress.step < config.training.steps:
            self.logger.message("compiling in the first step, about a minute")
        with profiling(
            config.profiling,
            self.run_directory,
            self.rank.rank,
            device=self.device,
            start_step=progress.step,
            excluded=self.profiling_excluded,
        ) as self.profiler:
            self.logger.timer.restart()
            while self.progress.step < config.training.steps:
                try:
                    is_first = self.progress.step + 1 == first_step
                    with (
                        self.reporting("compiling" if config.training.compile else "first step")
                        if is_first
                        else nullcontext()
                    ):
                        self.train_step(batches)
                    if (step := self.progress.step) == first_step:
                        self.set_timeout(config.comm.train_timeout_seconds)
                    self.do_what_is_due(step, is_first=step == first_step)
                    self.profiler.step(step)
                    self.stop_if_asked()
                except DivergenceError as divergence:
                    batches = self.roll_back(divergence)
        self.guard.wait()
        # Rank 0 may take its time with what is left, uploading say.
        self.set_timeout(config.comm.init_timeout_seconds)
        self.finish()

    @contextmanager
    def profiling_excluded(self) -> Iterator[None]:
        """Time of the body, on the slowest rank, is not training's."""
        self.watch.note(self.progress.step, "profiling")
        with self.logger.timer.excluded("profiling"):
            yield
            dist.barrier()

    def set_timeout(self, seconds: int) -> None:
        """How long ranks wait for each other from now on, but for those that save."""
        set_timeout(seconds, but=self.checkpoints.group)
        self.watch.timeout_seconds = seconds

    def train_step(self, batches: Iterator[tuple[Batch, Randomness]]) -> None:
        """One optimizer step."""
        step = self.progress.step + 1
        self.set_learning_rate(step)
        self.loss = self.accumulate_gradients(batches)
        self.watch.note(step, "gradient norm and optimizer")
        self.stop.begin()
        if self.scaler is not None:
            self.scaler.unscale(self.parameters)
        self.grad_norm = clip_grad_norm(self.parameters, max_norm=self.config.training.max_norm)
        is_spike = None if self.spikes is None else self.spikes.judge(self.mean_loss())
        is_overflow = None if self.scaler is None else self.scaler.judge(self.grad_norm)
        self.guard.step(step, self.grad_norm, is_spike, is_overflow)
        self.optimizer.zero_grad()
        if self.ema is not None:
            self.ema.update(step)

        self.progress.step = step
        self.progress.images_seen += self.plan.global_batch_size
        self.progress.position += self.plan.global_batch_size
        self.logger.count_images(self.plan.global_batch_size)

    def do_what_is_due(self, step: int, *, is_first: bool) -> None:
        """What happens between steps, now and then."""
        config = self.config
        if step % config.training.gc_freq == 0:
            gc.collect(1)
        if config.validation.freq and self.is_due(step, config.validation.freq):
            self.validate()
        if config.metrics.enable_sampling and self.is_due(step, config.metrics.sample_freq):
            self.sample()
        if is_first or self.extra_metrics or self.is_due(step, config.metrics.log_freq):
            self.log(step)
        if self.is_save_due(step):
            self.save()

    def is_save_due(self, step: int) -> bool:
        checkpoint = self.config.checkpoint
        if checkpoint.enable_checkpoint:
            return self.is_due(step, checkpoint.interval)
        return checkpoint.save_final and step == self.config.training.steps

    def stop_if_asked(self) -> None:
        """End here, with a checkpoint, if any rank was asked to: all ranks learn it at the same step.

        Raises:
            Interrupted: they were.
        """
        self.watch.note(self.progress.step, "agreeing whether to stop")
        number = self.stop.result()
        step, checkpoint = self.progress.step, self.config.checkpoint
        if number is None or step == self.config.training.steps:
            return
        if step == self.start_step:
            raise Interrupted(f"stopped by {number.name} before any step; the same command begins where this one did")
        reason = f"stopped by {number.name} after step {step}"
        if not checkpoint.enable_checkpoint:
            raise Interrupted(f"{reason}; without checkpoint.enable_checkpoint nothing was saved")
        if step != self.saved_step:
            self.save()
        self.checkpoints.wait()
        if self.checkpoints.failure is not None:
            raise Interrupted(f"{reason}, which could not be saved ({self.checkpoints.failure})")
        raise Interrupted(f"{reason}; the same command continues there")

    def roll_back(self, divergence: DivergenceError) -> Iterator[tuple[Batch, Randomness]]:
        """Return to the last checkpoint, and go on with the data behind that of the step that diverged.

        Raises:
            DivergenceError: the run is to stop at the first one, or came back to the same checkpoint too often.
        """
        training = self.config.training
        if training.on_nonfinite == "stop":
            self.checkpoints.wait()  # for one of an earlier step, which is healthy
            raise divergence
        rollbacks = self.progress.rollbacks
        behind = self.progress.position
        if self.progress.step < divergence.step:
            behind += self.plan.global_batch_size  # on a CPU the step is not counted yet
        self.guard.forget()
        self.optimizer.zero_grad()
        if not self.load_checkpoint():
            raise divergence
        self.num_tries = 1 if self.progress.step != self.tried_step else self.num_tries + 1
        self.tried_step = self.progress.step
        if self.num_tries > training.max_rollbacks:
            after = f"after {training.max_rollbacks} rollback(s) to step {self.progress.step}, each to other data"
            raise DivergenceError(divergence.step, f"{divergence.what}, {after}")
        self.progress.rollbacks = rollbacks + 1
        self.logger.roll_back(self.progress.step, self.progress.images_seen)
        self.profiler.return_to(self.progress.step)
        self.extra_metrics.clear()
        self.warn(
            f"warning: step {divergence.step}: {divergence.what}; back to step {self.progress.step}, without images "
            f"{self.progress.position:,} to {behind - 1:,} of the stream (rollback {self.progress.rollbacks})"
        )
        self.progress.position = behind
        return self.open_stream()

    def mean_loss(self) -> torch.Tensor:
        """Mean loss () of the last step over all ranks."""
        return sum_over_ranks(self.loss.clone()) / self.rank.world_size

    def open_stream(self) -> Iterator[tuple[Batch, Randomness]]:
        """Batches from where the run stands.

        A mistake in the data mostly shows in the first batch of some rank: then all ranks stop before any step, and
        leave nothing behind.
        """
        batches = self.stream.batches(self.progress.position)
        first: list[tuple[Batch, Randomness]] = []
        mistake: ConfigError | None = None
        try:
            first.append(next(batches))
        except ConfigError as error:
            mistake = error
        raise_on_all_ranks(mistake)
        return itertools.chain(first, batches)

    def is_due(self, step: int, freq: int) -> bool:
        """Every freq steps and at the last one; a frequency of 0 is the last step alone."""
        return step == self.config.training.steps or (freq > 0 and step % freq == 0)

    def accumulate_gradients(self, batches: Iterator[tuple[Batch, Randomness]]) -> torch.Tensor:
        """Forward and backward over this rank's micro-batches; its share of the mean loss, on the device."""
        share = self.plan.global_batch_size // self.rank.world_size
        total = torch.zeros((), device=self.device)
        for micro_batch in range(self.plan.num_micro_batches):
            self.watch.note(self.progress.step + 1, "data loading")
            with self.logger.timer.data_loading():
                batch, randomness = next(batches)
            self.watch.note(self.progress.step + 1, "forward and backward")
            self.num_skipped += int(batch.pop("skipped").sum())
            batch = {key: tensor.to(self.device, non_blocking=True) for key, tensor in batch.items()}
            randomness = randomness.to(self.device)
            with self.logger.timer.encoding() if self.space.is_encoding else nullcontext():
                batch = self.space.prepare(batch, randomness.posterior)
            self.model.set_requires_gradient_sync(micro_batch == self.plan.num_micro_batches - 1)
            losses = self.objective.loss(self.model, batch, randomness)
            # FSDP averages gradients over ranks, so each rank contributes the mean of its own share.
            loss = losses.sum() / share
            (loss if self.scaler is None else loss * self.scaler.scale).backward()
            total += loss.detach()
        return total

    def set_learning_rate(self, step: int) -> None:
        config = self.config
        self.lr = learning_rate(step, steps=config.training.steps, peak=config.optimizer.lr, config=config.lr_scheduler)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    def log(self, step: int) -> None:
        self.guard.wait()
        extra: dict[str, float] = dict(self.extra_metrics)
        if self.num_skipped:
            extra["corrupt_images_rank0"] = self.num_skipped
        if self.scaler is not None:
            extra["loss_scale"], extra["overflows"] = self.scaler.scale.item(), self.scaler.num_skipped.item()
        if self.progress.rollbacks:
            extra["rollbacks"] = self.progress.rollbacks
        loss, grad_norm = self.mean_loss().item(), self.grad_norm.item()
        max_loss = max_over_ranks(self.loss.clone()).item() if self.config.metrics.legacy_tags else None
        record = self.logger.log(step, loss=loss, grad_norm=grad_norm, lr=self.lr, extra=extra, max_loss=max_loss)
        self.peak_memory_gib = max(self.peak_memory_gib, record["peak_memory_gib"])
        self.extra_metrics.clear()

    def memory(self) -> dict[str, Any]:
        """This rank's own peak in GiB, what the device has, and how often its allocator had to start over."""
        if self.device.type != "cuda":
            return {"peak_memory_gib": self.peak_memory_gib}
        capacity = torch.cuda.get_device_properties(self.device).total_memory / 1024**3
        retries = torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
        return {"peak_memory_gib": self.peak_memory_gib, "capacity_gib": capacity, "alloc_retries": retries}

    def validate(self) -> None:
        self.watch.note(self.progress.step, "validation")
        assert self.validation_dataset is not None
        with self.logger.timer.excluded("validation"), self.reporting("validating"):
            self.extra_metrics["validation_loss"] = validation_loss(
                self.model,
                objective=self.objective,
                dataset=self.validation_dataset,
                space=self.space,
                num_images=self.config.validation.num_images,
                batch_size=self.plan.batch_size,
                corrupt_images=self.config.dataset.corrupt_images,
                device=self.device,
            )

    def sample(self) -> None:
        """Draw the grid of generated and real images of this step."""
        self.watch.note(self.progress.step, "sampling")
        config, rows = self.config, self.grids.rows
        self.guard.wait()
        averaged = self.ema.swapped_in() if self.ema is not None and config.sampling.use_ema else nullcontext()
        timeout_seconds = int(self.watch.timeout_seconds)
        self.set_timeout(max(timeout_seconds, config.comm.init_timeout_seconds))  # rank 0 decodes while all wait
        with self.logger.timer.excluded("sampling"), averaged, self.spec.sampling(self.model):
            start = time.perf_counter()
            generated = generate(
                self.model,
                rows=rows,
                samples_per_row=config.sampling.images_per_class,
                sample_shape=self.space.sample_shape,
                conditioning=self.spec.conditioning,
                prediction=self.spec.prediction,
                sampling=config.sampling,
                timestep_shift=config.diffusion.timestep_shift or 1.0,
                seed=config.training.seed,
                batch_size=config.metrics.sample_batch_size,
                device=self.device,
                say=self.logger.message,
            )  # on the CPU: what was queued is done
            seconds = time.perf_counter() - start
            if self.rank.rank == 0:
                with self.reporting("decoding samples"):
                    self.write_grid(generated)
            dist.barrier()
        self.set_timeout(timeout_seconds)
        if self.progress.step:  # a grid before the first step has no line to stand in
            self.extra_metrics["seconds_per_image"] = seconds / (generated.shape[0] * generated.shape[1])

    def write_grid(self, generated: torch.Tensor) -> None:
        path = self.run_directory.sample_path(self.progress.step)
        try:
            likeness = self.grids.write(path, self.space.to_pixels(generated), step=self.progress.step)
        except OSError as error:  # a full disk, which costs a picture
            self.warn(f"warning: no grid of step {self.progress.step}: {error.strerror}. The run goes on")
            return
        if self.progress.step:
            self.extra_metrics.update(likeness)
        self.logger.log_image("samples", path, self.progress.step)
        self.last_grid = path

    def save(self) -> None:
        self.watch.note(self.progress.step, "saving")
        self.guard.wait()
        with self.logger.timer.excluded("checkpoint"), self.reporting("saving"):
            self.progress.elapsed_s = self.logger.elapsed_s
            if self.spikes is not None:
                self.progress.mean_loss, self.progress.mean_loss_steps = self.spikes.state()
            if self.scaler is not None:
                self.progress.loss_scale, self.progress.loss_scale_steps = self.scaler.state()
            self.logger.flush()
            self.checkpoints.save(self.progress, loader_state=self.stream.state())
            self.saved_step = self.progress.step

    def finish(self) -> None:
        """Wait for the last checkpoint, and say where everything is.

        Raises:
            OSError: it could not be written; what the run learned since the one before would be lost in silence.
        """
        with self.reporting("saving"):
            self.checkpoints.wait()
        if self.checkpoints.failure is not None:
            reason = f"the last checkpoint could not be written: {self.checkpoints.failure}"
            has_earlier = latest_checkpoint(self.checkpoints.folder) is not None
            again = "continues from the one before" if has_earlier else "starts again from the first step"
            raise OSError(f"{reason}; the same command {again}")
        if self.last_grid is not None:
            beside = "" if self.grids.shows_prompts else ", generated beside real"
            self.logger.message(f"samples{beside}: {self.last_grid}")
        self.logger.message(f"done; everything of this run is in {self.run_directory.path}")
        if self.saved_step != self.progress.step:
            self.logger.message(f"no weights were kept: {_NOT_SAVED}")
            return
        self.logger.message(f"weights: {self.checkpoints.folder / f'step-{self.saved_step:08d}'}")
        if (command := self.command_to_generate()) is not None:
            self.logger.message(f"generate from them: {command}")

    def command_to_generate(self) -> str | None:
        """What draws from the weights of this run; None where a model continues a first frame."""
        command = f"python scripts/generate.py {shlex.quote(str(self.run_directory.path))}"
        conditioning = self.spec.conditioning
        if not isinstance(conditioning, TextEmbeddings):
            return command
        if conditioning.kept & conditioning.tensors.keys():
            return None
        return command if self.config.sampling.prompts else f'{command} --prompts "a text"'


def set_determinism(seed: int, *, deterministic: bool) -> None:
    """Seed torch's own generators (nothing of ours draws from them) and choose deterministic kernels.

    cuBLAS has to know earlier: see `Trainer.__init__`.
    """
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        # On by default then, it writes NaN into every tensor from torch.empty: a kernel each, and nothing of ours reads
        # memory before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
