"""Processes that train, a tiny recipe, and the run that it must end in, whatever happens on the way."""

import pytest
from breaking import elsewhere, steps_of_training, tiny


@pytest.fixture(scope="session")
def pool():
    with elsewhere(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="session")
def reference(pool, recipe, tmp_path_factory):
    """The folder of a training that nothing happened to, and its steps of writing."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    return folder, pool.submit(steps_of_training, recipe, folder).result()
