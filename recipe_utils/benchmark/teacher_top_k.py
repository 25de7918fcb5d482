"""Measures how much of a real teacher ``teacher_cache: top_k`` keeps, as the error of the gradient it leads to.

    pip install gguf
    python -m recipe_utils.benchmark.teacher_top_k SmolLM2-135M-Instruct.Q4_1.gguf
    python -m recipe_utils.benchmark.teacher_top_k SmolLM2-135M-Instruct.Q4_1.gguf --top_k 16 4096 --temperatures 4

The teacher answers questions about Python's standard library with its docstrings. Its students are itself with noise
on its last hidden states, and itself without its last layers. The gradient of the forward KL at a student's logits is
compared with that from the teacher's whole distribution, in L2 over all targets.

Shapes: s tokens of a sample, n targets of all samples, d embedding width, v vocabulary.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from recipe_utils.benchmark.gguf_model import read_gguf
from recipe_utils.embedded.question_answers import Pairs
from recipe_utils.embedded.stdlib_docs import docstring_pairs
from recipe_utils.loss.chunks import chunks_of
from recipe_utils.loss.distillation import (
    LinearDistillationLoss,
    TeacherHidden,
    TeacherTopK,
    top_k_of,
)

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)
END = "<|im_end|>"
ROWS_AT_ONCE = 64
"""Several times as many logits exist at a time."""

Cached = TeacherHidden | TeacherTopK
Way = Callable[[TeacherHidden], Cached]
"""What is cached of some rows, at one temperature."""


class Sample(NamedTuple):
    """A question and its answer."""

    tokens: Tensor
    """[s]."""
    num_targets: int
    """The last tokens, which are the answer's."""


class Targets(NamedTuple):
    """What is known of all samples' targets."""

    labels: Tensor
    """[n]."""
    of_teacher: Tensor
    """After the final norm, [n, d]."""
    of_cut: Tensor
    """Likewise without the last layers, [n, d]."""


class Kept(NamedTuple):
    """What a cache keeps of a teacher."""

    bytes_per_target: float
    mass: float
    """Probability of the tokens that are kept one by one."""
    errors: list[float]
    """Of the gradient at each student's logits, relative."""


def make_samples(
    tokenizer: Tokenizer, pairs: Pairs, num_targets: int, max_answer_len: int
) -> list[Sample]:
    """Random ones, until there are enough targets.

    Args:
        tokenizer: with the tokens of :data:`PROMPT`.
        pairs: questions and answers.
        num_targets: of all samples together, at most.
        max_answer_len: long answers are cut to it [tokens].
    """
    samples: list[Sample] = []
    for question, answer in random.Random(0).sample(pairs, len(pairs)):
        at_most = min(max_answer_len, num_targets - sum(sample.num_targets for sample in samples))
        if at_most <= 0:
            break
        prompt_ids = tokenizer.encode(PROMPT.format(question=question)).ids
        answer_ids = tokenizer.encode(answer + END).ids[:at_most]
        samples.append(Sample(torch.tensor(prompt_ids + answer_ids), len(answer_ids)))
    return samples


@torch.no_grad()
def find_targets(model: TransformerDecoder, samples: Iterable[Sample], num_layers: int) -> Targets:
    """Labels and hidden states of the targets.

    Args:
        model: the teacher.
        samples: one of them goes through the model at a time.
        num_layers: that the cut student has.
    """
    model = _without_output(model, num_layers)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for tokens, num_targets in samples:
        cut, whole = model(tokens[None])
        places = slice(-num_targets - 1, -1)
        parts.append((tokens[-num_targets:], whole[0, places], model.norm(cut[0, places])))
    return Targets(*map(torch.cat, zip(*parts, strict=True)))


def _without_output(model: TransformerDecoder, num_layers: int) -> TransformerDecoder:
    """Shares all modules; returns what goes into layer ``num_layers``, too."""
    return TransformerDecoder(
        tok_embeddings=model.tok_embeddings,
        layers=model.layers,
        max_seq_len=model.max_seq_len,
        num_heads=model.num_heads,
        head_dim=model.head_dim,
        norm=model.norm,
        output=nn.Identity(),
        output_hidden_states=[num_layers],
    )


def ways_at(temperature: float, top_k: Iterable[int], vocab_size: int) -> dict[str, Way]:
    """By the name in the table."""
    ways: dict[str, Way] = {
        f"top {k:,}": partial(top_k_of, k=k, num_tokens=vocab_size, temperature=temperature)
        for k in top_k
    }
    return ways | {"hidden states in bf16": _in_bf16}


def _in_bf16(teacher: TeacherHidden) -> TeacherHidden:
    def output(hidden: Tensor) -> Any:
        return teacher.output(hidden.to(teacher.hidden.dtype))

    return teacher._replace(hidden=teacher.hidden.bfloat16(), output=output)


