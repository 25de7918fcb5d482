"""What a student of images learns from its own moving average: crops, masked patches, spread and Gram.

Shapes: g images of a microbatch, each with 2 global and L local crops; m masked patches, P patches of a global
crop; d the backbone's width, b a bottleneck's.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from recipe_utils.data.images.crop_rows import ViewTargets
from recipe_utils.data.loader.settings import DataSettings
from recipe_utils.loss.chunks import sum_dtype
from recipe_utils.loss.distillation import LinearDistillationLoss, TeacherHidden
from recipe_utils.loss.koleo import koleo_loss
from recipe_utils.parallel.ranks import RankSettings
from recipe_utils.settings.components import MadeWith
from recipe_utils.settings.keys import STRICT, Count, Positive
from recipe_utils.settings.problems import Problem

HeadArguments = Annotated[
    dict[str, Any], MadeWith(1, default="recipe_utils.loss.self_distillation.PrototypeHead")
]
"""A config's arguments of a :class:`PrototypeHead`, but for the width of what comes in."""


class PrototypeHead(nn.Module):
    """An MLP to a bottleneck of length 1, and prototypes that it is compared with.

    As in DINO (Caron et al., arXiv:2104.14294, appendix C): linear layers with GELU between them, normalised.
    The prototypes are a plain matrix, as in DINOv3 (arXiv:2508.10104).

    Args:
        embed_dim: of what comes in.
        num_prototypes: k.
        hidden_dim: of the MLP.
        bottleneck_dim: b of the bottleneck.
        num_layers: of the MLP, at least 1.

    Raises:
        ValueError: an argument below 1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_prototypes: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        num_layers: int = 3,
    ) -> None:
        super().__init__()
        for name, value in (
            ("num_prototypes", num_prototypes),
            ("hidden_dim", hidden_dim),
            ("bottleneck_dim", bottleneck_dim),
            ("num_layers", num_layers),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        widths = [embed_dim, *[hidden_dim] * (num_layers - 1), bottleneck_dim]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        self.prototypes = nn.Linear(bottleneck_dim, num_prototypes, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """The bottleneck [n, b] of states [n, d]; it is for the loss to compare it with prototypes."""
        found: Tensor = self.mlp(states)
        return F.normalize(found.to(sum_dtype(found)), dim=-1).to(found.dtype)


class SelfDistillationHeads(nn.Module):
    """The heads of crops and of patches, as a decoder's output layer.

    Args:
        dino: of crops, by their cls tokens.
        ibot: of patches.
    """

    share_of_tokens = 0.1
    """About: class tokens and masked patches, of all tokens of DINOv3's crops; for cutting pipeline stages."""

    def __init__(self, dino: PrototypeHead, ibot: PrototypeHead) -> None:
        super().__init__()
        self.dino = dino
        self.ibot = ibot

    def forward(self, states: Tensor) -> Tensor:
        """Returns the states: heads are called by the loss, each with what is its own."""
        return states


SUMS = (
    "loss", "dino_local_loss", "dino_global_loss", "ibot_loss", "koleo_loss", "gram_loss", "target_entropy",
)  # fmt: skip
"""What the loss returns sums over images of: what is differentiated; cross-entropy [nats] of local crops, of global
crops and of masked patches; KoLeo; Gram; the entropy of a crop's target [nats]. None is weighted but the first."""

_KL, _ENTROPY = 0, 3  # places in recipe_utils.loss.distillation.SUMS


