"""Measures the peak memory and the time of a distillation loss, forward and backward, several ways.

    python -m recipe_utils.benchmark.distillation_memory
    python -m recipe_utils.benchmark.distillation_memory --ways automodel 256 --embed_dim 2048 --teacher_embed_dim 4096

From a student's and a teacher's last hidden states to the gradients of the student's and of its output weight;
cross-entropy and forward KL in equal parts, all ways with the same gradients. Every second slot is a target:

- automodel: both project all slots, a mask selects those with a target, softmaxes in fp32 (NeMo Automodel's default).
- torchtune: both project all slots, in 8 chunks of logits that are kept, and its chunked losses.
- whole: both project target positions only, with all of their logits at once.
- 512, 256, 128: ours, so many target positions at a time.
- top-64: ours, 256 at a time, with the teacher's 64 likeliest tokens of each from a cache.

Each run is a process of its own; its peak is what it had at most, less what it had with all inputs and weights.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune import training
from torchtune.modules.loss import CEWithChunkedOutputLoss, ForwardKLWithChunkedOutputLoss

from recipe_utils.benchmark.interleave import peak_memory_bytes
from recipe_utils.data.loader.microbatch import Targets
from recipe_utils.loss.chunks import chunks_of
from recipe_utils.loss.distillation import (
    LinearDistillationLoss,
    TeacherHidden,
    TeacherTopK,
    make_distillation_loss,
    top_k_of,
)
from recipe_utils.loss.linear_cross_entropy import LinearCrossEntropyLoss

IGNORE = -100
KD_RATIO = 0.5


class Sizes(NamedTuple):
    """Of a microbatch and of both output layers; d, d_t and v of the shapes below."""

    num_slots: int
    embed_dim: int
    teacher_embed_dim: int
    vocab_size: int


class Inputs(NamedTuple):
    """What a loss begins with; s slots, n of them targets."""

    hidden: Tensor
    """[1, s, d]."""
    output: nn.Linear
    """[..., d] -> [..., v]."""
    of_teacher: Tensor
    """[1, s, d_t]."""
    teacher_output: nn.Linear
    """[..., d_t] -> [..., v], frozen."""
    targets: Targets


def make_inputs(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Random hidden states, weights and labels."""
    torch.manual_seed(0)
    with training.set_default_dtype(dtype), device:
        outputs = [
            nn.Linear(width, sizes.vocab_size, bias=False)
            for width in (sizes.embed_dim, sizes.teacher_embed_dim)
        ]
        hidden, of_teacher = (torch.randn(1, sizes.num_slots, o.in_features) for o in outputs)
        labels = torch.randint(sizes.vocab_size, (1, sizes.num_slots))
        labels[:, ::2] = IGNORE
        positions = torch.arange(1, sizes.num_slots, 2)
    teacher_output = outputs[1].requires_grad_(False)
    targets = Targets(labels, positions)
    return Inputs(hidden.requires_grad_(), outputs[0], of_teacher, teacher_output, targets)


def automodel(inputs: Inputs) -> Tensor:
    """The mean over the targets, [], whose backward is done. Logits are held until then, as in its recipe."""
    logits = inputs.output(inputs.hidden).flatten(0, 1)
    with torch.no_grad():
        of_teacher = inputs.teacher_output(inputs.of_teacher).flatten(0, 1)
    labels = inputs.targets.labels.flatten()
    cross_entropy = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE)
    loss = _of_both(cross_entropy, _kl_of_valid(logits, of_teacher, labels != IGNORE))
    loss.backward()
    return loss


def _kl_of_valid(logits: Tensor, of_teacher: Tensor, valid: Tensor) -> Tensor:
    logits, of_teacher = logits[valid], of_teacher[valid]
    log_p = F.log_softmax(of_teacher, dim=-1, dtype=torch.float32)
    log_q = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    p = log_p.exp()
    log_ratio = torch.where(p > 0, log_p - log_q, 0.0)
    return (p * log_ratio).sum(1).mean()


def torchtune(inputs: Inputs) -> Tensor:
    """Likewise, plus the teacher's entropy, which its divergence leaves in."""
    loss = _of_chunks(inputs)
    loss.backward()
    return loss


def _of_chunks(inputs: Inputs) -> Tensor:
    cross_entropy, divergence = CEWithChunkedOutputLoss(), ForwardKLWithChunkedOutputLoss()
    num_chunks = cross_entropy.num_output_chunks
    logits = [inputs.output(part) for part in inputs.hidden.chunk(num_chunks, dim=1)]
    with torch.no_grad():
        of_teacher = [inputs.teacher_output(h) for h in inputs.of_teacher.chunk(num_chunks, dim=1)]
    labels = inputs.targets.labels
    kd_loss: Any = divergence(logits, of_teacher, labels)
    return _of_both(cross_entropy(logits, labels), kd_loss)


