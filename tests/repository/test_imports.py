# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Modules of `torchditan` that a job imports, measured in a separate process; imports have no cycle."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    pass

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIONAL_PARTS = {
    "torchditan.datasets.captions",
    "torchditan.datasets.hub",
    "torchditan.datasets.latents",
    "torchditan.extras.ablation",
    "torchditan.extras.autoencoders",
    "torchditan.distributed.compilation",
    "torchditan.distributed.float32_products",
    "torchditan.distributed.float8",
    "torchditan.extras.evaluation.card",
    "torchditan.extras.evaluation.card_tables",
    "torchditan.extras.evaluation.classifier",
    "torchditan.extras.evaluation.distances",
    "torchditan.extras.evaluation.during_training",
    "torchditan.extras.evaluation.efficientnet_lite",
    "torchditan.extras.evaluation.evaluator",
    "torchditan.extras.evaluation.extractors",
    "torchditan.extras.evaluation.inception",
    "torchditan.extras.evaluation.metric",
    "torchditan.extras.evaluation.neighbours",
    "torchditan.extras.evaluation.quality",
    "torchditan.sampling.reconstruction",
    "torchditan.extras.evaluation.sample_batches",
    "torchditan.extras.evaluation.sample_parts",
    "torchditan.extras.published",
    "torchditan.distributed.attention_backend",
    "torchditan.extras.latents.encoding",
    "torchditan.data_stream.latent_index",
    "torchditan.extras.latents.latent_space",
    "torchditan.data_stream.latent_shards",
    "torchditan.extras.latents.writer",
    "torchditan.optim.adamw_8bit",
    "torchditan.optim.loss_scaling",
    "torchditan.optim.muon",
    "torchditan.extras.planner",
    "torchditan.extras.report",
    "torchditan.run.tensor_cache",
    "torchditan.extras.weights",
}
"""Modules, and packages with all in them, that a job imports only where an option asks for them."""
PLAN = {"torchditan.extras.planner", "torchditan.extras.published", "torchditan.diffusion.loss_flops"}
"""What the memory in the first lines of a run adds, through the registry."""
TINY = (
    "--training.steps=2",
    "--training.global_batch_size=4",
    "--dataset.num_workers=0",
    "--model.flavor=debugmodel",
    "--model.patch_size=1",
    "--sampling.num_steps=2",
    "--sampling.max_classes=2",
    "--sampling.images_per_class=1",
    "--validation.num_images=4",
)
TRAIN_AND_LIST = """
import json, runpy, sys
sys.argv = ["train.py", *sys.argv[1:]]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
names = [name for name in sys.modules if name.split(".")[0] == "torchditan"]
print(json.dumps({name: sys.modules[name].__file__ for name in names}))
"""


def modules_of(*flags: str) -> dict[str, str]:
    """Name -> file of all that `python train.py` with these flags imports of this repository."""
    command = [sys.executable, "-c", TRAIN_AND_LIST, *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    modules: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return modules


def belongs_to(name: str, parts: set[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def test_the_quickstart_imports_no_optional_part(tmp_path: Path) -> None:
    modules = modules_of("--job.config_file=quickstart", *TINY, f"--job.dump_folder={tmp_path}")
    assert (tmp_path / "quickstart" / "samples" / "step_00000002.png").exists()  # it sampled too
    optional = sorted(name for name in modules if belongs_to(name, OPTIONAL_PARTS) and not belongs_to(name, PLAN))
    assert optional == []
    datasets = [name.removeprefix("torchditan.") for name in modules if name.startswith("torchditan.datasets")]
    assert sorted(datasets) == ["datasets", "datasets.digits", "datasets.options"]


def imports_of(tree: ast.AST, known: set[str]) -> set[str]:
    """Modules of `known` that a file imports: at the top, in a function, or for type checkers only."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "imports name the whole module"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & known or {node.module}
    return found & known


@functools.cache
def import_graph() -> dict[str, set[str]]:
    files = {}
    for file in [*(REPOSITORY / "torchditan").rglob("*.py"), *(REPOSITORY / "torchditan/datasets").glob("*.py")]:
        name = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = file
    return {name: imports_of(ast.parse(file.read_text(encoding="utf-8")), set(files)) for name, file in files.items()}


def cycle_in(graph: dict[str, set[str]]) -> list[str] | None:
    """Modules that import each other in a circle, the first one again at the end; None where there are none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return None
        for imported in sorted(graph[name]):
            if (cycle := visit(imported, [*path, name])) is not None:
                return cycle
        done.add(name)
        return None

    for name in sorted(graph):
        if (cycle := visit(name, [])) is not None:
            return cycle
    return None


def test_imports_have_no_cycle_lazy_ones_included() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    cycle = cycle_in(import_graph())
    assert cycle is None, " -> ".join(cycle or [])


@pytest.mark.parametrize(
    "core", ["trainer", "job", "data_stream", "diffusion", "models.dit", "models.spec", "distributed"]
)
def test_the_core_imports_no_optional_part_not_even_through_others(core: str) -> None:
    """Imports inside functions count."""
    graph = import_graph()
    reached: set[str] = set()
    waiting = [name for name in graph if belongs_to(name, {f"torchditan.{core}"})]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph[name]
    # Chosen by an option inside a function: torch.compile, the two precisions, attention kernels, and the scores of a
    # grid of captions. Autoencoders and metrics use float32_products.
    chosen = {
        "torchditan.distributed.compilation",
        "torchditan.distributed.float32_products",
        "torchditan.distributed.float8",
        "torchditan.optim.adamw_8bit",
        "torchditan.optim.loss_scaling",
        "torchditan.distributed.attention_backend",
        "torchditan.sampling.reconstruction",
        "torchditan.extras.autoencoders",
        "torchditan.extras.autoencoders.autoencoder",
    }
    assert sorted(name for name in reached if belongs_to(name, OPTIONAL_PARTS - chosen) and name not in chosen) == []


FOLDERS = sorted(path.parent.name for path in (REPOSITORY / "torchditan").glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_what_its_docstring_says(folder: str) -> None:
    """`May import: a, b.` names exactly the parts of `torchditan` that the folder imports, lazily or not."""
    docstring = ast.get_docstring(ast.parse((REPOSITORY / "torchditan" / folder / "__init__.py").read_text())) or ""
    said = docstring.partition("May import: ")[2].partition(".")[0].replace("\n", " ").split(", ")
    found = set()
    for name, imported in import_graph().items():
        if belongs_to(name, {f"torchditan.{folder}"}):
            found |= {other.split(".")[1] for other in imported if other.startswith("torchditan.")} - {folder}
    assert said == sorted(found)


def test_only_commands_import_datasets() -> None:
    """The core finds them through the registry, and the command line finds commands through their table."""
    folders = {"torchditan.datasets", "torchditan.commands"}
    for name, imported in import_graph().items():
        others = {other for other in imported if belongs_to(other, folders)}
        assert belongs_to(name, folders) or not others or name == "torchditan.__main__", name
