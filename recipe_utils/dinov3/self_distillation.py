"""DINOv3's objective: a student learns from its moving average by crops, masked patches, KoLeo and Gram.

Shapes: g images of a microbatch, each with 2 global and L local crops; m masked patches, P patches
of a global crop; d width of the backbone, b of a bottleneck.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from recipe_utils.dinov3.images.crop_rows import ViewTargets
from recipe_utils.dinov3.koleo import koleo_loss
from recipe_utils.losses.chunks import sum_dtype
from recipe_utils.losses.divergences import LinearDistillationLoss, TeacherHidden
from recipe_utils.models.settings import ModelSettings
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.settings.components import MadeWith
from recipe_utils.settings.keys import STRICT, Count, OnlyWith
from recipe_utils.settings.problems import Problem
from recipe_utils.update_steps.settings import DataSettings

HeadArguments = Annotated[dict[str, Any], MadeWith(1, default="recipe_utils.dinov3.self_distillation.PrototypeHead")]
"""Config of a :class:`PrototypeHead`, without ``embed_dim``."""


class PrototypeHead(nn.Module):
    """MLP to a bottleneck of length 1, and the prototypes that the loss compares it with.

    The MLP is that of DINO (Caron et al., arXiv:2104.14294, appendix C): linear layers with GELU between them, then
    normalization. The prototypes are a plain matrix, as in DINOv3 (arXiv:2508.10104). Raises ValueError if an argument
    is below 1, or there is one prototype, which all crops would have.
    """

    def __init__(
        self,
        embed_dim: int,
        num_prototypes: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        num_layers: int = 3,
    ) -> None:
        sizes = dict(locals())
        least = {"num_prototypes": 2, "hidden_dim": 1, "bottleneck_dim": 1, "num_layers": 1}
        for name, number in least.items():
            if sizes[name] < number:
                raise ValueError(f"{name}={sizes[name]}: it must be at least {number}")
        super().__init__()
        widths = [embed_dim, *[hidden_dim] * (num_layers - 1), bottleneck_dim]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        self.prototypes = nn.Linear(bottleneck_dim, num_prototypes, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Returns bottlenecks [n, b] of states [n, d]; the loss multiplies them with the prototypes."""
        bottlenecks: Tensor = self.mlp(states)
        return F.normalize(bottlenecks.to(sum_dtype(bottlenecks)), dim=-1).to(bottlenecks.dtype)


class SelfDistillationHeads(nn.Module):
    """Heads of crops (``dino``, on cls tokens) and of patches (``ibot``), as a decoder's output layer."""

    share_of_tokens = 0.1
    """Approximate share of cls tokens and masked patches in DINOv3's tokens; balances pipeline stages."""

    def __init__(self, dino: PrototypeHead, ibot: PrototypeHead) -> None:
        super().__init__()
        self.dino = dino
        self.ibot = ibot

    def forward(self, states: Tensor) -> Tensor:
        """Returns the states unchanged: the loss calls each head on its own rows."""
        return states


SUMS = (
    "loss", "dino_local_loss", "dino_global_loss", "ibot_loss", "koleo_loss", "gram_loss", "target_entropy",
)  # fmt: skip
"""Names of the sums over images that the loss returns: differentiated loss; cross-entropy [nats] of local crops, of
global crops and of masked patches; KoLeo; Gram; entropy of a crop's target [nats]. Only the first is weighted."""

_KL, _ENTROPY = 0, 3  # indices into recipe_utils.losses.divergences.SUMS


