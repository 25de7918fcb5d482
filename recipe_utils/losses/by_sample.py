"""Losses of an update step by sample, and by named dataset, as its loss module computes them.

An update step of 4 samples of two datasets, a and b, with 2, 3, 1 and 4 targets: rank 0 computes samples 0 and 3.
Its loss module calls ``record`` with the losses of 6 targets and their samples [0, 0, 3, 3, 3, 3]; ``sums`` are
[l0, 0, 0, l3], ``numbers`` [2, 0, 0, 4]. Sums over ranks give each sample's mean; those of a dataset's samples its
loss. If b has ``loss_weight`` 2, ``loss_module.weights`` are [w, w, 2w, 2w] with w such that they are 1 on average
over the 10 targets.
"""

from typing import Any

import torch
from torch import Tensor

from recipe_utils.losses.dataset_weights import LossWeightSettings
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.text.collator import OF_DATASET
from recipe_utils.text.mixture import Mixture
from recipe_utils.update_steps.loader import UpdateStepLoader
from recipe_utils.update_steps.step import UpdateStep


class LossesBySample:
    """Records the losses of a loss module by sample, and sets its weights.

    Args:
        loss_module: has ``record``, and ``weights`` if datasets can be weighted; stock losses have neither.
        ranks: ranks of the job.
        keeps_samples: records losses of datasets without names, too.
        weighing: weights of named datasets; None for a recipe that has none.
    """

    def __init__(
        self, loss_module: Any, ranks: Ranks, keeps_samples: bool = False, weighing: LossWeightSettings | None = None
    ) -> None:
        self._loss_module, self._ranks, self._weighing = loss_module, ranks, weighing
        self._keeps_samples = keeps_samples and hasattr(loss_module, "record")
        self.has_weights = weighing is not None and hasattr(loss_module, "weights")
        self._datasets = torch.zeros(0, dtype=torch.int64)
        self._num_datasets = 0
        self.sums = torch.zeros(0)
        """Sums of losses of each sample of the update step on this rank, [samples] fp64 on the device."""
        self.numbers = torch.zeros(0)
        """Targets, or pairs, of each, [samples] fp64 on the device."""

    def start(self, step: UpdateStep, loader: UpdateStepLoader, epoch: int, weighs: bool = True) -> None:
        """Starts an update step of a loader: clears the sums, and sets the weights of its named datasets.

        Without ``weighs`` weights are 1, as in validation.
        """
        names = [name for name in step.totals if name.startswith(OF_DATASET)] if self.has_weights else []
        mixture, device = loader.dataset.parts, self._ranks.device
        self._num_datasets = len(names)
        if not (names or self._keeps_samples):
            return
        indices = loader.order.samples(epoch, step.index)
        self.sums, self.numbers = torch.zeros(2, len(indices), dtype=torch.float64, device=device)
        self._loss_module.record = self._add
        if names:
            assert isinstance(mixture, Mixture)
            assert self._weighing is not None
            self._datasets = torch.from_numpy(mixture.datasets_of(indices))
            weights = self._weighing.weigh(mixture.loss_weights, self._totals(step, mixture))
            of_samples = weights[self._datasets].to(device, non_blocking=True)
            self._loss_module.weights = of_samples if weighs else None

    def _totals(self, step: UpdateStep, mixture: Mixture) -> list[float]:
        """Returns the weights of each dataset's targets, or their number."""
        count = "weights" if "weights" in step.totals else "target_tokens"
        return [step.totals[f"{count}/{name}"] for name in mixture.names]

    def _add(self, losses: Tensor, samples: Tensor | None) -> None:
        """Adds losses of targets or pairs, [n], of the samples at ``samples`` [n], without gradients.

        Raises ValueError without ``samples``: a ``collate_fn`` made another number of rows.
        """
        if samples is None:
            text = "it made another number of rows than samples, so losses have no sample"
            raise ValueError(f"collate_fn: {text}; make one row of each sample, or set sample_losses=False")
        self.sums.index_add_(0, samples, losses.detach().double())
        self.numbers.index_add_(0, samples, torch.ones_like(self.numbers[:1]).expand(len(samples)))

    def stop(self) -> Tensor:
        """Ends the record of an update step, so that other forwards are not in it.

        Returns this rank's sums of losses of each named dataset, [k] fp64; [0] if there is none. Times the number of
        pipeline stages, of which one has losses: their mean over stages is the sums.
        """
        if hasattr(self._loss_module, "record"):
            self._loss_module.record = None
        if self.has_weights:
            self._loss_module.weights = None
        sums = torch.zeros(self._num_datasets, dtype=torch.float64, device=self._ranks.device)
        if not self._num_datasets:
            return sums
        datasets = self._datasets.to(self._ranks.device, non_blocking=True)
        return sums.index_add_(0, datasets, self.sums) * self._ranks.dims.pp
