"""Rollouts in files as tools write them are the same groups; what is missing, cut or in another place is named."""

import gzip
import json
import re
import tempfile
from pathlib import Path

import datasets
import numpy as np
import pytest
from chats import CHATML, TOOL_CHATML, TOOLS, say, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from image_folders import write_image_folder
from PIL import Image

from recipe_utils.cli.registry import recipe_path
from recipe_utils.plans.microbatching import MicrobatchSettings
from recipe_utils.policy import rollout_dataset
from recipe_utils.policy.rollout_keys import Rollout
from recipe_utils.policy.rollouts import check_whole_answers, shorten_equal_group
from recipe_utils.text.conversations.schema import table_of
from recipe_utils.text.conversations.tokenizer import FolderTokenizer
from recipe_utils.text.limits import RowBounds
from recipe_utils.text.reader import TextReader
from recipe_utils.update_steps.samples import SampleError, UnusedError

PROMPT, ANSWER, LOGPROBS = [1, 7], [9, 4, 2], [-0.25, -1.5, -2.0]
BESIDE = {"logprobs": [0, 0, *LOGPROBS], "advantages": [0, 0, 0.5, 0.5, 0.5]}
TENSOR = {"dtype": "float32", "shape": [4]}
ONE = {
    "trl": {"prompt_ids": PROMPT, "completion_ids": ANSWER, "logprobs": LOGPROBS, "advantage": 0.5},
    "trl samples": {
        "input_ids": [*PROMPT, *ANSWER], "completion_mask": [0, 0, 1, 1, 1], "old_log_probs": [0, 0, *LOGPROBS],
        "advantage": 0.5, "group_id": 3,
    },
    "openenv": {"prompt_ids": PROMPT, "response_ids": ANSWER, "logprobs": LOGPROBS, "loss_mask": [1, 1, 1], "advantage": 0.5},
    "prime-rl": {
        "token_ids": [*PROMPT, *ANSWER], "mask": [False, False, True, True, True], "logprobs": [0, 0, *LOGPROBS],
        "temperatures": [1.0] * 5, "advantages": BESIDE["advantages"], "env_name": "math",
    },
    "torchtitan": {
        "token_ids": [*PROMPT, *ANSWER], "loss_mask": [0, 0, 1, 1, 1], "logprobs": LOGPROBS, "advantage": [0.5] * 3,
        "policy_versions": [4, 4, 4], "group_id": "a",
    },
    "slime": {
        "tokens": [*PROMPT, *ANSWER], "response_length": 3, "loss_mask": [1, 1, 1], "rollout_log_probs": LOGPROBS,
        "advantage": 0.5, "group_index": 0, "rollout_id": 5, "status": "completed", "prompt": "1 7", "response": "9 4 2",
    },
    "open-instruct": {
        "prompt_tokens": PROMPT, "response_tokens": ANSWER, "logprobs": LOGPROBS, "advantage": 0.5, "step": 1,
        "prompt_idx": 3, "finish_reason": "stop",
    },
    "tinker": {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 7, 9, 4]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [7, 9, 4, 2], "dtype": "int64", "shape": [4]},
            "logprobs": {"data": [0, *LOGPROBS], **TENSOR}, "advantages": {"data": [0, 0.5, 0.5, 0.5], **TENSOR},
            "mask": {"data": [0, 1, 1, 1], **TENSOR},
        },
    },
}  # fmt: skip


class Tokenizer:
    max_seq_len = 8


def dataset_of(folder, *rows, name="rollouts.jsonl", tokenizer=Tokenizer, **options):
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return rollout_dataset(tokenizer, str(folder / name), **options)


def sequences_of(sample):
    """Returns the sequences of a sample, with what belongs to an answer beside each of its targets."""

    def beside(sequence, value):
        is_target = np.asarray(sequence["labels"]) != -100
        return (np.where(is_target, value, 0.0) if isinstance(value, float) else np.asarray(value)).tolist()

    return [{name: beside(s, value) for name, value in s.items()} for s in sample["sequences"]]


@pytest.mark.parametrize("form", ONE)
def test_a_rollout_as_each_tool_writes_it_is_the_same_sample(form, tmp_path):
    (sequence,) = sequences_of(dataset_of(tmp_path, ONE[form], advantage="given")[0])
    assert sequence["tokens"] == [*PROMPT, *ANSWER]
    assert sequence["labels"] == [-100, -100, *ANSWER]
    assert {name: sequence[name] for name in BESIDE} == BESIDE
    assert sequence["answers"] == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3])
    assert "rewards" not in sequence  # so that no mean reward is logged
    assert sequence.get("temperatures", BESIDE) in (BESIDE, [0, 0, 1, 1, 1])


