"""TRL's GRPOTrainer as a baseline, on one process, with the rollouts of a file instead of a sampler's.

A line of the file is a group: ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``rewards``. A microbatch has
``batch_size`` groups; TRL pads all prompts and all answers of an update step to the longest of each.
"""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig
from trl import GRPOConfig, GRPOTrainer

from recipe_utils.benchmark.baselines.hugging_face import tokenizer_of_numbers, trainer_arguments, what_is_trained
from recipe_utils.update_steps.permutation import epoch_permutation


class _OfGivenLogProbs(GRPOTrainer):
    """Trainer whose ratios compare with the sampler's log-probabilities; TRL's compare with its own model."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        scored = super()._generate_and_score_completions(inputs)
        return {**scored, "old_per_token_logps": scored["sampling_per_token_logps"]}


def train(config: DictConfig) -> None:
    """Trains with TRL's loss; ``grpo`` of the config has its further arguments, such as ``loss_type``."""
    groups = [json.loads(line) for line in Path(config.dataset.path).read_text().splitlines()]
    order = epoch_permutation(len(groups), epoch=0, shuffle=config.get("shuffle", True)).tolist()
    size = len(groups[0]["rewards"])

    # Called with the number of a group once for each of its answers, in place of a sampler.
    def given(prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        picked = [groups[int(prompt)] for prompt in prompts[::size]]
        answers = {
            key: [each for group in picked for each in group[key]] for key in ("completion_ids", "logprobs", "rewards")
        }
        return {**answers, "prompt_ids": [group["prompt_ids"] for group in picked for _ in range(size)]}

    def reward(rewards: list[float], **_: Any) -> list[float]:
        return rewards

    parts = what_is_trained(config)
    arguments = {
        "per_device_train_batch_size": config.batch_size * size,
        "num_generations": size,
        "shuffle_dataset": False,
        **trainer_arguments(config),
        **config.get("grpo", {}),
    }
    trainer = GRPOTrainer if config.loss.get("old") == "start" else _OfGivenLogProbs
    trainer(
        reward_funcs=reward,
        args=GRPOConfig(**arguments),
        # Prompts are numbers of groups. TRL decodes answers for rewards, which are given.
        train_dataset=Dataset.from_dict({"prompt": list(map(str, order))}),
        processing_class=tokenizer_of_numbers(parts["model"], config),
        rollout_func=given,
        **parts,
    ).train()
