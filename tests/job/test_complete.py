# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The configuration of a job: the given one is unchanged, the completed one has every value."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from minimal_parts import PAIRED
from refusals import refused

from torchditan.announcements import describe_batches
from torchditan.config.loader import load_config, to_dict
from torchditan.config.options import Config, flatten
from torchditan.config.trajectory import trajectory
from torchditan.distributed.process_group import Rank
from torchditan.errors import ConfigError
from torchditan.extras.ablation.autotune import candidate_batches
from torchditan.job.complete import StoredRun, complete_batches, keep_global_batch_size
from torchditan.job.prepare import Job, prepare

if TYPE_CHECKING:
    from tests.conftest import RunScript

ENCODED = ["--autoencoder.name=haar", "--autoencoder.online", "--autoencoder.shift=0", "--autoencoder.scale=1"]
ENCODED += ["--autoencoder.downsampling=2"]
OF_DIGITS: dict[str, Any] = {
    "model.input_channels": 1,
    "model.sample_size": [8, 8],
    "dataset.image_size": [8, 8],
    "dataset.num_classes": 10,
    "dataset.horizontal_flip": False,
    "diffusion.timestep_shift": 1.0,
    "training.batch_size": 16,
    "training.global_batch_size": 16,
}


def prepared(folder: Path, *flags: str) -> tuple[Job, dict[str, Any]]:
    """A job of digits, and the options that preparing it changed; the given configuration must stay as it is."""
    given = load_config(["--model.flavor=debugmodel", f"--job.dump_folder={folder}", *flags])
    before = flatten(given)
    job = prepare(given)
    assert job is not None and job.config is not given
    assert flatten(given) == before
    return job, {name: value for name, value in flatten(job.config).items() if before[name] != value}


def test_the_completed_configuration_is_a_new_one_and_leaves_nothing_open(tmp_path: Path) -> None:
    job, filled_in = prepared(tmp_path)
    assert filled_in == OF_DIGITS
    assert describe_batches(job.plan) == "batch_size 16 x 1 micro-batch x 1 rank = global batch 16"


@pytest.mark.parametrize("flag", ["--model.sample_size=4,4", "--dataset.fingerprint=other"])
def test_what_only_the_data_decides_is_refused_with_another_value(flag: str, tmp_path: Path) -> None:
    with refused(flag.removeprefix("--").split("=")[0], "leave it out"):
        prepared(tmp_path, flag)


def test_the_section_of_the_autoencoder_is_completed_by_what_it_opened(tmp_path: Path) -> None:
    job, filled_in = prepared(tmp_path, *ENCODED)
    assert filled_in == {
        **OF_DIGITS,
        "model.input_channels": 4,
        "model.sample_size": [4, 4],
        "autoencoder.shift": [0.0] * 4,
        "autoencoder.scale": [1.0] * 4,
        "autoencoder.fingerprint": job.space.config.fingerprint,
    }
    assert job.config.autoencoder == job.space.config


def test_random_samples_need_no_autoencoder(tmp_path: Path) -> None:
    flags = ["--dataset.dataset_name=dummy", "--dataset.image_size=8", "--autoencoder.name=haar"]
    job, filled_in = prepared(tmp_path, *flags)
    assert filled_in["autoencoder.name"] is None
    assert job.config.autoencoder == type(job.config.autoencoder)()


def test_a_run_that_is_continued_completes_the_configuration_too(tmp_path: Path) -> None:
    flags = ["--metrics.experiment_name=run", "--lr_scheduler.schedule=cosine"]
    first, _ = prepared(tmp_path, *flags, "--training.global_batch_size=24")
    first.run_directory.open(to_dict(first.config), trajectory=trajectory(first.config))
    first.run_directory.close()
    again, filled_in = prepared(tmp_path, *flags, "--training.batch_size=10")
    assert filled_in == {**OF_DIGITS, "training.batch_size": 8, "training.global_batch_size": 24}
    described = describe_batches(again.plan, asked=again.given.training.batch_size)
    assert described.endswith("(batch_size 10 does not divide the 24 of a rank)")


@pytest.mark.parametrize("flags", [[], ENCODED])
def test_print_config_prints_the_completed_configuration_and_writes_nothing(
    tmp_path: Path, run_script: RunScript, flags: list[str]
) -> None:
    small = ["--model.flavor=debugmodel", f"--job.dump_folder={tmp_path}", "--metrics.experiment_name=run", *flags]
    result = run_script("train.py", *small, "--job.print_config")
    assert result.code == 0, result.err
    assert list(tmp_path.iterdir()) == []
    printed = tmp_path / "printed.toml"
    printed.write_text(result.out, encoding="utf-8")
    job, _ = prepared(tmp_path, *small)
    read = load_config(["--job.config_file", str(printed)])
    assert read.replace({"job.config_file": None}) == job.config


def of_pairs(**options: Any) -> Config:
    return Config().replace({"diffusion.ingredients": [PAIRED], **options})


def rank_of(world_size: int) -> Rank:
    return Rank(rank=0, local_rank=0, world_size=world_size)


@pytest.mark.parametrize(
    ("batch_size", "global_batch_size", "world_size", "message"),
    [
        (3, None, 1, r"training\.batch_size = 3: must be a multiple of 2"),
        (None, 4, 4, r"global_batch_size = 4: must be a multiple of 8: .* x 2 for .*; it fits 1, 2 ranks"),
    ],
)
def test_an_odd_batch_is_refused_for_a_loss_of_pairs(
    batch_size: int | None, global_batch_size: int | None, world_size: int, message: str
) -> None:
    odd = of_pairs(**{"training.batch_size": batch_size, "training.global_batch_size": global_batch_size})
    with pytest.raises(ConfigError, match=message):
        complete_batches(odd, rank_of(world_size))


def test_batches_that_are_chosen_for_a_loss_of_pairs_are_even() -> None:
    of_36 = of_pairs(**{"training.global_batch_size": 36})
    assert candidate_batches(of_36, num_devices=1) == [2, 4, 6, 12, 18, 36]
    assert candidate_batches(of_36.replace({"autotune.batch_size_multiple": 3}), num_devices=1) == [6, 12, 18, 36]
    run = StoredRun(path=Path("run"), options={"training.global_batch_size": 12}, cpu_threads=None)
    kept = keep_global_batch_size(of_pairs(**{"training.batch_size": 5}), run, world_size=2)
    assert (kept.training.batch_size, kept.training.global_batch_size) == (2, 12)
