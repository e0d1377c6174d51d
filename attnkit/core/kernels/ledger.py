"""The ledger of findings and times of the kernels on this machine, which "auto" obeys.

`python -m attnkit doctor` writes it as one JSON file in the user's cache folder:

    {"attnkit ledger": 1, "machines": {"<device, versions>": {
        "found": [{"kernel": "flash", "kind": ["Causal", "float32"], "what": "causality",
                   "seen": "output 5 sees key 9", "date": "2026-11-26"}],
        "times": [{"kind": ["float32"], "size": [256, 1024, 1024, 1024, 2],
                   "seconds": {"flash": 0.0012, "math": 0.0031}, "date": "2026-11-26"}]}}}

The kind of an attention is the set of its features (`kind_of`). **A finding holds for every
attention whose kind contains the finding's**, at all sizes: a kernel that is wrong for {Causal,
float32} is also skipped for a causal mask with padding, but not in bfloat16. **Times hold for the
same kind and size** (`size_of`) only, and never in compiled programs, which compute differently.
Entries of other devices, or of other versions of attnkit, torch and compilers, are ignored.

The file is read once in a process, when the first kernel is chosen. The environment variable
ATTNKIT_LEDGER names another file, or is `off`. A compiled program keeps the kernels that were
chosen when it was traced. An exported program, which may run on other machines, never depends on
the ledger.
"""

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from attnkit.core.inputs import Inputs
from attnkit.core.masks.edges import Edges
from attnkit.core.masks.sequences import Causal, Packed, Window
from attnkit.core.normalizers import Softmax
from attnkit.core.scores.kinds import ScaledDot

VARIABLE = "ATTNKIT_LEDGER"
FORMAT = 1
MARGIN = 1.05  # by this factor another kernel must be faster: less is noise
PLAIN = frozenset({"float32"}), frozenset({"float32", "gradient"})

Kind = frozenset[str]
Size = tuple[int, ...]


class LedgerError(RuntimeError):
    """Raised if the ledger cannot be written; the message says why, and what to do."""


def _today() -> str:
    return date.today().isoformat()


@dataclass(frozen=True)
class Wrong:
    """A finding that a kernel is wrong.

    Args:
        kernel: the name of the kernel.
        kind: the kind of attention for which it is skipped.
        what: the property that it lacks, such as "causality".
        seen: the observation in one sentence, such as "output 5 sees key 9".
    """

    kernel: str
    kind: Kind
    what: str
    seen: str
    date: str = field(default_factory=_today)

    def __str__(self) -> str:
        kind = ", ".join(sorted(self.kind)) or "all attention"
        seen = " ".join(self.seen.split())
        return f"found wrong here on {self.date} for {kind}: {self.what}, {seen} (attnkit doctor)"


@dataclass(frozen=True)
class Timed:
    """The seconds that each kernel took for attention of a kind and size."""

    kind: Kind
    size: Size
    seconds: Mapping[str, float]
    date: str = field(default_factory=_today)

    def faster_than(self, kernel: str) -> list[str]:
        """Return the clearly faster kernels, the fastest first; none if it was not measured."""
        most = self.seconds.get(kernel, 0.0) / MARGIN
        return sorted(
            (name for name in self.seconds if self.seconds[name] < most),
            key=self.seconds.__getitem__,
        )

    def fastest(self, kernel: str, other: str) -> str:
        """Return a text that says why a kernel is taken in place of another."""
        mine, its = (f"{1e3 * self.seconds[name]:.3g} ms" for name in (kernel, other))
        return f"measured fastest here on {self.date}, {mine} against {its} ({other})"


@dataclass(frozen=True)
class Known:
    """The ledger's entries of one device."""

    found: tuple[Wrong, ...] = ()
    times: Mapping[tuple[Kind, Size], Timed] = field(default_factory=dict)

    @property
    def date(self) -> str | None:
        """The date of the last entry; None without entries."""
        dates = [wrong.date for wrong in self.found] + [timed.date for timed in self.times.values()]
        return max(dates, default=None)

    def wrong(self, kind: Kind) -> dict[str, Wrong]:
        """Return the findings of kernels to skip for a kind of attention, by the kernel's name. The
        reference is the definition and is never skipped."""
        found = (wrong for wrong in self.found if wrong.kind <= kind)
        return {wrong.kernel: wrong for wrong in found if wrong.kernel != "reference"}


NOTHING = Known()

_lock = RLock()
_machines: dict[str, Known] | None = None  # None: not read yet
_devices: dict[torch.device, Known] = {}
_is_silent = False
keeps_plain_flash = False
"""Whether the ledger was read and has nothing against flash for plain attention on the CPU."""


