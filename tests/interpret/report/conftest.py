"""A browser without a network, where one is installed; and the pixels of a page's pictures."""

import base64
import io
import os
import shutil

import numpy as np
import pytest
from PIL import Image

ARGUMENTS = (
    "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip


@pytest.fixture(scope="session")
def pixels():
    """A function from a picture's address in a page to its colours, uint8 [height, width, 3]."""

    def decoded(uri):
        kind, _, coded = uri.partition(";base64,")
        assert kind in ("data:image/png", "data:image/jpeg")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(coded))).convert("RGB"))

    return decoded


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    """Chromium, headless, as Debian and others package it; a test that needs it is skipped."""
    programs = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    program = next((found for found in programs if found), None)
    if program is None:
        pytest.skip("needs Chromium, which is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=[*ARGUMENTS, *root])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """A function from a file to the page of it; nothing may be asked of a network, or fail."""
    contexts, wrong = [], []

    def asked(request):
        if not request.url.startswith(("file:", "data:")):
            wrong.append(request.url)

    def opened(path, **options):
        context = chromium.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("request", asked)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.goto(path.absolute().as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong
