"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Theme: follow the system until the reader chooses.
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // Tables: a click on a heading sorts by it, another click turns the order round.
  for (const heading of all("table.sortable th")) {
    heading.addEventListener("click", () => {
      const table = heading.closest("table"), column = heading.cellIndex;
      const order = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      const value = (row) => row.cells[column].dataset.sort;
      const compare = (a, b) => (isNaN(value(a)) || isNaN(value(b)) ? value(a).localeCompare(value(b)) : value(a) - value(b));
      all("th", table).forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", order === 1 ? "ascending" : "descending");
      table.tBodies[0].append(...all("tbody tr", table).sort((a, b) => order * compare(a, b)));
    });
  }

  // A note to whoever tests the page: how many figures have a size, and what was fetched or refused (nothing).
  let refused = 0;
  document.addEventListener("securitypolicyviolation", () => { root.dataset.refused = String(++refused); });
  addEventListener("load", () => {
    const drawn = all("figure svg").filter((svg) => { const box = svg.getBoundingClientRect(); return box.width > 0 && box.height > 0; });
    root.dataset.figures = String(drawn.length);
    root.dataset.fetched = String(performance.getEntriesByType("resource").length);
    root.dataset.refused = String(refused);
  });
})();
