"""Documents of a row attend as if each were alone, with any attention kernel."""

import itertools

import pytest
import tiny
import torch
from forests import FOREST, sequences_of
from torch import nn
from torch.nn.attention import varlen as varlen_module
from torch.nn.attention.flex_attention import flex_attention
from torchtune.modules import RMSNorm

from recipe_utils.compiler import configure_compiler
from recipe_utils.models.attention import attend as dispatch
from recipe_utils.models.attention.attend import compile_flex_attention
from recipe_utils.models.attention.block_mask import block_mask
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.attention.packed_attention import attention_of, self_attentions
from recipe_utils.models.distribute import apply_compile
from recipe_utils.models.settings import ModelSettings
from recipe_utils.settings.problems import ConfigError
from recipe_utils.text.documents import Documents, length_of, tree

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = [5, 1, 17, 2]
PAIRS = [tree(5, 3, 7), 4, tree(1, 6, 2), tree(9, 1, 1), 1]
MODELS = {"tied": tiny.MODEL, "untied": tiny.UNTIED_MODEL, "gemma2": tiny.GEMMA2_MODEL}


def make(sizes=tiny.MODEL, kernel=None, device=CPU, max_row_length=80):
    """Returns a model in float64 on the CPU with the attention of a bf16 model on ``device``."""
    model = tiny.tiny_model(sizes)
    first = next(model.parameters())
    weights, first.data = first.data, first.data.bfloat16()
    attend_within_documents(model, attention_of(model, device, kernel), max_row_length)
    first.data = weights
    return model.double()


def row_of(lengths, seed=3):
    size = sum(map(length_of, lengths))
    generator = torch.Generator().manual_seed(seed)
    positions = torch.zeros(1, size, dtype=torch.long)
    for sequence in sequences_of(lengths):
        positions[0, sequence] = torch.arange(len(sequence))
    return {
        "tokens": torch.randint(1, tiny.VOCAB_SIZE, (1, size), generator=generator),
        "input_pos": positions,
        "document_lengths": Documents([lengths]),
    }


def assert_close_with_gradients(model, logits, other, expected):
    for each in (logits, expected):
        torch.cat(each).square().sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("lengths", "mixed"),
    [
        (PLAIN, [25]),
        (PAIRS, [15, 4, 9, 11, 1]),
        (FOREST, [39, 6, 16, 1, 11]),
        # Siblings that see each other, and a segment below its aunt.
        (FOREST, [tree(7, tree(3, tree(1, 21, 2)), 5), *FOREST[1:]]),
        (FOREST, [*FOREST[:4], tree(1, tree(1, 2), 5, 1, 1)]),
    ],
    ids=["plain", "pairs", "forest", "siblings", "ancestors"],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_row_gives_the_logits_and_gradients_of_its_documents_alone(name, lengths, mixed):
    model, alone, row = make(MODELS[name]), make(MODELS[name]), row_of(lengths)
    with tiny.float64_throughout():
        sequences = list(sequences_of(lengths))
        expected = [alone(row["tokens"][:, sequence])[0] for sequence in sequences]
        logits = model(**row)[0]
        of_mixed = model(**{**row, "document_lengths": Documents([mixed])})[0]
        assert_close_with_gradients(model, [logits[sequence] for sequence in sequences], alone, expected)
    assert not torch.allclose(of_mixed, logits, rtol=1e-2)


def test_rows_of_one_microbatch_keep_apart():
    rows = [row_of([3, 9], seed=1), row_of([7, 4, 1], seed=2)]
    together = {key: torch.cat([row[key] for row in rows]) for key in ("tokens", "input_pos")}
    model = make()
    logits = model(**together, document_lengths=Documents([[3, 9], [7, 4, 1]]))
    for row, of_row in zip(rows, logits, strict=True):
        torch.testing.assert_close(of_row, model(**row)[0])


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["by_document", "varlen"])
def test_without_documents_torchtune_s_own_forward_runs(device):
    tokens = row_of([20])["tokens"]
    assert torch.equal(make(device=device)(tokens), tiny.tiny_model().double()(tokens))


def test_rows_that_cannot_be_computed_are_refused_in_the_forward():
    model = make({**tiny.MODEL, "attn_dropout": 0.1}, "flex", CUDA)
    with pytest.raises(ConfigError, match=r"packed_attention=flex: .* attn_dropout=0\.1"):
        model(**row_of(PLAIN))


