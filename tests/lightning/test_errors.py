import pytest
from torch import nn

from attnkit.lightning import UserError
from attnkit.lightning.errors import first_line
from attnkit.lightning.modules.classification import ClassificationModule


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


def test_a_users_mistake_is_a_value_error_and_told_once():
    """Python code catches it as it catches those of other libraries. A message of several lines
    that a part raises while it is made is not told again as its first line."""

    def optimizer(parameters):
        raise UserError("lr: none is given\n  give optimizer.lr")

    module = ClassificationModule(nn.Linear(3, 2), num_classes=2, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"^lr: none is given\n  give optimizer.lr$"):
        module.configure_optimizers()
