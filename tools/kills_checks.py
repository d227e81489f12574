# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""What kills.py promises of a run that was killed: every check of a finished run against one that nobody stopped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kills_attempts import KEEP_LATEST_K, SAMPLE_FREQ, STEPS, names_in
from kills_plans import EVALUATION, EVALUATION_FREQ, Plan

from torchditan.run.reading import read_metrics, read_status
from torchditan.sampling.validation import BIN_KEYS

if TYPE_CHECKING:
    from torch import Tensor

ELASTIC_TOLERANCE = 1e-5
_EVALUATED = ("brightness_generated", "brightness_train")
_EXACT = ("images_seen", "lr", "loss", "grad_norm", "validation_loss", *BIN_KEYS, *_EVALUATED)


def compare(run: Path, reference: Path, plan: Plan) -> tuple[dict[str, str], dict[str, float]]:
    """What is wrong with a finished run.

    Returns:
        each check that it fails, with what was seen, none where all is as if never stopped; and, where the ranks
        changed, the largest relative difference of a loss and of a part of the state.
    """
    from torchditan.checkpoint.files import latest_checkpoint
    from torchditan.checkpoint.loading import read_numbers

    found: dict[str, str | None] = {}
    differences: dict[str, float] = {}
    records, expected = read_metrics(run), read_metrics(reference)
    found["steps"] = wrong_steps([record["step"] for record in records])
    status = read_status(run) or {}
    if status.get("state") != "completed" or status.get("step") != STEPS:
        found["status"] = f"{status}"
    found["debris"] = "; ".join(debris(run)) or None
    found["grids"] = missing_grids(run) if "--metrics.enable_sampling=true" in plan.flags else None
    found["evaluations"] = missing_evaluations(records) if plan.variant == EVALUATION else None
    if "--metrics.enable_tensorboard=true" in plan.flags:
        steps = wrong_steps(tensorboard_steps(run / "tensorboard"))
        found["tensorboard"] = steps and f"steps {steps}"
    last, right = latest_checkpoint(run / "checkpoint"), latest_checkpoint(reference / "checkpoint")
    if last is None or right is None:
        return {"checkpoint": "there is none", **without_none(found)}, differences
    progress, expected_progress = (read_numbers(path) for path in (last, right))
    found["samples"] = wrong_samples(records, progress, plan.batch_size)
    keys = progress.keys() | expected_progress.keys()
    differing = {key for key in keys if progress.get(key) != expected_progress.get(key)} - {"elapsed_s"}
    # On other meshes the counts stay, and means of the loss differ like the losses.
    differing -= {key for key in differing if plan.is_elastic and isinstance(progress.get(key), float)}
    if differing:
        found["progress"] = f"{progress}, not {expected_progress}"
    state, expected_state = (final_state(path) for path in (run, reference))
    if plan.is_elastic:
        differences["loss"] = largest_difference(records, expected)
        differences["state"], part = state_difference(state, expected_state)
        for what, difference in differences.items():
            if not difference <= ELASTIC_TOLERANCE:
                found[f"elastic {what}"] = f"off by {difference:.1e}" + (f" in {part}" if what == "state" else "")
    else:
        found["curve"] = first_difference(records, expected)
        names = differing_tensors(state, expected_state)
        found["tensors"] = f"{len(names)} differ, {names[0]} first" if names else None
    return without_none(found), differences


def final_state(run: Path) -> dict[str, Tensor]:
    """All tensors of the last checkpoint."""
    from torchditan.checkpoint.files import latest_checkpoint
    from torchditan.checkpoint.loading import read_state

    last = latest_checkpoint(run / "checkpoint")
    assert last is not None
    return read_state(last)


def without_none(found: Mapping[str, str | None]) -> dict[str, str]:
    return {name: what for name, what in found.items() if what is not None}


def wrong_steps(steps: Sequence[int]) -> str | None:
    """What is wrong with logged steps that should be 1, 2, ... STEPS."""
    counts = Counter(steps)
    missing = [step for step in range(1, STEPS + 1) if step not in counts]
    doubled = [step for step, count in counts.items() if count > 1]
    if missing or doubled:
        return f"missing {missing}, doubled {doubled}"
    return None if list(steps) == list(range(1, STEPS + 1)) else f"in another order: {list(steps)}"


