"""Every command that a sweep or a study prints, run as it is printed: pasted into a shell."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

LEAN = ("callbacks.curves=null", "callbacks.steps.cost=false", "logger.tensorboard=null",
        "callbacks.progress=null", "trainer.max_epochs=1")  # fmt: skip


@pytest.fixture
def theirs(tmp_path, hers, monkeypatch):
    """A folder with a space and a "=" in its name: a task in it, a package beside it."""
    folder = tmp_path / "my =folder"
    (folder / "task").mkdir(parents=True)
    task = (hers / "task" / "mine.yaml").read_text()
    task = task.replace("mine_of_the_tests.Mine", "of_mine.Mine")
    task = task.replace("mine_of_the_tests.Data", "of_mine.Data")
    (folder / "task" / "mine.yaml").write_text(task)
    module = (hers / "mine_of_the_tests.py").read_text()
    for what in ("fail", "interrupt"):  # while there is a file of this name
        module = module.replace(
            f"self.current_epoch == self.hparams.{what}_at", f'Path("{what}").exists()'
        )
    Path("of_mine.py").write_text(module)
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)
    return folder


def printed(text):
    """The commands in what was printed, without a `cd` before them."""
    return re.findall(r"(?:^|: |  )(attnkit .*=.*)$", text, re.MULTILINE)


def pasted(command):
    """Run it as a shell would; `attnkit` is this one."""
    python = f"{shlex.quote(sys.executable)} -m attnkit"
    line = f"{python} {command.removeprefix('attnkit ')}"
    done = subprocess.run(
        line, shell=True, capture_output=True, text=True, env=dict(os.environ), timeout=300
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sweeper", [(), ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2")])
def test_every_printed_command_works(attnkit, found, theirs, sweeper):
    """As a shell splits them, in this process; the test below has a real shell."""

    def pasted(command):
        done = attnkit(*shlex.split(command)[1:])
        return done.code, done.out + done.err

    if sweeper:
        pytest.importorskip("optuna")
    Path("interrupt").touch()
    done = attnkit(
        "-m", "task=mine", "--config-dir", theirs, "allow=[of_mine]", *LEAN, "module.lr=0.1,0.2",
        *sweeper, "run_dir='my sweep=1'",
    )  # fmt: skip
    assert done.code == 130, done.err
    folder = Path("my sweep=1")
    (again,) = printed(done.err)
    (said,) = set(printed(attnkit("run=report", f"sweep='{folder}'").out))
    assert said == again
    Path("interrupt").rename("fail")
    code, out = pasted(again)
    assert (code, found.states(folder)) == (1, ["failed", "failed"]), out
    (retry,) = printed(out)
    assert "run=retry" in retry

    Path("fail").unlink()
    code, out = pasted(retry)
    assert (code, found.states(folder)) == (0, ["done", "done"]), out
    commands = [command for command in printed(out) if "run=retry" not in command]
    assert len(commands) == 1  # also of a study, whose best is the table's
    for number, command in enumerate(commands):
        assert "allow=" in command
        code, out = pasted(f"{command} run_dir=best_{number}")
        assert code == 0, out
        assert Path(f"best_{number}/results.json").is_file()


@pytest.mark.slow
def test_the_command_after_a_stopped_run_works(attnkit, found, theirs):
    done = attnkit(
        "task=mine", "--config-dir", theirs, "allow=[of_mine]", *LEAN, "trainer.max_epochs=2",
        "+callbacks.sent._target_=of_mine.StopAt", "+callbacks.sent.batch=4",
        "run_dir='my run=1'",
    )  # fmt: skip
    assert done.code == 143, done.err
    (again,) = printed(done.err)
    code, out = pasted(f"{again} callbacks.sent=null")
    assert code == 0, out
    assert "train, going on" in Path("my run=1/run.log").read_text()
