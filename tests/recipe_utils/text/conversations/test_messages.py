"""Chat files as tools write them: what is trained on is written here by hand, for a template without special cases."""

import json
import re
from functools import partial

import pytest
from chats import CHATML, THINKS_LAST, TOOL_CHATML, TOOLS, call, say, targets, tokenizer_of
from recipe_runs import slow
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from recipe_utils.policy import rollout_dataset
from recipe_utils.preference import pair_dataset
from recipe_utils.text import conversation_dataset, folder_tokenizer
from recipe_utils.update_steps.samples import SampleError


def text_of(*turns):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


def use(calls, result="3", content="", tools=TOOLS):
    """Returns a row with a call and its result."""
    messages = [say("user", "Hi"), say("assistant", content, tool_calls=calls), say("tool", result)]
    return {"messages": [*messages, say("assistant", "Yes.")], "tools": tools}


AS_JSON = '[{"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": {"type": "object", "properties": {}}}}]'
F = {"type": "function", "function": {"name": "f", "arguments": {"a": 2}}}
ODD = 'L\'été "x"\n\\ ⟪0:0⟫ '


@pytest.mark.parametrize(
    ("calls", "printed"),
    [
        ([call(a=2, b=3)], 'weather {"a": 2, "b": 3}'),
        ([call()], "weather {}"),
        ([call(a=True, b=None, c=[1, False, ""], d={"x": -1.5, "y": {}})], 'weather {"a": true, "b": null, "c": [1, false, ""], "d": {"x": -1.5, "y": {}}}'),
        ([call(a=ODD)], f'weather {{"a": {json.dumps(ODD, ensure_ascii=False)}}}'),
        ([{"function": {"name": "f", "arguments": '{"a": 2}'}}], 'f {"a": 2}'),
        ([{"id": 7, "index": 0, "function": {"name": "f", "arguments": ""}}], "f {}"),
        ([{"function": {"name": "f"}}], "f {}"),
        ([{"function": {"name": "f", "arguments": {}}, "arguments": {"a": 2}}], 'f {"a": 2}'),
        ([{"name": "f", "arguments": {"a": 2}}], 'f {"a": 2}'),
        (F, 'f {"a": 2}'),
        (json.dumps([F]), 'f {"a": 2}'),
        ([json.dumps(F)], 'f {"a": 2}'),
    ],
)  # fmt: skip
def test_tool_calls_train_as_they_are_printed_whatever_their_arguments_contain(calls, printed, read):
    whole = f"<tool_call>{printed}</tool_call>"
    for content in ("", None):
        text, trained = read(use(calls, content=content))
        assert text == text_of(
            ("system", AS_JSON), ("user", "Hi"), ("assistant", whole), ("tool", "3"), ("assistant", "Yes.")
        )  # fmt: skip
        assert trained == [f"{whole}<|im_end|>", "Yes.<|im_end|>"]


@pytest.mark.parametrize(
    ("tools", "printed"),
    [
        (json.dumps(TOOLS), AS_JSON), (TOOLS[0], AS_JSON), ([json.dumps(TOOLS[0])], AS_JSON), ([], None), ("", None),
        ("[]", None), (None, None), ("null", None), ("{}", None), ([{"name": "f"}], '[{"name": "f"}]'),
        ([{"type": "function", "function": {"name": "f", "strict": True}}], '[{"type": "function", "function": {"name": "f", "strict": true}}]'),
    ],
)  # fmt: skip
def test_tools_may_be_json_text_one_tool_or_nothing(tools, printed, read):
    before = [("system", printed)] if printed else []
    text, _ = read({"messages": [say("user", "Hi"), say("assistant", "Yes.")], "tools": tools})
    assert text == text_of(*before, ("user", "Hi"), ("assistant", "Yes."))


@pytest.mark.parametrize(
    ("result", "printed"),
    [
        (None, "null"), ({"t": "été"}, '{"t": "été"}'), ([1, [2]], "[1, [2]]"), (3.5, "3.5"), (True, "true"), ([], "[]"),
        ([{"t": 1}], '[{"t": 1}]'), ([{"type": "text", "text": "22 C"}], "22 C"),
    ],
)  # fmt: skip
def test_the_result_of_a_tool_is_json_text_unless_it_is_text(result, printed, read):
    text, _ = read(use([F], result))
    assert f"<|im_start|>tool\n{printed}<|im_end|>" in text


