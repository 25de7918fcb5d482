"""The gradient of every parameter is that of one big batch with its teacher, in float64, in all layouts."""

import pytest
import torch
from gradient_rows import (
    RECOMPUTED,
    Row,
    assert_exact,
    error_of_mutant,
    on_ranks,
    outputs_of_another_microbatch,
    spanning,
)
from recipe_runs import slow

from recipe_utils.losses import divergences as distillation
from recipe_utils.models.frozen import FrozenModel
from recipe_utils.models.runner import Whole
from recipe_utils.models.transformers import causal_lm, decoder
from recipe_utils.update_steps.step import UpdateStep

IN_ORDER, PADDED = ("in_order", 2), ("least_padding", 4, "last_microbatch")
FAST = [
    Row("one", "untied", objective="kd"),
    Row("fsdp-2", "tied", *IN_ORDER, None, "kd"),
    Row("fsdp-2", "tied", objective="kd", changes=spanning(2)),
    Row("pp-2", "untied", "least_padding", 4, None, "kd"),
    Row("one", "untied/gemma2", objective="kd"),  # whose tail caps logits
]
ROWS = [
    *FAST,
    Row("one", "tied", *PADDED, "kd"),
    Row("one", "untied", *IN_ORDER, None, "kd alone"),
    Row("one", "tied", objective="reverse"),
    Row("one", "untied", *PADDED, "symmetric"),
    Row("one", "lora", *IN_ORDER, None, "kd"),
    Row("fsdp-2", "untied", objective="kd"),
    Row("fsdp-2", "tied", "in_order", 1, "last_microbatch", "kd alone"),
    Row("fsdp-2", "lora", *PADDED, "kd"),
    # Where an output layer is a unit of its own, FSDP2 frees its weight after each call.
    Row("fsdp-2", "untied", *IN_ORDER, None, "kd", {"teacher_custom_sharded_layers": ["output", "tok_embeddings"]}),
    Row("fsdp-2", "untied", *IN_ORDER, None, "kd", {"custom_sharded_layers": ["output"]}),
    Row("fsdp-2", "untied", *IN_ORDER, None, "kd", {**RECOMPUTED, "fsdp_reshard_after_forward": False}),
    Row("fsdp-4", "tied", objective="kd"),
    Row("hsdp-2x2", "untied", objective="kd"),
    Row("pp-2", "untied", *IN_ORDER, "InterleavedZeroBubble", "kd alone"),
    Row("pp-2", "tied", "in_order", 1, "GPipe", "reverse"),
    Row("pp-2", "untied", objective="symmetric"),
    Row("pp-4", "tied", *IN_ORDER, None, "kd"),
    Row("pp-2-fsdp-2", "untied", "least_padding", 4, "Interleaved1F1B", "kd"),
    Row("pp-2-fsdp-2", "tied", *IN_ORDER, "InterleavedZeroBubble", "kd"),
    # Rows of several ranks
    Row("fsdp-4", "tied", objective="symmetric", changes=spanning(4)),
    Row("hsdp-2x2", "untied", objective="reverse", changes=spanning(4)),
    Row("pp-2-fsdp-2", "tied", *("packed", 1), "Interleaved1F1B", "kd", spanning(2)),
    # Models of transformers
    Row("one", "qwen3/untied", objective="kd"),
    Row("one", "gemma2/qwen3", "least_padding", 4, None, "kd"),
    Row("one", "lfm2/gemma3_text", objective="kd"),  # whose output is tied
    Row("one", "granite/gpt_oss", objective="kd"),
    Row("one", "granite/gemma2", "least_padding", 4, None, "kd"),
    Row("fsdp-2", "qwen3/gemma2", "least_padding", 4, None, "kd"),
    Row("fsdp-2", "gemma3_text/lfm2", objective="kd"),
    Row("pp-2", "qwen3/gemma2", objective="kd"),
    Row("pp-2", "untied/gemma3_text", objective="kd"),
]  # fmt: skip


@on_ranks(FAST, ROWS)
def test_gradient_and_metrics_are_those_of_one_big_batch(rows, weights_folder, tmp_path):
    assert_exact(rows, weights_folder, tmp_path)


# ---- Wrong recipes -----------------------------------------------------------------------------------


def a_mean_per_microbatch(patches):
    sums = Whole.sums
    patches.setattr(UpdateStep, "scale", lambda step, _: 1 / len(step.microbatches))
    patches.setattr(Whole, "sums", lambda self, m: sums(self, m) / max(len(m.targets.positions), 1))


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
    patches.setattr(distillation.TeacherHidden, "logits_like", lambda *args: logits_like(*args[:-1], 1.0))


def a_teacher_that_drops_out(patches):
    outputs = FrozenModel.outputs

    def outputs_with_dropout(self, microbatches):
        for layer in self.model.module.layers:
            if not isinstance(layer.mlp, torch.nn.Sequential):
                layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.3))
        self.model.module.train()
        return outputs(self, microbatches)

    patches.setattr(FrozenModel, "outputs", outputs_with_dropout)


def a_tail_without_its_cap(patches):
    """Only after the check at start-up, which would refuse the model."""
    forward, check = decoder.Tail.forward, causal_lm.cached_packing_check

    def check_the_whole(*args):
        with pytest.MonkeyPatch.context() as right:
            right.setattr(decoder.Tail, "forward", forward)
            return check(*args)

    head_alone = lambda self, hidden: self.shell.get_output_embeddings()(hidden)  # noqa: E731
    patches.setattr(decoder.Tail, "forward", head_alone)
    patches.setattr(causal_lm, "cached_packing_check", check_the_whole)


ONE = Row("one", "untied", *IN_ORDER, None, "kd")
MUTANTS = {
    a_mean_per_microbatch: 1e-2,
    outputs_of_another_microbatch: 1e-2,
    no_square_of_the_temperature: 1e-2,
    targets_counted_before_they_are_shifted: 1e-2,
    a_temperature_of_the_student_alone: 1e-2,
    a_teacher_that_drops_out: 1e-2,
    a_tail_without_its_cap: 1e-6,
}


@pytest.mark.parametrize("mutate", [a_mean_per_microbatch, *map(slow, list(MUTANTS)[1:])], ids=lambda m: m.__name__)
def test_a_wrong_recipe_misses_the_big_batch(mutate, weights_folder, tmp_path):
    row = ONE._replace(model="untied/gemma2") if mutate is a_tail_without_its_cap else ONE
    assert error_of_mutant(mutate, row, weights_folder, tmp_path) > MUTANTS[mutate]
