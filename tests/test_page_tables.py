"""The tables page: what is committed, what is yours, and files that are no tables."""

import json
import re
from html import escape

import pytest
from support import app_page

from workbench.content import content
from workbench.pages import results, tables_parts
from workbench.tables import TABLES, engine, order, winograd
from workbench.tables.engine import Quick

COMMITTED = [name for name in TABLES if (content("docs/results") / f"{name}.json").exists()]


def committed(name):
    return json.loads((content("docs/results") / f"{name}.json").read_text())


def html(app) -> str:
    return " ".join(element.proto.body for element in app.get("html"))


def captions(app):
    return [caption.value for caption in app.caption]


def charts(app):
    return [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]


@pytest.fixture(autouse=True)
def fresh():
    """Rows are kept by the path of their folder, which another test had too."""
    results._kept.clear()


@pytest.mark.parametrize("name", COMMITTED)
def test_every_committed_table_opens_with_all_its_cells(name):
    app = app_page("tables", tables_name=name, tables_columns="all columns")
    assert not app.error and app.selectbox(key="tables_name").value == name
    data, body = committed(name), html(app)
    for cell in {cell for row in results.make(data).cells() for cell in row}:
        assert f">{escape(cell)}<" in body
    assert data["command"] in [code.value for code in app.code]
    assert "no longer" not in body and not app.warning
    if "recipe_sha256" in data["rows"][0]:
        assert data["rows"][0]["recipe_sha256"][:12] in body
        assert any("All of these are today's recipes" in caption for caption in captions(app))
    assert any(data["versions"]["torch"] in caption for caption in captions(app))


def test_the_page_opens_on_winograd_and_says_what_it_shows():
    app = app_page("tables")
    rows = committed("winograd")["rows"]
    means = {row["model"]: row["held_out_accuracy"]["mean"] for row in rows}
    said, lowest = app.markdown[0].value, min(means, key=means.__getitem__)
    assert f"mean held-out accuracy from {100 * means[lowest]:.1f} ({lowest}) to 100.0 % (winograd-2" in said
    compared = winograd.compared(rows)
    agree = sum(bool(each.agrees) for each in compared)
    assert f"{agree} of {sum(each.agrees is not None for each in compared)} published figures agree" in said
    (chart,) = charts(app)
    seeds = next(trace for trace in chart["data"] if trace["name"] == "seeds")
    assert seeds["x"] == [100 * value for row in rows for value in row["held_out_accuracy"]["per_seed"]]
    hollow = [symbol == "circle-open" for symbol in seeds["marker"]["symbol"]]
    assert f"({sum(hollow)} dots)" in next(caption for caption in captions(app) if "Hollow" in caption)
    assert not any(hollow[i] for i, x in enumerate(seeds["x"]) if x == 100)


def test_main_columns_are_those_of_a_narrow_terminal():
    app = app_page("tables")
    heads = re.findall(r'<th[^>]*scope="col">([^<]*)</th>', html(app).partition("<tbody>")[0])
    assert heads == [column.heading for column in winograd.COLUMNS if column.essential]


@pytest.mark.parametrize(
    "query",
    [{"tables_name": "nonsense"}, {"tables_measure": "z"}, {"tables_columns": "?"}, {"tables_from": "elsewhere"}],
)
def test_a_stale_link_opens_the_usual_view(query):
    app = app_page("tables", **query)
    assert not app.error and app.selectbox(key="tables_name").value == "winograd" and len(charts(app)) == 1


def test_a_prompt_that_cannot_be_read_does_not_matter():
    app = app_page("tables", prompt="zebra zebra")
    assert not app.error and charts(app)


def test_a_measure_is_chosen_and_comes_by_its_link():
    app = app_page("tables", tables_name="induction", tables_measure="prefix matching")
    rows = committed("induction")["rows"]
    (chart,) = charts(app)
    traces = {trace["name"]: trace for trace in chart["data"]}
    assert traces["seeds"]["x"] == [value for row in rows for value in row["prefix_matching"]["per_seed"]]
    assert traces["null"]["x"][0] == min(rows[2]["prefix_matching"]["low"])


