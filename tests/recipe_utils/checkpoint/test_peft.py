"""Exported adapters have the names, rows and config that PEFT computes the same with."""

import json

import peft
import pytest
import tiny
import torch
from omegaconf import OmegaConf
from recipe_runs import DPO, KD, SFT, run_recipe, slow
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import config
from torchtune.models.convert_weights import tune_to_hf
from torchtune.models.gemma2._convert_weights import gemma2_tune_to_hf
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
from torchtune.modules.peft import get_adapter_params
from torchtune.training import FullModelHFCheckpointer
from transformers import AutoModelForCausalLM

from recipe_utils.checkpoint.export import export
from recipe_utils.checkpoint.peft import load_checkpoint
from recipe_utils.models.adapters.adapted_linear import speed_up_adapters
from recipe_utils.models.adapters.lora import find_adapters, freeze_base
from recipe_utils.models.adapters.merge import contents_of_export

QWEN2 = {
    **{key: value for key, value in tiny.MODEL.items() if key != "scale_factor"},
    "_component_": "torchtune.models.qwen2.qwen2",
    "tie_word_embeddings": False,
}
# torchtune caps hidden states, transformers logits; here neither does.
GEMMA2 = {**tiny.GEMMA2_MODEL, "final_capping_value": 1e6}
GEMMA = {**tiny.GEMMA2_MODEL, "_component_": "torchtune.models.gemma.gemma"}
MODELS = {  # torchtune's model, converter and name of its type
    "llama": (tiny.MODEL, tune_to_hf, "LLAMA3_2"),
    "qwen2": (QWEN2, qwen2_tune_to_hf, "QWEN2"),
    "gemma": (GEMMA, tune_to_hf, "GEMMA"),
    "gemma2": (GEMMA2, gemma2_tune_to_hf, "GEMMA2"),
}


def hugging_face_config(sizes, kind):
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": sizes["vocab_size"],
        "hidden_size": sizes["embed_dim"],
        "intermediate_size": sizes["intermediate_dim"],
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_kv_heads"],
        "head_dim": sizes.get("head_dim", sizes["embed_dim"] // sizes["num_heads"]),
        "max_position_embeddings": 64,
        "rope_theta": {"qwen2": 1_000_000.0, "llama": 500_000.0}.get(kind, 10_000.0),
        "rms_norm_eps": 1e-6 if "gemma" in kind else 1e-5,
        "tie_word_embeddings": kind != "qwen2",
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "float32",
    }


def write_base(folder, weights, sizes, kind="llama"):
    """Writes a model of torchtune's as a folder of Hugging Face's."""
    hf_config = hugging_face_config(sizes, kind)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config))
    heads = {"num_heads": sizes["num_heads"], "num_kv_heads": sizes["num_kv_heads"]}
    of_head = {} if kind == "qwen2" else {"head_dim": hf_config["head_dim"]}
    converted = MODELS[kind][1](weights, dim=sizes["embed_dim"], **heads, **of_head)
    converted = {name: weight.contiguous() for name, weight in converted.items()}
    save_file(converted, folder / "model.safetensors", metadata={"format": "pt"})


KINDS = [
    (kind, use_dora) if use_dora == bool(i % 2) else slow((kind, use_dora))
    for i, kind in enumerate(MODELS)
    for use_dora in (False, True)
]


@pytest.fixture(params=KINDS, ids=str)
def exported(request, tmp_path):
    """Returns an adapted model, its base in Hugging Face's format, and its export."""
    kind, use_dora = request.param
    sizes, _, model_type = MODELS[kind]
    base = config.instantiate(OmegaConf.create(sizes))
    model = config.instantiate(OmegaConf.create(tiny.adapted(sizes, use_dora=use_dora)))
    generator = torch.Generator().manual_seed(0)
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.1, generator=generator)
    model.load_state_dict(base.state_dict(), strict=False)
    for name, parameter in get_adapter_params(model).items():
        nn.init.normal_(parameter, 1.0 if "magnitude" in name else 0.0, 0.2, generator=generator)

    write_base(tmp_path / "base", base.state_dict(), sizes, kind)
    checkpointer = FullModelHFCheckpointer(
        str(tmp_path / "base"), ["model.safetensors"], model_type, str(tmp_path / "out")
    )
    checkpointer.load_checkpoint()
    freeze_base(model)
    speed_up_adapters(model, torch.optim.SGD(model.parameters()))
    adapters = find_adapters(model)
    trained = {name: p.detach() for name, p in model.state_dict().items()}
    contents, lost = contents_of_export(dict(trained), adapters, None)
    assert lost < 1e-6
    return model, tmp_path / "base", export(checkpointer, contents, "epoch_0")


