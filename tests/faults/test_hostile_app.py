"""The app before a stranger: links of any kind, words that are HTML, where it listens and what it writes."""

import ast
import json
import os
import random
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from hostile import HANG, assert_one_line
from support import app_page, counted
from typer.testing import CliRunner

from workbench import cli
from workbench.content import content
from workbench.pages import cache
from workbench.recipes import load_recipe
from workbench.training import train

ROOT = Path(cli.__file__).parent.parent
PAGES = ["attention", "two_hops", "heads", "tables", "training", "circuits", "step_by_step", "lens"]
EVIL = "<img/src=x/onerror=alert(1)>"
KEYS = sorted({key for page in (ROOT / "workbench" / "pages").glob("*.py")
               for key in re.findall(r'key="(\w+)"[^)]*bind="query-params"', page.read_text())})  # fmt: skip
VALUES = [
    "", " ", "x", "-1", "0", "1e999", "nan", "None", "[]", "{}", "9" * 400, "\0", "\ufffd", "\u202e", "\x1b[2J", EVIL,
    f"**{EVIL}**", "[x](javascript:alert(1))", "$\\href{javascript:alert(1)}{x}$", "../../etc/passwd", "the " * 500,
    "x" * 20_000, "the animal", "__import__('os')", "{{7*7}}", "free text", "another seed", "a checkpoint",
    "winograd-2-attn", "bigram-0", "induction-2-attn", "1.0", "0.0", "9.9", "true", ":material/delete:",
    "\U0001f468\u200d\U0001f469" * 20,
]  # fmt: skip


def assert_clean(app) -> None:
    """No traceback, refusals of one line, and nothing of a stranger's that a browser would obey."""
    assert not app.exception
    for error in app.error:
        assert error.value and "\n" not in error.value and "could not be computed" not in error.value, error.value
    obeyed = [element.proto.body for element in app.get("html")]
    obeyed += [element.proto.body for element in app.markdown if element.proto.allow_html]
    assert not any(EVIL in body for body in obeyed)
    for element in app.get("plotly_chart"):
        assert EVIL not in json.loads(json.dumps(element.proto.spec))


def test_a_link_of_any_kind_opens_a_page_or_says_why_not():
    rng = random.Random(0)
    assert len(KEYS) > 20 and {"prompt", "model", "at", "pair", "head"} <= set(KEYS)
    for case in range(counted(6, 120)):
        query = {rng.choice(KEYS): rng.choice(VALUES) for _ in range(rng.choice((1, 2, 4)))}
        if case % 4 == 0:
            query["prompt"] = rng.choice(VALUES)
        app = app_page(PAGES[case % len(PAGES)], **query)
        assert_clean(app)


def test_words_that_are_html_are_shown_and_not_obeyed(tmp_path):
    """A task of one's own may have them; so may what a run says of itself."""
    text = (content("datasets") / "winograd.toml").read_text().replace('"animal"', f'"{EVIL}"')
    (tmp_path / "odd.toml").write_text(text)
    (tmp_path / "mine.toml").write_text(
        f'about = "{EVIL}"\ntask = "odd.toml"\n[model]\nn_heads = 2\nd_model = 16\n[training]\nsteps = 1\nlog_every = 1'
    )
    train(load_recipe(tmp_path / "mine.toml"))
    cache.forget_entries()
    prompt = f"the {EVIL} did not cross the street because it was too tired , so the"
    for page in PAGES[: counted(2, len(PAGES))]:
        app = app_page(page, model="mine", prompt=prompt)
        assert app.session_state.view.run.name == "mine"
        assert_clean(app)
    cache.forget_entries()


def test_runs_of_a_strangers_making_are_named_in_one_line(runs):
    for i, data in enumerate([b"\x1b[2J", b"task = 'winograd'", b"a" + b".a" * 30_000, f"task = '{EVIL}'".encode()]):
        (runs / f"{EVIL[1:4]}{i}" / "seed-0").mkdir(parents=True)
        (runs / f"{EVIL[1:4]}{i}" / "seed-0" / "recipe.toml").write_bytes(data)
    os.mkfifo(runs / "pipe")
    cache.forget_entries()
    faults = cache.entries()[1]
    assert len(faults) == 4
    for fault in faults:
        assert_one_line(Exception(fault), *[runs] * 3)
    assert_clean(app_page("attention"))
    cache.forget_entries()


