"""The logged metrics, and when the host reads them from the device."""

import pytest
import tiny
import torch
from distributed_runs import run_distributed
from recipe_runs import ListLogger, run_recipe, set_up
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 16}


@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_have_their_names_and_definitions(world_size, tiny_config):
    batch = {"batch_size": 4, "global_batch_size": 8, "gradient_accumulation_steps": ...}
    config = tiny_config(dataset=DATA, shuffle=False, **batch)
    logged = run_distributed(run_recipe, world_size, config)[0]
    assert set(logged[0]) == {
        "step", "loss", "lr", "grad_norm", "num_tokens", "tokens_per_second_per_gpu",
        "real_tokens_per_second_per_gpu", "padding_fraction", "data_wait_seconds", "num_left_out",
    }  # fmt: skip
    samples = tiny.make_samples(16)
    for step, metrics in enumerate(logged):
        rows = [len(sample["tokens"]) for sample in samples[8 * step : 8 * step + 8]]
        microbatches = [rows[:4], rows[4:]] if world_size == 1 else [rows[0::2], rows[1::2]]
        num_positions = sum(len(rows) * max(rows) for rows in microbatches)
        assert metrics["padding_fraction"] == pytest.approx(1 - sum(rows) / num_positions)
        ratio = metrics["real_tokens_per_second_per_gpu"] / metrics["tokens_per_second_per_gpu"]
        assert ratio == pytest.approx(sum(rows) / metrics["num_tokens"])
        assert metrics["data_wait_seconds"] >= 0


def test_names_of_datasets_add_metrics_and_change_no_bit(recipe_and_config):
    recipe, make = recipe_and_config
    one = make()["dataset"]
    runs = []
    for names in ({}, {}), ({"name": "a"}, {"name": "b"}):
        config = make(dataset=[{**one, **name} for name in names], max_steps_per_epoch=2)
        runs.append(run_recipe(config, recipe))
    shares, losses = {"token_share/a", "token_share/b"}, {"loss/a", "loss/b"}
    for plain, named in zip(*runs, strict=True):
        added = named.keys() - plain.keys()
        assert shares < added <= shares | losses  # a dataset may have no sample in an update step
        same = [name for name in plain if "second" not in name]
        assert {name: named[name] for name in same} == {name: plain[name] for name in same}


class CountReads(TorchDispatchMode):
    """Counts operations that wait for a device: item() and shapes that depend on data."""

    WAITING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
    num_reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_reads += func in self.WAITING
        return func(*args, **(kwargs or {}))


def num_reads_while_training(config):
    with set_up(config) as recipe, recipe.loader.epoch(0) as steps, CountReads() as counter:
        for step in steps:
            recipe.update(step)
    return counter.num_reads


@pytest.mark.slow
def test_an_update_step_of_two_ranks_does_not_wait_for_the_device(tiny_config):
    """Of one process, and with other losses: ``test_on_meta.py``."""
    config = tiny_config(
        dataset=[{**DATA, "num_samples": 17, "name": "a"}, {**DATA, "name": "b"}],
        optimizer={"_component_": "torch.optim.AdamW", "lr": 0.1, "fused": True},
        clip_grad_norm=1.0,
    )
    assert run_distributed(num_reads_while_training, 2, config) == [0, 0]


class Reads(TorchFunctionMode):
    """Names of functions that read a tensor's values on the host."""

    WAITING = ("item", "tolist", "nonzero", "numpy", *(f"__{n}__" for n in ("bool", "int", "float")))

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (name := getattr(func, "__name__", "")) in self.WAITING:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("log_every_n_steps", [1, 2])
def test_metrics_are_read_after_the_next_update_step_is_enqueued(log_every_n_steps, recipe_and_config):
    """Between two update steps only metrics of an earlier one are read; at an epoch's end, all are."""
    recipe, make = recipe_and_config
    every = log_every_n_steps
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 0.1, "fused": True}
    changes = {"max_steps_per_epoch": 7, "batch_size": 1, "log_every_n_steps": every}
    reads = Reads()
    logged_by, read_between, read_in_advance = [], [], []
    with set_up(make(optimizer=optimizer, **changes), recipe) as made:
        run = made.run
        run.metrics.late.is_late = True
        update, advance, profiled = made.update, run.advance, run.profiler.step

        def updating(step):
            updated = update(step)
            reads.found.clear()
            return updated

        def advancing(step):
            assert reads.found == []
            with reads:
                advanced = advance(step)
            read_in_advance.append(bool(reads.found))
            reads.found.clear()
            logged_by.append([line["step"] for line in ListLogger.logged])
            reads.__enter__()
            return advanced

        def after_log():
            reads.__exit__(None, None, None)
            read_between.append(bool(reads.found))
            profiled()

        made.update, run.advance, run.profiler.step = updating, advancing, after_log
        made.train()
    assert logged_by == [list(range(every, i + 1, every)) for i in range(7)]
    assert read_in_advance == [i > 0 and i % every == 0 for i in range(7)]
    assert read_between == [False] * 6 + [True]  # known before the export
    assert [line["step"] for line in ListLogger.logged] == list(range(every, 8, every))
