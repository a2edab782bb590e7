// What a reader does with the page of crisp report, and what is there then.

const all = (where) => [...document.querySelectorAll(where)];
const lines = () => all("#figures figure").map((figure) =>
  [...figure.querySelectorAll("path.line")].map((line) => line.dataset.policy));
const marks = () => all("#figures figure").map((figure) =>
  [figure.querySelectorAll("circle.point").length, figure.querySelectorAll("path.measured").length]);
const column = (place) => all(`#table tbody tr td:nth-child(${place})`).map((cell) => cell.textContent);
const press = (node, key) => node.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const found = { title: document.title, images: all("img").length, lines: lines(), marks: marks() };
found.legend = all("#legend button").map((button) => button.textContent);

const lru = all("#legend button")[0];
lru.focus();
lru.click();
found.alone = { lines: lines(), marks: marks(), pressed: document.activeElement.getAttribute("aria-pressed"),
  rows: column(1), bounds: all("path.bound").length, named: all(".bound-name").map((name) => name.textContent) };
document.activeElement.click();
found.again = lines();

const chart = all("svg.chart")[0];
const dot = chart.querySelector("circle.point").getBoundingClientRect();
const [clientX, clientY] = [dot.x + dot.width / 2, dot.y + dot.height / 2];
chart.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY }));
found.pointed = document.getElementById("tip").innerText;
chart.dispatchEvent(new PointerEvent("pointerleave"));
chart.focus();
press(chart, "ArrowRight");
found.tip = document.getElementById("tip").innerText;
press(chart, "Escape");
found.hidden = document.getElementById("tip").hidden;

const speed = () => all("#table th button").find((button) => button.textContent === "speed");
speed().focus();
speed().click();
found.rising = column(4);
found.sorted = document.activeElement.closest("th").getAttribute("aria-sort");
speed().click();
found.falling = column(4);
found.why = all("#table td.none").map((cell) => cell.title);

const timeline = all("svg.timeline")[0], bars = () => all("svg.timeline rect.bar").length;
found.bars = [bars(), all("svg.timeline rect.load").length, all("svg.timeline rect.compute").length];
press(timeline, "ArrowRight");
press(timeline, "ArrowRight");
found.bar = document.getElementById("tip").innerText;
press(timeline, "Enter");
found.near = [bars(), all("#timeline-controls span").pop().textContent];
press(all("svg.timeline")[0], "Escape");
found.far = bars();
found.fetched = performance.getEntriesByType("resource").length;
return found;
