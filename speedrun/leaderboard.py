#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Write the speedrun's leaderboard and its plots from the committed results: `python speedrun/leaderboard.py`.

It writes speedrun/LEADERBOARD.md and the pictures next to it. `--check` only says whether the page is up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entries import CONFIRMATION_SEEDS, FIRST_TUNING_SEED, LADDER_SEEDS, METRIC, Entry, load, names
from ladder import Result, Rung, compare, gains, is_copying, pooled_std, read_results

from torchditan.config.command_line import ScriptParser
from torchditan.config.errors import ConfigError
from torchditan.evaluation.card_figures import spread_of
from torchditan.run.atomic_files import atomic_writer, write_file

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "LEADERBOARD.md"
PLOT = FOLDER / "leaderboard.png"
BASELINE = "official_dit"
"""The entry with which records are compared, at `BUDGET` images."""

Results = Mapping[str, Mapping[int, Result]]


def page(entries: Sequence[Entry], results: Results, trials: Sequence[Result], times: Mapping[str, Any]) -> str:
    """The text of LEADERBOARD.md."""
    lines = [
        "# Leaderboard of the laptop speedrun",
        "",
        "`python speedrun/leaderboard.py` writes this page from the JSON files in [results/](results). "
        "[README.md](README.md) has the rules.",
        "",
        *_records(entries, results, times),
        *_ladder(entries, results),
        *_trials(trials),
    ]
    return "\n".join(lines) + "\n"


def _records(entries: Sequence[Entry], results: Results, times: Mapping[str, Any]) -> Iterator[str]:
    yield "## Records and baselines"
    yield ""
    confirmed = [entry for entry in entries if _seeds(results[entry.name], CONFIRMATION_SEEDS)]
    if not confirmed:
        yield "No entry has results of the confirmation seeds yet."
        yield ""
        return
    yield f"Mean over the training seeds {_words(CONFIRMATION_SEEDS)}, with Student's 95% interval."
    yield ""
    yield (
        f"- *Better than the baseline* compares with `{BASELINE}` seed by seed: the mean gain, and its lower bound at "
        "a confidence of 95%, one-sided."
    )
    yield "- *FLOPs* are those of training, with optimizer and teacher, relative to the baseline."
    yield "- *Time* is steps times the ratio of step times to the baseline's ([step_times.py](step_times.py))."
    yield ""
    yield f"![{METRIC} against training images and FLOPs](leaderboard.png)"
    yield ""
    yield f"| entry | images | {METRIC} | KID x 1000, held out | FLOPs | time | better than the baseline | seeds |"
    yield "|---|---|---|---|---|---|---|---|"
    base = results.get(BASELINE, {})
    for entry in sorted(confirmed, key=lambda entry: _mean(results[entry.name], CONFIRMATION_SEEDS, "fd")):
        own = results[entry.name]
        seeds = _seeds(own, CONFIRMATION_SEEDS)
        ratio = _flops(own, seeds) / _flops(base, seeds) if _seeds(base, seeds) else None
        cells = [
            f"[{entry.name}](entries/{entry.name}.toml): {entry.title}",
            f"{entry.images:,}",
            _interval([own[seed]["figures"]["fd"] for seed in seeds]),
            _interval([1000 * own[seed]["figures"]["kid_held_out"] for seed in seeds]),
            "" if ratio is None else f"{ratio:.2f}",
            _time(entry, own, base, times),
            "" if entry.name == BASELINE else _comparison(base, own),
            str(len(seeds)),
        ]
        copies = " (**copies**: not valid)" if any(is_copying(own[seed]) for seed in seeds) else ""
        yield "| " + " | ".join([cells[0] + copies, *cells[1:]]) + " |"
    yield ""