_Weight = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, config=STRICT)
class ObjectiveSettings:
    """What is compared, and how much of it is in the loss."""

    dino_loss_weight: _Weight = 1.0
    """Of crops with the teacher's global crops; each term is a mean over images, and one of weight 0 is not
    computed."""
    ibot_loss_weight: _Weight = 1.0
    """Of masked patches with the teacher's, which sees them."""
    koleo_loss_weight: _Weight = 0.1
    """Of the spread of images."""
    gram_loss_weight: _Weight = 0.0
    """Of how patches resemble each other, as an earlier teacher saw it."""
    gram_over: Literal["image", "batch"] = "image"
    """Which patches are compared; ``batch`` is refused, since it would couple all images of a microbatch."""
    gram_teacher_every_n_steps: Count | None = None
    """Makes the moving average the Gram teacher after every so many update steps, the first time at the start."""
    sinkhorn_iterations: Count = 3
    """Of Sinkhorn-Knopp's scaling of prototypes, then crops."""
    sinkhorn_over: Literal["update_step", "microbatch"] = "update_step"
    """Which crops and patches share the prototypes evenly; with ``microbatch`` those of one alone, so that the
    gradient depends on the split."""
    student_temperature: Positive = 0.1
    """Divides the student's logits."""
    knn_neighbors: Count = 20
    """Whose votes tell the class of an image of ``dataset_val``."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong between the keys."""
        weights = {
            name: getattr(self, name)
            for name in (
                "dino_loss_weight",
                "ibot_loss_weight",
                "koleo_loss_weight",
                "gram_loss_weight",
            )
        }
        if not any(weights.values()):
            text = "all are 0, so nothing would be learned; set one above 0"
            yield Problem(", ".join(weights), text, depends_on=tuple(weights))
        if self.gram_over == "batch":
            yield Problem(
                "gram_over",
                "it compares patches of different images, so the gradient would depend on how "
                "an update step is split; set gram_over=image",
                "batch",
            )
        if self.gram_loss_weight and self.gram_teacher_every_n_steps is None:
            yield Problem(
                "gram_loss_weight",
                "there is no Gram teacher; set gram_teacher_every_n_steps, or gram_loss_weight=0",
                self.gram_loss_weight,
                depends_on=("gram_teacher_every_n_steps",),
            )

    def problems_with(self, data: DataSettings, ranks: RankSettings) -> Iterator[Problem]:
        """What an update step of so many images excludes."""
        if self.koleo_loss_weight == 0 or ranks.dims_or_none is None:
            return
        dp_degree = ranks.dims_or_none.dp_degree
        try:
            num_images = data.batch_size * data.num_accumulated(dp_degree) * dp_degree
        except ValueError:
            return
        if num_images == 1:
            yield Problem(
                "koleo_loss_weight",
                "an update step of 1 image has no neighbours to be "
                "spread from; set global_batch_size to 2 or more, or koleo_loss_weight=0",
                self.koleo_loss_weight,
                depends_on=("batch_size", "global_batch_size", "gradient_accumulation_steps"),
            )


class TeacherViews(NamedTuple):
    """What is said of a microbatch's crops before its student is asked."""

    crops: TeacherHidden
    """Of the global crops: bottlenecks [2 * g, b], prototypes, and dual of the update step."""
    patches: TeacherHidden
    """Of the masked patches: bottlenecks [m, b], and the same."""
    gram: Tensor | None = None
    """An earlier teacher's states of all patches of global crops, [2 * g * P, d]."""
    koleo: tuple[Tensor, Tensor] | None = None
    """Of the first of two passes: KoLeo's gradient for the cls states of global crops [g, 2, d], and its mean []."""


