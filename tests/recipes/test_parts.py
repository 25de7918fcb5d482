"""What users add to a recipe: an average of the weights, an evaluation with an interval of its own, frozen layers."""

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from arrays import LAYOUTS
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from moving_average import MovingAverage
from omegaconf import OmegaConf
from recipe_runs import (
    ListLogger,
    exported_model,
    keep_messages,
    recipe_class,
    recipe_of_page,
    run_recipe,
    writing_to,
)
from torch.distributed.tensor import DTensor

from recipe_utils.checkpoint.tensors import parameters_by_name
from recipe_utils.models import runner
from recipe_utils.training import metrics
from recipe_utils.training.parts import answers
from recipe_utils.training.parts.protocol import Part

DECAY = 0.9
HELD_OUT = {"dataset_val": {"_component_": "tiny.tiny_dataset", "num_samples": 8, "seed": 5}}
VALIDATING = {**HELD_OUT, "run_val_every_n_steps": 2, "max_steps_per_epoch": 5, "batch_size": 2, "global_batch_size": 4}
VALIDATING |= {"dtype": "fp64", "gradient_accumulation_steps": ..., "fsdp_reshard_after_forward": False}


@contextmanager
def with_parts(config, *added):
    """Yields a recipe that is ready to train, whose ``setup`` calls ``added`` with the run and the model."""
    ListLogger.logged.clear()
    cfg = OmegaConf.create(config)
    made = recipe_class()(cfg)
    resume = made.run.resume

    def add_and_resume(trained):
        for add in added:
            add(made.run, trained.model)
        return resume(trained)

    made.run.resume = add_and_resume
    with made.run:
        made.setup(cfg)
        yield made


def add_average(run, model):
    average = MovingAverage(model, DECAY)
    run.parts.add("average", average)
    run.parts.weights = average.weights


@torch.no_grad()
def in_full(tensors):
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def train(config, averages):
    """Returns metrics, and the full weights before the first and after each update step."""
    with with_parts(config, *[add_average] * averages) as made:
        recorded, update = [in_full(parameters_by_name(made.model.module))], made.update

        def recording(step):
            updated = update(step)
            recorded.append(in_full(parameters_by_name(made.model.module)))
            return updated

        made.update = recording
        made.train()
        after_training = in_full(parameters_by_name(made.model.module))
    assert all(torch.equal(after_training[name], weight) for name, weight in recorded[-1].items())
    return list(ListLogger.logged), recorded


