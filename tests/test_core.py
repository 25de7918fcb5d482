"""The core imports PyTorch and NumPy: not torchtune, no config, no model library."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

CORE = {
    "losses": "chunks cross_entropy log_probs",
    "parallel": "*",
    "plans": "*",
    "text": "collator documents limits reader row_tensors samples trees",
    "update_steps": "*",
}
"""Files of the core by package: all but config keys and commands, or some."""
NOT_CORE = {"settings", "__init__", "__main__"}
FOREIGN = {"omegaconf", "pydantic", "safetensors", "torchao", "torchtune", "transformers"}
LOOP = """
import torch
from recipe_utils.losses import LinearCrossEntropyLoss
from recipe_utils.parallel import gradient_sync, join_ranks, to_device_ahead
from recipe_utils.text import MicrobatchSettings, RowCollator
from recipe_utils.update_steps import CheckedDataset, RowBudget, ShuffledOrder, UpdateStepLoader, mark_last

ranks, collator = join_ranks(), RowCollator(MicrobatchSettings("packed", max_tokens_per_microbatch=8))
dataset = CheckedDataset([{"tokens": [1, 2, 3], "labels": [-100, 2, 3]}] * 8, "dataset", collator.prepare)
loader = UpdateStepLoader(dataset, ShuffledOrder(8, 4), RowBudget(collator), ranks, ranks.prefetch_group, num_workers=1)
embeddings, output, loss_fn = torch.nn.Embedding(4, 8), torch.nn.Linear(8, 4, bias=False), LinearCrossEntropyLoss()
with loader.epoch(0) as steps:
    for step in steps:
        for microbatch, is_last in mark_last(to_device_ahead(step.microbatches, ranks.device)):
            with gradient_sync(output, is_last):
                loss = loss_fn(output, embeddings(microbatch.inputs["tokens"]), microbatch.targets)
                (loss * step.scale("target_tokens")).backward()
ranks.leave()
"""


def test_the_core_imports_and_runs_without_torchtune_pydantic_and_omegaconf():
    names = [
        f"recipe_utils.{package}.{path.stem}"
        for package, stems in CORE.items()
        for path in sorted((ROOT / "recipe_utils" / package).glob("*.py"))
        if path.stem in stems.split() or (stems == "*" and path.stem not in NOT_CORE)
    ]
    assert len(names) >= 30
    code = f"import importlib, sys\n[*map(importlib.import_module, {names})]\n{LOOP}\n"
    code += f"print(sorted({FOREIGN} & {{name.partition('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr
