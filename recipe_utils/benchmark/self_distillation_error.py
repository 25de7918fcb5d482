"""Measures what it costs to split an update step of self-distillation: gradients that are off, and time where they are not.

    python -m recipe_utils.benchmark.self_distillation_error
    python -m recipe_utils.benchmark.self_distillation_error --parts error --num_images 64 --splits 64x1 16x4 8x8 2x32

Model, crops and images are those of the embedded default, vit/digits_dinov3_update_step, with fresh weights; its student
is on the way to other ones. A split such as 4x4 is images per microbatch x microbatches. Two ways to train it:

- naive: each microbatch as if it were a batch of its own. Sinkhorn-Knopp shares the prototypes evenly among its crops and
  patches, KoLeo looks for neighbours among its images, and the gradient is the mean over microbatches.
- exact: as the recipe does. The teacher sees all microbatches before the student sees the first.

Parts: ``error``, relative L2 error of the gradient of all weights in float64, with the mean total variation between
Sinkhorn-Knopp's targets and those of one batch; ``time`` of update steps, both ways in turn; ``row``, one row of crops of
two sizes against a call of the model for each size; ``memory`` of what is kept of the teacher.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtune import config, training

from recipe_utils.benchmark.report import quartiles
from recipe_utils.checkpoint.dinov3_vit import dinov3_hf_config
from recipe_utils.data.images.collator import Views, ViewSamples
from recipe_utils.data.images.crop_rows import TokenLayout, layout_of, of_global_crops
from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.sampler import StepIndex
from recipe_utils.loss.attach_loss import attach_loss
from recipe_utils.loss.self_distillation import SelfDistillationLoss, TeacherViews
from recipe_utils.model.build.build import build_model, build_on_meta
from recipe_utils.model.build.weights import load_weights
from recipe_utils.model.vision.average_teacher import AverageTeacher
from recipe_utils.model.vision.vision_transformer import dinov3_vit, fresh_vit_weights, with_heads
from recipe_utils.parallel.ranks import Ranks, join_ranks
from recipe_utils.settings.settings import read_settings, settings_of
from recipe_utils.tune.registry import config_path

RECIPE, CONFIG = "dinov3_update_step", "vit/digits_dinov3_update_step"
PARTS = ("error", "time", "row", "memory")
TERMS: Mapping[str, tuple[str, ...]] = {
    "DINO": ("dino_loss_weight",),
    "iBOT": ("ibot_loss_weight",),
    "KoLeo": ("koleo_loss_weight",),
    "all": ("dino_loss_weight", "ibot_loss_weight", "koleo_loss_weight"),
}
"""What is compared -> the weights that are not 0 for it."""
TEMPERATURE = 0.07
"""Of the teacher."""
_STUDENT_IS_AWAY = 0.3
"""How far the student's weights are on the way from the teacher's to other fresh ones."""

Sizes = Sequence[int]
"""Images of each microbatch."""


def sizes_of(split: str) -> list[int]:
    """Images of each microbatch: ``4x2`` is 4, 4, and ``7+5+4`` says them one by one.

    Raises:
        ValueError: neither of both.
    """
    if "+" in split:
        return [int(size) for size in split.split("+")]
    size, number = map(int, split.split("x"))
    return [size] * number


class Contest:
    """A student and its teacher, whose update steps are split one way or the other.

    Args:
        overrides: of the embedded default's config, by dotted key.
        num_images: of an update step.
        dtype: of all weights, ``fp32`` or ``fp64``.
        ranks: of this process alone.
    """

    def __init__(
        self, overrides: Mapping[str, Any], num_images: int, dtype: str, ranks: Ranks
    ) -> None:
        base: Any = OmegaConf.load(config_path(CONFIG))
        cfg: Any = OmegaConf.merge(base, {"dtype": dtype, "compile": False})
        for key, value in overrides.items():
            OmegaConf.update(cfg, key, value)
        settings: Any = read_settings(cfg, settings_of(RECIPE))
        self._settings = settings
        self._ranks = ranks
        modules = settings.modules
        make = with_heads(partial(config.instantiate, cfg.model), cfg.dino_head, cfg.ibot_head)
        whole: Any = build_on_meta(make, modules)
        layout = layout_of(whole)
        transform = config.instantiate(cfg.transform)
        views = Views(config.instantiate(cfg.dataset), transform, settings.views, layout, 0)
        self._samples = [
            {**views[StepIndex(i, 0, 0, i, num_images)], "name": f"image {i}"}
            for i in range(num_images)
        ]
        self._kind = partial(ViewSamples, layout=layout)
        self.loss_fn = SelfDistillationLoss(settings.objective)
        self.loss_fn.teacher_temperature = TEMPERATURE

        def build(head: Any) -> nn.Module:
            return build_model(
                make, lambda model, _: attach_loss(model, head), modules, ranks, settings.pipeline
            )

        of_teacher, other = (fresh_vit_weights(whole, seed) for seed in (0, 1))
        of_student = {
            name: torch.lerp(weight, other[name], _STUDENT_IS_AWAY)
            for name, weight in of_teacher.items()
        }
        self.model: Any = build(self.loss_fn)
        load_weights(self.model, {training.MODEL_KEY: of_student}, modules, ranks.device)
        self.teacher = AverageTeacher(build, settings.objective, modules, settings.pipeline, ranks)
        self.teacher.set_up(self.model, None, of_teacher)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def microbatches(self, sizes: Sizes, koleo_group_size: int | None = None) -> list[Microbatch]:
        """The update step's, image after image.

        Args:
            sizes: of them.
            koleo_group_size: None has all of a microbatch for one group.
        """
        views = replace(self._settings.views, koleo_group_size=koleo_group_size)
        kind = self._kind(self._settings.data, views)
        samples = iter(self._samples)
        return [kind.collate([next(samples) for _ in range(size)]) for size in sizes]

    def only(self, term: str) -> None:
        """From now on the loss is this one of :data:`TERMS`."""
        off = {name: 0.0 for name in TERMS["all"] if name not in TERMS[term]}
        self.loss_fn.settings = replace(self._settings.objective, **off)

    @contextmanager
    def taught(
        self, microbatches: Sequence[Microbatch], max_images: int | None
    ) -> Iterator[tuple[Sequence[Microbatch], float]]:
        """Microbatches with what the teacher says of them as one batch, and what a sum over them is multiplied by.

        Args:
            microbatches: whose targets depend on each other.
            max_images: as :meth:`AverageTeacher.teaching` takes it.
        """
        num_images = sum(microbatch.counts["images"] for microbatch in microbatches)
        step = UpdateStep(0, microbatches, {"images": num_images}, dp_degree=1)
        with self.teacher.teaching(step, TEMPERATURE, max_images) as (found, _):
            yield found, step.scale("images")

    def backward(
        self, batches: Sequence[Sequence[Microbatch]], max_images: int | None = None
    ) -> None:
        """Adds up the gradient of the mean over batches.

        Args:
            batches: of microbatches: one is exact; with one for each microbatch it is the naive way.
            max_images: see :meth:`taught`.
        """
        for batch in batches:
            with self.taught(batch, max_images) as (microbatches, scale):
                for microbatch in microbatches:
                    sums = self.model(**microbatch.inputs, targets=microbatch.targets)
                    (sums[0] * (scale / len(batches))).backward()

    def gradient(
        self, batches: Sequence[Sequence[Microbatch]], max_images: int | None = None
    ) -> Tensor:
        """That of all weights one after the other, see :meth:`backward`."""
        self.model.zero_grad(set_to_none=True)
        self.backward(batches, max_images)
        found = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad
            for weight in self.model.parameters()
        ]
        return torch.cat([each.flatten() for each in found])

    def update(
        self, batches: Sequence[Sequence[Microbatch]], max_images: int | None = None
    ) -> None:
        """An optimizer step, after which the teacher follows."""
        self.backward(batches, max_images)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.teacher.follow(0.99, None, 1)

    @torch.no_grad()
    def targets(self, batches: Sequence[Sequence[Microbatch]]) -> tuple[Tensor, Tensor]:
        """Sinkhorn-Knopp's of all global crops and of all masked patches, [n, k] each."""
        crops: list[Tensor] = []
        patches: list[Tensor] = []
        for batch in batches:
            with self.taught(batch, None) as (microbatches, _):
                for microbatch in microbatches:
                    said: Any = microbatch.targets.teacher
                    for rows, found in ((said.crops, crops), (said.patches, patches)):
                        like = rows.hidden.new_empty(0, len(rows.bias))
                        found.append(rows.log_probs_like(like, TEMPERATURE).exp())
        return torch.cat(crops), torch.cat(patches)


