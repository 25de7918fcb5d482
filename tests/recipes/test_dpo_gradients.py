"""The gradient of every parameter is that of its pairs one by one, in float64, whatever the layout."""

from functools import cache, partial

import big_batch
import big_batch_of_pairs
import pytest
import tiny
from big_batch import LAYOUTS, TOLERANCE, TP_PLAN
from big_batch_of_pairs import NUM_PAIRS, PAIRS_PER_STEP
from distributed_runs import run_distributed
from recipe_runs import (
    DPO,
    ListLogger,
    run_recipe_recording_gradients,
    tiny_dpo_config,
    with_adapters,
)

TORCHTUNE, OURS = "torchtune.rlhf.loss", "recipe_utils.loss.preference"
LOSSES = {
    "dpo": {"_component_": f"{TORCHTUNE}.DPOLoss", "beta": 0.3},
    "smoothed": {"_component_": f"{TORCHTUNE}.DPOLoss", "beta": 0.3, "label_smoothing": 0.2},
    "rso": {"_component_": f"{TORCHTUNE}.RSOLoss", "gamma": 0.02},
    "ipo": {"_component_": f"{OURS}.IPOLoss", "tau": 0.3},
    "robust": {"_component_": f"{OURS}.RobustDPOLoss", "beta": 0.3, "label_smoothing": 0.2},
    "normalized": {"_component_": f"{OURS}.NormalizedDPOLoss", "beta": 3.0},
    "simpo": {"_component_": f"{OURS}.SimPOLoss", "beta": 2.0, "gamma": 0.5},
}
COMBINATIONS = [  # kind of pairs, loss, weight of the SFT term
    ("masked", "dpo", 0.0),
    ("multi_turn", "dpo", 0.7),
    ("train_on_input", "smoothed", 0.0),
    ("nothing_common", "rso", 0.0),
    ("alike_beginnings", "ipo", 0.3),
    ("multi_turn", "robust", 0.0),
    ("alike_beginnings", "normalized", 0.0),
    ("masked", "simpo", 0.2),
]
PLANS = [
    {"microbatching": "in_order", "batch_size": 2, "gradient_sync": "last_microbatch"},
    {"microbatching": "least_padding", "batch_size": 2},
    {"microbatching": "packed", "batch_size": 1, "gradient_sync": "last_microbatch"},
    {"microbatching": "packed", "batch_size": 2, "prefix_sharing": False},
]
TIED, UNTIED = tiny.MODEL, tiny.UNTIED_MODEL


@cache
def reference(combination, is_tied=True):
    kind, loss, weight = combination
    sizes = TIED if is_tied else UNTIED
    return big_batch_of_pairs.reference_of_steps(sizes, kind, LOSSES[loss], weight)


@pytest.fixture
def step_of_8(weights_folder, tmp_path):
    """Makes configs whose output goes to this test's own folder."""
    return partial(make_step_of_8, weights_folder, tmp_path)


def make_step_of_8(folder, out, combination, **changes):
    kind, loss, weight = combination
    data = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": NUM_PAIRS, "kind": kind}
    changes.setdefault("batch_size", 2)
    config = tiny_dpo_config(
        folder,
        dataset=data,
        loss=LOSSES[loss],
        sft_loss_weight=weight,
        global_batch_size=PAIRS_PER_STEP,
        gradient_accumulation_steps=...,
        **changes,
    )
    config["output_dir"] = config["checkpointer"]["output_dir"] = str(out)
    return config


