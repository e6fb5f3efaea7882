"""One server for all browser tests, and pages that must not leave an error in the console."""

import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from browsing import PATIENCE, settled
from playwright.sync_api import ConsoleMessage, Page, sync_playwright

from workbench.content import content

CHROMIUM = os.environ.get("WORKBENCH_CHROMIUM", "/usr/bin/chromium")
STREAMLITS_OWN = re.compile(r"/_stcore/(health|host-config)$")  # a sub-page's permalink asks for these in vain


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The app on a free port, with the shipped models only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = content("app.py")
    environment = os.environ | {"WORKBENCH_RUNS": str(tmp_path_factory.mktemp("runs")), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "streamlit", "run", str(app), "--server.port", str(port)]
    log = tmp_path_factory.mktemp("log") / "server.txt"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=app.parent, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_until_up(url: str, process: subprocess.Popen, log: Path) -> None:
    pause = threading.Event()
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            pause.wait(0.1)
    raise AssertionError(f"the server did not start: {log.read_text()}")


@pytest.fixture(scope="session")
def chromium():
    if not Path(CHROMIUM).exists():
        reason = f"no Chromium at {CHROMIUM}; apt-get install chromium, or set WORKBENCH_CHROMIUM"
        if os.environ.get("WORKBENCH_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        names = "--enable-blink-features=ComputedAccessibilityInfo"  # element.computedName
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", names])
        yield browser
        browser.close()


@pytest.fixture
def visit(server, chromium):
    """Open a path in a fresh context; in the end no error may be in a console, and no request may have left here."""
    contexts, errors = [], []

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error" and not STREAMLITS_OWN.search(message.location.get("url", "")):
            errors.append(message.text)

    def asked(url: str) -> None:
        if not url.startswith((server, server.replace("http", "ws"), "data:", "blob:")):
            errors.append(f"left this machine: {url}")

    def open_page(path: str = "/", **options) -> Page:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 1500}} | options)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(f"failed: {request.url}"))
        page.on("request", lambda request: asked(request.url))
        page.on("console", heard)
        page.goto(server + path)
        page.locator("h1").first.wait_for()
        settled(page)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