REWARDED = [
    {"group": g, "prompt_ids": [1, g], "completion_ids": [9] * n, "logprobs": [-1.0] * n, "reward": r}
    for g, n, r in ((5, 2, 1), (6, 1, 1), (5, 3, 0), (6, 3, 1), (5, 1, 0.5))
]


def test_a_row_for_each_group_is_its_rows_and_groups_may_be_anywhere(tmp_path):
    (tmp_path / "table").mkdir()
    of_group = {g: [row for row in REWARDED if row["group"] == g] for g in (5, 6)}
    rows = [
        {
            "prompt_ids": [1, g], "completion_ids": [r["completion_ids"] for r in of], "rewards": [r["reward"] for r in of],
            "logprobs": [r["logprobs"] for r in of],
        }
        for g, of in of_group.items()
    ]  # fmt: skip
    neighbors = [{k: v for k, v in r.items() if k != "group"} for g in (5, 6) for r in of_group[g]]
    packed = dataset_of(tmp_path, *REWARDED, name="answers.jsonl.gz")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "table" / "groups.parquet")
    others = [dataset_of(tmp_path, *rows, name="groups.jsonl"), dataset_of(tmp_path, *neighbors, name="n.jsonl")]
    for other in (*others, rollout_dataset(Tokenizer, str(tmp_path / "table"))):
        assert len(packed) == len(other) == 2
        assert [*map(sequences_of, packed)] == [*map(sequences_of, other)]


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("mean", [0.5, -0.5, 0]),
        ("mean_std", [0.5 / 0.500001, -0.5 / 0.500001, 0]),  # of 1, 0 and 0.5 the standard deviation is 0.5, with 3 - 1
        ("leave_one_out", [0.75, -0.75, 0]),
        ("teacher", [0, 0, 0]),
    ],
)
def test_advantages_and_weights_are_those_of_the_group(advantage, expected, tmp_path):
    sequences = sequences_of(dataset_of(tmp_path, *REWARDED, advantage=advantage)[0])
    assert [s["advantages"][-1] for s in sequences] == pytest.approx(expected)
    assert [sum(s["rewards"]) for s in sequences] == pytest.approx([1, 0, 0.5])
    assert [sum(s["answers"]) for s in sequences] == pytest.approx([1, 1, 1])
    assert sum(sum(s["groups"]) for s in sequences) == pytest.approx(1)
    assert [s.get("teacher") is not None for s in sequences] == [advantage == "teacher"] * 3


def test_parts_of_one_rollout_are_one_answer_and_untrained_ones_are_none(tmp_path):
    rows = [{**REWARDED[0], "group": 1, "rollout": r, "reward": x, "mask": m} for r, x, m in (
        ("a", 1, [1, 1]), ("a", 1, [0, 1]), ("b", 0, [1, 1]), ("c", 0, [0, 0]),
    )]  # fmt: skip
    sample = dataset_of(tmp_path, *rows, advantage="mean")[0]
    sequences = sequences_of(sample)
    assert sample["answers"] == [0, 0, 1]
    assert [row.partition(" of ")[0] for row in sample["rows"]] == ["line 1", "line 2", "line 3"]
    assert [s["advantages"][-1] for s in sequences] == pytest.approx([2 / 3, 2 / 3, -1 / 3])  # c counts in the mean
    assert [sum(s["answers"]) for s in sequences] == pytest.approx([2 / 3, 1 / 3, 1])  # and not as an answer
    assert [sum(s["rewards"]) for s in sequences] == pytest.approx([2 / 3, 1 / 3, 0])
    assert sum(sum(s["masked"]) for s in sequences) == pytest.approx(1)
    rows[3]["reward"] = 5.0  # of the answer without a trained token
    sequences = sequences_of(dataset_of(tmp_path, *rows, advantage="mean")[0])
    assert sum(sum(s["rewards"]) for s in sequences) == pytest.approx(1 + 0 + 5)


