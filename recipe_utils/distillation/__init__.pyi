from recipe_utils.distillation.distillation_loss import STUDENT as STUDENT
from recipe_utils.distillation.distillation_loss import build_loss as build_loss
from recipe_utils.distillation.teacher import Teacher as Teacher
from recipe_utils.distillation.teacher import TeacherSettings as TeacherSettings
from recipe_utils.distillation.teacher import build_teacher_on_meta as build_teacher_on_meta
from recipe_utils.losses.divergences import SUMS as SUMS
from recipe_utils.losses.divergences import LinearDistillationLoss as LinearDistillationLoss
