"""The doctor finds the faults that attention has had in public, and none where there is none."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import attnkit
from attnkit.checks.attentions import attentions
from attnkit.checks.cases import Case, cases
from attnkit.checks.doctor import timed_cases, times
from attnkit.checks.examine import Examination
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
    """The future is seen at 257 tokens, as on Apple GPUs (pytorch 195910)."""
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
    """What was made of a mask is kept by its identity (as scales on Apple GPUs, pytorch 184122)."""
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
    """From eight items on sums are taken in half precision (as in pytorch 196886)."""
    if len(query) < 8 or query.dtype != torch.float32:
        return attention(query, key, value, **options)
    return attention(*(t.bfloat16() for t in (query, key, value)), **options).float()


# Found missing by a reader of the first version.


def wrong_for_wide_heads(query, key, value, **options):
    return attention(query, key, value, **options) * (1.5 if query.shape[3] >= 80 else 1.0)


def wrong_without_gradient(query, key, value, **options):
    return attention(query, key, value, **options) * (1.0 if query.requires_grad else 1.5)


def wrong_for_many_keys(query, key, value, **options):
    return attention(query, key, value, **options) * (1.5 if key.shape[2] > 1000 else 1.0)


def mask_of_the_first_head(query, key, value, attn_mask=None, **options):
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask[:, :1]
    return attention(query, key, value, attn_mask=attn_mask, **options)


def dropout_shared_by_heads(query, key, value, dropout_p=0.0, **options):
    if not dropout_p:
        return attention(query, key, value, **options)
    weights = F.dropout(torch.ones(query.shape[2], key.shape[2]), dropout_p)
    return (query @ key.mT / query.shape[3] ** 0.5).softmax(-1) * weights @ value


def dropout_that_ignores_the_seed(query, key, value, dropout_p=0.0, **options):
    with torch.random.fork_rng(enabled=dropout_p > 0):
        if dropout_p:
            torch.manual_seed(0)
        return attention(query, key, value, dropout_p=dropout_p, **options)


def raises_at_65(query, key, value, **options):
    if key.shape[2] == 65:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return attention(query, key, value, **options)


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
    wrong_for_wide_heads: "output",
    wrong_without_gradient: "output",
    wrong_for_many_keys: "output",
    mask_of_the_first_head: "output",
    dropout_shared_by_heads: "dropout",
    dropout_that_ignores_the_seed: "dropout",
    raises_at_65: "output",
}


@pytest.mark.parametrize("fault", SDPA_FAULTS, ids=lambda fault: fault.__name__)
def test_each_public_fault_is_found(fault, monkeypatch, capsys):
    monkeypatch.setattr(F, "scaled_dot_product_attention", fault)
    monkeypatch.setattr("attnkit.checks.doctor.DTYPES", ("float32",))
    report = attnkit.doctor(quick=True, only=NAME)
    assert not report
    found = {(failure.attention, failure.what): failure for failure in report.failures}
    told = found[f"{NAME}, float32 on cpu", SDPA_FAULTS[fault]]
    assert "WRONG" in str(report)
    assert told.program in report.markdown()
    assert "attnkit" not in told.program  # anyone can run it
    if fault in (causal_leak_at_one_length, nan_at_low_logsumexp):  # run where it is not
        monkeypatch.undo()
        capsys.readouterr()
        exec(told.program, {})
        lines = capsys.readouterr().out.splitlines()
        assert max(float(line.split(" off")[0].split()[-1]) for line in lines) < 1e-4
    if fault is causal_leak_at_one_length:
        smallest = "1 × 1 × 257 × 1 float32 on cpu, mask=causal: output differs by"
        assert report.failures[0].seen.startswith(smallest)


@pytest.fixture
def flash(tmp_path, monkeypatch):
    """A ledger of its own, and a function that puts a fault into attnkit's flash."""
    monkeypatch.setenv("ATTNKIT_LEDGER", str(tmp_path / "ledger.json"))
    ledger.reload()
    attnkit.attend(*torch.randn(3, 1, 2, 8, 16).unbind(), backend="flash")  # it is loaded now
    honest = PLACES["flash"].kernel

    def put(fault):
        class Wrong(type(honest)):
            def compute(self, inputs):
                return fault(super().compute, inputs)

        monkeypatch.setattr(PLACES["flash"], "kernel", Wrong() if fault else honest)

    yield put
    monkeypatch.undo()
    ledger.reload()


