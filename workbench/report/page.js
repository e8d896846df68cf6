"use strict";
// Filter, order and group the verdicts, and compare the settings of two configurations. Reads the page's own data,
// writes text only, and asks for nothing; without it every row stands in the ablation's order.
{
  const $ = (id) => document.getElementById(id);
  const made = (name, text, parent, look) => {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (look) element.className = look;
    if (parent) parent.append(element);
    return element;
  };
  const all = JSON.parse($("configurations").textContent);
  const table = document.querySelector("table.summary");
  const bodies = table ? [...table.tBodies] : [];
  for (const one of all) {
    one.row = $(one.id);
    const next = one.row && one.row.nextElementSibling;
    one.rows = one.row ? [one.row, ...(next && next.classList.contains("remarks") ? [next] : [])] : [];
    one.body = one.row && one.row.parentElement;
    one.text = one.rows.map((row) => row.textContent).join(" ").toLowerCase();
  }
  const rank = (one) => (one.share === "inf" ? Infinity : one.share === null ? -1 : one.share);
  const arrange = () => {
    const words = $("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const key = $("group").value;
    const shown = all.filter((one) => one.row && words.every((word) => one.text.includes(word)));
    if ($("order").value === "largest") shown.sort((a, b) => (rank(a) === rank(b) ? 0 : rank(b) - rank(a)));
    while (table.tBodies.length) table.tBodies[0].remove();
    const groups = new Map();
    for (const one of shown) {
      const name = key === "reference" ? one.reference : key === "verdict" ? one.verdict : one.settings[key.slice(1)];
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(one);
    }
    for (const [name, members] of groups) {
      const body = made("tbody", undefined, table);
      if (key !== "reference") {
        const head = made("th", `${name} (${members.length})`, made("tr", undefined, body, "group"));
        head.colSpan = 6;
        head.scope = "rowgroup";
      }
      for (const one of members) body.append(...one.rows);
    }
    $("shown").textContent = `${shown.length} of ${all.length} shown`;
  };
  const compare = () => {
    const [a, b] = ["left", "right"].map((id) => all[Number($(id).value)]);
    const place = $("difference");
    place.replaceChildren();
    const keys = Object.keys(a.settings).filter((key) => a.settings[key] !== b.settings[key]);
    if (!keys.length) return void made("p", "These two have the same settings.", place);
    const table = made("table", undefined, place);
    const head = made("tr", undefined, made("thead", undefined, table));
    for (const text of ["setting", a.name, b.name]) made("th", text, head).scope = "col";
    const body = made("tbody", undefined, table);
    for (const key of keys) {
      const row = made("tr", undefined, body);
      made("th", key, row).scope = "row";
      for (const one of [a, b]) made("td", one.settings[key], row);
    }
  };
  if (bodies.length) {
    for (const id of ["filter", "order", "group"]) $(id).addEventListener("input", arrange);
    $("controls").hidden = false;
  }
  const pair = $("pair");
  if (pair && all.length > 1) {
    for (const [id, start] of [["left", 0], ["right", 1]]) {
      all.forEach((one, place) => (made("option", one.name, $(id)).value = place));
      $(id).value = start;
      $(id).addEventListener("input", compare);
    }
    compare();
    pair.hidden = false;
  }
}
