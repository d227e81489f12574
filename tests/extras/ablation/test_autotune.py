# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The search finds the largest batch in few trials wherever it is, and reuses stored trials."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs_here import CPU

from torchditan.config.loader import build_config, load_config
from torchditan.config.options import Config
from torchditan.errors import ConfigError
from torchditan.extras.ablation import autotune
from torchditan.extras.ablation.autotune import (
    NothingFits,
    Trial,
    TrialStore,
    find_batch_size,
    question_of,
    search,
)
from torchditan.extras.ablation.grid import load_grid
from torchditan.extras.ablation.ledger import read_ledger
from torchditan.extras.published.resolutions import published_options
from torchditan.run.reading import read_config, read_metrics

REPOSITORY = Path(__file__).resolve().parents[3]


def trial(batch_size: int, *, fits_up_to: int, speed: Callable[[int], float] = float) -> Trial:
    if batch_size > fits_up_to:
        return Trial(batch_size, "oom", None, None, 0)
    return Trial(batch_size, "completed", speed(batch_size), 0.5, 0)


def test_the_fastest_is_the_best_of_what_was_tried_and_need_not_be_the_largest() -> None:
    def peaked(batch_size: int) -> float:
        return 1000.0 - abs(batch_size - 32)

    def run_trial(batch_size: int) -> Trial:
        return trial(batch_size, fits_up_to=300, speed=peaked)

    options: dict[str, Any] = {"candidates": range(1, 1000), "guess": None}
    largest, fastest = (search(run_trial, goal=goal, **options) for goal in ("largest", "fastest"))
    assert largest is not None and fastest is not None
    assert largest.batch_size == 300
    assert 16 <= fastest.batch_size <= 64


def options(**autotune_options: Any) -> Config:
    values = {f"autotune.{key}": value for key, value in autotune_options.items()}
    values |= {"training.batch_size": "auto", "metrics.experiment_name": "job", "model.input_channels": 4}
    values |= {"model.flavor": "debugmodel", "dataset.image_size": [16, 16], "dataset.num_classes": 10}
    return build_config(values)


Find = Callable[..., tuple[int, list[int]]]


@pytest.fixture
def find(tmp_path: Path, executed_here: None) -> Find:
    """`find(config)`: (the answer, the batch sizes tried for it now), by trials in this process that hold up to 31."""

    def run(config: Config, **changes: Any) -> tuple[int, list[int]]:
        tried: list[int] = []
        settings: dict[str, Any] = {"device": CPU, "num_devices": 2, "folder": tmp_path / "trials"}
        settings |= {"store": tmp_path / "autotune.json", "program": ("train.py",), "timeout_s": 20}
        settings |= {"on_trial": lambda trial: tried.append(trial.batch_size), **changes}
        return find_batch_size(config, **settings), tried

    return run


def test_allocator_retries_of_any_rank_rule_a_batch_out_and_the_answer_is_kept(find: Any, tmp_path: Path) -> None:
    answer, tried = find(options())
    assert answer == 30, "32 runs out of memory on rank 1, 31 fits but its allocator had to start over"
    assert {30, 31} <= set(tried) and len(tried) <= 8
    assert find(options()) == (30, []), "the same question again"
    coarser, further = find(options(batch_size_multiple=8))
    assert coarser == 24 and not set(further) & set(tried), "trials serve other searches"
    other = options().replace({"activation_checkpoint.mode": "full"})
    assert find(other)[1] != [], "another question"
    other = options().replace({"training.reshard_after_forward": "never"})
    assert find(other)[1] != [], "another question"
    of_lora = {**published_options("flux/debugmodel", None), "training.batch_size": "auto"}
    full, lora = (options().replace({**of_lora, "lora.rank": rank, "ema.enable": False}) for rank in (0, 4))
    assert question_of(full, device=CPU, num_devices=2) != question_of(lora, device=CPU, num_devices=2)
    unrelated = {"training.seed": 7, "lr_scheduler.warmup_steps": 3, "dataset.root_dir": "x", "validation.freq": 5}
    assert find(options().replace(unrelated)) == (30, []), "the same question"
    assert find(options(), num_devices=1)[1] != [], "another number of ranks"
    stored = json.loads((tmp_path / "autotune.json").read_text())
    assert len(stored["questions"]) == 4
    assert len((tmp_path / "autotune.json").read_text()) > 100


def test_the_margin_of_memory_stays_free(find: Any) -> None:
    # The stand-in takes batch / 8 + rank GiB, and rank 1 is the fuller one: 24 would take all of its 4 GiB.
    assert find(options(memory_limit_gib=4.0))[0] == 22


def test_nothing_that_fits_is_said(find: Find) -> None:
    with pytest.raises(NothingFits, match=r'training\.batch_size = "auto": .*\b32\b.*CPU'):
        find(options(batch_size_multiple=32))


def test_a_search_that_was_interrupted_goes_on(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Trial] = []

    def stop_at_three(trial: Trial) -> None:
        made.append(trial)
        if len(made) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(options(), on_trial=stop_at_three)
    answer, tried = find(options())
    assert answer == 30
    assert not {trial.batch_size for trial in made} & set(tried)


