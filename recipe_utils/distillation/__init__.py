"""Distillation from a teacher: losses and teacher outputs."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "build_teacher_on_meta": "recipe_utils.distillation.teacher",
        "LinearDistillationLoss": "recipe_utils.losses.divergences",
        "make_distillation_loss": "recipe_utils.distillation.losses",
        "SUMS": "recipe_utils.losses.divergences",
        "Teacher": "recipe_utils.distillation.teacher",
        "TeacherSettings": "recipe_utils.distillation.teacher",
    }
)
