"""Views of an image are equal on any layout; rows contain what their targets describe."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed_runs import run_distributed
from torch.utils.data import Dataset

from recipe_utils.data.loaders import build_loader
from recipe_utils.dinov3.images.crop_rows import CLASS, TokenLayout, global_crops
from recipe_utils.dinov3.images.multi_crop import MultiCrop
from recipe_utils.dinov3.images.view_draws import mask_ratios
from recipe_utils.dinov3.images.views import (
    ImageCollator,
    ViewCollator,
    Views,
    ViewSettings,
    WholeImages,
)
from recipe_utils.parallel.settings import RankSettings
from recipe_utils.update_steps.loader import RowBudget
from recipe_utils.update_steps.order import OnRank, ShuffledOrder, StepIndex
from recipe_utils.update_steps.permutation import epoch_permutation
from recipe_utils.update_steps.samples import CheckedDataset, SampleError, load_samples
from recipe_utils.update_steps.settings import DataSettings

CROPS = {
    "global_crop_size": 16,
    "local_crop_size": 8,
    "num_local_crops": 3,
    "mean": [0.4, 0.5, 0.6],
    "std": [0.2, 0.3, 0.4],
}
COMPONENT = {"_component_": "recipe_utils.dinov3.MultiCrop", **CROPS}
LAYOUT = TokenLayout(patch_size=4, num_channels=3, num_registers=2, num_draws=4)
NUM_IMAGES = 37
P, G, L = 16, 1 + 2 + 16, 1 + 2 + 4


class NamedViews(ViewCollator):
    """Adds the names of the images to the inputs."""

    @staticmethod
    def prepare(sample, name, at):
        return {**sample, "name": name}

    def collate(self, samples):
        (made,) = super().collate(samples)
        made.inputs["names"] = [sample["name"] for sample in samples]
        return [made]


class Pictures(Dataset):
    def __init__(self, num=NUM_IMAGES, bad=(), dtype=np.float32, has_labels=True):
        self.num, self.bad, self.dtype, self.has_labels = num, bad, dtype, has_labels

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        shape = (3, 12 + index % 5, 20)
        image = np.random.default_rng(index).random(shape).astype(self.dtype)
        label = {"label": index % 10} if self.has_labels else {}
        bad = np.full(shape, np.nan)
        return {"image": bad if index in self.bad else image, "name": f"{index}.png", **label}


def settings_of(**keys):
    return ViewSettings(transform=COMPONENT, **{"koleo_group_size": 4, "rope_rescale": 2.0, **keys})


def views_of(dataset=None, layout=LAYOUT, **keys):
    return Views(dataset or Pictures(), MultiCrop(**CROPS), settings_of(**keys), layout, seed=7)


def make_loader(dataset=None, ranks=(), layout=LAYOUT, keys=(), **data):
    keys = dict(keys)
    settings = DataSettings(**{"batch_size": 4, "global_batch_size": 16, **data})
    ranks = RankSettings(device="cpu", **dict(ranks)).join()
    budget = RowBudget(NamedViews(settings, settings_of(**keys), layout))
    return build_loader(views_of(dataset, layout, **keys), budget, settings, ranks)


def images_of(microbatch):
    """Returns the bytes of each image's part of the row, by name."""
    targets, inputs = microbatch.targets, microbatch.inputs
    found = {}
    starts = targets.cls_positions.tolist()
    for image, name in enumerate(inputs["names"]):
        of_local = 2 * targets.num_images + targets.num_local_crops * image
        crops = [(start, G) for start in starts[2 * image : 2 * image + 2]]
        crops += [(start, L) for start in starts[of_local : of_local + targets.num_local_crops]]
        assert len(crops) == 5
        found[name] = b"".join(
            inputs[key][0, start : start + length].numpy().tobytes()
            for start, length in crops
            for key in ("tokens", "input_pos")
        )
    return found


def groups_of(microbatch):
    names = np.array(microbatch.inputs["names"])
    groups = microbatch.targets.koleo_groups.tolist()
    assert groups == sorted(groups)
    return [tuple(names[np.equal(groups, group)].tolist()) for group in sorted(set(groups))]


