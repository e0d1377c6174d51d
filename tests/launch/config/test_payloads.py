"""Checkpoints with code in them, given wherever a checkpoint is taken: nothing of it runs."""

import io
import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from attnkit.lightning.errors import UserError
from attnkit.tasks.image_classification import ImageClassification


class Call:
    """Unpickled, it is `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def stored(value):
    """As `torch.save` writes it: a zip with a pickle in it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def in_zip(data):
    """A zip that looks like torch's, around any pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return file.getvalue()


def in_tar(data):
    """The format torch wrote before 0.1.10."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def legacy(value):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def model(good, **node):
    hyper = good["hyper_parameters"]
    return stored({**good, "hyper_parameters": {**hyper, "model": {**hyper["model"], **node}}})


def hyper(good, **values):
    return stored({**good, "hyper_parameters": {**good["hyper_parameters"], **values}})


# What is in the file, from a good checkpoint and the path of the trace.
PICKLES = {
    "os.system": lambda good, t: stored({**good, "extra": Call(os.system, f"touch {t}")}),
    "open": lambda good, t: stored({**good, "x": Call(open, t, "w")}),
    "hyper-parameters": lambda good, t: hyper(good, lr=Call(open, t, "w")),
    "callbacks": lambda good, t: stored({**good, "callbacks": {"EMA": Call(open, t, "w")}}),
    "loops": lambda good, t: stored(
        {
            **good,
        }
    ),
    "weights": lambda good, t: stored({**good, "state_dict": Call(open, t, "w")}),
    "an array": lambda good, t: stored({**good, "x": np.array([Call(open, t, "w")], dtype=object)}),
    "a module": lambda good, t: stored({**good, "x": torch.nn.Linear(3, 3)}),
    "legacy": lambda good, t: legacy({**good, "x": Call(open, t, "w")}),
    "plain pickle": lambda good, t: pickle.dumps(Call(open, t, "w")),
    "zip": lambda good, t: in_zip(pickle.dumps(Call(open, t, "w"), protocol=2)),
    "tar": lambda good, t: in_tar(pickle.dumps(Call(open, t, "w"), protocol=2)),
    "torchscript": lambda good, t: in_zip(b"\x80\x02}q\x00.").replace(b"data.pkl", b"code.pkl"),
    "cut off": lambda good, t: stored(good)[:5000],
    "empty": lambda good, t: b"",
    "a list": lambda good, t: stored([1, 2, 3]),
}

# No pickled code, but hyper-parameters that ask for some: read where the file is all there is.
HYPER = {
    "_target_": lambda good: model(good, _target_="canary.Net"),
    "_target_ of Python": lambda good: model(good, _target_="os.system"),
    "_target_ of attnkit": lambda good: model(good, _target_="attnkit.launch.main.main"),
    "_target_ below": lambda good: model(good, positions={"_target_": "canary.run"}),
    "optimizer": lambda good: hyper(good, optimizer={"_target_": "canary.run"}),
    "allow": lambda good: hyper(good, allow=["canary"], model={"_target_": "canary.Net"}),
    "_instantiator": lambda good: hyper(good, _instantiator="canary.run"),
    "Lightning's": lambda good: hyper(
        good, _instantiator="lightning.pytorch.cli.instantiate_module", _class_path="canary.Net"
    ),
    "hparams_name": lambda good: stored({**good, "hparams_name": "model"}),
    "a list": lambda good: stored({**good, "hyper_parameters": ["canary.run"]}),
}


def good(run):
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


def refused(done, path):
    assert done.code == 2, done
    lines = done.err.strip().splitlines()
    assert 0 < len(lines) <= 3, done.err
    assert str(path) in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("case", PICKLES)
def test_pickle(attnkit, run, trace, tmp_path, case):
    path = tmp_path / "evil.ckpt"
    path.write_bytes(PICKLES[case](good(run), str(trace)))
    refused(attnkit("run=test", f"ckpt={path}"), path)
    with pytest.raises(UserError, match=r"evil\.ckpt"):
        ImageClassification.load_from_checkpoint(path)
    assert os.listdir(".") == []


@pytest.mark.parametrize("case", ["os.system", "callbacks", "legacy", "tar", "empty", "a list"])
def test_pickle_in_a_run_folder(attnkit, run, trace, case):
    shutil.copytree(run, "run")
    for name in ("best.ckpt", "last.ckpt"):
        Path("run/checkpoints", name).write_bytes(PICKLES[case](good(run), str(trace)))
    log = (Path("run/run.log")).read_bytes()
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused(attnkit("resume=run", "trainer.max_epochs=3"), "last.ckpt")
    refused(attnkit("run=test", "ckpt=run"), "best.ckpt")
    refused(attnkit("run=predict", "ckpt=run", "images=run"), "best.ckpt")
    assert os.listdir(".") == ["run"]
    # That it was refused is in the log of the run, and nothing else has changed.
    assert (Path("run/run.log")).read_bytes().startswith(log)
    after = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert before == {**after, Path("run/run.log"): log}


@pytest.mark.parametrize("case", HYPER)
def test_hyper_parameters(attnkit, run, trace, tmp_path, case):
    path = tmp_path / "evil.ckpt"
    path.write_bytes(HYPER[case](good(run)))
    refused(attnkit("run=predict", f"ckpt={path}", "images=."), path)
    with pytest.raises(UserError, match=r"evil\.ckpt"):
        ImageClassification.load_from_checkpoint(path)
    assert os.listdir(".") == []


def test_payload_does_run_where_pickles_are_trusted(tmp_path):
    path = tmp_path / "trusted.ckpt"
    path.write_bytes(stored(Call(open, str(tmp_path / "made"), "w")))
    torch.load(path, weights_only=False).close()
    assert (tmp_path / "made").exists()
