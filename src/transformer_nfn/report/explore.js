// How a reader asks a chart about one of its marks: by pointer, by touch, by keyboard.
const tip = document.getElementById("tip");
const said = document.getElementById("said");

function showTip(title, pairs, x, y) {
  tip.textContent = "";
  make("b", {}, tip, title);
  const list = make("dl", {}, tip);
  for (const [name, value] of pairs) {
    make("dt", {}, list, name);
    make("dd", {}, list, value);
  }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const page = document.documentElement;
  let left = x + 14;
  let top = y + 14;
  if (left + box.width > page.clientWidth - 8) left = x - box.width - 14;
  if (left < 8) left = Math.max(8, Math.min(x - box.width / 2, page.clientWidth - box.width - 8));
  if (top + box.height > window.innerHeight - 8) top = y - box.height - 14;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(8, top))}px)`;
}

function hideTip() {
  tip.hidden = true;
}

// marks: [{x, y, r?, title, pairs() , halo?(svg)}] in the chart's own units, in keyboard order.
function explore(svg, marks, { reach = 26, column = false } = {}) {
  let current = -1;
  const halo = draw("circle", { class: "halo", r: 6, visibility: "hidden" }, svg);
  const extra = draw("g", {}, svg);

  function leave() {
    current = -1;
    halo.setAttribute("visibility", "hidden");
    extra.textContent = "";
    hideTip();
  }

  function go(index, aloud) {
    if (index === current) return;
    current = index;
    const mark = marks[index];
    const box = svg.getBoundingClientRect();
    const unit = box.width / svg.viewBox.baseVal.width;
    halo.setAttribute("cx", mark.x);
    halo.setAttribute("cy", mark.y);
    halo.setAttribute("r", mark.r || 6);
    halo.setAttribute("visibility", mark.halo ? "hidden" : "visible");
    extra.textContent = "";
    if (mark.halo) mark.halo(extra);
    const pairs = mark.pairs();
    showTip(mark.title, pairs, box.left + mark.x * unit, box.top + mark.y * unit);
    if (aloud) {
      said.textContent = `${mark.title}: ${pairs.map((pair) => pair.join(" ")).join(", ")}`;
    }
  }

  function nearest(event) {
    const box = svg.getBoundingClientRect();
    const unit = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * unit;
    const y = (event.clientY - box.top) * unit;
    let best = -1;
    let least = reach * reach;
    marks.forEach((mark, index) => {
      const far = (mark.x - x) ** 2 + (column ? 0 : (mark.y - y) ** 2);
      if (!mark.hidden && far < least) {
        least = far;
        best = index;
      }
    });
    return best;
  }

  const point = (event) => {
    const index = nearest(event);
    if (index < 0) leave();
    else go(index, false);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1,
      PageDown: 10, PageUp: -10 };
    const shown = marks.map((mark, index) => index).filter((index) => !marks[index].hidden);
    if (!shown.length) return;
    const here = shown.indexOf(current);
    if (event.key in steps) {
      const next = here < 0 ? 0 : Math.max(0, Math.min(shown.length - 1, here + steps[event.key]));
      go(shown[next], true);
    } else if (event.key === "Home") go(shown[0], true);
    else if (event.key === "End") go(shown[shown.length - 1], true);
    else if (event.key === "Escape") leave();
    else return;
    event.preventDefault();
  });
}
