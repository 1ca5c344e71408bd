// Sorts and filters tables, lets a reader choose one, folds the sections on a narrow screen.
"use strict";
function make(name, attributes, parent, text = "") {
  const node = document.createElement(name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  node.textContent = text;
  parent.appendChild(node);
  return node;
}

// What a cell is sorted by: its first number, or its text.
function valueOf(row, column) {
  const text = row.cells[column].textContent;
  const found = text.replaceAll(",", "").replaceAll("\u2212", "-").match(/^[^\d-]*(-?\d+(\.\d+)?)/);
  return found && column ? Number(found[1]) : text;
}

function sortBy(table, heading) {
  const column = heading.cellIndex;
  const up = heading.getAttribute("aria-sort") === "descending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [row.cells.length > column ? valueOf(row, column) : "", row]);
  rows.sort(([a], [b]) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    const order = typeof a === "number" ? a - b : a.localeCompare(b);
    return up ? order : -order;
  });
  body.append(...rows.map(([, row]) => row));
}

document.querySelectorAll("table.sorts").forEach((table) => {
  for (const heading of table.tHead.rows[0].cells) {
    heading.tabIndex = 0;
    heading.addEventListener("click", () => sortBy(table, heading));
    heading.addEventListener("keydown", (event) => {
      if (event.key === "Enter") sortBy(table, heading);
    });
  }
});
document.querySelectorAll("table.filters").forEach((table) => {
  const box = make("p", { class: "filter" }, document.createElement("div"));
  const input = make("input", { type: "search", placeholder: "only rows with …",
    "aria-label": "Only rows with" }, box);
  table.closest(".scroll").before(box);
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of table.tBodies[0].rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
    }
  });
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
