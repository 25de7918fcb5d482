"""A vision transformer is saved and loaded as transformers' own, with its heads in a file beside it."""

import json
import shutil

import pytest
import tiny_vit
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_vit import MODEL, images_of, row_of

from recipe_utils.checkpoint.export import ExportError, export
from recipe_utils.dinov3.checkpoint import HEADS, DINOv3Checkpointer, dinov3_hf_to_tune, dinov3_tune_to_hf

GATED = {"use_gated_mlp": True, "num_registers": 0, "num_channels": 1}
OF_HEADS = {"output.cls.weight": torch.randn(8, 32), "output.patch.0.bias": torch.randn(8)}


def checkpointer_of(tmp_path, checkpoint_dir=None, changed=(), **options):
    checkpoint_dir = None if checkpoint_dir is None else str(checkpoint_dir)
    return DINOv3Checkpointer(checkpoint_dir, str(tmp_path / "out"), {**MODEL, **dict(changed)}, **options)


def exported(tmp_path, model, changed=(), heads=(), **options):
    contents = {"model": {**model.state_dict(), **dict(heads)}}
    return export(checkpointer_of(tmp_path, None, changed, **options), contents, "exported")


def equal(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def assert_equal_states(model, theirs):
    images = images_of(2, 12, 16, num_channels=model.arguments["num_channels"])
    expected = theirs.eval()(images).last_hidden_state
    found = model(**row_of(model, images)).view_as(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changed", [{}, GATED], ids=["plain", "gated"])
def test_transformers_loads_the_exported_folder_and_computes_the_same(tmp_path, changed):
    model = tiny_vit.tiny_vit(**changed)
    folder = exported(tmp_path, model, changed, OF_HEADS)
    theirs, report = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == "DINOv3ViTModel"
    assert not any(report.values())
    assert_equal_states(model, theirs)


@pytest.mark.parametrize("changed", [{}, GATED], ids=["plain", "gated"])
def test_what_transformers_saves_is_loaded_and_computes_the_same(tmp_path, changed):
    theirs = tiny_vit.of_transformers(tiny_vit.tiny_vit(seed=3, **changed))
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert (tmp_path / "saved/model.safetensors.index.json").exists()
    model = tiny_vit.tiny_vit(seed=0, **changed)
    loaded = checkpointer_of(tmp_path, tmp_path / "saved", changed).load_checkpoint()
    model.load_state_dict(loaded["model"])
    assert_equal_states(model, theirs)


@pytest.mark.parametrize("changed", [{}, GATED], ids=["plain", "gated"])
def test_names_of_either_version_are_read(changed):
    weights = tiny_vit.tiny_vit(**changed).state_dict()
    published = dinov3_tune_to_hf(weights, changed.get("num_channels", 3))
    newer = {n.replace("layer.", "model.layer.", 1): weight for n, weight in published.items()}
    assert equal(dinov3_hf_to_tune(published), weights)
    assert equal(dinov3_hf_to_tune(newer), weights)


@pytest.mark.parametrize("convert", [dinov3_hf_to_tune, dinov3_tune_to_hf])
def test_a_name_of_no_backbone_is_refused(convert):
    with pytest.raises(ValueError, match=r"classifier\.weight: it is no weight"):
        convert({"classifier.weight": torch.zeros(2, 2)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_keep_their_precision_and_heads_are_saved_beside_the_backbone(tmp_path, dtype):
    model = tiny_vit.tiny_vit(dtype=dtype)
    folder = exported(tmp_path, model, heads=OF_HEADS)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", HEADS, "model.safetensors", "preprocessor_config.json",
    ]  # fmt: skip
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype)[6:]
    assert equal(load_file(folder / HEADS), OF_HEADS)
    loaded = checkpointer_of(tmp_path, folder).load_checkpoint()["model"]
    assert equal(loaded, {**model.state_dict(), **OF_HEADS})
    without = exported(tmp_path, model)
    assert equal(checkpointer_of(tmp_path, without).load_checkpoint()["model"], model.state_dict())
    assert checkpointer_of(tmp_path).load_checkpoint() == {"model": {}}


def test_images_are_described_by_the_config_or_the_given_folder(tmp_path):
    model = tiny_vit.tiny_vit()

    def described(folder):
        return json.loads((folder / "preprocessor_config.json").read_text())

    fresh = described(exported(tmp_path, model))
    assert fresh["image_mean"] == [0.485, 0.456, 0.406]
    assert fresh["size"] == {"height": 224, "width": 224}
    own = {"image_size": 16, "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}
    folder = exported(tmp_path, model, **own)
    assert described(folder)["image_mean"] == [0.1, 0.2, 0.3]
    assert described(folder)["size"]["height"] == 16
    start = tmp_path / "start"
    shutil.copytree(folder, start)
    again = export(checkpointer_of(tmp_path, start), {"model": model.state_dict()}, "again")
    assert described(again) == described(start)
    assert json.loads((again / "config.json").read_text())["image_size"] == 16
    grey = exported(tmp_path, tiny_vit.tiny_vit(**GATED), GATED)
    assert described(grey)["do_normalize"] is False


# ---- Refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "described", "message"),
    [
        ({"num_heads": 4}, {}, r"model\.num_heads=4: .* has num_attention_heads 2; set model\.num_heads=2"),
        ({"rope_base": 10.0}, {}, r"model\.rope_base=10\.0: .* has rope_theta 100\.0"),
        ({"use_gated_mlp": True}, {}, r"model\.use_gated_mlp=True: .* has use_gated_mlp False"),
        ({}, {"model_type": "dinov2"}, "its model_type is dinov2, not dinov3_vit"),
        ({}, {"key_bias": True}, "its key_bias is True, the model here has False only"),
        ({}, {"hidden_act": "relu"}, "its hidden_act is relu, the model here has gelu only"),
    ],
)  # fmt: skip
def test_a_folder_of_another_model_is_refused_before_it_is_read(tmp_path, changed, described, message):
    path = exported(tmp_path, tiny_vit.tiny_vit()) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **described}))
    path.with_name("model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        checkpointer_of(tmp_path, path.parent, changed)


def test_files_that_are_missing_broken_or_incomplete_are_named(tmp_path):
    folder = exported(tmp_path, tiny_vit.tiny_vit())
    with pytest.raises(ValueError, match=r"has no other\.safetensors"):
        checkpointer_of(tmp_path, folder, checkpoint_files=["other.safetensors"])
    weights = load_file(folder / "model.safetensors")
    weights.pop("layer.1.layer_scale1.lambda1")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"it lacks layers\.1\.sa_scale\.scale"):
        checkpointer_of(tmp_path, folder).load_checkpoint()
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"its model\.safetensors cannot be read"):
        checkpointer_of(tmp_path, folder).load_checkpoint()
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"its config\.json cannot be read"):
        checkpointer_of(tmp_path, folder)
    with pytest.raises(ValueError, match=r"nowhere: its config\.json cannot be read"):
        checkpointer_of(tmp_path, tmp_path / "nowhere")


def test_what_is_no_model_of_this_kind_is_not_exported(tmp_path):
    weights = tiny_vit.tiny_vit(embed_dim=64).state_dict()
    with pytest.raises(ExportError, match=r"its shapes differ: .* instead of"):
        export(checkpointer_of(tmp_path), {"model": weights}, "exported")
    assert not (tmp_path / "out/exported").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_mean": [0.5, 0.5, 0.5]}, r"image_mean=\[0\.5, 0\.5, 0\.5\]: image_std=None; set"),
        ({"changed": {"_component_": "torch.nn.Identity"}}, "it makes a Identity; set it to"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        checkpointer_of(tmp_path, **options)
