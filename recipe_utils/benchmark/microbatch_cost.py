"""Measures the cost of microbatches and fits the constants of ``MicrobatchCost``.

    python -m recipe_utils.benchmark.microbatch_cost                        # the embedded model on this machine
    python -m recipe_utils.benchmark.microbatch_cost --config my.yaml device=cuda dtype=bf16

Times forward and backward of padded microbatches of many shapes in random order; half of the
positions are targets. Fits medians with seconds = a * positions + b * positions * longest + c by
least squares of relative errors, and compares overhead_slots = c / a and equal_attention_length = a
/ b with the constants in use.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune import config, training

from recipe_utils.data.loader.microbatch import Targets
from recipe_utils.data.plan.cost import ESTIMATED_COSTS, MEASURED_COSTS
from recipe_utils.loss.attach_loss import attach_loss
from recipe_utils.model.construct.sizes import equal_attention_length, vocab_size_and_max_seq_len
from recipe_utils.tune.registry import config_path


def main() -> None:
    """Prints the measurements and the fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="llama3_2/5M_full_update_step")
    parser.add_argument("--max_slots", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    cfg: Any = OmegaConf.load(config_path(args.config))
    cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(args.overrides))

    torch.manual_seed(0)
    device = torch.device(cfg.device)
    with training.set_default_dtype(training.get_dtype(cfg.dtype, device)), device:
        model = config.instantiate(cfg.model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    attach_loss(model, config.instantiate(cfg.loss))

    longest_sample = vocab_size_and_max_seq_len(model)[1]
    shapes = [
        (rows, longest)
        for longest in (2**power for power in range(4, 20))
        for rows in (2**power for power in range(12))
        if longest <= longest_sample and rows * longest <= args.max_slots
    ]
    seconds: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(args.repeats + 1):  # the first warms up
        for shape in random.sample(shapes, len(shapes)):
            seconds[shape].append(time_of(model, *shape, device))
    medians = {shape: statistics.median(times[1:]) for shape, times in seconds.items()}

    terms = np.array([(r * s, r * s * s, 1.0) for r, s in shapes])
    times = np.array([medians[shape] for shape in shapes])
    (a, b, c), *_ = np.linalg.lstsq(terms / times[:, None], np.ones(len(times)), rcond=None)
    fitted = terms @ (a, b, c)
    print("| rows x longest | positions | median [ms] | fitted [ms] |")
    print("| --- | --- | --- | --- |")
    for (rows, longest), measured, fit in zip(shapes, times, fitted, strict=True):
        print(f"| {rows} x {longest} | {rows * longest} | {measured * 1e3:.2f} | {fit * 1e3:.2f} |")
    print(f"\nMedian relative error of the fit: {np.median(np.abs(fitted / times - 1)):.1%}")
    used = MEASURED_COSTS.get(device.type, ESTIMATED_COSTS)
    print(
        f"overhead_slots: fitted {c / a:.0f}, used {used.overhead_slots:.0f}; microbatch_overhead_slots in a "
        "config sets it"
    )
    theory = equal_attention_length(model)
    print(
        f"equal_attention_length: fitted {a / b:.0f}, N / (L * d) {theory:.0f}; "
        f"attention's slowness: fitted {theory * b / a:.1f}, used {used.attention_slowness:.1f}"
    )


def time_of(model: nn.Module, rows: int, longest: int, device: torch.device) -> float:
    """Returns the time of one forward and backward [s]."""
    vocab_size = vocab_size_and_max_seq_len(model)[0]
    tokens = torch.randint(vocab_size, (rows, longest), device=device)
    targets = Targets(tokens, torch.arange(0, rows * longest, 2, device=device))
    model.zero_grad(set_to_none=False)  # the backward accumulates
    return median_seconds(lambda: model(tokens, targets=targets)[0].backward(), device, 0, 1)


def median_seconds(
    call: Callable[[], Any], device: torch.device, num_warm_up: int, num_timed: int
) -> float:
    """Returns the median time of a call, on CUDA between events so that the host can run ahead."""
    for _ in range(num_warm_up):
        call()
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(num_timed):
            call()
            times.append(time.perf_counter())
        return statistics.median(stop - start for start, stop in pairwise(times))
    torch.cuda.synchronize(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_timed + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairwise(events))


if __name__ == "__main__":
    main()
