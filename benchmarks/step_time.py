#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Time, throughput and memory of one training step: `python benchmarks/step_time.py`.

Notable:
- on a CPU: our DiT against diffusers' `DiTTransformer2DModel` of the same shape, forward + backward + fused AdamW.
  All variants live in one process and take turns, ours, diffusers, ours, diffusers..., so that a drift of the
  machine meets all of them; the median counts;
- on a GPU: the trainer's whole step (objective, clipping, non-finite guard, EMA), one process per model, swept over
  batch sizes until memory runs out; a row that fails is recorded as such and the rest goes on;
- data and weights are random normal. Zeros run faster on GPUs, and adaLN-zero's initial weights would make most
  gradients zero.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # a clone that is not installed works too

from torchditan.config import EMA as EMAConfig  # noqa: E402
from torchditan.config import Diffusion, Model, Optimizer, Training  # noqa: E402
from torchditan.diffusion.flow_matching import FlowMatching  # noqa: E402
from torchditan.diffusion.timesteps import timestep_sampling  # noqa: E402
from torchditan.distributed.parallel_dims import ParallelDims  # noqa: E402
from torchditan.distributed.parallelize import CompileOptions, parallelize  # noqa: E402
from torchditan.distributed.process_group import Rank, init_process_group  # noqa: E402
from torchditan.ema import EMA  # noqa: E402
from torchditan.flops import count_model_flops, peak_flops  # noqa: E402
from torchditan.models import ModelSpec, build_model_spec  # noqa: E402
from torchditan.optim import NonFiniteGuard, build_optimizer, clip_grad_norm  # noqa: E402
from torchditan.randomness import Randomness  # noqa: E402
from torchditan.run_directory import write_file  # noqa: E402
from torchditan.verdict import verdict_of  # noqa: E402

NUM_CLASSES = 1000
PATCH_SIZE = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GIB = 1024**3

SAMPLE_SHAPES = {
    "debugmodel": (4, 8, 8),
    "DiT-S": (4, 32, 32),
    "DiT-B": (4, 32, 32),
    "DiT-L": (16, 32, 32),
    "DiT-XL": (4, 32, 32),
    "DiT-1B": (16, 32, 32),
    "DiT-7B": (16, 32, 32),
}
"""Latents of 256 px images: the 4 channels of the paper's autoencoder, or 16."""

CPU_VARIANTS = ("fp32_eager", "bf16_eager", "bf16_compiled")
TARGETS = {"fp32_eager": 0.96, "bf16_compiled": 0.42}
"""Time of our variant over that of diffusers in fp32 eager, at most; for DiT-S."""

GPU_BATCH_SIZES = {
    "debugmodel": (2, 4),
    "DiT-S": (256, 512, 1024),
    "DiT-B": (128, 256, 512),
    "DiT-L": (64, 128, 256),
    "DiT-XL": (64, 128, 256),
    "DiT-1B": (32, 64, 128),
    "DiT-7B": (4, 8, 16, 32),
}


@dataclass(frozen=True)
class Case:
    """What is measured, but for the batch size."""

    implementation: str
    """ours or diffusers."""
    model: str
    """A flavor of models/dit.py."""
    preset: str
    """official, torchditan, or diffusers."""
    precision: str
    """fp32 or bf16: the FSDP2 policy of the trainer for ours, autocast for diffusers."""
    compile: str
    """eager, per_block or whole_model."""
    step: str
    """bare: forward, mean squared error, backward, AdamW. trainer: the objective, clipping and guard too."""
    activation_checkpoint: str = "none"
    ema: bool = False

    @property
    def variant(self) -> str:
        return f"{self.precision}_{'eager' if self.compile == 'eager' else 'compiled'}"

    @property
    def title(self) -> str:
        parts = [self.implementation, f"{self.model}/{PATCH_SIZE}", self.preset, self.precision, self.compile]
        parts += [f"ac {self.activation_checkpoint}"] if self.activation_checkpoint != "none" else []
        return " ".join(dict.fromkeys(parts))  # diffusers is its own preset


@dataclass(frozen=True)
class Batch:
    """One batch on the device, used again in every step: loading data is not measured."""

    sample: torch.Tensor
    class_label: torch.Tensor
    randomness: Randomness


Step = Callable[[Batch], None]


# Cases


