"""Plots metrics of one or several trainings.

python -m recipe_utils.plot OUTPUT_DIR [OUTPUT_DIR ...] [--out metrics.png] [--over num_tokens_seen]
python -m recipe_utils.plot OUTPUT_DIR --samples

Draws the metrics of ``logs/metrics.jsonl``, those of validations beside those of training: losses, also by dataset,
rewards, accuracies and all others that an objective logs, learning rate, gradient norm, throughput and padding.
``--samples`` prints the samples of highest loss, and those whose loss rose most, of trainings with
``sample_losses: True``.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from recipe_utils.text.mixture import load_dataset
from recipe_utils.torchtune_names import instantiate
from recipe_utils.training.log import METRICS_FILE, read_metrics
from recipe_utils.training.parts.sample_losses import DATASETS, FILE, report_of

PANELS = {
    r"(val_)?loss": "loss [nats]",
    r"(mean|val)_reward": "mean reward",
    r"(val_)?rewards/accuracies": "accuracy of pairs",
    r"(val_)?rewards/margins": "reward margin",
    r"knn_accuracy": "k-NN accuracy",
    r"(val_)?loss/.+": "loss of datasets [nats]",
    r"clipped_(low|high)": "clipped [fraction of tokens]",
    r"lr(/.+)?": "learning rate",
    r"grad_norm": "gradient norm",
    r"(tokens|images)_per_second_per_gpu": "tokens or images / s / rank",
    r"padding_fraction": "padding [fraction of positions]",
}
"""Metrics of a panel, as a regular expression, and its label. Others have panels of their own."""
NOT_DRAWN = re.compile(
    r"step|time|epoch|num_.*|.*_(seen|seconds|gib|batch)|.+_tokens_per_.*|shared_.*|token_share/.*|.*memory.*"
)
"""Positions, counts and times."""


def curve(metrics: Sequence[Mapping[str, Any]], name: str, over: str) -> list[tuple[Any, Any]]:
    """Returns the points of metric ``name`` over metric ``over``, without missing values."""
    points = [(line.get(over), line.get(name)) for line in metrics]
    return [point for point in points if None not in point]


def panels_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Returns the metrics of each panel by its label: first those of ``PANELS``, in its order, then all others."""
    panels: dict[str, list[str]] = {label: [] for label in PANELS.values()}
    for name in names:
        if not NOT_DRAWN.fullmatch(name):
            label = next((label for names, label in PANELS.items() if re.fullmatch(names, name)), None)
            panels.setdefault(label or name.removeprefix("val_"), []).append(name)
    return {label: sorted(names, key=lambda name: name.startswith("val_")) for label, names in panels.items() if names}


def plot(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, over: str = "step") -> None:
    """Plots runs by name: a panel for each kind of metric. The suffix of ``path`` selects the format."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    panels = panels_of(dict.fromkeys(name for metrics in runs.values() for line in metrics for name in line))
    num_columns = math.ceil(math.sqrt(max(len(panels), 1)))
    num_rows = -(-max(len(panels), 1) // num_columns)
    figure = Figure(figsize=(4 * num_columns, 3.2 * num_rows), layout="constrained")
    for index, (label, names) in enumerate(panels.items()):
        axis = figure.add_subplot(num_rows, num_columns, index + 1)
        lines = [(run, name, curve(metrics, name, over)) for run, metrics in runs.items() for name in names]
        for run, name, points in lines:
            if points:
                text = ", ".join([name] * (len(names) > 1) + [run] * (len(runs) > 1))
                marker = "." if len(points) < 30 else None
                axis.plot(*zip(*points, strict=True), label=text, linewidth=1, marker=marker)
        axis.set(xlabel="update steps" if over == "step" else over, ylabel=label)
        # Four numbers such as 120k do not touch each other.
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
        if len(names) > 1 or (len(runs) > 1 and index == 0):
            axis.legend(fontsize="small")
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
    parser.add_argument("--over", default="step", help="metric of the x-axes, such as num_tokens_seen; default: step")
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
        plot(runs, path, arguments.over)
    except ImportError:
        sys.exit("matplotlib is missing; pip install -e '.[plot]'")
    print(path)  # noqa: T201


if __name__ == "__main__":
    main()
