"""KoLeo in groups equals that of a distance matrix, and over ranks that of all images."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_runs import run_distributed

from recipe_utils.dinov3.koleo import gradient_of_all, koleo_loss

pytestmark = pytest.mark.usefixtures("in_float64")


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def reference(embeddings, groups):
    """Computes KoLeo image by image and crop by crop, from distances between all of a group."""
    total = embeddings.sum() * 0
    for group in groups.unique():
        if group < 0:
            continue
        members = F.normalize(embeddings[groups == group], dim=-1)
        for crop in members.unbind(1):
            if len(crop) > 1:
                distances = torch.cdist(crop, crop, compute_mode="donot_use_mm_for_euclid_dist")
                distances = distances + 10 * torch.eye(len(crop), dtype=crop.dtype)
                total = total - (distances.min(1).values + 1e-8).log().sum() / members.size(1)
    return total


def loss_and_gradient(function, embeddings, *rest):
    embeddings = embeddings.clone().requires_grad_()
    loss = function(embeddings, *rest)
    return loss.detach(), *torch.autograd.grad(loss, embeddings)


GROUPS = {
    "one": [0] * 9,
    "several": [0, 0, 0, 0, 1, 1, 1, 1, 1],
    "a lone image": [0, 0, 0, 1, 2, 2, 2, 3, 3],
    "images without a group": [0, 0, -1, -1, -1, 1, 1, 1, -1],
}


@pytest.mark.parametrize("case", GROUPS)
def test_loss_and_gradient_are_those_of_a_distance_matrix(case):
    embeddings, groups = 3 * drawn(9, 2, 4), torch.tensor(GROUPS[case])
    found = loss_and_gradient(koleo_loss, embeddings, groups)
    expected = loss_and_gradient(reference, embeddings, groups)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_an_image_that_is_nearest_to_many_is_no_sum_by_index():
    """On CUDA such a sum adds in any order."""
    waiting, names = [koleo_loss(drawn(9, 2, 4).requires_grad_(), torch.zeros(9).long()).grad_fn], set()
    while waiting:
        node = waiting.pop()
        names.add(node.name())
        waiting += [following for following, _ in node.next_functions if following is not None]
    assert not [name for name in names if "Gather" in name or "Index" in name]
    assert any("Bmm" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_equal_images_have_a_finite_loss_and_gradient(dtype):
    embeddings = drawn(3, 2, 4).to(dtype)
    embeddings[1] = embeddings[0]
    loss, gradient = loss_and_gradient(koleo_loss, embeddings, torch.zeros(3).long())
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.isfinite()
    assert gradient.isfinite().all()


NUM_ON_RANKS = [(4, 3), (7, 0), (0, 7), (1, 6), (1, 0), (0, 0)]


def of_all_ranks(max_images):
    rank = dist.get_rank()
    found = []
    for of_ranks in NUM_ON_RANKS:
        images = drawn(7, 2, 4)
        first = sum(of_ranks[:rank])
        own = images[first : first + of_ranks[rank]]
        found.append(gradient_of_all(own, max_images, dist.group.WORLD))
    return found


def test_over_uneven_ranks_it_is_the_gradient_of_one_batch():
    of_ranks = run_distributed(of_all_ranks, 2, 9)
    for on_ranks, *found in zip(NUM_ON_RANKS, *of_ranks, strict=True):
        images = drawn(7, 2, 4)[: sum(on_ranks)]
        loss, gradient = loss_and_gradient(reference, images, torch.zeros(len(images)).long())
        together = torch.cat([each for each, _ in found])
        torch.testing.assert_close(together, gradient, rtol=1e-12, atol=1e-12)
        for _, mean in found:
            expected = loss / max(len(images), 1)
            torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
