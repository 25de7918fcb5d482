"""Fresh weights are built once, depend on the seed alone, and give transformers' logits."""

import json
import re

import pytest
import tiny
import torch
import transformers
from distributed_runs import fork_context
from omegaconf import OmegaConf
from recipe_runs import keep_messages
from safetensors.torch import load_file, save_file
from torchtune import config

from recipe_utils.examples.fresh_weights import fresh_llama_checkpointer, fresh_state_dict

MODEL = {**tiny.MODEL, "rope_base": 10_000, "norm_eps": 1e-4}
FEWER_HEADS = {"num_heads": 2, "num_kv_heads": 1}


def make_checkpointer(folder, seed=3, **changes):
    return fresh_llama_checkpointer({**MODEL, **changes}, str(folder / "fresh"), str(folder / "out"), seed)


def make_weights(folder, **changes):
    return make_checkpointer(folder, **changes).load_checkpoint()["model"]


def make_model():
    return config.instantiate(OmegaConf.create(MODEL))


def assert_equal(weights, expected):
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def contents(folder):
    weights = load_file(folder / "fresh/model.safetensors")
    described = (folder / "fresh/config.json").read_text()
    return described, {name: tensor.tolist() for name, tensor in weights.items()}


def test_transformers_and_torchtune_compute_the_same_logits_from_the_folder(tmp_path):
    weights = make_weights(tmp_path)
    assert_equal(weights, fresh_state_dict(make_model(), seed=3))
    model = make_model()
    model.load_state_dict(weights, strict=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fresh")
    assert theirs.config.max_position_embeddings == model.max_seq_len
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=1e-6)


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    first = fresh_state_dict(make_model(), seed=5)
    torch.manual_seed(2)
    assert_equal(fresh_state_dict(make_model(), seed=5), first)
    other = fresh_state_dict(make_model(), seed=6)
    matrices = [name for name in first if first[name].dim() > 1]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)


def test_projections_into_the_residual_stream_are_smaller_by_the_root_of_their_number():
    weights = fresh_state_dict(make_model(), seed=0)
    into = torch.cat([w.flatten() for n, w in weights.items() if "w2." in n or "output_proj" in n])
    inside = torch.cat([w.flatten() for n, w in weights.items() if "w1." in n or "q_proj" in n])
    num_projections = 2 * MODEL["num_layers"]
    ratio = (inside.std() / into.std()).item()
    assert ratio == pytest.approx(num_projections**0.5, rel=0.05)
    assert all((weights[name] == 1).all() for name in weights if name.endswith("norm.scale"))


@pytest.mark.parametrize(
    ("change", "logged"),
    [
        (FEWER_HEADS, "model.num_heads is 2 and was 4, model.num_kv_heads is 1 and was 2"),
        ({"seed": 4}, "seed is 4 and was 3"),
    ],
    ids=["heads", "seed"],
)
def test_the_folder_follows_its_arguments_and_logs_the_change(change, logged, tmp_path):
    make_checkpointer(tmp_path)
    with keep_messages() as messages:
        make_checkpointer(tmp_path, **change)
        make_checkpointer(tmp_path, **change)  # read
        make_checkpointer(tmp_path / "new", **change)
    assert contents(tmp_path) == contents(tmp_path / "new")
    assert messages == [f"{tmp_path}/fresh/model.safetensors is rebuilt: {logged}"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_no_file_of_a_killed_build_is_taken_for_a_whole_one(name, tmp_path, interrupted_at):
    make_checkpointer(tmp_path)
    whole = contents(tmp_path)
    interrupted_at(name, make_checkpointer, tmp_path, **FEWER_HEADS)
    make_checkpointer(tmp_path)
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None], ids=str)
def test_weights_of_another_origin_are_not_replaced(metadata, tmp_path):
    make_checkpointer(tmp_path)
    path = tmp_path / "fresh" / "model.safetensors"
    save_file(load_file(path), path, metadata)
    described = path.with_name("config.json")
    described.write_text(json.dumps({**json.loads(described.read_text()), "bos_token_id": 1}))
    before = contents(tmp_path)
    make_checkpointer(tmp_path, rope_base=20_000)
    assert contents(tmp_path) == before


OTHERS = {
    "shards": ["config.json", "model-00001-of-00001.safetensors"],
    "an index": ["model.safetensors.index.json"],
    "a description": ["config.json"],
    "torch": ["pytorch_model-00001-of-00002.bin"],
    "Meta": ["consolidated.00.pth"],
}


@pytest.mark.parametrize("is_own_beside", [False, True], ids=["alone", "beside its own"])
@pytest.mark.parametrize("names", OTHERS.values(), ids=OTHERS)
def test_a_folder_with_files_of_another_model_is_refused_before_anything_is_written(names, is_own_beside, tmp_path):
    folder = tmp_path / "fresh"
    folder.mkdir()
    if is_own_beside:
        make_checkpointer(tmp_path, **FEWER_HEADS)
    for name in names:
        (folder / name).write_text('{"model_type": "llama"}')
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=re.escape(f"beside files of another model: {', '.join(names)}; set an empty")):
        make_checkpointer(tmp_path)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_other_files_of_a_folder_stay_beside_fresh_weights(tmp_path):
    (tmp_path / "fresh").mkdir()
    for name in ("tokenizer.model", "tokenizer_config.json", ".model.safetensors.tmp"):
        (tmp_path / "fresh" / name).write_text("{}")
    make_checkpointer(tmp_path)
    assert (tmp_path / "fresh/tokenizer_config.json").read_text() == "{}"


def start_at_once(folder, barrier):
    barrier.wait()
    return make_weights(folder, rope_base=20_000)


def test_one_of_several_processes_rebuilds_the_folder(tmp_path):
    make_checkpointer(tmp_path)
    with fork_context.Manager() as manager, fork_context.Pool(3) as pool:
        barrier = manager.Barrier(3)
        loaded = pool.starmap(start_at_once, [(tmp_path, barrier)] * 3, chunksize=1)
    for weights in loaded[1:]:
        assert_equal(weights, loaded[0])


@pytest.mark.parametrize("model", [tiny.UNTIED_MODEL, {**tiny.MODEL, "scale_factor": 32}])
def test_a_model_that_config_json_cannot_describe_is_refused(tmp_path, model):
    with pytest.raises(ValueError, match=r"llama3_2 with scale_factor=1 only"):
        fresh_llama_checkpointer(model, str(tmp_path), str(tmp_path))
