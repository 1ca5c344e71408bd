// Draws every chart, again when its width changes, and lets a reader choose a table.
const zoos = JSON.parse(document.getElementById("data").textContent).zoos;
const CHARTS = {
  taus, scatter, histogram, sizes,
  "curve-val_tau": curve("val_tau", "Validation τ while training", "validation τ"),
  "curve-loss": curve("loss", "Loss while training", "loss"),
};
const resized = new ResizeObserver((entries) => {
  requestAnimationFrame(() => entries.forEach(({ target }) => {
    if (target.clientWidth && target.clientWidth !== target.drawn) paint(target);
  }));
});

function paint(canvas) {
  const { chart, zoo } = canvas.parentNode.dataset;
  canvas.drawn = canvas.clientWidth;
  CHARTS[chart](canvas, zoos[Number(zoo)]);
}

document.querySelectorAll("figure.chart > .canvas").forEach((canvas) => {
  paint(canvas);
  resized.observe(canvas);
});
document.querySelectorAll(".chooser").forEach((chooser) => {
  chooser.querySelector("select").addEventListener("change", (event) => {
    chooser.querySelectorAll(".choice").forEach((choice) => {
      choice.hidden = choice.dataset.choice !== event.target.value;
    });
  });
});
addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
