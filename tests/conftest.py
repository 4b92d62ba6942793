"""What holds for every test."""

import gc
import importlib
import os
import sys

import pytest
import torch
from support import processes
from treadle.strategies.distributed import disconnect

# Files that take longest, most of it in waiting. With `--no-loadscope-reorder` they are handed out first, so that none
# of them is what everything waits for at the end.
LONGEST_FIRST = (
    "integration/test_readme.py",
    "engine/data/test_loader.py",
    "strategies/fsdp/test_fsdp.py",
    "integrations/test_transformers_task.py",
    "strategies/distributed/test_waiting_call.py",
    "fault_injection/test_killed.py",
    "fault_injection/test_hostile.py",
    "integration/test_without_tools.py",
    "trainer/test_function_ranks.py",
    "cli/lightning_cli/test_cli.py",
    "trainer/loop/test_manual_updates.py",
    "strategies/launch/test_elastic_agent.py",
    "engine/checkpoint/test_store.py",
    "strategies/launch/test_rendezvous.py",
    "engine/weights/test_save.py",
    "strategies/processes/test_exit_limit.py",
    "tools/sweep/test_command.py",
    "integration/test_examples.py",
    "strategies/launch/test_command.py",
    "engine/checkpoint/test_checkpointer.py",
    "trainer/loop/test_compile.py",
    "strategies/launch/test_hydra.py",
    "tools/sweep/test_study.py",
    "strategies/launch/test_supervisor.py",
    "trainer/checkpointing/test_resume.py",
    "trainer/checkpointing/test_resume_reads.py",
    "trainer/loop/test_preemption.py",
    "trainer/loop/test_budget.py",
    "tools/plan/test_report.py",
    "tools/test_doctor.py",
    "integration/test_tutorials.py",
)


STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
"""Audit events of a new process."""


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="skip each test that starts a process, when it does")


def pytest_configure(config):
    """Hide GPUs from tests that mean the CPU: all but tests/gpu. TREADLE_TEST_GPU=1 shows them to whatever is run."""
    if config.getoption("--quick"):
        sys.addaudithook(lambda event, _: pytest.skip("it starts a process") if event in STARTS and _running else None)
    elif getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        processes.share_fork_servers()
    asked = os.environ.get("TREADLE_TEST_GPU") == "1" or any("tests/gpu" in argument for argument in config.args)
    if not asked:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


_running: set[str] = set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    _running.add(item.nodeid)
    yield
    _running.clear()


def pytest_collection_modifyitems(items):
    place = {f"tests/{name}": number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(place)))


@pytest.fixture(autouse=True, scope="session")
def an_interrupt_is_not_ignored():
    """As it is in tests that a shell has started in its background, and in every process that those start.

    Nor is a hangup, as under nohup.
    """
    processes.heed_signals()


@pytest.fixture(autouse=True, scope="session")
def operations_use_one_thread():
    """More workers than cores: threads that wait for one another made batch norms of 20 numbers take 15 ms each."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def garbage_is_not_looked_for_in_what_is_imported():
    """Torch and its compiler are 280,000 objects: up to 0.5 s for each of the collections that a run asks for."""
    importlib.import_module("torch._dynamo")  # as the first optimizer does
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """A run in the test's own process may connect it (sharding does so even alone), and the next test starts anew."""
    yield
    disconnect()


def restore_environment():
    before = dict(os.environ)
    yield
    for name in [name for name in os.environ if name not in before]:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


# What a run or a package sets would be with all tests that follow, whose ranks then could not be forked. Per module,
# too, for what a module's own fixtures run.
environment_is_left_as_it_was = pytest.fixture(autouse=True)(restore_environment)
environment_of_a_module = pytest.fixture(autouse=True, scope="module")(restore_environment)
