"""The rows of a diagnosis, made call by call while the model runs."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnkit.core.capture.calls import AttentionCall, Call, EdgeCall
from attnkit.interpret.diagnosis.diagnosis import MEASURES
from attnkit.interpret.diagnosis.edges import measure_edges
from attnkit.interpret.diagnosis.sampling import Sampling
from attnkit.interpret.diagnosis.tokens import measure_tokens
from attnkit.interpret.methods.grid import Grid


@dataclass
class Layout:
    """What is known of the tokens: images and their patches, and padding."""

    grids: dict[int, Grid | None] | None
    """By its number of keys, where those of attention lie on the images; None without images."""
    num_prefix_tokens: int | None
    real: Tensor | None
    has_met_padding: bool = False
    """Whether attention over as many tokens as `real` has ran."""

    def patches(self, num_keys: int) -> Grid | None:
        """Where so many keys lie on the images; None where they form no grid."""
        return None if self.grids is None else self.grids.get(num_keys)

    def real_keys(self, batch: int, num_keys: int) -> Tensor | None:
        """Which keys are not padding, [batch, keys]; None where there is none."""
        if self.real is None or self.real.shape != (batch, num_keys):
            return None
        self.has_met_padding = True
        return self.real


class Recorder:
    """Receives calls of attention; keeps a row for each head, and notes on what was sampled."""

    def __init__(self, layout: Layout, sampling: Sampling) -> None:
        self.layout = layout
        self.sampling = sampling
        self.rows: list[dict[str, Any]] = []
        self.notes: dict[str, None] = {}
        self._times: Counter[tuple[str, Any]] = Counter()

    def hear(self, call: Call) -> None:
        if isinstance(call, EdgeCall):
            found, by_degree = measure_edges(call, self.sampling)
            self._add(call.layer, call.edge_type, call.num_heads, found, by_degree)
        else:
            self._add(call.layer, None, call.num_heads, self._of_tokens(call), None)

    def _of_tokens(self, call: AttentionCall) -> dict[str, Tensor]:
        layout, sampling = self.layout, self.sampling
        patches = layout.patches(call.num_keys)
        if patches is not None:
            self._note(f"grid: {patches.rows} x {patches.columns}, {patches.source}.")
        elif layout.grids is not None:
            self._note(f"grid: the {call.num_keys} keys of {call.layer or '(itself)'} form none.")
        drawn = f"drawn with the seed {sampling.seed}"
        if call.num_queries > sampling.rows:
            self._note(f"{sampling.rows} queries of each layer, {drawn}.")
        if call.num_queries > sampling.compared or call.num_keys > sampling.keys:
            self._note(
                f"divergence and static: of at most {sampling.compared} queries and, of those that "
                f"are ranked, {sampling.keys} keys, {drawn}."
            )
        return measure_tokens(
            call,
            sampling,
            num_prefix_tokens=patches.num_prefix_tokens if patches else layout.num_prefix_tokens,
            grid=(patches.rows, patches.columns) if patches else None,
            real=layout.real_keys(call.query.shape[0], call.num_keys),
        )

    def _add(
        self,
        layer: str,
        edge_type: tuple[str, str, str] | None,
        num_heads: int,
        found: dict[str, Tensor],
        by_degree: dict[str, Tensor] | None,
    ) -> None:
        number = self._times[layer, edge_type]
        self._times[layer, edge_type] += 1
        for head in range(num_heads):
            values = {name: float(of_heads[head]) for name, of_heads in found.items()}
            row = {"layer": layer, "call": number, "edge_type": edge_type, "head": head}
            row |= dict.fromkeys(MEASURES) | values
            if by_degree is not None:
                row["entropy_by_degree"] = {
                    degree: float(of_heads[head]) for degree, of_heads in by_degree.items()
                }
            self.rows.append(row)

    def _note(self, sentence: str) -> None:
        self.notes[sentence] = None
