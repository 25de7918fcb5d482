import pytest
import tiny
import torch
from omegaconf import OmegaConf
from torchtune import config as torchtune_config

from recipe_utils.benchmark.baselines.hugging_face import load_model


@pytest.mark.parametrize("sizes", [{}, {"tie_word_embeddings": False, "num_kv_heads": 4}])
def test_transformers_model_has_the_random_weights_of_a_checkpointer_without_a_folder(sizes):
    model = {**tiny.MODEL, **sizes}
    random = {"_component_": "recipe_utils.check_gradient.RandomWeights", "model": model, "seed": 3}
    config = OmegaConf.create({"model": model, "checkpointer": random, "dtype": "fp32"})
    of_torchtune = torchtune_config.instantiate(config.model)
    of_torchtune.load_state_dict(torchtune_config.instantiate(config.checkpointer).load_checkpoint()["model"])
    of_transformers = load_model(config, torch.device("cpu"))
    tokens = torch.arange(1, 50)[None]
    torch.testing.assert_close(of_transformers(tokens).logits, of_torchtune(tokens))
