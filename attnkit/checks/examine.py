"""The examination of one attention: cases against the definition, and general properties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, log2
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from attnkit.checks.attentions import Attention
from attnkit.checks.cases import COMPARED, DEFINITION, HEAD, PRINTED, Case
from attnkit.checks.report import Fault, Row, share
from attnkit.checks.run import check_attention
from attnkit.core.inputs import Inputs, check_inputs
from attnkit.core.kernels import ledger

COLUMNS = {
    "output": "output",
    "causality": "causal",
    "batch": "batch",
    "batch_training": "batch",
    "determinism": "repeats",
    "mask": "padding",
    "padding": "padding",
    "padding_appended": "padding",
    "dead_rows": "dead rows",
}
"""The checks of `check_attention` that every attention must pass, with their report columns."""

TINY = Case(batch=3, queries=7, keys=7, dim=8, value_dim=8)
DROPOUT = Case(batch=8, heads=4, kv_heads=4, dim=64, value_dim=64, dropout_p=0.25)
FAR = 8.0  # factor on the tolerance for scores near ±100, which have fewer digits after the point
NEW = 211  # a number of tokens that no case has
GROWTH = (2048, 4096)  # numbers of tokens above those where kernels switch to larger blocks
TRIALS = 200  # maximum number of smaller cases to try

Names = dict[str, Any]


class Refused(Exception):
    """Raised if an attention refuses to compute a case, or has no argument for it."""


def tolerance(case: Case) -> float:
    """Return the difference that another order of sums may cause, relative to the largest value."""
    return torch.finfo(getattr(torch, case.dtype)).eps ** 0.75 * (FAR if case.around else 1.0)


def computed(attention: Attention, case: Case, more: str = "") -> Names:
    """Run a case's program and return its variables, `output` among them.

    Raises:
        Refused: the attention cannot compute the case. attnkit's raises `UnsupportedError`; others
            have no special error, so any error before `output` counts.
    """
    program = attention.program(case)
    if program is None:
        raise Refused("it has no argument for this")
    names: Names = {}
    try:
        exec(compile(program + more, f"<{attention.name}>", "exec"), names)
    except Exception as error:
        is_refusal = not attention.is_ours or type(error).__name__ == "UnsupportedError"
        if is_refusal and "output" not in names:
            raise Refused(str(error)) from error
        raise
    return names


class Examination:
    """One attention in one dtype on one device, case by case."""

    def __init__(self, attention: Attention, device: str, dtype: str) -> None:
        self.attention = attention
        self.device, self.dtype = device, dtype
        self.name = f"{attention.name}, {dtype} on {device}"
        self.num_cases = 0
        self.worst: dict[str, float] = {}
        self.told: set[str] = set()
        self.cells: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.has_raised = False
        self.reason = ""
        self.kinds: set[ledger.Kind] = set()
        self.wrong: list[ledger.Wrong] = []

    def row(self) -> Row:
        worst = {what: _said(found) for what, found in self.worst.items()}
        faults = {fault.what: fault.verdict for fault in reversed(self.faults)}
        cells = self.cells | worst
        for what, verdict in sorted(faults.items(), key=lambda item: item[1] == "fail"):
            cells[what] = "WRONG" if verdict == "fail" else cells.get(what, verdict)
        return Row(self.attention.name, self.device, self.dtype, self.num_cases, cells)

    def add(self, what: str, seen: str, program: str = "", verdict: str = "fail") -> None:
        self.faults.append(Fault(self.name, what, verdict, seen, program))

    def ask(self, cases: Iterable[Case], seconds: float = inf) -> None:
        """Compare each case with the definition, and start none after `seconds`.

        For each column, the first wrong case is reported, reduced to the smallest case that is
        still wrong. All wrong kinds of inputs are recorded, so that "auto" avoids them.
        """
        started = perf_counter()
        for asked in cases:
            if perf_counter() - started > seconds:
                return
            case = self.here(asked)
            try:
                found = self.differences(case)
            except Refused as refusal:
                self.refused(case, refusal)
                continue
            self.num_cases += 1
            for what, (difference, seen) in found.items():
                self.worst[what] = max(self.worst.get(what, 0.0), difference)
                if not difference <= tolerance(case):
                    self.tell(what, case, seen)

    def refused(self, case: Case, refusal: Refused) -> None:
        """Report a refusal that is a fault: of a plain attention, or of a number of tokens if 64
        tokens work. A forced kernel of torch may refuse by "No available kernel"."""
        raised = refusal.__cause__
        self.reason = self.reason or str(refusal).splitlines()[0]
        if raised is None or self.attention.is_ours or self.has_raised:
            return
        if self.attention.may_refuse and "No available kernel" in str(raised):
            return
        plain = replace(case, queries=64, keys=64)
        is_plain = replace(plain, mask="none") == self.here(Case(trains=case.trains))
        is_fault = is_plain and not self.attention.may_refuse
        if not is_fault and case != plain and case.queries == case.keys:
            try:
                is_fault = bool(self.differences(plain))
            except Refused:
                return
        if is_fault or "CUDA error" in str(raised):
            self.has_raised = True
            seen = f"{case}: raises {type(raised).__name__}: {raised}".splitlines()[0]
            self.add("output", seen, self.printed(case))

    def tell(self, what: str, case: Case, seen: str) -> None:
        is_first = what not in self.told
        self.told.add(what)
        if what == "dead rows" and not self.attention.is_ours:
            if is_first:
                self.add(what, f"a query that may look nowhere: {seen}", verdict="note")
            return
        if not is_first and (not self.attention.kernel or self.is_forbidden(what, case)):
            return
        small, seen = self.smallest(what, case, seen)
        if is_first:
            self.add(what, f"{small}: {seen}", self.printed(small))
        self.forbid(what, small, f"{small}: {seen}")

    def forbid(self, what: str, case: Case, seen: str) -> None:
        """Record that "auto" must not use the kernel for inputs with this case's features."""
        if self.attention.kernel and (kind := self.kind(what, case)) is not None:
            self.wrong.append(ledger.Wrong(self.attention.kernel, kind, what, seen))

    def is_forbidden(self, what: str, case: Case) -> bool:
        kind = self.kind(what, case)
        return kind is None or any(wrong.kind <= kind for wrong in self.wrong)

    def kind(self, what: str, case: Case) -> ledger.Kind | None:
        """Return the features of a case that the ledger distinguishes; None if `attend` refuses it.

        "gradient" is left out unless the gradients are what is wrong.
        """
        tensors = case.tensors(is_same=False, is_top_left=False)
        mask = (self.attention.lines(case) or "").split("\noutput")[0]
        names: Names = {}
        try:
            exec(f"{HEAD}{self.attention.imports}{tensors}{mask}", names)
            kind = ledger.kind_of(inputs_of(names))
        except ValueError:
            return None
        return kind if what == "gradients" else kind - {"gradient"}

    def printed(self, case: Case) -> str:
        """Return the program of a case that prints the differences from the definition."""
        program = self.attention.program(case)
        assert program is not None
        head, tensors = program.split("\ntorch.manual_seed", 1)
        if self.attention.is_ours:  # without the ledger, as in the examination
            head = f'import os\n\nos.environ["ATTNKIT_LEDGER"] = "off"\n{head}'
        parts = [head, "\n", DEFINITION, "\ntorch.manual_seed", tensors]
        return "".join([*parts, self.attention.defined, COMPARED, PRINTED])

    def here(self, case: Case) -> Case:
        return replace(case, device=self.device, dtype=self.dtype)

    def smallest(self, what: str, case: Case, seen: str) -> tuple[Case, str]:
        """Return the smallest case found that is wrong in the same column."""
        trials = 0
        candidates = case.smaller()
        while trials < TRIALS and (smaller := next(candidates, None)) is not None:
            trials += 1
            try:
                difference, told = self.differences(smaller).get(what, (0.0, ""))
            except Refused:
                continue
            if not difference <= tolerance(smaller):
                case, seen, candidates = smaller, told, smaller.smaller()
        return case, seen

    def differences(self, case: Case) -> dict[str, tuple[float, str]]:
        """Return by column the worst difference from the definition, and its place in words.

        Raises:
            Refused: the attention cannot compute the case.
        """
        try:
            names = computed(self.attention, case, DEFINITION + self.attention.defined + COMPARED)
        except Refused:
            raise
        except Exception as error:
            return {"output": (inf, f"raises {type(error).__name__}: {error}".splitlines()[0])}
        output, expected = names["output"].detach().cpu().double(), names["expected"].detach()
        if output.shape != expected.shape:
            said = f"the shape {list(output.shape)}, expected {list(expected.shape)}"
            return {"output": (inf, said)}
        seeing = names["allowed"].cpu().any(dim=-1, keepdim=True).expand_as(expected[..., :1])
        alive = seeing
        if not self.attention.is_ours:  # NaN of one head reaches all through an output projection
            alive = seeing.all(dim=1, keepdim=True).expand_as(seeing)
        errors = (output - expected).abs() / _largest([expected])
        found = {"output": _worst(errors.masked_fill(~alive, 0.0), "output", tolerance(case))}
        if not seeing.all():
            difference, _ = _worst(output.abs().masked_fill(seeing, 0.0), "", inf)
            seen = f"{difference:.1e}" if difference < inf else "NaN"
            found["dead rows"] = difference, f"{seen} where 0 is expected"
        if names["got"] is not None and (alive.all() or self.attention.is_ours):
            largest = _largest(names["right"])
            named = [
                _worst((was.cpu().double() - should).abs() / largest, name, tolerance(case))
                for name, was, should in zip(
                    names["inputs"], names["got"], names["right"], strict=True
                )
            ]
            found["gradients"] = max(named, key=lambda pair: pair[0])
        if self.attention.kernel:
            kind = ledger.kind_of(inputs_of(names))
            self.kinds |= {kind, kind - {"gradient"}}
        return found

    def properties(self) -> None:
        """Run `check_attention` with padding and with a causal mask."""
        for mask in ("padding", "causal"):
            case = self.here(replace(TINY, mask=mask))
            try:
                names = computed(self.attention, case)
            except Exception:  # refused, or reported by the cases already
                continue
            if not names["output"].requires_grad:  # the checks need gradients
                continue
            module = _Module(self.attention, case)
            is_causal = mask == "causal"
            report = check_attention(
                module,
                3 * case.heads * case.dim,
                call=_unmasked if is_causal else _masked,
                causal=is_causal,
                checks=[check for check in COLUMNS if is_causal or check != "causality"],
            )
            for finding in report:
                what = COLUMNS[finding.check]
                if finding.verdict == "skipped":
                    continue
                promised = what != "dead rows" or self.attention.is_ours
                if finding.verdict == "fail":
                    if all(fault.what != what for fault in self.faults):  # not reported yet
                        seen = f"{finding.check} with {mask}: {finding.seen}"
                        program = self.printed(case) if self.is_wrong(case) else self.repeated(case)
                        self.add(what, seen, program, "fail" if promised else "note")
                    if promised:
                        self.forbid(what, case, finding.seen)
                else:
                    self.cells.setdefault(what, "ok")

    def is_wrong(self, case: Case) -> bool:
        return any(d > tolerance(case) for d, _ in self.differences(case).values())

    def repeated(self, case: Case) -> str:
        """Return a program that calls twice and prints the difference."""
        return (
            f"{self.attention.program(case)}first = output\n{self.attention.lines(case)}\n"
            'print("two calls differ by", (output - first).abs().max().item())\n'
        )

    def dropout(self) -> None:
        """Check the share of dropped weights, the size of the others, and that the backward drops
        the same ones. Queries are 0, so that weights are equal, and values are the identity."""
        case = self.here(DROPOUT)
        size = case.keys
        identity = (
            "query = torch.zeros_like(query).requires_grad_()\n"
            f"value = torch.eye({size}, **kind).expand_as(key).contiguous().requires_grad_()\n"
        )
        program = self.attention.program(case)
        if program is None or self.attention.is_same:
            return
        before, lines = program.split("allowed = ", 1)
        call = self.attention.lines(case)
        program = f"{before}{identity}allowed = {lines}" + (
            "weights, columns = output.detach(), output.detach().sum(dim=2)\n"
            f"kept = weights > 0.5 / {size}\n"
            "dropped, size = 1 - kept.double().mean().item(), weights[kept].mean().item()\n"
            "gradient = torch.autograd.grad(output.sum(), value)[0][..., 0]\n"
            "first = kept[0, 0]\n"
            "are_shared = (kept[0, 1] == first).all() or (kept[1, 0] == first).all()\n"
            f"{call}\n"
            f"are_repeated = ((output > 0.5 / {size}) == kept).all()\n"
            'print(f"dropped {dropped:.4f}, expected {dropout_p}")\n'
            f'print(f"kept {{size * {size}:.4f}}, expected {{1 / (1 - dropout_p):.4f}}")\n'
            'print("all heads or items drop the same:", bool(are_shared), "expected False")\n'
            'print("two calls drop the same:", bool(are_repeated), "expected False")\n'
        )
        names: Names = {}
        try:
            quiet = program.split("\nprint")[0]
            exec(compile(quiet, f"<{self.attention.name}>", "exec"), names)
        except Exception as error:
            if self.attention.is_ours and type(error).__name__ != "UnsupportedError":
                self.add("dropout", f"raises {type(error).__name__}: {error}", program)
            return
        number = names["weights"].numel()
        if self.attention.kernel and (kind := self.kind("dropout", case)) is not None:
            self.kinds |= {kind, kind | {"gradient"}}
        spread = 6 * (case.dropout_p * (1 - case.dropout_p) / number) ** 0.5
        dropped, kept = names["dropped"], names["size"] * size * (1 - case.dropout_p)
        columns = names["columns"]
        backward = _worst((names["gradient"] - columns).abs() / columns.abs().max(), "", inf)[0]
        said = f"drops {dropped:.4f} of the weights, {case.dropout_p} was asked for"
        if abs(kept - 1) > 2 * tolerance(case):
            said = f"the weights that it keeps are {kept:.4f} of what they should be"
        elif backward > 4 * tolerance(case):
            said = f"its backward drops other weights than its forward: {share(backward)}"
        elif names["are_shared"] or names["are_repeated"]:
            which = "two calls" if names["are_repeated"] else "two heads or items"
            said = f"{which} drop the same weights"
        elif abs(dropped - case.dropout_p) <= spread:
            self.cells["dropout"] = "ok"
            return
        self.add("dropout", said, program)
        self.forbid("dropout", case, said)

    def costs(self, *, memory: bool) -> None:
        """Measure how much longer a first call with a new number of tokens takes, and how peak
        memory grows with the tokens."""
        new = self.here(replace(TINY, queries=NEW, keys=NEW))
        seconds = []
        for _ in range(4):
            start = perf_counter()
            try:
                computed(self.attention, new)
            except Exception:  # refused, or reported by the cases already
                return
            seconds.append(perf_counter() - start)
        more = 1000 * (seconds[0] - min(seconds[1:]))
        self.cells["new shape"] = f"{max(more, 0):.0f} ms"
        # MPS has no memory statistics, and torch cannot run two profilers
        if memory and self.device != "mps" and not torch.autograd._profiler_enabled():
            one = replace(new, batch=1)
            peaks = [_peak(self.attention, replace(one, queries=n, keys=n)) for n in GROWTH]
            self.cells["memory"] = f"n^{log2(peaks[1] / peaks[0]):.1f}"


