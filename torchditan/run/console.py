# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The console of a run: one line per record, and a progress bar below them on a terminal."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import Any, TextIO

CONSOLE_COLUMNS = 100
"""Maximum line length if the output is not a terminal; otherwise the width of the terminal applies."""
_LEAST_IMPORTANT_FIRST = (
    "encoding_percent",
    "data_loading_percent",
    "tflops_per_device",
    "step_time_s",
    "peak_memory_gib",
    "lr",
    "grad_norm",
    "mfu",
    "images_per_second",
)
"""Parts that a console line drops, in this order, until it fits; metrics.jsonl contains all of them."""


class Console:
    """Lines of text and, on a terminal, a progress bar below them that never mixes with the lines."""

    _BAR_WIDTH = 10
    _REDRAW_S = 0.1

    def __init__(self, stream: TextIO, *, color: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self._stream = stream
        self._clock = clock
        self.is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.color = color and self.is_terminal and not os.environ.get("NO_COLOR")
        self._bar = ""
        self._drawn_at = float("-inf")

    @property
    def columns(self) -> int:
        """Maximum line length."""
        return shutil.get_terminal_size().columns if self.is_terminal else CONSOLE_COLUMNS

    def line(self, text: str) -> None:
        self._stream.write(f"{self._erase()}{text}\n{self._bar}")
        self._stream.flush()

    def progress(self, step: int, total_steps: int, eta: str, *, figures: str = "") -> None:
        """Redraw the bar, a few times per second at most; does nothing if the output is not a terminal.

        `figures` stands between step and time left: the last logged loss and speed.
        """
        if not self.is_terminal or (self._clock() - self._drawn_at < self._REDRAW_S and step < total_steps):
            return
        self._drawn_at = self._clock()
        share = min(step / total_steps, 1.0)
        bar = "#" * int(share * self._BAR_WIDTH)
        text = f"{share:4.0%} [{bar:.<{self._BAR_WIDTH}}] step {step:,}/{total_steps:,}  {figures}ETA {eta}"
        text = text[: shutil.get_terminal_size().columns - 1]  # a wrapped bar could not be erased
        self._stream.write(f"{self._erase()}{text}")
        self._stream.flush()
        self._bar = text

    def close(self) -> None:
        self._stream.write(self._erase())
        self._stream.flush()
        self._bar = ""

    def _erase(self) -> str:
        return "\r\x1b[2K" if self._bar else ""


def record_line(record: dict[str, Any], total_steps: int, eta: str, *, color: bool, columns: int) -> str:
    """One line of at most `columns` characters; if it would be longer, the least important parts are dropped."""
    parts = {
        "step": (f"step {{:>{len(str(total_steps))}}}/{total_steps}", 31),
        "loss": ("loss {:.4f}", 32),
        "validation_loss": ("val {:.4f}", 32),
        "grad_norm": ("grad {:.3f}", 33),
        "lr": ("lr {:.1e}", 39),
        "images_per_second": ("{:,.1f} images/s", 34),
        "step_time_s": ("{:.3f} s/step", 34),
        "tflops_per_device": ("{:,.2f} TFLOP/s", 36),
        "mfu": ("MFU {:.1f}%", 36),
        "peak_memory_gib": ("{:.2f} GiB", 35),
        "data_loading_percent": ("data {:.1f}%", 39),
        "encoding_percent": ("encoding {:.1f}%", 39),
    }
    shown = {
        key: (text.format(record[key]), code) for key, (text, code) in parts.items() if record.get(key) is not None
    }
    shown["eta"] = (f"ETA {eta}", 39)
    for key in _LEAST_IMPORTANT_FIRST:
        if len("  ".join(text for text, _ in shown.values())) <= columns:
            break
        shown.pop(key, None)
    return "  ".join(f"\x1b[{code}m{text}\x1b[0m" if color else text for text, code in shown.values())