@pytest.mark.parametrize("advantage", ["mean", "mean_std", "leave_one_out"])
@pytest.mark.parametrize(
    ("rewards", "signs"),
    [
        ([0.3, 0.425, 0.55], [-1, 0, 1]),  # 0.425 - 0.3 is not 0.55 - 0.425
        ([0.1 + 0.2, 0.3, 0.3], [0, 0, 0]),
        ([1e6 + 0.3, 1e6 + 0.1 + 0.2], [0, 0]),
        ([0.0, 0.0], [0, 0]),
        ([1e-9, 2e-9, 3e-9], [-1, 0, 1]),
        ([7.0, 7.0 + 1e-6], [-1, 1]),
    ],
)
def test_rewards_that_are_equal_but_for_rounding_have_the_advantage_0(rewards, signs, advantage, tmp_path):
    rows = [{**REWARDED[0], "reward": reward} for reward in rewards]
    sequences = sequences_of(dataset_of(tmp_path, *rows, advantage=advantage)[0])
    assert [float(np.sign(s["advantages"][-1])) for s in sequences] == signs
    assert sum(sum(s["equal_groups"]) for s in sequences) == pytest.approx(float(not any(signs)))


def test_an_equal_group_costs_two_tokens_and_keeps_its_counts(tmp_path):
    dataset = dataset_of(tmp_path, *REWARDED)
    (short,) = sequences_of(shorten_equal_group(dataset[1]))
    assert short["tokens"] == [1, 6]
    sums = {
        name: sum(short[name]) for name in ("answer_tokens", "answers", "groups", "rewards", "equal_groups", "measured")
    }
    assert sums == pytest.approx(
        {"answer_tokens": 4, "answers": 2, "groups": 1, "rewards": 2, "equal_groups": 1, "measured": 0}
    )
    assert len(shorten_equal_group(dataset[0])["sequences"]) == 3
    by_teacher = dataset_of(tmp_path, *REWARDED, advantage="teacher")
    assert len(shorten_equal_group(by_teacher[1])["sequences"]) == 2  # its advantages are not known yet


def test_an_answer_in_parts_is_refused_where_its_ratio_is_of_the_whole(tmp_path):
    """One row with the mask of both parts, the remedy, is taken."""
    parts = [{**REWARDED[0], "group": 1, "rollout": r, "reward": x} for r, x in (("a", 1), ("a", 1), ("b", 0))]
    text = r"^group 0: line 1 of .*: its answer has 2 parts, and loss.kind=sequence needs all"
    with pytest.raises(UnusedError, match=text):
        check_whole_answers(dataset_of(tmp_path, *parts)[0], "group 0")
    whole = {**parts[0], "completion_ids": [9, 9, 3, 9, 9], "mask": [1, 1, 0, 1, 1], "logprobs": [-1.0] * 4}
    group = dataset_of(tmp_path, whole, {**whole, "rollout": "b", "reward": 0})[0]
    assert check_whole_answers(group, "group 0") is group


def test_texts_are_tokenized_by_the_template_with_their_stop_token(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "model", CHATML)
    rows = [{"prompt": "one two", "completions": ["three", "four five"], "rewards": [1, 0]}]
    sequences = sequences_of(dataset_of(tmp_path, *rows, tokenizer=tokenizer, advantage="mean")[0])
    for sequence, answer in zip(sequences, rows[0]["completions"], strict=True):
        chat = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": answer}]
        tokens, mask = tokenizer.tokenize_messages(chat)
        assert sequence["tokens"] == tokens
        trained = [t for t, is_masked in zip(tokens, mask, strict=True) if not is_masked]
        assert [t for t in sequence["labels"] if t != -100] == trained
        assert trained[-1] in tokenizer.stop_tokens


