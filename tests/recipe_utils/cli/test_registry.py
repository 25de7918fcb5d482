"""`tune run FILE` takes a recipe's file at any path."""

import pytest
from programs import tune
from recipe_runs import slow

RECIPE = """
import os, sys
from recipe_utils.training.command import entry_point

@entry_point
def main(cfg):
    print("rank", os.environ.get("RANK"), "read", cfg.number, "of", __file__, flush=True)

if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.mark.parametrize("given", ["/my-recipe.py", slow("../my-recipe.py"), slow("./mine.py"), slow("mine.py")])
@pytest.mark.parametrize("num_processes", [1, slow(2)])
def test_a_recipe_file_may_be_anywhere(given, num_processes, tmp_path):
    """Absolute, above the current folder, or in it."""
    here = tmp_path / "here"
    here.mkdir()
    for path in (tmp_path / "my-recipe.py", here / "mine.py"):
        path.write_text(RECIPE)
    (here / "my.yaml").write_text("number: 7\n")
    path = str(tmp_path / given[1:]) if given.startswith("/") else given
    launcher = ("--nproc_per_node", num_processes) if num_processes > 1 else ()
    done = tune("run", *launcher, path, "--config", "my.yaml", cwd=here)
    assert done.returncode == 0, done.stderr
    ranks = range(num_processes) if num_processes > 1 else [None]
    lines = [line for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert sorted(lines) == [f"rank {rank} read 7 of {(here / path).resolve()}" for rank in ranks]
