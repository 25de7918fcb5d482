"""Loss curves: the same for every split and layout, and those of the stock recipe and of others."""

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from recipe_runs import (
    STOCK_LOSS,
    ListLogger,
    losses,
    run_compiled_recipe,
    run_recipe,
    run_recipes,
    run_stock_recipe,
    slow,
)

from recipe_utils.losses.cross_entropy import LinearCrossEntropyLoss
from recipe_utils.settings.problems import ConfigError

DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 160}
EXACT = {"dataset": DATA, "dtype": "fp64"}


@pytest.fixture(scope="module")
def one_process_losses(module_config):
    config = module_config(**EXACT, batch_size=16, gradient_accumulation_steps=1)
    return losses(run_distributed(run_recipe, 1, config)[0])


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [(1, {"batch_size": 4, "microbatching": "packed"}), slow(4, {"batch_size": 1, "data_parallel_replicate_dim": 2})],
)
def test_the_same_global_batch_gives_the_same_losses(world_size, changes, tiny_config, one_process_losses):
    same = {**EXACT, "global_batch_size": 16, "gradient_accumulation_steps": ...}
    logged = run_distributed(run_recipe, world_size, tiny_config(**same, **changes))[0]
    assert len(one_process_losses) == 10
    assert losses(logged) == pytest.approx(one_process_losses, rel=1e-5)


@pytest.mark.slow
def test_compiled_packed_rows_give_the_same_losses(tiny_config, one_process_losses):
    """Some samples are longer than the budget: each of those has a row of its own."""
    config = tiny_config(
        **EXACT, batch_size=4, gradient_accumulation_steps=4, microbatching="packed", max_tokens_per_microbatch=39
    )
    (logged,) = run_distributed(run_compiled_recipe, 1, config)
    assert losses(logged) == pytest.approx(one_process_losses, rel=1e-5)


@pytest.mark.parametrize("clip_grad_norm", [slow(None), 0.5])
def test_losses_are_those_of_the_stock_recipe(clip_grad_norm, tiny_config):
    config = tiny_config(
        **EXACT, loss=STOCK_LOSS, batch_size=4, gradient_accumulation_steps=4, clip_grad_norm=clip_grad_norm
    )
    stock = losses(run_distributed(run_stock_recipe, 1, config)[0])
    own_loss = {"_component_": "recipe_utils.losses.LinearCrossEntropyLoss"}
    ((with_stock_loss, with_own_loss),) = run_distributed(run_recipes, 1, [config, {**config, "loss": own_loss}])
    assert len(stock) == 10
    assert losses(with_stock_loss) == pytest.approx(stock, rel=1e-4)
    assert losses(with_own_loss) == pytest.approx(stock, rel=1e-4)


UNCHANGED = [
    {"prefetch_update_steps": 0},
    {"num_workers": 2},
    {"enable_activation_checkpointing": True},
    {"ac_mode": "selective", "ac_option": 2},
    {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "batch_size": 16},
    {"loss": STOCK_LOSS},
    {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}},
    {"fsdp_cpu_offload": True},
    {"log_every_n_steps": 2},
]


@pytest.mark.slow
def test_what_must_not_change_the_curve_does_not(tiny_config, one_process_losses):
    same = {**EXACT, "batch_size": 4, "gradient_accumulation_steps": 4}
    configs = [tiny_config(**same | changes) for changes in UNCHANGED]
    (curves,) = run_distributed(run_recipes, 1, configs, timeout_seconds=300)
    for changes, logged in zip(UNCHANGED, curves, strict=True):
        every = changes.get("log_every_n_steps", 1)
        expected = pytest.approx(one_process_losses[every - 1 :: every], rel=1e-5)
        assert losses(logged) == expected, changes


@pytest.mark.slow
def test_losses_are_those_of_hugging_face_trainer(tmp_path):
    import hugging_face_runs

    config = hugging_face_runs.config(tmp_path)
    (ours,) = run_distributed(run_recipe, 1, config)
    (theirs,) = run_distributed(hugging_face_runs.trainer_losses, 1, config)
    assert len(theirs) == 10
    assert losses(ours) == pytest.approx(theirs, rel=1e-4)


class TwoSums(LinearCrossEntropyLoss):
    """Also returns the number of targets."""

    def forward(self, output, hidden, targets, *args):
        sums = super().forward(output, hidden, targets, *args)
        return torch.cat([sums.view(1), sums.new_tensor([len(targets.positions)])])


class TwoSumsOfLogits(torch.nn.CrossEntropyLoss):
    def forward(self, logits, labels):
        return super().forward(logits, labels).repeat(2)


@pytest.mark.parametrize("loss", [TwoSums, TwoSumsOfLogits])
@pytest.mark.parametrize("validation", [{}, {"dataset_val": DATA, "run_val_every_n_steps": 1}])
def test_a_loss_with_two_sums_is_refused_before_the_first_update(loss, validation, tiny_config, monkeypatch):
    monkeypatch.setattr(tiny, loss.__name__, loss, raising=False)
    config = tiny_config(loss={"_component_": f"tiny.{loss.__name__}"}, **validation)
    with pytest.raises(ConfigError, match=r"loss._component_: it returns \[2\] and not \[1\], the sum over"):
        run_recipe(config)
    assert not ListLogger.logged
