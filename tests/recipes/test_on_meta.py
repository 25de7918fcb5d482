"""Update steps with model, optimizer and microbatches on the meta device, in place of a GPU.

The meta device has shapes and no numbers: every read by the host raises, and so does a mix of two devices.
Blocking copies to it raise here, too. Streams, pinned memory and times of kernels need a GPU.
"""

import sys
from contextlib import ExitStack
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest
import tiny
import torch
import torch.distributed as dist
from big_batch_of_views import step_of_16
from recipe_runs import DINO, DPO, KD, POLICY, SFT, STOCK_LOSS, ListLogger, cosine, set_up, slow
from tiny_transformers import save_tiny
from torch import nn
from torch.func import functional_call
from torch.nn.attention import flex_attention, varlen
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtune.models.llama3_1 import Llama3ScaledRoPE

from recipe_utils.models import distribute, frozen, settings, sizes
from recipe_utils.models.attention import kernels
from recipe_utils.models.attention.packed_attention import attention_of
from recipe_utils.parallel import ranks

META, CUDA = torch.device("meta"), torch.device("cuda")
DIVISORS = {SFT: "target_tokens", DPO: "pairs", KD: "target_tokens", DINO: "images", POLICY: "answer_tokens"}
KEYS = {
    "device": "meta",
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01, "fused": True},
    "lr_scheduler": cosine(2),
    "clip_grad_norm": 1.0,
    "prefetch_update_steps": 0,
    "log_peak_memory_stats": False,
}


class Waits(TorchDispatchMode):
    """Raises for an operation between devices, except for non-blocking copies. Those to the host arrive as zeros."""

    supports_higher_order_operators = True  # flex attention, one kernel on a GPU

    def __init__(self, raises=True):
        super().__init__()
        self.raises = raises

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_copy = func is torch.ops.aten._to_copy.default
        if is_copy and (kwargs.get("non_blocking") or not self.raises):
            if args[0].is_meta and kwargs.get("device", META).type == "cpu":
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype", args[0].dtype))
            return func(*args, **kwargs)
        made = func(*args, **kwargs)
        # A kernel takes a number of the host without a wait; a copy waits.
        copies = is_copy or func is torch.ops.aten.copy_.default
        leaves = [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor)]
        if len({t.is_meta for t in leaves if t.dim() or copies}) > 1 and self.raises:
            raise RuntimeError(f"{func} goes between devices, and the host waits")
        return made


class LikeCuda(TorchFunctionMode):
    """Raises for a tensor made of numbers on the device. ``is_cuda`` is True for tensors on it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return args[0].is_meta
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor) and made.is_meta:
            raise RuntimeError("numbers go to the device, and the host waits")
        return made


class Gather(torch.autograd.Function):
    """Copies a parameter from the CPU to the device; its gradient goes the other way."""

    @staticmethod
    def forward(ctx, parameter):
        return parameter.to(META, non_blocking=True)

    @staticmethod
    def backward(ctx, grad):
        return grad.to("cpu", non_blocking=True)


class Gathered(nn.Module):
    """A model's forward with its parameters gathered, as FSDP2 with CPU offload; FSDP2 rejects the meta device."""

    def __init__(self, model, *_, **__):
        super().__init__()
        self.model, self.plain = model, model.forward
        model.forward = self.run

    def run(self, *args, **kwargs):
        gathered = {name: Gather.apply(p) for name, p in self.named_parameters()}
        return functional_call(self, gathered, args, kwargs)

    def forward(self, *args, **kwargs):
        return self.plain(*args, **kwargs)


@pytest.mark.parametrize(
    "do",
    [
        lambda on_device, _: on_device.sum().item(),
        lambda on_device, _: on_device.tolist(),
        lambda on_device, _: on_device.nonzero(),
        lambda on_device, _: on_device[on_device > 0],
        lambda on_device, _: bool(on_device.any()),
        lambda on_device, _: on_device.cpu(),
        lambda _, on_host: on_host.to(META),
        lambda _, on_host: on_host[0].to(META),
        lambda on_device, on_host: on_device.copy_(on_host),
        lambda on_device, on_host: on_device[on_host],
        lambda on_device, on_host: torch.cat([on_device, on_host]),
        lambda on_device, _: on_device.new_tensor([1, 2]),
        lambda _, __: torch.tensor([1, 2], device=META),
    ],
)
def test_a_wait_of_the_host_raises(do):
    with Waits(), LikeCuda(), pytest.raises((RuntimeError, NotImplementedError)):
        do(torch.empty(3, dtype=torch.long, device=META), torch.zeros(3, dtype=torch.long))


@pytest.fixture
def arrivals(monkeypatch):
    """Lets recipes train on the meta device; gets an item for each wait for a copy to the host."""
    store, arrivals = dist.HashStore(), []
    dist.init_process_group("cpu:gloo,meta:fake", store=store, rank=0, world_size=1)
    event = SimpleNamespace(synchronize=lambda: arrivals.append("arrived"))
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    for module in (ranks, settings):
        monkeypatch.setattr(module, "resolve_device", torch.device)
    monkeypatch.setattr(distribute, "shard_model", Gathered)
    for module in (frozen, sizes):
        monkeypatch.setattr(module, "attention_of", lambda model, _, *o: attention_of(model, CUDA, *o))
    monkeypatch.setattr(kernels, "missing_for_triton", lambda: None)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    # torch 2.15 queries the driver for the library that computes it.
    capability = "_cudnn_version_and_major_capability"
    monkeypatch.setattr(varlen, capability, lambda _: (None, 9), raising=False)
    monkeypatch.setattr("torchtune.training.validate_no_params_on_meta_device", lambda _: None)
    monkeypatch.setattr(settings, "get_dtype", lambda *_, **__: None)  # a CPU may lack bf16
    optim = sys.modules[torch.optim.Optimizer.__module__]
    monkeypatch.setattr(optim, "_get_fused_kernels_supported_devices", lambda: ["cpu", "meta"])
    rope_init = Llama3ScaledRoPE.rope_init

    def on_cpu(self):
        with torch.device("cpu"):
            rope_init(self)
        self.to(META)

    monkeypatch.setattr(Llama3ScaledRoPE, "rope_init", on_cpu)  # its scaling reads its table
    return arrivals


