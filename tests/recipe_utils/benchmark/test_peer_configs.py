import pytest
import tiny
from omegaconf import OmegaConf
from recipe_runs import tiny_config

from recipe_utils.benchmark.peer_configs import load_base_config, merge, peer_of


@pytest.fixture
def base(tmp_path):
    return OmegaConf.create(
        {**tiny_config(tmp_path), "my_folder": "${output_dir}/fresh", "data": "${my_folder}/data"}
    )


def make(base, num_ranks=1, **settings):
    return peer_of("mine", settings, base, "/shared", num_ranks, max_steps=9).config


def test_peers_share_what_the_base_derives_from_output_dir_and_write_elsewhere(base):
    base.checkpointer.checkpoint_dir = "${my_folder}"
    config = make(base, kind="update_step")
    assert config["checkpointer"]["checkpoint_dir"] == "/shared/fresh"
    assert config["output_dir"] == config["checkpointer"]["output_dir"] == "/shared/peers/mine"
    assert "my_folder" not in config, "the recipe would refuse it, nothing refers to it any more"


def test_only_a_peer_that_asks_for_it_saves(base):
    base.save_every_n_steps = base.save_every_n_minutes = 200
    config = make(base, kind="update_step")
    assert config["save_every_n_steps"] is config["save_every_n_minutes"] is None
    assert make(base, kind="update_step", save_every_n_steps=1)["save_every_n_steps"] == 1


def test_stock_gets_a_loss_of_torchtune_unless_told_otherwise(base):
    stock = "torchtune.modules.loss.CEWithChunkedOutputLoss"
    assert make(base, kind="stock")["loss"]["_component_"] == stock
    own = {"_component_": "torch.nn.CrossEntropyLoss"}
    assert make(base, kind="stock", loss=own)["loss"] == own
    assert make(base, kind="update_step")["loss"]["_component_"].startswith("recipe_utils.")


def test_a_global_batch_is_divided_over_the_ranks(base):
    base.pop("gradient_accumulation_steps")
    base.global_batch_size = 16
    assert make(base, num_ranks=2, kind="stock")["gradient_accumulation_steps"] == 4
    with pytest.raises(ValueError, match="global_batch_size=16: it is not a multiple"):
        make(base, num_ranks=3, kind="stock")


def test_peers_of_one_model_start_from_the_same_adapters(base):
    def start_of(**settings):
        peer = peer_of("mine", settings, base, "/shared", 1, max_steps=9)
        return peer.config["checkpointer"].get("adapter_checkpoint"), peer.draws_adapters

    adapted = tiny.adapted(tiny.MODEL)
    assert start_of(kind="stock") == (None, False)
    base.model = adapted
    path, draws = start_of(kind="stock")
    assert path.startswith("/shared/start_adapters/")
    assert draws
    assert start_of(kind="update_step", microbatching="packed") == (path, True)
    assert start_of(kind="update_step", model={**adapted, "lora_rank": 2})[0] != path
    assert start_of(kind="update_step", model=tiny.MODEL) == (None, False)
    base.checkpointer.output_dir = "/given"
    base.checkpointer.adapter_checkpoint = "epoch_0/adapter_model.pt"
    assert start_of(kind="stock") == ("/given/epoch_0/adapter_model.pt", False)


def test_an_override_that_names_a_component_replaces_it_whole(base):
    merged = merge(base, {"optimizer": {"_component_": "torch.optim.SGD"}, "dataset": {"seed": 1}})
    assert merged.optimizer == {"_component_": "torch.optim.SGD"}
    assert merged.dataset.num_samples == 32
    assert "seed" not in base.dataset


def test_an_unknown_base_config_is_named():
    assert load_base_config("llama3_2/5M_full_update_step").batch_size == 4
    with pytest.raises(ValueError, match=r"update_step_config=llama9/1B: .* set it to"):
        load_base_config("llama9/1B")
