import pytest
import tiny
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torchtune import config as torchtune_config

from recipe_utils.benchmark.baselines.hugging_face import load_model
from recipe_utils.benchmark.baselines.trl_sft import make_trainer
from recipe_utils.benchmark.token_audit import samples_in_order
from recipe_utils.models.double_precision import DoublePrecision


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
    documents = [
        document
        for sample in samples_in_order(config, tiny.TinyTokenizer(64), num_ranks=1)
        for document in torch.tensor([sample["tokens"], sample["labels"]]).split(
            sample.get("seq_lens", len(sample["tokens"])), dim=1
        )
    ]
    num_targets = sum((labels[1:] != tiny.IGNORE).sum() for _, labels in documents)

    def gradient(loss):
        trainer.model.zero_grad()
        loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])

    def sum_alone(tokens, labels):
        return F.cross_entropy(trainer.model(tokens[None]).logits[0, :-1], labels[1:], reduction="sum")

    with DoublePrecision():
        trainer = make_trainer(config)
        (row,) = trainer.get_train_dataloader()
        assert row["input_ids"].numel() == sum(len(tokens) for tokens, _ in documents)
        computed = gradient(trainer.compute_loss(trainer.model, row, num_items_in_batch=num_targets))
        expected = gradient(sum(sum_alone(*document) for document in documents) / num_targets)
    # TRL's head computes in fp32: 2e-7 of the largest. Positions that do not restart make it 0.2 or more.
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
