"""Outputs of a frozen model for the microbatches of update steps, computed at each step or cached on disk."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchtune.utils import get_logger
from tqdm import tqdm

from recipe_utils.data.loader.loader import UpdateStep, UpdateStepLoader
from recipe_utils.data.loader.microbatch import CacheKeys, Microbatch
from recipe_utils.data.loader.samples import Sample
from recipe_utils.model.frozen.cache import OutputCache, Values
from recipe_utils.model.frozen.model import FrozenModel
from recipe_utils.parallel.process_group import gather_objects
from recipe_utils.parallel.ranks import Ranks
from recipe_utils.settings.problems import naming

_log = get_logger("INFO")

_SECONDS_TO_LOSE = 60.0
"""Seconds of computed outputs that a killed training may lose."""


class OutputKind(NamedTuple):
    """Stored part of a teacher's or a reference's outputs, and its use."""

    name: str
    """Name of the model, for messages."""
    cache_key: str
    """Config key of the cache's folder."""
    numbers_of: Callable[[Sample], Mapping[str, Any]]
    """Returns the integers of a sample that outputs depend on, by name."""
    to_values: Callable[[Any, Any, Microbatch], Values]
    """Converts a microbatch's outputs, with the output layer, to values."""
    attach: Callable[[Values, Any], Any]
    """Converts values, with the output layer, to ``targets.teacher`` of the loss module."""
    needs_output_layer: bool
    """Values are projected by the loss module, so the output layer stays gathered in the step."""
    is_small: bool
    """Values are a few bytes; missing ones are computed during training, too."""


