"""The attention of packed rows is selected for a reason, and refused by name."""

import sysconfig
from types import SimpleNamespace

import pytest
import tiny
import torch
from tiny import on_meta
from torch import nn

from recipe_utils.data.text.limits import row_multiple_of_packed
from recipe_utils.model.attention.packed_attention import (
    missing_for_triton,
    other_attention,
    select_kernel,
)
from recipe_utils.model.build.build import ModelSettings
from recipe_utils.model.build.sizes import limits_of
from recipe_utils.model.frozen.teacher import Teacher
from recipe_utils.settings.problems import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def with_heads(num_heads, width):
    heads = {"num_heads": num_heads, "num_kv_heads": num_heads}
    return {**tiny.MODEL, **heads, "embed_dim": num_heads * width}


@pytest.mark.parametrize(
    ("sizes", "dtype", "device", "kernel"),
    [
        (tiny.MODEL, "bf16", CPU, "by_document"),
        (tiny.MODEL, "bf16", CUDA, "varlen"),
        (tiny.MODEL, "fp32", CUDA, "flex"),
        (tiny.MODEL, "fp64", CUDA, "by_document"),
        ({**tiny.MODEL, "attn_dropout": 0.1}, "bf16", CUDA, "by_document"),
        (with_heads(8, 20), "bf16", CUDA, "flex"),
        (with_heads(2, 264), "bf16", CUDA, "flex"),
        (with_heads(2, 256), "bf16", CUDA, "varlen"),
        (tiny.GEMMA2_MODEL, "bf16", CUDA, "dense"),
    ],
)
def test_the_default_depends_on_device_precision_and_heads(sizes, dtype, device, kernel):
    selected = select_kernel(on_meta(sizes, dtype=dtype), device)
    assert selected.kernel == kernel
    assert selected.why


def test_deterministic_algorithms_select_flex():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        selected = select_kernel(on_meta(dtype="bf16"), CUDA)
    finally:
        torch.use_deterministic_algorithms(False)
    assert selected.kernel == "flex"
    assert "cudnn_deterministic_mode" in selected.why


@pytest.mark.parametrize(
    ("kernel", "with_shared_prefixes"),
    [("varlen", "flex"), ("flex", "flex"), ("by_document", "by_document")],
)
def test_a_configured_kernel_is_used_and_flex_for_pairs_of_varlen(kernel, with_shared_prefixes):
    selected = select_kernel(on_meta(dtype="bf16", packed_attention=kernel), CUDA)
    assert selected.kernel == kernel
    assert selected.with_shared_prefixes().kernel == with_shared_prefixes


def test_other_attention_than_torchtune_s_is_named():
    assert other_attention(tiny.tiny_model()) is None
    assert other_attention(tiny.tiny_fusion_model()) is None
    assert other_attention(tiny.tiny_model(tiny.GEMMA2_MODEL)) == "Gemma2Attention"
    assert other_attention(nn.Linear(1, 1)) == "Linear"


@pytest.mark.parametrize(
    ("kernel", "compiles", "num_row_lengths", "with_shared_prefixes"),
    [
        ("varlen", False, None, 4),
        ("varlen", True, 4, 4),
        ("flex", False, 4, 4),
        ("by_document", False, None, None),
    ],
)
def test_rows_have_few_lengths_where_each_is_compiled_for(
    kernel, compiles, num_row_lengths, with_shared_prefixes
):
    model = on_meta(dtype="bf16", packed_attention=kernel)
    limits = limits_of(model, CUDA, compiles)
    assert limits.num_row_lengths == num_row_lengths
    assert limits.with_shared_prefixes().num_row_lengths == with_shared_prefixes
    assert limits.row_multiple == 128
    assert limits_of(on_meta(), CPU, False).row_multiple is None


def test_a_teacher_in_fp32_beside_a_student_in_bf16_has_rows_of_few_lengths(monkeypatch):
    monkeypatch.setattr(
        "recipe_utils.model.attention.packed_attention.missing_for_triton", lambda: None
    )
    sizes = {**tiny.TEACHER_MODEL, "embed_dim": 64}  # FlashAttention has no heads of width 12
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
    assert flex.startswith("packed_attention=null: FlashAttention does not compute in float32, and")
    assert flex.endswith("set packed_attention=by_document")
    varlen = limits_of(on_meta(dtype="bf16"), CUDA, False)
    assert varlen.packing_problem is None
    assert row_multiple_of_packed(varlen, 1000) == 128
    with pytest.raises(ConfigError, match="prefix_sharing"):
        row_multiple_of_packed(varlen.with_shared_prefixes(), 1000)
    prefix_shared = varlen.with_shared_prefixes().packing_problem
    assert prefix_shared.startswith("packed_attention=null: pairs with prefix_sharing use flex")
    documents = limits_of(on_meta(packed_attention="by_document"), CUDA, False)
    assert documents.packing_problem is documents.with_shared_prefixes().packing_problem is None


def test_heads_that_flash_attention_does_not_take_are_refused_by_key():
    model = on_meta(with_heads(2, 264), dtype="bf16", packed_attention="varlen")
    problem = select_kernel(model, CUDA).problem
    assert problem == (
        "packed_attention=varlen: FlashAttention does not support heads of width 264; set "
        "packed_attention=flex, or remove the key"
    )


def test_compiled_layers_are_refused_where_triton_lacks_something(monkeypatch):
    monkeypatch.setenv("PATH", "")
    (problem,) = ModelSettings(compile=True)._problems_of_kernels(CUDA)
    assert str(problem).startswith("compile=True: Triton needs ")
    assert problem.text.endswith("set compile=False")
