# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Reports whose plots are not rendered."""

from __future__ import annotations

import io

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without rendered plots, which take seconds."""
    empty = {"svg": b"<svg></svg>", "png": b"png"}

    def savefig(_: object, file: io.BytesIO, *, format: str, **options: object) -> None:
        file.write(empty[format])

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
