# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The shell scripts in scripts/ and their arguments, with a torchrun that only prints its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from torchditan.config.loader import load_config

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

TORCHRUN = """#!/bin/sh
printf "%s\\n" "$@" | tee arguments
echo "[rank0]:autotune: batch 24: 1.0 images/s"
echo "[rank0]:autotune: training.batch_size = 24"
if [ "$STATE" ]; then
  cd "$TORCHDITAN_RANKS_FOLDER"
  echo "{\\"rank\\": 0, \\"state\\": \\"$STATE\\", \\"reason\\": null, \\"time\\": 1}" > rank-00000.json
fi
"""


def launch(
    folder: Path, *arguments: str, script: str = "train_latent_diffusion.sh", code: int = 1, **environment: str
) -> list[str]:
    """What a script makes of it: the arguments of torchrun, which only prints them here, and what the script adds.

    `STATE` is the state that rank 0 reports; without it no rank began, let alone completed.
    """
    torchrun = folder / "bin" / "torchrun"
    torchrun.parent.mkdir(exist_ok=True)
    torchrun.write_text(TORCHRUN)
    torchrun.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key not in ("NGPU", "CONFIG_FILE", "LOG_RANK")}
    path = f"{torchrun.parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [str(SCRIPTS / script), *arguments],
        cwd=folder,
        env={**kept, "PATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code, result.stderr
    return [line for line in result.stdout.splitlines() if not line.startswith("[rank0]:")]


def test_the_launcher_trains_the_course_projects_job_on_one_gpu(tmp_path: Path) -> None:
    arguments = launch(tmp_path)
    assert "--nproc_per_node=1" in arguments
    assert "--local-ranks-filter=0" in arguments
    assert arguments[-2:] == [str(SCRIPTS.parent / "train.py"), "--job.config_file=llama3_latent_diffusion.toml"]


@pytest.mark.parametrize(("state", "code"), [("completed", 0), ("oom", 1), ("interrupted", 75)])
def test_a_run_of_the_course_projects_grids_exits_with_what_they_read_as_out_of_memory(
    tmp_path: Path, state: str, code: int
) -> None:
    script = "train_latent_diffusion_ablate.sh"
    arguments = launch(tmp_path, "--model.patch_size=4", script=script, code=code, STATE=state, NGPU="1")
    assert arguments[-2:] == ["--job.config_file=llama3_latent_diffusion_ablate.toml", "--model.patch_size=4"]
    config = load_config(arguments[-2:])
    assert (config.training.steps, config.dataset.dummy_fill, config.metrics.legacy_tags) == (40, "zeros", True)


def test_the_search_of_the_course_projects_grids_ends_with_the_batch_size(tmp_path: Path) -> None:
    """The grid reads the last number of two lines, and passes the batch of its previous search."""
    script = "autotune_bs_train_latent_diffusion.sh"
    flags = ["--training.batch_size=8"]
    assert launch(tmp_path, *flags, script=script, code=0, STATE="completed", NGPU="1") == [
        "Attempting training with batch size: 24",
        "Binary search complete. Optimal batch size found: 24",
    ]
    given = (tmp_path / "arguments").read_text().splitlines()
    assert given[-3:] == [*flags, "--training.batch_size=auto", "--job.print_config"]
    assert launch(tmp_path, script=script, code=3, STATE="oom", NGPU="1") == []


def test_the_launcher_passes_environment_and_arguments_on(tmp_path: Path) -> None:
    further = ["--training.steps=100", "--job.description", "two words"]
    arguments = launch(tmp_path, *further, NGPU="8", CONFIG_FILE="my jobs/a.toml", LOG_RANK="0,3")
    assert "--nproc_per_node=8" in arguments
    assert "--local-ranks-filter=0,3" in arguments
    assert arguments[-4:] == ["--job.config_file=my jobs/a.toml", *further]
