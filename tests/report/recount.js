// Counts every number of a report again, from the data that the page carries and nothing else.
// Shares no code with the page. Returns {numbers: {key: [number…] or text}, charts: […]}.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const mean = (values) => sum(values) / values.length;
  const known = (values) => values.filter((value) => value !== null && value !== undefined);
  const standardError = (values) => {
    const m = mean(values);
    return Math.sqrt(sum(values.map((v) => (v - m) ** 2)) / (values.length - 1) / values.length);
  };
  const withError = (values) => {
    if (!values.length || known(values).length < values.length) return [];
    return values.length > 1 ? [mean(values), standardError(values)] : [mean(values)];
  };
  const points = (values) => values.map((value) => 100 * value);
  const millionths = (accuracy) => Math.round(accuracy * 1e6);

  // Kendall's τ-b by its definition, pair by pair; 0 where an order says nothing.
  const kendall = (a, b) => {
    let [balance, untiedA, untiedB] = [0, 0, 0];
    for (let i = 0; i < a.length; i++) {
      for (let j = 0; j < i; j++) {
        const [x, y] = [Math.sign(a[i] - a[j]), Math.sign(b[i] - b[j])];
        balance += x * y;
        untiedA += x * x;
        untiedB += y * y;
      }
    }
    return untiedA && untiedB ? balance / Math.sqrt(untiedA * untiedB) : 0;
  };
  const rSquared = (truth, said) => {
    const m = mean(truth);
    return 1 - sum(truth.map((t, i) => (t - said[i]) ** 2)) / sum(truth.map((t) => (t - m) ** 2));
  };
  const error = (truth, said) => mean(truth.map((t, i) => Math.abs(t - said[i])));

  // One row for each seed and test network: {n, truth, said, low, high}.
  const rowsOf = (zoo, seed) => zoo.parts[seed.part].map((n, i) => ({
    n, truth: zoo.networks.accuracy[n], said: seed.predicted[i], low: seed.low[i],
    high: seed.high[i],
  }));
  const testedSeeds = (model) => model.seeds.filter((seed) => seed.part !== undefined);
  const scoresOf = (zoo, seed) => {
    if (seed.part === undefined) return { tau: seed.tau, r2: seed.r2, mae: seed.mae };
    const rows = rowsOf(zoo, seed);
    const [truth, said] = [rows.map((row) => row.truth), rows.map((row) => row.said)];
    return { tau: kendall(truth, said), r2: rSquared(truth, said), mae: error(truth, said) };
  };

  // For each network the mean over the seeds that tested it, by place.
  const meansOf = (zoo, seeds) => {
    const byNetwork = new Map();
    for (const seed of seeds) {
      for (const row of rowsOf(zoo, seed)) {
        byNetwork.set(row.n, [...(byNetwork.get(row.n) || []), row]);
      }
    }
    return [...byNetwork].sort((a, b) => a[0] - b[0]).map(([n, rows]) => {
      const of = (field) => {
        const values = rows.map((row) => row[field]);
        return known(values).length === values.length ? mean(values) : null;
      };
      return { n, truth: rows[0].truth, said: of("said"), low: of("low"), high: of("high") };
    });
  };

  // τ of the mean over the seeds, which all tested the same networks in the same order; as
  // recorded where the page does not carry their predictions.
  const togetherOf = (zoo, model) => {
    if (model.seeds.length < 2) return [];
    const [part, ...others] = model.seeds.map((seed) => seed.part);
    if (part === undefined || others.some((other) => other !== part)) {
      return known([model.recorded.tau_together]);
    }
    const said = zoo.parts[part].map((_, i) => mean(model.seeds.map((seed) => seed.predicted[i])));
    return [kendall(zoo.parts[part].map((n) => zoo.networks.accuracy[n]), said)];
  };

  const hasInterval = (row) => row.low !== null && row.high !== null;
  const isInside = (row) => row.low <= row.truth && row.truth <= row.high;
  const share = (rows, test) => 100 * (rows.filter(test).length / rows.length);

  const groupsOf = (zoo, test) => {
    const optimizer = zoo.networks.settings.optimizer || [];
    const names = new Set(known(test.map((n) => optimizer[n])));
    const first = ["sgd", "sgdm", "adam", "rmsprop"].filter((name) => names.has(name));
    const others = [...names].filter((name) => !first.includes(name)).sort();
    const optimisers = [...first, ...others].map((name) => ({ label: name,
      has: (n) => optimizer[n] === name }));
    const values = test.map((n) => millionths(zoo.networks.accuracy[n]));
    const [low, high] = [Math.min(...values), Math.max(...values)];
    let [start, step] = [0, 20];
    if (high - low <= 500000) {
      start = Math.floor(low / 10000);
      step = Math.max(1, Math.ceil((high - start * 10000) / 50000));
      start = Math.max(0, Math.min(start, 100 - 5 * step));
    }
    const bands = [0, 1, 2, 3, 4].map((i) => {
      const [a, b] = [start + step * i, start + step * (i + 1)];
      return { label: [a, b], has: (n) => {
        const value = millionths(zoo.networks.accuracy[n]);
        return value >= a * 10000 && (value < b * 10000 || i === 4);
      } };
    });
    return optimisers.length ? [optimisers, bands] : [bands];
  };

  const nameOf = (zoo, n) => zoo.networks.name[n];
  const settingOf = (value) => (typeof value === "number" ? [value] : value === null ? [] : value);

  const numbers = {};
  const charts = [];

  data.runs.forEach((run, i) => {
    numbers[`run${i}.parts`] = known(run.chosen);
    if (run.done) numbers[`run${i}.tau`] = withError(run.taus);
  });
  numbers.runs = [data.runs.length];
  numbers.folders = [data.runs.length];
  const compared = new Set(data.zoos.flatMap((zoo) => zoo.models.map((model) => model.name)));
  const done = data.runs.filter((run) => run.done).length;
  if (compared.size) numbers.models = [compared.size];
  else if (done) numbers.variants = [done];

  data.tables.forEach((table, t) => {
    const columns = table.columns.filter((column) => column !== "change");
    for (const cell of table.cells) {
      const key = `t${t}.r${table.rows.indexOf(cell.row)}.c${table.columns.indexOf(cell.column)}`;
      const sizes = table.quantity === "parameters" || cell.column === "parameters";
      if (sizes) numbers[key] = known([cell.parameters]);
      else if (cell.column === "change") {
        const taus = columns.map((column) => table.cells.find((other) => other.row === cell.row
          && other.column === column)).map((other) => (other && other.taus.length
          ? mean(other.taus) : null));
        const base = taus[1] === null ? taus[0] : taus[1];
        const changes = known(taus.slice(2)).map((tau) => tau - base);
        numbers[key] = [changes.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a))];
      } else if (cell.taus.length) numbers[key] = withError(cell.taus);
    }
  });

  const order = data.zoos.map((zoo, z) => [zoo.models.length,
    data.runs.filter((run) => run.zoo === z).length]);
  const largest = order.reduce((best, [models, runs], z) => (models > order[best][0]
    || (models === order[best][0] && runs > order[best][1]) ? z : best), 0);

  data.zoos.forEach((zoo, z) => {
    const put = (key, value) => { numbers[`z${z}.${key}`] = value; };
    const mine = data.runs.filter((run) => run.zoo === z);
    const accuracy = zoo.networks.accuracy;
    const models = zoo.models.map((model) => {
      const seeds = testedSeeds(model);
      return { ...model, tested: seeds, scores: model.seeds.map((seed) => scoresOf(zoo, seed)),
        rows: seeds.flatMap((seed) => rowsOf(zoo, seed)), means: meansOf(zoo, seeds) };
    });
    const test = [...new Set(models.flatMap((model) => model.rows.map((row) => row.n)))]
      .sort((a, b) => a - b);
    const isTest = new Set(test);
    // Networks outside the test parts: of the whole zoo, or where that is not known the validation.
    const others = zoo.everything === null ? zoo.validation.map((n) => accuracy[n])
      : test.reduce((left, n) => {
        left.splice(left.indexOf(accuracy[n]), 1);
        return left;
      }, [...zoo.everything]);
    const said = others.length ? mean(others) : null;

    if (zoo.size !== null) put("facts.size", [zoo.size]);
    put("facts.parts", known(zoo.chosen));
    const seeds = [...new Set(mine.flatMap((run) => run.seeds.map(String)))].sort();
    if (seeds.length) put("facts.seeds", [seeds.length, ...seeds.map(Number)]);
    put("facts.compared", [models.length]);
    put("facts.models", [new Set(mine.map((run) => run.model)).size]);
    put("facts.runs", [mine.length]);

    const over = (model, field) => mean(model.scores.map((score) => score[field]));
    const insideOf = (model) => {
      const rows = model.rows.filter(hasInterval);
      return rows.length ? [share(rows, isInside)] : [];
    };
    const best = models[0];
    if (best && models.length > 1) put("lede.tau", [over(best, "tau")]);
    if (best && z === largest) {
      put("tile.tau", withError(best.scores.map((score) => score.tau)));
      put("tile.mae", [100 * over(best, "mae")]);
      put("tile.inside", insideOf(best));
      put("tile.train", known([zoo.chosen[0]]));
      if (zoo.size !== null) put("tile.size", [zoo.size]);
    }

    models.forEach((model, m) => {
      put(`m${m}.tau`, withError(model.scores.map((score) => score.tau)));
      put(`m${m}.together`, togetherOf(zoo, model));
      put(`m${m}.r2`, [over(model, "r2")]);
      put(`m${m}.mae`, [over(model, "mae")]);
      put(`m${m}.inside`, insideOf(model));
      put(`m${m}.parameters`, known([model.parameters]));
      const rows = model.rows.filter(hasInterval);
      if (!rows.length) return;
      const at = `m${m}.calibration`;
      put(`${at}.aim`, points(known([model.level])));
      put(`${at}.inside`, insideOf(model));
      put(`${at}.below`, [share(rows, (row) => row.truth < row.low)]);
      put(`${at}.above`, [share(rows, (row) => row.truth > row.high)]);
      put(`${at}.width`, [100 * mean(rows.map((row) => row.high - row.low))]);
      put(`${at}.reach`, points(known([model.recorded.radius])));
      put(`${at}.recorded`, points(known([model.recorded.coverage])));
      // Wilson's interval: the shares p from which what was seen is 1.96 standard errors away.
      const n = new Set(rows.map((row) => row.n)).size;
      const p = share(rows, isInside) / 100;
      const [a, b, c] = [n + 1.96 ** 2, 2 * n * p + 1.96 ** 2, n * p ** 2];
      const ends = [-1, 1].map((s) => (b + s * Math.sqrt(b ** 2 - 4 * a * c)) / (2 * a));
      if (model.level !== null && ends[1] < model.level) {
        put(`m${m}.short.aim`, points(known([model.level])));
        put(`m${m}.short.inside`, insideOf(model));
        put(`m${m}.short.networks`, [n]);
        put(`m${m}.short.sampled`, points(ends));
      }
    });
    const counts = models.map((model) => model.seeds.length);
    if (counts.length && Math.max(...counts) > 1) {
      put("seeds", [...new Set([Math.min(...counts), Math.max(...counts)])]);
    }
    const levels = known(models.map((model) => model.level));
    if (levels.length) put("level", [100 * Math.max(...levels)]);
    if (said !== null && test.length) {
      const truth = test.map((n) => accuracy[n]);
      put("mean.said", [100 * said]);
      put("mean.networks", [others.length]);
      put("mean.r2", [rSquared(truth, truth.map(() => said))]);
      put("mean.mae", [error(truth, truth.map(() => said))]);
    }

    const tested = models.filter((model) => model.rows.length);
    const groupings = test.length ? groupsOf(zoo, test) : [];
    const errors = groupings.map((groups) => tested.map((model) => groups.map((group) => {
      const rows = model.rows.filter((row) => group.has(row.n));
      return rows.length ? mean(rows.map((row) => Math.abs(row.said - row.truth))) : null;
    })));
    groupings.forEach((groups, g) => {
      groups.forEach((group, c) => {
        const members = test.filter(group.has);
        for (const kind of ["error", "inside"]) {
          if (kind === "inside" && !tested.some((model) => model.rows.some(hasInterval))) continue;
          put(`${kind}${g}.label${c}`, group.label);
          put(`${kind}${g}.n${c}`, [members.length]);
        }
        errors[g].forEach((row, r) => row[c] !== null && put(`error${g}.r${r}.c${c}`, [row[c]]));
        if (said !== null && members.length) {
          put(`error${g}.r${tested.length}.c${c}`,
            [mean(members.map((n) => Math.abs(accuracy[n] - said)))]);
        }
        tested.filter((model) => model.rows.some(hasInterval)).forEach((model, r) => {
          const rows = model.rows.filter((row) => hasInterval(row) && group.has(row.n));
          if (rows.length) put(`inside${g}.r${r}.c${c}`, [share(rows, isInside)]);
        });
      });
    });

    models.forEach((model, m) => {
      const worst = [...model.means]
        .sort((a, b) => Math.abs(b.said - b.truth) - Math.abs(a.said - a.truth)).slice(0, 8);
      worst.forEach((row, k) => {
        const at = `m${m}.w${k}`;
        put(`${at}.id`, nameOf(zoo, row.n));
        put(`${at}.run`, zoo.networks.run[row.n] === null ? "–" : String(zoo.networks.run[row.n]));
        put(`${at}.true`, [100 * row.truth]);
        put(`${at}.predicted`, [100 * row.said]);
        put(`${at}.interval`, hasInterval(row) ? [100 * row.low, 100 * row.high] : []);
        put(`${at}.error`, [100 * (row.said - row.truth)]);
        for (const [field, values] of Object.entries(zoo.networks.settings)) {
          put(`${at}.${field}`, settingOf(values[row.n]));
        }
      });
      if (m || !worst.length) return;
      const off = model.rows.map((row) => row.said - row.truth);
      put("best.mae", [100 * mean(off.map(Math.abs))]);
      put("best.network", nameOf(zoo, worst[0].n));
      put("best.worst", [100 * Math.abs(worst[0].said - worst[0].truth)]);
      if (Math.abs(mean(off)) >= 5e-4) put("best.bias", [100 * Math.abs(mean(off))]);
      errors.forEach(([row], g) => {
        if (known(row).length < 2) return;
        const c = row.indexOf(Math.max(...known(row)));
        put(`best.band${g}.label`, groupings[g][c].label);
        put(`best.band${g}.error`, [100 * row[c]]);
        put(`best.band${g}.n`, [test.filter(groupings[g][c].has).length]);
      });
    });

    // Charts: for each the numbers of its description, and its marks in keyboard order.
    const chart = (kind, described, marks, more = {}) =>
      charts.push({ kind, zoo: z, described, marks, ...more });
    if (models.length) {
      chart("taus", [models.length], models.map((model) => ({ title: model.name, numbers: [
        ...withError(model.scores.map((score) => score.tau)),
        ...model.seeds.flatMap((seed, i) => [Number(seed.seed), model.scores[i].tau,
          ...known([seed.tau_low, seed.tau_high])])] })));
    }
    const all = zoo.everything === null ? accuracy : zoo.everything;
    if (all.length) {
      const bins = Array(20).fill(0);
      for (const a of all) bins[Math.min(19, Math.floor((millionths(a) * 20) / 1e6))] += 1;
      put("histogram", [all.length]);
      chart("histogram", [all.length], bins.map((count, i) => ({ title: `${5 * i} to ${5 * i + 5} %`,
        numbers: [count, (100 * count) / all.length] })), { bars: bins.filter((n) => n) });
    }
    const withIntervals = models.filter((model) => model.rows.some(hasInterval));
    if (withIntervals.length) {
      chart("calibration", [withIntervals.length], withIntervals.map((model) => ({ title: model.name, numbers: [
        ...insideOf(model), ...points(known([model.level])),
        ...model.tested.flatMap((seed) => [Number(seed.seed),
          share(rowsOf(zoo, seed).filter(hasInterval), isInside)])] })));
    }
    if (tested.length) {
      const most = Math.max(...tested.map((model) => model.means.length));
      if (most > data.mostPoints) {
        put("drawn.total", [most]);
        put("drawn.shown", [data.mostPoints]);
      }
      const several = (model) => model.tested.length > 1;
      chart("scatter", null, null, { panels: tested.map((model) => {
        const total = model.means.length;
        const kept = total <= data.mostPoints ? model.means : Array.from(
          { length: data.mostPoints },
          (_, i) => model.means[Math.floor((i * (total - 1)) / (data.mostPoints - 1))]);
        const whose = several(model) ? model.tested.length : Number(model.tested[0].seed);
        return { name: model.name, tau: over(model, "tau"), described: [kept.length, whose],
          marks: [...kept].sort((a, b) => a.truth - b.truth).map((row) => ({
            title: nameOf(zoo, row.n), numbers: [100 * row.truth,
              whose, 100 * row.said,
              ...(hasInterval(row) ? [100 * row.low, 100 * row.high] : []),
              // Of a mixed zoo the name of a run has that of its size in front.
              ...(zoo.networks.run[row.n] === null ? []
                : [Number(String(zoo.networks.run[row.n]).split("/").pop())]),
              ...Object.entries(zoo.networks.settings).filter(([field]) => field !== "optimizer")
                .map(([, values]) => values[row.n])].filter((value) => value !== null) })) };
      }) });
    }
    if (zoo.sizes.length) {
      const sizes = new Set(zoo.sizes.flatMap((line) => line.points.map((point) => point.train)));
      chart("sizes", [zoo.sizes.length, sizes.size], zoo.sizes.flatMap((line) => line.points.map((point) => ({
        title: line.name, numbers: [point.train, ...withError(point.taus)] }))));
    }
    for (const field of zoo.curves.length ? ["val_tau", "loss"] : []) {
      chart(`curve-${field}`, [zoo.curves.length], zoo.curves.flatMap((line) => {
        const epochs = [...new Set(line.seeds.flatMap((seed) => seed.epoch))].sort((a, b) => a - b);
        const at = (seed, epoch) => seed[field][seed.epoch.indexOf(epoch)];
        const means = epochs.map((epoch) => [epoch, known(line.seeds.map((s) => at(s, epoch)))])
          .filter(([, values]) => values.length)
          .map(([epoch, values]) => ({ title: line.name, numbers: [epoch, mean(values)] }));
        if (field === "loss") return means;
        return [...means, ...line.seeds.filter((seed) => known([at(seed, seed.kept)]).length)
          .map((seed) => ({ title: line.name,
            numbers: [Number(seed.seed), seed.kept, at(seed, seed.kept)] }))];
      }));
    }
  });
  return { numbers, charts };
})();