def test_it_listens_on_this_machine_only_unless_told_otherwise(monkeypatch):
    config = tomllib.loads((content("app.py").parent / ".streamlit" / "config.toml").read_text())
    assert config["server"]["address"] == "127.0.0.1"
    asked = []
    monkeypatch.setattr(cli.os, "execv", lambda program, arguments: asked.append(arguments))
    monkeypatch.setattr(cli.os, "chdir", lambda folder: None)
    monkeypatch.setenv("WORKBENCH_RUNS", os.environ["WORKBENCH_RUNS"])
    for options, address in (([], "127.0.0.1"), (["--address", "0.0.0.0"], "0.0.0.0")):
        assert CliRunner().invoke(cli.app, ["app", *options]).exit_code == 0
        arguments = asked.pop()
        assert arguments[arguments.index("--server.address") + 1] == address


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel's list of sockets is Linux's")
def test_its_socket_is_on_the_loopback_interface(free_port, runs):
    """As the kernel has it: 127.0.0.1 is 0100007F."""

    def listening() -> set[str]:
        lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
        places = [line[1].split(":") for line in lines if len(line) > 3 and line[3] == "0A"]
        return {address for address, port in places if int(port, 16) == free_port}

    command = [sys.executable, "-m", "workbench", "app", "--headless", "--port", str(free_port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(10 * HANG):
            if listening() or server.poll() is not None:
                break
            time.sleep(0.1)
        assert listening() == {"0100007F"}
    finally:
        server.terminate()
        server.wait(HANG)


WATCHED = """
import os, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
written = []

def watch(event, given):
    if event == "open":
        path, mode, flags = given
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND) and not isinstance(path, int):
            written.append(os.fspath(path))
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
        written.append(os.fspath(given[0]))
    elif event in ("os.rename", "os.link", "os.symlink"):
        written.extend(map(os.fspath, given[:2]))
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        written.append(f"started {given[0]}")

from support import app_page
sys.addaudithook(watch)
from workbench.content import content
from workbench.uploads import add_run
from workbench.pages import cache

model = content("models") / "winograd-1"
add_run("mine", (model / "recipe.toml").read_bytes(), (model / "model.safetensors").read_bytes())
cache.forget_entries()
for page in sys.argv[2:]:
    assert not app_page(page, model="mine").error
for path in written:
    print(ascii(path if isinstance(path, str) else os.fsdecode(path)))
"""


def test_it_writes_among_the_runs_and_nowhere_else(tmp_path, runs):
    """An upload and every page, in a process that notes every path opened to be written; temporary files apart."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = [str(ROOT / "tests"), *PAGES[: counted(2, len(PAGES))]]
    done = subprocess.run(
        [sys.executable, "-B", "-c", WATCHED, *arguments], capture_output=True, text=True, timeout=HANG, check=False,
        cwd=tmp_path, env=os.environ | {"TMPDIR": str(temporary), "HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("'")]
    allowed = (str(runs), str(temporary), "/dev/null", "/dev/shm")
    assert [path for path in written if not path.startswith(allowed)] == []
    assert any(path.startswith(str(runs / "mine")) for path in written)


LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "code", "runpy"}
ALLOWED = {
    ("workbench/__init__.py", "import_module"): "a name of the package's own table, by attribute access",
    ("circuits/__init__.py", "import_module"): "the same",
    ("workbench/figures/__init__.py", "import_module"): "the same",
    ("workbench/tables/__init__.py", "import_module"): "a name that is in TABLES",
    ("workbench/pages/results.py", "import_module"): "a name that is in TABLES",
    ("workbench/pages/cache.py", "import_module"): "two names that stand there, to import them early",
    ("workbench/tables/engine.py", "import_module"): "two names that stand there, to find their folders",
    ("workbench/cli.py", "execv"): "Streamlit's own command, with checked options and no shell",
}
"""Where code is chosen by a name, and why no stranger chooses it."""


def suspicious(tree: ast.AST) -> list[str]:
    """What could run, or load as code, something that was given."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in names if name.partition(".")[0] in LOADERS]
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        bare = isinstance(node.func, ast.Name)
        of = getattr(getattr(node.func, "value", None), "id", "")
        if bare and name in ("eval", "exec", "compile", "__import__", "input", "breakpoint"):
            found.append(name)
        if name in ("import_module", "system", "popen", "read_pickle", "unsafe_load", "exec_module", "literal_eval"):
            found.append(name)
        if of == "os" and name.startswith(("exec", "spawn", "posix_spawn")):
            found.append(name)
        if (of == "torch" and name in ("load", "save")) or "allow_pickle" in keywords:
            found.append(f"{of}.{name}")
        if "shell" in keywords or "unsafe_allow_html" in keywords or "unsafe_allow_javascript" in keywords:
            found.append(f"{name} with an unsafe option")
    return found


def test_nothing_that_is_given_is_imported_evaluated_or_unpickled():
    files = [ROOT / "app.py", *(ROOT / "workbench").rglob("*.py"), *(ROOT / "circuits").rglob("*.py")]
    assert len(files) > 100
    found = {
        (file.relative_to(ROOT).as_posix(), what) for file in files for what in suspicious(ast.parse(file.read_text()))
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "line",
    ["eval(x)", "exec(x)", "compile(x, '', 'eval')", "__import__(x)", "import pickle", "from pickle import loads",
     "import yaml", "import_module(x)", "os.system(x)", "os.popen(x)", "torch.load(x)", "np.load(x, allow_pickle=True)",
     "pd.read_pickle(x)", "subprocess.run(x, shell=True)", "st.markdown(x, unsafe_allow_html=True)", "os.execv(x, y)"],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(line):
    assert suspicious(ast.parse(line)) and not suspicious(ast.parse("model.eval(); re.compile(x); json.load(x)"))
