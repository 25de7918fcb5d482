"""Proof that a decoder of transformers computes packed rows as it computes their documents one at a time.

Gradients of a cut copy of the model are compared in float64: all kinds of layers, few of each, with
the real widths and numbers of heads, and documents longer than every window. A gradient of zero
across documents is not a test: models with sparse attention pass it, and their gradients still differ.
"""

import copy
import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from filelock import FileLock
from pydantic import TypeAdapter
from torch import Tensor, nn
from torchtune.training import set_default_dtype

from recipe_utils.data.text.documents import Document, Documents, chains, length_of, tree
from recipe_utils.data.text.limits import Kernel, PackedAttention
from recipe_utils.files import log_once, write_atomically
from recipe_utils.model.double_precision import DoublePrecision
from recipe_utils.model.transformers.decoder import (
    Decoder,
    build,
    decoder_name,
    hidden_of,
    layers_of,
)
from recipe_utils.model.transformers.documents import Exchange

Way = Literal["masks", "by_document", "padded"]

WAYS: tuple[Way, ...] = ("masks", "by_document")
"""Ways to compute packed rows, the cheapest first."""
_MAX_MODULES = 3
"""Most classes of modules that run by document in one model."""
_LENGTHS = (17, 29, 1, 22)
"""Tokens of the documents that are compared: more than the copy's windows, chunks and selections."""
_TIMES_ON_DEVICE = 16
"""Factor of their lengths on a device, for several blocks of a kernel."""
_FOREST: list[Document] = [tree(7, tree(3, tree(1, tree(9, 4, 8), 2)), 5), 6, tree(4, 3, 9)]
"""A plain document between trees, with a depth of 5 and segments shorter and longer than the windows."""
_WINDOW = 6
_WINDOWS = re.compile(r"window(?!.*layers)|chunk_size|block_size|index_topk|topk_blocks")
"""Config keys of lengths that are shorter than the documents in a copy."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NUM_EXPERTS = 16
_NUM_TOKENS = 96
_MLP_WIDTH = 256
_BOUND = 1e-8
"""Largest relative difference of a parameter's gradient."""
_NUM_PARTS = 3
"""Parts of a row that ranks compute."""
_SEED = 0


@dataclass(frozen=True)
class Proof:
    """Result of the start-up check of a decoder.

    Attributes:
        way: how packed rows are computed. ``masks``: attention keeps documents apart;
            ``by_document``: ``modules`` run once for each document, too; ``padded``: packed rows are not
            supported, see ``problem``.
        modules: classes of modules.
        axes: dimensions of positions in their tensors, see :func:`.documents.run_by_document`; None
            while it is tried.
        head_is_tail: the output layer alone computes logits from hidden states.
        problem: the module that mixes documents.
        error: largest relative difference of a gradient.
        seconds: time that the proof took.
        splits_attention: attention computes one document after the other, else by a mask [b, s, s].
        head_dims: widths of keys and values.
        attention_needs: see :attr:`.AttentionNeeds.others`.
        computes_trees: sequences may share what they begin with in a packed row.
        can_be_cut: pipeline stages of any layers compute packed rows.
        spans_ranks: ranks may compute parts of a row; all but attention is computed token by token.
    """

    way: Way
    modules: tuple[str, ...]
    head_is_tail: bool
    problem: str | None
    error: float = 0.0
    seconds: float = 0.0
    axes: dict[str, list[int]] | None = None
    splits_attention: bool = False
    head_dims: tuple[tuple[int, int], ...] = ()
    attention_needs: tuple[str, ...] = ()
    computes_trees: bool = False
    can_be_cut: bool = False
    spans_ranks: bool = False

    def __str__(self) -> str:
        how = {
            "masks": "packed rows are exact",
            "by_document": f"packed rows are exact; {', '.join(self.modules)} runs by document",
            "padded": f"rows are padded, since {self.problem} mixes the documents of a packed row",
        }[self.way]
        return (
            f"{how} (gradients of a small copy equal those of separate samples to {self.error:.0e})"
        )


def proof_of(config: Any, attention: str | None = None) -> Proof:
    """Returns the proof for a config, from the user's cache if it was made before.

    Raises ValueError if the model is not causal, its padded rows are not exact, or its logits are
    not made of its decoder's hidden states.
    """
    found = _cached([config, attention], lambda: asdict(prove(config, attention)))
    return TypeAdapter(Proof).validate_python(found)  # lists of JSON become tuples


def error_on_device(
    config: Any,
    attention: str | None,
    proof: Proof,
    dtype: torch.dtype,
    device: torch.device,
    kernel: Kernel,
) -> str | None:
    """Compares gradients of a packed row with those of its documents on a device, in the dtype of training.

    Both are compared with the documents' gradients in fp32: an exact kernel is as far from them as rounding
    alone, so more than twice as far is an error. Returns both distances as text if so, else None.
    """

    def measure() -> dict[str, float]:
        # fp32: some versions of PyTorch draw other weights in bf16.
        with torch.device(device), set_default_dtype(torch.float32), torch.random.fork_rng():
            copied = cut(config)
            in_fp32, in_dtype = (
                _copies(copied, attention, each) for each in (torch.float32, dtype)
            )
            lengths = [n * _TIMES_ON_DEVICE for n in _LENGTHS]
            documents = _drawn(copied, lengths)
            one_by_one = partial(_logits_one_by_one, documents=documents)
            expected = gradients(in_fp32(), one_by_one, documents)
            alone = gradients(in_dtype(), one_by_one, documents)
            decoder = Decoder(in_dtype(), proof)
            decoder.attention = PackedAttention(kernel, "it is compared with separate documents")

            def forward(_: Any) -> Sequence[Tensor]:
                return _of_row(decoder, documents)[0].split(lengths)

            row = gradients(decoder.model, forward, documents)
        return {"row": distance(row, expected), "alone": distance(alone, expected)}

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found = _cached([config, attention, name, kernel, str(dtype)], measure)
    if found["row"] <= 2 * found["alone"] + 1e-5:
        return None
    return f"gradients differ by {found['row']:.0e}, and by {found['alone']:.0e} of rounding"


def paths_of_code() -> list[Path]:
    """Returns the files of this package that a proof depends on."""
    package = Path(__file__).parents[2]
    folders = ("model", "data/text", "parallel")
    paths = [path for folder in folders for path in sorted((package / folder).rglob("*.py"))]
    return [*paths, package / "checkpoint" / "transformers.py"]


