import json
from functools import partial

import pytest
import torch
from recipe_runs import slow
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchtune.models.qwen2 import qwen2

from recipe_utils.benchmark import gpu
from recipe_utils.benchmark.gpu import STAGES, decoder_flops, main
from recipe_utils.benchmark.token_audit import IGNORE_INDEX
from recipe_utils.losses import LinearCrossEntropyLoss
from recipe_utils.losses.attach import attach_loss
from recipe_utils.models.attention.document_mask import attend_within_documents
from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.settings import ModelSettings
from recipe_utils.text.rows import collate_packed_microbatch
from recipe_utils.update_steps.step import Targets

SMALL = ["--device", "cpu", "--small"]


@pytest.mark.slow
def test_all_stages_run_in_small_on_a_cpu_and_no_check_fails(tmp_path, capsys):
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == list(STAGES)
    (printed,) = results["gradients"]["output"].values()
    assert printed[-1] == "Equal to single samples within the precision of fp32."
    printed = capsys.readouterr().out
    rows = results["speed"]["rows"]
    assert len(rows) == 3
    assert all(row["target_tokens_per_second"] > 0 and row["share_of_peak"] > 0 for row in rows)
    assert printed.count("share_of_peak") == 3


def raises(run):
    raise RuntimeError("no such kernel")


def fails(run):
    return {"failures": ["exit code 2", "exit code 3"]}


def test_stages_that_raise_or_fail_are_named_and_the_others_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "STAGES", {"first": raises, "second": fails, "third": raises})
    assert main([*SMALL, "--out", str(tmp_path), "--stages", "first,second"]) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found) == ["first", "second"]
    assert "in raises" in found["first"]["raised"]
    printed = capsys.readouterr().out
    assert "FAILED first: RuntimeError: no such kernel" in printed
    assert "FAILED second: exit code 2\nFAILED second: exit code 3" in printed
    with pytest.raises(SystemExit):
        main([*SMALL, "--stages", "first,fourth"])
    assert "there is no fourth; there are first, second, third" in capsys.readouterr().err


@pytest.mark.parametrize("own", [{}, slow({"tie_word_embeddings": True})])
def test_flops_of_a_decoder_are_those_that_pytorch_counts(own):
    sizes = {"vocab_size": 101, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32}
    sizes |= {"intermediate_dim": 48, "max_seq_len": 64, **own}
    model = build_on_meta(partial(qwen2, **sizes), ModelSettings())
    attend_within_documents(model, torch.device("cpu"), 64)
    attach_loss(model, LinearCrossEntropyLoss(tokens_per_chunk=7))
    lengths = [5, 11, 24]
    samples = [{"tokens": [1] * n, "labels": [IGNORE_INDEX] * (n // 2) + [1] * -(-n // 2)} for n in lengths]
    row = collate_packed_microbatch(samples, IGNORE_INDEX)
    with torch.device("meta"):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
        inputs = {**row.inputs, "tokens": row.inputs["tokens"].to("meta")}
        inputs["input_pos"] = inputs["input_pos"].to("meta")
    targets = Targets(row.targets.labels.to("meta"), row.targets.positions.to("meta"))

    def flops_of_addmm(_, left, right, **__):  # PyTorch does not count it in place
        return 2 * left[0] * left[1] * right[1]

    in_place = {torch.ops.aten.addmm_: flops_of_addmm}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, sdpa_kernel(SDPBackend.MATH):
        model(**inputs, targets=targets)[0].backward()
    of_weights, of_attention = decoder_flops(model, lengths, len(row.targets.positions))
    # PyTorch counts all pairs of queries and keys, of which causal attention needs half.
    assert counter.get_total_flops() == of_weights + 2 * of_attention
