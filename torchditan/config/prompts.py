# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Prompts of a user: texts, and `@prompts.txt` for those in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchditan.errors import is_unicode, option_error

_MARK = "@"


def read_prompts(option: str, given: Sequence[str]) -> list[str]:
    """The prompts, where each `@FILE` is replaced by those in the file.

    The file is UTF-8 text with one prompt per line. Empty lines and lines that start with # are ignored.

    Args:
        option: name of the option, for errors.
        given: texts and files.

    Raises:
        ConfigError: a file cannot be read or has no prompts, or a text is not Unicode.
    """
    prompts = []
    for text in given:
        if not is_unicode(text):
            right = "is not UTF-8 text in this locale; set LC_ALL=C.UTF-8, or write it to a file: @prompts.txt"
            raise option_error(option, text.encode(errors="replace").decode(), right)
        prompts += _read_file(option, text) if text.startswith(_MARK) else [text]
    return prompts


def _read_file(option: str, given: str) -> list[str]:
    try:
        content = Path(given.removeprefix(_MARK)).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        right = f"cannot be read: {error.strerror}; must be a text file with one prompt per line"
        raise option_error(option, given, f"{right} (a prompt that starts with @ must be in a file)") from None
    except UnicodeDecodeError:
        raise option_error(option, given, "is not UTF-8 text") from None
    lines = (line.strip() for line in content.split("\n"))
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise option_error(option, given, "has no prompts; must have one per line, and # only before comments")
    return prompts