_Weight = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, config=STRICT)
class ObjectiveSettings:
    """Terms of the objective and their weights."""

    dino_loss_weight: _Weight = 1.0
    """Weight of DINO. A term of weight 0 is not computed."""
    ibot_loss_weight: _Weight = 1.0
    """Weight of iBOT."""
    koleo_loss_weight: _Weight = 0.1
    """Weight of KoLeo, on cls states."""
    gram_loss_weight: _Weight = 0.0
    """Weight of Gram anchoring."""
    gram_teacher_every_n_steps: Annotated[Count | None, OnlyWith("gram_loss_weight")] = None
    """Update steps between copies of the moving average to the Gram teacher, first at the start."""
    sinkhorn_iterations: Count = 3
    """Number of Sinkhorn-Knopp iterations."""
    sinkhorn_over: Literal["update_step", "microbatch"] = "update_step"
    """Crops and patches over which Sinkhorn-Knopp balances the prototypes; with ``microbatch``
    the gradient depends on the split."""
    student_temperature: Annotated[float, Field(gt=0, le=10)] = 0.1
    """Temperature of the student's logits, cosines from -1 to 1."""
    knn_neighbors: Count = 20
    """``k`` of the k-NN classifier used for validation."""

    def problems(self) -> Iterator[Problem]:
        """Yields problems between the keys."""
        weights = tuple(f"{term}_loss_weight" for term in ("dino", "ibot", "koleo", "gram"))
        if not any(getattr(self, name) for name in weights):
            yield Problem(", ".join(weights), "all are 0, so nothing would be learned; set one above 0")
        if self.gram_loss_weight and self.gram_teacher_every_n_steps is None:
            text = "there is no Gram teacher; set gram_teacher_every_n_steps, or gram_loss_weight=0"
            yield Problem("gram_loss_weight", text, self.gram_loss_weight)

    def problems_of_objective(self, data: DataSettings, ranks: RankSettings, model: ModelSettings) -> Iterator[Problem]:
        """Yields heads as units of FSDP2, and the problem of an image without neighbors."""
        units = model.custom_sharded_layers or ()
        if heads := [name for name in units if name.partition(".")[0] == "output"]:
            text = "the loss calls parts of the heads one by one, which FSDP2 gathers with the root alone; take it out"
            yield Problem("custom_sharded_layers", text, ", ".join(heads))
        if self.koleo_loss_weight == 0 or ranks.dims_or_none is None:
            return
        dp_degree = ranks.dims_or_none.dp_degree
        try:
            num_images = data.batch_size * data.num_accumulated(dp_degree) * dp_degree
        except ValueError:
            return
        if num_images == 1:
            text = (
                "an image needs neighbors, and an update step has 1 image; set global_batch_size to 2 or "
                "more, or koleo_loss_weight=0"
            )
            yield Problem("koleo_loss_weight", text, self.koleo_loss_weight)


class TeacherViews(NamedTuple):
    """Teacher outputs for the crops of a microbatch."""

    crops: TeacherHidden
    """Global crops: bottlenecks [2 * g, b], prototypes, and dual variable of the update step."""
    patches: TeacherHidden
    """Masked patches: bottlenecks [m, b], prototypes, and dual variable."""
    gram: Tensor | None = None
    """Gram teacher's states of all patches of global crops, [2 * g * P, d]."""
    koleo: tuple[Tensor, Tensor] | None = None
    """Result of the first of two passes: KoLeo's gradient for the cls states of global crops [g, 2, d], and
    its mean []."""