# ---- Gradients ------------------------------------------------------------------------------------


class Errors(NamedTuple):
    """Of a split, by :data:`TERMS`."""

    variation: tuple[float, float]
    """Mean total variation of the targets of crops and of patches, in [0, 1]."""
    naive: Mapping[str, float]
    """Relative L2 error of the gradient."""
    exact: Mapping[str, float]
    """Likewise."""


def errors_of(contest: Contest, splits: Sequence[Sizes]) -> list[Errors]:
    """How far gradients of splits are from that of one batch, of which all are parts."""
    whole = contest.microbatches([sum(splits[0])])
    wanted_targets = contest.targets([whole])
    wanted = {}
    for term in TERMS:
        contest.only(term)
        wanted[term] = contest.gradient([whole])
    found = []
    for sizes in splits:
        microbatches = contest.microbatches(sizes)
        one_by_one = [[microbatch] for microbatch in microbatches]
        naive, exact = {}, {}
        for term in TERMS:
            contest.only(term)
            takes_two = sum(sizes) if term in ("KoLeo", "all") else None
            naive[term] = _error(contest.gradient(one_by_one), wanted[term])
            exact[term] = _error(contest.gradient([microbatches], takes_two), wanted[term])
        crops, patches = (
            ((mine - its).abs().sum(1) / 2).mean().item()
            for mine, its in zip(contest.targets(one_by_one), wanted_targets, strict=True)
        )
        found.append(Errors((crops, patches), naive, exact))
    contest.only("all")
    return found


