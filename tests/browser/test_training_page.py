"""The training page in a real Chromium: the slider moves the cursor through all panels and changes the map."""

import re

from browsing import PATIENCE, drawn, same_view
from playwright.sync_api import expect

import workbench as wb
from circuits import attention_maps


def test_the_slider_moves_the_cursor_and_the_map_and_the_link_restores_both(visit):
    page = visit("/training?model=induction-2-attn")
    drawn(page, "training_panels_chart", 6)
    drawn(page, "maps", 2)
    expect(page.get_by_text(re.compile("^At step 481 of 2,000"))).to_be_visible()
    slider = page.locator(".st-key-training_step").get_by_role("slider")
    before = page.locator(".st-key-training_panels_chart .shapelayer path").last.get_attribute("d")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_text(re.compile("^At step 299 of 2,000"))).to_be_visible(timeout=PATIENCE)
    expect(page.get_by_text("Attention at step 299")).to_be_visible(timeout=PATIENCE)
    expect(page.locator(".st-key-training_panels_chart .annotation-text", has_text="step 299")).to_have_count(1)
    drawn(page, "maps", 2)
    assert page.locator(".st-key-training_panels_chart .shapelayer path").last.get_attribute("d") != before
    page.wait_for_url("**training_step=299*")

    run = wb.load("induction-2-attn", step=299)
    prompt = page.locator(".st-key-prompt textarea").input_value()
    likeliest = attention_maps(run.model, run.encode(prompt)).probabilities[-1].max()
    expect(page.locator(".wb-next").first).to_contain_text(f"{100 * float(likeliest):.1f} %")

    again = visit(page.url[page.url.index("/", 8) :])
    expect(again.get_by_text(re.compile("^At step 299 of 2,000"))).to_be_visible(timeout=PATIENCE)
    drawn(again, "maps", 2)
    same_view(again, page)


def test_a_run_without_probes_has_curves_and_the_command(visit):
    page = visit("/training?model=winograd-2", viewport={"width": 390, "height": 844})
    drawn(page, "training_panels_chart", 3)
    expect(page.get_by_text("workbench train winograd-2 --seeds 0-4").first).to_be_visible()
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390  # what is wider scrolls by itself
