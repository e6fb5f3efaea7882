"""The page on circuits in a real Chromium: what it shows is chosen, searched, and restored by a link."""

import re

from browsing import PATIENCE, drawn
from playwright.sync_api import expect

import workbench as wb
from circuits.entries import token_circuit
from workbench.figures.heads import plus


def test_a_cell_says_its_number_and_its_null(visit):
    page = visit("/circuits?model=winograd-2&circuits_head=1.2")
    drawn(page, "circuits_matrix", 1)
    entries = token_circuit(wb.load("winograd-2").model, "1.2", "OV").at()
    words = wb.load("winograd-2").task.vocabulary.words
    i = words.index("street")
    box = page.locator(".st-key-circuits_matrix .heatmaplayer").bounding_box()
    assert box is not None
    x, y = (box[at] + box[size] * (i + 0.5) / 36 for at, size in (("x", "width"), ("y", "height")))
    page.mouse.move(x - 3, y - 3)
    page.mouse.move(x, y, steps=4)
    label = page.locator(".st-key-circuits_matrix .hoverlayer .hovertext")
    expect(label).to_contain_text(
        f"‘street’ → output ‘street’: {plus(float(entries.values[i, i]))} logits", timeout=PATIENCE
    )
    expect(label).to_contain_text(f"by chance {plus(float(entries.low[i, i]))}")


def test_parts_a_search_and_a_link(visit):
    page = visit("/circuits?model=winograd-2", color_scheme="dark")
    page.get_by_role("radio", name="QK", exact=True).click()
    expect(page.get_by_text(re.compile("head 0.0 looks for"))).to_be_visible(timeout=PATIENCE)
    page.locator(".st-key-circuits_token input").click()
    page.keyboard.type("tired")
    page.keyboard.press("Enter")
    expect(page.get_by_text("‘tired’ as destination: most")).to_be_visible(timeout=PATIENCE)
    page.wait_for_url("**circuits_token=tired*")
    again = visit(page.url[page.url.index("/", 8) :])
    expect(again.get_by_text("‘tired’ as destination: most")).to_be_visible(timeout=PATIENCE)
    again.locator(".st-key-circuits_what button", has_text="eigenvalues").click()
    drawn(again, "circuits_spectrum", 2)
