// The other charts: τ and intervals of each model, accuracies, τ by networks, training curves.
// One row for each model: its value, its error where there is one, and a small mark for each seed.
// rows: [{name, color, value, error, seeds: [number], pairs()}]; rule: a value to hold them against.
function dots(canvas, { heading, rows, format, rule = null }) {
  canvas.textContent = "";
  make("div", { class: "title" }, canvas, heading);
  const width = Math.max(240, canvas.clientWidth);
  const wide = width > 340;
  const [band, left] = wide ? [36, 156] : [46, 8];
  const height = rows.length * band + 40;
  const ends = rows.flatMap((row) => [row.value - (row.error || 0), row.value + (row.error || 0),
    ...row.seeds, ...(rule === null ? [] : [rule])]);
  const pad = Math.max(0.01, (Math.max(...ends) - Math.min(...ends)) * 0.08);
  const [from, to] = [Math.min(...ends) - pad, Math.max(...ends) + pad];
  const x = linear(from, to, left, width - 14);
  const svg = frame(canvas, {
    width, height, margin: [12, 14, 26, left],
    x: { scale: x, ticks: ticks(from, to, wide ? 5 : 4), format },
    y: { scale: (v) => v, ticks: [] },
    title: `${heading} of each model`, description: `${rows.length} models, best τ first.`,
  });
  if (rule !== null) {
    draw("line", { class: "always", x1: x(rule), x2: x(rule), y1: 12, y2: height - 26 }, svg);
  }
  const marks = rows.map((row, index) => {
    const y = 12 + band * (index + (wide ? 0.5 : 0.7));
    const color = modelColor(row.color);
    draw("text", wide ? { class: "name", x: left - 12, y: y + 4, "text-anchor": "end" }
      : { class: "name", x: left, y: y - 12 }, svg, row.name);
    for (const value of row.seeds) {
      draw("circle", { class: "seed", cx: x(value), cy: y, r: 2.5, fill: color,
        "fill-opacity": 0.4 }, svg);
    }
    if (row.error !== null) {
      draw("line", { x1: x(row.value - row.error), x2: x(row.value + row.error), y1: y, y2: y,
        stroke: color, "stroke-width": 2.5 }, svg);
    }
    draw("circle", { class: "mean", cx: x(row.value), cy: y, r: 5.5, fill: color }, svg);
    return { x: x(row.value), y, r: 9, title: row.name, pairs: row.pairs };
  });
  explore(svg, marks, { reach: 200 });
}

function taus(canvas, zoo) {
  const rows = zoo.models.filter((model) => model.tau !== null).map((model) => {
    const seeds = model.seeds.filter((seed) => seed.tau !== null);
    return {
      name: model.name, color: model.color, value: model.tau, error: model.error,
      seeds: seeds.map((seed) => seed.tau),
      pairs: () => [
        ["Mean τ", decimals(model.tau)
          + (model.error === null ? "" : ` ± ${decimals(model.error)}`)],
        ...seeds.map((seed) => [`Seed ${seed.seed}`, decimals(seed.tau) + (seed.tau_low === null
          ? "" : ` (${decimals(seed.tau_low)} to ${decimals(seed.tau_high)})`)]),
      ],
    };
  });
  dots(canvas, { heading: "Kendall’s τ", rows, format: String });
}

function calibration(canvas, zoo) {
  const found = insideShares(zoo);
  const levels = found.map((model) => model.level).filter((level) => level !== null);
  const rows = found.map((model) => ({
    name: model.name, color: model.color, value: model.share, error: null,
    seeds: model.seeds.map((seed) => seed.share),
    pairs: () => [["In interval", share(model.share)], ["Aim", share(model.level)],
      ...model.seeds.map((seed) => [`Seed ${seed.seed}`, share(seed.share)])],
  }));
  dots(canvas, { heading: "Test networks inside their interval", rows,
    format: (v) => `${Number((100 * v).toFixed(1))} %`,
    rule: levels.length ? Math.max(...levels) : null });
}