def test_no_null_is_claimed_where_none_is_known():
    app = app_page("tables", tables_name="ladder")
    assert any("No null of it is known here" in caption for caption in captions(app))


EMPTY = {"table": "winograd", "title": "", "command": "", "versions": {}, "trained_with": [], "notes": [], "rows": []}
BAD = {
    "half.json": ('{"table": "winograd", "ti', "half.json is damaged or half written"),
    "empty.json": ("", "empty.json is damaged or half written"),
    "list.json": ("[1, 2]", "list.json is no table"),
    "foreign.json": ('{"name": "package", "version": "1"}', "foreign.json is no table"),
    "nan.json": ('{"rows": [NaN]}', "NaN is no number of a table"),
    "deep.json": ("[" * 100_000, "deep.json is damaged or half written"),
    "other.json": (json.dumps(EMPTY | {"table": "x"}), "no table is called 'x'"),
    "rows.json": (json.dumps(EMPTY | {"rows": [3]}), "has rows without a budget"),
    "trained.json": (json.dumps(EMPTY | {"trained_with": "x"}), "trained.json is no table"),
}  # fmt: skip


def test_files_that_are_no_tables_are_one_line_each_and_the_page_stands(runs):
    folder = runs / "tables"
    folder.mkdir(parents=True)
    for name, (text, _) in BAD.items():
        (folder / name).write_text(text)
    (folder / "large.json").write_text(" " * (results.LARGEST + 1))
    app = app_page("tables")
    assert not app.error and len(charts(app)) == 1
    for _, message in [*BAD.values(), ("", "too large for a table")]:
        (line,) = [caption for caption in captions(app) if message in caption]
        assert "\n" not in line and "workbench table NAME --json" in line


@pytest.mark.parametrize("rows", [
    [{"budget": "full"}],
    [{"budget": "full", "model": "winograd-2", "held_out_accuracy": "high"}],
    [{"budget": "huge", "model": 3, "held_out_accuracy": {"mean": "x", "per_seed": []}}],
])  # fmt: skip
def test_a_table_of_other_rows_is_one_line(runs, rows):
    (runs / "tables").mkdir(parents=True)
    data = committed("winograd") | {"rows": rows}
    (runs / "tables" / "mine.json").write_text(json.dumps(data))
    app = app_page("tables", tables_from="yours: tables/mine.json")
    assert not app.error and not charts(app)
    (line,) = [caption for caption in captions(app) if "not what workbench.tables.winograd makes today" in caption]
    assert data["command"] in line and "\n" not in line
    app.selectbox(key="tables_from").set_value("committed").run()
    assert not app.exception and charts(app)


def test_rows_that_lack_what_only_the_discussion_reads_are_shown_without_it(runs):
    (runs / "tables").mkdir(parents=True)
    data = committed("winograd")
    for row in data["rows"]:
        del row["task"]
    (runs / "tables" / "mine.json").write_text(json.dumps(data))
    app = app_page("tables", tables_from="yours: tables/mine.json")
    assert not app.error and charts(app) and "winograd-average-half" in html(app)
    assert any("cannot all be read" in caption and "KeyError: 'task'" in caption for caption in captions(app))


def test_a_file_of_yours_is_shown_with_its_text_as_text(runs):
    (runs / "results").mkdir(parents=True)
    data = committed("winograd")
    data["title"], data["notes"], data["command"] = "<script>x</script>", ["<img src=x>"], "workbench table winograd"
    data["rows"] = [*data["rows"][:2], {"model": "winograd-2", "budget": "not run"}]
    data["rows"][0]["recipe_sha256"] = "0" * 64
    (runs / "results" / "winograd.json").write_text(json.dumps(data))
    app = app_page("tables", tables_from="yours: results/winograd.json")
    assert not app.error and "<script>" not in html(app) and "<img" not in html(app)
    assert "2 rows of 5 seeds at the full budget, 1 more not run" in app.markdown[0].value
    assert any("Of other recipes than today's: winograd-average." in caption for caption in captions(app))
    assert len(charts(app)[0]["layout"]["yaxis"]["tickvals"]) == 2


