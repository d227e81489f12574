# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The conventions of the repository: allowed imports, and modules that import quickly."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import RunScript

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONAL = {
    "cosmos_tokenizer",
    "datasets",
    "diffusers",
    "huggingface_hub",
    "pandas",
    "peft",
    "pyarrow",
    "submitit",
    "tensorboard",
    "torchao",
    "torchdata",
    "transformers",
    "wandb",
}


def imports(file: Path, *, at_top: bool = False) -> set[str]:
    tree = ast.parse(file.read_text())
    nodes = tree.body if at_top else list(ast.walk(tree))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def python_files(folder: str) -> list[Path]:
    return sorted((REPOSITORY / folder).rglob("*.py"))


def test_nothing_imports_data_by_the_name_of_its_folder() -> None:
    """data/ is installed as `torchditan.datasets`."""
    for file in REPOSITORY.rglob("*.py"):
        assert not re.search(r"^\s*(?:from|import) data\b", file.read_text(encoding="utf-8"), re.MULTILINE), file


@pytest.mark.parametrize("folder", ["models", "diffusion", "distributed"])
def test_inner_folders_know_no_trainer_no_parser_and_no_logger(folder: str) -> None:
    outer = {
        f"torchditan.{name}" for name in ("trainer", "config.loader", "run.metrics", "run.directory", "checkpoint")
    }
    for file in python_files(f"torchditan/{folder}"):
        assert not {name for name in imports(file) for part in outer if f"{name}.".startswith(f"{part}.")}, file


def test_optional_libraries_are_imported_where_they_are_used() -> None:
    """`torchditan report` checks that pandas is installed before it imports its folder."""
    reports = python_files("torchditan/extras/report")
    for file in [*python_files("torchditan"), *python_files("data"), REPOSITORY / "train.py"]:
        top = {name.split(".")[0] for name in imports(file, at_top=True)}
        assert not top & (OPTIONAL - {"pandas"} if file in reports else OPTIONAL), file


def test_importing_the_package_imports_no_torch_and_help_neither() -> None:
    for command in ("import torchditan", "import torchditan.config.loader, torchditan.supervision.exit_status"):
        script = f"import sys; {command}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY).returncode == 0, command


CONFIGURATIONS = [
    file for folder in (".", "recipes") for file in (REPOSITORY / "train_configs" / folder).glob("*.toml")
]


@pytest.mark.parametrize("file", sorted(CONFIGURATIONS), ids=lambda file: file.stem)
def test_every_configuration_trains_a_step(file: Path, tmp_path: Path, run_script: RunScript) -> None:
    """With a small model on random samples: the options of each file go together."""
    with file.open("rb") as stream:
        tables = tomllib.load(stream)
    size = max(16, tables["model"].get("patch_size", 1))
    flags = ["--dataset.dataset_name=dummy", f"--dataset.image_size={size}", "--model.flavor=debugmodel"]
    flags += ["--training.steps=1", "--training.batch_size=2", "--training.global_batch_size=2"]
    flags += ["--validation.freq=0", "--metrics.enable_sampling=false", "--checkpoint.enable_checkpoint=false"]
    flags += ["--compile.backend=eager"]  # graphs without the minute of a cold compile
    flags += ["--dataset.num_workers=0", f"--job.dump_folder={tmp_path}"]
    if tables["model"].get("overrides"):
        flags += ["--model.overrides=depth=2"]
    if tables["model"].get("text") and "text_width" not in tables["model"]:  # captions set the sizes
        flags += ["--model.text_tokens=4", "--model.text_width=8"]
    if tables["model"].get("path"):  # a published model: weights are drawn, and its latents have 16 channels
        for module in ("diffusers", "peft", "torchao"):
            pytest.importorskip(module)
        flags += ["--model.path=none", "--lora.assistant_path=none", "--model.input_channels=16"]
        flags += ["--dataset.aspect_buckets=false", "--optimizer.name=AdamW"]
    result = run_script("train.py", "--job.config_file", str(file), *flags)
    assert result.code == 0, result.err
    assert (tmp_path / file.stem / "metrics.jsonl").exists()
