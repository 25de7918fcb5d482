"""A training resumes from a state that torchtune's stock recipes saved at an epoch's end."""

import copy

import checkpoint_runs
import pytest
import tiny
import torch
from omegaconf import OmegaConf
from torchtune import training

from recipe_utils.checkpoint.stock import (
    check_stock_state,
    finds_stock_state,
    load_optimizer_state,
)
from recipe_utils.optim.optimizer import OptimizerSettings, build_lr_scheduler, build_optimizer
from recipe_utils.settings.problems import ConfigError

NUM_STEPS = 6
OPTIMIZER = OmegaConf.create({"_component_": "torch.optim.AdamW", "lr": 0.02})
SCHEDULE = OmegaConf.create(
    {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 2,
    }
)


def make_optimizer(kind, model):
    return build_optimizer(
        OPTIMIZER, model, OptimizerSettings(optimizer={}, optimizer_in_bwd=kind == "in_backward")
    )


def make_scheduler(optimizer, last_epoch=-1):
    return build_lr_scheduler(SCHEDULE, optimizer, NUM_STEPS, last_epoch + 1)


def train(model, optimizer, scheduler, steps):
    """Learning rates of all parameter groups, at each step."""
    rates = []
    for step in steps:
        rates.append({group["lr"] for group in optimizer.param_groups})
        checkpoint_runs.train(model, optimizer, [step])
        scheduler.step()
    return rates


def as_saved(kind, model, optimizer):
    """An optimizer's state as torchtune's recipes save it: parameters by their names."""
    state = copy.deepcopy(optimizer.state_dict())
    if kind == "plain":
        names = [name for name, _ in model.named_parameters()]
        state["state"] = {names[i]: value for i, value in state["state"].items()}
        state["param_groups"][0]["params"] = names
    else:
        for name, part in state.items():
            part["state"] = {name: part["state"][0]}
            part["param_groups"][0]["params"] = [name]
    return state


@pytest.mark.parametrize("kind", ["plain", "in_backward"])
def test_training_resumes_from_a_saved_state_as_if_it_had_not_stopped(kind):
    straight, resumed = tiny.tiny_model(), tiny.tiny_model()
    optimizer = make_optimizer(kind, straight)
    scheduler = make_scheduler(optimizer)
    before = train(straight, optimizer, scheduler, range(3))
    state = as_saved(kind, straight, optimizer)
    resumed.load_state_dict(straight.state_dict())
    after = train(straight, optimizer, scheduler, range(3, NUM_STEPS))

    optimizer = make_optimizer(kind, resumed)
    load_optimizer_state(resumed, optimizer, state, torch.device("cpu"))
    scheduler = make_scheduler(optimizer, last_epoch=len(before) - 1)
    rates = train(resumed, optimizer, scheduler, range(3, NUM_STEPS))
    assert [sorted(r) for r in rates] == [pytest.approx(sorted(r)) for r in after]
    for (name, ours), theirs in zip(resumed.named_parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7, msg=name)


def saved_state(kind, model):
    optimizer = make_optimizer(kind, model)
    checkpoint_runs.train(model, optimizer, [0])
    return as_saved(kind, model, optimizer)


@pytest.mark.parametrize(
    ("saved", "loaded", "num_layers", "num_saved"),
    [("plain", "in_backward", 2, 0), ("in_backward", "plain", 2, 0), ("plain", "plain", 1, 11)],
)
def test_a_state_of_another_optimizer_or_model_is_refused(saved, loaded, num_layers, num_saved):
    state = saved_state(saved, tiny.tiny_model({**tiny.MODEL, "num_layers": num_layers}))
    model = tiny.tiny_model()
    with pytest.raises(
        ConfigError,
        match=f"recipe_checkpoint: its optimizer steps {num_saved} of this .*which are 20;",
    ):
        load_optimizer_state(model, make_optimizer(loaded, model), state, torch.device("cpu"))


def test_a_state_that_is_not_of_a_full_fine_tuning_recipe_is_refused_with_what_it_lacks():
    keys = [training.OPT_KEY, training.SEED_KEY, training.MAX_STEPS_KEY, training.EPOCHS_KEY]
    whole = dict.fromkeys(keys, 0)
    check_stock_state(whole)
    for key in keys:
        lacking = {name: value for name, value in whole.items() if name != key}
        with pytest.raises(ConfigError, match=f"recipe_checkpoint: it has no {key}; "):
            check_stock_state(lacking)


def test_a_state_is_found_where_it_is_named_or_where_torchtune_puts_it(tmp_path):
    checkpointer = {"output_dir": str(tmp_path)}
    assert not finds_stock_state(checkpointer)
    assert finds_stock_state({**checkpointer, "recipe_checkpoint": "somewhere.pt"})
    (tmp_path / "recipe_state").mkdir()
    (tmp_path / "recipe_state" / "recipe_state.pt").write_bytes(b"")
    assert finds_stock_state(checkpointer)
