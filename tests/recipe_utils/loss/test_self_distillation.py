"""The loss of a microbatch: its terms, terms of weight 0, and the zero loss of a dummy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recipe_utils.data.images.crop_rows import ViewTargets
from recipe_utils.loss.distillation import TeacherHidden
from recipe_utils.loss.self_distillation import (
    SUMS,
    ObjectiveSettings,
    PatchStates,
    PrototypeHead,
    SelfDistillationHeads,
    SelfDistillationLoss,
    TeacherBottlenecks,
    TeacherViews,
)

DIM, NUM_IMAGES, NUM_LOCAL, NUM_PATCHES, NUM_PROTOTYPES, BOTTLENECK = 6, 3, 2, 4, 9, 5
LOCAL_START = 2 * NUM_IMAGES * (1 + NUM_PATCHES)
NUM_TOKENS = LOCAL_START + NUM_LOCAL * NUM_IMAGES * 2
ALL = {
    "dino_loss_weight": 0.7,
    "ibot_loss_weight": 0.9,
    "koleo_loss_weight": 0.2,
    "gram_loss_weight": 0.4,
    "gram_teacher_every_n_steps": 1,
}
LOSS_OF = {
    "dino_loss_weight": ("dino_local_loss", "dino_global_loss", "target_entropy"),
    "ibot_loss_weight": ("ibot_loss",),
    "koleo_loss_weight": ("koleo_loss",),
    "gram_loss_weight": ("gram_loss",),
}


def heads():
    made = [PrototypeHead(DIM, NUM_PROTOTYPES, 7, BOTTLENECK) for _ in range(2)]
    return SelfDistillationHeads(*made)


def targets_of(num_images=NUM_IMAGES, masked=(1, 3, 8)):
    """Returns positions of crops of a class token and ``NUM_PATCHES`` patches, and local ones of two tokens."""
    globals_ = torch.arange(2 * num_images) * (1 + NUM_PATCHES)
    locals_ = LOCAL_START + 2 * torch.arange(NUM_LOCAL * num_images)
    patches = (globals_[:, None] + 1 + torch.arange(NUM_PATCHES)).flatten()
    masked = torch.tensor(masked, dtype=torch.int64)
    crop_of = masked // (1 + NUM_PATCHES)
    per_crop = torch.bincount(crop_of, minlength=2 * NUM_IMAGES)
    return ViewTargets(
        cls_positions=torch.cat([globals_, locals_]),
        num_images=num_images,
        num_local_crops=NUM_LOCAL,
        masked_positions=masked,
        masked_weights=1 / per_crop[crop_of].double(),
        patch_positions=patches,
        koleo_groups=torch.zeros(num_images, dtype=torch.int64),
        labels=None,
        names=("image",) * num_images,
    )


def views_of(targets, teacher, states):
    """Returns the outputs of a teacher with these states."""
    dual = torch.linspace(-1, 1, NUM_PROTOTYPES)
    of_global = targets._replace(cls_positions=targets.cls_positions[: 2 * targets.num_images])
    of_crops, of_patches = TeacherBottlenecks()(teacher, states, of_global)
    return TeacherViews(
        TeacherHidden(of_crops, teacher.dino.prototypes, dual),
        TeacherHidden(of_patches, teacher.ibot.prototypes, dual),
        PatchStates()(teacher, states, targets),
    )


def case(targets=None, **weights):
    targets = targets_of() if targets is None else targets
    torch.manual_seed(1)
    student, teacher = heads(), heads()
    states = torch.randn(1, NUM_TOKENS, DIM)
    with torch.no_grad():
        outputs = views_of(targets, teacher, torch.randn(1, NUM_TOKENS, DIM))
    loss = SelfDistillationLoss(ObjectiveSettings(**{**ALL, **weights}))
    loss.teacher_temperature = 0.07
    return loss, student, states.requires_grad_(), targets._replace(teacher=outputs)


def sums(loss, student, states, targets):
    return dict(zip(SUMS, loss(student, states, targets), strict=True))


def test_it_is_the_weighted_sum_of_its_terms():
    loss, student, states, targets = case()
    found = sums(loss, student, states, targets)
    rows = states[0]

    def logits(head, row):
        return head.prototypes(head(row[None]))[0]

    def wanted(of_teacher, index):
        logits = of_teacher.output(of_teacher.hidden[index])
        return F.softmax(logits / 0.07 + of_teacher.bias, dim=-1)

    def cross_entropy(target, student_logits):
        return -(target * F.log_softmax(student_logits / 0.1, -1)).sum()

    expected = dict.fromkeys(SUMS, 0.0)
    crops, patches, gram = targets.teacher[:3]
    for image in range(NUM_IMAGES):
        first_local = 2 * NUM_IMAGES + NUM_LOCAL * image
        crops_of_image = [2 * image, 2 * image + 1, *range(first_local, first_local + NUM_LOCAL)]
        own = targets.cls_positions[crops_of_image]
        for t in (0, 1):
            target = wanted(crops, 2 * image + t)
            expected["target_entropy"] += -(target * target.log()).sum() / 2
            for v, position in enumerate(own):
                term = cross_entropy(target, logits(student.dino, rows[position]))
                if v >= 2:
                    expected["dino_local_loss"] += term / (2 * NUM_LOCAL)
                elif v != t:
                    expected["dino_global_loss"] += term / 2
    for index, position in enumerate(targets.masked_positions):
        weight = targets.masked_weights[index] / 2
        term = cross_entropy(wanted(patches, index), logits(student.ibot, rows[position]))
        expected["ibot_loss"] += weight * term
    for crop in range(2 * NUM_IMAGES):
        at = slice(crop * NUM_PATCHES, (crop + 1) * NUM_PATCHES)
        mine, its = (
            F.normalize(each[at], dim=-1) for each in (rows[targets.patch_positions], gram)
        )
        expected["gram_loss"] += (mine @ mine.T - its @ its.T).square().mean() / 2
    cls = F.normalize(rows[targets.cls_positions[: 2 * NUM_IMAGES]].unflatten(0, (-1, 2)), dim=-1)
    for crop in (0, 1):
        for image in range(NUM_IMAGES):
            others = [cls[i, crop] for i in range(NUM_IMAGES) if i != image]
            nearest = min((cls[image, crop] - each).norm() for each in others)
            expected["koleo_loss"] -= (nearest + 1e-8).log() / 2
    dino = (NUM_LOCAL * expected["dino_local_loss"] + expected["dino_global_loss"]) / (
        NUM_LOCAL + 1
    )
    expected["loss"] = 0.7 * dino + sum(
        ALL[f"{name}_loss_weight"] * expected[f"{name}_loss"] for name in ("ibot", "koleo", "gram")
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
    parameters = [states, *student.parameters()]
    mine, its = (
        torch.autograd.grad(each, parameters) for each in (found["loss"], expected["loss"])
    )
    for one, other in zip(mine, its, strict=True):
        torch.testing.assert_close(one, other)


class Forbidden(nn.Module):
    def forward(self, *_):
        raise AssertionError("computed")

    def __getattr__(self, name):
        if name == "prototypes":
            raise AssertionError("computed")
        return super().__getattr__(name)


@pytest.mark.parametrize("name", LOSS_OF)
def test_a_term_of_weight_0_is_not_computed(name, monkeypatch):
    loss, student, states, targets = case(**{name: 0.0})
    others = sums(*case())
    forbidden = {"dino_loss_weight": "dino", "ibot_loss_weight": "ibot"}
    if name in forbidden:
        setattr(student, forbidden[name], Forbidden())
    else:
        function = {"koleo_loss_weight": "koleo_loss", "gram_loss_weight": "gram_loss"}[name]
        monkeypatch.setattr(f"recipe_utils.loss.self_distillation.{function}", Forbidden())
        if "gram" in name:
            targets = targets._replace(teacher=targets.teacher._replace(gram=None))
    found = sums(loss, student, states, targets)
    for logged in SUMS[1:]:
        expected = 0.0 if logged in LOSS_OF[name] else others[logged]
        assert found[logged] == expected, logged


def test_a_microbatch_without_masked_patches_has_no_ibot_loss_and_still_a_graph():
    loss, student, states, targets = case(targets_of(masked=()))
    found = sums(loss, student, states, targets)
    assert found["ibot_loss"] == 0
    assert found["dino_local_loss"] > 0
    gradients = torch.autograd.grad(found["loss"], [states, *student.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not any(g.any() for g in gradients[1 + len([*student.dino.parameters()]) :])


@pytest.mark.parametrize("two_passes", [False, True])
def test_a_dummy_is_zero_with_a_graph_for_every_weight(two_passes):
    loss, student, states, targets = case(targets_of(num_images=0, masked=()))
    if two_passes:
        koleo = torch.zeros(0, 2, DIM), torch.tensor(0.3)
        targets = targets._replace(teacher=targets.teacher._replace(koleo=koleo))
    found = loss(student, states, targets)
    assert torch.equal(found, torch.zeros(7))
    gradients = torch.autograd.grad(found[0], [states, *student.parameters()])
    assert not any(gradient.any() for gradient in gradients)


def test_value_and_gradient_of_two_passes_are_those_of_the_first():
    gradient, mean = torch.randn(NUM_IMAGES, 2, DIM), torch.tensor(0.3)
    loss, student, states, targets = case(
        dino_loss_weight=0.0, ibot_loss_weight=0.0, gram_loss_weight=0.0
    )
    targets = targets._replace(teacher=targets.teacher._replace(koleo=(gradient, mean)))
    found = sums(loss, student, states, targets)
    assert found["koleo_loss"].item() == pytest.approx(0.3 * NUM_IMAGES)
    (of_states,) = torch.autograd.grad(found["loss"], states)
    of_cls = of_states[0, targets.cls_positions[: 2 * NUM_IMAGES]].unflatten(0, (NUM_IMAGES, 2))
    torch.testing.assert_close(of_cls, 0.2 * gradient)
    assert of_states.count_nonzero() == gradient.numel()


def test_without_a_teacher_it_returns_the_class_states_of_global_crops():
    loss, student, states, targets = case()
    cls = loss(student, states, targets._replace(teacher=None))
    assert torch.equal(cls.flatten(0, 1), states[0, targets.cls_positions[: 2 * NUM_IMAGES]])


def test_bf16_states_are_summed_in_fp32():
    loss, student, states, targets = case()
    views = targets.teacher
    crops, patches = (
        each._replace(hidden=each.hidden.bfloat16(), output=each.output.bfloat16())
        for each in views[:2]
    )
    teacher = TeacherViews(crops, patches, views.gram.bfloat16())
    found = loss(student.bfloat16(), states.bfloat16(), targets._replace(teacher=teacher))
    exact = loss(student.double(), states.double(), case()[3])
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 0.05 * exact.abs().max()