def val_loss_of(config):
    """Returns the validation loss before the first update step."""
    train({**config, "max_steps_per_epoch": 1}, averages=False)
    return ListLogger.logged[0]["val_loss"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_average_of_the_weights_is_validated_and_exported_and_changes_no_weight(world_size, tiny_config, tmp_path):
    config = tiny_config(**VALIDATING)
    plain = writing_to(tmp_path / "plain", config)
    logged, recorded = run_distributed(train, world_size, config, True)[0]
    logged_without, recorded_without = run_distributed(train, world_size, plain, False)[0]
    for with_part, without in zip(recorded, recorded_without, strict=True):
        assert all(torch.equal(with_part[name], without[name]) for name in without)
    assert [m["loss"] for m in logged if "loss" in m] == [m["loss"] for m in logged_without if "loss" in m]
    assert [m["num_averaged"] for m in logged if "loss" in m] == [1, 2, 3, 4, 5]

    averages = [{name: weight.double() for name, weight in recorded[0].items()}]
    for weights in recorded[1:]:
        before = averages[-1]
        averages.append({name: DECAY * before[name] + (1 - DECAY) * weights[name].double() for name in before})
    exported = torch.load(exported_model(config), weights_only=True)
    for name, expected in averages[-1].items():
        torch.testing.assert_close(exported[name].double(), expected, rtol=1e-9, atol=1e-12)
        assert not torch.equal(exported[name], recorded[-1][name])

    validated = {m["step"]: m["val_loss"] for m in logged if "val_loss" in m}
    assert list(validated) == [0, 2, 4, 5]
    (tmp_path / "averages").mkdir()
    for step in (2, 5):
        checkpointer = {
            **config["checkpointer"],
            "checkpoint_dir": str(tmp_path / "averages"),
            "checkpoint_files": ["average.pt"],
        }
        torch.save(averages[step], tmp_path / "averages" / "average.pt")
        of_average = writing_to(tmp_path / f"average_{step}", {**config, "checkpointer": checkpointer})
        assert validated[step] == pytest.approx(run_distributed(val_loss_of, 1, of_average)[0], rel=1e-6)


def test_the_average_of_the_page_is_exported(tiny_config, tmp_path):
    recipe = recipe_of_page(tmp_path, "## 5. Average")
    config = tiny_config(max_steps_per_epoch=3)
    plain = writing_to(tmp_path / "plain", config)
    assert [m["num_averaged"] for m in run_recipe(config, recipe) if "loss" in m] == [1, 2, 3]
    run_recipe(plain)
    start = tiny.tiny_model(tiny.MODEL).state_dict()
    average, trained = (torch.load(exported_model(each), weights_only=True) for each in (config, plain))
    for name, weight in trained.items():
        # Each weight moves by about the rate of 0.01 a step, of which the average has 0.1, 0.19 and 0.27.
        assert (average[name] - start[name]).norm() < 0.4 * (weight - start[name]).norm()


def resumed_average(config):
    with with_parts(config, add_average) as made:
        listed = made.run.parts._listed["average"].part
        return in_full(listed.average), listed.num_steps, in_full(parameters_by_name(made.model.module))


def train_and_return_average(config):
    with with_parts(config, add_average) as made:
        made.train()
        return in_full(made.run.parts._listed["average"].part.average)


@pytest.mark.parametrize("num_ranks", [(1, 2), (2, 1)], ids=["1 to 2", "2 to 1"])
def test_an_average_resumes_exactly_on_another_number_of_ranks(num_ranks, tiny_config, tmp_path):
    config = tiny_config(**VALIDATING, save_every_n_steps=3)
    average = run_distributed(train_and_return_average, num_ranks[0], config)[0]
    resumed, num_steps, weights = run_distributed(
        resumed_average, num_ranks[1], resuming_in(config["output_dir"], config)
    )[0]
    assert num_steps == 5
    assert average.keys() == resumed.keys()
    for name, value in average.items():
        assert torch.equal(value, resumed[name])
        assert not torch.equal(value, weights[name])


def test_validation_answers_and_exports_are_with_the_weights_of_the_context(tiny_config, monkeypatch):
    done = []

    @contextmanager
    def others():
        done.append("[")
        yield
        done.append("]")

    every_step = {"sample_every_n_steps": 1, "export_every_n_steps": 1, "sample_prompts": ["a"]}
    config = tiny_config(**{**VALIDATING, "max_steps_per_epoch": 2}, **every_step)
    monkeypatch.setattr(answers, "generate", lambda *_: done.append("answer") or ["b"])
    with with_parts(config, lambda run, _: setattr(run.parts, "weights", others)) as made:
        update, export = made.update, made.run.checkpointing.export
        made.update = lambda step: done.append("train") or update(step)
        made.run.checkpointing.export = lambda name: done.append(name) or export(name)
        made.train()
    found = " ".join(name for name in done)
    assert found == "[ ] train [ answer ] [ export_step_1 ] train [ ] [ answer ] [ epoch_0 ]"


# ---- An evaluation with an interval of its own --------------------------------------------------


class Evaluation(Part):
    """Takes 100 seconds of a clock, and returns a number and a tensor."""

    def __init__(self, clock):
        self.clock = clock

    def after(self, step):
        self.clock[0] += 100.0
        return {"evaluated": 7.0, "index": torch.tensor(step.index)}


def test_an_evaluation_runs_and_is_written_when_due_and_takes_no_training_time(tiny_config, monkeypatch):
    """An update step takes 1 second."""
    clock = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    config = tiny_config(log_every_n_steps=4, max_steps_per_epoch=6)
    with with_parts(config, lambda run, _: run.parts.add_every(2, "evaluation", Evaluation(clock))) as made:
        update = made.update

        def take_a_second(step):
            clock[0] += 1.0
            return update(step)

        made.update = take_a_second
        made.train()
    text = Path(config["output_dir"], "logs", "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["step"]: line["index"] for line in lines if "evaluated" in line} == {2: 1, 4: 3, 6: 5}
    (trained,) = [line for line in lines if "loss" in line]
    assert trained["step"] == 4
    assert trained["tokens_per_second_per_gpu"] == trained["num_tokens_seen"] / 4


class Steps(Part):
    """Keeps what ``run.global_step`` is in each call."""

    def __init__(self, run):
        self.run, self.calls = run, []

    def before(self, step):
        self.calls.append(("before", step.index, self.run.global_step))

    def after(self, step):
        self.calls.append(("after", step.index, self.run.global_step))
        return {}


@pytest.mark.parametrize("interval", [(), (1,)], ids=["add", "add_every"])
def test_a_finished_update_step_counts_in_after_of_every_part(interval, tiny_config):
    added = []

    def add(run, _):
        added.append(Steps(run))
        (run.parts.add_every if interval else run.parts.add)(*interval, "steps", added[0])

    with with_parts(tiny_config(max_steps_per_epoch=2), add) as made:
        made.train()
    assert added[0].calls == [("before", 0, 0), ("after", 0, 1), ("before", 1, 1), ("after", 1, 2)]


# ---- Rates by layer ---------------------------------------------------------------------------------


def test_groups_of_the_page_have_their_own_rates(tiny_config, tmp_path):
    recipe = recipe_of_page(tmp_path, "## 3. Rates by layer")
    schedule = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"}
    config = tiny_config(max_steps_per_epoch=2, lr_scheduler={**schedule, "num_warmup_steps": 1})
    lines = [line for line in run_recipe(config, recipe) if "loss" in line]
    assert [(line["lr/body"], line["lr/norm"]) for line in lines] == [(0, 0), (0.01, 1e-4)]
    start = tiny.tiny_model(tiny.MODEL).state_dict()
    changes = {
        name: (weight - start[name]).abs().max()
        for name, weight in torch.load(exported_model(config), weights_only=True).items()
    }
    assert all((change < 1.1e-4) == name.startswith("norm") for name, change in changes.items())


# ---- Frozen layers ------------------------------------------------------------------------------


def first_line_with_frozen_layer(config):
    """Returns the log line of the model with the first layer frozen by the recipe's ``prepare``."""
    attend = runner.attend_within_documents

    def freeze_and_attend(decoder, *args):
        decoder.layers[0].requires_grad_(False)
        attend(decoder, *args)

    with pytest.MonkeyPatch.context() as patches, keep_messages() as messages:
        patches.setattr(runner, "attend_within_documents", freeze_and_attend)
        with with_parts(config):
            return next((text for text in messages if text.startswith("Model: ")), "")


@pytest.mark.parametrize("layout", ["one", "fsdp-2", "pp-2"])
def test_the_log_counts_the_parameters_that_the_recipe_trains(layout, tiny_config):
    world_size, dims = LAYOUTS[layout]
    config = tiny_config(model=tiny.DEEP_MODEL, **dims)
    line = run_distributed(first_line_with_frozen_layer, world_size, config)[0]
    model = tiny.tiny_model(tiny.DEEP_MODEL)
    num_all, num_frozen = (sum(p.numel() for p in module.parameters()) for module in (model, model.layers[0]))
    assert f"{num_all:,} parameters, {num_all - num_frozen:,} of them trained" in line
