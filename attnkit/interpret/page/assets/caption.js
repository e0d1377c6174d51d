behaviour("caption", (section, { rows, columns, words }) => {
  const large = section.querySelector(".large");
  const shown = large.querySelector(".map");
  const nothing = shown.src;
  const region = large.querySelector(".region");
  const said = section.querySelector(".said");
  const cards = [...section.querySelectorAll(".word")];
  const p = (value) => value.toFixed(value > 0.005 && value < 0.995 ? 2 : 3);
  const number = (value) => Number(value.toPrecision(2)).toString().replace("-", "−");

  const mark = (row, column) => {
    region.hidden = false;
    Object.assign(region.style, {
      left: `${100 * column / columns}%`, top: `${100 * row / rows}%`,
      width: `${100 / columns}%`, height: `${100 / rows}%`,
    });
  };
  const clear = () => cards.forEach((card) => {
    card.classList.remove("looks");
    card.querySelector(".here").textContent = "";
  });

  // A word, large: its map, and the region that it ranks first.
  const enlarge = (index) => {
    const { word, values, first, p: whole, without, random } = words[index];
    clear();
    cards[index].classList.add("looks");
    shown.src = cards[index].querySelector(".map").src;
    large.classList.add("shows");
    const most = values.indexOf(Math.max(...values));
    const [row, column] = first ?? [Math.floor(most / columns), most % columns];
    mark(row, column);
    said.textContent = `The map of “${word}” is largest at row ${row}, column ${column}`
      + ` (${number(values[row * columns + column])}).`
      + (without ? ` Without that region p goes from ${p(whole)} to ${p(without[row * columns + column])};`
        + ` without a region drawn by lot, to ${p(random)}.` : "");
  };
  cards.forEach((card, index) => {
    card.addEventListener("pointerenter", () => enlarge(index));
    card.querySelector("button").addEventListener("focus", () => enlarge(index));
    card.querySelector("button").addEventListener("click", () => enlarge(index));
  });

  // A region of the image: the words whose maps are larger there than on average.
  cells(large, rows, columns, {
    move(row, column) {
      const place = row * columns + column;
      clear();
      mark(row, column);
      large.classList.remove("shows");
      shown.src = nothing;
      const mean = (values) => values.reduce((sum, value) => sum + Math.abs(value), 0) / values.length;
      const looked = words.map((word, index) => ({ ...word, index, here: word.values[place] }))
        .filter(({ values, here }) => here > mean(values)).sort((a, b) => b.here - a.here);
      looked.forEach(({ index, here }) => {
        cards[index].classList.add("looks");
        cards[index].querySelector(".here").textContent = `here ${number(here)}`;
      });
      const most = looked.slice(0, 3).map(({ word, here, p: whole, without }) => `“${word}” ${number(here)}`
        + (without ? ` (p ${p(whole)}, without the region ${p(without[place])})` : ""));
      said.textContent = `Row ${row}, column ${column}: `
        + (most.length ? `looked at by ${looked.length} of ${words.length} words more than the rest of the image; most by ${most.join(", ")}.`
          : "no word looked at it more than at the rest of the image.");
    },
  });
});
