"""From what the benchmark recorded to a table, a JSON file and a chart. Nothing here measures."""

import importlib.util
import json
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class TimedStep:
    """One optimizer step of one peer."""

    round: int
    """From 1; every round starts all peers anew."""
    step: int
    """Update step, from 1; the warm-up steps are not among these."""
    peer: str
    seconds: float
    num_target_tokens: int
    """Over all ranks, as the numbers below."""
    num_real_tokens: int
    num_slots: int
    fingerprint: int
    """Of the tokens that went into the model."""
    expected_fingerprint: int
    """Of the tokens of the update step's samples."""
    peak_memory_bytes: int
    """So far, of the largest rank."""
    idle_cpu_seconds: float
    """CPU time that the peer took before this step, while other peers were timed."""
    useful_flops: float | None = None
    """That its samples need; None where that was not counted."""


class Quartiles(NamedTuple):
    """Lower quartile, median and upper quartile."""

    lower: float
    median: float
    upper: float


@dataclass(frozen=True)
class PeerSummary:
    """A peer's row of the table."""

    peer: str
    num_steps: int
    target_tokens_per_second: Quartiles
    ratio: Quartiles
    """Target tokens per second over the baseline's in the same round and update step."""
    ratio_per_round: list[float]
    """Medians."""
    extra_seconds: Quartiles
    """Seconds of an update step, less the baseline's in the same round and update step."""
    real_tokens_per_second: float
    """Median."""
    slots_per_target: float
    padding_fraction: float
    """Padding slots / slots."""
    peak_memory_bytes: int
    """Median over the rounds."""
    memory_ratio: float
    """Peak memory over the baseline's."""
    loss_deviation: float | None
    """Largest |loss - baseline's| / |baseline's| over the update steps; None where the samples of the
    update steps or the model are other ones, or no loss was logged."""
    has_samples_of_baseline: bool
    """Whether the same tokens went into its model in every update step as into the baseline's."""
    has_model_of_baseline: bool = True
    share_of_peak: float | None = None
    """Median of useful floating-point operations per second over those of the fastest matrix product."""


