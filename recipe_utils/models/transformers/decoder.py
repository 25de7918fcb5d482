"""Decoders of transformers with the interface of torchtune's.

Example: ``LlamaForCausalLM`` with tied embeddings becomes ``Decoder(model, check)``. Its weights are called
``model.model.embed_tokens.weight``, ``model.model.layers.0...`` and so on; ``model.lm_head.weight`` is the first of
these again, so the state dict lacks it. ``decoder.layers`` are what FSDP2 shards and compiles one by one. The forward
is that of transformers up to the hidden states [b, s, d]; ``decoder.output`` then computes logits, so that a loss
module can replace ``decoder.unembed`` and compute those of targets only, as for torchtune's decoders.

Shapes: b rows, s positions, d width of the model, v vocabulary.
"""

import copy
import inspect
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from recipe_utils.checkpoint.transformers import names_of_weights
from recipe_utils.model_kinds import NotOnThisStage
from recipe_utils.models.attention.attend import PackedRows
from recipe_utils.models.attention.kernels import choose_kernel
from recipe_utils.models.transformers.interface import DecoderOfTransformers, ErrorOn, PackingCheck
from recipe_utils.models.transformers.masks import (
    ROWS,
    Setting,
    attention_within_documents,
    run_by_document,
    run_without_documents,
)
from recipe_utils.text.documents import Documents

