"""Corrects torchtune 0.6.1 when it is imported: it trains pairs without ``prompt``, tools, tool calls and thinking."""

from collections.abc import Mapping
from typing import Any

from torchtune.data import ChosenRejectedToMessages

from recipe_utils.preference.rows import SIDES
from recipe_utils.text.torchtune_messages import check_row
from recipe_utils.update_steps.samples import SampleError

_convert = ChosenRejectedToMessages.__call__
_REMEDY = "set dataset to a recipe_utils.preference.pair_dataset"


def _convert_whole(self: ChosenRejectedToMessages, sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises SampleError for a pair of which torchtune would lose a part, else as torchtune."""
    columns = [self._column_map[name] for name in SIDES]
    for side in (sample[column] for column in columns):
        if not isinstance(side, list):
            text = "instead of a list of messages, as torchtune takes them"
            raise SampleError(f"it has {str(side)[:60]!r} {text}; {_REMEDY}")
    check_row(self, sample, columns, _REMEDY)
    return _convert(self, sample)


ChosenRejectedToMessages.__call__ = _convert_whole
