"""Fixtures of the tests of tasks."""

import pytest


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """An empty cache folder, so that no scan of files of another test is found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