def kind_of(inputs: Inputs) -> Kind:
    """Return the features of an attention: its dtype, the classes of its mask's parts, those of a
    score and a normalizer that are not the usual ones; "bias", "grouped", "dropout", "sink",
    "softcap", "edge_features"; and "gradient" if one is needed."""
    features = [str(inputs.query.dtype).removeprefix("torch.")]
    features += [type(mask).__name__ for mask in inputs.masks]
    for choice, usual in ((inputs.score, ScaledDot), (inputs.normalizer, Softmax)):
        if type(choice) is not usual:
            features.append(type(choice).__name__)
    if inputs.score.softcap is not None:
        features.append("softcap")
    if inputs.bias is not None:
        features.append("bias")
    if inputs.sink is not None:
        features.append("sink")
    if inputs.edge_features is not None:
        features.append("edge_features")
    if inputs.is_grouped:
        features.append("grouped")
    if inputs.dropout_p > 0:
        features.append("dropout")
    if torch.is_grad_enabled():
        query, key, value, bias = inputs.query, inputs.key, inputs.value, inputs.bias
        trains = query.requires_grad or key.requires_grad or value.requires_grad
        if trains or (bias is not None and bias.requires_grad):
            features.append("gradient")
    return frozenset(features)


def size_of(inputs: Inputs) -> Size | None:
    """Return the rounded size of an attention: the numbers of a token in all items and heads,
    rounded up to a power of 4; the queries, the keys, and about how many of them a query sees,
    rounded up to powers of 2; and the number of threads on the CPU.

    None if that does not determine the amount of work: for masks other than `Causal`, `Window`,
    `Packed` and `Edges`, and in compiled programs.
    """
    batch, num_heads, num_queries, head_dim = inputs.query.shape
    seen = num_keys = inputs.num_keys
    width = batch * num_heads * head_dim
    if torch.compiler.is_compiling() or not type(width) is type(num_queries) is type(seen) is int:
        return None
    for mask in inputs.masks:
        if isinstance(mask, Packed):
            seen = min(seen, num_keys // max(1, len(mask.lengths)))
        elif isinstance(mask, Edges):
            seen = min(seen, mask.num_edges // max(1, num_queries))
        elif isinstance(mask, Window) and mask.left is not None and mask.right is not None:
            seen = min(seen, mask.left + mask.right + 1)
        elif not isinstance(mask, (Causal, Window)):
            return None
    sizes = width, num_queries, num_keys, seen
    bits = [(size - 1).bit_length() if size else 0 for size in sizes]
    threads = torch.get_num_threads() if inputs.query.is_cpu else 1
    return 1 << bits[0] + bits[0] % 2, 1 << bits[1], 1 << bits[2], 1 << bits[3], threads


def about(inputs: Inputs) -> tuple[tuple[str, ...], Timed | None]:
    """Return the kernels that were found wrong for an attention, and its times if there are any."""
    device = inputs.query.device
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting() or not _speaks_of(str(device)):
            return (), None
        return _wrong_in_program(str(device), kind_of(inputs)), None
    if _is_silent:
        return (), None
    known = _devices.get(device) or known_of(device)
    if not (known.found or known.times) or torch.jit.is_tracing():
        return (), None
    kind = kind_of(inputs)
    wrong = tuple(known.wrong(kind)) if known.found else ()
    size = size_of(inputs) if known.times else None
    return wrong, None if size is None else known.times.get((kind, size))


# The next two functions run while torch.compile traces, but are not traced.
@torch.compiler.assume_constant_result
def _speaks_of(device: str) -> bool:
    return bool(known_of(device).found)


@torch.compiler.assume_constant_result
def _wrong_in_program(device: str, kind: Kind) -> tuple[str, ...]:
    return tuple(known_of(device).wrong(kind))


def leaves_plain_flash() -> bool:
    """Read the ledger if need be, and return `keeps_plain_flash`."""
    global keeps_plain_flash
    with _lock:
        known = known_of("cpu")
        keeps_plain_flash = not (
            any("flash" in known.wrong(kind) for kind in PLAIN)
            or any(t.kind in PLAIN and t.faster_than("flash") for t in known.times.values())
        )
        return keeps_plain_flash


def known_of(device: torch.device | str) -> Known:
    """Return the ledger's entries of a device; no entries without a ledger."""
    global _machines, _is_silent
    device = torch.device(device)
    known = _devices.get(device)
    if known is None:
        with _lock:
            if _machines is None:
                _machines = _read()
                _is_silent = not _machines
            known = _machines.get(machine(device), NOTHING) if _machines else NOTHING
            _devices[device] = known
    return known


def reload() -> None:
    """Make the file be read again when the next kernel is chosen."""
    global _machines, _is_silent, keeps_plain_flash
    with _lock:
        _machines, _is_silent, keeps_plain_flash = None, False, False
        _devices.clear()


def path() -> Path | None:
    """Return the path of the ledger, whether it exists or not; None if the ledger is off."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() == "off":
        return None
    from attnkit.core.operators.files import cache_folder

    try:
        return Path(given).expanduser() if given else cache_folder() / "ledger.json"
    except RuntimeError:  # the home folder is unknown
        return None


def machine(device: torch.device | str) -> str:
    """Return the key of a device's entries: its name, and all versions that matter."""
    from importlib import metadata

    device = torch.device(device)
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, cuDNN {torch.backends.cudnn.version()}"
    else:
        name = f"{_processor()} {torch.backends.cpu.get_cpu_capability()}"
        name = name if device.type == "cpu" else f"{device.type}, {name}"
    versions = [f"attnkit {sys.modules['attnkit'].__version__}", f"torch {torch.__version__}"]
    for compiler in ("triton",) if device.type == "cuda" else ("numba",):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{compiler} {metadata.version(compiler)}")
    return ", ".join([name, *versions])


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    import platform

    return platform.processor() or platform.machine()


def record(
    device: torch.device | str,
    *,
    checked: Iterable[tuple[str, Kind]] = (),
    found: Iterable[Wrong] = (),
    times: Iterable[Timed] = (),
) -> Path:
    """Write findings and times of a device to the ledger, and obey them from now on.

    Args:
        checked: pairs of a kernel and a kind that were checked; older findings about them are
            removed.
        found: the new findings, about these or other pairs.
        times: the new times, which replace older ones of the same kind and size.

    Returns:
        The path of the ledger.

    Raises:
        LedgerError: the file cannot be written, or is not a ledger; nothing is changed then.
    """
    from attnkit.core.operators.files import alone, replacing

    file, found = path(), tuple(found)
    if file is None:
        raise LedgerError(f"there is no ledger to write to: set {VARIABLE} to a file, not to off")
    looked_at = {*checked, *((wrong.kernel, wrong.kind) for wrong in found)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _lock, alone(file.parent):
            machines, key = _parsed(file) if file.exists() else {}, machine(device)
            before = machines.get(key, NOTHING)
            kept = [old for old in before.found if (old.kernel, old.kind) not in looked_at]
            timed = {(new.kind, new.size): new for new in times}
            machines[key] = Known((*kept, *found), {**before.times, **timed})
            written = _written(machines)
            with replacing(file) as out:
                out.write(written)
    except OSError as error:
        reason = error.strerror or str(error)
        raise LedgerError(
            f"{file}: {reason}; set {VARIABLE} to a file that can be written"
        ) from error
    except ValueError as error:
        raise LedgerError(f"{error}; delete it, or set {VARIABLE} to another file") from error
    reload()
    return file


def _read() -> dict[str, Known]:
    """Read the entries of all machines; none if there is no file, or it is not a ledger."""
    file = path()
    if file is None or not os.path.exists(file):
        return {}
    try:
        return _parsed(file)
    except (OSError, ValueError) as error:
        reason = f"{file}: {error.strerror}" if isinstance(error, OSError) else error
        warnings.warn(
            f"{reason}, and is ignored; delete it, or set {VARIABLE} to another file or off",
            stacklevel=2,
        )
        return {}


def _written(machines: Mapping[str, Known]) -> bytes:
    import json

    def plain(entries: Iterable[Wrong | Timed]) -> list[dict[str, Any]]:
        return [{**vars(entry), "kind": sorted(entry.kind)} for entry in entries]

    entries = {
        key: {"found": plain(known.found), "times": plain(known.times.values())}
        for key, known in machines.items()
    }
    text = json.dumps({"attnkit ledger": FORMAT, "machines": entries}, indent=1)
    return text.encode()


def _parsed(file: Path) -> dict[str, Known]:
    """Read the file; raise ValueError, which names it, if it is not a ledger."""
    import json

    data = file.read_bytes()
    try:
        read = json.loads(data)
        if read["attnkit ledger"] != FORMAT:
            raise ValueError(f"format {read['attnkit ledger']}, expected {FORMAT}")
        return {key: _known(entry) for key, entry in read["machines"].items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file}: is not a ledger of this attnkit") from error


def _known(entry: Any) -> Known:
    found = [
        Wrong(kind=_kind(old), **{name: _is(str, old[name]) for name in _TEXTS})
        for old in _is(list, entry["found"])
    ]
    times = [
        Timed(
            kind=_kind(old),
            size=tuple([_is(int, number) for number in _is(list, old["size"])]),
            seconds={name: float(taken) for name, taken in old["seconds"].items()},
            date=_is(str, old["date"]),
        )
        for old in _is(list, entry["times"])
    ]
    return Known(tuple(found), {(timed.kind, timed.size): timed for timed in times})


_TEXTS = "kernel", "what", "seen", "date"


def _kind(entry: Any) -> Kind:
    return frozenset([_is(str, feature) for feature in _is(list, entry["kind"])])


def _is(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {value!r}")
    return value
