# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Which runs chaos.py makes: their layouts, their kills and the moments of these, as a function of (seed, number)."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

TARGETS = ("torchrun", "rank", "all")


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
    "ddp3": Layout(3, 3),
    "fsdp3": Layout(3, 1),
    "ddp4": Layout(4, 4),
    "fsdp4": Layout(4, 1),
    "hsdp4": Layout(4, 2),
}
_WEIGHTS = {"one": 30, "torchrun1": 15, "ddp2": 15, "fsdp2": 15, "hsdp4": 8}  # 5 for the others: ranks cost seconds


@dataclass(frozen=True)
class Kill:
    """One SIGKILL to come."""

    target: str
    """torchrun, rank or all."""
    rank: int
    """The one that dies where the target is a rank."""
    aim: str
    """What the moment is drawn over: its life, its training, or the training with the next save after it."""
    moment: float
    """0 to 1."""
    delay_s: float
    """After a save was seen."""


@dataclass(frozen=True)
class Plan:
    """A run to come: `kills[i]` ends the attempt in `layouts[i]`; the attempt in the last layout is left alone."""

    number: int
    layouts: tuple[str, ...]
    kills: tuple[Kill, ...]
    flags: tuple[str, ...]

    @property
    def is_elastic(self) -> bool:
        return len({mesh_of(layout) for layout in self.layouts}) > 1

    @property
    def reference(self) -> str:
        """The layout of the run to compare with."""
        return "one" if self.is_elastic else self.layouts[0]


@dataclass(frozen=True)
class Pace:
    """How long the parts of an attempt take, in seconds."""

    start_up_s: float
    step_s: float
    """Per step, with its share of saving, validation and sampling."""
    ending_s: float

    def life_s(self, num_steps: int) -> float:
        return self.start_up_s + num_steps * self.step_s + self.ending_s


def mesh_of(layout: str) -> tuple[int, int]:
    """What decides the numbers to the bit: (world size, replicas)."""
    return LAYOUTS[layout].world_size, LAYOUTS[layout].replicate


def plan_of(seed: int, number: int) -> Plan:
    """The plan of a run, always the same."""
    draw = random.Random(f"{seed} {number}")
    num_kills = draw.choices((1, 2, 3, 4, 5), (35, 30, 20, 10, 5))[0]
    layouts = [draw_layout(draw, LAYOUTS)]
    is_elastic = draw.random() < 1 / 3
    for _ in range(num_kills):
        others = [name for name in LAYOUTS if mesh_of(name) != mesh_of(layouts[-1])]
        layouts.append(draw_layout(draw, others) if is_elastic else layouts[-1])
    return Plan(
        number=number,
        layouts=tuple(layouts),
        kills=tuple(draw_kill(draw, LAYOUTS[layout]) for layout in layouts[:-1]),
        flags=(
            f"--checkpoint.interval={draw.randint(2, 6)}",
            f"--checkpoint.async_mode={draw.choice(('disabled', 'async'))}",
            f"--dataset.num_workers={draw.choice((0, 0, 0, 0, 2))}",
            f"--validation.freq={draw.choice((0, 0, 5))}",
            f"--metrics.enable_sampling={draw.choice(('true', 'false', 'false'))}",
            f"--metrics.enable_tensorboard={draw.choice(('true', 'false', 'false'))}",
        ),
    )


def draw_layout(draw: random.Random, names: Iterable[str]) -> str:
    names = list(names)
    return draw.choices(names, [_WEIGHTS.get(name, 5) for name in names])[0]


def draw_kill(draw: random.Random, layout: Layout) -> Kill:
    target = draw.choice(TARGETS)
    return Kill(
        target=target if layout.is_under_torchrun else "all",
        rank=draw.randrange(layout.world_size),
        aim=draw.choice(("life", "life", "training", "save")),
        moment=draw.random(),
        delay_s=draw.uniform(0, 0.05),
    )


def moment_of(kill: Kill, pace: Pace, num_steps: int) -> tuple[float | None, int, float]:
    """When to kill: (seconds after the launch, None once it trains; steps done since; seconds after that).

    Steps are counted, not timed: on a busy machine the expected seconds would be over too early.
    """
    seconds = kill.moment * num_steps * pace.step_s
    if kill.aim == "life":
        seconds = kill.moment * pace.life_s(num_steps) - pace.start_up_s
        if seconds < 0:
            return seconds + pace.start_up_s, 0, 0.0
    steps = min(int(seconds / pace.step_s), num_steps)
    return None, steps, seconds - steps * pace.step_s