LISTS = CHATML.replace("+ m.content +", "+ (m.content | map(attribute='text') | join('|')) +")
QWEN = CHATML.replace("+ m.content +", "+ (m.content if m.content is string else '') +")


@pytest.mark.parametrize(("template", "joint"), [(CHATML, ""), (TOOL_CHATML, ""), (QWEN, ""), (LISTS, "|")])
def test_parts_are_joined_where_a_template_has_no_branch_for_lists(template, joint, read):
    parts = [{"type": "text", "text": "Hel"}, {"type": "output_text", "text": "lo!"}]
    roles = "system", "user", "assistant"
    text, trained = read({"messages": [say(role, parts) for role in roles]}, template)
    assert text == text_of(*((role, f"Hel{joint}lo!") for role in roles))
    assert trained == [f"Hel{joint}lo!<|im_end|>"]


def test_content_is_none_where_a_template_asks_for_it(read):
    """Some print calls only then; others have a branch for lists in messages of the user only."""
    calls = "{% for c in m.tool_calls if not m.content is string %}"
    template = TOOL_CHATML.replace("{% for c in m.tool_calls %}", calls).replace("m.content +", "(m.content or '') +")
    assert "<tool_call>f" in read(use([F], content=None), template)[0]
    lists = "m.content if m.content is string else m.content | map(attribute='text') | join('|')"
    some = CHATML.replace("m.content +", f"({lists} if m.role == 'user' else m.content) +")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content, user in ((parts, "ab"), ("ab", "a|b")):
        text, _ = read({"messages": [say("user", parts), say("assistant", content)]}, some)
        assert text == text_of(("user", user), ("assistant", "ab"))


def test_keys_without_a_value_are_as_absent(read):
    nothing = {"refusal": None, "function_call": None, "audio": None, "annotations": [], "tool_calls": None, "name": ""}
    chat = [{**say("user", "Hi"), **nothing}, {**say("assistant", "Yes."), **nothing, "weight": None}]
    assert read({"messages": chat, "id": 1}) == (text_of(("user", "Hi"), ("assistant", "Yes.")), ["Yes.<|im_end|>"])


def test_sharegpt_rows_are_read(read):
    chat = [("human", "Hi"), ("function_call", json.dumps(F["function"])), ("observation", "3"), ("gpt", "Yes.")]
    row = {"conversations": [{"from": who, "value": text} for who, text in chat], "system": "Be brief."}
    text, trained = read(row)
    whole = '<tool_call>f {"a": 2}</tool_call>'
    assert text == text_of(
        ("system", "Be brief."), ("user", "Hi"), ("assistant", whole), ("tool", "3"), ("assistant", "Yes.")
    )  # fmt: skip
    assert trained == [f"{whole}<|im_end|>", "Yes.<|im_end|>"]


@pytest.mark.parametrize("split_turns", [False, True, "shared"])
def test_a_greeting_and_the_turns_after_it_train(split_turns, tmp_path, write):
    tokenizer = tokenizer_of(tmp_path / "folder", CHATML)
    chat = [say("assistant", "Hello"), say("user", "Hi"), say("assistant", "Yes.")]
    found = []
    for sample in conversation_dataset(tokenizer, write({"messages": chat}), split_turns):
        for each in sample.get("sequences", [sample]):
            found += targets(tokenizer, each)
    assert found == ["Hello<|im_end|>", "Yes.<|im_end|>"]