def gradients_and_metrics(configs):
    found = []
    for config in configs:
        ListLogger.logged.clear()
        gradients = run_recipe_recording_gradients(config, recipe=DPO)
        found.append((gradients, list(ListLogger.logged)))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_and_metrics_are_those_of_the_pairs_one_by_one(layout, step_of_8):
    world_size, dims = LAYOUTS[layout]
    is_tied = "tp" not in layout
    if not is_tied:
        dims = {**dims, **TP_PLAN}
    cases, configs = [], []
    # Tensor-parallel ranks hold the same pairs: there each plan is tried once.
    for i, combination in enumerate(COMBINATIONS if is_tied else COMBINATIONS[: len(PLANS)]):
        # All plans on one process; on more, of padded and packed rows in turn, each plan with two losses.
        of_ranks = PLANS[i // 2 % 2 + 2 * (i % 2)]
        for plan in PLANS if world_size == 1 else [of_ranks]:
            cases.append(combination)
            sizes = TIED if is_tied else UNTIED
            configs.append(step_of_8(combination, model=sizes, **plan, **dims))
    found = run_distributed(gradients_and_metrics, world_size, configs, timeout_seconds=300)
    for rank, of_rank in enumerate(found):
        for combination, (gradients, logged) in zip(cases, of_rank, strict=True):
            expected = reference(combination, is_tied)
            assert len(gradients) == len(expected) == 3
            for step, (_, of_step) in zip(gradients, expected, strict=True):
                assert step.keys() == of_step.keys()
                assert big_batch.error(step, of_step) < TOLERANCE, combination
            for metrics, (of_step, _) in zip(logged, expected if rank == 0 else [], strict=True):
                for name, value in of_step.items():
                    assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


SFT_AND_DPO, MULTI_TURN = COMBINATIONS[1], ("multi_turn", "dpo", 0.0)
FORWARD = "model(**microbatch.inputs, targets=microbatch.targets)"
MAKE_PAIRS = "PairCollator(data, self.tokenizer, limits, settings.pairs, self.reference)"
MUTANTS = {
    "rejected sees chosen": (
        1,
        (
            "            attend_within_documents(decoder, ranks.device, pairs.longest_row)",
            "            attend_within_documents(decoder, ranks.device, pairs.longest_row)\n"
            "            decoder.register_forward_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "
            "'document_lengths': [[sum(d) if isinstance(d, tuple) else d for d in row] "
            "for row in kwargs['document_lengths']]}), with_kwargs=True, prepend=True)",
        ),
    ),
    "rejected's positions count on after chosen": (
        1,
        (
            FORWARD,
            "model(**{**microbatch.inputs, 'input_pos': torch.cat([torch.arange(sum(d) if isinstance(d, tuple) "
            "else d) for d in microbatch.inputs['document_lengths'][0]])[None]}, targets=microbatch.targets)",
        ),
    ),
    "shared targets counted for chosen alone": (
        1,
        (
            "return sums_of_answers(of_tokens, microbatch.targets.pairs)",
            "return sums_of_answers(of_tokens, microbatch.targets.pairs) - torch.stack([t := torch.segment_reduce("
            "of_tokens.double(), 'sum', lengths=microbatch.targets.pairs.segment_lengths, unsafe=True, initial=0)"
            ".view(-1, 3)[:, 0], t]) * torch.tensor([[0.0], [1.0]])",
        ),
    ),
    "last common token shared, too": (
        1,
        (
            MAKE_PAIRS,
            f"(lambda pairs, prepare: setattr(pairs, 'prepare', lambda *args: (lambda s: {{**s, 'num_shared': "
            f"s['num_shared'] + 1}})(prepare(*args))) or pairs)(*(lambda p: (p, p.prepare))({MAKE_PAIRS}))",
        ),
    ),
    "mean of microbatch means": (
        1,
        (
            "sums = self.sums(microbatch)",
            "sums = self.sums(microbatch) / microbatch.counts['pairs'] / len(step.microbatches) / per_pair",
        ),
    ),
    "tokens instead of pairs": (
        1,
        (
            "sums = self.sums(microbatch)",
            "sums = self.sums(microbatch) * (microbatch.counts['target_tokens'] / step.totals['target_tokens']"
            " / microbatch.counts['pairs'] / per_pair)",
        ),
    ),
    "a microbatch left out": (
        1,
        (
            "            with gradient_sync(",
            "            if is_last and len(step.microbatches) > 1: continue\n            with gradient_sync(",
        ),
    ),
    "pairs of one rank": (2, ('step.scale("pairs")', "1 / step.totals['pairs']")),
    "the stand-in counted as a pair": (
        4,
        (
            MAKE_PAIRS,
            f"(lambda pairs: setattr(pairs, 'dummy', lambda sample: pairs.collate([sample])) or pairs)({MAKE_PAIRS})",
        ),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_recipe_misses_the_pairs(mutant, step_of_8):
    world_size, mutation = MUTANTS[mutant]
    config = step_of_8(MULTI_TURN, microbatching="packed", max_tokens_per_microbatch=100)
    if world_size == 4:
        config["batch_size"] = 2
    (gradients, *_) = run_distributed(
        run_recipe_recording_gradients, world_size, config, mutation, DPO
    )
    expected = reference(MULTI_TURN)
    errors = [
        big_batch.error(g, of_step) for g, (_, of_step) in zip(gradients, expected, strict=True)
    ]
    assert max(errors) > 0.05


ADAPTED = {
    "lora": (tiny.adapted(tiny.MODEL), 1),
    "dora": (tiny.adapted(tiny.UNTIED_MODEL, use_dora=True), 2),
    "lora-fsdp-2": (tiny.adapted(tiny.UNTIED_MODEL), 2),
}


@pytest.mark.parametrize("adapters", ADAPTED)
def test_adapters_have_the_model_without_them_as_reference(adapters, step_of_8, tmp_path):
    sizes, world_size = ADAPTED[adapters]
    kind, loss = "alike_beginnings", "dpo"
    configs = [
        with_adapters(
            step_of_8((kind, loss, 0.0), model=sizes, **plan),
            tmp_path,
        )
        for plan in (PLANS[0], PLANS[2], {**PLANS[2], "enable_activation_checkpointing": True})
    ]
    expected = big_batch_of_pairs.reference_of_steps(sizes, kind, LOSSES[loss])
    for of_rank in run_distributed(gradients_and_metrics, world_size, configs):
        for gradients, _ in of_rank:
            for step, (_, of_step) in zip(gradients, expected, strict=True):
                assert step.keys() == of_step.keys()
                assert big_batch.error(step, of_step) < TOLERANCE
