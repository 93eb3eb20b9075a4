// What is wrong with the page that is open, for readers with a phone, a keyboard, a screen reader or weak eyes.
(() => {
  const wrong = [];
  const say = (rule, what) => wrong.push(`${rule}: ${what}`);
  const named = (e) => `<${e.tagName.toLowerCase()} ${e.className?.baseVal ?? e.className}> ${(e.textContent || "").trim().slice(0, 40)}`;
  const all = (selector) => [...document.querySelectorAll(selector)];
  const shown = (e) => e.getClientRects().length && e.checkVisibility({ opacityProperty: true, visibilityProperty: true });

  // --- the document
  if (document.documentElement.lang !== "en") say("language", document.documentElement.lang);
  if (!document.title.trim()) say("title", "empty");
  if (!/width=device-width/.test(document.querySelector("meta[name=viewport]")?.content ?? "")) say("viewport", "none");
  const ids = all("[id]").map((e) => e.id);
  for (const id of new Set(ids.filter((id, k) => ids.indexOf(id) !== k))) say("id used twice", id);

  // --- headings
  const levels = all("h1, h2, h3, h4, h5, h6").map((h) => Number(h.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1 || levels[0] !== 1) say("headings", levels.join(" "));
  levels.forEach((level, k) => { if (k && level > levels[k - 1] + 1) say("heading level left out", levels.slice(0, k + 1).join(" ")); });

  // --- names
  for (const e of all("img")) {
    if (!e.alt.trim()) say("image without text", e.src);
    if (e.complete && !e.naturalWidth) say("image not found", e.src);
  }
  const name = (e) => (e.textContent + (e.getAttribute("aria-label") ?? "") + (e.title ?? "") + [...e.querySelectorAll("img")].map((i) => i.alt).join("")).trim();
  for (const e of all("a[href], button, label:not([class$=overlay])")) if (shown(e) && !name(e)) say("without a name", e.outerHTML.slice(0, 120));
  for (const e of all("iframe")) if (!e.title.trim()) say("frame without a title", e.src);

  // --- room
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) {
    const scrolls = (e) => { for (; e; e = e.parentElement) if (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX)) return true; return false; };
    const wide = all("article *").filter((e) => e.getBoundingClientRect().right > width + 1 && !scrolls(e.parentElement));
    say("wider than the window", `${document.documentElement.scrollWidth} px; ${wide.slice(0, 3).map(named).join("; ")}`);
  }
  const small = (e) => { const b = e.getBoundingClientRect(); return b.width < 24 || b.height < 24; };
  for (const e of all("header button, header label, header a, .md-tabs__link, .md-footer a")) {
    if (shown(e) && small(e) && !e.closest("p, .md-copyright")) say("too small to tap", named(e));
  }

  // --- contrast, as of WCAG 2.2 AA
  const parse = (text) => { const v = text.match(/[\d.]+/g).map(Number); return [v[0], v[1], v[2], v[3] ?? 1]; };
  const over = (top, under) => [0, 1, 2].map((k) => top[3] * top[k] + (1 - top[3]) * under[k]).concat(1);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const ground = (e) => {
    const layers = [];
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] > 0.99) break;
    }
    return layers.reduceRight((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const found = new Map();
  for (const e of all("body *")) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    if (e.closest("script, style, svg, [hidden], .md-search__output, .headerlink") || !shown(e)) continue;
    const style = getComputedStyle(e);
    const under = ground(e);
    const [a, b] = [light(over(parse(style.color), under)), light(under)].sort((p, q) => q - p);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const enough = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    if (ratio < enough) found.set(`${style.color} on ${under.map(Math.round)}`, `${ratio.toFixed(2)} ${named(e)}`);
  }
  for (const [colours, where] of found) say("contrast", `${colours}: ${where}`);
  return wrong;
})()