@pytest.mark.parametrize(
    ("ending", "is_whole"),
    [
        *(({"finish_reason": reason}, True) for reason in ("stop", "STOP", "FinishReason.STOP", "tool_calls", "end-turn", None, {"type": "stop", "matched": 2})),
        *(({"finish_reason": reason}, False) for reason in ("length", "LENGTH", "abort", "max_tokens", "content_filter", "error", {"type": "length", "length": 64}, {"a": 1}, 1, True)),
        *(({"status": status}, status == "completed") for status in ("completed", "aborted", "failed", "truncated", "pending", 500)),
        ({"stop_reason": "max_tokens"}, False), ({"stop_reason": 7}, True), ({"finish_reason": "stop", "stop_reason": "</answer>"}, True),
        ({"finish_reason": "stop", "status": "completed"}, True), ({"finish_reason": "length", "status": "completed"}, False),
        ({"truncated": True}, False), ({"is_truncated": 1}, False), ({"truncated": False}, True), ({"truncated": "false"}, False),
        ({"was_cut": True}, False), ({"completed": False}, False), ({"is_done": True, "aborted_early": False}, True), ({"cut": 1}, True),
        ({"finish_reason": ["stop", "stop"]}, True), ({"finish_reasons": ["stop", {"type": "length"}]}, False), ({"truncated": [False, True]}, False),
    ],
)  # fmt: skip
def test_a_text_that_is_not_known_as_complete_is_refused(ending, is_whole, tmp_path):
    tokenizer = tokenizer_of(tmp_path / "model", CHATML)
    rows = [{"prompt": "one two", "completions": ["three", "four five"], "rewards": [1, 0], **ending}]
    if not any(isinstance(value, list) for value in ending.values()):
        rows = [
            {**rows[0], "completions": text} | {"rewards": reward}
            for text, reward in zip(rows[0]["completions"], (1, 0), strict=True)
        ]
    dataset = dataset_of(tmp_path, *rows, tokenizer=tokenizer)
    if is_whole:
        assert len(dataset[0]["sequences"]) == 2
    else:
        key = next(key for key in reversed(ending) if ending[key] != "completed")
        with pytest.raises(
            SampleError,
            match=f"line 1 of .*{key}=.*(; write token ids, remove it, or set dataset.ignored_keys=|set it to true or false)",
        ):
            dataset[0]
        ids = [{"prompt_ids": PROMPT, "completion_ids": ANSWER, "reward": reward, **ending} for reward in (1, 0)]
        if "list" not in str([*map(type, ending.values())]) and ending != {"truncated": "false"}:
            assert len(dataset_of(tmp_path, *ids)[0]["sequences"]) == 2  # their mask tells what is trained


MASK = [1, 0, 1]


@pytest.mark.parametrize("key", ["tool_mask", "env_mask"])
def test_masks_of_trl_are_read(key, tmp_path):
    rows = [{"prompt_ids": PROMPT, "completion_ids": ANSWER, key: MASK, "reward": reward} for reward in (1, 0)]
    assert [s["labels"] for s in sequences_of(dataset_of(tmp_path, *rows)[0])] == [[-100, -100, 9, -100, 2]] * 2


@pytest.mark.parametrize(
    "keys",
    [{"action_mask": MASK}, {"kept": ["1", "0", "1"]}, {"assistant_masks": [0, 0, *MASK]}, {"response_loss_mask": [True, False, True]}, {"x": [0, 0]},
     {"by": [[0, 0, 1], [1, 1, 1]]}, {"messages": 3, "loss_masks": [1, 0, 1.0]}],
)  # fmt: skip
def test_a_mask_under_any_name_is_refused_until_it_is_ignored(keys, tmp_path):
    """As many as the answer, all, or the trained tokens are."""
    rows = [{"prompt_ids": PROMPT, "completion_ids": ANSWER, "mask": MASK, "reward": reward} for reward in (1, 0)]
    (key,) = keys.keys() - {"messages"}
    with pytest.raises(
        SampleError, match=rf"line 1 of .*{key}: \d numbers 0 and 1.* or set dataset.ignored_keys=\[{key}\]"
    ):
        dataset_of(tmp_path, *({**row, **keys} for row in rows))[0]
    ignoring = dataset_of(tmp_path, *({**row, **keys} for row in rows), ignored_keys=[key])
    assert sequences_of(ignoring[0]) == sequences_of(dataset_of(tmp_path, *rows, name="own.jsonl")[0])


