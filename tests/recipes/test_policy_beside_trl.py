"""Losses of update steps of rollouts are those of TRL's GRPOTrainer, where that is right: one microbatch per update step."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from distributed_runs import run_distributed
from recipe_runs import POLICY, losses, run_recipe
from tiny_transformers import float64_throughout, save_tiny
from torchtune.training import set_default_dtype

NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE = 5, 4, 4


def write_rollouts(path, spread):
    """Writes groups whose log-probabilities make ratios of which about half are clipped, with rewards of a ``spread``."""
    draw = random.Random(0)

    def tokens(least, most):
        return [draw.randint(1, 60) for _ in range(draw.randint(least, most))]

    lines = []
    for _ in range(NUM_STEPS * GROUPS_PER_STEP):
        answers = [tokens(1, 12) for _ in range(GROUP_SIZE)]
        group = {
            "prompt_ids": tokens(2, 20),
            "completion_ids": answers,
            "logprobs": [[draw.gauss(-4.5, 0.5) for _ in answer] for answer in answers],
            "rewards": [draw.gauss(0, spread) for _ in answers],
        }
        lines.append(json.dumps(group) + "\n")
    path.write_text("".join(lines))


def losses_of_trl(config):
    from omegaconf import OmegaConf
    from trl.kernels import chunked_logprob
    from trl.trainer import grpo_trainer

    from recipe_utils.benchmark.baselines import trl_policy
    from recipe_utils.benchmark.interleave import LossLogger

    # It shuffles the answers of several update steps on one file, which then have parts of groups.
    grpo_trainer.shuffle_sequence_dict = lambda answers: answers
    # Its output layer computes in fp32, whatever the model's dtype.
    chunked_logprob.torch = SimpleNamespace(**{**vars(torch), "float32": torch.float64})
    found = []
    LossLogger.gate = SimpleNamespace(add_loss=found.append)
    with set_default_dtype(torch.float64), float64_throughout():
        trl_policy.train(OmegaConf.create(config))
    return found


@pytest.mark.parametrize(
    ("loss", "advantage", "grpo"),
    [
        pytest.param(
            {"clip_high": 0.28, "kl": "k3", "kl_weight": 0.1},
            "mean_std",
            {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1, "use_bias_correction_kl": False},
            id="dapo_with_kl",
        ),
        pytest.param({"normaliser": "answers"}, "mean_std", {"loss_type": "grpo"}, id="grpo"),
        pytest.param(
            {"normaliser": "constant", "tokens_per_answer": 12},
            "mean",
            {"loss_type": "dr_grpo", "max_completion_length": 12, "scale_rewards": "none"},
            id="dr_grpo",
        ),
        # Its bound is 1 + high.
        pytest.param(
            {"kind": "cispo", "clip_high": 0.5}, "mean_std", {"loss_type": "cispo", "epsilon_high": 1.5}, id="cispo"
        ),
        pytest.param(
            {"kind": "sequence", "normaliser": "answers", "clip_low": 0.1, "clip_high": 0.2},
            "mean_std",
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2},
            id="gspo",
        ),
        pytest.param(
            {"normaliser": "answers", "old": "start"},
            "mean_std",
            {"loss_type": "grpo", "steps_per_generation": NUM_STEPS},
            id="five_update_steps_on_one_file",
        ),
    ],
)
def test_losses_of_five_update_steps_are_those_of_trl(loss, advantage, grpo, tiny_config, tmp_path):
    # TRL adds 1e-4 to the standard deviation of a group's rewards, and we 1e-6: advantages differ by 1e-13.
    write_rollouts(tmp_path / "rollouts.jsonl", spread=1e9 if advantage == "mean_std" else 1)
    config = tiny_config(
        **save_tiny(tmp_path / "llama", "llama"),
        dataset={
            "_component_": "recipe_utils.policy.rollout_dataset",
            "path": str(tmp_path / "rollouts.jsonl"),
            "advantage": advantage,
        },
        loss={"_component_": "recipe_utils.policy.PolicyLoss", **loss},
        optimizer={"_component_": "torch.optim.SGD", "lr": 0.3},
        shuffle=False,
        batch_size=GROUPS_PER_STEP,
        gradient_accumulation_steps=1,
        max_steps_per_epoch=NUM_STEPS,
        dtype="fp64",
    )
    own = {"enable_activation_checkpointing": False, "grpo": grpo}
    (expected,) = run_distributed(losses_of_trl, 1, {**config, **own})
    with float64_throughout():
        logged = run_recipe(config, POLICY)
    assert losses(logged) == pytest.approx(expected, rel=0, abs=1e-10)
    assert len({round(loss, 3) for loss in expected}) == NUM_STEPS
    assert (logged[0]["ratio_max"] == 1) == (loss.get("old") == "start")
