# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The search for the largest batch size that fits. The planner asks its own plans, the autotuner trial runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torchditan.config.options import Config
from torchditan.diffusion.objectives import batch_multiple

MAX_BATCH_SIZE = 65536
_FIRST_GUESS = 16


def allowed_batch_sizes(
    config: Config, *, num_devices: int, multiple: int = 1, largest: int = MAX_BATCH_SIZE
) -> Sequence[int]:
    """Values of `training.batch_size` that the job can have, ascending; empty if it can have none.

    If the job has a global batch, they divide the share of a rank, or of a group of ranks that share their tokens.

    Args:
        config: the job.
        num_devices: ranks of the job.
        multiple: only multiples of this number.
        largest: upper limit.
    """
    multiple = math.lcm(multiple, batch_multiple(config.diffusion))
    total, num_groups = config.training.global_batch_size, num_devices // config.training.context_parallel_degree
    if total is None:
        return range(multiple, largest + 1, multiple)
    if total % num_groups:
        return []
    share = total // num_groups
    return [size for size in range(multiple, min(largest, share) + 1, multiple) if share % size == 0]


def largest_that_fits(fits: Callable[[int], bool], sizes: Sequence[int], *, guess: int | None = None) -> int | None:
    """The largest of the ascending `sizes` that fits, or None. Assumes that whatever is smaller than it fits too.

    Moves away from the start in growing strides until one size fits and a larger one does not, then bisects.

    Args:
        fits: called at most once for each size.
        sizes: those allowed.
        guess: an estimate of the answer, where the search starts with small strides. None: it starts at 16 and doubles.
    """
    low, high = -1, len(sizes)
    position = max(0, sum(size <= (guess or _FIRST_GUESS) for size in sizes) - 1)
    stride = max(1, position // 8) if guess else position + 1
    while high - low > 1:
        if fits(sizes[position]):
            low = position
        else:
            high = position
        if low >= 0 and high < len(sizes):
            position = (low + high) // 2
        elif low >= 0:
            position = min(low + stride, len(sizes) - 1)
        else:
            position = max(high - stride, 0)
        stride *= 2
    return sizes[low] if low >= 0 else None
