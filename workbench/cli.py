"""The command line. Errors are one line on stderr and exit code 2; nothing heavy is imported before it is needed."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from circuits.errors import CircuitError
from workbench.errors import NoCorpus, WorkbenchError
from workbench.terminal import Bars, check_writable, print_table, say, show, write_file
from workbench.untrusted import plain
from workbench.wording import percent

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.tables.engine import Order
    from workbench.tables.table import Table

app = typer.Typer(
    help="Train tiny transformers on tasks with known answers, and look inside them.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
MOST_RUNS = 10_000  # of one command
INTERRUPTED = 130  # what typer makes of Ctrl-C
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Dask = Annotated[
    str | None,
    typer.Option("--dask", metavar="ADDRESS", help="Train on this Dask cluster, such as tcp://10.0.0.1:8786."),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Trainings side by side; by default one a core.")]


@app.command()
def models(as_json: Json = False) -> None:
    """List the trained models, shipped ones and yours."""
    from workbench.runs import list_runs

    runs, faults = list_runs()
    rows = [
        {
            "model": run.name,
            "seed": run.seed,
            "task": Path(run.recipe.task).stem,
            "held_out_accuracy": run.held_out_accuracy,
            "score": run.score,
            "parameters": run.results["parameters"],
            "whose": "shipped" if run.shipped else "yours",
            "about": run.recipe.about,
            "path": str(run.path),
        }
        for run in runs
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(
            ["model", "seed", "", "score", "task", "parameters", "about"],
            [
                [r["model"], str(r["seed"]), r["whose"], r["score"], r["task"], f"{r['parameters']:,}", r["about"]]
                for r in rows
            ],
            right={1, 5},
        )
    for fault in faults:
        say(str(fault))


@app.command()
def tasks(
    name: Annotated[str | None, typer.Argument(help="A task, or a TOML file of one.")] = None,
    split_seed: Annotated[int, typer.Option(min=0, help="Which held-out split.")] = 0,
    as_json: Json = False,
) -> None:
    """List the tasks, or show one: its truth, its sizes, and how far shortcuts get on it."""
    from workbench.tasks import load_task, task_abouts

    if name is None:
        abouts = task_abouts()
        if as_json:
            print(json.dumps(abouts, indent=1))
        else:
            print_table(["task", "about"], [list(item) for item in abouts.items()])
        return
    from workbench.tasks.shortcuts import shortcut_accuracies

    task = load_task(name, split_seed)
    shortcuts = shortcut_accuracies(task)
    data = {
        "task": task.name,
        "about": task.about,
        "truth": task.truth(),
        "vocabulary": len(task.vocabulary),
        "length": task.n_ctx,
        "train": len(task.train),
        "held_out": len(task.held_out),
        "scored_positions": list(task.scored),
        "roles": task.roles,
        "example": task.decode(task.held_out[0]),
        "chance": task.chance,
        "shortcuts": shortcuts,
    }
    if as_json:
        print(json.dumps(data, indent=1))
        return
    print(f"{task.name}: {task.about}\n\n  {data['example']}\n\ntruth: {data['truth']}")
    scored = (
        f"position {task.scored[0]}" if len(task.scored) == 1 else f"positions {task.scored[0]} to {task.scored[-1]}"
    )
    print(
        f"{data['train']:,} training and {data['held_out']:,} held-out sequences of {task.n_ctx} tokens, "
        f"vocabulary {data['vocabulary']}; the prediction made at {scored} is scored\n"
    )
    rows = [["chance", percent(task.chance)], *([k, percent(v)] for k, v in shortcuts.items())]
    print_table(["shortcut", "held-out"], rows, right={1})


@app.command()
def train(
    name: Annotated[str, typer.Argument(help="A shipped recipe, or a TOML file.")],
    seeds: Annotated[str, typer.Option(help="Such as 3, 0-4 or 0,2,5.")] = "0",
    steps: Annotated[int | None, typer.Option(help="Instead of the recipe's.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUES", help="Such as lr=1e-3,3e-3; several make a grid."),
    ] = None,
    jobs: Jobs = None,
    dask: Dask = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 … or mps.")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with unfinished runs.")] = False,
) -> None:
    """Train a model from its recipe; several seeds, or a grid of settings, side by side."""
    from workbench.recipes import grid, load_recipe

    recipe = load_recipe(name)
    if steps is not None:
        recipe = recipe.with_steps(steps)
    made = grid(recipe, settings or [])
    numbers = _numbers(seeds)
    if len(made) * len(numbers) > MOST_RUNS:
        raise WorkbenchError(
            f"{len(made):,} settings of {len(numbers):,} seeds are more than {MOST_RUNS:,} runs; ask for fewer at once"
        )
    said = [said for said, _ in made for _ in numbers]
    wanted = [each.with_seed(seed) for _, each in made for seed in numbers]
    from workbench.sweeps import train_many

    with Bars(wanted) as bars:
        runs = train_many(wanted, jobs=jobs, resume=resume, watch=bars.watch, cluster=dask, device=device)
    for setting, run in zip(said, runs, strict=True):
        results = run.results
        print(
            f"{run.name}{f' ({setting})' if setting else ''} seed {run.seed}: {run.score}, training accuracy "
            f"{percent(results['train']['accuracy'])}, {results['steps']:,} steps "
            f"in {results['seconds']:.0f} s → {run.path}"
        )


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="Which table; `all` makes every one, and a page about them.")],
    seeds: Annotated[int | None, typer.Option(help="How many; by default the table's own number.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="quick: its shape in minutes; half of the steps; or full. By default the table's own."),
    ] = None,
    split_per_seed: Annotated[
        bool, typer.Option("--split-per-seed", help="Hold out other examples for every seed, not the same for all.")
    ] = False,
    trained: Annotated[
        bool, typer.Option("--trained", help="Train nothing: rows whose models are not there say so.")
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="attention-cost: what a row may take; larger ones are predicted."),
    ] = None,
    jobs: Jobs = None,
    dask: Dask = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write JSON to this file; - is the terminal.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write CSV.")] = None,
    md_file: Annotated[Path | None, typer.Option("--md", help="Write Markdown.")] = None,
    tex_file: Annotated[Path | None, typer.Option("--tex", help="Write LaTeX, for the package booktabs.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="With `all`: where to write results.md and results/; by default here.")
    ] = None,
) -> None:
    """Train what a table needs, side by side, and print it. Killed and started again, it goes on."""
    from workbench.tables import TABLES, order

    files = {"json": json_file, "csv": csv_file, "markdown": md_file, "tex": tex_file}
    if name != "all":
        if folder is not None:
            raise WorkbenchError("--folder is for `workbench table all`; --json, --csv, --md and --tex name files")
        for file in files.values():
            check_writable(file)
        options = {} if memory is None else {"memory": memory}
        made = _make(order(name, seeds, budget, split_per_seed, options), trained, jobs, dask)
        if Path("-") not in files.values():
            show(made)
        for form, file in files.items():
            if file:
                write_file(file, getattr(made, form)())
        return
    from workbench.tables.report import command

    if any(files.values()):
        raise WorkbenchError("`all` writes results/NAME.json and .md for every table; choose where by --folder")
    if memory is not None:
        raise WorkbenchError("--memory is for `workbench table attention-cost`, not for `all`")
    page = (folder or Path()) / "results.md"
    check_writable(page)
    orders = [order(each, seeds, budget, split_per_seed) for each in TABLES]
    _write_all(
        page, orders, lambda each: _make(each, trained, jobs, dask),
        command(seeds, budget, split_per_seed, trained, folder),
    )  # fmt: skip


def _write_all(page: Path, orders: "list[Order]", make: "Callable[[Order], Table]", command: str) -> None:
    """Every table and the page about them; where a text is missing, the tables that need none, and no page."""
    from workbench.tables.report import report

    done, missing = {}, None
    for each in orders:
        try:
            made = make(each)
        except NoCorpus as error:
            missing = error
            continue
        done[each.name] = (each, made)
        (page.parent / "results").mkdir(exist_ok=True)
        for form, suffix in (("json", "json"), ("markdown", "md")):
            write_file(page.parent / "results" / f"{each.name}.{suffix}", getattr(made, form)())
        print(f"{each.name}: {page.parent / 'results' / each.name}.md")
    if missing:
        left = ", ".join(each.name for each in orders if each.name not in done)
        raise NoCorpus(f"{left}, and the page on all, are not written: {missing}")
    write_file(page, report(done, command))
    print(f"all: {page}")


def _make(order: "Order", trained: bool, jobs: int | None, cluster: str | None) -> "Table":
    with Bars([] if trained else order.untrained) as bars:
        return order.make(trained_only=trained, jobs=jobs, watch=bars.watch, measured=bars.measured, cluster=cluster)


data = typer.Typer(help="Texts to train on, which are fetched and not part of the workbench.", rich_markup_mode=None)
app.add_typer(data, name="data")


@data.command()
def fetch(
    name: Annotated[str, typer.Argument(help="Such as shakespeare.")],
    source: Annotated[Path | None, typer.Option("--from", help="Take this copy instead of downloading one.")] = None,
) -> None:
    """Get a text, check that it is the right one, and keep it."""
    from workbench.corpora import fetch

    print(fetch(name, source))


@app.command()
def attention(
    run: Annotated[str, typer.Argument(help="A model's name, or a run's folder.")],
    prompt: Annotated[str, typer.Argument(help="Words of the model's vocabulary.")],
    against: Annotated[str | None, typer.Option(help="A second prompt, to compare.")] = None,
    head: Annotated[str | None, typer.Option(help="Such as 1.3; by default the mean over each block's heads.")] = None,
    position: Annotated[int, typer.Option(help="The destination; −1 is the last word.")] = -1,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    step: Annotated[int | None, typer.Option(min=0, help="A checkpoint.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the maps as a page that needs no network.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a destination attends to, block by block, and what the model says next."""
    from workbench.attention_report import attention_report
    from workbench.runs import load

    check_writable(html)
    prompts = [prompt] if against is None else [prompt, against]
    report = attention_report(load(run, seed, step), prompts, head=head, destination=position)
    if html:
        write_file(html, report.html())
    if as_json:
        print(json.dumps(report.data, indent=1))
        return
    for line in report.lines():
        print(line)
    if report.rows:
        print_table(report.headings, report.rows, right=set(range(2, len(report.headings))))


