"""An export is complete or does not exist; nothing outside the output folder is written."""

import errno
import os
import re
import resource
from pathlib import Path

import pytest
import tiny
import torch
from checkpoint_runs import die_at, files_of, killed_before_each_operation
from distributed_runs import fork_context
from recipe_runs import keep_messages, run_recipe_keeping_warnings, slow, writing_to
from safetensors.torch import load_file
from torchtune.training import FullModelTorchTuneCheckpointer
from transformers import utils as transformers_utils

from recipe_utils.checkpoint.export import ExportError, export
from recipe_utils.checkpoint.folder import check_whole, remove_leftovers
from recipe_utils.examples.fresh_weights import fresh_llama_checkpointer
from recipe_utils.torchtune_names import log_once

# Not each opening: what is inside of the temporary folder does not matter.
FILE_OPERATIONS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.utime")


def make_checkpointer(folder, **changes):
    """Returns a Hugging Face checkpointer, which also copies the config."""
    checkpointer = fresh_llama_checkpointer(tiny.MODEL, str(folder / "fresh"), str(folder / "out"), **changes)
    return checkpointer, checkpointer.load_checkpoint()["model"]


def test_an_export_has_the_files_that_torchtune_writes_at_an_epoch_s_end(tmp_path):
    checkpointer, weights = make_checkpointer(tmp_path)
    assert export(checkpointer, {"model": weights}, "export_step_3") == tmp_path / "out/export_step_3"
    checkpointer.save_checkpoint({"model": weights}, epoch=7)
    exported, stock = (files_of(tmp_path / "out" / name) for name in ("export_step_3", "epoch_7"))
    assert "config.json" in exported
    assert exported == stock
    assert sorted(os.listdir(tmp_path / "out")) == ["epoch_7", "export_step_3"]
    assert sorted(os.listdir(tmp_path)) == ["fresh", "out"]


