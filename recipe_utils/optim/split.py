"""Two optimizers, for the matrices of layers and for everything else."""

import re
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from torch.optim import Optimizer

from recipe_utils.settings.components import MadeWith, check_component
from recipe_utils.settings.problems import ConfigError
from recipe_utils.torchtune_names import instantiate


class Split(Optimizer):
    """Steps parameters by name with one of two optimizers, whose rates are logged as ``lr/matrices`` and ``lr/rest``.

    Example: ``matrices: {_component_: torch.optim.Muon, lr: 0.02}`` steps ``layers.0.attn.q_proj.weight``, and
    ``rest: {_component_: torch.optim.AdamW, lr: 3.0e-4}`` embeddings, output layer, norms and biases.

    ``params`` are groups of (name, parameter). ``matrices`` steps parameters of two dimensions in whose name the regular
    expression ``names`` is found; ``rest`` steps all others, also weights of experts [e, m, n].
    """

    takes_names = True

    def __init__(
        self, params: Sequence[dict[str, Any]], matrices: dict[str, Any], rest: dict[str, Any],
        names: str = r"(^|\.)layers\.",
    ) -> None:  # fmt: skip
        self.parts: dict[str, Optimizer] = {}
        for part, component in {"matrices": matrices, "rest": rest}.items():
            if problems := [*check_component(f"optimizer.{part}", component, MadeWith(num_positional=1))]:
                raise ConfigError(*problems)
            # A group keeps its options; the log names its rate by optimizer and group.
            groups = []
            for group in params:
                is_matrix = {name: p.ndim == 2 and bool(re.search(names, name)) for name, p in group["params"]}
                if chosen := [p for name, p in group["params"] if is_matrix[name] == (part == "matrices")]:
                    groups.append(
                        {**group, "params": chosen, "name": "/".join([part, *filter(None, [group.get("name")])])}
                    )
            # An optimizer without parameters would be an error of its own, which names no key.
            if not groups:
                examples = ", ".join([name for group in params for name, _ in group["params"]][:3])
                raise ValueError(
                    f"optimizer.names={names}: it leaves no parameter to {part}; there are {examples}, ..."
                )
            self.parts[part] = instantiate(OmegaConf.create(component), groups)
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one step with both optimizers."""
        for part in self.parts.values():
            part.step()
