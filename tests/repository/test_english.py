# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""English of the pages: short sentences on average, and no phrase that reads like a translation.

`pytest tests/repository/test_english.py -s` prints the average and the longest sentence of each page.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *(page for page in sorted((REPOSITORY / "docs").glob("*.md")) if page.name not in ("LOG.md", "options.md")),
]
"""docs/LOG.md is history; docs/options.md is generated, and only its phrases are checked."""
MAX_AVERAGE = 20
MAX_WORDS = 40
BANNED = (
    r"\bhouses?\b",
    r"\brooms?\b",
    r"\bbeside\b",
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b)",
    r"\btold\b",
    r"\banew\b",
    r"\bstands? in\b",
    r"\bmended\b",
    r"\bin force\b",
)


def prose(markdown: str) -> list[str]:
    """Paragraphs and list items of a page, as text: without code, tables, headings, images and addresses."""
    markdown = re.sub(r"^```.*?^```", "\n", markdown, flags=re.DOTALL | re.MULTILINE)
    markdown = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", markdown)
    markdown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    markdown = re.sub(r"`[^`]+`", "X", markdown)
    blocks: list[str] = []
    is_open = False
    is_code = False
    for line in markdown.splitlines():
        text = line.strip()
        is_item = bool(re.match(r"[-*] |\d+\. ", text))
        # Four spaces begin code after an empty line; inside a list they continue an item.
        is_code = line.startswith("    ") and not is_item and (is_code or not is_open)
        if is_code or not text or text.startswith(("|", "#")):
            is_open = False
            continue
        text = re.sub(r"^(?:[-*]|\d+\.) ", "", text)
        if is_open and not is_item:
            blocks[-1] += f" {text}"
        else:
            blocks.append(text)
        is_open = True
    return [block.replace("*", "") for block in blocks]


def sentences(markdown: str) -> list[str]:
    found = []
    for block in prose(markdown):
        found += re.split(r"(?<=[.!?])[\")]*\s+(?=[\"(]?[A-Z0-9])", block)
    return [sentence for sentence in found if len(words(sentence)) > 2]


def words(sentence: str) -> list[str]:
    return [word for word in sentence.split() if re.search(r"\w", word)]


def average_length(markdown: str) -> float:
    found = sentences(markdown)
    return sum(len(words(sentence)) for sentence in found) / max(1, len(found))


def banned_phrases(markdown: str) -> list[str]:
    text = " ".join(prose(markdown) + re.findall(r"^[|#].*", markdown, flags=re.MULTILINE))
    return [match.group() for phrase in BANNED for match in re.finditer(phrase, text, flags=re.IGNORECASE)]


def pages(*more: Path) -> list[object]:
    return [pytest.param(page, id=page.name) for page in (*PAGES, *more)]


@pytest.mark.parametrize("page", pages())
def test_sentences_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    longest = max(sentences(text), key=lambda sentence: len(words(sentence)))
    print(f"{page.name}: {average_length(text):.1f} words on average; {len(words(longest))} in: {longest}")
    assert average_length(text) <= MAX_AVERAGE
    assert len(words(longest)) <= MAX_WORDS, longest


@pytest.mark.parametrize("page", pages(REPOSITORY / "docs" / "options.md"))
def test_banned_phrases_are_absent(page: Path) -> None:
    assert banned_phrases(page.read_text(encoding="utf-8")) == []


def test_a_long_sentence_and_a_banned_phrase_are_found() -> None:
    page = (
        "# One room\n\nShort one. Word " + "word " * 40 + "end. A grid stands\nin the folder.\n\n    code beside code\n"
    )
    assert [len(words(sentence)) for sentence in sentences(page)] == [42, 6]
    assert average_length(page) == 24
    assert sorted(banned_phrases(page)) == ["room", "stands in"]


def test_code_tables_and_links_are_not_prose() -> None:
    page = "See [this page](a.md#b) now.\n\n```\ncode line\n```\n| a | b |\n- `x = 1` is\n  an item.\n\n    code\n"
    assert prose(page) == ["See this page now.", "X is an item."]
