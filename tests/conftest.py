import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

SUPPORT = str(Path(__file__).parent / "support")
# The fork server and `tune run` start fresh interpreters, which must find the tests' components.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [SUPPORT, os.environ.get("PYTHONPATH", "")])
)
sys.path.insert(0, SUPPORT)
# The fork server imports the test modules, too. At the end of the path, because the checkout's recipes/
# must not hide torchtune's package of that name.
sys.path.append(str(Path(__file__).parents[1]))

import recipe_runs  # noqa: E402

# No test is timed: the machine may be busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory):
    """A folder with the tiny model's weights; configs of :func:`recipe_runs.tiny_config` use it."""
    folder = tmp_path_factory.mktemp("tiny")
    recipe_runs.save_weights(folder)
    return folder


def config_maker(weights_folder, folder):
    def make(**changes):
        config = recipe_runs.tiny_config(weights_folder, **changes)
        config["output_dir"] = config["checkpointer"]["output_dir"] = str(folder / "out")
        return config

    return make


@pytest.fixture
def tiny_config(weights_folder, tmp_path):
    """Makes tiny configs whose output goes to this test's own folder."""
    return config_maker(weights_folder, tmp_path)


@pytest.fixture(scope="module")
def module_config(weights_folder, tmp_path_factory):
    """The same for what a module's tests share, in a folder of its own."""
    return config_maker(weights_folder, tmp_path_factory.mktemp("module"))
