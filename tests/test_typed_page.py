"""docs/typed_graphs.md: its code, as it stands there."""

import re


def test_the_code_of_the_page(repository):
    page = (repository / "docs" / "typed_graphs.md").read_text()
    names: dict = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for code in blocks:
        exec(compile(code, "typed_graphs.md", "exec"), names)
