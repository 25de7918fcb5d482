"""Parts of a training: what it does beside its update steps, listed in a recipe's ``setup``.

With ``log_every_n_steps: 4``, an average of the weights (``parts.add``) and an evaluation every 2 update steps
(``parts.add_every(2, ...)``):

==================  ==========  =============  ==========  =============
update step         1           2              3           4
==================  ==========  =============  ==========  =============
in training time    average     average        average     average
log line            -           -              -           loss, lr, ...
timed apart         -           evaluation     -           evaluation
==================  ==========  =============  ==========  =============

The evaluation's metrics are written at 2 and 4, and the tokens per second of the log line at 4 are those of four
update steps without the two evaluations. A checkpoint contains the average of each parameter as the tensor
``part.average.PARAMETER``, in shards that any number of ranks can load.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from recipe_utils.update_steps.step import UpdateStep

Metric = float | Tensor


class Part:
    """Part of a training. A class that names it as its base implements only the methods that it needs.

    All ranks call the methods together.
    """

    def begin(self, epoch: int) -> None:
        """Called before the first update step of an epoch is prepared, and before those that a resumed one has left.

        Timed apart. The run ends after it if ``run.stop.is_agreed``, which all ranks must set together.
        """

    def before(self, step: UpdateStep) -> None:
        """Called before each update step; ``run.global_step`` does not count it yet."""

    def after(self, step: UpdateStep) -> Mapping[str, Metric]:
        """Called after an update step is enqueued; ``run.global_step`` counts it. Returns metrics, equal on all ranks.

        After each one, in training time: it should not wait for the device, and its metrics are logged with the
        update step's. With an interval it is called when due, timed apart, and its metrics are always written.
        """
        return {}

    def state(self) -> Mapping[str, Any]:
        """Returns what a checkpoint holds: JSON values, equal on all ranks, and tensors by name.

        A tensor is sharded as a parameter, or the same on all ranks. Those of a start have the shapes of all.
        """
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes the values of :meth:`state` in a checkpoint. Its tensors are those of now, read in place."""

    def summary(self) -> Iterable[str]:
        """Returns lines for the end of a complete training."""
        return ()

    def close(self, error: BaseException | None) -> None:
        """Called once at the end of a run, also after an ``error``, which it may replace by raising another one."""


class _Listed(NamedTuple):
    part: Part
    every_n_steps: int | None
    """None for each update step, in training time."""
    at_ends: bool


class Parts:
    """Parts of a training, called in the order in which a recipe adds them."""

    weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context in which the model has the weights that are validated, answer and are exported. Default:
    those that are trained. See :func:`recipe_utils.models.weights.with_weights`."""

    def __init__(self) -> None:
        self._listed: dict[str, _Listed] = {}

    def add(self, name: str, part: Part) -> None:
        """Adds a part that belongs to each update step; ``name`` is that of its state in checkpoints."""
        self._add(name, _Listed(part, None, False))

    def add_every(self, every_n_steps: int | None, name: str, part: Part, at_ends: bool = False) -> None:
        """Adds a part with an interval; None adds nothing.

        ``at_ends`` also calls its ``after`` before the first update step, which it gets, and after the last one.
        """
        if every_n_steps is not None:
            self._add(name, _Listed(part, every_n_steps, at_ends))

    def _add(self, name: str, listed: _Listed) -> None:
        if name in self._listed or "." in name:
            raise ValueError(f"{name}: a part's name has no dot and is that of one part only; set another one")
        self._listed[name] = listed

    def begin(self, epoch: int) -> None:
        """Calls each part before an epoch."""
        for listed in self._listed.values():
            listed.part.begin(epoch)

    def before(self, step: UpdateStep) -> None:
        """Calls each part before an update step."""
        for listed in self._listed.values():
            listed.part.before(step)

    def after(self, step: UpdateStep) -> dict[str, Metric]:
        """Calls the parts of each update step. Returns their metrics."""
        metrics: dict[str, Metric] = {}
        for listed in self._listed.values():
            if listed.every_n_steps is None:
                metrics |= listed.part.after(step)
        return metrics

    def due(self, global_step: int, is_last: bool) -> list[Part]:
        """Returns the parts with an interval that are due after ``global_step`` update steps, 0 before the first."""
        return [
            part
            for part, every_n_steps, at_ends in self._listed.values()
            if every_n_steps is not None
            if (at_ends and (is_last or not global_step)) or (global_step and global_step % every_n_steps == 0)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of all states as ``NAME.KEY``."""
        states = {name: listed.part.state() for name, listed in self._listed.items()}
        return {
            f"{name}.{key}": value.detach()
            for name, state in states.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def values(self) -> dict[str, dict[str, Any]]:
        """Returns the other values of all states by name of the part."""
        states = {name: listed.part.state() for name, listed in self._listed.items()}
        return {
            name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            for name, state in states.items()
        }

    def load(self, values: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        """Passes a checkpoint's :meth:`values` to the parts, whose tensors are read already.

        Yields the names of parts with a state of which the checkpoint has none: their state is that of a start.
        """
        for name, listed in self._listed.items():
            if name in values:
                tensors = {key: value for key, value in listed.part.state().items() if isinstance(value, Tensor)}
                listed.part.load({**tensors, **values[name]})
            elif listed.part.state():
                yield name

    def summary(self) -> Iterator[str]:
        """Yields the lines of all parts."""
        for listed in self._listed.values():
            yield from listed.part.summary()

    def close(self, error: BaseException | None) -> None:
        """Closes all parts, the last one first. Raises the last error of a part, after all are closed."""
        raised = None
        for listed in reversed(self._listed.values()):
            try:
                listed.part.close(error)
            except Exception as replacement:  # any: the others are closed, too
                raised = replacement
        if raised is not None:
            raise raised