def test_a_greeting_of_a_template_without_a_header_is_history(read, caplog):
    """Its prompt shows where answers start, but the first message is printed otherwise."""
    template = CHATML.replace("m.role + ", "('x' if loop.first else m.role) + ")
    chat = [say("assistant", "Hello"), say("user", "Hi"), say("assistant", "Yes.")]
    assert read({"messages": chat}, template)[1] == ["Yes.<|im_end|>"]
    assert ["first message, which no prompt precedes, is not trained" in m for m in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("row", "template", "error"),
    [
        (use("f(2)"), TOOL_CHATML, r"turn 1 \(assistant\): tool_calls: 'f\(2\)' is no call; write {\"type\": \"function\""),
        (use([{"arguments": {}}]), TOOL_CHATML, "turn 1 .*: tool_calls: .* is no call"),
        (use([{"function": {"name": "f", "arguments": '{"a": '}}]), TOOL_CHATML, "turn 1 .*: tool_calls: arguments=.*: it is no JSON object"),
        (use([F], tools="weather"), TOOL_CHATML, "tools: 'weather' is no tool; write"),
        (use([F]), CHATML, "turn 1 .*: the chat template leaves its tool_calls out"),
        (use([F]), TOOL_CHATML.replace("tojson }}</", "length }}</"), "turn 1 .*: the chat template leaves its tool_calls out"),
        (use([F]), TOOL_CHATML.replace("{{ c.function.name }}", "f"), "turn 1 .*: the chat template leaves its tool_calls out"),
        (use([F]), TOOL_CHATML.replace("c.function.arguments | tojson", "m.tool_calls"), "turn 1 .* prints its tool_calls as a list or mapping of Python; .*tojson"),
        (use([F]), TOOL_CHATML.replace("tools | tojson", "tools | string"), "prints tools as a list or mapping of Python"),
        (use([F]), TOOL_CHATML.replace("tools | tojson", "'tools'"), "leaves tools out"),
        ({"messages": [say("user", "Hi"), say("assistant", None, refusal="No.")]}, CHATML, "turn 1 .*: the chat template leaves its refusal out"),
        ({"messages": [say("user", {"a": 1}), say("assistant", "b")]}, CHATML, r"turn 0 \(user\): content={'a': 1}: it is no text"),
        ({"messages": [say("user", "Hi"), {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]}, CHATML,
         "turn 1 .*: it is a function_call, an item of OpenAI's Responses; write turns with role"),
        ({"messages": [{"role": "user", "parts": [{"text": "Hi"}]}]}, CHATML, "turn 0 .*; write the parts of Gemini's turns as content"),
        ({"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}, CHATML, "of Gemini's form; write messages"),
        ({"messages": [say("user", None)]}, CHATML, r"turn 0 \(user\): content=None: it has no text"),
        ({"messages": [say("user", 3)]}, CHATML, r"turn 0 \(user\): content=3: it is no text"),
        ({"messages": [say("user", [{"type": "image"}])]}, CHATML, "its messages have 1 places for the 0 images"),
        ({"messages": [say("alien", "x")]}, CHATML, r"turn 0 \(alien\): role='alien': set it to one of system"),
        ({"messages": [say("user", "x", weight=1)]}, CHATML, r"turn 0 \(user\): weight=1: only assistants train; remove it"),
        ({"messages": [say("assistant", "x", weight=-1)]}, CHATML, r"turn 0 \(assistant\): weight=-1: set it to 0 or 1"),
        ({"messages": [say("assistant", "x", weight="0.5")]}, CHATML, r"turn 0 \(assistant\): weight='0.5': set it"),
        ({"conversations": [{"from": "alien", "value": "Hi"}]}, CHATML, r"turn 0 \(alien\): from='alien': set it to one of system, developer, user"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_or_printed_is_named_with_its_turn(row, template, error, read):
    with pytest.raises(SampleError, match=error):
        read(row, template)


@pytest.mark.parametrize("content", ["m.content.split('</think>')[-1]", "m.content | upper"])
def test_text_that_a_template_cuts_or_changes_is_reported_once(content, read, caplog):
    chat = [say("user", "HI"), say("assistant", "<think>a</think>b")] * 2
    read({"messages": chat}, CHATML.replace("m.content", f"({content})"))
    assert [re.search(r"cuts or changes the content of a message \(assistant\), such as '<think>a", m) is not None
            for m in caplog.messages] == [True]  # fmt: skip


COUNTS = TOOL_CHATML.replace("{{ c.function.name }}", "{{ c.function.arguments | length }} {{ c.function.name }}")  # fmt: skip
LAST = CHATML.replace("m.content", "(m.content if loop.index0 < 4 else m.content | trim | upper)")


@pytest.mark.parametrize("order", [(0, 1, 2), slow((1, 2, 0)), (2, 1, 0)])
def test_a_sample_does_not_depend_on_what_came_before(order, tmp_path, write):
    """The template leaves arguments out unless they are text; each process reads in an order of its own."""
    template = TOOL_CHATML.replace(
        "c.function.arguments | tojson", "c.function.arguments.values() | select('string') | join"
    )
    path = write(*(use(calls) for calls in ([call(a="x")], [call(a=2)], [call()])))
    dataset = conversation_dataset(tokenizer_of(tmp_path / "folder", template), path)
    outcomes = {}
    for index in order:
        try:
            outcomes[index] = len(dataset[index]["tokens"])
        except SampleError as error:
            outcomes[index] = str(error)
    assert [isinstance(outcomes[index], int) for index in range(3)] == [True, False, True]
    assert re.search("line 2 of .* leaves its tool_calls out", outcomes[1])


def test_a_template_that_prints_more_than_values_is_checked_key_by_key(read):
    """It prints the number of arguments, which stays as it is, and the length of a text, which does not."""
    _, trained = read(use([call(a=2, b="x")]), COUNTS)
    assert trained[0] == '<tool_call>2 weather {"a": 2, "b": "x"}</tool_call><|im_end|>'
    own = CHATML.replace("m.content +", "m.content + (m.content | length | string) +")
    assert read({"messages": [say("user", "Hi"), say("assistant", "Yes.")]}, own)[1] == ["Yes.4<|im_end|>"]
    with pytest.raises(SampleError, match=r"turn 0 \(user\): its content changes tokens or targets"):
        read({"messages": [say("user", "Hi"), say("assistant", "Yes.")]},
             CHATML.replace("m.content +", "m.content + (messages[0].content | length | string) +"))  # fmt: skip


PHI3 = CHATML.replace("'<|im_start|>' + m.role + '\n'", "'<|' + m.role + '|>\n'").replace(
    "<|im_start|>assistant", "<|assistant|>"
)


@pytest.mark.parametrize("answer", ["It is 0", " It is 0", "\n It is", "  ", ""])
def test_targets_begin_behind_the_tokens_of_the_prompt(answer, tmp_path, write, caplog):
    """Control tokens of Phi-3 take the blanks behind them, those of an answer, too."""
    tokenizer_of(tmp_path / "folder", PHI3 + "{#<|user|><|assistant|>#}")
    file = tmp_path / "folder" / "tokenizer.json"
    settings = json.loads(file.read_text())
    for token in settings["added_tokens"]:
        token["rstrip"] = token["content"] != "<bos>"
    file.write_text(json.dumps(settings))
    # What another file says of blanks changes no ids.
    config = tmp_path / "folder" / "tokenizer_config.json"
    others = {token["id"]: {**token, "rstrip": False} for token in settings["added_tokens"]}
    config.write_text(json.dumps({**json.loads(config.read_text()), "added_tokens_decoder": others}))
    tokenizer = folder_tokenizer(str(tmp_path / "folder"))
    text = f"<|user|>\nHi<|im_end|>\n<|assistant|>\n{answer}<|im_end|>"
    ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_bos=False, add_eos=False, is_rendered=True) == ids
    chat = [say("user", "Hi"), say("assistant", answer)] * 2
    (sample,) = conversation_dataset(tokenizer, write({"messages": chat}))
    expected = [-100] * len(sample["tokens"])
    for end in (1, 3):
        prompt, whole = (tokenizer.tokenize_messages(chat[:num], add_eos=num > end)[0] for num in (end, end + 1))
        assert whole[: len(prompt)] == prompt == sample["tokens"][: len(prompt)]
        expected[len(prompt) : len(whole)] = whole[len(prompt) :]
    assert sample["labels"] == expected
    assert "begins in the generation prompt" not in caplog.text


def test_a_token_that_reaches_over_the_border_is_a_target_and_named_once(read, caplog):
    _, trained = read({"messages": [say("user", "Hi"), say("assistant", "\n\nIt is")] * 2})
    assert trained == ["\n\n\nIt is<|im_end|>"] * 2
    assert caplog.text.count("a target begins in the generation prompt, such as in '\\n\\n\\nIt is") == 1


A, B = (say("assistant", text, reasoning_content="hm") for text in ("4", "6"))
HI, MORE = say("user", "Hi"), say("user", "More?")


def test_each_remedy_for_earlier_thinking_trains(tmp_path, write):
    """A template that drops earlier thinking; the remedies are of the place where the conversation stands."""
    tokenizer, last = (tokenizer_of(tmp_path / "model", THINKS_LAST, train_on_last=each) for each in (False, True))
    whole = ["<think>hm</think>4<|im_end|>", "<think>hm</think>6<|im_end|>"]

    def refuse(dataset):
        with pytest.raises(SampleError) as error:
            dataset[0]
        return str(error.value).partition("otherwise once more follows; ")[2]

    def trained(dataset, keys=("tokens", "labels")):
        return [text for sample in dataset for text in targets(tokenizer, sample, keys)]

    both, followed = write({"messages": [HI, A, MORE, B]}), write({"messages": [HI, A, MORE]}, name="followed.jsonl")
    split = "use a conversation_dataset with split_turns=True"
    assert refuse(conversation_dataset(tokenizer, both)) == f"{split}, or set tokenizer.train_on_last=True"
    assert trained(conversation_dataset(tokenizer, both, split_turns=True)) == whole
    assert trained(conversation_dataset(last, both)) == whole[1:]
    assert refuse(conversation_dataset(tokenizer, followed)) == f"{split}, or remove the turns after it"
    assert trained(conversation_dataset(tokenizer, followed, split_turns=True)) == whole[:1]
    assert trained(conversation_dataset(tokenizer, write({"messages": [HI, A]}, name="removed.jsonl"))) == whole[:1]
    pair = {"prompt": [HI], "chosen": [A, MORE, B], "rejected": [B, MORE, A]}
    text = "end both sides with one turn of the assistant behind the turns that they share"
    assert refuse(pair_dataset(tokenizer, write(pair, name="pair.jsonl"))) == text
    shared = {"prompt": [HI, A, MORE], "chosen": [B], "rejected": [A]}
    dataset = pair_dataset(tokenizer, write(shared, name="shared.jsonl"))
    assert trained(dataset, ("chosen_input_ids", "chosen_labels")) == whole[1:]
    rollout = {"group": 0, "messages": [HI, A, MORE, B]}
    text = "write a row for each turn of the assistant, with what precedes it as prompt and one value of rollout, or token ids"
    rows = [{**rollout, "reward": reward} for reward in (0, 1)]
    assert refuse(rollout_dataset(tokenizer, write(*rows, name="rollouts.jsonl"))) == text
    turns = [({"prompt": [HI], "completion": [A]}), ({"prompt": [HI, A, MORE], "completion": [B]})]
    rows = [{"group": 0, **turn, "rollout": str(reward), "reward": reward} for reward in (0, 1) for turn in turns]
    (sample,) = rollout_dataset(tokenizer, write(*rows, name="turns.jsonl"))
    assert trained(sample["sequences"]) == whole * 2


KIMI = CHATML.replace("<|im_end|>\n' }}", "' }}{% for c in m.tool_calls %}<tool_call>{{ c.id }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}{{ '<|im_end|>\n' }}")  # fmt: skip


def test_a_name_counts_where_it_is_printed_in_the_id_of_its_call(read):
    """As by Kimi's templates. The remedy for another id is to write it in this form."""
    calls = [
        {**F, "id": f"functions.{name}:{i}", "function": {"name": name, "arguments": {"a": i}}}
        for i, name in enumerate(("weather", "f", "f"))
    ]
    row = use(calls, tools=None)
    printed = "".join(f"<tool_call>{c['id']} {json.dumps(c['function']['arguments'])}</tool_call>" for c in calls)
    assert read(row, KIMI)[1] == [f"{printed}<|im_end|>", "Yes.<|im_end|>"]
    for other in ("call_abc", "call_5f"):
        text = rf"turn 1 .*prints the id {other} of a call, and not its name f; write ids as functions.f:0"
        with pytest.raises(SampleError, match=text):
            read(use([*calls[:1], {**calls[1], "id": other}], tools=None), KIMI)
    with pytest.raises(SampleError, match=r"turn 1 .*: the chat template leaves its tool_calls out"):
        read(row, KIMI.replace("c.id", "loop.index"))


THINKS = TOOL_CHATML.replace("+ m.content +", "+ ('<t>' + m.reasoning_content + '</t>' if m.reasoning_content else '') + m.content +")  # fmt: skip


def test_anthropic_s_conversations_are_those_of_openai(read):
    use_part = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 2}}
    text, hm = (
        {"type": "text", "text": "So", "cache_control": {"type": "ephemeral"}},
        {"type": "thinking", "thinking": "hm", "signature": "x"},
    )
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": content}
        for content in ("3", [{"type": "text", "text": "4"}], None)
    ]
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
    row = {
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}], "tools": tools,
        "messages": [say("user", "Hi"), say("assistant", [hm, text, use_part]), say("user", [*results, {"type": "text", "text": "And?"}]), say("assistant", "Yes.")],
    }  # fmt: skip
    openai = {
        "tools": [{"name": "f", "parameters": {"type": "object", "properties": {}}}],
        "messages": [
            say("system", "Be brief."), say("user", "Hi"), say("assistant", "So", reasoning_content="hm", tool_calls=[F]),
            *(say("tool", content, tool_call_id="1") for content in ("3", "4", "")), say("user", "And?"), say("assistant", "Yes."),
        ],
    }  # fmt: skip
    assert read(row, THINKS) == read(openai, THINKS)
    assert read(row, THINKS)[1][0] == '<t>hm</t>So<tool_call>f {"a": 2}</tool_call><|im_end|>'
    late = say("assistant", [text, hm])
    beside, redacted = {**say("assistant", [hm, text]), "reasoning": "a"}, {"type": "redacted_thinking", "data": "x"}
    for parts, error in (
        (late, "only text and images are supported, not {'type': 'thinking'"),
        (beside, "thinking beside reasoning"),
        (say("assistant", [redacted, text]), "only text and images are supported"),
    ):
        with pytest.raises(SampleError, match=rf"turn 1 \(assistant\): .*{error}"):
            read({"messages": [say("user", "Hi"), parts]}, THINKS)


