"""The gradient of every parameter is that of one big batch with its teacher, in float64, whatever the layout."""

from functools import cache

import big_batch_of_teacher
import pytest
import tiny
from big_batch import TOLERANCE, error
from big_batch_of_teacher import step_of_16
from distributed_runs import run_distributed
from recipe_runs import KD, ListLogger, run_recipe_recording_gradients, with_adapters

PP_2, PP_4 = {"pipeline_parallel_dim": 2}, {"pipeline_parallel_dim": 4}
ONE = [{}]
LAYOUTS = {  # world size, dimensions, and what of a pipeline in turn
    "one-process": (1, {}, ONE),
    "fsdp-2": (2, {}, ONE),
    "fsdp-4": (4, {}, ONE),
    "hsdp-2x2": (4, {"data_parallel_replicate_dim": 2}, ONE),
    "pp-2": (2, PP_2, ["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble"]),
    "pp-4": (4, PP_4, ["1F1B", "GPipe"]),
    "pp-2-fsdp-2": (4, PP_2, ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"]),
}
SPLITS = [
    {"microbatching": "in_order", "num_microbatches": 4},
    {"microbatching": "least_padding", "num_microbatches": 4, "gradient_sync": "last_microbatch"},
    {"microbatching": "packed", "max_tokens_per_microbatch": 64},
    {"microbatching": "in_order", "num_microbatches": 16, "gradient_sync": "last_microbatch"},
]
OTHER_TERMS = [
    {"kd_ratio": 1.0},
    {"kd_loss": {"divergence": "reverse", "temperature": 1.0}},
    {"kd_loss": {"divergence": "symmetric"}},
]


@cache
def reference(kind, kd_ratio=0.3, temperature=2.0, divergence="forward"):
    return big_batch_of_teacher.reference_of_steps(
        big_batch_of_teacher.STUDENTS[kind],
        big_batch_of_teacher.TEACHERS[kind],
        kd_ratio,
        temperature,
        divergence,
    )


def gradients_and_metrics(configs):
    found = []
    for config in configs:
        ListLogger.logged.clear()
        gradients = run_recipe_recording_gradients(config, recipe=KD)
        found.append((gradients, list(ListLogger.logged)))
    return found


def assert_is_the_big_batch(of_ranks, expected, kd_ratio=0.3):
    """Gradients of all ranks, which hold some parameters each; metrics of rank 0."""
    for step, (metrics, gradients) in enumerate(expected):
        assert set().union(*(found[step] for found, _ in of_ranks)) == gradients.keys()
        for found, _ in of_ranks:
            assert error(found[step], gradients) < TOLERANCE
        _, logged = of_ranks[0]
        for name, value in metrics.items():
            if name == "ce_loss" and kd_ratio == 1:
                assert name not in logged[step]
            else:
                assert logged[step][name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


def with_microbatches(split, dp_degree):
    split = dict(split)
    num_microbatches = split.pop("num_microbatches", 1)
    return {**split, "batch_size": max(16 // dp_degree // num_microbatches, 1)}


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_and_metrics_are_those_of_one_big_batch(layout, kind, tiny_kd_config):
    world_size, dims, schedules = LAYOUTS[layout]
    dp_degree = world_size // dims.get("pipeline_parallel_dim", 1)
    configs = []
    for i, schedule in enumerate(schedules):
        # Each schedule with two plans, which change places between tied and untied; without stages all.
        splits = (
            SPLITS if schedule == {} else [SPLITS[(i + (kind == "tied")) % 2], SPLITS[2 + i % 2]]
        )
        of_schedule = {} if schedule == {} else {"pipeline_parallel_schedule": schedule}
        for split in splits:
            changes = {**with_microbatches(split, dp_degree), **of_schedule, **dims}
            configs.append(step_of_16(tiny_kd_config, kind, **changes))
    ranks = run_distributed(gradients_and_metrics, world_size, configs, timeout_seconds=300)
    for of_ranks in zip(*ranks, strict=True):
        assert_is_the_big_batch(of_ranks, reference(kind))


@pytest.mark.parametrize("layout", ["one-process", "pp-2"])
def test_other_terms_of_the_loss_too(layout, tiny_kd_config):
    world_size, dims, _ = LAYOUTS[layout]
    configs = [
        step_of_16(tiny_kd_config, "untied", batch_size=4, **terms, **dims) for terms in OTHER_TERMS
    ]
    ranks = run_distributed(gradients_and_metrics, world_size, configs)
    for terms, of_ranks in zip(OTHER_TERMS, zip(*ranks, strict=True), strict=True):
        of_loss = terms.get("kd_loss", {})
        kd_ratio = terms.get("kd_ratio", 0.3)
        expected = reference(
            "untied",
            kd_ratio,
            of_loss.get("temperature", 2.0),
            of_loss.get("divergence", "forward"),
        )
        assert_is_the_big_batch(of_ranks, expected, kd_ratio)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_student_s_adapters_have_the_big_batch_s_gradient(world_size, tiny_kd_config, tmp_path):
    sizes = tiny.adapted(tiny.UNTIED_MODEL)
    config = step_of_16(tiny_kd_config, "untied", model=sizes, batch_size=2)
    config = with_adapters(config, tmp_path)
    expected = big_batch_of_teacher.reference_of_steps(sizes, tiny.UNTIED_TEACHER_MODEL, 0.3, 2.0)
    for of_rank in run_distributed(gradients_and_metrics, world_size, [config]):
        gradients, _ = of_rank[0]
        for step, (_, of_step) in zip(gradients, expected, strict=True):
            assert step.keys() == of_step.keys()
            assert error(step, of_step) < TOLERANCE


@pytest.mark.parametrize("wrapping", ["output of its own", "student's output of its own", "whole"])
def test_however_the_models_are_wrapped(wrapping, tiny_kd_config):
    """Where an output layer is a unit of its own, FSDP2 lets go of its weight after each call."""
    changes = {
        "output of its own": {"teacher_custom_sharded_layers": ["output", "tok_embeddings"]},
        "student's output of its own": {"custom_sharded_layers": ["output"]},
        "whole": {"enable_activation_checkpointing": True, "fsdp_reshard_after_forward": False},
    }[wrapping]
    config = step_of_16(tiny_kd_config, "untied", batch_size=2, **changes)
    ranks = run_distributed(gradients_and_metrics, 2, [config])
    assert_is_the_big_batch([of_rank[0] for of_rank in ranks], reference("untied"))


SUMS = "sums = self.pipeline.forward_backward(taught,"
TAUGHT = "with self.teacher.teaching(step) as taught:"
MUTANTS = {
    "divergence a mean per microbatch": (
        "scaled = self.sums(microbatch) * scale",
        "head = next(h for h in __import__('gc').get_objects() if type(h) is LinearDistillationLoss); "
        "head._square = 4 / scale / max(len(microbatch.targets.positions), 1) / len(taught); "
        "scaled = self.sums(microbatch) * scale",
    ),
    "the teacher's word rotated by one microbatch": (
        f"        {TAUGHT}\n            if self.pipeline is not None:\n                # One",
        f"        {TAUGHT}\n            words = [m.targets.teacher for m in taught]\n"
        "            n = [len(m.targets.positions) for m in taught]\n"
        "            taught = [m.with_teacher(w._replace(hidden=torch.nn.functional.pad(w.hidden[:k], (0, 0, 0, "
        "max(k - len(w.hidden), 0))))) for m, w, k in zip(taught, words[1:] + words[:1], n)]\n"
        "            if self.pipeline is not None:\n                # One",
    ),
    "no square of the temperature": (
        "kd_loss_fn = kd_loss_fn or LinearDistillationLoss()",
        "kd_loss_fn._square = 1.0",
    ),
    "targets counted before they are shifted": (
        'scale = step.scale("target_tokens")\n        metrics',
        'scale = step.dp_degree / (step.totals["target_tokens"] + 16)\n        metrics',
    ),
    "both sides over the teacher's own tokens": (
        "make_distillation_loss(loss_fn, kd_loss_fn, settings.teacher.kd_ratio)",
        "make_distillation_loss(loss_fn, kd_loss_fn, settings.teacher.kd_ratio)\n"
        "                from recipe_utils.loss.distillation import TeacherHidden\n"
        "                TeacherHidden.log_probs_like = lambda self, logits, t: torch.log_softmax(self.output("
        "self.hidden).to(logits.dtype) / t, -1)[:, :logits.size(1)]",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_recipe_misses_the_big_batch(mutant, tiny_kd_config):
    config = step_of_16(tiny_kd_config, "untied", batch_size=2)
    (gradients,) = run_distributed(run_recipe_recording_gradients, 1, config, MUTANTS[mutant], KD)
    expected = reference("untied")
    errors = [error(g, of_step) for g, (_, of_step) in zip(gradients, expected, strict=True)]
    assert max(errors) > 1e-2


def gradients_with_a_teacher_in_train_mode(config):
    import torch

    from recipe_utils.model.frozen import hidden_states

    frozen = hidden_states.FrozenModel.hidden_of

    def hidden_of(self, microbatches):
        for layer in self._model.layers:
            layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(0.3))
        hidden_states.FrozenModel.hidden_of = frozen
        self._model.train()
        return frozen(self, microbatches)

    hidden_states.FrozenModel.hidden_of = hidden_of
    return run_recipe_recording_gradients(config, recipe=KD)


def test_a_teacher_that_drops_out_would_be_seen(tiny_kd_config):
    config = step_of_16(tiny_kd_config, "untied", batch_size=2)
    (gradients,) = run_distributed(gradients_with_a_teacher_in_train_mode, 1, config)
    assert error(gradients[0], reference("untied")[0][1]) > 1e-2
