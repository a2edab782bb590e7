// Everything anew: after a choice, when the width of the page changes, and for paper.

function draw() {
  hideTip();
  state.variants = state.alone === null ? [] : variants();
  keeping($("legend"), drawLegend);
  drawStyles();
  drawCharts();
  drawTable();
}
drawControls();
drawColumns();
draw();
tellAbsent();
drawTimeline();
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  drawCharts();
  drawTimeline();
});
addEventListener("beforeprint", () => {
  state.page = 0;
  drawTable(PRINTED);
});
addEventListener("afterprint", () => drawTable());
