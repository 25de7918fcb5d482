"""Check that a decoder of transformers computes packed rows as it computes their documents one at a time.

Gradients of a cut copy of the model are compared in float64: all kinds of layers, few of each, with
the real widths and numbers of heads, and documents longer than every window. A gradient of zero
across documents is not a test: models with sparse attention pass it, and their gradients still differ.

Example: documents of 17, 29, 1 and 22 tokens are computed one at a time, then as one row of 69 positions whose
positions restart at 17, 46 and 47. For Qwen3 all gradients agree to 1e-15, since its mask keeps documents apart.
For LFM2 they do not: its convolution passes tokens of one document to the next. Compared module by module,
``Lfm2ShortConv`` is the first to return other outputs for equal inputs. So it runs once for each document, and
the gradients of the row agree. If they still differ after three classes of modules, rows are padded.
"""

import copy
import hashlib
import json
import logging
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from filelock import FileLock
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import keystr, tree_leaves_with_path
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from recipe_utils.files import write_atomically
from recipe_utils.models.attention.exchange import Exchange
from recipe_utils.models.transformers.decoder import Decoder, build, layers_of
from recipe_utils.models.transformers.double_precision import DoublePrecision
from recipe_utils.models.transformers.interface import Axes, PackingCheck
from recipe_utils.models.transformers.masks import NEEDS, Setting
from recipe_utils.text.documents import Document, Documents, chains, length_of, tree
from recipe_utils.text.limits import Kernel, PackedAttention
from recipe_utils.torchtune_names import log_once, set_default_dtype

_MAX_MODULES = 3
"""Most classes of modules that run by document in one model."""
_LENGTHS = (17, 29, 1, 22)
"""Tokens of the documents that are compared: more than the copy's windows, chunks and selections."""
_TIMES_ON_DEVICE = 16
"""Factor of their lengths on a device, for several blocks of a kernel."""
_FOREST: list[Document] = [tree(7, tree(3, tree(1, tree(9, 4, 8), 2)), 5), 6, tree(4, 3, 9)]
"""A plain document between trees, with a depth of 5 and segments shorter and longer than the windows."""
_MOST = {
    r"window(?!.*layers)|chunk_size|block_size|index_topk|topk_blocks": 6,  # shorter than the documents
    r"^(num_experts|num_local_experts|n_routed_experts)$": 16,
    "intermediate_size": 256,
}
"""Largest values of config keys in a copy."""
_MOST_OF_TOKENS = {"^vocab_size": 96, "_token_id$": 2}
_OF_ONE_LAYER = ("_idx", "_id", "index", "store_full_length_kv")
"""Endings of attributes that do not make another kind of layer. Gemma 4's last layers store keys for later ones."""
_DEPTHS = ("num_hidden_layers", "depth", "encoder_layers", "n_layers")
"""Keys of the number of layers in configs of parts for other data than text."""
BOUND = 1e-8
"""Largest relative difference of a parameter's gradient."""


def cached_packing_check(config: Any, attention: str | None = None) -> PackingCheck:
    """Returns :func:`check_packing` of a config, from the user's cache if it was made before.

    Raises ValueError if the model is not causal, its padded rows are not exact, or its logits are
    not made of its decoder's hidden states.
    """
    result = cached([config, attention], lambda: asdict(check_packing(config, attention)))
    return TypeAdapter(PackingCheck).validate_python(result)  # lists of JSON become tuples


Gradients = Mapping[str, Tensor]
"""By the name of the parameter."""
OnDevice = Callable[[Callable[[Any], Decoder]], tuple[Gradients, Gradients, Gradients]]
"""Maps a maker of decoders to gradients of separate samples in fp32, in the dtype of training, and of them in a row."""


