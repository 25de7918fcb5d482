"""Rewards of sampled texts, which configs under test name."""


def of_length(prompts, completions, target, **_):
    """Returns how near the number of tokens of an answer is to the row's ``target``."""
    assert len(prompts) == len(completions) == len(target)
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [-abs(len(text.split()) - wanted) for text, wanted in zip(texts, target, strict=True)]


async def of_ids(completions, completion_ids, trainer_state, prompts=None):
    """Returns the number of tokens of each answer, as TRL's rewards of length; None for answers to messages of one token."""
    assert (trainer_state.global_step, trainer_state.epoch) == (11, 3)
    is_chat = [not isinstance(prompt, str) for prompt in prompts]
    assert is_chat == [isinstance(completion, list) for completion in completions]
    return [None if one and len(ids) % 2 else len(ids) for one, ids in zip(is_chat, completion_ids, strict=True)]


def only_texts(completions, **_):
    return [1.0 if isinstance(completion, str) else None for completion in completions]


def of_answer(completions, answer):
    return [0.0] * len(completions)


def of_places(completions, /, **_):
    return [0.0] * len(completions)


def raising(prompts, completions, **_):
    raise KeyError("answer")


def too_few(prompts, completions, **_):
    return [0.0]


def not_finite(prompts, completions, **_):
    return [float("nan")] * len(prompts)


NOT_CALLABLE = 3
