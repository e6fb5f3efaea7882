"""The attention page in a real Chromium: the numbers on the screen are the model's, and a link restores the view."""

import re

import pytest
from browsing import PATIENCE, click, drawn, same_view
from playwright.sync_api import Page, expect
from support import SENTENCE

import workbench as wb
from circuits import attention_maps, head_scores
from circuits.attention import contribution_maps
from workbench.figures.style import signed


def hover(page: Page, panel: int, destination: int, source: int, length: int) -> str:
    """What the tooltip says over one cell of one map."""
    box = page.locator(".st-key-maps .cartesianlayer > .subplot").nth(panel).locator(".heatmaplayer").bounding_box()
    assert box is not None
    # the heat map ends with its cells, so a cell is 1 / length of it
    x, y = ((p + 0.5) / length for p in (source, destination))
    page.mouse.move(box["x"] + 2, box["y"] - 40)
    page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * y, steps=4)
    label = page.locator(".st-key-maps .hoverlayer .hovertext")
    expect(label).to_contain_text(f"at {destination} ", timeout=PATIENCE)
    return label.text_content() or ""


def expected(prompt: str):
    run = wb.load("winograd-2")
    return attention_maps(run.model, run.encode(prompt))


def test_hover_and_words_show_the_models_numbers(visit):
    page = visit("/?pair=none")
    drawn(page, "maps", 2)
    maps = expected(SENTENCE)
    for panel in range(2):
        text = hover(page, panel, 14, 1, 15)
        assert text == f"at 14 ‘the’ → 1 ‘animal’: {maps.mean[panel, 14, 1]:.2f}, predicts ‘animal’"
    numbers = page.locator(".wb-word small").all_text_contents()
    assert numbers == [f"{weight:.2f}" for layer in range(2) for weight in maps.mean[layer, 14].tolist()]


def test_a_minimal_pair_side_by_side(visit):
    page = visit()
    drawn(page, "maps", 6)
    maps, other = expected(SENTENCE), expected(SENTENCE.replace("tired", "wet"))
    change = other.mean[1, 14, 6] - maps.mean[1, 14, 6]
    assert f"→ 6 ‘street’: {change:+.2f}".replace("-", "−") in hover(page, 5, 14, 6, 15)
    assert "predicts ‘animal | street’" in hover(page, 5, 14, 6, 15)
    for line, prompt in enumerate((maps, other)):
        probability = 100 * prompt.probabilities[14].max()
        expect(page.locator(".wb-next").nth(line)).to_contain_text(f"{probability:.1f} %")


def test_a_click_on_a_cell_makes_its_row_the_destination(visit):
    page = visit("/?pair=none")
    drawn(page, "maps", 2)
    click(lambda: hover(page, 0, 7, 1, 15), page.get_by_text(re.compile("^From 7 ‘because’")))
    page.wait_for_url("**at=because*")


def test_a_link_restores_the_view_in_a_fresh_browser(visit):
    page = visit()
    prompt = page.locator(".st-key-prompt textarea")
    prompt.fill("the dog did not cross the river because it was too slow , so the")
    prompt.press("Control+Enter")
    expect(page.locator(".wb-line").first).to_contain_text("dog", timeout=PATIENCE)
    page.locator(".st-key-pair button", has_text="swap nouns").click()
    expect(page.locator(".wb-line").nth(1)).to_contain_text("cross", timeout=PATIENCE)
    page.locator(".st-key-at button", has_text="slow").click()
    expect(page.get_by_text(re.compile("^From 11 ‘slow’"))).to_be_visible(timeout=PATIENCE)
    page.locator(".st-key-head button", has_text="0.3").click()
    drawn(page, "maps", 3)
    sentence = page.get_by_text(re.compile("^From 11 ‘slow’")).text_content()
    page.wait_for_url("**head=0.3*")

    again = visit(page.url[page.url.index("/", 8) :])
    drawn(again, "maps", 3)
    expect(again.get_by_text(re.compile("^From 11 ‘slow’"))).to_have_text(sentence or "", timeout=PATIENCE)
    expect(again.locator(".st-key-prompt textarea")).to_have_value(prompt.input_value())
    same_view(again, page, ".wb-line")


