# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A report as one HTML page from one template (page.html.j2), with its plots as files next to it.

Notable:
- The page loads nothing: its plots are inline SVG, its pictures data URIs. Its content security policy forbids more.
- The template escapes every text: names of runs, captions and error messages are untrusted. Only SVG passes as it is,
  whose labels matplotlib escapes.
- A section without content is not shown.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from torchditan.config.errors import option_error
from torchditan.config.optional_libraries import import_optional
from torchditan.report.labels import as_utf8, count
from torchditan.run.atomic_files import write_file

if TYPE_CHECKING:
    from PIL import Image

_MOST_ROWS = 200
_SIDES = (1200, 800, 500, 300)
"""Longest sides of an embedded picture in pixels: the first, and smaller ones for a picture that has too many bytes."""


@dataclass(frozen=True)
class Table:
    """A table of texts. Columns in `numeric` are right-aligned. With a `summary` it is collapsed under this text.

    A column without any entry is not shown, nor are rows after `most_rows`.
    """

    kind: ClassVar[str] = "table"
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[str] = frozenset()
    title: str = ""
    summary: str = ""
    most_rows: int = _MOST_ROWS

    @property
    def columns(self) -> list[int]:
        """Numbers of the columns that are shown."""
        return [number for number in range(len(self.headers)) if any(row[number] for row in self.rows)]

    @property
    def shown(self) -> Sequence[Sequence[str]]:
        return self.rows[: self.most_rows]

    @property
    def num_hidden(self) -> int:
        return max(0, len(self.rows) - self.most_rows)


@dataclass(frozen=True)
class Look:
    """How the line of one name is drawn. `dashes` are in pixels, empty for a solid line; `width` is in points."""

    name: str
    color: str
    dashes: str = ""
    width: float = 1.5


@dataclass(frozen=True)
class Plot:
    """A drawn figure. A report that is a folder also has it as the files that `draw_files` returns, by name."""

    kind: ClassVar[str] = "plot"
    name: str
    title: str
    svg: str
    draw_files: Callable[[], Mapping[str, bytes]]
    legend: Sequence[Look] = ()

    @property
    def inline(self) -> str:
        """The SVG without the lines in front of its element."""
        return self.svg[self.svg.index("<svg") :]


@dataclass(frozen=True)
class Picture:
    """One of several pictures side by side: a caption, and a data URI or why there is none."""

    name: str
    caption: str
    uri: str | None


@dataclass(frozen=True)
class Pictures:
    kind: ClassVar[str] = "pictures"
    title: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Plots:
    """Small plots side by side, with one legend for all."""

    kind: ClassVar[str] = "plots"
    plots: Sequence[Plot]
    legend: Sequence[Look] = ()
    title: str = ""


@dataclass(frozen=True)
class Frames:
    """The pictures of one run by step. A value of None is a picture that cannot be read."""

    name: str
    uris: Mapping[int, str | None]


@dataclass(frozen=True)
class Slider:
    """Pictures of runs side by side. A slider chooses the step; the last one is shown first."""

    kind: ClassVar[str] = "slider"
    runs: Sequence[Frames]

    @property
    def steps(self) -> list[int]:
        return sorted({step for run in self.runs for step in run.uris})


Block = Table | Plot | Plots | Pictures | Slider


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]
    note: str = ""

    @property
    def anchor(self) -> str:
        return "-".join(self.title.lower().replace(",", "").split())


@dataclass(frozen=True)
class Warned:
    """A warning, and its cases."""

    sentence: str
    cases: Table | None = None

    @property
    def num_cases(self) -> str:
        return count(len(self.cases.rows), "case") if self.cases else ""


@dataclass(frozen=True)
class Page:
    """The content of a report. `headlines` are its verdicts, one line each; `files` the names of its data files."""

    title: str
    facts: Sequence[str]
    headlines: Sequence[str]
    warnings: Sequence[Warned]
    sections: Sequence[Section]
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def shown(self) -> list[Section]:
        return [section for section in self.sections if section.blocks]

    @property
    def has_slider(self) -> bool:
        return any(isinstance(block, Slider) for section in self.shown for block in section.blocks)


def html_of(page: Page) -> str:
    template = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    jinja2 = import_optional("jinja2", extra="analysis")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text: str = environment.from_string(template).render(page=page)
    return text


def write_page(page: Page, out: Path, name: str) -> Path:
    """Write the page, its data files, and its plots as SVG and PNG to the folder of `--out`."""
    contents = {out / file: content for file, content in page.files.items()}
    for section in page.shown:
        for block in section.blocks:
            for plot in block.plots if isinstance(block, Plots) else [block] if isinstance(block, Plot) else []:
                contents |= {out / file: content for file, content in plot.draw_files().items()}
    contents[out / name] = as_utf8(html_of(page))
    try:
        for path, content in contents.items():
            write_file(path, content)
    except OSError as error:
        raise option_error("--out", str(out), f"is not a writable folder ({error.strerror})") from None
    return out / name


def data_uri(path: Path, *, most_bytes: int) -> str | None:
    """The picture in a file as a data URI, as `picture_uri` makes it; None if it cannot be read."""
    try:
        return picture_uri(path.read_bytes(), most_bytes=most_bytes)
    except OSError:
        return None


def picture_uri(data: bytes, *, most_bytes: int) -> str | None:
    """A picture as a data URI; None if it is not a complete image.

    One that has more than `most_bytes` becomes JPEG, smaller until it fits.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:  # of a file, Pillow reserves as many bytes as a damaged one names
            picture.load()
            kind = (picture.format or "").lower()
            for side in _SIDES:
                if len(data) <= most_bytes:
                    break
                picture.thumbnail((side, side))
                data, kind = _encoded(picture.convert("RGB"), "jpeg"), "jpeg"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # errors of Pillow
        return None
    return uri_of(data, kind)


def uri_of(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def num_bytes(path: Path) -> int:
    """Size of a file; 0 if it cannot be read, such as a link that leads nowhere."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _encoded(picture: Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, format=kind, optimize=True)
    return file.getvalue()
