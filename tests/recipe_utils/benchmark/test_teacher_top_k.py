import math
import sys

import pytest
import torch
from tokenizers import pre_tokenizers
from torch import nn
from torchtune.models.llama2 import llama2

from recipe_utils.benchmark.gguf_model import read_gguf
from recipe_utils.benchmark.teacher_top_k import find_targets, main, make_samples, measure, ways_at
from recipe_utils.loss.distillation import TeacherHidden

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "12"]
NAMES = {
    "tok_embeddings.weight": "token_embd.weight",
    "norm.scale": "output_norm.weight",
    "sa_norm.scale": "attn_norm.weight",
    "mlp_norm.scale": "ffn_norm.weight",
    "attn.q_proj.weight": "attn_q.weight",
    "attn.k_proj.weight": "attn_k.weight",
    "attn.v_proj.weight": "attn_v.weight",
    "attn.output_proj.weight": "attn_output.weight",
    "mlp.w1.weight": "ffn_gate.weight",
    "mlp.w2.weight": "ffn_down.weight",
    "mlp.w3.weight": "ffn_up.weight",
}


def make_model():
    torch.manual_seed(0)
    model = llama2(len(TOKENS), 3, 4, 2, 32, 512, intermediate_dim=48, rope_base=1000.0)
    model.output.weight = model.tok_embeddings.weight
    # Or tied embeddings of this size would predict the last token with certainty.
    model.tok_embeddings.weight.data.mul_(0.1)
    return model.requires_grad_(False)


def write_gguf(path, model, split="smollm"):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ a", "1 2"])
    for name, weight in model.state_dict().items():
        if name.startswith("layers."):
            _, layer, of_layer = name.split(".", 2)
            writer.add_tensor(f"blk.{layer}.{NAMES[of_layer]}", weight.numpy())
        elif name != "output.weight":
            writer.add_tensor(NAMES[name], weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_gives_the_model_and_the_tokenizer_that_were_written(tmp_path):
    written = make_model()
    write_gguf(tmp_path / "model.gguf", written)
    model, tokenizer = read_gguf(tmp_path / "model.gguf")
    tokens = torch.randint(len(TOKENS), (2, 9))
    torch.testing.assert_close(model(tokens), written(tokens), rtol=0, atol=0)

    ids = tokenizer.encode("<|im_start|>12 a<|im_end|>").ids
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "1", "2", "Ġa", "<|im_end|>"]


def test_a_gguf_with_another_tokenizer_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", make_model(), split="qwen2")
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre is qwen2"):
        read_gguf(tmp_path / "model.gguf")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SystemExit, match="pip install gguf"):
        main(["model.gguf"])


def test_the_table_has_each_cache_and_temperature(tmp_path, capsys):
    write_gguf(tmp_path / "model.gguf", make_model())
    options = ["--num_targets", "50", "--max_answer_len", "20", "--num_layers", "1"]
    main([str(tmp_path / "model.gguf"), "--top_k", "2", str(len(TOKENS)), *options])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:5]]
    assert [row[:2] for row in rows] == [
        ["top 2", "20"],
        [f"top {len(TOKENS)}", f"{8 * len(TOKENS) + 4:,}"],
        ["hidden states in bf16", "64"],
    ]
    assert [float(cell) for cell in rows[1][2:]] == [1, 0, 0, 1, 0, 0]
    assert all(float(cell) > 0 for cell in rows[0][2:])
    assert max(float(rows[0][2]), float(rows[0][5])) < 1
    assert "50 targets in 3 answers" in lines[-1]


def test_targets_are_those_that_the_models_logits_predict(tmp_path):
    write_gguf(tmp_path / "model.gguf", make_model())
    model, tokenizer = read_gguf(tmp_path / "model.gguf")
    (sample,) = make_samples(tokenizer, [("What?", "This.")], 50, 20)
    assert tokenizer.decode(sample.tokens[-6:].tolist(), skip_special_tokens=False).endswith(
        "<|im_end|>"
    )
    labels, of_teacher, of_cut = find_targets(model, [sample], 2)
    assert labels.tolist() == sample.tokens[-6:].tolist()
    torch.testing.assert_close(model.output(of_teacher), model(sample.tokens[None])[0, -7:-1])
    del model.layers[2]
    torch.testing.assert_close(model.output(of_cut), model(sample.tokens[None])[0, -7:-1])


def test_the_error_is_that_of_the_gradient_over_all_rows():
    torch.manual_seed(0)
    output = nn.Linear(8, 30, bias=False).double()
    of_teacher, student = torch.randn(2, 100, 8, dtype=torch.float64)
    teacher = TeacherHidden(of_teacher, output)
    kept = measure(teacher, [student], ways_at(2.0, [4], 30), 2.0)["top 4"]

    p, q = (output(hidden).div(2).softmax(1) for hidden in (of_teacher, student))
    top, ids = p.topk(4)
    assert kept.mass == pytest.approx(top.sum(1).mean().item())
    # All others share one factor, by which the student's probability of them is off.
    is_top = torch.zeros_like(p).scatter(1, ids, 1.0).bool()
    factor = (1 - top.sum(1)) / q.masked_fill(is_top, 0).sum(1)
    seen = torch.where(is_top, p, q * factor[:, None])
    expected = (seen - p).norm() / (q - p).norm()
    assert kept.errors == pytest.approx([expected.item()], rel=1e-6)
    assert math.isfinite(kept.bytes_per_target)
