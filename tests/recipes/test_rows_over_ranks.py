"""Rows that several ranks compute together have one process's curve, also resumed, with less memory.

``test_gradients.py`` and its like have their gradients.
"""

import shutil

import pytest
import tiny
import torch
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import STEP_OF_8, run_recipe, writing_to
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from recipe_utils.losses import LinearCrossEntropyLoss
from recipe_utils.losses.attach import attach_loss
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.attention.exchange import row_groups
from recipe_utils.models.attention.packed_attention import attention_of
from recipe_utils.parallel.ranks import join_ranks
from recipe_utils.plans.rounds import Share
from recipe_utils.text.row_tensors import share_of_row

SPANNING = {"microbatching": "packed", "batch_size": 1, "max_tokens_per_microbatch": 12}


@pytest.fixture
def trained(tiny_config):
    """Makes a config of two epochs with validation, in which some rows need several ranks."""

    def make(max_ranks):
        return tiny_config(
            dataset={"_component_": "tiny.tiny_dataset", "num_samples": 38},
            dataset_val={"_component_": "tiny.tiny_dataset", "num_samples": 9, "seed": 1},
            run_val_every_n_steps=5,
            epochs=2,
            dtype="fp64",
            save_every_n_steps=3,
            keep_last_n_checkpoints=9,
            max_ranks_per_row=max_ranks,
            **{**STEP_OF_8, **SPANNING},
        )

    return make


def curve(logged):
    """Returns losses and validation losses by update step."""
    return [(m["step"], name, m[name]) for m in logged for name in ("loss", "val_loss") if name in m]


def assert_same_curve(found, expected):
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in expected], rel=1e-6)


@pytest.mark.slow
def test_the_curve_is_that_of_one_process_also_resumed_on_fewer_ranks(trained, tmp_path):
    alone = curve(run_distributed(run_recipe, 1, trained(1))[0])
    assert len(alone) == 13
    config = writing_to(tmp_path / "four", trained(4))
    assert_same_curve(curve(run_distributed(run_recipe, 4, config)[0]), alone)
    resumed = resuming_in(tmp_path / "two", trained(2))
    shutil.copytree(tmp_path / "four" / "step_3", tmp_path / "two" / "step_3")
    expected = [each for each in alone if each[0] > 3]
    assert_same_curve(curve(run_distributed(run_recipe, 2, resumed)[0]), expected)


NUM_TOKENS = 1024
SIZES = {**tiny.WIDE_MODEL, "num_layers": 4, "num_heads": 8, "max_seq_len": NUM_TOKENS}


def saved_bytes(num_ranks, recomputes):
    """Returns the bytes of activations that the backward of a one-document row needs on this rank."""
    ranks = join_ranks("cpu")
    model = tiny.tiny_model(SIZES)
    groups = row_groups(ranks, ranks.world_size)
    attend_within_documents(model, attention_of(model, ranks.device), NUM_TOKENS, groups)
    attach_loss(model, LinearCrossEntropyLoss(tokens_per_chunk=64))
    if recomputes:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tokens = torch.randint(tiny.VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).numpy()  # fmt: skip
    share = Share(ranks.dp_rank % num_ranks, num_ranks)
    whole = tiny.packed_row([{"tokens": tokens, "labels": tokens}])
    row = share_of_row(whole, share, 1, None)
    sizes = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model(**row.inputs, targets=row.targets)
    num_bytes = sum(nbytes for nbytes, _ in sizes.values())
    loss.sum().backward()
    ranks.leave()
    return num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_four_ranks_keep_a_quarter_of_the_activations_each(recomputes):
    whole = max(run_distributed(saved_bytes, 4, 1, recomputes))
    of_ranks = run_distributed(saved_bytes, 4, 4, recomputes)
    assert max(of_ranks) <= 0.3 * whole
    assert max(of_ranks) <= 1.02 * min(of_ranks)
