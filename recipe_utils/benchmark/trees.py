"""Times update steps on conversations whose turns share what they begin with, against other layouts.

    python -m recipe_utils.benchmark.trees [--kind turns|agent] [--num_steps 8] [--scale 4]

All layouts train the same turns of the same conversations in each update step, from the same weights,
in turning order in one process; a pair is one update step. Texts are words of generated lengths, rendered
by the chat template of :mod:`recipe_utils.embedded.stdlib_conversations`.
"""

import argparse
import json
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from recipe_utils.settings.describe import load_recipe
from recipe_utils.tune.registry import config_path

# Of a turn in tokens, before they are divided by the scale: user, thinking, answer; then turns.
KINDS = {"turns": (100, 600, 200, 10), "agent": (500, 200, 100, 20)}
_SYSTEM = 2000
"""Tokens of the system prompt of an agent's run."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {"dataset.split_turns": "shared", "microbatching": "packed"},
    "packed": {"dataset.split_turns": True, "microbatching": "packed"},
    "padded": {"dataset.split_turns": True, "microbatching": "in_order"},
}


def conversations(kind: str, number: int, scale: float) -> Iterator[list[dict[str, str]]]:
    """Yields messages; lengths are drawn within a third of the mean."""
    draw = random.Random(0)
    *means, num_turns = KINDS[kind]

    def words(mean: float) -> str:
        size = max(round(mean / scale * draw.uniform(2 / 3, 4 / 3)), 1)
        return " ".join(draw.choice("abcdefghij") for _ in range(size))

    system = words(_SYSTEM)
    for _ in range(number):
        messages = [{"role": "system", "content": system}] if kind == "agent" else []
        for _ in range(num_turns):
            user, thinking, answer = map(words, means)
            messages.append({"role": "user", "content": user})
            answer_message = {"role": "assistant", "content": answer, "reasoning_content": thinking}
            messages.append(answer_message)
        yield messages


def config_of(layout: str, kind: str, num_steps: int, scale: float, folder: Path) -> Any:
    """Returns a config of fine-tuning with a layout; one conversation is an update step."""
    embedded = "recipe_utils.embedded.stdlib_conversations.conversation_tokenizer"
    sizes = dict(OmegaConf.load(config_path("llama3_2/5M_full_update_step")).model)
    model = {**sizes, "max_seq_len": 16_384}
    num_turns = KINDS[kind][-1]
    per_step = 1 if layout == "shared" else num_turns
    config = {
        "output_dir": str(folder / layout),
        "model": model,
        "tokenizer": {
            "_component_": embedded,
            "path": str(folder / "tokenizer" / "tokenizer.model"),
            "docstrings_path": str(folder / "docstrings.json"),
        },
        "dataset": {
            "_component_": "recipe_utils.data.chat_template.conversation_dataset",
            "path": str(folder / "conversations.jsonl"),
        },
        "checkpointer": {
            "_component_": "recipe_utils.embedded.fresh_weights.fresh_llama_checkpointer",
            "model": model,
            "checkpoint_dir": str(folder / "fresh"),
            "output_dir": str(folder / layout),
        },
        "loss": {"_component_": "recipe_utils.loss.LinearCrossEntropyLoss"},
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.0},
        "batch_size": min(per_step, 4 if kind == "agent" else 8),
        "global_batch_size": per_step,
        "shuffle": False,
        "prefetch_update_steps": 0,
        "max_steps_per_epoch": num_steps,
        "seed": 0,
        "device": "cpu",
        "dtype": "fp32",
    }
    cfg = OmegaConf.create(config)
    for key, value in LAYOUTS[layout].items():
        OmegaConf.update(cfg, key, value)
    if layout != "padded":
        cfg.max_tokens_per_microbatch = 16_384
    return cfg


def measure(kind: str, num_steps: int, scale: float) -> list[dict[str, tuple[float, int, float]]]:
    """Returns CPU seconds, positions and loss by layout, for each update step."""
    found = []
    recipe = load_recipe("full_finetune_update_step")[1]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        lines = (json.dumps({"messages": each}) for each in conversations(kind, num_steps, scale))
        (folder / "conversations.jsonl").write_text("\n".join(lines))
        made = {}
        for layout in LAYOUTS:
            cfg = config_of(layout, kind, num_steps, scale, folder)
            trainer = recipe(cfg)
            stack.enter_context(trainer.run)
            trainer.setup(cfg)
            made[layout] = trainer, iter(stack.enter_context(trainer.loader.epoch(0)))
        order = [*made]
        for index in range(num_steps):
            of_step = {}
            for layout in order[index % 3 :] + order[: index % 3]:
                trainer, steps = made[layout]
                step = next(steps)
                began = time.process_time()
                metrics, _ = trainer.update(step)
                seconds = time.process_time() - began
                of_step[layout] = seconds, step.totals["positions"], float(metrics["loss"])
            found.append(of_step)
    return found


def main() -> None:
    """Prints the CPU time of the other layouts over that of ``shared``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="turns")
    parser.add_argument("--num_steps", type=int, default=8)
    parser.add_argument("--scale", type=float, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    steps = measure(args.kind, args.num_steps, args.scale)
    for other in ("packed", "padded"):
        ratios = [each[other][0] / each["shared"][0] for each in steps]
        positions = sum(e[other][1] for e in steps) / sum(e["shared"][1] for e in steps)
        deviation = max(abs(each[other][2] / each["shared"][2] - 1) for each in steps)
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"{args.kind}: shared over {other}: {median:.2f} ({low:.2f} to {high:.2f}) in CPU time, "
            f"{positions:.2f} in positions; losses differ by at most {deviation:.0e}"
        )


if __name__ == "__main__":
    main()