@torch.no_grad()
def measure(
    teacher: TeacherHidden,
    students: Sequence[Tensor],
    ways: Mapping[str, Way],
    temperature: float,
) -> dict[str, Kept]:
    """Each way's, over all rows.

    Args:
        teacher: of all targets.
        students: their last hidden states, each [n, d]; they have the teacher's output layer.
        ways: by name.
        temperature: of both sides.
    """
    num_rows = len(teacher.hidden)
    num_bytes, mass = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0.0)
    squares = {name: torch.zeros(len(students), dtype=torch.float64) for name in ways}
    exact_squares = torch.zeros(len(students), dtype=torch.float64)
    for rows in chunks_of(num_rows, ROWS_AT_ONCE):
        of_rows = teacher.of_rows(rows)
        cached = {name: way(of_rows) for name, way in ways.items()}
        for name, of_way in cached.items():
            num_bytes[name] += _num_bytes(of_way)
            mass[name] += _mass(of_way)
        for i, student in enumerate(students):
            logits = teacher.output(student[rows])
            exact = gradient_at(logits, of_rows, temperature)
            exact_squares[i] += exact.square().sum()
            for name, of_way in cached.items():
                gradient = gradient_at(logits, of_way, temperature)
                squares[name][i] += gradient.sub_(exact).square().sum()
    return {
        name: Kept(
            num_bytes[name] / num_rows,
            mass[name] / num_rows,
            (squares[name] / exact_squares).sqrt().tolist(),
        )
        for name in ways
    }


@torch.enable_grad()
def gradient_at(logits: Tensor, teacher: Cached, temperature: float) -> Tensor:
    """Of the summed divergence, at a student's logits [c, v]."""
    logits = logits.detach().requires_grad_()
    loss = LinearDistillationLoss(temperature=temperature, num_output_chunks=1)
    loss.of_rows(nn.Identity(), logits, None, teacher)[0].backward()
    assert logits.grad is not None
    return logits.grad


def _num_bytes(cached: Cached) -> int:
    if isinstance(cached, TeacherHidden):
        return cached.hidden.nbytes
    return cached.token_ids.nbytes + cached.log_probs.nbytes


def _mass(cached: Cached) -> float:
    """Summed over the rows."""
    if isinstance(cached, TeacherHidden):
        return len(cached.hidden)
    return cached.log_probs[:, :-1].exp().sum().item()


@torch.no_grad()
def cross_entropy(output: nn.Module, hidden: Tensor, labels: Tensor) -> float:
    """Mean over the targets [nats]."""
    of_chunks = [
        F.cross_entropy(output(hidden[rows]), labels[rows], reduction="sum")
        for rows in chunks_of(len(labels), ROWS_AT_ONCE)
    ]
    return float(sum(of_chunks)) / len(labels)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a markdown table, and how well teacher and students predict the text.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a Llama with SmolLM's tokenizer, as GGUF")
    parser.add_argument("--top_k", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 2.0])
    parser.add_argument("--num_targets", type=int, default=1100)
    parser.add_argument("--max_answer_len", type=int, default=128, help="in tokens")
    parser.add_argument(
        "--noise", type=float, default=0.3, help="of a student, over the hidden states' own size"
    )
    parser.add_argument("--num_layers", type=int, default=24, help="of the other student")
    args = parser.parse_args(arguments)

    try:
        model, tokenizer = read_gguf(args.model)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        sys.exit(str(error))
    if not 0 <= args.num_layers < len(model.layers):
        parser.error(f"--num_layers {args.num_layers}: the model has {len(model.layers)}")
    with tempfile.TemporaryDirectory() as folder:
        pairs = docstring_pairs(str(Path(folder) / "docstrings.json"))
    samples = make_samples(tokenizer, pairs, args.num_targets, args.max_answer_len)
    labels, of_teacher, of_cut = find_targets(model, samples, args.num_layers)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(of_teacher.shape, generator=generator)
    noisy = of_teacher + args.noise * of_teacher.square().mean().sqrt() * noise
    teacher = TeacherHidden(of_teacher, model.output)
    students = {"noise": noisy, f"{args.num_layers} layers": of_cut}

    vocab_size = model.tok_embeddings.num_embeddings
    columns = [
        measure(teacher, list(students.values()), ways_at(t, args.top_k, vocab_size), t)
        for t in args.temperatures
    ]
    heads = [
        f"mass, T={t:g} | " + " | ".join(f"error, {student}, T={t:g}" for student in students)
        for t in args.temperatures
    ]
    print(f"| cached | bytes per target | {' | '.join(heads)} |")
    print("| --- " * (2 + len(columns) * (1 + len(students))) + "|")
    for way, first in columns[0].items():
        cells = [f"{x:.4f}" for of_way in columns for x in (of_way[way].mass, *of_way[way].errors)]
        print(f"| {way} | {first.bytes_per_target:,.0f} | {' | '.join(cells)} |")
    print(f"\nCross-entropy of {len(labels):,} targets in {len(samples)} answers [nats]: ", end="")
    models = {"teacher": of_teacher, **students}
    of_models = [
        f"{name} {cross_entropy(model.output, h, labels):.2f}" for name, h in models.items()
    ]
    print(", ".join(of_models))


if __name__ == "__main__":
    main()
