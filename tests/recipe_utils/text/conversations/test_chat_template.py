"""Targets that chat templates determine: TRL's masks, torchtune's datasets, tool calls, and refusals."""

import json
import math
import os
import pickle
import re
import tempfile
from collections import Counter
from datetime import datetime
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
import trl
import yaml
from chats import CHATML, TOOL_CHATML, TOOLS, call, say, targets, tokenizer_of, trained
from distributed_runs import run_distributed
from forests import mask_of
from omegaconf import OmegaConf
from recipe_runs import DPO, SFT, keep_messages, run_recipe, section_of, slow, tiny_config
from torchtune.data import Message
from torchtune.datasets import (
    alpaca_dataset,
    instruct_dataset,
    preference_dataset,
    text_completion_dataset,
)

import recipe_utils.text
from recipe_utils.examples.stdlib_docs import docstring_tokenizer
from recipe_utils.files import CheckpointError
from recipe_utils.preference import pair_dataset
from recipe_utils.show_data.__main__ import report
from recipe_utils.text import conversation_dataset, folder_tokenizer, text_pieces_dataset
from recipe_utils.text.trees import merge
from recipe_utils.update_steps.samples import CheckedDataset, SampleError

MODULE = "recipe_utils.text"
TEMPLATES = Path(find_spec("trl").origin).with_name("chat_templates")
STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"], "deepseek": ["<\uff5cend▁of▁sentence\uff5c>"], "gptoss": ["<|return|>", "<|call|>"],
    "diffusion_gemma": ["<eos>", "<turn|>", "<|tool_response>"], "gemma": ["<eos>", "<end_of_turn>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"], "idefics3": ["<end_of_utterance>"],
    "llama3": ["<|end_of_text|>", "<|eot_id|>"], "llava_next": ["</s>"], "muse_glimmer": ["<|eot|>"],
    "phi3": ["<|endoftext|>", "<|assistant|>", "<|end|>"], "smolvlm": ["<end_of_utterance>"],
}  # fmt: skip
"""Tokens of the models' ``generation_config.json``; of others ``<|im_end|>``. The first is the tokenizer's EOS."""


TWO = [
    say("user", "2 + 2?"), say("assistant", "It is 4."), say("user", "3 + 3?"), say("assistant", "6, I think."),
]  # fmt: skip
THINK = [TWO[0], {**TWO[1], "reasoning_content": "Two."}, TWO[2], {**TWO[3], "reasoning_content": "Two."}]
USE = [
    say("user", "Weather in Paris?"), say("assistant", tool_calls=[call(city="Paris")]),
    say("tool", "sunny", name="weather", tool_call_id="c"), say("assistant", "It is sunny."),
]  # fmt: skip
CHATS = [
    (TWO[:2], None), ([say("system", "Be brief."), *TWO[:2]], None), (TWO, None), (THINK[:2], None), (THINK, None),
    (USE[:2], TOOLS), (USE, TOOLS), ([*USE, *TWO[2:]], TOOLS),
    ([USE[0], {**USE[1], "reasoning_content": "I look."}, *USE[2:]], TOOLS),
]  # fmt: skip
TABLE = {
    "cohere": "EEELLLXXX EEELLLXXX", "cohere2": "EEELLLXXX EEELLLXXX", "deepseek_r1_distill": "PPPLLLLLL OOOLLLLLL",
    "deepseekv3": "PPPLLLLLL PPPLLXXXX", "diffusion_gemma": "WWWWRHHHH WWWWRHHHH", "gemma": "WXWLLLXXX WXWLLLXXX",
    "gemma3": "WWWLLLXXX WWWLLLXXX", "glm4moe": "EEEEREEEE SSSSRSSSS", "gptoss": "PPRPRPPRR PPRPRPPRR",
    "idefics3": "WWWLLLLLL WWWLLLLLL", "lfm2": "WWWLLLLLL WWWLLLLLL", "lfm2_v2": "WWWLLWWWL WWWLLWWWL",
    "llama3": "EEELLLLLL EEELLLLLL", "llava_next": "EEELLLXXX EEELLLXXX", "muse_glimmer": "PPPPPPPPP PPPPPPPPP",
    "nemotron_3_5_lightning": "BBBBRBBBB BBBBRBBBB", "nemotron_3_nano": "BBBBRBBBB BBBBRBBBB",
    "nemotron_3_super": "BBBBRBBBB BBBBRBBBB", "nemotron_3_ultra": "BBBBRBBBB BBBBRBBBB",
    "phi3": "EEWLLLLLL EEWLLLLLL", "phi3_5": "EEWLLLLLL EEWLLLLLL", "qwen2_5": "BBBLLBBBL BBBLLBBBL",
    "qwen2_5_vl": "WWWLLLLLL WWWLLLLLL", "qwen3": "WWWWWWWWW WWRWRWRRW", "qwen3_5_nothink": "BBBBBBBBB BBRBRBBRB",
    "qwen3_5_think": "BBBBBBBBB BBRBRBBRB", "qwen3_6": "BBBBBBBBB BBRBRBBRB", "qwen3_8": "BBBBBBBBB BBBBBBBBB",
    "qwen3_instruct_2507": "WWWLLWWWL WWWLLWWWL", "qwen3_vl": "WWWLLWWWL WWWLLWWWL", "smolvlm": "WWWLLLLLL WWWLLLLLL",
}  # fmt: skip
"""Outcomes for CHATS, of TRL's training template and of the stock one; letters as in :func:`outcome`."""
FAST = ("qwen3", "gptoss", "gemma")
PROMPT = {"tokenize": False, "add_generation_prompt": True}


