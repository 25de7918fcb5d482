"""Norms and positions with fewer passes are torchtune's, forward and backward."""

import pytest
import tiny
import torch
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.modules import RMSNorm, RotaryPositionalEmbeddings

from recipe_utils.models.kernels import fuse_norms_and_rope


def forward_and_gradients(module, x, **arguments):
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x, **arguments)
    y.backward(torch.sin(torch.arange(y.numel())).view_as(y).to(y.dtype))
    return y.detach(), x.grad, *(p.grad for p in module.parameters())


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def assert_fused_is_bitwise_equal(module, x, **arguments):
    stock = forward_and_gradients(module, x, **arguments)
    fuse_norms_and_rope(module)
    for ours, theirs in zip(forward_and_gradients(module, x, **arguments), stock, strict=True):
        assert ours.dtype == theirs.dtype == x.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 7, 64), (1, 2048, 256), (3, 64), (1, 1, 8)])
def test_norms_are_torchtune_s_bitwise(shape, dtype):
    torch.manual_seed(0)
    norm = RMSNorm(shape[-1], eps=1e-5)
    torch.nn.init.normal_(norm.scale, mean=1)
    assert_fused_is_bitwise_equal(norm.to(dtype), (torch.randn(shape) * 3).to(dtype))


def test_a_frozen_scale_gets_no_gradient():
    norm = RMSNorm(8)
    norm.scale.requires_grad_(False)
    fuse_norms_and_rope(norm)
    _, grad, none = forward_and_gradients(norm, torch.randn(2, 8))
    assert grad is not None
    assert none is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", ["given", "none"])
@pytest.mark.parametrize("kind", [RotaryPositionalEmbeddings, Llama3ScaledRoPE])
def test_positions_are_torchtune_s_bitwise(kind, positions, dtype):
    torch.manual_seed(0)
    rope = kind(dim=16, max_seq_len=64)
    if kind is Llama3ScaledRoPE:
        rope.rope_init()
    given = {"input_pos": torch.randint(64, (2, 40))} if positions == "given" else {}
    assert_fused_is_bitwise_equal(rope, torch.randn(2, 40, 3, 16).to(dtype), **given)


def test_rotation_keeps_strides():
    rope = RotaryPositionalEmbeddings(dim=16, max_seq_len=64)
    fuse_norms_and_rope(rope)
    x = torch.randn(2, 3, 40, 16).transpose(1, 2)
    assert rope(x).stride() == x.stride()


def test_other_norms_keep_their_forward_and_weights_their_names():
    class Own(RMSNorm):
        pass

    norms = torch.nn.Sequential(Own(8), torch.nn.LayerNorm(8), RMSNorm(8))
    fuse_norms_and_rope(norms)
    assert ["forward" in vars(module) for module in norms] == [False, False, True]
    model = tiny.tiny_model()
    names = list(model.state_dict())
    fuse_norms_and_rope(model)
    assert list(model.state_dict()) == names
    assert sum("forward" in vars(module) for module in model.modules()) == 2 * 2 + 1 + 1


def test_gemma_2_overwrites_its_rotated_queries_in_fp32():
    tokens = torch.arange(16).view(2, 8)
    models = [tiny.tiny_model(tiny.GEMMA2_MODEL) for _ in range(2)]
    fuse_norms_and_rope(models[0])
    for model in models:
        model(tokens).sin().sum().backward()
    for ours, stock in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours.grad, stock.grad)
