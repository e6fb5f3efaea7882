"""Everything by the keyboard: each stop of Tab has a name and a ring that can be seen, and a page is used without a
mouse."""

from itertools import cycle

import pytest
from browsing import PATIENCE, drawn, settled
from playwright.sync_api import Page, expect

import workbench as wb
from circuits import attention_maps
from workbench.figures import attention_rows

PATHS = (
    "/?pair=free+text", "/two_hops", "/heads?head_page=1.0", "/tables", "/training?model=induction-2-attn",
    "/circuits", "/step_by_step", "/lens",
)  # fmt: skip
RING = {"light": "rgb(84, 87, 214) solid 2px", "dark": "rgb(139, 142, 245) solid 2px"}
STILL = "* { transition: none !important; animation: none !important }"
FIRST = "Skip to main content"
MOST = 150  # stops of a page
TAGS = {"main", "body", "a", "button", "input", "textarea", "summary", "div", "canvas", "table", "th", "td", "svg"}
"""What stands for the name of a stop without one."""
STOP = """() => {
  const ring = element => {
    const rings = []
    for (; element && rings.length < 4; element = element.parentElement) rings.push(getComputedStyle(element).outline)
    return rings
  }
  const element = document.activeElement, before = window.before
  element.dataset.reached = ""
  window.before = element
  return {
    name: element.computedName || element.localName, rings: ring(element),
    without: before && before.isConnected ? ring(before) : null,
  }
}"""
"""The name and the outlines of what has the focus and of what it is in, and those of the stop before, which lost it."""
MISSED = """() => [...document.querySelectorAll(".stApp :is(a[href], button, input, textarea, summary)")]
  .filter(e => e.tabIndex >= 0 && !e.disabled && e.checkVisibility({visibilityProperty: true}))
  .filter(e => !(e.closest("[role=radiogroup], [role=toolbar]") || e).matches("[data-reached], :has([data-reached])"))
  .map(e => e.computedName || e.outerHTML)"""


@pytest.mark.parametrize(("path", "scheme"), list(zip(PATHS, cycle(RING), strict=False)))
def test_every_stop_of_tab_has_a_name_and_a_ring(visit, path, scheme):
    page = visit(path, color_scheme=scheme)
    expect(page.locator(".stPlotlyChart .main-svg").first).to_be_visible(timeout=PATIENCE)
    settled(page)
    page.add_style_tag(content=STILL)
    stops = []
    for _ in range(MOST):
        page.keyboard.press("Tab")
        stop = page.evaluate(STOP)
        last = stops[-1] if stops else {"name": "body"}
        if last["name"] != "body" and stop["without"] is not None:
            lost = [a for a, b in zip(last["rings"], stop["without"], strict=True) if a != b]
            assert lost == [RING[scheme]], last["name"]
        if stops and stop["name"] == FIRST:
            break
        stops.append(stop)
    names = [stop["name"] for stop in stops]
    assert len(stops) < MOST and names[0] == FIRST
    assert TAGS.intersection(names) <= {"main", "body"}
    assert page.evaluate(MISSED) == []


def reach(page: Page, name: str, key: str = "Tab") -> None:
    """Press Tab until the control with this name has the focus."""
    for _ in range(MOST):
        page.keyboard.press(key)
        if page.evaluate("document.activeElement.computedName") == name:
            return
    raise AssertionError(f"Tab does not reach {name!r}")


def test_model_prompt_head_and_more_without_a_mouse(visit):
    page = visit("/?pair=none")
    drawn(page, "maps", 2)
    reach(page, "Model")
    page.keyboard.press("ArrowDown")
    lit, names = page.locator("[role=option][data-focused]"), page.get_by_role("option").all_text_contents()
    for _ in range(names.index("winograd-2-attn") - names.index(lit.text_content() or "")):
        page.keyboard.press("ArrowDown")
    expect(lit).to_have_text("winograd-2-attn")
    page.keyboard.press("Enter")
    page.wait_for_url("**model=winograd-2-attn*")
    settled(page)
    reach(page, "Prompt")
    page.keyboard.press("Control+A")
    prompt = "the dog did not cross the river because it was too slow , so the"
    page.keyboard.type(prompt)
    page.keyboard.press("Control+Enter")
    expect(page.locator(".wb-line").first).to_contain_text("dog", timeout=PATIENCE)
    settled(page)
    reach(page, "mean of 4 heads")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    page.wait_for_url("**head=0.1*")
    run = wb.load("winograd-2-attn")
    tokens = run.encode(prompt)
    ((_, weights),) = attention_rows(attention_maps(run.model, tokens), run.str_tokens(tokens), (0, 1))
    expect(page.locator(".wb-word small")).to_have_text([f"{weight:.2f}" for weight in weights], timeout=PATIENCE)
    settled(page)
    reach(page, "What am I looking at?")
    page.keyboard.press("Enter")
    expect(page.get_by_text("A map shows where a head looks.")).to_be_visible()
    reach(page, "numbers (CSV)")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "attention-winograd-2-attn.csv"
    reach(page, "shuffle", "Shift+Tab")
    page.keyboard.press("Space")
    expect(page.locator(".st-key-prompt textarea")).not_to_have_value(prompt, timeout=PATIENCE)
