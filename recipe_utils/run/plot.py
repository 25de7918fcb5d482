"""Plots metrics of one or several trainings.

python -m recipe_utils.run.plot OUTPUT_DIR [OUTPUT_DIR ...] [--out metrics.png]

Draws loss, val_loss, k-NN accuracy, learning rate, gradient norm, throughput and padding of
``logs/metrics.jsonl`` over update steps; losses also over target tokens.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipe_utils.run.log import METRICS_FILE, read_metrics

PANELS = (
    ("loss", "num_tokens_seen", "loss [nats]"),
    ("loss", "step", "loss [nats]"),
    ("val_loss", "num_tokens_seen", "val_loss [nats]"),
    ("val_loss", "step", "val_loss [nats]"),
    ("knn_accuracy", "step", "k-NN accuracy"),
    ("lr", "step", "learning rate"),
    ("grad_norm", "step", "gradient norm"),
    ("tokens_per_second_per_gpu", "step", "target tokens / s / rank"),
    ("images_per_second_per_gpu", "step", "images / s / rank"),
    ("padding_fraction", "step", "padding [fraction of positions]"),
)
"""Metric, x axis, label."""
_OVER = {"step": "update steps", "num_tokens_seen": "target tokens"}


def curve(
    metrics: Sequence[Mapping[str, Any]], name: str, over: str
) -> tuple[list[Any], list[Any]]:
    """Returns the points of metric ``name`` over metric ``over``, without missing values."""
    points = [
        (line[over], line[name])
        for line in metrics
        if line.get(name) is not None and line.get(over) is not None
    ]
    return [x for x, _ in points], [y for _, y in points]


def plot(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Plots runs by name in one colour each. The suffix of ``path`` selects the format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        panel for panel in PANELS if any(curve(metrics, *panel[:2])[0] for metrics in runs.values())
    ]
    num_columns = max(-(-len(panels) // 2), 1)
    figure, axes = pyplot.subplots(
        2, num_columns, figsize=(4 * num_columns, 7), layout="constrained", squeeze=False
    )
    for axis in axes.T.flat[len(panels) :]:
        axis.remove()
    for axis, (name, over, label) in zip(axes.T.flat, panels, strict=False):
        for run, metrics in runs.items():
            x, y = curve(metrics, name, over)
            axis.plot(x, y, label=run, linewidth=1, marker="." if len(x) < 30 else None)
        axis.set_xlabel(_OVER[over])
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if name == "padding_fraction":
            axis.set_ylim(0, 1)
    if len(runs) > 1:
        axes.flat[0].legend()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    """Plots the runs given on the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipe_utils.run.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("output_dir", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="default: metrics.png in the first OUTPUT_DIR")
    arguments = parser.parse_args()
    runs = {}
    for folder in arguments.output_dir:
        path = folder / "logs" / METRICS_FILE
        try:
            runs[str(folder)] = read_metrics(path)
        except OSError as error:
            sys.exit(f"{path}: {error.strerror}; it is written by trainings since 0.4.2")
    path = arguments.out or arguments.output_dir[0] / "metrics.png"
    try:
        plot(runs, path)
    except ImportError:
        sys.exit('matplotlib is missing: pip install "torchtune-update-step[plot]"')
    print(path)  # noqa: T201


if __name__ == "__main__":
    main()
