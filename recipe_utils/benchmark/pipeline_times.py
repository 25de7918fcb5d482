"""Times one pipeline schedule per update step against one per accumulation group, on real ranks.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m recipe_utils.benchmark.pipeline_times
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m recipe_utils.benchmark.pipeline_times --teacher 256x6 768x6

The embedded default's model in as many stages as ranks, rows of random tokens. Both ways run the same microbatches
in turn; a group holds as many as there are ranks. Gradients are not used, so shared weights are not summed.

With a teacher, a model as wide and deep as asked for, one stage per rank: its forward-only schedule over all
microbatches of a group or an update step, then the student's over the same, with cross-entropy and divergence.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchtune import config

from recipe_utils.benchmark.pipeline_bubble import idle_fraction, order_of_ranks, timeline
from recipe_utils.benchmark.report import quartiles
from recipe_utils.data.loader.microbatch import Microbatch, Targets
from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.attach_loss import attach_loss
from recipe_utils.loss.distillation import (
    SUMS,
    LinearDistillationLoss,
    TeacherHidden,
    make_distillation_loss,
)
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.model.pipeline.pipeline import Pipeline
from recipe_utils.model.pipeline.schedule import (
    SCHEDULES,
    PipelineSettings,
    has_several_stages_per_rank,
    stages_of_rank,
)
from recipe_utils.model.pipeline.stages import cut_to_stage, layers_of_stages
from recipe_utils.tune.registry import config_path


class HiddenAtTargets:
    """Takes the place of a teacher's loss: its last hidden states at the targets, [n * d_t]."""

    takes_hidden_states = True

    def __call__(self, output: nn.Module, hidden: Tensor, targets: Targets, _: bool) -> Tensor:
        """Returns [n, d] of ``hidden`` [b, s, d]."""
        return hidden.flatten(0, 1).index_select(0, targets.positions)


class Teacher:
    """A model with fresh weights, one stage on each rank.

    Args:
        size: ``EMBED_DIMxNUM_LAYERS``; the MLP is three times as wide.
    """

    def __init__(self, size: str) -> None:
        self._embed_dim, num_layers = map(int, size.split("x"))
        cfg = _student_config()
        widths = {"embed_dim": self._embed_dim, "intermediate_dim": 3 * self._embed_dim}
        cfg.merge_with({**widths, "num_layers": num_layers})
        stages = make_stages(cfg, "GPipe", HiddenAtTargets())
        self._pipeline = make_pipeline(cfg, "GPipe", stages)
        self._output: Any = stages[max(stages)].output

    def teach(self, microbatches: list[Microbatch]) -> list[Microbatch]:
        """The same with what it says of their targets, on the rank of the last stage."""
        outputs = self._pipeline.outputs(microbatches)
        return [
            microbatch.with_teacher(
                TeacherHidden(outputs[i].view(-1, self._embed_dim), self._output)
            )
            if i in outputs
            else microbatch
            for i, microbatch in enumerate(microbatches)
        ]