def test_a_store_of_another_version_or_cut_in_half_is_refused(tmp_path: Path) -> None:
    store = TrialStore(tmp_path / "autotune.json", {"a": 1})
    store.add(Trial(8, "completed", 1.0, 0.5, 0))
    assert list(store.trials()) == [8]
    whole = store.path.read_text()
    for text in (whole[: len(whole) // 2], whole.replace('"schema_version": 1', '"schema_version": 2')):
        store.path.write_text(text)
        with pytest.raises(ConfigError, match=r"autotune\.json .*version.*move .*away"):
            store.trials()


def test_a_trial_trains_random_samples_of_the_jobs_shape(find: Any, tmp_path: Path) -> None:
    stored = {"dataset.dataset_name": "imagenet", "dataset.root_dir": "somewhere"}
    stored["dataset.fingerprint"] = "latents-0123456789abcdef"  # as the trainer fills it in before the search
    find(options().replace(stored))
    made = load_config(["--job.config_file", str(tmp_path / "trials" / "job_bs16" / "trial.toml")])
    assert (made.dataset.dataset_name, made.dataset.root_dir, made.dataset.fingerprint) == ("dummy", None, None)
    assert (made.training.batch_size, made.training.steps, made.dataset.image_size) == (16, 6, [16, 16])
    assert not made.metrics.enable_sampling
    assert not made.checkpoint.enable_checkpoint and not made.checkpoint.save_final


def test_a_trial_that_encodes_keeps_its_images_whose_channels_only_the_dataset_knows(find: Any, tmp_path: Path) -> None:
    encoded = {"autoencoder.online": True, "autoencoder.name": "haar"}
    encoded["dataset.dataset_name"] = "digits"  # grey: random samples would have three channels
    find(options().replace(encoded))
    made = load_config(["--job.config_file", str(tmp_path / "trials" / "job_bs16" / "trial.toml")])
    assert (made.dataset.dataset_name, made.autoencoder.online, made.autoencoder.name) == ("digits", True, "haar")


def test_an_autotuned_grid_measures_each_cell_at_its_largest_batch(tmp_path: Path, run_here: Any) -> None:
    grid = load_grid("debug", overrides={"steps": 4, "window": 2, "autotune": "largest"})
    axes = {"model.flavor": ["debugmodel"], "training.compile": [False], "parallel": ["1,2"]}
    grid = replace(grid, name="g", axes={**axes, "model.patch_size": [2, 4]}, exclude=[])
    grid.settings["autotune.batch_size_multiple"] = 8
    rows = run_here(grid)
    found = [(row["run_name"].split("_")[1], row["training.batch_size"], row["status"]) for row in rows]
    assert found == [("bsauto", 24, "completed"), ("bsauto", None, "error")]
    assert rows[0]["images_per_second_mean"] == 24 * 2 / 0.5
    assert "batch size 16" in rows[1]["reason"]
    assert read_ledger(tmp_path / "outputs" / "g", axes=grid.columns) == rows
    before = (tmp_path / "outputs" / "autotune.json").stat().st_mtime_ns
    again = run_here(grid)
    assert again[0] == rows[0]
    assert (tmp_path / "outputs" / "autotune.json").stat().st_mtime_ns == before


def test_a_job_across_machines_cannot_search(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchditan.distributed.process_group import Rank

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r'training\.batch_size = "auto": .*one machine.*torchrun.*integer'):
        autotune.resolve_batch_size(options(), Rank(0, 0, 16))


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.nightly)]
)
def test_train_py_finds_the_largest_batch_under_a_memory_limit_and_trains_with_it(
    world_size: int, tmp_path: Path, run_distributed: Any
) -> None:
    flags = ["--model.flavor=debugmodel", "--dataset.num_workers=0", "--training.steps=2"]
    flags += ["--metrics.enable_sampling=false", "--metrics.log_freq=1", "--training.mixed_precision_param=float32"]
    plain = [*flags, "--training.batch_size=512", "--metrics.experiment_name=plain"]
    subprocess.run([sys.executable, str(REPOSITORY / "train.py"), *plain], cwd=tmp_path, check=True, timeout=300)
    limit = 1.25 * read_metrics(tmp_path / "outputs" / "plain")[-1]["peak_memory_gib"]  # torch alone differs by machine
    flags += ["--training.batch_size=auto", "--autotune.batch_size_multiple=512"]
    flags += [f"--autotune.memory_limit_gib={limit:.2f}", "--metrics.experiment_name=job"]
    if world_size == 1:
        command = [sys.executable, str(REPOSITORY / "train.py"), *flags]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    else:
        result = run_distributed(["train.py", *flags], world_size, cwd=tmp_path, timeout=300)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("autotune: ")]
    print(lines)
    found = int(lines[-1].split(" = ")[1])
    assert found >= 512 and found % 512 == 0
    assert any("out of memory" in line or "% of the memory" in line for line in lines[:-1])
    assert read_config(tmp_path / "outputs" / "job")["config"]["training"]["batch_size"] == found
    questions = json.loads((tmp_path / "outputs" / "autotune.json").read_text())["questions"]
    (entry,) = questions.values()
    outcomes = {stored["batch_size"]: stored["status"] for stored in entry["trials"]}
    assert outcomes[found] == "completed"
    assert "oom" in outcomes.values() or max(outcomes) > found
