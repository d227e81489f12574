# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""User errors: one line with the option, its value and a correct value."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterable
from typing import Any, cast

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SECRET = re.compile(
    r"""(?P<before>://|:/(?=[^\s/@]*:))[^\s/"']+(?P<after>@)"""
    r"""|(?P<key>[?&](?:X-Amz-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|sig|(?:access_)?token)=)[^\s&"']+"""
    r"""|(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|gh[a-z]_[A-Za-z0-9]{36,}|glpat-[\w-]{20,})""",
    re.IGNORECASE,
)
"""User name and password in an address (as a path, it has one slash), the key in its query, and tokens of services
that mark theirs."""
_LONGEST = 4_000


class ConfigError(ValueError):
    """A user error, in one line that includes how to fix it. `train.py` exits with code 2.

    The text may quote a stranger's file, so it is made `printable`, and is cut after 4,000 characters. Tokens, and
    passwords in addresses, are left out.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten(printable(message), most=_LONGEST))

    is_of_this_rank = False
    """True if a rank found it before the ranks were connected, so that no other rank can report it."""


def printable(text: str) -> str:
    """The text with escapes in place of characters that control a terminal or change the direction of writing, and
    without tokens and the passwords of addresses. Bytes of a file's name that are not UTF-8 become `\\x8e`."""
    text = _SECRET.sub(lambda match: f"{match['before'] or match['key'] or ''}***{match['after'] or ''}", text)
    return _UNPRINTABLE.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    is_byte = "\udc80" <= character <= "\udcff"  # os.fsdecode
    return f"\\x{ord(character) - 0xDC00:02x}" if is_byte else character.encode("unicode_escape").decode()


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode the text: bytes in another encoding, and halves of characters in JSON, are not text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(name: str) -> str:
    """The name of a file or folder as text to store and to draw: `\\x8e\\xca` for one that is not UTF-8."""
    if is_unicode(name):
        return name
    try:
        return name.encode(errors="surrogateescape").decode("ascii", errors="backslashreplace")
    except UnicodeEncodeError:  # half of a character, from JSON
        return printable(name)


def shorten(text: str, *, most: int) -> str:
    """The text, or its beginning and three dots: at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def first_line(error: BaseException) -> str:
    """The first line of a library's message, or the name of its exception."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def has_secret(text: str) -> bool:
    """Whether a text contains a token, or an address with a password or a key: `s3://key:secret@bucket`."""
    return _SECRET.search(text) is not None


def is_finite_number(value: object) -> bool:
    """Whether a value of a TOML or JSON file is a number that fits in a float: not true, NaN, 1e999 or 10**400."""
    return type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max


def option_error(option: str, value: Any, right: str) -> ConfigError:
    """The format of every user error: `training.steps = 0: must be at least 1`."""
    shown = "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    shown = shorten(printable(shown), most=120)  # printable first: half of a password is not found
    return ConfigError(f"{option} = {shown}: {right}")


def some(names: Iterable[str], *, most: int = 3) -> str:
    """`a, b, c and 4 more`: the first of these names."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most similar to `name`, ignoring case, or None if none is similar."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`; did you mean DiT-XL?`, or an empty string if no choice is similar."""
    found = nearest(name, choices)
    return f"; did you mean {found}?" if found else ""


def counted(number: int, what: str) -> str:
    """`1 image`, `1,200 images`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
