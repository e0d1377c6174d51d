"""The commands of docs/several_machines.md, on two nodes that are network namespaces, or none."""

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[3] / "docs" / "several_machines.md"
BLOCKS = re.findall(r"^```bash(?: (\w+)=(\S+))?\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
COMMANDS = {name: code.replace("\\\n", "").strip() for kind, name, code in BLOCKS if kind == "node"}
SCRIPT = next(code for kind, _, code in BLOCKS if kind == "file")
QUICK = (
    "model.dim=24 model.depth=1 trainer.max_epochs=1 trainer.limit_batches=3 callbacks.curves=null"
)

pytestmark = pytest.mark.slow


@pytest.fixture
def cable():
    """Two network namespaces with a cable between them: the start of a command line on each, and
    its address."""
    ip = shutil.which("ip")
    if os.geteuid() or ip is None:
        pytest.skip("network namespaces need root and the command ip")
    names = [f"attnkit{os.getpid()}{end}" for end in "ab"]
    ends = [f"ak{os.getpid()}{end}" for end in "ab"]

    def run(*command):
        subprocess.run([ip, *command], check=True, capture_output=True)

    try:
        for name in names:
            run("netns", "add", name)
        run("link", "add", ends[0], "netns", names[0], "type", "veth",
            "peer", "name", ends[1], "netns", names[1])  # fmt: skip
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            run("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", end)
            run("-n", name, "link", "set", "lo", "up")
            run("-n", name, "link", "set", end, "up")
        prefixes = [
            [ip, "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}"]
            for name, end in zip(names, ends, strict=True)
        ]
        yield prefixes, "10.77.0.1"
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    finally:
        for name in names:
            subprocess.run([ip, "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def localhost():
    return [[], []], "127.0.0.1"


def together(commands, **environment):
    """Commands at the same time, in the order of the nodes; how each ended and what it said."""
    started = [
        subprocess.Popen(
            command, env={**os.environ, **environment}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for command in commands
    ]  # fmt: skip
    said = [process.communicate(timeout=500)[0] for process in started]
    return [process.returncode for process in started], said


def free_port():
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def weights(folder):
    return torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]


@pytest.mark.parametrize("nodes", ["cable", "localhost"])
def test_torchrun_on_two_nodes(nodes, request, tmp_path, attnkit):
    prefixes, address = request.getfixturevalue(nodes)
    port = str(free_port())
    commands = []
    for prefix, number in zip(prefixes, sorted(COMMANDS), strict=True):
        words = COMMANDS[number].replace("/shared", str(tmp_path)).split()
        assert words[:2] == ["torchrun", "--nnodes"]
        words = [address if w == "node0" else port if w == "29500" else w for w in words]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        commands.append([*prefix, *torchrun, *words[1:], *QUICK.split()])
    codes, said = together(commands)
    assert codes == [0, 0], said
    assert "2 processes" in said[0]
    assert "test: the checkpoint of the best epoch" in said[0]
    assert "test: the checkpoint" not in said[1]
    done = attnkit("task=vit", "trainer=cpu_ddp", *QUICK.split(), f"run_dir={tmp_path / 'one'}")
    assert done.code == 0, done.err
    one, two = weights(tmp_path / "one"), weights(tmp_path / "run")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], tensor) for name, tensor in two.items())
    one, two = (
        json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "run")
    )
    assert two["test/loss"] == pytest.approx(one["test/loss"], abs=1e-7)


def test_the_batch_script(tmp_path):
    """With an srun that starts two processes as on two nodes; then once more, as when requeued."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    srun = binaries / "srun"
    srun.write_text(
        f"#!/bin/bash\nexport PATH={Path(sys.executable).parent}:$PATH\n"
        'for rank in 1 0; do SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_LOCALID=0 "$@" & done\n'
        "code=0; for job in $(jobs -p); do wait $job || code=$?; done; exit $code\n"
    )
    srun.chmod(srun.stat().st_mode | stat.S_IXUSR)
    script = SCRIPT.replace("/shared", str(tmp_path)).replace("task=vit", f"task=vit {QUICK}")
    script = script.replace("max_epochs=1", "max_epochs=2")
    (tmp_path / "job.sh").write_text(script)
    environment = {
        "PATH": f"{binaries}:{os.environ['PATH']}", "SLURM_JOB_ID": f"7{free_port() % 9000 + 1000}",
        "SLURM_JOB_NAME": "job", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2", "SLURM_NODELIST": "127.0.0.1", "SLURM_STEP_ID": "0",
    }  # fmt: skip
    for said_so in ("test: the checkpoint of the best epoch", "finished already"):
        (code,), (said,) = together([["bash", str(tmp_path / "job.sh")]], **environment)
        assert code == 0, said
        assert said_so in said
    assert json.loads((tmp_path / "run" / "results.json").read_text())["epochs"] == 2


def test_a_sweep_by_submitit(tmp_path, attnkit):
    """The command for SLURM, in submitit's local mode, which has no partition."""
    pytest.importorskip("submitit")
    (command,) = [code for kind, _, code in BLOCKS if not kind and "submitit_slurm" in code]
    words = command.replace("\\\n", "").replace("submitit_slurm", "submitit_local").split()
    assert words[:3] == ["python", "-m", "attnkit"]
    words = [w for w in words[3:] if "partition" not in w]
    done = attnkit(*words, *QUICK.split(), "trainer=cpu", f"run_dir={tmp_path / 'sweep'}")
    assert done.code == 0, done.err + done.out
    assert len(list((tmp_path / "sweep").glob("*/results.json"))) == 2
