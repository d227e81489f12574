# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The samples of an evaluation: their classes, and their pictures in 8 bits.

Notable:
- sample k of class c starts from the noise that torchditan generate gives sample k of class c;
- batch b holds samples b * B to (b + 1) * B - 1 on any number of ranks, so the images are the same to the byte. With
  another batch size, the last digits of the model's output may differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchditan.config.errors import option_error
from torchditan.distributed.process_group import rank_and_world_size
from torchditan.evaluation.metric import Pictures, ToPixels
from torchditan.evaluation.reconstruction import Rounding, to_8_bit
from torchditan.evaluation.sample_parts import SampleParts
from torchditan.evaluation.sampler import SamplePlan, Sampler, SampleRows, noise_number
from torchditan.randomness import Permutation, uniform

ClassBalance = Literal["data", "balanced", "random"]
"""Classes of the samples: "data" has each class as often as the training images, "balanced" each equally often, and
"random" draws the class of each sample uniformly, as ADM's and DiT's scripts do."""


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
        ConfigError: "data" lacks the class counts.
    """
    if not num_classes:
        return SamplePlan([noise_number(0, number) for number in range(num_samples)])
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
    numbers[order] = np.arange(num_samples) - np.searchsorted(labels[order], labels[order])  # 0, 1, ... in each class
    return SamplePlan(
        noise_numbers=[noise_number(*pair) for pair in zip(labels.tolist(), numbers.tolist(), strict=True)],
        conditions={"class_label": torch.arange(num_classes)},
        rows=torch.from_numpy(labels),
    )


def plan_prompts(num_samples: int, prompts: Sequence[str], rows: SampleRows) -> SamplePlan:
    """Samples of all prompts in turn: sample n is sample n // R of prompt n % R, as torchditan generate draws it.

    Args:
        num_samples: N.
        prompts: R texts.
        rows: their conditions.
    """
    numbers, places = np.divmod(np.arange(num_samples), len(prompts))
    return SamplePlan(
        noise_numbers=[noise_number(*pair) for pair in zip(places.tolist(), numbers.tolist(), strict=True)],
        conditions=rows.tensors,
        rows=torch.from_numpy(places),
        texts=list(prompts),
        negative=rows.negative,
    )


def _apportion(num_samples: int, weights: np.ndarray, *, seed: int) -> np.ndarray:
    """Samples of each class in proportion to the weights, (num_classes,) both, by largest remainder."""
    counts, remainders = np.divmod(num_samples * weights, weights.sum())
    tie_break = Permutation(seed, "sample_remainders", 0, length=len(weights))(np.arange(len(weights)))
    largest = np.lexsort((tie_break, -remainders))[: num_samples - counts.sum()]
    counts[largest] += 1
    return counts


def draw_pictures(
    sampler: Sampler,
    model: nn.Module,
    plan: SamplePlan,
    *,
    seed: int,
    batch_size: int,
    to_pixels: ToPixels,
    rounding: Rounding = "nearest",
    parts: SampleParts | None = None,
    say: Callable[[str], None] | None = None,
) -> Iterator[Pictures]:
    """Draw this rank's share of the samples. All ranks call it together, and take all that it yields.

    Samples in `parts` are not drawn again. If they came from batches of another size, the rest of each batch is drawn.

    Args:
        model: the model to sample from, whole on each rank or sharded over the ranks.
        plan: the samples.
        seed: of the starting noise.
        batch_size: samples at once on each rank.
        to_pixels: decodes samples.
        rounding: see `to_8_bit`.
        parts: keeps finished samples, so that an interrupted evaluation continues; None keeps none.
        say: receives lines of progress; None writes them to stderr.

    Yields:
        Pictures of source "generated", B or fewer.

    Raises:
        ConfigError: `parts` cannot be read or written.
    """
    finished: set[range] = set()
    if parts is not None and (stored := parts.open()):
        rank, world_size = rank_and_world_size()
        damaged: list[range] = []
        for numbers in stored[rank::world_size]:
            kept = parts.read(numbers)
            if kept is None:
                damaged.append(numbers)
            else:
                yield _pictures(plan, numbers, kept)
        finished = set(stored) - set(_of_all_ranks(damaged, world_size))
    batches = _missing_batches(len(plan), finished, batch_size=batch_size)
    num_missing, num_bad = sum(map(len, batches)), 0
    kept_text = f" ({len(plan) - num_missing:,} are finished)" if num_missing < len(plan) else ""
    what = f"drawing {num_missing:,} samples{kept_text}"
    for drawn, samples in sampler.draw(model, plan, batches, seed=seed, what=what, say=say):
        pixels = to_pixels(samples).cpu()
        num_bad += int((~pixels.isfinite()).flatten(1).any(1).sum())
        images = to_8_bit(pixels.nan_to_num(nan=-1.0), rounding).byte()  # (B, 1 or 3, H, W)
        if parts is not None:
            parts.write(drawn, images)
        yield _pictures(plan, drawn, images)
    if num_bad:
        warning = f"warning: {num_bad} samples have values that are not finite; NaN counts as black"
        (say or partial(print, file=sys.stderr))(warning)


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
    labels = None if plan.labels is None else plan.labels[chosen]
    return Pictures(images, labels, chosen, "generated", plan.prompts_of(numbers))


def _of_all_ranks(values: list[range], world_size: int) -> list[range]:
    if world_size == 1:
        return values
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, values)
    return [value for part in gathered for value in part]
