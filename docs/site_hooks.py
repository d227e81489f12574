# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Links of a page that leave docs/ lead to the repository in the site. On GitHub they work as they are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: object) -> str:
    """Called by MkDocs for each page. A link to a file that does not exist stays as it is, and fails a strict build."""
    docs = Path(config["docs_dir"])
    repository = docs.parent

    def replace(link: re.Match[str]) -> str:
        target = Path(os.path.normpath((docs / page.file.src_uri).parent / link[1]))
        if target.is_relative_to(docs) or not target.is_relative_to(repository) or not target.exists():
            return link[0]  # MkDocs checks it
        kind = "tree" if target.is_dir() else "blob"
        path = target.relative_to(repository).as_posix()
        return f"]({config['repo_url'].rstrip('/')}/{kind}/HEAD/{path}{link[2] or ''})"

    return LINK.sub(replace, markdown)
