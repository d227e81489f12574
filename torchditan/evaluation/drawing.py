# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Draws the samples of an evaluation: their classes and noise, batch by batch, divided over the ranks.

Notable:
- sample k of class c starts from the noise that scripts/generate.py gives sample k of class c;
- batch b holds samples b * B to (b + 1) * B - 1 on any number of ranks, so the images are the same to the byte. With
  another batch size, the last digits of the model's output may differ;
- every rank runs the same number of forward passes, so under FSDP no rank waits for another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchditan.config.errors import option_error
from torchditan.config.options import Sampling
from torchditan.diffusion.objectives import Objective
from torchditan.evaluation.generate import draw_batch, noise_number
from torchditan.evaluation.metric import Pictures
from torchditan.evaluation.ranks import rank_and_world_size
from torchditan.evaluation.reconstruction import Rounding, to_8_bit
from torchditan.evaluation.sample_parts import SampleParts
from torchditan.models.spec import Conditioning
from torchditan.randomness import Permutation, uniform
from torchditan.run.progress import report_progress

ClassBalance = Literal["data", "balanced", "random"]
"""Classes of the samples: "data" has each class as often as the training images, "balanced" each equally often, and
"random" draws the class of each sample uniformly, as ADM's and DiT's scripts do."""


@dataclass(frozen=True)
class SamplePlan:
    """The samples of an evaluation, in order."""

    labels: Tensor | None
    """(N,) int64 requested class of each sample; None without classes."""
    noise_numbers: list[int]
    """Key of each sample's noise: that of sample k of its class for the k-th sample of this class, from 0."""

    def __len__(self) -> int:
        return len(self.noise_numbers)


def plan_samples(
    num_samples: int,
    *,
    num_classes: int,
    class_balance: ClassBalance,
    class_counts: Sequence[int] | None,
    seed: int,
) -> SamplePlan:
    """Choose the classes of all samples.

    With "data" and "balanced", the number of samples of each class is exact: its share of `num_samples`, rounded down,
    and one more for the classes with the largest remainders. The seed decides between equal remainders, so N need not
    be a multiple of the number of classes. The order is random. With "random", the counts vary as those of independent
    draws do.

    Args:
        num_samples: N.
        num_classes: 0 for a model without classes.
        class_balance: see `ClassBalance`; ignored without classes.
        class_counts: training images of each class; None if they are not known.
        seed: of the evaluation.

    Raises:
        ConfigError: `num_samples` is not positive, or "data" lacks the class counts.
    """
    if num_samples < 1:
        raise option_error("--num_samples", num_samples, "must be at least 1")
    if not num_classes:
        return SamplePlan(labels=None, noise_numbers=[noise_number(0, number) for number in range(num_samples)])
    if class_balance == "random":
        draws = uniform(seed, "sample_class", range(num_samples)).double().numpy()  # sample i's depends on (seed, i)
        labels = (draws * num_classes).astype(np.int64)
    else:
        weights = [1] * num_classes
        if class_balance == "data":
            if class_counts is None or not sum(class_counts):
                right = "this dataset does not know how many images each class has; must be balanced or random"
                raise option_error("--class_balance", class_balance, right)
            assert len(class_counts) <= num_classes, (len(class_counts), num_classes)
            weights = list(class_counts)  # the last classes may have no image
        counts = _apportion(num_samples, np.array(weights, dtype=np.int64), seed=seed)
        order = Permutation(seed, "sample_order", 0, length=num_samples)(np.arange(num_samples))
        labels = np.repeat(np.arange(len(counts)), counts)[order]
    order = np.argsort(labels, kind="stable")
    numbers = np.empty_like(order)
    numbers[order] = _number_within_class(labels[order])
    pairs = zip(labels.tolist(), numbers.tolist(), strict=True)
    return SamplePlan(torch.from_numpy(labels), [noise_number(label, number) for label, number in pairs])