# ---- Kernels for CUDA ---------------------------------------------------------------------------


def assert_same_as_on_a_cpu(model, on_cpu, lengths):
    row = row_of(lengths)
    with tiny.float64_throughout():
        assert_close_with_gradients(model, list(model(**row)), on_cpu, list(on_cpu(**row)))


@pytest.mark.parametrize("lengths", [PLAIN, PAIRS, FOREST], ids=["plain", "pairs", "forest"])
@pytest.mark.parametrize("kernel", ["varlen", "flex", "by_document"])
def test_each_kernel_gives_the_same_logits_and_gradients(
    kernel, lengths, flash_attention_on_a_cpu, flex_attention_on_a_cpu
):
    with torch.compiler.set_stance("force_eager"):
        assert_same_as_on_a_cpu(make(kernel=kernel, device=CUDA), make(), lengths)


def test_queries_and_keys_are_normalized_as_torchtune_does(flash_attention_on_a_cpu):
    models = make(device=CUDA), make()
    for model in models:
        for attention in self_attentions(model):
            attention.q_norm, attention.k_norm = (RMSNorm(8).double() for _ in range(2))
            nn.init.constant_(attention.q_norm.scale, 1.3)
    assert_same_as_on_a_cpu(*models, PLAIN)


def test_where_keys_cannot_be_shared_they_are_copied(monkeypatch, flash_attention_on_a_cpu):
    """torch 2.11's varlen_attn has no enable_gqa."""
    varlen_attn = varlen_module.varlen_attn

    def of_torch_2_11(query, key, value, *bounds, window_size):
        assert query.shape == key.shape
        return varlen_attn(query, key, value, *bounds, window_size=window_size)

    monkeypatch.setattr(varlen_module, "varlen_attn", of_torch_2_11)
    assert_same_as_on_a_cpu(make(device=CUDA), make(), PLAIN)


# ---- Compilation --------------------------------------------------------------------------------


@pytest.fixture
def backend():
    """Yields a compiler's backend that keeps the graphs in ``backend.graphs`` and runs them as they are."""

    def keep(graph, _):
        keep.graphs.append(graph)
        return graph.forward

    keep.graphs = []
    torch._dynamo.reset()
    yield keep
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["by_document", "varlen", "flex"])
def test_compiled_layers_are_not_compiled_again_for_other_documents_and_lengths(
    kernel, backend, monkeypatch, flash_attention_on_a_cpu, flex_attention_on_a_cpu
):
    """The first row is as long as the model is wide."""
    monkeypatch.setattr(dispatch, "compile_flex_attention", lambda: torch.compiler.disable(flex_attention))
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: compile_(call, **{**options, "backend": backend}))
    long = {**tiny.MODEL, "max_seq_len": 128}
    model = make(long, kernel=kernel, device=CUDA, max_row_length=128)
    apply_compile(model, ModelSettings(compile=True))
    with tiny.float64_throughout():
        model(**row_of([20, 12]))
        num_compilations = len(backend.graphs)
        assert num_compilations > 0
        for lengths in ([9, 9, 14], [25], [128], [3, 60, 65], [2]):
            row = row_of(lengths)
            torch.testing.assert_close(model(**row), make(long, max_row_length=128)(**row))
    assert len(backend.graphs) == num_compilations


@pytest.mark.slow
def test_flex_attention_is_compiled_once_for_each_length_of_rows_in_training_and_validation(
    backend, flex_attention_on_a_cpu
):
    """Six lengths, twice each: 12 variants, beyond PyTorch's limit of 8; fresh documents add none."""
    attend = compile_flex_attention(backend)
    configure_compiler()

    def attend_to(row, trains):
        q, k, v = (torch.randn(1, 2, sum(row), 16, requires_grad=trains) for _ in range(3))
        with torch.set_grad_enabled(trains):
            return attend(q, k, v, block_mask=block_mask(Documents([row])))

    variants = list(itertools.product(range(1, 7), (True, False)))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for num_blocks, trains in variants:
            attend_to([100, 128 * num_blocks - 100], trains)
        assert len(backend.graphs) == len(variants) == 12
        for num_blocks, trains in variants:
            attend_to([30, 90, 128 * num_blocks - 120], trains)
            attend_to([128 * num_blocks], trains)
    assert len(backend.graphs) == 12
    compile_flex_attention.cache_clear()
