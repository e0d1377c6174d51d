import json
import logging

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from attnkit import Interpret
from attnkit.lightning import KernelRecord, ResultsFile


@pytest.mark.parametrize(("backend", "kernel"), [("auto", "flash"), ("math", "math")])
def test_first_batch_of_each_stage(small_net, loader, make_trainer, backend, kernel):
    record = KernelRecord()
    trainer = make_trainer(callbacks=[record])
    module = small_net(backend)
    trainer.fit(module, loader, loader)
    trainer.test(module, loader, verbose=False)
    assert {stage: dict(r.counts) for stage, r in record.records.items()} == {
        stage: {"attention": {kernel: 1}} for stage in ("train", "val", "test")
    }
    assert record.results[f"kernels/train/{kernel}"] == 1.0


def test_names_are_those_of_the_module_in_every_stage(small_net, loader, make_trainer):
    class Nested(small_net):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(self.attention)

        def training_step(self, batch, batch_idx):
            return self.inner(torch.randn(2, 5, self.attention.dim)).mean()

        def validation_step(self, batch, batch_idx):
            self.inner(torch.randn(2, 5, self.attention.dim))

    record = KernelRecord()
    make_trainer(callbacks=[record]).fit(Nested(), loader, loader)
    assert {stage: dict(r.counts) for stage, r in record.records.items()} == {
        stage: {"attention": {"flash": 1}} for stage in ("train", "val")
    }


@pytest.mark.parametrize("first", [True, False])
def test_passes_that_only_look_are_not_counted(small_net, loader, make_trainer, first, tmp_path):
    record, maps = KernelRecord(), Interpret(trust="none", layer=-1, folder=tmp_path)
    trainer = make_trainer(callbacks=[maps, record] if first else [record, maps], max_epochs=1)
    trainer.fit(small_net(), loader, loader)
    assert list(tmp_path.glob("*.png"))
    assert record.records["val"].counts == {"attention": {"flash": 1}}


def test_tells_on_screen_and_in_the_results(
    small_net, loader, make_trainer, tmp_path, caplog, monkeypatch
):
    # Lightning's logger keeps its messages to itself where it was imported before pytest logs.
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    path = tmp_path / "results.json"
    make_trainer(callbacks=[KernelRecord(), ResultsFile(path)]).fit(small_net(), loader)
    assert "attention  flash ×1" in caplog.text
    assert json.loads(path.read_text())["kernels/train/flash"] == 1

    caplog.clear()
    make_trainer(callbacks=[KernelRecord(verbose=False)]).fit(small_net(), loader)
    assert "flash" not in caplog.text


def test_goes_to_tensorboard(small_net, loader, make_trainer, tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="")
    make_trainer(callbacks=[KernelRecord()], logger=logger).fit(small_net(), loader)
    events = EventAccumulator(str(tmp_path)).Reload()
    (text,) = events.Tensors("kernels/train/text_summary")
    assert "flash" in text.tensor_proto.string_val[0].decode()


def test_a_failing_batch_leaves_no_recorder_behind(small_net, loader, make_trainer):
    class Failing(small_net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(callbacks=[KernelRecord()]).fit(Failing(), loader)
    assert _get_current_function_mode_stack() == []


def test_training_is_the_same_with_it(small_net, loader, make_trainer):
    weights = []
    for callbacks in ([], [KernelRecord()]):
        torch.manual_seed(3)
        module = small_net()
        make_trainer(callbacks=callbacks).fit(module, loader, loader)
        weights.append(module.attention.in_proj.weight)
    assert torch.equal(*weights)
