import json
from functools import partial

import pytest
import torch
from omegaconf import OmegaConf
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchtune import config

from recipe_utils.benchmark.gpu import __main__ as command
from recipe_utils.benchmark.gpu.__main__ import STAGES, Stage, main
from recipe_utils.benchmark.gpu.crafted import document_lengths, packed_row
from recipe_utils.benchmark.gpu.flops import decoder_flops
from recipe_utils.benchmark.gpu.measure import at_most, attempt
from recipe_utils.benchmark.gpu.speed import group_of, ways
from recipe_utils.data.loader.microbatch import Targets
from recipe_utils.loss import LinearCrossEntropyLoss
from recipe_utils.loss.attach_loss import attach_loss
from recipe_utils.model.attention.document_mask import attend_within_documents
from recipe_utils.model.build.build import ModelSettings, build_on_meta

SMALL = ["--device", "cpu", "--small"]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """The exit code, the results and the table of all stages in tiny shapes."""
    folder = tmp_path_factory.mktemp("gpu")
    code = main([*SMALL, "--out", str(folder)])
    return code, json.loads((folder / "results.json").read_text()), folder / "results.md"


def test_all_stages_run_in_small_on_a_cpu_and_no_check_fails(small_run):
    code, results, _ = small_run
    assert list(results["stages"]) == list(STAGES)
    assert not [stage["raised"] for stage in results["stages"].values() if "raised" in stage]
    checks = [each for stage in results["stages"].values() for each in stage.get("checks", ())]
    assert not [each for each in checks if not each["passed"]]
    assert len(checks) > 12
    assert code == 0


def test_what_only_cuda_measures_is_null_and_what_a_stage_lacks_is_named(small_run):
    _, results, _ = small_run
    stages = results["stages"]
    assert stages["4 host waits"]["waits_per_update"] is None
    assert {row["peak_gb"] for row in stages["8 speed"]["rows"]} == {None}
    assert any("float8" in text for text in stages["10 beyond bf16"]["not_available"])


def test_the_table_has_a_row_for_each_step_to_the_fastest(small_run):
    _, results, table = small_run
    rows = [line.split("|")[1:6] for line in table.read_text().splitlines() if "|" in line]
    found = {row[0].strip() for row in rows}
    missing = " ".join(results["stages"]["8 speed"]["not_available"])
    for name, _ in ways():
        assert name in found or name in missing
    (row,) = [r for r in rows if r[0].strip() == "eager" and r[1].strip() == "128"]
    assert float(row[2]) > 0
    assert row[4].strip().endswith("%")
    assert all(name in found for name in STAGES)


def raises(settings):
    raise RuntimeError("no such kernel")


def fails(settings):
    return {"checks": [at_most("error", 2.0, 1.0)]}


def passes(settings):
    return {"checks": [at_most("error", 1.0, 1.0)]}


def test_a_stage_that_raises_is_recorded_and_the_others_run(tmp_path, capsys):
    stages = {"0 first": Stage(raises, 1), "1 second": Stage(passes, 1)}
    assert main([*SMALL, "--out", str(tmp_path)], stages) == 1
    found = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert "in raises" in found["0 first"]["raised"]
    assert found["1 second"]["checks"][0]["passed"]
    assert "FAILED 0 first: RuntimeError: no such kernel" in capsys.readouterr().out


def test_a_check_that_fails_is_the_exit_code_and_is_named(tmp_path, capsys):
    assert main([*SMALL, "--out", str(tmp_path)], {"0 first": Stage(fails, 1)}) == 1
    assert "FAILED 0 first: error: 2.0, bound 1.0" in capsys.readouterr().out
    assert main([*SMALL, "--out", str(tmp_path)], {"0 first": Stage(passes, 1)}) == 0