def test_an_export_replaces_the_one_before_whole(tmp_path):
    checkpointer, weights = make_checkpointer(tmp_path)
    export(checkpointer, {"model": weights}, "epoch_0")
    (tmp_path / "out/epoch_0/left_over.txt").write_text("of the one before")
    doubled = {name: 2 * weight for name, weight in weights.items()}
    export(checkpointer, {"model": doubled}, "epoch_0")
    assert not (tmp_path / "out/epoch_0/left_over.txt").exists()
    embeddings = load_file(tmp_path / "out/epoch_0/model-00001-of-00001.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(embeddings, doubled["tok_embeddings.weight"])


def names_that_transformers_reads():
    """Returns the names of files of all its tokenizers, configs, processors and templates."""
    constants = {name for name in vars(transformers_utils) if re.fullmatch(r"[A-Z_]+(?<!WEIGHTS)_(NAME|FILE)", name)}
    names = {getattr(transformers_utils, name) for name in constants}
    for path in Path(transformers_utils.__file__).parents[1].glob("models/*/tokenization_*.py"):
        declared = re.search(r"VOCAB_FILES_NAMES = (\{[^}]*\})", path.read_text())
        names |= set(re.findall(r': "([^"]+)"', declared[1])) if declared else set()
    return {name for name in names if "." in name and not re.search(r"adapter_|\.safetensors|\.bin", name)}


OTHERS_READ = {"tekken.json", "params.json", "tool_chat_template.jinja", "parser.py", "qwen.tiktoken", "vocab.bpe"}
"""Names of files of vLLM, of Mistral, and of tokenizers in code of a folder."""
UNKNOWN = {"saved_model.pb", "model.engine", "variables/variables.data-00000-of-00001", "model.ckpt.index", "rank0"}


def test_an_export_copies_what_is_read_with_a_model_and_names_what_it_does_not_know(tmp_path):
    checkpointer, weights = make_checkpointer(tmp_path)
    names = names_that_transformers_reads() | OTHERS_READ
    assert {"tokenizer.json", "spiece.model", "generation_config.json", "chat_template.jinja"} < names
    for name in names | UNKNOWN | {"model.gguf"}:
        (tmp_path / "fresh" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "fresh" / name).touch()
    (tmp_path / "fresh/config.json").write_text("{}")
    with (tmp_path / "fresh/web_text.txt").open("wb") as large:
        large.truncate(1 << 29)
    with keep_messages() as messages:
        for name in ("export_step_1", "epoch_0"):
            exported = files_of(export(checkpointer, {"model": weights}, name)).keys()
    assert names <= exported
    assert exported - names == {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    (text,) = [text for text in messages if "exports lack" in text]
    assert text.startswith(f"{tmp_path}/fresh: exports lack 6 of its files, which may be old weights: model.ckpt.index")
    assert "gguf" not in text


def refuse(patches, operation, number):
    """Makes a function of the operating system fail."""

    def refused(*_, **__):
        raise OSError(number, os.strerror(number))

    patches.setattr(os, operation, refused)


@pytest.mark.parametrize("number", [errno.EINVAL, slow(errno.EBADF), slow(errno.ENOTSUP)])
def test_without_modes_and_syncs_all_is_written(number, tiny_config, tmp_path, monkeypatch):
    """Files of SMB and FUSE; one warning for each of the two, in the whole run."""
    log_once.cache_clear()
    refuse(monkeypatch, "fsync", number)
    refuse(monkeypatch, "chmod", errno.EPERM)
    fresh = {"checkpoint_dir": str(tmp_path / "fresh"), "model": tiny.MODEL}
    component = "recipe_utils.examples.fresh_llama_checkpointer"
    config = tiny_config(checkpointer={"_component_": component, **fresh}, save_every_n_steps=1)
    config = writing_to(tmp_path / "out", {**config, "max_steps_per_epoch": 2})
    _, warnings = run_recipe_keeping_warnings(config)
    assert check_whole(tmp_path / "out/step_1") is None
    assert {"config.json", "model-00001-of-00001.safetensors"} <= files_of(tmp_path / "out/epoch_0").keys()
    operations = [text.split()[6] for text in warnings if "its filesystem does not support" in text]
    assert sorted(operations) == ["chmod", "fsync"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sync_that_fails_fails_the_export(number, tmp_path, monkeypatch):
    checkpointer, weights = make_checkpointer(tmp_path)
    refuse(monkeypatch, "fsync", number)
    with pytest.raises(ExportError, match=os.strerror(number)):
        export(checkpointer, {"model": weights}, "epoch_0")


def export_with_umask(folder, umask):
    checkpointer, weights = make_checkpointer(folder)
    (folder / "fresh/private.json").write_text("{}")
    (folder / "fresh/private.json").chmod(0o400)
    os.umask(umask)
    return export(checkpointer, {"model": weights}, "epoch_0")


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_an_export_may_be_read_by_whom_the_umask_allows(umask, tmp_path):
    with fork_context.Pool(1) as pool:
        folder = pool.apply(export_with_umask, (tmp_path, umask))
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)
    assert {"model-00001-of-00001.safetensors", "config.json", "private.json"} <= modes.keys()
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask


def export_with_disk_full(folder, kind):
    checkpointer, weights = make_checkpointer(folder)
    if kind == "torchtune":
        checkpointer = FullModelTorchTuneCheckpointer(
            str(folder / "fresh"), ["model.safetensors"], "LLAMA3_2", str(folder / "out")
        )
    export(checkpointer, {"model": weights}, "epoch_0")
    before = files_of(folder / "out")
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))
    with pytest.raises(ExportError) as error:
        export(checkpointer, {"model": {k: 2 * w for k, w in weights.items()}}, "epoch_0")
    assert files_of(folder / "out") == before
    assert os.listdir(folder / "out") == ["epoch_0"]
    return str(error.value)


@pytest.mark.parametrize("kind", ["hugging_face", "torchtune"])
def test_where_the_disk_is_full_the_one_before_stays_and_nothing_else(kind, tmp_path):
    with fork_context.Pool(1) as pool:
        text = pool.apply(export_with_disk_full, (tmp_path, kind))
    assert f"{tmp_path}/out/epoch_0: it could not be exported (" in text


def export_and_die_at(operation, folder):
    """Kills this process right before its n-th file operation of replacing an export."""
    checkpointer, weights = make_checkpointer(folder)
    export(checkpointer, {"model": weights}, "epoch_0")
    die_at(operation, FILE_OPERATIONS)
    export(checkpointer, {"model": {k: 2 * w for k, w in weights.items()}}, "epoch_0")


@pytest.mark.slow
def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new_export_whole(tmp_path):
    found = []
    for folder in killed_before_each_operation(export_and_die_at, tmp_path):
        remove_leftovers(folder / "out")
        assert os.listdir(folder / "out") == ["epoch_0"]
        found.append(files_of(folder / "out/epoch_0"))
    assert len(found) > 8
    assert found[0] != found[-1]
    assert all(exported in (found[0], found[-1]) for exported in found)
