import pytest

from attnkit.lightning.errors import first_line


@pytest.mark.parametrize(
    ("error", "line", "named"),
    [
        (ValueError("\n  no such key\nmore"), "no such key", "ValueError: no such key"),
        (KeyError("x"), "'x'", "KeyError: 'x'"),
        (AssertionError(), "AssertionError", "AssertionError"),
        (OSError(" \n "), "OSError", "OSError"),
        (ValueError("x" * 1000), "x" * 300, "ValueError: " + "x" * 300),
    ],
)
def test_first_lines(error, line, named):
    assert first_line(error) == line
    assert first_line(error, named=True) == named
