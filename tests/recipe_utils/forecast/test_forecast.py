"""Fake steps take the bytes of real ones, and the command forecasts without files, ranks and memory."""

import gc
import logging
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny
import torch
import torch.distributed as dist
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DINO, DPO, KD, SFT, recipe_class, slow
from tiny_transformers import save_tiny
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.torch_version import TorchVersion

from recipe_utils.benchmark.flops import decoder_flops
from recipe_utils.cli.registry import RECIPES
from recipe_utils.forecast import __main__ as forecast
from recipe_utils.forecast import fake_step
from recipe_utils.forecast.fake_step import row_of
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.update_steps.step import UpdateStep

is_old = TorchVersion(torch.__version__) < "2.13"
pytestmark = pytest.mark.skipif(is_old, reason="fake collectives need torch 2.13")
WIDE = {"model": tiny.WIDE_UNTIED_MODEL, "microbatching": "packed", "max_tokens_per_microbatch": 4096}
LORA = {"model": tiny.adapted(tiny.WIDE_UNTIED_MODEL)}
QLORA = {"model": tiny.adapted(tiny.WIDE_UNTIED_MODEL, quantize_base=True), "dtype": "bf16"}
IN_ORDER = {"microbatching": "in_order", "max_tokens_per_microbatch": None}
MASTER = {"dtype": "bf16", "weights_dtype": "fp32"}
RECOMPUTED = {"enable_activation_checkpointing": True}
FUSED = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01, "fused": True}}
EIGHT_BIT = {"optimizer": {"_component_": "recipe_utils.optim.AdamW8bit"}}
PADDED = {"microbatching": "least_padding", **EIGHT_BIT}
SIZES = (64, 512, 1024)  # the first step also makes the optimizer's state


def real_peaks(recipe, config):
    """Returns peaks of update steps of a recipe with real tensors on this rank."""
    cfg, live = OmegaConf.create(config), LiveBytes()
    made = recipe_class(recipe)(cfg)
    with made.run:
        with live:
            made.setup(cfg)
        peaks = []
        for size in SIZES:
            row = row_of(made.loader.budget.collator(), size, 64)
            totals = {name: 2 * number for name, number in row.counts.items()}
            gc.collect()
            live.peak = live.now
            with live:
                made.update(UpdateStep(0, (row, row), totals, made.ranks.dp_degree))
            peaks.append(live.peak)
    return peaks[1:]


@pytest.fixture
def ranks(monkeypatch):
    """Makes this process rank 0 of ranks that do not exist."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0" if "RANK" in name else "1")

    def start(number=1):
        monkeypatch.setenv("WORLD_SIZE", str(number))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def config_of(tiny_config, tiny_dpo_config, tiny_kd_config):
    makers = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}
    return lambda recipe, **changes: makers[recipe](**{**WIDE, **FUSED, **changes})


def fake_peaks(recipe, config):
    made = forecast.training_of(recipe, OmegaConf.create(config))
    return [made.measure(size, 64)[1] for size in SIZES][1:]


def assert_alike(fake, real):
    assert fake == pytest.approx(real, rel=0.03)
    assert fake[1] - fake[0] == pytest.approx(real[1] - real[0], rel=0.03)


@pytest.mark.parametrize(
    ("recipe", "changes", "num_ranks"),
    [
        (SFT, {}, 1),
        (SFT, {**MASTER, **RECOMPUTED}, 2),
        (SFT, LORA, 1),
        (DPO, {}, 1),
        (KD, {}, 1),
        slow(SFT, RECOMPUTED, 1),
        slow(SFT, MASTER, 1),
        slow(SFT, {**QLORA, **RECOMPUTED}, 1),
        slow(SFT, QLORA, 2),
        slow(SFT, IN_ORDER, 1),
        slow(SFT, PADDED, 2),
        slow(SFT, {"data_parallel_replicate_dim": 2, **MASTER}, 4),
        slow(DPO, LORA, 1),
        slow(DPO, {**MASTER, **RECOMPUTED}, 2),
        slow(KD, {**MASTER, **RECOMPUTED}, 2),
    ],
)
def test_fake_bytes_equal_real_ones(recipe, changes, num_ranks, config_of, ranks):
    config = config_of(recipe, **changes)
    if num_ranks == 1:
        real = real_peaks(recipe, config)
    else:
        real = run_distributed(real_peaks, num_ranks, recipe, config)[0]
    ranks(num_ranks)
    assert_alike(fake_peaks(recipe, config), real)


@pytest.mark.parametrize("model_type", ["qwen3", *map(slow, ("gemma3", "gemma3_text", "deepseek_v3", "lfm2"))])
def test_a_folder_of_transformers_needs_its_config_only(model_type, config_of, tmp_path, ranks):
    dtype = "bf16" if model_type == "deepseek_v3" else "fp32"  # experts' grouped products
    config = config_of(SFT, **save_tiny(tmp_path / "hf", model_type, hidden_size=256), dtype=dtype)
    real = real_peaks(SFT, config)
    for path in (tmp_path / "hf").iterdir():
        if path.name != "config.json":
            path.unlink()
    ranks()
    assert_alike(fake_peaks(SFT, config), real)


class Blind(LiveBytes):
    """Counter that ignores changes of a storage's size."""

    def _resize(self, key, size):
        if key not in self._resized:
            super()._resize(key, size)


def test_a_counter_that_does_not_see_resizes_is_wrong_by_far(config_of, ranks, monkeypatch):
    ranks()
    config = config_of(SFT, **MASTER)  # FSDP2 of one rank, which casts weights as it gathers them
    seen = fake_peaks(SFT, config)
    monkeypatch.setattr(fake_step, "LiveBytes", Blind)
    blind = fake_peaks(SFT, config)
    assert min(abs(a / b - 1) for a, b in zip(blind, seen, strict=True)) > 0.03


def test_flops_are_those_of_products_and_attention(config_of, ranks):
    ranks()
    made = forecast.training_of(SFT, OmegaConf.create(config_of(SFT)))
    whole = tiny.config.instantiate(OmegaConf.create(tiny.WIDE_UNTIED_MODEL))
    of_weights, of_attention = decoder_flops(whole, 512 // 64 * [64], 512 - 8)
    # All pairs of positions, not half of them, and the scores once more in the backward: 7 products for 3.
    assert made.measure(512, 64)[2] == pytest.approx(of_weights + of_attention * 7 / 3, rel=1e-3)


@pytest.mark.slow
def test_adamw_8bit_s_update_counts_as_compiled_except_on_a_cpu(config_of, ranks):
    ranks()
    num, peaks = 32_000 * 256, {}  # of the embedding
    model = {**tiny.WIDE_UNTIED_MODEL, "vocab_size": 32_000}
    for device in ("cpu", "cuda"):
        config = config_of(SFT, model=model, device=device, **EIGHT_BIT)
        made = forecast.training_of(SFT, OmegaConf.create(config))
        peaks[device] = [made.measure(64, 64)[1] for _ in range(2)][1]
    assert peaks["cpu"] - peaks["cuda"] > 45 * num  # 60 bytes per element, and 9


@pytest.mark.parametrize("is_fake", [False, True])
def test_the_counter_follows_views_gradients_and_resizes(is_fake):
    with FakeTensorMode() if is_fake else nullcontext(), LiveBytes() as live:
        x = torch.empty(10, 10, requires_grad=True)
        view = (x @ x).view(100)
        assert (live.now, live.flops) == (800, 2000)
        view.sum().backward()
        assert live.now == 1200  # and a gradient
        del view
        assert live.now == 800


# ---- The command -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, ranks):
    """Runs the command in this process; its exit code and what it printed."""

    def call(recipe, config, *options):
        if isinstance(config, dict):
            OmegaConf.save(OmegaConf.create(config), tmp_path / "my.yaml")
            config = str(tmp_path / "my.yaml")
        monkeypatch.setattr(sys, "argv", ["forecast", recipe, "--config", config, *options])
        with pytest.raises(SystemExit) as end:
            forecast.main()
        logging.disable(logging.NOTSET)
        screen = capsys.readouterr()
        return end.value.code, screen.err if end.value.code else screen.out

    return call


def test_the_command_prints_a_forecast_and_leaves_output_dir_alone(run, config_of):
    config = config_of(SFT, **RECOMPUTED, max_tokens_per_microbatch=128)
    code, text = run(SFT, config, "--memory", "0.03GiB", "--tflops", "1")
    assert not code
    assert not Path(config["output_dir"]).exists()
    first, columns, *rows, last = text.splitlines()
    assert first.startswith("GiB on each of 1 rank(s): weights 0.00, ")
    assert columns.endswith(" s/256 tokens")
    labels = [row.split("  ")[0] for row in rows]
    assert labels == ["recomputation (as configured)", "no recomputation"]
    with_it, without = (float(row[30:].split()[0]) for row in rows)
    assert with_it < without
    assert last.startswith("Not counted: ")


@pytest.mark.parametrize(
    ("recipe", "changes", "options", "text"),
    [
        (SFT, {"data_parallel_shard_dim": 2}, ("--ranks", "3"), "they make 2 ranks, but 3 run"),
        (SFT, {"pipeline_parallel_dim": 2}, ("--ranks", "2"), "pipeline_parallel_dim=2: it has no forecast"),
        (SFT, {"model": {"_component_": "tiny.tiny_fusion_model"}, **IN_ORDER}, (), "images beside text have no forecast"),
        (DPO, {"reference": "cached"}, (), "reference=cached: it has no forecast"),
        (SFT, {"batchsize": 2}, (), "batchsize: this recipe has no such key; did you mean batch_size?"),
    ],
)  # fmt: skip
def test_what_has_no_forecast_is_refused_by_name(recipe, changes, options, text, run, config_of):
    code, printed = run(recipe, config_of(recipe, **changes), *options)
    assert code == 2
    assert text in printed


@pytest.mark.parametrize("recipe", [DINO, "my_recipe.py"])
def test_images_and_edited_files_have_no_forecast(recipe, run):
    code, printed = run(recipe, RECIPES[DINO][0])
    assert code == 2
    assert f"{recipe}: edited files and images have no forecast" in printed


EMBEDDED = [
    (recipe, config)
    for recipe, configs in RECIPES.items()
    for config in configs
    if re.search(r"/5M(?!.*(benchmark|generation))", config)
    and config != "qwen3/5M_lora_update_step"  # its model is a folder that another training exports
]


@pytest.mark.parametrize(("recipe", "config"), [slow(*each) for each in EMBEDDED])
def test_every_embedded_config_of_text_has_a_forecast(recipe, config, run):
    code, text = run(recipe, config, "--ranks", "2", "--memory", "1GiB")
    assert not code
    assert len(text.splitlines()) == 5


def test_a_storage_that_is_released_while_sizes_are_read_is_left_out():
    meter = LiveBytes()
    meter._held = {1: (lambda: meter._held.pop(2) and None, 0), 2: (lambda: None, 0)}
    meter._resized = {1, 2}
    with meter:
        kept = torch.ones(3)
    assert meter.now == kept.nbytes
