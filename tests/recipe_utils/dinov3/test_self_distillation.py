"""The loss of a microbatch without a term, a mask or an image, and its first pass.

Values and gradients of all terms: ``recipes/test_dinov3_gradients.py``.
"""

import pytest
import torch

from recipe_utils.dinov3.images.crop_rows import ViewTargets
from recipe_utils.dinov3.self_distillation import (
    SUMS,
    ObjectiveSettings,
    PrototypeHead,
    SelfDistillationHeads,
    SelfDistillationLoss,
    TeacherBottlenecks,
    TeacherViews,
)
from recipe_utils.losses.attach import HiddenAtTargets
from recipe_utils.losses.divergences import TeacherHidden

pytestmark = pytest.mark.usefixtures("in_float64")

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
    )


def views_of(targets, teacher, states):
    """Returns the outputs of a teacher with these states."""
    dual = torch.linspace(-1, 1, NUM_PROTOTYPES)
    of_global = targets._replace(cls_positions=targets.cls_positions[: 2 * targets.num_images])
    of_crops, of_patches = TeacherBottlenecks()(teacher, states, of_global)
    return TeacherViews(
        TeacherHidden(of_crops, teacher.dino.prototypes, dual),
        TeacherHidden(of_patches, teacher.ibot.prototypes, dual),
        HiddenAtTargets("patch_positions")(teacher, states, targets),
    )


def case(targets=None, **weights):
    targets = targets_of() if targets is None else targets
    torch.manual_seed(1)
    student, teacher = heads(), heads()
    states = torch.randn(1, NUM_TOKENS, DIM)
    with torch.no_grad():
        outputs = views_of(targets, teacher, torch.randn(1, NUM_TOKENS, DIM))
    loss = SelfDistillationLoss(ObjectiveSettings(**{**ALL, **weights}))
    loss.divergence.teacher_temperature = 0.07
    return loss, student, states.requires_grad_(), targets._replace(outputs={"teacher": outputs})


def sums(loss, student, states, targets):
    return dict(zip(SUMS, loss(student, states, targets), strict=True))


@pytest.mark.parametrize("name", LOSS_OF)
def test_a_term_of_weight_0_is_not_computed(name, monkeypatch):
    loss, student, states, targets = case(**{name: 0.0})
    others = sums(*case())
    if name in ("dino_loss_weight", "ibot_loss_weight"):
        setattr(student, name.split("_")[0], None)
    else:
        function = name.removesuffix("_weight")
        monkeypatch.setattr(f"recipe_utils.dinov3.self_distillation.{function}", None)
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
        targets = targets._replace(outputs={"teacher": targets.outputs["teacher"]._replace(koleo=koleo)})
    found = loss(student, states, targets)
    assert torch.equal(found, torch.zeros(7))
    gradients = torch.autograd.grad(found[0], [states, *student.parameters()])
    assert not any(gradient.any() for gradient in gradients)


def test_bf16_states_are_summed_in_fp32():
    loss, student, states, targets = case()
    views = targets.outputs["teacher"]
    crops, patches = (each._replace(hidden=each.hidden.bfloat16(), output=each.output.bfloat16()) for each in views[:2])
    teacher = TeacherViews(crops, patches, views.gram.bfloat16())
    found = loss(student.bfloat16(), states.bfloat16(), targets._replace(outputs={"teacher": teacher}))
    exact = loss(student.double(), states.double(), case()[3])
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 0.05 * exact.abs().max()
