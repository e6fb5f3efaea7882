"""Two hops in a real Chromium: a click on an arc chooses its chain, the button cuts it, a link restores all of it."""

import re

import pytest
from browsing import PATIENCE, click, drawn
from playwright.sync_api import Page, expect
from support import SENTENCE

import workbench as wb
from circuits import attention_maps, cut, two_hops
from circuits.edges import Edge, reference
from workbench.figures import chains_that_matter
from workbench.figures.arcs import chain_words, one_decimal
from workbench.wording import percent


def found():
    run = wb.load("winograd-2")
    tokens, words = run.encode(SENTENCE), run.task.vocabulary.words
    hops = two_hops(run.model, tokens, 14, words.index("animal"), words.index("street"))
    return run, tokens, hops, [chain for chain, _ in chains_that_matter(hops, 0.1)]


def top_of(page: Page, chain) -> None:
    """Put the mouse on the marker at the top of a chain's upper arc."""
    plot = page.locator(".st-key-arcs .js-plotly-plot")
    place = plot.evaluate(
        """(plot, name) => {
            const at = plot._fullData.filter(t => t.name === name && t.y[0] > 0)[0], box = plot.getBoundingClientRect();
            const {xaxis: x, yaxis: y} = plot._fullLayout;
            return [box.x + x._offset + x.d2p(at.x[0]), box.y + y._offset + y.d2p(at.y[0])];
        }""",
        f"top of {chain}",
    )
    page.mouse.move(place[0] - 30, place[1] - 30)
    page.mouse.move(*place, steps=4)


def test_a_click_on_an_arc_chooses_its_chain_and_the_button_cuts_it(visit):
    run, tokens, hops, shown = found()
    page = visit("/two_hops")
    drawn(page, "arcs", 1)
    expect(page.get_by_text(f"animal − street = {one_decimal(float(hops.clean))} logits")).to_be_visible()
    second = shown[1]

    def point():
        top_of(page, second)
        hover = page.locator(".st-key-arcs .hoverlayer .hovertext")
        expect(hover).to_contain_text("without it answer − foil loses", timeout=PATIENCE)

    words = chain_words(second, run.str_tokens(tokens), 14)
    click(point, page.locator(f'.st-key-hops_chain input[value="{words}"]'))

    page.locator(".st-key-hops_cut button", has_text="cut it").focus()
    page.keyboard.press("Space")
    examples = run.examples()
    edge = Edge(*second.writer, 14, second.source)  # pyright: ignore[reportArgumentType]
    with cut(run.model, edge, reference=reference(run.model, examples)):
        accuracy = float(examples.judge(run.model(examples.tokens))[0].double().mean())
        logits = run.model(tokens)[0, 14].detach()
    result = page.get_by_text(re.compile("^prediction: "))
    expect(result).to_contain_text(f"held-out: 100.0 % → {percent(accuracy)} (n = 288)", timeout=PATIENCE)
    said = run.task.vocabulary.words[int(logits.argmax())]
    expect(result).to_contain_text(f"→ {said} {percent(float(logits.softmax(-1).max()))}")
    clean = attention_maps(run.model, tokens).probabilities[14].max()
    expect(result).to_contain_text(f"prediction: animal {percent(float(clean))}")

    page.wait_for_url("**hops_cut=*")
    again = visit(page.url[page.url.index("/", 8) :])
    drawn(again, "arcs", 1)
    expect(again.locator(".st-key-hops_chain input")).to_have_value(words, timeout=PATIENCE)
    expect(again.get_by_text(re.compile("^prediction: "))).to_have_text(result.text_content() or "", timeout=PATIENCE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_stands_and_its_text_is_legible(visit, scheme):
    page = visit("/two_hops", color_scheme=scheme)
    drawn(page, "arcs", 1)
    drawn(page, "score_terms", 1)
    drawn(page, "compositions", 3)

    def lightness(selector: str, what: str) -> float:
        color = page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{what}")
        red, green, blue = (int(part) for part in re.findall(r"\d+", color)[:3])
        return (0.299 * red + 0.587 * green + 0.114 * blue) / 255

    paper = lightness(".stApp", "backgroundColor")
    for key in ("arcs .textpoint", "arcs .legendtext", "score_terms .xtick", "compositions .xtick"):
        selector = f".st-key-{key}" + ("" if key.endswith("legendtext") else " text")
        assert abs(lightness(selector, "fill") - paper) > 0.6