class SelfDistillationLoss:
    """Sum over images of w_d DINO + w_i iBOT + w_k KoLeo + w_g Gram; each is a mean within its image.

    DINO is the mean over all pairs of a student's crop and another, global crop of the teacher
    (Caron et al., arXiv:2104.14294, equation 2). iBOT is the mean over masked patches of a crop,
    then over both global crops (Zhou et al., arXiv:2111.07832, equation 2); a crop without a masked
    patch adds 0. Both are cross-entropies with Sinkhorn-Knopp's targets.

    For a microbatch without teacher outputs it returns the cls states of global crops, [g, 2, d]:
    the first of KoLeo's two passes.
    """

    takes_hidden_states = True

    def __init__(self, settings: ObjectiveSettings) -> None:
        self.settings = settings
        self.divergence = LinearDistillationLoss(
            "forward",
            temperature=settings.student_temperature,
            teacher_temperature=1.0,  # set: the divergence is not multiplied by T^2
            tokens_per_chunk=256,
        )
        """Cross-entropies; its ``teacher_temperature`` follows a schedule."""
        self.compile_chunks = self.divergence.compile_chunks

    def __call__(
        self, output: SelfDistillationHeads, hidden: Tensor, targets: ViewTargets, backward_in_parts: bool = False
    ) -> Tensor:
        """Returns SUMS over the images of a microbatch, [7], at least fp32; without images 0, with a graph.

        ``hidden`` is [1, s, d]. For the arguments see :mod:`recipe_utils.losses.attach`.
        """
        weights, num_images, num_local = self.settings, targets.num_images, targets.num_local_crops
        states = hidden.flatten(0, 1)
        cls = states.index_select(0, targets.cls_positions)
        cls_of_global = cls[: 2 * num_images].unflatten(0, (num_images, 2))
        teacher: TeacherViews | None = targets.outputs.get("teacher")
        if teacher is None:
            return cls_of_global

        def cross_entropy(
            head: Any, bottlenecks: Tensor, hidden_of_teacher: TeacherHidden, row_weights: Any = None
        ) -> tuple[Tensor, Tensor]:
            """Returns the cross-entropy and the targets' entropy, summed over rows."""
            sums = self.divergence.sum_rows(
                head.prototypes, bottlenecks, None, hidden_of_teacher, row_weights, backward_in_parts
            )
            # KL + entropy; the entropy is constant, so the gradient is that of KL.
            return sums[_KL] + sums[_ENTROPY].detach(), sums[_ENTROPY]

        nothing = hidden.new_zeros((), dtype=sum_dtype(hidden))
        local_loss = global_loss = ibot = koleo = gram = entropy = nothing
        if weights.dino_loss_weight:
            bottlenecks = output.dino(cls)
            (global_loss, entropy), (local_loss, _) = (
                cross_entropy(
                    output.dino,
                    bottlenecks.index_select(0, student_crops),
                    teacher.crops._replace(hidden=teacher.crops.hidden.index_select(0, teacher_crops)),
                )
                for student_crops, teacher_crops in _pairs_of_crops(num_images, num_local, cls.device)
            )
            global_loss, entropy, local_loss = global_loss / 2, entropy / 2, local_loss / (2 * num_local)
        if weights.ibot_loss_weight:
            bottlenecks = output.ibot(states.index_select(0, targets.masked_positions))
            row_weights = targets.masked_weights / 2
            ibot, _ = cross_entropy(output.ibot, bottlenecks, teacher.patches, row_weights)
        if weights.koleo_loss_weight and teacher.koleo is not None:
            gradient, mean = teacher.koleo
            # The value is that of the first pass; the gradient is the one computed there.
            along = (cls_of_global * gradient).sum()
            koleo = along - along.detach() + mean * num_images
        elif weights.koleo_loss_weight:
            koleo = koleo_loss(cls_of_global, targets.koleo_groups)
        if weights.gram_loss_weight:
            assert teacher.gram is not None
            patches = states.index_select(0, targets.patch_positions)
            gram = gram_loss(patches, teacher.gram, 2 * num_images) / 2
        loss = (
            weights.dino_loss_weight * (num_local * local_loss + global_loss) / (num_local + 1)
            + weights.ibot_loss_weight * ibot
            + weights.koleo_loss_weight * koleo
            + weights.gram_loss_weight * gram
        )
        logged = (local_loss, global_loss, ibot, koleo, gram, entropy)
        return torch.stack([loss, *(term.detach() for term in logged)])


class TeacherBottlenecks:
    """Returns the teacher's bottlenecks, which Sinkhorn-Knopp and the student's loss need, never logits."""

    takes_hidden_states = True

    def __call__(
        self, output: SelfDistillationHeads, hidden: Tensor, targets: ViewTargets, *_: bool
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Returns bottlenecks of global crops [2 * g, b] and of masked patches [m, b].

        For whole images (without local crops) it returns the cls states [g, d].
        """
        states = hidden.flatten(0, 1)
        cls = states.index_select(0, targets.cls_positions)
        if targets.num_local_crops == 0:
            return cls
        return output.dino(cls), output.ibot(states.index_select(0, targets.masked_positions))


def _pairs_of_crops(num_images: int, num_local: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Returns indices of the student's and the teacher's crops to compare: global crops, then local ones."""
    global_crops = torch.arange(2 * num_images, device=device)
    local = torch.arange(num_images * num_local, device=device)
    image_of_local = local // max(num_local, 1)
    teacher_of_local = torch.cat([2 * image_of_local, 2 * image_of_local + 1])
    return [(global_crops ^ 1, global_crops), (2 * num_images + local.repeat(2), teacher_of_local)]


def gram_loss(patches: Tensor, teacher_patches: Tensor, num_crops: int) -> Tensor:
    """Returns the sum over crops of the mean squared difference between cosines of all pairs of patches, [].

    Gram anchoring (DINOv3, arXiv:2508.10104, section 4.2, equation 2), for each crop by itself.
    ``patches`` [crops * patches, d] are the student's; d of the teacher's may differ.
    """
    if num_crops == 0:
        return patches.sum()  # 0, with a graph

    def cosines_of(states: Tensor) -> Tensor:
        directions = F.normalize(states.to(sum_dtype(patches)), dim=-1)
        directions = directions.unflatten(0, (num_crops, -1))
        return directions @ directions.transpose(1, 2)

    return (cosines_of(patches) - cosines_of(teacher_patches)).square().mean((1, 2)).sum()
