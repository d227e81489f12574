# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Checks that a refusal names the option, its value and the right value, independent of the wording."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from torchditan.errors import ConfigError


def assert_refused(text: str, about: str, mentions: Sequence[str] = ()) -> None:
    """`text` is one line that begins with `about` and names each of `mentions` after it.

    Args:
        text: a message, or what a script wrote to stderr ("error: ...").
        about: "option = value", or a file; "" for a line that begins with neither.
        mentions: values, options, files and flags, each as a whole word; a suggestion ends with "?".
    """
    line = text.removesuffix("\n").removeprefix("error: ")
    assert "\n" not in line, text
    boundary = r"(?!\w)" if about else ""
    assert re.match(re.escape(about) + boundary, line), f"{line!r} does not begin with {about!r}"
    rest = line[len(about) :]
    missing = [word for word in mentions if not re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", rest)]
    assert not missing, f"{line!r} does not mention {missing}"


@contextmanager
def refused(about: str, *mentions: str) -> Iterator[None]:
    """The block raises a ConfigError whose message is such a line."""
    with pytest.raises(ConfigError) as caught:
        yield
    assert_refused(str(caught.value), about, mentions)
