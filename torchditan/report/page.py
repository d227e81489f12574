# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Building blocks of the reports: an HTML page that works offline, with tables, plots and cards.

Notable:
- The script of plotly is inlined once. The page loads nothing.
- Texts are escaped here: the error message of a run is text, not markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torchditan.config.errors import ConfigError, option_error
from torchditan.report.findings import Finding
from torchditan.run.atomic_files import write_file

MOST_ROWS = 200
_CSS = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:1228px;padding:20px 24px 80px;background:#fff;color:#111;
 font:15px/1.5 system-ui,"Segoe UI","Helvetica Neue",Arial,sans-serif}
h1{font-size:25px;line-height:1.25;margin:0 0 4px}
h2{font-size:20px;margin:44px 0 6px;padding-top:10px;border-top:1px solid #ccc}
h3{font-size:16px;margin:22px 0 4px}
p{margin:4px 0 10px;max-width:960px}
.facts{color:#444;margin:0 0 12px;max-width:none}
.none{color:#444;font-style:italic}
.findings{display:grid;grid-template-columns:1fr 1fr;gap:12px}
.finding{border:1px solid #ccc;border-left:5px solid #0072B2;border-radius:4px;padding:9px 14px}
.finding h3{font-size:14px;margin:0;color:#444;font-weight:600}
.finding strong{display:block;font-size:18px;line-height:1.3;margin:1px 0 4px}
.finding p,.finding li{max-width:none;font-size:14px;line-height:1.42;margin:0;overflow-wrap:anywhere}
.finding ul{margin:0;padding-left:18px}
.finding.first{grid-column:1/-1;border-left-width:9px;background:#F3F8FC}
.finding.first strong{font-size:24px}
.finding.warn{border-left-color:#D55E00}
.table{overflow-x:auto;margin:6px 0 14px}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px 3px 0;text-align:left;vertical-align:top;border-bottom:1px solid #e3e3e3}
th{border-bottom:1px solid #777;font-weight:600;white-space:nowrap}
th.n,td.n{text-align:right;white-space:nowrap}
td.wrap{max-width:560px;overflow-wrap:break-word}
details{margin:4px 0 12px}
summary{cursor:pointer}
nav{font-size:14px;margin:10px 0 0}
nav a{display:inline-block;margin-right:16px;color:#00568A}
.runs th,.runs th.n{white-space:normal;vertical-align:bottom}
.runs table{font-size:13px}
.runs td:first-child{min-width:100px;overflow-wrap:anywhere}
.runs td.n{white-space:normal}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:14px;margin:6px 0 14px}
figure{margin:0;min-width:0}
figcaption{font-size:14px;margin:0 0 4px;overflow-wrap:anywhere}
figcaption b{display:block}
figure img{max-width:100%;height:auto;border:1px solid #ccc}
.plot{margin:6px 0 10px;min-width:0}
.check::before{display:inline-block;width:6em;font-weight:600;white-space:nowrap}
.check.pass::before{content:"passed";color:#006B4E}
.check.fail::before{content:"failed";color:#A84300}
.check.skip::before{content:"unknown";color:#555}
.check{margin:8px 0 0;max-width:none}
.detail{margin:0 0 4px 6em;color:#333}
@media(max-width:800px){.findings{grid-template-columns:1fr}}
"""


def document(*, title: str, heading: str, top: str, findings: str, sections: Iterable[tuple[str, str, str]]) -> str:
    """The HTML page. `top`, `findings` and the content of each section (anchor, title, content) are HTML."""
    sections = list(sections)
    script = import_module("plotly.offline").get_plotlyjs()
    links = "".join(f'<a href="#{anchor}">{html.escape(name)}</a>' for anchor, name, _ in sections)
    body = "".join(
        f'<section id="{anchor}"><h2>{html.escape(name)}</h2>{content}</section>' for anchor, name, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_CSS}</style>"
        f"<script>{script}</script></head><body>"
        f"<header><h1>{html.escape(heading)}</h1>{top}</header>"
        f"{findings}<nav>{links}</nav>{body}</body></html>\n"
    )


def require(*libraries: str) -> None:
    """Raise ConfigError if a library of the report is not installed."""
    for name in libraries:
        try:
            import_module(name)
        except ImportError:
            raise ConfigError(f"the analysis needs {name}: pip install -e '.[analysis]'") from None


def write_files(contents: dict[Path, bytes], out: Path) -> None:
    """Write the files of a report to the folder of `--out`."""
    try:
        for path, content in contents.items():
            write_file(path, content)
    except OSError as error:
        raise option_error("--out", str(out), f"is not a writable folder ({error.strerror})") from None


def card(finding: Finding, classes: str) -> str:
    """A card with a question, its answer in large type, and the numbers behind it."""
    if len(finding.sentences) == 1:
        text = f"<p>{html.escape(finding.sentences[0])}</p>"
    else:
        text = f"<ul>{''.join(f'<li>{html.escape(sentence)}</li>' for sentence in finding.sentences)}</ul>"
    question, answer = html.escape(finding.question), html.escape(finding.answer)
    return f'<div class="{classes}"><h3>{question}</h3><strong>{answer}</strong>{text}</div>'


def plot(figure: Any | None, name: str, otherwise: str) -> str:
    """The figure as a div without the script of plotly, or the text `otherwise` if the figure is None."""
    if figure is None:
        return none(otherwise)
    text = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        default_width="100%",
        config={"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]},
    )
    return f'<div class="plot">{text}</div>'


class Picture(str):
    """HTML of a picture, which a table shows as it is."""


def picture(uri: str, description: str) -> Picture:
    return Picture(f'<img src="{uri}" alt="{html.escape(description)}">')


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], numeric: set[str] | frozenset[str] = frozenset()
) -> str:
    """A table of texts, or of pictures (`picture`). Columns named in `numeric` are right-aligned."""
    rows = list(rows)
    head = "".join(f"<th{_class(header in numeric)}>{html.escape(header)}</th>" for header in headers)
    lines = [
        "".join(
            f"<td{_class(header in numeric)}>{cell if isinstance(cell, Picture) else html.escape(str(cell))}</td>"
            for header, cell in zip(headers, row, strict=True)
        )
        for row in rows[:MOST_ROWS]
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = f"<p>{len(rows) - MOST_ROWS:,} more.</p>" if len(rows) > MOST_ROWS else ""
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def _class(is_numeric: bool) -> str:
    return ' class="n"' if is_numeric else ' class="wrap"'


def details(summary: str, content: str, *, is_open: bool = False) -> str:
    """Collapsible content."""
    return f"<details{' open' if is_open else ''}><summary>{html.escape(summary)}</summary>{content}</details>"


def none(text: str) -> str:
    """A paragraph that explains missing content."""
    return f'<p class="none">{html.escape(text)}</p>'