load = AutoModelForCausalLM.from_pretrained


def logits_of_export(base_folder, folder, tokens):
    """Returns the logits of the merged model, and of its base with the adapters."""
    plain = load(folder)
    with_peft = peft.PeftModel.from_pretrained(load(base_folder), folder / "adapter")
    return plain(tokens).logits, with_peft(tokens).logits


@torch.no_grad()
def test_peft_and_a_plain_load_compute_the_model_s_logits(exported):
    model, base_folder, folder = exported
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(1))
    described = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base_folder)
    assert (described["r"], described["lora_alpha"], described["bias"]) == (4, 6, "none")
    assert len(described["target_modules"]) == 7
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 14 * (3 if described["use_dora"] else 2)
    plain, with_peft = logits_of_export(base_folder, folder, tokens)
    assert (with_peft - plain).abs().max() < 1e-5
    assert (with_peft - model(tokens)).abs().max() < 1e-5


TRAININGS = {
    "lora": (SFT, tiny.adapted(tiny.MODEL)),
    "dora": (SFT, tiny.adapted(tiny.MODEL, use_dora=True)),
    "qlora": (SFT, tiny.adapted(tiny.WIDE_MODEL, quantize_base=True)),
    "dpo": (DPO, tiny.adapted(tiny.MODEL)),
    "kd": (KD, tiny.adapted(tiny.MODEL)),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["lora", "dora", "qlora", *map(slow, ("dpo", "kd"))])
def test_an_exported_folder_is_opened_as_it_is(kind, tiny_config, tiny_dpo_config, tiny_kd_config, tmp_path):
    """transformers would apply the adapters again if ``adapter_config.json`` were beside a merged model."""
    recipe, sizes = TRAININGS[kind]
    base = tiny.tiny_model(tiny.base_of(sizes)).state_dict()
    write_base(tmp_path / "base", base, sizes)
    checkpointer = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(tmp_path / "base"),
        "checkpoint_files": ["model.safetensors"],
        "model_type": "LLAMA3_2",
    }
    make = {SFT: tiny_config, DPO: tiny_dpo_config, KD: tiny_kd_config}[recipe]
    with torch.enable_grad():
        run_recipe(make(model=sizes, checkpointer=checkpointer, max_steps_per_epoch=4), recipe)
    folder = tmp_path / "out" / "epoch_0"
    assert not list(folder.glob("adapter_*"))

    given = {"output_dir": tmp_path / "out", "adapter_checkpoint": "epoch_0/adapter/adapter_model.pt"}
    stock = config.instantiate(OmegaConf.create(checkpointer), output_dir=str(tmp_path / "out"))
    trained = load_checkpoint(stock, given)["adapter"]
    model = config.instantiate(OmegaConf.create(sizes))
    model.load_state_dict({**base, **trained})
    tokens = torch.randint(tiny.VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(1))
    quantized = {name: p.get_original_weight() for name, p in model.named_parameters() if isinstance(p, NF4Tensor)}
    write_base(tmp_path / "as_multiplied", {**base, **quantized}, sizes)
    plain, with_peft = logits_of_export(tmp_path / "as_multiplied", folder, tokens)
    assert (plain - load(tmp_path / "as_multiplied")(tokens).logits).abs().max() > 1e-2
    own = model(tokens)
    assert (plain - own).abs().max() < 1e-5 * own.abs().max()
    assert (with_peft - own).abs().max() < 1e-5 * own.abs().max()