def outcome(tokenizer, trains_as, chat, tools):
    """Returns a letter: the difference of targets from those that TRL's training template marks.

    Equal; White space behind the stop token; Prompt, which TRL trains; Both; Header or stop token that the
    prompt lacks and TRL does not train. Refused: renders history otherwise (R), leaves a key out (L), no stop
    token (S). The template raises (X), or has another text than TRL's (O).
    """
    inner = tokenizer.tokenizer
    try:
        theirs = trains_as.apply_chat_template(chat, tools, return_dict=True, return_assistant_tokens_mask=True)
        inner.apply_chat_template(chat, tools)
    except Exception:
        return "X"
    try:
        tokens, mask = tokenizer.tokenize_messages(chat, tools=tools)
    except SampleError as error:
        letters = {"otherwise": "R", "out": "L", "not its name": "L", "no stop token": "S", "fails": "X"}
        (letter,) = [letter for word, letter in letters.items() if word in str(error)]
        return letter
    if tokens != theirs["input_ids"]:
        return "O"
    found = set()
    ours, theirs = [not is_masked for is_masked in mask], theirs["assistant_masks"]
    answers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    prompts = [inner.apply_chat_template(chat[:i], tools, **PROMPT)[-60:] for i in answers]
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a == b:
            continue
        following = next((j for j in range(i, len(ours)) if ours[j] and theirs[j]), i)
        last = max((j for j in range(i) if ours[j]), default=0)
        text = inner.decode(tokens[i:following])
        if a:
            assert tokens[i] in tokenizer.stop_tokens or (text and all(ours[i:following]))
            found.add("H")
        elif tokens[last] in tokenizer.stop_tokens and inner.decode(tokens[last + 1 : i + 1]).isspace():
            found.add("W")
        else:
            assert all(theirs[i:following])
            assert any(text and text in prompt for prompt in prompts)
            found.add("P")
    return {"": "E", "PW": "B", "HW": "H"}.get("".join(sorted(found)), "".join(sorted(found)))


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in TABLE])
def test_targets_are_those_of_trl_but_for_named_differences(name, tmp_path, monkeypatch):
    day = SimpleNamespace(now=lambda: datetime(2026, 1, 31))
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", day)
    found = [stops for start, stops in STOPS.items() if name.startswith(start)]
    stops = found[0] if found else ["<|im_end|>", "<|endoftext|>"]
    texts = [(TEMPLATES / f"{name}{which}.jinja").read_text() for which in ("_training", "")]
    both = [tokenizer_of(tmp_path / str(len(text)), text, stops, date="2026-01-31") for text in texts]
    chats = CHATS
    if name in ("llava_next", "idefics3", "smolvlm"):
        chats = [([in_blocks(message) for message in chat], tools) for chat, tools in CHATS]
    rows = ["".join(outcome(each, both[0].tokenizer, *chat) for chat in chats) for each in both]
    assert " ".join(rows) == TABLE[name]


def in_blocks(message):
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def test_the_table_has_every_pair_of_trl():
    pairs = {path.stem.removesuffix("_training") for path in TEMPLATES.glob("*_training.jinja")}
    assert set(TABLE) == pairs


@pytest.fixture
def qwen3(tmp_path):
    """Drops thinking of earlier turns, so that history is rendered otherwise."""
    return tokenizer_of(tmp_path / "qwen3", (TEMPLATES / "qwen3.jinja").read_text())


@pytest.fixture
def chatml(tmp_path):
    return tokenizer_of(tmp_path / "chatml", CHATML)