def _comparison(base: Mapping[int, Result], own: Mapping[int, Result]) -> str:
    paired = gains(base, own, CONFIRMATION_SEEDS)
    if not paired:
        return "no common seed"
    result = compare(paired)
    kid = gains(base, own, CONFIRMATION_SEEDS, "kid_held_out")
    bound = "one seed" if result.lower is None else f"{_percent(result.lower)} or more"
    disagrees = "; **KID disagrees**" if (sum(kid) > 0) != (result.mean > 0) else ""
    return f"{'yes' if result.is_better and not disagrees else 'no'}: {_percent(result.mean)}, {bound}{disagrees}"


def _time(entry: Entry, own: Mapping[int, Result], base: Mapping[int, Result], times: Mapping[str, Any]) -> str:
    """Training time relative to the baseline's, from the measured ratio of step times."""
    if entry.name == BASELINE:
        return "1.00"
    measured = times.get(entry.recipe)
    if measured is None or not base:
        return "not measured"
    if measured["ratio"] is None:
        return "too noisy"
    steps = next(iter(own.values()))["steps"] / next(iter(base.values()))["steps"]
    return f"{steps * measured['ratio']:.2f}"


def ladder_rungs(entries: Sequence[Entry], results: Results) -> list[Rung]:
    """The rungs with results, in the order of the ladder, with the spread pooled over all of them."""
    rungs = []
    for entry in sorted((entry for entry in entries if entry.rung is not None), key=lambda entry: entry.rung or 0):
        assert entry.base is not None
        base, own = results[entry.base], results[entry.name]
        paired = gains(base, own, LADDER_SEEDS)
        if paired:
            kid = gains(base, own, LADDER_SEEDS, "kid_held_out")
            copies = any(is_copying(own[seed]) for seed in _seeds(own, LADDER_SEEDS))
            rungs.append(Rung(entry, paired, kid, copies))
    std = pooled_std([rung.gains for rung in rungs])
    return [Rung(rung.entry, rung.gains, rung.kid_gains, rung.has_copies, std) for rung in rungs]