def _error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def print_errors(contest: Contest, splits: Sequence[str]) -> None:
    """A markdown table with a row for each split."""
    print(
        "| images x microbatches | variation of targets: crops, patches | "
        + " | ".join(f"naive: {term}" for term in TERMS)
        + " | exact, all |"
    )
    print("| --- " * (3 + len(TERMS)) + "|")
    for split, errors in zip(splits, errors_of(contest, list(map(sizes_of, splits))), strict=True):
        naive = " | ".join(f"{errors.naive[term]:.3f}" for term in TERMS)
        crops, patches = errors.variation
        print(
            f"| {split} | {crops:.2f}, {patches:.2f} | {naive} | {max(errors.exact.values()):.0e} |"
        )


# ---- Time -----------------------------------------------------------------------------------------


Clock = Callable[[], float]


def seconds_in_turn(
    ways: Mapping[str, Callable[[], Any]], num_rounds: int, clock: Clock
) -> dict[str, list[float]]:
    """Seconds of each call, each way; which comes first changes every round. The first round warms up.

    Args:
        ways: by name.
        num_rounds: that count.
        clock: says seconds.
    """
    names = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 + num_rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            started = clock()
            ways[name]()
            seconds[name].append(clock() - started)
    return {name: of_way[1:] for name, of_way in seconds.items()}


def _ratio(seconds: Sequence[float], over: Sequence[float]) -> str:
    low, middle, high = quartiles([a / b for a, b in zip(seconds, over, strict=True)])
    return f"{low:.2f} **{middle:.2f}** {high:.2f}"


def print_times(contest: Contest, splits: Sequence[str], num_rounds: int, clock: Clock) -> None:
    """A markdown table: seconds of an update step the naive way, and the exact ones over it."""
    print(
        "| images x microbatches | naive [s] | exact, KoLeo in groups, over naive "
        "| exact, KoLeo in two passes, over naive |"
    )
    print("| --- " * 4 + "|")
    for split in splits:
        sizes = sizes_of(split)
        microbatches = contest.microbatches(sizes)
        one_by_one = [[microbatch] for microbatch in microbatches]
        ways = {
            "naive": partial(contest.update, one_by_one),
            "groups": partial(contest.update, [microbatches]),  # each microbatch is one
            "two passes": partial(contest.update, [microbatches], sum(sizes)),
        }
        seconds = seconds_in_turn(ways, num_rounds, clock)
        ratios = " | ".join(_ratio(seconds[way], seconds["naive"]) for way in list(ways)[1:])
        print(
            f"| {split} | {quartiles(seconds['naive']).median:.3f} | {ratios} |",
            flush=True,
        )


# ---- A row of crops of two sizes ------------------------------------------------------------------