def first_difference(records: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> str | None:
    """The first number of a curve that is another one, to the bit."""
    reference = {record["step"]: record for record in expected}
    for record in records:
        for key in _EXACT:
            if key in record and record[key] != reference.get(record["step"], {}).get(key):
                other = reference.get(record["step"], {}).get(key)
                return f"{key} of step {record['step']} is {record[key]!r}, not {other!r}"
    return None


def largest_difference(records: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> float:
    """Of the losses, relative; infinite where a step is missing."""
    losses = {record["step"]: record["loss"] for record in records}
    pairs = [(losses.get(record["step"]), record["loss"]) for record in expected]
    return max((abs(a - b) / abs(b) if a is not None else float("inf") for a, b in pairs), default=float("inf"))


def differing_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are not the same bytes, or that only one of the two has."""

    def same(name: str) -> bool:
        a, b = left.get(name), right.get(name)
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()

    return [name for name in sorted({*left, *right}) if not same(name)]


def state_difference(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of a part of the state, and its name; infinite where the tensors are others.

    A part is all weights, all averages, or all moments of a kind. Single tensors may be sums that cancel to rounding.
    """
    if left.keys() != right.keys():
        return float("inf"), min(left.keys() ^ right.keys())
    squares: dict[str, list[float]] = {}
    for name, expected in right.items():
        found = left[name]
        if found.dtype != expected.dtype or found.shape != expected.shape:
            return float("inf"), name
        pieces = name.split(".")
        part = f"{pieces[0]}.{pieces[-1]}" if pieces[0] == "optimizer" else ".".join(pieces[:1])
        sums = squares.setdefault(part, [0.0, 0.0])
        sums[0] += (found.double() - expected.double()).square().sum().item()
        sums[1] += expected.double().square().sum().item()
    relative = {part: ratio(difference, size) for part, (difference, size) in squares.items()}
    part = max(relative, key=lambda name: relative[name])
    return relative[part], part


def ratio(difference: float, size: float) -> float:
    """The root of a quotient of sums of squares; a NaN is infinite."""
    if not difference >= 0:
        return float("inf")
    return (difference / size) ** 0.5 if size else float("inf") if difference else 0.0


def tensorboard_steps(folder: Path) -> list[int]:
    """Steps at which TensorBoard shows a loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not folder.is_dir():
        return []
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every resume
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars("loss")] if "loss" in events.Tags()["scalars"] else []


def wrong_samples(records: Sequence[Mapping[str, Any]], progress: Mapping[str, Any], batch_size: int) -> str | None:
    """Samples of the stream that were lost or repeated. Equal losses then show that they were the right ones."""
    for record in records:
        if record["images_seen"] != record["step"] * batch_size:
            return f"{record['images_seen']} images after step {record['step']}"
    if progress.get("position") != STEPS * batch_size:
        return f"the stream stands at {progress.get('position')}, not {STEPS * batch_size}"
    return None


def due_steps(freq: int) -> list[int]:
    """Every `freq` steps, and the last one."""
    return [step for step in range(1, STEPS + 1) if step % freq == 0 or step == STEPS]


def missing_grids(run: Path) -> str | None:
    missing = [step for step in due_steps(SAMPLE_FREQ) if not (run / "samples" / f"step_{step:08d}.png").exists()]
    return f"no grid of step {missing}" if missing else None


def missing_evaluations(records: Sequence[Mapping[str, Any]]) -> str | None:
    done = {record["step"] for record in records if all(key in record for key in _EVALUATED)}
    missing = [step for step in due_steps(EVALUATION_FREQ) if step not in done]
    return f"no evaluation of step {missing}" if missing else None


def debris(run: Path) -> list[str]:
    """Files and folders that a finished run should not hold."""
    from torchditan.checkpoint.files import list_checkpoints

    patterns = ("*.partial", "*.deleted")
    found = {path.relative_to(run).as_posix() for pattern in patterns for path in run.rglob(pattern)}
    checkpoints = list_checkpoints(run / "checkpoint")
    strangers = names_in(run / "checkpoint") - {path.name for path in checkpoints}
    found |= {f"checkpoint/{name}" for name in strangers}
    if len(checkpoints) > KEEP_LATEST_K:
        found.add(f"{len(checkpoints)} checkpoints")
    return sorted(found)
