# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""The findings of an analysis: a question, a short answer, and the numbers behind it.

Notable: every sentence contains its number of pairs. An answer is "yes" or "no" only if the middle half of the pairs
agrees and the median exceeds the noise of the measurement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchditan.ablation.grid import (
    BATCH_SIZE,
    CHECKPOINT_FRACTION,
    CHECKPOINTING,
    COMPILE,
    FLAVOR,
    PARALLEL,
    PATCH_SIZE,
    PRECISION,
)
from torchditan.ablation.ledger import STATUSES
from torchditan.finetune.resolutions import MODEL, RESOLUTION
from torchditan.report.analysis import Analysis, Effect, fastest, repayment
from torchditan.report.grid_results import parallel_mode
from torchditan.report.pairs import MEMORY, MFU, THROUGHPUT, Change
from torchditan.report.sanity import MINUS, count

if TYPE_CHECKING:
    import pandas as pd

AXIS_NAMES = {
    COMPILE: "torch.compile",
    CHECKPOINTING: "activation checkpointing",
    CHECKPOINT_FRACTION: "share of blocks checkpointed",
    PRECISION: "precision",
    PARALLEL: "parallel mode",
    PATCH_SIZE: "patch size",
    FLAVOR: "model",
    BATCH_SIZE: "batch per device",
    "source": "folder",
}
_QUESTIONS = {
    CHECKPOINTING: "Should I checkpoint activations?",
    CHECKPOINT_FRACTION: "How many blocks should I checkpoint?",
    PRECISION: "Which precision?",
    PARALLEL: "Shard or replicate?",
    PATCH_SIZE: "What does the patch size cost?",
}
_EXTREMES = ("FSDP", "DDP")
_MOST_AGREE = 0.9
_MOST_SOURCES = 4
_MOST_LINES = 6
STATUS_NAMES = {
    "completed": "completed",
    "oom": "out of memory",
    "error": "failed",
    "timeout": "timed out",
    "skipped": "skipped",
}


@dataclass(frozen=True)
class Finding:
    """`answer` is shown large under the question; `sentences` have the numbers."""

    question: str
    answer: str
    sentences: list[str]


def findings(analysis: Analysis) -> list[Finding]:
    """All findings. The first is always whether to compile."""
    asked = [axis for axis in analysis.results.effects if axis != COMPILE]
    found = [compile_finding(analysis)]
    if len(analysis.results.sources) > 1:
        found.append(_folders_finding(analysis))
    found += [_axis_finding(analysis, axis) for axis in asked]
    return [*found, _fastest_finding(analysis), _status_finding(analysis)]


def compile_finding(analysis: Analysis) -> Finding:
    """Should I compile? Yes, no, or the reason why the grid does not answer it."""
    question = "Should I compile?"
    known = [effect for effect in _answering(analysis, COMPILE) if effect.key == (COMPILE, "false", "true")]
    if not known:
        return Finding(question, "Unknown.", [_why_no_compile_pair(analysis)])
    verdicts = {_verdict(effect.change(THROUGHPUT)) for effect in known}
    shown = known[0].change(THROUGHPUT), known[0].change(MEMORY)
    if len(verdicts) > 1:
        answer = "It depends on where you train."
    elif verdicts == {"better"}:
        answer = (
            f"{_degree(shown[0], shown[0].num_better)} {_both(*shown)}."
            if len(known) == 1
            else f"Yes, in every folder: {_range(known)} images/s."
        )
    elif verdicts == {"worse"}:
        worse = shown[0].num_pairs - shown[0].num_better
        answer = (
            f"{_degree(shown[0], worse, word='No')} {_both(*shown)}."
            if len(known) == 1
            else f"No, in no folder: {_range(known)} images/s."
        )
    else:
        answer = "It has no clear effect on speed."
    sentences = [_compile_sentence(analysis, effect) for effect in known[:_MOST_SOURCES]]
    if len(known) > _MOST_SOURCES:
        sentences.append(f"{len(known) - _MOST_SOURCES} more are in the table of effects.")
    return Finding(question, answer, sentences)


def _degree(change: Change, agreeing: int, *, word: str = "Yes") -> str:
    """The confidence of a yes or no, from the share of pairs that agree."""
    if change.num_pairs == 1:
        return f"{word}, by a single pair:"
    return f"{word}:" if agreeing >= _MOST_AGREE * change.num_pairs else f"Mostly {word.lower()}:"


def _answering(analysis: Analysis, axis: str) -> list[Effect]:
    """Effects of an axis that have pairs: at the same batch, or with autotuned batches each at its best batch."""
    for effects in (analysis.same_batch, analysis.best_batch):
        known = [effect for effect in effects if effect.axis == axis and effect.change(THROUGHPUT).num_pairs]
        if known:
            return known
    return []


