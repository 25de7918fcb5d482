"""DINOv3's vision transformer (arXiv:2508.10104) out of torchtune's parts, for crops of several sizes in one row.

A microbatch is one row of tokens, crop after crop, so that sharding, compile, activation checkpointing and
pipeline stages work as for text. What they are made of is :class:`VisionTransformer`'s to say.

Shapes: b rows, s tokens per row, h heads, w width of a head, d of the model, L layers, c channels, p patch size.
"""

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from recipe_utils.data.images.crop_rows import MASKED_PATCH, PATCH
from recipe_utils.loss.self_distillation import PrototypeHead, SelfDistillationHeads
from recipe_utils.settings.problems import ConfigError

CropGroups = Sequence[tuple[int, int]]
"""(number of crops, tokens per crop) of each run of equally long crops, in the order of the row."""

_ANY_LENGTH = 2**31 - 1
"""For torchtune's parts, which use it to size caches for generating text."""


class PatchEmbedding(nn.Module):
    """Embeds patches, and puts learned vectors where a token is none or is masked.

    Args:
        patch_size: side of a patch [pixels].
        num_channels: of an image.
        embed_dim: d.
        num_registers: learned tokens of each crop besides the class token (arXiv:2309.16588).
    """

    def __init__(
        self, patch_size: int, num_channels: int, embed_dim: int, num_registers: int
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.num_channels = num_channels
        self.embedding_dim = embed_dim
        self.num_registers = num_registers
        self.sees_masked_patches = False
        """True on a teacher, which a mask hides nothing from."""
        self.patches = nn.Linear(num_channels * patch_size**2, embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(embed_dim))
        self.cls_token = nn.Parameter(torch.zeros(embed_dim))
        # No empty one, which FSDP2 could not shard.
        self.register_tokens = (
            nn.Parameter(torch.zeros(num_registers, embed_dim)) if num_registers else None
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Takes tokens [b, s, 1 + c * p * p] -> [b, s, d], in the precision of the weights.

        Raises:
            ValueError: patches of another size.
        """
        width = 1 + self.patches.in_features
        if tokens.size(-1) != width:
            raise ValueError(
                f"model.patch_size={self.patch_size}: with num_channels={self.num_channels} a token has {width} "
                f"columns, these have {tokens.size(-1)}; the model and the images' transform must have the same two"
            )
        kinds = tokens[..., 0].long()
        if self.sees_masked_patches:
            kinds = kinds.masked_fill(kinds == MASKED_PATCH, PATCH)
        learned = [self.mask_token[None], self.cls_token[None]]
        if self.register_tokens is not None:
            learned.append(self.register_tokens)
        # All of them for every token, so that each weight has a gradient even if no token is of its kind.
        others = F.embedding((kinds - MASKED_PATCH).clamp(min=0), torch.cat(learned))
        embedded = self.patches(tokens[..., 1:].to(self.patches.weight.dtype))
        return torch.where((kinds == PATCH)[..., None], embedded, others)


class AxialRotaryPositions(nn.Module):
    """Turns pairs (i, i + w / 2) of a head by angles of a patch's row and column (DINOv3, section 3.2)."""

    def forward(self, x: Tensor, *, input_pos: tuple[Tensor, Tensor]) -> Tensor:
        """Takes x [b, s, h, w] and what :func:`rotation_of` gives -> [b, s, h, w]."""
        cos, sin = input_pos
        swapped = x.roll(x.size(-1) // 2, -1)
        return torch.addcmul(x * cos, swapped, sin)


class LayerScale(nn.Module):
    """Scales each channel of a residual branch (arXiv:2103.17239).

    Args:
        embed_dim: d.
        initial: the value that all channels start from.
    """

    def __init__(self, embed_dim: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.scale = nn.Parameter(torch.full((embed_dim,), initial))

    def forward(self, x: Tensor) -> Tensor:
        """Takes and gives [..., d]."""
        return x * self.scale


class VisionLayer(TransformerSelfAttentionLayer):
    """torchtune's layer, whose residual branches a crop may go without."""

    def forward(
        self,
        x: Tensor,
        *,
        mask: CropGroups | None = None,
        input_pos: Any = None,
        branches: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Takes and gives [b, s, d].

        Args:
            x: hidden states.
            mask: the crops, which attention stays within; None if each row is one.
            input_pos: of :func:`rotation_of`.
            branches: [b, s, 2], what attention and MLP are multiplied with; None is 1.
        """
        normed = self.sa_norm(x)
        attended = self.sa_scale(self.attn(normed, normed, mask=mask, input_pos=input_pos))
        if branches is not None:
            attended = attended * branches[..., :1]
        x = x + attended
        fed = self.mlp_scale(self.mlp(self.mlp_norm(x)))
        if branches is not None:
            fed = fed * branches[..., 1:]
        return x + fed


class VisionTransformer(TransformerDecoder):
    """torchtune's decoder over crops: what is alike for all layers is computed once per forward, on every stage.

    Args:
        arguments: of :func:`dinov3_vit`, all of them.
        **parts: of :class:`torchtune.modules.TransformerDecoder`.
    """

    def __init__(self, arguments: dict[str, Any], **parts: Any) -> None:
        super().__init__(**parts)
        self.arguments = arguments
        self.rope_base: float = arguments["rope_base"]
        self.drop_path: float = arguments["drop_path"]

    @property
    def num_draws(self) -> int:
        """Columns of ``input_pos`` after the first two that a student needs: one for each residual branch."""
        return 2 * len(self.layers) if self.drop_path > 0 else 0

    def forward(
        self,
        tokens: Tensor,
        *,
        input_pos: Tensor,
        crop_groups: CropGroups | None = None,
    ) -> Any:
        """Hidden states after the final norm [b, s, d], or what ``output`` or a head makes of them.

        Args:
            tokens: [b, s, 1 + c * p * p]: the kind of the token (0 patch, 1 masked patch, 2 class token, 3 + r
                register r), then the normalised pixels of its patch in the order [c, p, p]. On stages other
                than the first hidden states [b, s, d].
            input_pos: [b, s, 2 + draws]: (row, column) of the patch's centre in (-1, 1), (0, 0) for other tokens.
                Then draws in [0, 1), alike for all tokens of a crop, one for each residual branch: attention
                of layer 0, MLP of layer 0, attention of layer 1, ... Below ``drop_path`` a training model drops
                the branch, others it scales by 1 / (1 - drop_path) (arXiv:1603.09382). Without them none is dropped.
            crop_groups: ((number of crops, tokens per crop), ...), together s; b is 1. Attention is within crops.
                None if each row is one crop.

        Raises:
            ValueError: crops that do not fill the row, or draws for another number of layers.
        """
        if crop_groups is not None:
            check_crop_groups(tokens, crop_groups)
        h = self.tok_embeddings(tokens)
        rotation = rotation_of(input_pos[..., :2], self.head_dim, self.rope_base, h.dtype)
        branches = self._branches(input_pos[..., 2:], h.dtype)
        for index, layer in enumerate(self.layers):
            kept = None if branches is None else branches[..., 2 * index : 2 * index + 2]
            h = layer(h, mask=crop_groups, input_pos=rotation, branches=kept)
        return self.unembed(h)

    def unembed(self, h: Tensor) -> Any:
        """Takes [b, s, d]; unlike torchtune's it keeps the precision."""
        return self.output(self.norm(h))

    def _branches(self, draws: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What residual branches are multiplied with, [b, s, 2 L]."""
        if not self.training or self.drop_path == 0 or draws.size(-1) == 0:
            return None
        if draws.size(-1) != self.num_draws:
            raise ValueError(
                f"model.drop_path={self.drop_path}: {len(self.layers)} layers need {self.num_draws} draws per crop, "
                f"input_pos has {draws.size(-1)}; the images' transform must draw num_draws of them, or none"
            )
        return (draws >= self.drop_path).to(dtype) / (1 - self.drop_path)


def rotation_of(
    centres: Tensor, head_dim: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the sign that they get in the turn, [b, s, 1, w] each.

    Angles are 2 pi * centre * base^(-4 i / w), i below w / 4: rows for one quarter of the pairs' halves, columns
    for the other, as transformers' DINOv3ViTModel has them.

    Args:
        centres: (row, column) [b, s, 2] in (-1, 1).
        head_dim: w.
        base: of the wavelengths.
        dtype: of the hidden states.
    """
    # Angles need fp32 where hidden states are bf16, and all digits where they are fp64.
    wide = torch.promote_types(torch.promote_types(dtype, centres.dtype), torch.float32)
    exponents = torch.arange(0, 1, 4 / head_dim, dtype=wide, device=centres.device)
    frequencies = 1 / base**exponents
    angles = (2 * math.pi * centres.to(wide)[..., None] * frequencies).flatten(-2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1)[:, :, None], torch.cat((-sin, sin), -1)[:, :, None]


def check_crop_groups(tokens: Tensor, crop_groups: CropGroups) -> None:
    """Checks that crops fill a row, on the host.

    Raises:
        ValueError: they do not.
    """
    num_tokens = sum(num_crops * length for num_crops, length in crop_groups)
    if tuple(tokens.shape[:2]) != (1, num_tokens):
        raise ValueError(
            f"crop_groups={tuple(crop_groups)}: these are {num_tokens} tokens of 1 row, tokens has {tokens.size(1)} "
            f"in each of {tokens.size(0)} rows"
        )


def attend_within_crops(
    q: Tensor, k: Tensor, v: Tensor, mask: CropGroups | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """Attention of each token to all of its crop, one call per group of equally long crops.

    Args:
        q: [b, h, s, w]; so are k, v and what is returned.
        k: keys.
        v: values.
        mask: the crops; None if each row is one.
        dropout_p: of attention's weights.
        is_causal: never.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    _, num_heads, _, head_dim = q.shape
    groups = [(num_crops, length) for num_crops, length in mask if num_crops > 0]
    sizes = [num_crops * length for num_crops, length in groups]
    attended = []
    # split and cat: the backward of a slice would fill the gradient of the whole row each time.
    parts = zip(*(each.transpose(1, 2).split(sizes, dim=1) for each in (q, k, v)), strict=True)
    for (num_crops, length), of_group in zip(groups, parts, strict=True):
        q, k, v = (
            part.reshape(num_crops, length, num_heads, head_dim).transpose(1, 2)
            for part in of_group
        )
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
        attended.append(out.transpose(1, 2).reshape(1, num_crops * length, num_heads, head_dim))
    # In the layout [b, s, h, w], which the caller wants next.
    return torch.cat(attended, dim=1).transpose(1, 2)


def dinov3_vit(  # a model's sizes, each of which configs name
    patch_size: int,
    embed_dim: int,
    num_layers: int,
    num_heads: int,
    *,
    num_registers: int = 4,
    num_channels: int = 3,
    intermediate_dim: int | None = None,
    use_gated_mlp: bool = False,
    layer_scale_init: float = 1e-5,
    drop_path: float = 0.0,
    rope_base: float = 100.0,
    norm_eps: float = 1e-5,
) -> VisionTransformer:
    """DINOv3's vision transformer, without a head: its ``output`` gives back what it gets.

    The same function as transformers' ``DINOv3ViTModel``, see :mod:`recipe_utils.checkpoint.dinov3_vit`.

    Args:
        patch_size: side of a patch [pixels].
        embed_dim: width d of the hidden states.
        num_layers: L.
        num_heads: of each attention.
        num_registers: learned tokens of each crop besides the class token.
        num_channels: of an image.
        intermediate_dim: of the MLP; None is four times ``embed_dim``.
        use_gated_mlp: SwiGLU instead of GELU, as in S+, H+ and larger.
        layer_scale_init: what residual branches are scaled with at first.
        drop_path: share of the crops that go without a residual branch, in all layers alike, as DINOv2 and DINOv3 do;
            other ViTs have it grow with depth.
        rope_base: of the rotary positions' wavelengths.
        norm_eps: of the layer norms.

    Raises:
        ValueError: sizes below 1 or that do not fit, or a share outside [0, 1).
    """
    counts = {"patch_size": patch_size, "num_layers": num_layers, "num_heads": num_heads}
    for name, count in {**counts, "num_channels": num_channels}.items():
        if count < 1:
            raise ValueError(f"model.{name}={count}: it must be at least 1")
    if embed_dim % num_heads or (embed_dim // num_heads) % 4:
        raise ValueError(
            f"model.num_heads={num_heads}: embed_dim={embed_dim} must be a multiple of 4 * num_heads, since rows and "
            "columns of patches each turn pairs of a head's channels"
        )
    if not 0 <= drop_path < 1:
        raise ValueError(f"model.drop_path={drop_path}: it must be at least 0 and below 1")
    head_dim = embed_dim // num_heads
    hidden_dim = 4 * embed_dim if intermediate_dim is None else intermediate_dim

    def layer() -> VisionLayer:
        attention = MultiHeadAttention(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            q_proj=nn.Linear(embed_dim, embed_dim),
            k_proj=nn.Linear(embed_dim, embed_dim, bias=False),
            v_proj=nn.Linear(embed_dim, embed_dim),
            output_proj=nn.Linear(embed_dim, embed_dim),
            pos_embeddings=AxialRotaryPositions(),
            max_seq_len=_ANY_LENGTH,
            is_causal=False,
        )
        attention._attention_call = attend_within_crops
        mlp = FeedForward(
            gate_proj=nn.Linear(embed_dim, hidden_dim),
            down_proj=nn.Linear(hidden_dim, embed_dim),
            up_proj=nn.Linear(embed_dim, hidden_dim) if use_gated_mlp else None,
            activation=nn.SiLU() if use_gated_mlp else nn.GELU(),
        )
        return VisionLayer(
            attention,
            mlp,
            # Not torchtune's Fp32LayerNorm, which would narrow fp64. PyTorch's computes bf16 in fp32 inside.
            sa_norm=nn.LayerNorm(embed_dim, norm_eps),
            mlp_norm=nn.LayerNorm(embed_dim, norm_eps),
            sa_scale=LayerScale(embed_dim, layer_scale_init),
            mlp_scale=LayerScale(embed_dim, layer_scale_init),
        )

    return VisionTransformer(
        {
            "patch_size": patch_size,
            "embed_dim": embed_dim,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_registers": num_registers,
            "num_channels": num_channels,
            "intermediate_dim": hidden_dim,
            "use_gated_mlp": use_gated_mlp,
            "layer_scale_init": layer_scale_init,
            "drop_path": drop_path,
            "rope_base": rope_base,
            "norm_eps": norm_eps,
        },
        tok_embeddings=PatchEmbedding(patch_size, num_channels, embed_dim, num_registers),
        layers=nn.ModuleList([layer() for _ in range(num_layers)]),
        max_seq_len=_ANY_LENGTH,
        num_heads=num_heads,
        head_dim=head_dim,
        norm=nn.LayerNorm(embed_dim, norm_eps),
        output=nn.Identity(),
    )


def with_heads(
    make_backbone: Callable[[], nn.Module], dino: Mapping[str, int], ibot: Mapping[str, int]
) -> Callable[[], nn.Module]:
    """A builder of a backbone with heads in place of its output layer.

    Args:
        make_backbone: a :func:`dinov3_vit`.
        dino: arguments of :class:`recipe_utils.loss.self_distillation.PrototypeHead` for crops, but for the width.
        ibot: likewise for patches.

    The builder raises a ValueError for another model, see
    :func:`check_vision_transformer`, and a :class:`recipe_utils.settings.problems.ConfigError` for an argument of a head.
    """

    def make() -> nn.Module:
        model: Any = make_backbone()
        check_vision_transformer(model)
        embed_dim: int = model.tok_embeddings.embedding_dim
        heads = []
        for key, arguments in (("dino_head", dino), ("ibot_head", ibot)):
            try:
                heads.append(PrototypeHead(embed_dim, **arguments))
            except ValueError as error:
                raise ConfigError(f"{key}.{error}") from error
        model.output = SelfDistillationHeads(*heads)
        return model

    return make


def check_vision_transformer(model: nn.Module) -> None:
    """Whether images of a microbatch go through a model each by itself, as crops in rows.

    Raises:
        ValueError: it is no :class:`VisionTransformer`, or a norm over the batch is in it.
    """
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"it is a {type(model).__name__} and no vision transformer; set it to "
            "recipe_utils.model.vision.vision_transformer.dinov3_vit or one of its sizes"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"its {name} is a {type(module).__name__}, by which images would depend on how an update step is "
                "split; set it to a norm of each token, such as torch.nn.LayerNorm"
            )


_S16 = {"patch_size": 16, "embed_dim": 384, "num_layers": 12, "num_heads": 6}
_B16 = {"patch_size": 16, "embed_dim": 768, "num_layers": 12, "num_heads": 12}
_L16 = {"patch_size": 16, "embed_dim": 1024, "num_layers": 24, "num_heads": 16}


def dinov3_vit_s16(**changed: Any) -> VisionTransformer:
    """ViT-S/16: 21.6 million parameters. Takes the arguments of :func:`dinov3_vit`, by name."""
    return dinov3_vit(**{**_S16, **changed})


def dinov3_vit_b16(**changed: Any) -> VisionTransformer:
    """ViT-B/16: 85.7 million parameters. Takes the arguments of :func:`dinov3_vit`, by name."""
    return dinov3_vit(**{**_B16, **changed})


def dinov3_vit_l16(**changed: Any) -> VisionTransformer:
    """ViT-L/16: 303 million parameters. Takes the arguments of :func:`dinov3_vit`, by name."""
    return dinov3_vit(**{**_L16, **changed})


def _sign(build: Any, sizes: dict[str, int]) -> None:
    """Gives a builder the signature of :func:`dinov3_vit`, against which configs are checked."""
    signature = inspect.signature(dinov3_vit)
    build.__signature__ = signature.replace(
        parameters=[
            each.replace(kind=each.KEYWORD_ONLY, default=sizes.get(name, each.default))
            for name, each in signature.parameters.items()
        ]
    )
    build.__annotations__ = dinov3_vit.__annotations__


_sign(dinov3_vit_s16, _S16)
_sign(dinov3_vit_b16, _B16)
_sign(dinov3_vit_l16, _L16)


def fresh_vit_weights(whole_on_meta: nn.Module, seed: int) -> dict[str, Tensor]:
    """Initial weights: matrices normal with deviation 1 / sqrt(3 * inputs), which is 0.02 for 833.

    So small models, too, tell images apart from the start; published ones have 384 inputs and more and 0.02
    (arXiv:2104.14294). Prototypes have a length of about 1, as DINO's normalised ones. Learned tokens have a
    deviation of 0.02. Each weight has a generator of its own, of the seed and its name, so that it is the same on
    any layout.

    Args:
        whole_on_meta: with its heads; not wrapped yet.
        seed: of the run.

    Returns:
        Full tensors by name, in fp32 on the CPU: the mask token and biases zero, norms one, LayerScale as the
        model says.

    Raises:
        ValueError: a weight of an unknown kind, or a buffer.
    """
    weights = {}
    for prefix, module in whole_on_meta.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            kind = name.rpartition(".")[2]
            value = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
            if isinstance(module, LayerScale):
                value.fill_(module.initial)
            elif isinstance(module, nn.LayerNorm | nn.RMSNorm | RMSNorm) and kind != "bias":
                value.fill_(1)
            elif value.dim() >= 2 or kind == "cls_token":
                digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
                seed_of_name = int.from_bytes(digest[:8], "big") >> 1
                generator = torch.Generator("cpu").manual_seed(seed_of_name)
                std = 0.02
                if isinstance(module, nn.Linear):
                    # Prototypes have a length of 1, or their logits were all alike, and so all targets.
                    gain = 1.0 if ".prototypes." in name else 3**-0.5
                    std = gain * module.in_features**-0.5
                nn.init.trunc_normal_(value, std=std, generator=generator)
            elif kind not in ("bias", "mask_token"):
                raise ValueError(
                    f"model: {name} has no fresh value; only matrices, biases, norms and LayerScale have"
                )
            weights[name] = value
    names = list(whole_on_meta.state_dict())
    if unknown := [name for name in names if name not in weights]:
        raise ValueError(f"model: {unknown[0]} has no fresh value, since it is no parameter")
    return {name: weights[name] for name in names}


_DEPTH = re.compile(r"(?:stage_\d+\.)?(?:tok_embeddings|layers\.(?P<layer>\d+)|norm|output)\.")


def layer_of(name: str, num_layers: int) -> int:
    """Depth of a weight for a learning rate that decays towards the input.

    Args:
        name: in the whole model or a stage, without wrappers.
        num_layers: of the whole model.

    Returns:
        0 for the patch embedding, i + 1 for layer i, num_layers + 1 for the last norm and the heads.

    Raises:
        ValueError: the name of no weight of a vision transformer.
    """
    found = _DEPTH.match(name)
    if found is None:
        raise ValueError(f"{name}: it is no weight of a vision transformer")
    if found["layer"] is not None:
        return int(found["layer"]) + 1
    return 0 if "tok_embeddings." in found[0] else num_layers + 1
