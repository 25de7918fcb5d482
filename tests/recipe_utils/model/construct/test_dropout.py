"""Masks of dropout: uniform, independent, and the same for a sample in any row, part of a row or recomputation."""

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from torch._inductor import metrics
from torchtune.data import padded_collate_sft
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from recipe_utils.data.order import mixed_sequence, seed_of
from recipe_utils.data.text import collate
from recipe_utils.data.text.collate import collate_microbatch, collate_packed_microbatch
from recipe_utils.data.text.trees import merge
from recipe_utils.model.construct import dropout
from recipe_utils.model.construct.dropout import LayoutFreeDropout, has_dropout, replace_dropout

P, SHAPE = 0.3, (32, 64, 128)
"""Rate; samples, positions and channels of each mask."""


def keys_of(step, num_samples=SHAPE[0], length=SHAPE[1]):
    """Returns keys of samples of one length in an update step."""
    keys = np.array([seed_of(0, 0, step, i) for i in range(num_samples)]).repeat(length)
    positions = np.tile(np.arange(length), num_samples)
    return torch.from_numpy(mixed_sequence(keys, positions)).view(num_samples, length)


def kept(name, keys, num_channels=SHAPE[2]):
    """Returns the mask of a module."""
    dropout._forward.keys = keys
    return LayoutFreeDropout(P, name)(torch.ones(*keys.shape, num_channels)) != 0


@pytest.fixture(autouse=True)
def no_keys_remain():
    yield
    dropout._forward.keys = None


@pytest.fixture(scope="module")
def masks():
    """Returns masks by update step (two), module (two), sample, position and channel."""
    return torch.stack(
        [torch.stack([kept(name, keys_of(step)) for name in ("layers.0.a", "layers.1.a")]) for step in (0, 1)]
    )  # fmt: skip


def z_of_chi_squared(counts, number):
    """Returns the deviation of chi-squared of binomial counts out of ``number``, in standard deviations."""
    expected, degrees = number * (1 - P), counts.numel()
    chi_squared = ((counts - expected) ** 2).sum() / (number * P * (1 - P))
    return float(chi_squared - degrees) / (2 * degrees) ** 0.5


@pytest.mark.parametrize("over", [[0], [1], [2], [3], [4], [3, 4], [1, 4], [0, 2]])
def test_masks_are_uniform_over_steps_modules_samples_positions_and_channels(masks, over):
    others = [axis for axis in range(5) if axis not in over]
    counts = masks.double().sum(others)
    assert abs(z_of_chi_squared(counts, masks.numel() / counts.numel())) < 4
    # Alone, chi-squared would not notice masks that repeat.
    assert abs(float(masks.double().mean()) - (1 - P)) < 4 * (P * (1 - P) / masks.numel()) ** 0.5


@pytest.mark.parametrize("axis", range(5))
def test_masks_are_independent_along_each_axis_and_in_squares(masks, axis):
    def z(agrees, probability):
        number = agrees.numel()
        return (float(agrees.sum()) - number * probability) / (number * probability * (1 - probability)) ** 0.5  # fmt: skip

    agree, size = P**2 + (1 - P) ** 2, masks.size(axis) // 2
    for step in {1, size}:
        first, second = (masks.narrow(axis, start, size) for start in (0, step))
        same = first == second
        assert abs(z(same[..., ::2] if axis == 4 and step < size else same, agree)) < 5
        if axis < 4:  # two channels of two positions: dependent if hashes were sums of both
            half = same.size(-1) // 2
            squares = same[..., :half] == same[..., half:]
            assert abs(z(squares, agree**2 + (1 - agree) ** 2)) < 5