def row_of_crops(layout: TokenLayout, sizes: tuple[int, int], num_images: int) -> Microbatch:
    """Random crops: two global and eight local ones of each image.

    Args:
        layout: of the model's tokens.
        sizes: of global and of local crops [pixels].
        num_images: of the microbatch.
    """
    rng = np.random.default_rng(0)
    side = sizes[0] // layout.patch_size

    def crops(num: int, size: int) -> np.ndarray:
        drawn: np.ndarray = rng.standard_normal((num, layout.num_channels, size, size))
        return drawn.astype(np.float32)

    samples = [
        {
            "global_crops": crops(2, sizes[0]),
            "local_crops": crops(8, sizes[1]),
            "masks": np.zeros((2, side**2), dtype=bool),
            "draws": np.zeros((10, layout.num_draws)),
            "position": i,
            "step_size": num_images,
            "position_factor": 1.0,
            "label": None,
            "name": f"image {i}",
        }
        for i in range(num_images)
    ]
    settings: Any = read_settings(_default(), settings_of(RECIPE))
    views = replace(settings.views, koleo_group_size=None)
    return ViewSamples(settings.data, views, layout).collate(samples)


def _default() -> DictConfig:
    found: Any = OmegaConf.load(config_path(CONFIG))
    return found


def forward_backward(model: nn.Module, *inputs: Mapping[str, Any]) -> list[Tensor]:
    """One call of the model after the other, and the gradients of the mean square of all states."""
    states = [model(**each).flatten(0, -2) for each in inputs]
    torch.cat(states).square().mean().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return gradients


def split_by_size(microbatch: Microbatch) -> list[Mapping[str, Any]]:
    """Inputs of a call for the global crops and of one for the local ones."""
    of_global = of_global_crops(microbatch).inputs
    start = of_global["tokens"].size(1)
    inputs = microbatch.inputs
    of_local = {
        "tokens": inputs["tokens"][:, start:],
        "input_pos": inputs["input_pos"][:, start:],
        "crop_groups": inputs["crop_groups"][1:],
    }
    return [of_global, of_local]