def test_a_walk_through_the_controls(visit):
    """Direction, cells, a logit, the ranking, a thumbnail, the errors, and back by the link: the keyboard will do."""
    page = visit("/?model=winograd-1&pair=none")
    page.get_by_role("radio", name="who looks at it").focus()
    page.keyboard.press("Space")
    expect(page.get_by_text("At 14 ‘the’, block 1 looks most from 14 ‘the’")).to_be_visible(timeout=PATIENCE)
    page.get_by_role("radio", name="what it looks at").click()
    page.get_by_role("radio", name="→ a logit").click()
    expect(page.get_by_text("sum of 4 heads").first).to_be_visible(timeout=PATIENCE)
    run = wb.load("winograd-1")
    tokens = run.encode(SENTENCE)
    answer = int(attention_maps(run.model, tokens).probabilities[14].argmax())
    row = contribution_maps(run.model, tokens, answer).together[0, 14]
    expect(page.locator(".wb-word small")).to_have_text([signed(value) for value in row.tolist()], timeout=PATIENCE)

    page.locator(".st-key-rank input").click()
    page.get_by_role("option", name="copying").click()
    expect(page.get_by_text("By copying, the highest first")).to_be_visible(timeout=PATIENCE)
    copying = head_scores(run.model, draws=39)["copying"].scores[0]
    best = f"0.{int(copying.argmax())}"
    layer = page.locator(".st-key-heads .cartesianlayer")
    expect(layer).to_have_count(1, timeout=PATIENCE)  # while heads are scored, the old ones stay

    def point():
        picture = layer.bounding_box()
        assert picture is not None
        page.mouse.move(picture["x"] + 30, picture["y"] - 30)
        page.mouse.move(picture["x"] + 30, picture["y"] + 30, steps=3)
        expect(page.locator(".st-key-heads .hoverlayer")).to_contain_text(f"copying: {signed(float(copying.max()))}")

    click(point, page.get_by_text(f"block 1 · head {best}").first)

    page.get_by_text("What it gets wrong").click()
    first = page.locator(".st-key-mistakes button").first
    words = (first.text_content(timeout=PATIENCE) or "").partition(":")[0].split(" · ")
    first.click()
    expect(page.locator(".wb-line").first).to_contain_text(words[-1], timeout=PATIENCE)
    x, y, adjective = words
    wrong = f"the {x} did not cross the {y} because it was too {adjective} , so the"
    expect(page.locator(".st-key-prompt textarea")).to_have_value(wrong, timeout=PATIENCE)
    page.wait_for_url(f"**head={best}*")

    again = visit(page.url[page.url.index("/", 8) :])
    expect(again.get_by_text("By copying, the highest first")).to_be_visible(timeout=PATIENCE)
    expect(again.locator(".st-key-mistakes button").first).to_be_visible(timeout=PATIENCE)
    same_view(again, page, ".wb-line")


def test_an_unknown_word_is_answered_and_the_page_stands(visit):
    page = visit()
    prompt = page.locator(".st-key-prompt textarea")
    prompt.fill("the zebra did")
    prompt.press("Control+Enter")
    expect(page.get_by_test_id("stAlert")).to_contain_text("unknown word 'zebra'; nearest:", timeout=PATIENCE)
    page.get_by_role("button", name="example").click()
    drawn(page, "maps", 6)
    expect(page.get_by_test_id("stAlert")).to_have_count(0)
    expect(page.get_by_test_id("stException")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_both_colour_schemes(visit, scheme):
    page = visit(color_scheme=scheme)
    drawn(page, "maps", 6)

    def lightness(selector: str, what: str) -> float:
        color = page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{what}")
        red, green, blue = (int(part) for part in re.findall(r"\d+", color)[:3])
        return (0.299 * red + 0.587 * green + 0.114 * blue) / 255

    paper = lightness(".stApp", "backgroundColor")
    assert (paper > 0.9) == (scheme == "light") and (paper < 0.2) == (scheme == "dark")
    for selector, what in (
        (".st-key-maps .xtick text", "fill"),
        (".wb-token", "color"),
        (".st-key-maps .annotation-text", "fill"),
    ):
        assert abs(lightness(selector, what) - paper) > 0.6
