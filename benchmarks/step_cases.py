# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The cases of step_time.py, and the training step of each as a function of the batch.

Notable: data and weights are random normal. Zeros run faster on GPUs, and adaLN-zero's initial weights would make
most gradients zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchditan.config.options import EMA as EMAConfig
from torchditan.config.options import Diffusion, Model, Optimizer, Training
from torchditan.diffusion.flow_matching import FlowMatching
from torchditan.diffusion.timesteps import Timesteps
from torchditan.distributed.parallel_dims import ParallelDims
from torchditan.distributed.parallelize import CompileOptions, parallelize
from torchditan.models import ModelSpec, build_model_spec
from torchditan.optim.divergence import DivergenceGuard
from torchditan.optim.ema import EMA
from torchditan.optim.optimizers import build_optimizer, clip_grad_norm
from torchditan.randomness import Randomness

NUM_CLASSES = 1000
PATCH_SIZE = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

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
    """One case to measure, without the batch size."""

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
    def title(self) -> str:
        parts = [self.implementation, f"{self.model}/{PATCH_SIZE}", self.preset, self.precision, self.compile]
        parts += [f"ac {self.activation_checkpoint}"] if self.activation_checkpoint != "none" else []
        return " ".join(dict.fromkeys(parts))  # diffusers is its own preset


@dataclass(frozen=True)
class Batch:
    """One batch on the device, reused in every step, so that loading data is not measured."""

    sample: torch.Tensor
    class_label: torch.Tensor
    randomness: Randomness


Step = Callable[[Batch], None]


def cpu_cases(model: str, *, against: str, variants: Sequence[str]) -> list[Case]:
    """Ours and diffusers in turns. diffusers is compiled in both ways, and the faster one counts."""
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
    """The trainer's step in bf16. Compiled cases come first because users run them."""
    cases = []
    for how in ("per_block", "eager"):
        for model in models:
            # float32 weights, gradients, moments and an EMA of 7B parameters do not fit on one GPU
            cases.append(Case("ours", model, "torchditan", "bf16", how, "trainer", ema=model != "DiT-7B"))
    for model in models:
        if model == "DiT-7B":
            cases.append(
                Case("ours", model, "torchditan", "bf16", "per_block", "trainer", activation_checkpoint="full")
            )
        if model == "DiT-XL":  # a published model, so it uses the published preset too
            for how in ("per_block", "eager"):
                cases.append(Case("ours", model, "official", "bf16", how, "trainer", ema=True))
        if against == "diffusers":
            for how in ("whole_model", "eager"):
                cases.append(Case("diffusers", model, "diffusers", "bf16", how, "bare"))
    return cases


def build_spec(case: Case) -> ModelSpec:
    """Our model of a case; for diffusers, our model of the same shape."""
    preset = "official" if case.implementation == "diffusers" else case.preset
    config = Model(flavor=case.model, preset=preset, patch_size=PATCH_SIZE, learn_sigma=False)  # type: ignore[arg-type]
    return build_model_spec(config, sample_shape=SAMPLE_SHAPES[case.model], num_classes=NUM_CLASSES)


def build_ours(spec: ModelSpec, case: Case, device: torch.device) -> nn.Module:
    """Build it like the trainer: on meta, parallelized over a mesh of one process, then initialized."""
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

    It keeps its own structure: an embedder of timestep and label in every block, and separate q, k and v. In training,
    it would drop labels in every block with its own random numbers, while our objective drops them outside the bare
    step. Label dropout is therefore off, but its label tables keep the null class, like ours.
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
    """Set all weights to N(0, 0.02), and norms to 1 plus that, drawn on the device."""
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
    if case.implementation == "diffusers":
        step = diffusers_step(model, case, device)
    elif case.step == "trainer":
        step = trainer_step(model, spec, case)
    else:
        step = bare_step(model)
    return step, sum(parameter.numel() for parameter in model.parameters())


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


def trainer_step(model: nn.Module, spec: ModelSpec, case: Case, options: Optimizer | None = None) -> Step:
    """The work of torchditan/trainer.py between two batches, with the default options or those of an optimizer."""
    diffusion, training, ema_config = Diffusion(), Training(), EMAConfig()
    objective = FlowMatching(
        conditioning=spec.conditioning,
        timesteps=Timesteps(
            kind=diffusion.timestep_sampling,
            mean=diffusion.logit_normal_mean,
            std=diffusion.logit_normal_std,
            shift=spec.timestep_shift,
        ),
        label_dropout=diffusion.label_dropout,
    )
    optimizer = build_optimizer(model, options or Optimizer())
    guard = DivergenceGuard(optimizer)
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
