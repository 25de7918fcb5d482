"""Times one pipeline schedule per update step against one per accumulation group, on real ranks.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 -m recipe_utils.benchmark.pipeline_times

The embedded default's model in as many stages as ranks, rows of random tokens. Both ways run the same microbatches
in turn; a group holds as many as there are ranks. Gradients are not used, so shared weights are not summed.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torchtune import config

from recipe_utils.benchmark.pipeline_bubble import idle_fraction, order_of_ranks, timeline
from recipe_utils.data.microbatch import Microbatch, Targets
from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.head import attach_head
from recipe_utils.model.document_mask import attend_within_documents
from recipe_utils.model.pipeline import Pipeline
from recipe_utils.model.schedule import (
    SCHEDULES,
    PipelineSettings,
    has_several_stages_per_rank,
    stages_of_rank,
)
from recipe_utils.model.stages import cut_to_stage, layers_of_stages
from recipe_utils.tune.registry import config_path


def main() -> None:
    """Prints, on rank 0, a markdown table with medians and quartiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_groups", type=int, default=4)
    parser.add_argument("--num_tokens", type=int, default=512, help="per microbatch")
    parser.add_argument("--num_update_steps", type=int, default=12)
    parser.add_argument("--schedules", nargs="+", default=["1F1B", "Interleaved1F1B"])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    p, m = dist.get_world_size(), dist.get_world_size() * args.num_groups
    if dist.get_rank() == 0:
        print(
            "| schedule | p | m | seconds per update step: groups | whole | groups / whole | by the timelines |"
        )
        print("| --- " * 7 + "|")
    for schedule in args.schedules:
        assert schedule in SCHEDULES, f"{schedule} is none of {', '.join(SCHEDULES)}"
        pipeline = make_pipeline(schedule)
        microbatches = [make_microbatch(args.num_tokens, seed) for seed in range(m)]
        seconds: dict[str, list[float]] = {"groups": [], "whole": []}
        for _ in range(1 + args.num_update_steps):
            seconds["groups"].append(
                seconds_of(pipeline, [microbatches[i : i + p] for i in range(0, m, p)])
            )
            seconds["whole"].append(seconds_of(pipeline, [microbatches]))
        groups, whole = seconds["groups"][1:], seconds["whole"][1:]  # the first warms up
        low, middle, high = statistics.quantiles(
            [a / b for a, b in zip(groups, whole, strict=True)], n=4
        )
        _, share = idle_fraction(timeline(order_of_ranks(schedule, p, p)))
        _, whole_share = idle_fraction(timeline(order_of_ranks(schedule, p, m)))
        if dist.get_rank() == 0:
            print(
                f"| {schedule} | {p} | {m} | {statistics.median(groups):.3f} | "
                f"{statistics.median(whole):.3f} | {low:.2f} **{middle:.2f}** {high:.2f} | "
                f"{float((1 - whole_share) / (1 - share)):.2f} |"
            )
    dist.destroy_process_group()


def make_pipeline(schedule: str) -> Pipeline:
    """The embedded default's model in stages, with fresh weights."""
    cfg = OmegaConf.load(config_path("llama3_2/5M_full_update_step")).model
    p = dist.get_world_size()
    num_stages = p * (2 if has_several_stages_per_rank(schedule) else 1)
    layers = layers_of_stages(config.instantiate(cfg), num_stages)
    stages = {}
    for index in stages_of_rank(dist.get_rank(), p, num_stages):
        stages[index] = config.instantiate(cfg)
        cut_to_stage(stages[index], layers[index])
        attend_within_documents(stages[index], torch.device("cpu"), cfg.max_seq_len)
        if index == num_stages - 1:
            attach_head(
                stages[index],
                LinearCrossEntropyLoss(),
                backward_in_parts=PipelineSettings(schedule).splits_backward,  # type: ignore[arg-type]
            )
    assert dist.group.WORLD is not None
    return Pipeline(
        stages,
        num_stages=num_stages,
        schedule=schedule,
        embed_dim=cfg.embed_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
    )


def make_microbatch(num_tokens: int, seed: int) -> Microbatch:
    """One row, every fourth token of which is a target."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4096, (1, num_tokens), generator=generator)
    targets = Targets(tokens, torch.arange(0, num_tokens, 4))
    return Microbatch({"tokens": tokens}, targets)


def seconds_of(pipeline: Pipeline, groups: list[list[Microbatch]]) -> float:
    """From the start on all ranks to the end on all ranks."""
    dist.barrier()
    started = time.perf_counter()
    for group in groups:
        pipeline.forward_backward(group, lambda sums: sums[0] * 1e-4)
    dist.barrier()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
