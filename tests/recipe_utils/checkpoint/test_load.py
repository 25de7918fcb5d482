"""A training that is loaded from a checkpoint continues as if it had never stopped."""

import random

import checkpoint_runs
import pytest
import tiny
import torch
import torch.distributed as dist
import torchao
from checkpoint_runs import build, contents, save_once, state, train
from distributed_runs import run_distributed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from recipe_utils.checkpoint.load import DamagedError, differences, load
from recipe_utils.checkpoint.save import CheckpointWriter
from recipe_utils.checkpoint.tensors import note_options, optimizer_contents
from recipe_utils.files import CheckpointError
from recipe_utils.models.distribute import parallelize
from recipe_utils.models.settings import ModelSettings
from recipe_utils.optim.optimizer import unwrapped
from recipe_utils.parallel.process_group import new_cpu_group
from recipe_utils.parallel.settings import RankSettings

OPTIMIZERS = ("adamw", "sgd", "sgd_momentum", "in_backward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "adafactor", "asgd", "nadam"])
def test_a_resumed_training_is_bitwise_the_uninterrupted_one(tmp_path, optimizer, dtype):
    model, optim = build(optimizer, dtype=dtype)
    train(model, optim, range(2))
    CheckpointWriter(tmp_path).save(model, optim, state(2))
    drawn = random.random(), torch.rand(3)
    train(model, optim, range(2, 4))

    resumed, resumed_optim = build(optimizer, seed=1, dtype=dtype)
    train(resumed, resumed_optim, range(7, 8))
    assert load(tmp_path / "step_2", resumed, resumed_optim, state(0)) == state(2)
    assert random.random() == drawn[0]
    assert torch.equal(torch.rand(3), drawn[1])
    train(resumed, resumed_optim, range(2, 4))
    checkpoint_runs.assert_equal(contents(resumed, resumed_optim), contents(model, optim))


def test_a_checkpoint_from_before_the_first_step_leaves_the_optimizer_without_state(tmp_path):
    save_once(tmp_path, 0)
    model, optimizer = build(seed=1)
    train(model, optimizer, range(1))
    load(tmp_path / "step_0", model, optimizer, state(0))
    assert not optimizer.state


@pytest.mark.parametrize(("saved", "loaded"), [OPTIMIZERS[::3], OPTIMIZERS[::-3]])
def test_an_optimizer_and_one_that_steps_in_the_backward_load_each_others_state(tmp_path, saved, loaded):
    model, optim = save_once(tmp_path, 2, saved)
    resumed, resumed_optim = build(loaded, seed=1)
    load(tmp_path / "step_2", resumed, resumed_optim, state(0))
    for each in ((model, optim), (resumed, resumed_optim)):
        train(*each, range(2, 4))
    for ours, theirs in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_a_wrapper_adds_to_the_names_does_not_matter(tmp_path):
    model, optim = save_once(tmp_path, 1)
    wrapped, _ = build(seed=1)
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    wrapped_optim = torch.optim.AdamW(wrapped.parameters())
    load(tmp_path / "step_1", wrapped, wrapped_optim, state(0))
    found = {unwrapped(name): value for name, value in contents(wrapped, wrapped_optim).items()}
    checkpoint_runs.assert_equal(found, contents(model, optim))


def test_persistent_buffers_are_saved_and_the_other_ones_are_not(tmp_path):
    def make(value):
        model = nn.Linear(2, 2)
        model.register_buffer("kept", torch.full((3,), value))
        model.register_buffer("cache", torch.full((3,), value), persistent=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    CheckpointWriter(tmp_path).save(*make(1.0), state(1))
    model, optimizer = make(2.0)
    load(tmp_path / "step_1", model, optimizer, state(0))
    assert model.kept.tolist() == [1.0] * 3
    assert model.cache.tolist() == [2.0] * 3


# ---- Ranks --------------------------------------------------------------------------------------


def save_on_ranks(folder, replicate, shard):
    """Saves step 2. Returns its contents."""
    model, optimizer = build(replicate=replicate, shard=shard)
    train(model, optimizer, range(2))
    with torch.no_grad():  # as validation does: the root's parameters stay gathered
        model(torch.zeros(1, 2, dtype=torch.long))
    torch.manual_seed(dist.get_rank())
    assert CheckpointWriter(folder, group=new_cpu_group()).save(model, optimizer, state(2)).path
    return contents(model, optimizer)


def test_copies_of_a_shard_are_saved_once_and_load_on_one_process(tmp_path):
    """Without the random numbers of another number of ranks."""
    at_save, *_ = run_distributed(save_on_ranks, 4, tmp_path, 2, 2)
    model, optimizer = build(seed=1)
    before = torch.get_rng_state()
    load(tmp_path / "step_2", model, optimizer, state(0))
    assert torch.equal(torch.get_rng_state(), before)
    checkpoint_runs.assert_equal(contents(model, optimizer), at_save)
    num_bytes = sum(v.nbytes for v in at_save.values() if isinstance(v, torch.Tensor))
    sizes = [file.stat().st_size for file in (tmp_path / "step_2").glob("*.safetensors")]
    assert len(sizes) == 4
    assert num_bytes < sum(sizes) < num_bytes + 4 * 40_000
    assert max(sizes) < 1.5 * min(sizes)


def load_with_a_problem_on_one_rank(folder):
    """Returns the errors of a missing folder, of a damaged file that both ranks read, and of an optimizer."""
    errors, group = [], new_cpu_group()
    is_second = dist.get_rank() == 1
    for name, optimizer, expected in (
        ("nowhere" if is_second else "step_1", "adamw", DamagedError),
        ("step_2", "adamw", DamagedError),
        ("step_1", "sgd" if is_second else "adamw", CheckpointError),
    ):
        loaded = build(optimizer, shard=2, seed=1)
        before = contents(*loaded)
        with pytest.raises(CheckpointError) as caught:
            load(folder / name, *loaded, state(0), group=group)
        checkpoint_runs.assert_equal(contents(*loaded), before)
        assert type(caught.value) is expected
        errors.append(str(caught.value))
    return errors


def test_what_one_rank_finds_is_an_error_on_all_and_changes_none(tmp_path):
    """Rank 0 checks optimizer.json and state.json, rank 1 the other two files."""
    for step in (1, 2):
        save_once(tmp_path, step)
    index = tmp_path / "step_2" / "tensors.json"
    index.write_bytes(b"{" * index.stat().st_size)
    errors, same = run_distributed(load_with_a_problem_on_one_rank, 2, tmp_path)
    assert errors == same
    missing, damaged, optimizer = errors
    assert missing.startswith(f"rank 1: resume_from_checkpoint: {tmp_path / 'nowhere'} cannot be used")
    assert damaged.startswith("rank 1: resume_from_checkpoint: ")
    assert "tensors.json: its bytes are not those that were written" in damaged
    assert optimizer.startswith("rank 1: optimizer=SGD: its options are")


def save_split_layers(folder):
    """Saves a model of tensor parallelism over 2 ranks, sharded over 2."""
    model = tiny.tiny_model(tiny.UNTIED_MODEL)
    plan = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
    ranks = RankSettings(device="cpu", tensor_parallel_dim=2).join()
    parallelize(model, ModelSettings(tensor_parallel_plan=plan), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    assert CheckpointWriter(folder, group=new_cpu_group()).save(model, optimizer, state(2)).path
    return contents(model, optimizer)


def test_a_checkpoint_of_split_layers_loads_on_one_process(tmp_path):
    at_save, *_ = run_distributed(save_split_layers, 4, tmp_path)
    model = tiny.tiny_model(tiny.UNTIED_MODEL, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    load(tmp_path / "step_2", model, optimizer, state(0))
    checkpoint_runs.assert_equal(contents(model, optimizer), at_save)


# ---- What does not fit --------------------------------------------------------------------------


def other_model(**changes):
    model = tiny.tiny_model({**tiny.MODEL, **changes})
    model.register_parameter("extra", nn.Parameter(torch.zeros(3)))
    return model


MISFITS = {
    r"step_1 does not fit it: its shapes differ: tok_embeddings.weight \(67, 32\) instead of \(70, 32\)": (
        lambda: other_model(vocab_size=70)
    ),
    "its dtypes differ: extra torch.float32 instead of torch.bfloat16": (lambda: other_model().bfloat16()),
    "it lacks layers.2.attn.k_proj.weight": lambda: other_model(num_layers=3),
    "it has layers.1.*, which the model does not have": lambda: other_model(num_layers=1),
    "it lacks .* and 4 more; its shapes differ: .* instead of": (lambda: other_model(num_layers=3, vocab_size=70)),
}


@pytest.mark.parametrize("words", MISFITS)
def test_a_model_that_does_not_fit_is_named_with_both_values(tmp_path, words):
    save_once(tmp_path, 1)
    model = MISFITS[words]()
    optimizer = torch.optim.AdamW(model.parameters())
    before = contents(model, optimizer)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "step_1", model, optimizer, state(0))
    checkpoint_runs.assert_equal(contents(model, optimizer), before)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), "optimizer=SGD: its options are damp.*betas"),
        (lambda m: torch.optim.AdamW([*m.parameters()][1:]), "none; no longer: extra"),
    ],
    ids=["kind", "parameters"],
)
def test_an_optimizer_that_does_not_fit_is_named_with_both_values(tmp_path, make, words):
    save_once(tmp_path, 1)
    model, _ = build()
    optimizer = make(model)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "step_1", model, optimizer, state(0))
    assert not optimizer.state


