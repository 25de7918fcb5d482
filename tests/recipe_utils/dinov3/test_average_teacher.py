"""The moving average of weights: its values, in place, without skipped steps.

Shards and pipeline stages: ``recipes/test_dinov3_gradients.py``.
"""

import pytest
import torch
from torch import nn

from recipe_utils.dinov3.average_teacher import update_average


def model(seed, dtype=torch.float64):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)
    made[2].to(torch.float32)  # two precisions
    return made


def weights_of(module):
    return {name: weight.clone() for name, weight in module.state_dict().items()}


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("grad_norm", [None, torch.tensor(2.0).double()])
def test_momentum_is_the_weight_of_the_average(grad_norm, momentum):
    average, followed = model(0), model(1)
    before, of_followed = weights_of(average), weights_of(followed)
    wanted = {n: momentum * before[n] + (1 - momentum) * of_followed[n] for n in before}
    addresses = [p.data_ptr() for p in average.parameters()]
    update_average(average, followed, momentum, grad_norm)
    torch.testing.assert_close(weights_of(average), wanted)
    torch.testing.assert_close(weights_of(followed), of_followed, rtol=0, atol=0)
    assert addresses == [p.data_ptr() for p in average.parameters()]
    if momentum == 0:
        assert all(map(torch.equal, average.parameters(), followed.parameters()))
