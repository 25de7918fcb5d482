"""Schedules are pure functions of the update steps that are done, and groups are alike on all ranks."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from recipe_utils.dinov3.backbone import dinov3_vit, layer_of
from recipe_utils.dinov3.schedules import ScheduleSettings, half_cosine

NUM_LAYERS = 4


def whole():
    return dinov3_vit(num_layers=NUM_LAYERS, patch_size=4, embed_dim=8, num_heads=2, num_registers=1)


def groups_of(settings, parameters, **optimizer):
    depth_of = partial(layer_of, num_layers=NUM_LAYERS)
    optimizer = {"lr": 0.5, **optimizer}
    return settings.groups_by_depth(parameters, optimizer, depth_of, NUM_LAYERS + 2, False)


def test_half_a_cosine_goes_from_start_to_end_and_stays_there():
    assert half_cosine(0.99, 1.0, 0, 100) == 0.99
    assert half_cosine(0.99, 1.0, 50, 100) == pytest.approx(0.995)
    assert half_cosine(0.99, 1.0, 25, 100) == pytest.approx(1 - 0.01 * (1 + math.sqrt(0.5)) / 2)
    assert half_cosine(0.99, 1.0, 100, 100) == half_cosine(0.99, 1.0, 300, 100) == 1.0
    assert half_cosine(0.99, None, 50, 100) == 0.99
    assert half_cosine(0.99, 0.0, 0, 0) == 0.99
    curve = [half_cosine(0.04, 0.4, step, 37) for step in range(38)]
    assert curve == sorted(curve)


def test_momentum_and_temperature_follow_the_update_steps_that_are_done():
    warmup = {"teacher_temperature_start": 0.04, "teacher_temperature_warmup_steps": 3}
    settings = ScheduleSettings(ema_momentum=0.9, ema_momentum_end=1.0, **warmup)
    temperatures = [settings.temperature_at(step) for step in range(6)]
    assert temperatures == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.07, 0.07])
    assert settings.momentum_at(0, 10) == 0.9
    assert settings.momentum_at(5, 10) == pytest.approx(0.95)
    # What is logged is what the last update step had.
    assert settings.schedules_at(2, 10) == {
        "ema_momentum": settings.momentum_at(2, 10),
        "teacher_temperature": settings.temperature_at(2),
    }
    plain = ScheduleSettings(ema_momentum=0.9)
    assert {plain.momentum_at(step, 10) for step in range(12)} == {0.9}
    assert {plain.temperature_at(step) for step in range(12)} == {0.07}


def test_matrices_decay_and_vectors_do_not():
    model = whole()
    groups = groups_of(ScheduleSettings(), dict(model.named_parameters()), weight_decay=0.04)
    assert [group["weight_decay"] for group in groups] == [0, 0.04]
    for group, is_matrix in zip(groups, (False, True), strict=True):
        assert group["params"]
        assert all((p.dim() > 1) == is_matrix for p in group["params"])
    assert sum(len(group["params"]) for group in groups) == len([*model.parameters()])
    assert not any("weight_decay" in group for group in groups_of(ScheduleSettings(), dict(model.named_parameters())))


def test_each_layer_has_the_learning_rate_of_the_next_one_times_the_decay():
    model = whole()
    groups = groups_of(ScheduleSettings(layerwise_lr_decay=0.5), dict(model.named_parameters()))
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        depth = layer_of(name, NUM_LAYERS)
        assert rates[id(parameter)] == 0.5 * 0.5 ** (NUM_LAYERS + 1 - depth), name
    assert rates[id(model.norm.weight)] == 0.5
    assert rates[id(model.tok_embeddings.cls_token)] == 0.5**6


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_groups_are_alike_whatever_parameters_a_stage_has(decay):
    settings = ScheduleSettings(layerwise_lr_decay=decay)
    parameters = dict(whole().named_parameters())
    first, second = {}, {}
    for name, parameter in parameters.items():
        stage = first if name.startswith(("tok", "layers.0.")) else second
        stage[f"stage_0.{name}"] = parameter
    of_whole = groups_of(settings, parameters, weight_decay=0.1)
    expected = [{**group, "params": ...} for group in of_whole]
    num_params = 0
    for stage in (first, second, {}):
        groups = groups_of(settings, stage, weight_decay=0.1)
        assert [{**group, "params": ...} for group in groups] == expected
        num_params += sum(len(group["params"]) for group in groups)
    assert num_params == len(parameters)
    torch.optim.AdamW(of_whole)  # accepts empty groups


def test_weight_decay_follows_the_schedule_only_where_there_is_some():
    settings = ScheduleSettings(weight_decay_end=0.4)
    optimizer = torch.optim.AdamW(groups_of(settings, dict(whole().named_parameters()), weight_decay=0.04))
    for step, expected in ((0, 0.04), (5, 0.22), (10, 0.4), (0, 0.04)):
        settings.set_weight_decay(optimizer, step, 10)
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0, pytest.approx(expected)]
    ScheduleSettings().set_weight_decay(optimizer, 5, 10)
    assert optimizer.param_groups[1]["weight_decay"] == 0.04
    without = torch.optim.SGD(groups_of(settings, dict(whole().named_parameters())))
    settings.set_weight_decay(without, 5, 10)
    assert {g["weight_decay"] for g in without.param_groups} == {0}


def test_prototypes_stay_for_so_many_update_steps():
    model = nn.ModuleDict({"output": nn.ModuleDict({"prototypes": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)})})
    settings = ScheduleSettings(freeze_last_layer_steps=2)
    for step, is_frozen in ((0, True), (1, True), (2, False)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        settings.freeze_prototypes(model, step)
        has_gradient = {name: p.grad is not None for name, p in model.named_parameters()}
        assert has_gradient["output.mlp.weight"]
        assert has_gradient["output.prototypes.weight"] == (not is_frozen)
