"use strict";
// Sections come to life by the behaviour that data-script names; each is given its element and
// its data. Without scripts, and in print, all that matters is there as well.
const behaviours = {};
function behaviour(name, start) {
  behaviours[name] = start;
}

// Cells of a grid that lies over an element: pointer, focus and arrow keys choose one, click,
// Enter and Space pick it. `move` and `pick` get row and column.
function cells(element, rows, columns, { move, pick = () => {} }) {
  let row = 0, column = 0;
  element.tabIndex = 0;
  const go = (r, c) => {
    row = Math.min(rows - 1, Math.max(0, r));
    column = Math.min(columns - 1, Math.max(0, c));
    move(row, column);
  };
  const at = (event) => {
    const box = element.getBoundingClientRect();
    go(Math.floor((event.clientY - box.top) / box.height * rows),
       Math.floor((event.clientX - box.left) / box.width * columns));
  };
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  element.addEventListener("pointermove", at);
  element.addEventListener("focus", () => go(row, column));
  element.addEventListener("click", (event) => { at(event); pick(row, column); });
  element.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (step) go(row + step[0], column + step[1]);
    else if (event.key === "Enter" || event.key === " ") pick(row, column);
    else return;
    event.preventDefault();
  });
}

document.addEventListener("DOMContentLoaded", () => {
  for (const section of document.querySelectorAll("section[data-script]")) {
    const start = behaviours[section.dataset.script];
    const data = section.querySelector("script[type='application/json']");
    if (start && data) start(section, JSON.parse(data.textContent));
  }
});
