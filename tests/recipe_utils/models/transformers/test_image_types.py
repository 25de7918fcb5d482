"""Rows with images, of each image-text type of transformers: gradients of text, projector and tower are those of samples."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from decoder_types import tiny_config_of
from distributed_runs import run_distributed
from image_folders import write_image_folder
from image_types import TYPES, gradients_of_row, gradients_one_by_one, samples_of, tiny_image_config_of
from recipe_runs import slow
from torchtune.training import set_default_dtype
from transformers.masking_utils import and_masks, remap_positions_for_packed_sequence

from recipe_utils.models.construct import build_on_meta
from recipe_utils.models.pipeline.stages import layers_of_stages
from recipe_utils.models.settings import ModelSettings
from recipe_utils.models.sizes import limits_of
from recipe_utils.models.transformers import masks
from recipe_utils.models.transformers.causal_lm import causal_lm
from recipe_utils.models.transformers.decoder import Decoder
from recipe_utils.models.transformers.image_check import ImageComparison
from recipe_utils.models.transformers.interface import PackingCheck
from recipe_utils.models.transformers.packing_check import DoublePrecision, cached_packing_check, copies, difference
from recipe_utils.parallel.fsdp import shard_model
from recipe_utils.parallel.ranks import ParallelDims, build_mesh
from recipe_utils.settings.problems import ConfigError
from recipe_utils.text.images.sample import Join
from recipe_utils.text.limits import ModelLimits, RowBounds
from recipe_utils.text.reader import TextReader
from recipe_utils.text.row_tensors import packed, padded
from recipe_utils.text.trees import apart

FAST = ("qwen3_vl", "gemma3", "llava", "smolvlm", "lfm2_vl")
EXACT = 1e-10
"""Norms and softmaxes of towers pass through fp64 sums of up to 1e5 numbers; the smallest mutant differs by 1e-2."""


@contextmanager
def compared(name):
    """Yields the comparison of a type's rows with its samples one at a time, and an exact check, in float64."""
    with set_default_dtype(torch.float64), torch.random.fork_rng(), DoublePrecision():
        config = tiny_image_config_of(name)
        make = copies(config, None, torch.float64)
        samples = samples_of(name, make())
        expected, of_tree = (gradients_one_by_one(make(), some) for some in (samples[:4], samples[3:]))
        comparison = ImageComparison(make, samples, expected, of_tree, ())
        joins = {n: TYPES[name].joins.get(n, Join(0)) for n in samples[0].images.pixels[0].tensors}
        # Most types need no more than attention within documents; others are asked for what they need.
        check = PackingCheck(head_is_tail=True, splits_attention=True, computes_trees=True, joins=joins)
        if comparison.error(check, comparison.packed) > EXACT:
            check = replace(cached_packing_check(config), joins=joins)
        yield comparison, check


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in TYPES])
def test_rows_with_images_have_the_gradients_of_their_samples(name):
    """Four samples with 1, 0, 2 and 1 images, of other sizes where the type has any; of the last two, one image is shared."""
    with compared(name) as (comparison, check):
        assert comparison.error(check, comparison.packed) < EXACT
        assert comparison.error(replace(check, splits_attention=False), comparison.packed) < EXACT
        assert comparison.error(check, padded) < EXACT
        assert comparison.error_of_tree(check) < EXACT


def test_the_page_has_the_number_of_types():
    page = Path(masks.__file__).parents[1] / "README.md"
    num_types = len({kind.model_type or name for name, kind in TYPES.items()})
    assert f"{len(TYPES)} tiny models of {num_types} types" in " ".join(page.read_text().split())


@pytest.mark.parametrize("name", ["smolvlm", slow("llava_next"), slow("minicpmv4_6")])
def test_the_way_to_join_images_of_samples_is_found(name):
    with compared(name) as (comparison, check):
        assert comparison.joins(check)["pixel_values"] == check.joins["pixel_values"]


# In bf16 on a CPU with AMX, the weight gradient of a convolution of a single position reads memory that nobody has written
# (torch 2.13 and 2.14): got_ocr2's projector at these sizes.
@pytest.mark.parametrize("name", ["aria", *map(slow, sorted(TYPES.keys() - {"aria", "got_ocr2"}))])
def test_a_tower_computes_in_the_dtype_of_its_weights(name):
    """Processors make fp32; the row in bf16 is as far from fp32 as a row with pixels in bf16."""
    with set_default_dtype(torch.float32), torch.random.fork_rng():
        make = copies(tiny_image_config_of(name), None, torch.float32)
        samples, made = samples_of(name, make())[:3], []
    joins = {n: TYPES[name].joins.get(n, Join(0)) for n in samples[0].images.pixels[0].tensors}
    reader = TextReader(bounds=RowBounds(limits=ModelLimits(joins=joins)))
    for dtype in (torch.float32, torch.bfloat16):
        model, row = make(), padded(samples, reader)
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        row.inputs["images"] = {
            key: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for key, tensor in row.inputs["images"].items()
        }
        made.append(gradients_of_row(Decoder(model, PackingCheck(head_is_tail=True, joins=joins)), row))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(gradient, made[1][key]) for key, gradient in made[0].items())


# ---- Ranks without images ----------------------------------------------------------------------------


