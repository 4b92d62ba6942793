"""Work that must finish before the interpreter exits."""

import subprocess
import sys

PROGRAM = """
import asyncio
from treadle.common.before_exit import before_exit

def fail():
    raise OSError("no space")

async def resolve():
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)

before_exit(lambda: print("saved"))
before_exit(fail)
before_exit(lambda: asyncio.run(resolve()))
before_exit(lambda: print("cancelled"))()
"""


def test_each_function_runs_while_executors_still_work_even_if_another_fails():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "saved\n")
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("OSError: no space\n")