function histogram(canvas, zoo) {
  const state = canvas.state || (canvas.state = { log: false });
  canvas.textContent = "";
  const bar = make("div", { class: "bar-of-controls" }, canvas);
  make("span", { class: "title" }, bar, "Accuracies of the networks");
  const button = make("button", { type: "button", "aria-pressed": String(state.log) }, bar,
    "log scale");
  button.addEventListener("click", () => {
    state.log = !state.log;
    histogram(canvas, zoo);
    canvas.querySelector("button").focus();
  });
  const { counts } = zoo.histogram;
  const width = Math.max(240, canvas.clientWidth);
  const [height, margin] = [320, [26, 8, 42, 38]];
  const top = Math.max(...counts);
  const base = height - margin[2];
  const floor = state.log ? 0.7 : 0;
  const limit = state.log ? Math.max(10, top * 1.3) : top * 1.08;
  const y = state.log ? logarithmic(floor, limit, base, margin[0])
    : linear(0, limit, base, margin[0]);
  const powers = [1, 10, 100, 1000, 10000, 100000].filter((v) => v <= limit);
  const x = linear(0, 1, margin[3], width - margin[1]);
  const svg = frame(canvas, {
    width, height, margin,
    x: { scale: x, ticks: ticks(0, 1, 5), format: percent, label: "true accuracy (%)" },
    y: { scale: y, ticks: state.log ? powers : ticks(0, limit, 5).filter(Number.isInteger),
      format: String, label: "networks" },
    title: "Histogram of accuracies", description: `${zoo.histogram.total} networks.`,
  });
  const step = 1 / counts.length;
  const marks = counts.map((count, index) => {
    const [start, end] = [x(index * step), x((index + 1) * step)];
    const at = count ? y(count) : base;
    const box = { x: start + 0.75, width: Math.max(1, end - start - 1.5), y: at,
      height: Math.max(0, base - at), rx: 1.5 };
    if (count) draw("rect", { class: "bar", ...box }, svg);
    return {
      x: (start + end) / 2, y: at, r: 4,
      title: `${percent(index * step)} to ${percent((index + 1) * step)} %`,
      pairs: () => [["Networks", String(count)], ["Share", share(count / zoo.histogram.total)]],
    };
  });
  explore(svg, marks, { column: true, reach: 40 });
}

// Lines of several series with one mark a point: [{name, color, lines, marks}].
function lines(canvas, { heading, series, x, y, height, description }) {
  canvas.textContent = "";
  make("div", { class: "title" }, canvas, heading);
  const width = Math.max(240, canvas.clientWidth);
  const margin = [30, 12, 42, 44];
  x.scale = (x.log ? logarithmic : linear)(x.from, x.to, margin[3] + 6, width - margin[1] - 6);
  y.scale = linear(y.from, y.to, height - margin[2], margin[0]);
  if (x.thin) x.ticks = x.thin(x.ticks, x.scale);
  const svg = frame(canvas, { width, height, margin, x, y, title: heading, description });
  const groups = [];
  const marks = [];
  series.forEach((entry, index) => {
    const group = draw("g", {}, svg);
    groups.push(group);
    for (const line of entry.lines) {
      const path = line.points.filter(([, value]) => value !== null)
        .map(([a, b]) => `${x.scale(a).toFixed(1)},${y.scale(b).toFixed(1)}`).join(" ");
      draw("polyline", { class: line.thin ? "line thin" : "line", points: path,
        stroke: modelColor(entry.color) }, group);
    }
    for (const mark of entry.marks) {
      const [px, py] = [x.scale(mark.at), y.scale(mark.value)];
      if (mark.error) {
        draw("line", { x1: px, x2: px, y1: y.scale(mark.value - mark.error),
          y2: y.scale(mark.value + mark.error), stroke: modelColor(entry.color),
          "stroke-width": 1.5 }, group);
      }
      if (mark.dot) {
        draw("circle", { class: "dot", cx: px, cy: py, r: 4, fill: modelColor(entry.color) }, group);
      }
      marks.push({ x: px, y: py, index, title: entry.name, pairs: () => mark.pairs });
    }
  });
  explore(svg, marks, { reach: 40 });
  if (series.length > 1) {
    key(canvas, series.map((entry) => ({ name: entry.name, color: modelColor(entry.color) })),
      (only) => {
        groups.forEach((group, i) => group.classList.toggle("dim", only !== null && i !== only));
        marks.forEach((mark) => { mark.hidden = only !== null && mark.index !== only; });
      });
  }
}

