"""Cross-entropy and divergence in one kernel, against autograd on whole logits."""

from dataclasses import dataclass

import pytest
import tiny
import torch
import torch.nn.functional as F
from output_layers import D, LogitsWatch, V, make_output, make_targets, parameters_of
from torch import nn
from torch._dynamo.testing import CompileCounter
from torchtune.modules import loss as stock

from recipe_utils.distillation.distillation_loss import make_distillation_loss
from recipe_utils.losses import divergences
from recipe_utils.losses.cross_entropy import LinearCrossEntropyLoss
from recipe_utils.losses.divergences import SUMS, LinearDistillationLoss, TeacherHidden

pytestmark = pytest.mark.usefixtures("in_float64")

D_T = 5
DIVERGENCES = ("forward", "reverse", "symmetric", "js")


def plain_divergence(kind, q, p, mixture=0.5):
    """Returns the definitions' divergences of probabilities [n, o]."""

    def kl(a, b):
        return (a * (a / b).log()).sum(1)

    if kind == "js":
        m = mixture * p + (1 - mixture) * q
        return mixture * kl(p, m) + (1 - mixture) * kl(q, m)
    part_of_forward = {"forward": 1, "reverse": 0, "symmetric": mixture}[kind]
    return part_of_forward * kl(p, q) + (1 - part_of_forward) * kl(q, p)


@dataclass
class Case:
    """Arguments of a kernel, and its expected results."""

    kd_ratio: float = 0.3
    temperature: float = 1.0
    divergence: str = "forward"
    mixture: float = 0.5
    teacher_vocab: int = V
    teacher_temperature: float | None = None
    with_bias: bool = False
    with_row_weights: bool = False
    num_rows: int = 37
    output: str = "linear"

    def __post_init__(self):
        self.hidden = torch.randn(self.num_rows, D, requires_grad=True)
        self.layer = make_output(self.output)
        self.labels = torch.randint(V, (self.num_rows,))
        of_teacher = nn.Linear(D_T, self.teacher_vocab, bias=False).requires_grad_(False)
        bias = torch.randn(self.teacher_vocab) if self.with_bias else None
        self.teacher = TeacherHidden(torch.randn(self.num_rows, D_T), of_teacher, bias)
        self.weights = torch.rand(self.num_rows) + 0.5 if self.with_row_weights else None
        self.inputs = [self.hidden, *parameters_of(self.layer)]

    def loss_fn(self, **changes):
        kd_loss = LinearDistillationLoss(
            self.divergence,
            self.temperature,
            self.mixture,
            self.teacher_temperature,
            **{"tokens_per_chunk": 7, **changes},
        )
        return make_distillation_loss(LinearCrossEntropyLoss(), kd_loss, self.kd_ratio)

    def ours(self, **changes):
        return self.loss_fn(**changes).sum_rows(self.layer, self.hidden, self.labels, self.teacher, self.weights)

    def expected(self):
        num_common = min(V, self.teacher_vocab)
        logits = self.layer(self.hidden)
        of_teacher = self.teacher.output(self.teacher.hidden)
        of_teacher = of_teacher / (self.teacher_temperature or self.temperature)
        if self.with_bias:
            of_teacher = of_teacher + self.teacher.bias
        q = F.softmax(logits[:, :num_common] / self.temperature, dim=1)
        p = F.softmax(of_teacher[:, :num_common], dim=1)
        ce = F.cross_entropy(logits, self.labels, reduction="none")
        kd = plain_divergence(self.divergence, q, p, self.mixture)
        square = self.temperature**2 if self.teacher_temperature is None else 1
        loss = (1 - self.kd_ratio) * ce + self.kd_ratio * square * kd
        agree = (q.argmax(1) == p.argmax(1)).double()
        of_rows = torch.stack([loss, ce, kd, -(p * p.log()).sum(1), agree])
        return (of_rows * (1 if self.weights is None else self.weights)).sum(1)


def assert_close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


def assert_is_the_plain_sum(case, **changes):
    ours, expected = case.ours(**changes), case.expected()
    if case.kd_ratio == 1:
        assert ours[1] == 0  # not computed
        expected = expected * torch.tensor([1.0, 0, 1, 1, 1])
    assert_close(ours, expected)
    assert_close(torch.autograd.grad(0.3 * ours[0], case.inputs), torch.autograd.grad(0.3 * expected[0], case.inputs))


