"""The gradient of every parameter is that of one big batch with its teacher, in float64, in all layouts."""

from functools import cache
from typing import Any, NamedTuple

import arrays
import big_batch_of_teacher
import pytest
import tiny
import torch
from big_batch import TOLERANCE, error
from big_batch_of_teacher import STUDENTS, TEACHERS, step_of_16
from distributed_runs import run_distributed
from recipe_runs import (
    KD,
    recipe_class,
    run_mutant_recording_gradients,
    run_recording_gradients_and_metrics,
    with_adapters,
)

from recipe_utils.data.loader.loader import UpdateStep
from recipe_utils.loss import distillation
from recipe_utils.model.frozen.model import FrozenModel
from recipe_utils.model.frozen.outputs import FrozenOutputs

PLANS = [
    {"microbatching": "in_order", "batch_size": 2},
    {"microbatching": "least_padding", "batch_size": 4, "gradient_sync": "last_microbatch"},
    {"microbatching": "packed", "max_tokens_per_microbatch": 64},
    {"microbatching": "in_order", "batch_size": 1, "gradient_sync": "last_microbatch"},
]
FORWARD = {"kd_ratio": 0.3, "temperature": 2.0, "divergence": "forward"}
TERMS = [
    FORWARD,
    {**FORWARD, "kd_ratio": 1.0},
    {**FORWARD, "temperature": 1.0, "divergence": "reverse"},
    {**FORWARD, "divergence": "symmetric"},
]
CACHED = {"teacher_cache": "hidden"}


def schedule(name):
    return {"pipeline_parallel_schedule": name}


class Row(NamedTuple):
    """One training; indices of PLANS and TERMS."""

    layout: str
    model: str
    plan: int
    terms: int = 0
    changes: dict[str, Any] = {}  # noqa: RUF012


FAST = [
    Row("one", "untied", 2),
    Row("fsdp-2", "tied", 0),
    Row("pp-2", "untied", 1),
]
ROWS = [
    *FAST,
    *(Row("one", model, plan) for model, plan in (("tied", 0), ("tied", 1), ("untied", 3))),
    Row("one", "untied", 0, 1),
    Row("one", "tied", 2, 2),
    Row("one", "untied", 1, 3),
    Row("one", "lora", 0),
    Row("fsdp-2", "untied", 2),
    Row("fsdp-2", "tied", 3, 1, CACHED),
    Row("fsdp-2", "lora", 1),
    # Where an output layer is a unit of its own, FSDP2 frees its weight after each call.
    Row("fsdp-2", "untied", 0, 0, {"teacher_custom_sharded_layers": ["output", "tok_embeddings"]}),
    Row("fsdp-2", "untied", 0, 0, {"custom_sharded_layers": ["output"]}),
    Row(
        "fsdp-2", "untied", 0, 0,
        {"enable_activation_checkpointing": True, "fsdp_reshard_after_forward": False},
    ),
    Row("fsdp-4", "tied", 2),
    Row("fsdp-4", "untied", 1),
    Row("hsdp-2x2", "untied", 2),
    Row("hsdp-2x2", "tied", 3),
    Row("pp-2", "tied", 2, 0, schedule("Interleaved1F1B")),
    Row("pp-2", "untied", 0, 1, schedule("InterleavedZeroBubble")),
    Row("pp-2", "tied", 3, 2, schedule("GPipe")),
    Row("pp-2", "untied", 2, 3, CACHED),
    Row("pp-4", "tied", 0),
    Row("pp-4", "untied", 2, 0, schedule("GPipe")),
    Row("pp-2-fsdp-2", "tied", 2),
    Row("pp-2-fsdp-2", "untied", 1, 0, schedule("Interleaved1F1B")),
    Row("pp-2-fsdp-2", "tied", 0, 0, {**schedule("InterleavedZeroBubble"), **CACHED}),
]  # fmt: skip


def sizes_of(model):
    """Student and teacher."""
    if model == "lora":
        return tiny.adapted(tiny.UNTIED_MODEL), TEACHERS["untied"]
    return STUDENTS[model], TEACHERS[model]


@cache
def reference(model, terms=0):
    return big_batch_of_teacher.reference_of_steps(*sizes_of(model), *TERMS[terms].values())