# ---- Cost of long conversations -------------------------------------------------------------------

LONG = [say(*turn) for i in range(24) for turn in (("user", f" {i} + 1? "), ("assistant", f"It is {i + 1}.\n"))]


@pytest.mark.parametrize("template", [CHATML, LAST])
def test_turns_between_equal_texts_start_and_end_as_if_each_was_rendered(template, tmp_path, write):
    """The oracle splits the whole text, which a template that changes its manner after four messages has, too."""
    tokenizer, path = tokenizer_of(tmp_path / "folder", template), write({"messages": LONG})
    text = tokenizer.tokenizer.apply_chat_template(LONG, tokenize=False)
    expected = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.S)
    assert len(expected) == 24
    whole = conversation_dataset(tokenizer, path)[0]
    shared = conversation_dataset(tokenizer, path, "shared")[0]["sequences"]
    assert targets(tokenizer, whole) == expected
    assert [targets(tokenizer, each) for each in shared] == [[each] for each in expected]
    assert [list(each["tokens"]) for each in shared] == [whole["tokens"][: len(each["tokens"])] for each in shared]


def test_each_turn_of_a_long_conversation_is_rendered_about_once_and_tokenized_twice(tmp_path, write):
    tokenizer, path = tokenizer_of(tmp_path / "folder", CHATML), write({"messages": LONG})
    shared, whole = (conversation_dataset(tokenizer, path, each) for each in ("shared", False))
    template, inner, num = tokenizer._template, tokenizer.tokenizer, [0, 0, 0]
    functions = tokenizer._encoded, template._render, inner.apply_chat_template

    def counted(which, function, *args, **kwargs):
        num[which] += len(args[0]) if which == 0 else 1
        return function(*args, **kwargs)

    num_characters = len(inner.apply_chat_template(LONG, tokenize=False))
    tokenizer._encoded, template._render, inner.apply_chat_template = (
        partial(counted, which, function) for which, function in enumerate(functions)
    )
    shared[0]
    assert num[0] <= 2 * num_characters  # in the whole, and at the end
    assert num[1] <= 24 + 2 + 8  # each turn; marks, of all and of one; prompts of the 1st, 2nd, 4th, ... turn
    assert num[2] == 0  # a conversation of roles and texts alone needs no copy
    num[:] = 0, 0, 0
    whole[0]
    assert num[0] == num_characters
    assert num[1] <= 2 + 2 * 7
    assert num[2] == 0


