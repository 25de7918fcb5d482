"""Documents: links resolve; keys, pictures, code and commands are those of the program."""

import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import tiny
import torch
import torchtune
import yaml
from decoder_types import tiny_config_of
from omegaconf import OmegaConf
from recipe_runs import run_recipe, section_of

from recipe_utils.cli.registry import RECIPES, SAME_FILE, TRAINING_RECIPES, config_path
from recipe_utils.plans import __main__ as plans
from recipe_utils.settings import __main__ as settings_command
from recipe_utils.settings.describe import SECTIONS, settings_of
from recipe_utils.settings.keys import keys_of
from recipe_utils.settings.read import read_settings
from recipe_utils.training.command import with_overrides

ROOT = Path(__file__).parents[1]
FIRST = "full_finetune_update_step"
TUTORIAL = ROOT / "recipes" / "writing_a_recipe.md"
DOCUMENTS = sorted(
    Path(line)
    for line in subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    if (ROOT / line).is_file()
)
STOCK = Path(torchtune.__file__).parents[1] / "recipes"


def without_code(text):
    return re.sub(r"^```.*?^```|^~~~.*?^~~~", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors_of(path):
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def keys_of_recipe(recipe):
    return set(keys_of(settings_of(recipe)))


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


def test_the_page_of_keys_is_the_command_s_output(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["settings"])
    settings_command.main()
    page = (ROOT / "recipes" / "keys.md").read_text()
    expected = capsys.readouterr().out
    assert page[page.index("## ") :] == expected, "replace it by the output of python -m recipe_utils.settings"


def test_each_key_stands_once_on_the_page_of_keys():
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "recipes" / "keys.md").read_text(), re.M)
    assert len(rows) == len(set(rows))
    assert set(rows) == set().union(*map(keys_of_recipe, TRAINING_RECIPES))
    assert len(SECTIONS["Set first"].split()) == 20


def test_recipes_that_train_have_a_page():
    files = {SAME_FILE.get(name, name) for name in RECIPES}
    assert set(TRAINING_RECIPES) == files - {"benchmark_tokens_per_second"}
    assert all((ROOT / "recipes" / f"{recipe}.md").is_file() for recipe in TRAINING_RECIPES)


def test_the_picture_is_the_command_s_output(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plans", *["5", "3", "9", "2", "--ranks", "2"]])
    plans.main()
    picture = capsys.readouterr().out
    assert (ROOT / "recipe_utils" / "plans" / "four_samples.svg").read_text() == picture
    (caption,) = re.findall(r"!\[(.*)\]\(recipe_utils/plans/four_samples.svg\)", (ROOT / "README.md").read_text())
    assert caption == "Four samples on two ranks: 24 positions padded, at most 18 on a rank; 19 packed, at most 10"
    for title, numbers in (("in_order", (24, 5, 18)), ("packed", (19, 0, 10))):
        text = "{}: {} positions, {} of them padding; at most {} on a rank".format(title, *numbers)
        assert text in picture


@pytest.mark.parametrize("recipe", [FIRST, "full_dpo_update_step", "policy_update_step", "dinov3_update_step"])
def test_a_whole_config_for_own_data_is_accepted(recipe, tmp_path):
    page = ROOT / "README.md" if recipe == FIRST else ROOT / "recipes" / f"{recipe}.md"
    (block,) = re.findall(r"^```yaml\n(# \w+\.yaml: .*?)^```", page.read_text(), re.M | re.S)
    own = {"output_dir": str(tmp_path)}
    if recipe == FIRST:
        tiny_config_of("qwen3").save_pretrained(tmp_path)
        own["folder"] = str(tmp_path)
    cfg = OmegaConf.create(yaml.safe_load(block))
    read_settings(OmegaConf.merge(cfg, own), settings_of(recipe))


def test_the_dataset_with_weights_trains_their_mean(tiny_config, tmp_path, monkeypatch):
    section = section_of(TUTORIAL, "## 1. Weigh targets")
    (block,) = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    encode = "lambda self, text: self(dict(messages=[Message('user', text)]), inference=True)['tokens']"
    tokenizer = f"Tokenizer = type('Tokenizer', (tiny.TinyTokenizer,), dict(encode={encode}))"
    head = "import tiny\nfrom torchtune.data import Message"
    (tmp_path / "my_data.py").write_text("\n".join([head, tokenizer, block]))
    monkeypatch.syspath_prepend(tmp_path)
    components = {"tokenizer": {"_component_": "my_data.Tokenizer", "max_seq_len": 64}}
    config = tiny_config(**components, dataset={"_component_": "my_data.dataset"}, batch_size=1)
    (loss,) = [line["loss"] for line in run_recipe(config) if "loss" in line]
    import my_data

    (sample,) = my_data.dataset(my_data.Tokenizer(64))
    tokens, weights = torch.tensor(sample["tokens"]), torch.tensor(sample["weights"])[1:]
    losses = torch.nn.functional.cross_entropy(tiny.tiny_model()(tokens[None])[0, :-1], tokens[1:], reduction="none")
    assert loss == pytest.approx((weights * losses).sum().item() / weights.sum().item(), rel=1e-5)
    assert loss != pytest.approx(losses.mean().item(), rel=1e-3)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_page_of_keys_shows_the_error_as_it_is(tmp_path):
    page = (ROOT / "recipes" / "keys.md").read_text()
    (shown,) = re.findall(r"^```\n(3 problems.*?)\n```", page, re.M | re.S)
    wrong = ["batchsize=3", "optimizer.learning_rate=1", "microbatching=pack"]
    cfg = OmegaConf.merge(
        OmegaConf.load(config_path("llama3_2/5M_full_update_step")),
        OmegaConf.from_dotlist([*wrong, f"output_dir={tmp_path}"]),
    )
    with pytest.raises(ValueError, match="3 problems") as error:
        read_settings(cfg, settings_of(FIRST))
    assert str(error.value) == shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_are_accepted(document, tmp_path, monkeypatch):
    text = (ROOT / document).read_text()
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" & ")[0], comments=True)
            for program, action in pairwise(words):
                if (program, action) == ("tune", "run"):
                    with monkeypatch.context() as environment:
                        check_run(words[words.index("run") + 1 :], tmp_path, environment)
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


def check_run(arguments, tmp_path, environment):
    """Checks that a recipe is registered, or a file of the user, and that it takes the config with its overrides."""
    config, *overrides = arguments[arguments.index("--config") + 1 :]
    recipes = [word for word in arguments if word in RECIPES or word == "generate"]
    is_of_user = config.endswith(".yaml")
    assert recipes or any(word.endswith(".py") for word in arguments), arguments
    assert is_of_user or has_config(config), config
    recipe = recipes[0] if recipes else FIRST
    cfg = OmegaConf.load(config_path(RECIPES[recipe][0] if is_of_user else config))
    removed = [word.removeprefix("~") for word in overrides if word.startswith("~")]
    given = OmegaConf.from_dotlist([word for word in overrides if not word.startswith("~")])
    here = {"output_dir": str(tmp_path), **({"device": "cpu", "dtype": "fp32"} if "device" in cfg else {})}
    cfg = with_overrides(OmegaConf.merge(cfg, given, here), [], removed)
    if recipe == "generate":
        assert set(given) <= set(OmegaConf.load(config_path(config))), overrides
    else:
        if "--nproc_per_node" in arguments:
            environment.setenv("WORLD_SIZE", arguments[arguments.index("--nproc_per_node") + 1])
        read_settings(cfg, settings_of(recipe))