def _compile_sentence(analysis: Analysis, effect: Effect) -> str:
    throughput = effect.change(THROUGHPUT)
    at = "at the same batch" if effect in analysis.same_batch else "each at its own best batch"
    text = f"{where(analysis, effect.source)}, compiling changes throughput by {_evidence(throughput, 'faster')}."
    memory = effect.change(MEMORY)
    if memory.num_pairs:
        text += f" Peak memory {at}: {percent(memory.median)} ({_pairs(memory.num_pairs)})."
    best = [other for other in analysis.best_batch if other.source == effect.source and other.key == effect.key]
    if effect not in best and best and best[0].change(THROUGHPUT).num_pairs and _has_several_batches(analysis):
        change = best[0].change(THROUGHPUT)
        text += f" Each at its best batch: {percent(change.median)} throughput ({_pairs(change.num_pairs)})."
    cost = repayment(effect, analysis.results.cells)
    if cost is not None:
        text += f" It costs {cost.seconds:,.0f} s more at the start"
        text += f", repaid after about {cost.steps:,.0f} steps" if cost.steps is not None else ", never repaid"
        text += f" ({_pairs(cost.num_pairs)})."
    return text


def _why_no_compile_pair(analysis: Analysis) -> str:
    values = {"true": "was compiled", "false": "ran eagerly"}
    completed = analysis.results.values(COMPILE)
    if not completed:
        return "No run completed with a measurement."
    if len(completed) == 1:
        return f"Every completed run {values.get(completed[0], completed[0])}, so there are no pairs to compare."
    return "No pairs: no two completed runs differ only in torch.compile."


def _folders_finding(analysis: Analysis) -> Finding:
    question = "How do the folders compare?"
    first = analysis.results.sources[0]
    known = [effect for effect in analysis.between_folders if effect.change(THROUGHPUT).num_pairs]
    if not known:
        return Finding(question, "No pairs.", [f"No setting completed both in {first} and in another folder."])
    effect = known[0]
    ratio = 1 + effect.change(THROUGHPUT).median / 100
    answer = f"{effect.to_value}: {ratio:.2f} times the throughput of {first}."
    sentences = [
        f"{other.to_value} against {first}, same settings: throughput {_evidence(other.change(THROUGHPUT), 'faster')}."
        for other in known[:_MOST_LINES]
    ]
    return Finding(question, answer, sentences)


def _axis_finding(analysis: Analysis, axis: str) -> Finding:
    question = _QUESTIONS.get(axis, f"What does {AXIS_NAMES.get(axis, axis)} change?")
    known = _answering(analysis, axis)
    if not known:
        return Finding(question, "No pairs.", [f"No two completed runs differ only in {AXIS_NAMES.get(axis, axis)}."])
    first = _headline_effect(known)
    answer = f"{value_name(axis, first.to_value)} instead of {value_name(axis, first.from_value)}: "
    answer += f"{_both(first.change(THROUGHPUT), first.change(MEMORY))}."
    sentences = [_effect_sentence(analysis, effect) for effect in known[:_MOST_LINES]]
    if len(known) > _MOST_LINES:
        sentences.append(f"{len(known) - _MOST_LINES} more are in the table of effects.")
    return Finding(question, answer, sentences)


def _headline_effect(effects: list[Effect]) -> Effect:
    """The effect of the first source to show: full sharding against none if meshes are compared, else the first."""
    mine = [effect for effect in effects if effect.source == effects[0].source]
    extremes = [
        effect
        for effect in mine
        if effect.axis == PARALLEL and (parallel_mode(effect.from_value), parallel_mode(effect.to_value)) == _EXTREMES
    ]
    return extremes[-1] if extremes else mine[0]


def _effect_sentence(analysis: Analysis, effect: Effect) -> str:
    throughput, memory = effect.change(THROUGHPUT), effect.change(MEMORY)
    start, end = value_name(effect.axis, effect.from_value), value_name(effect.axis, effect.to_value)
    text = f"{start} → {end}: {percent(throughput.median)} throughput"
    if throughput.num_pairs > 1:
        text += f" (middle half {percent(throughput.quartile_1)} to {percent(throughput.quartile_3)})"
    if memory.num_pairs:
        text += f", {percent(memory.median)} peak memory"
    text += f"; {_pairs(throughput.num_pairs)}"
    if effect not in analysis.same_batch:
        text += ", each at its best batch"
    if _verdict(throughput) == "unclear":
        text += "; the difference in speed is not clear"
    if len(analysis.results.sources) > 1:
        text += f", {effect.source}"
    return text + "."


