"""Shapes checked at every call; one thread, since tiny models are slower on more; a folder of runs for each test."""

from pathlib import Path

from jaxtyping import install_import_hook

# Before the first import of ours. (jaxtyping's pytest option cannot take a checker with arguments and two packages.)
# Not the recipes: they refuse wrong types themselves, in the user's words.
PACKAGE = Path(__file__).parent.parent / "workbench"
OURS = ["circuits", *(f"workbench.{path.stem}" for path in PACKAGE.iterdir() if path.stem[0] not in "_.")]
install_import_hook(
    [module for module in OURS if module != "workbench.recipes"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

import socket  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("workbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("workbench")


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """An empty folder for runs, so that a test sees the shipped ones and its own."""
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
