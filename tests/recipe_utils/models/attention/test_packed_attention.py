"""The attention of packed rows is selected with a reason, and refused by name."""

import sysconfig

import pytest
import tiny
import torch
from tiny import on_meta
from torch import nn

from recipe_utils.models import settings
from recipe_utils.models.attention.kernels import AttentionNeeds, choose_kernel, missing_for_triton
from recipe_utils.models.attention.packed_attention import attention_of, other_attention
from recipe_utils.models.settings import ModelSettings, model_on_ranks
from recipe_utils.models.sizes import limits_of
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.settings.problems import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def with_heads(num_heads, width):
    return {**tiny.MODEL, "num_heads": num_heads, "num_kv_heads": num_heads, "embed_dim": num_heads * width}


@pytest.mark.parametrize(
    ("sizes", "dtype", "device", "kernel"),
    [
        (tiny.MODEL, "bf16", CPU, "by_document"),
        (tiny.MODEL, "bf16", CUDA, "varlen"),
        (tiny.MODEL, "fp32", CUDA, "flex"),
        ({**tiny.MODEL, "attn_dropout": 0.1}, "bf16", CUDA, "by_document"),
        (with_heads(8, 20), "bf16", CUDA, "flex"),
        (tiny.GEMMA2_MODEL, "bf16", CUDA, "dense"),
    ],
)
def test_the_default_depends_on_device_precision_and_heads(sizes, dtype, device, kernel):
    selected = attention_of(on_meta(sizes, dtype=dtype), device)
    assert selected.kernel == kernel
    assert selected.why


NEEDS = AttentionNeeds(
    torch.bfloat16, frozenset({(64, 64)}), others=frozenset(), can_split=True, has_flex=True, has_flash=True
)


@pytest.mark.parametrize(
    ("changes", "kernel", "of_trees"),
    [
        ({}, "varlen", "flex"),
        ({"has_flex": False}, "varlen", "by_document"),
        ({"head_dims": frozenset({(256, 256)})}, "varlen", "flex"),
        ({"head_dims": frozenset({(264, 264)})}, "flex", None),
        ({"head_dims": frozenset({(24, 16)})}, "flex", None),
        ({"has_flash": False}, "flex", None),
        ({"has_flash": False, "has_flex": False}, "by_document", None),
        ({"others": frozenset({"softcap"})}, "flex", None),
        ({"others": frozenset({"other masks"}), "has_flex": False}, "by_document", None),
        ({"dtype": torch.float32}, "flex", None),
        ({"dtype": torch.float64}, "by_document", None),
        ({"can_split": False}, "dense", None),
    ],
)
def test_no_type_gets_a_kernel_that_its_class_or_device_lacks(changes, kernel, of_trees, with_triton):
    needs = NEEDS._replace(**changes)
    on_cpu, on_cuda = (choose_kernel(needs, device) for device in (CPU, CUDA))
    assert (on_cpu.kernel, on_cpu.kernel_of_trees) == ("by_document" if needs.can_split else "dense", None)
    assert (on_cuda.kernel, on_cuda.kernel_of_trees) == (kernel, of_trees)
    assert not on_cuda.refused


def test_deterministic_algorithms_select_flex():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        selected = attention_of(on_meta(dtype="bf16"), CUDA)
    finally:
        torch.use_deterministic_algorithms(False)
    assert selected.kernel == "flex"
    assert "cudnn_deterministic_mode" in selected.why


@pytest.mark.parametrize(("kernel", "of_trees"), [("varlen", "flex"), ("flex", None), ("by_document", None)])
def test_a_configured_kernel_is_used_and_flex_for_trees_of_varlen(kernel, of_trees, with_triton):
    selected = attention_of(on_meta(dtype="bf16"), CUDA, kernel)
    assert (selected.kernel, selected.kernel_of_trees) == (kernel, of_trees)


def test_other_attention_than_torchtune_s_is_named():
    assert other_attention(tiny.tiny_model()) is None
    assert other_attention(tiny.tiny_fusion_model()) is None
    assert other_attention(tiny.tiny_model(tiny.GEMMA2_MODEL)) == "Gemma2Attention"
    assert other_attention(nn.Linear(1, 1)) == "Linear"


@pytest.mark.parametrize(
    ("kernel", "num_row_lengths", "of_trees"), [("varlen", None, 4), ("flex", 4, 4), ("by_document", None, None)]
)
def test_rows_have_few_lengths_where_each_is_compiled_for(kernel, num_row_lengths, of_trees, with_triton):
    model = on_meta(dtype="bf16")
    attention = attention_of(model, CUDA, kernel)
    assert attention.num_row_lengths() == num_row_lengths
    assert attention.num_row_lengths(has_trees=True) == of_trees
    assert limits_of(model, CUDA, packed_attention=kernel).row_multiple == 128
    assert limits_of(on_meta(), CPU).row_multiple is None
    if num_row_lengths is not None:
        with pytest.raises(ConfigError, match=r"without max_tokens_per_microbatch or .* which flex attention needs"):
            limits_of(model, CUDA, packed_attention=kernel).multiple_of_packed_rows(None)


def test_a_teacher_in_fp32_beside_a_student_in_bf16_has_rows_of_few_lengths(with_triton):
    sizes = {**tiny.TEACHER_MODEL, "embed_dim": 64}  # FlashAttention has no heads of width 12
    student = on_meta(dtype="bf16")
    for teacher, multiple in ((None, 128), ("bf16", 128), ("fp32", 2048)):
        teacher = teacher and on_meta(sizes, dtype=teacher)
        assert limits_of(student, CUDA, teacher=teacher).multiple_of_packed_rows(8192) == multiple


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
    flex = attention_of(on_meta(), CUDA).refused["packed"]
    assert flex.startswith("packed_attention=null: FlashAttention does not compute in float32, and")
    assert flex.endswith("set packed_attention=by_document")
    varlen = limits_of(on_meta(dtype="bf16"), CUDA)
    assert varlen.multiple_of_packed_rows(1000) == 128
    assert varlen.multiple_of_packed_rows(1000, ("prefix_sharing=True", "")) == 128
    assert varlen.attentions[0].kernel_of_trees == "by_document"
    assert not attention_of(on_meta(), CUDA, "by_document").refused


@pytest.mark.parametrize(("dtype", "reason"), [("bf16", "support heads of width 264"), ("fp32", "compute in float32")])
def test_models_that_flash_attention_does_not_take_are_refused_by_key(dtype, reason):
    model = on_meta(with_heads(2, 264), dtype=dtype)
    assert attention_of(model, CUDA, "varlen").refused["packed"] == (
        f"packed_attention=varlen: FlashAttention does not {reason}; set packed_attention=flex, or remove the key"
    )


def test_compiled_layers_are_refused_where_triton_lacks_something(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(settings, "resolve_device", torch.device)
    (problem,) = model_on_ranks(ModelSettings(compile=True), RankSettings(device="cuda"))
    assert str(problem).startswith("compile=True: Triton needs ")
    assert problem.text.endswith("set compile=False")
