"use strict";
// The page shows everything essential without scripts, and in print.

// Keys in a grid: arrows move, Enter and Space select.
const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
function keys(element, go, pick = () => {}) {
  element.addEventListener("keydown", (event) => {
    if (event.key in STEPS) go(...STEPS[event.key]);
    else if (event.key === "Enter" || event.key === " ") pick();
    else return;
    event.preventDefault();
  });
}

// Shows the text of an edge or node of a drawing, or of a head's thumbnail, under the pointer or
// selected by the arrow keys, in the order of rank.
function things(box) {
  const within = box.querySelector(".choose"), said = box.querySelector(".said");
  const all = [...within.querySelectorAll("[data-rank]")].sort((a, b) => a.dataset.rank - b.dataset.rank);
  const across = Number(box.dataset.across);
  // the text is beside the drawing, not in it
  box.querySelectorAll(".says li").forEach((says, rank) => { all[rank].dataset.says = says.textContent; });
  let chosen = null;
  const choose = (thing) => {
    if (!thing) return;
    chosen?.classList.remove("chosen");
    thing.classList.add("chosen");
    said.textContent = thing.dataset.says;
    chosen = thing;
  };
  const at = (rank) => all.find((thing) => Number(thing.dataset.rank) === rank);
  within.addEventListener("pointerover", (event) => choose(event.target.closest("[data-rank]")));
  within.addEventListener("focus", () => choose(chosen ?? all[0]));
  keys(within, (down, right) => {
    const rank = Number(chosen.dataset.rank), next = rank + across * down + right;
    const isInRow = across === 1 || Math.floor(next / across) === Math.floor(rank / across);
    if (down || isInRow) choose(at(next));
  });
}

// Marks the same place of the grid in all frames of a section: a patch of an image, or a region of
// a captioned image.
function maps(section, data) {
  const { rows, columns } = data;
  const said = section.querySelector(".said");
  const frames = [...section.querySelectorAll(".frame")], main = frames[0];
  const picture = main.querySelector("img");
  const sharpen = () => main.classList.toggle("small", picture.naturalWidth < 100);
  picture.complete ? sharpen() : picture.addEventListener("load", sharpen);
  if (!rows) return;

  const added = (frame, name) => {
    const element = document.createElement("span");
    element.className = name;
    element.hidden = true;
    return frame.appendChild(element);
  };
  const lay = (element, place) => {
    element.style.left = `${100 * (place % columns) / columns}%`;
    element.style.top = `${100 * Math.floor(place / columns) / rows}%`;
    element.style.width = `${100 / columns}%`;
    element.style.height = `${100 / rows}%`;
    element.hidden = false;
  };
  const gone = added(main, "gone");
  const cursors = frames.map((frame) => added(frame, "cursor"));
  const { start, say } = data.words ? wordsAt(data) : patchesAt(section, data);
  let chosen = start, picked = null;
  const go = (row, column) => {
    const inside = (at, most) => Math.min(most - 1, Math.max(0, at));
    chosen = inside(row, rows) * columns + inside(column, columns);
    for (const cursor of cursors) lay(cursor, chosen);
    said.textContent = say(chosen, picked);
  };
  const pick = () => {
    if (data.words) return;
    picked = picked === chosen ? null : chosen;
    lay(gone, chosen);
    gone.hidden = picked === null;
    said.textContent = say(chosen, picked);
  };
  for (const frame of frames) {
    frame.classList.add("live");
    const under = (event) => {
      const box = frame.getBoundingClientRect();
      go(Math.floor((event.clientY - box.top) / box.height * rows),
         Math.floor((event.clientX - box.left) / box.width * columns));
    };
    frame.addEventListener("pointermove", under);
    frame.addEventListener("click", (event) => { under(event); pick(); });
  }
  const step = (down, right) => go(Math.floor(chosen / columns) + down, chosen % columns + right);
  main.tabIndex = 0;
  main.setAttribute("role", "application");
  main.setAttribute("aria-label", "The image: arrow keys choose a place, Enter leaves a patch out");
  main.addEventListener("focus", () => step(0, 0));
  keys(main, step, pick);
  if (data.looks) {
    // initial selection, shown before the user points at a place, and in print
    say(chosen, null);
    lay(cursors.at(-1), chosen);
    section.querySelector("select").addEventListener("change", () => step(0, 0));
  }
}

// Shows what a patch looks at in the chosen layer, and p without the removed patch.
function patchesAt(section, { columns, rows, target, kind, whole, without, looks }) {
  const figure = section.querySelector(".looks");
  const choice = figure?.querySelector("select");
  const pen = figure?.querySelector("canvas").getContext("2d");
  const sheets = (looks ?? []).map(({ sheet }) => Object.assign(new Image(), { src: sheet }));
  const name = (place) => `row ${Math.floor(place / columns)}, column ${place % columns}`;
  let last = null;
  // the tile of the patch in the layer's sheet of tiles
  const draw = async (place) => {
    const sheet = sheets[choice.value];
    last = place;
    await sheet.decode();
    if (place !== last) return;
    const left = place % columns * columns, top = Math.floor(place / columns) * rows;
    pen.drawImage(sheet, left, top, columns, rows, 0, 0, columns, rows);
  };
  const look = (place) => {
    if (!looks) return "";
    const { layer, heads, most, times, prefix } = looks[choice.value];
    draw(place);
    figure.querySelector(".which").textContent =
      `The patch at ${name(place)} in ${layer}, the mean over ${heads} heads.`;
    const tokens = prefix.length ? `; class and register tokens get ${prefix[place]} %` : "";
    return `The patch at ${name(place)} looks most at ${name(most[place])}, `
      + `${times[place]} times uniform attention, in ${layer}${tokens}. `;
  };
  const lost = (place) => {
    const after = without[place];
    const digits = after.toFixed(2) === whole.toFixed(2) ? 4 : 2;
    const [from, to] = [whole.toFixed(digits), after.toFixed(digits)];
    const way = from === to ? "goes" : after < whole ? "falls" : "rises";
    return `Without the patch at ${name(place)} (${kind}), p(${target}) ${way} from ${from} to ${to}.`;
  };
  const start = without.indexOf(Math.min(...without));
  return { start, say: (place, picked) => look(place) + (picked === null ? "" : lost(picked)) };
}

// Shows the words whose maps are larger at a region than on average, and their p without it.
function wordsAt({ columns, words }) {
  const number = (value) => Number(value.toPrecision(2)).toString().replace("-", "−");
  const mean = (values) => values.reduce((sum, value) => sum + Math.abs(value), 0) / values.length;
  const say = (place) => {
    const looked = words.map((word) => ({ ...word, here: word.values[place] }))
      .filter(({ values, here }) => here > mean(values)).sort((a, b) => b.here - a.here);
    const most = looked.slice(0, 3).map(({ word, here, p, without }) => `“${word}” ${number(here)}`
      + (without ? ` (p ${p.toFixed(2)}, without the region ${without[place].toFixed(2)})` : ""));
    return `Row ${Math.floor(place / columns)}, column ${place % columns}: `
      + (most.length ? `looked at by ${looked.length} of ${words.length} words more than the rest of the image; most by ${most.join(", ")}.`
        : "no word looked at it more than at the rest of the image.");
  };
  return { start: 0, say };
}

for (const box of document.querySelectorAll(".things")) things(box);
for (const section of document.querySelectorAll("section[data-kind='maps']")) {
  maps(section, JSON.parse(section.querySelector("script").textContent));
}
