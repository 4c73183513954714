// One cell or parameter: why it deserves a look, each of its tensors in numbers, its range over the steps, histograms.
const FIELDS = ["site", "dtype", "count", "zeros", "nan", "pos_inf", "neg_inf", "flushed", "first", "length"];

// The rows of a place in each step of which there are histograms; unpacked when first asked for.
let unpacked = null;
function histograms(site) {
  if (!unpacked) {
    unpacked = DATA.snapshots.map((snapshot) => {
      const all = integers(bytes(snapshot.data));
      let at = snapshot.rows * FIELDS.length;
      const rows = [];
      for (let k = 0; k < snapshot.rows; k++) {
        const row = Object.fromEntries(FIELDS.map((name, index) => [name, all[k * FIELDS.length + index]]));
        row.step = snapshot.step;
        row.counts = all.slice(at, at + row.length);
        at += row.length;
        rows.push(row);
      }
      return rows;
    });
  }
  return unpacked.flatMap((rows) => rows.filter((row) => row.site === site));
}

const NUMBERS = [
  ["steps", (s) => count(SITES.steps[s])],
  ["elements", (s) => count(SITES.count[s])],
  ["absmax", (s) => show(SITES.absmax[s]), "absmax"],
  ["in step", (s) => show(SITES.absmax_step[s])],
  ["min", (s) => show(SITES.min[s]), "min"],
  ["max", (s) => show(SITES.max[s]), "max"],
  ["exponents", (s) => (SITES.highest_exponent[s] === null ? "–" : `${power(SITES.lowest_exponent[s])} to ${power(SITES.highest_exponent[s])}`)],
  ["NaN", (s) => count(SITES.nan[s]), "nan"],
  ["+inf", (s) => count(SITES.pos_inf[s]), "pos_inf"],
  ["−inf", (s) => count(SITES.neg_inf[s]), "neg_inf"],
  ["first not finite in step", (s) => show(SITES.first_nonfinite_step[s])],
  ["zero", (s) => share(SITES.zeros[s], SITES.count[s]), "zeros"],
  ["subnormal in fp16", (s) => share(SITES.subnormal[s], SITES.count[s]), "subnormal"],
  ["to 0 in fp16", (s) => share(SITES.flushed[s], SITES.count[s]), "flushed"],
  ["beyond 65504", (s) => share(SITES.exceeding[s], SITES.count[s]), "exceeding"],
  ["at 65504", (s) => count(SITES.saturated[s]), "saturated"],
];

