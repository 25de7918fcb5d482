"""An order of one's own, by length: the same update steps on any number of ranks, and an exact resume."""

import re
from contextlib import suppress
from itertools import chain

import by_length
import numpy as np
import pytest
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import ListLogger, losses, refusal, set_up, slow

from recipe_utils.files import CheckpointError

NUM_SAMPLES, PER_STEP = 21, 4
DATA = {"_component_": "tiny.tiny_dataset", "num_samples": NUM_SAMPLES}
STEPS = {"batch_size": 2, "global_batch_size": PER_STEP, "gradient_accumulation_steps": ...}


ORDER = {"_component_": "by_length.ByLength"}


class StoppedError(Exception):
    pass


def train(config, max_steps=None):
    """Returns the tokens of this rank's samples in each update step, and losses."""
    steps = []
    with set_up(config) as made:
        update = made.update

        def recording(step):
            if len(steps) == max_steps:
                raise StoppedError
            rows = [row.tolist() for m in step.microbatches if m.counts for row in m.inputs["tokens"]]
            steps.append([tuple(filter(None, row)) for row in rows])  # without padding
            return update(step)

        made.update = recording
        with suppress(StoppedError):
            made.train()
    return steps, losses(ListLogger.logged)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [({}, [4, 4, 4, 4, 4, 1]), ({"last_update_step": "drop"}, [4] * 5), slow({"max_steps_per_epoch": 2}, [4, 4])],
)
def test_samples_grow_over_the_update_steps_of_an_epoch_on_any_number_of_ranks(changes, sizes, tiny_config):
    config = tiny_config(dataset=DATA, epochs=2, order=ORDER, dtype="fp64", **STEPS, **changes)
    ((steps, expected),) = run_distributed(train, 1, config)
    assert list(map(len, steps)) == 2 * sizes
    ((plain, _),) = run_distributed(train, 1, {**config, "order": None})
    num_steps = len(sizes)
    for epoch in (slice(num_steps), slice(num_steps, None)):
        lengths = [sorted(map(len, step)) for step in steps[epoch]]
        assert [*chain(*lengths)] == sorted(map(len, chain(*steps[epoch])))
        assert sorted(chain(*steps[epoch])) == sorted(chain(*plain[epoch]))  # the samples of the config's order
    assert steps[:num_steps] != steps[num_steps:]
    ranks = run_distributed(train, 2, config)
    assert [sorted(a + b) for a, b in zip(ranks[0][0], ranks[1][0], strict=True)] == [sorted(step) for step in steps]
    assert ranks[0][1] == pytest.approx(expected, rel=1e-6)


def test_an_own_order_resumes_exactly_within_an_epoch(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(dataset=DATA, epochs=2, save_every_n_steps=8, order=ORDER, **STEPS)
    steps, expected = train(config)
    interrupted = {**config, "output_dir": str(tmp_path / "second")}
    train(interrupted, max_steps=9)
    resuming = resuming_in(tmp_path / "second", interrupted)
    with pytest.raises(CheckpointError, match=r"order\._component_=None: .* by_length\.ByLength"):
        train({**resuming, "order": None})
    assert train(resuming) == (steps[8:], expected[8:])
    monkeypatch.setattr(by_length.ByLength, "fingerprint", lambda _: {"lengths": 2})
    with pytest.raises(CheckpointError, match="lengths=2: the checkpoint was saved with None"):
        train(resuming)


@pytest.mark.parametrize(
    ("method", "returned", "text"),
    [
        ("num_steps", 0, r"update steps \[-1, 0\] are .* at least one update step"),
        ("samples", np.array([3, 21]), r"are \[array\(\[ 3, 21\]\), .* indices below 21, "),
        ("samples", [0], "return arrays of indices"),
        ("end", 4, r"end at \[4, 4\]; .* ends that ascend"),
        ("fingerprint", None, "it has no fingerprint; let it inherit from recipe_utils.update_steps.order.Order"),
    ],
)
def test_what_is_no_order_is_refused_before_weights_are_read(method, returned, text, tiny_config, monkeypatch):
    monkeypatch.setattr(by_length.ByLength, method, None if returned is None else lambda *_: returned)
    found = refusal(tiny_config(dataset=DATA, order=ORDER, **STEPS))
    assert re.search(f"order._component_=by_length.ByLength: .*{text}", found), found
