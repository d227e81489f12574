# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Opens changed files in a forked process that is watched, and judges what happened.

A case is a copy of an example in an empty folder `here`, changed by some seeds, and opened. It is `ok`, `refused` (a
ConfigError), a `traceback` (another exception, which a damaged file may raise), or found: too much memory, too much
time, code that ran, a file outside that was read or written, or markup and control characters that reach a page or a
terminal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from fuzz_mutations import OUTSIDE, RAN, change_file

from torchditan.errors import ConfigError
from torchditan.supervision.exit_status import verdict_of

MEMORY = 384 << 20
"""Bytes that opening a small file may take, code and caches of libraries included."""
PICTURE_MEMORY = 3 << 29
"""The same for pictures: Pillow refuses more than 179 million pixels, and its WebP decoder has two canvases of 4 bytes
each. A picture of one colour in so many pixels is a small file."""
PARQUET_MEMORY = 9 << 28
"""Arrow reserves what a damaged page claims, up to 2 GiB, and refuses it then."""
MEMORY_PER_BYTE = 64
CPU_SECONDS = 15.0
_HARD_LIMIT = 3 << 30
_PAGE_SUFFIXES = (".html", ".md")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_EXECUTION = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "urllib.Request", "webbrowser.open"),
)
_PATHS_WRITTEN = {"os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1}
"""Audit events that change the file system, and the argument that is changed."""
_PATHS_WRITTEN |= {"os.truncate": 0, "os.chmod": 0, "shutil.rmtree": 0}


@dataclass(frozen=True)
class Kind:
    """Files of a stranger, and the call that a user would open them with."""

    name: str
    make: Callable[[Path], None]
    """Writes an example that opens into an empty folder, which is the working folder."""
    open: Callable[[], object]
    """Opens it, in a working folder that holds the example."""
    files: tuple[str, ...] = ("**/*",)
    """Patterns of the files to change."""
    seal: Callable[[], None] | None = None
    """Makes sizes and checksums fit the changed files, as an attacker would."""
    may_read_outside: bool = False
    """The file is the user's own program (a configuration): its paths are meant."""
    memory: int = MEMORY
    """Bytes that opening a small file may take."""
    refuses_links: bool = False
    """Links out of the folder are refused. Elsewhere they are the user's: many datasets are folders of links."""


class Outcome(NamedTuple):
    verdict: str
    """ok, refused, traceback (an exception for a damaged file), or what was found: memory, time, execution, read
    outside, write outside, markup, terminal, crash."""
    reason: str = ""
    place: str = ""
    """Last place in the project, which tells findings apart."""
    details: str = ""
    changes: tuple[str, ...] = ()
    megabytes: float = 0.0

    @property
    def is_found(self) -> bool:
        return self.verdict not in ("ok", "refused", "traceback")


def steps_of(kind: str, seed: int, number: int) -> list[int]:
    """Seeds of the changes of a case."""
    rng = random.Random(f"{seed}/{kind}/{number}")
    return [rng.getrandbits(32) for _ in range(rng.choice([1, 1, 1, 2, 3]))]


def prepare(kind: Kind, example: Path, case: Path, steps: Sequence[int]) -> tuple[str, ...]:
    """Write the changed files to `case/here`. Returns what was changed."""
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(example, case / "here", symlinks=True)
    outside = case / OUTSIDE
    outside.mkdir()
    _write_private(outside)
    changes = []
    with working_folder(case / "here"):
        is_sealed = bool(steps) and steps[0] % 8 != 0
        for step in steps:
            rng = random.Random(step)
            files = sorted({path for pattern in kind.files for path in Path().glob(pattern) if not path.is_dir()})
            if files:
                path = rng.choice(files)
                changes.append(f"{path}: {change_file(path, rng)}")
        if kind.seal is not None and is_sealed:
            with contextlib.suppress(Exception):  # what was changed cannot be sealed
                kind.seal()
    return tuple(change.encode("ascii", "backslashreplace").decode() for change in changes)


def _write_private(outside: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8), (1, 2, 3)).save(outside / "private.png")
    (outside / "private.txt").write_text("a private line\n")


@contextlib.contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# The process that opens files