_NOT_COMPUTED = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Keys of ``config.json`` that change no logits."""
_TEXT = ("", "text_config")
"""Configs whose attention is set; a part for images or audio may not support it."""


def build(config: Any, attention: str | None = None) -> PreTrainedModel:
    """Returns a causal language model, or one of images and text, on the current device, in the default precision.

    Its ``attention`` is ``sdpa`` or ``eager``; None is ``sdpa`` where the model supports it. Raises ValueError if the model
    needs a package that is not installed, such as Gemma 3n's tower timm.
    """
    config = copy.deepcopy(config)
    known = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    make = (known if type(config) in known else MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]
    attention = (attention or "sdpa") if make._supports_sdpa else "eager"
    config._attn_implementation = dict.fromkeys(_TEXT, attention)
    config.use_cache = False
    if torch.get_default_dtype() == torch.float64:
        for part in (config, config.get_text_config()):
            part._experts_implementation = "eager"  # grouped_mm has no fp64
    try:
        model: PreTrainedModel = make(config)
    except ImportError as error:
        raise ValueError(f"model: {' '.join(str(error).split())}") from error
    for parameter in model.parameters():  # some types make routers in fp32; FSDP2 needs one dtype
        parameter.data = parameter.data.to(torch.get_default_dtype())
    return model


class Decoder(DecoderOfTransformers):
    """A causal language model of transformers, called as torchtune's decoders.

    Parameters have the names of transformers with the prefix ``model.``; of tied weights the state
    dict has the first only. ``check`` describes how packed rows are computed; ``path`` is the folder of
    ``config.json``.
    """

    def __init__(
        self, model: PreTrainedModel, check: PackingCheck, path: str | None = None, error_on: ErrorOn | None = None
    ) -> None:
        super().__init__()
        self.model, self.check, self.path, self.error_on = model, check, path, error_on
        self.norm = nn.Identity()  # the hidden states are normalized
        text: Any = model.config.get_text_config()
        self.max_seq_len = max_seq_len_of(text)
        self.num_heads: int = getattr(text, "num_attention_heads", 1)
        self.num_kv_heads: int = getattr(text, "num_key_value_heads", None) or self.num_heads
        self.head_dim: int = text.hidden_size // self.num_heads
        # Attention, and modules that the check has found to mix documents, take the documents of a forward.
        self._base = model.config._attn_implementation
        self.attend_within_documents(choose_kernel(self.attention_needs(), torch.device("cpu")))
        name = attention_within_documents(self._base, check.splits_attention)
        model.set_attn_implementation(dict.fromkeys(_TEXT, name))
        for module in model.modules():
            if (axes := check.modules.get(type(module).__name__)) is not None:
                run_by_document(module, axes)
        for tower in towers_of(model):
            run_without_documents(tower)
        # The output layer is a part of the model; what else follows the decoder is a module without parameters.
        self._tail: nn.Module | None = None if check.head_is_tail else Tail(model)
        self._ties = {n: first for first, others in names_of_weights(self).items() for n in others}
        takes = inspect.signature(getattr(model, decoder_name(model)).forward).parameters
        self._name_of_cache = "cache" if "cache" in takes else "past_key_values"
        # By module and name, because sharding replaces parameters; to find them takes 7 ms for a model of 3B parameters.
        of_images = set(map(id, self.of_images())) if check.joins else set[int]()
        self._beside_text = [
            (module, name)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) in of_images
        ]
        self.register_state_dict_post_hook(_drop_ties)
        self.register_load_state_dict_pre_hook(_share_ties)

    @property
    def output(self) -> nn.Module:
        """Returns the module that computes logits from hidden states."""
        return self.model.get_output_embeddings() if self._tail is None else self._tail

    @property
    def tok_embeddings(self) -> nn.Module:
        """Returns the token embeddings [v, d]."""
        return self.model.get_input_embeddings()

    @property
    def layers(self) -> list[nn.Module]:
        """Returns the layers, which are sharded, compiled and recomputed one by one."""
        return layers_of(self.model)

    def forward(
        self,
        tokens: Tensor,
        *,
        input_pos: Tensor | None = None,
        document_lengths: Documents | None = None,
        mask: Tensor | None = None,
        cache: Any = None,
        images: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Returns logits [b, s, v] of tokens [b, s]. Packed rows have positions that restart [b, s].

        ``images`` are what a model of images takes under its own names: columns beside tokens [b, s], and tensors of the
        images of all rows, if they have any. Positions may then be [k, b, s], of which the first are the text's.
        A ``cache`` of transformers takes the keys of the tokens, at ``input_pos`` [b, s], behind those of earlier
        forwards; ``mask`` [b, m] is False where a key is padding.
        Pipeline stages take hidden states [b, s, d] instead of tokens, or return them; see :meth:`cut_to_stage`.
        Raises ValueError for trees if the model is not proved to compute them.
        """
        # Documents go beside the forward, since modules of transformers have no argument for them.
        rows, documents = None, document_lengths
        if documents is not None:
            if documents.ends is not None and not self.check.computes_trees:
                raise ValueError(f"{type(self.model).__name__} cannot compute trees")
            if documents.num_ranks > 1 and not self.check.splits_attention:
                raise ValueError(f"{type(self.model).__name__} cannot compute a part of a row")
            kernel = self.attention.kernel_of(documents)
            exchange = self.row_groups[documents.num_ranks] if documents.num_ranks > 1 else None
            of_text = input_pos[0] if input_pos is not None and input_pos.dim() == 3 else input_pos
            rows = PackedRows(documents, kernel, exchange, positions=of_text)
        # Processors make fp32, which some towers, such as Kimi's and Aria's, do not cast.
        if images and self._beside_text:
            dtype = getattr(*self._beside_text[0]).dtype
            images = {n: t.to(dtype) if t.is_floating_point() else t for n, t in images.items()}
        # The model's own decoder up to the hidden states; a later pipeline stage gets them in place of tokens.
        with Setting(ROWS, rows), self._reaching_towers(images or {}):
            out = getattr(self.model, decoder_name(self.model))(
                **{"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens},
                position_ids=input_pos if (documents, cache, images) != (None, None, None) else None,
                use_cache=cache is not None,
                **(images or {}),
                **({} if cache is None else {"attention_mask": mask, self._name_of_cache: cache}),
            )
        return self.unembed(out[0] if isinstance(out, tuple) else out.last_hidden_state)

    @contextmanager
    def _reaching_towers(self, images: Mapping[str, Tensor]) -> Iterator[None]:
        """Gives trained parameters of the tower gradients of 0 in a row without images, as FSDP2 reduces them on all ranks.

        A zero is added to the embeddings, where images are, so that the backward passes through all layers: in the backward
        of a row with images FSDP2 gathers those of a frozen text, too.
        """
        has_pixels = any(map(torch.is_floating_point, images.values()))
        places = () if has_pixels or not torch.is_grad_enabled() else self._beside_text
        # Numbers are added first: to add each to the embeddings would take a pass over them per parameter.
        trained = [p.flatten()[0] for place in places if (p := getattr(*place)).requires_grad]
        if not trained:
            yield
            return
        zero = 0.0 * torch.stack(trained).sum()
        # Behind the hooks of FSDP2: where images are, the output of frozen embeddings has no gradient either.
        hook = self.tok_embeddings.register_forward_hook(lambda module, args, embedded: embedded + zero)
        try:
            yield
        finally:
            hook.remove()

    def of_images(self) -> list[nn.Parameter]:
        """Returns the parameters that text does not pass through: those of towers and projectors."""
        reached = reached_by_text(self.model)
        return [parameter for parameter in self.model.parameters() if id(parameter) not in reached]

    def unembed(self, hidden: Tensor) -> Tensor:
        """Returns logits [b, s, v] of hidden states [b, s, d]."""
        logits: Tensor = self.output(self.norm(hidden))
        return logits

    @property
    def output_is_tied(self) -> bool:
        """Returns True if the output layer shares its weight with the token embeddings."""
        return bool(self._ties)

    def cut_to_stage(self, layers: range) -> None:
        """Removes all modules with weights but those of one pipeline stage, in place.

        The first stage has the embeddings, the last one has all that is neither embeddings nor layer;
        see ``check.can_be_cut``.
        """
        all_layers, embeddings = self.layers, self.tok_embeddings
        is_last = layers.stop == len(all_layers)
        stays = {id(layer): index in layers for index, layer in enumerate(all_layers)}
        stays[id(embeddings)] = layers.start == 0
        weight: Any = embeddings.weight if is_last and self.output_is_tied else None

        def cut(module: nn.Module) -> None:
            for name, child in list(module.named_children()):
                if id(child) not in stays and any(id(part) in stays for part in child.modules()):
                    cut(child)
                elif any(True for _ in child.parameters()) and not stays.get(id(child), is_last):
                    other = NotOnThisStage(weight if child is embeddings else None)
                    # Attributes that the loop over layers reads.
                    plain = (bool, int, str)
                    vars(other).update({k: v for k, v in vars(child).items() if type(v) in plain})
                    module._modules[name] = other

        cut(self.model)
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        self._ties = {n: first for n, first in self._ties.items() if {n, first} <= names}
        if not is_last:
            self._tail = NotOnThisStage()

    def recompute_layers(self, interval: int) -> None:
        """Recomputes every ``interval``-th layer in the backward, with the documents of its forward."""
        layers = set(map(id, self.layers[::interval]))

        def contexts() -> tuple[Any, Any]:  # called in the forward
            return nullcontext(), Setting(ROWS, ROWS.get())

        apply_activation_checkpointing(
            self.model,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, context_fn=contexts),
            check_fn=lambda module: id(module) in layers,
        )

    def fingerprint(self, folder: str | Path | None) -> str:
        """Returns the CRC-32 of what ``config.json`` describes. Raises ValueError if that in ``folder`` differs."""
        described, other = (
            AutoConfig.from_pretrained(path, local_files_only=True).get_text_config().to_dict()
            for path in (self.path, folder)
        )
        for name in sorted((described.keys() | other.keys()) - _NOT_COMPUTED):
            if described.get(name) != other.get(name):
                raise ValueError(
                    f"{folder}: its config.json has {name}={other.get(name)}, and that of "
                    f"model.path={self.path} has {described.get(name)}; set both to folders of one architecture"
                )
        described = {name: described[name] for name in sorted(described.keys() - _NOT_COMPUTED)}
        return f"{zlib.crc32(json.dumps(described, default=str).encode()):08x}"

    def rope_init(self) -> None:
        """Computes the buffers that are not in the state dict, on the current device."""
        for name, buffer in list(self.model.named_non_persistent_buffers()):
            parent = self.model.get_submodule(name.rpartition(".")[0])
            new = torch.empty_like(buffer, device=torch.get_default_device())
            parent.register_buffer(name.rpartition(".")[2], new, persistent=False)
        for tensor in self.model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True
        self.model.initialize_weights()