@pytest.mark.parametrize("split_turns", [False, True, "shared"])
def test_a_weight_of_a_message_is_that_of_its_targets(split_turns, chatml, write):
    chat = [TWO[0], {**TWO[1], "weight": 0.5}, *TWO[2:]]
    dataset = conversation_dataset(chatml, write({"messages": chat}), split_turns=split_turns)
    if split_turns == "shared":
        with pytest.raises(SampleError, match=r"weight=0.5: split_turns=shared keeps no weights"):
            dataset[0]
        return
    plain = conversation_dataset(chatml, write({"messages": TWO}, name="plain.jsonl"), split_turns=split_turns)
    for sample, other in zip(dataset, plain, strict=True):
        assert (sample["tokens"], sample["labels"]) == (other["tokens"], other["labels"])
        is_target = np.array(sample["labels"]) != -100
        of_targets = sample.get("weights", np.ones(len(is_target)))[is_target].tolist()
        first = targets(chatml, sample)[0] == "It is 4.<|im_end|>"
        assert of_targets[0] == (0.5 if first else 1)
        assert of_targets[-1] == (0.5 if first and split_turns else 1)


def test_a_conversation_dataset_keeps_tool_calls_and_weights(qwen3, write):
    """Arguments are OpenAI's JSON strings; a row's arguments do not get the keys of another row's."""
    as_json = {**USE[1], "tool_calls": [call(city="Paris")]}
    as_json["tool_calls"][0]["function"]["arguments"] = '{"city":"Paris"}'
    other = [USE[0], {**say("assistant"), "content": None, "tool_calls": [call(days=2)]}]
    weighted = [*CHATS[8][0][:3], {**USE[3], "weight": 0}]
    path = write(*({"messages": m, "tools": TOOLS} for m in ([USE[0], as_json], other, weighted)))
    dataset = conversation_dataset(qwen3, path)
    assert len(dataset) == 3
    for row in range(3):
        text = qwen3.decode(dataset[row]["tokens"], skip_special_tokens=False)
        arguments = re.findall(r'"arguments": (\{".*?\})\}', text)
        assert arguments == ['{"days": 2}' if row == 1 else '{"city": "Paris"}']
        assert "# Tools" in text
    (only,) = targets(qwen3, dataset[2])
    assert only == trained(qwen3, CHATS[8][0], TOOLS)[0]


def test_history_rendered_otherwise_is_refused_and_split_turns_trains_every_turn(qwen3, write):
    path = write({"messages": TWO}, {"messages": THINK})
    whole = CheckedDataset(conversation_dataset(qwen3, path), "dataset", lambda sample, _: sample)
    with pytest.raises(SampleError, match=r"sample 1 of dataset: line 2 of .*: turn 1 \(assistant\): .*split_turns"):
        whole[1]
    split = conversation_dataset(qwen3, path, split_turns=True)
    found = [targets(qwen3, split[i]) for i in range(len(split))]
    empty, two = "<think>\n\n</think>\n\n", "<think>\nTwo.\n</think>\n\n"
    ends = [f"{text}<|im_end|>" for text in ("It is 4.", "6, I think.")]
    assert found == [[f"{thought}{end}"] for thought in (empty, two) for end in ends]
    last = folder_tokenizer(str(qwen3._path), train_on_last=True)
    assert trained(last, THINK) == found[3]


def targets_behind_tokens(samples):
    return Counter(
        (tuple(each["tokens"][:i]), each["labels"][i])
        for each in samples
        for i in range(1, len(each["tokens"]))
        if each["labels"][i] != tiny.IGNORE
    )


@pytest.mark.parametrize("max_seq_len", [None, 60])
@pytest.mark.parametrize("name", ["qwen3", "chatml"])
def test_shared_turns_have_the_targets_of_split_turns(name, max_seq_len, request, write):
    tokenizer = request.getfixturevalue(name)
    tokenizer = folder_tokenizer(str(tokenizer._path), max_seq_len=max_seq_len)
    chats = [TWO, TWO * 3]
    if name == "qwen3":
        chats += [THINK, [*THINK, *THINK[:2]], CHATS[8][0]]
    path = write(*({"messages": chat} for chat in chats))
    shared = conversation_dataset(tokenizer, path, split_turns="shared")
    alone = iter(conversation_dataset(tokenizer, path, split_turns=True))
    assert shared.facts().has_sequences
    assert len(shared) == len(chats)
    for chat, sample in zip(chats, shared, strict=True):
        num_turns = sum(message["role"] == "assistant" for message in chat)
        turns = [next(alone) for _ in range(num_turns)]
        assert [{key: part[key].tolist() for key in part} for part in sample["sequences"]] == turns
        merged = merge(tiny.read(turns), None, tiny.IGNORE)
        if name == "chatml":
            assert merged.documents == [max(len(each["tokens"]) for each in turns)]
        row, found = tiny.laid_out([merged]), Counter()
        (tokens,), (labels,) = row.inputs["tokens"].tolist(), row.targets.labels.tolist()
        for q, seen in enumerate(mask_of(merged.documents)):
            if labels[q] != tiny.IGNORE:
                before = tuple(t for t, is_seen in zip(tokens, seen, strict=True) if is_seen)
                found[before, labels[q]] += 1
        assert found == targets_behind_tokens(turns)
    with pytest.raises(ValueError, match=r"^dataset\.split_turns=share: set it to True, False or"):
        conversation_dataset(tokenizer, path, split_turns="share")


