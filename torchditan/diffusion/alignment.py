# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Self-alignment, SRA (Jiang et al. 2025, arXiv 2505.02831): the EMA model teaches the early blocks of the model.

Notable:
- loss = loss of the wrapped objective + weight (1 - cos), the mean over the patch tokens of one minus the cosine
  similarity of a projected early block of the model and a later block of the EMA model, which has no gradients;
- the teacher sees the same sample, noise and condition at less noise: t + gap u, at most 1. For each sample, u is
  uniform in [0, 1), a function of (seed, index);
- the paper's results used smooth L1 with a weight that decays; its authors now recommend the cosine with weight 0.5
  (https://github.com/vvvvvjdy/SRA), which does not depend on the scale of the tokens. Their code takes the cosine over
  the tokens, ours over the features of each token. Their head has two layers, ours three;
- the objective is wrapped, not replaced: its inputs are recorded at its call of the model. Predictions, weightings
  and terms of flow matching therefore stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from torchditan.config.errors import option_error
from torchditan.diffusion.flow_matching import FlowMatching, wide
from torchditan.diffusion.objectives import Objective
from torchditan.models.alignment_head import FEATURE, AlignedDiT
from torchditan.randomness import Randomness

if TYPE_CHECKING:
    from torchditan.config.options import Config, Diffusion, Sampling
    from torchditan.diffusion.samplers import Prediction
    from torchditan.models.spec import Condition, ModelSpec


def aligned_blocks(spec: ModelSpec, config: Diffusion) -> tuple[int, int]:
    """Indices, from 0, of the model's block and of the teacher's.

    By default after 2/7 and 5/7 of the depth: the paper's blocks 8 and 20 of the 28 of XL.

    Raises:
        ConfigError: the model has fewer blocks, or the teacher's is not the later one.
    """
    depth = spec.config.depth
    student, teacher = config.self_alignment_blocks or (max(1, round(2 * depth / 7)), round(5 * depth / 7))
    if not 1 <= student < teacher <= depth:
        right = f"must be two blocks in order, of the student and of the teacher, from 1 to {depth}"
        raise option_error("diffusion.self_alignment_blocks", [student, teacher], right)
    return student - 1, teacher - 1


@dataclass(frozen=True)
class SelfAlignment(Objective):
    """An objective of the straight path x_t = (1 - t) noise + t x, plus self-alignment."""

    base: FlowMatching
    weight: float
    gap: float
    """Largest difference of the two times."""
    teacher_block: str

    uses_teacher = True

    @staticmethod
    def training_spec(config: Diffusion, spec: ModelSpec) -> ModelSpec:
        """The same model with the projection head, as the feature "alignment_head"."""
        assert spec.name == "dit", "mistakes refuses others"
        student, _ = aligned_blocks(spec, config)
        build = partial(AlignedDiT, spec.config, block=student)
        return dataclasses.replace(spec, build=build, features=[*spec.features, FEATURE])

    @classmethod
    def around(cls, base: Objective, config: Diffusion, spec: ModelSpec) -> SelfAlignment:
        """Wrap an objective, for the model of `training_spec`."""
        assert isinstance(base, FlowMatching), "mistakes refuses others"
        _, teacher = aligned_blocks(spec, config)
        return cls(base, config.self_alignment, config.self_alignment_gap, f"blocks.{teacher}")

    @property
    def features(self) -> tuple[str, ...]:
        return FEATURE, self.teacher_block

    @staticmethod
    def mistakes(config: Config, objective: type[Objective]) -> Iterator[tuple[str, str]]:
        """(option, what would be right) for each option that self-alignment does not support."""
        if not config.ema.enable:
            yield "ema.enable", "diffusion.self_alignment uses the EMA model as its teacher; must be true"
        if not issubclass(objective, FlowMatching) or objective.uses_teacher:
            right = "needs the straight path of flow_matching, without another teacher; must be 0"
            yield "diffusion.self_alignment", f"{right} with {config.diffusion.objective}"
        if config.model.name != "dit":
            right = f"needs the features of a native model; must be 0 with {config.model.name}"
            yield "diffusion.self_alignment", right
        if len(config.diffusion.self_alignment_blocks) not in (0, 2):
            yield "diffusion.self_alignment_blocks", "must be two blocks, of the student and of the teacher: 8,20"

    def loss(  # type: ignore[override]  # an objective with a teacher has one more argument
        self, model: nn.Module, batch: dict[str, torch.Tensor], randomness: Randomness, teacher: nn.Module
    ) -> torch.Tensor:
        """Loss of the wrapped objective + weight x alignment: (B,) float32."""
        student = _Recorder(model)
        losses = self.base.loss(cast(nn.Module, student), batch, randomness)
        assert randomness.alignment is not None, "build_stream asks for it"
        t = self.teacher_time(self.base.model_time(student.t), randomness.alignment)  # (B,)
        x, t_wide = batch["sample"], wide(t, batch["sample"])
        x_t = (1 - t_wide) * randomness.noise + t_wide * x
        _, found = teacher(x_t, self.base.model_time(t), student.cond, features=[self.teacher_block])
        targets = found[self.teacher_block].detach()
        distance = 1 - cosine_similarity(student.tokens.float(), targets.float(), dim=-1)  # (B, N)
        return losses + self.weight * distance.mean(1)

    def teacher_time(self, t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Time of the teacher (B,): later than t (B,) by gap u, with u (B,) in [0, 1), but at most 1."""
        return (t + self.gap * u).clamp(max=1.0)

    def model_time(self, t: Any) -> Any:
        return self.base.model_time(t)

    def sample(self, predict: Prediction, noise: torch.Tensor, *, sampling: Sampling) -> torch.Tensor:
        return self.base.sample(predict, noise, sampling=sampling)

    def num_evaluations(self, sampling: Sampling) -> int:
        return self.base.num_evaluations(sampling)


class _Recorder:
    """Calls the model like an objective without features, and keeps the inputs and the projected tokens."""

    t: torch.Tensor
    cond: Condition
    tokens: torch.Tensor

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        prediction, found = self._model(x_t, t, cond, features=[FEATURE])
        self.t, self.cond, self.tokens = t, cond, found[FEATURE]
        return prediction
