"""The kernels of the first batch of each stage: on screen, in the results and in TensorBoard."""

import json
import logging

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from attnkit import Interpret
from attnkit.lightning import KernelRecord, ResultsFile


def counts(record):
    return {stage: dict(found.counts) for stage, found in record.records.items()}


@pytest.mark.parametrize(("backend", "kernel"), [("auto", "flash"), ("math", "math")])
def test_first_batch_of_each_stage(
    small_net, loader, make_trainer, backend, kernel, tmp_path, caplog, monkeypatch
):
    # Lightning's logger keeps its messages to itself where it was imported before pytest logs.
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    weights = []
    record = KernelRecord(verbose=kernel == "flash")
    for callbacks in ([], [record, ResultsFile(tmp_path / "results.json")]):
        torch.manual_seed(3)
        module = small_net(backend)
        logger = TensorBoardLogger(tmp_path, name="", version="")
        trainer = make_trainer(callbacks=callbacks, logger=logger)
        trainer.fit(module, loader, loader)
        weights.append(module.attention.in_proj.weight)
    trainer.test(module, loader, verbose=False)
    assert counts(record) == {
        stage: {"attention": {kernel: 1}} for stage in ("train", "val", "test")
    }
    assert json.loads((tmp_path / "results.json").read_text())[f"kernels/train/{kernel}"] == 1
    assert ("attention  flash ×1" in caplog.text) == record.verbose
    (text,) = EventAccumulator(str(tmp_path)).Reload().Tensors("kernels/train/text_summary")
    assert kernel in text.tensor_proto.string_val[0].decode()
    assert torch.equal(*weights)


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
    assert counts(record) == {s: {"attention": {"flash": 1}} for s in ("train", "val")}


@pytest.mark.parametrize("first", [True, False])
def test_passes_that_only_look_are_not_counted(small_net, loader, make_trainer, first, tmp_path):
    record, maps = KernelRecord(), Interpret(trust="none", layer=-1, folder=tmp_path)
    trainer = make_trainer(callbacks=[maps, record] if first else [record, maps], max_epochs=1)
    trainer.fit(small_net(), loader, loader)
    assert list(tmp_path.glob("*.png"))
    assert counts(record)["val"] == {"attention": {"flash": 1}}


def test_a_failing_batch_leaves_no_recorder_behind(small_net, loader, make_trainer):
    class Failing(small_net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        make_trainer(callbacks=[KernelRecord()]).fit(Failing(), loader)
    assert _get_current_function_mode_stack() == []
