# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Verdicts over training seeds: known effects are found, noise is not, and one seed gives none."""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ledger_rows import Row, row
from refusals import assert_refused
from scipy.stats import ttest_rel
from test_analysis import analyse, compiling, section, write_grid, write_losses

from torchditan.extras.ablation.grid import COMPILE
from torchditan.extras.report.data import Data
from torchditan.extras.report.effects import MEMORY, THROUGHPUT
from torchditan.extras.report.report import page_of
from torchditan.extras.report.verdicts import LEVEL, holm, paired_tests, seeds_needed, summary, verdict_text

if TYPE_CHECKING:
    import pandas as pd

    from tests.conftest import RunScript

SCRIPT = "optimization_analysis.py"
MLP, NORM, SEED = "model.mlp", "model.qk_norm", "training.seed"
FD, RECALL = "FD-EffNetLite0", "recall-EffNetLite0"
Value = Callable[[str, bool, int], float]


def cell(mlp: str, norm: bool, seed: int, **values: Any) -> Row:
    entry = row(**{MLP: mlp, NORM: norm, SEED: seed}, **values)
    entry["run_name"] += f"_seed-{seed}_mlp-{mlp}_qk_norm-{str(norm).lower()}"
    return entry


def analysis_of(folder: Path, rows: Iterable[Row], *, figures: list[str] | None = None) -> Data:
    return analyse([write_grid(folder / "grid", rows, axes=(MLP, NORM, SEED))], figures=figures)


def square(num_seeds: int, **figures: Value) -> list[Row]:
    """All four cells of two settings, for each seed; `figures` compute values from (mlp, norm, seed)."""
    settings = itertools.product(range(num_seeds), ("gelu", "swiglu"), (False, True))
    return [
        cell(mlp, norm, seed, **{name: value(mlp, norm, seed) for name, value in figures.items()})
        for seed, mlp, norm in settings
    ]


def noise(*key: Any) -> float:
    return float(np.random.default_rng([7, *(sum(map(ord, str(part))) for part in key)]).normal())


def swiglu_helps(mlp: str, norm: bool, seed: int) -> float:
    """FD: the seeds spread by 5, SwiGLU lowers it by 3, and one run spreads by 0.1."""
    return 30 + 5 * noise("seed", seed) - 3 * (mlp == "swiglu") + 0.1 * noise(mlp, norm, seed)


def swiglu_hurts(mlp: str, norm: bool, seed: int) -> float:
    return 0.5 - 0.1 * (mlp == "swiglu") + 0.004 * noise("recall", mlp, norm, seed)


def find(verdicts: pd.DataFrame, axis: str, figure: str) -> list[Any]:
    return list(verdicts[(verdicts["axis"] == axis) & (verdicts["figure"] == figure)].itertuples())


# The statistics


def test_pure_noise_gets_a_verdict_in_at_most_one_of_twenty_grids() -> None:
    """8 settings against one baseline and 4 correlated figures: 32 comparisons, none of which has an effect."""
    num_grids, num_seeds, generator = 4000, 3, np.random.default_rng(0)
    seeds = 3 * generator.normal(size=(num_grids, 1, 4, num_seeds))
    of_run = generator.normal(size=(num_grids, 9, 1, num_seeds))  # shared by the figures of a run
    values = seeds + of_run + generator.normal(size=(num_grids, 9, 4, num_seeds))
    tests = paired_tests((values[:, 1:] - values[:, :1]).reshape(num_grids, 32, num_seeds))
    error = math.sqrt(0.05 * 0.95 / num_grids)
    is_decided = np.array([holm(p) for p in tests.p]) <= LEVEL
    share = is_decided.any(axis=-1).mean()
    assert share <= 0.05 + 3 * error, "better or worse, per grid"
    assert share >= 0.02, "the correction is not far too strict either"
    assert is_decided.mean() < 0.003, "per comparison"
    assert (tests.p <= 0.05).mean() == pytest.approx(0.05, abs=0.006), "one comparison alone"
    assert (tests.p <= 0.05).any(axis=-1).mean() > 0.5, "without the correction most grids would have one"