def steps_of(loader, epoch=1, samples_consumed=0):
    """Returns images, groups and totals of each update step."""
    found = []
    with loader.epoch(epoch, samples_consumed) as steps:
        for step in steps:
            real = [microbatch for microbatch in step.microbatches if microbatch.counts]
            images = {}
            for microbatch in real:
                images |= images_of(microbatch)
            groups = sorted(group for microbatch in real for group in groups_of(microbatch))
            found.append((images, groups, dict(step.totals)))
    return found


def steps_of_a_rank(changes=()):
    return steps_of(make_loader(**dict(changes)))


@pytest.fixture(scope="module")
def whole_steps():
    (steps,) = run_distributed(steps_of_a_rank, 1)
    return steps


def joined(ranks):
    """Returns the steps of all ranks together."""
    steps = []
    for of_ranks in zip(*ranks, strict=True):
        images = {name: bytes_ for step in of_ranks for name, bytes_ in step[0].items()}
        groups = sorted({group for step in of_ranks for group in step[1]})
        assert all(step[2] == of_ranks[0][2] for step in of_ranks)
        steps.append((images, groups, of_ranks[0][2]))
    return steps


# ---- The same wherever they are made --------------------------------------------------------------

LAYOUTS = {
    "4 ranks": (4, {}),
    "2 ranks, whole at once": (2, {"batch_size": 8}),
    "2 workers": (1, {"batch_size": 16, "num_workers": 2}),
    "2 ranks with a worker, not ahead": (2, {"prefetch_update_steps": 0, "num_workers": 1}),
    "2 stages, which have the same images": (2, {"ranks": {"pipeline_parallel_dim": 2}}),
}


@pytest.mark.parametrize(("num_ranks", "changes"), LAYOUTS.values(), ids=LAYOUTS)
def test_views_groups_and_totals_are_the_same_on_any_layout(num_ranks, changes, whole_steps):
    assert joined(run_distributed(steps_of_a_rank, num_ranks, changes)) == whole_steps


def test_every_image_is_in_one_update_step_and_its_group_follows_its_position(whole_steps):
    order = epoch_permutation(NUM_IMAGES, 1, shuffle=True).tolist()
    for number, (images, groups, totals) in enumerate(whole_steps):
        window = order[16 * number : 16 * (number + 1)]
        names = [f"image {index} of dataset" for index in window]
        assert set(images) == set(names)
        assert groups == sorted(tuple(names[i : i + 4]) for i in range(0, len(names), 4))
        assert totals["images"] == len(window)
        assert totals["koleo_images"] == len(window) - (len(window) % 4 == 1)
        assert totals["crop_tokens"] == len(window) * (2 * G + 3 * L)
    assert len(window) == 5


def test_views_depend_on_neither_resume_nor_threads(whole_steps, one_process):
    assert steps_of(make_loader(), samples_consumed=16) == whole_steps[1:]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1 + num_threads)
    try:
        assert steps_of(make_loader(), samples_consumed=32) == whole_steps[2:]
    finally:
        torch.set_num_threads(num_threads)


def test_epochs_seeds_and_images_differ_in_all_draws():
    plain = views_of(Pictures(2))
    base = plain[StepIndex(0, 0, 0, 0, 8)]
    same_image = Pictures(2)
    same_image.__class__ = type("Same", (Pictures,), {"__getitem__": lambda s, i: Pictures()[0]})
    for other in (
        plain[StepIndex(0, 1, 0, 0, 8)],
        Views(Pictures(2), MultiCrop(**CROPS), settings_of(), LAYOUT, seed=8)[0],
        views_of(same_image)[StepIndex(1, 0, 0, 0, 8)],
    ):
        for key in ("global_crops", "local_crops", "draws"):
            assert not np.array_equal(base[key], other[key])
    # The update step and the position change masks and the factor, but no crop.
    elsewhere = plain[StepIndex(0, 0, 3, 5, 8)]
    np.testing.assert_array_equal(base["global_crops"], elsewhere["global_crops"])
    assert base["position_factor"] != elsewhere["position_factor"]


