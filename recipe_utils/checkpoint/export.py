"""The model in the checkpointer's own format, as a folder that is whole or not there."""

import copy
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from torchtune import training

from recipe_utils.checkpoint.folder import TEMPORARY_EXPORT, replace_folder
from recipe_utils.files import fsync_tree


class ExportError(RuntimeError):
    """A model that could not be exported."""


def export_weights(checkpointer: Any, weights: dict[str, Tensor], name: str) -> Path:
    """Saves weights as a folder of the checkpointer's output folder.

    The checkpointer writes into a temporary folder, which gets its name once everything in it is on
    the disk. What was there under that name is replaced then.

    Args:
        checkpointer: one of torchtune's for full models, which has loaded the weights to start from.
        weights: full (unsharded), by torchtune's names.
        name: of the folder.

    Returns:
        Where they are.

    Raises:
        ExportError: why they could not be saved. Nothing is left of them, and what was there stays.
    """
    output_dir = Path(checkpointer._output_dir)
    temporary = output_dir / TEMPORARY_EXPORT
    redirected = copy.copy(checkpointer)
    redirected._output_dir = temporary
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        redirected.save_checkpoint(
            {training.MODEL_KEY: weights}, epoch=0, intermediate_checkpoint=False
        )
        fsync_tree(temporary)
        replace_folder(temporary / "epoch_0", output_dir / name)
    except Exception as error:
        raise ExportError(f"{output_dir / name}: it could not be exported ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return output_dir / name
