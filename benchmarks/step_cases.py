# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The cases of step_time.py: which ones take turns, and how each one's step is built.

Notable:
- ours is the trainer's own step, and samples are drawn as `torchditan generate` does;
- diffusers' model gets the step and the sampler of plain_dit.py;
- data and weights are random normal: zeros run faster on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plain_dit
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trainer_step import Step, build_trainer, fill_with_normal, num_parameters, trainer_step

from torchditan.config.loader import load_config
from torchditan.config.options import Config, Model
from torchditan.distributed.precision import multiplies_bfloat16
from torchditan.distributed.process_group import Rank
from torchditan.extras.weights.trained_model import TrainedModel
from torchditan.models import ModelSpec, build_model_spec
from torchditan.sampling.drawing import SampleRows

NUM_CLASSES = 1000
PATCH_SIZE = 2
GUIDANCE_SCALE = 2.0

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

SWEEP_BATCH_SIZES = {
    "debugmodel": (2, 4),
    "DiT-S": (256, 512, 1024),
    "DiT-B": (128, 256, 512),
    "DiT-L": (64, 128, 256),
    "DiT-XL": (32, 64, 128, 256),
    "DiT-1B": (32, 64, 128),
    "DiT-7B": (4, 8, 16, 32),
}

VARIANTS = ("fp32_eager", "fp32_compiled", "bf16_eager", "bf16_compiled")


@dataclass(frozen=True)
class Case:
    """One implementation, precision and kind of work."""

    implementation: str
    """ours, bare loop (over our model), plain or diffusers."""
    model: str
    """A flavor of models/dit.py."""
    precision: str
    """fp32 or bf16: `training.mixed_precision_param` of ours. Others train under autocast."""
    compiled: bool = False
    """Ours per block, others as a whole."""
    preset: str = "official"
    """Of our model. The others are the official architecture."""
    depth: int | None = None
    """Blocks of ours, if not the flavor's."""
    work: str = "train"
    """train or sample."""
    flags: tuple[str, ...] = ()
    """More options of train.py, for ours."""

    @property
    def overrides(self) -> list[str]:
        return [] if self.depth is None else [f"depth={self.depth}"]


@dataclass(frozen=True)
class Group:
    """Cases that are measured in the same processes: two that take turns, or one alone."""

    suite: str
    cases: tuple[Case, ...]
    batch_size: int
    """Images of a step, or drawn at once, over all ranks."""
    num_ranks: int = 1
    target: float | None = None
    """Largest time of the first case, as a multiple of the second's."""
    missing: str | None = None
    """Why it cannot be measured on this machine."""


@dataclass(frozen=True)
class Choice:
    """What the command line asks for."""

    device: torch.device
    models: tuple[str, ...]
    variants: tuple[str, ...]
    ranks: tuple[int, ...]
    batch_sizes: tuple[int, ...] | None
    """None: those of each suite."""
    flags: tuple[str, ...] = ()
    """Of the suite `options`."""


def lacks_bf16(device: torch.device) -> str | None:
    """Why bfloat16 is not worth measuring on this device; None if it is."""
    return None if multiplies_bfloat16(device) else "this CPU has no bfloat16 products"


def lacks_amx(device: torch.device) -> str | None:
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return None if device.type == "cuda" or found.get("amx_bf16") else "this CPU has no AMX"


def of_variant(variant: str, **fields: Any) -> Case:
    precision, mode = variant.split("_")
    return Case(precision=precision, compiled=mode == "compiled", **fields)


def against(choice: Choice, other: str) -> Iterator[Group]:
    """A training step of ours and another implementation's, with the same model."""
    for model in choice.models:
        for num_ranks in choice.ranks:
            for variant in choice.variants:
                cases = tuple(of_variant(variant, implementation=name, model=model) for name in ("ours", other))
                is_reference = (model, other, num_ranks) == ("DiT-S", "diffusers", 1)
                yield Group(
                    other,
                    cases,
                    batch_size=32 if choice.device.type == "cuda" else 16,
                    num_ranks=num_ranks,
                    target=1.0 if is_reference else None,
                    missing=lacks_bf16(choice.device) if "bf16" in variant else None,
                )


