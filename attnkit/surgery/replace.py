"""Replacement of a network's attention by the shared block, with the same weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnkit.core.kernels.choose import named_backend
from attnkit.core.masks.base import Mask, as_mask
from attnkit.core.multihead import MultiHeadAttention
from attnkit.core.normalizers import Normalizer
from attnkit.core.running import undisturbed
from attnkit.interop.conversion import shortened
from attnkit.surgery.adapters import Adapter
from attnkit.surgery.convert import Changes, ScoreChange, changed, convert, is_known
from attnkit.surgery.dry_run import examples_for

SOFTMAX = "a softmax is taken"
PRODUCT = "activations are multiplied with each other"
_OPERATIONS = dict.fromkeys(("softmax", "scaled_dot_product_attention"), SOFTMAX) | dict.fromkeys(
    ("matmul", "__matmul__", "bmm", "baddbmm", "einsum"), PRODUCT
)


def attending(model: nn.Module) -> dict[str, str]:
    """Return the innermost modules that take a softmax or multiply activations in a dry run, and
    which; products only outside of modules with a softmax. Empty if no example runs."""
    for images in examples_for(model):
        inside: list[str] = []
        found: dict[str, str] = {}
        with suppress(Exception), _inside(model, inside), _Watch(inside, found):
            model(images)
            softmaxes = tuple(f"{name}." for name, what in found.items() if what == SOFTMAX)
            return {
                name: what
                for name, what in found.items()
                if what == SOFTMAX or not any(each.startswith(f"{name}.") for each in softmaxes)
            }
    return {}


@contextmanager
def _inside(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Return a context in which `names` are those of the running modules, the innermost last."""

    def drop_last() -> None:  # a hook that returned something would change the output
        names.pop()

    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda *_, name=name: names.append(name))
            leave = module.register_forward_hook(lambda *_: drop_last(), always_call=True)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        yield


class _Watch(TorchFunctionMode):
    def __init__(self, inside: list[str], found: dict[str, str]) -> None:
        super().__init__()
        self.inside = inside
        self.found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        what = _OPERATIONS.get(getattr(func, "__name__", ""))
        tensors = [each for each in args if isinstance(each, Tensor)]
        # weights of a product have two dimensions
        if what and len(tensors) >= 1 + (what == PRODUCT) and all(t.ndim > 2 for t in tensors):
            name = self.inside[-1]
            self.found[name] = SOFTMAX if SOFTMAX in (what, self.found.get(name)) else PRODUCT
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ReplacedAttention:
    """One replaced module: its name, its class, and the sizes of its attention."""

    name: str
    replaced: str
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class Replacement:
    """The replaced modules, and those left unchanged with the reasons; `str()` is a table."""

    replaced: tuple[ReplacedAttention, ...]
    left: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[ReplacedAttention]:
        return iter(self.replaced)

    def __len__(self) -> int:
        return len(self.replaced)

    def __str__(self) -> str:
        lines = [("module", "in the place of", "heads", "head_dim")]
        lines += [(r.name, r.replaced, f"{r.num_heads}", f"{r.head_dim}") for r in self]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {heads:>{widths[2]}}  {dim:>{widths[3]}}"
            for name, kind, heads, dim in lines
        ]
        return "\n".join([*table, *(f"left: {each}" for each in self.left)])


