"""Rows that several ranks compute together: the gradient of one big batch, the curve of one process, less memory."""

import shutil
from functools import cache
from typing import Any, NamedTuple

import arrays
import big_batch
import big_batch_of_pairs
import big_batch_of_teacher
import pytest
import tiny
import torch
from big_batch import STEP_OF_16, TOLERANCE, error
from big_batch_of_pairs import NUM_PAIRS, PAIRS_PER_STEP
from big_batch_of_teacher import STUDENTS, TEACHERS
from checkpoint_runs import resuming_in
from distributed_runs import run_distributed
from recipe_runs import (
    DPO,
    KD,
    SFT,
    STEP_OF_8,
    losses,
    refusal,
    run_compiled_recipe,
    run_mutant_recording_gradients,
    run_recipe,
    run_recording_gradients_and_metrics,
    slow,
    with_adapters,
    writing_to,
)
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from recipe_utils.data.loader import collectives
from recipe_utils.data.plan.plan import WHOLE, Part
from recipe_utils.data.text import collate
from recipe_utils.data.text.collator import TextCollator
from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.attach_loss import attach_loss
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.parallel import exchange
from recipe_utils.parallel.ranks import RankSettings, join_ranks

SPANNING = {"microbatching": "packed", "batch_size": 1, "max_tokens_per_microbatch": 12}
MODELS = {
    "tied": tiny.DEEP_MODEL,
    "untied": tiny.DEEP_UNTIED_MODEL,
    "4 keys": {**tiny.MODEL, "num_kv_heads": 4},
    "1 key": {**tiny.MODEL, "num_kv_heads": 1},
    "lora": tiny.adapted(tiny.DEEP_MODEL),
    "dora": tiny.adapted(tiny.DEEP_UNTIED_MODEL, use_dora=True),
}
RECOMPUTED = {"enable_activation_checkpointing": True}
LAST = {"gradient_sync": "last_microbatch"}
TORCHTUNE, OURS = "torchtune.rlhf.loss", "recipe_utils.loss.preference"
LOSSES = {
    "dpo": ("multi_turn", {"_component_": f"{TORCHTUNE}.DPOLoss", "beta": 0.3}, 0.7),
    "ipo": ("alike_beginnings", {"_component_": f"{OURS}.IPOLoss", "tau": 0.3}, 0.0),
    "normalized": ("train_on_input", {"_component_": f"{OURS}.NormalizedDPOLoss", "beta": 3.0}, 0.2),
}  # fmt: skip


class Row(NamedTuple):
    """One training; ``objective`` is a key of LOSSES for pairs, a kind of divergence, or cross-entropy."""

    layout: str
    max_ranks: int
    model: str
    objective: str = "ce"
    changes: dict[str, Any] = {}  # noqa: RUF012

    @property
    def recipe(self):
        return DPO if self.objective in LOSSES else SFT if self.objective == "ce" else KD


def schedule(name):
    return {"pipeline_parallel_schedule": name}


FAST = [
    Row("fsdp-2", 2, "tied"),
    Row("fsdp-2", 2, "tied", "forward"),
    Row("fsdp-2", 2, "untied", "normalized"),
]
ROWS = [
    *FAST,
    Row("fsdp-4", 4, "tied", "ce", RECOMPUTED),
    Row("fsdp-4", 4, "untied", "ce", {"fsdp_reshard_after_forward": False}),
    Row("fsdp-4", 4, "4 keys"),
    Row("fsdp-4", 4, "1 key", "ce", LAST),
    Row("fsdp-4", 4, "lora", "ce", RECOMPUTED),
    Row("fsdp-4", 2, "dora"),
    Row("fsdp-4", 4, "tied", "symmetric"),
    Row("fsdp-4", 4, "tied", "dpo"),
    Row("fsdp-4", 4, "untied", "ipo", {"prefix_sharing": False}),
    Row("fsdp-4", 4, "lora", "normalized"),
    Row("fsdp-4", 4, "tied", "ipo", {"reference": "cached"}),
    Row("hsdp-2x2", 4, "tied", "ce", LAST),
    Row("hsdp-2x2", 4, "untied", "reverse"),
    Row("hsdp-2x2", 2, "tied", "normalized", {"reference": "offload"}),
    Row("fsdp-2-tp-2", 2, "untied"),
    Row("fsdp-2-tp-2", 2, "untied", "dpo"),
    Row("pp-2-fsdp-2", 2, "tied", "ce", schedule("GPipe")),
    Row("pp-2-fsdp-2", 2, "untied", "ce", schedule("InterleavedZeroBubble")),
    Row("pp-2-fsdp-2", 2, "tied", "forward", schedule("Interleaved1F1B")),
    Row("pp-2-fsdp-2", 2, "tied", "ipo", {"reference": "cached"}),
]


