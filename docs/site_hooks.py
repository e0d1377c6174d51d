"""A hook of mkdocs for the name of a file, or of a node, behind a fence of our pages."""

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """```yaml file=mine/a.yaml becomes ```yaml title="mine/a.yaml", which the theme shows."""
    return re.sub(r"^```(\w+) \w+=(\S+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