def error_on_device(
    config: Any,
    attention: str | None,
    check: PackingCheck,
    dtype: torch.dtype,
    device: torch.device,
    kernel: Kernel,
    compute: OnDevice | None = None,
    made_from: str = "",
) -> str | None:
    """Compares gradients of a packed row with those of its documents on a device, in the dtype of training.

    Both are compared with the documents' gradients in fp32: an exact kernel is as far from them as rounding
    alone, so more than twice as far is an error. Returns both distances as text if so, else None.

    ``compute`` computes other rows than those of texts; ``made_from`` is what they depend on beside the model.
    """

    def with_kernel(model: Any) -> Decoder:
        decoder = Decoder(model, check)
        decoder.attend_within_documents(PackedAttention(kernel, "it is compared with separate documents"))
        return decoder

    def measure() -> dict[str, float]:
        # fp32: some versions of PyTorch draw other weights in bf16.
        with torch.device(device), set_default_dtype(torch.float32), torch.random.fork_rng():
            expected, alone, row = (compute or partial(_of_texts, config, attention, dtype))(with_kernel)
        return {"row": distance(row, expected), "alone": distance(alone, expected)}

    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    distances = cached([config, attention, name, kernel, str(dtype), made_from], measure)
    if distances["row"] <= 2 * distances["alone"] + 1e-5:
        return None
    return f"gradients differ by {distances['row']:.0e}, and by {distances['alone']:.0e} of rounding"


def _of_texts(
    config: Any, attention: str | None, dtype: torch.dtype, with_kernel: Callable[[Any], Decoder]
) -> tuple[Gradients, Gradients, Gradients]:
    """Returns the gradients of documents of random tokens, as :data:`OnDevice`."""
    copied = cut(config)
    in_fp32, in_dtype = (copies(copied, attention, precision) for precision in (torch.float32, dtype))
    lengths = [n * _TIMES_ON_DEVICE for n in _LENGTHS]
    documents = _drawn(copied, lengths)
    expected, alone = (gradients(make(), one_by_one, documents) for make in (in_fp32, in_dtype))
    decoder = with_kernel(in_dtype())
    row_logits = partial(logits_of_row, [decoder], torch.cat(documents), lengths)
    return expected, alone, gradients(decoder.model, lambda *_: row_logits(), documents)


def paths_of_code() -> list[Path]:
    """Returns the files of this package that the check depends on."""
    package = Path(__file__).parents[2]
    folders, files = ("models", "text", "parallel"), ("model_kinds.py", "checkpoint/transformers.py")
    of_folders = [path for name in folders for path in sorted((package / name).rglob("*.py"))]
    return [*of_folders, *(package / name for name in files)]


