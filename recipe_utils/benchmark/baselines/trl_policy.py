"""TRL's GRPOTrainer as a baseline, on one process, with the rollouts of a file instead of a sampler's.

A line of the file is a group: ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``rewards``. A microbatch has
``batch_size`` groups; TRL pads all prompts and all answers of an update step to the longest of each.
"""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import DictConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torchtune import config as torchtune_config
from torchtune.utils import get_device
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from recipe_utils.benchmark.baselines.hugging_face import ReportLoss, load_model, trainer_arguments
from recipe_utils.optim.optimizer import make_schedule
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

    model = load_model(config, get_device(config.device))
    optimizer = torchtune_config.instantiate(config.optimizer, model.parameters())
    # Prompts are numbers of groups. TRL decodes answers for rewards, which are given.
    numbers = Tokenizer(WordLevel({str(i): i for i in range(model.config.vocab_size)}, unk_token="0"))
    pad = str(torchtune_config.instantiate(config.tokenizer).pad_id)
    arguments = {
        "per_device_train_batch_size": config.batch_size * size,
        "num_generations": size,
        "shuffle_dataset": False,
        **trainer_arguments(config),
        **config.get("grpo", {}),
    }
    trainer = GRPOTrainer if config.loss.get("old") == "start" else _OfGivenLogProbs
    trainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_dict({"prompt": list(map(str, order))}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=numbers, pad_token=pad, eos_token=pad),
        rollout_func=given,
        callbacks=[ReportLoss()],
        optimizers=(optimizer, make_schedule(config.get("lr_scheduler"), optimizer, config.max_steps_per_epoch)),
    ).train()
