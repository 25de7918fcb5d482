"""Rewards of sampled texts, which configs under test name."""


def of_length(prompts, completions, target, **_):
    """Returns how near the number of tokens of an answer is to the row's ``target``."""
    assert len(prompts) == len(completions) == len(target)
    return [-abs(len(text.split()) - wanted) for text, wanted in zip(completions, target, strict=True)]


def raising(prompts, completions, **_):
    raise KeyError("answer")


def too_few(prompts, completions, **_):
    return [0.0]


def not_finite(prompts, completions, **_):
    return [float("nan")] * len(prompts)


NOT_CALLABLE = 3