def test_padding_is_removed_with_what_stands_beside_it(tmp_path):
    """As verl writes it; prompts are padded on the left, answers on the right."""
    whole = [
        {"tokens": [5, 6, 9, 2], "mask": [0, 0, 1, 1], "logprobs": [-0.5, -0.25], "group": 0, "reward": r}
        for r in (1, 0)
    ]
    attention = [0, 0, 0, 1, 1, 1, 1, 0, 0]
    verl = {
        "input_ids": [0, 0, 0, 5, 6, 9, 2, 0, 0], "attention_mask": attention, "response_length": 4,
        "response_mask": [1, 1, 0, 0], "rollout_log_probs": [-0.5, -0.25, 0, 0],
    }  # fmt: skip
    parts = {"prompt_ids": [0, 0, 0, 5, 6], "completion_ids": [9, 2, 0, 0], "attention_mask": attention}
    forms = [
        verl,
        {**verl, "response_mask": [1] * 4},
        {**parts, "logprobs": [-0.5, -0.25]},
        {**parts, "logprobs": [0] * 5 + [-0.5, -0.25, 0, 0]},
        {**parts, "prompt_ids": [5, 6], "attention_mask": [1, 1, 0, 0], "logprobs": [-0.5, -0.25, -9, -9]},
    ]
    (expected,) = map(sequences_of, dataset_of(tmp_path, *whole))
    for form in forms:
        (found,) = map(
            sequences_of, dataset_of(tmp_path, *({**form, "group": 0, "reward": r} for r in (1, 0)), name="p.jsonl")
        )
        assert found == expected


def test_groups_are_of_a_file_and_have_one_prompt(tmp_path):
    def row(group, last, **keys):
        return {"group": group, "prompt_ids": [5, 6, last], "completion_ids": [9, 2], "reward": 1.0, **keys}

    a, b = (
        dataset_of(tmp_path, *(row(g, 7 + int(g) + more) for g in (0, 1, 1.0, "0")), name=f"{more}.jsonl")
        for more in (0, 5)
    )
    assert [len(both[g]["sequences"]) for both in (a, b) for g in range(2)] == [2] * 4
    both = rollout_dataset(Tokenizer, [str(tmp_path / "0.jsonl"), str(tmp_path / "5.jsonl")])
    assert [*map(sequences_of, both)] == [*map(sequences_of, a), *map(sequences_of, b)]
    for other in (row(0, 8), row(0, 8, iteration=2), {**row(0, 7), "prompt_ids": [5, 6]}, row(0, 8, rollout="b")):
        with pytest.raises(
            SampleError, match=r"line 1 of .*different prompts \(that of line 2 of .*c.jsonl is another\)"
        ):
            dataset_of(tmp_path, row(0, 7), other, name="c.jsonl")[0]
    agents = row(0, 7, rollout="a"), row(0, 9, rollout="a"), row(0, 9, rollout="b"), row(0, 7, rollout="b")
    assert len(dataset_of(tmp_path, *agents, name="d.jsonl")[0]["sequences"]) == 4


ANSWERS = st.lists(
    st.tuples(st.lists(st.integers(3, 9), max_size=3), st.sampled_from([0, 0.5, 1]), st.booleans(), st.booleans()),
    min_size=2, max_size=4,
)  # fmt: skip


@settings(max_examples=40)  # each writes two files
@given(ANSWERS, st.sampled_from(["prompt_ids", "tokens"]), st.booleans())
def test_a_group_in_a_row_is_its_answers_one_a_line(answers, form, has_logprobs):
    """Empty answers, masks and log-probabilities are values in both. A group without a trained token is a masked one."""

    def answer(tokens, reward, is_masked, is_cut):
        mask = {"mask": [0] * len(tokens)} if is_masked else {"mask": [1] * len(tokens)}
        ids = (
            {"completion_ids": tokens}
            if form == "prompt_ids"
            else {"tokens": [1, 7, *tokens], "response_length": len(tokens)}
        )
        logprobs = {"logprobs": [] if is_masked else [-0.5] * len(tokens)} if has_logprobs else {}
        return {**ids, **mask, **logprobs, "reward": reward, "finish_reason": "length" if is_cut else "stop"}

    of_answers = [answer(*each) for each in answers]
    prompt = {"prompt_ids": [1, 7]} if form == "prompt_ids" else {}
    group = {**prompt, **{key: [each[key] for each in of_answers] for key in of_answers[0]}}
    with tempfile.TemporaryDirectory() as folder:
        lines = dataset_of(Path(folder), *({**prompt, **each, "group": 0} for each in of_answers))
        (found,) = map(sequences_of, lines)
        (expected,) = map(sequences_of, dataset_of(Path(folder), group, name="group.jsonl"))
    assert found == expected
    trained = [tokens for tokens, _, is_masked, _ in answers if tokens and not is_masked]
    if trained:
        assert [[t for t in each["labels"] if t != -100] for each in found] == trained
    elif found:
        (each,) = found
        sums = {name: sum(each[name]) for name in ("masked", "rewards", "answers", "answer_tokens", "measured")}
        assert sums == {**dict.fromkeys(sums, 0), "masked": len(answers), "rewards": sum(each[1] for each in answers)}


