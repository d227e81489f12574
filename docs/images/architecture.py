# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Draw the imports between the folders of the package: `python docs/images/architecture.py` writes architecture.png.

Imports inside functions count; imports for type checkers only do not.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "torchditan"
TRAINING = {
    "trainer": "construction, loop, step",
    "periodic_tasks": "validate, log, sample, save",
    "job": "complete and check options",
    "checkpoint": "state on disk",
    "optim": "optimizers, schedules, EMA, divergence",
    "distributed": "mesh, parallelize, compile",
    "diffusion": "objectives, timesteps, samplers",
    "models": "the transformer, its interface, FLOPs",
    "data_stream": "position -> sample -> batch",
    "supervision": "lost ranks, stop requests, exit codes",
    "run": "run directory, metrics, progress",
    "config": "options, rules, TOML and flags",
    "randomness": "noise of a seed and a position",
    "registry": "names of optional parts",
}
REST = {
    "report": "tables and plots of grids and runs",
    "ablation": "grids of runs, batch size search",
    "planner": "memory without a device",
    "finetune": "published models, captions, LoRA, int8",
    "weights": "export, import, load a run",
    "evaluation": "validation, sample grids, metrics",
    "latents": "stored latents, and their space",
    "autoencoders": "pixels <-> latents",
    "datasets": "one file per dataset",
    "commands": "what users run",
}
ROLES = {**TRAINING, **REST}


def main(output: Path) -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= set(ROLES), f"give {sorted(folders - set(ROLES))} a row"
    imports = {row: count_imports(row) for row in ROLES}
    columns = [*TRAINING, *REST]
    named = names_in_registry()
    mpl.rcParams["font.size"] = 9
    figure = Figure(figsize=(11, 9.2), layout="constrained")
    axes = figure.subplots()
    rows = list(ROLES)
    first_rest, first_outside = len(TRAINING), len(columns)
    axes.add_patch(Rectangle((-0.5, -0.5), first_rest, first_rest, color="#dbe9f6", zorder=0))
    axes.add_patch(Rectangle((first_rest - 0.5, first_rest - 0.5), len(REST), len(REST), color="#fde9d9", zorder=0))
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            if row == column:
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color="#9aa5b1", zorder=1))
            elif number := imports[row][column]:
                is_exception = y < first_rest <= x
                axes.scatter(x, y, s=210, color="#b03030" if is_exception else "#2b5c8a", zorder=2)
                axes.text(x, y, str(number), color="white", ha="center", va="center", fontsize=7.5, zorder=3)
            elif row == "registry" and column in named:
                axes.scatter(x, y, s=210, facecolors="none", edgecolors="#2b5c8a", linestyles="dotted", zorder=2)
    for line in (first_rest - 0.5, first_outside - 0.5):
        axes.axhline(line, color="black", linewidth=0.8)
    axes.axvline(first_rest - 0.5, color="black", linewidth=0.8)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns, rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), [f"{name}:  {role}" for name, role in ROLES.items()])
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(color="#e4e7eb", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.set_title("A row imports a column (number of import statements)", fontsize=11, pad=12)
    figure.savefig(output, dpi=100)


def count_imports(row: str) -> Counter[str]:
    """Import statements of a folder or file, by the part of the package that they name."""
    found: Counter[str] = Counter()
    for file in files(row):
        for module in imported_modules(ast.parse(file.read_text(encoding="utf-8"))):
            package, _, rest = module.partition(".")
            if package == "torchditan" and rest:
                found[rest.split(".")[0]] += 1
    found.pop(row, None)
    return found


def files(row: str) -> list[Path]:
    path = PACKAGE / row
    return sorted(path.rglob("*.py")) if path.is_dir() else [path if path.suffix else path.with_suffix(".py")]


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Modules of the import statements under a node, without those under `if TYPE_CHECKING`."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield from ([f"torchditan.{a.name}" for a in node.names] if node.module == "torchditan" else [node.module])
    for child in ast.iter_child_nodes(node):
        yield from imported_modules(child)


def names_in_registry() -> set[str]:
    """Parts that registry.py names in texts such as "torchditan.extras.weights.initial:load_initial_weights"."""
    tree = ast.parse((PACKAGE / "registry.py").read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text.split(".")[1].split(":")[0] for text in texts if text.startswith("torchditan.")}


if __name__ == "__main__":
    main(Path(__file__).with_suffix(".png"))
