// Edges and nodes of a drawing say what they are: under the pointer, or chosen by the arrow keys,
// which go from the edge that ranks first to the last, and on through the nodes.
behaviour("graph", (section) => {
  const drawing = section.querySelector(".ego"), said = section.querySelector(".said");
  const things = [...drawing.querySelectorAll("[data-rank]")]
    .sort((a, b) => a.dataset.rank - b.dataset.rank);
  const texts = new Map(things.map((thing) => [thing, thing.querySelector("title").textContent]));
  // said below the drawing at once; a second time by the browser would lie over it
  for (const thing of things) thing.querySelector("title").remove();
  let chosen = -1;
  const choose = (number) => {
    if (!things.length) return;
    if (chosen >= 0) things[chosen].classList.remove("chosen");
    chosen = (number + things.length) % things.length;
    things[chosen].classList.add("chosen");
    said.textContent = texts.get(things[chosen]);
  };
  drawing.addEventListener("pointerover", (event) => {
    const thing = event.target.closest("[data-rank]");
    if (thing) choose(things.indexOf(thing));
  });
  drawing.addEventListener("focus", () => { if (chosen < 0) choose(0); });
  drawing.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    if (event.key === "Home") choose(0);
    else if (event.key === "End") choose(-1);
    else if (event.key in steps) choose(Math.max(chosen, 0) + steps[event.key]);
    else return;
    event.preventDefault();
  });
});
