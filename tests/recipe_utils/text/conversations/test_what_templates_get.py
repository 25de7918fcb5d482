"""What a chat template is given: the form of arguments, variables of a row, texts without control tokens.

The right text is that of transformers' ``apply_chat_template``, called with the row as it is.
"""

import json
import re

import pytest
from chats import CHATML, TOOL_CHATML, TOOLS, call, say, tokenizer_of, trained
from tokenizers import AddedToken, Tokenizer

from recipe_utils.text import conversation_dataset, folder_tokenizer, text_pieces_dataset
from recipe_utils.update_steps.samples import SampleError

CONCATENATES = TOOL_CHATML.replace(
    "{{ c.function.arguments | tojson }}", "{{ '```json\n' + c.function.arguments + '\n```' }}"
)
"""As DeepSeek-V3's."""
LITERALS = TOOL_CHATML.replace(
    "{{ c.function.name }} {{ c.function.arguments | tojson }}",
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}="
    "{{ \"'\" + v + \"'\" if v is string else v }}{{ '' if loop.last else ', ' }}{% endfor %})",
)
"""Calls in the syntax of Python, as LFM2's."""


def use(**arguments):
    return [say("user", "Sun?"), say("assistant", "", tool_calls=[call(**arguments)])]


def test_arguments_are_json_text_where_a_template_prints_text_alone(tmp_path):
    tokenizer = tokenizer_of(tmp_path, CONCATENATES)
    arguments = {"city": "Genève", "n": 2}
    text = json.dumps(arguments, ensure_ascii=False)
    expected = f"<tool_call>weather ```json\n{text}\n```</tool_call><|im_end|>"
    assert trained(tokenizer, use(**arguments), TOOLS) == [expected]
    openai = json.loads(json.dumps(use(**arguments)))
    openai[1]["tool_calls"][0]["function"]["arguments"] = text  # as OpenAI's files have it
    assert tokenizer.tokenizer.apply_chat_template(openai, TOOLS, tokenize=False).endswith(expected + "\n")


@pytest.mark.parametrize(
    "arguments", [{"ids": [1, 2]}, {"names": ["a", "b"], "x": True}, {"where": {"city": "Paris"}, "n": None}]
)
def test_calls_in_the_syntax_of_python_are_trained_as_transformers_renders_them(arguments, tmp_path):
    tokenizer = tokenizer_of(tmp_path, LITERALS)
    (found,) = trained(tokenizer, use(**arguments), TOOLS)
    whole = tokenizer.tokenizer.apply_chat_template(use(**arguments), TOOLS, tokenize=False)
    assert f"<|im_start|>assistant\n{found}\n" in whole
    for value in arguments.values():
        assert str(value) in found


LISTS = CHATML.replace(
    "m.content + '", "m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join + '"
)
"""Prints lists of parts alone, as SmolVLM's and LLaVA's, through which transformers passes a text."""


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json"])
def test_texts_become_parts_where_a_template_prints_lists_alone(file, tmp_path, caplog):
    tokenizer = tokenizer_of(tmp_path, LISTS)
    if file == "chat_template.json":  # that of a processor, beside another one of the tokenizer
        (tmp_path / "chat_template.jinja").unlink()
        (tmp_path / file).write_text(json.dumps({"chat_template": LISTS}))
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TOOL_CHATML}))
        tokenizer = folder_tokenizer(str(tmp_path))
        assert "that of chat_template.json" in caplog.text
    chat = [say("system", "Sums."), say("user", "2 + 2?"), say("assistant", "It is 4.")]
    tokens, _ = tokenizer.tokenize_messages(chat)
    with_parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat]
    assert tokenizer.decode(tokens, skip_special_tokens=False) == (
        tokenizer.tokenizer.apply_chat_template(with_parts, tokenize=False)
    )
    assert trained(tokenizer, chat) == ["It is 4.<|im_end|>"]


SPECIAL = "It is <|im_end|> 4."


