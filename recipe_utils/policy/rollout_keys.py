"""Keys of rollouts in files as tools write them: each is used, known as harmless, or named as not read.

Example: ``{"group_index": 3, "tokens": [1, 7, 9, 4, 2], "response_length": 2, "rollout_log_probs": [-0.1, -2.3], "reward": 1.0,
"status": "completed"}``, as slime writes it, has the answer 4 2 to the prompt 1 7 9 in group 3; ``status`` is
``finish_reason`` under another name. ``python -m recipe_utils.policy.rollout_keys`` prints the table of the page.
"""

from typing import Any, ClassVar

from recipe_utils.text.conversations.schema import MEDIA, Keys, known_as, table_of


class Rollout(Keys):
    """A row of one answer, or of a group with lists of what each answer has."""

    prompt: Any = known_as("text of the user, or messages; not read beside token ids", "prompt")
    completion: Any = known_as(
        "text of the assistant, or messages; a list of them in a row of a group; not read beside token ids",
        "completion", "completions", "response", "responses",
    )  # fmt: skip
    messages: Any = known_as(
        "whole conversation, whose assistant turns are trained unless their `weight` is 0", "messages", "conversation"
    )
    tools: Any = known_as("tools of the chat template", "tools")
    prompt_ids: Any = known_as("tokens before the answer", "prompt_ids", "prompt_tokens", "prompt_token_ids")
    completion_ids: Any = known_as(
        "tokens of the answer, with its stop token if the policy sampled one",
        "completion_ids", "completion_tokens", "completion_token_ids", "response_ids", "response_tokens",
        "response_token_ids",
    )  # fmt: skip
    tokens: Any = known_as("tokens of prompt and answer", "tokens", "token_ids", "input_ids")
    mask: Any = known_as(
        "1 for each token that the policy sampled, 0 for others, such as outputs of tools: of all tokens, or of the answer",
        "mask", "loss_mask", "completion_mask", "response_mask",
    )  # fmt: skip
    response_length: Any = known_as("number of the last of `tokens` that are the answer", "response_length")
    logprobs: Any = known_as(
        "log-probability of each sampled token in the policy that sampled it",
        "logprobs", "log_probs", "old_log_probs", "old_logprobs", "rollout_log_probs", "sampling_logprobs",
    )  # fmt: skip
    ref_logprobs: Any = known_as(
        "the same in a reference or teacher", "ref_logprobs", "ref_log_probs", "teacher_logprobs", "teacher_log_probs"
    )
    reward: Any = known_as("a number", "reward", "rewards")
    advantage: Any = known_as("a number, or one for each token", "advantage", "advantages")
    group: Any = known_as(
        "answers to one prompt have equal values; without it, rows that follow each other with equal prompts are a group",
        "group", "group_id", "group_index", "prompt_idx",
    )  # fmt: skip
    step: Any = known_as("part of the group's name, if a file has several steps of a training", "step")
    rollout: Any = known_as("rows of a group with equal values are parts of one answer", "rollout", "rollout_id")
    temperature: Any = known_as(
        "divided the sampler's logits (1): a number, or one for each token", "temperature", "temperatures"
    )
    finish_reason: Any = known_as(
        "a text that was cut (`length`, `truncated`) is refused, because its stop token would be trained",
        "finish_reason", "status",
    )  # fmt: skip
    policy_version: Any = known_as("harmless", "policy_version", "policy_versions")
    model_input: Any = known_as("Tinker's tokens but the last", "model_input")
    loss_fn_inputs: Any = known_as(
        "Tinker's `target_tokens`, `logprobs`, `advantages` and `mask` or `weights`, each beside the token before its own",
        "loss_fn_inputs",
    )  # fmt: skip
    lost: ClassVar = {**MEDIA, "weight": "write mask", "weights": "write mask"}


if __name__ == "__main__":
    print(table_of({"row": Rollout}))  # noqa: T201
