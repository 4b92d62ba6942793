"""The pages that a run leaves and those of the site, in a browser without a window: ``make test-browser``."""

import contextlib
import html
import json
import re
import shutil
import subprocess
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from support.models import Line
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks.reporting.html import Chart, Page
from treadle.cli.commands.runs import main as runs
from treadle.loggers import TensorBoardLogger
from treadle.trainer.runs import RunFolder

import treadle

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Move the pointer over the first chart, and note what the page then says, and every error it had.
POINTS = """
<script>
window.addEventListener("load", () => {
  const svg = document.querySelector("figure > svg"), box = svg.getBoundingClientRect();
  const note = document.createElement("div");
  note.id = "seen";
  const at = share => svg.dispatchEvent(
    new MouseEvent("mousemove", {clientX: box.left + share * box.width, clientY: 9}));
  const caption = () => document.querySelector("figcaption").textContent;
  const newest = () => document.querySelector(".keys b").textContent;
  const seen = [caption(), newest()];
  at(0); seen.push(caption(), newest());
  at(1); seen.push(caption(), newest());
  svg.dispatchEvent(new MouseEvent("mouseleave")); seen.push(caption(), newest());
  seen.push([...document.querySelectorAll("polyline")].filter(line => line.getBBox().width > 100).length);
  seen.push(document.documentElement.scrollWidth <= innerWidth);
  note.textContent = seen.join("|");
  document.body.append(note);
});
</script>
"""


class Task(Line):
    features = 4

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, 160).reshape(40, 4)), batch_size=4)
    trainer = treadle.Trainer(
        accelerator="cpu", max_epochs=5, log_every_n_steps=1, logger=TensorBoardLogger(str(folder)), profiler="simple"
    )
    trainer.fit(Task(), loader, loader)
    return trainer


def opened(url, folder, *flags, seconds=5):
    """What a page is once its scripts have run, and what they wrote to the console."""
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions"]
    command += ["--enable-logging=stderr", f"--user-data-dir={folder}", f"--virtual-time-budget={seconds * 1000}"]
    done = subprocess.run([*command, *flags, "--dump-dom", url], capture_output=True, text=True, timeout=120 + seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def seen_in(text, script, folder, *flags):
    """What a script of ours notes of a page, which has no errors."""
    page = folder / "page.html"
    page.write_text(text.replace("</body>", script + "</body>"), encoding="utf-8")
    dom, console = opened(f"file://{page}", folder / "profile", *flags)
    assert console == []
    return re.search(r'<div id="seen">(.*?)</div>', dom)[1].split("|")


def test_there_is_a_browser():
    assert BROWSER is not None, "apt-get install --no-install-recommends chromium"


@pytest.mark.parametrize("size", ["1250,900", "500,900"])
def test_the_report(ran, tmp_path, size):
    page = (Path(ran.log_dir) / "report.html").read_text(encoding="utf-8")
    seen = seen_in(page, POINTS, tmp_path, f"--window-size={size}")
    curve = ran.history["train_loss"]
    first, last = (f"{curve.values[place]:.4g}" for place in (0, -1))
    title = "loss (logarithmic)" if "loss (logarithmic)" in page else "loss"
    assert seen[:1] == [title]
    assert [float(seen[1]), seen[2], float(seen[3])] == [float(last), f"{title}, step 1", float(first)]
    assert [seen[4], float(seen[5])] == [f"{title}, step 50", float(last)]
    assert [seen[6], float(seen[7])] == [title, float(last)]
    assert int(seen[8]) == 5  # two losses, the throughput, and what is smoothed of both
    assert seen[9] == "true"  # nothing sticks out of the window


SMOOTHED = """
<script>
window.addEventListener("load", () => {
  const figure = document.querySelector("figure"), raw = figure.querySelector("polyline"), over = raw.nextSibling;
  const input = document.querySelector(".smoothing input"), note = document.createElement("div");
  note.id = "seen";
  const look = () => [input.value, getComputedStyle(raw).opacity, getComputedStyle(over).display,
    over.getAttribute("points")].join(";");
  const seen = [document.querySelector(".smoothing").hidden, figure.querySelectorAll("polyline").length, look()];
  for (const value of ["0.9", "0"]) {
    input.value = value;
    input.dispatchEvent(new Event("input"));
    seen.push(look());
  }
  note.textContent = seen.join("|");
  document.body.append(note);
});
</script>
"""


@pytest.mark.parametrize("points", [50, 4000])
def test_smoothing(tmp_path, points):
    generator = torch.Generator().manual_seed(0)
    values = (5 + torch.randn(points, generator=generator, dtype=torch.float64)).tolist()
    few = list(range(1, 30))
    lines = {"train_loss": (range(1, points + 1), values), "val_loss": (few, few)}
    page = Page("x", "finished", charts={"loss": lines}).render()
    hidden, count, *looks = seen_in(page, SMOOTHED, tmp_path)
    assert (hidden, count) == ("false", "3")  # few points are shown as they are
    chart = Chart("loss", lines)
    size = 1 if points == 50 else 9  # means of sections, as many as the chart has pixels
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, points, size)]
    for look, weight in zip(looks, (0.6, 0.9), strict=False):
        value, opacity, display, drawn = look.split(";")
        assert (float(value), float(opacity), display) == (weight, 0.3, "inline")
        heights = [float(point.partition(",")[2]) for point in drawn.split(" ")]
        wanted = []
        for i in range(len(means)):
            weights = [weight ** (i - j) for j in range(i + 1)]
            wanted.append(chart.y(sum(w * m for w, m in zip(weights, means, strict=False)) / sum(weights)))
        assert heights == pytest.approx(wanted, abs=0.06)
    assert looks[2].split(";")[:3] == ["0", "1", "none"]


