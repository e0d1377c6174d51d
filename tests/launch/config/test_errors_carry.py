"""What an error of a configuration carries for a program that catches it, beside its text."""

import pytest

from attnkit.launch.config.compose import Composer
from attnkit.launch.decide import Request
from attnkit.lightning import UserError


@pytest.mark.parametrize(
    ("override", "key", "expected", "given"),
    [
        ("model.depth=abc", "model.depth", "int", "abc"),
        ("seeds=0", "seeds", "1 to 1000 runs", 0),
        ("trainer.log_every_n_steps=-1", "trainer.log_every_n_steps", "at least 0", -1),
        ("model._target_=3", "model._target_", "a dotted name", 3),
        ("callbacks.mine=3", "callbacks.mine", "a mapping with _target_", 3),
        ("model._target_=os.system", "model._target_", "", None),
        ("model.dim=${modle.depth}", "model.dim", "", None),
        ("data.root=???", "data.root", "", None),
    ],
)
def test_key_expected_given_and_where(override, key, expected, given):
    request = Request.read(Composer(), [override])
    with pytest.raises(UserError) as caught:
        request.plain(request.config, run_dir="run")
    error = caught.value
    assert (error.key, error.expected, error.given) == (key, expected, given)
    assert str(error).startswith(f"{key}: ")
    assert error.where == ("" if "???" in override else override)
    assert str(error).endswith(f"\n  in {override}") or not error.where