def sampling(choice: Choice) -> Iterator[Group]:
    """Drawing images. Ours is never compiled: `torchditan generate` does not compile."""
    for model in choice.models:
        for other in ("diffusers", "plain"):
            for num_ranks in choice.ranks:
                for variant in dict.fromkeys(name.replace("compiled", "eager") for name in choice.variants):
                    names = ("ours", other)
                    yield Group(
                        "sampling",
                        tuple(of_variant(variant, implementation=name, model=model, work="sample") for name in names),
                        batch_size=32,
                        num_ranks=num_ranks,
                        target=0.9 if (model, other, num_ranks) == ("DiT-S", "diffusers", 1) else None,
                        missing=lacks_bf16(choice.device) if "bf16" in variant else None,
                    )


def trainer(choice: Choice) -> Iterator[Group]:
    """The trainer's step against a bare loop over the same model, in one process."""
    for model in choice.models:
        for variant in choice.variants:
            names = ("ours", "bare loop")
            yield Group(
                "trainer",
                tuple(of_variant(variant, implementation=name, model=model) for name in names),
                batch_size=32 if choice.device.type == "cuda" else 16,
                target=1.03,
                missing=lacks_bf16(choice.device) if "bf16" in variant else None,
            )


def float32_products(choice: Choice) -> Iterator[Group]:
    """float32 with products in bfloat16 (on a GPU in TF32) against IEEE float32."""
    precision = "high" if choice.device.type == "cuda" else "medium"
    variants = [variant for variant in choice.variants if variant.startswith("fp32")]
    for model in choice.models:
        for variant in variants or VARIANTS[:2]:  # those of a GPU are bf16 by default
            plain = of_variant(variant, implementation="ours", model=model)
            faster = replace(plain, flags=(f"--training.float32_matmul_precision={precision}",))
            yield Group(
                "float32_products",
                (faster, plain),
                batch_size=32 if choice.device.type == "cuda" else 16,
                target=0.6 if choice.device.type == "cpu" else None,
                missing=lacks_amx(choice.device),
            )


def options(choice: Choice) -> Iterator[Group]:
    """The trainer's step with the options `choice.flags` against the same step without them."""
    for model in choice.models:
        for num_ranks in choice.ranks:
            for variant in choice.variants:
                without = of_variant(variant, implementation="ours", model=model, preset="torchditan")
                yield Group(
                    "options",
                    (replace(without, flags=choice.flags), without),
                    batch_size=32 if choice.device.type == "cuda" else 16,
                    num_ranks=num_ranks,
                    missing=lacks_bf16(choice.device) if "bf16" in variant else None,
                )


def float8(choice: Choice) -> Iterator[Group]:
    """Float8 against bfloat16, both compiled. Of DiT-7B only 6 blocks, which fit twice; the sweep has all of it."""
    for model in choice.models:
        is_7b = model == "DiT-7B"
        bf16 = Case("ours", model, "bf16", compiled=True, preset="torchditan", depth=6 if is_7b else None)
        float8 = replace(bf16, flags=("--float8.enable_float8_linear",))
        missing = None if choice.device.type == "cuda" else "needs a GPU with float8 products"
        yield Group("float8", (float8, bf16), batch_size=128, target=0.85 if is_7b else None, missing=missing)


def sweep(choice: Choice) -> Iterator[Group]:
    """The trainer's step alone, at growing batch sizes until memory runs out: throughput, MFU and memory."""
    missing = None if choice.device.type == "cuda" else "needs a GPU"
    for model in choice.models:
        compiled = Case("ours", model, "bf16", compiled=True, preset="torchditan")
        cases = [compiled, replace(compiled, compiled=False)]
        if model == "DiT-XL":  # a published model, so it has the published preset too
            cases.append(replace(compiled, preset="official"))
        if model == "DiT-7B":  # float32 weights, gradients, moments and an average do not fit on one GPU
            cases = [replace(case, flags=("--ema.enable=false",)) for case in cases]
            cases += [replace(case, flags=(*case.flags, "--activation_checkpoint.mode=full")) for case in cases]
            cases += [replace(case, flags=(*case.flags, "--float8.enable_float8_linear")) for case in cases[::2]]
        for case in cases:
            for batch_size in choice.batch_sizes or SWEEP_BATCH_SIZES[model]:
                yield Group("sweep", (case,), batch_size, missing=missing)