def test_how_the_optimizer_computes_is_the_resumed_runs_choice_and_the_rest_is_not(tmp_path):
    save_once(tmp_path, 1)
    model, _ = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=True)
    load(tmp_path / "step_1", model, optimizer, state(0))
    (group,) = optimizer.param_groups
    assert group["foreach"] is True
    assert group["lr"] == 0.01
    assert group["betas"] == (0.9, 0.999)


def adamw_of(model, of_vectors):
    """Returns an optimizer with options of vectors; None for one group."""
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": vectors, **(of_vectors or {})}]
    return torch.optim.AdamW(model.parameters() if of_vectors is None else groups, lr=0.01)


@pytest.mark.parametrize(
    ("then", "now", "of_matrices", "of_vectors"),
    [
        ({"lr": 0.02}, {"lr": 0.05}, {}, {"lr": 0.05}),
        ({"weight_decay": 0.9}, {"weight_decay": 0.0}, {}, {"weight_decay": 0.0}),
        (None, {"betas": (0.5, 0.6)}, {}, {"betas": (0.5, 0.6)}),
        ({"lr": 0.02}, None, {"lr": 0.01}, {"lr": 0.01}),
    ],
)
def test_options_that_are_built_otherwise_are_those_of_now_and_the_others_continue(
    then, now, of_matrices, of_vectors, tmp_path
):
    (model, _), (resumed, _) = build(), build(seed=1)
    optimizer, resumed_optimizer = adamw_of(model, then), adamw_of(resumed, now)
    for each in (optimizer, resumed_optimizer):
        note_options(each)
    train(model, optimizer, range(2))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # by a schedule
    configs = [{"optimizer": {"lr": 1, **(options or {})}} for options in (then, now)]
    CheckpointWriter(tmp_path).save(model, optimizer, state(2, config=configs[0]))
    loaded = resumed, resumed_optimizer
    load(tmp_path / "step_2", *loaded, state(0, config=configs[1]))
    train(*loaded, range(2, 4))

    by_hand = adamw_of(model, then or {})
    by_hand.state = optimizer.state
    for group, changes in zip(by_hand.param_groups, (of_matrices, of_vectors), strict=True):
        group |= {"lr": 0.5 * group["lr"], **changes}
    train(model, by_hand, range(2, 4))
    assert all(map(torch.equal, resumed.parameters(), model.parameters()))


