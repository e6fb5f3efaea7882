"""The tables page in a real Chromium: the committed figures are on the screen, in the files, and behind the link."""

import json
import re

from browsing import PATIENCE, drawn, same_view
from playwright.sync_api import expect

from workbench.content import content
from workbench.tables import winograd


def committed(name):
    return json.loads((content("docs/results") / f"{name}.json").read_text())


def test_every_seed_is_on_the_screen_and_in_the_files(visit):
    page = visit("/tables")
    drawn(page, "tables_seeds", 1)
    rows = committed("winograd")["rows"]
    table = page.locator(".wb-journal").first
    expect(table.get_by_role("rowheader")).to_have_text([row["model"] for row in rows])
    for row in rows:
        seeds = " ".join(f"{100 * value:.1f}" for value in row["held_out_accuracy"]["per_seed"])
        expect(table.locator("tr", has=page.get_by_role("rowheader", name=row["model"], exact=True))).to_contain_text(
            seeds
        )
    dots = page.locator(".st-key-tables_seeds .scatterlayer .points path")
    n_seeds = sum(len(row["seeds"]) for row in rows)
    expect(dots).to_have_count(n_seeds + len(rows))  # and a tick for each mean
    dots.last.hover(force=True)
    expect(page.locator(".st-key-tables_seeds .hoverlayer")).to_contain_text("winograd-leaky-1")

    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    assert json.loads(download.value.path().read_text()) == committed("winograd")
    with page.expect_download() as download:
        page.get_by_role("button", name="LaTeX", exact=True).click()
    assert r"\bottomrule" in download.value.path().read_text()


def test_a_table_is_chosen_by_the_keyboard_and_a_link_restores_it(visit):
    page = visit("/tables")
    drawn(page, "tables_seeds", 1)
    page.get_by_role("radio", name="all columns").focus()
    page.keyboard.press("Space")
    headings = [column.heading for column in winograd.COLUMNS]
    expect(page.locator(".wb-journal").first.get_by_role("columnheader")).to_have_text(headings, timeout=PATIENCE)
    chooser = page.locator(".st-key-tables_name input")
    chooser.focus()
    page.keyboard.type("induction-h")
    page.keyboard.press("Enter")
    title = committed("induction-heads")["title"]
    expect(page.locator(".wb-journal caption").first).to_have_text(title, timeout=PATIENCE)
    page.wait_for_url(re.compile("tables_name=induction-heads"))

    again = visit(page.url[page.url.index("/", 8) :])
    expect(again.locator(".wb-journal caption").first).to_have_text(title, timeout=PATIENCE)
    same_view(again, page, ".wb-journal")
