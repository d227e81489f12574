# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The fuzzer of files (fuzz.py): it notices bad readers, and a few seconds of it find nothing in ours."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzz import fuzz
from fuzz_cases import Kind, Opener, Outcome, markup_in, steps_of
from fuzz_kinds import KINDS
from fuzz_mutations import PICKLE

from torchditan.config.errors import ConfigError

pytestmark = pytest.mark.nightly


def make(folder: Path) -> None:
    (folder / "file.bin").write_bytes(PICKLE + bytes(100))


def opened(tmp_path: Path, read: Callable[[], object], steps: tuple[int, ...] = (1,)) -> Outcome:
    """What the fuzzer says of a reader, which opens the untouched example first."""

    def call() -> None:
        if Path("file.bin").read_bytes() != PICKLE + bytes(100):
            read()

    opener = Opener(Kind("a kind", make, call), tmp_path / "fuzz")
    try:
        assert opener.open([]).verdict == "ok"
        return opener.open(steps)
    finally:
        opener.close()


def run_a_pickle() -> None:
    pickle.loads(PICKLE)


def run_a_command() -> None:
    os.system("true")


def open_a_connection() -> None:
    with socket.socket() as connection:
        connection.connect(("127.0.0.1", 9))


def write_outside() -> None:
    Path("../outside/new").write_text("new")


def write_outside_from_c() -> None:
    os.posix_fallocate(os.open("../outside/private.txt", os.O_RDWR), 0, 99)


def read_outside() -> None:
    Path("../outside/private.txt").read_text()


def raise_a_key_error() -> None:
    {}["missing"]


def allocate_4_gb() -> None:
    np.empty(4 << 30, dtype=np.uint8)


def fill_1_gb() -> None:
    np.ones(1 << 30, dtype=np.uint8)
    raise ConfigError("refused, too late")


def print_an_escape() -> None:
    print("a caption \x1b[2J")


def write_markup() -> None:
    Path("report.html").write_text("<p>a caption <img src=x onerror=ran()></p>")


def crash() -> None:
    os._exit(7)


@pytest.mark.parametrize(
    ("read", "verdict"),
    [
        (run_a_pickle, "execution"),
        (run_a_command, "execution"),
        (open_a_connection, "execution"),
        (write_outside, "write outside"),
        (write_outside_from_c, "write outside"),
        (read_outside, "read outside"),
        (raise_a_key_error, "traceback"),
        (allocate_4_gb, "memory"),
        (fill_1_gb, "memory"),
        (print_an_escape, "terminal"),
        (write_markup, "markup"),
        (crash, "crash"),
    ],
)
def test_a_bad_reader_is_noticed(read: Callable[[], None], verdict: str, tmp_path: Path) -> None:
    outcome = opened(tmp_path, read)
    assert outcome.verdict == verdict, outcome
    if read is raise_a_key_error:
        assert "KeyError" in outcome.reason and "raise_a_key_error" in outcome.details


def test_an_endless_reader_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loop() -> None:
        while True:
            time.monotonic()

    monkeypatch.setattr("fuzz_cases.CPU_SECONDS", 0.5)
    outcome = opened(tmp_path, loop)
    assert outcome.verdict == "time", outcome
    assert outcome.reason == "no end within 0.5 s of CPU time"
    assert "in loop" in outcome.details


def test_a_refusal_and_a_file_that_opens_are_no_findings(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ConfigError("file.bin = 3: must be 4")

    assert opened(tmp_path / "one", refuse)[:2] == ("refused", "file.bin = 3: must be 4")
    outcome = opened(tmp_path / "two", lambda: None)
    assert outcome.verdict == "ok", outcome


def test_markup_is_found_where_a_reader_sees_it() -> None:
    image = "<img src=x onerror=ran()>"
    assert markup_in(f"<p>{image}</p>", ".html") and markup_in(f"a caption {image}", ".md")
    assert markup_in("[a](javascript:ran())", ".md")
    assert not markup_in("<p>&lt;img src=x onerror=ran()&gt;</p>", ".html")
    assert not markup_in(f"`{image}` and\n```\n{image}\n```\n\\<img src=x onerror=ran()\\>", ".md")


def test_a_case_is_a_function_of_its_seed_and_number() -> None:
    assert steps_of("npz", 0, 7) == steps_of("npz", 0, 7)
    assert len({tuple(steps_of(kind, seed, 7)) for kind in KINDS for seed in range(3)}) == 3 * len(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_few_cases_of_each_kind_find_nothing(name: str) -> None:
    result = fuzz(KINDS[name], seed=1, seconds=60, most=20)
    assert result["found"] == []
    assert result["ok"] + result["refused"] == result["cases"] > 0
