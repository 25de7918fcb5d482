"""Tokenizers of small folders, conversations, and the texts of their targets."""

import json
import re
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from recipe_utils.text import folder_tokenizer

CONTROL = re.compile(
    r"<\|[^<>|\s'\"]+\|>|<\uff5c[^\uff5c]+\uff5c>|<\|\w+>|<\w+\|>|</?(?:think|s|tool_\w+)>|<\w+_of_\w+>"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    + CHATML.replace("<|im_end|>\n' }}", "' }}{% for c in m.tool_calls %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{{ '<|im_end|>\n' }}")
)  # fmt: skip
"""Also prints tools and tool calls."""
THINKS_LAST = (
    "{% set ns = namespace(last=0, seen=false) %}{% for m in messages if m.role == 'user' %}{% set ns.last = m.content %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and ns.seen %}"
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% if m.content == ns.last %}{% set ns.seen = true %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Prints thinking behind the last turn of the user alone, as Qwen3's template does."""


@cache
def byte_pairs():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["user assistant\n\nIt is sunny, it is 4.\n\n"] * 9, trainer)
    return tokenizer.to_str()


def tokenizer_of(folder, template, stops=("<|im_end|>",), **options):
    """Returns a tokenizer of a folder with byte pairs, and with the control tokens of a template."""
    inner = Tokenizer.from_str(byte_pairs())
    inner.decoder = decoders.ByteLevel()
    names = dict.fromkeys([*stops, *CONTROL.findall(template or ""), "<bos>"])
    for name in names:
        token = AddedToken(name, normalized=False, special=not re.search("think|tool_", name))
        (inner.add_special_tokens if token.special else inner.add_tokens)([token])
    folder.mkdir(exist_ok=True, parents=True)
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": stops[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = {"eos_token_id": [inner.token_to_id(stop) for stop in stops]}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder_tokenizer(str(folder), **options)


def say(role, content="", **more):
    return {"role": role, "content": content, **more}


def call(**arguments):
    return {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}


WEATHER = {"name": "weather", "description": "Weather.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}]


def trained(tokenizer, messages, tools=None, **options):
    """Returns the text of every run of targets."""
    tokens, mask = tokenizer.tokenize_messages(messages, tools=tools, **options)
    return runs_of(tokenizer, tokens, [not is_masked for is_masked in mask])


def runs_of(tokenizer, tokens, are_targets):
    texts, run = [], []
    for token, is_target in zip([*tokens, 0], [*are_targets, False], strict=True):
        if is_target:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return texts


def targets(tokenizer, sample, keys=("tokens", "labels")):
    """Returns the texts that are targets in a sample's labels."""
    tokens, labels = (list(sample[key]) for key in keys)
    assert all(label in (-100, token) for token, label in zip(tokens, labels, strict=True))
    return runs_of(tokenizer, tokens, [label != -100 for label in labels])
