"""k-NN accuracy of a frozen backbone, over all ranks."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_utils.parallel.process_group import gather_objects, mean_over_ranks
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.samples import SampleError
from recipe_utils.update_steps.step import Microbatch

StatesOf = Callable[[Sequence[Microbatch]], dict[int, Tensor]]
"""Maps microbatches to class states [g, d] by index; empty on ranks without a pipeline's last stage."""


class NearestNeighbors:
    """k-NN classification of ``images`` by the states of labeled images, exact over all ranks.

    Images of ``bank`` vote. Raises ValueError for more neighbors than images in the bank, or if the
    bank's images are those to classify.
    """

    def __init__(self, bank: UpdateStepLoader, images: UpdateStepLoader, num_neighbors: int, ranks: Ranks) -> None:
        if num_neighbors > len(bank.dataset):
            has = f"{bank.dataset.name} has {len(bank.dataset)} images"
            raise ValueError(f"knn_neighbors={num_neighbors}: {has}; set it to fewer")
        is_same = len(images.dataset) == len(bank.dataset)
        with suppress(SampleError):  # skipped or raised when the sample is loaded
            is_same = is_same and all(images.dataset[0]["digest"] == bank.dataset[0]["digest"])
        if is_same:
            raise ValueError(
                f"{images.dataset.name}: it has the images of {bank.dataset.name}, so each would be its own "
                "neighbor; set one of the two to other images, such as split=train[90%:]"
            )
        self._loaders = bank, images
        self._num_neighbors = num_neighbors
        self._ranks = ranks
        self._dp_group = ranks.dp_group if ranks.dp_degree > 1 else None

    def accuracy(self, states_of: StatesOf) -> Tensor:
        """Returns the fraction of correctly classified images [], equal on all ranks.

        Raises SampleError if fewer than ``num_neighbors`` images of the bank are usable.
        """
        (bank, bank_labels, num_bank), (states, labels, _) = (self._read(loader, states_of) for loader in self._loaders)
        if num_bank < self._num_neighbors:  # a total over ranks, so all of them raise
            dataset = self._loaders[0].dataset
            raise SampleError(
                f"knn_neighbors={self._num_neighbors}: only {num_bank} of {len(dataset)} images of "
                f"{dataset.name} can be used; set it to fewer, or repair the images"
            )
        numbers = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        if self._ranks.has_last_stage:
            if self._dp_group is not None:  # their images vote, too; their number may differ. Blocks the device
                bank, bank_labels = (
                    torch.cat(gather_objects(rows.cpu(), self._dp_group)).to(rows.device)
                    for rows in (bank, bank_labels)
                )
            numbers[0] = num_voted_right(states, labels, bank, bank_labels, self._num_neighbors)
            numbers[1] = len(labels)
        num_right, num_images = mean_over_ranks(numbers)
        return num_right / num_images.clamp(min=1e-9)

    def _read(self, loader: UpdateStepLoader, states_of: StatesOf) -> tuple[Tensor, Tensor, int]:
        """Returns states [n, d], labels [n] of this rank and the number of images of all ranks.

        States and labels are empty before the last pipeline stage.
        """
        states: list[Tensor] = []
        labels = [torch.empty(0, dtype=torch.int64)]
        num_images = 0
        with loader.epoch(0) as steps:
            for step in steps:
                num_images += int(step.totals["images"])
                for index, microbatch_states in sorted(states_of(step.microbatches).items()):
                    targets: Any = step.microbatches[index].targets
                    states.append(microbatch_states)
                    labels.append(targets.labels)
        all_states = torch.cat(states) if states else torch.empty(0)
        return all_states, torch.cat(labels).to(self._ranks.device), num_images


@torch.no_grad()
def num_voted_right(
    states: Tensor,
    labels: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    num_neighbors: int,
    temperature: float = 0.07,
    rows_per_chunk: int = 1024,
) -> Tensor:
    """Returns the number of images whose label gets most votes of their nearest neighbors [].

    A vote's weight is exp(cosine / temperature) (Wu et al., arXiv:1805.01978, section 3.4; k = 20
    as in DINO, arXiv:2104.14294).

    Shapes: states [n, d], labels [n] from 0, bank [m, d], its labels [m]; ``num_neighbors`` is at most m.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    bank, states = (F.normalize(rows.to(wide), dim=-1) for rows in (bank, states))
    num_classes = int(torch.cat([bank_labels, labels]).max()) + 1 if len(labels) else 1
    num_right = torch.zeros((), dtype=torch.int64, device=states.device)
    # In chunks, because the cosines of all images with the whole bank may not fit.
    for rows in range(0, len(states), rows_per_chunk):
        chunk = slice(rows, rows + rows_per_chunk)
        cosines, nearest = (states[chunk] @ bank.t()).topk(num_neighbors, dim=1)
        votes = cosines.new_zeros(len(cosines), num_classes)
        votes.scatter_add_(1, bank_labels[nearest], (cosines / temperature).exp())
        num_right += (votes.argmax(1) == labels[chunk]).sum()
    return num_right
