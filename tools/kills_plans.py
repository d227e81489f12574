# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Which runs kills.py makes: variant, layouts, kills and their moments, as a function of (seed, number)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

EVALUATION_FREQ = 5
BATCH_SIZE, BATCH_SIZE_ONE_STEP = 12, 16  # on 4 ranks, imf needs a multiple of 8
EVALUATION = "evaluation"
TARS = ("--dataset.dataset_name=webdataset", "--dataset.root_dir=SHARDS")
"""SHARDS becomes the folder of the shards."""
VARIANTS: dict[str, tuple[str, ...]] = {
    EVALUATION: (
        *TARS,  # of few images: an evaluation reads all of them
        f"--evaluation.freq={EVALUATION_FREQ}",
        '--evaluation.metrics=["kills_metric:Brightness"]',
        "--evaluation.num_samples=24",
    ),
    "muon": ("--optimizer.name=Muon", "--optimizer.ns_dtype=float32"),
    "one-step": ("--diffusion.objective=imf", f"--training.global_batch_size={BATCH_SIZE_ONE_STEP}"),
    "tars": TARS,
    "adamw": (),
}
"""What is trained: name -> flags. Each has reference runs of its own."""

TARGETS = ("launcher", "rank", "all")
AIMS = ("start-up", "step", "save", "clean-up", EVALUATION, "end")


@dataclass(frozen=True)
class Layout:
    """How the ranks of an attempt share the work; one process comes with and without torchrun."""

    world_size: int
    replicate: int
    is_under_torchrun: bool = True


LAYOUTS = {
    "one": Layout(1, 1, is_under_torchrun=False),
    "torchrun1": Layout(1, 1),
    "ddp2": Layout(2, 2),
    "fsdp2": Layout(2, 1),
    "ddp4": Layout(4, 4),
    "fsdp4": Layout(4, 1),
    "hsdp4": Layout(4, 2),
}
_WEIGHTS = {"one": 35, "torchrun1": 10, "ddp2": 15, "fsdp2": 15}  # 5 for the others: ranks cost seconds


@dataclass(frozen=True)
class Kill:
    """One signal to come."""

    target: str
    """launcher, rank or all; a process without torchrun is its own launcher."""
    rank: int
    """The one that is hit where the target is a rank."""
    signal: str
    """SIGKILL or SIGTERM."""
    aim: str
    """What should be going on."""
    moment: float
    """0 to 1, over the start-up or the steps left."""
    delay_s: float
    """After a save, a clean-up, an evaluation or the end was seen."""


@dataclass(frozen=True)
class Plan:
    """A run to come: `kills[i]` ends the attempt in `layouts[i]`; the attempt in the last layout is left alone."""

    number: int
    variant: str
    is_forked: bool
    """Attempts are forks of a process that has imported torch. Otherwise, on up to 2 ranks, they are started by their
    command line."""
    layouts: tuple[str, ...]
    kills: tuple[Kill, ...]
    flags: tuple[str, ...]

    @property
    def is_elastic(self) -> bool:
        return len({mesh_of(layout) for layout in self.layouts}) > 1

    @property
    def reference(self) -> str:
        """The layout of the run to compare with."""
        if self.is_elastic:
            return "one"
        return next(name for name in LAYOUTS if mesh_of(name) == mesh_of(self.layouts[0]))

    @property
    def batch_size(self) -> int:
        return BATCH_SIZE_ONE_STEP if self.variant == "one-step" else BATCH_SIZE

    def saves_in_background(self) -> bool:
        return "--checkpoint.async_mode=async" in self.flags

    def first(self, num_kills: int) -> Plan:
        """The same run with at most so many kills."""
        if num_kills >= len(self.kills):
            return self
        return replace(self, kills=self.kills[:num_kills], layouts=self.layouts[: num_kills + 1])


@dataclass(frozen=True)
class Pace:
    """How long the parts of an attempt take, in seconds."""

    start_up_s: float
    step_s: float
    """Per step, with its share of saving, validation, sampling and evaluation."""


def mesh_of(layout: str) -> tuple[int, int]:
    """What decides the numbers to the bit: (world size, replicas)."""
    return LAYOUTS[layout].world_size, LAYOUTS[layout].replicate


def plan_of(seed: int, number: int) -> Plan:
    """The plan of a run, always the same. Variants take turns."""
    draw = random.Random(f"{seed} {number}")
    variant = list(VARIANTS)[number % len(VARIANTS)]
    num_kills = draw.randint(2, 6)
    layouts = [draw_layout(draw, LAYOUTS)]
    is_elastic = draw.random() < 0.4
    for _ in range(num_kills):
        others = [name for name in LAYOUTS if mesh_of(name) != mesh_of(layouts[-1])]
        layouts.append(draw_layout(draw, others) if is_elastic else layouts[-1])
    return Plan(
        number=number,
        variant=variant,
        is_forked=number % 8 != 7 or max(LAYOUTS[layout].world_size for layout in layouts) > 2,
        layouts=tuple(layouts),
        kills=tuple(draw_kill(draw, LAYOUTS[layout], variant) for layout in layouts[:-1]),
        flags=(
            f"--checkpoint.interval={draw.randint(2, 5)}",
            f"--checkpoint.async_mode={draw.choice(('disabled', 'async'))}",
            f"--dataset.num_workers={draw.choice((0, 0, 0, 0, 0, 2))}",
            f"--validation.freq={draw.choice((0, 0, 5))}",
            f"--metrics.enable_sampling={draw.choice(('true', 'false', 'false'))}",
            f"--metrics.enable_tensorboard={draw.choice(('true', 'false', 'false'))}",
        ),
    )


def draw_layout(draw: random.Random, names: Iterable[str]) -> str:
    names = list(names)
    return draw.choices(names, [_WEIGHTS.get(name, 5) for name in names])[0]


def draw_kill(draw: random.Random, layout: Layout, variant: str) -> Kill:
    target = draw.choice(TARGETS)
    weights = (15, 30, 25, 15, 40 if variant == EVALUATION else 0, 5)
    return Kill(
        target=target if layout.is_under_torchrun else "launcher",
        rank=draw.randrange(layout.world_size),
        signal=draw.choice(("SIGKILL", "SIGKILL", "SIGKILL", "SIGTERM")),
        aim=draw.choices(AIMS, weights)[0],
        moment=draw.random(),
        delay_s=draw.uniform(0, 0.03),
    )
