// `frame` is defined before: the sizes of the charts, as html.py draws them.
const charts = JSON.parse(document.getElementById("data").textContent);
const {left, width, right, low} = frame;  // not `top`, which is the window's
const control = document.querySelector(".smoothing"), smoothed = [];
// An exponential moving average without its bias towards 0, as in TensorBoard.
const average = (values, weight) => {
  let sum = 0, total = 0;
  return values.map(value => {
    sum = sum * weight + value * (1 - weight);
    total = total * weight + 1 - weight;
    return sum / total;
  });
};
const draw = weight => smoothed.forEach(({raw, over, chart, steps, values}) => {
  const scale = value => chart.logarithmic ? Math.log10(value) : value;
  const bottom = scale(chart.bottom), height = scale(chart.top) - bottom;
  raw.classList.toggle("faint", weight > 0);
  over.style.display = weight > 0 ? "" : "none";
  over.setAttribute("points", average(values, weight).map((value, i) => {
    const x = left + (steps[i] - chart.first) / (chart.last - chart.first) * (width - left - right);
    return `${x.toFixed(1)},${(low - (scale(value) - bottom) / height * (low - frame.top)).toFixed(1)}`;
  }).join(" "));
});
for (const raw of document.querySelectorAll("polyline[data-line]")) {
  const chart = charts[raw.closest("figure").dataset.chart], line = chart.lines[raw.dataset.line];
  const [steps, values] = line.means || [line.steps, line.values];
  if (!chart.smooth || values.length < frame.smoothed_from) continue;
  const over = raw.cloneNode();
  over.removeAttribute("data-line");
  raw.after(over);
  smoothed.push({raw, over, chart, steps, values});
}
if (smoothed.length) {
  const input = control.querySelector("input"), output = control.querySelector("output");
  const update = () => { output.textContent = Number(input.value).toFixed(2); draw(Number(input.value)); };
  input.addEventListener("input", update);
  control.hidden = false;
  update();
}
const show = v => Math.abs(v) >= 1e4 && Math.abs(v) < 1e15
  ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(4)));
for (const figure of document.querySelectorAll("figure")) {
  const chart = charts[figure.dataset.chart], svg = figure.querySelector(":scope > svg");
  const pointer = svg.querySelector(".pointer"), caption = figure.querySelector("figcaption");
  const title = caption.textContent, keys = [...figure.querySelectorAll(".keys b")];
  const newest = keys.map(key => key.textContent);
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * width;
    const share = Math.min(1, Math.max(0, (x - left) / (width - left - right)));
    const step = chart.first + share * (chart.last - chart.first);
    let nearest = null;
    chart.lines.forEach((line, i) => {
      if (!line.steps.length) return;
      let low = 0, high = line.steps.length - 1;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (line.steps[middle] <= step) low = middle; else high = middle;
      }
      const at = step - line.steps[low] < line.steps[high] - step ? low : high;
      keys[i].textContent = show(line.values[at]);
      if (nearest === null || Math.abs(line.steps[at] - step) < Math.abs(nearest - step)) nearest = line.steps[at];
    });
    if (nearest === null) return;
    const place = left + (nearest - chart.first) / (chart.last - chart.first) * (width - left - right);
    for (const [name, value] of [["x1", place], ["x2", place], ["y1", frame.top], ["y2", low]]) {
      pointer.setAttribute(name, value);
    }
    pointer.style.visibility = "visible";
    caption.textContent = title + ", step " + nearest.toLocaleString("en");
  });
  svg.addEventListener("mouseleave", () => {
    pointer.style.visibility = "hidden";
    caption.textContent = title;
    keys.forEach((key, i) => { key.textContent = newest[i]; });
  });
}
