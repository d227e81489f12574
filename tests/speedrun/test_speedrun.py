# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""`torchditan speedrun`: what it lists, makes, repeats and refuses, on small copies of the tracks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import torchditan.__main__
from speedrun import entries, leaderboard, run
from torchditan.run.reading import read_metrics

if TYPE_CHECKING:
    from tests.conftest import RunScript

TINY = """
[entry]
title = "a tiny model"
config = "CONFIG"
images = 48
[model]
flavor = "debugmodel"
patch_size = 8
[training]
global_batch_size = 8
mixed_precision_param = "float32"
[sampling]
num_steps = 2
"""


@pytest.fixture
def tracks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tracks without entries and with few samples, which any result reaches. Commands run in this process."""

    def call(trial: Any, command: str, arguments: list[str]) -> None:
        monkeypatch.setattr(sys, "argv", ["torchditan", command, *arguments])
        assert torchditan.__main__.main() == 0

    monkeypatch.setattr(run, "call", call)
    for name in entries.track_names():
        folder = tmp_path / "tracks" / name
        (folder / "entries").mkdir(parents=True)
        text = (entries.FOLDER / name / "track.toml").read_text()
        num_samples = 1300 if name == "earth" else 8  # a Fréchet distance of 1,280 features needs more
        text = re.sub(r"num_samples=\d+", f"num_samples={num_samples}", text.replace("needs_gpu = true", ""))
        text = re.sub(r"(seen|held_out) = 0\.\d+", r"\1 = 0.0", text)
        # Trials run in threads, and Linux ends a loader process with the thread that forked it.
        text = re.sub(r"num_workers = .*\n|\"dataset.num_workers\", ", "", text)
        text = text.replace("[dataset]\n", "[dataset]\nnum_workers = 0\n")
        (folder / "track.toml").write_text(text)
    return tmp_path / "tracks"


def test_all_tracks_their_entries_and_their_results_are_listed(run_script: RunScript) -> None:
    everything = run_script("torchditan", "speedrun")
    assert (everything.code, everything.err) == (0, "")
    rows = [
        line for name in entries.track_names() for line in run_script("torchditan", "speedrun", name).out.splitlines()
    ]
    assert everything.out.splitlines() == rows
    assert any(row.startswith("| muon_batch_16_full: ") and "| 32.7 ± 1.1 |" in row for row in rows)
    assert any(row.startswith("| scenes: ") for row in rows)


def test_the_page_follows_from_the_results() -> None:
    boards = [leaderboard.read_board(entries.load_track(name)) for name in entries.track_names()]
    assert leaderboard.page(boards) == (entries.FOLDER / leaderboard.PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("track", ["laptop", "gpu", pytest.param("earth", marks=pytest.mark.nightly)])
def test_an_entry_of_one_file_is_trained_scored_repeated_to_the_bit_and_on_the_page(
    track: str, tracks: Path, run_script: RunScript
) -> None:
    text = TINY.replace("CONFIG", "earth" if track == "earth" else "scenes")
    fixed = {"earth": r"\[model\](.|\n)*?(?=\[)|mixed_precision.*", "laptop": "mixed_precision.*"}
    text = re.sub(fixed.get(track, "^$"), "", text)
    (tracks / track / "entries" / "mine.toml").write_text(text)
    seed = entries.load_track(track).seeds[0]
    words = ("torchditan", "speedrun", track, "mine", "--seeds", seed, "--tracks", tracks)
    made = run_script(*words)
    assert made.code == 0, made.err
    assert made.out.splitlines()[-1].startswith("| mine: a tiny model | 48 |")
    path = tracks / track / "results" / "mine" / f"seed-{seed}.json"
    result = json.loads(path.read_text())
    assert result["steps"] == 6 and result["images"] == 48 and result["training_flops"] > 0
    score = entries.load_track(track).score
    assert "exists; to repeat it" in run_script(*words).out
    assert run_script("torchditan", "speedrun", "--board", "--tracks", tracks).code == 0
    assert f"[mine]({track}/entries/mine.toml): a tiny model" in (tracks / leaderboard.PAGE).read_text()

    if track == "laptop":
        trial = (*words[:4], "--tracks", tracks, "--seeds", 100)
        for options in (["--set", "sampling.timestep_shift=3", "--set", "sampling.num_steps=3"], []):
            assert run_script(*trial, *options).code == 0
        shifted, own = sorted((tracks / track / "results/tuning").glob("*.json"), key=lambda path: -len(path.name))
        assert json.loads(shifted.read_text())["sampling"]["timestep_shift"] == 3
        assert json.loads(own.read_text())["sampling"] == result["sampling"], "a trial draws with its own sampler only"
        assert run_script(*words, "--check").code == 0
        result["figures"][score] *= 1.5
        result["last_loss"] += 1e-7
        path.write_text(json.dumps(result))
        changed = run_script(*words, "--check")
        assert changed.code == 1 and "DIFFERS" in changed.out


def test_the_first_checkpoint_at_the_target_gives_the_seconds_and_none_gives_no_record(
    tracks: Path, run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {20: 0.5, 40: 0.95, 48: 1.0}

    def score_step(_trial: Any, step: int, _out: Path) -> dict[str, Any]:
        figures = {"seen": shares[step], "held_out": 0.8}
        return {"figures": figures, "training_seconds": 1.5 * step, "training_flops": 1.0, "steps": step}

    monkeypatch.setattr(run, "_train", lambda _trial: {})
    monkeypatch.setattr(run, "_score_step", score_step)
    protocol = tracks / "gpu" / "track.toml"
    protocol.write_text(re.sub("reach = .*", "reach = { seen = 0.9, held_out = 0.75 }", protocol.read_text()))
    text = TINY.replace("CONFIG", "scenes").replace("images = 48", "images = 384")
    (tracks / "gpu" / "entries" / "mine.toml").write_text(f"{text}[checkpoint]\ninterval = 20\n")
    words = ("torchditan", "speedrun", "gpu", "mine", "--tracks", tracks, "--seeds")
    assert "| mine: a tiny model | 384 | 60.0 | 95.0 | 80.0 |" in run_script(*words, 0).out
    assert "measures seconds in every run" in run_script(*words, 0, "--time").err
    shares |= {40: 0.6, 48: 0.7}
    missed = run_script(*words, 1)
    assert missed.code == 2 and "no checkpoint reached" in missed.err
    assert run_script(*words, 100).code == 0, "a tuning trial that failed is a result"


def test_the_gpu_track_asks_for_a_gpu_and_a_wheel_for_a_checkout(
    run_script: RunScript, tracks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tracks / "gpu" / "entries" / "mine.toml").write_text(TINY.replace("CONFIG", "scenes"))
    protocol = tracks / "gpu" / "track.toml"
    protocol.write_text(protocol.read_text().replace("\n[track]\n", "\n[track]\nneeds_gpu = true\n"))
    refused = run_script("torchditan", "speedrun", "gpu", "mine", "--tracks", tracks)
    assert refused.code == 2 and refused.err.count("\n") == 1 and "needs a GPU" in refused.err
    monkeypatch.setattr("torchditan.commands.speedrun.checkout", lambda: None)
    refused = run_script("torchditan", "speedrun")
    assert refused.code == 2 and refused.err.count("\n") == 1 and "needs a checkout" in refused.err


def test_a_seed_of_no_track_and_a_wrong_option_are_refused_in_one_line(run_script: RunScript, tracks: Path) -> None:
    text = TINY.replace("CONFIG", "scenes").replace("mixed_precision_param", "# ")
    file, words = tracks / "laptop" / "entries" / "mine.toml", ("torchditan", "speedrun", "laptop", "mine")
    for old, new, more, message in (
        ("", "", ("--seeds", 7), "must be different ones of 0, 1, 2"),
        ("flavor", "flavour", (), "mine.toml: model.flavour"),
        ("images = 48", "", (), "mine.toml: images = 0: must be 1 to"),
        ("images = 48", "images = 48\nrung = 1", (), "mine.toml: the track laptop has no ladder"),
        ("", "", ("--check", "--time"), "exclude each other"),
    ):
        file.write_text(text.replace(old, new))
        refused = run_script(*words, "--tracks", tracks, *more)
        assert refused.code == 2 and refused.err.count("\n") == 1 and message in refused.err


@pytest.mark.nightly
@pytest.mark.parametrize(("track", "name"), [("earth", "muon"), ("laptop", "scenes")])
def test_twenty_steps_of_an_entry_are_equal_to_the_bit_when_repeated(
    track: str, name: str, run_script: RunScript
) -> None:
    flags = [
        *entries.load(entries.load_track(track), name).flags(seed=0),
        "--training.steps=20",
        "--metrics.log_freq=1",
    ]
    for place in ("one", "two"):
        made = run_script("torchditan", "train", *flags, "--job.dump_folder=.", f"--metrics.experiment_name={place}")
        assert made.code == 0, made.err
    one, two = ([(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(Path(p))] for p in ("one", "two"))
    assert one == two and len(one) == 20
