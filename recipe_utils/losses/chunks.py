"""Sums over target tokens, with logits and their gradients computed chunk by chunk in the forward.

Example: 16,384 target tokens of a vocabulary of 128,256 have 8.4 GB of fp32 logits, and gradients of the same size. In
chunks of 2,048 targets no more than 1.1 GB of logits exists. A chunk is projected, its loss is added to the sums, and
its logits become their own gradient, which two more products turn into those of the hidden states and of the weight.
Then they are freed. The backward only multiplies both gradients by that of the sum.

Shapes: d embedding width, v vocabulary, n target tokens, c target tokens of a chunk, k sums.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from recipe_utils.compiler import configure_compiler
from recipe_utils.update_steps.step import Targets


class TiedOutput(Protocol):
    """torchtune's ``TiedLinear``, which is no module: it multiplies with the weight of one."""

    tied_module: nn.Module

    def __call__(self, hidden: Tensor, /) -> Tensor: ...  # noqa: D102


OutputLayer = nn.Module | TiedOutput
"""Output projection of hidden states [..., d] to logits [..., v]."""

ChunkLoss = Callable[[Tensor, slice, bool], tuple[Tensor, Tensor | None]]
"""Takes the logits of a chunk [c, v], at least fp32, which it may overwrite, the slice of its rows in all rows,
and True if a gradient is needed. Returns sums [k], and the first one's gradient for the logits [c, v]."""

Record = Callable[[Tensor, Tensor | None, Tensor | None], None]
"""Takes losses of targets or pairs [n], the index in the dataset of each one's sample [n], and its position in the
update step [n]; None for both if a ``collate_fn`` made another number of rows than samples."""

_CHUNKS_IN_BF16 = 4
"""Chunks whose weight gradients are summed in bf16. The error of 32 chunks is 1.4 times that of one; 3.4 times if
all are summed in bf16."""


