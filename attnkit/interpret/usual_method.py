"""The default method for what a module says is explained."""

from attnkit.interpret.explain import explain
from attnkit.lightning.explained import Explained


def usual_method(explained: Explained) -> str:
    """The method that `attnkit.explain` takes where none is asked for, of the first of them."""
    if explained.kind == "nodes":
        return explain(explained.model, explained.inputs, index=0).method
    said = None if explained.sentences is None else explained.sentences[:1]
    return explain(explained.model, explained.inputs[:1], said).method
