"""Rows in the layouts of public sets and other tools: each key is used, compared, refused, or named as not read.

The rows are made up in their form. What is trained on is written here by hand.
"""

import json
import re
from pathlib import Path

import datasets
import pytest
from chats import CHATML, TOOL_CHATML, TOOLS, say, targets, tokenizer_of
from torchtune.datasets import alpaca_dataset, chat_dataset, instruct_dataset

from recipe_utils.preference import pair_dataset
from recipe_utils.text import conversation_dataset, text_pieces_dataset
from recipe_utils.text.conversations.file_rows import table
from recipe_utils.update_steps.samples import SampleError

USER, YES, NO = say("user", "2 + 2?"), say("assistant", "It is 4."), say("assistant", "It is 5.")
BRIEF = say("system", "Be brief.")
SHAREGPT = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "It is 4."}]
NULLS = dict.fromkeys(
    ("title", "category", "custom_instruction", "hash", "idx", "model_name", "topic", "views", "weight")
)
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
ARGUMENTS = {"city": "Paris"}


def text_of(*messages):
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def unread_of(caplog):
    lines = [re.search("rows.jsonl: not read: (.*)", message) for message in caplog.messages]
    return [line[1].split(", ") for line in lines if line]


LAYOUTS = {
    "UltraChat 200k": ({"prompt": "2 + 2?", "prompt_id": "ab", "messages": [USER, YES]}, [USER, YES], ["prompt_id"]),
    "Tulu 3": ({"id": "a", "messages": [USER, YES], "source": "b"}, [USER, YES], ["id", "source"]),
    "SmolTalk": ({"messages": [BRIEF, USER, YES], "source": "b"}, [BRIEF, USER, YES], ["source"]),
    "OpenHermes 2.5": ({**NULLS, "conversations": SHAREGPT, "system_prompt": None, "source": "a", "skip_prompt_formatting": False}, [USER, YES], ["source", "skip_prompt_formatting"]),
    "OpenHermes 2.5, system": ({**NULLS, "conversations": SHAREGPT, "system_prompt": "Be brief."}, [BRIEF, USER, YES], []),
    "Capybara": ({"source": "a", "conversation": [{"input": "2 + 2?", "output": "It is 4."}]}, [USER, YES], ["source"]),
    "LMSYS": ({"conversation_id": "a", "model": "b", "conversation": [USER, YES], "turn": 1, "language": "English",
               "openai_moderation": [{"flagged": False}], "redacted": False}, [USER, YES], ["conversation_id", "model", "turn", "language", "openai_moderation", "redacted"]),
    "WildChat": ({"conversation": [{**USER, "country": "Peru", "header": {"a": "b"}, "toxic": False}, {**YES, "turn_identifier": 7}], "toxic": False},
                 [USER, YES], ["toxic", "country", "header", "turn_identifier"]),
    "Nemotron": ({"input": [USER], "output": "It is 4.", "category": "math", "reasoning": "off", "system_prompt": "Be brief."}, [BRIEF, USER, YES], ["category", "reasoning"]),
    "Orca": ({"id": "a", "system_prompt": "Be brief.", "question": "2 + 2?", "response": "It is 4."}, [BRIEF, USER, YES], ["id"]),
    "Alpaca": ({"instruction": "Add.", "input": "2 + 2", "output": "It is 4.", "text": "Below"}, [say("user", "Add.\n2 + 2"), YES], ["text"]),
    "Alpaca without input": ({"instruction": "2 + 2?", "input": "", "output": "It is 4."}, [USER, YES], []),
    "Dolly": ({"instruction": "Add.", "context": "2 + 2", "response": "It is 4.", "category": "qa"}, [say("user", "Add.\n2 + 2"), YES], ["category"]),
    "TRL, messages": ({"prompt": [BRIEF, USER], "completion": [YES]}, [BRIEF, USER, YES], []),
    "a system beside messages": ({"system": "Be brief.", "messages": [USER, YES]}, [BRIEF, USER, YES], []),
    "a system that is the first turn": ({"system": "Be brief.", "messages": [BRIEF, USER, YES]}, [BRIEF, USER, YES], []),
    "messages, and an answer": ({"messages": [USER], "response": "It is 4."}, [USER, YES], []),
    "messages of a pair": ({"messages": [USER, YES], "chosen": [USER, YES], "rejected": [USER, NO]}, [USER, YES], ["chosen", "rejected"]),
    "an empty name beside a filled one": ({"messages": [{**USER, "content": "", "value": "2 + 2?"}, {"role": "assistant", "content": None, "value": "It is 4."}], "output": ""}, [USER, YES], []),
    "old roles": ({"messages": [{"role": "human", "content": "2 + 2?"}, {"role": "ai", "content": "It is 4."}]}, [USER, YES], []),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_public_sets_are_read_and_what_is_not_read_is_named_once(layout, read, write, tmp_path, caplog):
    row, messages, unread = LAYOUTS[layout]
    text, trained = read(row)
    assert text == text_of(*messages)
    assert trained == ["It is 4.<|im_end|>"]
    assert unread_of(caplog) == ([unread] if unread else [])
    caplog.clear()
    dataset = conversation_dataset(tokenizer_of(tmp_path / "folder", TOOL_CHATML), write(row, row))
    assert [len(sample["tokens"]) for sample in dataset] == [len(dataset[0]["tokens"])] * 2
    assert unread_of(caplog) == ([unread] if unread else [])


def test_turns_before_an_answer_of_its_own_key_are_not_trained(read):
    row = {"input": [USER, YES, say("user", "3 + 3?")], "output": "6"}
    assert read(row)[1] == ["6<|im_end|>"]
    assert read({"messages": [*row["input"], say("assistant", "6")]})[1] == ["It is 4.<|im_end|>", "6<|im_end|>"]


AS_TEXT = [
    ({"prompt": [USER], "completion": [YES]}, {"prompt", "completion"}), ({"prompt": "2 + 2?", "completion": [YES]}, {"completion"}),
    ({"input": [USER], "output": "It is 4."}, {"input"}), ({"prompt": [BRIEF, USER], "response": [YES]}, {"prompt"}),
    ({"prompt": SHAREGPT[:1], "completion": SHAREGPT[1:]}, {"prompt", "completion"}),
    ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, {"prompt", "chosen", "rejected"}), ({"prompt": "2 + 2?", "chosen": [YES], "rejected": [NO]}, {"chosen", "rejected"}),
]  # fmt: skip


