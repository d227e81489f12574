# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Several runs, usually one job on different hardware: times over equal steps, agreement of losses, equal-step scores.

Runs are one job if all options agree that decide what is learned. Only then are their losses expected to agree.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from torchditan.report.labels import as_utf8, count, duration, number
from torchditan.report.runs import Run, differing_settings

SAME_CURVE = 1e-3
"""Relative difference of losses up to which two curves of one job count as equal."""


class CurvePair(NamedTuple):
    """Losses of two runs of one job at the steps that both logged."""

    first: Run
    second: Run
    difference: float
    """The largest, relative to the larger loss."""
    parted_at: int | None
    """The first step at which they differ by more than SAME_CURVE."""


@dataclass(frozen=True)
class Comparison:
    """Values that need all runs. They are None where runs did not measure them; runs without a line are ignored."""

    runs: Sequence[Run]

    @cached_property
    def common_step(self) -> int | None:
        """The last step that all runs reached."""
        return min((run.steps for run in self.runs if run.steps is not None), default=None)

    def training_time(self, run: Run) -> float | None:
        """Seconds that a run took for the steps that all runs reached, with sampling, validation and checkpoints."""
        return None if self.common_step is None else run.reached_at(self.common_step)

    def time_ratio(self, run: Run) -> float | None:
        """Training time of the slowest run, divided by that of this run."""
        own = self.training_time(run)
        known = [time for time in map(self.training_time, self.runs) if time]
        return max(known) / own if own and len(known) > 1 else None

    def speed_up(self, run: Run) -> float | None:
        """Images/s relative to the slowest run."""
        known = [speed for other in self.runs if (speed := other.images_per_second)]
        return run.images_per_second / min(known) if run.images_per_second and len(known) > 1 else None

    @cached_property
    def equal_step(self) -> int | None:
        """The last step at which all runs have PSNR or SSIM; if no run has any, the last one that all logged."""
        scored = [{step for key in ("psnr", "ssim") for step, _ in run.scores(key)} for run in self.runs]
        logged = [{record["step"] for record in run.records} for run in self.runs]
        known = [steps for steps in (scored if any(scored) else logged) if steps]
        return max(set.intersection(*known), default=None) if known else None

    def at_equal_step(self, run: Run) -> dict[str, float | None]:
        """`elapsed_s`, `loss`, `validation_loss`, `psnr` and `ssim` of a run at `equal_step`."""
        step = self.equal_step
        if step is None:
            return dict.fromkeys(("elapsed_s", "loss", "validation_loss", "psnr", "ssim"))
        curves = {key: dict(run.curve(key)) for key in ("loss", "validation_loss")}
        curves |= {key: dict(run.scores(key)) for key in ("psnr", "ssim")}
        return {"elapsed_s": run.reached_at(step), **{key: curve.get(step) for key, curve in curves.items()}}

    @cached_property
    def curves(self) -> list[CurvePair]:
        """The pairs of runs of one job that logged losses at the same steps."""
        pairs = (_curve_pair(*pair) for pair in combinations(self.runs, 2) if _are_one_job(*pair))
        return [pair for pair in pairs if pair is not None]

    @property
    def headlines(self) -> Iterable[str]:
        """The ratio of total training times, and whether runs of one job follow one curve."""
        times = [(time, run.label) for run in self.runs if (time := self.training_time(run))]
        if len(times) > 1:
            (least, fastest), (most, slowest) = min(times), max(times)
            yield (
                f"Total training time: {fastest} is {ratio_text(most / least)} times as fast as {slowest} "
                f"({count(self.common_step or 0, 'step')} in {duration(least)} instead of {duration(most)})."
            )
        most_apart = max((pair.difference for pair in self.curves), default=None)
        if most_apart is not None and most_apart <= SAME_CURVE:
            yield f"Runs of one job have the same losses{f', within {most_apart:.1e}' if most_apart else ''}."

    @property
    def warnings(self) -> Iterable[str]:
        parted = [(pair.parted_at, pair) for pair in self.curves if pair.parted_at is not None]
        if parted:
            step, first = min(parted, key=lambda found: found[0])
            yield (
                f"The losses of {len(parted)} of {count(len(self.curves), 'pair')} of runs of one job differ by more "
                f"than {SAME_CURVE:g}, first at step {step:,} ({first.first.label} and {first.second.label})."
            )

    def csv(self) -> bytes:
        """One row per run with unrounded numbers; fields without a measurement are empty."""
        file = io.StringIO()
        rows = [self._csv_row(run) for run in self.runs]
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return as_utf8(file.getvalue())

    def _csv_row(self, run: Run) -> dict[str, Any]:
        return {
            "label": run.label,
            "path": str(run.path),
            "hardware": run.hardware,
            "world_size": run.world_size,
            "parallel_mode": run.parallel_mode,
            "global_batch_size": run.global_batch_size,
            "precision": run.precision,
            "steps": run.steps,
            "planned_steps": run.planned_steps,
            "elapsed_s": run.elapsed_s,
            "steps_per_second": run.steps_per_second,
            "images_per_second": run.images_per_second,
            "speed_up": self.speed_up(run),
            "seconds_per_image": run.seconds_per_image,
            "peak_memory_gib": run.peak_memory_gib,
            "loss": run.loss,
            "validation_loss": run.validation_loss,
            "state": run.state,
            "common_step": self.common_step,
            "training_time_s": self.training_time(run),
            "training_time_ratio": self.time_ratio(run),
            "equal_step": self.equal_step,
            **{f"{key}_at_equal_step": value for key, value in self.at_equal_step(run).items()},
            "scored_against": run.scored_against,
            "torch": run.content["versions"].get("torch"),
            "git_commit": run.content.get("git_commit"),
            "hostname": run.machine.get("hostname"),
            "run_id": run.content.get("run_id"),
        }


def ratio_text(value: float) -> str:
    return f"{value:.2f}" if value < 10 else number(value)


def _are_one_job(first: Run, second: Run) -> bool:
    return not any(setting.is_of_job for setting in differing_settings([first, second]))


def _curve_pair(first: Run, second: Run) -> CurvePair | None:
    there = dict(second.curve("loss"))
    common = [(step, loss, there[step]) for step, loss in first.curve("loss") if step in there]
    if not common:
        return None
    relative = [(step, abs(a - b) / (max(abs(a), abs(b)) or 1.0)) for step, a, b in common]
    parted_at = next((step for step, difference in relative if difference > SAME_CURVE), None)
    return CurvePair(first, second, max(difference for _, difference in relative), parted_at)
