"""An order of one's own, by length: the same update steps on any number of ranks, and an exact resume."""

from contextlib import suppress
from itertools import chain
from pathlib import Path

import by_length
import pytest
import tiny
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import SFT, ListLogger, losses, recipe_of_page, set_up

from recipe_utils.files import CheckpointError

NUM_SAMPLES, PER_STEP = 21, 4
DATA = {"_component_": "tiny.tiny_dataset", "num_samples": NUM_SAMPLES}
STEPS = {"batch_size": 2, "global_batch_size": PER_STEP, "gradient_accumulation_steps": ...}


def recipe_by_length(folder):
    return recipe_of_page(folder, "## 6. Order")


class StoppedError(Exception):
    pass


def train(config, recipe, max_steps=None):
    """Returns the tokens of this rank's samples in each update step, and losses."""
    steps = []
    with set_up(config, recipe) as made:
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


@pytest.fixture
def recipe(tmp_path):
    return recipe_by_length(tmp_path)


def test_samples_grow_over_the_update_steps_of_an_epoch_on_any_number_of_ranks(recipe, tiny_config):
    config = tiny_config(dataset=DATA, epochs=2, **STEPS)
    ((steps, expected),) = run_distributed(train, 1, config, recipe)
    assert list(map(len, steps)) == 2 * [4, 4, 4, 4, 4, 1]
    samples = sorted(tuple(sample["tokens"]) for sample in tiny.make_samples(NUM_SAMPLES))
    for epoch in (steps[:6], steps[6:]):
        lengths = [sorted(map(len, step)) for step in epoch]
        assert [*chain(*lengths)] == sorted(map(len, samples))
        assert sorted(chain(*epoch)) == samples  # each once
    assert steps[:6] != steps[6:]
    ranks = run_distributed(train, 2, config, recipe)
    assert [sorted(a + b) for a, b in zip(ranks[0][0], ranks[1][0], strict=True)] == [sorted(step) for step in steps]
    assert ranks[0][1] == pytest.approx(expected, rel=1e-4)


def test_an_own_order_resumes_exactly_within_an_epoch(recipe, tiny_config, tmp_path):
    config = tiny_config(dataset=DATA, epochs=2, save_every_n_steps=8, **STEPS)
    steps, expected = train(config, recipe)
    interrupted = {**config, "output_dir": str(tmp_path / "second")}
    train(interrupted, recipe, max_steps=9)
    resuming = resuming_in(tmp_path / "second", interrupted)
    with pytest.raises(CheckpointError, match="order=None: the checkpoint was saved with by length"):
        train(resuming, SFT)
    assert train(resuming, recipe) == (steps[8:], expected[8:])


def test_the_order_is_short():
    assert len(Path(by_length.__file__).read_text().splitlines()) <= 60
