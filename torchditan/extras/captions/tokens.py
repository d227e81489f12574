# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Counts the tokens of captions: which a text encoder cuts, and of which it knows no token.

Notable: only the tokenizer is opened, so the line is the same with a full and with an empty cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchditan.errors import shorten
from torchditan.run.progress import report_progress

_AT_ONCE = 1000


class TokenCount(NamedTuple):
    """Tokens of a whole caption."""

    length: int
    """With the tokens that mark its beginning and end."""
    known: int
    unknown: int
    """Tokens without a meaning of their own: unknown to the encoder, or single bytes of a character."""


@dataclass(frozen=True)
class Tokenizer:
    """Counts the tokens of captions."""

    max_length: int
    """Further tokens are cut."""
    count: Callable[[list[str]], list[TokenCount]]


def tokenizer_of_transformers(tokenizer: Any, *, max_length: int) -> Tokenizer:
    """The counter of a tokenizer that transformers opened."""
    num_marks = len(tokenizer("")["input_ids"])
    unknown, space = tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids("▁")  # None if it has none

    def count(captions: list[str]) -> list[TokenCount]:
        counts = []
        for ids in tokenizer(captions, add_special_tokens=False, truncation=False)["input_ids"]:
            num_unknown = ids.count(unknown)
            num_spaces = 0 if space == unknown else ids.count(space)
            counts.append(TokenCount(num_marks + len(ids), len(ids) - num_unknown - num_spaces, num_unknown))
        return counts

    return Tokenizer(max_length, count)


def describe_tokens(captions: Collection[str], tokenizer: Tokenizer, *, what: str) -> str | None:
    """One line about captions that are cut or unknown to the encoder; None if all are whole and known.

    Args:
        captions: different texts.
        tokenizer: of the encoder.
        what: "captions" or "prompts".
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else each forked worker of the loader warns
    longest, first_cut, first_unknown = 0, "", ""
    num_cut = num_unreadable = known = unknown = 0
    with report_progress(f"counting tokens of {what}", total=len(captions), unit=what) as advance:
        texts = sorted(captions)
        for start in range(0, len(texts), _AT_ONCE):
            batch = texts[start : start + _AT_ONCE]
            for caption, count in zip(batch, tokenizer.count(batch), strict=True):
                known, unknown = known + count.known, unknown + count.unknown
                if count.length > tokenizer.max_length:
                    num_cut, longest, first_cut = num_cut + 1, max(longest, count.length), first_cut or caption
                if count.unknown and not count.known:
                    num_unreadable, first_unknown = num_unreadable + 1, first_unknown or caption
            advance(len(batch))
    total, parts = f"of {len(captions):,} {what}", []
    if num_cut:
        cut = f"cut to {tokenizer.max_length} tokens (the longest has {longest:,})"
        parts.append(f"{num_cut:,} {total} {cut}: {_quoted(first_cut)}")
    if num_unreadable:
        parts.append(f"{num_unreadable:,} {total} without a known token: {_quoted(first_unknown)}")
    if unknown:
        parts.append(f"{unknown / (known + unknown):.1%} of the tokens of {what} unknown")
    return f"text encoder: {'; '.join(parts)}" if parts else None


def beginning(caption: str) -> str:
    """The caption, or its first words and three dots, for messages and pictures."""
    return shorten(caption, most=60)


def _quoted(caption: str) -> str:
    return json.dumps(beginning(caption), ensure_ascii=False)
