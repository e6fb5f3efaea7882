"""What the browser tests wait for."""

from playwright.sync_api import Page, expect

PATIENCE = 90_000  # milliseconds: the server imports PyTorch first, on a machine that may be busy


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
