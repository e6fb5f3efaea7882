"""The command line as a user meets it: one end-to-end training, every command, every refusal."""

import json
import re
import subprocess
import sys

import pytest

from workbench.recipes import shipped_names
from workbench.tasks import load, task_names

PROMPT = "the animal did not cross the street because it was too tired , so the"


RECIPE = """
about = "small"
task = "winograd"
[model]
n_layers = 1
n_heads = 2
d_model = 16
[training]
steps = 40
batch = 16
log_every = 20
"""


def test_a_recipe_is_trained_listed_loaded_and_looked_at(workbench, runs, tmp_path):
    (tmp_path / "small.toml").write_text(RECIPE)
    code, out, _ = workbench("train", str(tmp_path / "small.toml"), "--seeds", "0-1", "--jobs", "2")
    assert code == 0 and "small seed 0: held-out" in out and "small seed 1: held-out" in out
    folder = runs / "small" / "seed-1"
    assert {p.name for p in folder.iterdir()} == {"recipe.toml", "model.safetensors", "run.json", "metrics.jsonl"}
    code, out, _ = workbench("models", "--json")
    mine = [row for row in json.loads(out) if row["whose"] == "yours"]
    assert [(row["model"], row["seed"]) for row in mine] == [("small", 0), ("small", 1)]
    code, out, _ = workbench("attention", "small", PROMPT, "--seed", "1")
    assert code == 0 and "block 1" in out
    code, out, _ = workbench("train", str(tmp_path / "small.toml"))
    assert code == 0  # trained already: the run is returned


def test_models_lists_every_shipped_one(workbench):
    code, out, _ = workbench("models", "--json")
    rows = {row["model"]: row for row in json.loads(out)}
    assert code == 0 and set(rows) == set(shipped_names())
    assert rows["winograd-2"]["held_out_accuracy"] >= 0.98
    assert "winograd-2-attn" in workbench("models")[1]


def test_tasks_lists_them_and_shows_how_each_can_be_cheated(workbench):
    code, out, _ = workbench("tasks")
    assert code == 0 and all(name in out for name in task_names())
    code, out, _ = workbench("tasks", "winograd-leaky", "--json")
    assert json.loads(out)["shortcuts"]["bag of words"] == 1.0
    assert re.search(r"bag of words +27.8 %", workbench("tasks", "winograd")[1])


def test_attention_gives_the_models_own_numbers(workbench, tmp_path):
    import workbench as wb

    wet = PROMPT.replace("tired", "wet")
    code, out, _ = workbench("attention", "winograd-2", PROMPT, "--against", wet, "--json")
    data = json.loads(out)
    run = wb.load("winograd-2")
    _, cache = run.model.run_with_cache(run.encode(wet))
    expected = cache["pattern", 1][0].mean(dim=0)[14].tolist()
    assert code == 0 and data["against"]["attention"][1] == pytest.approx(expected, abs=1e-6)
    assert data["prompt"]["next_words"][0]["word"] == "animal" and data["against"]["next_words"][0]["word"] == "street"
    page = tmp_path / "page.html"
    code, out, _ = workbench("attention", "winograd-2", PROMPT, "--head", "1.3", "--html", str(page))
    assert code == 0 and "head 1.3" in out and "plotly" in page.read_text().lower()


