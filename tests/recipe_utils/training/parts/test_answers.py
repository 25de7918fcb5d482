"""Answers during training are those of the model alone, in every layout; training is unaffected."""

import pytest
import tiny
import torch
from arrays import HSDP_2, TP_2
from distributed_runs import run_distributed
from recipe_runs import SFT, keep_messages, run_recipe
from torchtune.data import Message

from recipe_utils.training.parts.answers import generate

CPU = torch.device("cpu")
PROMPTS = ["Why?", "What does it do, and for how long?", "x"]
ASKING = {"sample_prompts": PROMPTS, "sample_every_n_steps": 2, "sample_max_new_tokens": 6}


def one_by_one(model, prompt, num_tokens):
    """Returns greedy answers by forwards of all tokens so far, without padding."""
    tokenizer = tiny.tiny_tokenizer()
    messages = [Message(role="user", content=prompt)]
    given = tokenizer({"messages": messages}, inference=True)["tokens"]
    tokens = list(given)
    for _ in range(num_tokens):
        with torch.no_grad():
            best = int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(best)
        if best == tokenizer.eos_id:
            break
    return tokenizer.decode([token for token in tokens[len(given) :] if token != tokenizer.eos_id])


@pytest.mark.parametrize("sizes", ["MODEL", "UNTIED_MODEL"])
def test_answers_are_those_of_the_likeliest_tokens_one_by_one(sizes):
    model = tiny.tiny_model(getattr(tiny, sizes), seed=3).eval()
    expected = [one_by_one(model, prompt, 12) for prompt in PROMPTS]
    model.train()
    assert generate(model, tiny.tiny_tokenizer(), PROMPTS, 12, CPU) == expected
    assert model.training
    assert len(set(expected)) == len(PROMPTS)


def test_an_answer_ends_where_the_tokenizer_says_or_the_model_can_take_no_more():
    model = tiny.tiny_model(seed=3).eval()
    (whole,) = generate(model, tiny.tiny_tokenizer(), ["Why?"], 12, CPU)
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.stop_tokens = [int(whole.split()[3])]
    end = whole.split().index(whole.split()[3])
    assert generate(model, tokenizer, ["Why?"], 12, CPU) == [" ".join(whole.split()[:end])]
    (longest,) = generate(model, tiny.tiny_tokenizer(), ["Why?"], 1000, CPU)
    assert len(longest.split()) <= 64 - len("Why?")


class Offloaded(torch.nn.Module):
    """Computes on another device than that of its parameters, as with ``fsdp_cpu_offload``."""

    def __init__(self, model):
        super().__init__()
        self.norm, self.max_seq_len = model.norm, model.max_seq_len
        self.offloaded = torch.nn.Parameter(torch.zeros(1, device="meta"))
        self.compute = model.forward

    def parameters(self, recurse=True):
        yield self.offloaded

    def forward(self, tokens):
        return self.compute(tokens)


def test_inputs_are_on_the_device_of_the_ranks_not_of_offloaded_parameters():
    model = tiny.tiny_model(seed=3)
    expected = generate(model, tiny.tiny_tokenizer(), PROMPTS, 3, CPU)
    assert generate(Offloaded(model), tiny.tiny_tokenizer(), PROMPTS, 3, CPU) == expected


def answers_and_losses(config, recipe=SFT):
    with keep_messages() as messages:
        logged = run_recipe(config, recipe)
    answers = [text for text in messages if " -> " in text]
    return answers, [metrics["loss"] for metrics in logged if "loss" in metrics]


LAYOUTS = {"FSDP2": (2, {}), "HSDP": (4, HSDP_2), "tensor parallel": (2, {**TP_2, "model": tiny.UNTIED_MODEL})}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_every_layout_the_answers_are_those_of_one_process(layout, tiny_config):
    world_size, changes = LAYOUTS[layout]
    batch = {"global_batch_size": 8, "gradient_accumulation_steps": ..., "batch_size": 1}
    config = tiny_config(**ASKING, **batch, **changes)
    alone = {key: value for key, value in config.items() if not key.startswith("tensor_parallel")}
    alone["data_parallel_replicate_dim"] = 1
    expected, losses = answers_and_losses(alone)
    assert len(expected) == 2 * len(PROMPTS)
    (answers, found), *others = run_distributed(answers_and_losses, world_size, config)
    assert answers == expected
    assert found == pytest.approx(losses, rel=1e-5)
    assert not any(answers for answers, _ in others)


@pytest.mark.slow
def test_sampling_does_not_change_the_losses(recipe_and_config):
    recipe, make = recipe_and_config
    model = {**tiny.MODEL, "attn_dropout": 0.1} if recipe == SFT else tiny.MODEL
    _, expected = answers_and_losses(make(model=model), recipe)
    answers, losses = answers_and_losses(make(model=model, **ASKING), recipe)
    assert losses == expected
    assert answers