def test_a_mask_is_that_of_a_hash_in_unsigned_arithmetic():
    def fmix(h):
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        return (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32

    keys, name = keys_of(3, 2, 5), "layers.0.attn.q_proj.dropout"
    salt = dropout.zlib.crc32(name.encode()) ^ 2**31
    found = kept(name, keys, 7)
    for place in np.ndindex(2, 5, 7):
        key = int(keys[place[:2]]) % 2**64
        row = fmix(fmix(key % 2**32 ^ salt) ^ key >> 32)
        value = fmix(row ^ fmix(place[2] + 1)) ^ 2**31  # signed numbers are compared
        assert bool(found[place]) == (value >= round(P * 2**32)), place


# ---- Layouts ------------------------------------------------------------------------------------


def samples_of(*lengths):
    return [
        {"tokens": np.arange(n) + 2, "labels": np.arange(n) + 2, "dropout_key": seed_of(n)}
        for n in lengths
    ]


def test_masks_of_a_sample_are_bitwise_equal_in_any_row():
    """Rows are packed, padded, or the sample alone; the mutant uses positions in the row."""
    long, short = samples_of(9, 4)
    alone = [collate_packed_microbatch([each], -100).inputs["dropout_keys"][0] for each in (long, short)]  # fmt: skip
    packed = collate_packed_microbatch([short, long], -100, row_multiple=16).inputs["dropout_keys"]
    padded = collate_microbatch([long, short], padded_collate_sft, -100).inputs["dropout_keys"]
    assert packed.shape == (1, 16)
    assert torch.equal(packed[0, :4], alone[1])
    assert torch.equal(packed[0, 4:13], alone[0])
    assert torch.equal(padded[0], alone[0])
    assert torch.equal(padded[1, :4], alone[1])
    assert torch.equal(kept("a", padded)[1, :4], kept("a", packed)[0, :4])
    with pytest.MonkeyPatch.context() as patches:
        in_row = lambda keys, positions: mixed_sequence(keys, np.arange(len(keys)))  # noqa: E731
        patches.setattr(collate, "mixed_sequence", in_row)
        wrong = collate_packed_microbatch([short, long], -100).inputs["dropout_keys"]
    assert not torch.equal(wrong[0, 4:13], alone[0])


def test_a_shared_beginning_of_sequences_has_one_mask():
    """A branch of a tree has the keys of its sequence alone."""
    tokens = [np.array([5, 6, 7, *end]) for end in ([1, 2], [3, 4, 8])]
    sequences = [{"tokens": each, "labels": np.where(each < 5, each, -100)} for each in tokens]
    tree = {**merge(sequences, None, -100), "dropout_key": 3}
    keys = collate_packed_microbatch([tree], -100).inputs["dropout_keys"][0]
    assert len(keys) == 9  # both have a target at their last common position
    assert torch.equal(keys, torch.from_numpy(mixed_sequence(np.full(9, 3), tree["input_pos"])))
    assert len(keys.unique()) == 6


def test_without_dropout_there_are_no_keys():
    plain = [{k: v for k, v in each.items() if k != "dropout_key"} for each in samples_of(3, 4)]
    assert "dropout_keys" not in collate_packed_microbatch(plain, -100).inputs
    model = tiny.tiny_model()
    before = [type(module) for module in model.modules()]
    replace_dropout(model)
    assert [type(module) for module in model.modules()] == before
    assert not has_dropout(model)


# ---- Modules ------------------------------------------------------------------------------------


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(7, 8)
        self.resid_dropout, self.attn_dropout = nn.Dropout(P), nn.Dropout(P)
        self.experts = nn.ModuleList([nn.Dropout(P)])
        self.off = nn.Dropout(0.0)

    def forward(self, tokens):
        return self.resid_dropout(self.tok_embeddings(tokens))


def test_dropout_of_activations_is_replaced_by_name():
    def replaced(model, **how):
        replace_dropout(model, **how)
        return [name for name, m in model.named_modules() if isinstance(m, LayoutFreeDropout)]

    assert replaced(Decoder()) == ["resid_dropout"]
    assert replaced(Decoder(), tensor_parallel_dim=2) == []
    assert replaced(nn.Sequential(nn.Dropout(P))) == []  # of images


def test_a_forward_takes_the_keys_of_its_inputs_and_drops_in_training_only():
    model = Decoder()
    replace_dropout(model)
    tokens, keys = torch.ones(2, 5, dtype=torch.int64), keys_of(0, 2, 5)
    first, second = (model(tokens, dropout_keys=keys) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first != 0, kept("resid_dropout", keys, 8))
    assert not torch.equal(model(tokens, dropout_keys=keys_of(1, 2, 5)), first)
    assert not torch.equal(model(tokens), model(tokens))  # draws, as nn.Dropout
    assert bool((model.eval()(tokens, dropout_keys=keys) != 0).all())


def test_activations_of_other_positions_are_refused_by_name():
    dropout._forward.keys = keys_of(0, 2, 5)
    module = LayoutFreeDropout(P, "layers.0.attn_drop")
    flat = module(torch.ones(10, 8))
    assert torch.equal(flat, module(torch.ones(2, 5, 8)).flatten(0, 1))
    for shape in ((5, 2, 8), (2, 4, 5, 5), (7, 8)):
        with pytest.raises(ValueError, match=r"model: layers\.0\.attn_drop drops from .* to 0"):
            module(torch.ones(*shape))


def test_recomputed_layers_have_the_masks_of_their_forward():
    """Other rows are computed in between, as in a pipeline, and the generator has other numbers."""
    gradients = []
    tokens = torch.arange(10).view(2, 5)
    for recomputes in (False, True):
        sizes = tiny.adapted(tiny.MODEL, lora_dropout=P)
        model = tiny.tiny_model(sizes)
        replace_dropout(model)
        assert has_dropout(model)
        if recomputes:
            set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
            dropout.recompute_with_keys(model)
        loss = model(tokens, dropout_keys=keys_of(0, 2, 5)).square().sum()
        model(tokens[:1], dropout_keys=keys_of(1, 1, 5))
        torch.manual_seed(int(recomputes))
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


def num_kernels(module, *inputs):
    torch._dynamo.reset()
    metrics.reset()
    out = torch.compile(module)(*inputs)
    return out, metrics.generated_kernel_count


@pytest.mark.slow
def test_compiled_masks_are_bitwise_equal_and_take_no_more_kernels(monkeypatch):
    keys, x = keys_of(0, 2, 64), torch.randn(2, 64, 96)
    dropout._forward.keys = keys
    own = LayoutFreeDropout(P, "a")
    compiled, number = num_kernels(own, x)
    assert torch.equal(compiled, own(x))
    monkeypatch.setattr(dropout, "missing_for_triton", lambda: None)
    alone = dropout._compiled.__wrapped__()  # as eager layers on CUDA
    for p in (P, P / 2):
        assert torch.equal(alone(x, keys, own._salt, p), LayoutFreeDropout(p, "a")(x))
    linear = nn.Linear(96, 96)
    assert number == num_kernels(nn.Dropout(P), x)[1] == 1
    counts = [num_kernels(nn.Sequential(each, linear), x)[1] for each in (own, nn.Dropout(P))]
    assert counts[0] <= counts[1]