def freezing(part):
    """Returns a model of which a part is frozen, its optimizer, and fingerprints."""
    model, _ = build()
    frozen = {name: "1" for name, _ in model.named_parameters() if name.startswith(part)}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    trained = (p for p in model.parameters() if p.requires_grad)
    return model, torch.optim.AdamW(trained, lr=0.01), frozen


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ("none", "layers.1.", r": none \(0\); frozen now, trained then: layers.1.* \(9\)"),
        ("layers.0.", "none", r": layers.0.* \(9\); frozen now, trained then: none \(0\)"),
    ],
)
def test_another_frozen_set_is_refused_in_words(then, now, words, tmp_path):
    *trained, frozen = freezing(then)
    train(*trained, range(2))
    CheckpointWriter(tmp_path).save(*trained, state(2, frozen=frozen))
    *other, frozen = freezing(now)
    for fingerprints, text in ((frozen, f"^model: .*{words}"), ({}, "^model: ")):
        with pytest.raises(CheckpointError, match=text):
            load(tmp_path / "step_2", *other, state(0, frozen=fingerprints), other_model=True)


def test_optimizer_state_that_is_no_plain_tensor_is_named():
    model = nn.Embedding(128, 64)
    optimizer = torchao.optim.AdamW8bit(model.parameters())
    model.weight.grad = torch.ones(128, 64)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"AdamW8bit: its state .* of weight is a OptimState8bit"):
        optimizer_contents(model, optimizer)


