"""The page on heads in a real Chromium: a click opens a head, a link restores it, claims are checked."""

import re

from browsing import PATIENCE, click, drawn
from playwright.sync_api import expect


def test_a_click_on_a_line_opens_the_heads_page_and_a_link_restores_it(visit):
    page = visit("/heads?model=induction-2-attn")
    drawn(page, "heads_table", 1)
    layer = page.locator(".st-key-heads_table .cartesianlayer")

    def point():
        box = layer.bounding_box()
        assert box is not None
        y = box["y"] + box["height"] * 6.5 / 8  # the seventh of eight lines: head 1.2
        page.mouse.move(box["x"] + 20, y - 3)
        page.mouse.move(box["x"] + 20, y, steps=4)
        expect(page.locator(".st-key-heads_table .hoverlayer")).to_contain_text("head 1.2: induction", timeout=PATIENCE)

    click(point, page.get_by_text("Head 1.2 (block 2) is called induction"))
    drawn(page, "head_map", 1)
    page.wait_for_url("**head_page=1.2*")
    again = visit(page.url[page.url.index("/", 8) :])
    expect(again.get_by_text("Head 1.2 (block 2) is called induction")).to_be_visible(timeout=PATIENCE)
    again.get_by_role("link", name="On Circuits").click()
    expect(again.get_by_role("heading", name="Circuits")).to_be_visible(timeout=PATIENCE)
    expect(again.get_by_text(re.compile("head 1.2 raises"))).to_be_visible(timeout=PATIENCE)


def test_claims_are_checked_by_keyboard(visit):
    page = visit("/heads?model=induction-2-attn", color_scheme="dark")
    drawn(page, "heads_table", 1)
    expect(page.locator(".wb-list td", has_text="–").first).to_be_visible(timeout=PATIENCE)
    page.locator(".st-key-heads_check input").focus()
    page.keyboard.press("Space")
    expect(page.locator(".wb-list tr", has_text="✓").first).to_contain_text(
        "looks at the token before", timeout=PATIENCE
    )
    page.wait_for_url("**heads_check=true*")
