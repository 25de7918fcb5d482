"""All layouts of conversations train the same targets, with ever fewer positions."""

import pytest

from recipe_utils.benchmark import trees


@pytest.mark.slow
@pytest.mark.parametrize("kind", trees.KINDS)
def test_layouts_of_conversations_train_the_same_targets(kind):
    for each in trees.measure(kind, num_steps=2, scale=64):
        losses = [loss for _, _, loss in each.values()]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
        assert each["shared"][1] < each["packed"][1] < each["padded"][1]
