"""Distillation from a teacher: losses and teacher outputs."""

from recipe_utils import exported

__getattr__ = exported(
    {
        "recipe_utils.distillation.losses": "make_distillation_loss STUDENT",
        "recipe_utils.distillation.teacher": "build_teacher_on_meta Teacher TeacherSettings",
        "recipe_utils.losses.divergences": "LinearDistillationLoss SUMS",
    }
)
