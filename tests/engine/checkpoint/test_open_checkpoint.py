"""A checkpoint that is loaded is opened once: manifest and digests read once, and only verified bytes are loaded."""

import itertools
import os
import resource
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoint_reads import Reads, once
from support.processes import in_own_process, run
from support.saved_nets import prepared, same, snapshot
from support.stored_states import flip_a_bit
from treadle.cli.commands.export import export
from treadle.engine.checkpoint.open_checkpoint import OpenCheckpoint
from treadle.engine.checkpoint.safetensors_file import read_tensor
from treadle.engine.weights.sources import open_source

import treadle
from treadle.utils import ProjectConfiguration


@in_own_process
def test_more_tensors_than_a_process_may_open_files(tmp_path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    path = tmp_path / "many.safetensors"
    save_file({f"{i:03}": torch.full((300_000,), float(i)) for i in range(100)}, path)
    weights = treadle.load_checkpoint(path)["state_dict"].values()
    with open_source(path) as source:
        held = [read_tensor(piece) for piece in source.weights.values()]
    assert sum(tensor[-1] for tensor in weights) == sum(tensor[-1] for tensor in held) == 4950


# -- each byte once ------------------------------------------------------------------------------------------------


def load_in_turn(root):
    """What is read of the newest one, which is searched for, and what of one whose weights are wanted."""
    project = ProjectConfiguration(project_dir=str(root), automatic_checkpoint_naming=True)
    accelerator, *_ = prepared(project_config=project)
    path = accelerator.save_state()
    accelerator.wait_for_everyone()
    found = []
    for options in ({}, {"input_dir": path, "state": False}):
        with Reads() as reads:
            accelerator.load_state(**options)
        found.append((path, reads.hashed, reads.parsed))
    return found


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_load_state_reads_each_byte_once(tmp_path, world):
    for ranks in zip(*run(load_in_turn, world, tmp_path), strict=True):
        assert sum((hashed for _, hashed, _ in ranks), start=Counter()) == once(Path(ranks[0][0]))
        assert [parsed for _, _, parsed in ranks] == [1, 0][:world]
        counts = [sum(hashed.values()) for _, hashed, _ in ranks]
        assert max(counts) - min(counts) <= 1, "the processes share the work"


def test_what_loads_weights_reads_each_byte_once(saved, tmp_path):
    path, model, _ = saved
    for work in (lambda: treadle.load_weights(model, path), lambda: export(path, tmp_path / "weights.safetensors")):
        with Reads() as reads:
            work()
        assert (reads.hashed, reads.parsed) == (once(path), 1)


def test_a_part_is_opened_once_and_is_never_shared(saved):
    opened = OpenCheckpoint(saved[0])
    opened.open_part("state")["registered"]["mine"] = 1
    assert opened.part("state") is opened.part("state")
    assert "mine" not in opened.open_part("state")["registered"]
    with pytest.raises(ValueError, match="has no part 'nothing'"):
        opened.read_part("nothing")


# -- verified bytes only -------------------------------------------------------------------------------------------


def load_each(*templates):
    """What comes of loading each path, with this process's rank in it, which changes nothing."""
    accelerator, model, optimizer = prepared(steps=2)
    before = snapshot(model, optimizer)
    problems = []
    for template in templates:
        try:
            accelerator.load_state(template.format(rank=os.environ["RANK"]))
        except Exception as error:
            problems.append((type(error).__name__, str(error)))
    same(snapshot(model, optimizer), before)
    return problems


def damaged(path, name):
    fix = "Copy or download the checkpoint again, or use another checkpoint."
    return "ValueError", f"{path}: {name} is not the file that was written (its digest differs). {fix}"


def test_all_processes_refuse_what_one_finds_damaged(tmp_path):
    """Also in copies on file systems of their own: nobody else has seen the bytes that this process loads."""
    path = prepared()[0].save_state(tmp_path / "saved")
    templates, expected = [], []
    for name in ("model.safetensors", "optimizer.safetensors", "rank-00000.json", "state.json"):
        copied = shutil.copytree(path, tmp_path / name)
        flip_a_bit(copied / name)
        templates.append(str(copied))
        expected.append(damaged(copied, name))
    for number, (rank, name) in enumerate(itertools.product(range(2), ("model.safetensors", "optimizer.safetensors"))):
        for machine in range(2):
            shutil.copytree(path, tmp_path / f"{number}-{machine}")  # with the times of the original
        flip_a_bit(tmp_path / f"{number}-{rank}" / name)
        templates.append(f"{tmp_path}/{number}-{{rank}}")
        expected.append(damaged(tmp_path / f"{number}-{rank}", name))
    shutil.copytree(path, f"{path}-0")
    for *problems, (_, last) in run(load_each, 2, *templates, f"{path}-{{rank}}"):
        assert problems == expected
        assert "saved-1 does not exist" in last


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_file_that_changes_after_it_was_verified_is_refused(saved, name):
    path, *_ = saved
    opened = OpenCheckpoint(path)
    opened.verify()
    flip_a_bit(path / name)
    os.utime(path / name, ns=(0, (path / name).stat().st_mtime_ns + 1))
    with pytest.raises(ValueError, match=f"{name} was changed after it was verified. Load the checkpoint again"):
        opened.read_part(name.partition(".")[0])


def test_another_save_to_the_path_is_noticed(tmp_path):
    accelerator, model, _ = prepared()
    path = accelerator.save_state(tmp_path / "saved")
    opened = OpenCheckpoint(path)
    with torch.no_grad():
        model.parts["head"].weight.add_(1)
    accelerator.save_state(path)
    before = model.parts["head"].weight.clone()
    with pytest.raises(ValueError, match="was replaced or deleted while it was being read"):
        accelerator.load_state(opened)
    assert torch.equal(model.parts["head"].weight, before)
    accelerator.load_state(path)