def test_differences_are_found_within_components_and_compare_values_as_json():
    then = {"loss": {"_component_": "L", "beta": 0.1}, "path": None, "lr": 1, "betas": (1, 2)}
    now = {"loss": {"_component_": "L", "beta": 0.5}, "kd": {"a": [2], "b": {}}, "betas": [1, 2]}
    assert differences(then, now) == {"kd.a": (None, [2]), "kd.b": (None, {}), "loss.beta": (0.1, 0.5), "lr": (1, None)}
    assert differences(then, {**then, "path": "x"}, unset="its default") == {"path": (None, "x")}
    assert differences({}, {"path": None}, unset="its default") == {"path": ("its default", None)}


def test_the_config_of_a_frozen_model_is_compared(tmp_path):
    crc, described = {"teacher_checkpointer": "1f"}, "teacher_checkpointer.config.json"
    model, optimizer = build()
    CheckpointWriter(tmp_path).save(model, optimizer, state(1, frozen={**crc, described: "2a"}))
    load(tmp_path / "step_1", model, optimizer, state(0))  # kd_ratio=0
    with pytest.raises(CheckpointError, match=f"^teacher_checkpointer: .*weights: {described}"):
        load(tmp_path / "step_1", model, optimizer, state(0, frozen={**crc, described: "2b"}))


def test_all_differences_are_named_at_once(tmp_path):
    model, optimizer = build()
    CheckpointWriter(tmp_path).save(model, optimizer, state(1, frozen={"a": "1"}, config={"model": {"num_heads": 4}}))
    sgd = torch.optim.SGD(model.parameters())
    changes = {"data_fingerprint": {"shuffle": False}, "frozen": {"a": "2"}, "config": {"model": {"num_heads": 8}}}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "step_1", model, sgd, state(0, **changes))
    first, *problems = str(caught.value).splitlines()
    assert first == "4 problems with the checkpoint:"
    beginnings = ("dataset_length=None: ", "checkpointer: ", "model.num_heads=8: ", "optimizer=SGD: ")
    for problem, beginning in zip(problems, beginnings, strict=True):
        assert problem.startswith(f"  - {beginning}")
    assert not sgd.state