def test_the_tests_are_paired_t_tests_over_the_seeds_that_both_have() -> None:
    generator = np.random.default_rng(1)
    before, after = generator.normal(size=(2, 6, 5))
    after[2, 3] = before[4, 0] = before[4, 1] = np.nan
    after[5, 1:] = np.nan
    tests = paired_tests(after - before)
    assert tests.num_seeds.tolist() == [5, 5, 4, 5, 3, 1]
    for number in range(5):
        expected = ttest_rel(after[number], before[number], nan_policy="omit")
        interval = expected.confidence_interval(0.95)
        assert tests.p[number] == pytest.approx(expected.pvalue)
        assert tests.mean[number] - tests.half_width[number] == pytest.approx(interval.low)
        assert tests.mean[number] + tests.half_width[number] == pytest.approx(interval.high)
    assert np.isnan([tests.p[5], tests.std[5], tests.half_width[5], holm(tests.p)[5]]).all()


def test_holms_correction_by_hand() -> None:
    nan = math.nan
    found = holm(np.array([0.01, 0.04, nan, 0.03, 0.005]))
    assert found == pytest.approx([0.03, 0.06, nan, 0.06, 0.02], nan_ok=True)
    assert holm(np.array([nan, 0.4])) == pytest.approx([nan, 0.4], nan_ok=True), "what is not a test does not count"
    assert holm(np.array([0.9, 0.6])).tolist() == [1, 1]


@pytest.mark.parametrize("differences", [[0.1, 0.1, 0.1], [0.3 - 0.2, 0.1, 0.4 - 0.3], [0.0, 0.0, 0.0]])
def test_equal_differences_show_no_spread_and_decide_nothing(differences: list[float]) -> None:
    tests = paired_tests(np.array([differences, [1.0, 1.01, 1.02]]))
    assert tests.p[0] == 1
    assert holm(tests.p)[1] == pytest.approx(2 * tests.p[1]), "it counts as a comparison all the same"


@pytest.mark.parametrize(("mean", "level"), [(1.0, 0.05), (-2.0, 0.001)])
def test_the_number_of_seeds_finds_the_difference_with_the_stated_power(mean: float, level: float) -> None:
    number = seeds_needed(mean, 1.0, level=level)
    assert number is not None
    generator = np.random.default_rng(2)
    powers = []
    for seeds in (number - 1, number):
        values = generator.normal(mean, 1.0, size=(10_000, 1, seeds))
        powers.append((paired_tests(values).p <= level).mean())
    assert powers[1] >= 0.8 - 0.012 and powers[0] <= 0.8 + 0.012
    assert powers[0] < powers[1]


# From ledgers to verdicts


def test_known_effects_are_found_in_their_direction(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, square(4, **{FD: swiglu_helps, RECALL: swiglu_hurts})).verdicts
    assert len(found) == 8, "two settings, each with and without the other, two figures"
    assert [verdict.verdict for verdict in find(found, MLP, FD)] == ["better"] * 2, "lower is better"
    assert [verdict.verdict for verdict in find(found, MLP, RECALL)] == ["worse"] * 2
    assert {verdict.verdict for axis in (FD, RECALL) for verdict in find(found, NORM, axis)} == {"inconclusive"}
    verdict = find(found, MLP, FD)[0]
    assert (verdict.from_value, verdict.to_value, verdict.seeds) == ("gelu", "swiglu", "0 1 2 3")
    assert verdict.difference == pytest.approx(-3, abs=0.2) and verdict.num_comparisons == 8
    assert verdict.half_width < 1, "the seeds' own spread cancels in pairs"
    assert verdict.change == "model.mlp: gelu → swiglu" and found["with"].iloc[0] == "model.qk_norm false"


def test_verdicts_are_those_of_the_tests(tmp_path: Path) -> None:
    """Against scipy, and Holm's procedure, on differences made here."""
    rows = square(3, **{FD: swiglu_helps, RECALL: swiglu_hurts})
    by_run = {(entry["run_name"], entry[SEED]): entry for entry in rows}
    found = analysis_of(tmp_path, rows).verdicts
    p = []
    for verdict in found.itertuples():
        names = [run.replace("seed-0,1,2", "seed-{}") for run in (verdict.from_run, verdict.to_run)]
        before, after = ([by_run[name.format(seed), seed][verdict.figure] for seed in range(3)] for name in names)
        p.append(ttest_rel(after, before).pvalue)
        assert (verdict.before, verdict.after) == (pytest.approx(np.mean(before)), pytest.approx(np.mean(after)))
    assert found["p"].tolist() == pytest.approx(p)
    assert found["corrected_p"].tolist() == pytest.approx(holm(np.array(p)).tolist())


