"""The doctor finds the faults that attention has had in public, and none where there is none."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import attnkit
from attnkit.checks.doctor.attentions import attentions
from attnkit.checks.doctor.cases import Case, cases
from attnkit.checks.doctor.examine import Examination
from attnkit.core.kernels import ledger
from attnkit.core.kernels.choose import PLACES

HONEST = F.scaled_dot_product_attention
NAME = "torch sdpa (math)"


def attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Attention as its definition reads, for a fault to be put into its arguments."""
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return HONEST(query, key, value, attn_mask, dropout_p, scale=scale)


def causal_leak_at_one_length(query, key, value, is_causal=False, **options):
    """The future is seen at 257 tokens, as on Apple GPUs (pytorch 174861)."""
    if is_causal and key.shape[2] == 257:
        shown = torch.ones(query.shape[2], 257, dtype=torch.bool).tril(1)
        return attention(query, key, value, attn_mask=shown, **options)
    return attention(query, key, value, is_causal=is_causal, **options)


class _Unmasked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask):
        ctx.save_for_backward(query, key, value)
        return HONEST(query, key, value, mask)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return *torch.autograd.grad(HONEST(*inputs), inputs, gradient), None


def mask_ignored_in_the_backward(query, key, value, attn_mask=None, **options):
    if attn_mask is None or attn_mask.dtype != torch.bool or options["dropout_p"]:
        return attention(query, key, value, attn_mask=attn_mask, **options)
    return _Unmasked.apply(query, key, value, attn_mask)


def wrong_groups(query, key, value, enable_gqa=False, **options):
    """Query head h reads key head h mod kv_heads."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat(1, repeats, 1, 1) for t in (key, value))
    return attention(query, key, value, **options)


def unscaled_dropout(query, key, value, dropout_p=0.0, **options):
    return attention(query, key, value, dropout_p=dropout_p, **options) * (1 - dropout_p)


class _NaN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, is_low):
        ctx.is_low = is_low
        return query.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (torch.nan if ctx.is_low else 1.0), None


def nan_at_low_logsumexp(query, key, value, scale=None, **options):
    """cuDNN's gradient of the queries, where 64 keys are left over (pytorch 196678)."""
    if key.shape[2] % 128 == 64 and key.shape[1] == query.shape[1]:
        scores = query @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
        query = _NaN.apply(query, bool((scores.logsumexp(-1) < -88.7).any()))
    return attention(query, key, value, scale=scale, **options)


def neighbour_mixed_in(query, key, value, **options):
    """The last block of keys is read beyond its end, where the next item begins."""
    if len(key) > 1 and key.shape[2] % 64:
        key = torch.cat([key[:, :, :-1], key.roll(-1, 0)[:, :, -1:]], dim=2)
    return attention(query, key, value, **options)


_MASKS = {}


def stale_mask(query, key, value, attn_mask=None, **options):
    """What was made of a mask is found again by its identity (FlexAttention's block masks)."""
    if attn_mask is not None:
        kept = _MASKS.get(id(attn_mask))
        if kept is None or kept[0] is not attn_mask:
            kept = _MASKS[id(attn_mask)] = attn_mask, attn_mask.detach().clone()
        attn_mask = kept[1] if attn_mask.dtype == torch.bool else attn_mask
    return attention(query, key, value, attn_mask=attn_mask, **options)


def strides_ignored(query, key, value, **options):
    """Memory is read as if it were contiguous."""
    shape = key.shape
    if key.is_contiguous() or key.numel() > key.untyped_storage().nbytes() // key.itemsize:
        return attention(query, key, value, **options)
    read = torch.as_strided(key, shape, torch.empty(shape, device="meta").stride())
    return attention(query, read, value, **options)


def scaled_twice(query, key, value, scale=None, **options):
    return attention(query, key, value, scale=None if scale is None else scale**2, **options)


def softmax_over_padding(query, key, value, attn_mask=None, **options):
    """Padding is left out of the sum of values, and not of the softmax."""
    if attn_mask is None or attn_mask.shape[2] > 1 or attn_mask.dtype != torch.bool:
        return attention(query, key, value, attn_mask=attn_mask, **options)
    return attention(query, key, value * attn_mask.mT, **options)


