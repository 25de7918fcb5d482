"""DINOv3's vision transformer equals transformers' model, on rows of crops.

Gradients on shards and pipeline stages: ``recipes/test_dinov3_gradients.py``.
"""

import copy
from functools import partial

import pytest
import tiny_vit
import torch
from tiny_vit import SIZES, images_of, row_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipe_utils.dinov3 import backbone as vision_transformer
from recipe_utils.dinov3.backbone import dinov3_vit, fresh_vit_weights, layer_of
from recipe_utils.models.pipeline.stages import layers_of_stages

DIM, NUM_LAYERS = SIZES["embed_dim"], SIZES["num_layers"]
NUM_PREFIX = 1 + SIZES["num_registers"]


def relative(found, expected):
    return (found - expected).abs().max().item() / expected.abs().max().item()


# ---- transformers -------------------------------------------------------------------------------


GATED = {"use_gated_mlp": True, "num_registers": 0}


@pytest.mark.parametrize(
    ("changed", "size", "dtype"),
    [
        ({}, (16, 16), torch.float32),
        (GATED, (24, 12), torch.float32),
        (GATED, (16, 16), torch.float64),
        ({}, (28, 36), torch.float64),
    ],
    ids=str,
)
def test_it_is_transformers_model_with_and_without_masked_patches(changed, size, dtype):
    model = tiny_vit.tiny_vit(dtype=dtype, **changed)
    theirs = tiny_vit.of_transformers(model)
    images = images_of(3, *size, dtype=dtype)
    num_patches = size[0] * size[1] // 16
    masks = torch.rand(3, num_patches, generator=torch.Generator().manual_seed(1)) < 0.4
    for mask in (None, masks):
        expected = theirs(images, bool_masked_pos=mask).last_hidden_state
        found = model(**row_of(model, images, masks=mask)).view_as(expected)
        assert found.dtype == dtype
        assert relative(found, expected) < (1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.slow
def test_gradients_are_those_of_transformers():
    model = tiny_vit.tiny_vit(dtype=torch.float64)
    theirs = tiny_vit.of_transformers(model)
    images = images_of(2, 16, 12, dtype=torch.float64)
    masks = torch.arange(24).view(2, 12) % 3 == 0
    model(**row_of(model, images, masks=masks)).square().sum().backward()
    theirs(images, bool_masked_pos=masks).last_hidden_state.square().sum().backward()
    of_theirs = {"embeddings.register_tokens": model.tok_embeddings.register_tokens.grad}
    of_theirs["embeddings.mask_token"] = model.tok_embeddings.mask_token.grad
    for name, gradient in of_theirs.items():
        expected = theirs.get_parameter(name).grad.view_as(gradient)
        assert relative(gradient, expected) < 1e-10
    last = next(n for n, _ in theirs.named_parameters() if n.endswith("2.attention.q_proj.weight"))
    q_proj = model.layers[2].attn.q_proj.weight.grad
    assert relative(q_proj, theirs.get_parameter(last).grad) < 1e-10


# ---- Rows of crops ------------------------------------------------------------------------------


def test_a_row_of_crops_of_two_sizes_is_what_each_crop_is_by_itself():
    model = tiny_vit.tiny_vit(dtype=torch.float64)
    large, small = images_of(4, 24, 24).double(), images_of(8, 8, 12, seed=1).double()
    masks = torch.rand(4, 36, generator=torch.Generator().manual_seed(2)) < 0.5
    whole = model(**row_of(model, large, small, masks=masks))
    found = whole.split([4 * (36 + NUM_PREFIX), 8 * (6 + NUM_PREFIX)], dim=1)
    for part, images, mask in ((found[0], large, masks), (found[1], small, None)):
        crops = part.view(len(images), -1, DIM)
        for index, crop in enumerate(crops):
            alone = row_of(model, images[index : index + 1], masks=None if mask is None else mask[index : index + 1])
            del alone["crop_groups"]
            assert relative(crop, model(**alone)[0]) < 1e-12


def test_every_weight_has_a_gradient_even_if_no_patch_is_masked():
    model = tiny_vit.tiny_vit()
    model(**row_of(model, images_of(2, 8, 8))).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.tok_embeddings.mask_token.grad.abs().max() == 0
    assert model.tok_embeddings.register_tokens.grad.abs().min() > 0


def test_attention_is_one_call_for_each_group_and_layer(monkeypatch):
    calls = []
    attention = vision_transformer.F.scaled_dot_product_attention

    def counted(q, k, v, **options):
        calls.append(tuple(q.shape))
        return attention(q, k, v, **options)

    monkeypatch.setattr(vision_transformer.F, "scaled_dot_product_attention", counted)
    model = tiny_vit.tiny_vit()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # which takes no mask
        model(**row_of(model, images_of(4, 16, 16), images_of(6, 8, 8)))
    assert calls == NUM_LAYERS * [(4, 2, 16 + NUM_PREFIX, 16), (6, 2, 4 + NUM_PREFIX, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_it_computes_in_the_dtype_of_its_weights_and_rotates_by_exact_angles(dtype):
    model = tiny_vit.tiny_vit(dtype=dtype)
    row = row_of(model, images_of(2, 16, 16))
    found = model(**row)
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float64: 1e-5}[dtype]
    assert relative(found.double(), tiny_vit.tiny_vit()(**row).double()) < tolerance
    centers = row["input_pos"][..., :2]
    found, in_fp32 = (vision_transformer.rotation_of(centers, 16, 100.0, each) for each in (dtype, torch.float32))
    for of_found, of_fp32 in zip(found, in_fp32, strict=True):
        if dtype == torch.float64:
            assert (of_found - of_fp32).abs().max() < 1e-6
            assert not torch.equal(of_found, of_fp32.double())
        else:
            assert torch.equal(of_found, of_fp32.to(dtype))


# ---- Drop path ----------------------------------------------------------------------------------


def with_draws(model, low=()):
    """Returns 2 + 3 crops; branches ``low``, (crop, branch), have draws below the rate of 0.25, others at it."""
    draws = torch.full((5, 2 * NUM_LAYERS), 0.25)
    for crop, branch in low:
        draws[crop, branch] = 0.1
    groups = images_of(2, 16, 16).double(), images_of(3, 8, 8, seed=1).double()
    return row_of(model, *groups, draws=draws.split([2, 3]))


def crops_of(model, row):
    large, small = model(**row).split([num_crops * length for num_crops, length in row["crop_groups"]], dim=1)
    return [*large.view(2, -1, DIM), *small.view(3, -1, DIM)]


@torch.no_grad()
def scaled_branches(model, factor, dropped=None):
    scaled = copy.deepcopy(model).eval()
    scales = [s for layer in scaled.layers for s in (layer.sa_scale, layer.mlp_scale)]
    for index, module in enumerate(scales):
        module.scale.mul_(0 if index == dropped else factor)
    return scaled


@pytest.mark.parametrize("branch", range(2 * NUM_LAYERS))
def test_a_branch_is_dropped_for_its_crop_alone_and_others_are_scaled(branch):
    model = tiny_vit.tiny_vit(dtype=torch.float64, drop_path=0.25)
    row = with_draws(model, low=[(3, branch)])
    found = crops_of(model, row)
    kept = crops_of(scaled_branches(model, 4 / 3), row)
    without = crops_of(scaled_branches(model, 4 / 3, dropped=branch), row)
    for index, crop in enumerate(found):
        expected, other = (without, kept) if index == 3 else (kept, without)
        assert relative(crop, expected[index]) < 1e-12
        assert relative(crop, other[index]) > 1e-3


def test_nothing_is_dropped_without_draws_in_evaluation_or_at_rate_0():
    model = tiny_vit.tiny_vit(dtype=torch.float64, drop_path=0.25)
    row = with_draws(model, low=[(0, 0), (4, 3)])
    without = {**row, "input_pos": row["input_pos"][..., :2]}
    expected = model(**without)
    assert not torch.equal(model(**row), expected)
    assert torch.equal(model.eval()(**row), expected)
    assert torch.equal(tiny_vit.tiny_vit(dtype=torch.float64)(**row), expected)
    assert (model.num_draws, tiny_vit.tiny_vit().num_draws) == (6, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"drop_path": 1.0}, r"drop_path=1.0: it must be"),
        ({"num_layers": 0}, r"num_layers=0: it must be at least 1"),
        ({"num_heads": 3}, r"num_heads=3: embed_dim=32 must be"),
        ({"num_heads": 16}, r"num_heads=16: embed_dim=32 must be"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        dinov3_vit(**{**SIZES, **changed})


# ---- Stages and weights -------------------------------------------------------------------------


HEAD = {"num_prototypes": 12, "hidden_dim": 8, "bottleneck_dim": 6, "num_layers": 2}


def with_heads(**changed):
    build = partial(dinov3_vit, **{**SIZES, **changed})
    return vision_transformer.with_heads(build, HEAD, HEAD)


def test_stages_are_balanced_by_all_parameters_of_heads_and_without_a_head():
    assert layers_of_stages(dinov3_vit(**SIZES), 3) == [range(1), range(1, 2), range(2, 3)]
    model = dinov3_vit(**SIZES)
    params = sum(p.numel() for p in model.layers[0].parameters())
    model.output = nn.Sequential(nn.Linear(DIM, 3 * params))
    assert layers_of_stages(model, 2) == [range(2), range(2, 3)]


def meta_with_heads():
    with torch.device("meta"):
        return with_heads(layer_scale_init=1e-3)


def test_fresh_weights_depend_only_on_seed_and_name():
    first, again, other = (fresh_vit_weights(meta_with_heads(), seed) for seed in (1, 1, 2))
    assert list(first) == list(meta_with_heads().state_dict())
    assert all(torch.equal(first[name], again[name]) for name in first)
    with torch.device("meta"):
        deeper = fresh_vit_weights(dinov3_vit(**{**SIZES, "num_layers": 5}), 1)
    name = "layers.1.attn.q_proj.weight"
    assert torch.equal(first[name], deeper[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["layers.2.attn.q_proj.weight"])


def test_fresh_weights_have_a_deviation_by_the_number_of_inputs():
    fresh = fresh_vit_weights(meta_with_heads(), 0)
    drawn = 0
    for name, weight in fresh.items():
        kind = name.rpartition(".")[2]
        if kind in ("bias", "mask_token"):
            assert weight.count_nonzero() == 0, name
        elif kind == "scale":
            assert weight.unique().tolist() == pytest.approx([1e-3]), name
        elif "norm" in name:
            assert weight.unique().tolist() == [1], name
        else:
            drawn += 1
            std = 0.02
            if weight.dim() == 2 and "register" not in name:
                std = weight.size(1) ** -0.5 * (1 if "prototypes" in name else 3**-0.5)
            assert weight.std().item() == pytest.approx(std, rel=0.35), name
    # Patches, class token, registers; six matrices of each layer; three of each head.
    assert drawn == 3 + 6 * NUM_LAYERS + 6


def test_a_weight_of_an_unknown_kind_has_no_initial_value():
    model = with_heads()
    model.output.temperature = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"output\.temperature has no initial value"):
        fresh_vit_weights(model, 0)


def test_names_of_weights_determine_their_depth():
    depths = {name: layer_of(name, NUM_LAYERS) for name in with_heads().state_dict()}
    assert depths["tok_embeddings.patches.weight"] == depths["tok_embeddings.mask_token"] == 0
    assert depths["layers.0.attn.q_proj.weight"] == 1
    assert depths["layers.2.sa_scale.scale"] == NUM_LAYERS
    assert depths["norm.weight"] == depths["output.ibot.mlp.0.weight"] == NUM_LAYERS + 1
    assert layer_of("stage_1.layers.2.mlp.w1.bias", NUM_LAYERS) == 3
    assert layer_of("output.layers.0.weight", NUM_LAYERS) == NUM_LAYERS + 1
    with pytest.raises(ValueError, match="temperature"):
        layer_of("temperature", NUM_LAYERS)
