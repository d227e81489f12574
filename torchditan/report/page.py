# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""A report as one HTML page from one template (page.html.j2), with its plots as files next to it.

Notable:
- The page loads nothing: its plots are inline SVG, its pictures data URIs. Its content security policy forbids more.
- The template escapes every text: names of runs, captions and error messages are untrusted. Only SVG passes as it is,
  whose labels matplotlib escapes.
- A section without content is not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torchditan.config.errors import option_error
from torchditan.config.optional_libraries import import_optional
from torchditan.report.labels import as_utf8
from torchditan.run.atomic_files import write_file

if TYPE_CHECKING:
    import pandas as pd

PAGE_NAME = "report.html"
_MOST_ROWS = 200


@dataclass(frozen=True)
class Table:
    """A table of texts. Columns in `numeric` are right-aligned. With a `summary` it is collapsed under this text.

    A column without any entry is not shown, nor are rows after `most_rows`.
    """

    kind: ClassVar[str] = "table"
    frame: pd.DataFrame
    numeric: frozenset[str] = frozenset()
    title: str = ""
    summary: str = ""
    most_rows: int = _MOST_ROWS

    @property
    def shown(self) -> pd.DataFrame:
        return self.frame.loc[:, (self.frame != "").any().to_numpy()].iloc[: self.most_rows]


def table(headers: Sequence[str], rows: Any, numeric: Sequence[str] = (), **options: Any) -> Table:
    """A `Table` of rows."""
    import pandas as pd

    return Table(pd.DataFrame(rows, columns=list(headers), dtype=object), frozenset(numeric), **options)


class Look(NamedTuple):
    """How the line of one name is drawn. `dashes` are in pixels, empty for a solid line; `width` is in points."""

    name: str
    color: str
    dashes: str = ""
    width: float = 1.5


class Plot(NamedTuple):
    """A drawn figure. A report that is a folder also has it as the files that `draw_files` returns, by name."""

    name: str
    title: str
    svg: str
    draw_files: Callable[[], Mapping[str, bytes]]
    legend: Sequence[Look] = ()


@dataclass(frozen=True)
class Plots:
    """One wide plot, or small ones side by side with one legend for all."""

    kind: ClassVar[str] = "plots"
    plots: Sequence[Plot]
    legend: Sequence[Look] = ()
    is_small: bool = False


class Picture(NamedTuple):
    """A caption, and a data URI or None."""

    name: str
    caption: str
    uri: str | None


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side."""

    kind: ClassVar[str] = "pictures"
    title: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Slider:
    """Pictures of runs side by side: data URIs by run and step; None is a picture that cannot be read.

    A slider chooses the step; the last one is shown first.
    """

    kind: ClassVar[str] = "slider"
    runs: Mapping[str, Mapping[int, str | None]]

    @property
    def steps(self) -> list[int]:
        return sorted({step for uris in self.runs.values() for step in uris})


Block = Table | Plots | Pictures | Slider


class Section(NamedTuple):
    title: str
    blocks: Sequence[Block]
    note: str = ""

    @property
    def anchor(self) -> str:
        return "-".join(self.title.lower().replace(",", "").split())


class Warned(NamedTuple):
    """A warning, and its cases."""

    sentence: str
    cases: Table | None = None


@dataclass(frozen=True)
class Page:
    """The content of a report. `headlines` are its verdicts, one line each; `files` its data files."""

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
    def blocks(self) -> list[Block]:
        return [block for section in self.sections for block in section.blocks]


def html_of(page: Page) -> str:
    template = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    jinja2 = import_optional("jinja2", extra="analysis")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text: str = environment.from_string(template).render(page=page)
    return text


def write_page(page: Page, out: Path, name: str | None = None) -> Path:
    """Write the page to the folder of `--out` as `name`, with its data files, and its plots as SVG and PNG.

    Without a name it is one file: `out`, or report.html in this folder. Returns the path of the page.
    """
    contents: dict[Path, bytes] = {}
    if name is not None:
        path = out / name
        drawn = [plot.draw_files() for block in page.blocks if isinstance(block, Plots) for plot in block.plots]
        contents = {out / file: content for files in (page.files, *drawn) for file, content in files.items()}
    else:
        page = replace(page, files={})
        is_file = out.suffix.lower() in (".html", ".htm") and not out.is_dir()
        out = path = out if is_file else out / PAGE_NAME
    contents[path] = as_utf8(html_of(page))
    try:
        for file, content in contents.items():
            write_file(file, content)
    except OSError as error:
        right = f"is not a writable {'file' if name is None else 'folder'} ({error.strerror})"
        raise option_error("--out", str(out), right) from None
    return path