@pytest.mark.parametrize(("row", "keys"), AS_TEXT)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_of_json_texts_of_messages_is_messages(row, keys, kind, write, tmp_path, caplog):
    """All texts of a column are, or none; the log says which."""
    of_rows = pair_dataset if "chosen" in row else conversation_dataset
    tokenizer = tokenizer_of(tmp_path / "folder", CHATML)
    texts = {key: json.dumps(value) if key in keys else value for key, value in row.items()}
    path, broken = (
        write(texts, texts, name=f"texts.{kind}"),
        write(texts, {**texts, min(keys): "It is 4."}, name="broken.jsonl"),
    )
    if kind == "parquet" and all(isinstance(value, str) for value in texts.values()):
        datasets.Dataset.from_list([texts, texts]).to_parquet(path)
    expected = of_rows(tokenizer, write(row))[0]
    assert [*of_rows(tokenizer, path)] == [expected] * 2
    assert {*re.findall("JSON texts of (.*) are read as messages", caplog.text)} == keys
    assert of_rows(tokenizer, broken)[0] != expected
    assert f"JSON texts of {min(keys)} are read as texts (1 of 2 could be messages)" in caplog.text


def test_answers_that_are_json_because_it_was_asked_for_are_texts(write, tmp_path):
    tokenizer, answers = (
        tokenizer_of(tmp_path / "folder", CHATML),
        ([say("assistant", "x")], [{"role": "cook"}], {"a": 1}),
    )
    rows = [{"question": "As JSON?", "answer": json.dumps(answer)} for answer in answers]
    dataset = conversation_dataset(tokenizer, write(*rows))
    assert [targets(tokenizer, each) for each in dataset] == [[row["answer"] + "<|im_end|>"] for row in rows]
    (alone,) = conversation_dataset(tokenizer, write(rows[1], name="cook.jsonl"))
    assert targets(tokenizer, alone) == [rows[1]["answer"] + "<|im_end|>"]


def test_an_empty_answer_trains_its_stop_token(read):
    for row in (
        {"question": "2 + 2?", "answer": ""},
        {"messages": [USER, say("assistant", "")]},
        {"prompt": [USER], "completion": ""},
    ):
        assert read(row) == (text_of(USER, say("assistant", "")), ["<|im_end|>"])


