"""Migration of configurations, scripts and lists of requirements."""

from __future__ import annotations

import re
from pathlib import PurePath

from .counterparts import PEER_PACKAGES, describe_missing, find_dotted
from .differences import Finding

CONFIGURATIONS = (".yaml", ".yml", ".json", ".jsonnet", ".toml", ".cfg", ".ini", ".gin")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".mk")
_NAMES = ("Makefile", "Dockerfile", "Justfile", "Pipfile")

_PACKAGE = "|".join(PEER_PACKAGES)
# A whole value: it follows the start of the line, a quote, a bracket, an `=`, `: `, `, ` or `- `.
_CLASS_PATH = re.compile(
    rf"(?P<before>(?:^|[\[{{,:\-]\s|[\"'=\[@])\s*)(?P<path>(?:{_PACKAGE})(?:\.\w+)+)(?=\s*(?:$|[\"',\]}}#]|\(\)))"
)
_UNKNOWN_PATH = re.compile(rf"(?:_target_|class_path)[\"']?\s*:\s*[\"']?(?P<path>(?:{_PACKAGE})(?:\.\w+)+)")
_REQUIRED = r"(?P<name>pytorch[-_.]lightning|lightning[-_.]fabric|lightning|accelerate)\s*(?:\[[\w\s,.-]*\])?\s*"
_UNQUOTED_REQUIREMENT = re.compile(rf"^\s*(?:-\s+)?{_REQUIRED}(?:[<>=!~@;#]|$)", re.IGNORECASE)
_QUOTED_REQUIREMENT = re.compile(rf"[\"']{_REQUIRED}(?:[<>=!~^@;][^\"']*)?[\"']", re.IGNORECASE)
_NO_REQUIREMENT = re.compile(r"\s*(?:name|keywords|description|packages)\s*=")
_TREADLE = re.compile(r"(?:^\s*(?:-\s+)?|[\"'])treadle\b", re.MULTILINE)
_LAUNCH = re.compile(r"(?:^|[\s;&|\"'])(?P<command>accelerate\s+launch|(?:lightning|fabric)\s+run)\b")


def is_text(name: str) -> bool:
    """Return whether a file with this name is a configuration, a script, or a list of requirements."""
    path = PurePath(name)
    return path.suffix in (*CONFIGURATIONS, *SCRIPTS) or path.name.startswith(_NAMES) or _is_list(path.name)


def migrate_text(text: str, path: str) -> tuple[str, list[Finding]]:
    """Return a file's text with class paths in configurations translated to Treadle's, and the findings."""
    name = PurePath(path).name
    findings: list[Finding] = []
    lines = text.split("\n")
    for index, line in enumerate(lines):
        body = line.rstrip("\r")
        if body.lstrip().startswith("#"):
            continue
        if PurePath(name).suffix in CONFIGURATIONS:
            lines[index] = _CLASS_PATH.sub(_translate, body) + line[len(body) :]
            unknown = _UNKNOWN_PATH.search(lines[index])
            if unknown is not None:
                module, _, class_name = unknown["path"].rpartition(".")
                findings.append(Finding(path, index + 1, describe_missing(module, class_name)))
        command = _LAUNCH.search(body)
        if command is not None:
            findings.append(Finding(path, index + 1, f"{command['command']}: use treadle launch instead."))
    return "\n".join(lines), findings + (find_requirements(text, path) if _is_list(name) else [])


def find_requirements(text: str, path: str) -> list[Finding]:
    """Return a finding for each required package of a peer, unless the file already requires Treadle."""
    findings: list[Finding] = []
    for number, line in enumerate(text.split("\n") if not _TREADLE.search(text) else (), 1):
        if line.lstrip().startswith("#") or _NO_REQUIREMENT.match(line):
            continue
        unquoted = None if path.endswith(".py") else _UNQUOTED_REQUIREMENT.match(line)
        for match in [unquoted] if unquoted else _QUOTED_REQUIREMENT.finditer(line):
            package = match["name"]
            advice = f"{package}: add treadle, and remove {package} unless something else needs it."
            findings.append(Finding(path, number, advice))
    return findings


def _is_list(name: str) -> bool:
    """Return whether a file with this name lists requirements."""
    return (
        re.fullmatch(r"(?:.*requirements.*|constraints)\.(?:txt|in)", name) is not None
        or name in ("pyproject.toml", "setup.cfg", "Pipfile")
        or re.fullmatch(r"(?:environment|conda).*\.ya?ml", name) is not None
    )


def _translate(match: re.Match[str]) -> str:
    return match["before"] + (find_dotted(match["path"]) or match["path"])