class Detail {
  constructor() {
    this.dialog = $("detail");
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // the backdrop
    });
  }

  open(key, site, column) {
    const sites = GROUPS.get(key) || [];
    const chosen = site === null ? sites[0] : site;
    const path = chosen === undefined ? key.slice(key.indexOf(" ") + 1) || "(network)" : pathOf(chosen);
    const type = sites.map((s) => SITES.type[s]).find(Boolean) || "";
    const close = el("button", { type: "button", onclick: () => this.dialog.close() }, "Close");
    const title = el("h2", { id: "detail-title", class: "path" }, path, type ? el("span", null, ` ${type}`) : null);
    this.graphs = el("div", { class: "graphs" });
    this.chips = sites.map((s) => el("button", { type: "button", onclick: () => this.choose(s, column) }, `${whatOf(s)}, ${SITES.dtypes[s].join("/") || "no values"}`));
    this.sites = sites;
    this.dialog.replaceChildren(
      el("div", { class: "detail" },
        el("div", { class: "detail-head" }, title, close),
        this.column(chosen, column),
        this.reasons(key),
        this.about(path === "(network)" ? "" : path, key),
        el("div", { class: "chips", role: "group", "aria-label": "Tensors" }, ...this.chips),
        this.graphs,
        this.numbers(sites)
      )
    );
    if (!this.dialog.open) this.dialog.showModal();
    this.dialog.scrollTop = 0;
    if (chosen !== undefined) this.choose(chosen, column);
    close.focus();
  }

  column(site, column) {
    if (column === null || site === undefined) return null;
    return el("p", { class: "lead", id: "detail-column" }, el("b", null, `${whatOf(site)}, ${sayColumn(column)}`), `: ${sayRange(rangeOf(site, column))}`);
  }

  reasons(key) {
    const row = ROWS.get(key);
    if (!row || !row.reasons.length) return el("p", { class: "explain" }, "Nothing about it stands out.");
    return el("ul", { class: "reasons" }, ...row.reasons.map(([slug, text]) => el("li", { class: row.alarm ? "alarm" : null, title: slug }, text)));
  }

  about(path, key) {
    const cell = key.startsWith("cell ") ? CELLS.get(path) : null;
    if (!cell) return null;
    const pair = (name, ...value) => [el("dt", null, name), el("dd", null, ...value)];
    const computes = Object.entries(cell.computes).map(([operator, dtype]) => (operator ? `${operator} in ${dtype}` : dtype));
    const parameters = Object.entries(cell.parameters).map(([name, dtype]) => {
      const known = GROUPS.has(`parameter ${name}`);
      const link = known ? el("button", { type: "button", class: "link", onclick: () => this.open(`parameter ${name}`, null, null) }, name) : el("code", null, name);
      return el("span", null, link, ` ${dtype}  `);
    });
    const parts = [
      ...(cell.asked ? pair("asked to compute in", cell.asked) : []),
      ...(computes.length ? pair("computes in", computes.join(", ")) : []),
      ...(parameters.length ? pair("parameters", ...parameters) : []),
      ...(cell.note ? pair("note", cell.note) : []),
    ];
    return parts.length ? el("dl", { class: "pairs" }, ...parts) : null;
  }

  choose(site, column) {
    this.chips.forEach((chip, index) => chip.setAttribute("aria-pressed", String(this.sites[index] === site)));
    for (const cell of this.dialog.querySelectorAll("[data-of]")) cell.setAttribute("aria-selected", String(Number(cell.dataset.of) === site));
    const ranges = el("div", { class: "graph" }, el("h3", null, `Exponents over the steps: ${whatOf(site)}`));
    const counts = el("div", { class: "graph" });
    this.graphs.replaceChildren(ranges, counts);
    ranges.append(rangeGraph(site, column, Math.max(240, ranges.clientWidth - 24)));
    ranges.append(el("p", null, "Band: smallest to largest exponent of any value. Dashed: float16's largest, smallest normal and smallest subnormal."));
    this.histogram(counts, site);
  }

  histogram(node, site) {
    const rows = histograms(site);
    if (!rows.length) {
      node.append(el("h3", null, "Exponent histogram"), el("p", null, "There is no histogram of this tensor in the steps that the page holds."));
      return;
    }
    const select = el("select", { "aria-label": "step" }, ...rows.map((row, index) => el("option", { value: index }, `step ${row.step}`)));
    const graph = el("div", { class: "histogram" });
    const draw = () => {
      const row = rows[select.value];
      const bad = row.nan + row.pos_inf + row.neg_inf;
      const said = `${plural(row.count, "element")} of ${DATA.dtypes[row.dtype]}, ${share(row.zeros, row.count) || "0 %"} zero` + (bad ? `, ${count(bad)} not finite` : "");
      graph.replaceChildren(histogramGraph(row, Math.max(240, node.clientWidth - 24)), el("p", null, said));
    };
    select.value = rows.length - 1;
    const worst = rows.findIndex((row) => row.nan + row.pos_inf + row.neg_inf);
    if (worst >= 0) select.value = worst;
    select.addEventListener("change", draw);
    node.append(el("h3", null, "Exponent histogram, ", select), graph);
    draw();
  }

  numbers(sites) {
    const head = el("tr", null, el("th", { scope: "col" }, "over all measured steps"), ...sites.map((s) => el("th", { scope: "col", class: "number", "data-of": s }, whatOf(s))));
    const shape = (s) => (SITES.shape[s] ? `[${SITES.shape[s].join(", ")}]` : "–");
    const rows = [["dtype", (s) => SITES.dtypes[s].join("/") || "–"], ["shape", shape], ...NUMBERS];
    const body = rows.map(([name, text, field]) =>
      el("tr", { "data-field": field || null }, el("th", { scope: "row" }, name),
        ...sites.map((s) => el("td", { class: "number", "data-of": s, "data-value": field ? SITES[field][s] : null }, SITES.rows[s] || name === "shape" || name === "dtype" ? text(s) : "–")))
    );
    return el("div", { class: "table" }, el("table", { id: "detail-numbers" }, el("caption", null, "Numbers of each tensor"), el("thead", null, head), el("tbody", null, ...body)));
  }
}