def test_answers_that_are_calls_are_calls_beside_tools_alone(read):
    row = {"id": 1, "query": "Sun?", "answers": json.dumps([CALL]), "tools": json.dumps(TOOLS)}
    assert read(row)[1] == ['<tool_call>weather {"city": "Paris"}</tool_call><|im_end|>']
    assert read({**row, "tools": []})[1] == [json.dumps([CALL]) + "<|im_end|>"]


@pytest.mark.parametrize(
    "call",
    [
        {"name": "weather", "args": ARGUMENTS, "id": "1", "type": "tool_call"},
        {"name": "weather", "parameters": ARGUMENTS},
        {"type": "tool_use", "id": "1", "name": "weather", "input": ARGUMENTS},
        {"type": "function", "function": {"name": "weather", "parameters": json.dumps(ARGUMENTS)}},
        {"function": {"name": "weather"}, "arguments": ARGUMENTS},
        {"name": "weather", "arguments": ARGUMENTS, "args": ARGUMENTS},
    ],
)
def test_calls_have_their_arguments_under_any_of_their_names(call, read):
    whole = '<tool_call>weather {"city": "Paris"}</tool_call><|im_end|>'
    answers = [say("assistant", "", tool_calls=[call]), {**say("assistant", None), "function_call": call}]
    if call.get("type") == "tool_use":
        answers.append(say("assistant", [call]))
    for answer in answers:
        assert read({"messages": [say("user", "Sun?"), answer], "functions": TOOLS})[1] == [whole]


@pytest.mark.parametrize(
    ("mark", "trains"),
    [({"train": False}, False), ({"trainable": False}, False), ({"loss": False}, False), ({"loss_mask": 0}, False),
     ({"train": True}, True), ({"loss_mask": 1, "weight": 1}, True), ({"training": False}, False)],
)  # fmt: skip
def test_marks_of_what_trains_are_weights(mark, trains, read):
    row = {"messages": [USER, {**YES, **mark}, say("user", "3 + 3?"), say("assistant", "6")]}
    assert read(row)[1] == ["It is 4.<|im_end|>"] * trains + ["6<|im_end|>"]


def test_the_last_turn_alone_weighs_1_whatever_its_weight(tmp_path, write):
    """Of ``train_on_last``; the weight of an earlier turn, which is not trained, changes nothing."""
    tokenizer = tokenizer_of(tmp_path / "folder", CHATML, train_on_last=True)
    last = {**say("assistant", "6"), "weight": 0}
    (sample,) = conversation_dataset(tokenizer, write({"messages": [USER, {**YES, "weight": 0.5}, USER, last]}))
    assert targets(tokenizer, sample) == ["6<|im_end|>"]
    assert {weight for weight, label in zip(sample["weights"], sample["labels"], strict=True) if label != -100} == {1.0}


@pytest.mark.parametrize(
    "row", [{"prompt": "2 + 2? ", "completion": "It is 4."}, {"prompt": "2 + 2?\n", "completion": "4"}]
)
@pytest.mark.parametrize("split_turns", [False, True, "shared"])
def test_a_prompt_and_a_completion_of_texts_are_trained_as_they_are(row, split_turns, tmp_path, write):
    """As TRL does: without a chat template, and with an end token."""
    tokenizer = tokenizer_of(tmp_path / "folder", CHATML)
    (sample,) = conversation_dataset(tokenizer, write(row), split_turns)
    sample = sample.get("sequences", [sample])[0]
    assert list(sample["tokens"]) == tokenizer.encode(row["prompt"] + row["completion"])
    assert targets(tokenizer, sample) == [row["completion"] + "<|im_end|>"]


TOOL_CALL = {"type": "function", "function": CALL}


