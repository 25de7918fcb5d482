"""Samples of several sequences: gradients are those of the sequences one by one, in float64."""

import shutil

import numpy as np
import pytest
from gradient_rows import RECOMPUTED, Row, assert_exact, error_of_mutant, on_ranks, spanning
from recipe_runs import losses, refusal, run_recipe, slow
from tiny_transformers import save_tiny

from recipe_utils.models.attention import chains
from recipe_utils.text import trees
from recipe_utils.text.documents import length_of
from recipe_utils.text.reader import TextReader

CUT = {"max_tokens_per_microbatch": 20}

SHARED = {"max_tokens_per_microbatch": 64}

FAST = [
    Row("one", "tied", objective="trees"),
    Row("fsdp-2", "untied", objective="trees", changes=CUT),
    Row("fsdp-2", "tied", objective="common", changes=SHARED),
    Row("fsdp-2", "tied", "least_padding", 2, None, "trees"),
]
ROWS = [
    *FAST,
    Row("one", "tied lora", objective="trees", changes=CUT),
    Row("one", "qwen3", objective="trees"),
    Row("one", "lfm2", objective="common", changes=SHARED),
    Row("pp-2", "tied", "packed", 1, "1F1B", "common", SHARED),
    Row("one", "tied", objective="kd common", changes=SHARED),
    Row("one", "lfm2", objective="trees", changes=CUT),
    Row("fsdp-2", "untied", objective="trees", changes=spanning(2, 30)),
    Row("fsdp-2", "gemma3_text", objective="trees", changes=RECOMPUTED),
    Row("fsdp-2", "qwen3", objective="trees", changes=spanning(2, 30)),
    Row("fsdp-4", "tied", objective="trees", changes={**CUT, **RECOMPUTED}),
    Row("pp-2", "tied", "packed", 1, "1F1B", "trees", CUT),
    Row("tp-2", "untied", objective="trees"),
    Row("one", "tied", objective="kd trees", changes=CUT),
    Row("fsdp-2", "qwen3/gemma3_text", objective="kd trees"),
]


@on_ranks(FAST, ROWS)
def test_gradients_are_those_of_the_sequences(rows, weights_folder, tmp_path):
    assert_exact(rows, weights_folder, tmp_path)


def test_what_cannot_have_trees_is_refused_before_weights_load(tiny_config, tmp_path):
    keys = {"dataset": {"_component_": "tiny.tiny_tree_dataset", "num_samples": 9}, "batch_size": 2}
    text = refusal(tiny_config(**keys, collate_fn="tiny.collate_images"))
    assert "collate_fn=tiny.collate_images: a sample may have several sequences, each of which is a row" in text
    keys["microbatching"] = "packed"
    text = refusal(tiny_config(**keys, **save_tiny(tmp_path / "bloom", "bloom")))
    assert "split_turns=shared: BloomForCausalLM does not compute trees as it computes their" in text


def a_wrong_ancestor(patches):
    of_row = chains.chains

    def without_the_nearest(row):
        for chain in of_row(row):
            yield chain._replace(ancestors=chain.ancestors[:-1])

    patches.setattr(chains, "chains", without_the_nearest)


def siblings_that_see_each_other(patches):
    of_row = chains.chains
    patches.setattr(chains, "chains", lambda row: of_row(list(map(length_of, row))))


def positions_that_do_not_continue(patches):
    prepare = TextReader.prepare

    def restarted(self, *args):
        sample = prepare(self, *args)
        return sample._replace(positions=np.zeros(len(sample.tokens), dtype=np.int64))

    patches.setattr(TextReader, "prepare", restarted)


def a_shared_target_lost(patches):
    insert = trees._insert

    def without(root, path, places, num_new, flat):
        are_targets = flat.are_targets.copy()
        are_targets[places[: len(places) - num_new]] = False
        insert(root, path, places, num_new, flat._replace(are_targets=are_targets))

    patches.setattr(trees, "_insert", without)


def positions_with_two_targets_shared(patches):
    num_shared = trees._num_shared
    nothing = lambda flat: flat._replace(are_targets=flat.are_targets & False)  # noqa: E731
    patches.setattr(trees, "_num_shared", lambda segment, places, flat: num_shared(segment, places, nothing(flat)))


def a_repeated_target_counted_twice(patches):
    split = trees.split_trees

    def last_twice(sample):
        parts = split(sample)
        return [*parts, parts[-1]]

    patches.setattr("recipe_utils.text.collator.split_trees", last_twice)


def a_beginning_that_is_too_long(patches):
    tree_of, share = trees._tree_of, trees.share_beginnings
    patches.setattr(trees, "_tree_of", lambda samples, n: tree_of(samples, n + 1))

    def one_more(*args, **keys):
        row = share(*args, **keys)
        starts = [start + (start > 0) for start in row.starts]
        return row._replace(starts=starts, num_saved=row.num_saved + sum(start > 0 for start in starts))

    patches.setattr("recipe_utils.text.collator.share_beginnings", one_more)


MUTANTS = {
    a_beginning_that_is_too_long: FAST[2]._replace(layout="one"),
    a_wrong_ancestor: FAST[0],
    siblings_that_see_each_other: FAST[0],
    positions_that_do_not_continue: FAST[0],
    a_shared_target_lost: FAST[0],
    positions_with_two_targets_shared: FAST[0],
    a_repeated_target_counted_twice: FAST[0]._replace(changes=CUT),
}


@pytest.mark.parametrize(
    "mutate", [*list(MUTANTS)[:3], *map(slow, list(MUTANTS)[3:])], ids=lambda mutate: mutate.__name__
)  # fmt: skip
def test_a_wrong_tree_misses_the_sequences(mutate, weights_folder, tmp_path):
    assert error_of_mutant(mutate, MUTANTS[mutate], weights_folder, tmp_path) > 1e-2


def test_shared_positions_are_logged_and_a_training_resumes_bitwise(tiny_config, tmp_path):
    data = {"_component_": "tiny.tiny_tree_dataset", "num_samples": 12}
    config = tiny_config(
        dataset=data, microbatching="packed", batch_size=2, max_tokens_per_microbatch=24,
        max_steps_per_epoch=3, save_every_n_steps=2, keep_last_n_checkpoints=9,
    )  # fmt: skip
    whole = run_recipe(config)
    shared = [metrics["shared_fraction"] for metrics in whole if "loss" in metrics]
    assert all(0.1 < each < 0.8 for each in shared), shared
    for later in ("step_3", "epoch_0"):
        shutil.rmtree(f"{config['output_dir']}/{later}")
    rest = run_recipe({**config, "resume_from_checkpoint": True})
    assert losses(rest) == losses(whole)[2:]


def test_the_common_beginning_of_samples_is_computed_once_per_row(tiny_config):
    data = {"_component_": "tiny.tiny_dataset", "num_samples": 12, "num_common": 20}
    packed = {"microbatching": "packed", "max_tokens_per_microbatch": 128}
    keys = {"dataset": data, "dataset_val": data, "run_val_every_n_steps": 1, "dtype": "fp64"}
    shared = run_recipe(tiny_config(**keys, **packed))
    fractions = [each["shared_fraction"] for each in shared if "loss" in each]
    assert all(each > 0.2 for each in fractions), fractions
    assert losses(shared) == pytest.approx(losses(run_recipe(tiny_config(**keys))), rel=1e-6)
    alone = run_recipe(tiny_config(**keys, **packed | {"max_tokens_per_microbatch": 1}))
    assert not any("shared_fraction" in each for each in alone)
