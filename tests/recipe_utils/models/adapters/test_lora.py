"""Trained weights are found in any model; merged weights compute what the adapted layers did."""

import pytest
import tiny
import torch
from omegaconf import OmegaConf
from torchao.dtypes.nf4tensor import to_nf4
from torchtune import config
from torchtune.modules.low_precision import FrozenNF4Linear

from recipe_utils.models.adapters.adapted_linear import speed_up_adapters
from recipe_utils.models.adapters.lora import find_adapters, fingerprint_of_frozen, freeze_base, fresh_adapters
from recipe_utils.models.adapters.merge import contents_of_export, merge
from recipe_utils.models.adapters.nf4 import without_quantizing
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.weights import load_weights

KINDS = {
    "lora": tiny.adapted(tiny.MODEL),
    "dora": tiny.adapted(tiny.MODEL, use_dora=True),
    "output": tiny.adapted(tiny.UNTIED_MODEL, apply_lora_to_output=True),
    "qlora": tiny.adapted(tiny.WIDE_MODEL, quantize_base=True),
    "qdora": tiny.adapted(tiny.WIDE_MODEL, quantize_base=True, use_dora=True),
}
TOKENS = torch.arange(1, 41).reshape(2, 20)


def loaded(sizes, dtype="fp32"):
    """Returns an adapted model as the recipe has it, with adapters that change it."""
    adapted = tiny.adapted_model({**sizes, "quantize_base": False})
    given = {n: p.detach() for n, p in adapted.named_parameters() if p.requires_grad}
    settings = ModelSettings(dtype=dtype)
    model = tiny.on_meta(sizes, dtype=dtype)
    base = tiny.tiny_model(tiny.base_of(sizes)).state_dict()
    load_weights(model, {"model": base, "adapter": given}, settings, torch.device("cpu"))
    speed_up_adapters(model, torch.optim.SGD(p for p in model.parameters() if p.requires_grad))
    return model


def plain_weights(model):
    return {
        name: weight.get_original_weight() if hasattr(weight, "get_original_weight") else weight
        for name, weight in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_computes_what_the_adapted_one_does(kind):
    sizes = KINDS[kind]
    model = loaded(sizes)
    contents, lost = contents_of_export(plain_weights(model), find_adapters(model), None)
    assert lost < 1e-5
    merged = config.instantiate(OmegaConf.create(tiny.base_of(sizes)))
    merged.load_state_dict(contents["model"])  # all of it, and nothing else
    with torch.no_grad():
        adapted, plain = model(TOKENS), tiny.tiny_model(tiny.base_of(sizes))(TOKENS)
        assert (merged(TOKENS) - adapted).abs().max() < 1e-5 * adapted.abs().max()
        assert (plain - adapted).abs().max() > 1e-2
    assert contents["adapter"].keys() == find_adapters(model).trained
    assert contents["adapter_config"]["use_dora"] == ("dora" in kind)


@pytest.mark.parametrize("size_of_change", [1e-1, 1e-3])
def test_what_rounding_takes_from_a_change_is_measured(size_of_change):
    torch.manual_seed(0)
    model = config.instantiate(OmegaConf.create(tiny.adapted(tiny.MODEL, apply_lora_to_mlp=False)))
    freeze_base(model)
    adapters = find_adapters(model)
    weights = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    trained = {n: weights.pop(n).float() * 0 for n in adapters.trained}
    for name in adapters.modules:
        base = weights[f"{name}.weight"].float()
        trained[f"{name}.lora_a.weight"][0] = base.norm() / base.shape[1] ** 0.5
        trained[f"{name}.lora_b.weight"][:, 0] = size_of_change / base.shape[0] ** 0.5 * torch.randn(len(base)) / 1.5
    before = dict(weights)
    lost = merge(weights, trained, adapters, torch.bfloat16)
    lost_squares = change_squares = 0.0
    for name in adapters.modules:
        b, a = trained[f"{name}.lora_b.weight"], trained[f"{name}.lora_a.weight"]
        change = 6 / 4 * b @ a
        assert weights[f"{name}.weight"].dtype == torch.bfloat16
        left = weights[f"{name}.weight"].float() - before[f"{name}.weight"].float()
        lost_squares += (left - change).square().sum()
        change_squares += change.square().sum()
    assert lost == pytest.approx((lost_squares / change_squares).sqrt().item(), rel=1e-2)
    low, high = (0.001, 0.1) if size_of_change == 1e-1 else (0.4, 1.0)
    assert low < lost < high
    assert merge(dict(before), trained, adapters, torch.float32) < 1e-3


def test_a_model_without_adapters_is_left_as_it_is():
    model = tiny.tiny_model()
    freeze_base(model)
    adapters = find_adapters(model)
    assert (adapters.modules, adapters.frozen) == ({}, {})
    assert adapters.trained == dict(model.named_parameters()).keys()
    assert fresh_adapters(adapters, model.state_dict(), 0, torch.float32) == {}
    contents, lost = contents_of_export(model.state_dict(), adapters, torch.bfloat16)
    assert (contents.keys(), lost) == ({"model"}, 0.0)
    assert {weight.dtype for weight in contents["model"].values()} == {torch.bfloat16}


def test_another_base_is_known_by_its_fingerprint():
    sizes = KINDS["qlora"]
    model = loaded(sizes)
    base = tiny.tiny_model(tiny.base_of(sizes)).state_dict()
    same = fingerprint_of_frozen(find_adapters(model), base)
    assert len(same) == 20
    assert same["layers.0.mlp.w1.weight"].endswith(" NF4")
    assert not same["norm.scale"].endswith(" NF4")
    for name in ("layers.1.mlp.w1.weight", "norm.scale"):
        found = fingerprint_of_frozen(find_adapters(model), {**base, name: base[name] * 1.001})
        assert {key for key in same if same[key] != found[key]} == {name}


def test_nothing_is_quantized_on_the_meta_device_and_what_is_not_default_is_refused():
    quantized = config.instantiate(OmegaConf.create(KINDS["qlora"]))
    model = tiny.on_meta(KINDS["qlora"])
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    assert sum(map(bool, find_adapters(model).frozen.values())) == 14
    assert list(model.state_dict()) == list(quantized.state_dict())
    with without_quantizing(), pytest.raises(ValueError, match="'block_size': 32"):
        FrozenNF4Linear(256, 256, block_size=32)


def test_a_weight_is_quantized_in_the_blocks_of_its_layer():
    model = build_on_meta(lambda: torch.nn.Sequential(FrozenNF4Linear(80, 160, scaler_block_size=100)), ModelSettings())
    weight = torch.randn(160, 80, generator=torch.Generator().manual_seed(0))
    load_weights(model, {"model": {"0.weight": weight}}, ModelSettings(), torch.device("cpu"))
    found, expected, other = (
        each.get_original_weight()
        for each in (model[0].weight, *(to_nf4(weight, scaler_block_size=n) for n in (100, 200)))
    )
    assert torch.equal(found, expected)
    assert not torch.equal(found, other)


def test_dora_norms_are_formed_once_until_the_optimizer_steps():
    model = loaded(KINDS["dora"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    speed_up_adapters(model, optimizer)
    layer = model.layers[0].attn.q_proj
    model(TOKENS).sum().backward()
    first = layer._norm
    model(TOKENS)
    assert layer._norm is first
    assert not first.requires_grad
    optimizer.step()
    model(TOKENS)
    assert not torch.equal(layer._norm, first)
