# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""One-step generation: improved MeanFlow (Geng et al. 2025, arXiv 2512.02012) and MeanFlow (arXiv 2505.13447).

Notable:
- the model predicts the mean velocity u(x_t, t, h) over [t, t + h], so that x_{t+h} = x_t + h u. The scalar condition
  `interval` is h. At h = 0, u is the velocity of flow matching, x - noise on average;
- the derivative of h u along the path, with a fixed end, gives u = v + h du/dt, and so V = u - h du/dt is regressed on
  x - noise. du/dt is along (dx, dt, dh) = (v, 1, -1), has no gradients, and is exact (diffusion/derivative.py);
- improved MeanFlow differentiates along the model's own velocity, MeanFlow along x - noise (`tangent=data`). The loss
  is otherwise the same;
- the samples at even positions of the stream have h = 0, so that half of a micro-batch needs no derivative. t and t + h
  are the smaller and the larger of two draws. In the papers t = 1 is noise: their logit-normal mean of -0.4 is 0.4
  here;
- each sample has the weight 1 / (its squared error + 0.01), where the squared error is a sum over its values. The log
  has the mean of the error without weights;
- with `guidance=8` the model also gets 1 - 1 / scale and an interval of t, and learns the guided velocity
  v + (1 - 1 / scale) (v_label - v_null). Samples with guidance then take one evaluation per step. Training computes
  v_null for all samples, and v_label for those with h > 0; for the others it is the prediction itself.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import nn

from torchditan.diffusion.derivative import derivative
from torchditan.diffusion.flow_matching import FlowMatching, wide
from torchditan.diffusion.objectives import Inputs, Losses
from torchditan.diffusion.samplers import Prediction, StepNoise
from torchditan.errors import option_error
from torchditan.models.spec import Condition, Unconditional
from torchditan.randomness import NOISE_TIMESTEP_DROPOUT, Kind, Randomness
from torchditan.registry import OBJECTIVES, entry_name, resolve

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.models.spec import ModelSpec

INTERVAL = "interval"
GUIDANCE = ("guidance", "guidance_start", "guidance_end")
LARGEST_SCALE = 8.0
"""Of `guidance=true`, as in the paper."""
_WEIGHT_OFFSET = 0.01


