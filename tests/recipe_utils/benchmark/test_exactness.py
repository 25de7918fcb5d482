import math

import torch
from torch import nn

from recipe_utils.benchmark.exactness import (
    CASES,
    CraftedDataset,
    crafted_config,
    relative_error,
)

REFERENCES = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([2.0])}


def test_the_error_is_relative_to_the_largest_gradient():
    gradients = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([2.5])}
    assert relative_error(gradients, REFERENCES) == 0.125
    assert relative_error(REFERENCES, REFERENCES) == 0


def test_a_missing_gradient_is_one_of_zeros():
    assert relative_error({"b": torch.tensor([2.0])}, REFERENCES) == 1


def test_a_nan_gradient_is_no_small_error():
    for bad in ("a", "b"):
        gradients = {**REFERENCES, bad: REFERENCES[bad] * math.nan}
        assert math.isnan(relative_error(gradients, REFERENCES))


def test_every_case_but_the_last_fills_an_update_step_of_all_ranks():
    dataset = CraftedDataset(None, num_token_ids=67, max_seq_len=64, num_ranks=2)
    cases = dataset.cases()
    assert [len(samples) for samples in cases.values()] == [16, 16, 16, 4]
    assert sum(len(samples) for samples in cases.values()) == len(dataset)
    assert all(1 < len(dataset[i]["tokens"]) <= 64 for i in range(len(dataset)))
    # Two neighbours are the same sample of both ranks, so each rank's third microbatch has no target.
    empty = cases["no_targets_in_a_microbatch"][8:12]
    assert all(set(sample["labels"]) == {-100} for sample in empty)
    assert all(-100 not in sample["labels"] for sample in cases["every_token"])
    assert list(cases) == list(CASES)


def test_token_ids_are_inside_the_vocabulary():
    dataset = CraftedDataset(None, num_token_ids=67, max_seq_len=64)
    embedding = nn.Embedding(67, 2)
    for i in range(len(dataset)):
        embedding(torch.tensor(dataset[i]["tokens"]))


def test_crafted_update_steps_of_a_model_with_adapters_start_from_crafted_ones(tmp_path):
    plain = {"model": {}, "optimizer": {"lr": 0.1}, "checkpointer": {"output_dir": "out"}}
    assert crafted_config(plain, 1, tmp_path)["checkpointer"] == plain["checkpointer"]
    adapted = {**plain, "checkpointer": {"output_dir": "out", "adapter_checkpoint": "fresh.pt"}}
    checkpointer = crafted_config(adapted, 1, tmp_path)["checkpointer"]
    assert checkpointer == {"output_dir": "out", "adapter_checkpoint": f"{tmp_path}/adapters.pt"}