@pytest.mark.usefixtures("undrawn")
def test_one_seed_gives_no_verdict_however_large_the_difference(tmp_path: Path) -> None:
    analysis = analysis_of(tmp_path, square(1, **{FD: swiglu_helps}))
    assert set(analysis.verdicts["verdict"]) == {"one seed: no verdict"}
    assert analysis.verdicts[["half_width", "p", "further_seeds"]].isna().all(axis=None)
    assert summary(analysis.verdicts) == "One seed: no verdict."
    text = verdict_text(analysis.verdicts)
    assert text.count("one seed: no verdict") == 4 and "at most 5%" not in text
    assert "training seeds, averaged" not in page_of(analysis).html


def test_a_seed_that_one_side_lacks_is_left_out_and_named(tmp_path: Path) -> None:
    rows = square(4, **{FD: swiglu_helps})
    for entry in rows:
        if entry[SEED] == 3 and entry[MLP] == "swiglu":
            entry |= {"status": "error", "reason": "it diverged", FD: 1e9}
    found = analysis_of(tmp_path, rows).verdicts
    assert {(verdict.seeds, verdict.missing_seeds) for verdict in find(found, MLP, FD)} == {("0 1 2", "3")}
    assert find(found, MLP, FD)[0].difference == pytest.approx(-3, abs=0.2)
    text = verdict_text(found)
    assert "3 of 4" in text and "2 comparisons without some seeds: a run of one side failed or is missing." in text


def test_what_was_not_measured_has_no_verdict(tmp_path: Path) -> None:
    rows = square(3, **{FD: swiglu_helps})
    for entry in rows:
        if entry[NORM]:
            entry[FD] = None
    found = analysis_of(tmp_path, rows).verdicts
    assert {verdict.verdict for verdict in find(found, NORM, FD)} == {"not measured on both sides"}
    assert find(found, MLP, FD)[0].num_comparisons == 1
    assert verdict_text(found).count("| not measured on both sides |") == 3


def test_costs_are_ratios_of_the_cells(tmp_path: Path) -> None:
    rows = [
        cell(mlp, False, seed, throughput=speed * (1 + seed), memory=memory, **{FD: swiglu_helps(mlp, False, seed)})
        | {"tflops_per_device_mean": flops * speed * (1 + seed)}
        for mlp, speed, memory, flops in (("gelu", 100.0, 10.0, 0.5), ("swiglu", 80.0, 12.0, 0.6))
        for seed in range(3)
    ]
    (verdict,) = analysis_of(tmp_path, rows).verdicts.itertuples()
    assert (verdict.flops_ratio, verdict.time_ratio, verdict.memory_ratio) == pytest.approx((1.2, 1.25, 1.2))
    assert (verdict.time_low, verdict.time_high) == pytest.approx((1.25, 1.25)), "all seeds have the same ratio"
    rows[0]["images_per_second_mean"] *= 2
    verdicts = analysis_of(tmp_path, rows).verdicts
    (verdict,) = verdicts.itertuples()
    ratios = np.log([2.5, 1.25, 1.25])
    half = 4.303 * ratios.std(ddof=1) / math.sqrt(3)
    assert verdict.time_ratio == pytest.approx(np.exp(ratios.mean()))
    ends = np.exp([ratios.mean() - half, ratios.mean() + half])
    assert (verdict.time_low, verdict.time_high) == pytest.approx(ends, rel=1e-3)
    assert "| 1.57 (95%: 0.58 to 4.26) |" in verdict_text(verdicts)


def test_one_change_at_a_time_is_compared_with_the_baseline_only(tmp_path: Path) -> None:
    """Also where the baseline is not the smallest value, and where neighbours would be compared otherwise."""
    rate = "optimizer.lr"
    values = [("swiglu", 1e-3), ("gelu", 1e-3), *(("swiglu", value) for value in (1e-4, 3e-4, 3e-3, 1e-2))]
    rows = []
    for seed, (mlp, lr) in itertools.product(range(2), values):
        rows.append(cell(mlp, False, seed, **{FD: noise(mlp, lr, seed)}) | {rate: lr})
        rows[-1]["run_name"] += f"_lr-{lr}"
    folder = write_grid(tmp_path / "grid", rows, axes=(MLP, NORM, rate, SEED), one_at_a_time=True)
    found = analyse([folder]).verdicts[["axis", "from_value", "to_value"]].itertuples(index=False, name=None)
    others = [("optimizer.lr", "0.001", value) for value in ("0.0001", "0.0003", "0.003", "0.01")]
    assert sorted(found) == [(MLP, "swiglu", "gelu"), *others]


