// What every chart is made of: SVG elements, scales, ticks, axes.
const SVG = "http://www.w3.org/2000/svg";
let serial = 0;

function draw(name, attributes, parent, text) {
  return placed(document.createElementNS(SVG, name), attributes, parent, text);
}

function make(name, attributes, parent, text) {
  return placed(document.createElement(name), attributes, parent, text);
}

function placed(node, attributes, parent, text) {
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function linear(from, to, start, end) {
  const span = to - from || 1;
  return (value) => start + ((value - from) / span) * (end - start);
}

function logarithmic(from, to, start, end) {
  const inner = linear(Math.log(from), Math.log(to), start, end);
  return (value) => inner(Math.log(value));
}

// Round numbers that cover the range.
function ticks(from, to, about) {
  const raw = (to - from || 1) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) {
    found.push(Number((i * step).toPrecision(10)));
  }
  return found;
}

const percent = (value) => `${Math.round(100 * value)}`;
const decimals = (value) => (value === null ? "–" : value.toFixed(3).replace("-", "−"));
const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
const modelColor = (index) => `var(--m${Math.min(index, 8)})`;

// An empty chart with axes; x and y are {scale, ticks, format, label}.
function frame(parent, { width, height, margin, x, y, title, description }) {
  const id = `chart-${++serial}`;
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${height}`, tabindex: "0", role: "application",
    "aria-roledescription": "chart", "aria-labelledby": `${id}-t`, "aria-describedby": `${id}-d`,
  }, parent);
  draw("title", { id: `${id}-t` }, svg, title);
  draw("desc", { id: `${id}-d` }, svg, `${description} Arrow keys move through the marks.`);
  const [top, right, bottom, left] = margin;
  const low = height - bottom;
  for (const value of x.ticks) {
    const at = x.scale(value);
    draw("line", { class: "grid", x1: at, x2: at, y1: top, y2: low }, svg);
    draw("text", { x: at, y: low + 17, "text-anchor": "middle" }, svg, x.format(value));
  }
  for (const value of y.ticks) {
    const at = y.scale(value);
    draw("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }, svg);
    draw("text", { x: left - 7, y: at + 4, "text-anchor": "end" }, svg, y.format(value));
  }
  draw("line", { class: "axis", x1: left, x2: width - right, y1: low, y2: low }, svg);
  if (x.label) {
    draw("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, svg,
      x.label);
  }
  if (y.label) {
    draw("text", { x: 0, y: top - 9, "text-anchor": "start" }, svg, y.label);
  }
  return svg;
}

// The marks of the optimisers differ in shape as well as in colour.
const SHAPES = [
  (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
  (x, y, r) => `M${x - r * 0.88} ${y - r * 0.88}h${1.76 * r}v${1.76 * r}h${-1.76 * r}z`,
  (x, y, r) => `M${x} ${y - 1.2 * r}l${1.15 * r} ${2 * r}h${-2.3 * r}z`,
  (x, y, r) => `M${x} ${y - 1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}z`,
  (x, y, r) => `M${x - 0.4 * r} ${y - 1.1 * r}h${0.8 * r}v${2.2 * r}h${-0.8 * r}zM${x - 1.1 * r} ${y - 0.4 * r}h${2.2 * r}v${0.8 * r}h${-2.2 * r}z`,
];
const OPTIMISERS = ["sgd", "sgdm", "adam", "rmsprop"];
function optimiser(name) {
  if (name === null) return 0;
  const index = OPTIMISERS.indexOf(String(name).toLowerCase());
  return index < 0 ? 4 : index;
}

// Buttons that name the series; one pressed shows its series alone.
function key(parent, entries, pick) {
  const box = make("div", { class: "key", role: "group", "aria-label": "Series" }, parent);
  const buttons = entries.map((entry, index) => {
    const button = make("button", { type: "button", "aria-pressed": "false" }, box);
    const icon = draw("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, button);
    draw("path", { d: SHAPES[entry.shape || 0](6, 6, 4), fill: entry.color }, icon);
    make("span", {}, button, entry.name);
    button.addEventListener("click", () => {
      const only = button.getAttribute("aria-pressed") !== "true";
      buttons.forEach((other) => other.setAttribute("aria-pressed", "false"));
      button.setAttribute("aria-pressed", String(only));
      pick(only ? index : null);
    });
    return button;
  });
}
