import pytest
import tiny
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torchtune import config as torchtune_config

from recipe_utils.benchmark.baselines.hugging_face import load_model
from recipe_utils.benchmark.baselines.trl_sft import make_trainer
from recipe_utils.benchmark.token_audit import samples_in_order
from recipe_utils.models.transformers.double_precision import DoublePrecision


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


@pytest.mark.parametrize("sft", [{"packing": True, "max_length": 64}, {}], ids=["packing", "flattened"])
def test_a_row_of_trl_has_the_gradient_of_separate_samples(sft, tiny_config):
    random = {"_component_": "recipe_utils.check_gradient.RandomWeights", "model": tiny.MODEL, "seed": 3}
    own = {"sft": sft, "max_steps_per_epoch": 1, "enable_activation_checkpointing": False}
    config = OmegaConf.create(tiny_config(checkpointer=random, dtype="fp64", gradient_accumulation_steps=1, **own))
    with DoublePrecision():
        trainer = make_trainer(config)
        (row,) = trainer.get_train_dataloader()
        num_targets = (row["labels"] != tiny.IGNORE).sum()
        trainer.compute_loss(trainer.model, row, num_items_in_batch=num_targets).backward()
        largest = max(parameter.grad.abs().max() for parameter in trainer.model.parameters())
        for sample in samples_in_order(config, tiny.TinyTokenizer(64), num_ranks=1):
            both = torch.tensor([sample["tokens"], sample["labels"]])
            for tokens, labels in both.split(sample.get("seq_lens", both.shape[1]), dim=1):
                logits = trainer.model(tokens[None]).logits[0, :-1]
                (-F.cross_entropy(logits, labels[1:], reduction="sum") / num_targets).backward()
    # TRL's head computes in fp32: 2e-7. Positions that do not restart make it 0.2 or more.
    assert max(parameter.grad.abs().max() for parameter in trainer.model.parameters()) < 1e-5 * largest
