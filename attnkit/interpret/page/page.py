"""`write_page`: one HTML file that needs nothing but a browser."""

import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from attnkit.interpret.page.html import escaped, table_html
from attnkit.interpret.page.section import Section, Table
from attnkit.lightning.files import write_text

# Nothing is loaded from anywhere, whatever a section holds.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_page(
    path: str | os.PathLike[str],
    *,
    title: str,
    facts: Sequence[str],
    table: Table,
    sections: Sequence[Section],
) -> Path:
    """Write a page; the file is there whole or not at all. Returns the path.

    A section's script is a file `assets/<script>.js` that calls `behaviour(name, function)`, its
    style `assets/<script>.css`; the function gets the section's element and its data.

    Args:
        title: plain text.
        facts: what was shown and how it was made, `name: what`, plain text.
        table: of the scores.
        sections: in this order.
    """
    scripts = dict.fromkeys(section.script for section in sections if section.script)
    style = _assets(["page", *scripts], "css")
    code = _assets(["page", *scripts], "js")
    listed = "".join(
        f'<li><a href="#s{number}">{escaped(section.title)}</a></li>'
        for number, section in enumerate(sections)
    )
    body = "\n".join(_section(number, section) for number, section in enumerate(sections))
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escaped(title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escaped(title)}</h1>
<dl class="facts">{"".join(map(_fact, facts))}</dl>
{table_html(table) if table.rows else ""}
<nav aria-label="Contents"><ol>{listed}</ol></nav>
</header>
<main>
{body}
</main>
<script>
{code}</script>
</body>
</html>
"""
    path = Path(path)
    write_text(path, page)
    return path


def _section(number: int, section: Section) -> str:
    data = ""
    if section.script:
        # so that no text in it can end the element
        text = json.dumps(section.data, separators=(",", ":")).replace("<", "\\u003c")
        data = f'\n<script type="application/json">{text}</script>'
    return (
        f'<section id="s{number}" data-script="{escaped(section.script)}">\n'
        f"<h2>{escaped(section.title)}</h2>\n{section.html}{data}\n</section>"
    )


def _fact(fact: str) -> str:
    name, colon, what = fact.partition(": ")
    return (
        f"<dt>{escaped(name)}</dt><dd>{escaped(what)}</dd>"
        if colon
        else f"<dd>{escaped(fact)}</dd>"
    )


def _assets(names: Sequence[str], kind: str) -> str:
    folder = resources.files("attnkit.interpret.page") / "assets"
    files = [folder / f"{name}.{kind}" for name in names]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