def _fastest_finding(analysis: Analysis) -> Finding:
    question = "What was fastest?"
    cells = fastest(analysis.results)
    if cells.empty:
        return Finding(question, "No measurements.", ["No run completed with a measurement."])
    best = cells.loc[cells[THROUGHPUT.column].idxmax()]
    answer = f"{best[THROUGHPUT.column]:,.4g} images/s "
    answer += f"with {_work_name(best)}." if best.get(MODEL) else f"at patch size {best[PATCH_SIZE]}."
    sentences = []
    for _, cell in cells.sort_values(THROUGHPUT.column, ascending=False, kind="stable").head(_MOST_LINES).iterrows():
        text = f"{cell['source']}: " if len(analysis.results.sources) > 1 else ""
        text += f"{_work_name(cell)}, {count(int(cell['num_devices']), 'device')}: "
        text += f"{cell[THROUGHPUT.column]:,.4g} images/s"
        if cell["num_seeds"] > 1:
            text += f" (± {cell[f'{THROUGHPUT.column}_half']:,.2g}, 95% over {cell['num_seeds']} seeds)"
        text += f", MFU {cell[MFU.column]:.1f}%" if cell[MFU.column] == cell[MFU.column] else ""
        text += f", {cell[MEMORY.column]:.3g} GiB" if cell[MEMORY.column] == cell[MEMORY.column] else ""
        sentences.append(f"{text} with {cell['run_name']}.")
    return Finding(question, answer, sentences)


def _work_name(cell: pd.Series) -> str:
    """`DiT-L, patch size 2`, or `flux/FLUX.1-dev at 512x512`."""
    if cell.get(MODEL):
        return f"{cell[MODEL]} at {cell[RESOLUTION]}"
    return f"{cell[FLAVOR]}, patch size {cell[PATCH_SIZE]}"


def _status_finding(analysis: Analysis) -> Finding:
    runs = analysis.results.runs
    counts = runs["status"].value_counts()
    parts = [f"{counts[status]:,} {STATUS_NAMES[status]}" for status in STATUSES if counts.get(status)]
    answer = f"{', '.join(parts)}, of {count(len(runs), 'run')}."
    failed = runs[runs["status"].isin(("error", "timeout"))]
    sentences = []
    if len(failed):
        reason, number = next(iter(failed["reason"].value_counts(sort=True).items()))
        sentences.append(f"The most frequent failure, {count(number, 'run')}: {reason or 'no reason recorded'}.")
    not_completed = counts.get("completed", 0) < len(runs)
    sentences.append(
        "Runs that did not complete are listed below and not used as data." if not_completed else "All did."
    )
    return Finding("Did everything run?", answer, sentences)


def where(analysis: Analysis, source: str) -> str:
    """`On NVIDIA A100-SXM4-80GB (dit_l)`."""
    cells = analysis.results.cells
    devices = cells["device"][cells["source"] == source]
    device = next(iter(devices), "") or "an unnamed device"
    return f"On {device} ({source.removesuffix(f' on {device}')})"


def effect_name(effect: Effect) -> str:
    """`torch.compile: off → on`; for folders, the one that is compared with the first."""
    if effect.axis == "source":
        return effect.to_value
    start, end = value_name(effect.axis, effect.from_value), value_name(effect.axis, effect.to_value)
    return f"{AXIS_NAMES.get(effect.axis, effect.axis)}: {start} → {end}"


def value_name(axis: str, value: str) -> str:
    """A value of an axis for readers: `on`, `FSDP 1,8`."""
    if axis == COMPILE:
        return {"true": "on", "false": "off"}.get(value, value)
    if axis == PARALLEL:
        return f"{parallel_mode(value)} {value}"
    return {"bfloat16_f8": "bfloat16 + float8", "": "(none)"}.get(value, value)


def percent(value: float) -> str:
    """`+70%`, `−4.2%`: signed, with only significant digits."""
    if value != value:
        return "-"
    digits = 0 if abs(value) >= 9.95 else 1
    text = f"{value:+,.{digits}f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text.replace("-", MINUS)


def _verdict(change: Change) -> str:
    if not change.is_clear:
        return "unclear"
    return "better" if change.median > 0 else "worse"


def _both(throughput: Change, memory: Change) -> str:
    if not memory.num_pairs:
        return _plainly(throughput, "images/s")
    if not throughput.is_clear and not memory.is_clear:
        return "no clear change in images/s or memory"
    return f"{_plainly(throughput, 'images/s')}, {_plainly(memory, 'memory')}"


def _plainly(change: Change, noun: str) -> str:
    """`+50% images/s`, or a phrase for no clear change."""
    return f"{percent(change.median)} {noun}" if change.is_clear else f"no clear change in {noun}"


def _range(effects: list[Effect]) -> str:
    """Medians of throughput, from the smallest to the largest."""
    medians = sorted(effect.change(THROUGHPUT).median for effect in effects)
    return " to ".join(dict.fromkeys((percent(medians[0]), percent(medians[-1]))))


def _evidence(change: Change, better: str) -> str:
    if change.num_pairs == 1:
        return f"{percent(change.median)} (one matched pair only)"
    quartiles = f"{percent(change.quartile_1)} to {percent(change.quartile_3)}"
    pairs = f"{better} in {change.num_better:,} of {change.num_pairs:,}"
    return f"{percent(change.median)} (median of {change.num_pairs:,} matched pairs; middle half {quartiles}; {pairs})"


def _pairs(number: int) -> str:
    return "1 pair" if number == 1 else f"{number:,} pairs"


def _has_several_batches(analysis: Analysis) -> bool:
    return BATCH_SIZE in analysis.results.varied
