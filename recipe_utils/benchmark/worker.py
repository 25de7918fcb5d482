"""A peer's process: ``python -m recipe_utils.benchmark.worker SPEC PIPE``.

``SPEC`` is a JSON file written by :func:`write_spec`, ``PIPE`` the number of an inherited file
descriptor that leads to the benchmark.
"""

import json
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torchtune.utils import get_device

from recipe_utils.benchmark import exactness
from recipe_utils.benchmark.fed_tokens import FedTokens
from recipe_utils.benchmark.peers import KINDS
from recipe_utils.benchmark.turns import Gate


def write_spec(path: Path, job: str, kind: str, config: dict[str, Any], **more: Any) -> Path:
    """Writes what a worker shall do.

    Args:
        path: of the JSON file.
        job: ``"turns"`` trains in turns, ``"gradient_errors"`` compares gradients, and
            ``"references"`` writes what they are compared with.
        kind: of the peer, a key of :data:`recipe_utils.benchmark.peers.KINDS`.
        config: of the recipe, resolved.
        more: ``pad_id`` for ``"turns"``, ``references`` (a folder) for the other two.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"job": job, "kind": kind, "config": config, **more}, indent=1))
    return path


def main() -> None:
    """Does what the spec says; ends when the training is done or the benchmark says so."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    pipe = Connection(int(sys.argv[2]))
    config = OmegaConf.create(spec["config"])

    if spec["job"] == "references":
        exactness.write_references(config, Path(spec["references"]))
        pipe.send(None)
        return
    if spec["job"] == "gradient_errors":
        errors = exactness.GradientErrors(Path(spec["references"]))
        errors.install()
        KINDS[spec["kind"]](config, errors.take_model)
        pipe.send(errors.per_case())
        # Not through the interpreter's end: a process group that is left open may wait there.
        pipe.close()
        os._exit(0)

    fed_tokens = FedTokens(spec["pad_id"])
    fed_tokens.install()
    Gate(pipe, fed_tokens, get_device(config.get("device"))).install()
    KINDS[spec["kind"]](config, lambda _: None)
    raise RuntimeError("the training ended before the benchmark did; is the dataset too small?")


if __name__ == "__main__":
    main()
