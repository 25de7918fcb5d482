"""Distillation with teacher and student of either library has the gradients of full logits, sample by sample."""

import pytest
import tiny
from big_batch import NUM_SAMPLES, TOLERANCE, error
from big_batch_of_teacher import metrics_and_gradients, step_of_16
from distributed_runs import run_distributed
from recipe_runs import KD, refusal, slow
from tiny_transformers import Plain, gradients_in_float64, save_tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from recipe_utils.data.loader.sampler import epoch_permutation
from recipe_utils.model.transformers import decoder
from recipe_utils.model.transformers.probe import DoublePrecision

TORCHTUNE = tiny.DEEP_UNTIED_MODEL, tiny.UNTIED_TEACHER_MODEL  # student, teacher
PACKED = {"microbatching": "packed", "max_tokens_per_microbatch": 64}
PADDED = {"microbatching": "least_padding", "batch_size": 4}
CACHED = {**PACKED, "teacher_cache": "hidden"}
HOT = {"teacher_top_k_at_any_temperature": True}
PP_2 = {**PACKED, "pipeline_parallel_dim": 2}


@pytest.fixture
def config_of(tiny_kd_config, tmp_path):
    """Makes the config of a student and a teacher: types of transformers, or None for torchtune's."""

    def make(student, teacher, **changes):
        given = {"model": TORCHTUNE[0], "teacher_sizes": TORCHTUNE[1]}
        if student:
            given |= save_tiny(tmp_path / "student", student)
        if teacher:
            folder = tmp_path / "teacher"
            made = save_tiny(folder, teacher, seed=1, vocab_size=150, hidden_size=96)
            given["teacher_sizes"], given["teacher_checkpointer"] = made.values()
        return step_of_16(tiny_kd_config, "untied", **given, **changes)

    return make


def sample_by_sample(folder, *types):
    samples = tiny.make_samples(NUM_SAMPLES, num_without_targets=3, mask_prompts=False)
    order = epoch_permutation(NUM_SAMPLES, epoch=0, shuffle=True).tolist()
    with DoublePrecision(), tiny.float64_throughout():
        models = [
            Plain(folder / name) if types[i] else tiny.tiny_model(TORCHTUNE[i], i).double()
            for i, name in enumerate(("student", "teacher"))
        ]
        return [
            metrics_and_gradients(*models, [samples[i] for i in step], 0.3, 2.0)[1]
            for step in (order[:16], order[16:])
        ]


@pytest.mark.parametrize(
    ("student", "teacher", "world_size", "plans"),
    [
        slow("qwen3", None, 1, [PACKED]),
        slow(None, "gemma2", 1, [PACKED]),
        (None, "gemma2", 1, [CACHED]),  # whose tail caps logits
        slow("gemma2", "qwen3", 1, [PADDED, PACKED, CACHED]),
        slow("lfm2", "gemma3_text", 1, [PADDED, PACKED, CACHED]),  # whose output is tied
        slow("granite", "gpt_oss", 1, [PADDED, PACKED]),
        slow("qwen3", "gemma2", 2, [PACKED, PADDED, CACHED, PP_2]),
        slow("gemma3_text", "lfm2", 2, [PACKED, CACHED, PP_2]),
        slow(None, "gemma3_text", 2, [PACKED, CACHED, PP_2]),
        slow(
            "granite",
            "gemma2",
            1,
            [{**PADDED, "teacher_cache": "top_k", "teacher_top_k": 150, **HOT}],
        ),
    ],
)
def test_gradients_are_those_of_full_logits(
    student, teacher, world_size, plans, config_of, tmp_path
):
    configs = [config_of(student, teacher, **plan) for plan in plans]
    ranks = run_distributed(gradients_in_float64, world_size, configs, KD)
    for plan, *of_ranks in zip(plans, *ranks, strict=True):
        for step, expected in enumerate(sample_by_sample(tmp_path, student, teacher)):
            assert set().union(*(found[step] for found in of_ranks)) == expected.keys()
            assert max(error(found[step], expected) for found in of_ranks) < TOLERANCE, plan


@pytest.mark.slow
def test_a_tail_without_its_cap_gives_other_gradients(config_of, tmp_path, monkeypatch):
    config = config_of(None, "gemma2", **PACKED)
    head_alone = lambda self, hidden: self.shell.get_output_embeddings()(hidden)  # noqa: E731
    monkeypatch.setattr(decoder.Tail, "forward", head_alone)
    (found,) = gradients_in_float64([config], KD)
    assert error(found[0], sample_by_sample(tmp_path, None, "gemma2")[0]) > 1e-6


def test_a_folder_with_other_tokens_is_refused(config_of, tmp_path):
    config = config_of(
        None, "qwen3", tokenizer={"_component_": "tiny.ReadableTokenizer", "max_seq_len": 64}
    )
    tokens = {f"token {i}": i for i in range(40)} | {"another": 40}
    Tokenizer(WordLevel(tokens, "another")).save(str(tmp_path / "teacher" / "tokenizer.json"))
    assert "token 40 is 'token 40' in the student's and 'another' in the teacher's" in refusal(
        config, KD
    )