@app.command()
def inspect(
    run: Annotated[str, typer.Argument(help="A model's name, or a run's folder.")],
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    step: Annotated[int | None, typer.Option(min=0, help="A checkpoint.")] = None,
    draws: Annotated[int, typer.Option(min=39, help="Draws for each null that is drawn.")] = 199,
    as_json: Json = False,
) -> None:
    """Read a model's heads and circuits: scores with their nulls, composition above chance, what its cuts cost."""
    from workbench.inspect_report import inspect_report
    from workbench.runs import load

    report = inspect_report(load(run, seed, step), draws)
    if as_json:
        print(json.dumps(report.data, indent=1))
        return
    for line in report.lines():
        print(line)
    for headings, rows, notes in (report.head_table(), report.pair_table()):
        print()
        if rows:
            print_table(headings, rows)
        for note in notes:
            print(f"· {note}")
    print(f"\n{report.memory_line()}")
    if report.claims:
        print("\nwhat can be said, and what the experiment that could refute it found:")
    for claim in report.claims:
        print(f"  {claim}")


@app.command()
def dynamics(
    runs: Annotated[list[str], typer.Argument(help="Models' names, or runs' folders.")],
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    all_seeds: Annotated[bool, typer.Option("--all-seeds", help="Every trained seed of each model.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="First read missing probes from checkpoints.")] = False,
    step: Annotated[int | None, typer.Option(min=0, help="A checkpoint, marked in the page.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the figure as a page that needs no network.")] = None,
    as_json: Json = False,
) -> None:
    """Show how scores move over training, and where they change phase."""
    from workbench.dynamics_report import dynamics_report

    check_writable(html)
    report = dynamics_report(runs, seed, every_seed=all_seeds, probe=probe)
    if html:
        write_file(html, report.html(step))
    if as_json:
        print(json.dumps(report.data, indent=1))
        return
    print_table(list(report.headings), report.rows, right={1, 4, 5})
    for line in report.lines():
        print(line)
    for fault in report.faults:
        say(f"· {fault}")


@app.command()
def check(
    fresh: Annotated[int, typer.Option(min=2, help="Freshly initialised models, in which there is nothing.")] = 200,
    as_json: Json = False,
) -> None:
    """Read models whose circuits are known, and models that have none: does the library find what is there?"""
    from dataclasses import asdict

    from rich.console import Console
    from rich.progress import track

    from workbench.check import findings, nulls

    found = list(findings())
    console = Console(stderr=True)
    steps = iter(track(range(fresh), "fresh models", console=console, disable=not console.is_terminal, transient=True))
    shares, roles = nulls(fresh, watch=lambda done: next(steps, None))
    wrong = sum(not finding.right for finding in found)
    if as_json:
        null = {"models": fresh, "heads_with_a_role": roles, "outside_the_band": [asdict(share) for share in shares]}
        print(json.dumps({"hand_built": [asdict(finding) for finding in found], "fresh": null}, indent=1))
    else:
        print_table(
            ["", "model", "what", "expected", "found"],
            [["✓" if f.right else "✗", f.model, f.what, f.expected, f.found] for f in found],
        )
        print(f"{len(found) - wrong} of {len(found)} findings on hand-built models are right\n")
        print_table(
            ["score", "outside its 95 % band", "standard error", "scores"],
            [[s.measure, percent(s.share), percent(s.standard_error), f"{s.n:,}"] for s in shares],
            right={1, 2, 3},
        )
        print(f"on {fresh} freshly initialised models, 5 % by chance; heads with a role: {roles}")
    if wrong or roles:
        raise typer.Exit(1)


@app.command("app")
def open_app(
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="By default 8501, or the next free one.")] = None,
    address: Annotated[str, typer.Option(help="127.0.0.1 is this machine only.")] = "127.0.0.1",
    headless: Annotated[bool, typer.Option("--headless", help="Do not open a browser.")] = False,
) -> None:
    """Open the workbench in a browser."""
    import socket

    from workbench.content import content
    from workbench.runs import runs_folder

    try:
        with socket.create_server((address, port or 0)):  # Streamlit's own words on this fill a screen
            pass
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise WorkbenchError(f"cannot open {address}, port {port or 8501} ({why}); choose another") from None
    script = content("app.py")
    options = {
        "server.address": address,
        "server.headless": str(headless).lower(),
        "server.showEmailPrompt": "false",
    } | ({"server.port": str(port)} if port else {})
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    os.environ["WORKBENCH_RUNS"] = str(runs_folder())
    os.chdir(script.parent)  # where Streamlit looks for .streamlit/config.toml
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "streamlit", "run", str(script), *flags])


def main() -> None:
    """Run the command line, with every foreseen error as one line."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except (WorkbenchError, CircuitError) as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is not None:
            _fail(f"cannot read or write {error.filename} ({error.strerror})")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python flushes it at exit, and the real one fails
        _fail(f"cannot write the output ({error.strerror})")
    except Exception as error:
        if not hasattr(error, "format_message"):  # the parser's own errors have it; the rest are bugs, shown whole
            raise
        _fail(error.format_message())  # type: ignore[attr-defined]
    if code == INTERRUPTED:
        say("stopped; what was saved is kept: the same command goes on, a training with --resume")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    say(" ".join(message.split()))
    sys.exit(2)


def _numbers(text: str) -> list[int]:
    """Seeds from "3", "0-4" or "0,2,5"."""
    numbers: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            start, end = int(first), int(last or first)
            if start < 0 or not 0 <= end - start < MOST_RUNS - len(numbers):
                raise ValueError
            numbers += range(start, end + 1)
    except ValueError:
        raise WorkbenchError(
            f"--seeds {plain(text, 60)}: expected a number, a range such as 0-4, or a list such as 0,2,5; "
            f"{MOST_RUNS:,} at most"
        ) from None
    return list(dict.fromkeys(numbers))