// float16's limits as lines between the exponents: [exponent at whose lower edge it lies, what is beyond].
const LIMITS = [DATA.float16.max + 1, DATA.float16.normal, DATA.float16.subnormal];

function rangeGraph(site, column, width) {
  const [left, right, top, height] = [46, width - 6, 8, 200];
  const bottom = height - 24;
  const ranges = Array.from({ length: COLUMNS }, (_, k) => rangeOf(site, k));
  const low = Math.min(DATA.float16.subnormal - 2, ...ranges.filter((r) => r.high !== null).map((r) => r.low));
  const high = Math.max(DATA.float16.max + 3, ...ranges.filter((r) => r.high !== null).map((r) => r.high + 1));
  const x = (k) => left + (k * (right - left)) / COLUMNS;
  const y = (exponent) => bottom - ((exponent - low) / (high - low)) * (bottom - top);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Exponent range over the steps of ${pathOf(site)}` });
  for (const exponent of ticks(low, high, 5, true)) {
    root.append(svg("line", { class: "grid", x1: left, x2: right, y1: y(exponent), y2: y(exponent) }));
    root.append(svg("text", { x: left - 6, y: y(exponent) + 4, "text-anchor": "end" }, power(exponent)));
  }
  ranges.forEach((range, k) => {
    const size = Math.max(1, x(k + 1) - x(k) - (x(1) - x(0) > 4 ? 1 : 0));
    if (range.high !== null) root.append(svg("rect", { class: "bar", x: x(k), width: size, y: y(range.high + 1), height: y(range.low) - y(range.high + 1) }));
    if (range.bad) root.append(cross(x(k) + size / 2, top + 6, "mark"));
  });
  for (const limit of LIMITS) root.append(svg("line", { class: "limit", x1: left, x2: right, y1: y(limit), y2: y(limit) }));
  if (column !== null) root.append(svg("rect", { x: x(column) - 1, y: top, width: x(column + 1) - x(column) + 2, height: bottom - top, fill: "none", class: "cursor" }));
  const said = (k, anchor, at) => svg("text", { x: at, y: height - 6, "text-anchor": anchor }, k);
  root.append(said(count(MAP.first[0]), "start", left), said("step", "middle", (left + right) / 2), said(count(MAP.last[COLUMNS - 1]), "end", right));
  return root;
}

function histogramGraph(row, width) {
  const [left, right, top, height] = [8, width - 6, 16, 200];
  const bottom = height - 24;
  const first = row.first - BIAS;
  const low = Math.min(DATA.float16.subnormal - 2, row.length ? first : 0);
  const high = Math.max(DATA.float16.max + 3, row.length ? first + row.length : 0);
  const x = (exponent) => left + ((exponent - low) / (high - low)) * (right - left);
  const most = Math.max(1, ...row.counts);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Histogram of exponents in step ${row.step}` });
  row.counts.forEach((n, k) => {
    if (!n) return;
    const exponent = first + k;
    const kind = exponent > DATA.float16.max ? " out" : exponent < DATA.float16.normal ? " low" : "";
    const tall = Math.max(1, (n / most) * (bottom - top)); // one value is still seen
    const bar = svg("rect", { class: `bar${kind}`, x: x(exponent) + 0.5, width: Math.max(1, x(exponent + 1) - x(exponent) - 1), y: bottom - tall, height: tall, "data-exponent": exponent, "data-count": n });
    bar.append(svg("title", null, `${power(exponent)} to ${power(exponent + 1)}: ${count(n)}`));
    root.append(bar);
  });
  root.append(svg("line", { class: "grid", x1: left, x2: right, y1: bottom, y2: bottom }));
  for (const exponent of ticks(low, high, Math.max(3, width / 70), true)) {
    root.append(svg("text", { x: x(exponent), y: height - 8, "text-anchor": "middle" }, power(exponent)));
  }
  for (const limit of LIMITS) root.append(svg("line", { class: "limit", x1: x(limit), x2: x(limit), y1: top - 6, y2: bottom }));
  if (!row.length) root.append(svg("text", { x: (left + right) / 2, y: (top + bottom) / 2, "text-anchor": "middle" }, "no finite value but 0"));
  else root.append(svg("text", { x: right, y: top - 5, "text-anchor": "end" }, `largest bar: ${count(most)}`));
  return root;
}