class Tail(nn.Module):
    """Computes logits from hidden states by the model's own forward, without its decoder."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        name, shell = decoder_name(model), copy.copy(model)
        given: Any = _Given(model._modules[name])
        shell._modules = {**model._modules, name: given}
        self.shell: Any
        object.__setattr__(self, "shell", shell)  # no module of its own

    @property
    def weight(self) -> Tensor:
        """Returns the output weight [v, d]."""
        weight: Tensor = self.shell.get_output_embeddings().weight
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits [b, s, v], or [n, v] for hidden states [n, d]."""
        rows = hidden if hidden.dim() == 3 else hidden.unsqueeze(0)
        logits: Tensor = type(self.shell).forward(self.shell, inputs_embeds=rows, use_cache=False).logits
        return logits if hidden.dim() == 3 else logits.squeeze(0)


class _Given:
    """Returns given hidden states instead of computing them; has the other attributes of a decoder."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "decoder"), name)

    def __call__(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> "_Output":
        return _Output(last_hidden_state=inputs_embeds)


class _Output(BaseModelOutputWithPast):
    """Output of a decoder without what only some decoders return."""

    def __getattr__(self, name: str) -> None:
        return None


def max_seq_len_of(config: Any) -> int:
    """Returns the longest sample [tokens] whose RoPE does not depend on other samples of its microbatch.

    ``longrope`` and ``dynamic`` frequencies depend on the longest position of a forward beyond their
    original length (``transformers.modeling_rope_utils.dynamic_rope_update``).
    """
    names = ("max_position_embeddings", "max_seq_len")
    length: int = next((v for n in names if (v := getattr(config, n, None))), 2**31 - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    key = "original_max_position_embeddings"
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        if part.get("rope_type") in ("longrope", "dynamic"):
            length = min(length, part.get(key) or getattr(config, key, None) or length)
    return length


def decoder_name(model: PreTrainedModel) -> str:
    """Returns the name of the child that computes hidden states.

    Raises ValueError if there is none.
    """
    name = model.base_model_prefix
    if name not in model._modules:
        children = model._modules.items()
        names = [n for n, child in children if child is model.get_decoder()]
        names += [n for n, child in children if isinstance(child, PreTrainedModel)]
        if not names:
            raise ValueError(f"model: {type(model).__name__} has no decoder of its own")
        name = names[0]
    return name


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the layers that text passes through: the items of all lists of modules that must not be split."""
    reached = reached_by_text(model)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and id(m) in reached]
    marked = [m for m in lists if type(m[0]).__name__ in (model._no_split_modules or ())]
    marked = marked or [max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))]
    return [layer for layers in marked for layer in layers]


