import statistics
from types import SimpleNamespace

import pytest

from recipe_utils.benchmark.random_texts import random_texts
from recipe_utils.benchmark.token_audit import contents_of

TOKENIZER = SimpleNamespace(pad_id=3, max_seq_len=2048)


def test_random_texts_have_the_lengths_of_conversations_and_targets_in_their_second_half():
    samples = random_texts(TOKENIZER, vocab_size=70, num_samples=600, median=300)
    assert samples == random_texts(TOKENIZER, vocab_size=70, num_samples=600, median=300)
    lengths = [len(sample["tokens"]) for sample in samples]
    assert statistics.median(lengths) == pytest.approx(300, rel=0.1)
    assert statistics.mean(lengths) == pytest.approx(430, rel=0.1)
    assert max(lengths) == 2048
    tokens = [token for sample in samples for token in sample["tokens"]]
    assert (min(tokens), max(tokens)) == (4, 69), "neither 0 nor the padding"
    assert contents_of(samples, 3).num_target_tokens == sum(length - length // 2 for length in lengths)


def test_packed_random_texts_are_the_same_samples():
    given = {"vocab_size": 70, "num_samples": 40, "median": 20}
    rows = random_texts(TOKENIZER, **given, packed=True)
    assert {len(row["tokens"]) for row in rows} == {2048}
    assert contents_of(rows, 3) == contents_of(random_texts(TOKENIZER, **given), 3)
