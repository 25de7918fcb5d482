import itertools

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipe_utils.models.pipeline.stages import cut_to_stage, layers_of_stages, split_layers, ties_output


def costliest(stages, costs, output_cost):
    sums = [sum(costs[i] for i in stage) for stage in stages]
    return max([*sums[:-1], sums[-1] + output_cost])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(0, 40), st.integers(1, 8))
def test_no_other_cut_has_a_cheaper_costliest_stage(costs, output_cost, num_stages):
    num_stages = min(num_stages, len(costs))
    stages = split_layers(costs, output_cost, num_stages)
    assert [i for stage in stages for i in stage] == list(range(len(costs)))
    assert len(stages) == num_stages
    assert all(stages)
    every_cut = (
        [range(a, b) for a, b in itertools.pairwise((0, *cut, len(costs)))]
        for cut in itertools.combinations(range(1, len(costs)), num_stages - 1)
    )
    least = min(costliest(cut, costs, output_cost) for cut in every_cut)
    assert costliest(stages, costs, output_cost) == least


def test_the_output_layer_counts_and_the_embedding_does_not():
    sizes = {**tiny.DEEP_UNTIED_MODEL, "vocab_size": 2 * 9_000 // 32}
    assert layers_of_stages(tiny.tiny_model(sizes), 2) == [range(3), range(3, 4)]
    assert layers_of_stages(tiny.tiny_model(tiny.DEEP_UNTIED_MODEL), 2) == [range(2), range(2, 4)]


@pytest.mark.parametrize(
    ("num_stages", "split_points", "message"),
    [
        (5, None, "5 stages need as many layers, the model has 4"),
        (3, [2, 2], r"split_points=\[2, 2\]: they must ascend between 1 and 3"),
        (2, [4], r"split_points=\[4\]"),
        (2, [0], r"split_points=\[0\]"),
    ],
)
def test_an_impossible_cut_is_refused_with_both_numbers(num_stages, split_points, message):
    with pytest.raises(ValueError, match=message):
        layers_of_stages(tiny.tiny_model(tiny.DEEP_MODEL), num_stages, split_points)


def test_a_model_that_is_no_plain_decoder_is_refused_by_its_name():
    with pytest.raises(ValueError, match="DeepFusionModel"):
        layers_of_stages(tiny.tiny_fusion_model(), 2)


@pytest.mark.parametrize("sizes", [tiny.DEEP_MODEL, tiny.DEEP_UNTIED_MODEL], ids=["tied", "untied"])
@pytest.mark.parametrize("points", [[2], [1], [1, 2, 3]])
def test_the_stages_one_after_the_other_are_the_model(sizes, points):
    model = tiny.tiny_model(sizes)
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))
    names, hidden = set(), tokens
    for layers in layers_of_stages(model, len(points) + 1, points):
        stage = tiny.tiny_model(sizes)
        cut_to_stage(stage, layers)
        names |= stage.state_dict().keys()
        stage.load_state_dict({n: model.state_dict()[n] for n in stage.state_dict()})
        hidden = stage(hidden)
    assert torch.equal(hidden, model(tokens))
    assert names == model.state_dict().keys()


def test_a_stage_keeps_only_its_own_weights():
    model = tiny.on_meta(tiny.DEEP_MODEL)
    assert ties_output(model)
    cut_to_stage(model, range(1, 3))
    assert {name.split(".")[1] for name in model.state_dict()} == {"1", "2"}
