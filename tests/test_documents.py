"""Documents: links resolve, key tables and commands are those of the program.

``python tests/test_documents.py`` rewrites the key tables of ``recipes/*.md``.
"""

import re
import shlex
import subprocess
import textwrap
from ast import literal_eval
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torchtune
import yaml
from omegaconf import OmegaConf

from recipe_utils.cli.registry import RECIPES, SAME_FILE, config_path
from recipe_utils.losses.attach import SummedLoss
from recipe_utils.settings.describe import key_table, settings_of
from recipe_utils.settings.read import read_settings
from recipe_utils.update_steps.step import Targets

ROOT = Path(__file__).parents[1]
FIRST = "full_finetune_update_step"
PAGES = sorted(set(RECIPES) - set(SAME_FILE) - {"benchmark_tokens_per_second"})
DOCUMENTS = sorted(
    Path(line)
    for line in subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if (ROOT / line).is_file()
)
KEYS = re.compile(r"(?<=<!-- keys -->\n).*(?=<!-- end of keys -->)", re.DOTALL)
STOCK = Path(torchtune.__file__).parents[1] / "recipes"


def without_code(text):
    return re.sub(r"^```.*?^```|^~~~.*?^~~~", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors_of(path):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def rows_of(recipe):
    return key_table(settings_of(recipe)).splitlines()


def expected_keys(recipe):
    """Returns the whole table for the first recipe; for others, rows that differ and missing keys."""
    if recipe == FIRST:
        return "\n".join(rows_of(recipe)) + "\n"
    first, own = rows_of(FIRST), rows_of(recipe)
    keys = [row.split("`")[1] for row in own[2:]]
    gone = [row.split("`")[1] for row in first[2:] if row.split("`")[1] not in keys]
    lines = [*own[:2], *(row for row in own[2:] if row not in first)]
    if gone:
        lines += ["", f"It does not have {', '.join(f'`{key}`' for key in gone)}."]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_and_anchors_resolve(document):
    path = ROOT / document
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        is_there = target.exists() and target.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("recipe", PAGES)
def test_key_tables_are_the_command_s_output(recipe):
    (found,) = KEYS.findall((ROOT / "recipes" / f"{recipe}.md").read_text())
    assert found == expected_keys(recipe), "run python tests/test_documents.py"


@pytest.mark.parametrize("recipe", [FIRST, "full_dpo_update_step", "dinov3_update_step"])
def test_a_whole_config_for_own_data_is_accepted(recipe, tmp_path):
    page = (ROOT / "recipes" / f"{recipe}.md").read_text()
    (block,) = re.findall(r"^A whole config .*?^```yaml\n(.*?)^```", page, re.M | re.S)
    own = {"output_dir": str(tmp_path)}
    if recipe == FIRST:
        from decoder_types import tiny_config_of  # not in the path of this file's command

        tiny_config_of("qwen3").save_pretrained(tmp_path)
        own["folder"] = str(tmp_path)
    cfg = OmegaConf.create(yaml.safe_load(block))
    read_settings(OmegaConf.merge(cfg, own), settings_of(recipe))


def test_the_term_added_to_a_loss_is_a_mean_over_targets():
    page = (ROOT / "recipes" / f"{FIRST}.md").read_text()
    (block,) = re.findall(r"^   ```python\n(.*?)^   ```", page, re.M | re.S)
    names = {"torch": torch}
    exec(textwrap.dedent(block), names)
    logits, labels = torch.randn(2, 5, 11), torch.tensor([[3, -100, 4, -100, 1], [-100] * 4 + [7]])
    summed = SummedLoss(names["ZLoss"]())
    summed.check(11)
    z = torch.stack([each.exp().sum().log() for each in logits[labels >= 0]])
    plain = SummedLoss(torch.nn.CrossEntropyLoss())
    targets = Targets(labels, (labels.flatten() >= 0).nonzero().squeeze(1))
    term = (summed(logits, targets) - plain(logits, targets)).item()
    assert term == pytest.approx(1e-4 * (z**2).sum().item(), rel=1e-2)


def test_update_steps_in_a_notebook_take_ten_lines(capsys):
    import tiny  # not in the path of this file's command

    page = (ROOT / "recipes" / f"{FIRST}.md").read_text()
    (block,) = re.findall(r"^### Update steps in a notebook.*?^```python\n(.*?)^```", page, re.M | re.S)
    assert len([line for line in block.splitlines() if line]) <= 10
    tokenizer, samples = tiny.tiny_tokenizer(), tiny.make_samples(40)
    try:
        exec(block, {"dataset": tiny.Samples(samples), "tokenizer": tokenizer})
    finally:
        torch.distributed.destroy_process_group()
    steps = [literal_eval(line.replace("} [", "}, [")) for line in capsys.readouterr().out.splitlines()]
    assert [len(shapes) > 1 for _, shapes in steps] == [True] * 3
    assert all(totals["positions"] == sum(width for _, width in shapes) for totals, shapes in steps)
    num_targets = sum(label != tiny.IGNORE for sample in samples for label in sample["labels"][1:])
    assert sum(totals["target_tokens"] for totals, _ in steps) == num_targets


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_readme_shows_the_error_as_it_is(tmp_path):
    (shown,) = re.findall(r"^```\n(3 problems.*?)\n```", (ROOT / "README.md").read_text(), re.M | re.S)
    wrong = ["batchsize=3", "optimizer.learning_rate=1", "microbatching=pack"]
    cfg = OmegaConf.merge(
        OmegaConf.load(config_path("llama3_2/5M_full_update_step")),
        OmegaConf.from_dotlist([*wrong, f"output_dir={tmp_path}"]),
    )
    with pytest.raises(ValueError, match="3 problems") as error:
        read_settings(cfg, settings_of(FIRST))
    assert str(error.value) == shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_name_existing_recipes_configs_and_files(document):
    text = (ROOT / document).read_text()
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for program, action in pairwise(words):
                if (program, action) == ("tune", "run"):
                    check_run(words[words.index("run") + 1 :])
                if (program, action) == ("tune", "cp"):
                    name = words[words.index("cp") + 1]
                    assert name in RECIPES or has_config(name), name
                if (program, action) == ("python", "-m"):
                    module = Path(*words[words.index("-m") + 1].split("."))
                    if module.parts[0] == "recipe_utils":
                        is_there = [(ROOT / module).is_dir(), (ROOT / f"{module}.py").is_file()]
                        assert any(is_there), module


def has_config(name):
    return any(name in configs for configs in RECIPES.values()) or (STOCK / "configs" / f"{name}.yaml").is_file()


def check_run(arguments):
    """Checks that a recipe is registered, or a file of the user, and that overridden keys exist."""
    recipes = [word for word in arguments if word in RECIPES or word == "generate"]
    assert recipes or any(word.endswith(".py") for word in arguments), arguments
    if "--config" in arguments:
        config = arguments[arguments.index("--config") + 1]
        assert config.endswith(".yaml") or has_config(config), config
    if not recipes or recipes[0] not in PAGES:
        return
    known = {row.split("`")[1] for row in rows_of(recipes[0])[2:]}
    for word in arguments:
        key = word.removeprefix("~").partition("=")[0].partition(".")[0]
        if "=" in word and not word.startswith("-"):
            own = []
            if not arguments[arguments.index("--config") + 1].endswith(".yaml"):
                path = ROOT / "configs" / f"{arguments[arguments.index('--config') + 1]}.yaml"
                own = yaml.safe_load(path.read_text())
            assert key in known or key in own, word


if __name__ == "__main__":
    for name in PAGES:
        page = ROOT / "recipes" / f"{name}.md"
        page.write_text(KEYS.sub(lambda _: expected_keys(name), page.read_text()))  # noqa: B023
