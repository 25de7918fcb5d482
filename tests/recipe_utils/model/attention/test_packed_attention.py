"""Each way to attend within documents gives the same, is chosen for a reason, and is refused by name."""

import itertools
import sysconfig
from types import SimpleNamespace

import pytest
import tiny
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention import varlen as varlen_module
from torch.nn.attention.flex_attention import BlockMask
from torchtune import config
from torchtune.modules import RMSNorm

from recipe_utils.data.text.documents import Documents
from recipe_utils.data.text.limits import row_multiple_of_packed
from recipe_utils.model.attention.block_mask import block_mask
from recipe_utils.model.attention.document_mask import (
    DocumentMask,
    VarlenMask,
    _make_mask,
    attend_within_documents,
    compile_flex_attention,
)
from recipe_utils.model.attention.packed_attention import (
    PackedAttention,
    ask_for,
    choose,
    missing_for_triton,
    raise_recompile_limit,
    self_attentions,
)
from recipe_utils.model.build.build import ModelSettings, build_on_meta
from recipe_utils.model.build.sizes import limits_of
from recipe_utils.model.frozen.teacher import Teacher
from recipe_utils.parallel.ranks import RankSettings
from recipe_utils.settings.problems import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = [5, 1, 17, 2]
PREFIX_SHARED = [(5, 3, 7), 4, (1, 6, 2), (9, 1, 1), 1]


def on_meta(sizes=tiny.MODEL, **settings):
    return build_on_meta(
        lambda: config.instantiate(OmegaConf.create(sizes)), ModelSettings(**settings)
    )


def asked(sizes=tiny.MODEL, way=None, device=CUDA):
    """A model that is told to compute on ``device`` in bf16; it computes on the CPU in float64."""
    model = tiny.tiny_model(sizes)
    first = next(model.parameters())
    weights, first.data = first.data, first.data.bfloat16()
    ask_for(model, way)
    attend_within_documents(model, device, 64)
    first.data = weights
    return model.double()


# ---- Which one, and why ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "dtype", "device", "way"),
    [
        (tiny.MODEL, "bf16", CPU, "by_document"),
        (tiny.MODEL, "bf16", CUDA, "varlen"),
        (tiny.MODEL, "fp32", CUDA, "flex"),
        (tiny.MODEL, "fp64", CUDA, "by_document"),
        ({**tiny.MODEL, "attn_dropout": 0.1}, "bf16", CUDA, "by_document"),
        ({**tiny.MODEL, "num_heads": 8, "num_kv_heads": 8, "embed_dim": 8 * 20}, "bf16", CUDA, "flex"),
        ({**tiny.MODEL, "num_heads": 2, "embed_dim": 2 * 264}, "bf16", CUDA, "flex"),
        ({**tiny.MODEL, "num_heads": 2, "embed_dim": 2 * 256}, "bf16", CUDA, "varlen"),
        (tiny.GEMMA2_MODEL, "bf16", CUDA, "dense"),
    ],
)  # fmt: skip
def test_what_is_chosen_by_itself_depends_on_device_precision_and_heads(sizes, dtype, device, way):
    chosen = choose(on_meta(sizes, dtype=dtype), device)
    assert chosen.way == way
    assert chosen.why


def test_the_same_bits_are_asked_for_in_all_of_pytorch():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        chosen = choose(on_meta(dtype="bf16"), CUDA)
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen.way == "flex"
    assert "cudnn_deterministic_mode" in chosen.why


@pytest.mark.parametrize("way", ["varlen", "flex", "by_document"])
def test_what_is_asked_for_is_taken(way):
    assert choose(on_meta(dtype="bf16", packed_attention=way), CUDA).way == way


def test_documents_with_shared_prefixes_take_flex_where_others_take_flash_attention():
    for way, expected in (("varlen", "flex"), ("flex", "flex"), ("by_document", "by_document")):
        chosen = choose(on_meta(dtype="bf16", packed_attention=way), CUDA)
        assert chosen.with_shared_prefixes().way == expected


@pytest.mark.parametrize(
    ("way", "compiles", "num_row_lengths", "with_shared_prefixes"),
    [
        ("varlen", False, None, 4),
        ("varlen", True, 4, 4),
        ("flex", False, 4, 4),
        ("by_document", False, None, None),
    ],
)
def test_rows_have_few_lengths_where_each_is_compiled_for(
    way, compiles, num_row_lengths, with_shared_prefixes
):
    model = on_meta(dtype="bf16", packed_attention=way)
    limits = limits_of(model, CUDA, compiles)
    assert limits.num_row_lengths == num_row_lengths
    assert limits.with_shared_prefixes().num_row_lengths == with_shared_prefixes
    assert limits.row_multiple == 128
    assert limits_of(on_meta(), CPU, False).row_multiple is None


