import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipe_utils.benchmark import gpu
from recipe_utils.benchmark.gpu import commands, main

PAGE = Path(gpu.__file__).with_name("README.md")


@pytest.mark.slow
def test_gradients_of_both_libraries_qlora_and_a_teacher_equal_single_samples_on_a_cpu(capsys):
    assert main(["--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for name in ("llama3_2/5M_full", "qwen3/5M_full", "llama3_2/5M_lora", "llama3_2/5M_to_1M_KD"):
        assert f"{name}_update_step fp32 null: exit code 0" in printed
    assert printed.count("Equal to single samples within the precision of fp32.") == 4
    assert "update step 2 of llama3_2/5M_lora_update_step, after one" in printed
    assert printed.endswith("All checks passed.\n")


def test_a_gpu_has_each_kernel_in_each_precision_and_the_tests(tmp_path):
    (tests, argv), *checks = commands("cuda", str(tmp_path))
    assert tests == "tests"
    assert argv[argv.index("-k") + 1] == "cuda"
    for config in ("llama3_2/5M_lora_update_step", "llama3_2/5M_to_1M_KD_update_step"):
        kernels = [name.split()[1:] for name, _ in checks if name.startswith(config)]
        of_bf16, of_fp32 = ([k for dtype, k in kernels if dtype == given] for given in ("bf16", "fp32"))
        assert sorted(of_bf16) == ["by_document", "flex", "varlen"]
        assert sorted(of_fp32) == ["by_document", "flex"]


def test_a_command_that_fails_is_named_with_its_output(monkeypatch, capsys):
    def run(argv, **_):
        failed = "qwen3/5M_full_update_step" in argv
        return SimpleNamespace(returncode=int(failed), stderr="no such kernel" * failed, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "qwen3/5M_full_update_step fp32 null: exit code 1\nno such kernel\n" in printed
    assert printed.count("exit code 0") == 3
    assert printed.endswith("1 commands failed.\n")


def test_the_command_of_the_page_prints_the_largest_kernels_and_the_share_of_products(tmp_path):
    durations = {"nvjet_tst_128x256": 500, "ampere_bf16_gemm": 100, "flash_fwd<cutlass::bfloat16_t>": 300, "copy": 100}
    events = [{"cat": "kernel", "name": name, "dur": us / 2} for name, us in durations.items() for _ in range(2)]
    events += [{"cat": "gpu_user_annotation", "name": "forward", "dur": 9000}, {"name": "process_name"}]
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    command = re.search(r"<<'END'\n(.*?)\nEND\n", PAGE.read_text(), re.S)[1]
    printed = subprocess.run([sys.executable, "-c", command, trace], capture_output=True, text=True, check=True).stdout
    first, *_, last = printed.splitlines()
    assert first.split() == ["50.0%", "0.50", "ms", "nvjet_tst_128x256"]
    assert last == "products: 60.0% of 1.0 ms in kernels"


def test_a_missing_gpu_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "--device cuda: PyTorch finds none; on a CPU use --device cpu" in capsys.readouterr().err
