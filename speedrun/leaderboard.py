# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The leaderboards of all tracks, from committed results: LEADERBOARD.md, its plot, and what the command prints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from speedrun.entries import (
    FIRST_TUNING_SEED,
    FOLDER,
    Entry,
    Track,
    load,
    load_track,
    register,
    split_sampling,
    track_names,
)
from speedrun.ladder import Result, climb, is_over, lower_bound, pair, read_results
from torchditan.extras.evaluation.card import spread_of
from torchditan.run.atomic_files import atomic_writer, write_file

PAGE = "LEADERBOARD.md"


class Board(NamedTuple):
    """A track, its entries and what is known about them."""

    track: Track
    entries: dict[str, Entry]
    results: Mapping[str, Mapping[int, Result]]
    trials: Sequence[Result]
    times: Mapping[str, Any]
    """Measured ratios of step times, by recipe."""

    def records(self, name: str) -> list[Result]:
        """The results of an entry on the seeds of records."""
        return [self.results[name][seed] for seed in self.track.seeds if seed in self.results[name]]


def read_board(track: Track) -> Board:
    """Read the entries and results of a track.

    Raises:
        ConfigError: an entry breaks a rule, or has a result of an older version.
    """
    entries = {name: load(track, name) for name in track.names()}
    for entry in entries.values():
        register(entry.registry, entry.code)
    results = {name: read_results(entry) for name, entry in entries.items()}
    trials = [json.loads(path.read_bytes()) for path in sorted((track.results / "tuning").glob("*.json"))]
    timed = track.results / "step_times.json"
    return Board(track, entries, results, trials, json.loads(timed.read_bytes()) if timed.exists() else {})


def page(boards: Sequence[Board]) -> str:
    """The text of LEADERBOARD.md."""
    lines = [
        "# Leaderboards of the speedrun",
        "",
        "`torchditan speedrun --board` writes this page from the JSON files in `*/results/`. "
        "[README.md](README.md) has the rules.",
        "",
        "- Figures are means over the seeds of the track, with Student's 95% interval.",
        "- *Compared with* other entries seed by seed: how much better the score is, and the lower bound of that at a "
        "confidence of 95%, one-sided. An entry is better if the bound is above 0 and the second figure agrees. The "
        "bounds are not corrected for the number of comparisons.",
        "- *FLOPs* are those of training, with the optimizer, relative to the baseline. *Time* is steps times the "
        "ratio of [step times](step_times.py), relative to the baseline.",
        "- *Nearer* is the probability that a sample is nearer to a training image than a held-out image is.",
        "",
    ]
    for board in boards:
        lines += [f"## {board.track.name}: {board.track.title}", "", *table(board, is_linked=True), ""]
        if any(board.records(name) for name in board.entries) and board.track.score == "fd":
            lines += ["![FD-EffNetLite0 against training images and FLOPs](leaderboard.png)", ""]
        if board.track.ideas:
            lines += ["Open ideas, each a good first entry:", "", *(f"- {idea}" for idea in board.track.ideas), ""]
        lines += [*_ladder(board), *_trials(board.trials, board.track)]
    return "\n".join(lines).rstrip() + "\n"


def table(board: Board, names: Sequence[str] | None = None, *, is_linked: bool = False) -> list[str]:
    """Rows of Markdown, the best first; of all records and entries without any result, or of some entries."""
    track = board.track
    if names is None:
        is_record = {name: bool(board.records(name)) or not board.results[name] for name in board.entries}
        names = [name for name, entry in board.entries.items() if is_record[name] and entry.rung is None]
    if not names:
        return ["No entry yet."]
    titles = [title for title, *_ in track.columns]
    heads = ["entry", "images", *titles, "FLOPs", "minutes" if track.minutes else "time", "compared with"]
    sign = 1 if track.is_lower_better else -1

    def place(name: str) -> float:
        figures = [result["figures"][track.score] for result in board.records(name)]
        return sign * _mean(figures) if figures else math.inf

    rows = [_row(board, board.entries[name], is_linked) for name in sorted(names, key=place)]
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def _row(board: Board, entry: Entry, is_linked: bool) -> list[str]:
    track, found = board.track, board.records(entry.name)
    name = f"[{entry.name}]({track.name}/entries/{entry.name}.toml)" if is_linked else entry.name
    first = [f"{name}: {entry.title}", f"{entry.images:,}"]
    if not found:
        return [*first, *[""] * len(track.columns), "", _time(board, entry), "not yet scored by this command"]
    base = board.records(track.baseline) if track.baseline in board.entries else []
    flops = [_mean([result["training_flops"] for result in results]) for results in (found, base) if results]
    return [
        *first,
        *(
            _interval([factor * result["figures"][figure] for result in found], digits)
            for _, figure, factor, digits in track.columns
        ),
        f"{flops[0] / flops[1]:.2f}" if base else "",
        _time(board, entry),
        _verdict(board, entry, found),
    ]


