"""Corrects torchtune 0.6.1 when it is imported: it trains pairs without ``prompt``, tools, tool calls and thinking."""

from collections.abc import Mapping
from typing import Any

from torchtune.data import ChosenRejectedToMessages

from recipe_utils.preference.rows import SIDES, has_own_prompt
from recipe_utils.text.conversations.messages import read_tools
from recipe_utils.text.torchtune_messages import check_message
from recipe_utils.update_steps.samples import SampleError

_convert = ChosenRejectedToMessages.__call__
_REMEDY = "set dataset to a recipe_utils.preference.pair_dataset"


def _convert_whole(self: ChosenRejectedToMessages, sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises SampleError for a pair of which torchtune would lose a part, else as torchtune."""
    for side in (sample[self._column_map[name]] for name in SIDES):
        if not isinstance(side, list):
            text = "instead of a list of messages, as torchtune takes them"
            raise SampleError(f"it has {str(side)[:60]!r} {text}; {_REMEDY}")
        for message in side:
            check_message(message, _REMEDY)
        if sample.get("prompt") and not has_own_prompt(sample["prompt"], side):
            raise SampleError(f"torchtune's preference_dataset leaves its prompt out; {_REMEDY}")
    if read_tools(sample.get("tools")):
        raise SampleError(f"torchtune's preference_dataset leaves its tools out; {_REMEDY}")
    return _convert(self, sample)


ChosenRejectedToMessages.__call__ = _convert_whole