def replace_attention(
    model: nn.Module,
    where: str = "*",
    *,
    mask: Mask | Annotated[Tensor, "#batch #heads #queries #keys", bool] | None = None,
    score: ScoreChange | None = None,
    normalizer: str | Normalizer | None = None,
    backend: str = "auto",
    partial: bool = False,
) -> Replacement:
    """Replace the attention in another library's network by attnkit's block, in place.

        vit = timm.create_model("vit_base_patch16_224", pretrained=True)
        attnkit.replace_attention(vit)                             # the same outputs
        with attnkit.capture_attention(vit, layers=-1, rows=0) as weights:
            vit(images)

        near = attnkit.Window2d(14, 14, 3, 3, num_prefix_tokens=1)
        attnkit.replace_attention(swin, score="cosine")            # to be fine-tuned
        attnkit.replace_attention(vit, "blocks.[0-5].*", mask=near)

    Each attention module becomes an adapter with the same call signature and a `MultiHeadAttention`
    named `attention` inside, which has the very parameters of the replaced module (an optimiser
    that was made before stays valid), its norms, gate, dropout and relative bias. If the
    projections are not those of the block, such as convolutions or pooled maps, the adapter keeps
    the module itself, `theirs`, and its `attention` is `attnkit.attend` for heads. Without changes,
    outputs and gradients are equal to rounding; weights are captured, kernels recorded, compiled
    and chosen as in any network of attnkit. State-dict keys change: load a pretrained network's
    weights first.

    Nearly all of timm's attention with a softmax of queries and keys is supported; docs/zoo.md
    lists its networks, `attnkit.surgery.timm_forwards` the classes that are kept. So are
    torchvision's `ShiftedWindowAttention`, both versions; torch's `nn.MultiheadAttention`
    (torchvision's VisionTransformer); and transformers' `Swinv2Attention` and
    `Data2VecVisionAttention`, while its other towers use the interface of
    `attnkit.interop.register_transformers`. If the network has no bias of keys, the block has one
    that begins at 0, which changes nothing under a dot product; separate projections or biases
    become one parameter, a copy. If heads are mixed after softmax (CaiT, EfficientFormer V2,
    ConViT), captured weights are those before mixing, and neither mask nor score may change.
    Attention over channels (XCiT, EdgeNeXt, DaViT) takes no mask, and no score with weights for
    head_dim, such as "general" and "additive". The state of the random generator stays.

    Args:
        model: the network.
        where: a glob over the names of its attention modules (`*` matches dots too).
        mask: where to look in addition to the network's own masks, True = may look; in Swin, from
            token to token of a window.
        score: a score that replaces the network's: a name, a `Score` or a class such as
            `attnkit.learned_scores.CosineScore`, of which each layer gets one.
        normalizer: a normalizer that replaces softmax: a name or a `Normalizer`.
        backend: the kernel, as in `attnkit.attend`.
        partial: whether attention that cannot be replaced may stay, if other attention can be.

    Returns:
        A row for each replaced module; with `partial`, `left` lists the others, and why.

    Raises:
        ValueError: a module selected by `where` looks like attention and cannot be replaced, with
            the reason of each (such as a copy that would be frozen in part), unless `partial` lets
            it stay; or there is none to replace. The network is then unchanged.
        TypeError: a mask or score of another kind.
    """
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ValueError("model: is compiled; replace attention first, then compile")
    changes = Changes(None if mask is None else as_mask(mask), score, normalizer, backend)
    named_backend(backend)
    with torch.random.fork_rng(devices=[]):
        changed(MultiHeadAttention(2, 1), changes)  # raises for a wrong score or normalizer
    named = dict(_attention_modules(model))
    chosen = {name: module for name, module in named.items() if fnmatchcase(name, where)}
    if not chosen:
        there_are = f"none of {shortened(named)}" if named else _why_there_is_none(model)
        raise ValueError(
            f"where: expected a glob over the attention modules of {type(model).__name__}, "
            f"got {where!r}: {there_are}"
        )
    adapters: dict[int, Adapter] = {}
    reasons: dict[str, list[str]] = {}
    with torch.random.fork_rng(devices=[]):  # initial weights are replaced by the network's
        for name, module in chosen.items():
            try:
                adapters[id(module)] = convert(module, changes)
            except ValueError as error:
                reasons.setdefault(str(error), []).append(name)
    left = tuple(f"{shortened(names)}: {reason}" for reason, names in reasons.items())
    if left and not (partial and adapters):
        can = "; where= can leave it out" if len(named) > len(chosen) else ""
        can = "; partial=True or where= leaves it as it is" if adapters else can
        raise ValueError(
            f"model: attention that cannot be replaced: {'; '.join(left)}{can}"
            f"{_unknown(model, named)}"
        )
    if partial and (others := _unknown(model, named)):
        left += (others.removeprefix("; "),)
    # a module may stand at several places
    for parent in list(model.modules()):
        for child, attention in parent._modules.items():
            if id(attention) in adapters:
                parent._modules[child] = adapters[id(attention)]
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(module, Adapter) for module in encoder.modules()
        ):
            # with nested tensors it packs the batch for a kernel that reads torch's own weights
            encoder.use_nested_tensor = False
    rows = (_row(n, m, adapters[id(m)]) for n, m in chosen.items() if id(m) in adapters)
    return Replacement(tuple(rows), left)


def _attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are attention by the name of their class, or of one it derives from,
    except attnkit's. A block or pooling around attention, which may be named so too, is left out.
    """
    ours: set[nn.Module] = set()
    named = {}
    for name, module in model.named_modules():
        if module in ours or type(module).__module__.split(".")[0] == "attnkit":
            ours.update(module.modules())
        elif name and (is_known(module) or _is_named_so(module)):
            named[name] = module
    known = tuple(f"{name}." for name, module in named.items() if is_known(module))
    for name, module in named.items():
        if name.startswith(known):  # it is replaced with the module around it
            continue
        if is_known(module) or not any(other.startswith(f"{name}.") for other in named):
            yield name, module


def _is_named_so(module: nn.Module) -> bool:
    return any(re.search("Attention|Attn", kind.__name__) for kind in type(module).__mro__)


def _why_there_is_none(model: nn.Module) -> str:
    if is_known(model):
        return (
            "it is one itself, and only modules inside the model are replaced; put it into one, "
            "such as torch.nn.ModuleList([attention])"
        )
    return "there is none by name of its class" + _unknown(model, ())


def _unknown(model: nn.Module, named: Iterable[str]) -> str:
    """Return a text about modules that may attend and are not in one of the named modules."""
    known = tuple(f"{name}." for name in named)
    found: dict[str, dict[str, list[str]]] = {}
    for name, what in attending(model).items():
        if not f"{name}.".startswith(known):
            kind = type(model.get_submodule(name)).__name__
            found.setdefault(what, {}).setdefault(kind, []).append(name or "the model")
    text = ""
    for what, kinds in found.items():
        places = "; ".join(f"{kind} ({shortened(names)})" for kind, names in kinds.items())
        text += f"; {what} in {places}, not known here"
    return text


def _row(name: str, module: nn.Module, adapter: Adapter) -> ReplacedAttention:
    block = adapter.attention
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    return ReplacedAttention(name, kind, block.num_heads, block.head_dim)