def main() -> None:
    """Prints, on rank 0, a markdown table with medians and quartiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_groups", type=int, default=4)
    parser.add_argument("--num_tokens", type=int, default=512, help="per microbatch")
    parser.add_argument("--num_update_steps", type=int, default=12)
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B"])
    parser.add_argument(
        "--teacher", nargs="+", metavar="EMBED_DIMxNUM_LAYERS", help="sizes of teachers"
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    p, m = dist.get_world_size(), dist.get_world_size() * args.num_groups
    teachers: dict[str, Teacher | None] = {size: Teacher(size) for size in args.teacher or ()}
    if dist.get_rank() == 0:
        print(
            "| schedule | teacher | p | m | seconds per update step: groups | whole | groups / whole "
            "| by the timelines |"
        )
        print("| --- " * 8 + "|")
    for schedule, (size, teacher) in itertools.product(
        args.schedules, teachers.items() or [("", None)]
    ):
        assert schedule in SCHEDULES, f"{schedule} is none of {', '.join(SCHEDULES)}"
        pipeline = make_student(schedule, has_teacher=teacher is not None)
        microbatches = [make_microbatch(args.num_tokens, seed) for seed in range(m)]
        seconds: dict[str, list[float]] = {"groups": [], "whole": []}
        for _ in range(1 + args.num_update_steps):
            groups = [microbatches[i : i + p] for i in range(0, m, p)]
            seconds["groups"].append(seconds_of(pipeline, groups, teacher))
            seconds["whole"].append(seconds_of(pipeline, [microbatches], teacher))
        of_groups, of_whole = seconds["groups"][1:], seconds["whole"][1:]  # the first warms up
        low, middle, high = quartiles([a / b for a, b in zip(of_groups, of_whole, strict=True)])
        if dist.get_rank() == 0:
            print(
                f"| {schedule} | {size} | {p} | {m} | {statistics.median(of_groups):.3f} | "
                f"{statistics.median(of_whole):.3f} | {low:.2f} **{middle:.2f}** {high:.2f} | "
                f"{_by_the_timelines(schedule, p, m) if teacher is None else ''} |",
                flush=True,
            )
    dist.destroy_process_group()


def _by_the_timelines(schedule: str, num_ranks: int, num_microbatches: int) -> str:
    """Of groups over whole; with a teacher see pipeline_bubble, which is told what its forward takes."""
    group, whole = (
        idle_fraction(timeline(order_of_ranks(schedule, num_ranks, m)))[1]
        for m in (num_ranks, num_microbatches)
    )
    return f"{float((1 - whole) / (1 - group)):.2f}"


def _student_config() -> Any:
    return OmegaConf.load(config_path("llama3_2/5M_full_update_step")).model


def make_student(schedule: str, has_teacher: bool) -> Pipeline:
    """The embedded default's model in stages, with fresh weights."""
    cfg, loss_fn = _student_config(), LinearCrossEntropyLoss()
    if not has_teacher:
        return make_pipeline(cfg, schedule, make_stages(cfg, schedule, loss_fn))
    kd_loss_fn = make_distillation_loss(loss_fn, LinearDistillationLoss(), 0.5)
    return make_pipeline(cfg, schedule, make_stages(cfg, schedule, kd_loss_fn), len(SUMS))


def make_stages(cfg: Any, schedule: str, loss_fn: Any) -> dict[int, nn.Module]:
    """This rank's, with fresh weights.

    Args:
        cfg: of a torchtune decoder.
        schedule: that the stages will run in.
        loss_fn: of the last one.
    """
    p = dist.get_world_size()
    num_stages = p * (2 if has_several_stages_per_rank(schedule) else 1)
    layers = layers_of_stages(config.instantiate(cfg), num_stages)
    stages = {}
    for index in stages_of_rank(dist.get_rank(), p, num_stages):
        stages[index] = config.instantiate(cfg)
        cut_to_stage(stages[index], layers[index])
        attend_within_documents(stages[index], torch.device("cpu"), cfg.max_seq_len)
        if index == num_stages - 1:
            splits_backward = PipelineSettings(schedule).splits_backward  # type: ignore[arg-type]
            attach_loss(stages[index], loss_fn, backward_in_parts=splits_backward)
    return stages


def make_pipeline(
    cfg: Any, schedule: str, stages: Mapping[int, nn.Module], num_sums: int = 1
) -> Pipeline:
    """Over all ranks of the job."""
    assert dist.group.WORLD is not None
    return Pipeline(
        stages,
        num_stages=dist.get_world_size() * len(stages),
        schedule=schedule,
        embed_dim=cfg.embed_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
        num_sums=num_sums,
    )


def make_microbatch(num_tokens: int, seed: int) -> Microbatch:
    """One row, every fourth token of which is a target."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4096, (1, num_tokens), generator=generator)
    targets = Targets(tokens, torch.arange(0, num_tokens, 4))
    return Microbatch({"tokens": tokens}, targets)


def seconds_of(
    pipeline: Pipeline, groups: list[list[Microbatch]], teacher: Teacher | None
) -> float:
    """From the start on all ranks to the end on all ranks."""
    dist.barrier()
    started = time.perf_counter()
    for group in groups:
        taught = teacher.teach(group) if teacher is not None else group
        pipeline.forward_backward(taught, lambda sums: sums[0] * 1e-4)
    dist.barrier()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
