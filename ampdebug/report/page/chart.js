// Loss, loss scale and overflows over the steps, on one axis.
const STEPS = DATA.steps;

function drawChart(node) {
  const bins = STEPS.first.length;
  const width = Math.max(280, node.clientWidth);
  const left = width < 500 ? 52 : 66;
  const right = width - 14;
  const panel = { loss: [26, width < 500 ? 170 : 200], scale: [0, 0], mark: [0, 0] };
  panel.scale = [panel.loss[1] + 34, panel.loss[1] + 34 + 74];
  panel.mark = [panel.scale[1] + 28, panel.scale[1] + 28 + 14];
  const height = panel.mark[1] + 30;
  const first = STEPS.first[0];
  const last = STEPS.last[bins - 1];
  const x = (step) => (last > first ? left + ((step - first) / (last - first)) * (right - left) : (left + right) / 2);
  const middle = (k) => x((STEPS.first[k] + STEPS.last[k]) / 2);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });

  const axis = (where, low, high, log, marks, label, title) => {
    const to = log ? Math.log2 : (v) => v;
    const [top, bottom] = where;
    const span = to(high) - to(low) || 1;
    const y = (value) => (high > low ? bottom - ((to(value) - to(low)) / span) * (bottom - top) : (top + bottom) / 2);
    root.append(svg("text", { x: left, y: top - 9, class: "title" }, title));
    for (const mark of marks) {
      root.append(svg("line", { class: "grid", x1: left, x2: right, y1: y(mark), y2: y(mark) }));
      root.append(svg("text", { x: left - 8, y: y(mark) + 4, "text-anchor": "end" }, label(mark)));
    }
    return y;
  };

  const xTicks = ticks(first, last, Math.max(2, Math.floor((right - left) / 110)), true);
  for (const step of xTicks) {
    const at = x(step);
    root.append(svg("line", { class: "grid", x1: at, x2: at, y1: panel.loss[0], y2: panel.mark[1] }));
    root.append(svg("text", { x: at, y: height - 10, "text-anchor": at > right - 20 ? "end" : "middle" }, count(step)));
  }
  if (width >= 500) root.append(svg("text", { x: 10, y: height - 10 }, "step"));

  // loss
  const lows = STEPS.loss_low.filter((v) => v !== null);
  const highs = STEPS.loss_high.filter((v) => v !== null);
  const low = Math.min(...lows);
  const high = Math.max(...highs);
  const log = $("chart-log").checked && low > 0;
  if (lows.length) {
    const marks = log ? decades(low, high) : ticks(low, high, 5);
    const y = axis(panel.loss, low, high, log, marks, show, "loss");
    root.append(...curve(STEPS.loss_low, STEPS.loss_high, STEPS.loss_last, middle, y, "loss", false));
  } else root.append(svg("text", { x: left, y: panel.loss[0] - 9, class: "title" }, STEPS.loss_nonfinite.some(Boolean) ? "loss: never finite" : "loss: not known"));
  for (let k = 0; k < bins; k++) {
    if (STEPS.loss_nonfinite[k]) root.append(cross(middle(k), panel.loss[0] + 5, "mark"));
  }

  // loss scale, in powers of two
  const scales = STEPS.scale_low.filter((v) => v > 0);
  if (scales.length) {
    const bottom = Math.min(...scales);
    const top = Math.max(...STEPS.scale_high.filter((v) => v > 0));
    const y = axis(panel.scale, bottom, top, true, logTicks(bottom, top, 3), sayScale, "loss scale");
    const positive = (list) => list.map((v) => (v > 0 ? v : null));
    root.append(...curve(positive(STEPS.scale_low), positive(STEPS.scale_high), positive(STEPS.scale_last), middle, y, "loss-scale", true));
  } else root.append(svg("text", { x: left, y: panel.scale[0] - 9, class: "title" }, "loss scale: not known"));

  // overflows
  const marked = STEPS.marked.reduce((a, b) => a + b, 0);
  root.append(svg("text", { x: left, y: panel.mark[0] - 8, class: "title" }, marked ? `overflow: ${plural(marked, "step")}` : "overflow: none"));
  root.append(svg("line", { class: "grid", x1: left, x2: right, y1: panel.mark[1], y2: panel.mark[1] }));
  const thick = Math.max(1.5, Math.min(6, (right - left) / bins - 1));
  for (let k = 0; k < bins; k++) {
    if (STEPS.marked[k]) root.append(svg("line", { class: "mark", "stroke-width": thick, x1: middle(k), x2: middle(k), y1: panel.mark[0], y2: panel.mark[1] }));
  }

  const cursor = svg("line", { class: "cursor", y1: panel.loss[0], y2: panel.mark[1], visibility: "hidden" });
  root.append(cursor);
  node.replaceChildren(root);
  return { cursor, middle, bins, at: (px) => nearest(px, middle, bins) };
}

function sayScale(value) {
  const exponent = Math.log2(value);
  return Number.isInteger(exponent) ? power(exponent) : show(value);
}

