"""The review page: one autoescaped template with its own style and script, and the policy that allows only those."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from soseleto.report.assets import asset, digest, template

HERE = Path(__file__).parent / "page"


def render(name: str, run_path: str) -> tuple[bytes, str]:
    """The page of the run called ``name``, and its content policy: pictures and decisions go to ourselves alone."""
    style, script = asset("style.css") + asset("review.css", HERE), asset("review.js", HERE)
    page = template("review.html.j2", HERE).render(
        name=name,
        run_path=run_path,
        style=Markup(style),  # our own package files: the only text that is not escaped
        script=Markup(script),
    )
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy
