"""Fake steps take the bytes of real ones, and the command forecasts without files, ranks and memory."""

import logging
import re
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from big_batch_of_views import step_of_16
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from recipe_runs import DINO, DPO, KD, SFT, recipe_class, slow
from tiny_transformers import save_tiny
from torch._subclasses import FakeTensorMode
from torch.torch_version import TorchVersion

from recipe_utils.benchmark.gpu import decoder_flops
from recipe_utils.forecast import Measured, largest_that_fits, measure, shares_of
from recipe_utils.forecast import __main__ as forecast
from recipe_utils.forecast.live_bytes import LiveBytes
from recipe_utils.settings.describe import settings_of
from recipe_utils.settings.keys import keys_of as settings_keys
from recipe_utils.tune.registry import RECIPES, recipe_path

is_old = TorchVersion(torch.__version__) < "2.13"
pytestmark = pytest.mark.skipif(is_old, reason="fake collectives need torch 2.13")
SIZES = {SFT: (512, 1024), DPO: (512, 1024), KD: (512, 1024), DINO: (8, 16)}
WIDE = {"model": tiny.WIDE_UNTIED_MODEL, "microbatching": "packed"}
LORA = {**WIDE, "model": tiny.adapted(tiny.WIDE_UNTIED_MODEL)}
QLORA = {**WIDE, "model": tiny.adapted(tiny.WIDE_UNTIED_MODEL, quantize_base=True), "dtype": "bf16"}
MASTER = {"dtype": "bf16", "weights_dtype": "fp32"}
RECOMPUTED = {"enable_activation_checkpointing": True}
FUSED = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01, "fused": True}}


def real_peaks(recipe, config, folder):
    """Returns peaks of update steps with real weights on this rank, and bytes at rest."""
    cfg, kept = (
        OmegaConf.create(config),
        ("checkpointer", "ref_checkpointer", "teacher_checkpointer"),
    )
    own = forecast.config_of(cfg, Path(folder), keys_of(recipe))
    own.update({key: config[key] for key in kept if key in config and recipe != DINO})
    live = LiveBytes()
    made = recipe_class(recipe)(own)
    with made.run:
        with live:
            made.setup(own)
        return peaks_of(made, live, partial(measure, made, live=live), own, SIZES[recipe])


def fake_peaks(recipe, config, num_ranks=1, make=LiveBytes):
    live, cfg = make(), OmegaConf.create(config)
    with forecast.set_up(str(recipe_path(recipe)), cfg, num_ranks, live) as (made, run):
        return peaks_of(made, live, run, cfg, SIZES[recipe])


def peaks_of(made, live, run, cfg, sizes):
    run(forecast.sizes_of(made, cfg)[0])
    return [run(size).peak for size in sizes], shares_of(made, live)


def keys_of(recipe):
    return settings_keys(settings_of(recipe))


def assert_alike(fake, real, bound=0.01):
    (peaks, shares), (expected, of_real) = fake, real
    assert peaks == pytest.approx(expected, rel=bound)
    assert peaks[1] - peaks[0] == pytest.approx(expected[1] - expected[0], rel=bound)
    frozen = [each.pop("frozen models and tables") for each in (shares, of_real)]
    assert frozen[0] == pytest.approx(frozen[1], rel=bound, abs=50_000)
    assert shares == of_real


@pytest.fixture
def config_of(tiny_config, tiny_dpo_config, tiny_kd_config):
    def make(recipe, **changes):
        if recipe == DINO:
            return {**step_of_16(tiny_config, batch_size=2, dtype="fp32"), **FUSED, **changes}
        makers = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}
        return makers[recipe](**{**WIDE, **FUSED, **changes})

    return make


@pytest.mark.parametrize(
    ("recipe", "changes", "num_ranks"),
    [
        (SFT, {}, 1),
        (SFT, {**MASTER, **RECOMPUTED}, 2),
        (SFT, {**QLORA, **RECOMPUTED}, 1),
        (DPO, {}, 1),
        (KD, {}, 1),
        (DINO, {}, 1),
        slow(SFT, RECOMPUTED, 1),
        slow(SFT, MASTER, 1),
        slow(SFT, LORA, 1),
        slow(SFT, QLORA, 2),
        slow(SFT, {"microbatching": "in_order"}, 1),
        slow(SFT, {"microbatching": "least_padding", "optimizer": {"_component_": "recipe_utils.optim.AdamW8bit"}}, 2),
        slow(SFT, {"data_parallel_replicate_dim": 2, **MASTER}, 4),
        slow(DPO, LORA, 1),
        slow(DPO, {**MASTER, **RECOMPUTED}, 2),
        slow(KD, {**MASTER, **RECOMPUTED}, 2),
        slow(DINO, {**MASTER, **RECOMPUTED}, 2),
    ],
)  # fmt: skip
def test_fake_bytes_equal_real_ones(recipe, changes, num_ranks, config_of, tmp_path):
    config = config_of(recipe, **changes)
    fake = fake_peaks(recipe, config, num_ranks)
    if num_ranks == 1:
        assert_alike(fake, real_peaks(recipe, config, tmp_path))
    else:
        assert_alike(fake, run_distributed(real_peaks, num_ranks, recipe, config, tmp_path)[0])


@pytest.mark.parametrize(
    "model_type", ["qwen3", *map(slow, ("gemma3_text", "deepseek_v3", "lfm2"))]
)
def test_a_folder_of_transformers_needs_its_config_only(model_type, config_of, tmp_path):
    dtype = "bf16" if model_type == "deepseek_v3" else "fp32"  # experts' grouped products
    folder = save_tiny(tmp_path / "hf", model_type, hidden_size=256)
    config = config_of(SFT, **folder, dtype=dtype)
    real = real_peaks(SFT, config, tmp_path)
    for path in (tmp_path / "hf").iterdir():
        if path.name != "config.json":
            path.unlink()
    assert_alike(fake_peaks(SFT, config), real)


# ---- The counter -----------------------------------------------------------------------------------


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
        x.untyped_storage().resize_(0)
        assert live.now == 400
        x.untyped_storage().resize_(4000)
        assert (live.now, live.peak) == (4400, 4400)
        del x
        assert live.now == 0


class Blind(LiveBytes):
    """Counter that ignores changes of a storage's size."""

    def _hold(self, storage):
        if storage._cdata not in self._held:
            super()._hold(storage)


def test_a_counter_that_does_not_see_resizes_is_wrong_by_far(config_of):
    config = config_of(SFT, **MASTER)  # FSDP2 of one rank, which casts weights as it gathers them
    seen, blind = (fake_peaks(SFT, config, make=make)[0] for make in (LiveBytes, Blind))
    assert min(abs(a / b - 1) for a, b in zip(blind, seen, strict=True)) > 0.03


def test_flops_are_those_of_products_and_attention(config_of):
    live, cfg = LiveBytes(), OmegaConf.create(config_of(SFT))
    with forecast.set_up(str(recipe_path(SFT)), cfg, 1, live) as (made, run):
        forecast.sizes_of(made, cfg)
        found, decoder = run(512), made.model
        documents = 512 // 64 * [64]
        of_weights, of_attention = decoder_flops(decoder, documents, 512 - len(documents))
    # All pairs of positions, not half of them, and the scores once more in the backward: 7 products for 3.
    assert found.flops == pytest.approx(of_weights + of_attention * 7 / 3, rel=1e-3)


def test_adamw_8bit_s_update_counts_as_compiled_except_on_a_cpu(config_of):
    num, peaks = 32_000 * 256, {}  # of the embedding
    model = {**tiny.WIDE_UNTIED_MODEL, "vocab_size": 32_000}
    optimizer = {"_component_": "recipe_utils.optim.AdamW8bit"}
    for device in ("cpu", "cuda"):
        cfg = OmegaConf.create(config_of(SFT, model=model, optimizer=optimizer, device=device))
        with forecast.set_up(str(recipe_path(SFT)), cfg, 1, LiveBytes()) as (_, run):
            run(64)
            peaks[device] = run(64).peak
    assert peaks["cpu"] - peaks["cuda"] > 45 * num  # 60 bytes per element, and 9


