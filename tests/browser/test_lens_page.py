"""Lens in a real Chromium: a cell of the grid is named by a click, and a link restores the view."""

import re

from browsing import PATIENCE, click, drawn, same_view
from playwright.sync_api import expect
from support import SENTENCE

import workbench as wb
from circuits.lens import patching
from workbench.figures.style import signed


def test_a_click_on_a_cell_says_what_it_restores(visit):
    page = visit("/lens?lens_patching=true")
    drawn(page, "lens_grid", 4)
    run = wb.load("winograd-2")
    tokens, other = (run.encode(text) for text in (SENTENCE, SENTENCE.replace("tired", "wet")))
    animal, street = (run.task.vocabulary.words.index(word) for word in ("animal", "street"))
    found = patching(run.model, tokens, other, 14, animal, street)
    grid = page.locator(".st-key-lens_grid .cartesianlayer > .subplot").nth(0)

    def point():
        grid.scroll_into_view_if_needed()
        box = grid.locator(".heatmaplayer").bounding_box()
        assert box is not None
        x, y = box["x"] + box["width"] * 14.5 / 15, box["y"] + box["height"] * 0.75
        page.mouse.move(x - 30, y)
        page.mouse.move(x, y, steps=4)
        hover = page.locator(".st-key-lens_grid .hoverlayer .hovertext")
        expect(hover).to_contain_text("the stream before a block, block 2", timeout=PATIENCE)

    said = page.get_by_text(re.compile("The stream before a block, block 2, at 14 ‘the’"))
    click(point, said)
    value = signed(float(found.parts["resid_pre"][1, 14]))
    expect(said).to_contain_text(f"goes from {signed(found.corrupted)} to {value} logits")


def test_a_link_restores_answer_and_foil(visit):
    page = visit("/lens?pair=none")
    drawn(page, "lens_components", 1)
    page.locator(".st-key-lens_foil input").click()
    page.get_by_role("option", name="street", exact=True).click()
    expect(page.get_by_text(re.compile("logits of ‘animal’ − ‘street’")).first).to_be_visible(timeout=PATIENCE)
    page.wait_for_url("**lens_foil=street*")
    sentence = page.get_by_text(re.compile("^At 14 ‘the’ winograd-2 says")).text_content() or ""
    again = visit(page.url[page.url.index("/", 8) :])
    expect(again.get_by_text(re.compile("^At 14 ‘the’ winograd-2 says"))).to_have_text(sentence, timeout=PATIENCE)
    same_view(again, page)