def test_texts_have_the_system_and_the_tools_of_conversations(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "model", TOOL_CHATML)
    texts = {"prompt": "Hi", "completion": "It"}
    turns = {"prompt": [say("system", "Be brief."), say("user", "Hi")], "completion": [say("assistant", "It")]}
    forms = (
        {**texts, "system_prompt": "Be brief.", "functions": TOOLS},
        {**turns, "tools": TOOLS},
        {**turns, "available_tools": TOOLS, "system": "Be brief."},
    )
    one, *others = (
        [*map(sequences_of, dataset_of(tmp_path, *({**form, "reward": r} for r in (1, 0)), tokenizer=tokenizer))]
        for form in forms
    )
    assert others == [one] * 2
    text = tokenizer.decode(one[0][0]["tokens"], False)
    assert "weather" in text
    assert "Be brief." in text


def test_an_empty_text_trains_its_stop_token_and_one_of_a_group_or_a_line_is_the_same(tmp_path):
    tokenizer = tokenizer_of(tmp_path / "model", CHATML)
    texts, rewards = ["", "It"], [1, 0]
    lines = [
        {"prompt": "Hi", "completion": text, "reward": reward} for text, reward in zip(texts, rewards, strict=True)
    ]
    (found,) = map(sequences_of, dataset_of(tmp_path, *lines, tokenizer=tokenizer))
    group = {"prompt": "Hi", "completions": texts, "rewards": rewards}
    assert found == sequences_of(dataset_of(tmp_path, group, tokenizer=tokenizer, name="group.jsonl")[0])
    assert [tokenizer.decode([t for t in each["labels"] if t != -100], False) for each in found] == [
        "<|im_end|>",
        "It<|im_end|>",
    ]


def changed(**keys):
    return {key: value for key, value in {**REWARDED[0], **keys}.items() if value is not ...}


def error_of(folder, *rows, **options):
    """Returns the error of the first bad group of rows, which names the file."""
    with pytest.raises(SampleError, match=r"rollouts\.jsonl") as error:
        [*map(dataset_of(folder, *rows, **options).__getitem__, range(len(rows)))]
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("1 logprobs for 4 tokens, 2 of them the answer's, 2 trained; write one for each", [changed(logprobs=[-1.0])]),
        ("all but one: beside the token before its own", [changed(logprobs=[-1.0] * 3)]),
        ("own: token 1, the last before the answer, has -0.5, and token 3", [changed(logprobs=[0, -0.5, -0.25, 0])]),
        ("logprobs: token 3 has nan; remove the answer", [changed(logprobs=[-1.0, float("nan")])]),
        ("logprobs contains 0.5; logarithms of probabilities are at most 0", [changed(logprobs=[0.5, 0.25])]),
        ("it has a prompt without an answer", [changed(completion_ids=...)]),
        ("it has an answer without a prompt; write prompt_ids", [changed(prompt_ids=...)]),
        ("which of its 3 tokens are the answer is unknown", [changed(tokens=[1, 2, 3], completion_ids=..., prompt_ids=...)]),
        ("1 mask for 4 tokens, 2 of them the answer's", [changed(mask=[1])]),
        ("temperature contains 0, and divides logits; set it above 0 (greedy answers: 1)", [changed(temperature=0)]),
        ("reward='high': set it to a finite number", [changed(reward="high")]),
        ("reward=1e+308: its square is no number in fp32; scale rewards", [changed(reward=1e308), REWARDED[0]]),
        ("a group of one answer has nothing to compare it with", [REWARDED[0]]),
        ("it has 2 completion_ids, 1 reward", [changed(completion_ids=[[9], [8]], logprobs=..., reward=[1])]),
        ("it has no reward, and the first row has; score all answers, or", [REWARDED[0], changed(reward=...)]),
        ("it has reward, and the first row has none; score all answers, or", [changed(reward=None), changed()]),
        ("parts of rollout=1 have the rewards", [changed(rollout=1), changed(rollout=1, reward=0)]),
        ("it has 9 tokens, more than tokenizer.max_seq_len=8", [changed(completion_ids=[9] * 7, logprobs=[-1.0] * 7)]),
        ("logprobs=['-.5', '-.5']: it is no list of numbers", [changed(logprobs=["-.5", "-.5"])]),
        ("answer 1: it has no reward, and the first row has; score all answers", [changed(completion_ids=[[9], [8]], logprobs=..., reward=[1, None])]),
        ("logprobs=-2.0: it is no list of numbers; write one", [changed(logprobs=-2.0)]),
        ("the first token is trained, and no token before it", [changed(tokens=[9, 9], response_length=2, prompt_ids=..., completion_ids=...)]),
        ("answer 1: it has no logprobs, and the first row has; write it in all rows", [changed(completion_ids=[[9], [8]], logprobs=[[-1.0], None], reward=[1, 0])]),
        ("logprob: numbers of at most 0, one for each token, would be lost", [changed(logprobs=..., logprob=[-1.0, -0.5])]),
        ("sampling_params.temperature=0.5: it would be lost; write", [changed(sampling_params={"temperature": 0.5})]),
        ("video='a.mp4': it would be lost; only text is supported", [changed(video="a.mp4")]),
    ],
)  # fmt: skip
def test_bad_rows_are_named(text, rows, tmp_path):
    assert text in error_of(tmp_path, *rows)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group_size": 2}, "the group is not whole: 1 answers, dataset.group_size=2"),
        ({"advantage": "given"}, "it has no advantage, which dataset.advantage=given needs"),
    ],
)
def test_rows_that_a_key_does_not_fit_are_named(options, text, tmp_path):
    assert text in error_of(tmp_path, REWARDED[0], **options)


