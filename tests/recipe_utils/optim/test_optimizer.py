"""Stepping inside the backward is the same training, with one schedule for all parameters."""

import checkpoint_runs
import pytest
import tiny
import torch
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import refusal
from torchtune.training.lr_schedulers import get_lr

from recipe_utils.optim import AdamW8bit
from recipe_utils.optim.optimizer import (
    OptimizerSettings,
    build_lr_scheduler,
    build_optimizer,
    check_optimizer,
    optimizer_on_ranks,
)  # fmt: skip
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.update_steps.settings import DataSettings

NUM_STEPS = 6


def component(path, **arguments):
    return OmegaConf.create({"_component_": path, **arguments})


def settings(**changes):
    return OptimizerSettings(optimizer={"_component_": "torch.optim.SGD"}, **changes)


OPTIMIZER = component("torch.optim.AdamW", lr=0.02)
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
SCHEDULE = component(COSINE, num_warmup_steps=2)


def make_optimizer(in_backward, model):
    return build_optimizer(OPTIMIZER, model, settings(optimizer_in_bwd=in_backward))


def make_scheduler(optimizer):
    return build_lr_scheduler(SCHEDULE, optimizer, NUM_STEPS, global_step=0)


def train(model, optimizer, steps, scheduler=None):
    """Returns learning rates of all parameter groups, at each step."""
    rates = []
    for step in steps:
        rates.append({group["lr"] for group in optimizer.param_groups})
        checkpoint_runs.train(model, optimizer, [step])
        if scheduler is not None:
            scheduler.step()
    return rates