# ---- The tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_ids_are_those_of_tokenizer_json_whatever_its_class_rebuilds(name, tmp_path, caplog):
    tokenizer_of(tmp_path, CHATML)
    path, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    inner = Tokenizer.from_file(str(path))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    content = json.loads(inner.to_str())
    content["model"]["vocab"]["12"] = inner.get_vocab_size()
    content["model"]["merges"].append(["1", "2"])
    path.write_text(json.dumps(content))
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tokenizer_class": name}))
    tokenizer = folder_tokenizer(str(tmp_path))
    texts = ["It is 12.", "e\u0301 12 12", "12\t12\n\n 12"]
    file = Tokenizer.from_file(str(path))
    for text in texts:
        ids = file.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_bos=False, add_eos=False) == ids
    is_other = name != "PreTrainedTokenizerFast"
    assert [
        re.search(rf"{name}.*encodes .* otherwise than tokenizer.json, which is taken", m) is not None
        for m in caplog.messages
    ] == [True] * is_other
    of_class = folder_tokenizer(str(tmp_path), from_pretrained={})
    of_texts = [[each.encode(text) for text in texts] for each in (tokenizer, of_class)]
    assert (of_texts[0] != of_texts[1]) == is_other


@pytest.mark.parametrize(
    ("adds", "template", "config", "warnings"),
    [
        (True, CHATML, {}, ["the chat template does not print <bos>, which the tokenizer adds to other texts"]),
        (True, "{{ bos_token }}" + CHATML, {}, []),
        (False, "{{ bos_token }}" + CHATML, {}, ["texts start without <bos>, with which this model's texts start"]),
        (False, "{{ bos_token }}" + CHATML, {"add_bos_token": False}, []),
        (False, CHATML, {}, []),
    ],
)  # fmt: skip
def test_a_missing_bos_is_reported_once(adds, template, config, warnings, tmp_path, caplog):
    tokenizer_of(tmp_path, template)
    path, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    if adds:
        inner = Tokenizer.from_file(str(path))
        bos = [("<bos>", inner.token_to_id("<bos>"))]
        inner.post_processor = TemplateProcessing("<bos> $A", special_tokens=bos)
        inner.save(str(path))
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **config}))
    tokenizer = folder_tokenizer(str(tmp_path))
    for _ in range(2):
        tokenizer.encode("It is.")
        tokenizer({"messages": [say("user", "Hi"), say("assistant", "Yes.")]})
    assert [message.split(": ", 1)[1] for message in caplog.messages] == warnings


def test_an_empty_block_of_thinking_is_reported_with_the_variable_that_moves_it(read, caplog):
    block = "<think>\n\n</think>\n\n"
    answers = CHATML.replace("+ m.content", f"+ ('{block}' if m.role == 'assistant' else '') + m.content")
    without = answers.replace("assistant\n'", f"assistant\n' + ('{block}' if enable_thinking is false else '')")
    chat = {"messages": [say("user", "Hi"), say("assistant", "Yes.")]}
    for template in (answers, without):
        assert read(chat, template)[1] == [f"{block}Yes.<|im_end|>"]
    remedies = ("no variable of the chat template", "set tokenizer.template_variables.enable_thinking to False")
    for remedy, message in zip(remedies, caplog.messages, strict=True):
        assert re.search(r"start with '<think>.*which is a target; " + remedy, message)
