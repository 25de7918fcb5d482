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

import torch
from omegaconf import OmegaConf
from torchtune import config as torchtune_config

from recipe_utils.benchmark import exactness
from recipe_utils.benchmark.interleave import Gate, end_with_the_benchmark
from recipe_utils.benchmark.matrix_peak import measure_products
from recipe_utils.benchmark.peer_configs import Peer
from recipe_utils.benchmark.peers import KINDS
from recipe_utils.benchmark.token_audit import FedTokens


def write_spec(
    path: Path, job: str, peer: Peer, config: dict[str, Any], pad_id: int, references: Path
) -> Path:
    """Writes what a worker shall do.

    Args:
        path: of the JSON file.
        job: ``"turns"`` trains in turns, ``"gradient_errors"`` compares gradients,
            ``"references"`` writes what they are compared with, and ``"products"`` times matrix products.
        peer: whose work it is.
        config: of the recipe, resolved.
        pad_id: the token that batches are padded with.
        references: folder of the gradients to compare with.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = {
        "job": job,
        "recipe": peer.recipe,
        "kind": peer.kind,
        "config": config,
        "pad_id": pad_id,
        "references": str(references),
    }
    path.write_text(json.dumps(spec, indent=1))
    return path


def main() -> None:
    """Waits for its first turn, then does what the spec says until the benchmark ends it."""
    end_with_the_benchmark()
    spec = json.loads(Path(sys.argv[1]).read_text())
    pipe = Connection(int(sys.argv[2]))
    config = OmegaConf.create(spec["config"])
    train = KINDS[spec["recipe"]][spec["kind"]]
    fed_tokens = FedTokens(spec["pad_id"])
    gate = Gate(pipe, fed_tokens, torch.device(config.device))
    gate.wait_for_turn()

    if spec["job"] == "turns":
        fed_tokens.install()
        gate.install()
        train(config, lambda _: None)
        raise RuntimeError("the training ended before the benchmark did")
    if spec["job"] == "products":
        pipe.send(measure_products(config))
    elif spec["job"] == "references":
        exactness.write_references(config, Path(spec["references"]))
        pipe.send(None)
    else:
        cases = torchtune_config.instantiate(config.dataset, None).cases()
        errors = exactness.GradientErrors(Path(spec["references"]), list(cases))
        errors.install()
        train(config, errors.take_model)
        pipe.send(errors.per_case())
    # Not through the interpreter's end: a process group that is left open may wait there for others.
    pipe.close()
    os._exit(0)


if __name__ == "__main__":
    main()