@pytest.mark.parametrize(
    ("divergence", "temperature", "kd_ratio", "teacher_vocab"),
    [  # every pair of values at least once
        ("forward", 1.0, 0.3, V), ("forward", 2.0, 1.0, V - 13), ("forward", 2.0, 0.3, V + 13),
        ("reverse", 2.0, 1.0, V), ("reverse", 1.0, 0.3, V + 13), ("reverse", 1.0, 0.3, V - 13),
        ("symmetric", 1.0, 1.0, V + 13), ("symmetric", 2.0, 0.3, V), ("symmetric", 2.0, 0.3, V - 13),
        ("js", 2.0, 0.3, V), ("js", 2.0, 0.3, V + 13), ("js", 1.0, 1.0, V - 13),
    ],
)  # fmt: skip
def test_sums_and_gradients_are_those_of_whole_logits(divergence, temperature, kd_ratio, teacher_vocab):
    case = Case(kd_ratio, temperature, divergence, teacher_vocab=teacher_vocab)
    assert_is_the_plain_sum(case)


@pytest.mark.parametrize(
    ("output", "num_rows", "tokens_per_chunk"),
    [
        ("linear", 0, 7), ("linear", 37, 1), ("tied", 0, 1), ("tied", 37, 7), ("tied", 1, 1000),
        ("bias", 0, 7), ("bias", 1, 7), ("bias", 37, 7), ("bias", 37, 1000),
    ],
)  # fmt: skip
def test_every_output_layer_number_of_rows_and_size_of_chunks(output, num_rows, tokens_per_chunk):
    case = Case(temperature=2.0, num_rows=num_rows, output=output)
    assert_is_the_plain_sum(case, tokens_per_chunk=tokens_per_chunk, num_output_chunks=tokens_per_chunk)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_teacher_s_bias_row_weights_and_temperatures_of_both_sides(divergence):
    mixture = 0.3 if divergence in ("symmetric", "js") else 0.5  # the others have none
    assert_is_the_plain_sum(Case(1.0, 0.1, divergence, mixture, V, 0.07, with_bias=True, with_row_weights=True))


@pytest.mark.parametrize("output", ["linear", "bias"])
def test_a_backward_in_two_parts_gives_each_part_its_gradient(output):
    case = Case(temperature=2.0, output=output)
    loss_fn = case.loss_fn()
    ours = loss_fn.sum_rows(case.layer, case.hidden, case.labels, case.teacher, None, True)[0]
    expected = case.expected()[0]
    for inputs in (case.inputs[:1], case.inputs[1:]):
        assert_close(
            torch.autograd.grad(0.3 * ours, inputs, retain_graph=True),
            torch.autograd.grad(0.3 * expected, inputs, retain_graph=True),
        )


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_no_more_than_one_chunk_of_each_side_s_logits_is_worked_on(divergence):
    rows = 4
    case = Case(0.3, 2.0, divergence, num_rows=64)
    case.teacher = TeacherHidden(torch.randn(64, D), make_output("linear").requires_grad_(False))
    with LogitsWatch() as watch:
        case.ours(tokens_per_chunk=rows)[0].backward()
    assert watch.most_rows == rows
    assert watch.most_alive <= 7 * rows


def test_a_chunk_is_computed_in_slices_that_fit_into_caches(monkeypatch):
    monkeypatch.setattr(divergences, "_LOGITS_IN_CACHES", 2 * V)
    case = Case(0.3, 2.0, with_row_weights=True)
    assert_is_the_plain_sum(case)
    with torch.no_grad():
        assert_close(case.ours(), case.expected())


def test_low_precision_hidden_states_give_fp32_sums():
    case = Case(temperature=2.0)
    exact = case.ours()
    hidden, teacher = case.hidden.detach().bfloat16(), case.teacher
    low = TeacherHidden(teacher.hidden.bfloat16(), teacher.output.bfloat16())
    sums = case.loss_fn().sum_rows(case.layer.bfloat16(), hidden, case.labels, low)
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums[:4].double(), exact[:4], rtol=0.01, atol=0)


STOCK = {
    "ForwardKLLoss": {},
    "ForwardKLWithChunkedOutputLoss": {"num_output_chunks": 3},
    "ReverseKLLoss": {},
    "ReverseKLWithChunkedOutputLoss": {},
    "SymmetricKLLoss": {"sym_kd_ratio": 0.8},
    "SymmetricKLWithChunkedOutputLoss": {"sym_kd_ratio": 0.8},
}


