"""The parts of the tables page, top to bottom."""

import json
import re
from collections.abc import Sequence
from typing import Any

import streamlit as st

from workbench.figures.journal import STYLE, journal_html, notes_html
from workbench.figures.seeds import is_rate, measure_words, row_labels, seed_lines, seeds_figure, written
from workbench.pages import results, show
from workbench.pages.frame import Refusal, literal, prose
from workbench.pages.results import Shown, Source
from workbench.tables import TABLES
from workbench.tables.table import NOT_RUN
from workbench.wording import count

OPENS_ON = "winograd"
MAIN, ALL = "main columns", "all columns"
AGREES = {True: "✓ agrees", False: "✗ differs", None: ""}
HASH = 12  # of a recipe's hash, shown

EXPLANATION = """\
**A row** is one experiment, trained from scratch once a seed and scored on sequences that no training saw. Every seed
is shown, since a mean hides that some seeds find the rule and others do not.

**95 %** is an interval of the mean. Where errors come in clusters (the sentences about one pair of nouns tend to be
right or wrong together) clusters and seeds are drawn again, and the interval is never narrower than Wilson's with the
clusters as the sample. It knows only the kinds of seeds that were seen; the notes say what so few seeds support.

**Hollow** is a value that chance allows: it lies inside the band of its null, or, of an accuracy, the dotted line lies
in Wilson's 95 % interval with the clusters as the sample. Where no null is known no dot is hollow.

**Agrees** is decided by the rule above the comparison, which stands in the table's code; nobody judges it by eye. The
discussion is written by that code from the same rows.

**The command** makes the table again; runs that are there are not trained again. A row depends on its recipes, its
weights and the code that measured it: yours are shown only if all three are today's. `--trained` trains nothing.
"""


def choose() -> tuple[Source | None, Shown | None, list[int], list[str]]:
    """The table, as it was read, and its columns; and lines on what cannot be shown."""
    source, faults = _choose_source()
    if source is not None:
        try:
            shown = results.read(json.dumps(source.data))
            faults += [shown.fault] if shown.fault else []
            return source, shown, _choose_columns(shown), faults
        except Refusal as error:
            faults.append(str(error))
    return source, None, [], faults


def _choose_source() -> tuple[Source | None, list[str]]:
    found, faults = results.files()
    there = results.names(found)
    if not there:
        return None, faults
    name = _one_of("Table", there, "tables_name", OPENS_ON if OPENS_ON in there else there[0], width=220)
    kept, missing = results.kept(name)
    sources = {source.label: source for source in [*found, *kept] if source.table == name}
    if not sources:
        return None, [*faults, *missing]
    label = next(iter(sources))
    if len(sources) > 1:
        label = _one_of("From", list(sources), "tables_from", label, width=260,
                        help="committed with the workbench, or made here: a file of yours, or the rows that "
                             "`workbench table` kept under your runs")  # fmt: skip
    return sources[label], [*faults, *missing]


def _choose_columns(shown: Shown) -> list[int]:
    """Those that a narrow terminal shows, or all."""
    every = list(range(len(shown.headings)))
    if len(shown.essential) in (0, len(every)):
        return every
    which = st.segmented_control("Columns", [MAIN, ALL], default=MAIN, required=True, key="tables_columns",
                                 bind="query-params", label_visibility="collapsed")  # fmt: skip
    return every if which == ALL else shown.essential


def sentence(source: Source, shown: Shown) -> str:
    """What the table says, in numbers."""
    rows = results.run_rows(source.data)
    missing = len(source.data["rows"]) - len(rows)
    parts = [f"{count(len(rows), 'row')}{_seeds(rows)}{f', {missing} more not run' if missing else ''}"]
    if shown.measures and len(rows) > 1:
        parts.append(_extremes(rows, shown.measures[0]))
    agree, published = shown.agreeing
    if published:
        parts.append(f"{agree} of {count(published, 'published figure')} {'agrees' if agree == 1 else 'agree'}")
    return f"{TABLES[source.table][0].upper()}{TABLES[source.table][1:]}: {'; '.join(parts)}."


