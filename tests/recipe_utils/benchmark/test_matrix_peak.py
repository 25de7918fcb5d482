import pytest
import tiny
import torch
import yaml
from omegaconf import OmegaConf
from recipe_runs import tiny_config, tiny_dpo_config

from recipe_utils.benchmark.lineup import LineupSettings
from recipe_utils.benchmark.matrix_peak import (
    Product,
    measure_products,
    peak_of,
    products_of,
    useful_flops,
)
from recipe_utils.settings.read import read_settings

WIDTH = 32


def lineup(tmp_path, config, **changes):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(config))
    settings = {
        "output_dir": f"{tmp_path}/out",
        "update_step_config": f"{tmp_path}/base.yaml",
        "peers": {"ours": {"kind": "update_step"}},
        "num_update_steps": 2,
        **changes,
    }
    return read_settings(OmegaConf.create(settings), LineupSettings).lineup


def flops_of(found):
    (baseline,) = found.baselines
    return useful_flops(baseline.recipe, baseline.config, found.contents["ours"])


def test_useful_work_is_that_of_real_tokens_targets_and_documents(tmp_path):
    found = lineup(tmp_path, tiny_config(tmp_path, shuffle=False))
    samples = tiny.make_samples(32)
    model = tiny.tiny_model()
    weights = sum(p.numel() for p in model.layers.parameters() if p.dim() == 2)
    for step, flops in enumerate(flops_of(found)):
        of_step = samples[4 * step : 4 * step + 4]
        lengths = [len(sample["tokens"]) for sample in of_step]
        num_targets = found.contents["ours"][step].num_target_tokens
        assert found.contents["ours"][step].document_lengths == tuple(lengths)
        expected = 6 * (weights * sum(lengths) + tiny.VOCAB_SIZE * WIDTH * num_targets)
        expected += 6 * len(model.layers) * WIDTH * sum(n * n for n in lengths)
        assert flops == pytest.approx(expected)


def test_what_needs_more_or_less_than_all_weights_is_not_counted(tmp_path):
    adapted = tiny_config(tmp_path, model=tiny.adapted(tiny.MODEL))
    assert flops_of(lineup(tmp_path, adapted)) == [None] * 3
    pairs = lineup(tmp_path, tiny_dpo_config(tmp_path), update_step_recipe="full_dpo_update_step")
    assert flops_of(pairs) == [None] * 3


def test_products_have_the_sizes_of_the_model_and_fit_a_cpu():
    products = products_of(tiny.tiny_model(), is_on_cpu=True)
    assert Product(2048, WIDTH, tiny.VOCAB_SIZE) in products
    assert Product(tiny.VOCAB_SIZE, 2048, WIDTH, is_transposed=True) in products
    assert len(products) == len(set(products))
    with torch.device("meta"):
        large = tiny.tiny_model()
        large.layers[0].attn.q_proj = torch.nn.Linear(20_000, 20_000, bias=False)
    for is_on_cpu in (False, True):
        (product,) = [p for p in products_of(large, is_on_cpu) if p[1:] == (20_000, 20_000, False)]
        assert product.m == (50 if is_on_cpu else 2048)


def test_products_are_timed_in_the_dtype_of_a_config(tmp_path, monkeypatch):
    monkeypatch.setattr("recipe_utils.benchmark.matrix_peak._ROWS", 16)
    seen = set()
    mm = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda left, right, out: (seen.add(left.dtype), mm(left, right, out=out))
    )
    found = measure_products(OmegaConf.create(tiny_config(tmp_path, dtype="bf16")))
    assert set(found) == {product.name for product in products_of(tiny.tiny_model(), True)}
    assert all(0 < rate < 1000 for rate in found.values())
    assert seen == {torch.bfloat16}


def test_the_peak_is_that_of_all_ranks_in_one_product():
    assert peak_of([{"a": 1.0, "b": 3.0}, {"a": 4.0, "b": 1.0}]) == 5.0
