"""How long the app takes, in a real Chromium, and what it costs the server.

    python benchmarks/app_latency.py [--chromium PATH]

Starts the app anew with the shipped models and a random 12 × 12-head model of width 192, and prints for every step the
wall time as the browser sees it and the CPU time of the server's process, medians of several. Wall times are of this
machine and of what else runs on it; the server's CPU time is what the app can do something about.
"""

import argparse
import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from workbench.content import content
from workbench.recipes import load_recipe
from workbench.training import train

PATIENCE = 120_000  # milliseconds
ROUNDS = 5
LARGE_TASK = """\
kind = "induction"
about = "a segment of different tokens, repeated with a period drawn for every sequence"
tokens = 50
length = 256
shortest_period = 4
longest_period = 24
train = 16
held_out = 16
"""
LARGE = """\
about = "twelve blocks of twelve heads, hardly trained"
task = "long-induction.toml"
[model]
d_model = 192
n_heads = 12
n_layers = 12
[training]
steps = 1
batch = 1
"""
SENTENCES = [
    f"the {x} did not cross the {y} because it was too {adjective} , so the"
    for x, y, adjective in (
        ("dog", "river", "tired"), ("child", "canal", "wet"), ("horse", "bridge", "slow"), ("truck", "tram", "busy"),
        ("river", "dog", "scared"), ("street", "animal", "wide"),
    )
]  # fmt: skip


@dataclass
class Server:
    """The app's process."""

    process: subprocess.Popen
    url: str

    @property
    def cpu(self) -> float:
        """Seconds of CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def served(runs: Path) -> Iterator[Server]:
    """The app, from the moment that its process is started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"WORKBENCH_RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    app = content("app.py")
    command = [sys.executable, "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    process = subprocess.Popen(command, cwd=app.parent, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield Server(process, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()


def opened(browser: Browser, server: Server, path: str = "/") -> Page:
    """A page of a browser that has seen nothing yet."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(server.url + path)
    return page


def settled(page: Page) -> None:
    """No run is going on, and none begins in the next moment."""
    while True:
        expect(page.get_by_test_id("stStatusWidget")).to_have_count(0, timeout=PATIENCE)
        page.wait_for_timeout(250)
        if page.get_by_test_id("stStatusWidget").count() == 0:
            return


def mapped(page: Page) -> None:
    expect(page.locator(".st-key-maps .cartesianlayer > .subplot").first).to_be_attached(timeout=PATIENCE)


def timed(server: Server, action: Callable[[], None], page: Page) -> tuple[float, float]:
    """Wall seconds of an action, and the server's CPU seconds until it is at rest again."""
    wall, cpu = time.perf_counter(), server.cpu
    action()
    wall = time.perf_counter() - wall
    settled(page)
    return wall, server.cpu - cpu


def report(what: str, taken: list[tuple[float, float]], limit: str) -> None:
    wall, cpu = (statistics.median(part) for part in zip(*taken, strict=True))
    print(f"{what:58} {wall:6.2f} s wall  {cpu:6.2f} s server CPU   {limit}", flush=True)


def start(server: Server, browser: Browser) -> Page:
    """From the start of the process to title and first map."""
    begun = time.perf_counter()
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/_stcore/health"):
                break
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.02)
    page = opened(browser, server)
    page.locator("h1").first.wait_for()
    report("cold start: title", [(time.perf_counter() - begun, server.cpu)], "≤ 4 s wall")
    mapped(page)
    report("cold start: first map", [(time.perf_counter() - begun, server.cpu)], "≤ 8 s wall, ≤ 5 s CPU")
    settled(page)
    return page


def prompts(server: Server, page: Page, texts: list[str], what: str, limit: str) -> None:
    """A new prompt, typed into the side bar, until its maps stand."""
    taken, box = [], page.locator(".st-key-prompt textarea")
    for text in texts:
        box.fill(text)

        def change(last: str = text.split()[1]) -> None:
            box.press("Control+Enter")
            expect(page.locator(".wb-line").first).to_contain_text(last, timeout=PATIENCE)
            expect(page.get_by_test_id("stStatusWidget")).to_have_count(0, timeout=PATIENCE)

        taken.append(timed(server, change, page))
    report(what, taken, limit)


def pages(server: Server, page: Page) -> None:
    """Each page after the first, seen before: what changing over costs once its figures are kept."""
    links = page.get_by_test_id("stSidebarNavLink")
    names = links.all_inner_texts()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for round in range(ROUNDS):
        for i, name in enumerate(names):

            def change(i: int = i, name: str = name) -> None:
                links.nth(i).click()
                expect(page.locator("h1").first).to_have_text(re.compile(name.strip()), timeout=PATIENCE)
                expect(page.get_by_test_id("stStatusWidget")).to_have_count(0, timeout=PATIENCE)

            cost = timed(server, change, page)
            if round:
                taken[name].append(cost)
            else:
                report(f"first visit of {name.strip()}", [cost], "")
    for name in names:
        report(f"change to {name.strip()}", taken[name], "≤ 0.7 s CPU")


def sessions(server: Server, browser: Browser) -> None:
    """What one more browser costs, and one more tab of a browser that has Streamlit's files already."""
    before, first = server.megabytes, opened(browser, server)
    mapped(first)
    settled(first)
    for what, page_of in (
        ("a further browser, which fetches 8 MB of files", lambda: opened(browser, server)),
        ("a further session of a browser that has them", lambda: _tab(first, server)),
    ):
        taken = []
        for _ in range(ROUNDS):
            cpu, wall = server.cpu, time.perf_counter()
            page = page_of()
            mapped(page)
            wall = time.perf_counter() - wall
            settled(page)
            taken.append((wall, server.cpu - cpu))
        report(what, taken, "≤ 0.4 s CPU")
    grown = (server.megabytes - before) / (2 * ROUNDS + 1)
    print(f"{'memory of a further session':58} {grown:6.2f} MB   ≤ 10 MB", flush=True)


def _tab(page: Page, server: Server) -> Page:
    other = page.context.new_page()
    other.goto(server.url)
    return other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    chromium = parser.parse_args().chromium
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "long-induction.toml").write_text(LARGE_TASK)
        (Path(folder) / "large.toml").write_text(LARGE)
        runs = Path(folder) / "runs"
        train(load_recipe(Path(folder) / "large.toml"), runs / "large" / "seed-0")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            with served(runs) as server:
                page = start(server, browser)
                prompts(server, page, SENTENCES, "winograd-2: new prompt", "≤ 0.4 s CPU")
                pages(server, page)
                sessions(server, browser)
                page = opened(browser, server, "/?model=large&pair=none")
                mapped(page)
                settled(page)
                texts = [" ".join(f"t{(i * step) % 50}" for i in range(256)) for step in (3, 7, 9, 11, 13)]
                prompts(server, page, texts, "12 × 12 heads, 256 tokens: new prompt", "≤ 2.5 s CPU")


if __name__ == "__main__":
    main()