def cpu_cases(model: str, *, against: str, variants: Sequence[str]) -> list[Case]:
    """Ours and diffusers in turns; diffusers is compiled in both ways, and its faster one counts."""
    cases = []
    for variant in variants:
        precision, mode = variant.split("_")
        ours = "eager" if mode == "eager" else "per_block"
        theirs = ("eager",) if mode == "eager" else ("whole_model", "per_block")
        cases.append(Case("ours", model, "official", precision, ours, "bare"))
        if against == "diffusers":
            cases += [Case("diffusers", model, "diffusers", precision, how, "bare") for how in theirs]
    return cases


def gpu_cases(models: Sequence[str], *, against: str) -> list[Case]:
    """The trainer's step in bf16, compiled ones of every model first: they are what a user would run."""
    cases = []
    for how in ("per_block", "eager"):
        for model in models:
            # float32 weights, gradients, moments and an EMA of 7B parameters are more than one GPU holds
            cases.append(Case("ours", model, "torchditan", "bf16", how, "trainer", ema=model != "DiT-7B"))
    for model in models:
        if model == "DiT-7B":
            case = Case("ours", model, "torchditan", "bf16", "per_block", "trainer", activation_checkpoint="full")
            cases.append(case)
        if model == "DiT-XL":  # the published one, so the published preset too
            cases += [
                Case("ours", model, "official", "bf16", how, "trainer", ema=True) for how in ("per_block", "eager")
            ]
        if against == "diffusers":
            cases += [Case("diffusers", model, "diffusers", "bf16", how, "bare") for how in ("whole_model", "eager")]
    return cases


# What is measured


def build_spec(case: Case) -> ModelSpec:
    """Our model of a case; for diffusers, the one of ours that has its shape."""
    preset = "official" if case.implementation == "diffusers" else case.preset
    config = Model(flavor=case.model, preset=preset, patch_size=PATCH_SIZE, learn_sigma=False)  # type: ignore[arg-type]
    return build_model_spec(config, sample_shape=SAMPLE_SHAPES[case.model], num_classes=NUM_CLASSES)


def build_ours(spec: ModelSpec, case: Case, device: torch.device) -> nn.Module:
    """As the trainer builds it: on meta, parallelized over a mesh of one process, then filled."""
    with torch.device("meta"):
        model = spec.build()
    parallelize(
        model,
        blocks=spec.blocks(model),
        mesh=ParallelDims(replicate=1, shard=1).build_mesh(device.type),
        activation_checkpoint=case.activation_checkpoint,  # type: ignore[arg-type]
        compile=CompileOptions() if case.compile == "per_block" else None,
        param_dtype=DTYPES[case.precision],
    )
    return model.to_empty(device=device)


def build_diffusers(spec: ModelSpec, device: torch.device) -> nn.Module:
    """diffusers' DiT of the same width, depth, heads, MLP ratio, channels and classes.

    It keeps its own shape where it has one: an embedder of timestep and label in every block, and q, k and v
    apart. It would drop labels in every block while training, with random numbers of its own; ours are dropped by
    the objective, outside the bare step. So it drops none, but its label tables keep the null class, as ours.
    """
    from diffusers.models.embeddings import LabelEmbedding
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    config = spec.config
    height, width = config.image_size
    assert height == width, "diffusers' DiT takes square samples"
    with device:
        model = DiTTransformer2DModel(
            num_attention_heads=config.num_heads,
            attention_head_dim=config.width // config.num_heads,
            in_channels=config.input_channels,
            out_channels=config.output_channels,
            num_layers=config.depth,
            sample_size=height,
            patch_size=config.patch_size,
            num_embeds_ada_norm=config.num_classes,
            norm_eps=1e-6,
        )
    for module in model.modules():
        if isinstance(module, LabelEmbedding):
            module.dropout_prob = 0.0
    return model


