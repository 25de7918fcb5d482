"""Outputs of a frozen model for the microbatches of update steps: live, or stored before training."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torchtune import training
from torchtune.utils import get_logger
from tqdm import tqdm

from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.microbatch import Microbatch
from recipe_utils.data.loader.samples import Sample
from recipe_utils.files import CheckpointError
from recipe_utils.model.construct.weights import (
    check_weights,
    crc32_of_weights,
    fingerprint_of_config,
)
from recipe_utils.model.frozen.cache import OutputCache, Values
from recipe_utils.model.frozen.model import FrozenModel
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import naming

_log = get_logger("INFO")


class _Wanted(NamedTuple):
    """Samples of a microbatch in the pass before training."""

    keys: Sequence[bytes]
    num_rows: Sequence[int]


class FrozenOutputs(ABC):
    """Attaches a frozen model's outputs to microbatches. All ranks together.

    Without a ``folder`` outputs are computed at every update step. With one, :meth:`precompute`
    stores those of all samples before training, and the prefetch thread reads them. Nothing is
    attached unless ``is_used``.
    """

    name: str
    """Name of the model, for messages."""
    checkpointer_key: str
    """Config key of the weights."""
    cache_key: str
    """Config key of ``folder``."""
    needs_output_layer: bool
    """The loss module projects values, so the output layer stays gathered in the update step."""
    checks_outputs = True
    """Raises for NaN or infinite outputs where this costs no device synchronization."""

    def __init__(self, ranks: Ranks, is_used: bool, folder: Path | None) -> None:
        self.ranks = ranks
        self.is_used = is_used
        self._folder = folder
        self._build: Callable[[], FrozenModel]
        self._model: FrozenModel | None = None  # with a cache only during the pass
        self._output_layer: Any = None  # without the model, for values from a cache
        self._cache: OutputCache | None = None
        self._is_precomputing = False
        self._spans: list[tuple[Any, Any]] = []  # start and stop of the model's forwards

    @property
    def is_cached(self) -> bool:
        """Returns True if outputs are stored before training."""
        return self._folder is not None

    @property
    def cached(self) -> "FrozenOutputs | None":
        """Returns itself for a collator, whose microbatches get outputs by :meth:`find`; None without a cache."""
        return self if self.is_cached and self.is_used else None

    # ---- Set-up ------------------------------------------------------------------------------------

    def load(
        self, checkpointer: Any, whole: nn.Module | None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns a checkpoint, and fingerprints that a resumed training must have, too.

        Raises ConfigError if its weights do not fit ``whole``, a meta model, unless None.
        """
        key = self.checkpointer_key
        with naming(key):
            checkpoint = checkpointer.load_checkpoint()
            weights = checkpoint[training.MODEL_KEY]
            fingerprints = {key: crc32_of_weights(weights, self.ranks.cpu_group)}
            if whole is not None:
                check_weights(whole, weights)
                folder = getattr(checkpointer, "_checkpoint_dir", None)
                for name, text in fingerprint_of_config(whole, folder).items():
                    fingerprints[f"{key}.{name}"] = text
        return checkpoint, fingerprints

    def open(
        self, build: Callable[[], FrozenModel], context: Mapping[str, Any], output_layer: Any = None
    ) -> None:
        """Opens the cache; without one builds the model.

        ``context`` are plain values that outputs depend on besides the sample; ``output_layer``
        projects values from a cache, if they need it.
        """
        self._build, self._output_layer = build, output_layer
        if self._folder is None:
            self._model = build()
            return
        context = {**context, "device": self.ranks.device.type}
        self._cache = OutputCache(self._folder, self.cache_key, context, self.ranks.cpu_group)
        if self.ranks.is_zero:
            _log.info(f"{self._folder}: {self.name} outputs of {len(self._cache)} samples")

    # ---- Outputs: what a teacher and a reference have different -------------------------------------

    @abstractmethod
    def numbers_of(self, sample: Sample) -> Mapping[str, Any]:
        """Returns the integers of a sample that outputs depend on, by name."""

    @abstractmethod
    def to_values(self, output: Any, layer: Any, microbatch: Microbatch) -> Values:
        """Converts a microbatch's outputs, with the output layer, to values."""

    @abstractmethod
    def attach(self, values: Values, layer: Any) -> Any:
        """Converts values, with the output layer, to ``targets.teacher`` of the loss module."""

    # ---- The pass before training -------------------------------------------------------------------

    def precompute(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """Stores the missing outputs of all samples of ``num_epochs`` epochs, if there is a cache.

        A killed pass resumes. Raises ConfigError with the file's name if outputs cannot be written.
        """
        if self._cache is None:
            return
        self._is_precomputing = True
        for loader in filter(None, loaders):
            num_steps, steps = loader.one_pass(num_epochs)
            with steps:
                for step in tqdm(steps, self.name, num_steps, disable=not self.ranks.is_zero):
                    self._store_missing(step)
            with naming(self.cache_key):
                self._cache.write()
            self._cache.reload()
        self._is_precomputing = False
        self._model = None

    def _store_missing(self, step: UpdateStep) -> None:
        """Computes an update step on all ranks if an output of any of its samples is missing."""
        assert self._cache is not None
        wanted = [microbatch.targets.teacher for microbatch in step.microbatches]
        is_known = all(all(self._cache.contains(each.keys)) for each in wanted if each is not None)
        if all(gather_objects(is_known, self.ranks.cpu_group)):
            return
        self._model = self._model or self._build()
        outputs = self._model.outputs(step.microbatches)
        with self._gathered_output_layer() as layer:
            for index, output in outputs.items():
                if wanted[index] is None:  # a dummy microbatch
                    continue
                keys, num_rows = wanted[index]
                values = self.to_values(output, layer, step.microbatches[index])
                with naming(self.cache_key):
                    self._cache.add(keys, num_rows, values)

    # ---- Training and validation --------------------------------------------------------------------

    def find(self, samples: Sequence[Sample], num_rows: Sequence[int]) -> Values | _Wanted:
        """Reads the outputs of a microbatch's samples, ``num_rows`` rows each, in the prefetch thread.

        Returns values on the CPU, none on ranks without the last stage; before training, keys.
        Raises CheckpointError with the sample if its outputs are missing or corrupt.
        """
        if self._cache is None:  # start-up checks of a dataset
            return {}
        keys = [self._cache.key_of(self.numbers_of(sample)) for sample in samples]
        if self._is_precomputing:
            return _Wanted(keys, num_rows)
        if not self.ranks.has_last_stage:
            return {}
        try:
            return self._cache.find(keys)
        except KeyError as error:
            sample = samples[error.args[0]]
            raise CheckpointError(
                f"{self.cache_key}={self._folder}: {_describe(sample)} is not in the cache, because the dataset "
                "did not return it in the pass before training; train without a cache"
            ) from None

    @contextmanager
    def attached(self, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        """Yields the microbatches with outputs, computed before any gradient exists.

        They are unchanged on ranks without the last stage, which have no loss. Raises
        NonfiniteError if outputs are NaN or infinite.
        """
        if not self.is_used:
            yield step.microbatches
        elif self._cache is not None:
            none = self._cache.find([])  # of dummy microbatches
            values = [each.targets.teacher or none for each in step.microbatches]
            yield self._attach(step, values, self._output_layer)
        else:
            assert self._model is not None
            start = self._now()
            outputs = self._model.outputs(step.microbatches)
            self._spans.append((start, self._now()))
            with self._gathered_output_layer() as layer:
                values = [
                    self.to_values(output, layer, step.microbatches[index])
                    for index, output in sorted(outputs.items())
                ]
                yield self._attach(step, values, layer)

    def _attach(
        self, step: UpdateStep, values: Sequence[Values], layer: Any
    ) -> Sequence[Microbatch]:
        if not self.ranks.has_last_stage:
            return step.microbatches
        return [
            microbatch.with_teacher(self.attach(each, layer))
            for microbatch, each in zip(step.microbatches, values, strict=True)
        ]

    def read_seconds(self) -> float | None:
        """Returns mean seconds of the model's forwards per update step since the last call.

        None if none ran. Only forwards that the device has finished count, without synchronization.
        """
        is_cuda = self.ranks.device.type == "cuda"
        done = [(start, stop) for start, stop in self._spans if not is_cuda or stop.query()]
        self._spans = self._spans[len(done) :]
        seconds = [a.elapsed_time(b) / 1000 if is_cuda else b - a for a, b in done]
        return sum(seconds) / len(seconds) if seconds else None

    def _now(self) -> Any:
        if self.ranks.device.type == "cuda":
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def _gathered_output_layer(self) -> AbstractContextManager[Any]:
        assert self._model is not None
        return self._model.output_layer() if self.needs_output_layer else nullcontext()


def _describe(sample: Sample) -> str:
    """Returns the name of a pair, or the tokens that a sample of text begins with."""
    tokens = sample.get("tokens", ())
    first = ", ".join(map(str, tokens[:8]))
    return sample.get("name") or f"a sample of {len(tokens)} tokens that begins with {first}"