def test_a_bad_turn_of_shared_turns_is_named_with_its_line(qwen3, write):
    path = write({"messages": TWO}, {"messages": [*TWO, say("user", "<|im_end|>"), TWO[3]]})
    shared = conversation_dataset(qwen3, path, split_turns="shared")
    with pytest.raises(SampleError, match=r"line 2 of .*: turn 4 \(user\): its text contains"):
        shared[1]


def test_turns_may_be_masked_and_inputs_trained(chatml):
    messages = [Message(role=each["role"], content=each["content"], masked=True) for each in TWO]
    assert trained(chatml, messages) == []
    messages[3].masked = False
    assert trained(chatml, messages) == ["6, I think.<|im_end|>"]
    messages[2].masked = False
    user = "<|im_start|>user\n3 + 3?<|im_end|>\n"
    assert trained(chatml, messages) == [user, "6, I think.<|im_end|>"]
    tokens, mask = chatml.tokenize_messages(messages)
    short = folder_tokenizer(str(chatml._path), max_seq_len=50)
    assert short.tokenize_messages(messages) == (tokens[:50], mask[:50])
    assert len(tokens) > 50


def test_a_report_marks_the_targets_of_conversations_and_builds_no_model(chatml, write, tmp_path):
    rows = [TWO, [*TWO[:3], {**TWO[3], "weight": 0}], [say("user", "No.")], [say("robot", "2")]]
    path, folder = write(*({"messages": row} for row in rows)), str(chatml._path)
    cfg = OmegaConf.create(tiny_config(
        tmp_path, shuffle=False, device="cuda",
        model={"_component_": "recipe_utils.models.causal_lm", "path": "/nowhere"},
        tokenizer={"_component_": f"{MODULE}.folder_tokenizer", "path": folder},
        dataset={"_component_": f"{MODULE}.conversation_dataset", "path": path},
    ))  # fmt: skip
    out = "\n".join(report(SFT, cfg, 4))
    for last in ("⟦6, I think.<|im_end|>⟧", "6, I think.<|im_end|>"):
        assert (
            "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n⟦It is 4.<|im_end|>⟧\n"
            f"<|im_start|>user\n3 + 3?<|im_end|>\n<|im_start|>assistant\n{last}\n" in out
        )
    assert "1 of 4 samples read: no target (dataset)\n" in out
    bad = r"bad, which ends the training; the first: sample 3 of dataset: line 4 of .*role='robot'"
    assert re.search(f"1 of 4 samples read: {bad}", out)
    cfg.on_bad_sample, cfg.tokenizer.max_seq_len = "skip", 9
    out = "\n".join(report(SFT, cfg, 0))
    assert "1 of 4 samples read: skipped; the first: sample 3 of dataset: line 4" in out
    assert "2 of 4 samples read: tokenizer.max_seq_len=9 tokens, probably truncated" in out


def test_the_start_does_not_depend_on_what_an_answer_begins_with(tmp_path):
    """The prompt opens a thought that no answer contains; the answer begins with a part of its text."""
    chat = [TWO[0], say("assistant", "[the 4]")]
    thought = CHATML.replace("assistant\n'", "assistant\n[thought]'")
    assert trained(tokenizer_of(tmp_path / "a", thought), chat) == ["[the 4]<|im_end|>"]
    plain = thought.replace("<|im_start|>", "").replace("\n", " ").replace("'<|im_end|> '", END)
    # The token " assistant" begins before the turn and ends in it.
    assert trained(tokenizer_of(tmp_path / "b", plain), chat) == [" assistant [the 4]<|im_end|>"]


END = "('<|im_end|>' if m.role == 'assistant' else ' ')"
MORE = "{% if loop.last and m.role == 'assistant' %}Bye.<|im_end|>{% endif %}{% endfor %}"
TAIL = "{% endfor %}{% if not add_generation_prompt %}{{ (messages | last).content | length }}{% endif %}"