@pytest.mark.parametrize(
    ("row", "error", "mend"),
    [
        ({"system": "Be long.", "messages": [BRIEF, USER, YES]}, "system='Be long.': the first turn has another text", {"system": ...}),
        ({"system": "a", "system_prompt": "b", "messages": [USER, YES]}, "system_prompt and system have different values", {"system_prompt": ...}),
        ({"messages": [USER, YES], "conversations": [USER, NO]}, "conversations and messages have different values", {"conversations": ...}),
        ({"prompt": "3 + 3?", "messages": [USER, YES]}, r"prompt='3 \+ 3\?': it is in no turn of messages, so it would be lost", {"prompt": ...}),
        ({"instruction": "Add.", "messages": [USER, YES]}, "instruction='Add.': it is in no turn", {"instruction": ...}),
        ({"messages": [USER, YES], "output": "It is 5."}, "output='It is 5.': it is in no turn", {"output": ...}),
        ({"messages": [USER, YES], "weight": 0.5}, "weight=0.5: it would be lost; write it in the messages, or set dataset.weight",
         {"weight": ..., "messages": [USER, {**YES, "weight": 0.5}]}),
        ({"messages": [USER, YES], "train": False}, 'train=False: it would be lost; write "weight": 0',
         {"train": ..., "messages": [USER, {**YES, "weight": 0}, USER, YES]}),
        ({"messages": [{**USER, "content": "<image>"}, YES], "images": ["a", "b"]}, "its messages have 1 places for the 2 images of its column", {"images": ...}),
        ({"messages": [USER, YES], "documents": [{"a": "b"}]}, "documents=.*: it would be lost; the chat template reads no documents",
         {"documents": ..., "messages": [say("system", "b"), USER, YES]}),
        ({"messages": [USER, YES], "history": [["a", "b"]]}, "history=.*: it would be lost",
         {"history": ..., "messages": [say("user", "a"), say("assistant", "b"), USER, YES]}),
        ({"question": "2 + 2?", "reasoning": "Two twos.", "answer": "4"}, "reasoning='Two twos.': it would be lost; write it as reasoning_content",
         {"reasoning": ...}),
        ({"messages": [USER, {**YES, "train_detail": [{"a": 1}]}]}, r"turn 1 \(assistant\): train_detail=.*: it would be lost",
         {"messages": [USER, {**YES, "weight": 1}]}),
        ({"messages": [USER, {**YES, "weight": 0.5, "train": True}]}, "train and weight have different values",
         {"messages": [USER, {**YES, "weight": 0.5}]}),
        ({"messages": [{**USER, "train": True}, YES]}, "train=True: only assistants train; remove it", {"messages": [USER, YES]}),
        ({"messages": [USER, {**YES, "images": ["a"]}]}, r"turn 1 \(assistant\): the chat template leaves its images out", {"messages": [USER, YES]}),
        ({"messages": [USER, say("assistant", "", tool_calls=[{"name": "f", "kwargs": {"a": 1}}])]}, "tool_calls: its kwargs would be lost",
         {"messages": [USER, say("assistant", "", tool_calls=[TOOL_CALL])]}),
        ({"messages": [USER, say("assistant", "", tool_calls=[{"name": "f", "args": {"a": 1}, "input": {"a": 2}}])]}, "input and args have different values",
         {"messages": [USER, say("assistant", "", tool_calls=[{"name": "f", "args": {"a": 1}}])]}),
        ({"message_id": "a", "parent_id": None, "text": "2 + 2?", "role": "prompter"}, "is one message of a tree", {"messages": [USER, YES]}),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, "is a pair; set dataset to a recipe_utils.preference.pair_dataset", None),
        ({"question": "2 + 2?", "context": {"title": ["A"]}, "answer": "4"}, "context={'title': .*: it is neither text nor a list of objects with role and content; write it as text",
         {"context": "A"}),
        ({"question": "2 + 2?", "input": ["p1", "p2"], "answer": "4"}, "input=.*: it is neither text nor a list of objects", {"input": "p1, p2"}),
        ({"question": "2 + 2?", "answer": 4}, "answer=4: it is neither text nor a list .*; write it as text", {"answer": "4"}),
        ({"text": "abc"}, "is a text; set dataset to a recipe_utils.text.text_pieces_dataset", None),
        ({"problem": "2 + 2?", "solution": "4"}, r"it has no messages \(its keys: problem, solution\)", {"question": "2 + 2?", "answer": "4"}),
        ({"messages": "[]"}, "its messages are empty; remove the line", None),
        ({"conversations": []}, "conversations is empty; remove the line", None),
        ({"messages": [USER, YES], "system": ["a"]}, r"system=\['a'\]: Input should be a valid string", {"system": "a"}),
    ],
)  # fmt: skip
def test_content_that_would_be_lost_is_refused_by_its_key_and_the_remedy_trains(row, error, mend, read):
    with pytest.raises(SampleError, match=rf"^line 1 of .*rows.jsonl: .*{error}"):
        read(row)
    if mend is not None:  # keys to write, and those to remove
        assert any(read({key: value for key, value in {**row, **mend}.items() if value is not ...})[1])