# ---- Masks ----------------------------------------------------------------------------------------


def test_half_of_an_update_step_s_crops_are_masked_each_to_its_ratio(whole_steps):
    for number, (images, _, totals) in enumerate(whole_steps):
        ratios = mask_ratios(7, 1, number, 2 * len(images), 0.5, (0.1, 0.5))
        expected = [round(ratio * P) for ratio in ratios]
        assert (ratios > 0).sum() == len(images)
        assert totals["masked_patches"] == sum(expected)
        order = epoch_permutation(NUM_IMAGES, 1, shuffle=True).tolist()[16 * number :]
        for position, index in enumerate(order[:16]):
            sample = views_of()[StepIndex(index, 1, number, position, len(images))]
            assert sample["masks"].sum(axis=1).tolist() == expected[2 * position : 2 * position + 2]


# ---- Rows -----------------------------------------------------------------------------------------


def collated(num=3, layout=LAYOUT, dtype=np.float32, **keys):
    """Returns a microbatch of the first images of an update step of 8, and the results of :class:`Views`."""
    samples = [views_of(Pictures(dtype=dtype), layout, **keys)[StepIndex(i, 2, 1, i, 8)] for i in range(num)]
    return ViewCollator(DataSettings(batch_size=8), settings_of(**keys), layout).collate(samples)[0], samples


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_patches_are_what_a_convolution_sees_and_global_crops_come_first(dtype):
    microbatch, samples = collated(dtype=dtype)
    tokens = microbatch.inputs["tokens"]
    assert tokens.shape == (1, 6 * G + 9 * L, 1 + 48)
    expected_dtype = torch.from_numpy(np.zeros(1, dtype)).dtype
    assert tokens.dtype == microbatch.inputs["input_pos"].dtype == expected_dtype
    assert microbatch.inputs["crop_groups"] == ((6, G), (9, L))
    weight = torch.randn(5, 3, 4, 4, dtype=tokens.dtype, generator=torch.Generator().manual_seed(0))
    embedded = tokens[0, :, 1:] @ weight.flatten(1).T
    start = 0
    for key, length in (("global_crops", G), ("local_crops", L)):
        crops = torch.from_numpy(np.concatenate([sample[key] for sample in samples]))
        expected = F.conv2d(crops, weight, stride=4).flatten(2).transpose(1, 2)
        end = start + len(crops) * length
        of_crops = embedded[start:end].view(len(crops), length, 5)
        torch.testing.assert_close(of_crops[:, 3:], expected)
        assert not of_crops[:, :3].any()
        start = end
    assert start == tokens.size(1)


def test_a_dummy_has_crops_but_no_targets_and_counts():
    collator = ViewCollator(DataSettings(), settings_of(), LAYOUT)
    dummy = collator.dummy(views_of()[0])
    assert dummy.inputs["crop_groups"] == ((2, G), (3, L))
    assert dummy.counts == {}
    targets = dummy.targets
    assert (targets.num_images, targets.num_local_crops) == (0, 3)
    assert not any(len(each) for each in targets if isinstance(each, torch.Tensor))


def test_without_masks_drop_path_and_groups():
    layout = LAYOUT._replace(num_draws=0, num_registers=0)
    microbatch, _ = collated(layout=layout, mask_probability=0.0, koleo_group_size=None)
    assert microbatch.inputs["input_pos"].size(2) == 2
    assert microbatch.inputs["crop_groups"] == ((6, 17), (9, 5))
    assert len(microbatch.targets.masked_positions) == len(microbatch.targets.masked_weights) == 0
    assert microbatch.counts["masked_patches"] == 0
    # All images of an update step are one group.
    assert microbatch.targets.koleo_groups.tolist() == [0, 0, 0]
    assert microbatch.counts["koleo_images"] == 3
    collator = ViewCollator(DataSettings(), settings_of(koleo_group_size=None), LAYOUT)
    (alone,) = collator.collate([views_of()[0]])
    assert alone.counts["koleo_images"] == 0