def chosen(**options):
    query, key = torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)
    return attnkit.explain_backends(query, key, key, **options)


def of_masks(*kinds):
    """A fault under these masks."""
    return lambda compute, inputs: compute(inputs) * (1.01 if isinstance(inputs.mask, kinds) else 1)


def test_a_causal_mask_at_the_wrong_corner_is_found_and_auto_leaves_the_kernel_out(flash):
    def top_left(compute, inputs):
        if isinstance(inputs.mask, attnkit.Causal):
            inputs = replace(inputs, mask=attnkit.Causal(align="top_left"))
        return compute(inputs)

    flash(top_left)
    failure = attnkit.doctor(quick=True, only="attnkit flash").failures[0]
    assert failure.what == "output"
    assert failure.seen.startswith("1 × 1 × 2 × 1 float32 on cpu, mask=causal, keys=3")
    told = chosen(mask=attnkit.Causal())
    assert told.chosen != "flash"
    assert "found wrong here" in str(told)
    assert chosen().chosen == "flash"


@pytest.mark.slow
def test_every_kind_that_is_wrong_is_recorded_and_a_whole_clean_run_takes_it_back(
    flash, monkeypatch
):
    monkeypatch.setattr("attnkit.checks.doctor.DTYPES", ("float32", "bfloat16"))
    masks = attnkit.Causal(), attnkit.Padding(torch.tensor([50])), torch.rand(70, 70) < 0.5
    flash(of_masks(attnkit.Causal, attnkit.Padding, attnkit.Dense))
    report = attnkit.doctor(quick=True, only="attnkit flash")
    assert report.ledger.startswith('backend="auto" obeys the ledger here: ')
    assert [chosen(mask=mask).chosen == "flash" for mask in masks] == [False] * 3
    assert len([f for f in report.failures if (f.what, "float32" in f.attention)]) < 8
    flash(None)
    attnkit.doctor(quick=True, only="attnkit flash")
    assert chosen(mask=masks[0]).chosen != "flash"  # a quick run asks less than another may have
    assert attnkit.doctor(only="attnkit flash")
    assert ledger.known_of("cpu").found == ()


def test_under_autocast_and_other_settings_nothing_honest_is_wrong(flash):
    flash(None)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert attnkit.doctor(quick=True, only="attnkit flash")
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert attnkit.doctor(quick=True, only=NAME)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)
    assert ledger.known_of("cpu").found == ()


def test_a_ledger_that_cannot_be_written_loses_no_report(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTNKIT_LEDGER", str(tmp_path / "file" / "ledger.json"))
    report = attnkit.doctor(quick=True, only="attnkit flash")
    assert report
    assert report.ledger.startswith("nothing is written to the ledger: ")
    assert report.ledger in str(report)


def test_what_cannot_run_here_is_named_and_is_no_pass():
    report = attnkit.doctor(quick=True, only="attnkit fl")  # flash and flex
    missing = {"attnkit flex"}
    assert missing & {row.attention for row in report.rows} == missing - report.refused.keys()
    assert all(name in str(report) for name in report.refused)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"only: attnkit varlen cannot run here: .*needs"):
            attnkit.doctor(quick=True, only="varlen")


def test_inside_a_block_that_listens_nobody_hears():
    net = attnkit.MultiHeadAttention(16, 2)
    tokens = torch.randn(1, 5, 16)
    with attnkit.capture_attention(net) as captured:
        net(tokens)
        attnkit.doctor(quick=True, only="attnkit edges", record=False)
        net(tokens)
    assert len(captured) == 1


def test_inside_exact_all_kernels_are_asked():
    with attnkit.exact():
        report = attnkit.doctor(quick=True, only="attnkit math", record=False)
    assert report.rows[0].num_cases > 90


