"""What holds on every page in a real Chromium: sessions do not mix, text is text, a link opens it in both schemes."""

import re

import pytest
from browsing import PATIENCE, settled
from playwright.sync_api import Page, expect

import workbench as wb
from circuits import attention_maps, cut, two_hops
from circuits.edges import Edge, reference
from workbench.figures import chains_that_matter
from workbench.figures.arcs import at_position, chain_words, one_decimal

PAGES = {
    "Attention": "/", "Two hops": "/two_hops", "Heads": "/heads", "Tables": "/tables", "Training": "/training",
    "Circuits": "/circuits", "Step by step": "/step_by_step", "Lens": "/lens",
}  # fmt: skip
READ_THE_PROMPT = ("Two hops", "Step by step", "Lens", "Attention")
HOSTILE = (
    "$x$", "**b**", "[l](http://x)", "<img/src=x/onerror=alert(1)>", "🦊", "\u202eשלום",
    "<script>alert(1)</script>",
)  # fmt: skip
AT = 14


def sentence(x: str, y: str, adjective: str) -> str:
    return f"the {x} did not cross the {y} because it was too {adjective} , so the"


ROUNDS = [
    [sentence("dog", "river", "tired"), sentence("child", "canal", "wet"), sentence("horse", "bridge", "slow")],
    [sentence("truck", "tram", "busy"), sentence("river", "dog", "scared"), sentence("street", "animal", "wide")],
    [sentence("goat", "market", "weak"), sentence("field", "robot", "steep"), sentence("road", "garden", "tired")],
]
"""For each browser another prompt, three times."""


def ask(page: Page, prompt: str) -> None:
    box = page.locator(".st-key-prompt textarea")
    box.fill(prompt)
    box.press("Control+Enter")


def uncut(run, prompt):
    """Chains of the two likeliest words here, their names and the difference of their logits."""
    tokens, words = run.encode(prompt), run.task.vocabulary.words
    first, second = run.model(tokens)[0, AT, : len(words)].topk(2).indices.tolist()
    hops = two_hops(run.model, tokens, AT, first, second)
    return tokens, hops, f"{words[first]} − {words[second]}", (first, second)


def cut_open(run, tokens, chain, pair) -> float:
    """Answer − foil where the first hop of a chain is cut."""
    examples, (first, second) = run.examples(), pair
    middle, source = (at_position(place, AT) for place in (chain.middle, chain.source))
    edge = Edge(*chain.writer, middle, source)  # pyright: ignore[reportCallIssue]
    with cut(run.model, edge, reference=reference(run.model, examples)):
        logits = run.model(tokens)[0, AT].detach()
    return float(logits[first] - logits[second])


def test_three_browsers_at_once_see_each_its_own_numbers(visit):
    """One cuts a chain on every held-out sequence while two others ask for new prompts of the same model."""
    run = wb.load("winograd-2")
    cutting = visit("/two_hops?pair=none&hops_share=1+%25&hops_cut=cut+it")
    asking, looking = visit("/two_hops?pair=none"), visit("/?pair=none")
    for prompts in ROUNDS:
        for page, prompt in zip((cutting, asking, looking), prompts, strict=True):
            ask(page, prompt)

        tokens, hops, names, pair = uncut(run, prompts[0])
        chain = chains_that_matter(hops, 0.01)[0][0]
        clean, broken = one_decimal(float(hops.clean)), one_decimal(cut_open(run, tokens, chain, pair))
        result = cutting.get_by_text(re.compile("^prediction: "))
        expect(result).to_contain_text(f"{names}: {clean} → {broken}", timeout=PATIENCE)
        largest = chain_words(chain, run.str_tokens(tokens), AT)
        expect(cutting.get_by_text(f"{names} = {clean} logits. The largest chain is {largest}:")).to_be_visible()

        tokens, hops, names, _ = uncut(run, prompts[1])
        said = f"{names} = {one_decimal(float(hops.clean))} logits. The largest chain is"
        chain, value = hops.ranked()[0]
        largest = f"{chain_words(chain, run.str_tokens(tokens), AT)}: {one_decimal(value)}"
        expect(asking.get_by_text(f"{said} {largest}")).to_be_visible(timeout=PATIENCE)

        maps = attention_maps(run.model, run.encode(prompts[2]))
        weights = [f"{weight:.2f}" for layer in range(2) for weight in maps.mean[layer, AT].tolist()]
        expect(looking.locator(".wb-word small")).to_have_text(weights, timeout=PATIENCE)
        best = float(maps.probabilities[AT].max())
        expect(looking.locator(".wb-next").first).to_contain_text(f"{100 * best:.1f} %")


def test_a_hostile_prompt_is_shown_as_text_on_every_page_that_reads_it(visit):
    page, dialogs = visit("/?pair=none"), []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    alert = page.get_by_test_id("stAlert")
    for prompt in HOSTILE:
        ask(page, prompt)
        expect(alert).to_contain_text(f"unknown word {prompt!r}", timeout=PATIENCE)
    for name in READ_THE_PROMPT:
        page.get_by_test_id("stSidebarNavLink").filter(has_text=name).click()
        expect(page.locator("h1").first).to_have_text(name, timeout=PATIENCE)
        expect(alert).to_contain_text(f"unknown word '{HOSTILE[-1]}'", timeout=PATIENCE)
        settled(page)
    main = page.get_by_test_id("stMain")
    assert main.locator("img, script, a[href='http://x'], strong, .katex").count() == 0
    assert dialogs == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_opens_by_a_link_in_both_colour_schemes(visit, scheme):
    for title, path in PAGES.items():
        page = visit(path, color_scheme=scheme)
        expect(page.locator("h1").first).to_have_text(title)
        expect(page.locator(".stPlotlyChart .main-svg").first).to_be_visible(timeout=PATIENCE)
        settled(page)
        assert page.get_by_test_id("stAlertContentError").count() == page.get_by_test_id("stException").count() == 0
        page.context.close()