def reached_by_text(model: PreTrainedModel) -> set[int]:
    """Returns the ids of the modules and parameters that text passes through, in models of images or audio, too."""
    # Texts skip mllama's layers that attend to images.
    skipped = getattr(model.config.get_text_config(), "cross_attention_layers", None) or ()
    layers = [layer for index, layer in enumerate(model.get_decoder().layers) if index in skipped] if skipped else []
    of_images = {id(each) for part in (*towers_of(model), *layers) for each in (*part.modules(), *part.parameters())}
    return {id(each) for part in _parts_for_text(model) for each in (*part.modules(), *part.parameters())} - of_images


def towers_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Returns the modules of a model that are models of images or audio, without text or beside the decoder of the text."""
    of_text = {id(parameter) for part in _parts_for_text(model) for parameter in part.parameters()}
    return [
        module
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        if "text" not in module.input_modalities or of_text.isdisjoint(map(id, module.parameters()))
    ]


def _parts_for_text(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules that have all weights of the text. Raises ValueError if the model has no decoder."""
    if model.config.get_text_config() is model.config:
        return [model]
    if (decoder := model.get_decoder()) is None:
        raise ValueError(f"model: {type(model).__name__} has no decoder of its own")
    return [decoder, model.get_output_embeddings()]


def parts_for_images(model: PreTrainedModel) -> dict[str, list[nn.Parameter]]:
    """Returns the parameters of the ``tower``, and of the ``projector`` behind it, which ends in the width of the text.

    That is what text does not pass through, without the models of other data than text; or it is in the tower, behind its
    layers (Qwen's ``visual.merger``).
    """
    reached, width = reached_by_text(model), model.config.get_text_config().hidden_size
    of_tower = set[int]()
    for tower in towers_of(model):
        is_behind = False
        for child in tower.children():
            ends_in_text = any(p.dim() > 1 and p.size(0) == width for p in child.parameters())
            if not (is_behind and ends_in_text):
                of_tower |= {id(parameter) for parameter in child.parameters()}
            is_behind |= any(isinstance(module, nn.ModuleList) for module in child.modules())
        of_tower |= {id(parameter) for parameter in tower.parameters(recurse=False)}
    others = [parameter for parameter in model.parameters() if id(parameter) not in reached]
    return {
        "tower": [parameter for parameter in others if id(parameter) in of_tower],
        "projector": [parameter for parameter in others if id(parameter) not in of_tower],
    }


def _drop_ties(model: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name in model._ties:
        state_dict.pop(prefix + name, None)


def _share_ties(model: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Makes tied weights one parameter, which loading assigns to both names."""
    for name, first in model._ties.items():
        if prefix + first in state_dict:
            weight = state_dict[prefix + first]
            weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
            state_dict[prefix + first] = state_dict[prefix + name] = weight
