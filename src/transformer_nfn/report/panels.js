// What a panel of the scatter shows: one seed's predictions, or for each network their mean.
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function testedSeeds(model) {
  return model.seeds.filter((seed) => seed.part !== undefined);
}

function meanOfSeeds(zoo, seeds) {
  const size = zoo.networks.accuracy.length;
  const times = new Int32Array(size);
  const sums = {};
  for (const field of ["predicted", "low", "high"]) sums[field] = new Float64Array(size);
  for (const seed of seeds) {
    zoo.parts[seed.part].forEach((network, i) => {
      times[network] += 1;
      for (const field in sums) {
        sums[field][network] += seed[field][i] === null ? NaN : seed[field][i];
      }
    });
  }
  const network = [...times.keys()].filter((n) => times[n]);
  const means = (field) => network.map((n) => {
    const value = sums[field][n] / times[n];
    return Number.isNaN(value) ? null : value;
  });
  return { network, predicted: means("predicted"), low: means("low"), high: means("high") };
}

// Evenly spread over the networks, so that a thinned chart looks like the whole.
function thin(panel, most) {
  const total = panel.network.length;
  if (total <= most) return { ...panel, total };
  const kept = Array.from({ length: most }, (_, i) => Math.floor((i * (total - 1)) / (most - 1)));
  const pick = (values) => kept.map((i) => values[i]);
  return { ...panel, total, network: pick(panel.network), predicted: pick(panel.predicted),
    low: pick(panel.low), high: pick(panel.high) };
}

// wanted: the name of a seed, or null for the mean over all.
function scatterPanels(zoo, wanted, most) {
  const found = [];
  for (const model of zoo.models) {
    const seeds = testedSeeds(model)
      .filter((seed) => wanted === null || String(seed.seed) === wanted);
    if (!seeds.length) continue;
    const values = wanted === null ? meanOfSeeds(zoo, seeds)
      : { ...seeds[0], network: zoo.parts[seeds[0].part] };
    found.push({ name: model.name, color: model.color, ...thin(values, most),
      tau: wanted === null ? model.tau : seeds[0].tau, seeds: seeds.length,
      whose: seeds.length > 1 ? `mean of ${seeds.length} seeds` : `seed ${seeds[0].seed}` });
  }
  return found;
}

function seedNames(zoo) {
  return [...new Set(zoo.models.flatMap((model) =>
    testedSeeds(model).map((seed) => String(seed.seed))))];
}

// The accuracy that looks at no weights: the mean outside the test parts, as the table says it.
function meanAccuracy(zoo) {
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  const accuracy = zoo.networks.accuracy;
  if (zoo.everything === null) {
    return zoo.validation.length ? mean(zoo.validation.map((n) => accuracy[n])) : null;
  }
  const test = [...new Set(zoo.parts.flat())];
  const others = zoo.everything.length - test.length;
  return others > 0 ? (total(zoo.everything) - total(test.map((n) => accuracy[n]))) / others : null;
}

// Shares of test networks inside their interval, over all seeds and of each.
function insideShares(zoo) {
  return zoo.models.map((model) => {
    const seeds = testedSeeds(model).map((seed) => {
      const inside = zoo.parts[seed.part].map((n, i) => {
        if (seed.low[i] === null || seed.high[i] === null) return null;
        const accuracy = zoo.networks.accuracy[n];
        return Number(seed.low[i] <= accuracy && accuracy <= seed.high[i]);
      }).filter((value) => value !== null);
      return { seed: seed.seed, inside };
    }).filter((seed) => seed.inside.length);
    return { name: model.name, color: model.color, level: model.level,
      seeds: seeds.map((seed) => ({ seed: seed.seed, share: mean(seed.inside) })),
      share: seeds.length ? mean(seeds.flatMap((seed) => seed.inside)) : null };
  }).filter((model) => model.share !== null);
}