@pytest.mark.parametrize(
    ("change", "chat", "error"),
    [
        (("{% endfor %}", TAIL), TWO[:2], r"turn 1 \(assistant\): its content changes tokens or targets"),
        (("+ m.content", "+ (m.content if messages[0].content | length < 8 else 'x')"), TWO[:2], "turn 0 .*its content"),
        (("+ m.content", "+ (m.content if m.role == 'assistant' else '')"), TWO[:2], r"turn 0 \(user\): .*content out"),
        (("+ m.content", "+ (m.content if loop.last else m.content | upper)"), TWO, "turn 1 .* renders it otherwise"),
        (("{% endfor %}", MORE), TWO, "turn 1 .* renders it otherwise"),
        (("{% for m", "{{ messages | length }}{% for m"), TWO, "turn 1 .* renders what precedes it otherwise"),
        (("<|im_end|>", "<|end|>"), TWO[:2], r"turn 1 .* no stop token .*generation_config\.json"),
        (("{% for m", "{{ raise_exception('no') }}{% for m"), TWO[:2], "chat template fails: no"),
        (("", ""), [TWO[0], say("assistant", "a<|im_end|>")], r"turn 1 .* special token <\|im_end\|>"),
        (("", ""), [TWO[0], {**TWO[1], "reasoning_content": "a"}], "leaves its reasoning_content out"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_determine_targets_is_refused(change, chat, error, tmp_path):
    tokenizer = tokenizer_of(tmp_path, CHATML.replace(*change))
    with pytest.raises(SampleError, match=error):
        tokenizer.tokenize_messages(chat)


def test_datasets_of_torchtune_train_answers(chatml, write):
    pair = {"instruction": "2 + 2?", "input": "", "output": "It is 4."}
    path = {"source": "json", "data_files": write(pair, name="a.json"), "split": "train"}
    columns = {"input": "instruction", "output": "output"}
    instructed = instruct_dataset(chatml, **path, column_map=columns)
    assert targets(chatml, instructed[0]) == ["It is 4.<|im_end|>"]
    user, answer = targets(chatml, alpaca_dataset(chatml, **path)[0])  # trains on its input
    assert (user[:17], answer) == ("<|im_start|>user\n", "It is 4.<|im_end|>")
    text = text_completion_dataset(chatml, **path, column="output")
    assert targets(chatml, text[0]) == ["It is 4.<|im_end|>"]


WRONG = say("assistant", "It is 5.")
LONGER = [*TWO[:3], say("assistant", "6; I guess")]
PAIRS = {
    "messages": {"prompt": TWO[:1], "chosen": TWO[1:2], "rejected": [WRONG]},
    "turns": {"chosen": TWO, "rejected": LONGER},
    "tools": {"prompt": USE[:1], "chosen": USE[1:2], "rejected": [say("assistant", "Rain.")], "tools": TOOLS},
    "thinking": {"prompt": TWO[:1], "chosen": THINK[1:2], "rejected": [WRONG]},
    "texts": {"prompt": "It is sun", "chosen": "ny, it is 4.", "rejected": "set.<|im_end|>"},
    "texts alone": {"chosen": "Human: 2? AI: It is 4.", "rejected": "Human: 2? AI: 4, I think."},
}  # fmt: skip


@pytest.fixture
def torchtunes(tmp_path):
    path = tmp_path / "docstrings.json"
    path.write_text(json.dumps([(f"What does `f{i}` do?", f"Returns {i} + 2.") for i in range(60)]))
    return docstring_tokenizer(str(tmp_path / "tokenizer.model"), str(path), 560)


def pair_of(tokenizer, write, row):
    return pair_dataset(tokenizer, write(row, name="pairs.jsonl"))[0]


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_are_those_of_trl(kind, qwen3, write):
    """But for the line break behind the end token, which TRL trains, too."""
    inner, args = qwen3.tokenizer, SimpleNamespace(dataset_num_proc=None, max_length=None)
    trainer = SimpleNamespace(_tokenizer=inner, _is_vision_dataset=False)
    row = json.loads(json.dumps(PAIRS[kind]))
    rows = datasets.Dataset.from_list([row])
    (theirs,) = trl.DPOTrainer._prepare_dataset(trainer, rows, inner, args, "train")
    found = pair_of(qwen3, write, row)
    for side in ("chosen", "rejected"):
        prompt, answer = theirs["prompt_ids"], theirs[f"{side}_ids"]
        num_behind = len(answer) - answer.index(qwen3.eos_id) - 1
        assert found[f"{side}_input_ids"] == prompt + answer
        kept = answer[: len(answer) - num_behind]
        assert found[f"{side}_labels"] == [-100] * len(prompt) + kept + [-100] * num_behind


@pytest.mark.parametrize(
    "row",
    [
        PAIRS["messages"],
        {"prompt": "2 + 2?", "chosen": TWO[1:2], "rejected": [WRONG]},
        {"prompt": TWO[:1], "chosen": TWO[:2], "rejected": [TWO[0], WRONG]},
        {"prompt": TWO[0], "chosen": TWO[1], "rejected": WRONG},
        {"prompt": TWO[:1], "chosen": "It is 4.", "rejected": "It is 5.", "tools": None},
        {"prompt": [], "chosen": TWO[:2], "rejected": [TWO[0], {**WRONG, "tool_calls": None}]},
    ],
)
def test_a_pair_with_its_own_prompt_is_the_joined_pair(row, chatml, torchtunes, write):
    joined = write({"chosen": TWO[:2], "rejected": [TWO[0], WRONG]}, name="joined.json")
    for tokenizer in (chatml, torchtunes):
        (expected,) = preference_dataset(tokenizer, source="json", data_files=joined)
        assert pair_of(tokenizer, write, row) == expected


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": TWO[:1], "chosen": TWO[:2]}, r"it has no rejected \(its keys: prompt, chosen\)"),
        ({"chosen": 4, "rejected": TWO[:2]}, "chosen=4: it is neither text nor a list of objects with role and content; write it as text"),
        ({"prompt": TWO[:1], "chosen": "4", "rejected": USE[1]}, "torchtune's tokenizers lose tool_calls"),
        (PAIRS["tools"], "take no tools; set tokenizer to a folder_tokenizer"),
    ],
)  # fmt: skip
def test_a_pair_that_is_not_certain_is_named(row, text, torchtunes, write):
    with pytest.raises(SampleError, match=rf"^line 1 of .*pairs.jsonl: .*{text}"):
        pair_of(torchtunes, write, row)


ALONE = {"chosen": TWO[:2], "rejected": [TWO[0], WRONG]}
ALSO = [{"system": "Be brief."}, {"question": "3 + 3?"}, {"tools": TOOLS}, {"weight": 2}]


@pytest.mark.parametrize("row", [*(PAIRS[kind] for kind in PAIRS if kind != "turns"), *(ALONE | more for more in ALSO)])
def test_a_pair_that_torchtune_would_train_in_part_is_refused(row, chatml, write):
    data = preference_dataset(chatml, source="json", data_files=write(row, name="a.json"))
    with pytest.raises(SampleError, match=r"set dataset to a recipe_utils.*pair_dataset$|weight=2: it would be lost"):
        data[0]
    whole = {"prompt": "2 + 2?", **ALONE, "tools": None}
    (pair,) = preference_dataset(chatml, source="json", data_files=write(whole, name="b.json"))
    assert targets(chatml, pair, ("rejected_input_ids", "rejected_labels")) == ["It is 5.<|im_end|>"]


def config_of(tokenizer, folder, dataset, **changes):
    model = {**tiny.MODEL, "vocab_size": tokenizer.vocab_size}
    (folder / "weights").mkdir()
    torch.save(tiny.tiny_model(model).state_dict(), folder / "weights" / "weights.pt")
    named = {"_component_": f"{MODULE}.folder_tokenizer", "path": str(tokenizer._path)}
    named["max_seq_len"] = changes.pop("max_seq_len", 60)
    config = tiny_config(folder, model=model, tokenizer=named, dataset=dataset, **changes)
    config["checkpointer"]["checkpoint_files"] = ["weights.pt"]
    return config


@pytest.mark.parametrize("component", ["recipe_utils.preference.pair_dataset", "torchtune.datasets.preference_dataset"])
def test_turns_before_the_answers_are_prompt_in_a_training(component, chatml, write, tmp_path):
    """SimPO's mean log-probabilities, computed from the rendered text, see the answers alone."""
    path = write(PAIRS["turns"], name="a.json")
    data = {"_component_": component, "path": path}
    if "torchtune" in component:
        data = {"_component_": component, "source": "json", "data_files": path}
    loss = {"_component_": "recipe_utils.preference.SimPOLoss", "beta": 2.0, "gamma": 0.5}
    changes = {"batch_size": 1, "gradient_accumulation_steps": 1, "loss": loss}
    config = config_of(chatml, tmp_path, data, **changes)
    (logged,) = run_recipe(config, DPO)
    means, model = [], tiny.tiny_model(config["model"])
    for text in ("6, I think.<|im_end|>", "6; I guess<|im_end|>"):
        prompt = chatml.tokenizer.apply_chat_template(TWO[:3], tokenize=False, add_generation_prompt=True)
        prompt, whole = (chatml.tokenizer.encode(each, add_special_tokens=False) for each in (prompt, prompt + text))
        log_probs = F.log_softmax(model(torch.tensor([whole]))[0], dim=-1)
        places = range(len(prompt), len(whole))
        means.append(sum(log_probs[i - 1, whole[i]].item() for i in places) / len(places))
    expected = math.log1p(math.exp(-(2 * means[0] - 2 * means[1] - 0.5)))
    assert logged["loss"] == pytest.approx(expected, rel=1e-5)


IDS = (range(10), range(10, 20))
PAGE = Path(recipe_utils.text.__file__).with_name("README.md")
DOCUMENTS = ["It is sunny, it is 4. " * 9, "", "It is 4.", "user assistant " * 20]


@pytest.mark.parametrize("most", [7, 8, 60, None])
def test_pieces_of_documents_train_all_of_a_file_once(most, chatml, write):
    tokenizer = folder_tokenizer(str(chatml._path), most)
    path = write(*({"body": text} for text in DOCUMENTS))
    pieces = [each["tokens"] for each in text_pieces_dataset(tokenizer, path, column="body")]
    expected = [tokenizer.encode(text) for text in DOCUMENTS]
    assert [*chain(*pieces)] == [*chain(*expected)]
    lengths = []
    for document in expected:
        num, rest = divmod(len(document), most or 1000)
        moves = rest == 1 and num > 0  # a last piece of one token would have no target
        lengths += [most] * (num - moves) + ([most - 1, 2] if moves else [rest] * (rest > 0))
    assert [*map(len, pieces)] == lengths
    (txt := Path(path).with_suffix(".txt")).write_text("\n".join(DOCUMENTS))
    whole = text_pieces_dataset(tokenizer, str(txt))
    assert [*chain(*(each["labels"] for each in whole))] == tokenizer.encode("\n".join(DOCUMENTS))


def test_an_epoch_of_pieces_has_every_token_and_a_cut_text_is_remarked(chatml, write, tmp_path):
    path = write(*({"text": text} for text in DOCUMENTS if text), {"text": None}, name="a.json")
    data = {"_component_": f"{MODULE}.text_pieces_dataset", "path": path}
    config = config_of(chatml, tmp_path, data, max_seq_len=8, on_bad_sample="skip")
    with keep_messages() as messages:
        logged = run_recipe(config)
    num_tokens = [len(chatml.encode(text)) for text in DOCUMENTS if text]
    num_pieces = sum(math.ceil(each / 8) for each in num_tokens)
    assert sum(each.get("num_tokens", 0) for each in logged) == sum(num_tokens) - num_pieces
    assert any("its text is no text (NoneType, its keys are text)" in line for line in messages)
    assert not any("truncated" in line for line in messages)
    stock = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "json"}
    path = write(*({"text": text} for text in DOCUMENTS), name="b.json")
    for packed, text in ((False, "2 of 4"), (True, " of ")):
        config["dataset"] = {**stock, "data_files": path, "packed": packed}
        with keep_messages() as messages:
            run_recipe({**config, "max_steps_per_epoch": 1})
        assert any(f"{text}" in line and "7 tokens (tokenizer.max_seq_len=8) with" in line for line in messages)


