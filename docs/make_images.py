"""Make the pictures of README.md and the site, in docs/images.

    python docs/make_images.py            the badges and the bars, from pyproject.toml and benchmarks/RESULTS.md
    python docs/make_images.py --report   and the screenshot: trains examples/digits.py, then needs chromium

The bars show the first table of benchmarks/RESULTS.md, so `make bench` and an edit of that table come first.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
ARMS = {  # the rows of the table that are drawn, with their labels
    "raw loop": "hand-written loop",
    "Treadle Accelerator": "Treadle Accelerator",
    "Treadle Trainer, everything on": "Treadle Trainer, everything on",
    "Fabric": "Lightning Fabric",
    "Accelerate": "Accelerate",
    "Lightning, everything off": "Lightning Trainer, everything off",
    "Lightning, everything on": "Lightning Trainer, everything on",
}
TEXT, OURS, THEIRS = "#7a8490", "#0d9488", "#9aa4af"  # on white and on near black alike
FONT = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif"'


def read_overhead():
    """Return the ratio of each arm to the hand-written loop: ``{"Accelerate": 1.56, ...}``."""
    table = RESULTS.read_text(encoding="utf-8").split("## overhead.py")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| [\d.]+ \| ([\d.]+) \|", table, re.MULTILINE)
    ratios = {}
    for name, ratio in rows:
        ratios.setdefault(name, float(ratio))  # later tables repeat some names
    return {name: ratios[name] for name in ARMS}


def draw_bars(ratios):
    """Return the bars as an SVG."""
    width, row, left, top = 760, 30, 230, 40
    scale = (width - left - 60) / max(ratios.values())
    height = top + row * len(ratios) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' role="img" aria-label="CPU time per optimizer step, relative to a hand-written loop">',
        f'<text x="0" y="18" {FONT} font-size="14" fill="{TEXT}">CPU time per optimizer step of a tiny model, '
        f"relative to a hand-written loop (less is better)</text>",
    ]
    for number, (name, ratio) in enumerate(ratios.items()):
        y = top + row * number
        color, weight = (OURS, 600) if name.startswith("Treadle") else (THEIRS, 400)
        lines += [
            f'<text x="{left - 10}" y="{y + 17}" {FONT} font-size="13" font-weight="{weight}" fill="{TEXT}"'
            f' text-anchor="end">{escape(ARMS[name])}</text>',
            f'<rect x="{left}" y="{y + 3}" width="{ratio * scale:.1f}" height="20" rx="3" fill="{color}"/>',
            f'<text x="{left + ratio * scale + 8:.1f}" y="{y + 18}" {FONT} font-size="13" font-weight="{weight}"'
            f' fill="{TEXT}">{ratio:.2f}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def draw_badge(label, value):
    """Return a badge as an SVG; widths are estimated from the number of characters."""
    left, right = 7 * len(label) + 14, 7 * len(value) + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img"'
        f' aria-label="{escape(label)}: {escape(value)}">\n'
        f'<rect width="{left + right}" height="20" rx="4" fill="#4b5563"/>\n'
        f'<path d="M{left} 0h{right - 4}a4 4 0 0 1 4 4v12a4 4 0 0 1 -4 4h-{right - 4}z" fill="{OURS}"/>\n'
        f'<g {FONT} font-size="11" fill="#fff" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">{escape(label)}</text>'
        f'<text x="{left + right / 2}" y="14">{escape(value)}</text></g>\n</svg>\n'
    )


def draw_all():
    """Return the text of each SVG by file name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(line for line in project["dependencies"] if line.startswith("torch>="))
    return {
        "overhead.svg": draw_bars(read_overhead()),
        "badge-python.svg": draw_badge("python", f"{project['requires-python'].removeprefix('>=')} or newer"),
        "badge-pytorch.svg": draw_badge("pytorch", f"{torch.removeprefix('torch>=')} or newer"),
        "badge-license.svg": draw_badge("license", project["license"]),
    }


def photograph_report(target):
    """Train the digits example and save the head of its report as a PNG."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("chromium is not installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # so small a network is slower with more
        subprocess.run([sys.executable, str(ROOT / "examples" / "digits.py")], cwd=folder, env=environment, check=True)
        report = next(Path(folder).rglob("report.html"))
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        command += ["--disable-background-networking", "--disable-sync", f"--user-data-dir={folder}/browser"]
        command += ["--window-size=1000,645", f"--screenshot={target}", report.as_uri()]
        subprocess.run(command, check=True, timeout=120, capture_output=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="take the screenshot of a run's report, too")
    arguments = parser.parse_args()
    for file, text in draw_all().items():
        (IMAGES / file).write_text(text, encoding="utf-8")
    if arguments.report:
        photograph_report(IMAGES / "report.png")