@cache
def reference(model, objective):
    """Gradients of each update step by parameter name, and metrics of those that have some."""
    sizes = MODELS[model]
    if objective == "ce":
        return [({}, gradients) for gradients in big_batch.reference_gradients(sizes)]
    if objective in LOSSES:
        return big_batch_of_pairs.reference_of_steps(sizes, *LOSSES[objective])
    return big_batch_of_teacher.reference_of_steps(STUDENTS[model], TEACHERS[model], 0.3, 2.0, objective)  # fmt: skip


@pytest.fixture
def config_of(tiny_config, tiny_kd_config, tiny_dpo_config, tmp_path):
    """Makes the config of a row."""

    def make(row):
        changes = {
            "model": MODELS[row.model],
            "max_ranks_per_row": row.max_ranks,
            **arrays.LAYOUTS[row.layout][1],
            **row.changes,
        }
        if row.recipe == SFT:
            config = tiny_config(**SPANNING, **STEP_OF_16, **changes)
            if "key" in row.model:
                folder = tmp_path / "own"
                folder.mkdir()
                torch.save(tiny.tiny_model(MODELS[row.model]).state_dict(), folder / "own.pt")
                own = {"checkpoint_dir": str(folder), "checkpoint_files": ["own.pt"]}
                config["checkpointer"] = {**config["checkpointer"], **own}
        elif row.recipe == KD:
            terms = {"temperature": 2.0, "divergence": row.objective}
            config = big_batch_of_teacher.step_of_16(
                tiny_kd_config, row.model, kd_ratio=0.3, kd_loss=terms, **SPANNING, **changes
            )
        else:
            kind, loss, weight = LOSSES[row.objective]
            data = {"_component_": "tiny.tiny_pair_dataset", "num_pairs": NUM_PAIRS, "kind": kind}
            changes |= {"dataset": data, "loss": loss, "sft_loss_weight": weight}
            step = {"global_batch_size": PAIRS_PER_STEP, "gradient_accumulation_steps": ...}
            changes["max_tokens_per_microbatch"] = 16 if row.objective == "dpo" else 28
            config = tiny_dpo_config(**{**SPANNING, **step, **changes})
        return with_adapters(config, tmp_path) if "lora_rank" in MODELS[row.model] else config

    return make


def gradients_metrics_and_parts(config, recipe):
    """Of each update step, and the number of ranks of each row in the order of the rounds."""
    parts = []
    with pytest.MonkeyPatch.context() as patches:
        part_of = collectives.part_of
        patches.setattr(collectives, "part_of", lambda *args: parts.append(part_of(*args)) or parts[-1])  # fmt: skip
        ((gradients, logged),) = run_recording_gradients_and_metrics([config], recipe)
    return gradients, logged, [part.num_ranks for part in parts]