def test_properties_are_asked_of_it_too(monkeypatch):
    """Noise far below the limit: only two calls of one seed tell."""
    generator = torch.Generator().manual_seed(0)

    def noisy(query, key, value, **options):
        output = attention(query, key, value, **options)
        return output + 1e-7 * torch.randn(output.shape, generator=generator).to(output)

    asked = ("causal", "padding", "batch", "repeats")
    honest = attnkit.doctor(quick=True, only=NAME).rows[0].cells
    assert [honest[what] for what in asked] == ["ok"] * 4
    monkeypatch.setattr(F, "scaled_dot_product_attention", noisy)
    report = attnkit.doctor(quick=True, only=NAME)
    found = {failure.what: failure for failure in report.failures}
    assert set(found) >= {"repeats"}
    assert "output" not in found
    assert "two calls differ by" in found["repeats"].program
    assert report.rows[0].cells["repeats"] == "WRONG"


def test_what_others_give_to_a_row_that_looks_nowhere_is_a_note_with_its_number(monkeypatch):
    def mean(query, key, value, attn_mask=None, **options):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask | ~attn_mask.any(-1, keepdim=True)
        return attention(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", mean)
    report = attnkit.doctor(quick=True, only=NAME)
    assert report
    assert float(report.rows[0].cells["dead rows"]) > 0.1
    assert [fault.what for fault in report.faults] == ["dead rows"] * len(report.faults)


def test_what_it_costs_is_told():
    for name, least, most in (("torch sdpa (flash)", 0.0, 1.3), ("torch sdpa (math)", 1.8, 2.2)):
        (examined,) = (each for each in attentions("cpu") if each.name == name)
        examination = Examination(examined, "cpu", "float32")
        examination.costs(memory=True)
        assert examination.cells["new shape"].endswith(" ms")
        assert least <= float(examination.cells["memory"].removeprefix("n^")) <= most, name


def test_kernels_are_timed_for_the_ledger(flash):
    flash(None)
    kernels = [each for each in attentions("cpu") if each.kernel in ("flash", "block_sparse")]
    case = Case("window", queries=512, keys=512, heads=4, kv_heads=4, dim=64, value_dim=64)
    trained, used = times(kernels, case)
    assert trained.kind == {"float32", "Window", "gradient"}
    assert used.kind == {"float32", "Window"}
    assert used.seconds["flash"] < trained.seconds["flash"]
    assert set(used.seconds) == {"flash", "block_sparse"}
    slow = replace(used, seconds={"flash": 1.0, "block_sparse": 2.0})
    ledger.record("cpu", times=[slow])
    query = torch.randn(2, 4, 512, 64)
    told = attnkit.explain_backends(query, query, query, mask=attnkit.Window(8, 8))
    assert told.chosen == "flash"
    assert "measured fastest here" in str(told)
    assert len(list(timed_cases("cpu"))) == 15


def test_nothing_is_wrong_with_torchs_and_ours_and_random_numbers_stay():
    state = torch.get_rng_state()
    for name in ("torch sdpa (flash)", "attnkit auto"):
        report = attnkit.doctor(quick=True, only=name)
        assert report, str(report)
        assert {row.dtype for row in report.rows} == {"float32", "bfloat16"}
        assert all(row.num_cases > 10 for row in report.rows)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
def test_nothing_is_wrong_on_this_machine():
    report = attnkit.doctor(record=False)
    assert report, str(report)
    names = {row.attention for row in report.rows}
    assert {"PyG GATConv", "torch flex", "nn.MultiheadAttention (fast path)"} <= names


def test_a_quick_run_bounds_what_is_slow(monkeypatch):
    """With no seconds for it nothing is asked, and what is not slow has no bound."""
    monkeypatch.setattr("attnkit.checks.doctor.SLOW_SECONDS", -1.0)
    with pytest.raises(ValueError, match="torch flex cannot run here"):
        attnkit.doctor(quick=True, only="torch flex", record=False)
    assert attnkit.doctor(quick=True, only="torch sdpa (flash)", record=False)
    slow = {each.name for each in attentions("cuda") if each.is_slow}
    assert slow == {"attnkit flex", "torch flex"}  # a GPU compiles each case, for many seconds


@pytest.mark.parametrize(
    ("raised", "wrong"), [("No available kernel. Aborting", 0), ("illegal memory access", 1)]
)
def test_a_forced_kernel_of_torch_may_say_that_it_serves_no_single_token(
    raised, wrong, monkeypatch
):
    """As cuDNN's does on an H200, with torch 2.11."""

    def serves_several(query, key, value, attn_mask=None, **options):
        if query.shape[2] == 1:
            raise RuntimeError(raised)
        return attention(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", serves_several)
    forced = next(each for each in attentions("cpu") if each.name == NAME)
    examination = Examination(forced, "cpu", "float32")
    examination.ask([Case(queries=1, keys=1)])
    assert len(examination.faults) == wrong


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
    assert report.rows[0].attention.startswith("self_attn (multi_head_attention_forward), 2 × 2")
    assert {"output", "gradients"} <= set(report.rows[0].cells)
    assert report
    assert before == {name: module.training for name, module in model.named_modules()}
    model = torch.nn.Sequential(attnkit.MultiHeadAttention(16, 2))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *t, **_: 1.01 * HONEST(*t))
    report = attnkit.doctor(model, [torch.randn(2, 9, 16)], quick=True, only=NAME)
    told = {failure.what: failure for failure in report.failures if failure.attention[:2] == "0 "}
    assert told["output"].seen.startswith("the output differs by 1.0e-02")
    assert "gradient" in told["gradients"].seen


def test_causal_models_of_torch_are_right():
    class Causal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 24)

        def forward(self, x):
            return F.scaled_dot_product_attention(*self.project(x).chunk(3, -1), is_causal=True)

    report = attnkit.doctor(Causal(), [torch.randn(1, 2, 5, 8)], quick=True, only=NAME)
    assert report, str(report)
    assert "gradients" in report.rows[0].cells
    assert report.rows[0].attention.endswith("1 × 2 × 5 × 8, Causal")


