// The table of runs: sorted by a click on a heading, a page at a time.

const ROWS = 25, PRINTED = 500;  // a page
for (const group of data.groups) state.groups[group.name] = group.shown;

function columns() {
  const named = (label, column) => ({ label, unit: "", words: true, sort: (row) => column.codes[row] < 0 ? null : text(column, row), cell: (row) => text(column, row) });
  const found = [named("policy", data.policy)];
  found.push({
    label: "budget", unit: "", words: false, sort: (row) => data.share[row], cell: (row) => text(data.budget, row),
  });
  if (data.measured.includes(1)) found.push({ label: "", unit: "", words: true, sort: kind, cell: kind });
  for (const condition of data.conditions) found.push(named(condition.label, condition));
  for (const metric of data.metrics) {
    if (!state.groups[metric.group]) continue;
    found.push({
      label: metric.head, unit: metric.unit, words: false, meaning: metric.meaning,
      sort: (row) => metric.values[row], cell: (row) => number(metric.values[row], metric.decimals),
      why: (row) => metric.why.codes[row] < 0 ? null : metric.why.texts[metric.why.codes[row]],
    });
  }
  return found;
}
function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number") return a - b;
  return a < b ? -1 : Number(a > b);
}
function sorted(rows, found) {
  const column = state.sort && found.find((one) => one.label + one.unit === state.sort.key);
  if (!column) return rows;
  const keys = new Map(rows.map((row) => [row, column.sort(row)]));
  return [...rows].sort((one, other) => {
    const a = keys.get(one), b = keys.get(other);
    if (a === null || b === null) return compare(a, b) || one - other;  // what is not there comes last
    return (state.sort.down ? compare(b, a) : compare(a, b)) || one - other;
  });
}
function heading(column) {
  const key = column.label + column.unit, own = state.sort && state.sort.key === key;
  const click = () => {
    state.sort = own ? (state.sort.down ? null : { key, down: true }) : { key, down: false };
    state.page = 0;
    drawTable();
  };
  return el("th", {
    scope: "col", class: column.words ? "text" : null, title: column.meaning || null,
    "aria-sort": own ? (state.sort.down ? "descending" : "ascending") : null,
  }, el("button", { type: "button", onclick: click }, column.label || "kind"),
  el("small", null, column.unit || "\u00a0"));
}
function cell(column, row, place) {
  const value = column.cell(row), why = column.why ? column.why(row) : null;
  if (why !== null) return el("td", { class: "none", title: why, "aria-label": `not known: ${why}` }, "–");
  if (place) return el("td", { class: column.words ? "text" : null, title: column.words ? value : null }, value);
  const dot = colour(row);
  const swatch = el("i", { class: data.measured[row] ? "measured" : null, "aria-hidden": "true" });
  swatch.style.background = swatch.style.borderColor = dot;
  return el("td", { class: "text", title: value }, swatch, value);
}
function drawTable(size = ROWS) {
  const rows = drawn(), found = columns(), ordered = sorted(rows, found);
  const pages = Math.max(1, Math.ceil(rows.length / size)), first = state.page * size;
  const page = ordered.slice(first, first + size);
  keeping($("table"), () => $("table").replaceChildren(
    el("thead", null, el("tr", null, ...found.map(heading))),
    el("tbody", null, ...page.map((row) => el("tr", null, ...found.map((column, place) => cell(column, row, place))))),
  ));
  const turn = (by, words) => el("button", {
    type: "button", disabled: state.page + by < 0 || state.page + by >= pages,
    onclick: () => { state.page += by; drawTable(size); },
  }, words);
  const of = rows.length < data.rows ? `, chosen of ${number(data.rows, 0)}` : "";
  const range = rows.length ? `${number(first + 1, 0)}–${number(first + page.length, 0)} of ${counted(rows.length, "run")}${of}` : "no run is chosen";
  keeping($("pager"), () => $("pager").replaceChildren(
    ...(pages > 1 ? [turn(-1, "previous"), turn(1, "next")] : []), el("span", null, range),
  ));
}
function drawColumns() {
  $("table-controls").replaceChildren(el("label", null, "columns"), ...data.groups.map((group) => {
    const box = el("input", { type: "checkbox", onchange: () => { state.groups[group.name] = box.checked; drawTable(); } });
    box.checked = state.groups[group.name];
    return el("label", null, box, group.name);
  }));
}
function tellAbsent() {
  const reasons = new Map();
  for (const { head, why } of data.absent) reasons.set(why, [...(reasons.get(why) || []), head]);
  const lines = [...reasons].map(([why, heads]) => el("p", null, `No run has ${heads.join(", ")}: ${why}.`));
  const words = "– : not known; the reason is shown under the pointer.";
  if (data.metrics.some((metric) => metric.why.texts.length)) lines.unshift(el("p", null, words));
  $("table-told").replaceChildren(...lines);
}
