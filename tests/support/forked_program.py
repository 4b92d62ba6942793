"""What an executable of `fork_server.executables` does, in place of the interpreter or of one of its scripts.

It has a fork server fork the program, hands signals on to it, and ends as it ends. Whatever is unusual, such as an
option of the interpreter that is not known here, is left to the interpreter itself.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
MOST_DESCRIPTORS = 200  # Linux sends 253 at once


def parsed(given):
    """What the interpreter's command line says, or None where it says something that is not known here."""
    known, given = {"unbuffered": False, "bytecode": True, "warnings": []}, list(given)
    while given:
        word = given.pop(0)
        if word == "-u":
            known["unbuffered"] = True
        elif word == "-B":
            known["bytecode"] = False
        elif word == "-W" and given:
            known["warnings"].append(given.pop(0))
        elif word.startswith("-W") and word != "-W":
            known["warnings"].append(word[2:])
        elif word == "-" and not os.isatty(0):
            return {**known, "kind": word, "target": "<stdin>", "argv": [word, *given]}
        elif word in ("-m", "-c") and given:
            return {**known, "kind": word, "target": given[0], "argv": [word, *given[1:]]}
        elif not word.startswith("-") and os.path.isfile(word) and not word.endswith((".zip", ".pyz")):
            return {**known, "kind": "script", "target": word, "argv": [word, *given]}
        else:
            return None
    return None


def inherited():
    """The descriptors that a program started by this process's parent has."""
    found = []
    for number in sorted(int(name) for name in os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            if os.get_inheritable(number):
                found.append(number)
    return found


def number_from(reply):
    """What the fork server says next; None if it is gone."""
    word = reply.recv(8)
    return int.from_bytes(word, "little", signed=True) if word else None


def hold_group(reply):
    """Leave a process in this one's group for those that the program left in its own: killed, it has them killed."""
    if os.getpgrp() != os.getpid() or os.fork():
        return
    os.chdir("/")
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    for number in inherited():
        if number != reply.fileno():
            os.close(number)
    reply.recv(8)
    os._exit(0)


def main():
    folder, name = os.path.split(os.path.abspath(sys.argv[0]))
    with open(os.path.join(folder, "known.json")) as file:
        known = json.load(file)
    interpreter = known["python"]
    script = [] if name == "python" else [os.path.join(os.path.dirname(interpreter), name)]
    given = [*script, *sys.argv[1:]]
    request, descriptors = parsed(given), inherited()
    reply = socket.socket(socket.AF_UNIX)
    try:
        if request is None or len(descriptors) > MOST_DESCRIPTORS:
            raise ConnectionRefusedError
        reply.connect(known["servers"][int(os.environ.get("RANK", "0")) % len(known["servers"])])
    except (OSError, ValueError):
        os.execv(interpreter, [interpreter, *given])
    os.umask(mask := os.umask(0))
    ignored = [int(one) for one in FORWARDED if signal.getsignal(one) is signal.SIG_IGN]
    python = os.path.join(folder, "python")
    request.update(executable=python, orig_argv=[python, *given], descriptors=descriptors, ignored=ignored)
    request.update(env=dict(os.environ), cwd=os.getcwd(), umask=mask)
    pid, early = None, []

    def forward(number, _):
        if pid is None:
            early.append(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in FORWARDED:
        if number not in ignored:
            signal.signal(number, forward)
    with open(os.memfd_create("request"), "wb") as file:
        file.write(json.dumps(request).encode())
        file.flush()
        socket.send_fds(reply, [b"."], [file.fileno(), *descriptors])
    pid = number_from(reply)
    if pid is None or pid < 0:
        os.execv(interpreter, [interpreter, *given])
    for number in early:
        forward(number, None)
    code = number_from(reply)
    if code is None:
        code = -signal.SIGKILL  # the fork server was killed, and the program with it
    elif number_from(reply):
        hold_group(reply)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    main()