def print_rows(sizes: str, num_images: int, num_rounds: int, clock: Clock) -> None:
    """A markdown table: forward and backward of one row, and calls for each size of crops over it.

    Args:
        sizes: of the model, ``EMBED_DIMxNUM_LAYERS``.
        num_images: of the microbatch.
        num_rounds: of times.
        clock: says seconds.
    """
    embed_dim, num_layers = map(int, sizes.split("x"))
    torch.manual_seed(0)
    model = dinov3_vit(16, embed_dim, num_layers, max(embed_dim // 64, 1))
    model.load_state_dict(fresh_vit_weights(model, 0))
    microbatch = row_of_crops(layout_of(model), (224, 96), num_images)
    ways: dict[str, Callable[[], Any]] = {
        "one row": partial(forward_backward, model, microbatch.inputs),
        "two calls": partial(forward_backward, model, *split_by_size(microbatch)),
    }
    if importlib.util.find_spec("transformers") is not None:
        import transformers

        theirs = transformers.DINOv3ViTModel(
            transformers.DINOv3ViTConfig(**dinov3_hf_config(model.arguments))
        )
        crops = [torch.randn(n * num_images, 3, h, h) for n, h in ((2, 224), (8, 96))]

        def call_twice() -> None:
            states = [theirs(pixel_values=each).last_hidden_state.flatten(0, 1) for each in crops]
            torch.cat(states).square().mean().backward()
            theirs.zero_grad(set_to_none=True)

        ways["transformers"] = call_twice
    seconds = seconds_in_turn(ways, num_rounds, clock)
    print(
        "| embed_dim x layers | images | one row [s] | two calls over it | transformers' two calls over it |"
    )
    print("| --- " * 5 + "|")
    over = [
        _ratio(seconds[way], seconds["one row"]) if way in seconds else "not installed"
        for way in ("two calls", "transformers")
    ]
    middle = quartiles(seconds["one row"]).median
    print(f"| {sizes} | {num_images} | {middle:.3f} | {' | '.join(over)} |")


# ---- Memory ---------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Knows the largest tensor that any operation made [bytes]."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and not func.is_view:
                self.num_bytes = max(self.num_bytes, each.nbytes)
        return made


class Kept(NamedTuple):
    """Of an update step's targets, before the student sees it [bytes]."""

    bottlenecks: int
    logits: int
    """That would be kept instead of them."""
    largest: int
    """The largest tensor that was made."""


def kept_of(contest: Contest, sizes: Sizes) -> Kept:
    """What a split keeps of the teacher."""
    microbatches = contest.microbatches(sizes)
    bottlenecks = logits = 0
    with (
        LargestTensor() as mode,
        contest.taught(microbatches, None) as (found, _),
    ):
        for microbatch in found:
            said: TeacherViews = microbatch.targets.teacher
            for rows in (said.crops, said.patches):
                bottlenecks += rows.hidden.nbytes
                logits += len(rows.hidden) * rows.output.weight.size(0) * 4
    return Kept(bottlenecks, logits, mode.num_bytes)


def arithmetic_of(name: str, num_images: int) -> tuple[float, float]:
    """Bytes of bottlenecks in bf16 and of logits in fp32 that images of a config have on average.

    Args:
        name: of the config.
        num_images: of a rank.
    """
    cfg: Any = OmegaConf.load(config_path(name))
    num_patches = (cfg.transform.global_crop_size // 16) ** 2
    num_masked = 2 * num_images * cfg.mask_probability * sum(cfg.mask_ratio) / 2 * num_patches
    bottlenecks = logits = 0.0
    for head, rows in ((cfg.dino_head, 2 * num_images), (cfg.ibot_head, num_masked)):
        bottlenecks += rows * head.bottleneck_dim * 2
        logits += rows * head.num_prototypes * 4
    return bottlenecks, logits


def print_memory(contest: Contest, sizes: Sizes, num_images_of_l16: int) -> None:
    """What is kept of the teacher, measured, and by arithmetic for ViT-L/16."""
    kept = kept_of(contest, sizes)
    print("| | bottlenecks, kept [MB] | logits would be [MB] | largest tensor made [MB] |")
    print("| --- " * 4 + "|")
    measured = " | ".join(f"{each / 1e6:.1f}" for each in kept)
    print(f"| {sum(sizes)} digits, heads of 65,536 prototypes, fp32, measured | {measured} |")
    bottlenecks, logits = arithmetic_of("vit/L16_dinov3_update_step", num_images_of_l16)
    print(
        f"| ViT-L/16, {num_images_of_l16:,} images of a rank, bf16, arithmetic | {bottlenecks / 1e6:,.0f} "
        f"| {logits / 1e6:,.0f} | |"
    )


HEADS_OF_L16 = {
    f"{head}.{key}": value
    for head in ("dino_head", "ibot_head")
    for key, value in (("num_prototypes", 65536), ("bottleneck_dim", 256))
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints markdown tables.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--num_images", type=int, default=16, help="of the first table")
    parser.add_argument("--splits", nargs="+", default=["8x2", "4x4", "2x8", "1x16", "7+5+4"])
    parser.add_argument("--timed_splits", nargs="+", default=["16x4", "8x8"])
    parser.add_argument("--num_rounds", type=int, default=8, help="timed, each way")
    parser.add_argument("--cpu_time", action="store_true", help="on a machine that others use")
    parser.add_argument("--row", default="384x4", help="embed_dim x layers of the row's model")
    args = parser.parse_args(arguments)
    if wrong := [split for split in args.splits if sum(sizes_of(split)) != args.num_images]:
        parser.error(f"--num_images {args.num_images}: {', '.join(wrong)} has another number")
    clock = time.process_time if args.cpu_time else time.perf_counter
    ranks = join_ranks(read_settings(_default(), settings_of(RECIPE)).ranks)
    try:
        if "error" in args.parts:
            print_errors(Contest({}, args.num_images, "fp64", ranks), args.splits)
            print()
        if "time" in args.parts:
            num_images = sum(sizes_of(args.timed_splits[0]))
            print_times(
                Contest({}, num_images, "fp32", ranks), args.timed_splits, args.num_rounds, clock
            )
            print()
        if "row" in args.parts:
            print_rows(args.row, 2, args.num_rounds, clock)
            print()
        if "memory" in args.parts:
            print_memory(Contest(HEADS_OF_L16, 64, "fp32", ranks), [16] * 4, 1024)
    finally:
        ranks.leave()


if __name__ == "__main__":
    main()
