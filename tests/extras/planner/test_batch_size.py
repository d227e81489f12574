# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The search for the largest batch size, which the planner and the autotuner share."""

from __future__ import annotations

import pytest
from minimal_parts import PAIRED

from torchditan.config.loader import build_config
from torchditan.extras.planner.batch_size import MAX_BATCH_SIZE, allowed_batch_sizes, largest_that_fits


@pytest.mark.parametrize("guess", [None, 16, 501])
def test_the_border_is_found_wherever_it_is(guess: int | None) -> None:
    sizes = range(1, 101)
    for border in range(101):
        asked: list[int] = []

        def fits(size: int, border: int = border, asked: list[int] = asked) -> bool:
            asked.append(size)
            return size <= border

        assert largest_that_fits(fits, sizes, guess=guess) == (border or None)
        assert len(asked) == len(set(asked)), "no size twice"
        assert len(asked) <= 15


def test_the_search_starts_at_the_guess_and_needs_no_sizes() -> None:
    def never(size: int) -> bool:
        raise AssertionError(size)

    assert largest_that_fits(never, []) is None
    asked: list[int] = []
    assert largest_that_fits(lambda size: asked.append(size) or True, [2, 4, 8], guess=8) == 8  # type: ignore[func-returns-value]
    assert asked == [8]


def test_sizes_divide_the_share_of_a_rank_or_of_a_group_that_shares_tokens() -> None:
    config = build_config({"training.global_batch_size": 96})
    assert list(allowed_batch_sizes(config, num_devices=4)) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert list(allowed_batch_sizes(config, num_devices=4, multiple=3, largest=20)) == [3, 6, 12]
    shared = config.replace({"training.context_parallel_degree": 2})
    assert list(allowed_batch_sizes(shared, num_devices=4)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
    even = config.replace({"diffusion.ingredients": [PAIRED]})
    assert list(allowed_batch_sizes(even, num_devices=4)) == [2, 4, 6, 8, 12, 24]
    assert list(allowed_batch_sizes(config, num_devices=5)) == []
    assert allowed_batch_sizes(build_config({}), num_devices=5) == range(1, MAX_BATCH_SIZE + 1)