@pytest.fixture
def config_of(tiny_kd_config, tmp_path):
    """Makes the config of a row."""

    def make(row):
        terms = dict(TERMS[row.terms])
        config = step_of_16(
            tiny_kd_config,
            "untied" if row.model == "lora" else row.model,
            model=sizes_of(row.model)[0],
            kd_ratio=terms.pop("kd_ratio"),
            kd_loss=terms,
            **{"batch_size": 2, **PLANS[row.plan]},
            **arrays.LAYOUTS[row.layout][1],
            **row.changes,
        )
        return with_adapters(config, tmp_path) if row.model == "lora" else config

    return make


@arrays.on_ranks(FAST, ROWS)
def test_gradient_and_metrics_are_those_of_one_big_batch(rows, world_size, config_of):
    rows = arrays.rows_on(rows, world_size)
    configs = [config_of(row) for row in rows]
    ranks = run_distributed(
        run_recording_gradients_and_metrics, world_size, configs, KD, timeout_seconds=300
    )
    for row, *of_ranks in zip(rows, *ranks, strict=True):
        for step, (metrics, gradients) in enumerate(reference(row.model, row.terms)):
            # Ranks of a pipeline hold some parameters each.
            assert set().union(*(found[step] for found, _ in of_ranks)) == gradients.keys(), row
            assert max(error(found[step], gradients) for found, _ in of_ranks) < TOLERANCE, row
            _, logged = of_ranks[0]
            for name, value in metrics.items():
                if name == "ce_loss" and TERMS[row.terms]["kd_ratio"] == 1:
                    assert name not in logged[step]
                else:
                    expected = pytest.approx(value, rel=1e-6, abs=1e-7)
                    assert logged[step][name] == expected, (row, name)


# ---- Wrong recipes -----------------------------------------------------------------------------------


def a_mean_per_microbatch(patches):
    recipe = recipe_class(recipe=KD)
    sums = recipe.sums
    patches.setattr(UpdateStep, "scale", lambda step, _: 1 / len(step.microbatches))
    patches.setattr(
        recipe, "sums", lambda self, m: sums(self, m) / max(len(m.targets.positions), 1)
    )


def outputs_of_another_microbatch(patches):
    attach = FrozenOutputs._attach

    def attach_rotated(self, *args):
        attached = attach(self, *args)
        hidden = [microbatch.targets.teacher for microbatch in attached]
        rotated = []
        for microbatch, other in zip(attached, hidden[1:] + hidden[:1], strict=True):
            num_targets = len(microbatch.targets.positions)
            rows = other.hidden[:num_targets]
            rows = torch.nn.functional.pad(rows, (0, 0, 0, num_targets - len(rows)))
            rotated.append(microbatch.with_teacher(other._replace(hidden=rows)))
        return rotated

    patches.setattr(FrozenOutputs, "_attach", attach_rotated)


def no_square_of_the_temperature(patches):
    make = distillation.LinearDistillationLoss.__init__

    def make_without(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self._square = 1.0

    patches.setattr(distillation.LinearDistillationLoss, "__init__", make_without)


def targets_counted_before_they_are_shifted(patches):
    patches.setattr(UpdateStep, "scale", lambda step, count: 1 / (step.totals[count] + 16))


def a_temperature_of_the_student_alone(patches):
    logits_like = distillation.TeacherHidden.logits_like
    patches.setattr(
        distillation.TeacherHidden, "logits_like", lambda *args: logits_like(*args[:-1], 1.0)
    )


def a_teacher_that_drops_out(patches):
    outputs = FrozenModel.outputs

    def outputs_with_dropout(self, microbatches):
        for layer in self._model.layers:
            if not isinstance(layer.mlp, torch.nn.Sequential):
                layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.3))
        self._model.train()
        return outputs(self, microbatches)

    patches.setattr(FrozenModel, "outputs", outputs_with_dropout)


MUTANTS = [
    a_mean_per_microbatch,
    outputs_of_another_microbatch,
    no_square_of_the_temperature,
    targets_counted_before_they_are_shifted,
    a_temperature_of_the_student_alone,
    a_teacher_that_drops_out,
]


@pytest.mark.parametrize(
    "mutate",
    [
        pytest.param(m, id=m.__name__, marks=[] if m is a_mean_per_microbatch else pytest.mark.slow)
        for m in MUTANTS
    ],
)
def test_a_wrong_recipe_misses_the_big_batch(mutate, config_of):
    config = config_of(Row("one", "untied", 0))
    (gradients,) = run_distributed(run_mutant_recording_gradients, 1, mutate, config, KD)
    expected = reference("untied")
    errors = [error(g, of_step) for g, (_, of_step) in zip(gradients, expected, strict=True)]
    assert max(errors) > 1e-2