LOTS = ",".join(f"0.{i:03}" for i in range(1, 101))
THOUSANDS = [part for name in ("lr", "beta1", "beta2") for part in ("--set", f"{name}={LOTS}")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing argument 'name'."),
        (["train", "winograd-22"], "unknown model 'winograd-22'; nearest: winograd-2"),
        (["train", "winograd-2", "--seeds", "4-1"], "--seeds 4-1: expected a number, a range such as 0-4"),
        (["train", "winograd-2", "--seeds", "0-99999999999"], "--seeds 0-99999999999: expected a number"),
        (["train", "winograd-2", "--seeds", "9" * 30], "expected 0 to 4294967295"),
        (["train", "x" * 5000], "unknown model"),
        (["train", "x" * 5000 + ".toml"], "not a readable TOML file"),
        (["tasks", "x" * 5000 + ".toml"], "no such task file"),
        (["attention", "x" * 5000, "the"], "unknown model"),
        (["attention", "", "the"], "unknown model ''"),
        (["table", "winograd", "--json", ""], "is a folder; give a file to write to"),
        (["table", "winograd", "--csv", "/"], "is a folder; give a file to write to"),
        (["attention", "winograd-2", "the", "--html", "."], "is a folder; give a file to write to"),
        (["app", "--address", "nonsense"], "cannot open nonsense, port 8501"),
        (["train", "winograd-2", "--seeds", "0-" + "9" * 20], "--seeds 0-99999999999999999999: expected a number"),
        (["train", "winograd-2", "--seeds", "0-9999," * 11_000 + "0"], "a list such as 0,2,5; 10,000 at most"),
        (["train", "winograd-2", "--seeds", "\x1b[2J"], r"--seeds \x1b[2J: expected a number"),
        (["train", "winograd-2", "--steps", "0"], "steps = 0: expected 1 to 1,000,000,000"),
        (["train", "shakespeare-12", "--steps", "1" + "0" * 400], "0: expected 1 to 1,000,000,000"),
        (["train", "winograd-2", *THOUSANDS], "--set: 1,000,000 combinations; expected at most 10,000"),
        (
            ["train", "winograd-2", *THOUSANDS[:2], "--seeds", "0-999"],
            "100 settings of 1,000 seeds are more than",
        ),
        (["train", "absent.toml"], "absent.toml: no such recipe file"),
        (["tasks", "winogrand"], "unknown task 'winogrand'; nearest: winograd"),
        (["table", "winogrand"], "unknown table 'winogrand'; nearest: winograd"),
        (["table", "winograd", "--seeds", "0"], "--seeds 0: expected 1 to 10,000"),
        (["table", "winograd", "--seeds", "99999999"], "--seeds 99999999: expected 1 to 10,000"),
        (["table", "winograd", "--budget", "big"], "--budget big: expected one of quick, half, full"),
        (["table", "winograd", "--folder", "."], "--folder is for `workbench table all`"),
        (["table", "all", "--json", "x.json"], "`all` writes results/NAME.json and .md for every table"),
        (["table", "all", "--folder", "no/such"], "no such folder no/such; make it first"),
        (["data", "fetch", "shakespear"], "unknown corpus 'shakespear'; nearest: shakespeare"),
        (
            ["data", "fetch", "shakespeare", "--from", "no/such.txt"],
            "cannot read no/such.txt (No such file",
        ),
        (["table", "winograd", "--json", "no/such/folder/x.json"], "no such folder no/such/folder; make it first"),
        (["attention", "winograd-22", "the"], "unknown model 'winograd-22'"),
        (["attention", "winograd-2", "the animl"], "unknown word 'animl'; nearest: animal"),
        (["attention", "winograd-2", ""], "the prompt is empty"),
        (["attention", "winograd-2", "the " * 19], "19 tokens, but winograd has a context of 18"),
        (["attention", "winograd-2", "the", "--head", "2.0"], "unknown head '2.0'"),
        (["attention", "winograd-2", "the", "--head", "x"], "unknown head 'x'"),
        (["attention", "winograd-2", "the", "--position", "5"], "position 5: this prompt has positions 0 to 0"),
        (["attention", "winograd-2", "the", "--seed", "9"], "seed 9 is not trained"),
        (["attention", "winograd-2", "the", "--step", "9"], "no checkpoint at step 9"),
        (["app", "--port", "99999999"], "port"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(workbench, runs, arguments, message):
    code, out, err = workbench(*arguments)
    assert code == 2 and message in err and err.count("\n") == 1 and out == ""
    assert not runs.exists()  # nothing half written


def test_a_table_is_printed_and_written_in_every_form(workbench, tmp_path):
    """The one that trains nothing."""
    files = {form: tmp_path / f"t.{form}" for form in ("json", "csv", "md", "tex")}
    code, out, _ = workbench("table", "parameters", *(x for form in files for x in (f"--{form}", str(files[form]))))
    assert code == 0 and "124,439,808" in out
    assert all("124439808" in file.read_text().replace(",", "") for file in files.values())
    assert json.loads(workbench("table", "parameters", "--json", "-")[1]) == json.loads(files["json"].read_text())


def test_all_tables_are_written_with_a_page_about_them(workbench, tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.tables.TABLES", {"parameters": "numbers", "bigram": "a chain"})
    code, out, _ = workbench("table", "all", "--trained", "--folder", str(tmp_path))
    assert code == 0 and out.splitlines()[-1] == f"all: {tmp_path / 'results.md'}"
    made = {path.name for path in (tmp_path / "results").iterdir()}
    assert made == {"parameters.json", "parameters.md", "bigram.json", "bigram.md"}
    page = (tmp_path / "results.md").read_text()
    assert "`workbench table all --trained --folder" in page and "Not run: bigram-0." in page


def test_without_the_text_the_tables_that_need_none_are_made(workbench, tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.tables.TABLES", {"ladder": "a text", "parameters": "numbers"})
    monkeypatch.delenv("WORKBENCH_SHAKESPEARE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load._load.cache_clear()
    (tmp_path / "results.md").write_text("an older page")
    code, _, err = workbench("table", "all", "--budget", "quick", "--folder", str(tmp_path), "--jobs", "1")
    assert code == 2 and err == (
        "ladder, and the page on all, are not written: the text of shakespeare is not here; "
        "run: workbench data fetch shakespeare (or add --from FILE for a copy you have)\n"
    )
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"parameters.json", "parameters.md"}
    assert (tmp_path / "results.md").read_text() == "an older page"


def test_a_text_is_taken_from_a_copy(workbench, made_up_text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, out, _ = workbench("data", "fetch", "shakespeare", "--from", str(tmp_path / "text.txt"))
    kept = tmp_path / "cache" / "circuit-workbench" / "shakespeare.txt"
    assert code == 0 and out == f"{kept}\n" and kept.read_text() == made_up_text


def test_without_a_command_the_help_is_shown(workbench):
    code, out, err = workbench()
    assert code == 0 and "attention" in out and out.count("\n") > 10 and err == ""


def test_the_destination_counts_for_both_prompts(workbench):
    code, out, _ = workbench("attention", "winograd-2", PROMPT, "--against", "the dog did", "--position", "1", "--json")
    data = json.loads(out)
    assert code == 0
    for part in (data["prompt"], data["against"]):
        assert part["destination"] == 1 and [len(row) for row in part["attention"]] == [2, 2]
    code, out, _ = workbench("attention", "winograd-2", PROMPT, "--against", "the dog did", "--json")
    assert json.loads(out)["against"]["destination"] == 2


def test_a_model_without_layers_says_so_and_what_comes_next(workbench):
    code, out, _ = workbench("attention", "bigram-0", "s3 s8")
    assert code == 0 and "no layers, so nothing attends" in out and "source" not in out


def test_an_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "workbench", "models"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2 and done.stderr == "cannot write the output (No space left on device)\n"


def test_a_file_that_cannot_be_read_is_named(workbench, monkeypatch):
    def refused():
        raise PermissionError(13, "Permission denied", "/locked/run.json")

    monkeypatch.setattr("workbench.runs.list_runs", refused)
    assert workbench("models") == (2, "", "cannot read or write /locked/run.json (Permission denied)\n")


def test_an_interrupt_says_how_to_go_on(workbench, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.sweeps.train_many", interrupted)
    code, _, err = workbench("train", "winograd-2")
    assert code == 130 and "--resume" in err


def test_help_does_not_import_torch():
    """`workbench --help` must answer in a moment; what makes it slow is an import."""
    script = (
        "import sys; sys.argv = ['workbench', '--help']\n"
        "from workbench.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformer_lens', 'numpy', 'plotly', 'streamlit', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "attention" in done.stdout