@dataclass(frozen=True)
class MeanFlow(FlowMatching):
    """The model's prediction is the mean velocity over an interval of time. See the file's docstring."""

    tangent: str = field(default="model", kw_only=True)
    """Direction of the derivative: the `model`'s velocity, or that of the `data`, x - noise."""
    guidance: float = field(default=0.0, kw_only=True)
    """The largest guidance scale to learn. Training draws scales from 1 to this, uniform in their logarithm. 0: the
    model gets neither scale nor interval."""

    batch_multiple = 2
    defaults: ClassVar[Mapping[str, Any]] = {
        "model.timestep_scale": 1.0,
        "diffusion.logit_normal_mean": 0.4,
        "sampling.num_steps": 1,
    }

    @classmethod
    def build(
        cls, config: Diffusion, spec: ModelSpec, tangent: str = "model", guidance: bool | float = False
    ) -> MeanFlow:
        """Build it from its options.

        Args:
            config, spec: as in `Objective.build`.
            tangent: model (improved MeanFlow) or data (MeanFlow).
            guidance: give the guidance scale and interval to the model: the largest scale to learn, or true for 8.

        Raises:
            ConfigError: values out of range, or guidance for a model without labels or captions.
        """

        def refuse(option: str, value: Any, right: str) -> NoReturn:
            raise option_error("diffusion.objective", f"{entry_name(config.objective)} {option}={value}", right)

        if tangent not in ("model", "data"):
            refuse("tangent", tangent, "must be model or data")
        largest = _largest_scale(guidance)
        if largest is None:
            refuse("guidance", guidance, "must be true, false, or the largest scale to learn, a number above 1")
        if largest and isinstance(spec.conditioning, Unconditional):
            refuse("guidance", str(guidance).lower(), "needs labels or captions; leave it out")
        plain = FlowMatching.build(config, spec)
        return cls(plain.conditioning, plain.timesteps, plain.label_dropout, tangent=tangent, guidance=largest)

    @classmethod
    def option_mistakes(cls, config: Config, changed: Collection[str]) -> Iterator[tuple[str, str]]:
        yield from super().option_mistakes(config, changed)
        name = entry_name(config.diffusion.objective)
        for option, right, why in (
            (
                "model.timestep_scale",
                1.0,
                "differentiates it; refit weights by torchditan refit_time",
            ),
            ("diffusion.prediction", "v", "predicts a velocity"),
            ("diffusion.loss_weighting", "none", "has weights of its own"),
            ("sampling.sampler", "euler", "takes the steps x + h u"),
            ("float8.enable_float8_linear", False, "differentiates linear layers"),
        ):
            if attrgetter(option)(config) not in (None, right):
                yield option, f"must be {json.dumps(right)}: {name} {why}"
        largest = cls.learned_scale(config.diffusion)
        if largest and not 1 <= config.sampling.guidance_scale <= largest:
            yield "sampling.guidance_scale", f"is given to the model; must be 1 to {largest:g}, which it learns"
        start, end = config.sampling.guidance_interval
        if largest and not start <= 0.5 <= end:
            yield "sampling.guidance_interval", "is given to the model; must contain 0.5, as all that it learns"
        if largest and config.sampling.negative_prompt:
            yield "sampling.negative_prompt", f"has no effect: {name} gives guidance to the model; leave it out"

    @classmethod
    def scalars(cls, config: Diffusion) -> Mapping[str, float]:
        return dict.fromkeys((INTERVAL, *(GUIDANCE if cls.learned_scale(config) else ())), 1.0)

    @classmethod
    def learned_scale(cls, config: Diffusion) -> float | None:
        """The largest guidance scale that the objective in `config` learns: as `_largest_scale`."""
        _, options = resolve(OBJECTIVES, "diffusion.objective", config.objective)
        return _largest_scale(options.get("guidance", False))

    @property
    def numbers(self) -> Mapping[str, Kind]:
        others: dict[str, Kind] = dict.fromkeys(("second_timestep", *(GUIDANCE if self.guidance else ())), "uniform")
        return {**NOISE_TIMESTEP_DROPOUT, **others}

    @property
    def embeds_guidance(self) -> bool:
        return self.guidance > 0

    def inputs(self, batch: dict[str, torch.Tensor], randomness: Randomness) -> Inputs:
        """Those of flow matching, with h = 0 and a guidance scale of 1, whose target is x - noise."""
        x_t, t, cond = super().inputs(batch, randomness)
        return Inputs(x_t, t, {**cond, INTERVAL: torch.zeros_like(t), **(_unguided(t) if self.guidance else {})})

    def validation_loss(
        self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness
    ) -> torch.Tensor | Losses:
        """The loss of flow matching, of u at h = 0."""
        return super().loss(model, batch, randomness)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness) -> Losses:
        """|u - h du/dt - v|^2 with adaptive weights. The micro-batch starts at an even position of the stream."""
        x = batch["sample"]  # (B, C, H, W)
        t, h = self.interval(randomness)
        inputs = self.inputs_at(t, batch, randomness)
        inputs.cond.update({INTERVAL: h, **self.guidance_of(randomness)})

        velocity = target = x - randomness.noise
        still, moving = slice(0, None, 2), slice(1, None, 2)  # h = 0 and h > 0
        if self.guidance:
            is_dropped = randomness.label_dropout < self.label_dropout
            strength = wide(self.strength(inputs) * ~is_dropped, x)
            of_label, of_null = self.label_and_null_velocity(model, inputs, moving)
            guided = velocity[moving] + strength[moving] * (of_label - of_null[moving])
            direction = of_label if self.tangent == "model" else guided
        elif self.tangent == "model":
            direction = self.own_velocity(model, _rows(inputs, moving))
        else:
            direction = velocity[moving]
        tangents = (direction, torch.ones_like(t[moving]), {INTERVAL: -torch.ones_like(h[moving])})
        _, du_dt = derivative(model, _rows(inputs, moving), tangents)
        change = wide(h[moving], du_dt) * du_dt.float()  # (B / 2, C, H, W)

        u = model(*inputs).float()
        if self.guidance:  # the velocity of samples with h = 0 is what was just predicted
            own = u[still].detach()
            target = _interleave(velocity[still] + strength[still] * (own - of_null[still]), guided)
        compound = _interleave(u[still], u[moving] - change)
        error = (compound - target).square().flatten(1).sum(1)
        total = error / (error.detach() + _WEIGHT_OFFSET)
        logged = {
            "loss": error.detach() / x[0].numel(),
            "h_du_dt_rms": change.square().flatten(1).mean(1).sqrt().repeat_interleave(2),  # of the samples with h > 0
        }
        return Losses(total, logged)

    def interval(self, randomness: Randomness) -> tuple[torch.Tensor, torch.Tensor]:
        """t and h (B,) float32. h = 0 at even positions."""
        first, second = self.timesteps(randomness.timestep), self.timesteps(randomness["second_timestep"])
        h = (first - second).abs()
        return torch.minimum(first, second), h * (torch.arange(len(h), device=h.device) % 2)

    def guidance_of(self, randomness: Randomness) -> Condition:
        """1 - 1 / scale, with a scale in [1, guidance], and an interval that contains t = 1/2: (B,) float32 each."""
        if not self.guidance:
            return {}
        scale, start, end = (randomness[name] for name in GUIDANCE)
        values = (1 - self.guidance**-scale, start / 2, (1 + end) / 2)
        return dict(zip(GUIDANCE, values, strict=True))

    @torch.no_grad()
    def own_velocity(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """The model's velocity at these inputs, u at h = 0: (B, C, H, W) float32."""
        cond = {**inputs.cond, INTERVAL: torch.zeros_like(inputs.t)}
        with torch.compiler.set_stance("force_eager"):  # it would recompile for other batch sizes
            return model(inputs.x_t, inputs.t, cond).float()

    def strength(self, inputs: Inputs) -> torch.Tensor:
        """1 - 1 / scale inside the guidance interval, 0 outside: (B,)."""
        strength, start, end = (inputs.cond[name] for name in GUIDANCE)
        return strength * ((start <= inputs.t) & (inputs.t <= end))

    def label_and_null_velocity(
        self, model: nn.Module, inputs: Inputs, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's velocity with labels for these rows, and without labels for all: (b, C, H, W), (B, C, H, W).

        The target with guidance is v + (1 - 1 / scale) (v_label - v_null). v_label is guided already, so that it is
        scale v_label + (1 - scale) v_null of velocities without guidance.
        """
        x_t, t, cond = inputs
        label = {name: cond[name] for name in cond if name not in (INTERVAL, *GUIDANCE)}
        null = Inputs(x_t, t, {**self.conditioning.null(label), INTERVAL: cond[INTERVAL], **_unguided(t)})
        found = self.own_velocity(model, _concatenate(_rows(inputs, rows), null))
        return found[: -len(t)], found[-len(t) :]

    def sample(
        self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling, step_noise: StepNoise
    ) -> torch.Tensor:
        """Steps x + h u through the timesteps, from noise to data."""
        guidance: dict[str, float] = {}
        if self.guidance:
            values = (1 - 1 / sampling.guidance_scale, *sampling.guidance_interval)
            guidance = dict(zip(GUIDANCE, values, strict=True))
        x = noise
        timesteps = self.timesteps.grid(sampling.num_steps, shift=sampling.timestep_shift)
        for t, t_next in itertools.pairwise(timesteps):
            x = x + (t_next - t) * predict(x, t, **{INTERVAL: t_next - t}, **guidance)
        return x

    def num_evaluations(self, sampling: Sampling) -> int:
        return sampling.num_steps


def _largest_scale(guidance: Any) -> float | None:
    """The largest guidance scale to learn, 0 without guidance; None for a value that is neither."""
    if isinstance(guidance, bool):
        return LARGEST_SCALE if guidance else 0.0
    return float(guidance) if isinstance(guidance, int | float) and 1 < guidance < math.inf else None


def _unguided(t: torch.Tensor) -> Condition:
    """The guidance conditions of a scale of 1, for every t (B,)."""
    return dict(zip(GUIDANCE, (torch.zeros_like(t), torch.zeros_like(t), torch.ones_like(t)), strict=True))


def _interleave(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """The rows of both (B / 2, ...), in turn: (B, ...)."""
    return torch.stack([even, odd], dim=1).flatten(0, 1)


def _concatenate(first: Inputs, second: Inputs) -> Inputs:
    cond = {name: torch.cat([value, second.cond[name]]) for name, value in first.cond.items()}
    return Inputs(torch.cat([first.x_t, second.x_t]), torch.cat([first.t, second.t]), cond)


def _rows(inputs: Inputs, rows: slice) -> Inputs:
    x_t, t, cond = inputs
    return Inputs(x_t[rows], t[rows], {name: value[rows] for name, value in cond.items()})
