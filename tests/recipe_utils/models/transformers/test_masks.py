"""Decoders of transformers compute packed rows with the kernels of torchtune's, selected by one function."""

import copy
from functools import partial

import pytest
import torch
from decoder_types import tiny_config_of
from recipe_runs import slow
from tiny_transformers import save_tiny
from torch import nn
from torchtune.training import set_default_dtype

from recipe_utils.models.attention import attend as dispatch
from recipe_utils.models.attention.attend import PackedRows
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.attention.packed_attention import attention_of
from recipe_utils.models.sizes import limits_of
from recipe_utils.models.transformers import masks, packing_check
from recipe_utils.models.transformers.causal_lm import causal_lm
from recipe_utils.models.transformers.decoder import Decoder, build, max_seq_len_of
from recipe_utils.text.documents import Documents

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LENGTHS = [17, 1, 30, 9]


def pretend_bf16(decoder):
    needs = decoder.attention_needs()._replace(dtype=torch.bfloat16)
    decoder.attention_needs = lambda: needs


def row_of(lengths):
    torch.manual_seed(1)
    parts = [torch.randint(3, 200, (n,)) for n in lengths]
    row = {"input_pos": torch.cat([torch.arange(n) for n in lengths])[None], "document_lengths": Documents([lengths])}
    return parts, torch.cat(parts)[None], row


def gradients_of(model, logits):
    torch.cat([each.square().flatten() for each in logits]).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_of_row_and_documents(decoder, plain):
    documents_, tokens, row = row_of(LENGTHS)
    with packing_check.DoublePrecision():
        alone = [plain(input_ids=d[None], use_cache=False).logits for d in documents_]
        return gradients_of(decoder.model, [decoder(tokens, **row)]), gradients_of(plain, alone)


def models_of(model_type):
    """Returns a decoder, and the same model as transformers computes it, in float64."""
    config = tiny_config_of(model_type)
    with set_default_dtype(torch.float64), packing_check.DoublePrecision():
        torch.manual_seed(0)
        plain = build(config).eval()
        for p in plain.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=p[0].numel() ** -0.5)
        decoder = Decoder(copy.deepcopy(plain), packing_check.cached_packing_check(config))
    return decoder, plain


@pytest.mark.parametrize(
    ("model_type", "kernel"),
    [
        ("qwen3", "varlen"),
        ("gemma3_text", "varlen"),  # windows, and a scale of its own
        ("gemma3_text", "flex"),
        ("gemma2", "flex"),  # soft caps
        ("gpt_oss", "by_document"),  # sinks
        slow("granite", "varlen"),
        slow("cohere2", "varlen"),
        slow("qwen3", "flex"),
        slow("deepseek_v3", "flex"),  # keys are wider than values
    ],
)
def test_each_kernel_gives_the_gradients_of_single_documents(
    model_type, kernel, flash_attention_on_a_cpu, flex_attention_on_a_cpu
):
    decoder, plain = models_of(model_type)
    pretend_bf16(decoder)
    attention = attention_of(decoder, CUDA if kernel != "by_document" else CPU, kernel)
    attend_within_documents(decoder, attention, 64)
    assert decoder.attention.kernel == kernel
    with torch.compiler.set_stance("force_eager"):
        found, expected = gradients_of_row_and_documents(decoder, plain)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)


def test_documents_are_not_inferred_from_positions():
    """A document continues the positions of the one before, as halves that a packed dataset has cut."""
    decoder, plain = models_of("qwen3")
    (_, second), tokens, row = row_of([11, 13])
    row["input_pos"] = torch.arange(24)[None]
    with packing_check.DoublePrecision():
        logits = decoder(tokens, **row)[0]
        alone = plain(input_ids=second[None], position_ids=torch.arange(11, 24)[None], use_cache=False)
    torch.testing.assert_close(logits[11:], alone.logits[0])


def test_a_tensor_is_not_cut_because_its_size_is_that_of_the_row():
    """A mixing module has a learned matrix as argument, and the row is as long as the matrix is wide."""

    class Mixer(nn.Module):
        def forward(self, hidden, matrix):
            return hidden.cumsum(1) @ matrix

    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer, self.matrix = Mixer(), nn.Parameter(torch.randn(1, 64, 64))

        def forward(self, hidden_states, **_):
            return self.mixer(hidden_states, self.matrix)

    model = build(tiny_config_of("lfm2"))
    model.model.layers[0].conv = Conv()
    parts = [torch.arange(3, 3 + n) for n in (17, 29, 1, 22)]
    _, axes = packing_check._modules_that_mix(lambda: model, parts, packing_check.PackingCheck(head_is_tail=True))
    assert axes["Mixer"] == {"[0][0]": [1], "[2]": [1]}
    mixer, (row, matrix) = Mixer(), torch.randn(2, 1, 64, 64)
    masks.run_by_document(mixer, axes["Mixer"])
    with masks.Setting(masks.ROWS, PackedRows(Documents([[40, 24]]), "by_document")):
        found = mixer(row, matrix)
    torch.testing.assert_close(found, torch.cat([Mixer()(part, matrix) for part in row.split([40, 24], dim=1)], dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_is_compared_on_the_device_in_the_dtype_of_training(dtype, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = tiny_config_of("gemma3_text")
    check = packing_check.cached_packing_check(config)
    compare = partial(packing_check.error_on_device, config, None, check, dtype, CPU)
    assert compare(kernel="by_document") is None

    def whole_row(q, k, v, _, mask, own, *__):
        return own(q, k, v, None)

    monkeypatch.setattr(dispatch, "by_document", whole_row)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert "gradients differ by" in compare(kernel="by_document")


def test_a_kernel_that_is_not_exact_on_the_device_is_replaced_or_rows_are_refused(with_triton, caplog):
    decoder = Decoder(build(tiny_config_of("qwen3")), packing_check.cached_packing_check(tiny_config_of("qwen3")))
    pretend_bf16(decoder)
    decoder.error_on = lambda _, kernel: "0.3" if kernel == "varlen" else None
    replaced = attention_of(decoder, CUDA)
    assert (replaced.kernel, replaced.reason_against("packed")) == ("by_document", None)
    assert "varlen computes other gradients of Qwen3ForCausalLM" in caplog.text
    decoder.error_on = lambda *_: "0.3"
    assert attention_of(decoder, CUDA).refused["packed"].endswith("set microbatching=least_padding")


def test_rows_may_be_longer_than_the_positions_of_mpt():
    decoder, plain = models_of("mpt")
    config = decoder.model.config
    config.max_seq_len = max(LENGTHS)
    assert max_seq_len_of(config) < sum(LENGTHS)
    attend_within_documents(decoder, attention_of(decoder, CPU), sum(LENGTHS))
    assert packing_check.difference(*gradients_of_row_and_documents(decoder, plain)) < 1e-8


def test_modules_that_run_by_document_take_one_row(tmp_path):
    """Rows of a packed dataset are merged for them."""
    save_tiny(tmp_path, "lfm2")
    with torch.device("meta"):
        limits = limits_of(causal_lm(str(tmp_path)), CPU)
    assert limits.merges_rows
