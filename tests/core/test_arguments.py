"""Checks of arguments: what is right passes, what is wrong is named."""

import pytest
import torch

from attnkit.core.arguments import at_least, choice, divides, odd, pair, positive, share, up_to_1


def test_what_is_right_passes():
    at_least(1, dim=1, heads=None, depth=10**9)
    positive(temperature=0.1, softcap=None, bandwidth=torch.tensor(-1.0))
    odd(kernel_size=7)
    share(dropout_p=0, drop_path=0.999)
    up_to_1(strength=1, crop_pct=None)
    choice(("sum", "max", None), mode=None)
    divides("num_heads", 3, dim=12, key_dim=3)
    assert (pair("size", 3), pair("size", [4, 5])) == ((3, 3), (4, 5))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: at_least(1, dim=3, depth=0), "depth: expected at least 1, got 0"),
        (lambda: at_least(0, entropy=float("nan")), "entropy: expected at least 0, got nan"),
        (lambda: at_least(0, entropy=float("inf")), "entropy: expected at least 0, got inf"),
        (lambda: positive(softcap=0), "softcap: expected a positive number, got 0"),
        (lambda: positive(scale=float("nan")), "scale: expected a positive number, got nan"),
        (lambda: odd(kernel_size=4), "kernel_size: expected an odd number, got 4"),
        (lambda: odd(kernel_size=-1), "kernel_size: expected an odd number, got -1"),
        (lambda: share(dropout_p=1.0), "dropout_p: expected 0 <= dropout_p < 1, got 1.0"),
        (lambda: share(dropout_p=float("nan")), "dropout_p: expected 0 <= dropout_p < 1, got nan"),
        (lambda: up_to_1(gamma=1.5), "gamma: expected 0 <= gamma <= 1, got 1.5"),
        (lambda: up_to_1(gamma=float("nan")), "gamma: expected 0 <= gamma <= 1, got nan"),
        (lambda: choice(("a",), kind="b"), "kind: expected 'a', got 'b'"),
        (lambda: choice(("a", "b", None), kind="c"), "kind: expected 'a', 'b' or None, got 'c'"),
        (lambda: choice(("a", "b"), kind=["a"]), r"kind: expected 'a' or 'b', got \['a'\]"),
        (lambda: divides("heads", 5, dim=12), "heads: 5 does not divide dim 12"),
        (lambda: divides("heads", 0, dim=12), "heads: 0 does not divide dim 12"),
        (lambda: pair("size", (3, 0)), r"size: expected a positive integer or two, got \(3, 0\)"),
        (lambda: pair("size", (3, 4, 5)), "size: expected a positive integer or two, got"),
        (lambda: pair("size", "12"), "size: expected a positive integer or two, got '12'"),
        (lambda: pair("size", True), "size: expected a positive integer or two, got True"),
    ],
)
def test_what_is_wrong_is_named(check, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check()
