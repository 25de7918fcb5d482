"""A vision transformer of some thousand parameters, rows of crops for it, and transformers' own to compare with."""

import math

import torch
import transformers

from recipe_utils.dinov3.backbone import dinov3_vit
from recipe_utils.dinov3.checkpoint import dinov3_hf_config, dinov3_tune_to_hf

SIZES = {"patch_size": 4, "embed_dim": 32, "num_layers": 3, "num_heads": 2, "num_registers": 2, "intermediate_dim": 48}
MODEL = {"_component_": "recipe_utils.dinov3.dinov3_vit", **SIZES}


def weights_like(model, seed=0):
    """Returns weights such that each one affects the output."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: ("norm" in name and name.endswith("weight"))
        + 0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for name, weight in model.state_dict().items()
    }


def tiny_vit(seed=0, dtype=torch.float32, **changed):
    model = dinov3_vit(**{**SIZES, **changed}).to(dtype)
    model.load_state_dict(weights_like(model, seed))
    return model


def images_of(num, height, width, num_channels=3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, num_channels, height, width, generator=generator).to(dtype)


def row_of(model, *groups, masks=None, draws=None):
    """Returns the forward's arguments for groups of images [n, c, h, w], one after the other.

    masks: one for the first group, [n, patches]. draws: one for each group, [n, columns].
    """
    arguments = model.arguments
    side, num_registers = arguments["patch_size"], arguments["num_registers"]
    tokens, positions, crop_groups = [], [], []
    for index, images in enumerate(groups):
        num, _, height, width = images.shape
        rows, columns = height // side, width // side
        patches = torch.nn.functional.unfold(images, side, stride=side).transpose(1, 2)
        kinds = images.new_zeros(num, rows * columns, 1)
        if index == 0 and masks is not None:
            kinds = masks[..., None].to(images.dtype)
        special = images.new_zeros(num, 1 + num_registers, 1 + patches.size(-1))
        special[..., 0] = torch.arange(2, 3 + num_registers)
        of_crops = torch.cat((special, torch.cat((kinds, patches), -1)), 1)
        centers = [(torch.arange(0.5, size) / size) * 2 - 1 for size in (rows, columns)]
        grid = torch.stack(torch.meshgrid(*centers, indexing="ij"), -1).flatten(0, 1)
        if images.dtype == torch.float64:
            # transformers rounds 2 pi * center to fp32, and not what comes after.
            grid = (2 * math.pi * grid).double() / (2 * math.pi)
        at = torch.cat((grid.new_zeros(1 + num_registers, 2), grid)).to(images.dtype)
        at = at.expand(num, -1, -1)
        if draws is not None:
            drawn = draws[index].to(images.dtype)[:, None].expand(-1, at.size(1), -1)
            at = torch.cat((at, drawn), -1)
        tokens.append(of_crops.flatten(0, 1))
        positions.append(at.flatten(0, 1))
        crop_groups.append((num, of_crops.size(1)))
    return {
        "tokens": torch.cat(tokens)[None],
        "input_pos": torch.cat(positions)[None],
        "crop_groups": tuple(crop_groups),
    }


def of_transformers(model):
    """Returns DINOv3ViTModel with the weights of ``model``, converted."""
    config = transformers.DINOv3ViTConfig(**dinov3_hf_config(model.arguments))
    dtype = model.norm.weight.dtype
    theirs = transformers.DINOv3ViTModel(config).eval().to(dtype)
    weights = dinov3_tune_to_hf(model.state_dict(), model.arguments["num_channels"])
    in_this_version = {
        f"model.{name}" if name.startswith("layer.") else name: weight for name, weight in weights.items()
    }
    names = theirs.state_dict().keys()
    theirs.load_state_dict(weights if names == weights.keys() else in_this_version)
    rope, head_dim = theirs.rope_embeddings, model.head_dim
    if dtype == torch.float64:  # which transformers makes in fp32
        exponents = torch.arange(0, 1, 4 / head_dim, dtype=dtype)
        rope.inv_freq = 1 / model.rope_base**exponents
    assert math.prod(rope.inv_freq.shape) == head_dim // 4
    return theirs