def test_a_teacher_in_fp32_beside_a_student_in_bf16_has_rows_of_few_lengths(monkeypatch):
    monkeypatch.setattr(
        "recipe_utils.model.attention.packed_attention.missing_for_triton", lambda: None
    )
    sizes = {**tiny.TEACHER_MODEL, "embed_dim": 64}  # FlashAttention takes no heads of width 12
    teacher = SimpleNamespace(
        is_used=True,
        _whole=on_meta(sizes, dtype="fp32"),
        _ranks=SimpleNamespace(device=CUDA),
        _modules=ModelSettings(),
    )
    limits = limits_of(on_meta(dtype="bf16"), CUDA, False)
    assert limits.num_row_lengths is None
    assert Teacher.intersect(teacher, limits).num_row_lengths == 4
    teacher._whole = on_meta(sizes, dtype="bf16")
    assert Teacher.intersect(teacher, limits).num_row_lengths is None


# ---- What a machine or a model lacks --------------------------------------------------------------


def test_what_triton_needs_is_named(monkeypatch, tmp_path):
    found = {"triton": object()}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    monkeypatch.delenv("CC", raising=False)
    include = tmp_path / "include"
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(include)})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_for_triton() == "a C compiler (gcc or clang on PATH)"
    (tmp_path / "gcc").touch(mode=0o755)
    assert missing_for_triton() == f"Python's headers ({include}/Python.h)"
    include.mkdir()
    (include / "Python.h").touch()
    assert missing_for_triton() is None
    monkeypatch.setenv("CC", "mycc")
    assert missing_for_triton() == "a C compiler (mycc on PATH)"
    found.clear()
    assert missing_for_triton() == "the package triton"


def test_packing_is_refused_before_weights_load_where_triton_lacks_something(monkeypatch):
    monkeypatch.setenv("PATH", "")
    flex = limits_of(on_meta(), CUDA, False).packing_problem
    assert flex.startswith(
        "packed_attention=null: it is flex here (FlashAttention does not compute"
    )
    assert "set packed_attention=by_document" in flex
    varlen = limits_of(on_meta(dtype="bf16"), CUDA, False)
    assert varlen.packing_problem is None
    prefix_shared = varlen.with_shared_prefixes().packing_problem
    assert prefix_shared.startswith("packed_attention=null: pairs with prefix_sharing take flex")
    documents = limits_of(on_meta(packed_attention="by_document"), CUDA, False)
    assert documents.packing_problem is documents.with_shared_prefixes().packing_problem is None


def test_heads_that_flash_attention_does_not_take_are_refused_by_key():
    sizes = {**tiny.MODEL, "num_heads": 2, "embed_dim": 2 * 264}
    problem = choose(on_meta(sizes, dtype="bf16", packed_attention="varlen"), CUDA).problem
    assert problem == (
        "packed_attention=varlen: FlashAttention does not take heads of width 264; set "
        "packed_attention=flex, or leave it out"
    )


