# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A report as one HTML page from one template (page.html.j2), with its plots as files next to it.

Notable:
- The page loads nothing: its plots are inline SVG, its pictures data URIs. Its content security policy forbids more.
- Every text is escaped, by pandas in tables, by matplotlib in plots, and by the template elsewhere: names of runs,
  captions and error messages are untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jinja2
import pandas as pd

from torchditan.errors import option_error
from torchditan.extras.report.figures import encoded
from torchditan.run.atomic_files import write_file

PAGE_NAME = "report.html"


@dataclass(frozen=True)
class Table:
    """A table of texts. With a `summary` it is collapsed under this text.

    Columns without any entry are not shown, nor are rows after `most_rows`.
    """

    kind: ClassVar[str] = "table"
    frame: pd.DataFrame
    title: str = ""
    summary: str = ""
    most_rows: int = 200

    @property
    def html(self) -> str:
        shown = self.frame.loc[:, (self.frame != "").any().to_numpy()].head(self.most_rows)
        with pd.option_context("display.max_colwidth", None):
            text: str = shown.to_html(index=False, border=0)
        return text

    @property
    def num_hidden(self) -> int:
        return max(0, len(self.frame) - self.most_rows)


@dataclass(frozen=True)
class Plot:
    """A figure, inline in the page. A report that is a folder also has it as `name`.svg and `name`.png."""

    kind: ClassVar[str] = "plot"
    name: str
    title: str
    figure: Any

    @cached_property
    def svg_file(self) -> bytes:
        return encoded(self.figure, "svg")

    @property
    def svg(self) -> str:
        text = self.svg_file.decode()
        return text[text.index("<svg") :]


class Pictures(NamedTuple):
    """Sample grids of a run as data URIs: by step (None cannot be read), as a strip and as a GIF."""

    name: str
    by_step: Mapping[int, str | None]
    strip: str | None
    animation: str | None


@dataclass(frozen=True)
class Slider:
    """Pictures of runs side by side. A slider chooses the step; the last one is shown first."""

    kind: ClassVar[str] = "slider"
    runs: Sequence[Pictures]

    @property
    def steps(self) -> list[int]:
        return sorted({step for run in self.runs for step in run.by_step})


class Section(NamedTuple):
    title: str
    blocks: Sequence[Table | Plot | Slider]
    note: str = ""

    @property
    def anchor(self) -> str:
        return "-".join(self.title.lower().replace(",", "").split())


@dataclass(frozen=True)
class Page:
    """The content of a report. `headlines` are its verdicts, one line each; `files` its data files."""

    title: str
    facts: Sequence[str]
    headlines: Sequence[str]
    warnings: Sequence[str]
    sections: Sequence[Section]
    files: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    is_folder: bool = True

    @property
    def html(self) -> str:
        template = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        text: str = environment.from_string(template).render(page=self)
        return text


def write_page(page: Page, path: Path) -> None:
    """Write the page; one that is a folder with its numbers as CSV, and its plots as SVG and PNG, next to it."""
    contents = {}
    if page.is_folder:
        contents = {name: as_utf8(csv_of(frame)) for name, frame in page.files.items()}
        for plot in (block for section in page.sections for block in section.blocks if isinstance(block, Plot)):
            contents |= {f"{plot.name}.svg": plot.svg_file, f"{plot.name}.png": encoded(plot.figure, "png")}
    try:
        for name, content in contents.items():
            write_file(path.with_name(name), content)
        write_file(path, as_utf8(page.html))
    except OSError as error:
        out, kind = (path.parent, "folder") if page.is_folder else (path, "file")
        raise option_error("--out", str(out), f"is not a writable {kind} ({error.strerror})") from None


def csv_of(frame: pd.DataFrame) -> str:
    """A CSV file with 6 significant digits; fields without a value are empty."""
    text: str = frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return text


def as_utf8(text: str) -> bytes:
    """The bytes of a file. Halves of surrogate pairs, which JSON of strangers may have, become question marks."""
    return text.encode("utf-8", "replace")
