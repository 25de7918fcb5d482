import pytest
import tiny
import yaml
from omegaconf import OmegaConf
from recipe_runs import tiny_config

from recipe_utils.benchmark.lineup import LineupSettings
from recipe_utils.settings.problems import ConfigError
from recipe_utils.settings.read import read_settings


@pytest.fixture
def read(tmp_path):
    """Reads a lineup of one peer over the tiny config, with changes."""

    def read(base=None, **changes):
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny_config(tmp_path, **(base or {}))))
        config = {
            "output_dir": f"{tmp_path}/out",
            "update_step_config": f"{tmp_path}/base.yaml",
            "peers": {"ours": {"kind": "update_step"}},
            "num_update_steps": 2,
            **changes,
        }
        return read_settings(OmegaConf.create(config), LineupSettings)

    return read


def problems(read, *args, **changes):
    with pytest.raises(ConfigError) as caught:
        read(*args, **changes)
    return tuple(map(str, caught.value.problems))


def test_changes_of_a_config_may_refer_to_its_keys(read):
    peers = {"ours": {"kind": "update_step", "gradient_accumulation_steps": "${batch_size}"}}
    lineup = read(overrides={"batch_size": 3, "seed": "${batch_size}"}, peers=peers).lineup
    config = lineup.peers[0].config
    assert config["seed"] == config["gradient_accumulation_steps"] == 3


def test_peers_of_the_same_data_share_what_their_update_steps_hold(read):
    peers = {
        "first": {"kind": "stock"},
        "same": {"kind": "update_step", "microbatching": "packed"},
        "other": {"kind": "update_step", "batch_size": 1},
    }
    contents = read(peers=peers).lineup.contents
    assert contents["first"] is contents["same"]
    assert contents["first"] != contents["other"]
    assert [len(each) for each in contents.values()] == [3, 3, 3]  # with the warm-up step


def test_a_peer_that_cannot_run_is_skipped_unless_it_is_the_baseline(read):
    peers = {"ours": {"kind": "update_step"}, "limit": {"kind": "limit"}}
    lineup = read(peers=peers, nproc_per_node=2).lineup
    assert [peer.name for peer in lineup.peers] == ["ours"]
    assert lineup.skipped == {"limit": "skipped: runs as one process only"}
    (problem,) = problems(read, peers=peers, nproc_per_node=2, baseline="limit")
    assert problem == "baseline=limit: it runs as one process only; set it to another peer"


def test_a_model_with_adapters_is_left_to_the_trainer_that_knows_them(read):
    peers = {"ours": {"kind": "update_step"}, "hf": {"kind": "hf_trainer"}, "trl": {"kind": "trl"}}
    skipped = read(base={"model": tiny.adapted(tiny.MODEL)}, peers=peers).lineup.skipped
    assert skipped["hf"] == "skipped: trains no adapters, which kind=trl does"
    skipped = read(peers=peers).lineup.skipped
    assert skipped["trl"] == ("skipped: trains adapters only; kind=hf_trainer trains whole models")


def test_keys_and_components_of_what_all_peers_train_are_checked_before_any_starts(read):
    found = problems(
        read,
        base={"batchsize": 2, "optimizer": {"_component_": "torch.optim.AdamW", "lrr": 0.1}},
        overrides={"tensor_parallel_dim": 2},
    )
    assert any(text.startswith("batchsize: this recipe has no such key") for text in found)
    assert "optimizer.lrr: AdamW has no such argument; did you mean lr?" in found
    assert any(text.startswith("overrides.tensor_parallel_dim=2: ") for text in found)


@pytest.mark.parametrize(
    ("key", "value"),
    [("batch_size", 0), ("batch_size", "2"), ("global_batch_size", 3), ("dataset", {"num": 1})],
)
def test_what_is_wrong_with_a_peer_names_it_and_its_key(read, key, value):
    (problem,) = problems(read, peers={"ours": {"kind": "update_step", key: value}})
    assert problem.startswith(f"peers.ours: {key}")


def test_a_lineup_without_peers_or_with_an_unreadable_config_is_refused(read, tmp_path):
    assert problems(read, peers={}) == (
        "peers: there are none; set it to names with a kind each, see the config",
    )
    for text in ("a: [", "- a"):
        (tmp_path / "bad.yaml").write_text(text)
        (problem,) = problems(read, update_step_config=f"{tmp_path}/bad.yaml")
        assert problem.startswith(f"update_step_config={tmp_path}/bad.yaml: ")