def quartiles(values: Sequence[float]) -> Quartiles:
    """Quartiles of at least one value, interpolated between the values themselves."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def summarize(
    steps: Sequence[TimedStep],
    losses: Mapping[str, Sequence[Sequence[float]]],
    baseline: str,
    other_models: Collection[str] = (),
    peak_tflops: float | None = None,
) -> list[PeerSummary]:
    """Compares each peer with the baseline, step by step.

    Args:
        steps: of all peers and rounds; those of the baseline among them.
        losses: of each peer and round, per update step from the first [nats per target token].
        baseline: name of the peer that ratios are taken over.
        other_models: names of peers that train another model than the baseline.
        peak_tflops: of the fastest matrix product on all ranks; None if none was measured.

    Returns:
        A summary of each peer that made a step, in the order of ``losses``.
    """
    baseline_steps = {(each.round, each.step): each for each in steps if each.peer == baseline}
    baseline_memory = _peak_memory(list(baseline_steps.values()))
    summaries = []
    for peer in losses:
        own = [each for each in steps if each.peer == peer]
        pairs = [
            (each, baseline_steps[each.round, each.step])
            for each in own
            if (each.round, each.step) in baseline_steps
        ]
        if not pairs:
            continue
        ratios = [_rate(each) / _rate(other) for each, other in pairs]
        rounds = sorted({each.round for each, _ in pairs})
        num_slots = sum(each.num_slots for each in own)
        num_targets = sum(each.num_target_tokens for each in own)
        has_samples_of_baseline = all(
            each.fingerprint == other.fingerprint
            and each.num_target_tokens == other.num_target_tokens
            for each, other in pairs
        )
        summaries.append(
            PeerSummary(
                peer=peer,
                num_steps=len(own),
                target_tokens_per_second=quartiles([_rate(each) for each in own]),
                ratio=quartiles(ratios),
                ratio_per_round=[
                    statistics.median(
                        ratio
                        for ratio, (each, _) in zip(ratios, pairs, strict=True)
                        if each.round == number
                    )
                    for number in rounds
                ],
                extra_seconds=quartiles([each.seconds - other.seconds for each, other in pairs]),
                real_tokens_per_second=statistics.median(
                    each.num_real_tokens / each.seconds for each in own
                ),
                slots_per_target=num_slots / max(num_targets, 1),
                padding_fraction=1 - sum(each.num_real_tokens for each in own) / max(num_slots, 1),
                peak_memory_bytes=_peak_memory(own),
                memory_ratio=_peak_memory(own) / baseline_memory,
                loss_deviation=(
                    _loss_deviation(losses[peer], losses[baseline])
                    if has_samples_of_baseline and peer not in other_models
                    else None
                ),
                has_samples_of_baseline=has_samples_of_baseline,
                has_model_of_baseline=peer not in other_models,
                share_of_peak=_share_of_peak(own, peak_tflops),
            )
        )
    return summaries


def throughput_table(
    summaries: Sequence[PeerSummary], baseline: str, missing: Mapping[str, str]
) -> str:
    """The main table, in Markdown.

    Args:
        summaries: of the peers that ran.
        baseline: name of the peer that ratios are taken over.
        missing: why each other peer has no numbers.
    """
    lines = [
        f"| peer | target tokens/s (quartiles) | over {baseline} (quartiles) | per round "
        f"| seconds per update step more than {baseline} (quartiles) | real tokens/s "
        f"| slots per target | padding | useful work over the matrix peak | peak memory GB (over {baseline}) | loss deviation |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in summaries:
        rate, ratio, extra = each.target_tokens_per_second, each.ratio, each.extra_seconds
        deviation = "other samples" if each.has_model_of_baseline else "another model"
        if each.loss_deviation is not None:
            deviation = f"{each.loss_deviation:.1e}" if each.peer != baseline else "0"
        lines.append(
            f"| {each.peer} | **{rate.median:.0f}** ({rate.lower:.0f}-{rate.upper:.0f}) "
            f"| **{ratio.median:.2f}** ({ratio.lower:.2f}-{ratio.upper:.2f}) "
            f"| {' '.join(f'{value:.2f}' for value in each.ratio_per_round)} "
            f"| {extra.median:.3f} ({extra.lower:.3f} to {extra.upper:.3f}) "
            f"| {each.real_tokens_per_second:.0f} | {each.slots_per_target:.2f} "
            f"| {each.padding_fraction:.0%} "
            f"| {'' if each.share_of_peak is None else f'{each.share_of_peak:.2f}'} "
            f"| {each.peak_memory_bytes / 1e9:.2f} ({each.memory_ratio:.2f}) | {deviation} |"
        )
    lines += [f"| {peer} | {why} | | | | | | | | | |" for peer, why in missing.items()]
    return "\n".join(lines)


def peak_sentence(peak_tflops: float | None) -> str:
    """What useful work is, if it was measured what it is a share of."""
    if peak_tflops is None:
        return ""
    return (
        "Useful work is what the samples need of the model, forward and backward: products of real tokens with "
        "weights, of target tokens with the output layer, causal attention within documents. The matrix peak, "
        f"{peak_tflops * 1e3:.4g} GFLOP/s, is the fastest product of the sizes of the model, measured in this run "
        "with the same dtype, threads and processes."
    )


def loss_table(losses: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Losses of the first round side by side, in Markdown.

    Args:
        losses: of each peer and round, per update step from the first [nats per target token].
    """
    first = {peer: rounds[0] for peer, rounds in losses.items() if rounds and rounds[0]}
    lines = [f"| update step | {' | '.join(first)} |", "| --- |" + " --- |" * len(first)]
    for step in range(max((len(each) for each in first.values()), default=0)):
        cells = [f"{each[step]:.5f}" if step < len(each) else "" for each in first.values()]
        lines.append(f"| {step + 1} | {' | '.join(cells)} |")
    return "\n".join(lines)