def cached(made_from: Sequence[Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the cached result of ``make`` for these values, versions and code; calls it if there is none.

    If the cache cannot be read, locked or written, the result is only returned, after a warning.
    """
    described = made_from[0].to_diff_dict() | {"model_type": made_from[0].model_type}
    code = [torch.__version__, transformers.__version__, *map(Path.read_text, paths_of_code())]
    key = hashlib.sha256(json.dumps([described, *made_from[1:], *code], default=str).encode()).hexdigest()
    home = os.environ.get("HOME") or tempfile.gettempdir()
    caches = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache")
    path = Path(caches, "torchtune_update_step", f"proof_{key[:32]}.json")
    result: dict[str, Any] = {}
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # One of several processes checks. A soft lock would outlive a killed process.
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


def check_packing(config: Any, attention: str | None = None) -> PackingCheck:
    """Compares gradients of padded and packed rows with those of documents one at a time.

    Raises ValueError as :func:`cached_packing_check`.
    """
    with torch.device("cpu"), set_default_dtype(torch.float64), torch.random.fork_rng(devices=[]), DoublePrecision():
        copied = cut(config)
        return _compare(_Comparison(copies(copied, attention, torch.float64), _drawn(copied, _LENGTHS)))


def _drawn(config: Any, lengths: Sequence[int]) -> list[Tensor]:
    num_tokens = config.get_text_config().vocab_size
    return [torch.randint(min(3, num_tokens - 1), num_tokens, (n,)) for n in lengths]


def copies(config: Any, attention: str | None, dtype: torch.dtype) -> Callable[[], Any]:
    """Returns a function that makes equal models with weights of order 1, drawn in the default dtype."""
    torch.manual_seed(0)
    first = build(config, attention).eval()
    with torch.no_grad():
        for parameter in first.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)

    def make() -> Any:
        model = copy.deepcopy(first)  # to initialize another one takes twice as long as a check
        for parameter in model.parameters():  # buffers, such as RoPE's frequencies, stay wide
            parameter.data = parameter.data.to(dtype)
        return model

    return make


class _Comparison:
    """Layouts of the same documents, each compared with the gradients of the documents one at a time.

    Each method computes one layout by the way that a check describes and returns the largest relative
    difference of a gradient, infinity if the model cannot compute it.
    """

    def __init__(self, make: Callable[[], Any], documents: Sequence[Tensor]) -> None:
        self.make, self.documents = make, documents
        self._lengths = [len(document) for document in documents]
        self._tokens = torch.cat(list(documents))
        try:
            self._expected = gradients(make(), one_by_one, documents)
        except Exception as error:  # any: each model has its own, such as a TypeError for a missing argument
            model, of_text = make(), MODEL_FOR_CAUSAL_LM_MAPPING
            has_other = of_text.get(type(model.config), type(model)) is not type(model)
            raise ValueError(
                f"model: {type(model).__name__} of transformers {transformers.__version__} cannot compute texts without "
                f"images or audio ({error}); set model.{'images=False' if has_other else 'path to another model'}"
            ) from error
        self._expected_of_trees = gradients(make(), one_by_one, self._sequences(_FOREST))

    def padded_rows(self, check: PackingCheck) -> float:
        """A document per row, padded at the end."""
        decoder = Decoder(self.make(), check)
        padded = pad_sequence(list(self.documents), batch_first=True, padding_value=1)
        return _error([decoder], partial(decoder, padded), self.documents, self._expected)

    def packed_row(self, check: PackingCheck) -> float:
        """All documents in one row."""
        return self._row_error([Decoder(self.make(), check)], self._lengths, self._expected)

    def row_of_trees(self, check: PackingCheck) -> float:
        """Documents that share what they begin with."""
        return self._row_error([Decoder(self.make(), check)], _FOREST, self._expected_of_trees)

    def row_by_stages(self, check: PackingCheck) -> float:
        """Pipeline stages of one layer each."""
        stages = list[Decoder]()
        for index in range(len(layers_of(self.make()))):
            stages.append(Decoder(self.make(), check))
            stages[-1].cut_to_stage(range(index, index + 1))  # before the next, to hold one copy and not one of each
        return self._row_error(stages, self._lengths, self._expected)

    def row_in_parts(self, check: PackingCheck) -> float:
        """Three ranks that compute a part of the row each."""
        return self._row_error([Decoder(self.make(), check)], self._lengths, self._expected, num_ranks=3)

    def _row_error(
        self, stages: Sequence[Decoder], row: Sequence[Document], expected: Mapping[str, Tensor], num_ranks: int = 1
    ) -> float:
        forward = partial(logits_of_row, stages, self._tokens, row, num_ranks)
        return _error(stages, forward, self._sequences(row), expected)

    def _sequences(self, row: Sequence[Document]) -> list[Tensor]:
        return [self._tokens[place] for place in _places(row)]


def _compare(comparison: _Comparison) -> PackingCheck:
    """Returns the first way to compute rows that is exact: by attention, then module by module."""
    # Any model is trained with padded rows, through its output layer alone or all that follows its decoder.
    for head_is_tail in (True, False):
        padded = PackingCheck(head_is_tail)
        padded = replace(padded, error=comparison.padded_rows(padded))
        if padded.error <= BOUND:
            break
    else:
        raise ValueError(
            f"model: {type(comparison.make()).__name__}: padding changes gradients by {padded.error:.0e}; it is not "
            "causal, its logits are not made of its decoder's hidden states, or its choices depend on rounding (ties "
            "of a sparse attention's scores), and it cannot be trained exactly"
        )

    # The first candidate with exact packed rows is kept; other layouts are allowed if they are exact, too.
    for check in _candidates(comparison, replace(padded, computes_trees=True)):
        needs = set[str | tuple[int, int]]()
        with Setting(NEEDS, needs):
            error = comparison.packed_row(check)
        if error > BOUND:
            continue
        # A rank computes some of the heads, and sinks (s_aux) are those of all.
        can_span = check.splits_attention and not check.modules and "s_aux" not in needs
        return replace(
            check,
            error=error,
            head_dims=tuple(sorted(need for need in needs if isinstance(need, tuple))),
            attention_needs=tuple(sorted(need for need in needs if isinstance(need, str))),
            computes_trees=comparison.row_of_trees(check) <= BOUND,
            can_be_cut=comparison.row_by_stages(check) <= BOUND,
            spans_ranks=can_span and comparison.row_in_parts(check) <= BOUND,
        )
    problem, _ = _modules_that_mix(comparison.make, comparison.documents, padded)
    return replace(padded, problem=problem or type(comparison.make()).__name__)


def _candidates(comparison: _Comparison, check: PackingCheck) -> Iterator[PackingCheck]:
    """Yields ways to compute packed rows: by attention alone, then with modules that run by document.

    First with each class alone that mixes documents, innermost first, then with more than one. Each with
    attention that computes one document after the other, if the model's can be replaced, and with a mask.
    """
    splits = (True, False) if comparison.make()._can_set_attn_implementation() else (False,)
    ways = [check]
    for num_modules in range(_MAX_MODULES + 1):
        if num_modules > 0:
            try:
                _, mixing = _modules_that_mix(comparison.make, comparison.documents, ways[0])
            except Exception:  # any: the modules so far cannot run once per document
                return
            ways = [replace(ways[0], modules={**ways[0].modules, name: axes}) for name, axes in mixing.items()]
        if not ways:
            return
        yield from (replace(way, splits_attention=split) for way in ways for split in splits)


def one_by_one(model: Any, documents: Sequence[Tensor]) -> list[Tensor]:
    """Returns logits [n, v] of each document [n], by the model's own forward."""
    return [model(input_ids=d[None], use_cache=False).logits[0] for d in documents]


def gradients(
    model: Any, forward: Callable[[Any, Any], Iterable[Tensor]], documents: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Returns each parameter's gradient of the cross-entropy summed over documents.

    ``forward`` of model and documents returns logits [n or more, v] of each document [n].
    """
    losses = [
        F.cross_entropy(logits[: len(d) - 1], d[1:], reduction="sum")
        for logits, d in zip(forward(model, documents), documents, strict=True)
        if len(d) > 1
    ]
    torch.stack(losses).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def difference(computed: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the largest difference of a gradient, over the largest element of the expected one.

    A gradient that is zero but for rounding, as a key's bias has, is compared with 1e-6 of the largest of all.
    """
    if computed.keys() != expected.keys():
        return float("inf")
    least = 1e-6 * max(g.abs().max() for g in expected.values())
    errors = [(computed[n] - g).abs().max() / g.abs().max().clamp(min=least) for n, g in expected.items()]
    return torch.stack(errors).nan_to_num(nan=torch.inf).max().item()


def distance(computed: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Returns the norm of the difference of all gradients, over that of the expected ones."""
    errors = [(computed[n].double() - g).square().sum() for n, g in expected.items()]
    squares = [g.double().square().sum() for g in expected.values()]
    return (torch.stack(errors).sum() / torch.stack(squares).sum()).sqrt().item()


def _places(row: Sequence[Document]) -> list[Tensor]:
    """Returns the positions in a row of each sequence."""
    return [torch.cat([torch.arange(*positions) for positions in chain.ranges]) for chain in chains(row)]


def _error(
    stages: Sequence[Decoder],
    forward: Callable[[], Iterable[Tensor]],
    sequences: Sequence[Tensor],
    expected: Mapping[str, Tensor],
) -> float:
    """Compares gradients of all stages with the expected ones; infinity if a module cannot compute ``forward``."""
    computed = dict[str, Any]()
    try:
        gradients(stages[0].model, lambda *_: forward(), sequences)
    except Exception:  # any: each module has its own
        return float("inf")
    for stage in stages:
        for name, weight in stage.model.named_parameters():
            if weight.grad is not None:  # twice for a tied output
                computed[name] = computed.get(name, 0) + weight.grad
    return difference(computed, expected)


def logits_of_row(
    stages: Sequence[Decoder], tokens: Tensor, row: Sequence[Document], num_ranks: int = 1
) -> list[Tensor]:
    """Returns logits [n, v] of each sequence of a row, the first of tokens.

    The row passes through ``stages`` of one layer each, or a whole decoder. The parts of ``num_ranks`` are
    concatenated; only attention gets the order of the row, so all other modules must compute token by token.
    """
    # Parts are stripes, as in training: 7 tokens on 3 ranks are in the order 0, 3, 6, 1, 4, 2, 5.
    places = _places(row)
    tokens = tokens[: sum(map(length_of, row))]
    order = torch.cat([torch.arange(i, len(tokens), num_ranks) for i in range(num_ranks)])
    back, positions = order.argsort(), torch.empty_like(tokens)
    for place in places:
        positions[place] = torch.arange(len(place))
    # In place of the ranks' exchange, attention gets the tokens in the order of the row.
    if num_ranks > 1:
        heads_of_row: Any = lambda *heads: tuple(tensor[back] for tensor in heads)  # noqa: E731
        exchange = Exchange(heads_of_row, lambda attended: attended[order])
        stages[0].attend_within_documents(stages[0].attention, row_groups={num_ranks: exchange})
    hidden = tokens[order][None]
    for stage in stages:
        hidden = stage(hidden, input_pos=positions[order][None], document_lengths=Documents([row], num_ranks))
    return [hidden[0, back][place] for place in places]


@torch.no_grad()
def _modules_that_mix(
    make: Callable[[], Any], documents: Sequence[Tensor], check: PackingCheck
) -> tuple[str | None, dict[str, Axes]]:
    """Compares a document in a row with the same one alone, module by module.

    Returns name and class of the first, innermost module that returns different outputs for equal
    inputs; and the classes of all that are smaller than a layer, with their tensors' dimensions as long as
    the row. Modules inside of those that run by document are called more often, and are not compared.
    """
    decoder, calls = Decoder(make(), check), defaultdict[str, list[dict[str, Tensor]]](list)

    def record(name: str, _: Any, *values: Any) -> None:  # args, kwargs, output
        calls[name].append({keystr(p): t.clone() for p, t in tree_leaves_with_path(values) if isinstance(t, Tensor)})

    # The same second document is computed as part of the row, and alone.
    for name, module in decoder.model.named_modules():
        module.register_forward_hook(partial(record, name), with_kwargs=True)
    lengths = [len(document) for document in documents]
    logits_of_row([decoder], torch.cat(list(documents)), lengths)
    calls_in_row = calls.copy()
    calls.clear()
    decoder(documents[1][None])

    # A module mixes documents if outputs differ and inputs do not. The axis of tokens is as long as the row.
    layers, axes = set(map(id, decoder.layers)), defaultdict[str, Axes](dict)
    problem, mixing = None, dict[str, Axes]()
    for name, module_calls in calls_in_row.items():
        module = decoder.model.get_submodule(name)
        class_name = type(module).__name__
        for tensors, alone in zip(module_calls, calls[name], strict=False):
            differing = set[str]()  # [0] args, [1] kwargs, [2] output
            for path, tensor in tensors.items():
                token_axes = [axis for axis, size in enumerate(tensor.shape) if size == sum(lengths)]
                if token_axes:
                    axes[class_name][path] = token_axes
                if len(token_axes) == 1 and path in alone and len(module_calls) == len(calls[name]):
                    part = tensor.narrow(token_axes[0], lengths[0], lengths[1])
                    if part.shape == alone[path].shape and not torch.allclose(part, alone[path], 1e-9, 1e-9):
                        differing.add(path[:3])
            if differing == {"[2]"}:
                problem = problem or f"{name} ({class_name})"
                if not any(id(child) in layers for child in module.modules()):
                    mixing[class_name] = axes[class_name]
    return problem, mixing


def cut(config: Any, num_layers_of_tower: int | None = 1, cuts_tokens: bool = True) -> Any:
    """Returns a config of few layers of each kind, windows shorter than the documents and, with ``cuts_tokens``, few tokens."""
    config = with_few_layers(config, num_layers_of_tower)
    largest = _MOST | (_MOST_OF_TOKENS if cuts_tokens else {})
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            for pattern, most in largest.items() if type(value) is int else ():
                if re.search(pattern, name):
                    setattr(part, name, min(value, most))
    return config


def with_few_layers(config: Any, num_layers_of_tower: int | None = 1) -> Any:
    """Returns a config of the first layers, at least 2, that have all kinds; parts for images have one, or all for None."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    with torch.device("meta"):
        layers = layers_of(build(config, "eager"))
    kinds = [json.dumps([_described(n, m) for n, m in layer.named_modules()]) for layer in layers]
    num_layers = min(len(layers), max(1, *map(kinds.index, kinds)) + 1)
    for part in {id(config): config, id(text): text}.values():
        for name, value in list(vars(part).items()):
            is_by_layer = isinstance(value, (list, tuple)) or (isinstance(value, str) and "pattern" in name)
            if is_by_layer and len(value) == text.num_hidden_layers:
                setattr(part, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    for part in (getattr(config, name) for name in config.sub_configs):
        for name in _DEPTHS:
            if part is not text and (depth := getattr(part, name, None)):
                setattr(part, name, min(depth, num_layers_of_tower or depth))
    return config


def _described(name: str, module: nn.Module) -> list[Any]:
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and not key.endswith(_OF_ONE_LAYER)
    }
    shapes = {key: list(p.shape) for key, p in module._parameters.items() if p is not None}
    return [name, type(module).__name__, plain, shapes]