@pytest.mark.parametrize("row", [*FAST, *map(slow, ROWS[len(FAST) :])], ids=str)
def test_gradient_and_metrics_are_those_of_one_big_batch(row, config_of):
    world_size = arrays.LAYOUTS[row.layout][0]
    if row.layout.startswith("pp") and not arrays.rows_on([row], world_size):
        pytest.skip("pipeline stages need torch 2.13")
    ranks = run_distributed(
        gradients_metrics_and_parts, world_size, config_of(row), row.recipe, timeout_seconds=300
    )
    sizes = {1 << i for i in range(row.max_ranks.bit_length())}
    assert set().union(*(parts for _, _, parts in ranks)) == sizes
    for step, (metrics, gradients) in enumerate(reference(row.model, row.objective)):
        assert set().union(*(found[step] for found, _, _ in ranks)) == gradients.keys()
        assert max(error(found[step], gradients) for found, _, _ in ranks) < TOLERANCE
        logged = ranks[0][1][step]
        for name, value in metrics.items():
            assert logged[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
    assert ranks[0][1][0]["num_spanning_samples"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tokens", "datasets"])
def test_datasets_have_their_loss_weights_in_parts_of_rows(how, tiny_config):
    of_rows = {**SPANNING, "max_ranks_per_row": 2, "loss_weights": how}
    config = tiny_config(
        model=tiny.DEEP_MODEL, **{**STEP_OF_16, "dataset": big_batch.MIXED, **of_rows}
    )
    run = run_recording_gradients_and_metrics
    ranks = [found for (found,) in run_distributed(run, 2, [config])]
    with tiny.float64_throughout():
        expected = big_batch.weighted_references(tiny.DEEP_MODEL, how)
    for step, (gradients, loss, datasets) in enumerate(expected):
        assert max(error(found[step], gradients) for found, _ in ranks) < TOLERANCE
        logged = ranks[0][1][step]
        means = {"loss": loss, **{f"loss/{name}": mean for name, (mean, _) in datasets.items()}}
        assert {name: logged[name] for name in means} == pytest.approx(means, rel=1e-12)


def test_a_teacher_s_cache_of_whole_rows_is_refused(tiny_kd_config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = tiny_kd_config(**SPANNING, max_ranks_per_row=2, teacher_cache="hidden")
    text = "1 problem in the config:\n  - max_ranks_per_row=2: teacher_cache=hidden stores outputs of whole rows"
    assert text in refusal(config, KD)


# ---- Wrong recipes -----------------------------------------------------------------------------------


def change_parts(patches, change):
    """Has ``change`` make a part from that part, and the whole row, of the text collator."""
    cut = collate.cut_part

    def changed(row, part, *args):
        return cut(row, part, *args) if part == WHOLE else change(cut(row, part, *args), row, part)

    patches.setattr(collate, "cut_part", changed)


def labels_shifted_after_the_cut(patches):
    def change(own, row, part):
        tokens = own.inputs["tokens"]
        labels = tokens.roll(-1).where(own.targets.labels != tiny.IGNORE, tiny.IGNORE)
        return type(own)(own.inputs, own.targets._replace(labels=labels), own.counts)

    change_parts(patches, change)


def positions_restarted_in_each_part(patches):
    def change(own, row, part):
        positions = torch.arange(own.inputs["tokens"].numel()).unsqueeze(0)
        return type(own)({**own.inputs, "input_pos": positions}, own.targets, own.counts)

    change_parts(patches, change)


def targets_counted_on_each_rank(patches):
    change_parts(patches, lambda own, row, _: type(own)(own.inputs, own.targets, row.counts))


def no_exchange_in_the_backward(patches):
    backward = staticmethod(lambda ctx, grad: (grad, None))
    patches.setattr(exchange._AllToAll, "backward", backward)


def a_part_lost_in_collation(patches):
    whole = TextCollator.collate
    patches.setattr(TextCollator, "collate", lambda self, samples, part=WHOLE: whole(self, samples))


MUTANTS = [
    labels_shifted_after_the_cut,
    positions_restarted_in_each_part,
    targets_counted_on_each_rank,
    no_exchange_in_the_backward,
    a_part_lost_in_collation,
]


@pytest.mark.parametrize(
    "mutate", [MUTANTS[0], *map(slow, MUTANTS[1:])], ids=lambda mutate: mutate.__name__
)
def test_a_wrong_recipe_misses_the_big_batch(mutate, config_of):
    config = config_of(FAST[0])
    found = run_distributed(run_mutant_recording_gradients, 2, mutate, config, SFT)
    ((_, expected), *_) = reference("tied", "ce")
    assert max(error(gradients[0], expected) for gradients in found) > 1e-2


# ---- Curves, resume, memory -----------------------------------------------------------------------------


@pytest.fixture
def trained(tiny_config):
    """Makes a config of two epochs with validation, in which some rows need several ranks."""

    def make(max_ranks):
        return tiny_config(
            dataset={"_component_": "tiny.tiny_dataset", "num_samples": 38},
            dataset_val={"_component_": "tiny.tiny_dataset", "num_samples": 9, "seed": 1},
            run_val_every_n_steps=5,
            epochs=2,
            save_every_n_steps=3,
            keep_last_n_checkpoints=9,
            max_ranks_per_row=max_ranks,
            **{**STEP_OF_8, **SPANNING},
        )

    return make


def curve(logged):
    """Losses and validation losses by update step."""
    return [
        (m["step"], name, m[name]) for m in logged for name in ("loss", "val_loss") if name in m
    ]


def assert_same_curve(found, expected):
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in expected], rel=1e-6)


@pytest.mark.slow
def test_the_curve_is_that_of_one_process_also_resumed_on_fewer_ranks(trained, tmp_path):
    alone = curve(run_distributed(run_recipe, 1, trained(1))[0])
    assert len(alone) == 12
    config = writing_to(tmp_path / "four", trained(4))
    assert_same_curve(curve(run_distributed(run_recipe, 4, config)[0]), alone)
    resumed = resuming_in(tmp_path / "two", trained(2))
    shutil.copytree(tmp_path / "four" / "step_3", tmp_path / "two" / "step_3")
    expected = [each for each in alone if each[0] > 3]
    assert_same_curve(curve(run_distributed(run_recipe, 2, resumed)[0]), expected)


@pytest.mark.slow
def test_compiled_layers_give_the_same_losses(trained):
    short = {"epochs": 1, "max_steps_per_epoch": 2, "run_val_every_n_steps": None}
    config = {**trained(2), **RECOMPUTED, **short}
    eager = run_distributed(run_recipe, 2, config)[0]
    compiled = run_distributed(run_compiled_recipe, 2, {**config, "output_dir": f"{config['output_dir']}_2"}, timeout_seconds=300)[0]  # fmt: skip
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-6)