@pytest.mark.parametrize("sizes", [tiny.MODEL, tiny.UNTIED_MODEL], ids=["tied", "untied"])
def test_stepping_in_the_backward_gives_the_weights_of_the_plain_optimizer(sizes):
    models, rates = [tiny.tiny_model(sizes) for _ in range(2)], []
    for in_backward, model in enumerate(models):
        optimizer = make_optimizer(bool(in_backward), model)
        rates.append(train(model, optimizer, range(3), make_scheduler(optimizer)))
    start = tiny.tiny_model(sizes)
    assert (models[0].tok_embeddings.weight - start.tok_embeddings.weight).abs().max() > 0.01
    assert rates[0] == rates[1]
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_a_backward_that_steps_frees_all_gradients():
    model = tiny.tiny_model()
    _ = make_optimizer(True, model)
    model(torch.ones(1, 3, dtype=torch.long)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_schedule_sets_the_learning_rate_of_all_parameters(in_backward):
    model = tiny.tiny_model()
    optimizer = make_optimizer(in_backward, model)
    assert build_lr_scheduler(None, optimizer, NUM_STEPS, 0) is None
    assert train(model, optimizer, range(2)) == [{0.02}] * 2
    scheduler = make_scheduler(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in parameters} == {id(p) for p in model.parameters()}
    # A warm-up from 0, then a cosine down to 0 at the last step; one rate for all parameters.
    rates = [rate for (rate,) in train(model, optimizer, range(NUM_STEPS), scheduler)]
    assert rates[:3] == pytest.approx([0, 0.01, 0.02])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert get_lr(optimizer) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("component_of", [torch.optim.AdamW, AdamW8bit])
@pytest.mark.parametrize("in_backward", [False, True])
def test_vectors_may_have_no_weight_decay(in_backward, component_of):
    models = [tiny.tiny_model() for _ in range(2)]
    path = f"{component_of.__module__}.{component_of.__name__}"
    without = settings(optimizer_in_bwd=in_backward, weight_decay_of_vectors=False)
    ours = build_optimizer(component(path, lr=0.02, weight_decay=0.5), models[0], without)
    vectors = [p for name, p in models[1].named_parameters() if name.endswith("scale")]
    matrices = [p for name, p in models[1].named_parameters() if name.endswith("weight")]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    train(models[0], ours, range(3))
    train(models[1], component_of(groups, lr=0.02), range(3))
    assert len(vectors) == 5
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_tensor_parallelism_refuses_fused_optimizers():
    settings = OptimizerSettings(optimizer={"fused": True, "rest": {"fused": True}}), DataSettings()
    problems = optimizer_on_ranks(*settings, RankSettings(tensor_parallel_dim=2))
    assert [problem.key for problem in problems] == ["optimizer.fused", "optimizer.rest.fused"]
    assert list(optimizer_on_ranks(*settings, RankSettings())) == []


class GroupsApart(torch.optim.Optimizer):
    """Wrapper whose inner optimizer does not see the rates of a schedule."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.inner = {"all": torch.optim.AdamW(self.param_groups[0]["params"], lr=lr)}

    def step(self, closure=None):
        self.inner["all"].step()


def test_inner_optimizers_have_the_state_of_their_wrapper_and_need_its_groups_for_a_schedule(monkeypatch):
    monkeypatch.setattr(tiny, "GroupsApart", GroupsApart, raising=False)
    cfg, model = component("tiny.GroupsApart"), torch.nn.Linear(2, 2)
    optimizer = build_optimizer(cfg, model, settings())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    check_optimizer(cfg, None, settings(), model)
    with pytest.raises(ValueError, match="_component_=GroupsApart: its inner optimizers have"):
        check_optimizer(cfg, SCHEDULE, settings(), model)


MUON, ADAMW = ({"_component_": f"torch.optim.{name}", "lr": rate} for name, rate in (("Muon", 0.02), ("AdamW", 3e-4)))


def test_matrices_of_layers_and_everything_else_have_an_optimizer_each_and_one_schedule():
    cfg = component("recipe_utils.optim.Split", matrices=MUON, rest=ADAMW)
    check_optimizer(cfg, SCHEDULE, settings(), tiny.tiny_model().to("meta"))
    model = tiny.tiny_model(tiny.UNTIED_MODEL)
    optimizer = build_optimizer(cfg, model, settings(weight_decay_of_vectors=False))
    names = {p: name for name, p in model.named_parameters()}
    stepped = {key: {names[p] for g in part.param_groups for p in g["params"]} for key, part in optimizer.parts.items()}
    assert stepped["matrices"] == {name for name in names.values() if "layers" in name and "scale" not in name}
    assert stepped["rest"] == {*names.values()} - stepped["matrices"] > {"tok_embeddings.weight", "output.weight"}
    scheduler = make_scheduler(optimizer)
    train(model, optimizer, range(1), scheduler)
    rates = [(group["name"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert rates == [("matrices", 0.01, 0.1), ("rest", 1.5e-4, 0.01), ("rest", 1.5e-4, 0.0)]


@pytest.mark.parametrize(
    ("path", "num_warmup_steps", "text"),
    [
        ("torch.optim.AdamW", -1, "lr_scheduler.num_warmup_steps=-1: it must be at least 0"),
        ("torch.optim.Muon", 2, "Muon only supports 2D parameters"),
    ],
)
def test_what_cannot_train_is_refused_before_weights_are_read(path, num_warmup_steps, text):
    schedule = component(COSINE, num_warmup_steps=num_warmup_steps)
    model, drawn = tiny.tiny_model(), torch.get_rng_state()
    with pytest.raises(ValueError, match=text):
        check_optimizer(component(path), schedule, settings(), model)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("num_copies", [1, 2])
def test_a_fused_step_that_knows_no_sharded_parameters_is_refused_before_weights_are_read(num_copies, tiny_config):
    optimizer = {"_component_": "torch.optim.SGD", "fused": True}
    config = tiny_config(optimizer=optimizer, data_parallel_replicate_dim=num_copies)
    for text in run_distributed(refusal, 2, config):
        assert "optimizer: a step on parameters as the training has them fails; take fused out" in text