def _verdict(board: Board, entry: Entry, found: Sequence[Result]) -> str:
    """Whether an entry is better than those that it names."""
    if is_over(board.track, found):
        return "**copies training images: not valid**"
    if board.track.minutes is not None and not re.fullmatch(r"[\d.]+", _time(board, entry)):
        return "not compared: no valid time"
    return "; ".join(_comparison(board, entry, other) for other in entry.compare)


def _comparison(board: Board, entry: Entry, other: str) -> str:
    track = board.track
    pairs = pair(track, board.results.get(other, {}), board.results[entry.name], track.seeds)
    if pairs.seeds != track.seeds:
        return f"{other}: {len(pairs.seeds)} of {len(track.seeds)} seeds"
    lower = lower_bound(pairs.gains)
    assert lower is not None
    is_better = lower > 0 and pairs.second_agrees
    disagrees = "" if pairs.second_agrees else f", {track.second} disagrees"
    word = "**better**" if is_better else "not better"
    if pairs.mean < 0:
        return f"{other}: {word}, {_gain(track, pairs.mean)[1:]} {'higher' if track.is_lower_better else 'lower'}"
    by = f"{_gain(track, pairs.mean)} {'lower' if track.is_lower_better else 'higher'}"
    return f"{other}: {word}, {by}, {_gain(track, lower)} or more{disagrees}"


def _time(board: Board, entry: Entry) -> str:
    """Training time relative to the baseline's, from the measured ratio of step times; or minutes."""
    base = board.entries.get(board.track.baseline)
    if base is None:
        return ""
    relative = entry.num_steps / base.num_steps * (board.track.minutes or 1)
    if entry.recipe() != base.recipe():
        measured = board.times.get(entry.recipe())
        if measured is None or measured["baseline_recipe"] != base.recipe():
            return "not measured"
        if measured["ratio"] is None:
            return "too noisy"
        relative *= measured["ratio"]
    is_late = board.track.minutes is not None and relative > board.track.minutes
    return f"{relative:.2f}" + (" **too long: not valid**" if is_late else "")


