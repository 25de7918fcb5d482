"""DINOv3's vision transformer (arXiv:2508.10104) built from torchtune's modules.

A microbatch is one row of tokens that concatenates crops of several sizes, so that sharding,
compile, activation checkpointing and pipeline stages work as for text.

Shapes: b rows, s tokens per row, h heads, w head width, d model width, L layers, c channels, p patch size.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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

from recipe_utils.dinov3.images.crop_rows import MASKED_PATCH, PATCH
from recipe_utils.dinov3.self_distillation import PrototypeHead, SelfDistillationHeads
from recipe_utils.settings.problems import ConfigError

CropGroups = Sequence[tuple[int, int]]
"""(number of crops, tokens per crop) of each run of crops of equal length, in row order."""

_ANY_LENGTH = 2**31 - 1
"""``max_seq_len`` of torchtune's modules, which only size KV caches by it."""


class PatchEmbedding(nn.Module):
    """Patch embedding, with learned vectors for class, register and masked tokens.

    Registers are learned tokens of each crop besides the class token (arXiv:2309.16588).
    """

    def __init__(self, patch_size: int, num_channels: int, embed_dim: int, num_registers: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.num_channels = num_channels
        self.embedding_dim = embed_dim
        self.num_registers = num_registers
        self.sees_masked_patches = False
        """True on a teacher: masked patches are embedded as if unmasked."""
        self.patches = nn.Linear(num_channels * patch_size**2, embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(embed_dim))
        self.cls_token = nn.Parameter(torch.zeros(embed_dim))
        # None instead of an empty parameter, which FSDP2 cannot shard.
        self.register_tokens = nn.Parameter(torch.zeros(num_registers, embed_dim)) if num_registers else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeds tokens [b, s, 1 + c * p * p] as [b, s, d], in the dtype of the weights."""
        kinds = tokens[..., 0].long()
        if self.sees_masked_patches:
            kinds = kinds.masked_fill(kinds == MASKED_PATCH, PATCH)
        learned = [self.mask_token[None], self.cls_token[None]]
        if self.register_tokens is not None:
            learned.append(self.register_tokens)
        # One lookup in all learned vectors, so that each has a gradient even if no token uses it.
        others = F.embedding((kinds - MASKED_PATCH).clamp(min=0), torch.cat(learned))
        embedded = self.patches(tokens[..., 1:].to(self.patches.weight.dtype))
        return torch.where((kinds == PATCH)[..., None], embedded, others)


class AxialRotaryPositions(nn.Module):
    """Axial RoPE: rotates channels (i, i + w / 2) by a patch's row and column (DINOv3, section 3.2)."""

    def forward(self, x: Tensor, *, input_pos: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates x [b, s, h, w] by the result of :func:`rotation_of`."""
        cos, sin = input_pos
        swapped = x.roll(x.size(-1) // 2, -1)
        return torch.addcmul(x * cos, swapped, sin)


class LayerScale(nn.Module):
    """Per-channel scale of a residual branch (arXiv:2103.17239)."""

    def __init__(self, embed_dim: int, initial: float) -> None:
        super().__init__()
        self.initial = initial
        self.scale = nn.Parameter(torch.full((embed_dim,), float(initial)))

    def forward(self, x: Tensor) -> Tensor:
        """Scales x [..., d]."""
        return x * self.scale


class VisionLayer(TransformerSelfAttentionLayer):
    """torchtune's layer with stochastic depth per crop."""

    def forward(
        self,
        x: Tensor,
        *,
        mask: CropGroups | None = None,
        input_pos: Any = None,
        branches: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Computes hidden states [b, s, d] from x [b, s, d].

        ``mask`` is that of :func:`attend_within_crops`, ``input_pos`` the result of
        :func:`rotation_of`; ``branches`` are factors [b, s, 2] of attention and MLP, None is 1.
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
    """torchtune's decoder over crops; rotations and dropped branches are computed once per forward on each stage.

    ``arguments`` are those of :func:`dinov3_vit`, ``parts`` those of :class:`TransformerDecoder`.
    """

    def __init__(self, arguments: dict[str, Any], **parts: Any) -> None:
        super().__init__(**parts)
        self.arguments = arguments
        self.rope_base: float = arguments["rope_base"]
        self.drop_path: float = arguments["drop_path"]

    @property
    def num_draws(self) -> int:
        """Number of draws that a student's ``input_pos`` contains: one per residual branch."""
        return 2 * len(self.layers) if self.drop_path > 0 else 0

    def forward(self, tokens: Tensor, *, input_pos: Tensor, crop_groups: CropGroups | None = None) -> Any:
        """Returns hidden states after the final norm [b, s, d], or the output of ``output`` or of a loss module.

        Args:
            tokens: [b, s, 1 + c * p * p]: kind of the token (0 patch, 1 masked patch, 2 class
                token, 3 + r register r), then its patch's normalized pixels in the order [c, p, p].
                On all stages but the first, hidden states [b, s, d].
            input_pos: [b, s, 2 + draws]: (row, column) of the patch center in (-1, 1), (0, 0) for other tokens; then
                draws in [0, 1), equal for all tokens of a crop, one per residual branch: attention of layer 0, MLP of
                layer 0, attention of layer 1, ... In training a draw below ``drop_path`` drops its branch, others scale
                it by 1 / (1 - drop_path) (arXiv:1603.09382). No draws drop nothing.
            crop_groups: crops of the single row (b = 1), s tokens in total; None if each row is one crop.
        """
        h = self.tok_embeddings(tokens)
        rotation = rotation_of(input_pos[..., :2], self.head_dim, self.rope_base, h.dtype)
        branches, draws = None, input_pos[..., 2:]
        if self.training and self.drop_path > 0 and draws.size(-1) > 0:
            branches = (draws >= self.drop_path).to(h.dtype) / (1 - self.drop_path)  # factors of all, [b, s, 2 L]
        for index, layer in enumerate(self.layers):
            kept = None if branches is None else branches[..., 2 * index : 2 * index + 2]
            h = layer(h, mask=crop_groups, input_pos=rotation, branches=kept)
        return self.unembed(h)

    def unembed(self, h: Tensor) -> Any:
        """Applies norm and output; unlike torchtune's, keeps the dtype."""
        return self.output(self.norm(h))


def rotation_of(centers: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosines and signed sines of the rotation, [b, s, 1, w] each.

    Angles are 2 pi * center * base^(-4 i / w) for i < w / 4, by rows for the first and by columns
    for the second half of the channel pairs, as in transformers' DINOv3ViTModel.

    ``centers`` [b, s, 2] are (row, column) in (-1, 1); ``base`` is that of the wavelengths.
    """
    # Angles need fp32 for bf16 hidden states, and fp64 for fp64 ones.
    wide = torch.promote_types(torch.promote_types(dtype, centers.dtype), torch.float32)
    exponents = torch.arange(0, 1, 4 / head_dim, dtype=wide, device=centers.device)
    frequencies = 1 / base**exponents
    angles = (2 * math.pi * centers.to(wide)[..., None] * frequencies).flatten(-2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), -1)[:, :, None], torch.cat((-sin, sin), -1)[:, :, None]


def attend_within_crops(
    q: Tensor, k: Tensor, v: Tensor, mask: CropGroups | None, dropout_p: float, is_causal: bool
) -> Tensor:
    """Computes full attention [b, h, s, w] within each crop, one call per group of equally long crops.

    ``mask`` None makes each row one crop. ``is_causal`` is torchtune's and ignored.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    _, num_heads, _, head_dim = q.shape
    sizes = [num_crops * length for num_crops, length in mask]
    attended = []
    # split and cat, because the backward of a slice fills a gradient of the whole row.
    parts = zip(*(x.transpose(1, 2).split(sizes, dim=1) for x in (q, k, v)), strict=True)
    for (num_crops, length), group in zip(mask, parts, strict=True):
        q, k, v = (part.reshape(num_crops, length, num_heads, head_dim).transpose(1, 2) for part in group)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
        attended.append(out.transpose(1, 2).reshape(1, num_crops * length, num_heads, head_dim))
    # Concatenated as [b, s, h, w], the layout that the caller needs next.
    return torch.cat(attended, dim=1).transpose(1, 2)


def dinov3_vit(
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
    """Builds DINOv3's vision transformer without a head, as transformers' ``DINOv3ViTModel``.

    Args:
        patch_size: side of a patch [pixels].
        embed_dim: width of the hidden states.
        num_layers: number of layers.
        num_heads: number of attention heads.
        num_registers: learned tokens of each crop besides the class token.
        num_channels: channels of an image.
        intermediate_dim: width of the MLP; None is four times ``embed_dim``.
        use_gated_mlp: SwiGLU instead of GELU, as in S+, H+ and larger.
        layer_scale_init: initial scale of residual branches.
        drop_path: fraction of crops whose residual branch is dropped, equal in all layers as in
            DINOv2 and DINOv3 (in other ViTs it grows with depth).
        rope_base: base of the rotary wavelengths.
        norm_eps: epsilon of the layer norms.

    Raises ValueError for sizes below 1 or incompatible, and for ``drop_path`` outside [0, 1).
    """
    arguments = dict(locals())
    for name in ("patch_size", "num_layers", "num_heads", "num_channels"):
        if arguments[name] < 1:
            raise ValueError(f"model.{name}={arguments[name]}: it must be at least 1")
    if embed_dim % num_heads or (embed_dim // num_heads) % 4:
        raise ValueError(
            f"model.num_heads={num_heads}: embed_dim={embed_dim} must be a multiple of 4 * num_heads, since rows and "
            "columns of patches each rotate pairs of a head's channels"
        )
    if not 0 <= drop_path < 1:
        raise ValueError(f"model.drop_path={drop_path}: it must be at least 0 and below 1")
    head_dim = embed_dim // num_heads
    hidden_dim = 4 * embed_dim if intermediate_dim is None else intermediate_dim
    arguments["intermediate_dim"] = hidden_dim

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
            # Not torchtune's Fp32LayerNorm, which downcasts fp64; PyTorch's computes bf16 in fp32 internally.
            sa_norm=nn.LayerNorm(embed_dim, norm_eps),
            mlp_norm=nn.LayerNorm(embed_dim, norm_eps),
            sa_scale=LayerScale(embed_dim, layer_scale_init),
            mlp_scale=LayerScale(embed_dim, layer_scale_init),
        )

    return VisionTransformer(
        arguments,
        tok_embeddings=PatchEmbedding(patch_size, num_channels, embed_dim, num_registers),
        layers=nn.ModuleList([layer() for _ in range(num_layers)]),
        max_seq_len=_ANY_LENGTH,
        num_heads=num_heads,
        head_dim=head_dim,
        norm=nn.LayerNorm(embed_dim, norm_eps),
        output=nn.Identity(),
    )


def part_of(name: str) -> str:
    """Returns the part of the model to which a parameter belongs; gradients are clipped part by part."""
    return next((head for head in ("output.dino.", "output.ibot.") if name.startswith(head)), "backbone")


def with_heads(
    make_backbone: Callable[[], nn.Module], dino: Mapping[str, int], ibot: Mapping[str, int]
) -> VisionTransformer:
    """Builds the backbone with prototype heads as its output layer.

    ``dino`` and ``ibot`` are arguments of :class:`PrototypeHead`, without the width. Raises ValueError for another
    backbone or one with batch norms, ConfigError for invalid arguments of a head.
    """
    model = make_backbone()
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"it is a {type(model).__name__} and no vision transformer; set it to "
            "recipe_utils.dinov3.dinov3_vit or one of its sizes"
        )
    # The gradient must not depend on the split: every layer computes a token, or a crop, by itself.
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"its {name} is a {type(module).__name__}, which makes outputs depend on how an update step is split; "
                "set it to a norm of each token, such as torch.nn.LayerNorm"
            )
    # Errors above are reported with the key model, these with the key of the head.
    heads = []
    for key, arguments in (("dino_head", dino), ("ibot_head", ibot)):
        try:
            heads.append(PrototypeHead(model.tok_embeddings.embedding_dim, **arguments))
        except ValueError as error:
            raise ConfigError(f"{key}.{error}") from error
    model.output = SelfDistillationHeads(*heads)
    return model


def _of_size(name: str, *sizes: Any) -> Callable[..., VisionTransformer]:
    """Returns :func:`dinov3_vit` with defaults of its first four arguments."""
    names = ("patch_size", "embed_dim", "num_layers", "num_heads")
    build = partial(dinov3_vit, **dict(zip(names, sizes, strict=True)))
    # Configs are checked against them.
    vars(build).update(__name__=name, __annotations__=dinov3_vit.__annotations__)
    return build


dinov3_vit_s16 = _of_size("dinov3_vit_s16", 16, 384, 12, 6)
"""Builds ViT-S/16 (21.6 million parameters)."""
dinov3_vit_b16 = _of_size("dinov3_vit_b16", 16, 768, 12, 12)
"""Builds ViT-B/16 (85.7 million parameters)."""
dinov3_vit_l16 = _of_size("dinov3_vit_l16", 16, 1024, 24, 16)
"""Builds ViT-L/16 (303 million parameters)."""


def fresh_vit_weights(meta_model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Returns full initial weights by name, in fp32 on the CPU.

    Matrices are normal with deviation 1 / sqrt(3 * inputs), which is 0.02 for 833 inputs, so that small models
    distinguish images from the start; published models have 384 inputs or more and 0.02 (arXiv:2104.14294). Prototypes
    have a norm of about 1, as DINO's normalized ones; learned tokens a deviation of 0.02; the mask token and biases are
    0, norms 1. Each weight has its own generator, so that weights do not depend on the layout.

    Raises ValueError for a parameter of an unknown kind.
    """
    weights = {}
    for prefix, module in meta_model.named_modules():
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
                    # With short prototypes all logits, and so all targets, would be nearly equal.
                    gain = 1.0 if ".prototypes." in name else 3**-0.5
                    std = gain * module.in_features**-0.5
                nn.init.trunc_normal_(value, std=std, generator=generator)
            elif kind not in ("bias", "mask_token"):
                raise ValueError(
                    f"model: {name} has no initial value; only matrices, biases, norms and LayerScale have"
                )
            weights[name] = value
    return weights


_DEPTH = re.compile(r"(?:stage_\d+\.)?(?:tok_embeddings|layers\.(?P<layer>\d+)|norm|output)\.")


def layer_of(name: str, num_layers: int) -> int:
    """Returns a weight's depth, for a learning rate that decays towards the input.

    Depths are 0 for the patch embedding, i + 1 for layer i, num_layers + 1 for the last norm and the
    heads. Raises ValueError for names that are not of the model or a stage.
    """
    match = _DEPTH.match(name)
    if match is None:
        raise ValueError(f"{name}: it is no weight of a vision transformer")
    if match["layer"] is not None:
        return int(match["layer"]) + 1
    return 0 if "tok_embeddings." in match[0] else num_layers + 1