OF_FORM = [  # keys of a row, of its answer, of a part of it, and of a call
    ({"label": False}, {}, {}, {}), ({"label": 1}, {}, {}, {}), ({"kto_label": "False"}, {}, {}, {}),
    ({"supervised": [False] * 32}, {}, {}, {}), ({"mask_of_answer": [1, 1, 0, 1, 1]}, {}, {}, {}),
    ({}, {"thought": "hm"}, {}, {}), ({}, {"inner_thoughts": ["hm"]}, {}, {}), ({}, {"cot": "Two twos."}, {}, {}),
    ({}, {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}, {}, {}),
    ({}, {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}]}, {}, {}),
    ({}, {"scratch": "I add the two twos, one at a time."}, {}, {}), ({}, {"notes": {"plan": ["add"]}}, {}, {}),
    ({}, {"draft": "\u4e8c\u52a0\u4e8c\u7b49\u4e8e\u591a\u5c11\u5462\uff0c\u6211\u6765\u7b97\u4e00\u4e0b"}, {}, {}),
    ({}, {}, {"thought": "hm"}, {}), ({}, {}, {"plan": ["add"]}, {}),
    ({}, {}, {}, {"comment": "I need to know the weather."}), ({}, {}, {}, {"thought": "hm"}),
]  # fmt: skip


def with_keys(row, answer, part, call):
    content = [{"type": "text", "text": "It is 4.", **part}] if part else "It is 4."
    calls = {"tool_calls": [{**TOOL_CALL, **call}]} if call else {}
    return {
        "messages": [USER, {**say("assistant", content), **answer, **calls}],
        "tools": TOOLS if call else None,
        **row,
    }


@pytest.mark.parametrize("form", OF_FORM)
def test_a_key_that_nobody_reads_is_refused_by_its_form_until_it_is_ignored(form, read, write, tmp_path):
    row, (key,) = with_keys(*form), [key for keys in form for key in keys]
    if "supervised" in row:  # as many as there are tokens
        row["supervised"] = [False] * (
            len(
                conversation_dataset(tokenizer_of(tmp_path / "folder", TOOL_CHATML), write(with_keys({}, {}, {}, {})))[
                    0
                ]["tokens"]
            )
        )
    with pytest.raises(SampleError, match=rf"line 1 of .*{key}.* or set dataset.ignored_keys=\[{key}\]"):
        read(row)
    assert read(row, ignored_keys=[key]) == read(with_keys({}, {}, {}, {"index": 0} if form[3] else {}))


@pytest.mark.parametrize(
    "form",
    [({"label": "sums"}, {}, {}, {}), ({"toxic": False, "scores": [1, 0, 1], "correctness": [True, False]}, {}, {}, {}), ({"keep": [1, 1]}, {}, {}, {}),
     ({}, {"language": "English", "state": "New South Wales", "created": 7}, {}, {}), ({}, {"reasoning_effort": "high"}, {}, {}),
     ({}, {"annotations": [{"id": "a", "type": "b"}], "usage": {"total": 3, "by": [1, 2]}}, {}, {}),
     ({}, {}, {"cache_control": {"type": "ephemeral"}}, {}), ({}, {}, {}, {"index": 0})],
)  # fmt: skip
def test_a_key_of_any_other_form_is_named(form, read):
    assert read(with_keys(*form)) == read(with_keys({}, {}, {}, {"index": 0} if form[3] else {}))


DOCUMENTS = "{% if documents %}{{ '<|im_start|>system\n' + documents[0].text + '<|im_end|>\n' }}{% endif %}" + CHATML


def test_a_key_that_the_template_reads_as_a_variable_is_given_to_it(read, caplog):
    row = {"messages": [USER, YES], "documents": [{"text": "Sums."}], "topic": "a"}
    expected = text_of(say("system", "Sums."), USER, YES), ["It is 4.<|im_end|>"]
    assert read(row, DOCUMENTS) == expected
    assert unread_of(caplog) == [["topic"]]
    assert (
        read({"messages": [USER, YES], "chat_template_kwargs": {"documents": row["documents"]}}, DOCUMENTS) == expected
    )
    with pytest.raises(
        SampleError, match=r"documents=.*: texts of a prompt and answers are joined without the chat template"
    ):
        read({"prompt": "2 + 2?", "completion": "4", "documents": row["documents"]}, DOCUMENTS)
    thinks = DOCUMENTS.replace("documents[0].text", "'Sums.'").replace("documents", "enable_thinking")
    assert read({"messages": [USER, YES], "enable_thinking": False}, thinks) == (text_of(USER, YES), expected[1])
    with pytest.raises(SampleError, match="enable_thinking='False': a text, which counts as true; write false without"):
        read({"messages": [USER, YES], "enable_thinking": "False"}, thinks)
    with pytest.raises(SampleError, match="document: the chat template reads no such variable"):
        read({"messages": [USER, YES], "chat_template_kwargs": {"document": 1}}, DOCUMENTS)