def table(source: Source, shown: Shown, columns: Sequence[int]) -> None:
    """The table, the command that makes it, and its notes."""
    figures = {i for i, column in enumerate(columns) if column in shown.figures}
    cells = [[row[column] for column in columns] for row in shown.cells]
    headings = [shown.headings[column] for column in columns]
    st.html(STYLE + journal_html(headings, cells, figures, source.data["title"]))
    st.code(source.data["command"], language="bash")
    st.html(STYLE + notes_html(source.data["notes"]))


def dots(source: Source, shown: Shown) -> tuple[Any, str | None]:
    """Every seed as a dot; the figure and its measure, if the table has one."""
    if not shown.measures:
        return None, None
    rows, measure = results.run_rows(source.data), shown.measures[0]
    with st.container(horizontal=True, gap="small", vertical_alignment="center"):
        st.markdown("**Seed by seed**")
        if len(shown.measures) > 1:
            measure = _one_of("Measure", shown.measures, "tables_measure", measure, format_func=measure_words,
                              width=300, label_visibility="collapsed")  # fmt: skip
    figure = seeds_figure(rows, measure, shown.clusters)
    show.chart(figure, "tables_seeds", wide=False, height=560 if int(figure.layout.height) > 600 else None)  # pyright: ignore
    st.caption(literal(about_dots(rows, measure, shown.clusters)))
    return figure, measure


def about_dots(rows: list[results.Row], measure: str, clusters: list[int | None]) -> str:
    """How to read the dots: only of what is drawn."""
    lines = seed_lines(rows, measure, clusters)
    said = ["A dot is a seed, the tick their mean"]
    if any(line.interval for line in lines):
        said.append("the bar its 95 % interval")
    against = list(dict.fromkeys(line.against for line in lines if line.chance is not None))
    if against:
        said.append(f"dotted {' or '.join(against)}")
    if any(line.bands for line in lines):
        said.append("grey the 95 % band of the null")
    known = sum(bool(line.bands) or line.chance is not None for line in lines)
    hollow = sum(sum(line.inside) for line in lines)
    if not known:
        return f"{', '.join(said)}. No null of it is known here, so no dot is hollow."
    return f"{', '.join(said)}. Hollow: no further from it than chance allows ({count(hollow, 'dot')})."


def comparison(shown: Shown) -> None:
    """Beside the published figures, and in words where they differ."""
    if shown.compared:
        st.markdown("**Beside the published figures**")
        st.caption(prose(shown.rule))
        cells = [[each.what, each.source, each.ours, AGREES[each.agrees]] for each in shown.compared]
        st.html(STYLE + journal_html(["", "source", "ours", ""], cells))
    for paragraph in shown.discussion:
        st.markdown(_without_links(paragraph))


def provenance(source: Source, shown: Shown) -> None:
    """What each row was made from."""
    with st.expander("Provenance"):
        versions = ", ".join(f"{name} {version}" for name, version in source.data["versions"].items())
        where = source.path if source.path is not None else "rows kept under the runs folder"
        trained = "".join(f" · trained with {each}" for each in source.data["trained_with"] if each != versions)
        st.caption(literal(f"{source.label} · {where} · {versions}{trained}"))
        rows = source.data["rows"]
        labels = dict(zip(map(id, results.run_rows(source.data)), row_labels(results.run_rows(source.data)),
                          strict=True))  # fmt: skip
        cells = [
            [labels.get(id(row)) or " · ".join(str(v) for k, v in row.items() if k != "budget"), row["budget"],
             " ".join(map(str, row.get("seeds", []))), *(_number(row, key) for key in ("steps", "seconds")),
             str(row.get("recipe_sha256", ""))[:HASH]]
            for row in rows
        ]  # fmt: skip
        head = ["row", "budget", "seeds", "steps", "seconds", "recipe, sha256"]
        used = [i for i in range(len(head)) if any(row[i] for row in cells)]
        st.html(STYLE + journal_html([head[i] for i in used], [[row[i] for i in used] for row in cells],
                                     {i for i, column in enumerate(used) if column in (3, 4)}))  # fmt: skip
        if any("recipe_sha256" in row for row in rows):
            st.caption(literal(
                f"Of other recipes than today's: {', '.join(shown.outdated)}." if shown.outdated
                else "All of these are today's recipes. Whole hashes are in the files."
            ))  # fmt: skip