def _cached(made_from: Sequence[Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the cached result of ``make`` for these values, versions and code; calls it if there is none.

    If the cache cannot be read, locked or written, the result is only returned, after a warning.
    """
    described = made_from[0].to_diff_dict() | {"model_type": made_from[0].model_type}
    code = [torch.__version__, transformers.__version__, *map(Path.read_text, paths_of_code())]
    text = json.dumps([described, *made_from[1:], *code], default=str)
    key = hashlib.sha256(text.encode()).hexdigest()
    home = os.environ.get("HOME") or tempfile.gettempdir()
    folder = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache"))
    path = folder / "torchtune_update_step" / f"proof_{key[:32]}.json"
    result: dict[str, Any] = {}
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # One of several processes proves. A soft lock would outlive a killed process.
            with FileLock(path.with_suffix(".lock"), timeout=600, fallback_to_soft=False):
                if not path.exists():
                    result = make()
                    write_atomically(path, json.dumps(result).encode())
        result = result or json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        text = f"{path.parent}: it cannot keep the result of the start-up check ({reason}), which each start repeats"
        text += "; set the environment variable XDG_CACHE_HOME to a folder of yours"
        log_once(text, logging.WARNING)
    return result or make()


def prove(config: Any, attention: str | None = None, ways: Sequence[Way] = WAYS) -> Proof:
    """Compares gradients of padded and packed rows with those of documents one at a time.

    Returns the proof of the first of ``ways`` that is exact; see :func:`proof_of`.
    """
    start = time.monotonic()
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), DoublePrecision():
            copied = cut(config)
            make = _copies(copied, attention, torch.float64)
            found = _compare(make, _drawn(copied, _LENGTHS), type(make()).__name__, ways)
    finally:
        torch.set_default_dtype(default)
    return replace(found, seconds=time.monotonic() - start)


def _drawn(config: Any, lengths: Sequence[int]) -> list[Tensor]:
    num_tokens = config.get_text_config().vocab_size
    return [torch.randint(min(3, num_tokens - 1), num_tokens, (n,)) for n in lengths]


def _copies(config: Any, attention: str | None, dtype: torch.dtype) -> Callable[[], Any]:
    """Returns a function that makes equal models with weights of order 1, drawn in the default dtype."""
    torch.manual_seed(_SEED)
    first = build(config, attention).eval()
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    weights = first.state_dict()

    def make() -> Any:
        model = build(config, attention).eval()
        for parameter in model.parameters():  # buffers, such as RoPE's frequencies, stay wide
            parameter.data = parameter.data.to(dtype)
        model.load_state_dict(weights)
        return model

    return make


def _compare(
    make: Callable[[], Any], documents: Sequence[Tensor], name: str, ways: Sequence[Way]
) -> Proof:
    longest, lengths = max(map(len, documents)), [len(d) for d in documents]
    rows = torch.stack([F.pad(d, (0, longest - len(d)), value=1) for d in documents])
    expected = gradients(make(), partial(_logits_one_by_one, documents=documents), documents)
    padded = gradients(make(), lambda model: list(logits_of(model, rows)), documents)
    error_of_padded = difference(padded, expected)
    if not error_of_padded <= _BOUND:
        raise ValueError(
            f"model: {name}: padding changes gradients by {error_of_padded:.0e}; it is not causal, or its choices "
            "depend on rounding (ties of a sparse attention's scores), and cannot be trained exactly"
        )
    head_is_tail = check_tail(make(), make(), documents[0])
    tokens = torch.cat(list(documents))

    def is_exact(proof: Proof, *row: Any, num_stages: int = 1, **options: Any) -> bool:
        stages = [Decoder(make(), proof) for _ in range(num_stages)]
        return _error(stages, *row, **options) <= _BOUND

    for way in ways:
        proofs: Iterable[Proof] = [Proof(way, (), head_is_tail, None)]
        if way == "by_document":
            proofs = _by_document(make, documents, head_is_tail)
        splits = (True, False) if make()._can_set_attn_implementation() else (False,)
        for proof in (replace(proof, splits_attention=each) for proof in proofs for each in splits):
            decoder = Decoder(make(), proof)
            decoder.calls = set()
            error = _error([decoder], tokens, lengths, expected)
            if not error <= _BOUND:
                continue
            proof = replace(
                proof,
                axes=decoder.axes,
                error=error,
                head_dims=tuple(sorted(c for c in decoder.calls if isinstance(c, tuple))),
                attention_needs=tuple(sorted(c for c in decoder.calls if isinstance(c, str))),
            )
            of_forest = tokens[: sum(map(length_of, _FOREST))]
            alone = [of_forest[place] for place in _places(_FOREST)]
            of_alone = gradients(make(), partial(_logits_one_by_one, documents=alone), alone)
            computes_trees = is_exact(
                replace(proof, computes_trees=True), of_forest, _FOREST, of_alone
            )
            proof = replace(proof, computes_trees=computes_trees)
            row, num_stages = (proof, tokens, lengths, expected), len(layers_of(make()))
            # A rank computes some of the heads, and sinks (s_aux) are those of all.
            can_span = proof.splits_attention and not proof.modules
            can_span = can_span and "s_aux" not in proof.attention_needs
            return replace(
                proof,
                can_be_cut=is_exact(*row, num_stages=num_stages),
                spans_ranks=can_span and is_exact(*row, num_ranks=_NUM_PARTS),
            )
    last = Proof(ways[-1], (), head_is_tail, None)
    problem, _ = _modules_that_mix(make, documents, last)
    return Proof("padded", (), head_is_tail, problem or name, error_of_padded)


def _by_document(
    make: Callable[[], Any], documents: Sequence[Tensor], head_is_tail: bool
) -> Iterator[Proof]:
    """Yields proofs to try: each module that mixes documents, innermost first, then more than one."""
    proof = Proof("by_document", (), head_is_tail, None)
    for _ in range(_MAX_MODULES):
        try:
            _, classes = _modules_that_mix(make, documents, proof)
        except Exception:  # any: the modules so far cannot run once per document
            return
        tries = [replace(proof, modules=(*proof.modules, each)) for each in classes]
        yield from tries
        if not tries:
            return
        proof = tries[0]


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Returns logits [b, s, v] by the model's own forward."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _logits_one_by_one(model: Any, documents: Sequence[Tensor]) -> list[Tensor]:
    return [logits_of(model, document[None])[0] for document in documents]


def gradients(
    model: nn.Module, forward: Callable[[Any], Sequence[Tensor]], documents: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Returns each parameter's gradient of the cross-entropy summed over documents.

    ``forward`` returns logits [n or more, v] of each document [n].
    """
    losses = [
        F.cross_entropy(logits[: len(d) - 1], d[1:], reduction="sum")
        for logits, d in zip(forward(model), documents, strict=True)
        if len(d) > 1
    ]
    torch.stack(losses).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the largest difference of a gradient, over the largest element of the expected one.

    A gradient that is zero but for rounding, as a key's bias has, is compared with 1e-6 of the
    largest of all.
    """
    if found.keys() != expected.keys():
        return float("inf")
    least = 1e-6 * max(g.abs().max() for g in expected.values())
    errors = [
        (found[n] - g).abs().max() / g.abs().max().clamp(min=least) for n, g in expected.items()
    ]
    return torch.stack(errors).nan_to_num(nan=torch.inf).max().item()


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the norm of the difference of all gradients, over that of the expected ones."""
    squares = [(found[n].double() - g).square().sum() for n, g in expected.items()]
    norms = [g.double().square().sum() for g in expected.values()]
    return (torch.stack(squares).sum() / torch.stack(norms).sum()).sqrt().item()


def _places(row: Sequence[Document]) -> list[Tensor]:
    """Returns the positions in a row of each sequence."""
    return [torch.cat([torch.arange(*each) for each in chain.ranges]) for chain in chains(row)]


def _error(
    stages: Sequence[Decoder],
    tokens: Tensor,
    row: Sequence[Document],
    expected: Mapping[str, Tensor],
    num_ranks: int = 1,
) -> float:
    """Compares gradients of a row of tokens [s] with those of its sequences one at a time.

    The row passes through ``stages`` of one layer each, or a whole decoder. The parts of ``num_ranks`` are
    concatenated; only attention gets the order of the row, so all other modules must compute token by
    token. Returns infinity if a module cannot run like this.
    """
    places, found = _places(row), dict[str, Any]()
    order = torch.cat([torch.arange(i, len(tokens), num_ranks) for i in range(num_ranks)])
    back, positions = order.argsort(), torch.empty_like(tokens)
    for place in places:
        positions[place] = torch.arange(len(place))
    if num_ranks > 1:
        stages[0].exchanges[num_ranks] = Exchange(
            lambda *heads: tuple(each[back] for each in heads), lambda attended: attended[order]
        )

    def forward(_: Any) -> Sequence[Tensor]:
        hidden = tokens[order][None]
        for index, stage in enumerate(stages):
            if len(stages) > 1:
                stage.cut_to_stage(range(index, index + 1))
            documents = Documents([row], num_ranks)
            hidden = stage(hidden, input_pos=positions[order][None], document_lengths=documents)
        return [hidden[0, back][place] for place in places]

    try:
        gradients(stages[0].model, forward, [tokens[place] for place in places])
    except Exception:  # any: a module that cannot run so
        return float("inf")
    for stage in stages:
        for name, weight in stage.model.named_parameters():
            if weight.grad is not None:  # twice for a tied output
                found[name] = found.get(name, 0) + weight.grad
    return difference(found, expected)


def _of_row(decoder: Decoder, documents: Sequence[Tensor]) -> Tensor:
    logits: Tensor = decoder(
        torch.cat(list(documents))[None],
        input_pos=torch.cat([torch.arange(len(d)) for d in documents])[None],
        document_lengths=Documents([[len(d) for d in documents]]),
    )
    return logits


@torch.no_grad()
def check_tail(model: Any, same: Any, tokens: Tensor) -> bool:
    """Returns True if the output layer alone computes logits from hidden states, for tokens [s].

    ``same`` is an equal model, which a decoder wraps. Raises ValueError if the decoder's logits are
    not those of ``model``.
    """
    expected = logits_of(model, tokens[None])
    decoder = Decoder(same, Proof("masks", (), False, None))
    if not torch.equal(decoder(tokens[None]), expected):
        raise ValueError(
            f"model: {type(model).__name__}: its logits are not made of its decoder's hidden states; it cannot be trained"
        )
    hidden = hidden_of(model._modules[decoder_name(model)](input_ids=tokens[None], use_cache=False))
    return torch.equal(model.get_output_embeddings()(hidden), expected)


@torch.no_grad()
def _modules_that_mix(
    make: Callable[[], Any], documents: Sequence[Tensor], proof: Proof
) -> tuple[str | None, list[str]]:
    """Compares a document in a row with the same one alone, module by module.

    Returns name and class of the first, innermost module that returns different outputs for equal
    inputs, and the classes of all that are smaller than a layer.
    """
    decoder = Decoder(make(), proof)
    start, length = len(documents[0]), len(documents[1])
    num_positions = sum(map(len, documents))
    with _traced(decoder.model, proof.modules) as in_row:
        _of_row(decoder, documents)
    with _traced(decoder.model, proof.modules) as alone:
        decoder(documents[1][None])
    layers = set(map(id, decoder.layers))
    problem, classes = None, []
    for (module, name, *tensors), (_, other, *own) in zip(in_row, alone, strict=False):
        if name != other:
            break
        inputs, outputs = (
            _same(*pair, num_positions, start, length) for pair in zip(tensors, own, strict=True)
        )
        if inputs and not outputs:
            problem = problem or f"{name} ({type(module).__name__})"
            if not any(id(part) in layers for part in module.modules()):
                classes.append(type(module).__name__)
    return problem, list(dict.fromkeys(classes))


_Call = tuple[nn.Module, str, list[Tensor], list[Tensor]]


@contextmanager
def _traced(model: nn.Module, by_document: Sequence[str]) -> Iterator[list[_Call]]:
    """Records inputs and outputs of modules, in the order in which the calls end.

    Modules inside of those that run by document are called more often, and are not recorded.
    """
    of_class = [m for m in model.modules() if type(m).__name__ in by_document]
    inside = {id(part) for m in of_class for part in m.modules() if part is not m}
    calls: list[_Call] = []
    hooks = [
        module.register_forward_hook(
            lambda m, args, kwargs, out, name=name: calls.append(
                (m, name, _tensors_of((args, kwargs)), _tensors_of(out))
            ),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if name and id(module) not in inside
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.clone()] if value.dtype != torch.bool else []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors_of(each)]
    return []


def _same(
    packed: Sequence[Tensor], alone: Sequence[Tensor], num_positions: int, start: int, length: int
) -> bool:
    """Returns True if tensors with one axis of positions are equal; other tensors are not compared."""
    for of_row, own in zip(packed, alone, strict=False):
        if of_row.dim() != own.dim():
            continue
        sizes = list(zip(of_row.shape, own.shape, strict=True))
        axes = [i for i, size in enumerate(sizes) if size == (num_positions, length)]
        if len(axes) == 1:
            part = of_row.narrow(axes[0], start, length)
            if part.shape == own.shape and not torch.allclose(part, own, rtol=1e-9, atol=1e-9):
                return False
    return True


def cut(config: Any) -> Any:
    """Returns a config of few layers of each kind, a small vocabulary, and windows shorter than the documents."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    with torch.device("meta"):
        needed = _num_layers_with_all_kinds(build(config, "eager"))
    for part in {id(config): config, id(text): text}.values():
        for name, value in list(vars(part).items()):
            is_pattern = isinstance(value, str) and "pattern" in name
            is_by_layer = isinstance(value, (list, tuple)) or is_pattern
            if is_by_layer and len(value) == num_layers > needed:
                setattr(part, name, value[:needed])
            elif isinstance(value, bool) or not isinstance(value, int):
                continue
            elif name.startswith("vocab_size"):
                setattr(part, name, min(value, _NUM_TOKENS))
            elif name.endswith("_token_id"):
                setattr(part, name, min(value, 2))
            elif _WINDOWS.search(name):
                setattr(part, name, min(value, _WINDOW))
            elif "intermediate_size" in name:
                setattr(part, name, min(value, _MLP_WIDTH))
            elif name in _EXPERTS:
                setattr(part, name, min(value, _NUM_EXPERTS))
    text.num_hidden_layers = needed
    return config


def _num_layers_with_all_kinds(model: Any) -> int:
    """Returns the smallest number of first layers, at least 2, with all kinds of layers of a model."""
    kinds: dict[str, int] = {}
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        kinds.setdefault(json.dumps([_described(n, m) for n, m in layer.named_modules()]), index)
    return min(len(layers), max(2, max(kinds.values()) + 1))


def _described(name: str, module: nn.Module) -> list[Any]:
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and not key.endswith(("_idx", "_id", "index"))
    }
    shapes = {key: list(p.shape) for key, p in module._parameters.items() if p is not None}
    return [name, type(module).__name__, plain, shapes]
