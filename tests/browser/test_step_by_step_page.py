"""Step by step in a real Chromium: what is touched lights up, a typed number goes through, a link restores the view."""

import re
from dataclasses import replace

from browsing import PATIENCE, drawn, same_view
from playwright.sync_api import Locator, expect
from support import SENTENCE

import workbench as wb
from circuits.steps import predicted, step_by_step
from workbench.wording import percent


def lit(cell: Locator) -> bool:
    return cell.evaluate("e => getComputedStyle(e).boxShadow") != "none"


def touched(cell: Locator, shown: Locator) -> bool:
    """Whether something lights up when a cell is touched; a page that still moves is touched again."""
    for _ in range(50):
        cell.hover()
        if lit(shown):
            return True
        cell.page.wait_for_timeout(100)
    return False


def test_a_touched_word_lights_up_in_every_step(visit):
    page = visit("/step_by_step?steps_head=1.1")
    words = page.locator(".sb thead th[tabindex]")
    expect(words).to_have_count(15, timeout=PATIENCE)
    rows = page.locator(".sb tbody tr")
    assert touched(words.nth(11), rows.nth(0).locator("td").nth(11))
    for row in range(rows.count()):
        cells = rows.nth(row).locator("td")
        assert lit(cells.nth(11)) and not lit(cells.nth(3))
    page.mouse.move(2, 2)
    words.nth(3).focus()  # the keyboard will do
    assert lit(rows.nth(0).locator("td").nth(3)) and not lit(rows.nth(0).locator("td").nth(11))
    # q·k comes from the key of its column and from the whole query
    assert touched(rows.nth(1).locator("td").nth(5), page.locator(".r-q b").first)
    assert lit(rows.nth(0).locator("td").nth(5))


def test_a_typed_number_goes_through_to_the_next_word(visit):
    page = visit("/step_by_step?model=winograd-1-hand&steps_edit=true&pair=none&steps_head=0.0")
    run = wb.load("winograd-1-hand")
    tokens = run.encode(SENTENCE)
    own = step_by_step(run.model, tokens, "0.0")
    drawn(page, "steps_plane", 1)  # nothing moves any more
    editor = page.get_by_test_id("stDataFrame").last
    editor.scroll_into_view_if_needed()
    box = editor.bounding_box()
    assert box is not None
    page.mouse.dblclick(box["x"] + 60, box["y"] + 54)  # a scroller lies over the canvas
    page.locator("#portal input").fill("500", timeout=PATIENCE)
    page.keyboard.press("Enter")
    expect(page.get_by_text("as changed on this page")).to_be_visible(timeout=PATIENCE)
    products = own.products.clone()
    products[0] = 500
    changed = predicted(run.model, tokens, replace(own, other_products=products)).softmax(-1)
    line = page.locator(".wb-line", has_text="as changed on this page")
    best = int(changed.argmax())
    expect(line).to_contain_text(f"{run.task.vocabulary.words[best]} {percent(float(changed[best]))}", timeout=PATIENCE)
    expect(page.locator(".r-dot td").first).to_have_text("500.00")


def test_a_link_restores_head_switches_and_word(visit):
    page = visit("/step_by_step?pair=none")
    page.locator(".st-key-steps_head button", has_text="1.2").click()
    expect(page.get_by_text(re.compile("head 1.2 looks most at"))).to_be_visible(timeout=PATIENCE)
    page.locator(".st-key-steps_follow button", has_text="tired").click()
    expect(page.locator(".sb-told")).to_contain_text("11 ‘tired’", timeout=PATIENCE)
    page.get_by_text("÷ √d_k", exact=True).click()
    expect(page.locator(".sb s").first).to_contain_text("÷ √16", timeout=PATIENCE)
    page.wait_for_url("**steps_scale=false*")
    again = visit(page.url[page.url.index("/", 8) :])
    same_view(again, page, ".sb-told", ".sb")
