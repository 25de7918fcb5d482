"""Everything wrong with a config is raised at once, with the numbers and the key to set."""

import pytest
import torch
from torch.torch_version import TorchVersion

from recipe_utils.settings import (
    ConfigError,
    Problems,
    check_keys,
    check_optimizer_in_bwd,
    check_pipeline_parallel,
    check_writable_dir,
    resolve_device,
    resolve_dtype,
    resolve_gradient_accumulation_steps,
)


def test_all_problems_come_in_one_error():
    problems = Problems()
    problems.add("dtype=fp16: no")
    problems.check_at_least(1, epochs=0, log_every_n_steps=1, max_steps_per_epoch=None)
    problems.check_one_of(("train", "drop"), last_update_step="keep", other="drop")
    check_optimizer_in_bwd(problems, True, 1.0, 1, "in_order")
    check_optimizer_in_bwd(problems, False, 1.0, 4, "least_padding")
    with problems.collect("dataset: "):
        try:
            raise OSError("disk gone")
        except OSError as error:
            raise ValueError("cannot be read") from error
    with problems.collect():
        pass
    with pytest.raises(ConfigError) as raised:
        problems.raise_if_any()
    lines = str(raised.value).splitlines()
    assert lines == [
        "5 problems in the config:",
        "  - dtype=fp16: no",
        "  - epochs=0: it must be at least 1",
        "  - last_update_step=keep: unknown; set it to one of train, drop",
        "  - clip_grad_norm=1.0: with optimizer_in_bwd=True no moment has all gradients to clip; "
        "set one of the two to null or False",
        "  - dataset: cannot be read (disk gone)",
    ]


def test_no_problem_raises_nothing():
    Problems().raise_if_any()


def test_a_keyboard_interrupt_is_no_problem_of_the_config():
    problems = Problems()
    with pytest.raises(KeyboardInterrupt), problems.collect():
        raise KeyboardInterrupt


def find_unknown_keys(config, known):
    problems = Problems()
    check_keys(problems, config, known, required=())
    try:
        problems.raise_if_any()
    except ConfigError as error:
        return str(error).split("\n  - ")[1:]
    return []


def test_an_unknown_key_suggests_the_near_one():
    (text,) = find_unknown_keys({"batch_sise": 4, "epochs": 1}, {"batch_size", "epochs"})
    assert text.startswith("batch_sise:")
    assert "did you mean batch_size?" in text


def test_a_key_unlike_any_is_to_be_taken_out():
    (text,) = find_unknown_keys({"wandb_project": "x"}, {"batch_size"})
    assert "take it out" in text


@pytest.mark.parametrize(
    "value",
    ["${width}", {"embed_dim": "${width}"}, [{"path": "/data/${ width }/x"}], "${width.inner}"],
)
def test_a_key_that_another_value_refers_to_is_fine(value):
    assert find_unknown_keys({"width": 8, "model": value}, {"model"}) == []


@pytest.mark.parametrize("value", ["width", "{width}", "${widths}", "${model.width}"])
def test_a_key_that_is_only_mentioned_is_not(value):
    assert len(find_unknown_keys({"width": 8, "model": value}, {"model"})) == 1


@pytest.mark.parametrize(
    ("batch_size", "steps", "global_batch_size", "dp_degree", "expected"),
    [(4, 3, None, 2, 3), (4, None, None, 2, 1), (4, None, 24, 2, 3), (4, 3, 24, 2, 3)],
)
def test_accumulation_steps_follow_from_whichever_key_is_given(
    batch_size, steps, global_batch_size, dp_degree, expected
):
    resolved = resolve_gradient_accumulation_steps(batch_size, steps, global_batch_size, dp_degree)
    assert resolved == expected
    if global_batch_size is not None:
        assert batch_size * resolved * dp_degree == global_batch_size


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((4, None, 20, 2), ["global_batch_size=20", "batch_size=4 * 2", "= 8", "16 and 24"]),
        ((4, None, 5, 2), ["global_batch_size=5", "= 8", "8 and"]),
        ((4, 2, 24, 2), ["global_batch_size=24", "gradient_accumulation_steps=2", "= 16"]),
        ((0, None, 8, 1), ["batch_size=0", "at least 1"]),
        ((4, 0, None, 1), ["gradient_accumulation_steps=0", "at least 1"]),
        ((4, None, -8, 1), ["global_batch_size=-8", "at least 1"]),
    ],
)
def test_a_batch_that_does_not_work_out_is_refused_with_both_numbers(arguments, parts):
    with pytest.raises(ValueError, match=r"batch|steps") as raised:
        resolve_gradient_accumulation_steps(*arguments)
    for part in parts:
        assert part in str(raised.value)


def test_the_multiples_that_a_batch_error_names_are_multiples():
    with pytest.raises(ValueError, match="the nearest multiples are 8 and 16"):
        resolve_gradient_accumulation_steps(4, None, 9, 2)
    with pytest.raises(ValueError, match="nearest multiple") as raised:
        resolve_gradient_accumulation_steps(4, None, 3, 2)
    named = str(raised.value).split("nearest multiple")[1]
    numbers = [int(word.strip(",;")) for word in named.split() if word.strip(",;").isdigit()]
    assert len(set(numbers)) == len(numbers)
    for number in numbers:
        assert resolve_gradient_accumulation_steps(4, None, number, 2) == number // 8


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp64", torch.float64)]
)
def test_dtypes_are_those_of_torch(name, dtype):
    assert resolve_dtype(name, resolve_device("cpu")) == dtype


@pytest.mark.parametrize("dtype", ["fp16", "fp13"])
def test_a_dtype_that_cannot_work_is_refused_by_key(dtype):
    with pytest.raises(ValueError, match=f"^dtype={dtype}: "):
        resolve_dtype(dtype, torch.device("cpu"))


def test_a_device_that_is_there_is_taken():
    assert resolve_device("cpu").type == "cpu"
    accelerator = torch.accelerator.current_accelerator()
    assert resolve_device(None).type == ("cpu" if accelerator is None else accelerator.type)


@pytest.mark.parametrize("device", ["abacus", "cuda", "xpu"])
def test_a_device_that_is_not_there_is_refused_by_key(device):
    if device != "abacus" and getattr(torch, device).is_available():
        pytest.skip(f"this machine has {device}")
    with pytest.raises(ValueError, match=f"^device={device}: "):
        resolve_device(device)


def test_a_directory_is_made_and_left_empty(tmp_path):
    check_writable_dir("output_dir", str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_a_directory_that_cannot_be_made_is_refused_by_key(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match=r"^output_dir=.*file.*: it cannot be written to"):
        check_writable_dir("output_dir", str(file / below))


def test_stages_on_an_older_torch_are_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu128"))
    problems = Problems()
    check_pipeline_parallel(
        problems,
        2,
        2,
        "1F1B",
        num_microbatches=None,
        tensor_parallel_dim=1,
        optimizer_in_bwd=False,
        enable_activation_offloading=False,
    )
    with pytest.raises(ConfigError, match=r"needs torch 2.13, this is 2.11.0\+cu128"):
        problems.raise_if_any()
