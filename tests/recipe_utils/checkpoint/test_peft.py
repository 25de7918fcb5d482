import torch
from safetensors.torch import load_file
from torchtune.training import FullModelHFCheckpointer, ModelType

from recipe_utils.checkpoint.peft import from_peft, write_peft


def test_adapters_come_back_from_peft_s_file_as_they_were(tmp_path):
    shapes = {"lora_a.weight": (2, 16), "lora_b.weight": (16, 2), "magnitude": (16,)}
    adapters = {
        f"layers.1.{module}.{part}": torch.randn(shape)
        for module in ("attn.q_proj", "attn.k_proj", "attn.output_proj", "mlp.w1")
        for part, shape in shapes.items()
    }
    described = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"}
    for model_type in (ModelType.LLAMA3_2, ModelType.QWEN2):
        checkpointer = FullModelHFCheckpointer.__new__(FullModelHFCheckpointer)
        vars(checkpointer).update(
            _model_type=model_type,
            _config={"num_attention_heads": 4, "num_key_value_heads": 2},
            repo_id="of/base",
        )
        path = tmp_path / "adapter_model.safetensors"
        path.touch()
        write_peft(tmp_path, checkpointer, adapters, described)
        found = from_peft({**load_file(path), "base.weight": torch.ones(1)}, adapters, checkpointer)
        assert found.keys() == adapters.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in adapters.items())
