#!/usr/bin/env python
# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Write the speedrun's leaderboard and its plots from the committed results: `python speedrun/leaderboard.py`.

It writes speedrun/LEADERBOARD.md and the pictures next to it. `--check` only says whether the page is up to date.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entries import (
    BASELINE,
    CONFIRMATION_SEEDS,
    FIRST_TUNING_SEED,
    LADDER_SEEDS,
    METRIC,
    Entry,
    load,
    names,
    register,
    split_sampling,
)
from ladder import Result, climb, is_copying, lower_bound, pair, read_result, read_results

from torchditan.config.command_line import ScriptParser
from torchditan.errors import ConfigError
from torchditan.extras.evaluation.card import spread_of
from torchditan.run.atomic_files import atomic_writer, write_file

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "LEADERBOARD.md"
PLOT = FOLDER / "leaderboard.png"
Results = Mapping[str, Mapping[int, Result]]


def page(entries: Sequence[Entry], results: Results, trials: Sequence[Result], times: Mapping[str, Any]) -> str:
    """The text of LEADERBOARD.md."""
    lines = [
        "# Leaderboard of the laptop speedrun",
        "",
        "`python speedrun/leaderboard.py` writes this page from the JSON files in `results/`. "
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
    confirmed = [entry for entry in entries if _seeds(results[entry.name])]
    if not confirmed:
        yield "No entry has results of the confirmation seeds yet."
        yield ""
        return
    yield f"Means over the training seeds {_words(CONFIRMATION_SEEDS)}, with Student's 95% interval."
    yield ""
    yield (
        "- *Compared with* other entries seed by seed: how much lower the distance is, and the lower bound of that at "
        "a confidence of 95%, one-sided. It is better if the bound is above 0 and KID against held-out images agrees. "
        "The bounds are not corrected for the number of comparisons."
    )
    yield f"- *FLOPs* are those of training, with the optimizer, relative to `{BASELINE}`."
    yield f"- *Time* is steps times the ratio of step times ([step_times.py](step_times.py)), relative to `{BASELINE}`."
    yield "- *Nearer* is the probability that a sample is nearer to a training image than a held-out image is."
    yield ""
    yield f"![{METRIC} against training images and FLOPs](leaderboard.png)"
    yield ""
    yield f"| entry | images | {METRIC} | KID x 1000, held out | nearer | FLOPs | time | compared with |"
    yield "|---|---|---|---|---|---|---|---|"
    base = results.get(BASELINE, {})
    base_flops = [base[seed]["training_flops"] for seed in _seeds(base)]
    for entry in sorted(confirmed, key=lambda entry: _mean([r["figures"]["fd"] for r in _confirmed(results, entry)])):
        found = _confirmed(results, entry)
        figures = [result["figures"] for result in found]
        flops = _mean([result["training_flops"] for result in found])
        cells = [
            f"[{entry.name}](entries/{entry.name}.toml): {entry.title}",
            f"{entry.images:,}",
            _interval([figure["fd"] for figure in figures]),
            _interval([1000 * figure["kid_held_out"] for figure in figures]),
            f"{_mean([figure['closer_than_held_out'] for figure in figures]):.2f}",
            f"{flops / _mean(base_flops):.2f}" if base_flops else "",
            _time(entry, entries, times),
            _verdict(entry, results, found),
        ]
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _verdict(entry: Entry, results: Results, found: Sequence[Result]) -> str:
    """Whether an entry is better than those that it names."""
    if is_copying(found):
        return "**copies training images: not valid**"
    return "; ".join(_comparison(entry, other, results) for other in entry.compare if other != entry.name)


def _comparison(entry: Entry, other: str, results: Results) -> str:
    pairs = pair(results.get(other, {}), results[entry.name], CONFIRMATION_SEEDS)
    if pairs.seeds != list(CONFIRMATION_SEEDS):
        return f"{other}: {len(pairs.seeds)} of {len(CONFIRMATION_SEEDS)} seeds"
    lower = lower_bound(pairs.gains)
    assert lower is not None
    is_better = lower > 0 and pairs.kid_agrees
    disagrees = "" if pairs.kid_agrees else ", KID disagrees"
    word = "**better**" if is_better else "not better"
    return f"{other}: {word}, {_lower(pairs.mean)} lower, {_lower(lower)} or more{disagrees}"


def _time(entry: Entry, entries: Sequence[Entry], times: Mapping[str, Any]) -> str:
    """Training time relative to the baseline's, from the measured ratio of step times."""
    base = next((each for each in entries if each.name == BASELINE), None)
    if base is None:
        return "not measured"
    steps = entry.num_steps / base.num_steps
    if entry.recipe() == base.recipe():
        return f"{steps:.2f}"
    measured = times.get(entry.recipe())
    if measured is None or measured["baseline_recipe"] != base.recipe():
        return "not measured"
    return "too noisy" if measured["ratio"] is None else f"{steps * measured['ratio']:.2f}"


def _ladder(entries: Sequence[Entry], results: Results) -> Iterator[str]:
    yield "## The ladder"
    yield ""
    rungs = climb(entries, results)
    if not rungs:
        yield "No rung has results yet."
        yield ""
        return
    yield (
        f"Each rung changes one thing in its base, at {rungs[0].entry.images:,} images and the seeds "
        f"{_words(LADDER_SEEDS)}. *Lower* is how much lower {METRIC} is than that of the base. A rung is kept if it is "
        "lower for all seeds, the mean exceeds the margin, and KID against held-out images "
        "agrees. [ladder.py](ladder.py) has the formula of the margin."
    )
    yield ""
    yield f"| rung | change | base | {METRIC} | lower, per seed | mean, margin | FLOPs | kept |"
    yield "|---|---|---|---|---|---|---|---|"
    for rung in rungs:
        entry, pairs = rung.entry, rung.pairs
        own, base = ([results[name][seed] for seed in pairs.seeds] for name in (entry.name, entry.base or ""))
        flops = _mean([r["training_flops"] for r in own]) / _mean([r["training_flops"] for r in base])
        kid = "" if pairs.kid_agrees else " (KID disagrees)"
        cells = [
            str(entry.rung),
            f"[{entry.title}](entries/{entry.name}.toml)",
            str(entry.base),
            _interval([result["figures"]["fd"] for result in own]),
            ", ".join(_lower(gain) for gain in pairs.gains),
            _lower(pairs.mean) + ("" if rung.margin is None else f", {_lower(rung.margin)}"),
            f"{flops:.2f}",
            ("**yes**" if rung.is_kept else "no" if rung.is_complete else "incomplete") + kid,
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
        key = (trial["entry"], _changes(split_sampling(trial["changes"])[0]) or "none", trial["seed"])
        trainings.setdefault(key, []).append(trial)
    totals = {name: sum(key[0] == name for key in trainings) for name, _, _ in trainings}
    for (name, changes, seed), made in sorted(trainings.items()):
        scores = sorted((_scoring(trial), _score(trial)) for trial in made)
        found = ", ".join(f"{scoring}: {score}" for scoring, score in scores)
        yield f"| {name} | {totals[name]} | {changes} | {seed} | {found} |"
    yield ""


def _changes(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{option} = {value}" for option, value in sorted(values.items()))


def _scoring(trial: Result) -> str:
    """How a trial's weights were averaged and sampled, where it differs from the entry."""
    sampling = _changes(split_sampling(trial["changes"])[1])
    return " ".join(filter(None, [f"{trial['ema_width'] or 'own'}", sampling]))


def _score(trial: Result) -> str:
    return "failed" if "failed" in trial else f"{trial['figures']['fd']:.1f}"


def _seeds(results: Mapping[int, Result]) -> list[int]:
    return [seed for seed in CONFIRMATION_SEEDS if seed in results]


def _confirmed(results: Results, entry: Entry) -> list[Result]:
    return [results[entry.name][seed] for seed in _seeds(results[entry.name])]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _interval(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    spread = spread_of(values)
    return f"{spread.mean:.1f} ± {spread.half_width:.1f}"


def _lower(gain: float) -> str:
    """A gain as a percentage of the distance before."""
    return f"{100 * -math.expm1(-gain):.1f}%"


def _words(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}"


def draw(entries: Sequence[Entry], results: Results, path: Path) -> None:
    """Quality against training images and against FLOPs: one point per entry and seed, a line through the means."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter, LogLocator

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    families: dict[str, list[Entry]] = {}
    for entry in entries:
        if _seeds(results[entry.name]):
            families.setdefault(entry.recipe(), []).append(entry)
    for family in families.values():
        family.sort(key=lambda entry: entry.images)
        for axis, quantity in zip(axes, ("images", "training_flops"), strict=True):
            found = [_confirmed(results, entry) for entry in family]
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
    axes[0].set_ylabel(f"{METRIC} (lower is better)")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    with atomic_writer(path) as file:
        figure.savefig(file, dpi=110, format="png", metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = ScriptParser(__doc__, options=())
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not up to date")
    parser.add_argument("--results", type=Path, default=FOLDER / "results", help="folder of the results")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the page and its pictures")
    args, rest = parser.parse(sys.argv[1:])
    if rest:
        raise ConfigError(f"{rest[0]} is not expected")
    entries = [load(name) for name in names()]
    for entry in entries:
        register(entry.registry, entry.code)
    results = {entry.name: read_results(args.results, entry) for entry in entries}
    trials = [read_result(path) for path in sorted((args.results / "tuning").glob("*.json"))]
    timed = args.results / "step_times.json"
    times = json.loads(timed.read_bytes()) if timed.exists() else {}
    text = page(entries, results, trials, times).encode()
    if args.check:
        if not PAGE.exists() or PAGE.read_bytes() != text:
            raise ConfigError(f"{PAGE.name} is not up to date; run python speedrun/leaderboard.py")
        return
    write_file(args.out / PAGE.name, text)
    if any(_seeds(found) for found in results.values()):
        draw(entries, results, args.out / PLOT.name)
    print(args.out / PAGE.name)


if __name__ == "__main__":
    from torchditan.supervision.exit_status import run_job

    sys.exit(run_job(main))
