"""The rule of the embedded default of policy gradients: rewards of answers, advantages of tokens, held-out questions."""

import json

import pytest

from recipe_utils.examples.stdlib_docs import docstring_tokenizer
from recipe_utils.examples.word_counts.credits import main
from recipe_utils.examples.word_counts.questions import word_count_reward, write_prompts


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Remove all items from list.", 1),
        ("Remove all of the items now.", 0.5),
        ("Remove all items.", 0),
        ("remove all items from list.", 0),
        ("Remove all items from items.", 0),
        ("Remove all. Return list.", 0),
        ("Remove all items from list", 0),
        ("", 0),
    ],
)
def test_the_reward_counts_the_words_of_a_sentence(answer, reward):
    assert word_count_reward(["?"], [answer], [5]) == [reward]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder of docstrings, prompts and a tokenizer."""
    folder = tmp_path_factory.mktemp("word_counts")
    docstring_tokenizer(str(folder / "tokenizer.model"), str(folder / "docstrings.json"))
    write_prompts(folder, str(folder / "docstrings.json"))
    return folder


def test_held_out_prompts_are_of_other_docstrings(folder):
    train, held_out = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "prompts_val.jsonl")
    )
    assert len(train) > 1_500
    assert len(held_out) == 64
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert all(row["prompt"].endswith(f"Answer in {row['num_words']} words.") for row in (*train, *held_out))


def test_worse_answers_are_blamed_where_they_go_wrong(folder, tmp_path):
    tokenizer = docstring_tokenizer(str(folder / "tokenizer.model"))
    blamed = {
        "Return the name of file.": "Return the name of file.",  # the best one
        "Return the old name of it now.": " it now.",
        "Return the name.": ".",
        "return the name": "return the name",
    }
    encode = lambda text: tokenizer.encode(text, add_bos=False, add_eos=False)  # noqa: E731
    group = {
        "prompt_ids": encode("What does `x` do? Answer in 5 words."),
        "completion_ids": [[*encode(answer), tokenizer.eot_id] for answer in blamed],
        "rewards": [1.0, 0.0, 0.0, 0.0],
    }
    (tmp_path / "round_0001.jsonl").write_text(json.dumps(group) + "\n")
    main(str(tmp_path), str(tmp_path / "credits"), str(folder / "tokenizer.model"))
    row = json.loads((tmp_path / "credits" / "round_0001.jsonl").read_text())
    for tokens, advantages, text, expected in zip(
        row["completion_ids"], row["advantages"], blamed.values(), [1.5, -0.5, -0.5, -0.5], strict=True
    ):
        assert tokenizer.decode([token for token, each in zip(tokens, advantages, strict=True) if each]) == text
        assert [each for each in advantages if each] == pytest.approx([expected] * (len(encode(text)) + 1), abs=1e-5)
