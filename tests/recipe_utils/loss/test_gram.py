"""Gram anchoring compares cosines between the patches of one crop with those of a teacher, crop by crop."""

import pytest
import torch
import torch.nn.functional as F

from recipe_utils.loss.self_distillation import gram_loss


def drawn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def test_it_is_the_squared_difference_of_all_pairs_of_cosines():
    patches, of_teacher = drawn(3, 4, 5).requires_grad_(), drawn(3, 4, 5, seed=1)
    expected = 0.0
    for mine, its in zip(patches, of_teacher, strict=True):
        for i in range(4):
            for j in range(4):
                cosine = F.cosine_similarity(mine[i], mine[j], dim=0)
                wanted = F.cosine_similarity(its[i], its[j], dim=0)
                expected = expected + (cosine - wanted) ** 2 / 16
    found = gram_loss(patches, of_teacher)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss, patches)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_crops_do_not_depend_on_each_other():
    patches, of_teacher = drawn(4, 6, 5), drawn(4, 6, 8, seed=1)  # a wider teacher is fine
    together = gram_loss(patches, of_teacher)
    alone = sum(gram_loss(patches[i : i + 1], of_teacher[i : i + 1]) for i in range(4))
    torch.testing.assert_close(together, alone)


def test_neither_lengths_nor_a_rotation_matter():
    patches, rotation = drawn(2, 6, 5), torch.linalg.qr(drawn(5, 5, seed=2)).Q
    assert gram_loss(patches, 3 * patches @ rotation) < 1e-24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_summed_in_fp32_at_least(dtype):
    patches, of_teacher = drawn(2, 6, 5, dtype=dtype), drawn(2, 6, 5, seed=1, dtype=dtype)
    found = gram_loss(patches, of_teacher)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gram_loss(patches.float(), of_teacher.float()))


def test_of_no_crop_it_is_nothing_with_a_graph():
    states = drawn(6, 5).requires_grad_()
    nothing = gram_loss(states[:0], states[:0])
    nothing.backward()
    assert nothing == 0
    assert torch.equal(states.grad, torch.zeros(6, 5).double())
