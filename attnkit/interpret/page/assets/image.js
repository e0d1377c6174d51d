behaviour("image", (section, data) => {
  const main = section.querySelector(".frame.main");
  const picture = main.querySelector("img");
  const sharpen = () => main.classList.toggle("small", picture.naturalWidth < 100);
  picture.complete ? sharpen() : picture.addEventListener("load", sharpen);
  if (data.rows) patches(section, data, main);
  if (data.heads) heads(section.querySelector(".heads"), data.heads);
});

function patches(section, { rows, columns, target, kind, whole, without, looks }, main) {
  const said = section.querySelector(".said");
  const frames = [...section.querySelectorAll(".figures .frame")];
  const name = (place) => `row ${Math.floor(place / columns)}, column ${place % columns}`;
  const lay = (element, place) => {
    element.style.left = `${100 * (place % columns) / columns}%`;
    element.style.top = `${100 * Math.floor(place / columns) / rows}%`;
    element.style.width = `${100 / columns}%`;
    element.style.height = `${100 / rows}%`;
    element.hidden = false;
  };
  const added = (frame, kind) => {
    const element = document.createElement("span");
    element.className = kind;
    element.hidden = true;
    return frame.appendChild(element);
  };
  const gone = added(main, "gone");
  const cursors = frames.map((frame) => added(frame, "cursor"));
  // Something to see before anyone points, and in print: the patch whose loss is largest.
  let chosen = without.indexOf(Math.min(...without));
  let picked = null;

  const figure = section.querySelector(".looks");
  const choice = figure?.querySelector("select");
  const pen = figure?.querySelector("canvas").getContext("2d");
  const sheets = (looks ?? []).map(({ sheet }) => {
    const image = new Image();
    image.src = sheet;
    return image;
  });
  // What a patch looks at is a tile of the layer's sheet, at the patch's own place.
  const draw = async () => {
    const sheet = sheets[choice.value];
    await sheet.decode();
    const left = chosen % columns * columns, top = Math.floor(chosen / columns) * rows;
    pen.drawImage(sheet, left, top, columns, rows, 0, 0, columns, rows);
  };
  const look = () => {
    if (!looks) return "";
    const { layer, heads, most, times, prefix } = looks[choice.value];
    draw();
    figure.querySelector(".which").textContent =
      `The patch at ${name(chosen)} in ${layer}, the mean over ${heads} heads.`;
    const tokens = prefix.length ? `; class and register tokens get ${prefix[chosen]} %` : "";
    return `The patch at ${name(chosen)} looks most at ${name(most[chosen])}, `
      + `${times[chosen]} times uniform attention, in ${layer}${tokens}. `;
  };
  const lost = (place) => {
    const after = without[place];
    const digits = after.toFixed(2) === whole.toFixed(2) ? 4 : 2;
    const [from, to] = [whole.toFixed(digits), after.toFixed(digits)];
    const way = from === to ? "goes" : after < whole ? "falls" : "rises";
    return `Without the patch at ${name(place)} (${kind}), p(${target}) ${way} from ${from} to ${to}.`;
  };

  const say = () => {
    said.textContent = look() + (picked === null ? "" : lost(picked));
  };
  const move = (row, column) => {
    chosen = row * columns + column;
    for (const cursor of cursors) lay(cursor, chosen);
    say();
  };
  const pick = () => {
    picked = picked === chosen ? null : chosen;
    lay(gone, chosen);
    gone.hidden = picked === null;
    say();
  };
  for (const frame of frames) {
    frame.classList.add("live");
    cells(frame, rows, columns, { move, pick });
    if (frame !== main) frame.tabIndex = -1;
  }
  main.setAttribute("role", "application");
  main.setAttribute("aria-label", "Patches of the image: arrow keys choose, Enter leaves one out");
  if (looks) {
    look();
    lay(cursors.at(-1), chosen);
    choice.addEventListener("change", say);
  }
}

function heads(figure, { layers, entropy, share, receiver, prefix, columns }) {
  const tiles = figure.querySelector(".tiles");
  const said = figure.querySelector(".said");
  const most = Math.max(...entropy.map((row) => row.length));
  const at = new Map([...tiles.children].map((tile) =>
    [["--layer", "--head"].map((name) => +tile.style.getPropertyValue(name)).join(), tile]));
  const token = (number) => {
    if (number < prefix) return prefix === 1 ? "the class token" : `class or register token ${number}`;
    const place = number - prefix;
    return `the patch at row ${Math.floor(place / columns)}, column ${place % columns}`;
  };
  const move = (layer, head) => {
    const tile = at.get([layer, head].join());
    if (!tile) return;
    tiles.querySelector(".chosen")?.classList.remove("chosen");
    tile.classList.add("chosen");
    said.textContent = `${layers[layer]}, head ${head}: entropy ${entropy[layer][head].toFixed(2)}; `
      + `${token(receiver[layer][head])} gets most, ${Math.round(100 * share[layer][head])} %.`;
  };
  cells(tiles, layers.length, most, { move });
}