class _Watch:
    """Notes what an opened file has this process do. An audit hook cannot be removed, so it is switched."""

    def __init__(self) -> None:
        self.case: Path | None = None
        self.may_read_outside = False
        self.found: tuple[str, str] | None = None
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.case is None or self.found is not None:
            return
        if event in _EXECUTION:
            self.found = ("execution", f"{event} {str(arguments)[:200]}")
        elif event == "open":
            path, mode, flags = arguments
            is_written = (
                bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if isinstance(flags, int) else "w" in str(mode)
            )
            self._judge(path, is_written=is_written)
        elif event in _PATHS_WRITTEN:
            self._judge(arguments[_PATHS_WRITTEN[event]], is_written=True)

    def _judge(self, path: Any, *, is_written: bool) -> None:
        if isinstance(path, int) or path is None or self.case is None:
            return
        try:
            place = os.path.realpath(os.fsdecode(path))
        except (TypeError, ValueError):
            return
        case = str(self.case)
        if os.path.basename(place) == RAN:
            self.found = ("execution", f"the payload ran: {place}")
        elif place.startswith((f"{case}/here", "/dev/", "/proc/self", "/sys/")):
            return
        elif is_written:
            if "__pycache__" not in place:
                self.found = ("write outside", place)
        elif place.startswith(f"{case}/{OUTSIDE}") and not self.may_read_outside and os.path.isfile(place):
            self.found = ("read outside", place)


