"""Programs that a fork server forks do what the interpreter does: what they print, where, and how they end."""

import os
import signal
import subprocess
import sys

import pytest

from support.fork_server import UNIMPORTED
from support.launches import wait_for
from support.processes import clean_environment, programs, python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is the interpreter itself")

WHERE = (
    "import os, sys; print(sys.argv, sys.path[:2], __name__, sys.flags.optimize, os.getcwd())\n"
    "print(sys.stdout.line_buffering, sys.stdout.write_through, sys.warnoptions)\n"
    "print(sys.orig_argv[1:], os.environ.get('PYTEST_SOME'), os.umask(0o22))"
)
OUTCOMES = {
    "words": "import sys; print('höhe', flush=True); print('error', file=sys.stderr)",
    "status": "import sys; sys.exit(3)",
    "status in words": "import sys; sys.exit('no such file')",
    "error": "def fails():\n    raise ValueError('no')\nfails()",
    "wrong syntax": "x = = 1",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "at the end": "import atexit; atexit.register(print, 'bye'); import sys; sys.exit(4)",
    "hook": "import sys; sys.excepthook = lambda *error: print('hook', error[0]); 1 / 0",
    "thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "finalizer": "class Last:\n    def __del__(self):\n        print('gone')\nkept = Last()",
    "input": "print(input())",
    "own child": "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'exit(5)']))",
    "descriptor": "import os; os.write(int(os.environ['PYTEST_FD']), b'through')",
}


def outcome(interpreter, *arguments, source=None, **options):
    """Exit status and what was printed, by an interpreter that was given ``source`` as a file, if any."""
    env = clean_environment({"PYTEST_SOME": "value", **options.pop("env", {})})
    done = subprocess.run([interpreter, *arguments], env=env, capture_output=True, text=True, timeout=60, **options)
    return done.returncode, done.stdout, done.stderr


def both(*arguments, **options):
    return outcome(python(), *arguments, **options), outcome(sys.executable, *arguments, **options)


@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.parametrize("how", ["script", pytest.param("-c", marks=pytest.mark.exhaustive)])
def test_a_program_ends_as_in_the_interpreter(name, how, tmp_path):
    (tmp_path / "program.py").write_text(OUTCOMES[name])
    arguments = ["program.py"] if how == "script" else ["-c", OUTCOMES[name]]
    read, write = os.pipe()
    with open(read, "rb") as through:
        found, wanted = both(
            *arguments, cwd=tmp_path, input="a line\n", pass_fds=[write], env={"PYTEST_FD": str(write)}
        )
        os.close(write)
        assert through.read() == (b"through" * 2 if name == "descriptor" else b"")
    assert found == wanted


@pytest.mark.parametrize(
    "arguments",
    [
        ["program.py", "a", "-u", "--b"],
        ["-u", "-B", "-W", "ignore", "-Wdefault::DeprecationWarning", "program.py"],
        ["-c", WHERE, "a", "b"],
        ["-m", "package", "a"],
        ["-m", "nothing"],
        ["-", "a"],
        ["nothing.py"],
        ["-O", "program.py"],
        ["-V"],
    ],
    ids=" ".join,
)
def test_a_program_finds_what_it_finds_in_the_interpreter(arguments, tmp_path):
    (tmp_path / "program.py").write_text(WHERE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(WHERE)
    path = tmp_path / "more"
    found, wanted = both(*arguments, cwd=tmp_path, input=WHERE, env={"PYTHONPATH": str(path)}, umask=0o27)
    found = tuple(str(part).replace(python(), sys.executable) for part in found)
    assert found == tuple(map(str, wanted))


@pytest.mark.long
@pytest.mark.parametrize(
    ("env", "imported"),
    [
        ({}, "True True"),
        ({UNIMPORTED: "1"}, "True False"),
        ({"PYTHONPATH": "own"}, "True False"),
        ({"OMP_NUM_THREADS": "2"}, "False False"),  # which torch may read at its import
    ],
)
def test_a_program_is_forked_from_what_has_imported_torch_and_treadle(env, imported, tmp_path):
    (tmp_path / "own" / "treadle").mkdir(parents=True)
    code = "import sys; print('torch' in sys.modules, 'treadle' in sys.modules)"
    assert outcome(python(), "-c", code, env=env, cwd=tmp_path)[:2] == (0, f"{imported}\n")


def test_scripts_of_the_environment_are_forked_too():
    code, printed, _ = outcome(str(programs() / "treadle"), "--version")
    assert (code, printed) == outcome(sys.executable, "-m", "treadle", "--version")[:2]


WAITS = """
import os, signal, sys, time
def stop(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGTERM, 7, "got SIGTERM\n"), (signal.SIGHUP, -1, ""), (signal.SIGKILL, -9, "")],
)
def test_signals_reach_the_program_and_its_end_is_told(number, code, words):
    command = [python(), "-c", WAITS]
    with subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.stdout.read() == words
        assert process.wait(60) == code
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), 10)
