// Charts against the budget. A line joins runs of one policy under the same conditions only.

const MOST_LINES = 150, HEIGHT = 270, PAD = { left: 52, right: 16, named: 66, top: 10, bottom: 40 };
const MEANINGS = {
  io: "the bytes it loaded, over the link’s bandwidth",
  "best order": "each event’s tasks in their best order",
  belady: "the fewest bytes that any cache could load for its tasks",
  compute: "nothing to load",
};
const BOUND_DASHES = { io: "1 3", "best order": "6 3", belady: "8 3 1 3", compute: "3 3" };

function linesOf(rows, values) {
  const lines = new Map();
  for (const row of rows) {
    if (values[row] === null || data.share[row] === null) continue;
    if (!lines.has(data.line[row])) lines.set(data.line[row], []);
    lines.get(data.line[row]).push(row);
  }
  return [...lines.values()].map((line) => line.sort((a, b) => data.share[a] - data.share[b]));
}
function setOf(row) {  // of conditions
  return data.conditions.map((condition) => text(condition, row)).filter((one) => one !== "–").join(", ");
}
// The dash of each set of conditions, if they are few enough to be told apart.
function dashes(rows) {
  const sets = [...new Set(rows.map(setOf))];
  return { sets, dash: (row) => (sets.length <= DASHES.length ? DASHES[sets.indexOf(setOf(row))] : "") };
}
function ticks(low, high, log) {
  const found = [];
  if (log) {
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const first of [1, 2, 5]) found.push(first * 10 ** power);
    }
    const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    return inside.length > 8 ? inside.filter((tick) => /^0*\.?0*1/.test(tick.toPrecision(1))) : inside;
  }
  const rough = (high - low) / 5 || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((first) => first * power).find((one) => one >= rough * 0.99);
  for (let n = Math.ceil(low / step); n * step <= high * 1.0001; n++) found.push(n * step);
  return found;
}
function tickText(tick) {
  const short = Number(tick.toPrecision(3));
  return Math.abs(short) >= 1000 ? number(short, 0) : String(short);
}
function mark(row, x, y, size, fill = colour(row)) {
  if (data.measured[row]) {
    const r = size * 1.25;
    return svg("path", {
      class: "point measured", d: `M${x},${y - r}L${x + r},${y}L${x},${y + r}L${x - r},${y}Z`,
      style: `fill: var(--paper); stroke: ${fill}; stroke-width: 1.8`,
    });
  }
  if (entryOf(row) >= COLOURS) {
    return svg("rect", { class: "point", x: x - size, y: y - size, width: 2 * size, height: 2 * size, style: `fill: ${fill}` });
  }
  return svg("circle", { class: "point", cx: x, cy: y, r: size, style: `fill: ${fill}` });
}
function drawChart(chart, box, told) {
  const rows = drawn(), lines = linesOf(rows, chart.values), kept = lines.slice(0, MOST_LINES);
  const caption = el("figcaption", null, chart.title + " ", el("span", null, chart.unit));
  box.replaceChildren(caption);
  for (const { why, runs } of chart.missing) {
    told.add(`${chart.title}: ${counted(runs, "run")} left out: ${why}`);
  }
  if (!lines.length) {
    const reasons = chart.missing.map(({ why, runs }) => `${why} (${counted(runs, "run")})`);
    box.append(el("p", { class: "empty" }, `Nothing to draw: ${reasons.join("; ") || "no run is chosen"}`));
    return;
  }
  if (kept.length < lines.length) {
    told.add(`${chart.title}: ${kept.length} of ${counted(lines.length, "line")} are drawn; ` +
      "choose a policy, or conditions, to see others");
  }
  const withBounds = state.bounds || new Set(kept.map((line) => data.legend.codes[line[0]])).size <= 2;
  const bounds = withBounds ? chart.bounds : [];
  const shown = [];
  for (const line of kept) for (const row of line) {
    shown.push(chart.values[row]);
    for (const bound of bounds) if (bound.values[row] !== null) shown.push(bound.values[row]);
  }
  const positive = shown.filter((value) => value > 0);
  const [least, high0] = extent(shown);
  let [low] = extent(positive), high = high0;
  const able = positive.length === shown.length;
  const log = able && (state.scale === "log" || (state.scale === "auto" && high / low > 15));
  if (log) { low /= 1.15; high *= 1.15; } else { low = Math.min(0, least); high = high * 1.06 || 1; }

  const width = Math.max(260, Math.round(box.clientWidth) || 380);
  const shares = kept.flat().map((row) => data.share[row]);
  const most = Math.min(100, extent(shares)[1] * 1.04) || 1, end = width - (bounds.length ? PAD.named : PAD.right);
  const x = (share) => PAD.left + (share / most) * (end - PAD.left);
  const scale = log ? Math.log : (value) => value;
  const y = (value) => HEIGHT - PAD.bottom -
    ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (HEIGHT - PAD.top - PAD.bottom);
  const root = svg("svg", {
    viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: 0, role: "group", class: "chart",
    "aria-label": `${chart.title}, ${chart.unit}, against the budget. Arrow keys go from run to run.`,
  });
  for (const tick of ticks(low, high, log)) {
    root.append(
      svg("line", { class: "grid", x1: PAD.left, x2: end, y1: y(tick), y2: y(tick) }),
      svg("text", { x: PAD.left - 8, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)),
    );
  }
  const base = HEIGHT - PAD.bottom;
  root.append(svg("line", { class: "axis", x1: PAD.left, x2: end, y1: base, y2: base }));
  const own = [...new Set(shares)];
  for (const tick of own.length <= 8 ? own : ticks(0, most, false)) {
    root.append(svg("text", { x: x(tick), y: base + 17, "text-anchor": "middle" }, tickText(tick)));
  }
  root.append(svg("text", { x: (PAD.left + end) / 2, y: HEIGHT - 5, "text-anchor": "middle" },
    "budget, % of all routed experts" + (log ? "  ·  log scale" : "")));

  const path = (line, values) => line
    .map((row, place) => `${place ? "L" : "M"}${x(data.share[row]).toFixed(1)},${y(values[row]).toFixed(1)}`).join("");
  const { dash } = dashes(rows);
  const names = new Map();
  for (const bound of bounds) for (const line of kept) {
    const known = line.filter((row) => bound.values[row] !== null);
    if (!known.length) continue;
    const stroke = colour(line[0]), last = known[known.length - 1];
    if (known.length > 1) {
      root.append(svg("path", {
        class: "bound", d: path(known, bound.values), "stroke-dasharray": BOUND_DASHES[bound.name], style: `stroke: ${stroke}`,
      }));
    } else {
      const px = x(data.share[last]), py = y(bound.values[last]);
      root.append(svg("path", { class: "bound", d: `M${px - 12},${py}h24`, style: `stroke: ${stroke}` }));
    }
    if (!names.has(bound.name)) names.set(bound.name, y(bound.values[last]));
  }
  const points = [];
  for (const line of kept) {
    const stroke = colour(line[0]);
    if (line.length > 1) {
      root.append(svg("path", {
        class: "line", d: path(line, chart.values), style: `stroke: ${stroke}`,
        "stroke-dasharray": dash(line[0]) || null, "data-policy": data.legend.texts[data.legend.codes[line[0]]],
      }));
    }
  }
  const size = shares.length > 300 ? 2.4 : 3.6;
  for (const line of kept) for (const [place, row] of line.entries()) {
    const point = { row, line, place, x: x(data.share[row]), y: y(chart.values[row]) };
    points.push(point);
    root.append(mark(row, point.x, point.y, size));
  }
  let above = -Infinity;
  for (const [name, at] of [...names].sort((a, b) => a[1] - b[1])) {
    above = Math.max(at + 4, above + 12);
    root.append(svg("text", { class: "bound-name", x: end + 5, y: above }, name));
  }
  const ring = svg("circle", { class: "ring", r: 7, visibility: "hidden" });
  root.append(ring);
  box.append(root);
  listen(root, points, ring, bounds, chart);
}
function listen(root, points, ring, bounds, chart) {
  let chosen = null;
  const show = (point) => {
    chosen = point;
    ring.setAttribute("visibility", point ? "visible" : "hidden");
    if (!point) return hideTip();
    ring.setAttribute("cx", point.x);
    ring.setAttribute("cy", point.y);
    const at = ring.getBoundingClientRect();
    showTip(titleOf(point.row), factsOf(point.row, bounds, chart), at.right, at.top);
  };
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect(), zoom = box.width / root.viewBox.baseVal.width;
    const px = (event.clientX - box.left) / zoom, py = (event.clientY - box.top) / zoom;
    let best = null, least = 28 ** 2;
    for (const point of points) {
      const far = (point.x - px) ** 2 + (point.y - py) ** 2;
      if (far < least) { least = far; best = point; }
    }
    if (best !== chosen || !best) show(best);
  });
  root.addEventListener("pointerleave", () => show(null));
  root.addEventListener("blur", () => show(null));
  root.addEventListener("focus", () => { if (root.matches(":focus-visible")) show(points[0]); });
  root.addEventListener("keydown", (event) => {
    const now = chosen || points[0], own = points.filter((point) => point.line === now.line);
    const column = points.filter((point) => data.share[point.row] === data.share[now.row]).sort((a, b) => b.y - a.y);
    const step = { ArrowLeft: [own, -1], ArrowRight: [own, 1], ArrowUp: [column, 1], ArrowDown: [column, -1] }[event.key];
    if (event.key === "Escape") show(null);
    if (!step) return;
    event.preventDefault();
    show(step[0][Math.min(step[0].length - 1, Math.max(0, step[0].indexOf(now) + step[1]))]);
  });
}
function titleOf(row) {
  return `${text(data.policy, row)} at ${text(data.budget, row)}, ${kind(row)}`;
}
function factsOf(row, bounds, chart) {
  const facts = data.metrics
    .filter((metric) => metric.group === data.groups[0].name && metric.values[row] !== null)
    .map((metric) => [metric.head, `${number(metric.values[row], metric.decimals)} ${metric.unit}`]);
  for (const bound of bounds) {
    if (bound.values[row] !== null) facts.push([`bound: ${bound.name}`, `${tickText(bound.values[row])} ${chart.unit}`]);
  }
  if (data.held[row] !== null) facts.push(["budget, floored", `${number(data.held[row], 2)} %`]);
  for (const condition of data.conditions) {
    if (condition.codes[row] >= 0) facts.push([condition.label, text(condition, row), true]);
  }
  return facts;
}