class FrozenOutputs:
    """Attaches a frozen model's outputs to microbatches. All ranks together.

    Without a cache outputs are computed at every update step. With one the prefetch thread looks
    them up, and missing ones are computed once. ``folder`` is the cache's; None for no cache.
    """

    def __init__(self, kind: OutputKind, folder: Path | None, ranks: Ranks) -> None:
        self._kind = kind
        self._folder = folder
        self._ranks = ranks
        self._build: Callable[[], FrozenModel] | None = None
        self.model: FrozenModel | None = None
        """None until it is needed."""
        self._output_layer: Any = None  # without the model, for values from a cache
        self._cache: OutputCache | None = None
        self._is_precomputing = False
        self._has_new = False  # on any rank
        self._written_seconds: float | None = None  # by rank 0's clock
        self._spans: list[tuple[Any, Any]] = []  # start and stop of the model's forwards

    def set_up(
        self,
        build: Callable[[], FrozenModel],
        context: Mapping[str, Any],
        output_layer: Any = None,
    ) -> None:
        """Opens the cache; without one builds the model.

        ``build`` is called at most once. ``context`` are plain values that outputs depend on besides
        the sample; ``output_layer`` projects values from a cache, if they need it.
        """
        self._build, self._output_layer = build, output_layer
        if self._folder is None:
            self.model = build()
            return
        kind, group = self._kind, self._ranks.cpu_group
        context = {**context, "device": self._ranks.device.type}
        self._cache = OutputCache(self._folder, kind.cache_key, context, group, kind.is_small)
        if self._ranks.is_zero:
            _log.info(f"{self._folder}: {kind.name} outputs of {len(self._cache)} samples")

    # ---- Called by the prefetch thread -------------------------------------------------------------

    def find(self, samples: Sequence[Sample], num_rows: Sequence[int]) -> Values | CacheKeys:
        """Looks up the outputs of a microbatch's samples, with ``num_rows`` rows each.

        Returns values on the CPU, none on ranks without the last stage; or keys, where a sample's
        outputs may be missing. For errors see :meth:`OutputCache.find`.
        """
        if self._cache is None:
            return CacheKeys((), (), num_missing=len(samples))
        keys = [self._cache.key_of(self._kind.numbers_of(sample)) for sample in samples]
        if self._is_precomputing or self._kind.is_small:
            # The training loop reads them, so that all ranks of a pipeline have the same missing samples.
            num_missing = self._cache.contains(keys).count(False)
            return CacheKeys(tuple(keys), tuple(num_rows), num_missing)
        return self._cache.find(keys) if self._ranks.has_last_stage else {}

    # ---- Called by the training loop --------------------------------------------------------------

    @contextmanager
    def attached(self, step: UpdateStep) -> Iterator[Sequence[Microbatch]]:
        """Yields the microbatches with outputs, computed before any gradient exists.

        They are unchanged on ranks without the last stage, which have no loss, and before
        :meth:`set_up`. Raises ValueError if outputs are NaN or infinite.
        """
        if self._build is None:
            yield step.microbatches
            return
        if self._cache is None:
            assert self.model is not None
            start = self._now()
            outputs = self.model.outputs(step.microbatches)
            self._spans.append((start, self._now()))
            with self._gathered_output_layer(self.model) as layer:
                values = {
                    index: self._kind.to_values(output, layer, step.microbatches[index])
                    for index, output in outputs.items()
                }
                yield self._attach(step, values, layer)
            return
        computed = self._compute_missing(step)
        if step.is_last_of_epoch:
            self.flush()
        yield self._attach(step, computed, self._output_layer)

    def precompute(self, num_epochs: int, *loaders: UpdateStepLoader | None) -> None:
        """Computes the missing outputs of all samples of ``num_epochs`` epochs.

        Raises ConfigError with the file's name if outputs cannot be written.
        """
        if self._cache is None:
            return
        self._is_precomputing = True
        for loader in filter(None, loaders):
            num_steps, steps = loader.one_pass(num_epochs)
            with steps:
                name, is_quiet = self._kind.name, not self._ranks.is_zero
                for step in tqdm(steps, name, num_steps, disable=is_quiet):
                    self._compute_missing(step)
        self._has_new = True
        self.flush()
        self._is_precomputing = False
        if not self._kind.is_small:
            self.model = None

    def flush(self) -> None:
        """Writes computed outputs and makes them readable on all ranks. All ranks together.

        A checkpoint is saved after it: last digits depend on the other samples of a microbatch, so a
        resumed training must read them.
        """
        if self._has_new and self._cache is not None:
            self._write()
            self._cache.reload()
        self._has_new = False

    def read_seconds(self) -> float | None:
        """Returns mean seconds of the model's forwards per update step since the last call.

        None if none ran. Only forwards that the device has finished count, without synchronization.
        """
        is_cuda = self._ranks.device.type == "cuda"
        done = [(start, stop) for start, stop in self._spans if not is_cuda or stop.query()]
        self._spans = self._spans[len(done) :]
        seconds = [a.elapsed_time(b) / 1000 if is_cuda else b - a for a, b in done]
        return sum(seconds) / len(seconds) if seconds else None

    def _now(self) -> Any:
        if self._ranks.device.type == "cuda":
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter()

    def _compute_missing(self, step: UpdateStep) -> dict[int, Values]:
        """Computes and caches the missing outputs of an update step; returns them by microbatch index."""
        assert self._cache is not None
        if step.totals.get("missing_pairs") == 0:  # a total over ranks, so no communication
            return {}
        missing = {
            index: microbatch.targets.teacher
            for index, microbatch in enumerate(step.microbatches)
            if isinstance(microbatch.targets.teacher, CacheKeys)
            and not all(self._cache.contains(microbatch.targets.teacher.keys))
        }
        # Rounds, because ranks compute a round together, and some of its rows; known outputs are dropped.
        rounds: list[int] = []
        if self._is_precomputing or self._kind.is_small:
            rounds = sorted(set().union(*gather_objects(list(missing), self._ranks.cpu_group)))
        if not rounds:
            return {}
        if self.model is None:
            assert self._build is not None
            self.model = self._build()
        microbatches = [step.microbatches[index] for index in rounds]
        outputs = self.model.outputs(microbatches)
        computed = {}
        with self._gathered_output_layer(self.model) as layer, self._naming_cache():
            for place, index in enumerate(rounds if outputs else ()):
                if (wanted := missing.get(index)) is None:
                    continue
                values = self._kind.to_values(outputs[place], layer, microbatches[place])
                self._cache.add(wanted.keys, wanted.num_rows, values)
                if not self._is_precomputing:
                    computed[index] = self._with_known_rows(wanted, values)
        self._has_new = True
        if self._written_seconds is None:
            self._written_seconds = step.clock_seconds
        # Measured by rank 0's clock, so that all ranks write together.
        if step.clock_seconds - self._written_seconds >= _SECONDS_TO_LOSE:
            self._write()
            self._written_seconds = step.clock_seconds
        return computed

    def _with_known_rows(self, wanted: CacheKeys, values: Values) -> Values:
        """Replaces rows that the cache contains, since another microbatch may have computed other last digits."""
        assert self._cache is not None
        values = {name: rows.cpu() for name, rows in values.items()}
        is_known = self._cache.contains(wanted.keys)
        known = self._cache.find(list(compress(wanted.keys, is_known)))
        is_row_known = torch.tensor(is_known).repeat_interleave(torch.tensor(wanted.num_rows))
        for name, rows in known.items():
            values[name][is_row_known] = rows
        return values

    def _attach(
        self, step: UpdateStep, values: Mapping[int, Values], layer: Any
    ) -> Sequence[Microbatch]:
        if not self._ranks.has_last_stage:
            return step.microbatches
        attached = []
        for index, microbatch in enumerate(step.microbatches):
            found = values.get(index, microbatch.targets.teacher)
            if found is None or isinstance(found, CacheKeys):
                assert self._cache is not None
                found = self._cache.find(found.keys if found else ())  # no keys: a dummy microbatch
            attached.append(microbatch.with_teacher(self._kind.attach(found, layer)))
        return attached

    def _gathered_output_layer(self, model: FrozenModel) -> AbstractContextManager[Any]:
        return model.output_layer() if self._kind.needs_output_layer else nullcontext()

    def _write(self) -> None:
        assert self._cache is not None
        try:
            with self._naming_cache():
                self._cache.write()
        except OSError as error:
            _log.warning(
                f"{self._kind.cache_key}: {error}; its outputs are computed again when needed"
            )

    def _naming_cache(self) -> AbstractContextManager[None]:
        """Converts errors to problems of the folder's key, except for small outputs, which are computed again."""
        return naming(self._kind.cache_key) if not self._kind.is_small else nullcontext()
