# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Runs test files of another project, in this process, with our code in place of what they test.

The other project stays in a folder that the user cloned. An adapter gives its test files, a function that replaces
names in a module of theirs, and the reason for each test that does not apply.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from torchditan.errors import ConfigError, option_error

Replace = Callable[[ModuleType], None]
"""Puts our code into one of their test modules, before any of its tests runs."""


class Suite:
    """The pytest plugin: replaces, skips, and records what became of each test."""

    def __init__(self, *, replace: Replace, skipped: Mapping[str, str]) -> None:
        self.replace = replace
        self.skipped = skipped
        self.outcomes: dict[str, tuple[str, str]] = {}
        """Id of a test -> ("passed", ""), ("skipped", reason) or ("failed", last line of the error)."""
        self.unused = set(skipped)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for module in {item.module for item in items}:
            self.replace(module)
        for item in items:
            for pattern, reason in self.skipped.items():
                if fnmatch.fnmatchcase(name_of(item.nodeid), pattern):
                    self.unused.discard(pattern)
                    item.add_marker(pytest.mark.skip(reason=reason))
                    break

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.outcomes[name] = ("skipped", reason.removeprefix("Skipped: "))
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = crash.message if crash else str(report.longrepr)
            self.outcomes[name] = ("failed", " ".join(text.split())[:300])
        elif report.when == "call" and name not in self.outcomes:
            self.outcomes[name] = ("passed", "")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = ("failed", f"not collected: {str(report.longrepr).strip().splitlines()[-1]}")


def name_of(nodeid: str) -> str:
    """`Class::test` of a test's id; a file that was not collected keeps its id."""
    return nodeid.partition("::")[2] or nodeid


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules with an empty class for each name, for libraries that a suite imports and its chosen tests do not use."""

    def __init__(self, libraries: Sequence[str]) -> None:
        self.libraries = libraries

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_absent = name.partition(".")[0] in self.libraries
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = empty_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def stand_in_for(libraries: Sequence[str]) -> None:
    """From now on, imports of these libraries (top-level names) give stand-ins, installed or not."""
    sys.meta_path.insert(0, StandIn(libraries))


def main(
    about: str, *, tests: Sequence[str], replace: Replace, skipped: Mapping[str, str], options: Sequence[str] = ()
) -> int:
    """The command line of an adapter.

    Args:
        about: the suite, for --help.
        tests: files of the suite, relative to --source.
        replace: see `Replace`.
        skipped: pattern of `Class::test` -> why it does not apply; the first match counts. A pattern without a test is
            an error.
        options: of pytest.

    Returns:
        Exit code: 0, 1 if a test failed, 2 for a wrong --source.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--source", help="folder of the cloned suite")
    parser.add_argument("--only", default="", help="run only tests whose name contains this")
    given = parser.parse_args()
    try:
        source = checked_source(given.source, tests)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.dont_write_bytecode = True  # leaves the suite's folder as it is
    suite = Suite(replace=replace, skipped=skipped)
    quiet = ("-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")
    only = ("-k", given.only) if given.only else ()
    pytest.main(
        [*quiet, "--rootdir", str(source), *only, *options, *(str(source / test) for test in tests)], plugins=[suite]
    )
    return report(suite, is_whole=not given.only)


def checked_source(source: str | None, tests: Sequence[str]) -> Path:
    """The folder, if it has the test files.

    Raises:
        ConfigError: no folder, or another one.
    """
    if source is None:
        raise option_error("--source", None, "must be the folder of the cloned suite")
    for test in tests:
        if not Path(source, test).is_file():
            raise option_error("--source", source, f"must be the folder of the cloned suite; it has no {test}")
    return Path(source).resolve()


def report(suite: Suite, *, is_whole: bool) -> int:
    """Print counts, reasons and failures. Returns the exit code."""
    by_reason = collections.Counter(reason for outcome, reason in suite.outcomes.values() if outcome == "skipped")
    failures = {name: text for name, (outcome, text) in suite.outcomes.items() if outcome == "failed"}
    num_passed = sum(outcome == "passed" for outcome, _ in suite.outcomes.values())
    print(f"passed {num_passed}, skipped {by_reason.total()}, failed {len(failures)}")
    for name, (outcome, _) in suite.outcomes.items():
        if outcome == "passed":
            print(f"  passed  {name_of(name)}")
    for reason, count in by_reason.most_common():
        print(f"  skipped {count}: {reason}")
    for name, text in failures.items():
        print(f"  failed  {name_of(name)}: {text}")
    unused = sorted(suite.unused) if is_whole and not failures else []
    for pattern in unused:
        print(f"  error   no test matches {pattern!r}")
    return int(bool(failures or unused or not suite.outcomes))
