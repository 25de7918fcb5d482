"""Gram anchoring of crops; its value and gradient are tested in ``recipes/test_dinov3_gradients.py``."""

import pytest
import torch

from recipe_utils.loss.self_distillation import gram_loss


def drawn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def test_crops_do_not_depend_on_each_other():
    patches, of_teacher = drawn(24, 5), drawn(24, 8, seed=1)  # the teacher may be wider
    together = gram_loss(patches, of_teacher, 4)
    crops = zip(patches.split(6), of_teacher.split(6), strict=True)
    torch.testing.assert_close(together, sum(gram_loss(*crop, 1) for crop in crops))


def test_neither_lengths_nor_a_rotation_matter():
    patches, rotation = drawn(12, 5), torch.linalg.qr(drawn(5, 5, seed=2)).Q
    assert gram_loss(patches, 3 * patches @ rotation, 2) < 1e-24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_summed_in_fp32_at_least(dtype):
    patches, of_teacher = drawn(12, 5, dtype=dtype), drawn(12, 5, seed=1, dtype=dtype)
    found = gram_loss(patches, of_teacher, 2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gram_loss(patches.float(), of_teacher.float(), 2))


def test_without_crops_it_is_zero_with_a_graph():
    states = drawn(6, 5).requires_grad_()
    nothing = gram_loss(states[:0], states[:0], 0)
    nothing.backward()
    assert nothing == 0
    assert torch.equal(states.grad, torch.zeros(6, 5).double())
