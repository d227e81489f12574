# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The folder of a sampling sweep: its points, and their results as sweep.json, sweep.md and two plots.

Notable:
- results are always read from the cards of the points, so a killed sweep loses none;
- a folder belongs to one checkpoint of each run and one set of options. More points of the same kind can be added;
- without `--metrics`, all points get the metrics of the first card, because the default ones depend on the machine;
- only one process at a time can use the folder. The kernel releases its lock when the process exits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchditan.config.errors import ConfigError, did_you_mean, option_error
from torchditan.evaluation.sweep import Point, Result, choose_figure, finished_card, markdown
from torchditan.report.sweep_plots import save_plots
from torchditan.run.atomic_files import write_file
from torchditan.run.directory import take_lock

SWEEP_NAME, TABLE_NAME = "sweep.json", "sweep.md"
_VERSION = 1


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep, and the checkpoint that all its points use."""

    path: Path
    run_id: str
    """From config.json; the path if an older run has none."""
    step: int


@dataclass
class SweepFolder:
    """The folder of a sweep. Each point has a folder in `points/` and one in `logs/`."""

    path: Path
    runs: dict[str, SweptRun]
    """By the labels that points have."""
    options: dict[str, Any]
    """Of torchditan evaluate, the same for all points. If `metrics` is not given, it becomes that of the first card."""
    points: list[Point]
    """Of this command, then those of earlier commands."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reasons by the names of points."""

    def out(self, point: Point) -> Path:
        """Folder of a point's evaluation."""
        return self.path / "points" / point.name

    def logs(self, point: Point) -> Path:
        return self.path / "logs" / point.name

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Context manager that locks the folder for this process.

        Raises:
            ConfigError: the folder has other content, or another sweep uses it. It is not changed.
        """
        self.check_content()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise option_error("--out", str(self.path), f"is not a writable folder ({error.strerror})") from None
        try:
            take_lock(lock, self.path, holder="sweep", remedy="name another folder with --out")
            self.add_earlier_points()
            yield
        finally:
            os.close(lock)

    def check_content(self) -> dict[str, Any]:
        """The stored sweep of the same runs and options; {} if nothing was evaluated in the folder yet.

        Raises:
            ConfigError: the folder has other content.
        """
        stored = read_sweep(self.path)
        try:
            differences = self._differences(stored) if stored else []
        except (KeyError, TypeError, AttributeError):
            raise _damaged(self.path) from None
        if differences:
            right = f"holds another sweep: {differences[0]}; name another folder"
            raise option_error("--out", str(self.path), right)
        return stored

    def _differences(self, stored: dict[str, Any]) -> list[str]:
        there, options = stored["runs"], stored["options"]
        if there.keys() != self.runs.keys():
            return [f"its runs are {', '.join(there)}"]
        found = []
        for label, run in self.runs.items():
            if there[label]["run_id"] != run.run_id:
                found.append(f"{label} is another run there")
            elif there[label]["step"] != run.step:
                found.append(f"{label} has step {there[label]['step']} there and step {run.step} here")
        for name in options.keys() & self.options.keys():  # an option of only one version has its default there
            if name == "metrics" and self.options[name] is None:
                continue  # then those of the stored sweep are used
            if options[name] != self.options[name]:
                was, now = json.dumps(options[name]), json.dumps(self.options[name])
                found.append(f"--{name} is {was} there and {now} here")
        return found

    def add_earlier_points(self) -> None:
        """Add the points of earlier commands in this folder, the reasons of those that failed, and their metrics."""
        stored = self.check_content()
        entries = stored.get("points", [])
        if self.options.get("metrics") is None:
            self.options["metrics"] = stored.get("options", {}).get("metrics")
        try:
            earlier = {Point.from_dict(entry["point"]): entry["reason"] for entry in entries}
        except (KeyError, TypeError, ValueError):
            raise _damaged(self.path) from None
        for point, reason in earlier.items():
            if point not in self.points:
                self.points.append(point)
                if reason:
                    self.failures[point.name] = reason

    def result(self, point: Point) -> Result:
        card = finished_card(
            self.out(point), point, step=self.runs[point.run].step, metrics=self.options.get("metrics")
        )
        return Result(point, card, None if card else self.failures.get(point.name))

    def results(self) -> list[Result]:
        """Of all points, in order."""
        return [self.result(point) for point in self.points]

    def settle_metrics(self) -> None:
        """Without `--metrics`, take the metrics of the first card for all points."""
        if self.options.get("metrics") is None:
            found = next((result.card for result in self.results() if result.card), None)
            self.options["metrics"] = found.metrics if found else None

    def check_figure(self, figure: str | None) -> None:
        """Refuse a figure that no card has. Before the first card, any name may be right: metrics choose them.

        Raises:
            ConfigError: the cards do not have the figure.
        """
        names = list(dict.fromkeys(name for result in self.results() for name in result.figures))
        if figure is not None and names and figure not in names:
            raise option_error("--figure", figure, f"must be one of {', '.join(names)}{did_you_mean(figure, names)}")

    def write(self, figure: str | None) -> str:
        """Write sweep.json, sweep.md and the plots. Returns the text of sweep.md without links to the plots.

        Args:
            figure: what points are compared by; None, or one that no card has, chooses a figure of the cards.
        """
        self.settle_metrics()
        results = self.results()
        write_file(self.path / SWEEP_NAME, json.dumps(self._content(results), indent=2).encode())
        if not any(figure in result.figures for result in results):
            figure = choose_figure(results)
        title = ", ".join(f"{label} step {run.step}" for label, run in self.runs.items())
        pictures: list[str] = []
        text = markdown(results, figure, title=f"Sampling sweep: {title}")
        if figure is not None:
            try:
                pictures = save_plots(self.path, results, figure, title=title)
            except ConfigError as error:  # the table does not need matplotlib
                text += f"\nNo plots: {error}. Then repeat the command.\n"
        links = [f"\n![{Path(name).stem.replace('_', ' ')}]({name})\n" for name in pictures]
        write_file(self.path / TABLE_NAME, "".join([text, *links]).encode())
        return text

    def _content(self, results: list[Result]) -> dict[str, Any]:
        """The content of sweep.json."""
        runs = {
            label: {"path": str(run.path), "run_id": run.run_id, "step": run.step} for label, run in self.runs.items()
        }
        points = [
            {
                "name": result.point.name,
                "point": result.point.to_dict(),
                "status": result.status,
                "reason": result.failure,
                "model_evaluations": result.model_evaluations,
                "card": f"points/{result.point.name}/card.json" if result.card else None,
                "figures": {name: asdict(figure) for name, figure in result.figures.items()},
            }
            for result in results
        ]
        return {"sweep": _VERSION, "runs": runs, "options": self.options, "points": points}


def read_sweep(folder: Path) -> dict[str, Any]:
    """The stored sweep of a folder; {} if nothing was evaluated there yet.

    Raises:
        ConfigError: the folder has other content.
    """
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise option_error("--out", str(folder), "is a file; must be a folder")
    if not (folder / SWEEP_NAME).exists():
        if any(path.name != ".lock" for path in folder.iterdir()):
            raise option_error("--out", str(folder), f"is not the folder of a sweep: it has no {SWEEP_NAME}")
        return {}
    try:
        stored: dict[str, Any] = json.loads((folder / SWEEP_NAME).read_bytes())
        is_known = stored["sweep"] == _VERSION
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_known = False
    if not is_known:
        raise _damaged(folder)
    return stored if any((folder / "points").glob("*/*")) else {}


def _damaged(folder: Path) -> ConfigError:
    return option_error(
        "--out", str(folder), f"its {SWEEP_NAME} is damaged, or of another version; name another folder"
    )