function decades(low, high) {
  const marks = ticks(Math.ceil(Math.log10(low)), Math.floor(Math.log10(high)), 5, true).map((k) => Number(`1e${k}`));
  const inside = marks.filter((mark) => mark >= low && mark <= high);
  return inside.length ? inside : [low, high];
}

function logTicks(low, high, wanted = 5) {
  const from = Math.ceil(Math.log2(low));
  const to = Math.floor(Math.log2(high));
  const marks = from < to ? ticks(from, to, wanted, true).map((k) => 2 ** k) : [low, high];
  return [...new Set(marks)];
}

const cross = (x, y, kind) =>
  svg("path", { class: kind, "stroke-width": 2, d: `M${x - 3.5} ${y - 3.5}l7 7m0 -7l-7 7` });

// A band from the smallest to the largest, and a line through the last of each group; unknown and not finite break it.
function curve(lows, highs, lasts, x, y, kind, stairs) {
  const result = [];
  let run = [];
  let line = "";
  const band = () => {
    if (run.length && run.some((k) => lows[k] !== highs[k])) {
      const top = run.map((k) => `${x(k).toFixed(1)} ${y(highs[k]).toFixed(1)}`);
      const under = run.map((k) => `${x(k).toFixed(1)} ${y(lows[k]).toFixed(1)}`).reverse();
      result.push(svg("path", { class: "band", d: `M${top.join("L")}L${under.join("L")}Z` }));
    }
    run = [];
  };
  let open = false;
  for (let k = 0; k < lasts.length; k++) {
    if (lows[k] === null) band();
    else run.push(k);
    const value = real(lasts[k]);
    if (value === null || !Number.isFinite(value)) {
      open = false;
      continue;
    }
    const [px, py] = [x(k).toFixed(1), y(value).toFixed(1)];
    line += open ? (stairs ? `H${px}V${py}` : `L${px} ${py}`) : `M${px} ${py}h0.01`;
    open = true;
  }
  band();
  result.push(svg("path", { class: kind, d: line, "stroke-linecap": "round", "stroke-linejoin": "round" }));
  return result;
}

function nearest(px, x, size) {
  let low = 0;
  let high = size - 1;
  while (high - low > 1) {
    const half = (low + high) >> 1;
    if (x(half) < px) low = half;
    else high = half;
  }
  return Math.abs(x(low) - px) <= Math.abs(x(high) - px) ? low : high;
}

function sayBin(k) {
  const between = (low, high) => (low === high ? show(low) : `${show(low)} to ${show(high)}`);
  const parts = [];
  const bad = STEPS.loss_nonfinite[k];
  if (STEPS.loss_low[k] !== null) parts.push(`loss ${between(STEPS.loss_low[k], STEPS.loss_high[k])}`);
  if (bad) parts.push(STEPS.steps[k] === 1 ? `loss ${show(STEPS.loss_last[k])}` : `loss not finite in ${plural(bad, "step")}`);
  if (STEPS.scale_last[k] !== null) parts.push(`loss scale ${STEPS.scale_low[k] === null ? show(STEPS.scale_last[k]) : between(STEPS.scale_low[k], STEPS.scale_high[k])}`);
  if (STEPS.marked[k]) parts.push(STEPS.steps[k] === 1 ? "overflow" : `overflow in ${plural(STEPS.marked[k], "step")}`);
  if (STEPS.skipped[k]) parts.push(STEPS.steps[k] === 1 ? "update skipped" : `${plural(STEPS.skipped[k], "update")} skipped`);
  return [steps(STEPS.first[k], STEPS.last[k]), parts.join(" · ")];
}

function chart() {
  if (!STEPS.first.length) return;
  $("training").hidden = false;
  const node = $("chart");
  const said = $("chart-said");
  const legend = [["loss", "loss"], ["loss-scale", "loss scale"], ["overflow", "overflow"]];
  $("chart-legend").append(...legend.map(([kind, name]) => el("span", { class: `key ${kind}` }, name)));
  const lows = STEPS.loss_low.filter((v) => v !== null);
  const log = $("chart-log");
  log.disabled = !lows.length || Math.min(...lows) <= 0;
  log.checked = !log.disabled && Math.max(...STEPS.loss_high.filter((v) => v !== null)) > 1000 * Math.min(...lows);
  let drawn = null;
  let now = -1;
  const point = (k) => {
    now = k;
    const at = drawn.middle(k);
    fill(drawn.cursor, { x1: at, x2: at, visibility: "visible" }, []);
    const [where, what] = sayBin(k);
    said.replaceChildren(el("b", null, where), `: ${what}`);
  };
  const draw = () => {
    drawn = drawChart(node);
    if (now >= 0) point(now);
  };
  redraw(node, draw);
  log.addEventListener("change", draw);
  node.addEventListener("pointermove", (event) => point(drawn.at(event.clientX - node.getBoundingClientRect().left)));
  node.addEventListener("click", (event) => point(drawn.at(event.clientX - node.getBoundingClientRect().left)));
  node.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: now - far, ArrowRight: now + far, Home: 0, End: drawn.bins - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    point(Math.max(0, Math.min(drawn.bins - 1, now < 0 && event.key === "ArrowLeft" ? drawn.bins - 1 : to)));
  });
}