def test_without_rows_there_is_still_a_page(runs):
    (runs / "tables").mkdir(parents=True)
    (runs / "tables" / "none.json").write_text(json.dumps(committed("winograd") | {"rows": []}))
    app = app_page("tables", tables_from="yours: tables/none.json")
    assert not app.error and "0 rows" in app.markdown[0].value


@pytest.fixture
def kept(monkeypatch, runs):
    """Two rows of the Winograd table at 1 % of their steps, two seeds, as the command leaves them."""
    monkeypatch.setattr(winograd, "MODELS", ("winograd-average", "winograd-1-hand"))
    monkeypatch.setattr(winograd, "QUICK", Quick(0.01))
    return order("winograd", 2, "quick").make(jobs=1).data


def test_kept_rows_are_the_table_that_the_command_prints(kept, monkeypatch, runs):
    app = app_page("tables", tables_from="yours: quick, 2 seeds")
    assert app.selectbox(key="tables_from").value == "yours: quick, 2 seeds"
    (source,), faults = results.kept("winograd")
    assert source.data == kept and not faults
    assert "2 rows of 1 to 2 seeds at the quick budget" in app.markdown[0].value

    scope: dict = {}
    *lines, last = next(code.value for code in app.code if "seeds_figure" in code.value).strip().splitlines()
    exec("\n".join([*lines, f"figure = {last}"]), scope)
    assert json.loads(scope["figure"].to_json()) == charts(app)[0]

    results._kept.clear()
    (row,) = [p for p in (runs / "tables" / "winograd").glob("*.json") if '"winograd-average"' in p.read_text()]
    row.write_text(row.read_text()[:50])  # half written: no trained row is left
    assert results.kept("winograd")[0][0].label == "yours: exact"

    results._kept.clear()
    monkeypatch.setattr(engine, "_source_sha256", lambda: "of changed code")
    sources, faults = results.kept("winograd")
    assert not sources and faults[0].endswith("`workbench table winograd` measures them again")
    app = app_page("tables")
    assert any("made by other code" in caption for caption in captions(app)) and charts(app)


@pytest.mark.parametrize("name", ["winograd", "ladder"])
def test_the_python_shown_makes_the_figure_shown(name):
    app = app_page("tables", tables_name=name)
    scope: dict = {}
    *lines, last = next(code.value for code in app.code if "seeds_figure" in code.value).strip().splitlines()
    exec("\n".join([*lines, f"figure = {last}"]), scope)
    assert json.loads(scope["figure"].to_json()) == charts(app)[0]


def test_a_file_of_yours_is_loaded_by_its_path(tmp_path):
    file = tmp_path / 'a "b".json'
    file.write_text(json.dumps(committed("ladder")))
    source = results.Source("ladder", "yours: results/x.json", committed("ladder"), str(file))
    scope: dict = {}
    exec(tables_parts.snippet(source, "held_out_perplexity", [None]), scope)
    assert scope["rows"] == committed("ladder")["rows"]


def test_links_to_files_beside_the_results_become_words():
    text = "see ([by_hand.py](../workbench/by_hand.py)) and [a paper](https://example.org/x)"
    assert tables_parts._without_links(text) == "see (by_hand.py) and [a paper](https://example.org/x)"


def test_every_table_is_there_or_told_how_to_make(monkeypatch):
    monkeypatch.setattr(results, "names", lambda found: ["winograd"])
    app = app_page("tables")
    told = next(caption for caption in captions(app) if caption.startswith("Not made yet"))
    assert [name for name in TABLES if f"`workbench table {name}`" in told] == [n for n in TABLES if n != "winograd"]