// -- what is above the charts --------------------------------------------------------------------

function key(...parts) {
  return svg("svg", { viewBox: "0 0 34 12", "aria-hidden": "true" }, ...parts);
}
function sample(entry) {
  const row = all.find((one) => data.legend.codes[one] === entry);
  const stroke = `var(--s${entry % COLOURS})`;
  return key(svg("line", { class: "line", x1: 2, x2: 32, y1: 6, y2: 6, style: `stroke: ${stroke}` }), mark(row, 17, 6, 3.6, stroke));
}
function drawLegend() {
  const present = new Set(matching().map((row) => data.legend.codes[row]));
  $("legend").replaceChildren(...data.legend.texts.map((name, entry) => el("button", {
    type: "button", "aria-pressed": String(state.alone === entry), disabled: !present.has(entry),
    class: state.alone !== null && state.alone !== entry ? "off" : null,
    onclick: () => {
      state.alone = state.alone === entry ? null : entry;
      state.page = 0;
      draw();
    },
  }, sample(entry), name)));
}
function drawStyles() {
  const rows = drawn(), { sets, dash } = dashes(rows), lines = [];
  const add = (words, ...parts) => lines.push(el("span", null, key(...parts), words));
  const line = (stroke, dashed) => svg("line", { class: "line", x1: 1, x2: 33, y1: 6, y2: 6, "stroke-dasharray": dashed || null, style: `stroke: ${stroke}` });
  for (const variant of state.variants) {
    const row = rows.find((one) => data.policy.codes[one] === variant);
    add(data.policy.texts[variant], line(colour(row), ""), mark(row, 17, 6, 3.6));
  }
  if (data.measured.includes(1) && data.measured.includes(0)) {
    for (const measured of [0, 1]) {
      const row = rows.find((one) => data.measured[one] === measured);
      if (row !== undefined) add(measured ? "measured" : "simulated", mark(row, 17, 6, 3.6));
    }
  }
  if (sets.length > 1 && sets.length <= DASHES.length) {
    for (const set of sets) add(set, line("var(--soft)", dash(rows.find((row) => setOf(row) === set))));
  } else if (sets.length > 1) {
    lines.push(el("span", null, `${number(sets.length, 0)} sets of conditions look alike: choose above`));
  }
  $("styles").replaceChildren(...lines);
}
function drawControls() {
  const parts = filters.map(({ condition, place }) => choice(
    condition.label,
    [["", "all"], ...condition.texts.map((one, code) => [code, one])],
    state.chosen[place] === undefined ? "" : state.chosen[place],
    (value) => {
      if (value === "") delete state.chosen[place]; else state.chosen[place] = Number(value);
      state.page = 0;
      draw();
    },
  ));
  const scales = [["auto", "automatic"], ["linear", "linear"], ["log", "logarithmic"]];
  parts.push(choice("scale", scales, state.scale, (value) => { state.scale = value; draw(); }));
  if (data.charts.some((chart) => chart.bounds.length) && data.legend.texts.length > 2) {
    const box = el("input", { type: "checkbox", onchange: () => { state.bounds = box.checked; draw(); } });
    box.checked = state.bounds;
    parts.push(el("label", null, box, "bounds of all policies"));
  }
  $("controls").replaceChildren(...parts);
}
function drawCharts() {
  const told = new Set(), shown = drawn().length;
  if (shown < data.rows) told.add(`Shown are ${number(shown, 0)} of ${counted(data.rows, "run")}, as chosen above.`);
  if (!$("figures").children.length) $("figures").append(...data.charts.map(() => el("figure")));
  data.charts.forEach((chart, place) => drawChart(chart, $("figures").children[place], told));
  const bounds = new Set(data.charts.flatMap((chart) => chart.bounds.map((bound) => bound.name)));
  if (bounds.size) {
    const meanings = [...bounds].map((name) => `${name}: ${MEANINGS[name]}`).join("; ");
    told.add(`Thin lines: what no run of that policy could be better than. ${meanings}.` +
      (data.legend.texts.length > 2 ? " They are drawn for a policy that is seen alone." : ""));
  }
  $("charts-told").replaceChildren(...[...told].map((line) => el("p", null, line)));
}
