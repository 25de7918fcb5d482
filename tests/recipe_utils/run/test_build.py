"""Optimizers are tried before weights are loaded: steps, their state in checkpoints, the schedule."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from omegaconf import OmegaConf
from torch.optim import SGD, AdamW, Optimizer

from recipe_utils.optim.optimizer import OptimizerSettings, make_optimizer
from recipe_utils.run.build import try_optimizer

CPU = torch.device("cpu")
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


class MomentumOutside(SGD):
    """Keeps its momentum outside of ``state``."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.momentum = {}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            kept = self.momentum.get(parameter, 0) + parameter.grad
            self.momentum[parameter] = kept
            parameter -= 0.1 * kept


class WithoutMode(SGD):
    """Steps only in a mode that training does not set, as schedule-free optimizers."""

    def step(self, closure=None):
        raise RuntimeError("insert .train() and .eval() calls")


class GroupsApart(Optimizer):
    """Wrapper whose inner optimizer does not see the rates of a schedule."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.inner = {"all": AdamW(self.param_groups[0]["params"], lr=lr)}

    def step(self, closure=None):
        self.inner["all"].step()


@pytest.fixture(autouse=True)
def own(monkeypatch):
    for each in (MomentumOutside, WithoutMode, GroupsApart, tiny.MuonAndAdamW):
        monkeypatch.setattr(tiny, each.__name__, each, raising=False)


def attempt(path, cosine=None, saves_checkpoints=True, **arguments):
    cfg = OmegaConf.create({"_component_": path, **arguments})
    settings = OptimizerSettings(optimizer={"_component_": path, **arguments})
    both = {"groups": settings.groups, "optimizer_in_bwd": False}
    settings = SimpleNamespace(**both, saves_checkpoints=saves_checkpoints)
    schedule = None if cosine is None else OmegaConf.create({"_component_": COSINE, **cosine})
    torch.manual_seed(3)
    drawn = torch.get_rng_state()
    try:
        try_optimizer(cfg, schedule, settings, CPU)
    finally:
        assert torch.equal(torch.get_rng_state(), drawn)


WARM = {"num_warmup_steps": 2}
TAKEN = {
    "torch.optim.AdamW": {"fused": True},
    "torch.optim.SGD": {"momentum": 0.9},
    "torch.optim.Adafactor": {},
    "torch.optim.NAdam": {},
    "torch.optim.ASGD": {},
    "transformers.Adafactor": {"lr": None},
    "tiny.MuonAndAdamW": {},
    "recipe_utils.optim.AdamW8bit": {"fused": True},
}


@pytest.mark.parametrize("path", TAKEN)
def test_optimizers_that_resume_bitwise_are_taken(path):
    attempt(path, None if TAKEN[path].get("lr", 1) is None else WARM, **TAKEN[path])


REFUSED = [
    ("torch.optim.AdamW", {"lr": -1.0}, "Invalid learning rate"),
    ("torch.optim.AdamW", {"lr": float("inf")}, "optimizer.lr=inf: it must be finite"),
    ("torch.optim.AdamW", {"cosine": {"num_warmup_steps": -1}}, "num_warmup_steps=-1: it must"),
    ("torch.optim.AdamW", {"differentiable": True}, "which fails: a leaf Variable"),
    ("torch.optim.LBFGS", {}, "LBFGS: training makes one step .* without a closure, which fails"),
    ("torch.optim.SparseAdam", {}, "SparseAdam: .* dense .* which fails"),
    ("torch.optim.Muon", {}, "_=Muon: it takes matrices only"),
    ("tiny.WithoutMode", {}, r"which fails: insert \.train\(\)"),
    ("tiny.GroupsApart", {"cosine": WARM}, "inner optimizers do not step with the rates"),
    ("tiny.MomentumOutside", {}, "a resumed training would differ"),
    ("torchao.optim.AdamW8bit", {}, "checkpoints cannot hold its state .* OptimState8bit"),
]


@pytest.mark.parametrize(("path", "changes", "text"), REFUSED)
def test_what_cannot_train_or_resume_is_refused_by_name(path, changes, text):
    with pytest.raises(ValueError, match=text):
        attempt(path, **changes)


def test_a_run_without_checkpoints_takes_an_optimizer_that_none_can_hold(caplog):
    attempt("tiny.MomentumOutside", saves_checkpoints=False)
    assert "MomentumOutside: a resumed training would differ" in caplog.text
    assert caplog.text.count("this run saves none") == 1


def test_inner_optimizers_have_the_state_of_their_wrapper():
    cfg = OmegaConf.create({"_component_": "tiny.GroupsApart"})
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(cfg, [weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