SUITES: dict[str, Callable[[Choice], Iterator[Group]]] = {
    "diffusers": lambda choice: against(choice, "diffusers"),
    "plain": lambda choice: against(choice, "plain"),
    "sampling": sampling,
    "trainer": trainer,
    "float32_products": float32_products,
    "float8": float8,
    "sweep": sweep,
    "options": options,
}


def build_groups(suites: Sequence[str], choice: Choice) -> list[Group]:
    groups = [group for suite in suites for group in SUITES[suite](choice)]
    if choice.batch_sizes is None:
        return groups
    sizes = {group: (group.batch_size,) if group.suite == "sweep" else choice.batch_sizes for group in groups}
    return [replace(group, batch_size=size) for group in groups for size in sizes[group]]


def build_spec(case: Case) -> ModelSpec:
    size = {"flavor": case.model, "overrides": case.overrides, "patch_size": PATCH_SIZE}
    config = Model(preset=case.preset, learn_sigma=False, **size)  # type: ignore[arg-type]
    return build_model_spec(config, sample_shape=SAMPLE_SHAPES[case.model], num_classes=NUM_CLASSES)


def job(case: Case, *, batch_size: int, num_ranks: int, folder: Path, sampling_steps: int) -> Config:
    """The options of train.py for a case of ours. `batch_size` counts the images of all ranks."""
    channels, height, width = SAMPLE_SHAPES[case.model]
    precision = {"fp32": "float32", "bf16": "bfloat16"}[case.precision]
    return load_config(
        [
            f"--model.flavor={case.model}",
            *(f"--model.overrides={override}" for override in case.overrides),
            f"--model.preset={case.preset}",
            "--model.learn_sigma=false",
            f"--model.patch_size={PATCH_SIZE}",
            f"--model.input_channels={channels}",
            "--dataset.dataset_name=dummy",
            "--dataset.image_size",
            str(height),
            str(width),
            f"--dataset.num_classes={NUM_CLASSES}",
            f"--dataset.num_workers={4 if torch.cuda.is_available() else 0}",
            f"--training.batch_size={batch_size // num_ranks}",
            f"--training.mixed_precision_param={precision}",
            f"--training.data_parallel_replicate_degree={num_ranks}",
            "--training.steps=1000000",
            *(["--training.compile"] if case.compiled else []),
            f"--sampling.num_steps={sampling_steps}",
            f"--sampling.guidance_scale={GUIDANCE_SCALE}",
            "--metrics.enable_sampling=false",
            "--metrics.experiment_name=run",
            f"--job.dump_folder={folder}",
            *case.flags,
        ]
    )