NUM_TOKENS = 1024
SIZES = {**tiny.WIDE_MODEL, "num_layers": 4, "num_heads": 8, "max_seq_len": NUM_TOKENS}


def saved_bytes(num_ranks, recomputes):
    """Of activations that the backward of a row of one document needs, on this rank."""
    ranks = join_ranks(RankSettings(device="cpu"))
    model = tiny.tiny_model(SIZES)
    groups = ranks.row_groups(ranks.world_size)
    attend_within_documents(model, ranks.device, NUM_TOKENS, groups)
    attach_loss(model, LinearCrossEntropyLoss(tokens_per_chunk=64))
    if recomputes:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tokens = torch.randint(tiny.VOCAB_SIZE, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).numpy()  # fmt: skip
    part = Part(ranks.dp_rank % num_ranks, num_ranks)
    row = collate.collate_packed_microbatch([{"tokens": tokens, "labels": tokens}], -100, part=part)
    sizes = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model(**row.inputs, targets=row.targets)
    num_bytes = sum(nbytes for nbytes, _ in sizes.values())
    loss.sum().backward()
    ranks.leave()
    return num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_four_ranks_keep_a_quarter_of_the_activations_each(recomputes):
    whole = max(run_distributed(saved_bytes, 4, 1, recomputes))
    of_ranks = run_distributed(saved_bytes, 4, 4, recomputes)
    assert max(of_ranks) <= 0.3 * whole
    assert max(of_ranks) <= 1.02 * min(of_ranks)
