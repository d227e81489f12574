# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Whole runs with context parallelism: the curve, the counts and the grids of one process, and resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from minimal_parts import ALIGNED
from tiny_runs import job
from zoo import DRAWN, KEPT, VALIDATED

from torchditan.run.reading import read_config, read_metrics

if TYPE_CHECKING:
    from zoo import Zoo

    from tests.conftest import RunDistributed, Train

FULL, OP = "--activation_checkpoint.mode=full", "--activation_checkpoint.selective_ac_option=op"
SELECTIVE = "--activation_checkpoint.mode=selective"
CONTEXT, REPLICATE = "--training.context_parallel_degree", "--training.data_parallel_replicate_degree"
COMPILED = ["--training.compile", "--compile.backend=aot_eager"]
TEXT = ["--dataset.dataset_name=dummy", "--dataset.image_size=8", "--model.input_channels=4"]
TEXT += ["--dataset.num_classes=0", "--model.text=in_context", "--model.text_tokens=5", "--model.text_width=8"]
WAYS = {  # flags of what is trained
    "plain": [*DRAWN, *VALIDATED],
    "in context": ["--model.conditioning=in_context"],
    "head": [f"--diffusion.ingredients={ALIGNED}"],
    "official": ["--model.preset=official", "--diffusion.objective=ddpm"],
    "text": TEXT,
}
MORE_TWO = [
    ("in context", [f"{CONTEXT}=2", FULL]),
    ("plain", [f"{CONTEXT}=2", SELECTIVE, OP]),
    ("official", [f"{CONTEXT}=2"]),
    ("text", [f"{CONTEXT}=2"]),
    ("in context", [f"{CONTEXT}=2", *COMPILED]),
    ("plain", [f"{CONTEXT}=2", *COMPILED, FULL]),
]
FOUR = [
    ("plain", [f"{CONTEXT}=2", "--training.batch_size=2"]),
    ("plain", [f"{CONTEXT}=2", f"{REPLICATE}=2"]),
    ("in context", [f"{CONTEXT}=4"]),
    ("head", [f"{CONTEXT}=4"]),
]


def run_jobs(run_distributed: RunDistributed, jobs: list[list[str]], world_size: int) -> str:
    result = run_distributed(["tests/trainer/test_training.py", json.dumps(jobs)], world_size)
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_same_curve(run: Path, expected: Path) -> None:
    records, references = read_metrics(run), read_metrics(expected)
    assert len(records) == len(references) > 0
    for record, reference in zip(records, references, strict=True):
        assert record["images_seen"] == reference["images_seen"]
        for key in record.keys() & {"loss", "grad_norm", "distance", "validation_loss"}:
            assert record[key] == pytest.approx(reference[key], rel=1e-5), (run, key)


def flops_per_image(run: Path) -> float:
    """What the throughput and the FLOPs per device of a run imply."""
    devices = read_config(run)["hardware"]["device_count"]
    record = read_metrics(run)[-1]
    return 1e12 * record["tflops_per_device"] * devices / record["images_per_second"]


def assert_same_grid(first: Path, second: Path) -> None:
    from PIL import Image, ImageChops

    one, two = (Image.open(run / "samples" / "step_00000006.png").convert("L") for run in (first, second))
    width, height = one.size
    below_the_title = (0, height // 4, width, height)
    assert ImageChops.difference(one.crop(below_the_title), two.crop(below_the_title)).getextrema()[1] <= 1


@pytest.mark.nightly
@pytest.mark.parametrize(("world_size", "modes"), [(2, MORE_TWO), (4, FOUR)], ids=["2", "4"])
def test_ranks_that_share_tokens_follow_the_curve_of_one_process(
    world_size: int, modes: list[tuple[str, list[str]]], tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    for way in dict.fromkeys(way for way, _ in modes):
        train(way, *WAYS[way], "--training.batch_size=8")
    runs = [tmp_path / str(number) for number in range(len(modes))]
    jobs = [job(run, *WAYS[way], *flags) for run, (way, flags) in zip(runs, modes, strict=True)]
    output = run_jobs(run_distributed, jobs, world_size)
    assert "context parallelism over" in output
    for run, (way, _) in zip(runs, modes, strict=True):
        assert_same_curve(run, tmp_path / way)
        assert flops_per_image(run) == pytest.approx(flops_per_image(tmp_path / way))
        if way == "plain":
            assert_same_grid(run, tmp_path / way)


def test_two_ranks_follow_the_curve_of_one_process_and_a_run_continues_on_another_degree(
    zoo: Zoo, tmp_path: Path, train: Train, run_distributed: RunDistributed
) -> None:
    flags, split = [*KEPT, *WAYS["plain"]], [f"{CONTEXT}=2", "--training.batch_size=4"]
    shutil.copytree(zoo("digits"), tmp_path / "split later")
    shutil.rmtree(tmp_path / "split later/checkpoint/step-00000006")
    train("head", *WAYS["head"])
    jobs = [
        job(tmp_path / "plain/run", *flags, *split),
        job(tmp_path / "split later", *flags, *split),
        job(tmp_path / "split head", *WAYS["head"], *split, FULL),
    ]
    output = run_jobs(run_distributed, jobs, 2)
    assert "context parallelism over" in output and "resumed at step 3" in output
    for run in ("plain/run", "split later"):
        assert_same_curve(tmp_path / run, zoo("digits"))
    assert flops_per_image(tmp_path / "plain/run") == pytest.approx(flops_per_image(zoo("digits")))
    assert_same_grid(tmp_path / "plain/run", zoo("digits"))
    assert_same_curve(tmp_path / "split head", tmp_path / "head")
    shutil.rmtree(tmp_path / "plain/run/checkpoint/step-00000006")
    assert "resumed at step 3" in train("plain/run", *flags).out
    assert_same_curve(tmp_path / "plain/run", zoo("digits"))
