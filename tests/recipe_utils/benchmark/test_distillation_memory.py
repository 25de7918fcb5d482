import pytest
import torch

from recipe_utils.benchmark.distillation_memory import Sizes, main, make_inputs, prepare

SIZES = Sizes(num_slots=32, embed_dim=8, teacher_embed_dim=12, vocab_size=53)


@pytest.mark.parametrize("way", ["torchtune", "whole", "512", "4", "top-53"])
def test_all_ways_have_the_gradients_of_the_first(way):
    gradients = []
    for each in ("automodel", way):
        inputs = make_inputs(SIZES, torch.device("cpu"), torch.float32)
        prepare(each, inputs)(inputs)
        gradients.append([inputs.hidden.grad, inputs.output.weight.grad])
    torch.testing.assert_close(*gradients)
    assert gradients[0][0].abs().max() > 0


def test_the_table_has_each_way_and_compares_it_with_the_first(capsys):
    main(
        ["--ways", "whole", "16", "--vocab_size", "20000", "--num_slots", "1024", "--num_runs", "1"]
    )
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["whole", "16"]
    assert float(rows[0][3]) == 1
    assert float(rows[1][3]) < 0.7
