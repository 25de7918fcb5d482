"""Stepping inside the backward is the same training, with one schedule for all parameters."""

import copy
from functools import partial

import pytest
import tiny
import torch
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup, get_lr

from recipe_utils.optim.optimizer import (
    OptimizerInBackward,
    build_lr_scheduler,
    load_optimizer_state,
)

NUM_STEPS = 6
MAKE_OPTIMIZER = partial(torch.optim.AdamW, lr=0.02)
MAKE_SCHEDULER = partial(get_cosine_schedule_with_warmup, num_warmup_steps=2)


def make_optimizer(kind, model):
    if kind == "in_backward":
        return OptimizerInBackward(model, MAKE_OPTIMIZER)
    return MAKE_OPTIMIZER(model.parameters())


def make_scheduler(optimizer, last_epoch=-1):
    return build_lr_scheduler(MAKE_SCHEDULER, optimizer, NUM_STEPS, last_epoch)


def train(model, optimizer, steps, scheduler=None):
    """Learning rates of all parameter groups, at each step."""
    rates = []
    for step in steps:
        rates.append({group["lr"] for group in optimizer.param_groups})
        tokens = torch.randint(
            tiny.VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(step)
        )
        model(tokens).logsumexp(-1).sum().backward()
        if not isinstance(optimizer, OptimizerInBackward):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()
    return rates


def assert_same_weights(model, other):
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize("sizes", [tiny.MODEL, tiny.UNTIED_MODEL], ids=["tied", "untied"])
def test_stepping_in_the_backward_gives_the_weights_of_the_plain_optimizer(sizes):
    models = [tiny.tiny_model(sizes) for _ in range(2)]
    rates = []
    for kind, model in zip(("plain", "in_backward"), models, strict=True):
        optimizer = make_optimizer(kind, model)
        rates.append(train(model, optimizer, range(3), make_scheduler(optimizer)))
    start = tiny.tiny_model(sizes)
    assert (models[0].tok_embeddings.weight - start.tok_embeddings.weight).abs().max() > 0.01
    assert rates[0] == rates[1]
    assert_same_weights(*models)


def test_gradients_are_freed_by_the_backward():
    model = tiny.tiny_model()
    OptimizerInBackward(model, MAKE_OPTIMIZER)
    model(torch.ones(1, 3, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["plain", "in_backward"])
def test_the_scheduler_moves_every_parameters_learning_rate(kind):
    model = tiny.tiny_model()
    optimizer = make_optimizer(kind, model)
    scheduler = make_scheduler(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in parameters} == {id(p) for p in model.parameters()}
    rates = train(model, optimizer, range(NUM_STEPS), scheduler)
    assert all(len(of_step) == 1 for of_step in rates)
    # Warm-up from 0, then a cosine down to 0 at the last step.
    rates = [of_step.pop() for of_step in rates]
    assert rates[:3] == pytest.approx([0, 0.01, 0.02])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert get_lr(optimizer) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", ["plain", "in_backward"])
def test_training_goes_on_from_a_saved_state_as_if_it_had_not_stopped(kind):
    straight, resumed = tiny.tiny_model(), tiny.tiny_model()
    optimizer = make_optimizer(kind, straight)
    scheduler = make_scheduler(optimizer)
    before = train(straight, optimizer, range(3), scheduler)
    # As torchtune's recipes save it: a plain optimizer's parameters by their names.
    state = copy.deepcopy(optimizer.state_dict())
    if kind == "plain":
        names = [name for name, _ in straight.named_parameters()]
        state["state"] = {names[i]: value for i, value in state["state"].items()}
        state["param_groups"][0]["params"] = names
    else:
        for name, part in state.items():
            part["state"] = {name: part["state"][0]}
            part["param_groups"][0]["params"] = [name]
    resumed.load_state_dict(straight.state_dict())
    after = train(straight, optimizer, range(3, NUM_STEPS), scheduler)

    optimizer = make_optimizer(kind, resumed)
    load_optimizer_state(resumed, optimizer, state, torch.device("cpu"))
    scheduler = make_scheduler(optimizer, last_epoch=len(before) - 1)
    rates = train(resumed, optimizer, range(3, NUM_STEPS), scheduler)
    assert [sorted(r) for r in rates] == [pytest.approx(sorted(r)) for r in after]
    assert_same_weights(resumed, straight)
