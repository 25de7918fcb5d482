"""KoLeo loss: spreads images over the sphere by the distance of each to its nearest neighbor.

Example: three embeddings on a circle at 0, 60 and 180 degrees have their neighbors at distances 1, 1 and 1.73, so the
loss is 0 + 0 - 0.55. At 0, 120 and 240 degrees, the farthest apart that they can be, it is 3 times -0.55.

-log of the distance to the nearest neighbor in a group (Kozachenko and Leonenko's entropy estimate; Sablayrolles et
al., arXiv:1806.03198, section 3.3; for self-supervision DINOv2, arXiv:2304.07193). The images of a group are coupled:
microbatches must not split a group, or must have all embeddings first (:func:`gradient_of_all`).

Shapes: n images, v crops of each, d width of an embedding.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from recipe_utils.losses.chunks import sum_dtype

_SMALLEST = 1e-8
"""Added to distances, so that the loss of two equal images is finite."""


def koleo_loss(embeddings: Tensor, groups: Tensor) -> Tensor:
    """Returns the sum over images of the mean over crops of -log(distance to the nearest neighbor), [].

    A crop is compared with the same crop of other images. An image that is alone in its group adds
    0. At least fp32. Only the directions of ``embeddings`` [n, v, d] are compared. ``groups`` [n]
    are integers; images in a group below 0 are ignored.
    """
    if len(embeddings) == 0:
        return embeddings.sum()  # 0, with a graph
    directions = F.normalize(embeddings.to(sum_dtype(embeddings)), dim=-1).transpose(0, 1)
    is_other = (groups[:, None] == groups) & (groups >= 0)
    is_other.fill_diagonal_(False)
    with torch.no_grad():
        cosines = directions @ directions.transpose(1, 2)  # [v, n, n]
        nearest = cosines.masked_fill_(~is_other, -2).argmax(-1, keepdim=True)  # [v, n, 1]
        is_nearest = cosines.zero_().scatter_(-1, nearest, 1)
    # A product, because the backward of an index that repeats adds in any order on CUDA.
    neighbors = is_nearest @ directions
    # Without a neighbor the distance could be 0, whose gradient is NaN even if it is not selected.
    has_neighbor = is_other.any(1)
    differences = torch.where(has_neighbor[:, None], directions - neighbors, 1)
    losses = -(torch.linalg.vector_norm(differences, dim=-1) + _SMALLEST).log()
    return torch.where(has_neighbor, losses, 0).sum() / embeddings.size(1)


def gradient_of_all(
    embeddings: Tensor, max_images: int, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the gradient of :func:`koleo_loss` for this rank's images, with all images of all ranks as one group.

    The first of two passes over an update step, as in GradCache (Gao et al., arXiv:2101.06983); the
    second computes the images with a graph and backpropagates this gradient.

    Returns the gradient [n, v, d] for ``embeddings`` [n, v, d], and the mean of the loss over all
    images, []. ``max_images`` is an upper bound of n over all ranks of ``group``; None is this rank.
    """
    local = embeddings.detach().to(sum_dtype(embeddings))
    everything, groups = local, torch.zeros(len(local), dtype=torch.int64, device=local.device)
    first = 0
    if group is not None:
        # Collectives need one shape: ranks with fewer images add some that are in no group.
        padding = max_images - len(local)
        everything = _gathered(F.pad(local, (0, 0, 0, 0, 0, padding)), group)
        groups = _gathered(F.pad(groups, (0, padding), value=-1), group)
        first = dist.get_rank(group) * max_images
    with torch.enable_grad():
        everything.requires_grad_()
        loss = koleo_loss(everything, groups)
        (gradient,) = torch.autograd.grad(loss, everything)
    mean = loss.detach() / (groups >= 0).sum().clamp(min=1)
    return gradient[first : first + len(local)], mean


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenates the tensors of all ranks, of one shape."""
    gathered = tensor.new_empty(dist.get_world_size(group) * len(tensor), *tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor, group=group)
    return gathered