@pytest.mark.parametrize("size", ["1250,900", "500,900"])
def test_the_comparison(ran, tmp_path, size):
    points = {"loss": {"train_loss": ([1, 2, 50], [3.0, 2.0, 1.0])}}
    for _ in range(2):
        folder = RunFolder.create(tmp_path / "runs", "base")
        folder.record({"state": "finished", "metrics": {"a_metric_with_a_name_that_takes_some_room": 1.0}}, points)
        folder.release()
    page = tmp_path / "page.html"
    assert runs(["compare", "1", "2", "--dir", str(tmp_path / "runs"), "--output", str(page)]) == 0
    seen = seen_in(page.read_text(encoding="utf-8"), POINTS, tmp_path, f"--window-size={size}")
    assert seen[:6] == ["train_loss", "1", "train_loss, step 1", "3", "train_loss, step 50", "1"]
    assert seen[8:] == ["1", "true"]  # two lines that are the same are one; nothing sticks out of the window


# Load each page of the site in a frame, and note what is wider than what it stands in. Code and tables scroll,
# and a name at the end of a line sticks out by the 5 pixels that are left of its background.
BOXES = """<!doctype html><iframe></iframe><script>
const frame = document.querySelector("iframe"), seen = [];
const wide = box => box.scrollWidth > box.clientWidth + 8 && box.clientWidth > 0;
async function measure(page, width) {
  frame.style = `width: ${width}px; height: 900px`;
  await new Promise(resolve => { frame.onload = resolve; frame.src = page; });
  const {documentElement, defaultView} = frame.contentDocument;
  if (!documentElement.querySelector("article")) seen.push(`${page}: no page`);
  if (wide(documentElement)) seen.push(`${page}, ${width}: the page is ${documentElement.scrollWidth} wide`);
  for (const box of documentElement.querySelectorAll("article *"))
    if (wide(box) && defaultView.getComputedStyle(box).overflowX === "visible" && !box.closest("svg"))
      seen.push(`${page}, ${width}: <${box.localName} ${box.className}> ${box.textContent.trim().slice(0, 60)}`);
}
(async () => {
  for (const page of PAGES) for (const width of [1280, 400]) await measure(page, width);
  document.body.innerHTML = '<div id="seen"></div>';
  document.querySelector("#seen").textContent = JSON.stringify(seen);
})();
</script>
"""


@contextlib.contextmanager
def served(folder, page):
    """Serve a folder, and ``page`` as its /boxes."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def do_GET(self):
            if self.path != "/boxes":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/boxes"
        server.shutdown()


def test_no_text_of_the_site_runs_out_of_its_box(tmp_path):
    site = ROOT / "build" / "html"
    pages = [path for path in sorted(site.rglob("*.html")) if "http-equiv=" not in path.read_text("utf-8")]
    pages = [path.relative_to(site).as_posix() for path in pages]  # without those that redirect
    assert len(pages) > 40, "make docs"
    alone = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    with served(site, BOXES.replace("PAGES", json.dumps(pages))) as address:
        dom, console = opened(address, tmp_path / "profile", *alone, seconds=600)
    assert console == []  # nothing is missing, nothing is fetched from elsewhere
    assert json.loads(html.unescape(re.search(r'<div id="seen">(.*?)</div>', dom)[1])) == []
