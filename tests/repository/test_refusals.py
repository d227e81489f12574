# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""assert_refused fails if option, value or suggestion is wrong, and accepts any other wording."""

from __future__ import annotations

import pytest
from refusals import assert_refused

LINE = "error: training.steps = 0: must be at least 1; did you mean --training.steps 10?\n"


def test_any_sentence_with_the_facts_passes() -> None:
    assert_refused(LINE, "training.steps = 0", ["1", "10?"])
    assert_refused("training.steps = 0 is too small: give 1 or more", "training.steps = 0", ["1"])


@pytest.mark.parametrize(
    ("about", "mentions"),
    [
        ("training.steps = 1", []),
        ("training.step", []),
        ("optimizer.lr = 0", []),
        ("training.steps = 0", ["2"]),
        ("training.steps = 0", ["0"]),  # the number is a part of another one
        ("training.steps = 0", ["steps 1"]),
    ],
)
def test_another_option_value_or_suggestion_fails(about: str, mentions: list[str]) -> None:
    with pytest.raises(AssertionError):
        assert_refused(LINE, about, mentions)


def test_two_lines_fail() -> None:
    with pytest.raises(AssertionError):
        assert_refused(LINE + LINE, "training.steps = 0")
