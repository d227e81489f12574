# Copyright (c) the TorchDiTan authors. BSD 3-Clause, see LICENSE.
"""Plans as text."""

from __future__ import annotations

from collections.abc import Sequence

from torchditan.config.options import Config
from torchditan.extras.planner.alternatives import Alternative
from torchditan.extras.planner.plan import GIB, USABLE_MEMORY, Plan
from torchditan.extras.planner.step_bound import model_peak
from torchditan.job.targets import describe_frozen, describe_targets
from torchditan.registry import FAMILIES

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


def describe(plan: Plan) -> str:
    """Describe one run: memory of each device, and the lower bound of its time."""
    config = plan.config
    device = plan.device.name if plan.device is not None else "a device without a datasheet"
    micro = f", {plan.num_micro_batches} micro-batches" if plan.num_micro_batches > 1 else ""
    context, sharing = "", "device"
    if plan.dims.context > 1:
        context, sharing = f" x {plan.dims.context}", f"{plan.dims.context} devices that share its tokens"
    weights = "float32 master weights"
    if config.lora.rank:
        trained = f"a LoRA of rank {config.lora.rank} with {plan.num_trained_parameters:,}"
        weights = f"{trained} in float32 and frozen {config.quantize.base} weights"
    lines = [
        f"{model_name(config)}, {plan.num_parameters:,} parameters, "
        f"{config.training.mixed_precision_param} over {weights}, {config.optimizer.name}",
        f"{plan.mode} ({plan.dims.replicate} x {plan.dims.shard}{context}) on {plan.num_devices} x {device}, "
        f"batch {plan.batch_size} per {sharing}{micro}, checkpointing {plan.checkpointing}, "
        f"{'compiled' if config.training.compile else 'eager'}",
        "",
        f"memory of the fullest device at its peak, {plan.peak.label}:",
        *(f"  {size / GIB:10.3f} GiB  {part}" for part, size in plan.parts.items() if size),
        f"  {plan.peak_memory_gib:10.3f} GiB  peak{_verdict(plan)}",
        "  in full: "
        + ", ".join(f"{name} {size / GIB:.3f}" for name, size in plan.state.items())
        + f"; activations kept from forward to backward {plan.activations / GIB:.3f}",
    ]
    costs, encoder = [], plan.model.encoder
    if encoder is not None:
        size = encoder.network.num_parameters
        costs.append(describe_frozen(config.autoencoder.name, size, encoder.flops, plan.model.flops_per_image))
    if plan.model.objective.targets:
        costs += describe_targets(plan.model.objective, flops_per_image=plan.model.flops_per_image)
    lines += [f"  {line}" for line in costs]
    if config.training.compile:
        lines.append("  blocks are planned as eager; compiled ones need less")
    return "\n".join([*lines, *_bound(plan)])


def _bound(plan: Plan) -> list[str]:
    if plan.bound is None or plan.device is None:
        return []
    config, device = plan.config, plan.device
    state = "offloaded, not counted"
    if not config.training.enable_cpu_offload:
        gib = sum(plan.state.values()) / GIB
        state = f"{gib:.2f} GiB read and written once, at {device.memory_gb_per_s:,g} GB/s"
    products = f"{plan.model_flops / 1e12:,.4g} TFLOP at the peak, {model_peak(config, device) / 1e12:,.0f} TFLOP/s"
    if plan.optimizer_flops:
        products += f", and {plan.optimizer_flops / 1e12:,.4g} of {config.optimizer.name}"
    hours = config.training.steps * plan.bound.seconds / 3600
    return [
        "",
        f"time of a step: at least {1e3 * plan.bound.seconds:.4g} ms (a lower bound, not a prediction)",
        f"  {1e3 * plan.bound.products:10.3f} ms  matrix products: {products}",
        f"  {1e3 * plan.bound.state:10.3f} ms  model state: {state}",
        f"  {config.training.steps:,} steps: at least {hours:,.2f} hours",
    ]


def model_name(config: Config) -> str:
    """`DiT-7B/2`, `ddt DiT-XL/2`, or `flux/FLUX.1-dev`."""
    model = config.model
    if model.name in FAMILIES:
        return f"{model.name}/{model.flavor}"
    return " ".join([*([] if model.name == "dit" else [model.name]), f"{model.flavor}/{model.patch_size}"])


def _verdict(plan: Plan) -> str:
    if plan.device is None or plan.fits is None:
        return ""
    verdict = "fits" if plan.fits else "does not fit"
    return f" of {plan.device.memory_gib:g}: {verdict} ({USABLE_MEMORY:.0%} is usable)"


def comparison(found: Sequence[Alternative]) -> str:
    """Table of parallel modes and checkpointing: memory at the job's batch, the bound at the largest that fits."""
    batch_size = found[0].configured.batch_size
    rows = [
        [
            "parallel",
            "checkpointing",
            "state GiB",
            f"activations GiB at {batch_size}",
            f"peak GiB at {batch_size}",
            "fits",
            "largest batch",
            "ms/image there, at least",
        ]
    ]
    for configured, largest in found:
        rows.append(
            [
                _mode(configured),
                configured.checkpointing,
                f"{sum(configured.state.values()) / GIB:,.2f}",
                f"{configured.activations / GIB:,.2f}",
                f"{configured.peak_memory_gib:,.2f}",
                "yes" if configured.fits else "no",
                str(largest.batch_size) if largest.fits else "none",
                milliseconds_per_image(largest) if largest.fits else "",
            ]
        )
    return format_table(rows)


def _mode(plan: Plan) -> str:
    return f"{plan.mode} {plan.dims.replicate},{plan.dims.shard}"


def milliseconds_per_image(plan: Plan) -> str:
    assert plan.min_seconds_per_image is not None
    return f"{float(f'{1e3 * plan.min_seconds_per_image:.3g}'):,g}"


def recommendation(best: Plan) -> str:
    """One line with the flags of the best plan."""
    if not best.fits:
        return "recommended: none of these fits, even with one image; use more devices, or devices with more memory"
    mode = best.checkpointing.split()
    flags = [
        f"--training.data_parallel_replicate_degree {best.dims.replicate}",
        f"--training.data_parallel_shard_degree {best.dims.shard}",
        f"--training.batch_size {best.batch_size}",
        f"--activation_checkpoint.mode {mode[0]}",
        *(f"--activation_checkpoint.selective_ac_option {option}" for option in mode[1:]),
        *([f"--training.context_parallel_degree {best.dims.context}"] if best.dims.context > 1 else []),
    ]
    return f"recommended, fits with the lowest bound: {' '.join(flags)}"


def other_global_batch(other: Plan, best: Plan) -> str:
    """One line with the bound of `other`, the best plan if the job could have any global batch size."""
    instead = f" instead of {milliseconds_per_image(best)}" if best.fits else ""
    return (
        f"another global batch, {other.global_batch_size} with --training.batch_size {other.batch_size} "
        f"({_mode(other)}, checkpointing {other.checkpointing}), would take at least "
        f"{milliseconds_per_image(other)} ms per image{instead}"
    )


NOTE = (
    "The lower bound assumes the peak and the bandwidth of the datasheet. It leaves out activations, recomputation, "
    "frozen networks, collectives, launches and waiting for data, so a real step takes longer. Bounds within 5% of the "
    "lowest count as equal: the first of them recomputes and communicates least."
)