class _Markup(HTMLParser):
    """Finds elements and attributes that come from a hostile text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, text in attrs:
            is_call = name.startswith("on") and f"{RAN}()" in (text or "")
            is_link = name in ("href", "src") and (text or "").strip().lower().startswith("javascript:")
            if is_call or is_link or (tag == "img" and text == "x"):
                self.found = f"<{tag} {name}={text!r}>"


def markup_in(text: str, suffix: str) -> str | None:
    """Markup of a hostile text in a page."""
    if suffix == ".md":  # code spans and fences are shown as text
        text = re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r"\n\n(    .*\n)+", "\n\n", text)
        text = re.sub(r"(`+).*?\1", "", text)
        text = re.sub(r"\\([<>\[\]()])", lambda match: f"&#{ord(match[1])};", text)
        if match := re.search(r"\]\(javascript:", text):
            return match[0]
    parser = _Markup()
    parser.feed(text)
    return parser.found


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[1]) << 10  # type: ignore[index]


def _outside(case: Path) -> list[tuple[str, int, int]]:
    others = [path for path in case.rglob("*") if "here" not in path.relative_to(case).parts[:1]]
    return sorted(
        (str(path), path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in [*others, case.parent / RAN]
        if path.exists()
    )


def _place_of(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/fuzz" not in frame.filename]
    own = [
        frame
        for frame in frames
        if re.search(r"/(torchditan|data)/", frame.filename) and "site-packages" not in frame.filename
    ]
    return "" if not own else f"{'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].name}"


def open_case(kind: Kind, case: Path, watch: _Watch, output: Path) -> Outcome:
    """Open the files in `case/here` in this process."""
    has_link = any(path.is_symlink() for path in (case / "here").rglob("*"))
    here = case / "here"
    size = sum(path.stat().st_size for path in here.rglob("*") if path.is_file() and not path.is_symlink())
    allowed = kind.memory + MEMORY_PER_BYTE * size
    before = _outside(case)
    pages = set(here.rglob("*"))
    os.chdir(here)
    os.truncate(output, 0)
    os.lseek(1, 0, os.SEEK_SET)
    Path("/proc/self/clear_refs").write_text("5")
    resident, virtual, peak = _status("VmRSS"), _status("VmSize"), _status("VmPeak")
    resource.setrlimit(resource.RLIMIT_AS, (virtual + _HARD_LIMIT, resource.RLIM_INFINITY))
    outcome = Outcome("ok")
    watch.may_read_outside = kind.may_read_outside or (has_link and not kind.refuses_links)
    watch.found, watch.case = None, case
    try:
        kind.open()
    except ConfigError as error:
        line = verdict_of(error).reason
        outcome = Outcome("refused", line)
        if _CONTROL.search(line):
            outcome = Outcome("terminal", line, _place_of(error))
        elif len(line) > 4_000:
            outcome = Outcome("terminal", f"a line of {len(line)} characters: {line[:200]}", _place_of(error))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        is_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        name = "memory" if is_memory else "traceback"
        outcome = Outcome(name, f"{type(error).__name__}: {error}"[:500], _place_of(error), text[-8_000:])
        if (verdict := verdict_of(error)).exit_code == 2:  # a command would print one line
            outcome = Outcome("refused", verdict.reason)
    finally:
        watch.case = None
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    sys.stdout.flush()
    sys.stderr.flush()
    used = _status("VmHWM") - resident
    if (reserved := _status("VmPeak")) > peak and reserved - virtual > allowed:  # reserved, and perhaps never written
        used = reserved - virtual
    outcome = outcome._replace(megabytes=used / 1e6)
    if used > allowed and not outcome.is_found:
        outcome = Outcome(
            "memory", f"{used >> 20} MiB for {size} bytes; {outcome.reason}", outcome.place, megabytes=used / 1e6
        )
    if watch.found is not None:
        outcome = Outcome(*watch.found)
    elif (here / RAN).exists():
        outcome = Outcome("execution", "the payload ran")
    elif _outside(case) != before:
        outcome = Outcome("write outside", f"{set(_outside(case)) ^ set(before)}"[:500])
    if outcome.is_found:
        return outcome
    printed = output.read_text(errors="backslashreplace")
    if match := _CONTROL.search(printed):
        return Outcome("terminal", f"printed {match[0]!r}: {printed[max(0, match.start() - 100) : match.end() + 20]!r}")
    for page in sorted(set(here.rglob("*")) - pages):
        if page.suffix in _PAGE_SUFFIXES and (text := markup_in(page.read_text(errors="replace"), page.suffix)):
            return Outcome("markup", f"{page.name}: {text}")
    return outcome


def _serve(kind: Kind, example: Path, case: Path, connection: Connection) -> None:
    gc.freeze()  # what was inherited stays: a finalizer may wait for a thread that only the parent has
    output = case.parent / "output"
    descriptor = os.open(output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, file=2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", errors="backslashreplace") for number in (1, 2))
    home = case / "here"
    os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(home), "HF_HUB_OFFLINE": "1"}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(home / "inductor")
    sys.path.insert(0, str(home))
    sys.setrecursionlimit(1_000)
    watch = _Watch()
    while (steps := connection.recv()) is not None:
        os.chdir(case.parent)  # the last case's folder is deleted
        changes = prepare(kind, example, case, steps)
        connection.send(open_case(kind, case, watch, output)._replace(changes=changes))


class Opener:
    """Opens cases of one kind in a forked process, which is replaced after a crash, a timeout and a finding."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.example, self.case = folder / "example", folder / "case"
        self.example.mkdir(parents=True)
        with working_folder(self.example):
            kind.make(self.example)
        prepare(kind, self.example, self.case, [])
        with working_folder(self.case / "here"), contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            kind.open()  # imports, and fills caches that every case would fill
        self._process: Any = None

    def open(self, steps: Sequence[int]) -> Outcome:
        """Open the example, changed by these seeds."""
        if self._process is None:
            self._connection, there = multiprocessing.Pipe()
            context = multiprocessing.get_context("fork")
            self._process = context.Process(target=_serve, args=(self.kind, self.example, self.case, there))
            self._process.start()
            there.close()
        self._connection.send(list(steps))
        start, waited = self._cpu_seconds(), 0
        while not self._connection.poll(1):
            waited += 1
            if self._cpu_seconds() - start > CPU_SECONDS or waited > 10 * CPU_SECONDS:
                details = f"{self._cpu_seconds() - start:.1f} s of CPU time in {waited} s\n{self._stacks()}"
                self.close()
                reason = f"no end within {CPU_SECONDS:g} s of CPU time"  # the same for all, which fuzz.py counts as one
                return Outcome("time", reason, details=details, changes=self._changes(steps))
        try:
            outcome: Outcome = self._connection.recv()
        except EOFError:
            self._process.join()
            code, printed = self._process.exitcode, (self.case.parent / "output").read_text(errors="replace")
            self.close()
            return Outcome("crash", f"exit code {code}", details=printed[-4_000:], changes=self._changes(steps))
        if outcome.is_found:  # it may have left something behind
            self.close()
        return outcome

    def smallest(self, steps: Sequence[int], found: Outcome) -> list[int]:
        """The steps without those that the finding does not need."""
        steps = list(steps)
        for step in list(steps):
            fewer = [other for other in steps if other != step]
            if fewer and self.open(fewer)[:1] == found[:1]:
                steps = fewer
        return steps

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

    def _stacks(self) -> str:
        """Where the threads of the process are, and what it printed before."""
        os.kill(self._process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return (self.case.parent / "output").read_text(errors="replace")[-16_000:]

    def _changes(self, steps: Sequence[int]) -> tuple[str, ...]:
        return prepare(self.kind, self.example, self.case, steps)

    def _cpu_seconds(self) -> float:
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