def test_once_the_time_is_used_up_the_others_are_skipped_by_name(tmp_path):
    stages = {"0 first": Stage(raises, 1), "1 second": Stage(raises, 1)}
    assert main([*SMALL, "--minutes", "0", "--out", str(tmp_path)], stages) == 0
    found = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert all("used up" in stage["skipped"] for stage in found.values())
    table = (tmp_path / "results.md").read_text()
    assert "1 second" in table
    assert "used up" in table


def test_a_stage_that_does_not_look_at_the_clock_is_ended(tmp_path):
    def is_stuck(settings):
        while True:
            pass

    main([*SMALL, "--minutes", "0.005", "--out", str(tmp_path)], {"0 first": Stage(is_stuck, 1)})
    found = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert "TimeoutError" in found["0 first"]["raised"]


def test_only_the_stages_that_are_asked_for_run(tmp_path, capsys):
    stages = {"0 first": Stage(raises, 1), "1 second": Stage(passes, 1)}
    assert main([*SMALL, "--stages", "1", "--out", str(tmp_path)], stages) == 0
    with pytest.raises(SystemExit):
        main([*SMALL, "--stages", "1,7", "--out", str(tmp_path)], stages)
    assert "there is no 7; there are 0, 1" in capsys.readouterr().err


def test_stages_have_no_more_time_together_than_the_command():
    assert sum(stage.seconds for stage in STAGES.values()) <= 600
    assert [name.split()[0] for name in STAGES] == [str(number) for number in range(11)]
    assert command.__doc__ is not None


def test_a_check_that_raises_fails_with_its_traceback():
    made = attempt("reading", lambda: {}["key"])
    assert not made["passed"]
    assert "KeyError" in made["found"]
    assert not at_most("error", float("nan"), 1.0)["passed"]


@pytest.mark.parametrize("own", [{}, {"tie_word_embeddings": True}])
def test_flops_of_a_decoder_are_those_that_pytorch_counts(own):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 48}
    component = OmegaConf.create(
        {
            "_component_": "torchtune.models.qwen2.qwen2",
            "vocab_size": 101,
            "num_layers": 3,
            "max_seq_len": 64,
            **sizes,
            **own,
        }
    )
    model = build_on_meta(partial(config.instantiate, component), ModelSettings())
    attend_within_documents(model, torch.device("cpu"), 64)
    attach_loss(model, LinearCrossEntropyLoss(tokens_per_chunk=7))
    lengths = [5, 11, 24]
    row = packed_row(lengths, 101, seed=0)
    with torch.device("meta"):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
        inputs = {**row.inputs, "tokens": row.inputs["tokens"].to("meta")}
        inputs["input_pos"] = inputs["input_pos"].to("meta")
    targets = Targets(row.targets.labels.to("meta"), row.targets.positions.to("meta"))

    def flops_of_addmm(_, left, right, out_shape=None, **scales):  # in place, not counted by itself
        return 2 * left[0] * left[1] * right[1]

    in_place = {torch.ops.aten.addmm_: flops_of_addmm}
    with (
        FlopCounterMode(display=False, custom_mapping=in_place) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        model(**inputs, targets=targets)[0].backward()
    found = decoder_flops(model, lengths, len(row.targets.positions))
    # PyTorch counts all pairs of queries and keys, of which causal attention needs half.
    assert counter.get_total_flops() == found.matrix + 2 * found.attention


def test_documents_fill_a_row():
    lengths = document_lengths(8192, 2048, seed=3)
    assert sum(lengths) == 8192
    assert max(lengths) <= 2048
    assert 60 < sorted(lengths)[len(lengths) // 2] < 130


def test_kernels_fall_into_groups():
    assert group_of("sm90_xmma_gemm_bf16bf16_bf16f32") == "matrix products"
    assert group_of("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel") == "attention"
    assert group_of("triton_tem_fused_flex_attention_0") == "attention"
    assert group_of("triton_poi_fused_silu_mul_1") == "compiled (Triton)"
    assert group_of("Memcpy HtoD (Pinned -> Device)") == "copies and casts"
    assert group_of(
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam"
    ) == ("optimizer, gradient norm")
