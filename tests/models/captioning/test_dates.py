"""The example that rewrites dates learns to, and draws its alignment."""

import importlib.util

import pytest
from PIL import Image


@pytest.fixture
def dates(repository):
    spec = importlib.util.spec_from_file_location("dates", repository / "docs/examples/dates.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_picture_is_drawn(dates, tmp_path):
    picture = tmp_path / "dates.png"
    dates.main(steps=10, picture=str(picture))
    assert Image.open(picture).width > 1000


@pytest.mark.slow
def test_dates_are_rewritten(dates):
    assert dates.main(steps=200) >= 0.97
