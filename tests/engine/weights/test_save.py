"""Files of weights that several processes write at the same time."""

import subprocess
import time
from pathlib import Path

from safetensors.torch import load_file
from support.processes import clean_environment, python
from torch import nn
from treadle.engine.weights import write_atomically

import treadle

WRITER = """
import os, sys, time
from pathlib import Path
from treadle.engine.weights import write_atomically

folder = Path(sys.argv[1])

def write(path):
    with open(path, "w") as file:
        file.write("first half, ")
        file.flush()
        (folder / "begun").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
            if (folder / "die").exists():
                os.kill(os.getpid(), 9)
        file.write("second half")

write_atomically(folder / "weights.bin", write)
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([python(), "-c", WRITER, str(folder)], env=clean_environment())
    end = time.monotonic() + 120
    while not (folder / "begun").exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


def test_two_processes_write_one_file(tmp_path):
    file, other = tmp_path / "weights.bin", start(tmp_path)
    write_atomically(file, lambda path: Path(path).write_text("mine"))
    assert file.read_text() == "mine"  # the other's is not complete yet
    (tmp_path / "go").touch()
    assert other.wait(60) == 0
    assert file.read_text() == "first half, second half"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "go", "weights.bin"]


def test_the_unfinished_file_of_a_killed_process_is_deleted_by_the_next(tmp_path):
    file, other = tmp_path / "weights.bin", start(tmp_path)
    (tmp_path / "die").touch()
    assert other.wait(60) == -9
    users = tmp_path / ".weights.bin.part"
    users.write_text("not ours")
    assert len(list(tmp_path.glob(".weights.bin.*.part"))) == 1
    write_atomically(file, lambda path: Path(path).write_text("mine"))
    assert (file.read_text(), users.read_text()) == ("mine", "not ours")
    assert list(tmp_path.glob(".weights.bin.*.part")) == []


def test_two_runs_save_a_model_into_one_folder(tmp_path):
    code = (
        "import sys, treadle; from torch import nn; net = nn.Linear(4, 2); nn.init.ones_(net.weight)\n"
        "for _ in range(50): treadle.Accelerator(cpu=True).save_model(net, sys.argv[1])"
    )
    folder, net = tmp_path / "out", nn.Linear(4, 2)
    accelerator = treadle.Accelerator(cpu=True)
    nn.init.zeros_(net.weight)
    other = subprocess.Popen([python(), "-c", code, str(folder)], env=clean_environment())
    while other.poll() is None:
        accelerator.save_model(net, folder)
    assert other.returncode == 0
    assert load_file(folder / "model.safetensors")["weight"].unique().tolist() in ([0.0], [1.0])
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