class SelfDistillationLoss:
    """sum over images of w_d DINO + w_i iBOT + w_k KoLeo + w_g Gram; each a mean within its image.

    DINO is the mean over all pairs of a student's crop and a global crop of the teacher's that is another one
    (Caron et al., arXiv:2104.14294, equation 2); iBOT the mean over masked patches of a crop, then over both
    global crops (Zhou et al., arXiv:2111.07832, equation 2); both are cross-entropies with Sinkhorn-Knopp's
    targets. A crop without a masked patch adds nothing.

    Called with a microbatch of which no teacher has said anything it returns the cls states of global crops,
    [g, 2, d]: the first of KoLeo's two passes.

    Args:
        settings: the weights, of which a term of weight 0 is not computed, and the student's temperature; the
            teacher's follows a schedule, see ``teacher_temperature``.
        rows_per_chunk: compared with all prototypes at once.
    """

    takes_hidden_states = True

    def __init__(self, settings: ObjectiveSettings, rows_per_chunk: int = 256) -> None:
        self.settings = settings
        self._divergence = LinearDistillationLoss(
            "forward",
            temperature=settings.student_temperature,
            teacher_temperature=1.0,  # one of its own, so that no square of the student's weighs anything
            tokens_per_chunk=rows_per_chunk,
        )

    @property
    def teacher_temperature(self) -> float:
        """Of this update step's targets."""
        return self._divergence.teacher_temperature

    @teacher_temperature.setter
    def teacher_temperature(self, temperature: float) -> None:
        self._divergence.teacher_temperature = temperature

    def compile_chunks(self, backend: Any) -> None:
        """See :meth:`recipe_utils.loss.distillation.LinearDistillationLoss.compile_chunks`."""
        self._divergence.compile_chunks(backend)

    def __call__(
        self,
        output: SelfDistillationHeads,
        hidden: Tensor,
        targets: ViewTargets,
        backward_in_parts: bool = False,
    ) -> Tensor:
        """SUMS over the images of a microbatch, [7], at least fp32; of none 0, with a graph.

        Args:
            output: the student's heads.
            hidden: its last states after the final norm, [1, s, d].
            targets: of the microbatch.
            backward_in_parts: see :func:`recipe_utils.loss.chunks.sum_over_chunks`.
        """
        states = hidden.flatten(0, 1)
        cls = states.index_select(0, targets.cls_positions)
        weights, num_images, num_local = self.settings, targets.num_images, targets.num_local_crops
        cls_of_global = cls[: 2 * num_images].unflatten(0, (num_images, 2))
        teacher: TeacherViews | None = targets.teacher
        if teacher is None:
            return cls_of_global

        def of_rows(head: Any, rows: Tensor, said: TeacherHidden, weights: Any = None) -> Tensor:
            found: Tensor = self._divergence.of_rows(
                head.prototypes, rows, None, said, weights, backward_in_parts
            )
            return found

        def cross_entropy(sums: Tensor) -> Tensor:
            # Of a divergence's gradient, which is the same.
            return sums[_KL] + sums[_ENTROPY].detach()

        nothing = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        local = of_global = ibot = koleo = gram = entropy = nothing
        if weights.dino_loss_weight:
            bottlenecks = output.dino(cls)
            pairs = _pairs_of_crops(num_images, num_local, cls.device)
            for_global, for_local = (
                of_rows(
                    output.dino,
                    bottlenecks.index_select(0, of_student),
                    teacher.crops._replace(hidden=teacher.crops.hidden.index_select(0, of_teacher)),
                )
                for of_student, of_teacher in pairs
            )
            of_global = cross_entropy(for_global) / 2
            local = cross_entropy(for_local) / (2 * num_local)
            entropy = for_global[_ENTROPY] / 2
        if weights.ibot_loss_weight:
            bottlenecks = output.ibot(states.index_select(0, targets.masked_positions))
            ibot = cross_entropy(
                of_rows(output.ibot, bottlenecks, teacher.patches, targets.masked_weights / 2)
            )
        if weights.koleo_loss_weight and teacher.koleo is not None:
            gradient, mean = teacher.koleo
            # Its value is the first pass's, its gradient that one's gradient.
            along = (cls_of_global * gradient).sum()
            koleo = along - along.detach() + mean * num_images
        elif weights.koleo_loss_weight:
            koleo = koleo_loss(cls_of_global, targets.koleo_groups)
        if weights.gram_loss_weight:
            assert teacher.gram is not None
            patches = states.index_select(0, targets.patch_positions)
            of_crops = (2 * num_images, len(patches) // max(2 * num_images, 1))
            gram = (
                gram_loss(
                    *(
                        each.view(*of_crops, -1) if len(each) else each
                        for each in (patches, teacher.gram)
                    )
                )
                / 2
            )
        loss = (
            weights.dino_loss_weight * (num_local * local + of_global) / (num_local + 1)
            + weights.ibot_loss_weight * ibot
            + weights.koleo_loss_weight * koleo
            + weights.gram_loss_weight * gram
        )
        logged = (local, of_global, ibot, koleo, gram, entropy)
        return torch.stack([loss, *(each.detach() for each in logged)])


class TeacherBottlenecks:
    """The teacher's head: what Sinkhorn-Knopp and the student's loss need of it, never logits."""

    takes_hidden_states = True

    def __call__(
        self,
        output: SelfDistillationHeads,
        hidden: Tensor,
        targets: ViewTargets,
        backward_in_parts: bool = False,
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Bottlenecks of global crops [2 * g, b] and of masked patches [m, b]; of whole images the cls states [g, d]."""
        states = hidden.flatten(0, 1)
        cls = states.index_select(0, targets.cls_positions)
        if targets.num_local_crops == 0:
            return cls
        return output.dino(cls), output.ibot(states.index_select(0, targets.masked_positions))


class PatchStates:
    """A Gram teacher's head: its states of all patches of global crops."""

    takes_hidden_states = True

    def __call__(
        self,
        output: SelfDistillationHeads,
        hidden: Tensor,
        targets: ViewTargets,
        backward_in_parts: bool = False,
    ) -> Tensor:
        """Returns [2 * g * P, d] of hidden [1, s, d]."""
        return hidden.flatten(0, 1).index_select(0, targets.patch_positions)


def _pairs_of_crops(
    num_images: int, num_local: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Crops of the student and of the teacher that are compared: indices of both, of global and of local crops.

    In the order of a microbatch's cls tokens: image by image its two global crops, then image by image its
    local ones.
    """
    of_teacher = torch.arange(2 * num_images, device=device)
    local = torch.arange(num_images * num_local, device=device)
    image_of_local = local // max(num_local, 1)
    of_local = torch.cat([2 * image_of_local, 2 * image_of_local + 1])
    return [(of_teacher ^ 1, of_teacher), (2 * num_images + local.repeat(2), of_local)]


def gram_loss(patches: Tensor, of_teacher: Tensor) -> Tensor:
    """Returns the sum over crops of the mean squared difference between the cosines of all pairs of patches, [].

    Gram anchoring (DINOv3, arXiv:2508.10104, section 4.2, equation 2), for each crop by itself.

    Args:
        patches: of the student, [crops, patches, d].
        of_teacher: the same patches as the teacher sees them, [crops, patches, any d].
    """
    if len(patches) == 0:
        return patches.sum()  # 0, with a graph
    wide = sum_dtype(patches)
    cosines, wanted = (
        directions @ directions.transpose(1, 2)
        for directions in (F.normalize(each.to(wide), dim=-1) for each in (patches, of_teacher))
    )
    return (cosines - wanted).square().mean((1, 2)).sum()
