// The time of one token: what link and compute do, and when. A click goes to an event and back.

const lanes = { step: 0, event: null };
const LOADS = ["load", "prefetch"], ROW = 26, BLOCK = 104;

function ms(ns, digits) {
  return `${number(ns / 1e6, digits)} ms`;
}
// The layers of a step, in order: [from, to) in ns.
function spans(lane) {
  const starts = lane.bars.filter((bar) => data.timelines.kinds[bar[0]] === "layer");
  return starts.map((bar, place) => ({
    layer: bar[2], from: bar[8], to: place + 1 < starts.length ? starts[place + 1][8] : lane.ns,
  }));
}
function named(bar, blocks) {
  return `E${bar[3]}` + (bar[7] < blocks ? ` ${bar[7]}/${blocks}` : "");
}
function words(bar, blocks) {
  const what = data.timelines.kinds[bar[0]], lines = [];
  if (what !== "layer") {
    if (bar[4]) lines.push(["task", `${bar[4]} of ${bar[5]} of the event`]);
    lines.push(["layer", String(bar[2])], ["expert", String(bar[3])]);
    lines.push(["blocks", `[${bar[6]}, ${bar[6] + bar[7]}) of ${blocks}`]);
  } else lines.push(["layer", String(bar[2])]);
  if (bar[1] >= 0) lines.push(["event", String(bar[1])]);
  lines.push(["from", ms(bar[8], 4)], ["to", ms(bar[9], 4)], ["takes", ms(bar[9] - bar[8], 4)]);
  const title = { layer: "router, attention", compute: "compute an expert", load: "load", prefetch: "prefetch" }[what];
  return [title, lines];
}
function drawLanes() {
  const step = data.timelines.steps[lanes.step], box = $("lanes");
  const width = Math.max(320, box.clientWidth || 760), left = 64, right = 8;
  const windows = step.lanes.map((lane) => {
    if (lanes.event === null) return [0, lane.ns];
    const own = spans(lane), span = own[Math.min(lanes.event, own.length - 1)];
    return [span.from, span.to];
  });
  const longest = Math.max(...windows.map(([from, to]) => to - from)) || 1;
  const scale = (width - left - right) / longest;
  const root = svg("svg", {
    viewBox: `0 0 ${width} ${BLOCK * step.lanes.length + 34}`, tabindex: 0, role: "group",
    class: lanes.event === null ? "timeline" : "timeline near",
    "aria-label": "Timeline. Arrow keys go from interval to interval, Enter goes to the event, Escape back to all.",
  });
  const bars = [];
  step.lanes.forEach((lane, place) => drawLane(root, lane, windows[place], place, { left, width, scale, right }, bars));
  const base = BLOCK * step.lanes.length + 12;
  root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: base, y2: base }));
  for (const tick of ticks(0, longest / 1e6, false)) {
    root.append(svg("text", { x: left + tick * 1e6 * scale, y: base + 16, "text-anchor": "middle" }, tickText(tick)));
  }
  root.append(svg("text", { x: left - 10, y: base + 16, "text-anchor": "end" }, "ms"));
  box.replaceChildren(root);
  listenBars(root, bars);
}
function drawLane(root, lane, [from, to], place, { left, width, scale, right }, bars) {
  const top = BLOCK * place + 38, at = { link: top, compute: top + ROW + 6 };
  const name = data.timelines.names[place];
  root.append(svg("text", { class: "whose", x: 0, y: top - 22 }, `${name}: step ${lane.step}, ${ms(lane.ns, 3)}` +
    (lane.left_out ? `; its first ${counted(lane.bars.length, "interval")}` : "")));
  for (const [what, y] of Object.entries(at)) root.append(svg("text", { class: "lane", x: 0, y: y + ROW / 2 + 4 }, what));
  let free = -Infinity;
  for (const span of spans(lane)) {
    const x = left + (span.from - from) * scale;
    if (x < left - 1 || x > width - right || span.from >= to) continue;
    root.append(svg("line", { class: "axis", x1: x, x2: x, y1: top - 6, y2: at.compute + ROW }));
    if (x < free) continue;
    root.append(svg("text", { x, y: top - 8 }, `L${span.layer}`));
    free = x + 34;
  }
  for (const bar of lane.bars) {
    if (bar[9] <= from || bar[8] >= to) continue;
    const kind = data.timelines.kinds[bar[0]], y = LOADS.includes(kind) ? at.link : at.compute;
    const x = left + (Math.max(bar[8], from) - from) * scale, end = left + (Math.min(bar[9], to) - from) * scale;
    const rect = svg("rect", {
      class: `bar ${kind}`, x: x.toFixed(2), y, width: Math.max(0.6, end - x).toFixed(2), height: ROW, rx: 1.5,
      style: `fill: var(--${kind})${end - x < 4 ? "; stroke: none" : ""}`,
    });
    root.append(rect);
    bars.push({ bar, rect, lane });
    const label = kind === "layer" ? "" : named(bar, lane.blocks);
    if (label && end - x > 7 * label.length + 6) {
      root.append(svg("text", {
        class: "on-bar", x: (x + end) / 2, y: y + ROW / 2 + 4, "text-anchor": "middle",
        style: `fill: var(--on-${kind === "load" ? "load" : "compute"})`,
      }, label));
    }
  }
}
function listenBars(root, bars) {
  let chosen = null;
  const show = (found) => {
    if (chosen) chosen.rect.classList.remove("chosen");
    chosen = found;
    if (!found) return hideTip();
    found.rect.classList.add("chosen");
    const at = found.rect.getBoundingClientRect();
    showTip(...words(found.bar, found.lane.blocks), Math.min(at.right, innerWidth - 40), at.bottom);
  };
  const enter = ({ bar, lane }) => {
    const at = spans(lane).findIndex((span) => bar[8] < span.to && bar[9] > span.from);
    goTo(lanes.event === null ? Math.max(0, at) : null);
  };
  for (const found of bars) {
    found.rect.addEventListener("pointerenter", () => show(found));
    found.rect.addEventListener("pointerleave", () => show(null));
    found.rect.addEventListener("click", () => enter(found));
  }
  root.addEventListener("blur", () => show(null));
  root.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) {
      event.preventDefault();
      show(bars[Math.min(bars.length - 1, Math.max(0, chosen ? bars.indexOf(chosen) + by : 0))]);
    } else if (event.key === "Enter" && chosen) { enter(chosen); again(); }
    else if (event.key === "Escape") { goTo(null); again(); }
  });
  const again = () => $("lanes").firstChild.focus();
}
function goTo(event) {
  lanes.event = event;
  hideTip();
  drawTimeline();
}
function drawTimeline() {
  const { steps } = data.timelines;
  if (!steps.length) return;
  $("timeline").hidden = false;
  $("h-timeline").textContent = `One ${data.timelines.of}’s time`;
  keeping($("timeline-controls"), drawTimelineControls);
  drawLanes();
}
function drawTimelineControls() {
  const { steps } = data.timelines, last = spans(steps[lanes.step].lanes[0]).length - 1;
  const button = (words, event, disabled) => el("button", { type: "button", disabled, onclick: () => goTo(event) }, words);
  const now = lanes.event === null ? "" : `layer ${spans(steps[lanes.step].lanes[0])[Math.min(last, lanes.event)].layer}`;
  $("timeline-controls").replaceChildren(
    choice("step", steps.map((step, place) => [place, step.label]), lanes.step, (value) => { lanes.step = Number(value); lanes.event = null; drawTimeline(); }),
    button("all layers", null, lanes.event === null),
    button("previous layer", Math.max(0, (lanes.event || 0) - 1), !lanes.event),
    button(lanes.event === null ? "first layer" : "next layer", lanes.event === null ? 0 : lanes.event + 1, lanes.event !== null && lanes.event >= last),
    el("span", null, now),
  );
  const names = { load: "load", prefetch: "prefetch", compute: "compute an expert", layer: "router, attention" };
  const seen = new Set(steps[lanes.step].lanes.flatMap((lane) => lane.bars.map((bar) => data.timelines.kinds[bar[0]])));
  $("timeline-told").replaceChildren(...Object.entries(names).filter(([kind]) => seen.has(kind)).map(([kind, words]) => {
    const swatch = key(svg("rect", { width: 30, height: 12, rx: 2, style: `fill: var(--${kind})` }));
    return el("span", null, swatch, words);
  }));
}