def whole(inputs: Inputs) -> Tensor:
    """The mean over the targets, [], whose backward is done."""
    positions = inputs.targets.positions
    log_q = F.log_softmax(inputs.output(inputs.hidden[0, positions]).float(), dim=-1)
    with torch.no_grad():
        of_teacher = inputs.teacher_output(inputs.of_teacher[0, positions]).float()
        log_p = F.log_softmax(of_teacher, dim=-1)
        del of_teacher
    kd_loss = F.kl_div(log_q, log_p, reduction="sum", log_target=True) / len(positions)
    loss = _of_both(F.nll_loss(log_q, inputs.targets.labels[0, positions]), kd_loss)
    loss.backward()
    return loss


def _of_both(cross_entropy: Tensor, kd_loss: Tensor) -> Tensor:
    return (1 - KD_RATIO) * cross_entropy + KD_RATIO * kd_loss


def ours(teacher: TeacherHidden | TeacherTopK, tokens_per_chunk: int, inputs: Inputs) -> Tensor:
    """The mean over the targets, [], whose backward is done."""
    kd_loss = LinearDistillationLoss(tokens_per_chunk=tokens_per_chunk)
    loss_fn = make_distillation_loss(LinearCrossEntropyLoss(), kd_loss, KD_RATIO)
    targets = inputs.targets._replace(teacher=teacher)
    loss: Tensor = loss_fn(inputs.output, inputs.hidden, targets)[0] / len(targets.positions)
    loss.backward()
    return loss


def prepare(way: str, inputs: Inputs) -> Callable[[Inputs], Tensor]:
    """A way, with what it has from a cache already there."""
    theirs: Mapping[str, Callable[[Inputs], Tensor]] = {
        "automodel": automodel,
        "torchtune": torchtune,
        "whole": whole,
    }
    if way in theirs:
        return theirs[way]
    of_targets = inputs.of_teacher[0, inputs.targets.positions]
    teacher = TeacherHidden(of_targets, inputs.teacher_output)
    if not way.startswith("top-"):
        return partial(ours, teacher, int(way))
    k = min(int(way.removeprefix("top-")), inputs.output.out_features)
    # Few rows at a time, so that the cache's making does not count as the peak.
    parts = [
        top_k_of(teacher.of_rows(rows), k, inputs.output.out_features, 1.0)
        for rows in chunks_of(len(of_targets), 8)
    ]
    cached = TeacherTopK(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.log_probs for part in parts]),
        inputs.output.out_features,
    )
    return partial(ours, cached, 256)


def measure(way: str, sizes: Sizes, device_name: str, dtype_name: str) -> tuple[int, float]:
    """Peak memory [bytes] and time [seconds] of a way, in a process that does nothing else."""
    device = torch.device(device_name)
    dtype = training.get_dtype(dtype_name, device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    small = make_inputs(sizes._replace(vocab_size=64), device, dtype)
    prepare(way, small)(small)  # libraries are loaded, threads begin
    inputs = make_inputs(sizes, device, dtype)
    run = prepare(way, inputs)
    wait()
    before, started = peak_memory_bytes(device), time.perf_counter()
    run(inputs)
    wait()
    seconds = time.perf_counter() - started
    return peak_memory_bytes(device) - before, seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a markdown table, medians over the runs.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = ["automodel", "torchtune", "whole", "512", "256", "128", "top-64"]
    parser.add_argument("--ways", nargs="+", default=ways, help="the first is compared with")
    parser.add_argument("--vocab_size", type=int, default=128_256)
    parser.add_argument("--num_slots", type=int, default=2048, help="half of them targets")
    parser.add_argument("--embed_dim", type=int, default=128)
    parser.add_argument("--teacher_embed_dim", type=int, default=256)
    parser.add_argument("--num_runs", type=int, default=3, help="of each way, in turn")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32")
    args = parser.parse_args(arguments)
    sizes = Sizes(args.num_slots, args.embed_dim, args.teacher_embed_dim, args.vocab_size)

    runs: dict[str, list[tuple[int, float]]] = {way: [] for way in args.ways}
    for _ in range(args.num_runs):
        for way in args.ways:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                run = process.submit(measure, way, sizes, args.device, args.dtype)
                runs[way].append(run.result())
    medians = {
        way: [statistics.median(column) for column in zip(*of_way, strict=True)]
        for way, of_way in runs.items()
    }

    logits_bytes = args.num_slots // 2 * args.vocab_size * 4
    first_bytes = medians[args.ways[0]][0]
    print(f"| way | peak [MiB] | x [targets, v] in fp32 | over {args.ways[0]} | seconds |")
    print("| --- " * 5 + "|")
    for way, (num_bytes, seconds) in medians.items():
        print(
            f"| {way} | {num_bytes / 2**20:,.0f} | {num_bytes / logits_bytes:.2f} "
            f"| {num_bytes / first_bytes:.3f} | {seconds:.2f} |"
        )


if __name__ == "__main__":
    main()
