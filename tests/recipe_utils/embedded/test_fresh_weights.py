"""Fresh weights are made once, depend on the seed alone, and mean the same to transformers."""

import json

import pytest
import tiny
import torch
from distributed_runs import fork_context
from omegaconf import OmegaConf
from recipe_runs import keep_messages
from safetensors.torch import load_file, save_file
from torchtune import config

from recipe_utils.embedded.fresh_weights import fresh_llama_checkpointer, fresh_state_dict

MODEL = {**tiny.MODEL, "rope_base": 10_000, "norm_eps": 1e-4}


def make_checkpointer(folder, **changes):
    arguments = {"model": MODEL, "checkpoint_dir": str(folder / "fresh"), **changes}
    return fresh_llama_checkpointer(**arguments, output_dir=str(folder / "out"))


def make_model():
    return config.instantiate(OmegaConf.create(MODEL))


@pytest.fixture
def keep_log():
    with keep_messages() as messages:
        yield messages


@pytest.fixture
def loaded(tmp_path):
    """The fresh checkpoint's weights, and a torchtune model that has loaded them."""
    weights = make_checkpointer(tmp_path, seed=3).load_checkpoint()["model"]
    model = make_model()
    model.load_state_dict(weights, strict=True)
    return weights, model


def test_a_torchtune_model_loads_exactly_the_fresh_weights_of_the_seed(loaded):
    weights, _ = loaded
    expected = fresh_state_dict(make_model(), seed=3)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    first = fresh_state_dict(make_model(), seed=5)
    torch.manual_seed(2)
    again, other = fresh_state_dict(make_model(), seed=5), fresh_state_dict(make_model(), seed=6)
    matrices = [name for name in first if first[name].dim() > 1]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in matrices)


def test_projections_into_the_residual_stream_are_smaller_by_the_root_of_their_number():
    weights = fresh_state_dict(make_model(), seed=0)
    into = torch.cat([w.flatten() for n, w in weights.items() if "w2." in n or "output_proj" in n])
    inside = torch.cat([w.flatten() for n, w in weights.items() if "w1." in n or "q_proj" in n])
    num_projections = 2 * MODEL["num_layers"]
    ratio = (inside.std() / into.std()).item()
    assert ratio == pytest.approx(num_projections**0.5, rel=0.05)
    assert all((weights[name] == 1).all() for name in weights if name.endswith("norm.scale"))


def test_a_second_call_reads_what_the_first_wrote(tmp_path):
    first = make_checkpointer(tmp_path).load_checkpoint()["model"]
    files = [tmp_path / "fresh" / name for name in ("config.json", "model.safetensors")]
    written = [path.stat().st_mtime_ns for path in files]
    second = make_checkpointer(tmp_path).load_checkpoint()["model"]
    assert [path.stat().st_mtime_ns for path in files] == written
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "change", [{"num_heads": 2, "num_kv_heads": 1}, {"rope_base": 20_000}], ids=str
)
def test_the_folder_follows_a_model_that_changed_and_logs_the_change(change, tmp_path, keep_log):
    first = make_checkpointer(tmp_path, seed=3)
    again = make_checkpointer(tmp_path, model={**MODEL, **change}, seed=3)
    new = make_checkpointer(tmp_path / "new", model={**MODEL, **change}, seed=3)
    weights, expected = (each.load_checkpoint()["model"] for each in (again, new))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert again._config == new._config != first._config
    (line,) = keep_log
    (name, value), *_ = change.items()
    assert "fresh weights are made anew, because" in line
    assert f"model.{name} is {value} and was {MODEL[name]}" in line
    assert "seed" not in line


def test_the_folder_follows_the_seed(tmp_path, keep_log):
    make_checkpointer(tmp_path, seed=3)
    weights = make_checkpointer(tmp_path, seed=4).load_checkpoint()["model"]
    expected = fresh_state_dict(make_model(), seed=4)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert [line.split("because ")[1] for line in keep_log] == ["seed is 4 and was 3"]


def test_what_a_kill_left_half_replaced_is_made_whole(tmp_path):
    """The weights are replaced before the config.json beside them."""
    make_checkpointer(tmp_path)
    old = (tmp_path / "fresh/config.json").read_text()
    changed = {**MODEL, "num_heads": 2, "num_kv_heads": 1}
    make_checkpointer(tmp_path, model=changed)
    new = (tmp_path / "fresh/config.json").read_text()
    for left in (old, None):
        (tmp_path / "fresh/config.json").unlink()
        if left is not None:
            (tmp_path / "fresh/config.json").write_text(left)
        make_checkpointer(tmp_path, model=changed)
        assert (tmp_path / "fresh/config.json").read_text() == new


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None], ids=str)
def test_weights_that_something_else_has_put_there_stay(metadata, tmp_path):
    make_checkpointer(tmp_path)
    path = tmp_path / "fresh" / "model.safetensors"
    save_file(load_file(path), path, metadata)
    described = tmp_path / "fresh" / "config.json"
    downloaded = {**json.loads(described.read_text()), "bos_token_id": 1}
    described.write_text(json.dumps(downloaded))
    written = path.read_bytes()
    make_checkpointer(tmp_path, model={**MODEL, "rope_base": 20_000})
    assert path.read_bytes() == written
    assert json.loads(described.read_text()) == downloaded


def start_at_once(folder, barrier):
    barrier.wait()
    return make_checkpointer(folder, model={**MODEL, "rope_base": 20_000}).load_checkpoint()[
        "model"
    ]


def test_of_processes_that_start_at_once_one_makes_the_folder_anew(tmp_path):
    make_checkpointer(tmp_path)
    with fork_context.Manager() as manager, fork_context.Pool(3) as pool:
        barrier = manager.Barrier(3)
        loaded = pool.starmap(start_at_once, [(tmp_path, barrier)] * 3, chunksize=1)
    for weights in loaded[1:]:
        assert all(torch.equal(weights[name], loaded[0][name]) for name in weights)


def test_the_config_describes_the_model(tmp_path):
    make_checkpointer(tmp_path)
    described = json.loads((tmp_path / "fresh" / "config.json").read_text())
    model = make_model()
    attention = model.layers[0].attn
    assert described["vocab_size"] == model.tok_embeddings.num_embeddings
    assert described["hidden_size"] == model.tok_embeddings.embedding_dim
    assert described["intermediate_size"] == model.layers[0].mlp.w1.out_features
    assert described["num_hidden_layers"] == len(model.layers)
    assert described["num_attention_heads"] == attention.num_heads
    assert described["num_key_value_heads"] == attention.num_kv_heads
    assert described["head_dim"] == attention.head_dim
    assert described["max_position_embeddings"] == model.max_seq_len
    assert described["rms_norm_eps"] == model.norm.eps
    assert described["tie_word_embeddings"] == ("output.weight" not in model.state_dict())


def test_transformers_computes_the_same_logits_from_the_folder(tmp_path, loaded):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fresh")
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, loaded[1](tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", [tiny.UNTIED_MODEL, {**tiny.MODEL, "scale_factor": 32}])
def test_a_model_that_the_config_would_not_describe_is_refused(tmp_path, model):
    with pytest.raises(ValueError, match=r"llama3_2 with scale_factor=1 only"):
        make_checkpointer(tmp_path, model=model)
