"""The default method for a model."""

from attnkit.interpret.explain import explain
from attnkit.lightning.explained import Explained


def usual_method(explained: Explained) -> str:
    """The first that can explain its first image: relevance, Grad-CAM or for sentences attention,
    and the input gradient, of which each asks less of a model."""
    if explained.kind == "nodes":
        return "relevance"
    said = None if explained.sentences is None else explained.sentences[:1]
    for method in ("relevance", "grad_cam" if said is None else "attention"):
        try:
            explain(explained.model, explained.inputs[:1], said, method)
        except (ValueError, TypeError, RuntimeError):  # also a block that begins as the identity
            continue
        return method
    return "input_gradient"
