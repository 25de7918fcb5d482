"""Summary and Markdown table of a benchmark's steps."""

import contextlib
import math
import os
import platform
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class TimedStep:
    """Optimizer step of one baseline. Counts are over all ranks, fingerprints of tokens."""

    round: int
    step: int
    baseline: str
    seconds: float
    num_target_tokens: int
    num_real_tokens: int
    num_positions: int
    fingerprint: int
    expected_fingerprint: int
    peak_memory_bytes: int
    """Peak so far, maximum over ranks."""
    num_flops: int = 0
    """FLOPs without those of padding; 0 if not countable."""

    @property
    def rate(self) -> float:
        """Target tokens per second."""
        return self.num_target_tokens / self.seconds


class Quartiles(NamedTuple):
    """Lower quartile, median and upper quartile."""

    lower: float
    median: float
    upper: float


@dataclass(frozen=True)
class Summary:
    """Row of the table: a baseline and the reference, paired by round and update step."""

    baseline: str
    num_steps: int
    target_tokens_per_second: Quartiles
    ratio: Quartiles
    """Target tokens per second divided by the reference's."""
    positions_per_target: float
    padding_fraction: float
    peak_memory_bytes: int
    """Median over the rounds."""
    memory_ratio: float
    share_of_product: float | None
    """FLOPs per second, without those of padding, over those of a large matrix product; None if not countable."""
    loss_deviation: float | None
    """Largest relative difference to the reference's loss; None if losses do not compare."""
    has_same_samples: bool
    """True if the tokens of every update step are the reference's."""


def quartiles(values: Sequence[float]) -> Quartiles:
    """Returns the interpolated quartiles of at least one value."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def summarize(
    steps: Sequence[TimedStep],
    losses: Mapping[str, Sequence[Sequence[float]]],
    reference: str,
    other_models: Collection[str] = (),
    product_flops_per_second: float = math.nan,
) -> list[Summary]:
    """Compares baselines that made a step with the reference, in the order of ``losses``.

    ``losses``: baseline -> round -> losses of all update steps [nats per target token];
    ``other_models``: baselines with another model, whose losses do not compare.
    """
    references = {(step.round, step.step): step for step in steps if step.baseline == reference}
    reference_memory = _peak_memory(list(references.values()))
    summaries = []
    for name in losses:
        timed = [step for step in steps if step.baseline == name]
        if not timed:
            continue
        # Paired with the reference's step of the same round and samples, minutes apart at most.
        pairs = [(step, references[step.round, step.step]) for step in timed]
        num_positions = sum(step.num_positions for step in timed)
        flops = [step.num_flops / step.seconds for step in timed if step.num_flops]
        contents = [[(s.fingerprint, s.num_target_tokens) for s in column] for column in zip(*pairs, strict=True)]
        has_same_samples = contents[0] == contents[1]
        compares = has_same_samples and name not in other_models
        summaries.append(
            Summary(
                baseline=name,
                num_steps=len(timed),
                target_tokens_per_second=quartiles([step.rate for step in timed]),
                ratio=quartiles([step.rate / other.rate for step, other in pairs]),
                positions_per_target=num_positions / sum(step.num_target_tokens for step in timed),
                padding_fraction=1 - sum(step.num_real_tokens for step in timed) / num_positions,
                peak_memory_bytes=_peak_memory(timed),
                memory_ratio=_peak_memory(timed) / reference_memory,
                share_of_product=statistics.median(flops) / product_flops_per_second if flops else None,
                loss_deviation=_deviation(losses[name], losses[reference]) if compares else None,
                has_same_samples=has_same_samples,
            )
        )
    return summaries


def throughput_table(summaries: Sequence[Summary], reference: str, missing: Mapping[str, str]) -> str:
    """Returns the main table in Markdown. ``missing``: baseline without figures -> reason."""
    columns = (
        "baseline", "target tokens/s (quartiles)", f"over {reference} (quartiles)", "positions per target", "padding",
        f"peak memory GB (over {reference})", "share of the product", "loss deviation",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    # The reference deviates by nothing from itself; other models and samples have no deviation.
    for row in summaries:
        rate, ratio = row.target_tokens_per_second, row.ratio
        deviation = "another model" if row.has_same_samples else "other samples"
        if row.loss_deviation is not None:
            deviation = f"{row.loss_deviation:.1e}" if row.baseline != reference else "0"
        share = "" if row.share_of_product is None else f"{row.share_of_product:.0%}"
        lines.append(
            f"| {row.baseline} | **{rate.median:.0f}** ({rate.lower:.0f}-{rate.upper:.0f}) | "
            f"**{ratio.median:.2f}** ({ratio.lower:.2f}-{ratio.upper:.2f}) | "
            f"{row.positions_per_target:.2f} | {row.padding_fraction:.0%} | "
            f"{row.peak_memory_bytes / 1e9:.2f} ({row.memory_ratio:.2f}) | {share} | {deviation} |"
        )
    empty = "| " * (len(columns) - 2) + "|"
    return "\n".join([*lines, *(f"| {name} | {why} {empty}" for name, why in missing.items())])


def samples_sentence(steps: Sequence[TimedStep], summaries: Sequence[Summary]) -> str:
    """Returns sentences about baselines that trained on other tokens."""
    others = [row.baseline for row in summaries if not row.has_same_samples]
    unexpected = {s.baseline for s in steps if s.fingerprint != s.expected_fingerprint}
    text = "Every update step had the same tokens in every baseline."
    if others:
        text = (
            f"Other samples per update step than the reference: {', '.join(others)}; tokens per second still "
            "compare, losses do not. The update steps of all others had the same tokens."
        )
    if unexpected:
        names = ", ".join(sorted(unexpected))
        text += f" Other samples than the data order's, so target tokens are miscounted: {names}."
    return text


def machine_name(device: torch.device) -> str:
    """Returns the name of the GPU, or the number and name of the CPUs."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{os.cpu_count()} x {name}"


def versions() -> dict[str, str]:
    """Returns the versions of Python and of installed packages."""
    installed = {"python": platform.python_version()}
    for package in ["torch", "torchtune", "torchao", "transformers", "accelerate", "trl", "torchtune-update-step"]:
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def _peak_memory(steps: Sequence[TimedStep]) -> int:
    peaks: dict[int, int] = {}
    for step in steps:
        peaks[step.round] = max(step.peak_memory_bytes, peaks.get(step.round, 0))
    return int(statistics.median(peaks.values()))


def _deviation(losses: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float | None:
    deviations = [
        abs(loss - other) / abs(other)
        for losses_of_round, others in zip(losses, reference, strict=False)
        for loss, other in zip(losses_of_round, others, strict=False)
    ]
    return float("nan") if any(map(math.isnan, deviations)) else max(deviations, default=None)
