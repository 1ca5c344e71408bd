// Draws every chart, again when its width changes, and lets a reader choose a table.
const data = JSON.parse(document.getElementById("data").textContent);
const { zoos, mostPoints, headings } = data;
const CHARTS = {
  taus, calibration, scatter, histogram, sizes,
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
// On a narrow screen the sections fold into one button, which opens all of them at once.
const sections = document.querySelector("nav");
const fold = sections.querySelector(".fold");
function unfold(open) {
  sections.classList.toggle("open", open);
  fold.setAttribute("aria-expanded", String(open));
}
sections.classList.add("folds");
fold.addEventListener("click", () => unfold(!sections.classList.contains("open")));
sections.addEventListener("click", (event) => {
  if (event.target.closest("a")) unfold(false);
});
sections.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !sections.classList.contains("open")) return;
  unfold(false);
  fold.focus();
});
addEventListener("scroll", hideTip, { passive: true });
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
});