def build_step(case: Case, *, batch_size: int, rank: Rank, folder: Path, sampling_steps: int) -> Step:
    """The step of a case on this rank. The process group is open."""
    options = {"batch_size": batch_size, "num_ranks": rank.world_size, "folder": folder}
    if case.implementation in ("ours", "bare loop"):
        config = job(case, **options, sampling_steps=sampling_steps)  # type: ignore[arg-type]
        if case.work == "sample":
            return sampling_of_ours(case, config, batch_size=batch_size, rank=rank)
        if case.implementation == "bare loop":
            config = config.replace({"ema.enable": False})
        built = build_trainer(config)
        fill_with_normal(built.model)
        if case.implementation == "ours":
            return trainer_step(built)
        return replace(bare_loop(built.model, case, batch_size, rank.device), close=built.supervision.close)
    build = build_plain if case.implementation == "plain" else build_diffusers
    with rank.device:
        model = build(build_spec(case))
    fill_with_normal(model)
    if case.work == "sample":
        return sampling_of_others(model, case, batch_size=batch_size, rank=rank, num_steps=sampling_steps)
    size = num_parameters(model)
    model.train()
    computing: nn.Module = DistributedDataParallel(model) if rank.world_size > 1 else model
    if case.compiled:
        computing = torch.compile(computing)  # type: ignore[assignment]
    sample, label = random_batch(case, batch_size // rank.world_size, rank.device)
    step = plain_dit.training_step(
        predict_of(case, computing),
        list(model.parameters()),
        sample=sample,
        label=label,
        null_label=NUM_CLASSES,
        autocast=case.precision == "bf16",
    )
    return Step(step, size)


def bare_loop(model: nn.Module, case: Case, batch_size: int, device: torch.device) -> Step:
    """The loop of plain_dit.py over a model of the trainer, which has its precision."""
    sample, label = random_batch(case, batch_size, device)
    step = plain_dit.training_step(
        lambda x_t, t, label: model(x_t, t, {"class_label": label}),
        list(model.parameters()),
        sample=sample,
        label=label,
        null_label=NUM_CLASSES,
        autocast=False,
    )
    return Step(step, num_parameters(model))


def sampling_of_ours(case: Case, config: Config, *, batch_size: int, rank: Rank) -> Step:
    """Draws `batch_size` images, as `torchditan generate` does with a trained model."""
    spec = build_spec(case)
    with torch.device("meta"):
        model = spec.build()
    model.to_empty(device=rank.device)
    fill_with_normal(model)
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    trained = TrainedModel(
        config=config,
        spec=spec,
        model=model.to(dtype).eval().requires_grad_(False),
        sample_shape=spec.sample_shape,
        num_classes=NUM_CLASSES,
        step=0,
        weights="raw",
        device=rank.device,
        dtype=dtype,
    )
    names = [str(label) for label in range(NUM_CLASSES)]
    rows = SampleRows.of_classes(range(batch_size), class_names=names)

    def run() -> None:
        trained.generate_rows(rows, samples_per_row=1, seed=0, batch_size=batch_size // rank.world_size)

    return Step(run, num_parameters(model))


def sampling_of_others(model: nn.Module, case: Case, *, batch_size: int, rank: Rank, num_steps: int) -> Step:
    """Draws this rank's share of the images: plain under autocast, diffusers with weights in bfloat16."""
    model.eval().requires_grad_(False)
    if case.implementation == "diffusers" and case.precision == "bf16":
        model.to(torch.bfloat16)
    _, label = random_batch(case, batch_size // rank.world_size, rank.device)

    def run() -> None:
        plain_dit.draw(
            predict_of(case, model),
            torch.randn((len(label), *SAMPLE_SHAPES[case.model]), device=rank.device),
            label,
            null_label=NUM_CLASSES,
            num_steps=num_steps,
            guidance_scale=GUIDANCE_SCALE,
            autocast=case.implementation == "plain" and case.precision == "bf16",
        )

    return Step(run, num_parameters(model))


def predict_of(case: Case, model: nn.Module) -> plain_dit.Predict:
    if case.implementation == "plain":
        return model
    dtype = next(model.parameters()).dtype
    return lambda x, t, label: model(x.to(dtype), (1000 * t).long(), label, return_dict=False)[0]


def build_plain(spec: ModelSpec) -> plain_dit.PlainDiT:
    """The plain DiT of our model's shape."""
    config = spec.config
    return plain_dit.PlainDiT(
        depth=config.depth,
        width=config.width,
        num_heads=config.num_heads,
        patch_size=config.patch_size,
        channels=config.input_channels,
        image_size=config.image_size[0],
        num_classes=config.num_classes,
    )


def build_diffusers(spec: ModelSpec) -> nn.Module:
    """diffusers' DiT of our model's width, depth, heads, MLP ratio, channels and classes.

    It keeps its own structure: an embedder of timestep and label in every block, and separate q, k and v. In training,
    it would drop labels in every block with its own random numbers, while the step drops them once. Its label dropout
    is therefore off, but its label tables keep the null class, like ours.
    """
    from diffusers.models.embeddings import LabelEmbedding
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    config = spec.config
    height, width = config.image_size
    assert height == width, "diffusers' DiT takes square samples"
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


def random_batch(case: Case, batch_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples (B, C, H, W) and labels (B,), the same in every step. Only our step loads data."""
    sample = torch.randn((batch_size, *SAMPLE_SHAPES[case.model]), device=device)
    return sample, torch.randint(NUM_CLASSES, (batch_size,), device=device)
