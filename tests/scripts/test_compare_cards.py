# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan compare`: a column per card, and the spread over training seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cards import card, figure
from refusals import assert_refused

from torchditan.evaluation.card import Card
from torchditan.evaluation.card_tables import write_card

if TYPE_CHECKING:
    from tests.conftest import RunScript

SCRIPT = ("torchditan", "compare")


def saved(folder: Path, **changes: Any) -> Path:
    write_card(folder, card(**changes))
    return folder


def rows_of(text: str) -> list[list[str]]:
    """Cells of the tables in a text, without the lines below the headings."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if not row[0].startswith("---")]


def test_one_column_per_card_with_differing_settings_on_top(tmp_path: Path, run_script: RunScript) -> None:
    first = saved(tmp_path / "a")
    second = saved(
        tmp_path / "b",
        run="outputs/other",
        run_id="another",
        model="dit DiT-S",
        sampling={**card().sampling, "num_steps": 25},
        figures={"FD-EffNetLite0": figure(11.0, 0.3)},
    )
    code, output, errors = run_script(*SCRIPT, first / "card.json", second, "--out", tmp_path / "new" / "c.md")
    assert (code, errors) == (0, "")
    assert (tmp_path / "new" / "c.md").read_text() == output
    assert rows_of(output) == [
        ["", "quickstart (± 95%)", "other (± 95%)"],
        ["run_id", "12ab34cd", "another"],
        ["model", "dit DiT-Ti", "dit DiT-S"],
        ["sampling.num_steps", "50", "25"],
        ["FD-EffNetLite0", "12.3 ± 0.4", "11.0 ± 0.3"],
        ["recall-EffNetLite0", "0.61 ± 0.03", "not measured"],
        ["coverage-EffNetLite0", "0.912 ± 0.012", "not measured"],
        ["copies: nearer than held-out", "0.05120", "not measured"],
        ["KID-EffNetLite0", "0.00123 ± 0.00012", "not measured"],
        ["accuracy_generated", "0.973 ± 0.004", "not measured"],
    ]
    assert "raining seeds" not in output


def of_seed(seed: int, distance: float, **changes: Any) -> Card:
    figures = {**card().figures, "FD-EffNetLite0": figure(distance, 0.4)}
    return card(
        run=f"outputs/seed{seed}",
        run_id=str(seed),
        training_seed=seed,
        config_hash=str(seed) * 64,
        figures=figures,
        **changes,
    )


def test_cards_of_several_training_seeds_give_their_spread(tmp_path: Path, run_script: RunScript) -> None:
    for seed, distance in enumerate((10.0, 11.0, 12.0)):
        write_card(tmp_path / str(seed), of_seed(seed, distance))
    code, output, errors = run_script(*SCRIPT, *(tmp_path / str(seed) for seed in range(3)))
    assert (code, errors) == (0, "")
    columns, spread = output.split("\n\nTraining seeds: 3 (0, 1, 2). ")
    assert ["FD-EffNetLite0", "10.0 ± 0.4", "11.0 ± 0.4", "12.0 ± 0.4"] in rows_of(columns)
    assert columns.endswith("Intervals: sampling only: 95%, 3 seeds.")
    assert spread.startswith("Intervals: training seeds, 95%")
    # Mean 11, standard deviation 1, t(0.975, 2) / sqrt(3) = 2.48. The distance is followed by its companions here too.
    assert rows_of(spread)[1:3] == [
        ["FD-EffNetLite0", "11", "1.0", "9.1%", "9 to 13"],
        ["recall-EffNetLite0", "0.6123", "0", "", "equal in all cards"],
    ]
    assert "±" not in spread, "sampling intervals are not mixed in"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampling": {"num_steps": 25}}, "sampling.num_steps"),
        ({"trajectory_hash": "0" * 64}, "trajectory_hash"),
        ({"commit": "9" * 40}, "commit"),
    ],
)
def test_no_spread_where_cards_differ_in_more_than_the_seed(
    changes: dict[str, Any], reason: str, tmp_path: Path, run_script: RunScript
) -> None:
    write_card(tmp_path / "0", of_seed(0, 10.0))
    write_card(tmp_path / "1", of_seed(1, 11.0, **changes))
    code, output, _ = run_script(*SCRIPT, tmp_path / "0", tmp_path / "1")
    assert code == 0
    (line,) = [line for line in output.splitlines() if line.startswith("No spread over training seeds")]
    assert reason in line


def test_two_runs_of_one_seed_are_not_two_training_seeds(tmp_path: Path, run_script: RunScript) -> None:
    write_card(tmp_path / "0", of_seed(0, 10.0))
    write_card(tmp_path / "1", of_seed(1, 11.0))
    write_card(tmp_path / "2", replace(of_seed(1, 12.0), run_id="again"))
    _, output, _ = run_script(*SCRIPT, *(tmp_path / str(number) for number in range(3)))
    assert output.splitlines()[-1] == "No spread over training seeds: two cards have the same training seed."
    assert rows_of(output)[0] == ["", "1: seed0 (± 95%)", "2: seed1 (± 95%)", "3: seed1 (± 95%)"]


def test_bad_input_is_one_line(tmp_path: Path, run_script: RunScript) -> None:
    folder = saved(tmp_path / "a")
    (tmp_path / "b.json").write_text("{}")
    for arguments, about in (
        ([folder], "CARD"),
        ([folder, folder / "card.json"], "CARD"),
        ([folder, tmp_path / "b.json"], f"{tmp_path / 'b.json'} is not a card"),
        ([folder, tmp_path / "no.json"], f"{tmp_path / 'no.json'} does not exist"),
        ([folder, tmp_path / "b.json", "--out", tmp_path], "--out"),
    ):
        code, output, errors = run_script(*SCRIPT, *arguments)
        assert (code, output) == (2, "")
        assert_refused(errors, about)