def _ladder(board: Board) -> Iterator[str]:
    track, rungs = board.track, climb(board.entries.values(), board.results)
    if not rungs:
        return
    score = track.columns[0][0]
    word = "lower" if track.is_lower_better else "higher"
    yield "### The ladder"
    yield ""
    yield (
        f"Each rung changes one thing in its base, at {rungs[0].entry.images:,} images and the seeds "
        f"{_words(track.rung_seeds)}. *{word.title()}* is how much {word} {score} is than that of the base. A rung is "
        f"kept if it is {word} for all seeds, the mean exceeds the margin, and the second figure ({track.second}) "
        "agrees. [ladder.py](ladder.py) has the formula of the margin."
    )
    yield ""
    yield f"| rung | change | base | {score} | {word}, per seed | mean, margin | FLOPs | kept |"
    yield "|---|---|---|---|---|---|---|---|"
    for rung in rungs:
        entry, pairs = rung.entry, rung.pairs
        own, base = ([board.results[name][seed] for seed in pairs.seeds] for name in (entry.name, entry.base or ""))
        flops = _mean([r["training_flops"] for r in own]) / _mean([r["training_flops"] for r in base])
        second = "" if pairs.second_agrees else f" ({track.second} disagrees)"
        cells = [
            str(entry.rung),
            f"[{entry.title}]({track.name}/entries/{entry.name}.toml)",
            str(entry.base),
            _interval([track.columns[0][2] * result["figures"][track.score] for result in own], 1),
            ", ".join(_gain(track, gain) for gain in pairs.gains),
            _gain(track, pairs.mean) + ("" if rung.margin is None else f", {_gain(track, rung.margin)}"),
            f"{flops:.2f}",
            ("**yes**" if rung.is_kept else "no" if rung.is_complete else "incomplete") + second,
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _trials(trials: Sequence[Result], track: Track) -> Iterator[str]:
    if not trials:
        return
    yield "### Tuning"
    yield ""
    yield (
        f"Trainings with seeds from {FIRST_TUNING_SEED} on, which count for nothing else. Several averages and "
        "samplers of one training are one trial."
    )
    yield ""
    yield f"| entry | trials | changes | seed | width of the average: {track.columns[0][0]} |"
    yield "|---|---|---|---|---|"
    trainings: dict[tuple[str, str, int, float], list[Result]] = {}
    for trial in trials:
        changes = _changes(split_sampling(trial["changes"])[0]) or "none"
        key = (trial["entry"], changes, trial["seed"], trial.get("training_seconds", 0.0))  # the time tells runs apart
        trainings.setdefault(key, []).append(trial)
    totals = {name: sum(key[0] == name for key in trainings) for name, *_ in trainings}
    for (name, changes, seed, _), made in sorted(trainings.items()):
        scores = sorted((_scoring(trial), _trial_score(trial, track)) for trial in made)
        found = ", ".join(f"{scoring}: {score}" for scoring, score in scores)
        yield f"| {name} | {totals[name]} | {changes} | {seed} | {found} |"
    yield ""


def _changes(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{option} = {value}" for option, value in sorted(values.items()))


def _scoring(trial: Result) -> str:
    """How a trial's weights were averaged and sampled, where it differs from the entry."""
    sampling = _changes(split_sampling(trial["changes"])[1])
    return " ".join(filter(None, [f"{trial['ema_width'] or 'own'}", sampling]))


def _trial_score(trial: Result, track: Track) -> str:
    return "failed" if "failed" in trial else f"{track.columns[0][2] * trial['figures'][track.score]:.1f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _interval(values: Sequence[float], digits: int) -> str:
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    spread = spread_of(values)
    return f"{spread.mean:.{digits}f} ± {spread.half_width:.{digits}f}"


def _gain(track: Track, gain: float) -> str:
    """A gain as a percentage of the score before, or as points of a share."""
    return f"{100 * -math.expm1(-gain):.1f}%" if track.is_lower_better else f"{100 * gain:.1f} points"


def _words(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}"


def draw(board: Board, path: Path) -> None:
    """Quality against training images and against FLOPs: one point per entry and seed, a line through the means."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, LogLocator

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    families: dict[str, list[Entry]] = {}
    for entry in board.entries.values():
        if board.records(entry.name):
            families.setdefault(entry.recipe(), []).append(entry)
    for family in families.values():
        family.sort(key=lambda entry: entry.images)
        for axis, quantity in zip(axes, ("images", "training_flops"), strict=True):
            found = [board.records(entry.name) for entry in family]
            at = [_mean([result[quantity] for result in made]) for made in found]
            distances = [[result["figures"]["fd"] for result in made] for made in found]
            (line,) = axis.plot(at, [_mean(values) for values in distances], label=family[-1].title.split(":")[0])
            for x, values in zip(at, distances, strict=True):
                axis.plot([x] * len(values), values, ".", color=line.get_color(), markersize=5)
    for axis, label in zip(axes, ("training images", "training FLOPs"), strict=True):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(label)
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            side.set_major_formatter(EngFormatter(sep=""))
            side.set_minor_formatter("")
        axis.grid(which="both", alpha=0.25)
    axes[0].set_ylabel("FD-EffNetLite0 (lower is better)")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    with atomic_writer(path) as file:
        figure.savefig(file, dpi=110, format="png", metadata={"Software": None})
    plt.close(figure)


def write_page(tracks: Path = FOLDER) -> None:
    """Write LEADERBOARD.md and the plot of the Fréchet distances."""
    boards = [read_board(load_track(name, tracks)) for name in track_names(tracks)]
    write_file(tracks / PAGE, page(boards).encode())
    for board in boards:
        if board.track.score == "fd" and any(board.records(name) for name in board.entries):
            draw(board, tracks / "leaderboard.png")
    print(tracks / PAGE)
