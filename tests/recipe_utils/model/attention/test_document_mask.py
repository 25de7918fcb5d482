"""Documents of a row attend as if each were alone, whichever way the attention is computed."""

import pytest
import tiny
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torchtune.modules import TransformerDecoder

from recipe_utils.data.text.documents import Documents
from recipe_utils.model.attention.block_mask import block_mask, sees
from recipe_utils.model.attention.document_mask import (
    DocumentMask,
    _attend,
    attend_within_documents,
)
from recipe_utils.model.attention.packed_attention import other_attention

CPU = torch.device("cpu")
MODELS = {"llama": tiny.MODEL, "untied": tiny.UNTIED_MODEL, "gemma2": tiny.GEMMA2_MODEL}


def make(sizes, max_row_length=0):
    model = tiny.tiny_model(sizes)
    attend_within_documents(model, CPU, max_row_length)
    return model


def documents(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, tiny.VOCAB_SIZE, (n,), generator=generator) for n in lengths]


def one_row(parts):
    return {
        "tokens": torch.cat(parts)[None],
        "input_pos": torch.cat([torch.arange(len(part)) for part in parts])[None],
        "document_lengths": [[len(part) for part in parts]],
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_row_gives_the_logits_and_gradients_of_its_documents_alone(name):
    parts = documents([5, 1, 17, 2])
    with tiny.float64_throughout():
        alone = make(MODELS[name]).double()
        expected = [alone(part[None]) for part in parts]
        torch.cat(expected, dim=1).square().sum().backward()
        model = make(MODELS[name]).double()
        logits = model(**one_row(parts))
        logits.square().sum().backward()
        mixed = model(tokens=one_row(parts)["tokens"], input_pos=one_row(parts)["input_pos"])
    assert torch.allclose(logits, torch.cat(expected, dim=1), rtol=1e-6)
    for (key, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        scale = other.grad.abs().max()
        # torchtune's unembed rounds logits to fp32
        assert (parameter.grad - other.grad).abs().max() < 1e-6 * scale, key
    assert not torch.allclose(mixed, logits, rtol=1e-2)


def test_rows_of_one_microbatch_keep_apart():
    rows = [documents([3, 9], seed=1), documents([7, 4, 1], seed=2)]
    together = {
        key: torch.cat([one_row(row)[key] for row in rows]) for key in ("tokens", "input_pos")
    }
    lengths = [one_row(row)["document_lengths"][0] for row in rows]
    model = make(tiny.MODEL)
    logits = model(**together, document_lengths=lengths)
    for row, of_row in zip(rows, logits, strict=True):
        assert torch.allclose(of_row, model(**one_row(row))[0], rtol=1e-4)


def test_a_row_may_be_longer_than_any_document_the_model_takes():
    parts = documents([60, 60, 60])
    with pytest.raises(ValueError, match="seq_len"):
        make(tiny.MODEL)(**one_row(parts))
    assert make(tiny.MODEL, max_row_length=180)(**one_row(parts)).shape[:2] == (1, 180)


def test_without_document_lengths_nothing_changes():
    (part,) = documents([20])
    assert torch.equal(make(tiny.MODEL)(part[None]), tiny.tiny_model()(part[None]))


@pytest.mark.slow
def test_compiled_layers_are_not_compiled_again_for_other_documents():
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model = make(tiny.MODEL)
    for layer in model.layers:
        layer.compile(backend=backend)
    model(**one_row(documents([5, 1, 17, 2])))
    num_compilations = len(compilations)
    assert num_compilations > 0
    for lengths in ([20, 5], [9, 9, 7], [25]):
        logits = model(**one_row(documents(lengths)))
        eager = make(tiny.MODEL)(**one_row(documents(lengths)))
        assert torch.allclose(logits, eager, rtol=1e-4)
    assert len(compilations) == num_compilations
    torch._dynamo.reset()


def test_models_that_cannot_keep_documents_apart_are_told_by_their_attention():
    assert other_attention(tiny.tiny_model()) is None
    assert other_attention(tiny.tiny_fusion_model()) is None
    assert other_attention(tiny.tiny_model(tiny.GEMMA2_MODEL)) == "Gemma2Attention"
    assert other_attention(nn.Linear(1, 1)) == "Linear"
    assert isinstance(tiny.tiny_model(), TransformerDecoder)


PAIRS = [(5, 3, 7), 4, (1, 6, 2), (9, 1, 1), 1]
"""Plain documents and prefix-shared pairs."""


def ends_alone(row):
    """Each end behind what it shares, or a document, as a sample of its own; in the row its slots."""
    start = 0
    for document in row:
        shared, *ends = document if isinstance(document, tuple) else (0, document)
        at = start + shared
        for length in ends:
            yield [*range(start, start + shared), *range(at, at + length)]
            at += length
        start = at


def row_of(lengths):
    num_tokens = sum(sum(d) if isinstance(d, tuple) else d for d in lengths)
    (tokens,) = documents([num_tokens], seed=3)
    positions = torch.zeros(num_tokens, dtype=torch.long)
    for slots in ends_alone(lengths):
        positions[slots] = torch.arange(len(slots))
    return {"tokens": tokens[None], "input_pos": positions[None], "document_lengths": [lengths]}


def test_an_end_sees_what_both_share_and_nothing_of_the_other():
    row = row_of(PAIRS)
    with tiny.float64_throughout():
        alone, model = make(tiny.UNTIED_MODEL).double(), make(tiny.UNTIED_MODEL).double()
        logits = model(**row)[0]
        for slots in ends_alone(PAIRS):
            expected = alone(row["tokens"][:, slots])[0]
            assert torch.allclose(logits[slots], expected, rtol=1e-12, atol=1e-12)
        flat = [sum(d) if isinstance(d, tuple) else d for d in PAIRS]
        seen_by_each_other = model(**{**row, "document_lengths": [flat]})[0]
    assert not torch.allclose(seen_by_each_other, logits, rtol=1e-2)


def test_flex_attention_s_mask_is_the_same_as_attention_piece_by_piece():
    lengths = [PAIRS, [(3, 20, 17)]]
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, 40, 8)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    ours = [t.clone().requires_grad_() for t in tensors]
    by_pieces = _attend(*ours, DocumentMask(lengths), 0.0)
    mask = block_mask(Documents(lengths))
    by_mask = flex_attention(*tensors, block_mask=mask)  # which has no backward on a CPU
    torch.testing.assert_close(by_pieces, by_mask, rtol=1e-12, atol=1e-12)
    weights = torch.randn(shape, generator=generator, dtype=torch.float64)
    (by_pieces * weights).sum().backward()
    dense = create_mask(sees(Documents(lengths)), 2, 1, 40, 40, CPU)
    plain = [t.clone().requires_grad_() for t in tensors]
    attended = nn.functional.scaled_dot_product_attention(*plain, attn_mask=dense)
    torch.testing.assert_close(by_pieces, attended, rtol=1e-12, atol=1e-12)
    (attended * weights).sum().backward()
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)