def train_two_steps(config, recipe, arrivals):
    """Trains like a recipe's ``train``; the metrics of both update steps are read late."""
    config = {**config, **KEYS}
    num_late = 1 + config.get("sample_losses", False) + (recipe == POLICY)  # its ratios
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        with Waits(raises=False):
            made = stack.enter_context(set_up(config, recipe))
        for step in islice(made.run.steps(made.loader, DIVISORS[recipe]), 2):
            with Waits(), LikeCuda():
                metrics, grad_norm = made.update(step)
                made.run.finish(step, metrics, grad_norm)
            assert {each.device for each in metrics.values()} == {META}
            assert len(arrivals) == num_late * (made.run.global_step - 1)
        made.run.metrics.late.read()
    assert [logged["step"] for logged in ListLogger.logged] == [1, 2]


PACKED = {"microbatching": "packed"}  # in fp32 by flex attention
VARLEN = {**PACKED, "dtype": "bf16"}
BY_DOCUMENT = {**PACKED, "packed_attention": "by_document"}
OFFLOAD = {"fsdp_cpu_offload": True}
LORA = {"model": tiny.adapted(tiny.MODEL)}
DROPS = {"model": tiny.adapted(tiny.MODEL, lora_dropout=0.3)}
KNOWN = {"sample_losses": True}
QDORA = {"model": tiny.adapted(tiny.WIDE_MODEL, use_dora=True, quantize_base=True)}
GEMMA = {"model": tiny.GEMMA2_MODEL}
CACHED = {"reference": "cached"}
DATA = {"_component_": "tiny.tiny_dataset", "num_samples": 99}
PACKED_DATASET = {"dataset": {**DATA, "packed": True}}
NAMED = {"dataset": [{**DATA, "name": "a", "loss_weight": 2}, {**DATA, "name": "b"}]}
JS = {"kd_loss": {"_component_": "recipe_utils.distillation.LinearDistillationLoss", "divergence": "js"}}
GRADED = {"dataset": {"_component_": "policies.graded_groups", "num_groups": 40}}
SEQUENCE = {"kind": "sequence", "normaliser": "tokens", "kl_weight": 0.1, "old": "start", "correction": "truncate"}
POLICIES = {**GRADED, "loss": {"_component_": "recipe_utils.policy.PolicyLoss", **SEQUENCE}}
SIMPO = {"loss": {"_component_": "recipe_utils.preference.SimPOLoss"}, "sft_loss_weight": 0.1}


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        (SFT, VARLEN),
        (SFT, {**BY_DOCUMENT, **DROPS, **KNOWN}),
        slow(DPO, {**PACKED, **KNOWN}),
        slow(KD, {**PACKED, **DROPS, **KNOWN}),
        (SFT, OFFLOAD),
        (SFT, {**GEMMA, **PACKED_DATASET}),
        (DPO, {**VARLEN, **LORA}),  # shared prefixes, by flex attention
        (KD, JS),
        (POLICY, {**POLICIES, **VARLEN, **KNOWN}),
        slow(POLICY, {**POLICIES, **LORA, "microbatching": "least_padding"}),
        slow(SFT, PACKED),
        slow(SFT, {**LORA, **PACKED}),
        slow(SFT, {**QDORA, **PACKED}),
        slow(SFT, {**PACKED_DATASET, **VARLEN}),
        slow(SFT, {**NAMED, "enable_activation_checkpointing": True}),
        slow(SFT, {"loss": STOCK_LOSS}),
        slow(DPO, {**BY_DOCUMENT, **CACHED}),
        slow(DPO, OFFLOAD),
        slow(DPO, SIMPO),
        slow(KD, PACKED),
        slow(KD, OFFLOAD),
        slow(DINO, {}),
        slow(DINO, {"koleo_group_size": None}),
    ],
)
def test_the_host_does_not_wait_in_an_update_step(
    recipe, changes, arrivals, tiny_config, tiny_dpo_config, tiny_kd_config
):
    images = partial(step_of_16, tiny_config, batch_size=2, dtype="fp32")
    make = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config, DINO: images, POLICY: tiny_config}
    train_two_steps(make[recipe](**changes), recipe, arrivals)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", VARLEN),
        ("deepseek_v3", {**VARLEN, **OFFLOAD}),
        ("lfm2", VARLEN),
        ("gemma3_text", VARLEN),  # windows
        ("gpt_oss", VARLEN),  # sinks
        ("qwen3", {"microbatching": "least_padding"}),
    ],
)
def test_a_decoder_of_transformers(model_type, changes, arrivals, tiny_config, tmp_path):
    config = tiny_config(**save_tiny(tmp_path, model_type), **changes)
    train_two_steps(config, SFT, arrivals)


def test_an_unfused_optimizer_reads_one_number(arrivals, tiny_config):
    config = {**tiny_config(**KEYS), "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1}}
    with set_up(config, SFT) as made:
        step = next(made.run.steps(made.loader, "target_tokens"))
        with pytest.raises(RuntimeError, match="meta"):
            made.update(step)
