// Predicted against true accuracy: a panel for each model, or one model large.
function setting(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential().replace("e-", "e−")
    : String(Number(value.toPrecision(6)));
}

function scatter(canvas, zoo) {
  const state = canvas.state || (canvas.state = { model: null, seed: null });
  canvas.textContent = "";
  const bar = make("div", { class: "bar-of-controls", role: "group",
    "aria-label": "Which model and seed" }, canvas);
  const all = scatterPanels(zoo, state.seed, mostPoints);
  if (all.length > 1) {
    [{ name: "All models" }, ...all].forEach((choice, index) => {
      const chosen = (state.model === null ? -1 : state.model) === index - 1;
      const button = make("button", { type: "button", "aria-pressed": String(chosen) }, bar,
        choice.name);
      button.addEventListener("click", () => {
        state.model = index ? index - 1 : null;
        scatter(canvas, zoo);
        canvas.querySelectorAll(".bar-of-controls button")[index].focus();
      });
    });
  }
  chooseSeed(bar, zoo, state, () => {
    scatter(canvas, zoo);
    canvas.querySelector("select").focus();
  });
  const single = state.model !== null || all.length === 1;
  const panels = make("div", { class: single ? "panels single" : "panels" }, canvas);
  const wanted = state.model === null ? all : [all[state.model]];
  const accuracy = zoo.networks.accuracy;
  const everything = all.flatMap((panel) =>
    panel.network.flatMap((n, i) => [accuracy[n], panel.predicted[i]]));
  const [least, most] = everything.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [1, 0]);
  const step = most - least > 0.4 ? 10 : 20;
  const from = Math.max(0, Math.floor(least * step) / step);
  const to = Math.min(1, Math.ceil(most * step) / step);
  const holders = wanted.map(() => make("div", {}, panels));
  const updates = wanted.map((panel, i) => scatterPanel(holders[i], zoo, panel, from, to, single));
  const { settings } = zoo.networks;
  if (!settings.optimizer) return;
  const shown = new Set(all.flatMap((panel) => panel.network));
  const names = [...new Set([...shown].map((n) => setting(settings.optimizer[n])))]
    .sort((a, b) => optimiser(a) - optimiser(b));
  const only = (name) => updates.forEach((update) => update(name));
  key(canvas, names.map((name) => ({ name, shape: optimiser(name),
    color: `var(--o${optimiser(name)})` })), (index) => only(index === null ? null : names[index]));
}

function chooseSeed(bar, zoo, state, again) {
  const names = seedNames(zoo);
  if (names.length < 2) return;
  const select = make("select", { "aria-label": "Which seed" }, bar);
  for (const name of [null, ...names]) {
    const text = name === null ? "mean of the seeds" : `seed ${name}`;
    const option = make("option", { value: name === null ? "" : name }, select, text);
    option.selected = name === state.seed;
  }
  select.addEventListener("change", () => {
    state.seed = select.value === "" ? null : select.value;
    state.model = null;
    again();
  });
}

function scatterPanel(holder, zoo, panel, from, to, single) {
  const width = Math.max(180, holder.clientWidth);
  const height = Math.round(Math.min(width * (single ? 0.82 : 1.02), 560)) + 20;
  const narrow = width < 220;
  const margin = [narrow ? 50 : 46, 10, narrow ? 22 : 40, single ? 40 : 30];
  const scales = [linear(from, to, margin[3], width - margin[1]),
    linear(from, to, height - margin[2], margin[0])];
  const [x, y] = scales;
  const marksAt = ticks(from, to, single ? 8 : 4);
  const axis = (scale, label) => ({ scale, ticks: marksAt, format: percent, label });
  const svg = frame(holder, {
    width, height, margin,
    x: axis(x, narrow ? "" : "true accuracy (%)"),
    y: axis(y, narrow ? "" : "predicted (%)"),
    title: `${panel.name}: predicted against true accuracy`,
    description: `${panel.network.length} networks, ${panel.whose}.`,
  });
  svg.classList.add("panel");
  draw("text", { class: narrow ? "head small" : "head", x: 0, y: 14 }, svg, panel.name);
  if (panel.tau !== null) {
    draw("text", narrow ? { x: 0, y: 31 } : { x: width - margin[1], y: 14, "text-anchor": "end" },
      svg, `τ ${decimals(panel.tau)}`);
  }
  const always = meanAccuracy(zoo);
  if (always !== null && always >= from && always <= to) {
    draw("line", { class: "always", x1: x(from), y1: y(always), x2: x(to), y2: y(always) }, svg);
  }
  draw("line", { class: "diagonal", x1: x(from), y1: y(from), x2: x(to), y2: y(to) }, svg);
  const { networks } = zoo;
  const { settings } = networks;
  const clip = (value) => Math.max(from, Math.min(to, value));
  const order = panel.network.map((_, i) => i)
    .sort((a, b) => networks.accuracy[panel.network[a]] - networks.accuracy[panel.network[b]]);
  const whiskers = draw("g", {}, svg);
  const points = draw("g", {}, svg);
  const marks = order.map((i) => {
    const n = panel.network[i];
    const name = settings.optimizer ? setting(settings.optimizer[n]) : null;
    const kind = optimiser(name);
    const color = `var(--o${kind})`;
    const [px, py] = [x(networks.accuracy[n]), y(panel.predicted[i])];
    const known = panel.low[i] !== null && panel.high[i] !== null;
    const interval = (parent, css) => known && draw("line", { class: css, stroke: color, x1: px,
      x2: px, y1: y(clip(panel.low[i])), y2: y(clip(panel.high[i])) }, parent);
    const whisker = single ? interval(whiskers, "whisker") : null;
    const node = draw("path", { class: "point", fill: color,
      d: SHAPES[kind](px, py, single ? 4 : 3) }, points);
    const mark = {
      x: px, y: py, node, whisker, name, title: networks.name[n],
      halo(parent) {
        interval(parent, "interval");
        draw("circle", { class: "halo", cx: px, cy: py, r: single ? 7 : 6 }, parent);
      },
      pairs: () => [
        ["True accuracy", share(networks.accuracy[n])],
        [`Predicted, ${panel.whose}`, share(panel.predicted[i])],
        ["Interval", known ? `${share(panel.low[i])} to ${share(panel.high[i])}` : "–"],
        ["Run", setting(networks.run[n])],
        ...Object.keys(settings).map((key) => [headings[key], setting(settings[key][n])]),
      ],
    };
    return mark;
  });
  explore(svg, marks);
  return (name) => marks.forEach((mark) => {
    mark.hidden = name !== null && mark.name !== name;
    mark.node.classList.toggle("dim", mark.hidden);
    if (mark.whisker) mark.whisker.classList.toggle("dim", mark.hidden);
  });
}
