"""Plots metrics of one or several trainings.

python -m recipe_utils.plot OUTPUT_DIR [OUTPUT_DIR ...] [--out metrics.png]
python -m recipe_utils.plot OUTPUT_DIR --samples

Draws loss, val_loss, k-NN accuracy, learning rate, gradient norm, throughput and padding of
``logs/metrics.jsonl`` over update steps; losses also over target tokens. ``--samples`` prints the
samples of highest loss, and those whose loss rose most, of trainings with ``sample_losses: True``.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from recipe_utils.text.datasets import load_dataset
from recipe_utils.torchtune_names import instantiate
from recipe_utils.training.log import METRICS_FILE, read_metrics
from recipe_utils.training.parts.sample_losses import DATASETS, FILE, report_of

METRICS = {
    "loss": "loss [nats]",
    "val_loss": "val_loss [nats]",
    "knn_accuracy": "k-NN accuracy",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second_per_gpu": "target tokens / s / rank",
    "images_per_second_per_gpu": "images / s / rank",
    "padding_fraction": "padding [fraction of positions]",
}
X_AXES = {"num_tokens_seen": "target tokens", "step": "update steps"}
PANELS = [*((name, "num_tokens_seen") for name in ("loss", "val_loss")), *((name, "step") for name in METRICS)]


def curve(metrics: Sequence[Mapping[str, Any]], name: str, over: str) -> list[tuple[Any, Any]]:
    """Returns the points of metric ``name`` over metric ``over``, without missing values."""
    points = [(line.get(over), line.get(name)) for line in metrics]
    return [point for point in points if None not in point]


def plot(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Plots runs by name in one color each. The suffix of ``path`` selects the format."""
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(curve(run, *panel) for run in runs.values())]
    num_columns = max(-(-len(panels) // 2), 1)
    figure = Figure(figsize=(4 * num_columns, 7), layout="constrained")
    for index, (name, over) in enumerate(panels):
        axis = figure.add_subplot(2, num_columns, index + 1)
        for run, metrics in runs.items():
            points = curve(metrics, name, over)
            x, y = zip(*points, strict=True) if points else ((), ())
            axis.plot(x, y, label=run, linewidth=1, marker="." if len(x) < 30 else None)
        axis.set(xlabel=X_AXES[over], ylabel=METRICS[name])
        axis.grid(alpha=0.3)
        if index == 0 and len(runs) > 1:
            axis.legend()
    figure.savefig(path, dpi=80)


def report_of_run(output_dir: Path) -> Iterator[str]:
    """Yields the lines of :meth:`SampleLosses.summary` for a training that has ended or still runs.

    Raises OSError if it wrote no losses of samples.
    """
    logs = output_dir / "logs"
    losses, names = np.load(logs / FILE, "r"), json.loads((logs / DATASETS).read_text())
    cfg: Any = OmegaConf.load(logs / "config.yaml")
    dataset = load_dataset(cfg.dataset, tokenizer=instantiate(cfg.tokenizer))
    yield from report_of(losses, names, dataset, cfg)


def main() -> None:
    """Plots the runs given on the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipe_utils.plot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("output_dir", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="default: metrics.png in the first OUTPUT_DIR")
    parser.add_argument("--samples", action="store_true", help="print samples of highest loss")
    arguments = parser.parse_args()
    if arguments.samples:  # text only: matplotlib is not needed
        for folder in arguments.output_dir:
            try:
                print("\n".join(report_of_run(folder)))  # noqa: T201
            except OSError as error:
                sys.exit(f"{error.filename}: {error.strerror}; train with sample_losses=True")
        return
    # All folders are read before anything is drawn.
    runs = {}
    for folder in arguments.output_dir:
        path = folder / "logs" / METRICS_FILE
        try:
            runs[str(folder)] = read_metrics(path)
        except OSError as error:
            sys.exit(f"{path}: {error.strerror}; set the output_dir of a training")
    path = arguments.out or arguments.output_dir[0] / "metrics.png"
    try:
        plot(runs, path)
    except ImportError:
        sys.exit('matplotlib is missing: pip install "torchtune-update-step[plot]"')
    print(path)  # noqa: T201


if __name__ == "__main__":
    main()
