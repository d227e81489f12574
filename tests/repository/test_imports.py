# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The order of the folders, which is the order to read them in, and what a job imports."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CORE = (
    *("errors", "registry", "randomness", "config", "run", "models", "diffusion", "distributed", "optim"),
    *("supervision", "checkpoint", "data_stream", "sampling", "datasets", "job", "periodic_tasks", "announcements"),
    "trainer",
)
EXTRAS = (
    *(
        "saved_models",
        "tensor_cache",
        "autoencoders",
        "latents",
        "published",
        "captions",
        "weights",
        "evaluation",
        "sharing",
    ),
    *("methods", "planner", "ablation"),
    "report",
)
ORDER = [*CORE, *(f"extras.{name}" for name in EXTRAS), "training", "ablation", "planner", "commands"]
"""A part imports only what stands before it. The package itself and its `__main__` import anything."""
TINY = (
    *("--training.steps=2", "--training.global_batch_size=4", "--dataset.num_workers=0", "--model.flavor=debugmodel"),
    *("--model.patch_size=1", "--sampling.num_steps=2", "--sampling.max_classes=2", "--sampling.images_per_class=1"),
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
OPTIONAL = {
    *("cosmos_tokenizer", "datasets", "diffusers", "huggingface_hub", "peft", "pyarrow", "submitit", "tensorboard"),
    *("torchao", "torchdata", "trackio", "transformers", "wandb"),
}


def files() -> list[Path]:
    package = REPOSITORY / "torchditan"
    return [*package.rglob("*.py"), *(package / "datasets").glob("*.py")]


def part_of(module: str) -> str:
    """`extras.report` of `torchditan.extras.report.page`."""
    words = module.split(".")[1:]
    return ".".join(words[:2]) if words[0] == "extras" else words[0]


def imports_of(file: Path, *, at_top: bool = False) -> set[str]:
    """The modules that a file imports: at the top, or also in a function or for type checkers only."""
    found = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{file}: imports name the whole module"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_a_part_imports_only_what_stands_before_it() -> None:
    """And models/, diffusion/ and distributed/ know no command line and no run directory."""
    wrong = []
    for file in files():
        module = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        if module in ("torchditan", "torchditan.__main__", "torchditan.extras"):
            continue
        part = part_of(module)
        ours = {name for name in imports_of(file) if name.startswith("torchditan.")}
        wrong += [f"{module}: {name}" for name in ours if ORDER.index(part_of(name)) > ORDER.index(part)]
        if part in ("models", "diffusion", "distributed"):
            outer = ("torchditan.config.loader.", "torchditan.run.metrics.", "torchditan.run.directory.")
            wrong += [f"{module}: {name}" for name in ours if f"{name}.".startswith(outer)]
    assert wrong == []


def test_optional_libraries_are_imported_where_they_are_used() -> None:
    found = {file: {name.split(".")[0] for name in imports_of(file, at_top=True)} & OPTIONAL for file in files()}
    assert {file: names for file, names in found.items() if names} == {}


def test_importing_the_package_imports_no_torch_and_help_neither() -> None:
    for command in ("import torchditan", "import torchditan.config.loader, torchditan.supervision.exit_status"):
        script = f"import sys; {command}; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY).returncode == 0, command


def test_the_quickstart_imports_only_the_core(tmp_path: Path) -> None:
    """`-s` prints the size of the closure."""
    command = [sys.executable, "-c", TRAIN_AND_LIST, "--job.config_file=quickstart", *TINY]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        [*command, f"--job.dump_folder={tmp_path}"],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    modules: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    lines = sum(len(Path(file).read_text(encoding="utf-8").splitlines()) for file in modules.values())
    print(f"the quickstart imports {len(modules)} files with {lines:,} lines")
    assert (tmp_path / "quickstart" / "samples" / "step_00000002.png").exists()  # it sampled too
    assert [name for name in modules if name.startswith("torchditan.extras")] == []
    datasets = [name.removeprefix("torchditan.") for name in modules if name.startswith("torchditan.datasets")]
    assert sorted(datasets) == ["datasets", "datasets.digits", "datasets.options"]