def test_too_long_answers_are_cut_by_a_key_and_prompts_never(tmp_path):
    long = changed(completion_ids=[9] * 7, logprobs=[-1.0] * 7, advantage=1)
    options = {"advantage": "given", "truncates_answers": True}
    (sequence,) = sequences_of(dataset_of(tmp_path, long, **options)[0])
    assert [len(sequence[name]) for name in ("tokens", "labels", "logprobs", "advantages")] == [8] * 4
    with pytest.raises(SampleError, match="8 of them the prompt's, or up to its last image, which are never cut"):
        dataset_of(tmp_path, changed(prompt_ids=[1] * 8, advantage=1), **options)[0]


def test_keys_that_are_not_read_are_named(one_process, tmp_path, caplog):
    dataset_of(tmp_path, *({**row, "advantage": 1, "env": 3} for row in REWARDED))
    assert "not read: env, advantage (dataset.advantage=mean_std)" in caplog.text


# ---- Images --------------------------------------------------------------------------------------

CAT = {"type": "image", "path": "cat.png"}
ASKED = [say("user", [CAT, {"type": "text", "text": "What?"}])]
OF_TEXTS = {"prompt": ASKED, "completions": ["A cat.", "Dog"], "rewards": [1, 0]}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Returns a folder of images, of which two have one size, and the tokenizer of a model that takes them."""
    folder = tmp_path_factory.mktemp("pictures")
    for seed, (name, height) in enumerate({"cat": 40, "cow": 40, "dog": 16}.items()):
        pixels = np.random.default_rng(seed).integers(0, 255, (height, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder, FolderTokenizer(str(write_image_folder(folder / "qwen2_vl", "qwen2_vl")))


def with_images(pictures, *rows):
    folder, tokenizer = pictures
    return dataset_of(folder, *rows, tokenizer=tokenizer, image_folder=str(folder))


def ids_of(sample, padding=0, **keys):
    """Yields a line of token ids for each of two answers, padded on both sides as verl pads them."""
    pads = [0] * padding
    for sequence, reward in zip(sample["sequences"], (1, 0), strict=True):
        tokens, mask = sequence["tokens"].tolist(), (sequence["labels"] >= 0).tolist()
        beside = {"tokens": tokens, "mask": mask, "attention_mask": [1] * len(tokens)}
        padded = {name: [*pads, *values, *pads] for name, values in beside.items()}
        yield {**padded, "images": ["cat.png"], "reward": reward, "group": 0, **keys}


def seen(sequence):
    """Returns what a model gets of an answer."""
    images = sequence["image_inputs"]
    tensors = [tensor for pixels in images.pixels for tensor in pixels.tensors.values()]
    arrays = [sequence["tokens"], sequence["labels"], images.positions, images.identities, *images.types.values()]
    return [each.tolist() for each in (*arrays, *tensors)], sequence["advantages"]


def test_a_rollout_with_an_image_is_the_same_sample_in_each_form_and_has_it_once(pictures):
    sample = with_images(pictures, OF_TEXTS)[0]
    lines = [
        {"completion": text, "reward": reward} for text, reward in zip(OF_TEXTS["completions"], (1, 0), strict=True)
    ]
    forms = {
        "TRL": [{"prompt": [say("user", "What?")], "image": "cat.png", **line} for line in lines],
        "messages": [
            {"messages": [*ASKED, say("assistant", line["completion"])], "group": 0, **line} for line in lines
        ],
        "ids": ids_of(sample),
        "ids beside turns": ids_of(sample, prompt=ASKED, images=None),
        "padded ids": ids_of(sample, padding=2),
    }
    for name, rows in forms.items():
        assert [*map(seen, with_images(pictures, *rows)[0]["sequences"])] == [*map(seen, sample["sequences"])], name
    packed = RowBounds(MicrobatchSettings("packed"))
    tree = TextReader(has_trees=True, drops_columns=True, bounds=packed).prepare(sample, "group")
    assert len(tree.images.pixels) == 1
    # Neighbors with one text and two images are two groups; an equal group has a stand-in of texts.
    dataset = with_images(
        pictures,
        *(
            {"prompt": "<image>?", "completion": "A", "image": f"{name}.png", "reward": 1}
            for name in ("cat", "cat", "dog", "dog")
        ),
    )
    assert len(dataset) == 2
    (short,) = shorten_equal_group(dataset[0])["sequences"]
    assert "image_inputs" not in short
    np.testing.assert_array_equal(short["tokens"], sample["sequences"][0]["tokens"][:2])


def test_rollouts_whose_images_do_not_fit_are_named(pictures, monkeypatch):
    two = {**OF_TEXTS, "prompt": "<image><image>What?", "images": ["cat.png", "dog.png"]}
    of_one, of_two = (with_images(pictures, row)[0]["sequences"][0]["tokens"].tolist() for row in (OF_TEXTS, two))
    ids = {"tokens": of_one, "response_length": 8, "images": ["cat.png"], "reward": 1}
    has = "its token ids have {} placeholders, and its {} images have {}, in this order"
    asked = {"prompt": "<image>?", "completion": "A", "group": 0, "reward": 1}
    for rows, text in (
        ([{**ids, "tokens": of_one[:8] + of_one[22:]}], has.format(1, 1, [15])),  # not expanded
        ([{**ids, "images": ["dog.png"]}], has.format(15, 1, [6])),
        ([{**ids, "images": None}], has.format(15, 0, [])),
        ([{**ids, "tokens": of_two, "images": ["dog.png", "cat.png"]}], has.format(21, 2, [6, 15])),
        ([{**ids, "response_length": 48}], "token 7 is of an image, and is trained; set its mask to 0"),
        ([{**asked, "image": "cat.png"}, {**asked, "image": "cow.png"}], "its group has answers to different prompts"),
        (
            [{**two, "prompt": "?", "completions": [[say("assistant", [CAT])], "B"], "images": None}],
            "it has an image, and is trained",
        ),
    ):
        with pytest.raises(SampleError, match=r"line 1 of .*rollouts\.jsonl: .*" + re.escape(text)):
            with_images(pictures, *rows)[0]
    monkeypatch.setattr(pictures[1], "max_seq_len", 16)
    with pytest.raises(
        SampleError, match=r"49 tokens, more than tokenizer.max_seq_len=16, 41 of them the prompt's, or up"
    ):
        with_images(pictures, ids)[0]


PAGE = recipe_path("full_policy_update_step").with_suffix(".md").read_text()


def test_the_page_has_the_table_of_keys():
    assert table_of({"row": Rollout}) in PAGE


def test_the_lines_of_the_page_are_rollouts(tmp_path):
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)
    one, other, group, agent, texts = map(json.loads, block.splitlines())
    tokenizer = tokenizer_of(tmp_path / "model", CHATML)
    for rows, advantage in (([one, other], "mean_std"), ([group], "mean"), ([agent], "given"), ([texts], "mean")):
        (sample,) = [*dataset_of(tmp_path, *rows, tokenizer=tokenizer, advantage=advantage)]
        assert len(sample["sequences"]) == (1 if advantage == "given" else 2)
        assert all(np.any(sequence["advantages"]) for sequence in sample["sequences"])