function range(values, least) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const pad = Math.max(least, (high - low) * 0.06);
  return [low - pad, high + pad];
}

function sizes(canvas, zoo) {
  const series = zoo.sizes.map((entry) => ({
    ...entry,
    lines: [{ points: entry.points.map((point) => [point.train, point.tau]) }],
    marks: entry.points.map((point) => ({
      at: point.train, value: point.tau, error: point.error, dot: true,
      pairs: [["Training networks", point.train.toLocaleString("en")],
        ["τ", decimals(point.tau) + (point.error === null ? "" : ` ± ${decimals(point.error)}`)]],
    })),
  }));
  const points = zoo.sizes.flatMap((entry) => entry.points);
  const counts = [...new Set(points.map((point) => point.train))].sort((a, b) => a - b);
  const [from, to] = range(points.flatMap((p) => [p.tau - (p.error || 0), p.tau + (p.error || 0)]),
    0.01);
  // From the right, so that the largest number is always named.
  const apart = (values, scale) => values.reduceRight((kept, value) => {
    if (!kept.length || scale(kept[0]) - scale(value) > 34) kept.unshift(value);
    return kept;
  }, []);
  lines(canvas, {
    heading: "τ by number of training networks", series, height: 290,
    x: { log: true, from: counts[0], to: counts[counts.length - 1], ticks: counts, thin: apart,
      format: (v) => v.toLocaleString("en"), label: "training networks (log scale)" },
    y: { from, to, ticks: ticks(from, to, 5), format: String, label: "Kendall’s τ" },
    description: `${series.length} models, ${counts.length} sizes.`,
  });
}

// The epoch of each seed whose predictor was kept: that of the best validation τ.
function keptEpochs(entry) {
  return entry.seeds.flatMap((seed) => {
    const value = seed.val_tau[seed.epoch.indexOf(seed.kept)];
    if (value === undefined || value === null) return [];
    return [{ at: seed.kept, value, dot: true, pairs: [[`Kept of seed ${seed.seed}`,
      `epoch ${seed.kept}`], ["validation τ", decimals(value)]] }];
  });
}

function curve(field, heading, label) {
  return (canvas, zoo) => {
    const series = zoo.curves.map((entry) => {
      const sums = new Map();
      for (const seed of entry.seeds) {
        seed.epoch.forEach((epoch, i) => {
          if (seed[field][i] === null) return;
          const [total, number] = sums.get(epoch) || [0, 0];
          sums.set(epoch, [total + seed[field][i], number + 1]);
        });
      }
      const means = [...sums].sort((a, b) => a[0] - b[0]).map(([e, [sum, n]]) => [e, sum / n]);
      const several = entry.seeds.length > 1;
      return {
        ...entry,
        lines: [
          ...(several ? entry.seeds.map((seed) => ({ thin: true,
            points: seed.epoch.map((epoch, i) => [epoch, seed[field][i]]) })) : []),
          { points: means },
        ],
        marks: [
          ...means.map(([epoch, value]) => ({ at: epoch, value,
            pairs: [["Epoch", String(epoch)], [label, decimals(value)]] })),
          ...(field === "val_tau" ? keptEpochs(entry) : []),
        ],
      };
    }).filter((entry) => entry.marks.length);
    if (!series.length) {
      canvas.closest("figure").hidden = true;
      return;
    }
    const points = series.flatMap((e) => e.lines.flatMap((line) => line.points))
      .filter((point) => point[1] !== null);
    const [from, to] = range(points.map((point) => point[1]), 0.005);
    const last = Math.max(...points.map((point) => point[0]));
    const first = Math.min(...points.map((point) => point[0]));
    lines(canvas, {
      heading, series, height: 290,
      x: { from: first, to: last, ticks: ticks(first, last, 5).filter(Number.isInteger),
        format: String, label: "epoch" },
      y: { from, to, ticks: ticks(from, to, 5), format: String, label },
      description: `${series.length} models.`,
    });
  };
}