def test_the_baseline_of_a_grid_that_continues_on_another_device_is_its_first_row(tmp_path: Path) -> None:
    rows = []
    for seed, (mlp, norm) in itertools.product(range(3), [("gelu", False), ("swiglu", False), ("gelu", True)]):
        device = "the first" if len(rows) < 2 else "the second"
        rows.append(cell(mlp, norm, seed, **{FD: noise(mlp, norm, seed)}) | {"device": device})
    folder = write_grid(tmp_path / "grid", rows, axes=(MLP, NORM, SEED), one_at_a_time=True)
    found = analyse([folder]).verdicts
    assert set(zip(found["axis"], found["from_value"], strict=True)) == {(MLP, "gelu"), (NORM, "false")}


@pytest.mark.parametrize(
    ("axis", "settings", "is_measured_alike"),
    [
        ("diffusion.timestep_shift", {}, False),
        ("diffusion.ingredients", {}, True),  # a term of the training loss alone
        ("model.learn_sigma", {}, False),
        ("model.preset", {}, False),
        ("model.preset", {"model.learn_sigma": False}, True),
    ],
)
def test_losses_are_not_compared_where_the_loss_itself_changes(
    tmp_path: Path, axis: str, settings: dict[str, Any], is_measured_alike: bool
) -> None:
    axes = (axis, NORM, SEED)
    levels: tuple[Any, Any] = (False, True) if axis == "model.learn_sigma" else (1.0, 3.0)
    values = itertools.product(levels, (False, True), range(2))
    rows = []
    for shift, norm, seed in values:
        rows.append(
            cell("gelu", norm, seed, validation_loss=noise(shift, norm, seed), **{FD: noise(seed, shift, norm)})
        )
        rows[-1] |= {axes[0]: shift, "run_name": f"{rows[-1]['run_name']}_shift-{shift}"}
    found = analyse([write_grid(tmp_path / "grid", rows, axes=axes, settings=settings)]).verdicts
    pairs = set(zip(found["axis"], found["figure"], strict=True))
    expected = {(axis, FD), (NORM, FD), (NORM, "validation_loss")}
    assert pairs == (expected | {(axis, "validation_loss")} if is_measured_alike else expected)


def test_without_figures_long_runs_of_several_seeds_are_judged_by_their_loss(tmp_path: Path) -> None:
    def rows(steps: int, seeds: int) -> list[Row]:
        return [entry | {"steps": steps, "loss_mean": noise(str(entry))} for entry in square(seeds)]

    assert set(analysis_of(tmp_path / "a", rows(100, 2)).verdicts["figure"]) == {"loss_mean"}
    assert analysis_of(tmp_path / "b", rows(99, 2)).verdicts.empty, "too short to say anything"
    assert analysis_of(tmp_path / "c", rows(100, 1)).verdicts.empty, "one seed, as before"


# Seeds are repetitions


def speeds(num_seeds: int = 3) -> list[Row]:
    """Compiling: +50% images/s in every seed; seed s has 100 + 10 s images/s, and 10 + s GiB."""
    return [
        row(batch=batch, compiled=compiled, throughput=(100 + 10 * seed) * (1.5 if compiled else 1), memory=10.0 + seed)
        | {SEED: seed, "run_name": f"bs{batch}_c{compiled}_seed-{seed}", "steps": 250, "loss_mean": 1.0 + seed}
        for seed in range(num_seeds)
        for batch in (4, 8)
        for compiled in (False, True)
    ]


@pytest.mark.usefixtures("undrawn")
def test_tables_average_over_the_seeds(tmp_path: Path) -> None:
    analysis = analyse([write_grid(tmp_path / "grid", speeds(), axes=(SEED,))])
    results = analysis.grids
    assert (results.effects, results.seeds, len(results.cells)) == ([COMPILE], ["0", "1", "2"], 4)
    assert SEED not in results.axes and SEED not in results.varied
    first = results.cells.iloc[0]
    assert (first["num_seeds"], first[THROUGHPUT.column], first[MEMORY.column]) == (3, 110, 11)
    assert first[f"{THROUGHPUT.column}_half"] == pytest.approx(4.303 * 10 / math.sqrt(3), rel=1e-3)
    assert first["run_name"] == "bs4_cFalse_seed-0,1,2"
    found = compiling(analysis)
    assert (found.num_pairs, found.median_percent) == (2, pytest.approx(50)), (
        "two batches, whatever the number of seeds"
    )
    assert found.noise_percent == pytest.approx(100 * math.sqrt(2) * 4.303 * 10 / math.sqrt(3) / 110, rel=1e-3)
    *_, table = section(page_of(analysis), "Throughput and memory").blocks
    assert "165 ± 37" in table.frame.iloc[0].tolist()
    assert "3 training seeds, averaged: 0, 1, 2." in page_of(analysis).html


