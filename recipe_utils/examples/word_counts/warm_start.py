"""Checkpoint of a small model that was trained on sentences of docstrings, from which rewards train it further."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torchtune.training import FullModelHFCheckpointer

from recipe_utils.examples.fresh_weights import fresh_llama_checkpointer
from recipe_utils.examples.question_answers import TokenizedPairs, tokenized_pairs
from recipe_utils.examples.stdlib_docs import digest_of, docstring_tokenizer
from recipe_utils.examples.word_counts.questions import questions_with_answers, write_prompts
from recipe_utils.torchtune_names import IGNORE_INDEX, logger

_BATCH_SIZE, _LEARNING_RATE, _NUM_WARMUP_STEPS = 32, 3e-3, 20


def word_count_checkpointer(
    model: Mapping[str, Any],
    checkpoint_dir: str,
    output_dir: str,
    docstrings_path: str,
    num_steps: int = 200,
    seed: int = 0,
) -> FullModelHFCheckpointer:
    """Returns the checkpointer of a model that answers questions with a sentence, but of any number of words.

    The first call trains it from fresh weights, in less than a minute on two CPU cores. It also writes the prompts of
    :func:`.write_prompts` beside the text.

    ``docstrings_path`` is the file of :func:`.docstring_pairs`, ``num_steps`` the number of update steps of this
    training, ``seed`` that of fresh weights and samples. For other arguments see :func:`.fresh_llama_checkpointer`.
    """
    tokenizer = docstring_tokenizer(f"{checkpoint_dir}/tokenizer.model", docstrings_path, model["vocab_size"])

    def train(module: nn.Module) -> None:
        logger.info(f"Trains the model of {checkpoint_dir} for {num_steps} update steps before its rewards do")
        pairs = questions_with_answers(docstrings_path, "train")
        _train(module, tokenized_pairs(tokenizer, pairs), tokenizer.pad_id, num_steps, seed)

    # A tokenizer of another text has other ids, so that weights are made again.
    recorded = {"warm_start.num_steps": num_steps, "warm_start.docstrings": digest_of(docstrings_path)}
    checkpointer = fresh_llama_checkpointer(model, checkpoint_dir, output_dir, seed, train=train, trained_on=recorded)
    write_prompts(Path(docstrings_path).parent, docstrings_path)
    return checkpointer


def _train(model: nn.Module, samples: TokenizedPairs, pad_id: int, num_steps: int, seed: int) -> None:
    """Trains a model on random samples: cross-entropy of answers, with a linear schedule."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95), fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / _NUM_WARMUP_STEPS, 1 - step / num_steps)
    )
    draws = random.Random(seed)
    for _ in range(num_steps):
        batch = [samples[draws.randrange(len(samples))] for _ in range(_BATCH_SIZE)]
        # Padding at the right: no token of a sample attends to it.
        tokens, labels = (
            pad_sequence([torch.tensor(sample[name]) for sample in batch], batch_first=True, padding_value=value)
            for name, value in (("tokens", pad_id), ("labels", IGNORE_INDEX))
        )
        logits = model(tokens)[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
