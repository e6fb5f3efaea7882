"""What the browser tests wait for."""

from collections.abc import Callable

from playwright.sync_api import Locator, Page, expect

PATIENCE = 90_000  # milliseconds: the server imports PyTorch first, on a machine that may be busy
CLICKS, BETWEEN = 4, 20_000


def settled(page: Page) -> None:
    """Wait until the run of the page is over."""
    expect(page.get_by_test_id("stStatusWidget")).to_have_count(0, timeout=PATIENCE)


def drawn(page: Page, key: str, n_plots: int | None = None) -> None:
    """Wait until the chart of this key stands, with so many plots in it, and the run is over."""
    plots = page.locator(f".st-key-{key} .cartesianlayer > .subplot")
    expect(plots.first).to_be_attached(timeout=PATIENCE)
    if n_plots is not None:
        expect(plots).to_have_count(n_plots, timeout=PATIENCE)
    settled(page)


def same_view(again: Page, page: Page, *selectors: str) -> None:
    """A view that a link opened: its address is the old one's, and each selector finds the same texts."""
    for each in (page, again):
        settled(each)
    expect(again).to_have_url(page.url, timeout=PATIENCE)
    for selector in selectors:
        texts = page.locator(selector).all_text_contents()
        assert texts, selector
        expect(again.locator(selector)).to_have_text(texts, timeout=PATIENCE)


def click(point: Callable[[], object], chosen: Locator) -> None:
    """Point at a mark of a chart and click, until what it chooses is seen: a chart being drawn anew takes none."""
    for left in reversed(range(CLICKS)):
        point()
        chosen.page.mouse.down()
        chosen.page.mouse.up()
        try:
            return expect(chosen).to_be_visible(timeout=BETWEEN if left else PATIENCE)
        except AssertionError:
            if not left:
                raise
