"""The browser that the tests drive: SOFTLINE_CHROMIUM names it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

# milliseconds; a first run of a model on a busy machine takes long
PATIENCE = 60_000


def find_browser() -> str | None:
    if named := os.environ.get("SOFTLINE_CHROMIUM"):
        return named
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start the browser; skip the test without one, or without playwright."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: name one by SOFTLINE_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        # containers have no users to separate
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
