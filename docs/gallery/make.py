"""The pictures of docs/gallery.md, of the shipped models, in both themes.

    python docs/gallery/make.py [--chromium PATH] [--url URL] [NAME …]

Starts the app by itself unless there is one at URL, which then must show no other models.
"""

import argparse
import contextlib
import io
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from workbench.content import content

FOLDER = Path(__file__).parent
WIDTH, HEIGHT, TALLEST = 1280, 800, 1500  # pixels
COLOURS = 256  # of a picture, so that one is 100 KB
VIEWS = {
    "attention": "/",
    "two-hops": "/two_hops?model=winograd-2-attn",
    "heads": "/heads?model=induction-2-attn",
    "tables": "/tables",
    "training": "/training?model=induction-2-attn&training_step=481",
    "circuits": "/circuits?model=induction-2-attn&circuits_what=OV+%C3%97+QK",
    "step-by-step": "/step_by_step",
    "lens": "/lens",
}


@contextlib.contextmanager
def served(url: str | None) -> Iterator[str]:
    """The address of the app."""
    if url is not None:
        yield url
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = content("app.py")
    with tempfile.TemporaryDirectory() as runs:
        environment = os.environ | {"WORKBENCH_RUNS": runs, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "streamlit", "run", str(app), "--server.port", str(port)]
        process = subprocess.Popen(command, cwd=app.parent, env=environment, stdout=subprocess.DEVNULL)
        try:
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health"):
                        break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def settled(page: Page) -> None:
    """No run is going on, and none begins in the next moment."""
    quiet = 0
    while quiet < 4:
        page.wait_for_timeout(300)
        quiet = quiet + 1 if page.get_by_test_id("stStatusWidget").count() == 0 else 0


def picture(page: Page, path: Path) -> None:
    """The page as high as it is, up to TALLEST, in few colours."""
    box = "document.querySelector('[data-testid=stMainBlockContainer]').scrollHeight"
    page.set_viewport_size({"width": WIDTH, "height": max(HEIGHT, min(page.evaluate(box), TALLEST))})
    settled(page)
    with Image.open(io.BytesIO(page.screenshot())) as image:
        image.convert("RGB").quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
            path, optimize=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="all of them unless some are given")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--url")
    asked = parser.parse_args()
    with served(asked.url) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=asked.chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            for name, path in VIEWS.items():
                if not asked.names or name in asked.names:
                    context = browser.new_context(
                        viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme, reduced_motion="reduce"
                    )
                    page = context.new_page()
                    page.goto(url + path)
                    page.locator("h1").first.wait_for(timeout=120_000)
                    settled(page)
                    picture(page, FOLDER / f"{name}-{scheme}.png")
                    print(f"{name}-{scheme}.png", flush=True)
                    context.close()


if __name__ == "__main__":
    main()