def test_rows_that_cannot_be_computed_are_refused_in_the_forward_too():
    model = asked({**tiny.MODEL, "attn_dropout": 0.1}, "flex")
    with pytest.raises(ConfigError, match=r"packed_attention=flex: it has no attn_dropout=0\.1"):
        model(**row_of(PLAIN))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"packed_attention": "varlen", "dtype": "bf16"}, "packed_attention=varlen: it needs device=cuda"),
        ({"packed_attention": "flex"}, "packed_attention=flex: it needs device=cuda"),
        ({"packed_attention": "varlen"}, "FlashAttention does not compute in dtype=fp32"),
        ({"packed_attention": "by_document"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_ways_that_a_cpu_has_not_are_refused_by_key(settings, words):
    problems = "\n".join(
        map(str, ModelSettings(**settings).problems_with(RankSettings(device="cpu")))
    )
    assert (words in problems) if words else (problems == "")


def test_compiled_layers_are_refused_where_triton_lacks_something(monkeypatch):
    monkeypatch.setenv("PATH", "")
    (problem,) = ModelSettings(compile=True)._problems_of_kernels(CUDA)
    assert str(problem).startswith("compile=True: Triton needs ")
    assert problem.text.endswith("set compile=False")


def test_packed_rows_are_refused_by_their_kinds(monkeypatch):
    monkeypatch.setenv("PATH", "")
    limits = limits_of(on_meta(dtype="bf16"), CUDA, False)
    assert row_multiple_of_packed(limits, 1000) == 128
    with pytest.raises(ConfigError, match="prefix_sharing"):
        row_multiple_of_packed(limits.with_shared_prefixes(), 1000)


# ---- What they give -------------------------------------------------------------------------------


def row_of(lengths, requires_tensors=True):
    num_tokens = sum(sum(d) if isinstance(d, tuple) else d for d in lengths)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, tiny.VOCAB_SIZE, (1, num_tokens), generator=generator)
    positions = []
    for document in lengths:
        shared, *ends = document if isinstance(document, tuple) else (document,)
        positions += range(shared)
        for end in ends:
            positions += range(shared, shared + end)
    documents = Documents([lengths]) if requires_tensors else [lengths]
    return {
        "tokens": tokens,
        "input_pos": torch.tensor([positions]),
        "document_lengths": documents,
    }


def flash_attention(q, k, v, sizes, grad=None):
    """What FlashAttention computes of documents of ``sizes``; given ``grad`` its gradients, by the formula.

    Takes q [t, h, d], k and v [t, h or fewer, d]. No autograd: it ends above a custom operator's kernels.
    """
    num_copies = q.size(1) // k.size(1)
    scale = q.size(-1) ** -0.5
    made = []
    inputs = (q, k, v) if grad is None else (q, k, v, grad)
    for row in zip(*(each.transpose(0, 1).split(sizes, dim=1) for each in inputs), strict=True):
        q, k, v = row[0], *(each.repeat_interleave(num_copies, dim=0) for each in row[1:3])
        sees = torch.ones(q.size(1), q.size(1), dtype=torch.bool).tril()
        p = (q @ k.mT * scale).masked_fill(~sees, -torch.inf).softmax(-1)
        if grad is None:
            made.append([p @ v])
            continue
        of_p = row[3] @ v.mT
        of_scores = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale
        of_k, of_v = (
            each.unflatten(0, (-1, num_copies)).sum(1) for each in (of_scores.mT @ q, p.mT @ row[3])
        )
        made.append([of_scores @ k, of_k, of_v])
    return tuple(
        torch.cat(parts, dim=1).transpose(0, 1).contiguous() for parts in zip(*made, strict=True)
    )


@pytest.fixture(scope="module")
def flash_attention_on_a_cpu():
    """PyTorch's varlen_attn with kernels for a CPU; what its operators are called with is checked."""

    def check(cu_q, cu_k, max_q, max_k, is_causal):
        sizes = cu_q.diff()
        assert cu_q.dtype == torch.int32
        assert torch.equal(cu_q, cu_k)
        assert sizes.min() > 0
        assert max_q == max_k
        assert max_q >= sizes.max()
        assert is_causal
        return sizes.tolist()

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, *_, **__):
        sizes = check(cu_q, cu_k, max_q, max_k, is_causal)
        (attended,) = flash_attention(q, k, v, sizes)
        return attended, torch.zeros(q.size(1), q.size(0)), torch.zeros(2, dtype=torch.uint64)

    def backward(grad, q, k, v, _, __, cu_q, cu_k, max_q, max_k, is_causal, *___, **____):
        return flash_attention(q, k, v, check(cu_q, cu_k, max_q, max_k, is_causal), grad)

    varlen_module._varlen_attn.register_kernel("cpu", forward)
    varlen_module._varlen_attn_backward.register_kernel("cpu", backward)


def assert_same_logits_and_gradients(model, alone, row):
    row_alone = {**row, "document_lengths": row["document_lengths"].lengths}
    with tiny.float64_throughout():
        logits, expected = model(**row), alone(**row_alone)
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
        logits.square().sum().backward()
        expected.square().sum().backward()
    for (key, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        scale = other.grad.abs().max()
        # torchtune's unembed rounds logits to fp32
        assert (parameter.grad - other.grad).abs().max() < 1e-6 * scale, key


@pytest.mark.parametrize("sizes", [tiny.MODEL, tiny.UNTIED_MODEL], ids=["llama", "untied"])
def test_flash_attention_gets_what_gives_each_document_s_logits_and_gradients(
    sizes, flash_attention_on_a_cpu
):
    assert_same_logits_and_gradients(asked(sizes), asked(sizes, device=CPU), row_of(PLAIN))


def test_queries_and_keys_are_normalised_as_torchtune_does(flash_attention_on_a_cpu):
    models = asked(), asked(device=CPU)
    for model in models:
        for attention in self_attentions(model):
            attention.q_norm, attention.k_norm = (RMSNorm(8).double() for _ in range(2))
            nn.init.constant_(attention.q_norm.scale, 1.3)
    assert_same_logits_and_gradients(*models, row_of(PLAIN))


def test_where_keys_cannot_be_shared_they_are_copied(monkeypatch, flash_attention_on_a_cpu):
    """As with torch 2.11, whose varlen_attn has no enable_gqa."""
    varlen_attn = varlen_module.varlen_attn

    def of_torch_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size):
        assert query.shape == key.shape
        return varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size
        )

    monkeypatch.setattr(varlen_module, "varlen_attn", of_torch_2_11)
    assert_same_logits_and_gradients(asked(), asked(device=CPU), row_of(PLAIN))


