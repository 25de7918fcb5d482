"""Output layers of every kind, targets of hidden states, and a watch over logits."""

import weakref

import tiny
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtune.modules.tied_linear import TiedLinear

from recipe_utils.update_steps.step import Targets

D, V = 8, 53


def make_targets(labels):
    return Targets(labels, (labels.flatten() != tiny.IGNORE).nonzero().squeeze(1))


def make_output(kind):
    linear = nn.Linear(D, V, bias=kind == "bias")
    return TiedLinear(nn.Embedding(V, D)) if kind == "tied" else linear


def parameters_of(output):
    return list((output.tied_module if isinstance(output, TiedLinear) else output).parameters())


class LogitsWatch(TorchDispatchMode):
    """Records every tensor that an operation makes and that is as wide as the vocabulary."""

    def __init__(self):
        super().__init__()
        self.alive, self.most_rows, self.most_alive = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (V,):
                self.see(tensor)
        return result

    def see(self, tensor):
        if tensor.shape == (D, V):  # the weight transposed, or its gradient
            return
        self.most_rows = max(self.most_rows, tensor.numel() // V)
        self.alive.append(weakref.ref(tensor))
        alive = {t.untyped_storage().data_ptr(): t.numel() // V for r in self.alive if (t := r()) is not None}
        self.most_alive = max(self.most_alive, sum(alive.values()))
