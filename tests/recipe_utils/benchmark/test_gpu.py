import json
import re

import pytest

from recipe_utils.benchmark import gpu
from recipe_utils.benchmark.gpu import STAGES, main

SMALL = ["--device", "cpu", "--small"]


@pytest.mark.slow
def test_all_stages_run_in_small_on_a_cpu_and_no_check_fails(tmp_path, capsys):
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == list(STAGES)
    checks = results["gradients"]["output"]
    assert [name.split()[0].split("/5M_")[1] for name in checks] == [
        "full_update_step", "full_update_step", "lora_update_step", "to_1M_KD_update_step",
    ]  # fmt: skip
    for printed in checks.values():
        assert printed[-1] == "Equal to single samples within the precision of fp32."
    printed = capsys.readouterr().out
    assert len(re.findall(r"^ +[0-9.]+ ms +[0-9]+ x  \S", printed, re.M)) == 10
    kernels = results["profile"]["kernels_ms"]
    shares = dict(re.findall(r"(\w+) ([0-9.]+)%", results["profile"]["lines"][1]))
    products = sum(time for name, time in kernels.items() if name in ("aten::mm", "aten::addmm", "aten::bmm"))
    assert float(shares["products"]) == pytest.approx(100 * products / sum(kernels.values()), abs=0.1)
    assert sum(map(float, shares.values())) == pytest.approx(100, abs=0.3)


def raises(run):
    raise RuntimeError("no such kernel")


def fails(run):
    return {"failures": ["exit code 2", "exit code 3"]}


def test_stages_that_raise_or_fail_are_named_and_the_others_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "STAGES", {"first": raises, "second": fails, "third": raises})
    assert main([*SMALL, "--out", str(tmp_path), "--stages", "first,second"]) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found) == ["first", "second"]
    assert "in raises" in found["first"]["raised"]
    printed = capsys.readouterr().out
    assert "FAILED first: RuntimeError: no such kernel" in printed
    assert "FAILED second: exit code 2\nFAILED second: exit code 3" in printed
    with pytest.raises(SystemExit):
        main([*SMALL, "--stages", "first,fourth"])
    assert "there is no fourth; there are first, second, third" in capsys.readouterr().err