def _ladder(entries: Sequence[Entry], results: Results) -> Iterator[str]:
    yield "## The ladder"
    yield ""
    rungs = ladder_rungs(entries, results)
    if not rungs:
        yield "No rung has results yet."
        yield ""
        return
    std = rungs[0].pooled_std
    yield (
        f"Each rung changes one thing in its base, at {rungs[0].entry.images:,} images and the seeds "
        f"{_words(LADDER_SEEDS)}. The gain is the decrease of log {METRIC}, per seed. A rung is kept if all seeds "
        "gain, the mean gain exceeds twice its standard error, and KID against held-out images agrees."
    )
    if std is not None:
        yield f"The standard deviation of one gain, pooled over all rungs, is {100 * std:.1f}%."
    yield ""
    yield f"| rung | change | base | {METRIC} | gain per seed | mean gain, 2 standard errors | FLOPs | kept |"
    yield "|---|---|---|---|---|---|---|---|"
    for rung in rungs:
        entry, own = rung.entry, results[rung.entry.name]
        base = results[entry.base or ""]
        seeds = [seed for seed in LADDER_SEEDS if seed in own and seed in base]
        error = rung.standard_error
        cells = [
            str(entry.rung),
            f"[{entry.title}](entries/{entry.name}.toml)",
            str(entry.base),
            _interval([own[seed]["figures"]["fd"] for seed in seeds]),
            ", ".join(_percent(gain) for gain in rung.gains),
            _percent(rung.mean) + ("" if error is None else f", {200 * error:.1f}%"),
            f"{_flops(own, seeds) / _flops(base, seeds):.2f}",
            "**yes**" if rung.is_kept else "no",
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _trials(trials: Sequence[Result]) -> Iterator[str]:
    yield "## Tuning"
    yield ""
    if not trials:
        yield "No trial yet."
        yield ""
        return
    yield (
        f"Trainings with seeds from {FIRST_TUNING_SEED} on, which count for nothing else. Several averages and "
        "samplers of one training are one trial."
    )
    yield ""
    yield f"| entry | trials | changes | seed | width of the average: {METRIC} |"
    yield "|---|---|---|---|---|"
    trainings: dict[tuple[str, str, int], list[Result]] = {}
    for trial in trials:
        changes = ", ".join(f"{option} = {value}" for option, value in sorted(trial["changes"].items())) or "none"
        trainings.setdefault((trial["entry"], changes, trial["seed"]), []).append(trial)
    totals = {name: sum(key[0] == name for key in trainings) for name, _, _ in trainings}
    for (name, changes, seed), made in sorted(trainings.items()):
        widths = sorted(made, key=lambda trial: trial["ema_width"] or 0)
        found = ", ".join(f"{trial['ema_width'] or 'own'}: {trial['figures']['fd']:.1f}" for trial in widths)
        yield f"| {name} | {totals[name]} | {changes} | {seed} | {found} |"
    yield ""


def _flops(results: Mapping[int, Result], seeds: Sequence[int]) -> float:
    return sum(results[seed]["training_flops"] for seed in seeds) / len(seeds)


def _seeds(results: Mapping[int, Result], wanted: Sequence[int]) -> list[int]:
    return [seed for seed in wanted if seed in results]


def _mean(results: Mapping[int, Result], seeds: Sequence[int], figure: str) -> float:
    values = [results[seed]["figures"][figure] for seed in _seeds(results, seeds)]
    return sum(values) / len(values)


def _interval(values: Sequence[float]) -> str:
    spread = spread_of(values)
    return f"{spread.mean:.1f}" + ("" if spread.half_width is None else f" ± {spread.half_width:.1f}")


def _percent(gain: float) -> str:
    return f"{100 * gain:+.1f}%"


def _words(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}"


def draw(entries: Sequence[Entry], results: Results, path: Path) -> None:
    """Quality against training images and against FLOPs: one point per entry and seed, a line through the means."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        if results[entry.name] and entry.rung is None:
            families.setdefault(entry.recipe, []).append(entry)
    for family in families.values():
        family.sort(key=lambda entry: entry.images)
        longest = family[-1]
        for axis, quantity in zip(axes, ("images", "training_flops"), strict=True):
            points = [
                (_mean_of(results[e.name], quantity), [r["figures"]["fd"] for r in results[e.name].values()])
                for e in family
            ]
            means = [sum(values) / len(values) for _, values in points]
            (line,) = axis.plot([x for x, _ in points], means, label=f"{longest.title}")
            for x, values in points:
                axis.plot([x] * len(values), values, ".", color=line.get_color(), markersize=5)
    for axis, label in zip(axes, ("training images", "training FLOPs"), strict=True):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.grid(which="both", alpha=0.25)
    axes[0].set_ylabel(f"{METRIC} (lower is better)")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    with atomic_writer(path) as file:
        figure.savefig(file, dpi=110, format="png", metadata={"Software": None})
    plt.close(figure)


def _mean_of(results: Mapping[int, Result], quantity: str) -> float:
    return sum(result[quantity] for result in results.values()) / len(results)


def main() -> None:
    parser = ScriptParser(__doc__, options=())
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    parser.add_argument("--results", type=Path, default=FOLDER / "results", help="folder of the results")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the page and its pictures")
    args, rest = parser.parse(sys.argv[1:])
    if rest:
        raise ConfigError(f"{rest[0]} is not expected")
    entries = [load(name) for name in names()]
    results = {entry.name: read_results(args.results, entry) for entry in entries}
    trials = [json.loads(path.read_bytes()) for path in sorted((args.results / "tuning").glob("*.json"))]
    timed = args.results / "step_times.json"
    times = json.loads(timed.read_bytes()) if timed.exists() else {}
    text = page(entries, results, trials, times).encode()
    if args.check:
        if not PAGE.exists() or PAGE.read_bytes() != text:
            raise ConfigError(f"{PAGE.name} is not up to date; run python speedrun/leaderboard.py")
        return
    write_file(args.out / PAGE.name, text)
    if any(results[entry.name] and entry.rung is None for entry in entries):
        draw(entries, results, args.out / PLOT.name)
    print(args.out / PAGE.name)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
