"""The loop of "Update steps in your own loop" against single samples, in float64."""

import re
from pathlib import Path
from textwrap import dedent, indent

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig

from recipe_utils.update_steps import ShuffledOrder

PAGE = Path(__file__).parents[2] / "recipes" / "update_steps_in_your_loop.md"
PER_STEP, NUM_SAMPLES = 12, 30
SAMPLES = tiny.make_samples(NUM_SAMPLES)
SIZES = {
    "microbatch=4096": "microbatch=60",
    "global_batch_size=64": f"global_batch_size={PER_STEP}",
    "range(3)": "range(1)",
}
PADDED = {'"packed"': '"least_padding"'}
CHUNKED = {
    "AutoModelForCausalLM.from_pretrained(folder)": "SummedLoss(AutoModelForCausalLM.from_pretrained(folder))",
    "*model.model.layers": "*model.model.model.layers",
    "(loss_sum(micro": "(model(micro",
}
BLOCK = r"^ *```python\n(.*?)^ *```"


class Recorder(torch.optim.AdamW):
    """Records gradients instead of changing weights."""

    def step(self):
        """Records the gradient of each parameter."""
        grads = [p.grad for p in self.param_groups[0]["params"]]
        RECORDED.append([grad.full_tensor() if isinstance(grad, DTensor) else grad.clone() for grad in grads])


RECORDED = []


def run_page(folder, changes):
    """Returns the gradients of each update step of the page's loop."""
    code, padded, chunked = (dedent(block) for block in re.findall(BLOCK, PAGE.read_text(), re.M | re.S))
    if changes.items() >= PADDED.items():
        code = re.sub(r"^ +rows = .*\n +logits = .*\n", indent(padded, " " * 4), code, flags=re.M)
    if changes.items() >= CHUNKED.items():
        code = code.replace("\nranks = ", f"{chunked}\nranks = ")
    for old, new in changes.items():
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    RECORDED.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Recorder)
        exec(code, {"dataset": SAMPLES, "folder": folder})
    return RECORDED


def gradients_of_single_samples(folder):
    """Returns the gradients of each update step from samples one by one."""
    model, gradients = AutoModelForCausalLM.from_pretrained(folder), []
    order = ShuffledOrder(NUM_SAMPLES, PER_STEP)
    for step in range(order.num_steps(0)):
        losses = []
        for index in order.samples(0, step):
            labels = torch.tensor(SAMPLES[index]["labels"])[1:]
            logits = model(torch.tensor([SAMPLES[index]["tokens"]])).logits[0, :-1]
            losses.append(cross_entropy(logits[labels != tiny.IGNORE], labels[labels != tiny.IGNORE], reduction="none"))
        model.zero_grad()
        torch.cat(losses).mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    return gradients


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=tiny.VOCAB_SIZE, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).double().save_pretrained(folder)
    return folder, gradients_of_single_samples(folder)


def error_of(found, expected):
    """Returns the largest error of a parameter's gradient in any update step, relative to its norm."""
    assert [len(grads) for grads in found] == [len(grads) for grads in expected]
    pairs = [pair for step in zip(found, expected, strict=True) for pair in zip(*step, strict=True)]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize("changes", [{}, PADDED, CHUNKED], ids=["packed", "padded", "in chunks"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_its_gradients_are_those_of_single_samples(world_size, changes, llama):
    folder, expected = llama
    for found in run_distributed(run_page, world_size, folder, SIZES | changes):
        assert error_of(found, expected) < 1e-10


MUTANTS = {
    "a mean per microbatch": {
        'reduction="sum"': 'reduction="mean"',
        'step.scale("target_tokens")': "1 / len(step.microbatches)",
    },
    "a total of one rank": {'step.scale("target_tokens")': '1 / step.totals["target_tokens"]'},
    "a cache": {"use_cache=False": "use_cache=True"},
    "no positions": {', "position_ids": inputs["input_pos"]': ""},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_loop_is_noticed(name, llama):
    folder, expected = llama
    assert error_of(run_distributed(run_page, 2, folder, SIZES | MUTANTS[name])[0], expected) > 1e-3