def exactness_table(errors: Mapping[str, Mapping[str, float | None] | str]) -> str:
    """Gradient errors of each peer and case, in Markdown.

    Args:
        errors: of each peer: max|g - reference| / max|reference| of each case, None for an update
            step that it never makes; or why there are none.
    """
    cases = next((list(each) for each in errors.values() if not isinstance(each, str)), [])
    lines = [f"| peer | {' | '.join(cases)} |", "| --- |" + " --- |" * len(cases)]
    for peer, per_case in errors.items():
        if isinstance(per_case, str):
            cells = [per_case, *[""] * (len(cases) - 1)]
        else:
            cells = ["left out" if e is None else f"{e:.1e}" for e in per_case.values()]
        lines.append(f"| {peer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def samples_sentence(steps: Sequence[TimedStep], summaries: Sequence[PeerSummary]) -> str:
    """Says which peers computed the same update steps, by the tokens that went into their models."""
    others = [each.peer for each in summaries if not each.has_samples_of_baseline]
    unexpected = sorted({s.peer for s in steps if s.fingerprint != s.expected_fingerprint})
    text = "Every update step held the same tokens in every peer."
    if others:
        text = (
            f"Other samples per update step than the baseline: {', '.join(others)}; tokens per second "
            "still compare, losses do not. The other peers' update steps held the same tokens."
        )
    if unexpected:
        text += (
            " Not the samples that the data order gives, so that the number of target tokens is not "
            f"theirs: {', '.join(unexpected)}."
        )
    return text


def idle_sentence(steps: Sequence[TimedStep], num_peers: int) -> str:
    """Says how much CPU time waiting peers took from the timed one, in the mean.

    Args:
        steps: of all peers and rounds.
        num_peers: that were alive at once.
    """
    idle = statistics.fmean(each.idle_cpu_seconds for each in steps)
    timed = statistics.fmean(each.seconds for each in steps)
    # A peer waits while each of the others takes a turn.
    share = idle / (timed * max(num_peers - 1, 1))
    return f"A waiting peer kept {share:.2%} of one CPU busy in the mean."


def write_json(path: Path, contents: Mapping[str, Any], steps: Sequence[TimedStep]) -> None:
    """Writes all raw numbers.

    Args:
        path: of the file.
        contents: anything that JSON can hold, or dataclasses.
        steps: of all peers and rounds.
    """
    text = json.dumps(
        {**contents, "steps": [asdict(each) for each in steps]}, indent=1, default=_as_plain
    )
    path.write_text(text + "\n")


def write_chart(
    path: Path, summaries: Sequence[PeerSummary], baseline: str, limit: str | None, note: str
) -> str | None:
    """Draws the ratios as horizontal bars with their quartiles.

    Args:
        path: of the PNG file.
        summaries: of the peers that ran.
        baseline: name of the peer that ratios are taken over.
        limit: name of the peer whose ratio is drawn as a line that the others run up to, if any.
        note: small print below.

    Returns:
        Why there is no chart; None if there is one.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (pip install matplotlib)"
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [each for each in reversed(summaries) if each.peer != limit]
    limits = [each for each in summaries if each.peer == limit]
    medians = [each.ratio.median for each in bars]
    whiskers = [
        [each.ratio.median - each.ratio.lower for each in bars],
        [each.ratio.upper - each.ratio.median for each in bars],
    ]
    ends = [each.ratio.upper for each in [*bars, *limits]]
    figure, axes = pyplot.subplots(figsize=(8, 1.3 + 0.45 * len(bars)), layout="constrained")
    axes.barh(
        [each.peer for each in bars],
        medians,
        xerr=whiskers,
        color=["#9aa5b1" if each.peer == baseline else "#2b6cb0" for each in bars],
        error_kw={"ecolor": "#1a202c", "capsize": 3, "elinewidth": 1},
        height=0.62,
    )
    for row, each in enumerate(bars):
        axes.annotate(
            f"{each.ratio.median:.2f}", (each.ratio.upper, row), (6, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    for each in limits:
        axes.axvspan(each.ratio.lower, each.ratio.upper, color="#c05621", alpha=0.12, linewidth=0)
        axes.axvline(each.ratio.median, color="#c05621", linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{each.peer} {each.ratio.median:.2f}", (each.ratio.median, 1), (0, 3),
            xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="center", color="#c05621", fontsize=9,
        )  # fmt: skip
    axes.set_xlim(0, max(ends) * 1.1)
    axes.set_xlabel(f"target tokens per second over {baseline} (median and quartiles)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.supxlabel(note, fontsize=7, color="#4a5568")
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
    return None


def _rate(step: TimedStep) -> float:
    return step.num_target_tokens / step.seconds


def _share_of_peak(steps: Sequence[TimedStep], peak_tflops: float | None) -> float | None:
    if peak_tflops is None or any(each.useful_flops is None for each in steps):
        return None
    rates = [(each.useful_flops or 0) / each.seconds / 1e12 for each in steps]
    return statistics.median(rates) / peak_tflops


def _peak_memory(steps: Sequence[TimedStep]) -> int:
    peaks: dict[int, int] = {}
    for each in steps:
        peaks[each.round] = max(each.peak_memory_bytes, peaks.get(each.round, 0))
    return int(statistics.median(peaks.values()))


def _loss_deviation(
    losses: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]
) -> float | None:
    deviations = [
        abs(loss - other) / abs(other)
        for own_round, baseline_round in zip(losses, baseline, strict=False)
        for loss, other in zip(own_round, baseline_round, strict=False)
    ]
    if any(deviation != deviation for deviation in deviations):
        return float("nan")
    return max(deviations, default=None)


def _as_plain(value: Any) -> Any:
    return asdict(value)