# ---- The largest microbatch ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peak", "least"),
    [
        (lambda n: 1e6 + 100 * n, 0.99),
        (
            lambda n: max(4e6 + 20 * n, 1e6 + 100 * n),
            0.9,
        ),  # another layer is the highest from there on
        (lambda n: 1e6 + 100 * min(n, 9000) + 90 * max(n - 9000, 0), 0.97),  # chunks of a loss
        (lambda n: 1e6 + 50 * n + n**2 / 400, 0.8),
    ],
)
def test_the_largest_microbatch_fits_and_leaves_little(peak, least):
    def run(size):
        runs.append(size)
        return Measured(size, int(peak(size)), 0)

    for limit in (5_000_000, 9_000_000):
        runs = []
        points = (run(4096), run(8192))
        found = largest_that_fits(run, points, limit, 10**9, 128)
        assert limit * least < found.peak <= limit
        assert len(runs) <= 6
    assert largest_that_fits(run, points, limit, 16_384, 128).size == 16_384
    assert largest_that_fits(run, points, 900_000, 10**9, 128) is None


# ---- The command -----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in this process; its exit code and what it printed."""

    def call(recipe, config, *options):
        if isinstance(config, dict):
            OmegaConf.save(OmegaConf.create(config), tmp_path / "my.yaml")
            config = str(tmp_path / "my.yaml")
        argv = ["forecast", recipe, "--config", config, *options]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            forecast.main()
        logging.disable(logging.NOTSET)
        screen = capsys.readouterr()
        return end.value.code, screen.out if end.value.code == 0 else screen.err

    return call


def test_the_command_prints_a_forecast_and_leaves_output_dir_alone(run, config_of):
    config = config_of(SFT, **RECOMPUTED)
    Path(config["output_dir"], "step_3").mkdir(parents=True)  # training would move it
    code, text = run(SFT, config, "--memory", "1GiB", "--tflops", "1")
    assert code == 0
    assert [path.name for path in Path(config["output_dir"]).iterdir()] == ["step_3"]
    first, columns, *rows, last = text.splitlines()
    assert first.startswith("GiB on each of 1 rank(s): weights 0.00, ")
    assert columns.endswith(" s/256 tokens")
    assert [row.split("  ")[0] for row in rows] == [
        "recomputation (as configured)",
        "no recomputation",
    ]
    with_it, without = (float(row[30:].split()[0]) for row in rows)
    assert with_it < without
    assert last.startswith("Not counted: ")


@pytest.mark.slow
def test_rows_shorter_than_the_longest_sample_have_their_own_peak(run):
    embedded = SFT, "llama3_2/5M_full_update_step"
    longer = "tokenizer.max_seq_len=2048", "model.max_seq_len=2048"
    small, row, same_row, whole = (
        int(run(*embedded, "--row", *options)[1])
        for options in (("128", *longer), ("512", *longer), ("512",), ("2048", *longer))
    )
    assert row == pytest.approx(same_row, rel=0.01)
    assert 1.2 * small < row < whole / 2
    code, text = run(*embedded, *longer, "max_tokens_per_microbatch=256")
    assert code == 0
    assert "at 2,048 tokens" in text  # a sample


@pytest.mark.parametrize(
    ("recipe", "changes", "options", "text"),
    [
        (SFT, {"data_parallel_shard_dim": 2}, ("--ranks", "3"), "they make 2 ranks, but 3 run"),
        (SFT, {"pipeline_parallel_dim": 2}, ("--ranks", "2"), "pipeline_parallel_dim=2: it has no forecast"),
        (DPO, {"reference": "cached"}, (), "reference=cached: it has no forecast"),
        (SFT, {"optimizer": {"_component_": "torch.optim.Nope"}}, (), "optimizer._component_=torch.optim.Nope: "),
        (SFT, {"batchsize": 2}, (), "batchsize: this recipe has no such key; did you mean batch_size?"),
    ],
)  # fmt: skip
def test_what_has_no_forecast_is_refused_by_name(recipe, changes, options, text, run, config_of):
    code, printed = run(recipe, config_of(recipe, **changes), *options)
    assert code == 2
    assert text in printed


EMBEDDED = [
    (recipe, config)
    for recipe, configs in RECIPES.items()
    for config in configs
    if re.search(r"/(5M|digits)(?!.*(benchmark|generation))", config)
    and config != "qwen3/5M_lora_update_step"  # its model is a folder that another training exports
]


@pytest.mark.parametrize(("recipe", "config"), [slow(*each) for each in EMBEDDED])
def test_every_embedded_config_has_a_forecast(recipe, config, run):
    code, text = run(recipe, config, "--ranks", "2", "--memory", "1GiB")
    assert code == 0
    assert len(text.splitlines()) == 5