def test_curves_are_means_over_seeds_and_a_run_that_diverged_keeps_its_own(tmp_path: Path) -> None:
    rows = [entry for entry in speeds() if entry["run_name"].startswith("bs4_cFalse")]
    rows[2]["status"] = "error"
    folder = write_grid(tmp_path / "grid", rows, axes=(SEED,))
    for entry in rows:
        write_losses(folder, entry, [entry["loss_mean"]] * 250)
    averaged, failed = analyse([folder]).curves("loss")
    assert averaged.values.iloc[0] == 1.5
    assert averaged.half_widths.iloc[0] == pytest.approx(12.706 * 0.5, rel=1e-3)
    assert (failed.has_failed, failed.values.iloc[0], failed.half_widths) == (True, 3, None)


# The report and the command


def test_the_report_the_terminal_and_the_csv_have_the_verdicts(tmp_path: Path, run_script: RunScript) -> None:
    rows = square(4, **{FD: swiglu_helps, RECALL: swiglu_hurts})
    folder = write_grid(tmp_path / "grid", rows, axes=(MLP, NORM, SEED))
    code, out, err = run_script(SCRIPT, folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-1] == f"report: {folder}/analysis/report.html"
    assert lines[-2].startswith("Verdicts: 2 better, 2 worse, 4 inconclusive, of 8 comparisons. Corrected for 8 ")
    assert re.search(r"\| model.mlp: gelu → swiglu +\| model.qk_norm false +\| FD-EffNetLite0 .*\| better ", out)
    page = (folder / "analysis" / "report.html").read_text()
    assert page.index("2 better, 2 worse, 4 inconclusive") < page.index("What each setting changes")
    assert "Verdicts on quality" in page and '<figure id="verdicts"' in page
    assert (folder / "analysis" / "verdicts.svg").exists() and (folder / "analysis" / "verdicts.png").exists()
    assert not re.search(r"\bnan\b|\bNone\b|\binf\b", page)
    with open(folder / "analysis" / "verdicts.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 8
    entry = next(entry for entry in table if entry["verdict"] == "better")
    assert (entry["axis"], entry["figure"], entry["better"], entry["seeds"]) == (MLP, FD, "lower", "0 1 2 3")
    assert entry["from_run"].endswith("_seed-0,1,2,3_mlp-gelu_qk_norm-false")
    assert float(entry["low"]) < float(entry["difference"]) < float(entry["high"]) < 0


@pytest.mark.usefixtures("undrawn")
def test_fewer_figures_are_fewer_comparisons(tmp_path: Path, run_script: RunScript) -> None:
    rows = square(4, **{FD: swiglu_helps, RECALL: swiglu_hurts})
    folder = write_grid(tmp_path / "grid", rows, axes=(MLP, NORM, SEED))
    code, out, _ = run_script(SCRIPT, folder, "--metrics", FD)
    assert code == 0 and RECALL not in out and "of 4 comparisons. Corrected for 4 comparisons per grid" in out
    code, out, err = run_script(SCRIPT, folder, "--metrics", "FID", "--out", tmp_path / "other")
    assert (code, out) == (2, "")
    assert_refused(err, '--metrics = "FID"', ["not measured", FD, RECALL])
    assert not (tmp_path / "other").exists()
    code, out, err = run_script(SCRIPT, "--metrics", FD, "--compare", folder)
    assert code == 2
    assert_refused(err, "--metrics", ["--compare"])


def test_two_grids_are_corrected_each_for_itself(tmp_path: Path) -> None:
    folders = [
        write_grid(tmp_path / name, square(3, **{FD: swiglu_helps}), axes=(MLP, NORM, SEED)) for name in ("a", "b")
    ]
    found = analyse(folders).verdicts
    assert dict(zip(found["grid"], found["num_comparisons"], strict=True)) == {"a": 4, "b": 4}
    assert "| a, model.mlp: gelu → swiglu" in verdict_text(found)
