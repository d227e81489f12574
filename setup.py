"""The long description: README.md, whose links lead to the repository. Everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).parent
CODE = r"(```.*?```|`[^`\n]*`)"
LINK = r'(\]\(<?|\b(?:src|href|srcset)="|^\[[^\]]+\]: *)(?!\w+:)([^)\s">]+)'


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def at_tag(link: re.Match[str]) -> str:
    """The file of a link in the repository, as it is at the tag of this version."""
    path = link[2].removeprefix("./")
    if path.startswith("#"):
        path = f"README.md{path}"
    kind = "raw" if path.endswith((".gif", ".jpg", ".png", ".svg", ".webp")) else "blob"
    return f"{link[1]}{repository}/{kind}/v{version}/{path}"


(repository,) = re.findall(r'^Repository = "(.+)"', read("pyproject.toml"), flags=re.MULTILINE)
(version,) = re.findall(r'^__version__ = "(.+)"', read("torchditan/__init__.py"), flags=re.MULTILINE)
parts = re.split(CODE, read("README.md"), flags=re.DOTALL)
parts[::2] = [re.sub(LINK, at_tag, part, flags=re.MULTILINE) for part in parts[::2]]
setup(long_description="".join(parts), long_description_content_type="text/markdown")
