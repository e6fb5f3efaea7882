"""Small tables for the page, as HTML: tokens in a monospace, numbers to the right, what lies in its null grey."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.figures import style

STYLE = f"""<style>
.wb-list {{ border-collapse: collapse; font-size: .88rem; margin: .2rem 0 .6rem; }}
.wb-table {{ overflow-x: auto; max-width: 100%; }}
.wb-list caption {{ text-align: left; font-weight: 600; padding-bottom: .25rem; }}
.wb-list th {{ font-weight: 500; opacity: .7; text-align: left; padding: .1rem 1.1rem .25rem 0;
  border-bottom: 1px solid {style.FAINT}; }}
.wb-list td {{ padding: .14rem 1.1rem .14rem 0; vertical-align: baseline; }}
.wb-list .number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
.wb-list .token {{ font-family: {style.MONOSPACE}; font-size: .82rem; white-space: pre-wrap; }}
.wb-note {{ font-size: .8rem; opacity: .7; max-width: 24rem; margin: 0 0 .6rem; }}
.wb-list .inside {{ color: {style.GREY}; }}
.wb-lists {{ display: flex; flex-wrap: wrap; gap: .4rem 2.6rem; align-items: flex-start; overflow-x: auto; }}
.wb-kind {{ display: inline-block; min-width: 1.1rem; padding: 0 .3rem; border-radius: .2rem; font-size: .8rem;
  font-weight: 600; color: #fff; text-align: center; }}
.wb-kind.K {{ color: #16171a; }}
</style>"""


@dataclass(frozen=True)
class Cell:
    """One cell: what it says, and how."""

    text: str
    kind: str = ""
    """"number", "token" or "" for words."""
    inside: bool = False
    """Inside its null: grey."""


def token(text: str) -> Cell:
    """A token as it is written everywhere: · for a leading space, ↵ for a newline."""
    return Cell(style.visible(text), "token")


def number(text: str, inside: bool = False) -> Cell:
    return Cell(text, "number", inside)


def listing(headings: Sequence[str], rows: Sequence[Sequence[Cell]], title: str = "", note: str = "") -> str:
    """One table, with a note under it. Everything in it is shown, nothing is obeyed."""
    kinds = [cell.kind for cell in rows[0]] if rows else [""] * len(headings)
    head = "".join(f'<th class="{kind if kind == "number" else ""}" scope="col">{html.escape(heading)}</th>'
                   for heading, kind in zip(headings, kinds, strict=True))  # fmt: skip
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    caption = f"<caption>{html.escape(title)}</caption>" if title else ""
    below = f'<p class="wb-note">{html.escape(note)}</p>' if note else ""
    table = f'<table class="wb-list">{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wb-table">{table}{below}</div>'


def side_by_side(*tables: str) -> str:
    """Tables beside each other where there is room."""
    return f'<div class="wb-lists">{"".join(tables)}</div>'


def _cell(cell: Cell) -> str:
    classes = " ".join(name for name in (cell.kind, "inside" if cell.inside else "") if name)
    if cell.kind in ("Q", "K", "V"):
        badge = (
            f'<span class="wb-kind {cell.kind}" style="background:{style.COMPOSITION[cell.kind]}">{cell.kind}</span>'
        )
        return f"<td>{badge} {html.escape(cell.text, quote=False)}</td>"
    return f'<td class="{classes}">{html.escape(cell.text, quote=False)}</td>'
