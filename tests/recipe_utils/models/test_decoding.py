"""Decoding with caches chooses the tokens of forwards without padding and caches, for decoders of both libraries."""

import pytest
import tiny
import torch
from omegaconf import OmegaConf
from recipe_runs import slow
from tiny_transformers import save_tiny
from torchtune.config import instantiate

from recipe_utils.models.decoding import Draws, decode

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 12, 11, 10], [5, 6, 7], [3], [3, 5]]
NUM, ENDS = 12, range(10, 30)


def model_of(name, folder):
    """Returns a model with weights that let windows and padding matter."""
    if hasattr(tiny, name):
        return tiny.tiny_model(getattr(tiny, name), seed=3)
    model = instantiate(OmegaConf.create(save_tiny(folder, name)["model"]))
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(
    "name",
    [
        "MODEL",
        "mistral",  # it has a window of fewer tokens than its rows
        *map(slow, ("GEMMA2_MODEL", "qwen3", "gemma3_text", "phi3", "gpt2", "lfm2", "qwen2_5_vl")),
    ],
)
def test_each_token_is_that_of_a_forward_of_its_own_row(name, tmp_path):
    model, widths = model_of(name, tmp_path).train(), []
    model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape))
    uniform = torch.rand(len(PROMPTS), NUM, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found = decode(model, PROMPTS, NUM, ENDS, torch.device("cpu"), Draws(1.5, uniform))
    assert model.training
    if name not in ("GEMMA2_MODEL", "lfm2"):  # others compute each prompt once, and then new tokens alone
        assert widths == [(4, 9), *[(5, 1)] * (max(len(answer.tokens) for answer in found) - 1)]
    model.eval()
    for prompt, answer, draws in zip(PROMPTS, found, uniform, strict=True):
        for place, (token, log_prob) in enumerate(zip(*answer, strict=True)):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer.tokens[:place]]))[0, -1]
            probabilities = torch.softmax(logits.double() / 1.5, dim=0)
            below = probabilities[:token].sum()
            assert below - 1e-5 <= draws[place] <= below + probabilities[token] + 1e-5
            assert log_prob == pytest.approx(probabilities[token].log().item(), abs=1e-4)
        assert {*ENDS}.isdisjoint(answer.tokens[:-1])
        assert len(answer.tokens) == NUM or answer.tokens[-1] in ENDS
    assert len({len(answer.tokens) for answer in found}) > 1
