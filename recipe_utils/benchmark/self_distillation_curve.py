"""Trains the digits with an update step split several ways, and draws what nearest neighbours make of each.

    python -m recipe_utils.benchmark.self_distillation_curve --out /tmp/curve
    python -m recipe_utils.benchmark.self_distillation_curve --out /tmp/curve --steps 418 --jobs 2

The embedded default, vit/digits_dinov3_update_step, with 64 images an update step, 64x1, 16x4, 8x8 and 2x32 (images per
microbatch x microbatches), once as the recipe does, with KoLeo over all images of an update step, so that all splits
have one objective; and once the naive way, with Sinkhorn-Knopp and KoLeo within each microbatch. Nothing else differs:
the same images, crops, masks and first weights. Of 64x1 both are the same.

``--out`` gets ``self_distillation_curve.png`` and ``.json``; the markdown table is printed. What is already there of the
same trainings is not done again.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipe_utils.embedded.digits import NUM_TRAIN, digits_dataset
from recipe_utils.evaluation.nearest_neighbors import num_voted_right
from recipe_utils.run.log import METRICS_FILE, read_metrics

TUNE = str(Path(sys.executable).with_name("tune"))
RECIPE, CONFIG = "dinov3_update_step", "vit/digits_dinov3_update_step"
NAME = "self_distillation_curve"
IMAGES_PER_STEP = 64
SPLITS = ("64x1", "16x4", "8x8", "2x32")
WAYS = ("exact", "naive")
_BLUES, _REDS = ("#1a365d", "#2b6cb0", "#4299e1", "#90cdf4"), ("#9b2c2c", "#dd6b20", "#d69e2e")
_LINES = ("-", "--", "-.", ":")


class Training(NamedTuple):
    """One of those that are compared."""

    split: str
    """Images per microbatch x microbatches."""
    way: str
    """One of :data:`WAYS`."""

    def overrides(self, steps: int, val_every: int) -> dict[str, Any]:
        """Of the embedded default.

        Args:
            steps: update steps at least; whole epochs, if it is more than one.
            val_every: update steps between looks at nearest neighbours.
        """
        batch_size, num_microbatches = map(int, self.split.split("x"))
        epochs = math.ceil(steps / math.ceil(NUM_TRAIN / IMAGES_PER_STEP))
        is_exact = self.way == "exact"
        return {
            "batch_size": batch_size,
            "gradient_accumulation_steps": num_microbatches,
            "batch_size_val": IMAGES_PER_STEP,
            "koleo_group_size": "null" if is_exact else batch_size,
            "sinkhorn_over": "update_step" if is_exact else "microbatch",
            "epochs": epochs,
            "max_steps_per_epoch": math.ceil(steps / epochs),
            "run_val_every_n_steps": val_every,
            "log_every_n_steps": 1,
        }


def trainings_of(splits: Sequence[str]) -> list[Training]:
    """Each split both ways; with one microbatch both are one."""
    return [
        Training(split, way)
        for way in WAYS
        for split in splits
        if way == "exact" or not split.endswith("x1")
    ]


def train(folder: Path, overrides: Sequence[str], changes: Mapping[str, Any]) -> list[Any]:
    """Trains in a process of its own, unless a training with this command has been there.

    Args:
        folder: of what it writes.
        overrides: ``key=value`` of the user's, which come last.
        changes: of the config.

    Returns:
        Its metrics.

    Raises:
        RuntimeError: it failed; says the end of its output.
    """
    said = [f"{key}={value}" for key, value in changes.items()]
    command = [TUNE, "run", RECIPE, "--config", CONFIG, *said, *overrides, f"output_dir={folder}"]
    done = folder / "command.json"
    if not done.is_file() or json.loads(done.read_text()) != command:
        environment = {**os.environ, "TQDM_DISABLE": "1"}
        found = subprocess.run(command, capture_output=True, text=True, env=environment)
        if found.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
        done.write_text(json.dumps(command))
    return read_metrics(folder / "logs" / METRICS_FILE)


def accuracies_of(metrics: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The share that nearest neighbours name right, by update step."""
    return {line["step"]: line["knn_accuracy"] for line in metrics if "knn_accuracy" in line}


def accuracy_of_pixels() -> float:
    """The same of the images' own pixels, less the mean image, instead of a model's states."""
    pixels, labels = [], []
    for split in ("train", "test"):
        dataset = digits_dataset(split)
        samples = [dataset[i] for i in range(len(dataset))]
        pixels.append(torch.stack([torch.from_numpy(each["image"]).flatten() for each in samples]))
        labels.append(torch.tensor([each["label"] for each in samples]))
    mean = pixels[0].mean(0)
    num_right: Tensor = num_voted_right(pixels[1] - mean, labels[1], pixels[0] - mean, labels[0])
    return num_right.item() / len(labels[1])


