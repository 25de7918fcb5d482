"""What a teacher says, kept on the disk: asked once, before training, and looked up with each microbatch.

Shapes: n target tokens of a microbatch or a sample, d_t the teacher's width, m tokens that both vocabularies
have.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.samples import Sample
from recipe_utils.loss.chunks import chunks_of
from recipe_utils.loss.distillation import TeacherHidden, TeacherTopK, top_k_of
from recipe_utils.model.frozen.cache import TeacherCache
from recipe_utils.model.frozen.hidden_states import FrozenModel
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import naming

_SECONDS_TO_LOSE = 60.0
"""How much of the pass before training a killed one may lose."""
_TOKENS_PER_CHUNK = 256
"""Targets whose logits exist at a time, while the likeliest tokens are looked for."""


class TopK(NamedTuple):
    """What of a distribution is kept, instead of the hidden states that give all of it."""

    k: int
    num_tokens: int
    """m, over which it is normalised."""
    temperature: float


class NotKept(NamedTuple):
    """Stands for what the teacher says of a microbatch until it has been asked."""

    keys: tuple[bytes, ...]
    """Of the samples."""
    num_targets: tuple[int, ...]
    """Of each sample; they follow one another in the microbatch's."""


class KeptTeacher:
    """Asks a teacher once about each sample, and says from then on what it said. All ranks together.

    Args:
        cache: where it is kept.
        build: makes the model; called if something is not kept.
        output: its output layer alone, for hidden states to be projected with; None for ``top_k`` and on
            ranks without the last stage.
        top_k: what is kept; None for hidden states.
        ranks: of the job.
    """

    def __init__(
        self,
        cache: TeacherCache,
        build: Callable[[], FrozenModel],
        output: Any,
        top_k: TopK | None,
        ranks: Ranks,
    ) -> None:
        self._cache = cache
        self._build = build
        self._output = output
        self._top_k = top_k
        self._ranks = ranks
        self._group = ranks.new_cpu_group()
        self._model: FrozenModel | None = None
        self._is_filling = False

    def find(self, samples: Sequence[Sample], num_targets: Sequence[int]) -> Any:
        """What is kept of a microbatch's samples; asked by the thread that makes microbatches.

        Args:
            samples: of text.
            num_targets: of each.

        Returns:
            Tensors by name, on the CPU. While the pass before training goes on :class:`NotKept`, or None
            where all is kept already. None on ranks without the last stage.

        Raises:
            recipe_utils.files.CheckpointError: a file is damaged, or a sample is not the one that it was.
        """
        keys = [self._cache.key_of(sample) for sample in samples]
        if self._is_filling:
            is_kept = self._cache.knows(keys)
            return None if is_kept else NotKept(tuple(keys), tuple(num_targets))
        return self._cache.find(keys) if self._ranks.has_last_stage else None

    def say(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with what is kept, as the student's loss takes it."""
        if not self._ranks.has_last_stage:
            return microbatch
        kept = microbatch.targets.teacher
        if kept is None:  # a stand-in
            kept = self._cache.find([])
        if self._top_k is None:
            return microbatch.with_teacher(TeacherHidden(kept["hidden"], self._output))
        return microbatch.with_teacher(TeacherTopK(**kept, num_tokens=self._top_k.num_tokens))

    def fill(self, num_epochs: int, loaders: Sequence[UpdateStepLoader]) -> None:
        """Asks about all samples that so many epochs consume, but for those that are kept already.

        Args:
            num_epochs: of the training.
            loaders: of its data.

        Raises:
            recipe_utils.settings.problems.ConfigError: what the teacher said cannot be written; names the file.
        """
        self._is_filling = True
        self._written_seconds = time.monotonic()
        for loader in loaders:
            num_steps, steps = loader.one_pass(num_epochs)
            with steps:
                for step in tqdm(steps, "teacher", num_steps, disable=not self._ranks.is_zero):
                    self._ask(step)
        with naming("teacher_cache_dir"):
            self._cache.write()
        self._cache.reload()
        self._is_filling = False
        self._model = None

    def _ask(self, step: UpdateStep) -> None:
        not_kept = [
            microbatch
            for microbatch in step.microbatches
            if isinstance(microbatch.targets.teacher, NotKept)
        ]
        # Every rank must run the same forwards; what a rank runs besides is dropped.
        most = max(gather_objects(len(not_kept), self._group))
        if most == 0:
            return
        if self._model is None:
            self._model = self._build()
        asked = not_kept + [step.microbatches[0]] * (most - len(not_kept))
        hidden = self._model.hidden_of([microbatch.with_teacher(None) for microbatch in asked])
        with self._model.output_layer() as output, naming("teacher_cache_dir"):
            for index in range(len(not_kept) if hidden else 0):
                values = dict(self._values_of(hidden[index], output))
                self._keep(not_kept[index].targets.teacher, values)
            if time.monotonic() - self._written_seconds > _SECONDS_TO_LOSE:
                self._cache.write()
                self._written_seconds = time.monotonic()

    @torch.no_grad()
    def _values_of(self, hidden: Tensor, output: Any) -> Iterator[tuple[str, Tensor]]:
        """What is kept of hidden states [n, d_t], by name."""
        if self._top_k is None:
            yield "hidden", hidden
            return
        parts = [
            top_k_of(TeacherHidden(hidden[rows], output), *self._top_k)
            for rows in chunks_of(max(len(hidden), 1), _TOKENS_PER_CHUNK)
        ]
        yield "token_ids", torch.cat([part.token_ids for part in parts])
        yield "log_probs", torch.cat([part.log_probs for part in parts])

    def _keep(self, samples: NotKept, values: dict[str, Tensor]) -> None:
        of_samples = {
            name: value.split(list(samples.num_targets)) for name, value in values.items()
        }
        for index, key in enumerate(samples.keys):
            self._cache.add(key, {name: value[index] for name, value in of_samples.items()})