@torch.no_grad()
def fill_with_normal(model: nn.Module) -> None:
    """All weights from N(0, 0.02), and norms 1 plus that, drawn on the device."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        local.normal_(mean=1.0 if is_norm else 0.0, std=0.02)


def make_batch(spec: ModelSpec, batch_size: int, device: torch.device) -> Batch:
    shape = (batch_size, *spec.sample_shape)
    return Batch(
        sample=torch.randn(shape, device=device),
        class_label=torch.randint(NUM_CLASSES, (batch_size,), device=device),
        randomness=Randomness(
            noise=torch.randn(shape, device=device),
            timestep=torch.rand(batch_size, device=device),
            label_dropout=torch.rand(batch_size, device=device),
        ),
    )


def build_step(case: Case, device: torch.device) -> tuple[Step, int]:
    """One training step as a function of the batch, and the number of parameters of its model."""
    spec = build_spec(case)
    model = build_diffusers(spec, device) if case.implementation == "diffusers" else build_ours(spec, case, device)
    fill_with_normal(model)
    model.train()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if case.implementation == "diffusers":
        return diffusers_step(model, case, device), num_parameters
    if case.step == "trainer":
        return trainer_step(model, spec, case), num_parameters
    return bare_step(model), num_parameters


def bare_step(model: nn.Module) -> Step:
    optimizer = build_optimizer(model, Optimizer())

    def step(batch: Batch) -> None:
        prediction = model(batch.sample, batch.randomness.timestep, {"class_label": batch.class_label})
        F.mse_loss(prediction.float(), batch.randomness.noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def diffusers_step(model: nn.Module, case: Case, device: torch.device) -> Step:
    options = Optimizer()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    predict: Callable[..., Any] = model
    if case.compile == "whole_model":
        predict = torch.compile(model)
    elif case.compile == "per_block":
        for block in model.get_submodule("transformer_blocks").children():
            block.compile()

    def step(batch: Batch) -> None:
        timestep = (batch.randomness.timestep * 1000).long()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=case.precision == "bf16"):
            prediction = predict(batch.sample, timestep, batch.class_label, return_dict=False)[0]
        F.mse_loss(prediction.float(), batch.randomness.noise).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def trainer_step(model: nn.Module, spec: ModelSpec, case: Case) -> Step:
    """What torchditan/trainer.py does between two batches, with the default options."""
    diffusion, training, ema_config = Diffusion(), Training(), EMAConfig()
    objective = FlowMatching(
        conditioning=spec.conditioning,
        timesteps=timestep_sampling(
            kind=diffusion.timestep_sampling,
            mean=diffusion.logit_normal_mean,
            std=diffusion.logit_normal_std,
            shift=diffusion.timestep_shift,
        ),
        label_dropout=diffusion.label_dropout,
    )
    optimizer = build_optimizer(model, Optimizer())
    guard = NonFiniteGuard(optimizer)
    ema = EMA(model, decay=ema_config.decay, warmup=ema_config.warmup) if case.ema else None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_steps = 0

    def step(batch: Batch) -> None:
        nonlocal num_steps
        num_steps += 1
        tensors = {"sample": batch.sample, "class_label": batch.class_label}
        losses = objective.loss(model, tensors, batch.randomness)
        (losses.sum() / len(losses)).backward()
        guard.step(num_steps, clip_grad_norm(parameters, max_norm=training.max_norm))
        optimizer.zero_grad()
        if ema is not None:
            ema.update(num_steps)

    return step


# How it is measured


@contextlib.contextmanager
def one_process(device: torch.device, seed: int = 0) -> Iterator[None]:
    """A process group of this process alone, the trainer's, and its garbage collection by hand."""
    torch.manual_seed(seed)
    init_process_group(Rank(rank=0, local_rank=0, world_size=1), timeout_seconds=600)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.distributed.destroy_process_group()


def time_steps(step: Step, batch: Batch, *, steps: int, device: torch.device) -> list[float]:
    """Seconds of each step. On a GPU by events between steps: the host runs ahead, as in training."""
    if device.type != "cuda":
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - start)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step(batch)
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]


