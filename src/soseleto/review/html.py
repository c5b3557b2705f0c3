"""The review page: one autoescaped template, and a content security policy for its own style and script only."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from soseleto.report.assets import asset, digest, template

HERE = Path(__file__).parent / "page"


def render(name: str, run_path: str, *, audit: bool = False) -> tuple[bytes, str]:
    """The page for a review or an audit of the run ``name``, and its content security policy.

    Requests go to this server only.
    """
    style, script = asset("style.css") + asset("review.css", HERE), asset("review.js", HERE)
    page = template("review.html.j2", HERE).render(
        name=name,
        run_path=run_path,
        audit=audit,
        style=Markup(style),  # files of this package: the only text that is not escaped
        script=Markup(script),
    )
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy
