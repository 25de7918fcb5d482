"""Summaries and Markdown tables of a benchmark's steps."""

import contextlib
import os
import platform
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

PACKAGES = (
    "torch", "torchtune", "torchao", "transformers", "accelerate", "peft", "trl", "torchtune-update-step",
)  # fmt: skip


@dataclass(frozen=True)
class TimedStep:
    """Optimizer step of one baseline. Counts are over all ranks."""

    round: int
    """Number of the round, from 1."""
    step: int
    """Number of the update step, from 1."""
    baseline: str
    seconds: float
    num_target_tokens: int
    num_real_tokens: int
    num_positions: int
    fingerprint: int
    """Fingerprint of the tokens that the model computed."""
    expected_fingerprint: int
    """Fingerprint of the samples."""
    peak_memory_bytes: int
    """Peak so far, maximum over ranks."""


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
    ratio_per_round: list[float]
    """Median ratio of each round."""
    extra_seconds: Quartiles
    """Seconds of an update step minus the reference's."""
    real_tokens_per_second: float
    """Median."""
    positions_per_target: float
    padding_fraction: float
    peak_memory_bytes: int
    """Median over the rounds."""
    memory_ratio: float
    """Peak memory divided by the reference's."""
    loss_deviation: float | None
    """Largest relative difference to the reference's loss; None if losses do not compare."""
    has_same_samples: bool
    """True if the tokens of every update step are the reference's."""
    has_same_model: bool = True


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
) -> list[Summary]:
    """Compares baselines that made a step with the reference, in the order of ``losses``.

    Args:
        steps: timed steps of all baselines and rounds.
        losses: baseline -> round -> losses of all update steps [nats per target token].
        reference: denominator of ratios.
        other_models: baselines with another model.
    """
    of_reference = {(each.round, each.step): each for each in steps if each.baseline == reference}
    reference_memory = _peak_memory(list(of_reference.values()))
    summaries = []
    for name in losses:
        own = [each for each in steps if each.baseline == name]
        pairs = [
            (each, of_reference[each.round, each.step])
            for each in own
            if (each.round, each.step) in of_reference
        ]
        if not pairs:
            continue
        ratios: dict[int, list[float]] = {}
        for each, other in pairs:
            ratios.setdefault(each.round, []).append(_rate(each) / _rate(other))
        num_positions = max(sum(each.num_positions for each in own), 1)
        num_targets = max(sum(each.num_target_tokens for each in own), 1)
        num_real = sum(each.num_real_tokens for each in own)
        has_same_model = name not in other_models
        has_same_samples = all(
            each.fingerprint == other.fingerprint
            and each.num_target_tokens == other.num_target_tokens
            for each, other in pairs
        )
        summaries.append(
            Summary(
                baseline=name,
                num_steps=len(own),
                target_tokens_per_second=quartiles([_rate(each) for each in own]),
                ratio=quartiles([ratio for of_round in ratios.values() for ratio in of_round]),
                ratio_per_round=[statistics.median(ratios[number]) for number in sorted(ratios)],
                extra_seconds=quartiles([each.seconds - other.seconds for each, other in pairs]),
                real_tokens_per_second=statistics.median(
                    each.num_real_tokens / each.seconds for each in own
                ),
                positions_per_target=num_positions / num_targets,
                padding_fraction=1 - num_real / num_positions,
                peak_memory_bytes=_peak_memory(own),
                memory_ratio=_peak_memory(own) / reference_memory,
                loss_deviation=(
                    _loss_deviation(losses[name], losses[reference])
                    if has_same_samples and has_same_model
                    else None
                ),
                has_same_samples=has_same_samples,
                has_same_model=has_same_model,
            )
        )
    return summaries


def throughput_table(
    summaries: Sequence[Summary], reference: str, missing: Mapping[str, str]
) -> str:
    """Returns the main table in Markdown. ``missing``: baseline without figures -> reason."""
    columns = (
        "baseline", "target tokens/s (quartiles)", f"over {reference} (quartiles)", "per round",
        f"seconds per update step more than {reference} (quartiles)", "real tokens/s", "positions per target",
        "padding", f"peak memory GB (over {reference})", "loss deviation",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for each in summaries:
        rate, ratio, extra = each.target_tokens_per_second, each.ratio, each.extra_seconds
        deviation = "other samples" if each.has_same_model else "another model"
        if each.loss_deviation is not None:
            deviation = f"{each.loss_deviation:.1e}" if each.baseline != reference else "0"
        lines.append(
            f"| {each.baseline} | **{rate.median:.0f}** ({rate.lower:.0f}-{rate.upper:.0f}) | "
            f"**{ratio.median:.2f}** ({ratio.lower:.2f}-{ratio.upper:.2f}) | "
            f"{' '.join(f'{value:.2f}' for value in each.ratio_per_round)} | "
            f"{extra.median:.3f} ({extra.lower:.3f} to {extra.upper:.3f}) | "
            f"{each.real_tokens_per_second:.0f} | {each.positions_per_target:.2f} | "
            f"{each.padding_fraction:.0%} | "
            f"{each.peak_memory_bytes / 1e9:.2f} ({each.memory_ratio:.2f}) | {deviation} |"
        )
    empty = "| " * (len(columns) - 2) + "|"
    return "\n".join([*lines, *(f"| {name} | {why} {empty}" for name, why in missing.items())])


def samples_sentence(steps: Sequence[TimedStep], summaries: Sequence[Summary]) -> str:
    """Returns sentences about baselines that trained on other tokens."""
    others = [each.baseline for each in summaries if not each.has_same_samples]
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
    """Returns the versions of Python and of installed :data:`PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _rate(step: TimedStep) -> float:
    return step.num_target_tokens / step.seconds


def _peak_memory(steps: Sequence[TimedStep]) -> int:
    peaks: dict[int, int] = {}
    for each in steps:
        peaks[each.round] = max(each.peak_memory_bytes, peaks.get(each.round, 0))
    return int(statistics.median(peaks.values()))


def _loss_deviation(
    losses: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> float | None:
    deviations = [
        abs(loss - other) / abs(other)
        for own_round, reference_round in zip(losses, reference, strict=False)
        for loss, other in zip(own_round, reference_round, strict=False)
    ]
    if any(deviation != deviation for deviation in deviations):
        return float("nan")
    return max(deviations, default=None)
