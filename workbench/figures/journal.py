"""A table as a journal prints it: rules above and below, figures set to the right, nothing else. HTML."""

import html
import re
from collections.abc import Collection, Sequence

STYLE = """<style>
.wb-journal { overflow-x: auto; margin: .2rem 0 .3rem; }
.wb-journal table { border-collapse: collapse; border-top: 2px solid; border-bottom: 2px solid; }
.wb-journal table { font-size: .86rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
.wb-journal caption { text-align: left; padding: 0 0 .35rem; font-size: .95rem; font-weight: 600; color: inherit; }
.wb-journal th, .wb-journal td { border: 0; padding: .2rem .65rem; vertical-align: baseline; text-align: left; }
.wb-journal th, .wb-journal td { white-space: nowrap; }
.wb-journal thead th { font-weight: 600; vertical-align: bottom; border-bottom: 1px solid; }
.wb-journal tbody th { font-weight: 400; }
.wb-journal tr > :first-child { padding-left: .15rem; }
.wb-journal tr > :last-child { padding-right: .15rem; }
.wb-journal tbody tr:first-child > * { padding-top: .4rem; }
.wb-journal tbody tr:last-child > * { padding-bottom: .4rem; }
.wb-journal .wb-figure { text-align: right; }
.wb-journal .wb-many { min-width: min(12.5rem, 45vw); max-width: 24rem; white-space: normal; }
.wb-journal tbody tr:hover { background: rgba(138, 143, 152, .12); }
.wb-notes { font-size: .8rem; line-height: 1.45; opacity: .72; }
.wb-notes div { margin: 0 0 .15rem; }
.wb-notes code { font-size: .95em; color: inherit; background: none; padding: 0; }
</style>"""
MANY = 22
"""Characters from which a cell of words, or a heading, may take more than one line."""

COLUMN, ROW = ' scope="col"', ' scope="row"'


def journal_html(
    headings: Sequence[str], rows: Sequence[Sequence[str]], figures: Collection[int] = (), caption: str = ""
) -> str:
    """`rows` of plain text under `headings`; columns whose number is in `figures` are set to the right.

    The first column names its row. A table that is wider than the page scrolls, by the keyboard too.
    """
    long = {i for i in range(len(headings)) if any(len(row[i]) > MANY for row in rows)}

    def cell(tag: str, i: int, text: str, scope: str = "") -> str:
        wraps = len(text) > MANY if scope == COLUMN else i in long and i not in figures
        kinds = ["wb-figure"] * (i in figures) + ["wb-many"] * wraps
        kind = f' class="{" ".join(kinds)}"' if kinds else ""
        return f"<{tag}{kind}{scope}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", i, text, COLUMN) for i, text in enumerate(headings))
    body = "".join(
        "<tr>" + "".join(cell("td" if i else "th", i, text, "" if i else ROW) for i, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    called = html.escape(caption or ", ".join(filter(None, headings)))
    titled = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wb-journal" tabindex="0" role="region" aria-label="{called}">'
        f"<table>{titled}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def notes_html(notes: Sequence[str]) -> str:
    """What stands under a table, in small print; `code` is set as such."""
    lines = [re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(note, quote=False)) for note in notes]
    return f'<div class="wb-notes">{"".join(f"<div>{line}</div>" for line in lines)}</div>'
