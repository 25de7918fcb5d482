"""Simulates plans on many ranks: waiting, padding, moved samples, planning time.

    python -m recipe_utils.benchmark.plans_over_ranks                       # the embedded data
    python -m recipe_utils.benchmark.plans_over_ranks --config my.yaml --num_ranks 8 64
    python -m recipe_utils.benchmark.plans_over_ranks --overhead_slots 400 --equal_attention_length 29700
    python -m recipe_utils.benchmark.plans_over_ranks --max_ranks_per_row 8 --figure rows.png

Update steps are drawn from a config's dataset. Costs are those of its model on a CPU, or of a
machine given by two constants. Columns are medians over update steps:

- slowest / mean: cost of the slowest rank over the mean, the wait of DDP.
- in step: sum over rounds of the costliest microbatch over the mean rank's cost, the wait of FSDP.
- padding: share of computed positions. microbatches: per rank. KB moved: sent to other ranks.
- planning: time on every rank [ms], in the background thread.

With ``--max_ranks_per_row`` lengths are long-tailed, see :func:`draw_lengths`, and rows that span
ranks are compared with context parallelism of a fixed degree, and with samples cut to what fits on a
rank: useful compute of a rank over the sum of the rounds' costliest ranks, exchange included.
"""

import argparse
import itertools
import pickle
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from torchtune import config

from recipe_utils.data.loader.samples import Sample
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.data.plan.cost import MEASURED_COSTS, MicrobatchCost
from recipe_utils.data.plan.packed import plan_packed
from recipe_utils.data.plan.plan import Microbatches, Plan, part_of
from recipe_utils.model.build.build import ModelSettings, build_on_meta
from recipe_utils.model.build.sizes import equal_attention_length
from recipe_utils.tune.registry import config_path


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=str(config_path("llama3_2/5M_full_update_step")))
    parser.add_argument("--num_ranks", type=int, nargs="+", default=[2, 8, 64, 512, 4096])
    parser.add_argument("--samples_per_rank", type=int, default=16)
    parser.add_argument("--num_update_steps", type=int, default=5)
    overhead = MEASURED_COSTS["cpu"].overhead_slots
    parser.add_argument("--overhead_slots", type=float, default=overhead, help="of a microbatch")
    parser.add_argument("--equal_attention_length", type=float, help="[tokens], default: on a CPU")
    parser.add_argument("--max_ranks_per_row", type=int, help="simulates rows that span ranks")
    parser.add_argument("--figure", help="file of a bar chart of that")
    args = parser.parse_args()
    if args.max_ranks_per_row is not None:
        compare_rows_over_ranks(args)
        return

    cfg: Any = OmegaConf.load(args.config)
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


# ---- Rows that span ranks: an 8B model (32 layers, 32 heads, 8 of keys, width 128) on H100s --------------

_TOKENS_PER_RANK = 16384
_COST = MicrobatchCost(400, 30500)
_SECONDS_PER_TOKEN = 6 * 8.03e9 / (0.5 * 989e12)  # half of the peak in bf16
_BYTES_PER_SECOND = 300e9  # within a node
_FRACTIONS = (0.01, 0.002)


def draw_lengths(number: int, fraction: float, rng: random.Random) -> list[int]:
    """Draws lengths [tokens]: lognormal with median 2,200, up to 32k, and a fraction of 64k to 128k."""
    short = (min(max(int(rng.lognormvariate(7.7, 0.8)), 16), 32768) for _ in range(number))
    return [rng.randrange(2**16, 2**17) if rng.random() < fraction else each for each in short]


def exchange_cost(num_ranks: int) -> float:
    """Returns the time of a token's exchange without overlap, over that of its matrix products.

    Bytes of q, k, v and outputs per layer, forward and backward: 8 w (h + max(g, c)) (c - 1) / c.
    """
    num_bytes = 32 * 8 * 128 * (32 + max(8, num_ranks)) * (num_ranks - 1) / num_ranks
    return num_bytes / _BYTES_PER_SECOND / _SECONDS_PER_TOKEN


def useful_compute(
    lengths: Sequence[int], num_ranks: int, max_ranks: int, fixed: int = 1
) -> tuple[float, float]:
    """Returns the useful share of the ranks' time, and the planning time [s].

    With ``fixed`` above 1 so many ranks compute every row together.
    """
    start = time.perf_counter()
    keys: Any = {"max_tokens_per_microbatch": fixed * _TOKENS_PER_RANK, "cost": _COST}
    ranks = plan_packed(lengths, num_ranks // fixed, max_ranks_per_row=max_ranks, **keys)
    seconds = time.perf_counter() - start
    total = 0.0
    for index in range(max(map(len, ranks))):
        costs = [0.0]
        for rank, row in enumerate(ranks):
            size = fixed * part_of(ranks, rank, index).num_ranks if row[index:] else 1
            of_samples = [lengths[position] for position in row[index]] if row[index:] else []
            exchanged = exchange_cost(size) * sum(of_samples)
            costs.append((sum(map(_COST.of_sample, of_samples)) + exchanged) / size)
        total += max(costs) + _COST.overhead_slots
    return sum(map(_COST.of_sample, lengths)) / num_ranks / total, seconds


def compare_rows_over_ranks(args: Any) -> None:
    """Prints a table with a row for each number of ranks, and draws it."""
    most = args.max_ranks_per_row
    names = (f"up to {most} ranks", f"always {most}", f"cut to {_TOKENS_PER_RANK:,}")
    print(f"| long, ranks | {' | '.join(names)} (tokens lost) | planning [ms] |")
    print("| --- " * 5 + "|")
    bars: dict[str, Sequence[float]] = {}
    for fraction, num_ranks in itertools.product(_FRACTIONS, args.num_ranks):
        rng, columns = random.Random(num_ranks), []
        for _ in range(args.num_update_steps):
            lengths = draw_lengths(num_ranks * args.samples_per_rank, fraction, rng)
            kept = [min(length, _TOKENS_PER_RANK) for length in lengths]
            found, seconds = useful_compute(lengths, num_ranks, most)
            fixed, _ = useful_compute(lengths, num_ranks, 1, fixed=most)
            cut, _ = useful_compute(kept, num_ranks, 1)
            lost = 1 - sum(kept) / sum(lengths)
            columns.append((found, fixed, cut, lost, 1e3 * seconds))
        row = [statistics.median(column) for column in zip(*columns, strict=True)]
        bars[f"{fraction:.1%}\n{num_ranks}"] = row[:3]
        print(
            f"| {fraction:.1%}, {num_ranks} | {row[0]:.2f} | {row[1]:.2f} "
            f"| {row[2]:.2f} ({row[3]:.0%}) | {row[4]:.0f} |"
        )
    if args.figure:
        draw(names, bars, args.figure)


def draw(names: Sequence[str], bars: Mapping[str, Sequence[float]], path: str) -> None:
    """Draws groups of bars, with a bar for each name."""
    from matplotlib.figure import Figure

    axis = (figure := Figure(figsize=(9, 3), layout="constrained")).add_subplot()
    for i, (name, heights) in enumerate(zip(names, zip(*bars.values(), strict=True), strict=True)):
        axis.bar([x + 0.27 * (i - 1) for x in range(len(bars))], heights, width=0.25, label=name)
    axis.set(ylabel="useful compute", ylim=(0, 1.2), xlabel="long samples, ranks")
    axis.set_xticks(range(len(bars)), list(bars))
    axis.legend(loc="upper center", ncols=3)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
