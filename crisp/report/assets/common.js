"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = 8, DASHES = ["", "6 4", "2 3", "9 3 2 3"];
const state = { alone: null, chosen: {}, scale: "auto", bounds: false, groups: {}, sort: null, page: 0, variants: [] };

// An element; text never becomes markup.
function el(name, attributes, ...children) {
  return filled(document.createElement(name), attributes, children);
}
function svg(name, attributes, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}
function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children) if (child !== null) node.append(child);
  return node;
}
function number(value, decimals) {
  if (value === null) return "–";
  const [whole, part] = Math.abs(value).toFixed(decimals).split(".");
  const sign = value < 0 && Number(value.toFixed(decimals)) !== 0 ? "−" : "";
  return sign + whole.replace(/\B(?=(\d{3})+$)/g, ",") + (part ? "." + part : "");
}
function text(column, row) {
  return column.codes[row] < 0 ? "–" : column.texts[column.codes[row]];
}
function counted(n, thing) {
  return `${number(n, 0)} ${thing}${n === 1 ? "" : "s"}`;
}
// The least and the most of numbers, of which there may be too many for arguments of a function.
function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}
// Draw a part of the page anew; what had the focus has it again.
function keeping(box, redraw) {
  const found = () => [...box.querySelectorAll("button, select")];
  const place = found().indexOf(document.activeElement);
  redraw();
  if (place < 0) return;
  const now = found();
  (now[place] && !now[place].disabled ? now[place] : now.find((one) => !one.disabled) || box).focus();
}
function kind(row) {
  return data.measured[row] ? "measured" : "simulated";
}

// -- which rows are shown ------------------------------------------------------------------------

const all = Array.from({ length: data.rows }, (_, row) => row);
const filters = data.conditions
  .map((condition, place) => ({ condition, place }))
  .filter(({ condition }) => condition.texts.length > 1 && condition.texts.length <= 60);
function matching() {
  return all.filter((row) => filters.every(({ condition, place }) => {
    const code = state.chosen[place];
    return code === undefined || condition.codes[row] === code;
  }));
}
function drawn() {
  return matching().filter((row) => state.alone === null || data.legend.codes[row] === state.alone);
}
// A policy has its colour; seen alone, each of its variants has one.
function variants() {
  const own = [...new Set(matching().filter((row) => data.legend.codes[row] === state.alone).map((row) => data.policy.codes[row]))];
  return own.length > 1 && own.length <= COLOURS ? own : [];
}
function entryOf(row) {
  return state.variants.length ? state.variants.indexOf(data.policy.codes[row]) : data.legend.codes[row];
}
function colour(row) {
  return `var(--s${entryOf(row) % COLOURS})`;
}
// Where there are many lines, the conditions that most runs share are the first to be seen.
if (new Set(data.line).size > 30) {
  const counts = new Map();
  for (const row of all) {
    const key = filters.map(({ condition }) => condition.codes[row]).join();
    counts.set(key, (counts.get(key) || 0) + 1);
  }
  let most = "";
  for (const [key, count] of counts) if (count > (counts.get(most) || 0)) most = key;
  most.split(",").forEach((code, place) => {
    if (filters.length && code !== "-1") state.chosen[filters[place].place] = Number(code);
  });
}

// -- the tip: what is under the pointer, or has the focus ----------------------------------------

const tip = $("tip");
function showTip(title, lines, x, y) {
  const cells = lines.map(([name, value, words]) =>
    el("tr", null, el("td", null, name), el("td", { class: words ? "words" : null }, value)));
  tip.replaceChildren(el("b", null, title), el("table", null, el("tbody", null, ...cells)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), gap = 14;
  const left = x + gap + box.width > innerWidth ? x - gap - box.width : x + gap;
  const top = Math.min(y + gap, innerHeight - box.height - 4);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}
function hideTip() {
  tip.hidden = true;
}
function choice(label, options, value, changed) {
  const select = el("select", { onchange: () => changed(select.value) });
  for (const [key, words] of options) select.append(el("option", { value: key }, words));
  select.value = value;
  return el("label", null, label, select);
}