@pytest.mark.parametrize("name", STOCK)
def test_torchtune_s_losses_are_ours_and_their_forward_ones_include_the_teacher_s_entropy(name):
    torch.set_default_dtype(torch.float32)  # theirs compute in it
    case = Case()
    stock_loss = getattr(stock, name)(**STOCK[name])
    ce_loss = stock.CEWithChunkedOutputLoss() if "Chunked" in name else nn.CrossEntropyLoss()
    ours = make_distillation_loss(ce_loss, stock_loss, 0.3)
    sums = ours.sum_rows(case.layer, case.hidden, case.labels, case.teacher)
    named = dict(zip(SUMS, (sums / 37).tolist(), strict=True))
    logits, of_teacher = case.layer(case.hidden), case.teacher.output(case.teacher.hidden)
    if "Chunked" in name:
        chunks = getattr(stock_loss, "num_output_chunks", 8)
        args = [[c[None] for c in part.chunk(chunks)] for part in (logits, of_teacher)]
        theirs = stock_loss(*args, case.labels[None])
    else:
        theirs = stock_loss(logits, of_teacher, case.labels)
    part_of_forward = {"F": 1.0, "R": 0.0, "S": 0.8}[name[0]]
    expected = theirs.item() - part_of_forward * named["teacher_entropy"]
    assert named["kd_loss"] == pytest.approx(expected, rel=1e-5)
    expected = F.cross_entropy(logits, case.labels).item()
    assert named["ce_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("beta", "temperature"), [(0.1, 1.0), (0.5, 2.0), (0.9, 2.0)])
def test_js_is_trl_s(beta, temperature):
    trl = pytest.importorskip("trl.experimental.gkd")
    case = Case(1.0, temperature, "js", beta)
    theirs = trl.GKDTrainer.generalized_jsd_loss(
        case.layer(case.hidden)[None],
        case.teacher.output(case.teacher.hidden)[None],
        case.labels[None],
        beta=beta,
        temperature=temperature,
        reduction="sum",
    )
    assert_close(case.ours()[2], theirs)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"divergence": "kl"}, "kd_loss.divergence=kl: unknown; set it to one of forward"),
        ({"teacher_temperature": -1.0}, "kd_loss.teacher_temperature=-1.0"),
        ({"mixture": 1.5}, "kd_loss.mixture=1.5: it must be between 0 and 1"),
        ({"divergence": "js", "mixture": 1.0}, "set divergence=forward or reverse"),
        ({"num_output_chunks": 0}, "kd_loss.num_output_chunks=0: it must be at least 1"),
    ],
)
def test_arguments_out_of_bounds_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        LinearDistillationLoss(**arguments)


FORWARD_KL = stock.ForwardKLLoss()


@pytest.mark.parametrize(
    ("loss", "kd_loss", "text"),
    [
        (nn.MSELoss(), FORWARD_KL, "loss: MSELoss is no cross-entropy"),
        (nn.CrossEntropyLoss(), nn.KLDivLoss(), "kd_loss: KLDivLoss is unknown"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), FORWARD_KL, "label_smoothing=0.1"),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), FORWARD_KL, "class weights"),
    ],
)
def test_losses_of_other_kinds_are_refused(loss, kd_loss, text):
    with pytest.raises(ValueError, match=text):
        make_distillation_loss(loss, kd_loss, 0.5)


def test_samples_without_targets_give_zero_with_a_graph():
    labels = torch.full((2, 5), tiny.IGNORE)
    case = Case(num_rows=0)
    hidden = torch.randn(2, 5, D, requires_grad=True)
    targets = make_targets(labels)._replace(outputs={"teacher": case.teacher})
    sums = case.loss_fn()(case.layer, hidden, targets)
    assert not sums.any()
    for gradient in torch.autograd.grad(sums[0], [hidden, *case.inputs[1:]]):
        assert not gradient.any()


# ---- Compiled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"divergence": "js", "kd_ratio": 1.0, "with_row_weights": True},
        {"teacher_vocab": V - 13, "with_bias": True, "temperature": 2.0, "output": "bias"},
        {"divergence": "reverse", "teacher_vocab": V + 13},
    ],
    ids=str,
)
def test_compiled_chunks_give_the_same_and_are_compiled_once_for_all_lengths(options):
    torch._dynamo.reset()  # other cases' variants of the same function count for its limit
    counter = CompileCounter()
    eager, compiled = (Case(**options).loss_fn() for _ in range(2))
    compiled.compile_chunks(counter)
    for num_rows in (3, 7, 9, 14, 1, 5, 0, 37, 28):
        case = Case(num_rows=num_rows, **options)
        args = (case.layer, case.hidden, case.labels, case.teacher, case.weights)
        (sums, expected) = (loss.sum_rows(*args) for loss in (compiled, eager))
        assert_close(sums, expected)
        if num_rows:
            assert_close(torch.autograd.grad(sums[0], case.inputs), torch.autograd.grad(expected[0], case.inputs))
        with torch.no_grad():
            args = (case.layer, case.hidden.detach(), *args[2:])
            assert_close(compiled.sum_rows(*args), eager.sum_rows(*args))
    assert counter.frame_count == 2  # with and without a gradient


@pytest.mark.slow
def test_the_default_compiler_gives_the_same_for_each_weight():
    """PyTorch's cache of graphs must not give one weight the gradient of another."""
    for kd_ratio in (0.5, 0.3):
        case = Case(kd_ratio=kd_ratio)
        eager, compiled = case.loss_fn(), case.loss_fn()
        compiled.compile_chunks("inductor")
        args = (case.layer, case.hidden, case.labels, case.teacher, case.weights)
        (found, expected) = (torch.autograd.grad(loss.sum_rows(*args)[0], case.inputs) for loss in (compiled, eager))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
