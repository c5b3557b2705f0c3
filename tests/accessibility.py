"""The automatable checks of the WCAG, run in a browser; each problem is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from browser import Browser

CHECKS = (Path(__file__).parent / "accessibility.js").read_text("utf-8").partition("\n")[2].rstrip()
NAMED = {"button", "link", "slider", "combobox", "checkbox", "image", "progressbar", "textbox", "region", "table"}


def problems(browser: Browser) -> list[str]:
    """The accessibility problems of the open page."""
    return [*_run(browser, "structure"), *_run(browser, "contrast"), *_nameless(browser), *_keyboard(browser)]


def _run(browser: Browser, function: str) -> Any:
    return browser.js(f"({CHECKS}).{function}()")


def _nameless(browser: Browser) -> list[str]:
    """Controls and images without an accessible name in the browser's accessibility tree."""
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node["ignored"] and not _name(node)]
    return [f"a {role} has no name" for role in roles if role in NAMED]


def _name(node: dict[str, dict[str, str]]) -> str:
    return str(node.get("name", {}).get("value", "")).strip()


def _keyboard(browser: Browser) -> list[str]:
    """Tab through the page: every control is reached, focus is never trapped and always visible."""
    found, reached = [], 0
    browser.js("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    browser.js("window.focused = []; scrollTo(0, 0)")  # from the top
    expected = _run(browser, "focusable")
    for _ in range(expected + 2):
        browser.press("Tab")
        focus = _run(browser, "focus")
        if focus is None or focus["again"]:
            break
        reached += 1
        if not focus["visible"]:
            found.append(f"the focus is not visible on {focus['which']}")
    if reached != expected:
        found.append(f"the keyboard reaches {reached} of {expected} controls")
    browser.js("document.activeElement.blur()")
    return found