def test_a_share_of_the_rows_is_validation(chatml, write, tmp_path):
    """As the page shows it. A resume notices another fraction, and another file of a list."""
    paths = [write(*({"messages": [say("user", f"{i}?"), TWO[1]]} for i in ids), name=f"{ids[0]}.jsonl") for ids in IDS]
    (block,) = re.findall(r"^```yaml\n(.*?)^```", section_of(PAGE, "### A share for validation"), re.M | re.S)
    sides = yaml.safe_load(block.replace("chat.jsonl", f"[{', '.join(paths)}]").replace("0.02", "0.4"))
    config = config_of(chatml, tmp_path, sides.pop("dataset"), save_every_n_steps=1, max_steps_per_epoch=2)
    with keep_messages() as messages:
        run_recipe(config | sides | {"run_val_every_n_steps": 2})
    held_out = conversation_dataset(chatml, paths, split="validation", validation_fraction=0.4)
    assert 0 < len(held_out) < 20
    assert any(f"Data: {20 - len(held_out)} samples" in line for line in messages)
    resumed = config | {"resume_from_checkpoint": True, "max_steps_per_epoch": 3}
    for fraction in (0.4, 0.400001):
        config["dataset"]["validation_fraction"] = fraction
        if fraction == 0.4:
            run_recipe(resumed)
            continue
        with pytest.raises(CheckpointError, match="content_hash"):
            run_recipe(resumed)
    config["dataset"]["validation_fraction"] = 0.4
    Path(paths[1]).write_text(Path(paths[1]).read_text().replace("17?", "77?"))
    with pytest.raises(CheckpointError, match="content_hash"):
        run_recipe(resumed | {"max_steps_per_epoch": 4})


def run_recipe_keeping_stderr(config):
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            logged = run_recipe(config)
        finally:
            os.dup2(before, 2)
        file.seek(0)
        return logged, file.read().decode()


def test_a_recipe_trains_and_samples_with_it(chatml, write, tmp_path):
    """Workers are forked after the tokenizer was used."""
    data = {"_component_": f"{MODULE}.conversation_dataset", "path": write(*[{"messages": TWO}] * 8)}
    sampling = {"sample_prompts": ["2 + 2?"], "sample_every_n_steps": 1, "sample_max_new_tokens": 3}
    config = config_of(chatml, tmp_path, data, num_workers=2, **sampling)
    ((logged, text),) = run_distributed(run_recipe_keeping_stderr, 1, config)
    assert len([each for each in logged if "loss" in each]) == 2
    assert "epoch 1 of 1" in text
    assert "forked" not in text


def test_a_folder_that_does_not_do_is_refused(tmp_path, write):
    with pytest.raises(ValueError, match=r"^tokenizer\.path=.*no tokenizer\.json"):
        folder_tokenizer(str(tmp_path))
    base = tokenizer_of(tmp_path / "base", None)
    assert base.decode(base.encode("It is.")) == "It is."
    with pytest.raises(SampleError, match=r"tokenizer\.path=.*no chat template.*text_completion"):
        base({"messages": TWO})
    dated = "{{ strftime_now('%d %b %Y') }}" + CHATML
    with pytest.raises(ValueError, match=r"^tokenizer\.date=None: .*2\d\d\d-\d\d-\d\d"):
        tokenizer_of(tmp_path / "dated", dated)
    again = pickle.loads(pickle.dumps(tokenizer_of(tmp_path / "dated", dated, date="2026-01-31")))
    assert again.decode(again({"messages": TWO})["tokens"]).startswith("31 Jan 2026")
    (others := tmp_path / "dated" / "additional_chat_templates").mkdir()
    (others / "tool_use.jinja").write_text("Use {{ strftime_now('%Y') }}" + TOOL_CHATML)
    several = folder_tokenizer(str(tmp_path / "dated"), date="2026-01-31")
    for tools, start in ((None, "31 Jan 2026"), (TOOLS, "Use 2026")):
        sample = several({"messages": TWO, "tools": tools})
        assert several.decode(sample["tokens"]).startswith(start)
    thinks = CHATML.replace("assistant\n'", "assistant\n' if enable_thinking else 'x'")
    tokenizer_of(tmp_path / "thinks", thinks, template_variables={"enable_thinking": True})
    with pytest.raises(ValueError, match=r"^tokenizer\.template_variables\.enable_thinkin: "):
        tokenizer_of(tmp_path / "thinks", thinks, template_variables={"enable_thinkin": True})
    with pytest.raises(
        ValueError, match=r"template_variables\.tokenize: .*no such variable \(it reads: enable_thinking\)"
    ):
        tokenizer_of(tmp_path / "thinks", thinks, template_variables={"tokenize": True})
    with pytest.raises(ValueError, match="set tokenizer to a folder_tokenizer"):
        conversation_dataset(object(), write())
    texts = "messages=3: it is no list of objects", "it is not one JSON object per line", "byte 14 is not UTF-8"
    Path(write()).write_bytes(b'\n{"messages": 3}\n{"mess\n{"messages": "\xe9"}')
    for split_turns in (False, True, "shared"):
        dataset = conversation_dataset(base, str(tmp_path / "rows.jsonl"), split_turns)
        for index, text in enumerate(texts):
            with pytest.raises(SampleError, match=f"^line {index + 2} of .*: {text}") as error:
                dataset[index]
            causes = error.value.__cause__, error.value.__suppress_context__
            assert causes == (None, True), "the screen would show a traceback"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think></think>", "prompts end with '<think></think>', which this"),
        ("", "no generation prompt, so an answer's header is a target"),
    ],
)
def test_a_generation_prompt_that_training_does_not_show_is_reported_once(prompt, text, tmp_path, caplog):
    template = CHATML.replace("<|im_start|>assistant\n", prompt)
    tokenizer = tokenizer_of(tmp_path / "chat", template)
    for _ in range(2):
        tokenizer({"messages": TWO[:2]})
    assert [text in line for line in caplog.messages] == [True] * (text is not None)


def test_a_greeting_with_weight_0_is_context(chatml):
    chat = [{**say("assistant", "Hello"), "weight": 0}, say("user", "Who?"), say("assistant", "I.")]
    assert trained(chatml, chat) == ["I.<|im_end|>"]
