import pytest
import tiny
import torch
from distributed_runs import run_distributed
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtune import config as torchtune_config

from recipe_utils.benchmark.baselines.start import load_adapters, load_start, write_fresh_adapters

DORA = tiny.adapted(tiny.MODEL, use_dora=True)


@pytest.fixture
def config(tiny_config, tmp_path):
    """Returns a resolved config whose model has fresh adapters in a separate file."""
    config = OmegaConf.create(tiny_config(model=DORA, seed=0, dtype="fp32"))
    config.checkpointer.adapter_checkpoint = f"{tmp_path}/start/a.pt"
    write_fresh_adapters(config)
    return config


def test_fresh_adapters_do_not_change_the_outputs(config):
    model = torchtune_config.instantiate(config.model)
    load_start(model, config)
    tokens = torch.arange(1, 9)[None]
    torch.testing.assert_close(model(tokens), tiny.tiny_model(tiny.MODEL)(tokens))


def load_into_shards(path):
    model = torchtune_config.instantiate(OmegaConf.create(DORA))
    fully_shard(model)
    load_adapters(model, path)
    return {
        name: parameter.full_tensor() for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)
    }


def test_sharded_models_get_their_parts_of_the_adapters(config):
    path = config.checkpointer.adapter_checkpoint
    written = torch.load(path)
    for loaded in run_distributed(load_into_shards, 2, path):
        for name, tensor in written.items():
            assert torch.equal(loaded[name], tensor)


def test_adapters_of_another_model_are_refused(config):
    with pytest.raises(ValueError, match=r"the model has no layers\.0"):
        load_adapters(nn.Linear(2, 2), config.checkpointer.adapter_checkpoint)