def downloads(source: Source, figure: Any) -> None:
    made = results.make(source.data)
    show.downloads(
        f"table-{source.table}",
        figure,
        CSV=("csv", "text/csv", made.csv),
        JSON=("json", "application/json", made.json),
        Markdown=("md", "text/markdown", made.markdown),
        LaTeX=("tex", "application/x-tex", made.tex),
    )


def snippet(source: Source, measure: str, clusters: list[int | None]) -> str:
    """The Python that makes the page's figure. It runs as it stands, in a notebook or a script."""
    given = "" if all(n is None for n in clusters) else f", {clusters}"
    name = json.dumps(source.table)
    if source.path is None:
        asked = re.fullmatch(r".* --seeds (\d+) --budget (\w+)", source.data["command"])
        seeds, budget = asked.groups() if asked else ("None", "full")
        load = f'order({name}, {seeds}, "{budget}").make(trained_only=True).data'
        imports = "from workbench.tables import order"
    else:
        committed = source.label == results.COMMITTED
        path = f'content("docs/results/{source.table}.json")' if committed else f"Path({json.dumps(source.path)})"
        load = f"json.loads({path}.read_text())"
        imports = "from workbench.content import content" if committed else "from pathlib import Path"
        imports = f"import json\n{imports}" if not committed else f"import json\n\n{imports}"
    return f"""\
{imports}
from workbench.figures import seeds_figure

rows = [row for row in {load}["rows"] if row["budget"] != "not run"]
seeds_figure(rows, {json.dumps(measure)}{given})
"""


def not_made(shown: list[str]) -> None:
    """The tables that there is nothing of, with the commands that make them."""
    missing = [name for name in TABLES if name not in shown]
    if missing:
        commands = ", ".join(f"`workbench table {name}`" for name in missing)
        st.caption(f"Not made yet: {commands}.")


def _one_of(label: str, options: list[str], key: str, usual: str, **more: Any) -> str:
    """A choice that falls back where there is no such option."""
    if st.session_state.get(key, usual) not in options:
        del st.session_state[key]
    chosen = st.selectbox(label, options, index=options.index(usual), key=key, bind="query-params", **more)
    return usual if chosen is None else chosen


def _seeds(rows: Sequence[results.Row]) -> str:
    """How many seeds they have, and at which budget."""
    numbers = sorted({len(row["seeds"]) for row in rows if "seeds" in row})
    budgets = sorted({row["budget"] for row in rows} - {NOT_RUN, "exact"})
    if not numbers or not budgets:
        return ""
    seeds = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    each = f" of {seeds} seed{'s' * (numbers[-1] > 1)}" if numbers != [1] else ""
    return f"{each} at the {' and '.join(budgets)} budget"


def _extremes(rows: list[results.Row], measure: str) -> str:
    lines = seed_lines(rows, measure)
    low, high = (pick(lines, key=lambda line: line.mean) for pick in (min, max))
    as_high = sum(written(line.mean, measure) == written(high.mean, measure) for line in lines) - 1
    more = f" and {as_high} more" if as_high else ""
    mean = "mean " if any(len(line.values) > 1 for line in lines) else ""
    ends = [written(line.mean, measure) for line in (low, high)]
    first = ends[0].removesuffix(" %") if is_rate(measure) and ends[0] != ends[1] else ends[0]
    return f"{mean}{measure_words(measure)} from {first} ({low.label}) to {ends[1]} ({high.label}{more})"


def _number(row: results.Row, key: str) -> str:
    value = row.get(key)
    return f"{value:,.0f}" if type(value) in (int, float) else ""


def _without_links(text: str) -> str:
    """Links lead to files beside docs/results.md, which the app does not serve: their words stay."""
    return re.sub(r"\[([^\]]+)\]\((?!https?://)[^)]*\)", r"\1", text)
