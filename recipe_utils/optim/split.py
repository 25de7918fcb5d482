"""Two optimizers, for the matrices of layers and for everything else.

Example: Muon steps ``layers.0.attn.q_proj.weight``; AdamW steps embeddings, output layer, norms and biases::

    optimizer:
      _component_: recipe_utils.optim.Split
      matrices: {_component_: torch.optim.Muon, lr: 0.02}
      rest: {_component_: torch.optim.AdamW, lr: 3.0e-4}

A schedule multiplies both rates, which are logged as ``lr/matrices`` and ``lr/rest``.
"""

import re
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf
from torch.optim import Optimizer
from torchtune import config

from recipe_utils.settings.components import MadeWith, check_component
from recipe_utils.settings.problems import ConfigError


class Split(Optimizer):
    """Steps parameters by name with one of two optimizers.

    Args:
        params: parameter groups, each with ``params`` of (name, parameter).
        matrices: component that steps the parameters of two dimensions with a name of ``names``.
        rest: component that steps all others, also weights of experts [e, m, n].
        names: regular expression that is searched for in names.
    """

    takes_names = True

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        matrices: dict[str, Any],
        rest: dict[str, Any],
        names: str = r"(^|\.)layers\.",
    ) -> None:
        self.parts: dict[str, Optimizer] = {}
        for part, component in {"matrices": matrices, "rest": rest}.items():
            if problems := [*check_component(f"optimizer.{part}", component, MadeWith(num_positional=1))]:
                raise ConfigError(*problems)
            groups = []
            for group in params:
                is_matrix = [p.ndim == 2 and bool(re.search(names, name)) for name, p in group["params"]]
                pairs = zip(group["params"], is_matrix, strict=True)
                chosen = [p for (_, p), is_one in pairs if is_one == (part == "matrices")]
                name = "/".join(filter(None, (part, group.get("name"))))
                groups += [{**group, "params": chosen, "name": name}] if chosen else []
            if not groups:
                examples = ", ".join([name for group in params for name, _ in group["params"]][:3])
                text = f"it leaves no parameter to {part}; they are called {examples}, ..."
                raise ValueError(f"optimizer.names={names}: {text}")
            self.parts[part] = config.instantiate(OmegaConf.create(component), groups)
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes one step with both optimizers."""
        for part in self.parts.values():
            part.step()
