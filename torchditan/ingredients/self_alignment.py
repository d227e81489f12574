# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Self-alignment, SRA (Jiang et al. 2025, arXiv 2505.02831): the EMA model teaches the early blocks of the model.

Notable:
- loss = loss of flow matching + weight (1 - cos), the mean over the patch tokens of one minus the cosine similarity of
  a projected early block of the model and a later block of the EMA model, which has no gradients;
- the teacher sees the same sample, noise and condition at less noise: t + gap u, at most 1. For each sample, u is
  uniform in [0, 1), a function of (seed, index);
- the paper's results used smooth L1 with a weight that decays; its authors now recommend the cosine with weight 0.5
  (https://github.com/vvvvvjdy/SRA), which does not depend on the scale of the tokens. Their code takes the cosine over
  the tokens, ours over the features of each token. Their head has two layers, ours three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from torchditan.config.errors import option_error
from torchditan.diffusion.flow_matching import FlowMatching, wide
from torchditan.diffusion.objectives import Ingredient, Losses, Objective
from torchditan.models.spec import Head
from torchditan.randomness import Kind, Randomness

if TYPE_CHECKING:
    from torchditan.config.options import Config
    from torchditan.models.spec import ModelSpec

HEAD = "alignment"


@dataclass(frozen=True)
class SelfAlignment(Ingredient):
    """Flow matching, plus the alignment of the model's block `student` with the EMA model's block `teacher`."""

    weight: float
    gap: float
    """Largest difference of the two times."""
    student: str
    teacher: str
    width: int

    uses_teacher = True

    @classmethod
    def around(
        cls,
        base: Objective,
        spec: ModelSpec,
        weight: float = 0.5,
        gap: float = 0.2,
        blocks: Sequence[int] = (),
    ) -> SelfAlignment:
        """Build it from its options.

        Args:
            base: flow matching.
            spec: the native model.
            weight: of the alignment, at least 0.
            gap: largest difference between the teacher's t, which is cleaner, and the model's; in [0, 1].
            blocks: of the model and of the teacher, from 1. By default after 2/7 and 5/7 of the depth: the paper's
                blocks 8 and 20 of the 28 of XL.

        Raises:
            ConfigError: values out of range, or the teacher's block is not the later one.
        """
        if not spec.can_have_heads:
            right = f"needs features of a native model, which {spec.name} is not; leave it out"
            raise option_error("diffusion.ingredients", "self_alignment", right)
        depth = spec.config.depth
        student, teacher = blocks if len(blocks) == 2 else (max(1, round(2 * depth / 7)), round(5 * depth / 7))
        for option, value, is_right, right in (
            ("weight", weight, weight >= 0, "0 or more; its authors suggest 0.5"),
            ("gap", gap, 0 <= gap <= 1, "between 0 and 1"),
            ("blocks", list(blocks), len(blocks) in (0, 2), "two blocks, of the student and of the teacher: 8,20"),
            ("blocks", [student, teacher], 1 <= student < teacher <= depth, f"two blocks in order, from 1 to {depth}"),
        ):
            if not is_right:
                typed = ",".join(map(str, value)) if isinstance(value, list) else value
                raise option_error("diffusion.ingredients", f"self_alignment {option}={typed}", f"must be {right}")
        return cls(base, weight, gap, f"blocks.{student - 1}", f"blocks.{teacher - 1}", spec.config.width)

    @classmethod
    def mistakes(cls, config: Config, objective: type[Objective]) -> Iterator[tuple[str, str]]:
        if not issubclass(objective, FlowMatching):
            right = f"self_alignment needs the straight path of flow_matching, not {config.diffusion.objective}"
            yield "diffusion.ingredients", right

    @property
    def numbers(self) -> Mapping[str, Kind]:
        return {**self.base.numbers, "alignment": "uniform"}

    @property
    def features(self) -> tuple[str, ...]:
        return HEAD, self.teacher

    @property
    def heads(self) -> Mapping[str, Head]:
        return {**self.base.heads, HEAD: Head(self.student, self.build_head)}

    def build_head(self) -> nn.Module:
        """The projection: three layers of the model's width with SiLU between them, as in REPA (arXiv 2410.06940)."""
        width = self.width
        layers = [nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)]
        return nn.Sequential(*layers)

    def loss(
        self,
        model: nn.Module,
        batch: dict[str, torch.Tensor],
        randomness: Randomness,
        teacher: nn.Module | None = None,
    ) -> Losses:
        """The base's error + weight x alignment. The logs have both apart: `loss` is that of the base."""
        assert teacher is not None, "uses_teacher"
        inputs = self.base.inputs(batch, randomness)
        prediction, found = model(*inputs, features=[HEAD])
        losses = self.base.error(prediction, inputs, batch, randomness)
        t = self.teacher_time(self.base.model_time(inputs.t), randomness["alignment"])  # (B,)
        x, t_wide = batch["sample"], wide(t, batch["sample"])
        x_t = (1 - t_wide) * randomness.noise + t_wide * x
        _, targets = teacher(x_t, self.base.model_time(t), inputs.cond, features=[self.teacher])
        cosine = cosine_similarity(found[HEAD].float(), targets[self.teacher].detach().float(), dim=-1)  # (B, N)
        distance = (1 - cosine).mean(1)
        return Losses(losses + self.weight * distance, {"loss": losses.detach(), "alignment_loss": distance.detach()})

    def teacher_time(self, t: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Time of the teacher (B,): later than t (B,) by gap u, with u (B,) in [0, 1), but at most 1."""
        return (t + self.gap * u).clamp(max=1.0)