def sum_depends_on_the_batch(query, key, value, **options):
    """From eight items on sums are taken in half precision (as in pytorch 195910)."""
    if len(query) < 8 or query.dtype != torch.float32:
        return attention(query, key, value, **options)
    return attention(*(t.bfloat16() for t in (query, key, value)), **options).float()


SDPA_FAULTS = {
    causal_leak_at_one_length: "output",
    mask_ignored_in_the_backward: "gradients",
    wrong_groups: "output",
    unscaled_dropout: "dropout",
    nan_at_low_logsumexp: "gradients",
    neighbour_mixed_in: "output",
    stale_mask: "output",
    strides_ignored: "output",
    scaled_twice: "output",
    softmax_over_padding: "output",
    sum_depends_on_the_batch: "output",
}


def printed(program):
    """What a program prints, run by itself: the differences, as numbers."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return [float(line.split(" off")[0].split()[-1]) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("fault", SDPA_FAULTS, ids=lambda fault: fault.__name__)
def test_each_public_fault_is_found(fault, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", fault)
    report = attnkit.doctor(quick=True, only=NAME)
    assert not report
    found = {(failure.attention, failure.what): failure for failure in report.failures}
    told = found[f"{NAME}, float32 on cpu", SDPA_FAULTS[fault]]
    assert "WRONG" in str(report)
    assert told.program in report.markdown()
    assert "attnkit" not in told.program  # anyone can run it
    if fault in (causal_leak_at_one_length, nan_at_low_logsumexp):  # in a process without it
        assert max(printed(told.program)) < 1e-4


def test_a_causal_mask_at_the_wrong_corner_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTNKIT_LEDGER", str(tmp_path / "ledger.json"))
    ledger.reload()
    attnkit.attend(*torch.randn(3, 1, 2, 8, 16).unbind(), backend="flash")  # it is loaded now
    flash = PLACES["flash"].kernel

    class Wrong(type(flash)):
        def compute(self, inputs):
            if isinstance(inputs.mask, attnkit.Causal):
                inputs = replace(inputs, mask=attnkit.Causal(align="top_left"))
            return super().compute(inputs)

    monkeypatch.setattr(PLACES["flash"], "kernel", Wrong())
    report = attnkit.doctor(quick=True, only="attnkit flash")
    failure = report.failures[0]
    assert failure.what == "output"
    assert failure.seen.startswith("1 × 1 × 2 × 1 float32 on cpu, mask=causal, keys=3")
    query, key = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 70, 16)
    told = attnkit.explain_backends(query, key, key, mask=attnkit.Causal(align="bottom_right"))
    assert told.chosen != "flash"
    assert "found wrong here" in str(told)
    monkeypatch.undo()
    ledger.reload()


def test_the_smallest_case_is_told(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", causal_leak_at_one_length)
    told = attnkit.doctor(quick=True, only=NAME).failures[0]
    assert told.seen.startswith("1 × 1 × 257 × 1 float32 on cpu, mask=causal: output differs by")


def test_nothing_is_wrong_with_torchs_and_ours():
    for name in ("torch sdpa (flash)", "attnkit auto"):
        report = attnkit.doctor(quick=True, only=name)
        assert report, str(report)
        assert {row.dtype for row in report.rows} == {"float32", "bfloat16"}
        assert all(row.num_cases > 10 for row in report.rows)


@pytest.mark.slow
def test_nothing_is_wrong_on_this_machine():
    report = attnkit.doctor(record=False)
    assert report, str(report)
    names = {row.attention for row in report.rows}
    assert {"PyG GATConv", "torch flex", "nn.MultiheadAttention (fast path)"} <= names


def test_every_case_is_asked_of_somebody():
    """A case that all attentions refuse would check nothing."""
    examinations = [
        Examination(each, "cpu", "float32")
        for each in attentions("cpu")
        if each.name in ("attnkit reference", "attnkit edges", "PyG GATConv")
    ]
    for case in cases(quick=True):
        asked = sum(_asked(examination, case) for examination in examinations)
        assert asked, str(case)


def _asked(examination, case):
    before = examination.num_cases
    examination.ask([case])
    return examination.num_cases - before


def test_a_smaller_case_has_one_thing_less():
    case = Case("dense", heads=4, kv_heads=2, layout="expanded", queries=65, keys=130)
    smaller = list(case.smaller())
    assert smaller[0] == replace(case, layout="contiguous")
    assert replace(case, heads=1, kv_heads=1) in smaller
    assert replace(case, queries=1, keys=1) in smaller
    least = replace(Case(), batch=1, heads=1, kv_heads=1, queries=1, keys=1, dim=1, value_dim=1)
    assert not list(least.smaller())


def test_a_model_is_held_to_the_definition_at_its_own_shapes(monkeypatch):
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    before = {name: module.training for name, module in model.named_modules()}
    report = attnkit.doctor(model, [torch.randn(2, 9, 16)], quick=True, only=NAME)
    assert report.rows[0].attention == "self_attn (multi_head_attention_forward)"
    assert {"output", "gradients"} <= set(report.rows[0].cells)
    assert report
    assert before == {name: module.training for name, module in model.named_modules()}
    model = torch.nn.Sequential(attnkit.MultiHeadAttention(16, 2))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *t, **_: 1.01 * HONEST(*t))
    report = attnkit.doctor(model, [torch.randn(2, 9, 16)], quick=True, only=NAME)
    told = {failure.what: failure for failure in report.failures if failure.attention[:2] == "0 "}
    assert told["output"].seen.startswith("2 × 2 × 9 × 8, mask=None: the output differs by 1.0e-02")
    assert "gradient" in told["gradients"].seen


def test_a_graphs_model_too():
    model = attnkit.GAT(8, 16, 3)
    edge_index = torch.randint(0, 10, (2, 30))
    report = attnkit.doctor(model, [torch.randn(10, 8), edge_index], quick=True, only=NAME)
    assert [row.attention for row in report.rows[:2]] == [
        "layers.0.attention (attend)",
        "layers.1.attention (attend)",
    ]
    assert float(report.rows[0].cells["output"]) < 1e-5


def test_torchs_random_state_and_threads_stay():
    state = torch.get_rng_state()
    attnkit.doctor(quick=True, only="torch sdpa (flash)")
    assert torch.equal(state, torch.get_rng_state())


def test_what_is_not_there_is_named():
    with pytest.raises(ValueError, match="only: 'flsh' is in none of the names attnkit"):
        attnkit.doctor(only="flsh")
    with pytest.raises(ValueError, match="Linear has no attention"):
        attnkit.doctor(torch.nn.Linear(2, 2), [torch.randn(2, 2)], only=NAME)


# The command.


def doctor(*words, env=None):
    from attnkit.launch.main import main

    return main(["doctor", *words])


def test_the_command_writes_its_report(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert doctor("--quick", "--only", NAME, "--markdown", "d.md", "--json", "d.json") == 0
    said = capsys.readouterr().out
    assert "nothing is wrong" in said
    told = json.loads((tmp_path / "d.json").read_text())
    assert told["passed"]
    assert "torch" in told["machine"]["cpu"]
    assert told["rows"][0]["attention"] == NAME
    assert (tmp_path / "d.md").read_text().startswith("# attnkit doctor: cpu ")


def test_the_exit_code_says_that_something_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(F, "scaled_dot_product_attention", scaled_twice)
    assert doctor("--quick", "--only", NAME) == 1
    assert "WRONG: torch sdpa (math), float32 on cpu: output" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quik"], "doctor: unrecognized arguments: --quik; attnkit doctor --help"),
        (["--only", "flsh"], "--only: 'flsh' is in none of the names"),
        (["model"], "doctor: expected MODEL.py:FUNCTION, got 'model'"),
        (["model.py:build"], "doctor: no file model.py"),
        (["here.py:biuld"], "doctor: here.py has no function 'biuld'; did you mean build?"),
        (["here.py:build"], "doctor: expected build() to return (model, input, …), got Linear"),
        (["--json", "no/d.json"], "no/d.json: no folder no; make it first"),
    ],
)
def test_a_wrong_word_is_one_line_and_exit_code_2(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import torch\ndef build():\n    return torch.nn.Linear(2, 2)\n"
    (tmp_path / "here.py").write_text(text)
    assert doctor(*words) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) <= 3


def test_torch_alone_is_loaded(tmp_path):
    code = (
        "import sys\nfrom attnkit.launch.main import main\n"
        f"main(['doctor', '--quick', '--only', {NAME!r}])\n"
        "print([m for m in ('lightning', 'hydra', 'omegaconf', 'torchvision', 'timm', "
        "'torch_geometric') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
