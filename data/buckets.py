# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Aspect-ratio buckets: a few sizes of about the same area, so that images keep their approximate aspect ratio.

All samples of an optimizer step come from one bucket (torchditan/data_stream/order.py).
"""

from __future__ import annotations

import math

from torchditan.errors import option_error

MAX_ASPECT_RATIO = 2.0
"""Maximum ratio of longer to shorter side. Images beyond it are cropped at both ends."""

Size = tuple[int, int]
"""(height, width)."""


def bucket_sizes(size: Size, *, step: int) -> list[Size]:
    """All sizes with about the area of `size` whose sides are multiples of `step`, from tall to wide.

    Args:
        size: `dataset.image_size`.
        step: `dataset.bucket_step`.

    Raises:
        ConfigError: the step is too large for this area.
    """
    area = math.prod(size)
    longest = math.isqrt(int(area * MAX_ASPECT_RATIO)) + step
    pairs = [(side, round(area / side / step) * step) for side in range(step, longest + 1, step)]
    found = {pair for side, other in pairs for pair in ((side, other), (other, side))}
    sizes = [pair for pair in found if min(pair) > 0 and max(pair) <= MAX_ASPECT_RATIO * min(pair)]
    if not sizes:
        right = f"no size has about the area of {size[0]} x {size[1]}; must be at most {math.isqrt(area)}"
        raise option_error("dataset.bucket_step", step, right)
    return sorted(sizes, key=lambda pair: (pair[1] / pair[0], pair))


def nearest_bucket(size: Size, buckets: list[Size]) -> int:
    """Number of the bucket whose aspect ratio is closest to the image's; the first one of equals."""
    aspect_ratio = math.log(size[1] / size[0])
    distances = [abs(math.log(width / height) - aspect_ratio) for height, width in buckets]
    return distances.index(min(distances))