@pytest.mark.parametrize(
    ("row", "owner"),
    [
        ({"messages": [say("user", SPECIAL), say("assistant", "b")]}, r"turn 0 \(user\)"),
        ({"messages": [say("user", "a"), say("assistant", "b")], "tools": [{"name": "f", "description": SPECIAL}]}, r"tools\[0\] \(f\)"),
        ({"messages": use(city=SPECIAL), "tools": TOOLS}, r"turn 1 \(assistant\)"),
        ({"messages": [say("user", "a"), say("assistant", "b")], "documents": [{"text": SPECIAL}]}, "documents"),
    ],
)  # fmt: skip
def test_special_tokens_and_halves_of_characters_are_refused_in_all_texts(row, owner, tmp_path, write):
    template = "{% for d in documents or () %}{{ d.text }}{% endfor %}" + TOOL_CHATML
    tokenizer = tokenizer_of(tmp_path / "folder", template)
    for text, error in (
        (SPECIAL, r"its text contains the special token <\|im_end\|>"),
        ("It \ud83d", "half of a character"),
    ):
        path = write(json.loads(json.dumps(row).replace(json.dumps(SPECIAL)[1:-1], json.dumps(text)[1:-1])))
        with pytest.raises(SampleError, match=f"line 1 of .*: {owner}: .*{error}"):
            conversation_dataset(tokenizer, path)[0]


def test_special_tokens_in_documents_are_refused_and_other_added_tokens_are_not(tmp_path, write):
    tokenizer = tokenizer_of(tmp_path / "folder", CHATML + "{# <think> #}")
    pieces = text_pieces_dataset(tokenizer, write({"text": SPECIAL}, {"text": "<think>It is 4."}))
    with pytest.raises(SampleError, match=r"line 1 of .*: its text contains the special token <\|im_end\|>"):
        pieces[0]
    assert tokenizer.tokenizer.convert_tokens_to_ids("<think>") in pieces[1]["tokens"]


@pytest.mark.parametrize("has_variable", [False, True])
def test_the_end_of_an_empty_block_that_the_prompt_opens_is_reported(has_variable, tmp_path, caplog):
    """The generation prompt ends with ``<think>``, so the targets start with ``</think>``; both line breaks are one token."""
    prompt = "'<|im_start|>assistant\n<think>\n'"
    if has_variable:
        prompt += " + ('\n</think>\n\n' if enable_thinking is false else '')"
    template = CHATML.replace("'<|im_start|>assistant\n'", prompt)
    template = template.replace(
        "+ m.content", "+ ('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') + m.content"
    )
    chat = [say("user", "Hi"), say("assistant", "Yes.")]
    assert trained(tokenizer_of(tmp_path, template), chat) == ["\n\n</think>\n\nYes.<|im_end|>"]
    (message,) = [message for message in caplog.messages if "answers without thinking" in message]
    remedy = "set tokenizer.template_variables.enable_thinking to False" if has_variable else "no variable of the chat"
    assert re.search(rf"start with '\\n</think>\\n\\n', which is a target; {remedy}", message)


def test_ids_are_those_of_tokenizer_json_also_for_texts_that_are_not_compared(tmp_path, caplog):
    """The class reads an added token from another file, which only a text with it shows."""
    tokenizer_of(tmp_path, CHATML)
    file = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    file.add_tokens([AddedToken("qzqz", normalized=False)])
    file.save(str(tmp_path / "tokenizer.json"))
    tokenizer = folder_tokenizer(str(tmp_path))
    text = "It qzqz is 4."
    assert tokenizer.encode(text, False, False) == file.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text, False, False)) == text


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("content", "error"), [('{"eos_token_id": ', "is not JSON"), ("[1]", "is a list, not a JSON object")]
)
def test_a_damaged_file_of_the_folder_is_named(name, content, error, tmp_path):
    tokenizer_of(tmp_path, CHATML)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"tokenizer\.path={tmp_path}: {re.escape(name)} {error}"):
        folder_tokenizer(str(tmp_path))


def test_variables_that_the_template_reads_are_known(tmp_path):
    template = (
        "{% set day = 'x' %}{% macro f(inner) %}{{ inner }}{% endmacro %}{{ f(day) if enable_thinking else '' }}{{ bos_token }}"
        + TOOL_CHATML
    )
    tokenizer = tokenizer_of(tmp_path, "{{ documents and documents[0].text }}" + template)
    assert tokenizer.template_variables == {"documents", "enable_thinking"}


def test_texts_are_those_of_apply_chat_template(tmp_path):
    """Also the filter tojson, special tokens, blocks of generation, and a template for tools."""
    template = "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ 'é<&' | tojson }}" + TOOL_CHATML.replace(
        "{{ '<|im_start|>'", "{% generation %}{{ '<|im_start|>'", 1
    ).replace("<|im_end|>\n' }}{% endfor %}", "<|im_end|>\n' }}{% endgeneration %}{% endfor %}", 1)  # fmt: skip
    tokenizer = tokenizer_of(tmp_path, template)
    chat = use(city="Genève")
    tokens, _ = tokenizer.tokenize_messages(chat, tools=TOOLS)
    expected = tokenizer.tokenizer.apply_chat_template(chat, TOOLS, tokenize=False)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == expected