class _Module(nn.Module):
    """An attention as a module over tokens that hold query, key and value of each head."""

    def __init__(self, attention: Attention, case: Case) -> None:
        super().__init__()
        lines = attention.lines(case)
        assert lines is not None
        self.names = computed(attention, case)
        self.code = compile(lines, f"<{attention.name}>", "exec")
        self.heads = case.heads
        self.register_buffer("like", self.names["query"].detach().new_zeros(()))

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        parts = tokens.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        names = dict(self.names, query=parts[0], key=parts[1], value=parts[2])
        if mask is not None:
            names["allowed"] = mask[:, None, None]
        exec(self.code, names)
        return names["output"].transpose(1, 2).flatten(2)


def _masked(module: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
    return module(tokens, mask)


def _unmasked(module: nn.Module, tokens: Tensor) -> Tensor:
    return module(tokens, None)


def inputs_of(names: Names) -> Inputs:
    """Return the inputs of `attend` from the variables of a program for attnkit."""
    given = {name: names[name] for name in ("mask", "bias", "scale", "dropout_p")}
    return check_inputs(names["query"], names["key"], names["value"], **given)


def _said(difference: float) -> str:
    if difference == inf:
        return "NaN"
    return f"{difference:.0e}" if difference else "0"


def _largest(tensors: Sequence[Tensor]) -> float:
    return max(tensor.abs().max().item() for tensor in tensors) or 1.0


def _worst(error: Tensor, name: str, limit: float) -> tuple[float, str]:
    """Return the largest error, inf for NaN, and in words the first one above the limit."""
    error = error.detach().nan_to_num(inf, posinf=inf)
    worst = error.max().item()
    if not worst > limit:
        return worst, ""
    first = (error > limit).nonzero()[0].tolist()
    return worst, f"{name} differs by {share(worst)}, first at {first} of {list(error.shape)}"


def _peak(attention: Attention, case: Case) -> float:
    """Return the peak memory in bytes of a call and its backward, without its inputs."""
    names = computed(attention, case)
    backward = "if output.requires_grad:\n    output.sum().backward()\n"
    call = compile(f"{attention.lines(case)}\n{backward}", f"<{attention.name}>", "exec")
    if case.device == "cuda":
        del names["output"]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        exec(call, names)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        exec(call, names)
    assert profiler.profiler is not None
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