def resident_memory() -> tuple[float | None, float | None]:
    """Resident memory of this process in GiB, now and at its peak; None where there is no /proc.

    Not getrusage: its peak starts at that of the parent process.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None, None
    now, peak = (re.search(rf"^{key}:\s+(\d+) kB", status, re.MULTILINE) for key in ("VmRSS", "VmHWM"))
    assert now is not None and peak is not None
    return int(now[1]) * 1024 / GIB, int(peak[1]) * 1024 / GIB


def new_row(case: Case, batch_size: int) -> dict[str, Any]:
    """The record of one measurement, its results still open."""
    return {
        **dataclasses.asdict(case),
        "patch_size": PATCH_SIZE,
        "sample_shape": list(SAMPLE_SHAPES[case.model]),
        "batch_size": batch_size,
        "status": "ok",
        "reason": None,
        "num_parameters": None,
        "step_times_s": [],
        "step_time_s": None,
        "interquartile_range_s": None,
        "images_per_second": None,
        "tflops_per_device": None,
        "mfu": None,
        "peak_memory_gib": None,
        "peak_memory_growth_gib": None,
        "peak_reserved_gib": None,
    }


def fail(row: dict[str, Any], error: BaseException) -> None:
    verdict = verdict_of(error)
    row["status"], row["reason"] = verdict.status, verdict.reason[:500]
    if verdict.status != "oom":
        traceback.print_exception(error)


def add_times(row: dict[str, Any], times: Sequence[float], *, flops_per_image: int, peak: float | None) -> None:
    median = float(np.median(times))
    flops_per_second = row["batch_size"] * flops_per_image / median
    row["step_times_s"] = [round(seconds, 6) for seconds in times]
    row["step_time_s"] = median
    row["interquartile_range_s"] = float(np.subtract(*np.percentile(times, [75, 25])))
    row["images_per_second"] = row["batch_size"] / median
    row["tflops_per_device"] = flops_per_second / 1e12
    row["mfu"] = None if peak is None else 100 * flops_per_second / peak


def take_turns(
    cases: Sequence[Case], *, batch_size: int, repeats: int, warmup: int, device: torch.device
) -> list[dict[str, Any]]:
    """Time all cases in this process, one step of each in turn: A B A B."""
    rows = {case: new_row(case, batch_size) for case in cases}
    batch = make_batch(build_spec(cases[0]), batch_size, device)
    steps: dict[Case, Step] = {}
    for case in cases:
        print(f"building and warming up {case.title}", flush=True)
        try:
            steps[case], rows[case]["num_parameters"] = build_step(case, device)
            time_steps(steps[case], batch, steps=warmup, device=device)
        except Exception as error:
            fail(rows[case], error)
            steps.pop(case, None)
        gc.collect()

    times: dict[Case, list[float]] = {case: [] for case in steps}
    for turn in range(repeats):
        for case, step in steps.items():
            times[case] += time_steps(step, batch, steps=1, device=device)
        last = "  ".join(f"{seconds[-1]:.3f}" for seconds in times.values())
        print(f"turn {turn + 1} of {repeats}, seconds: {last}", flush=True)
    for case, seconds in times.items():
        flops = count_model_flops(build_spec(case)).total
        add_times(rows[case], seconds, flops_per_image=flops, peak=None)
    return list(rows.values())


def sweep(
    case: Case,
    batch_sizes: Sequence[int],
    *,
    repeats: int,
    warmup: int,
    deadline: float,
    device: torch.device,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """One model, built once, at growing batch sizes until one fails or the time is up."""
    # Every batch size gets kernels of its own, as a run that knows only this size.
    torch._dynamo.config.automatic_dynamic_shapes = False
    resident_before, _ = resident_memory()
    peak = peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    step: Step | None = None
    for batch_size in batch_sizes:
        row = new_row(case, batch_size)
        if time.time() > deadline:
            row["status"], row["reason"] = "skipped", "the time limit was reached"
            report(row)
            return
        try:
            if step is None:
                step, num_parameters = build_step(case, device)
            row["num_parameters"] = num_parameters
            batch = make_batch(build_spec(case), batch_size, device)
            time_steps(step, batch, steps=warmup, device=device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = time_steps(step, batch, steps=repeats, device=device)
            flops = count_model_flops(build_spec(case)).total
            add_times(row, times, flops_per_image=flops, peak=peak)
        except Exception as error:
            fail(row, error)
        add_memory(row, resident_before, device)
        report(row)
        if row["status"] != "ok":
            return
        gc.collect()


def add_memory(row: dict[str, Any], resident_before: float | None, device: torch.device) -> None:
    """GPU: what the allocator handed out and held. CPU: resident memory, and its growth since the imports."""
    if device.type == "cuda":
        row["peak_memory_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        return
    _, row["peak_memory_gib"] = resident_memory()
    if row["peak_memory_gib"] is not None and resident_before is not None:
        row["peak_memory_growth_gib"] = row["peak_memory_gib"] - resident_before


# A process of its own


def sweep_in_subprocess(
    case: Case,
    batch_sizes: Sequence[int],
    *,
    repeats: int,
    warmup: int,
    deadline: float,
    device: torch.device,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """`sweep` in a fresh process: memory of its own, and a crash or a hang ends one case only."""
    options = {
        "case": dataclasses.asdict(case),
        "batch_sizes": list(batch_sizes),
        "repeats": repeats,
        "warmup": warmup,
        "deadline": deadline,
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    # A row that hangs past the deadline (a long compilation, say) is given another minute.
    killer = threading.Timer(max(0.0, deadline - time.time()) + 60, process.kill)
    killer.daemon = True
    killer.start()
    open_sizes = list(batch_sizes)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            row = json.loads(line)
            open_sizes = open_sizes[1:] if row["status"] == "ok" else []
            report(row)
    process.wait()
    killer.cancel()
    if open_sizes:
        row = new_row(case, open_sizes[0])
        row["status"], row["reason"] = "error", f"its process ended with exit code {process.returncode}"
        report(row)


def work(options: dict[str, Any]) -> None:
    """The subprocess of `sweep_in_subprocess`: rows as lines of JSON on stdout."""
    torch.set_num_threads(options.pop("threads"))
    device = torch.device(options.pop("device"))
    case = Case(**options.pop("case"))
    if case.implementation == "diffusers":  # before memory is read: the import takes 100 MB
        importlib.import_module("diffusers.models.transformers.dit_transformer_2d")
    with one_process(device):
        sweep(case, device=device, report=lambda row: print(json.dumps(row), flush=True), **options)


# Report


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "device": device.type,
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "versions": {
            "python": platform.python_version(),
            **{package: version_of(package) for package in ("torch", "diffusers", "numpy")},
            "cuda": torch.version.cuda,
        },
        "git_commit": git_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    try:
        names = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = None
    return names[1] if names else platform.processor() or platform.machine()


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every variant of ours over diffusers in fp32 eager (the targets), and over diffusers in the same variant."""
    fastest: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row["status"] == "ok":
            variant = Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)}).variant
            key = (row["model"], row["implementation"], variant)
            fastest[key] = min(row["step_time_s"], fastest.get(key, float("inf")))
    return [
        {
            "model": model,
            "numerator": f"ours {variant}",
            "denominator": f"diffusers {other}",
            "ratio": seconds / fastest[model, "diffusers", other],
            "target": TARGETS.get(variant) if (model, other) == ("DiT-S", "fp32_eager") else None,
        }
        for (model, implementation, variant), seconds in fastest.items()
        for other in dict.fromkeys(["fp32_eager", variant])
        if implementation == "ours" and (model, "diffusers", other) in fastest
    ]


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("implementation", "", "<14"),
    ("model", "", "<10"),
    ("preset", "", "<10"),
    ("precision", "", "<9"),
    ("compile", "", "<11"),
    ("activation_checkpoint", "ac", "<4"),
    ("batch_size", "batch", ">5"),
    ("step_time_s", "step s", ">8.4f"),
    ("interquartile_range_s", "iqr s", ">8.4f"),
    ("images_per_second", "images/s", ">9.2f"),
    ("mfu", "mfu %", ">6.1f"),
    ("peak_memory_gib", "peak GiB", ">8.2f"),
    ("peak_memory_growth_gib", "grown", ">7.2f"),
    ("peak_reserved_gib", "reserved", ">8.2f"),
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    def cell(value: Any, layout: str) -> str:
        return format("-" if value is None else value, layout.split(".")[0] if value is None else layout)

    lines = ["  ".join(cell(title or key, layout.split(".")[0]) for key, title, layout in COLUMNS)]
    for row in rows:
        line = "  ".join(cell(row[key], layout) for key, _, layout in COLUMNS)
        lines.append(line if row["status"] == "ok" else f"{line}  {row['status']}: {row['reason'][:60]}")
    return "\n".join(lines)


