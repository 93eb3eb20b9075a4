(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Regression: legend entries switch layers, the slider picks the band of one prior precision.
  const hidden = new Set();
  const slider = document.getElementById("precision");
  const frames = JSON.parse(slider.dataset.frames);
  const show = () => {
    const frame = Number(slider.value), tuned = Number(slider.dataset.tuned);
    for (const layer of all("#figure-regression svg g[id]")) {
      const [, kind, index] = /^regression-(data|truth|mean|draw|total|epistemic)(?:-(\d+))?$/.exec(layer.id) || [];
      if (!kind) continue;
      const banded = kind === "total" || kind === "epistemic";
      const out = hidden.has(kind) || (banded && Number(index) !== frame) || (kind === "draw" && frame !== tuned);
      layer.style.display = out ? "none" : "";
    }
    const f = frames[frame];
    const chosen = frame === tuned ? " <b>chosen by the evidence</b>" : "";
    document.getElementById("frame").innerHTML =
      `${f.precision} · log evidence ${f.evidence} · epistemic std in the gap ${f.gap}${chosen}`;
    slider.setAttribute("aria-valuetext", `precision ${f.precision}`);
  };
  slider.addEventListener("input", show);
  for (const key of all("button.key")) {
    key.addEventListener("click", () => {
      const on = key.getAttribute("aria-pressed") === "true";
      key.setAttribute("aria-pressed", String(!on));
      if (on) hidden.add(key.dataset.layers); else hidden.delete(key.dataset.layers);
      show();
    });
  }
  show();
})();
