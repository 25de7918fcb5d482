"""Gram anchoring: keeps how patches of one crop resemble each other as an earlier teacher saw it.

DINOv3, arXiv:2508.10104, section 4.2, equation 2; of each crop by itself, so that no crop depends on others.
"""

import torch.nn.functional as F
from torch import Tensor

from recipe_utils.loss.chunks import sum_dtype


def gram_loss(patches: Tensor, of_teacher: Tensor) -> Tensor:
    """Sum over crops of the mean squared difference between the cosines of all pairs of patches, [].

    Args:
        patches: of the student, [crops, patches, d].
        of_teacher: the same patches as the teacher sees them, [crops, patches, any d].
    """
    if len(patches) == 0:
        return patches.sum()  # 0, with a graph
    wide = sum_dtype(patches)
    cosines, wanted = (
        directions @ directions.transpose(1, 2)
        for directions in (F.normalize(each.to(wide), dim=-1) for each in (patches, of_teacher))
    )
    return (cosines - wanted).square().mean((1, 2)).sum()