def test_without_documents_torchtune_s_own_forward_runs():
    row = row_of([20])
    with tiny.float64_throughout():
        logits = asked()(row["tokens"])
        assert torch.equal(logits, asked(device=CPU)(row["tokens"]))


@pytest.mark.parametrize(("way", "lengths"), [("flex", PLAIN), ("flex", PREFIX_SHARED), ("varlen", PREFIX_SHARED)])  # fmt: skip
def test_flex_attention_gives_each_document_s_logits_and_gradients(way, lengths, monkeypatch):
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)  # no backward on a CPU
    monkeypatch.setattr(
        "recipe_utils.model.attention.packed_attention.missing_for_triton", lambda: None
    )
    with torch.compiler.set_stance("force_eager"):
        assert_same_logits_and_gradients(asked(way=way), asked(device=CPU), row_of(lengths))


def test_documents_one_by_one_are_there_on_every_device():
    row = row_of(PREFIX_SHARED)
    assert_same_logits_and_gradients(asked(way="by_document"), asked(device=CPU), row)


def test_masks_are_made_of_tensors_that_came_along_and_of_plain_numbers_too():
    varlen, flex, by_document = (
        PackedAttention(way, "") for way in ("varlen", "flex", "by_document")
    )
    documents = Documents([PLAIN])
    mask = _make_mask(documents, varlen, CPU)
    assert isinstance(mask, VarlenMask)
    assert mask.boundaries is documents.boundaries
    plain = _make_mask([PLAIN], varlen, CPU)
    assert torch.equal(plain.boundaries, mask.boundaries)
    assert isinstance(_make_mask([PLAIN], flex, CPU), BlockMask)
    for prefix_shared in (Documents([PREFIX_SHARED]), [PREFIX_SHARED]):
        assert isinstance(_make_mask(prefix_shared, varlen, CPU), BlockMask)
        assert isinstance(_make_mask(prefix_shared, by_document, CPU), DocumentMask)


# ---- What is compiled, and how often --------------------------------------------------------------


def counting_backend():
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    return backend, compilations


@pytest.mark.slow
def test_compiled_layers_are_not_compiled_again_for_other_documents_of_flash_attention(
    flash_attention_on_a_cpu,
):
    torch._dynamo.reset()
    backend, compilations = counting_backend()
    model = asked()
    for layer in model.layers:
        layer.compile(backend=backend)
    with tiny.float64_throughout():
        model(**row_of(PLAIN))
        num_compilations = len(compilations)
        assert num_compilations > 0
        for lengths in ([20, 5], [9, 9, 7], [25]):
            logits = model(**row_of(lengths))
            torch.testing.assert_close(logits, asked()(**row_of(lengths)), rtol=1e-6, atol=1e-6)
    assert len(compilations) == num_compilations
    torch._dynamo.reset()


@pytest.mark.slow
def test_flex_attention_is_compiled_once_for_each_length_of_rows_in_training_and_validation(
    monkeypatch,
):
    """Six lengths, twice each: 12 variants, beyond PyTorch's limit of 8; fresh documents add none."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    backend, compilations = counting_backend()
    attend = compile_flex_attention(backend)
    raise_recompile_limit()

    def attend_to(row, trains):
        size = sum(row)
        q, k, v = (torch.randn(1, 2, size, 16, requires_grad=trains) for _ in range(3))
        mask = block_mask(Documents([row]))
        with torch.set_grad_enabled(trains):
            return attend(q, k, v, block_mask=mask)

    variants = list(itertools.product(range(1, 7), (True, False)))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for num_blocks, trains in variants:
            attend_to([100, 128 * num_blocks - 100], trains)
        assert len(compilations) == len(variants) == 12
        for num_blocks, trains in variants:
            attend_to([30, 90, 128 * num_blocks - 120], trains)
            attend_to([128 * num_blocks], trains)
    assert len(compilations) == 12
    torch._dynamo.reset()
    compile_flex_attention.cache_clear()


def test_no_kind_of_attention_but_torchtune_s_own_is_changed():
    model = tiny.tiny_model(tiny.GEMMA2_MODEL)
    calls = [attention.forward for attention in self_attentions(model)]
    attend_within_documents(model, CUDA, 64)
    assert [attention.forward for attention in self_attentions(model)] == calls
    assert isinstance(model, nn.Module)
