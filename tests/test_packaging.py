"""What users install: a wheel that works from an empty folder, and imports that no folder of ours breaks."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from workbench.recipes import shipped_names
from workbench.tables import TABLES
from workbench.tasks import task_names

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A virtual environment with our wheel in it, and the dependencies of this one on its path."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True, capture_output=True,
    )  # fmt: skip
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel],
        check=True, capture_output=True,
    )  # fmt: skip
    # a .pth line adds the folder but reads no .pth in it: the editable install of this checkout stays out
    theirs = next(p for p in sys.path if p.endswith("site-packages"))
    (site / "dependencies.pth").write_text(theirs)
    return python


def run(python, folder, *arguments):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "WORKBENCH_RUNS")}
    done = subprocess.run(
        [python, *arguments], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_lists_and_loads_every_shipped_model_from_an_empty_folder(installed, tmp_path):
    home = run(installed, tmp_path, "-c", "import workbench; print(workbench.__file__)")
    assert str(ROOT) not in home
    rows = json.loads(run(installed, tmp_path, "-m", "workbench", "models", "--json"))
    assert {row["model"] for row in rows} == set(shipped_names())
    assert set(json.loads(run(installed, tmp_path, "-m", "workbench", "tasks", "--json"))) == set(task_names())
    script = "import workbench as wb\nfor r in wb.list_runs()[0]: print(r.name, r.model.n_parameters)"
    assert len(run(installed, tmp_path, "-c", script).splitlines()) == len(shipped_names())
    assert list(tmp_path.iterdir()) == []


def test_the_wheels_pages_open_without_an_error_and_the_committed_tables_are_there(installed, tmp_path):
    script = (
        "from streamlit.testing.v1 import AppTest\n"
        "from workbench.content import content\n"
        "app = AppTest.from_file(str(content('app.py')), default_timeout=300).run()\n"
        "assert not app.exception and not app.error, (app.exception, app.error)\n"
        "print(app.title[0].value)\n"
        "app.switch_page('../pages/tables.py').run()\n"
        "assert not app.exception and not app.error, (app.exception, app.error)\n"
        "print(app.title[0].value, len(app.selectbox(key='tables_name').options))"
    )
    first, tables, committed = run(installed, tmp_path, "-c", script).split()[-3:]
    assert (first, tables) == ("Attention", "Tables")
    assert int(committed) == sum((ROOT / "docs" / "results" / f"{name}.json").exists() for name in TABLES)


def test_the_wheel_starts_the_app(installed, tmp_path, free_port):
    command = [installed, "-m", "workbench", "app", "--headless", "--port", str(free_port)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as app:
        try:
            assert app.stdout
            lines = []
            for line in app.stdout:
                lines.append(line)
                if "URL" in line:
                    break
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/_stcore/health") as answer:
                assert answer.read() == b"ok", lines
            page = urllib.request.urlopen(f"http://127.0.0.1:{free_port}/").read()
            assert b"<title>" in page
        finally:
            app.terminate()
            app.communicate(timeout=60)  # it says that it stops: somebody must read it


def test_our_folders_break_nobodys_imports():
    """transformer_lens imports Hugging Face's `datasets` by that name; a package of ours called so would break it."""
    for start in (["-c", "import transformer_lens"], ["-m", "pytest", "--version"]):
        done = subprocess.run([sys.executable, *start], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert not list(ROOT.glob("datasets/__init__.py")) + list(ROOT.glob("models/__init__.py"))
    assert not (ROOT / "workbench" / "datasets.py").exists()


def test_the_version_is_the_changelogs_newest():
    import workbench

    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = next(line for line in changelog.splitlines() if line.startswith("## "))
    assert newest.split()[1] == workbench.__version__
    assert f'version = "{workbench.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_every_dependency_is_pinned_in_the_constraints():
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()}
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        assert requirement.split(">=")[0].lower() in pinned
