"""How attention over edges is divided."""

import pytest
import torch

from attnkit.core.kernels.edges import numba as edges_numba
from attnkit.core.kernels.edges import scores as edge_scores
from attnkit.core.operators.cpu import Caches


@pytest.fixture(params=["together", "apart"])
def computed_in(request, monkeypatch):
    """All heads of a small graph at once, in one thread and where they stand; or each head alone,
    in blocks and tasks of a few edges, on copies."""
    before = torch.get_num_threads()
    if request.param == "apart":
        torch.set_num_threads(3)
        monkeypatch.setattr(edge_scores, "GROUP", 0)
        monkeypatch.setattr(edge_scores, "BLOCK", 40)
        monkeypatch.setattr(edges_numba, "caches", lambda: Caches(0, 0))
        for name, value in (("GROUP", 100), ("ALONE", 0), ("BLOCK", 7), ("FEW", 0)):
            monkeypatch.setattr(edges_numba, name, value)
    yield
    torch.set_num_threads(before)