def draw_samples(
    model: nn.Module,
    plan: SamplePlan,
    *,
    seed: int,
    batch_size: int,
    rounding: Rounding,
    parts: SampleParts | None,
    to_pixels: Callable[[Tensor], Tensor],
    sample_shape: tuple[int, ...],
    conditioning: Conditioning,
    objective: Objective,
    sampling: Sampling,
    device: torch.device,
    say: Callable[[str], None] | None = None,
) -> Iterator[Pictures]:
    """Draw this rank's share of the samples. All ranks call it together, and take all that it yields.

    Samples in `parts` are not drawn again. If they came from batches of another size, the rest of each batch is drawn.

    Args:
        model: the model to sample from, whole on each rank or sharded over the ranks.
        plan: the samples.
        seed: seed of the starting noise.
        batch_size: samples at once on each rank.
        rounding: see `to_8_bit`.
        parts: keeps finished samples, so that an interrupted evaluation continues; None keeps none.
        to_pixels: samples (B, C, h, w) -> pictures (B, 1 or 3, H, W) in [-1, 1].
        sample_shape: (C, h, w).
        conditioning, objective, sampling: as in `generate`.
        device: where the model is.
        say: receives lines of progress; None writes them to stderr.

    Yields:
        Pictures of source "generated", B or fewer.

    Raises:
        ConfigError: `parts` holds other samples, or cannot be written.
    """
    rank, world_size = rank_and_world_size()
    finished: set[range] = set()
    if parts is not None and (stored := parts.open()):
        damaged: list[range] = []
        for numbers in stored[rank::world_size]:
            pictures = _stored_pictures(parts, numbers, plan)
            if pictures is None:
                damaged.append(numbers)
            else:
                yield pictures
        finished = set(stored) - set(_of_all_ranks(damaged, world_size))
    batches = _missing_batches(len(plan), finished, batch_size=batch_size)
    num_passes = -(-len(batches) // world_size)
    num_bad = 0
    what, total = _description(len(plan), batches), num_passes * objective.num_evaluations(sampling)
    with report_progress(what, total=total, unit="model steps", say=say) as advance:
        for first in range(0, len(batches), world_size):
            is_padding = first + rank >= len(batches)
            numbers_to_draw = [0] if is_padding else batches[first + rank]
            samples = draw_batch(
                model,
                noise_numbers=[plan.noise_numbers[number] for number in numbers_to_draw],
                tensors={} if plan.labels is None else {"class_label": plan.labels[numbers_to_draw]},
                sample_shape=sample_shape,
                conditioning=conditioning,
                objective=objective,
                sampling=sampling,
                seed=seed,
                device=device,
                advance=advance,
            )
            if is_padding:
                continue
            pixels = to_pixels(samples).cpu()
            num_bad += int((~pixels.isfinite()).flatten(1).any(1).sum())
            images = to_8_bit(pixels.nan_to_num(nan=-1.0), rounding).byte()  # (B, 1 or 3, H, W)
            pictures = _pictures(plan, numbers_to_draw, images)
            if parts is not None:
                _keep(parts, pictures)
            yield pictures
    _warn_of(num_bad, say=say)


def _description(num_samples: int, batches: list[list[int]]) -> str:
    num_missing = sum(map(len, batches))
    kept = f" ({num_samples - num_missing:,} are finished)" if num_missing < num_samples else ""
    return f"drawing {num_missing:,} samples{kept}"


def _warn_of(num_bad: int, *, say: Callable[[str], None] | None) -> None:
    if num_bad:
        warning = f"warning: {num_bad} samples have values that are not finite; NaN counts as black"
        (say or partial(print, file=sys.stderr))(warning)


def _stored_pictures(parts: SampleParts, numbers: range, plan: SamplePlan) -> Pictures | None:
    """A finished part; None if it is damaged."""
    if numbers.stop > len(plan):
        raise parts.refuse(f"sample {numbers[-1]}, now {len(plan)} samples")
    found = parts.read(numbers)
    if found is None:
        return None
    pictures = _pictures(plan, numbers, found[0])
    if not _equal(pictures.labels, found[1]):
        raise parts.refuse("its samples have other classes")
    return pictures


def _apportion(num_samples: int, weights: np.ndarray, *, seed: int) -> np.ndarray:
    """Samples of each class in proportion to the weights, (num_classes,) both, by largest remainder."""
    counts, remainders = np.divmod(num_samples * weights, weights.sum())
    tie_break = Permutation(seed, "sample_remainders", 0, length=len(weights))(np.arange(len(weights)))
    largest = np.lexsort((tie_break, -remainders))[: num_samples - counts.sum()]
    counts[largest] += 1
    return counts


def _number_within_class(labels: np.ndarray) -> np.ndarray:
    """0, 1, ... for the samples of each class; labels (N,) are sorted."""
    return np.arange(len(labels)) - np.searchsorted(labels, labels)


def _missing_batches(num_samples: int, finished: set[range], *, batch_size: int) -> list[list[int]]:
    """The numbers of each batch that are not finished, without empty batches."""
    is_missing = np.ones(num_samples, dtype=bool)
    for numbers in finished:
        is_missing[numbers.start : numbers.stop] = False
    starts = range(0, num_samples, batch_size)
    batches = [(start + np.flatnonzero(is_missing[start : start + batch_size])).tolist() for start in starts]
    return [batch for batch in batches if batch]


def _pictures(plan: SamplePlan, numbers: Sequence[int], images: Tensor) -> Pictures:
    chosen = torch.tensor(numbers, dtype=torch.int64)
    return Pictures(images, None if plan.labels is None else plan.labels[chosen], chosen, "generated")


def _keep(parts: SampleParts, pictures: Pictures) -> None:
    """Write one part for each run of consecutive numbers."""
    numbers = pictures.numbers
    breaks = (numbers.diff() != 1).nonzero().flatten() + 1
    for rows in torch.arange(len(numbers)).tensor_split(breaks):
        labels = None if pictures.labels is None else pictures.labels[rows]
        parts.write(range(int(numbers[rows[0]]), int(numbers[rows[-1]]) + 1), pictures.images[rows], labels)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _of_all_ranks(values: list[range], world_size: int) -> list[range]:
    if world_size == 1:
        return values
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, values)
    return [value for part in gathered for value in part]