def write_results(path: Path, head: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    document = {**head, "rows": list(rows), "ratios": ratios(rows) if head["device"] == "cpu" else []}
    write_file(path, (json.dumps(document, indent=1) + "\n").encode())


# Entry points


def measure_cpu(args: argparse.Namespace, head: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Memory of each case in a process of its own, then the time of all of them in this one."""
    device = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    for model in args.models:
        cases = cpu_cases(model, against=args.against, variants=args.variants)
        memory: list[dict[str, Any]] = []
        for case in cases if args.memory else []:
            print(f"memory of {case.title}", flush=True)
            sweep_in_subprocess(
                case,
                args.batch_size,
                repeats=1,
                warmup=1,
                deadline=time.time() + args.time_limit,
                device=device,
                report=memory.append,
            )
        with one_process(device):
            timed = take_turns(
                cases, batch_size=args.batch_size[0], repeats=args.repeats, warmup=args.warmup, device=device
            )
        for row, of_its_own in zip(timed, memory, strict=args.memory):
            for key in ("peak_memory_gib", "peak_memory_growth_gib"):
                row[key] = of_its_own[key]
        rows += timed
        write_results(out, head, rows)
    return rows


def measure_gpu(args: argparse.Namespace, head: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Every case in a process of its own, until the time limit; the file grows with every row."""
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
        write_results(out, head, rows)

    deadline = time.time() + args.time_limit
    print(table([]), flush=True)
    for case in gpu_cases(args.models, against=args.against):
        batch_sizes = args.batch_size or GPU_BATCH_SIZES[case.model]
        if time.time() > deadline:
            report({**new_row(case, batch_sizes[0]), "status": "skipped", "reason": "the time limit was reached"})
            continue
        sweep_in_subprocess(
            case,
            batch_sizes,
            repeats=args.repeats,
            warmup=args.warmup,
            deadline=deadline,
            device=torch.device("cuda"),
            report=report,
        )
    return rows


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time, throughput and memory of one training step, against diffusers on a CPU, swept over models "
        "and batch sizes on a GPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu", help="where to measure")
    add("--against", choices=["diffusers", "none"], help="compare with it (default: diffusers on a CPU, else none)")
    add("--size", choices=["full", "debug"], default="full", help="debug: a tiny model, to see that it runs")
    add("--models", nargs="+", choices=list(SAMPLE_SHAPES), help="flavors (default: DiT-S, or XL, L and 7B on a GPU)")
    add("--variants", nargs="+", choices=CPU_VARIANTS, help="on a CPU: what to compare (default: all)")
    add("--batch_size", type=int, nargs="+", help="images per step (default: 16; on a GPU a sweep)")
    add("--repeats", type=int, default=7, help="measured steps of each; their median counts")
    add("--warmup", type=int, default=2, help="steps before, compilation among them")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--time_limit", type=float, default=420, help="seconds: of a GPU sweep, or of each memory process")
    add("--no_memory", dest="memory", action="store_false", help="on a CPU: skip the processes that measure memory")
    add("--out", type=Path, help="the JSON (default: benchmarks/results/step_time_<device>.json)")
    add("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    if args.device == "cuda" and not cuda:
        parser.error("--device cuda: this machine has no CUDA device; use --device cpu")
    if min(args.repeats, args.warmup, *(args.batch_size or [1])) < 1:
        parser.error("--repeats, --warmup and --batch_size must be at least 1")
    if args.device == "cuda" and (args.variants or not args.memory):
        parser.error("--variants and --no_memory are for a CPU; on a GPU choose --models and --batch_size")
    if args.device == "cpu" and len(args.batch_size or [1]) > 1:
        parser.error("--batch_size: one size on a CPU; several are for the sweep on a GPU")
    args.variants = args.variants or list(CPU_VARIANTS)
    args.against = args.against or ("diffusers" if args.device == "cpu" else "none")
    if args.against == "diffusers" and args.worker is None and importlib.util.find_spec("diffusers") is None:
        parser.error("--against diffusers: it is not installed; pip install -e '.[benchmark]', or --against none")
    if args.size == "debug":
        args.models = args.models or ["debugmodel"]
    args.models = args.models or (["DiT-S"] if args.device == "cpu" else ["DiT-XL", "DiT-L", "DiT-7B"])
    if args.device == "cpu":
        args.batch_size = args.batch_size or [2 if args.size == "debug" else 16]
    return args


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 where every row was measured or ran out of memory, 1 where one failed otherwise."""
    args = parse(argv)
    if args.worker is not None:
        work(args.worker)
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    head = {
        "benchmark": "step_time",
        "command": "python benchmarks/step_time.py " + shlex.join(argv),
        "repeats": args.repeats,
        "warmup": args.warmup,
        **environment(device),
    }
    name = "cpu" if device.type == "cpu" else re.sub(r"[^a-z0-9]+", "-", head["device_name"].lower())
    out = args.out or Path(__file__).resolve().parent / "results" / f"step_time_{name}.json"
    if head["load_average_before"] > 0.5:
        print(f"load average {head['load_average_before']}: other work on this machine will show in the numbers")

    rows = (measure_cpu if device.type == "cpu" else measure_gpu)(args, head, out)
    print(f"\n{head['device_name']}, {head['threads']} threads, torch {head['versions']['torch']}")
    print(table(rows))
    for entry in ratios(rows) if device.type == "cpu" else []:
        target = "" if entry["target"] is None else f" (target: at most {entry['target']})"
        print(f"{entry['model']}: {entry['numerator']} / {entry['denominator']}: {entry['ratio']:.3f}{target}")
    print(f"wrote {out}")
    return 1 if any(row["status"] == "error" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