def gradients_of_ranks(name):
    """Returns the gradients of two sharded ranks, of which the second has a text alone, and those of one sample at a time."""
    with compared(name) as (comparison, check):
        decoder = Decoder(comparison.make(), check)
        for parameter_name, parameter in decoder.model.named_parameters():
            parameter.requires_grad_(parameter_name in comparison.expected)
        mesh = build_mesh(torch.device("cpu"), ParallelDims(dp_replicate=1, dp_shard=2, tp=1))
        options = {"custom_sharded_layers": None, "cpu_offload": False, "reshard_after_forward": True}
        shard_model(decoder, mesh, **options, of_root=decoder.of_images())
        samples = [comparison.samples[index] for index in ((0, 2, 3), (1,))[mesh.get_local_rank("dp_shard")]]
        reader = TextReader(bounds=RowBounds(limits=ModelLimits(joins=check.joins)))
        gradients_of_row(decoder, packed(apart(samples), reader))
        computed = {n: 2 * p.grad.full_tensor() for n, p in decoder.model.named_parameters() if p.requires_grad}
        return difference(computed, comparison.expected)


@pytest.mark.parametrize("name", ["llava", slow("smolvlm"), slow("qwen3_vl"), slow("gemma3")])
def test_a_rank_without_images_takes_part_in_the_gradients_of_the_tower(name):
    """Units of FSDP2 are those of text, and the rank adds zero times its parameters."""
    assert max(run_distributed(gradients_of_ranks, 2, name, timeout_seconds=120)) < EXACT


# ---- Refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("mllama", "text of model_type=mllama attends to the images of all samples of a row"),
        ("udop", "model_type=udop attends both ways in its inputs, and only decoders are trained"),
        ("qwen3", "transformers has no model of images and text for model_type=qwen3"),
        ("instructblip", "model_type=instructblip needs pixel_values and qformer_input_ids in each forward, also for texts"),
        slow("chameleon", "images=True: Chameleon.* makes tokens of images, .*; set model.images=False to train"),
        ("emu3", "images=True: Emu3.* makes tokens of images, .*; set model.images=False to train"),
        ("llama4", r"model: Llama4.* of transformers .* cannot compute texts .*; set model.images=False$"),
    ],
)  # fmt: skip
def test_models_that_take_no_images_in_rows_are_refused(model_type, text, tmp_path):
    write_image_folder(tmp_path, "llava")
    config = tiny_config_of(model_type)
    if hasattr(config, "vocabulary_map"):
        config.vocabulary_map = {"<image>": 5, "IMGIMGA": 6}
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        with pytest.raises(ValueError, match=text):
            causal_lm(str(tmp_path), images=True)
        if text.partition("; ")[2].startswith("set model.images=False"):
            assert causal_lm(str(tmp_path))


def test_images_are_not_cut_and_towers_are_no_units(tmp_path):
    """A module of the tower as a unit of FSDP2 would wait for ranks without images."""
    made = partial(causal_lm, str(write_image_folder(tmp_path, "qwen2_vl")), images=True)
    decoder = build_on_meta(made, ModelSettings(custom_sharded_layers=["model.lm_head"]))
    with pytest.raises(ValueError, match="Qwen2VLForConditionalGeneration with images cannot be cut into stages"):
        layers_of_stages(decoder, 2)
    with pytest.raises(ConfigError, match=r"takes images, which are not cut, .*; remove max_ranks_per_row"):
        limits_of(decoder, torch.device("cpu")).multiple_of_packed_rows(64, ("", ""), 2)
    with pytest.raises(
        ConfigError, match=r"custom_sharded_layers=model\.model\.visual: ranks without images would not"
    ):
        build_on_meta(made, ModelSettings(custom_sharded_layers=["model.model.visual"]))


# ---- Wrong rows --------------------------------------------------------------------------------------


def positions_of_text_alone(inputs):
    inputs["input_pos"] = inputs["input_pos"][0]


def no_token_types(inputs):
    del inputs["images"]["token_type_ids"]


def two_images_exchanged(inputs):
    pixels = inputs["images"]["pixel_values"]
    inputs["images"]["pixel_values"] = pixels[[1, 0, *range(2, len(pixels))]]


def patches_reversed(inputs):
    inputs["images"]["pixel_values"] = inputs["images"]["pixel_values"].flip(0)


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("qwen3_vl", positions_of_text_alone),
        ("qwen3_vl", patches_reversed),
        ("gemma3", no_token_types),
        ("gemma3", two_images_exchanged),
        slow("qwen2_5_vl", positions_of_text_alone),
        slow("llava", two_images_exchanged),
    ],
)
def test_a_wrong_row_is_noticed(name, mutate):
    with compared(name) as (comparison, check):
        assert comparison.error(check, comparison.packed) < EXACT
        assert comparison.error(check, comparison.packed, mutate) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)])
def test_a_kernel_beside_images_is_compared_on_the_device_in_the_dtype_of_training(dtype, monkeypatch, tmp_path):
    """The device is a CPU here. A kernel that mixes documents behind a mask of images is right for texts."""
    with set_default_dtype(dtype), torch.device("meta"):
        decoder = causal_lm(str(write_image_folder(tmp_path / "folder", "gemma3")), images=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert decoder.error_on(torch.device("cpu"), "by_document") is None
    monkeypatch.setattr(masks, "and_masks", blocks_of_the_document)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert "gradients differ by" in decoder.error_on(torch.device("cpu"), "by_document")


def blocks_of_the_document(is_seen, own):
    """As transformers has them for Gemma 3 and 4: the block of an image is looked up at the positions of its document."""
    return and_masks(is_seen, remap_positions_for_packed_sequence(own, masks.ROWS.get().positions))


@pytest.mark.parametrize("name", ["gemma3", slow("gemma4")])
def test_blocks_of_images_at_positions_of_the_document_are_noticed(name, monkeypatch):
    with compared(name) as (comparison, check):
        monkeypatch.setattr(masks, "and_masks", blocks_of_the_document)
        assert comparison.error(check, comparison.packed) > 1e-2