def test_a_graphs_model_too(monkeypatch):
    model = attnkit.GAT(8, 16, 3)
    edge_index = torch.randint(0, 10, (2, 30))
    report = attnkit.doctor(model, [torch.randn(10, 8), edge_index], quick=True, only=NAME)
    layers = [row.attention.split(" (")[0] for row in report.rows[:2]]
    assert layers == ["layers.0.attention", "layers.1.attention"]
    assert float(report.rows[0].cells["output"]) < 1e-5
    kernel = type(PLACES["reference"].kernel)  # which so few edges are left to
    compute = kernel.compute
    monkeypatch.setattr(kernel, "compute", lambda self, inputs: 1.01 * compute(self, inputs))
    report = attnkit.doctor(model, [torch.randn(10, 8), edge_index], quick=True, only=NAME)
    assert report.failures[0].attention.startswith("layers.0.attention (attend)")


def test_what_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"only: 'torch flx' is in no name .*mean torch flex\?"):
        attnkit.doctor(only="torch flx")
    with pytest.raises(ValueError, match=r"model: expected a torch\.nn\.Module, got int"):
        attnkit.doctor(3)
    with pytest.raises(ValueError, match="Linear raises RuntimeError for these inputs: mat1"):
        attnkit.doctor(torch.nn.Linear(2, 2), [torch.randn(2, 3)])
    with pytest.raises(ValueError, match="Linear has no attention"):
        attnkit.doctor(torch.nn.Linear(2, 2), [torch.randn(2, 2)], only=NAME)


# The command.


def doctor(*words):
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
        (["--only", "flsh"], "--only: 'flsh' is in no name of an attention"),
        (["--markdown", "."], ".: is a folder; name a file"),
        (["model"], "doctor: expected MODEL.py:FUNCTION, got 'model'"),
        (["model.py:build"], "doctor: no file model.py"),
        (["here.py:biuld"], "doctor: here.py has no function 'biuld'; did you mean build?"),
        (["here.py:build"], "doctor: expected build() to return (model, input, …), got Linear"),
        (["--json", "no/d.json"], "no/d.json: no folder no"),
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
