# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Plans as text, and a plot of the cost of scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from torchditan.config.options import Config
from torchditan.optim.power_ema import num_snapshots
from torchditan.planner import step_time
from torchditan.planner.memory import FLOAT32
from torchditan.planner.plan import GIB, USABLE_MEMORY, Plan

Table = Sequence[Sequence[str]]


def format_table(rows: Table) -> str:
    """Aligned columns with a line below the first row. Numbers are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if _is_number(cell) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "").replace("%", "").strip().isdigit()


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def describe(plan: Plan, config: Config, *, price_per_hour: float | None = None) -> str:
    """Describe one run: memory of each device, time of a step, and time and cost of all steps."""
    device = plan.device.name if plan.device is not None else "a device without a datasheet"
    micro = f", {plan.num_micro_batches} micro-batches" if plan.num_micro_batches > 1 else ""
    context, sharing = "", "device"
    if plan.context > 1:
        context, sharing = f" x {plan.context}", f"{plan.context} devices that share its tokens"
    weights = "float32 master weights"
    if config.lora.rank:
        trained = f"a LoRA of rank {config.lora.rank} with {plan.num_trained_parameters:,}"
        weights = f"{trained} in float32 and frozen {config.quantize.base} weights"
    lines = [
        f"{model_name(config)}, {plan.num_parameters:,} parameters, "
        f"{config.training.mixed_precision_param} over {weights}, {config.optimizer.name}",
        f"{plan.mode} ({plan.replicate} x {plan.shard}{context}) on {plan.num_devices} x {device}, "
        f"batch {plan.batch_size} per {sharing}{micro}, checkpointing {plan.checkpointing}, "
        f"{'compiled' if plan.compiled else 'eager'}",
        "",
        f"memory of the fullest device at its peak, {plan.peak.label}:",
        *(f"  {size / GIB:10.3f} GiB  {part}" for part, size in plan.parts.items() if size),
        f"  {plan.peak_memory_gib:10.3f} GiB  peak{_verdict(plan)}",
        "  in full: "
        + ", ".join(f"{name} {size / GIB:.3f}" for name, size in plan.state.items())
        + f"; activations kept from forward to backward {plan.activations / GIB:.3f}",
    ]
    if plan.compiled:
        lines.append("  blocks are planned as eager; compiled ones need less")
    if config.ema.post_hoc_widths:
        lines += ["", _snapshots(plan, config)]
    if plan.time is not None:
        lines += [
            "",
            f"time of a step (estimated, not measured): {plan.time.total:.4f} s",
            f"  {plan.time.compute:10.4f} s  forward and backward",
            f"  {plan.time.update:10.4f} s  clipping, {config.optimizer.name}, EMA",
            f"  {plan.time.exposed:10.4f} s  collectives that are not hidden, of {plan.time.communication:.4f} s",
            f"  {number(plan.images_per_second, 1)} images/s, MFU {number(plan.mfu, 1)}%, "
            f"{plan.flops_per_image / 1e12:.3f} TFLOP per image",
            f"  {_whole_run(config.training.steps, plan.time.total, plan.num_devices, price_per_hour)}",
        ]
    return "\n".join(lines)


def model_name(config: Config) -> str:
    """`DiT-7B/2`, or `flux/FLUX.1-dev`."""
    model = config.model
    return f"{model.flavor}/{model.patch_size}" if model.name == "dit" else f"{model.name}/{model.flavor}"


def _whole_run(steps: int, seconds: float, num_devices: int, price_per_hour: float | None) -> str:
    hours = steps * seconds / 3600
    device_hours = num_devices * hours
    cost = "" if price_per_hour is None else f", which cost {price_per_hour * device_hours:,.2f}"
    return f"{steps:,} such steps: {hours:,.2f} hours, {device_hours:,.2f} device-hours{cost}"


def _snapshots(plan: Plan, config: Config) -> str:
    """Disk space of `ema.post_hoc_widths`."""
    number = num_snapshots(config.training.steps, config.ema.post_hoc_interval)
    size = FLOAT32 * plan.num_trained_parameters * len(config.ema.post_hoc_widths) / 1e9
    return f"disk: {number} snapshots of averages of {size:,.3f} GB, {number * size:,.3f} GB in all"


def _verdict(plan: Plan) -> str:
    if plan.device is None or plan.fits is None:
        return ""
    verdict = "fits" if plan.fits else "does not fit"
    return f" of {plan.device.memory_gib:g}: {verdict} ({USABLE_MEMORY:.0%} is usable)"


def assumptions() -> str:
    """Assumptions behind all estimated times."""
    return (
        f"assumed: products reach {step_time.PRODUCT_EFFICIENCY:.0%} of the peak, other operators "
        f"{step_time.MEMORY_EFFICIENCY:.0%} of the memory bandwidth, collectives "
        f"{step_time.LINK_EFFICIENCY:.0%} of the links; {step_time.LAUNCH_S * 1e6:g} us of host time per "
        "operator; a block hides the next gather and the last reduction; links and memory from datasheets; "
        "no waiting for data"
    )


def comparison(same_batch: Sequence[Plan], largest: Sequence[Plan]) -> str:
    """Table of parallel modes and checkpointing: memory at the configured batch, speed at the largest that fits."""
    rows = [
        [
            "parallel",
            "checkpointing",
            "state GiB",
            f"activations GiB at {same_batch[0].batch_size}",
            "peak GiB",
            "fits",
            "largest batch",
            "images/s there",
            "MFU %",
        ]
    ]
    for plan in largest:
        same = next(other for other in same_batch if _settings(other) == _settings(plan))
        rows.append(
            [
                f"{plan.mode} {plan.replicate},{plan.shard}",
                plan.checkpointing,
                number(sum(plan.state.values()) / GIB),
                number(same.activations / GIB),
                number(same.peak_memory_gib),
                "yes" if same.fits else "no",
                str(plan.batch_size) if plan.fits else "none",
                number(plan.images_per_second, 1) if plan.fits else "",
                number(plan.mfu, 1) if plan.fits else "",
            ]
        )
    return format_table(rows)


def _settings(plan: Plan) -> tuple[int, int, str]:
    return plan.replicate, plan.shard, plan.checkpointing


def recommendation(largest: Sequence[Plan]) -> str:
    """One line with the fastest setting that fits."""
    best = largest[0]
    if not best.fits:
        return "recommended: none of these fits, even with one image; use more devices, or devices with more memory"
    mode = best.checkpointing.split()
    flags = [
        f"--training.data_parallel_replicate_degree {best.replicate}",
        f"--training.data_parallel_shard_degree {best.shard}",
        f"--training.batch_size {best.batch_size}",
        f"--activation_checkpoint.mode {mode[0]}",
        *(f"--activation_checkpoint.selective_ac_option {option}" for option in mode[1:]),
        *([f"--training.context_parallel_degree {best.context}"] if best.context > 1 else []),
    ]
    return f"recommended, the fastest that fits: {' '.join(flags)}"


def other_global_batch(other: Plan, best: Plan) -> str:
    """One line with the speed of `other`, the fastest plan if the job could have any global batch size."""
    settings = f"{other.mode} {other.replicate},{other.shard}, checkpointing {other.checkpointing}"
    instead = f" instead of {number(best.images_per_second, 1)}" if best.fits else ""
    return (
        f"another global batch, {other.global_batch_size} with --training.batch_size {other.batch_size} ({settings}), "
        f"would give {number(other.images_per_second, 1)} images/s{instead}"
    )


def cost(plan: Plan) -> float:
    """Device-hours per million images."""
    assert plan.images_per_second is not None
    return plan.num_devices * 1e6 / plan.images_per_second / 3600


def scaling(plans: Sequence[Plan]) -> str:
    """Table for the same batch per device on increasing numbers of devices."""
    rows = [
        ["devices", "parallel", "peak GiB", "fits", "step s", "images/s", "MFU %", "device-hours per million images"]
    ]
    for plan in plans:
        rows.append(
            [
                f"{plan.num_devices:,}",
                f"{plan.mode} {plan.replicate},{plan.shard}",
                number(plan.peak_memory_gib),
                "yes" if plan.fits else "no",
                number(plan.step_time_s, 3),
                number(plan.images_per_second, 0),
                number(plan.mfu, 1),
                number(cost(plan)),
            ]
        )
    return format_table(rows)


_WIDTH, _HEIGHT = 760, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 24, 66, 56
_COLOURS = {"FSDP": "#2563a8", "HSDP": "#c2591a", "DDP": "#3c7d3c", "one process": "#444444"}


def scaling_svg(plans: Sequence[Plan], title: str) -> str:
    """Plot of device-hours per million images over the number of devices, one line per parallel mode.

    Hollow points do not fit.
    """
    counts = sorted({plan.num_devices for plan in plans})
    top = _round_up(1.05 * max(cost(plan) for plan in plans))
    first, span = math.log2(counts[0]), max(1.0, math.log2(counts[-1] / counts[0]))

    def x(num_devices: int) -> float:
        return _LEFT + (math.log2(num_devices) - first) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for step in range(6):
        value = top * step / 5
        shapes.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>'
            f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    shapes += [f'<text x="{x(n):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{n:,}</text>' for n in counts]
    shapes.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">devices</text>'
        f'<text x="16" y="{(_TOP + _HEIGHT - _BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(_TOP + _HEIGHT - _BOTTOM) / 2})">device-hours per million images</text>'
    )
    modes = list(dict.fromkeys(plan.mode for plan in plans))
    for i, mode in enumerate(modes):
        colour = _COLOURS[mode]
        points = [(x(plan.num_devices), y(cost(plan)), plan) for plan in plans if plan.mode == mode]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for px, py, plan in points:
            fill = colour if plan.fits else "white"
            words = f"{mode} on {plan.num_devices:,}: {cost(plan):.2f} device-hours, {plan.peak_memory_gib:.1f} GiB"
            shapes.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.5" fill="{fill}" stroke="{colour}" stroke-width="2">'
                f"<title>{escape(words)}</title></circle>"
            )
        key = _LEFT + 90 * i
        shapes.append(
            f'<line x1="{key}" x2="{key + 22}" y1="46" y2="46" stroke="{colour}" stroke-width="3"/>'
            f'<text x="{key + 28}" y="50">{mode}</text>'
        )
    shapes.append(
        f'<text x="{_WIDTH - _RIGHT}" y="50" text-anchor="end" fill="#555555">estimated; hollow: does not fit</text>'
    )
    return "\n".join([*shapes, "</svg>"]) + "\n"


def _round_up(value: float) -> float:
    """The next larger of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= value)