def test_documents_name_what_is_not_read_and_refuse_weights(tmp_path, write, caplog):
    tokenizer = tokenizer_of(tmp_path / "folder", None)
    (piece,) = text_pieces_dataset(tokenizer, write({"text": "It is 4.", "url": "a", "title": None}))
    assert piece["tokens"] == tokenizer.encode("It is 4.")
    assert unread_of(caplog) == [["url"]]
    with pytest.raises(SampleError, match=r"line 1 of .*: weight=0.5: it would be lost"):
        text_pieces_dataset(tokenizer, write({"text": "It is 4.", "weight": 0.5}))[0]


# ---- Pairs ------------------------------------------------------------------------------------------


PAIRS = {
    "UltraFeedback": {"prompt": "2 + 2?", "prompt_id": "a", "chosen": [USER, YES], "rejected": [USER, NO], "messages": [USER, YES], "score_chosen": 8.0, "score_rejected": 3.0},
    "question": {"question": "2 + 2?", "chosen": "It is 4.", "rejected": "It is 5."},
    "LLaMA-Factory": {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "It is 5."}},
    "messages": {"messages": [USER], "chosen": YES, "rejected": NO},
    "messages with the answer": {"prompt": "2 + 2?", "messages": [USER, YES], "chosen": "It is 4.", "rejected": "It is 5."},
    "response": {"query": "2 + 2?", "response": "It is 4.", "chosen": [YES], "rejected": [NO]},
}  # fmt: skip
WITH_SYSTEM = {
    "Orca": {"system": "Be brief.", "question": "2 + 2?", "chosen": "It is 4.", "rejected": "It is 5."},
    "texts": {"system": "Be brief.", "prompt": "2 + 2?", "chosen": "It is 4.", "rejected": "It is 5."},
    "conversations": {"system_prompt": "Be brief.", "chosen": [USER, YES], "rejected": [USER, NO]},
    "both": {"system": "Be brief.", "chosen": [BRIEF, USER, YES], "rejected": [BRIEF, USER, NO]},
    "prompt": {"prompt": [BRIEF], "chosen": [USER, YES], "rejected": [USER, NO]},
}
ALPACA = {"instruction": "Add.", "input": "2 + 2", "chosen": "It is 4.", "rejected": "It is 5."}
CASES = [
    *((row, [USER]) for row in PAIRS.values()),
    *((row, [BRIEF, USER]) for row in WITH_SYSTEM.values()),
    (ALPACA, [say("user", "Add.\n2 + 2")]),
]


@pytest.mark.parametrize(("row", "before"), CASES, ids=[*PAIRS, *WITH_SYSTEM, "Alpaca"])
def test_pairs_train_answers_behind_all_that_precedes_them(row, before, write, tmp_path, caplog):
    tokenizer = tokenizer_of(tmp_path / "folder", CHATML)
    (pair,) = pair_dataset(tokenizer, write(row))
    for side, answer in (("chosen", YES), ("rejected", NO)):
        text = tokenizer.decode(pair[f"{side}_input_ids"], skip_special_tokens=False)
        assert text == text_of(*before, answer)
        assert targets(tokenizer, pair, (f"{side}_input_ids", f"{side}_labels")) == [answer["content"] + "<|im_end|>"]
    unread = [key for key in row if key.endswith("_id") or key.startswith("score")]
    assert unread_of(caplog) == ([unread] if unread else [])


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c", "answer": "d"}, "answer='d': it is in no turn of prompt"),
        ({"chosen": [USER, {**YES, "weight": 0.5}, USER, YES], "rejected": [USER, YES, USER, NO]}, "weight=0.5: the losses of pairs"),
        ({"question": "a", "context": ["b"], "chosen": "b", "rejected": "c"}, "context=.*: it is neither text nor a list of objects"),
        ({"question": "3 + 3?", "chosen": [USER, YES], "rejected": [USER, NO]}, "chosen begins with a turn of the user"),
        ({"prompt": [USER], "question": "3 + 3?", "chosen": YES, "rejected": NO}, r"question='3 \+ 3\?': it is in no turn of prompt"),
        ({"prompt": [USER], "completion": "6", "chosen": YES, "rejected": NO}, "completion='6': it is in no turn"),
        ({"system": "Be long.", "chosen": [BRIEF, USER, YES], "rejected": [BRIEF, USER, NO]}, "system='Be long.'"),
        ({"prompt": [{**USER, "content": "<image>"}], "chosen": YES, "rejected": NO, "images": ["a", "b"]}, "1 places for the 2 images of its column"),
        ({"prompt": [USER], "chosen": {**YES, "weight": 0.5}, "rejected": NO}, "chosen: weight=0.5: the losses of pairs and roll"),
    ],
)  # fmt: skip
def test_a_pair_without_a_part_of_its_content_is_refused(row, error, write, tmp_path):
    with pytest.raises(SampleError, match=error):
        pair_dataset(tokenizer_of(tmp_path / "folder", CHATML), write(row))[0]


