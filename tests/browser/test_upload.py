"""Your own model by upload: a good pair is shown, everything else is refused in a line and the page stands."""

import pickle
import re

from browsing import PATIENCE, drawn, settled
from playwright.sync_api import Page, expect

import workbench as wb
from workbench.content import content
from workbench.uploads import LARGEST_WEIGHTS

RECIPE = (content("models") / "winograd-2" / "recipe.toml").read_bytes()
WEIGHTS = (content("models") / "winograd-2" / "model.safetensors").read_bytes()


def give(page: Page, *files: tuple[str, bytes]) -> None:
    page.get_by_test_id("stSidebar").get_by_text("Your own model").click()
    payload = [{"name": name, "mimeType": "application/octet-stream", "buffer": data} for name, data in files]
    page.locator("input[type=file]").set_input_files(payload)  # pyright: ignore[reportArgumentType]
    settled(page)


def test_a_good_pair_is_shown_and_has_a_link(visit):
    page = visit("/?pair=none")
    give(page, ("found-elsewhere.toml", RECIPE), ("model.safetensors", WEIGHTS))
    expect(page.get_by_label("Call it")).to_have_value("found-elsewhere", timeout=PATIENCE)
    page.get_by_role("button", name="Add it").click()
    page.wait_for_url("**model=found-elsewhere*")
    sidebar = page.get_by_test_id("stSidebar")
    expect(sidebar.get_by_text("yours", exact=True)).to_be_visible(timeout=PATIENCE)
    expect(sidebar.get_by_text(wb.load("winograd-2").score).first).to_be_visible(timeout=PATIENCE)
    drawn(page, "maps")
    again = visit(page.url[page.url.index("/", 8) :])
    expect(again.get_by_test_id("stSidebar").get_by_text("yours", exact=True)).to_be_visible(timeout=PATIENCE)


def test_what_is_not_a_model_is_refused_and_the_page_stands(visit):
    page = visit("/?pair=none")
    give(page, ("broken.toml", RECIPE), ("broken.safetensors", WEIGHTS[:-100]))
    page.get_by_role("button", name="Add it").click()
    expect(page.get_by_test_id("stAlert")).to_contain_text("the weights of 'broken' are damaged", timeout=PATIENCE)
    drawn(page, "maps", 2)

    for name, data, why in (
        ("model.pt", pickle.dumps([0]), "not allowed"),
        ("large.safetensors", bytes(LARGEST_WEIGHTS + 1), "must be 32.*MB or smaller"),
    ):
        page = visit("/?pair=none")
        give(page, (name, data))
        expect(page.get_by_test_id("stSidebar").get_by_text(re.compile(why))).to_be_visible(timeout=PATIENCE)
        expect(page.get_by_role("button", name="Add it")).to_have_count(0)
        drawn(page, "maps", 2)
