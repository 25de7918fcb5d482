"""Simulates plans on many ranks: waiting, padding, moved samples, planning time.

    python -m recipe_utils.benchmark.plans_over_ranks                       # the embedded data
    python -m recipe_utils.benchmark.plans_over_ranks --config my.yaml --num_ranks 8 64
    python -m recipe_utils.benchmark.plans_over_ranks --overhead_slots 400 --equal_attention_length 29700

Update steps are drawn from a config's dataset. Costs are those of its model on a CPU, or of a
machine given by two constants. Columns are medians over update steps:

- slowest / mean: cost of the slowest rank over the mean, the wait of DDP.
- in step: sum over rounds of the costliest microbatch over the mean rank's cost, the wait of FSDP.
- padding: share of computed positions. microbatches: per rank. KB moved: sent to other ranks.
- planning: time on every rank [ms], in the background thread.
"""

import argparse
import pickle
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from torchtune import config

from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.plan.cost import MEASURED_COSTS, MicrobatchCost
from recipe_utils.data.plan.plan import Microbatches, Plan
from recipe_utils.model.construct.build import ModelSettings, build_on_meta
from recipe_utils.model.construct.sizes import equal_attention_length
from recipe_utils.tune.registry import config_path


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="llama3_2/5M_full_update_step")
    parser.add_argument("--num_ranks", type=int, nargs="+", default=[2, 8, 64, 512, 4096])
    parser.add_argument("--samples_per_rank", type=int, default=16)
    parser.add_argument("--num_update_steps", type=int, default=5)
    overhead = MEASURED_COSTS["cpu"].overhead_slots
    parser.add_argument("--overhead_slots", type=float, default=overhead, help="of a microbatch")
    parser.add_argument("--equal_attention_length", type=float, help="[tokens], default: on a CPU")
    args = parser.parse_args()

    cfg: Any = OmegaConf.load(config_path(args.config))
    tokenizer = config.instantiate(cfg.tokenizer)
    dataset = config.instantiate(cfg.dataset, tokenizer)
    samples = [dataset[i] for i in range(len(dataset))]

    model = build_on_meta(partial(config.instantiate, cfg.model), ModelSettings())
    own_length = equal_attention_length(model) / MEASURED_COSTS["cpu"].attention_slowness
    cost = MicrobatchCost(args.overhead_slots, args.equal_attention_length or own_length)
    max_tokens = cfg.get("max_tokens_per_microbatch") or cfg.batch_size * tokenizer.max_seq_len

    print(
        "| ranks | plan | slowest / mean | in step | padding | microbatches | KB moved | planning [ms] |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for num_ranks in args.num_ranks:
        for name in ("in_order", "least_padding", "packed"):
            keys: Any = {"batch_size": cfg.batch_size, "microbatching": name}
            plan = DataSettings(**keys).make_plan(max_tokens, cost)
            rng = random.Random(num_ranks)
            columns = []
            for _ in range(args.num_update_steps):
                drawn = [rng.choice(samples) for _ in range(num_ranks * args.samples_per_rank)]
                columns.append(simulate(drawn, name, plan, num_ranks, cost))
            row = [statistics.median(column) for column in zip(*columns, strict=True)]
            print(
                f"| {num_ranks} | `{name}` | {row[0]:.3f} | {row[1]:.2f} | {row[2]:.1%} "
                f"| {row[3]:.0f} | {row[4]:.1f} | {row[5]:.1f} |"
            )


def simulate(
    samples: Sequence[Sample], name: str, plan: Plan, num_ranks: int, cost: MicrobatchCost
) -> tuple[float, ...]:
    """Returns the columns of one update step, in the order of the table."""
    lengths = [len(sample["tokens"]) for sample in samples]
    per_rank = len(samples) // num_ranks
    if name == "in_order":  # ranks keep their samples
        ranks = [
            [[rank * per_rank + i for i in part] for part in plan(lengths[:per_rank], 1)[0]]
            for rank in range(num_ranks)
        ]
        seconds = 0.0
    else:
        start = time.perf_counter()
        ranks = plan(lengths, num_ranks)
        seconds = time.perf_counter() - start

    def computed(microbatch: Sequence[int]) -> list[int]:
        of_samples = [lengths[position] for position in microbatch]
        return of_samples if name == "packed" else [max(of_samples)] * len(of_samples)

    def microbatch_cost(microbatch: Sequence[int]) -> float:
        return cost.overhead_slots + sum(map(cost.of_sample, computed(microbatch)))

    costs = [[microbatch_cost(microbatch) for microbatch in rank] for rank in ranks]
    mean = sum(map(sum, costs)) / num_ranks
    num_rounds = max(map(len, costs))
    in_step = sum(
        max(of_rank[i] for of_rank in costs if len(of_rank) > i) for i in range(num_rounds)
    )
    num_slots = sum(sum(computed(m)) for rank in ranks for m in rank)
    return (
        max(map(sum, costs)) / mean,
        in_step / mean,
        1 - sum(lengths) / num_slots,
        num_rounds,
        statistics.mean(bytes_sent(samples, ranks, per_rank)) / 1e3,
        seconds * 1e3,
    )


def bytes_sent(
    samples: Sequence[Sample], ranks: Sequence[Microbatches], per_rank: int
) -> list[int]:
    """Returns the bytes that each rank sends. Rank r loads samples from r * per_rank on."""
    sent = [0] * len(ranks)
    for to, microbatches in enumerate(ranks):
        by_source: dict[int, dict[int, Sample]] = {}
        for position in (p for microbatch in microbatches for p in microbatch):
            by_source.setdefault(position // per_rank, {})[position] = samples[position]
        for source, leaving in by_source.items():
            sent[source] += len(pickle.dumps(leaving)) if source != to else 0
    return sent


if __name__ == "__main__":
    main()