# ---- torchtune's datasets ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"system": "Be brief.", "messages": [USER, YES]}, "leave its system text out"),
        ({"messages": [USER, YES], "tools": TOOLS}, "leave its tools out"),
        ({"messages": [USER, YES], "instruction": "Add."}, "instruction='Add.': it is in no turn of messages"),
        ({"messages": [USER, {**YES, "train": False}]}, "messages lose its train"),
        ({"messages": [USER, {**YES, "function_call": CALL}]}, "lose tool calls and thinking"),
        ({"messages": [USER, YES], "weight": 0.5}, "weight=0.5: it would be lost"),
    ],
)
@pytest.mark.parametrize("style", ["openai", "sharegpt"])
def test_a_row_that_torchtune_would_read_in_part_is_refused(style, row, error, write, tmp_path, caplog):
    tokenizer = tokenizer_of(tmp_path / "folder", CHATML)
    options = {"source": "json", "conversation_column": "messages", "conversation_style": style}
    names = {"user": "human", "assistant": "gpt"}

    def in_style(row):
        if style == "openai":
            return row
        turns = [{"from": names[m.pop("role")], "value": m.pop("content"), **m} for m in map(dict, row["messages"])]
        return {**row, "messages": turns}

    with pytest.raises(SampleError, match=error):
        chat_dataset(tokenizer, data_files=write(in_style(row)), **options)[0]
    whole = {"messages": [BRIEF, USER, YES] if style == "openai" else [USER, YES], "prompt": "2 + 2?", "topic": "a"}
    sample = chat_dataset(tokenizer, data_files=write(in_style(whole)), **options)[0]
    assert targets(tokenizer, sample) == ["It is 4.<|im_end|>"]
    assert "dataset: not read: topic" in caplog.messages


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"system": "Be brief."}, "torchtune's datasets leave its system text out"), ({"tools": TOOLS}, "leave its tools out"),
        ({"weight": 0.5}, "weight=0.5: it would be lost"), ({"context": "3 + 3"}, "context='3 . 3': it is in no turn"),
        ({"label": False}, "label=False: it would be lost"), ({"response": "It is 4.", "topic": "sums", "prompt": "2 + 2?"}, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("builder", [instruct_dataset, alpaca_dataset])
def test_torchtune_s_texts_refuse_what_they_would_drop(builder, more, error, tmp_path, write):
    """Their samples stay the same."""
    tokenizer = tokenizer_of(tmp_path / "folder", CHATML)
    question, own = ("input", {}) if builder is instruct_dataset else ("instruction", {"input": ""})
    row = {question: "2 + 2?", "output": "It is 4.", **own}
    options = {"source": "json", "split": "train"}
    (expected,) = builder(tokenizer, data_files=write(row), **options)
    path = write({**row, **more}, name="more.jsonl")
    if error is None:
        assert [*builder(tokenizer, data_files=path, **options)] == [expected]
    else:
        with pytest.raises(SampleError, match=f"{error}.*"):
            builder(tokenizer, data_files=path, **options)[0]


def test_the_page_has_the_table_of_the_schema():
    page = Path(__file__).parents[4] / "recipe_utils" / "text" / "README.md"
    assert table() in page.read_text()