def largest_spread(curves: Sequence[Mapping[int, float]]) -> float:
    """Between the highest and the lowest of curves, at the update step where it is largest."""
    return max(
        max(curve[step] for curve in curves) - min(curve[step] for curve in curves)
        for step in curves[0]
    )


def draw(path: Path, curves: Mapping[Training, Mapping[int, float]], of_pixels: float) -> None:
    """Both ways side by side, over update steps.

    Args:
        path: of the PNG file.
        curves: share that is right, by update step.
        of_pixels: that of raw pixels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, sharey=True, figsize=(9, 3.8), layout="constrained")
    titles = {
        "exact": "update_step: one curve, however it is split",
        "naive": "microbatch: Sinkhorn-Knopp and KoLeo within each",
    }
    for panel, way in zip(panels, WAYS, strict=True):
        # What both have in common is drawn in both.
        of_way = [each for each in curves if each.way == way or each.split.endswith("x1")]
        colours = iter(_REDS)
        for index, training in enumerate(of_way):
            curve = curves[training]
            is_blue = training.way == "exact"
            panel.plot(
                list(curve),
                list(curve.values()),
                color=_BLUES[index % len(_BLUES)] if is_blue else next(colours, "#718096"),
                linestyle=_LINES[index % len(_LINES)] if way == "exact" else "-",
                linewidth=(5 - index if way == "exact" else 1.6),
                label=training.split,
            )
        panel.axhline(of_pixels, color="#9aa5b1", linestyle=":", linewidth=1)
        panel.annotate(
            f"pixels alone {of_pixels:.3f}", (0.02, of_pixels), (0, -3), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="top", fontsize=8, color="#4a5568",
        )  # fmt: skip
        panel.set_title(titles[way], loc="left", fontsize=10)
        panel.set_xlabel("update steps of 64 images")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(title="images x microbatches", fontsize=8, title_fontsize=8)
    panels[0].set_ylabel("held-out digits that neighbours name right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def print_table(curves: Mapping[Training, Mapping[int, float]]) -> None:
    """What each training ends with, and how far the exact ones are apart."""
    print("| images x microbatches | exact: last, best | naive: last, best |")
    print("| --- " * 3 + "|")
    for split in dict.fromkeys(training.split for training in curves):
        cells = []
        for way in WAYS:
            curve = curves.get(Training(split, way), {})
            values = list(curve.values())
            cells.append(f"{values[-1]:.3f}, {max(values):.3f}" if values else "the same")
        print(f"| {split} | {' | '.join(cells)} |")
    exact = [curve for training, curve in curves.items() if training.way == "exact"]
    print(f"\nLargest spread of the exact splits at any update step: {largest_spread(exact):.4f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, draws and prints a markdown table.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(f"/tmp/torchtune_update_step/{NAME}"))
    parser.add_argument("--steps", type=int, default=150, help="update steps at least")
    parser.add_argument("--val_every", type=int, default=10, help="update steps")
    parser.add_argument("--splits", nargs="+", default=SPLITS, help="images x microbatches")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="of the config")
    args = parser.parse_args(arguments)
    for split in args.splits:
        batch_size, num_microbatches = map(int, split.split("x"))
        if batch_size * num_microbatches != IMAGES_PER_STEP:
            parser.error(f"--splits {split}: an update step has {IMAGES_PER_STEP} images")
    trainings = trainings_of(args.splits)
    of_pixels = accuracy_of_pixels()

    def curve_of(training: Training) -> dict[int, float]:
        folder = args.out / f"{training.way}_{training.split}"
        changes = training.overrides(args.steps, args.val_every)
        found = accuracies_of(train(folder, args.set, changes))
        print(f"{training.way} {training.split}: {found}", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(args.jobs) as pool:
        curves = dict(zip(trainings, pool.map(curve_of, trainings), strict=True))
    draw(args.out / f"{NAME}.png", curves, of_pixels)
    contents = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "steps": args.steps,
        "set": args.set,
        "raw_pixels": of_pixels,
        "knn_accuracy": [
            {**training._asdict(), "by_update_step": curve} for training, curve in curves.items()
        ],
    }
    (args.out / f"{NAME}.json").write_text(json.dumps(contents, indent=1) + "\n")
    print_table(curves)


if __name__ == "__main__":
    main()