class ChunkedLoss(nn.Module):
    """Base of loss modules that project hidden states at target tokens in chunks.

    No more than one chunk of logits exists at a time: each chunk's gradient is computed along with
    its sums (three matrix products, none twice). Chunking over tokens follows torchtune (pull
    1390), computing gradients in the forward follows Liger Kernel (arXiv:2410.10989).

    The output layer itself projects each of ``num_output_chunks`` chunks, and again in the backward, if
    it is tensor parallel, a separate FSDP2 unit or of another class, or has a bias or a fake-quantized
    weight. Their number is fixed, because all FSDP ranks must call the layer equally often.

    Args:
        tokens_per_chunk: target tokens projected at once.
        num_output_chunks: number of chunks if the output layer is called as a module.
        ignore_index: label of positions that are no targets.
        key: config key of the loss, for the ValueError of a number of chunks below 1.
    """

    takes_hidden_states = True
    records: Sequence[Record] = ()
    """See :mod:`recipe_utils.training.parts.sample_losses`."""

    def __init__(self, tokens_per_chunk: int, num_output_chunks: int, ignore_index: int, key: str) -> None:
        super().__init__()
        sizes = {"tokens_per_chunk": tokens_per_chunk, "num_output_chunks": num_output_chunks}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{key}.{name}={size}: it must be at least 1")
        self.tokens_per_chunk = tokens_per_chunk
        self.num_output_chunks = num_output_chunks
        self.ignore_index = ignore_index

    def new_losses(self, hidden: Tensor) -> Tensor | None:
        """Returns a buffer for each target's loss [n], which a recomputation overwrites; None without ``records``."""
        return None if not self.records else hidden.new_zeros(len(hidden), dtype=sum_dtype(hidden))

    def record_losses(self, losses: Tensor | None, targets: Targets) -> None:
        """Records losses [n], if there are any."""
        if losses is not None:
            places = [None if each is None else targets.of_targets(each) for each in (targets.items, targets.samples)]
            for record in self.records:
                record(losses, *places)

    def at_targets(self, hidden: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Returns hidden states [n, d] of [b, s, d], and labels [n], of the target tokens."""
        labels = targets.labels.flatten().index_select(0, targets.positions)
        return hidden.flatten(0, 1).index_select(0, targets.positions), labels

    def sum_over_chunks(
        self,
        output: OutputLayer,
        hidden: Tensor,
        chunk_loss: ChunkLoss,
        num_sums: int,
        backward_in_parts: bool = False,
    ) -> Tensor:
        """Returns the sums of a loss over all chunks, [k], at least fp32; the first has a gradient.

        If ``hidden`` [n, d] has no rows, the sums are 0, with a graph. With ``backward_in_parts``
        the backward runs twice, for ``hidden`` and for the weight (zero-bubble schedules), which
        needs a second copy of both gradients.
        """
        # A plain weight: gradients are computed in the forward, each matrix product once.
        weight = plain_weight(output)
        if weight is not None:
            if not torch.is_grad_enabled():
                weight = weight.detach()  # otherwise validation would compute its gradient
            sums: Tensor = _SumsOfPlainWeight.apply(
                hidden, weight, chunk_loss, num_sums, self.tokens_per_chunk, backward_in_parts
            )
            return sums
        # The module itself projects each chunk, and again in the backward, so that no logits are kept.
        sums = hidden.new_zeros(num_sums, dtype=sum_dtype(hidden))
        start = 0
        for part in hidden.tensor_split(self.num_output_chunks):
            rows = slice(start, start + len(part))
            arguments = output, part, rows, chunk_loss
            sums = sums + checkpoint(_sums_of_output, *arguments, use_reentrant=False)
            start = rows.stop
        return sums


def compiled_for_all_lengths(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """Compiles a function of a chunk's rows (logits [c, v], ...) once for any number of rows."""
    configure_compiler()
    compiled = torch.compile(function, dynamic=True, backend=backend)

    def call(logits: Tensor, *others: Any) -> Any:
        # The compiler would specialize on 0 and 1 rows, and on the sizes of tensors that vectors are slices of.
        if len(logits) < 2:
            return function(logits, *others)
        return compiled(logits, *(e.clone() if isinstance(e, Tensor) and e.dim() == 1 else e for e in others))

    return call


class WeightGradient:
    """Gradient of an output weight [v, d], summed over chunks.

    Each addition in bf16 rounds, so bf16 sums of a few chunks are summed in fp32, in a buffer of v * d
    numbers that exists only with more chunks. An fp32 sum of all chunks would move three times the bytes.
    """

    def __init__(self, weight: Tensor) -> None:
        self._few = torch.zeros_like(weight)
        self._num_chunks = 0
        self._rest: Tensor | None = None

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        """Adds the gradient of a chunk, for ``grad_logits`` [c, v] and ``hidden`` [c, d]."""
        is_low = self._few.dtype.itemsize < torch.float32.itemsize
        if is_low and self._num_chunks == _CHUNKS_IN_BF16:
            self._rest = self._few.float() if self._rest is None else self._rest.add_(self._few)
            self._few.zero_()
            self._num_chunks = 0
        self._few.addmm_(grad_logits.t(), hidden)
        self._num_chunks += 1

    def total(self) -> Tensor:
        """Returns the gradient [v, d] in the dtype of the weight."""
        return self._few if self._rest is None else self._rest.add_(self._few).to(self._few.dtype)


class _SumsOfPlainWeight(torch.autograd.Function):
    """Sums over hidden @ weight.T, with gradients computed in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        chunk_loss: ChunkLoss,
        num_sums: int,
        tokens_per_chunk: int,
        backward_in_parts: bool,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = WeightGradient(weight) if needs_weight else None
        sums = hidden.new_zeros(num_sums, dtype=sum_dtype(hidden))
        for rows in chunks_of(len(hidden), tokens_per_chunk):
            # The logits have no name here, so that chunk_loss can free them.
            of_chunk, grad_logits = chunk_loss(
                (hidden[rows] @ weight.t()).to(sums.dtype), rows, needs_hidden or needs_weight
            )
            sums += of_chunk
            if grad_logits is None:
                continue
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.add(grad_logits, hidden[rows])
            del grad_logits
        # Attributes, not saved tensors: hooks that offload activations must not move these.
        ctx.grads = (grad_hidden, None if grad_weight is None else grad_weight.total())
        ctx.backward_in_parts = backward_in_parts
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        """Scales the forward's gradients in place. A second backward needs ``backward_in_parts``."""
        grads = ctx.grads
        if ctx.backward_in_parts:
            grads = [None if grad is None else grad.clone() for grad in grads]
        else:
            ctx.grads = None
        for grad in grads:
            if grad is not None:
                grad.mul_(grad_sums[0])
        return *grads, None, None, None, None


def _sums_of_output(output: Any, hidden: Tensor, rows: slice, chunk_loss: ChunkLoss) -> Tensor:
    logits = output(hidden)
    sums: Tensor = _SumsOfLogits.apply(logits.to(sum_dtype(logits)), rows, chunk_loss)
    return sums


class _SumsOfLogits(torch.autograd.Function):
    """Sums over logits [c, v] that a module has computed."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: slice, chunk_loss: ChunkLoss) -> Tensor:
        # A copy, because chunk_loss may overwrite it and the logits belong to the module.
        sums, grad_logits = chunk_loss(logits.clone(), rows, ctx.needs_input_grad[0])
        if grad_logits is not None:
            # A saved tensor, unlike above: checkpointing drops and recomputes it.
            ctx.save_for_backward(grad_logits)
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        (grad_logits,) = ctx.saved_tensors
        return grad_logits * grad_sums[0], None, None


def chunks_of(num_tokens: int, tokens_per_chunk: int) -> list[slice]:
    """Returns the rows of each chunk."""
    starts = range(0, num_tokens, tokens_per_chunk)
    return [slice(start, start + tokens_per_chunk) for start in starts]


def plain_weight(output: OutputLayer) -> Tensor | None:
    """Returns the weight [v, d] of an output layer that only multiplies with it, as a plain tensor; else None."""
    if not isinstance(output, nn.Module):
        weight: Tensor = output.tied_module.weight  # type: ignore[assignment]
    elif type(output) is nn.Linear and output.bias is None and "forward" not in vars(output):
        weight = output.weight
    else:
        return None  # also an FSDPModule: its weight is sharded until its own forward
    return None if isinstance(weight, DTensor) else weight


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype in which a loss of ``tensor`` is summed: at least fp32."""
    return torch.promote_types(tensor.dtype, torch.float32)
