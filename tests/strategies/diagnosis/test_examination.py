"""The examination of real ranks: what it reports where all is well, and which faults it names."""

import importlib.metadata
import os
import shutil
import signal
import sys
import time

import pytest
from processes import RankError, run
from treadle.strategies import LaunchEnvironment
from treadle.strategies.diagnosis import examination, examine, measurements


def examine_rank(prepare=None, limit=20.0, folder="."):
    """Examine this rank; return its report, after `prepare` was called with its rank."""
    rank = int(os.environ["RANK"])
    if prepare is not None:
        globals()[prepare](rank)
    return examine(LaunchEnvironment.read(), folder, limit, publish=lambda report: None)


def find(report, subject):
    """The marks and texts of a report's findings about a subject."""
    return [(item["mark"], item["text"]) for item in report["findings"] if item["subject"] == subject]


def list_faults(report):
    return {item["subject"] for item in report["findings"] if item["mark"] == "fault"}


def test_two_ranks_in_order():
    report, other = run(examine_rank, 2)
    assert other is None
    assert report["result"] != "fault", report["findings"]
    assert [facts["rank"] for facts in report["ranks"]] == [0, 1]
    ((mark, text),) = find(report, "all-reduce")
    assert mark == "good"
    assert text.startswith("gloo, latency ")
    ((mark, text),) = find(report, "clocks")
    assert (mark, text[:8]) == ("good", "at most ")


def test_one_rank():
    (report,) = run(examine_rank, 1)
    assert report["result"] != "fault"
    assert find(report, "all-reduce") == [("good", "one rank, nothing to reduce")]


def install_old_numpy(rank):
    """Put another version of numpy's metadata before the installed one, on rank 1."""
    if rank == 1:
        folder = os.path.abspath(f"other-{os.getpid()}")
        os.makedirs(f"{folder}/numpy-1.0.1.dist-info")
        with open(f"{folder}/numpy-1.0.1.dist-info/METADATA", "w") as file:
            file.write("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0.1\n")
        sys.path.insert(0, folder)
        examination.inspect_process = _then(examination.inspect_process, lambda: shutil.rmtree(folder))


def _then(function, end):
    def wrapped(*arguments):
        result = function(*arguments)
        end()
        return result

    return wrapped


def test_a_rank_with_another_version(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report, _ = run(examine_rank, 2, "install_old_numpy")
    installed = importlib.metadata.version("numpy")
    expected = f"numpy {installed} on rank 0, 1.0.1 on rank 1. Install the same versions on all machines."
    assert ("fault", expected) in find(report, "versions")
    assert list_faults(report) == {"versions"}


def set_clock_ahead(rank):
    if rank == 1:
        clock = time.time
        measurements.time.time = lambda: clock() + 5.0


def test_a_clock_that_is_ahead():
    report, _ = run(examine_rank, 2, "set_clock_ahead")
    ((mark, text),) = find(report, "clocks")
    assert mark == "fault"
    assert text.startswith("the clock of rank 1 is 5.0 s ahead of rank 0's")


def test_a_rank_that_never_comes():
    begin = time.monotonic()
    with pytest.raises(RankError, match="exited with status 9"):
        run(report_missing, 2, "1")
    assert time.monotonic() - begin < 15


def test_rank_zero_never_comes():
    with pytest.raises(RankError, match="exited with status 9"):
        run(report_missing, 2, "0")


def report_missing(absent):
    """Stay away as one rank; as the other leave with status 9 if the report names that one."""
    if os.environ["RANK"] == absent:
        time.sleep(60)
    report = examine_rank(limit=1.0)
    ((mark, text),) = find(report, "ranks")
    named = mark == "fault" and text.startswith(f"rank {absent} of 2 did not report")
    os._exit(9 if named and report["result"] == "fault" else 1)


def test_a_rank_that_stops_in_the_measurements():
    with pytest.raises(RankError, match="exited with status 9"):
        run(report_stopped, 2)


def report_stopped():
    if os.environ["RANK"] == "1":
        examination.measure_clocks = lambda world: os.kill(os.getpid(), signal.SIGSTOP)
    report = examine_rank(limit=1.0)
    texts = [text for mark, text in find(report, "meeting") if mark == "fault"]
    os._exit(9 if "rank 1 did not finish the measurements within 1 s" in texts else 1)


def test_a_sum_that_is_wrong():
    report, _ = run(examine_rank, 2, "spoil_sums")
    ((_, text),) = find(report, "meeting")
    assert text.endswith("returned up to 1 wrong sum on rank 1")
    assert list_faults(report) == {"meeting"}


def spoil_sums(rank):
    if rank == 1:
        reduce = measurements.dist.all_reduce

        def reduce_and_spoil(tensor, **options):
            reduce(tensor, **options)
            if tensor.numel() > 2:
                tensor[3] += 1

        measurements.dist.all_reduce = reduce_and_spoil


def claim_rank_zero():
    os.environ["RANK"] = "0"
    report = examine_rank(limit=2.0)
    return [text for _, text in find(report, "meeting")], [text for mark, text in find(report, "ranks")]


def test_two_processes_that_are_the_same_rank():
    errors = [text for texts, _ in run(claim_rank_zero, 2) for text in texts]
    assert errors == ["another process is also rank 0 of 2. Set a different RANK for each process."]


def test_an_address_that_does_not_resolve():
    reports = run(examine_rank, 2, "lose_address")
    expected = "MASTER_ADDR='nowhere.invalid' can't be resolved on "
    assert find(reports[0], "meeting")[0][1].startswith(expected)
    assert find(reports[1], "rank 1")[0][1].startswith(expected)


def lose_address(rank):
    os.environ["MASTER_ADDR"] = "nowhere.invalid"


def test_a_folder_in_which_nothing_can_be_written():
    report, _ = run(examine_rank, 2, None, 20.0, "/proc/no/such/folder")
    ((mark, text),) = find(report, "run folder")
    assert mark == "fault"
    assert text.startswith("/proc/no/such/folder: can't write a file: ")