# ---- Skipped images, and labeled ones ------------------------------------------------------------


def test_a_bad_image_is_named_and_skipped_without_changing_other_groups(one_process, whole_steps):
    bad = epoch_permutation(NUM_IMAGES, 1, shuffle=True).tolist()[5]
    name = f"image {bad} of dataset"
    with pytest.raises(SampleError, match=f"image {bad} of dataset: image {bad}.png: .*not all finite"):
        steps_of(make_loader(Pictures(bad=(bad,))))
    found = steps_of(make_loader(Pictures(bad=(bad,)), on_bad_sample="skip"))
    for (images, groups, _), (all_images, all_groups, _) in zip(found, whole_steps, strict=True):
        left = {key: value for key, value in all_images.items() if key != name}
        assert images == left
        assert groups == sorted(tuple(n for n in group if n != name) for group in all_groups)


def test_microbatches_hold_whole_groups_and_at_most_batch_size_images():
    collator = ViewCollator(DataSettings(batch_size=8), settings_of(), LAYOUT)
    positions = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 14]
    assert collator.plan(positions, 1) == [[list(range(7)), list(range(7, 13))]]
    assert collator.plan([], 1) == [[]]


def test_whole_images_are_one_crop_each_with_their_labels(one_process):
    data = DataSettings(batch_size=8).of_validation()
    images = WholeImages(Pictures(), MultiCrop(**CROPS), LAYOUT)
    ranks = RankSettings(device="cpu").join()
    loader = build_loader(images, RowBudget(ImageCollator(data, LAYOUT)), data, ranks, "dataset_val")
    labels = []
    with loader.epoch(0) as steps:
        for step in steps:
            (microbatch,) = step.microbatches
            targets, number = microbatch.targets, microbatch.targets.num_images
            assert microbatch.inputs["crop_groups"] == ((number, G),)
            assert microbatch.inputs["input_pos"].shape == (1, number * G, 2)
            assert (microbatch.inputs["tokens"][0, targets.cls_positions, 0] == CLASS).all()
            assert len(targets.patch_positions) == number * P
            assert step.totals == {"images": number, "crop_tokens": number * G, "skipped_samples": 0}
            assert global_crops(microbatch).inputs["crop_groups"] == ((number, G),)
            labels += targets.labels.tolist()
    assert labels == [index % 10 for index in range(NUM_IMAGES)]
    with pytest.raises(SampleError, match="it has no label"):
        WholeImages(Pictures(has_labels=False), MultiCrop(**CROPS), LAYOUT)[0]


# ---- Workers, fingerprints, settings --------------------------------------------------------------


def test_the_fingerprint_is_of_the_images_alone(one_process):
    first = make_loader().dataset.fingerprint
    assert make_loader(keys={"mask_probability": 0.3}).dataset.fingerprint == first
    other = type("Other", (Pictures,), {"__getitem__": lambda s, i: Pictures()[(i + 1) % NUM_IMAGES]})
    assert make_loader(other()).dataset.fingerprint != first


def test_a_worker_s_samples_are_arrays_which_hold_no_file_open():
    """Tensors come from workers as files in shared memory, of which a process may open about a thousand."""
    checked = CheckedDataset(views_of(), "dataset", ViewCollator.prepare)
    (samples,) = load_samples(checked, OnRank(ShuffledOrder(8, 8, shuffle=False), 0, range(1), 0, 1), num_workers=1)
    assert [sample["position"] for sample in samples] == list(range(8))
    assert not any(isinstance(value, torch.Tensor) for value in samples[0].values())


WITH_ANOTHER = {**COMPONENT, "image_transform": {"_component_": "torch.nn.Identity"}}


def test_a_transform_that_draws_beside_the_training_is_refused():
    views = ViewSettings(transform=WITH_ANOTHER, koleo_group_size=4)
    (problem,) = views.problems_of_views(DataSettings(batch_size=4))
    assert str(problem).startswith("num_workers=0: transform.image_transform")
