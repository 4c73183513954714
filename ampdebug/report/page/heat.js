// Places x steps: a canvas that draws the rows in view only, so that thousands of them cost nothing.
const PRINTED_ROWS = 400;

function rowColor(range, which) {
  if (!range.seen) return color("empty");
  if (range.bad) return color("bad");
  if (range.high === null) return color("zero");
  return DATA.palette[(which === "highest" ? range.high : range.low) + BIAS];
}

class Heat {
  constructor(open) {
    this.open = open;
    this.view = $("map-view");
    this.canvas = $("map-canvas");
    this.axis = $("map-axis");
    this.said = $("map-said");
    this.cursor = null; // [row, column]
    this.rows = [];
    const present = DATA.kinds.filter((kind) => this.sites(kind).length);
    if (!present.length || !COLUMNS) return;
    $("map").hidden = false;
    $("map-kind").append(...present.map((kind) => el("option", { value: kind }, kind.replace("_", " "))));
    $("map-kind").value = present.includes("output") ? "output" : present[0];
    for (const name of ["kind", "which", "order", "compact"]) $(`map-${name}`).addEventListener("change", () => this.choose());
    $("map-filter").addEventListener("input", () => this.choose());
    this.view.addEventListener("scroll", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.point(this.place(event)));
    this.canvas.addEventListener("click", (event) => {
      const place = this.place(event);
      if (!place) return;
      this.point(place);
      this.choice();
    });
    this.view.addEventListener("keydown", (event) => this.key(event));
    onPrint(() => {
      this.legend();
      this.draw();
    });
    this.choose();
    redraw(this.view, () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.legend());
  }

  sites(kind) {
    const result = [];
    for (let site = 0; site < SITES.path.length; site++) if (SITES.rows[site] && kindOf(site) === kind) result.push(site);
    return result;
  }

  choose() {
    this.which = $("map-which").value;
    this.height = $("map-compact").checked ? 5 : matchMedia("(pointer: coarse)").matches ? 24 : 17;
    const words = $("map-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    this.rows = this.sites($("map-kind").value).filter((site) => {
      const text = `${pathOf(site)} ${SITES.type[site]} ${SITES.slot[site]}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if ($("map-order").value === "look") {
      const rank = new Map(DATA.rows.map((row, index) => [keyOf(row.site), index]));
      this.rows.sort((a, b) => rank.get(keyOf(a)) - rank.get(keyOf(b)) || a - b);
    }
    this.cursor = null;
    this.view.scrollTop = 0;
    this.said.textContent = this.rows.length
      ? `${plural(this.rows.length, "row")}. Point at the map, or focus it and use the arrow keys; Enter shows the details.`
      : "Nothing matches.";
    this.legend();
    this.draw();
  }

  // Everything in CSS pixels of the canvas.
  layout() {
    const width = Math.max(260, this.view.clientWidth);
    const label = Math.round(Math.min(290, width * (width < 600 ? 0.36 : 0.27)));
    const total = this.rows.length * this.height;
    const rows = printing.now ? Math.min(this.rows.length, PRINTED_ROWS) : this.rows.length;
    const limit = printing.now ? Infinity : this.view.clientHeight || 600;
    return { width, label, total, area: width - label - 8, visible: Math.max(1, Math.min(rows * this.height, limit)), rows };
  }

  draw() {
    const space = $("map-space");
    space.style.height = `${this.rows.length * this.height}px`;
    const box = this.layout();
    if (printing.now) space.style.height = `${box.rows * this.height}px`;
    const more = $("map-more");
    more.hidden = !(printing.now && box.rows < this.rows.length);
    more.textContent = `${count(this.rows.length - box.rows)} more rows are not printed.`;
    const ink = prepare(this.canvas, box.width, box.visible);
    const top = printing.now ? 0 : this.view.scrollTop;
    const first = Math.floor(top / this.height);
    const last = Math.min(box.rows - 1, Math.floor((top + box.visible - 1) / this.height));
    const left = (column) => box.label + Math.round((column * box.area) / COLUMNS);
    const gap = this.height > 8 ? 1 : 0;
    const every = Math.ceil(14 / this.height); // labels of compact rows would lie upon each other
    const colors = { ink: color("ink"), bad: color("bad"), counter: color("zero"), zero: color("zero"), faint: color("faint"), empty: color("empty") };
    ink.font = `12px ${getComputedStyle(document.body).getPropertyValue("--mono")}`;
    ink.textBaseline = "middle";
    for (let row = first; row <= last; row++) {
      const site = this.rows[row];
      const y = row * this.height - top;
      if (row % every === 0) {
        ink.fillStyle = colors.ink;
        ink.fillText(fit(ink, rowName(site), box.label - 16), 8, y + (every > 1 ? 7 : this.height / 2));
      }
      for (let column = 0; column < COLUMNS; column++) {
        const range = rangeOf(site, column);
        const [from, to] = [left(column), left(column + 1)];
        ink.fillStyle = !range.seen ? colors.empty : range.bad ? colors.bad : range.high === null ? colors.zero : rowColor(range, this.which);
        ink.fillRect(from, y, to - from, this.height - gap);
        if (range.bad) badMark(ink, from, y, to - from, this.height - gap, colors.counter);
        else if (range.seen && range.high === null) zeroMark(ink, from, y, to - from, this.height - gap, colors.faint);
      }
    }
    if (this.cursor && this.cursor[0] >= first && this.cursor[0] <= last) {
      const [row, column] = this.cursor;
      // Two lines, light and dark: one of them is seen on any colour.
      for (const [paint, line] of [[color("card"), 5], [colors.ink, 2]]) {
        ink.strokeStyle = paint;
        ink.lineWidth = line;
        ink.strokeRect(left(column) - 1, row * this.height - top - 1, left(column + 1) - left(column) + 2, this.height - gap + 2);
      }
    }
    this.drawAxis(box, left);
  }

  // Above the map: which steps, and in which of them the gradients overflowed.
  drawAxis(box, left) {
    const ink = prepare(this.axis, box.width, 34);
    ink.font = `11.5px ${getComputedStyle(document.body).fontFamily}`;
    ink.fillStyle = color("soft");
    ink.textBaseline = "alphabetic";
    ink.fillText("step", 8, 12);
    const wanted = Math.max(1, Math.floor(box.area / 90));
    const unit = Math.max(1, Math.ceil(COLUMNS / wanted));
    for (let column = 0; column < COLUMNS; column += unit) {
      const text = count(MAP.first[column]);
      if (left(column) + ink.measureText(text).width < box.width) ink.fillText(text, left(column), 12);
    }
    ink.fillText("overflow", 8, 28);
    for (let column = 0; column < COLUMNS; column++) {
      if (!MAP.overflows[column]) continue;
      ink.fillStyle = color("mark");
      ink.fillRect(left(column), 20, Math.max(2, left(column + 1) - left(column) - (box.area / COLUMNS > 5 ? 1 : 0)), 9);
    }
  }

  place(event) {
    const box = this.layout();
    const area = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - area.top + this.view.scrollTop) / this.height);
    const column = Math.floor(((event.clientX - area.left - box.label) / box.area) * COLUMNS);
    if (row < 0 || row >= this.rows.length) return null;
    return [row, Math.max(0, Math.min(COLUMNS - 1, column))];
  }

  point(place) {
    if (!place) return;
    this.cursor = place;
    const site = this.rows[place[0]];
    this.said.replaceChildren(el("b", { class: "path" }, rowName(site)), ` · ${sayColumn(place[1])}: ${sayRange(rangeOf(site, place[1]))}`);
    this.draw();
  }

  choice() {
    const site = this.rows[this.cursor[0]];
    this.open(keyOf(site), site, this.cursor[1]);
  }

  key(event) {
    if (!this.rows.length) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (this.cursor) this.choice();
      return;
    }
    const [row, column] = this.cursor || [Math.floor(this.view.scrollTop / this.height), 0];
    const page = Math.max(1, Math.floor(this.view.clientHeight / this.height) - 1);
    const to = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
      PageUp: [row - page, column], PageDown: [row + page, column], Home: [row, 0], End: [row, COLUMNS - 1],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    const place = this.cursor ? [Math.max(0, Math.min(this.rows.length - 1, to[0])), Math.max(0, Math.min(COLUMNS - 1, to[1]))] : [row, column];
    const top = place[0] * this.height;
    if (top < this.view.scrollTop) this.view.scrollTop = top;
    if (top + this.height > this.view.scrollTop + this.view.clientHeight) this.view.scrollTop = top + this.height - this.view.clientHeight;
    this.point(place);
  }

  legend() {
    const { max, normal, subnormal } = DATA.float16;
    const entry = (fillColor, text, mark) =>
      el("li", null, svg("svg", { width: 18, height: 14, viewBox: "0 0 18 14", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { width: 18, height: 14, fill: fillColor }), mark), text);
    const at = (exponent) => DATA.palette[exponent + BIAS];
    const gradient = svg("svg", { width: 150, height: 14, viewBox: "0 0 150 14", preserveAspectRatio: "none", "aria-hidden": "true" });
    const size = max - normal + 1;
    for (let k = 0; k < size; k++) gradient.append(svg("rect", { x: (k * 150) / size, width: 150 / size + 0.5, height: 14, fill: at(normal + k) }));
    const bad = svg("path", { d: "M5.5 3.5l7 7m0 -7l-7 7", stroke: color("zero"), "stroke-width": 1.5 });
    const zero = svg("path", { d: "M6 7h6", stroke: color("faint"), "stroke-width": 1.5 });
    $("map-legend").replaceChildren(
      entry(color("bad"), "NaN or infinity", bad),
      entry(at(max + 1), `${power(max + 1)} and more: overflows in float16`),
      el("li", null, gradient, `${power(normal)} to ${power(max)}: float16's normal range`),
      entry(at(normal - 1), `below ${power(normal)}: subnormal in float16, fewer digits`),
      entry(at(subnormal - 2), `below ${power(subnormal - 1)}: zero in float16`),
      entry(color("zero"), "every value is 0", zero),
      entry(color("empty"), "not measured")
    );
  }
}

const rowName = (site) => {
  const call = SITES.call[site] ? ` call ${SITES.call[site]}` : "";
  return `${pathOf(site)}${call}${SITES.slot[site] ? ` ${SITES.slot[site]}` : ""}`;
};

// The steps of a column up to the next one's; overflows of steps that were not measured in between count here.
function sayColumn(column) {
  const overflows = MAP.overflows[column];
  const often = MAP.first[column] === MAP.last[column] && overflows === 1 ? "overflow" : `overflow in ${plural(overflows, "step")}`;
  return steps(MAP.first[column], MAP.last[column]) + (overflows ? ` (${often})` : "");
}

function prepare(canvas, width, height) {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const ink = canvas.getContext("2d");
  ink.scale(ratio, ratio);
  return ink;
}

// A cross, so that it is not told by colour alone; where there is no room for one, a line.
function badMark(ink, x, y, width, height, paint) {
  ink.strokeStyle = ink.fillStyle = paint;
  const size = Math.min(width, height) / 2 - 1.5;
  const [cx, cy] = [x + width / 2, y + height / 2];
  if (size < 1.5) {
    ink.fillRect(x, cy - 0.5, width, 1);
    return;
  }
  const arm = Math.min(size, 3.5);
  ink.lineWidth = 1.3;
  ink.beginPath();
  ink.moveTo(cx - arm, cy - arm);
  ink.lineTo(cx + arm, cy + arm);
  ink.moveTo(cx + arm, cy - arm);
  ink.lineTo(cx - arm, cy + arm);
  ink.stroke();
}

function zeroMark(ink, x, y, width, height, paint) {
  if (height < 6) return;
  ink.fillStyle = paint;
  ink.fillRect(x + width * 0.25, y + height / 2 - 0.5, width * 0.5, 1);
}

// Both ends of a path stay, since paths of one network differ at either; where there is little room, the end alone.
function fit(ink, text, width) {
  if (ink.measureText(text).width <= width) return text;
  let keep = Math.floor((text.length * width) / ink.measureText(text).width);
  for (; keep > 3; keep--) {
    const head = keep > 24 ? Math.floor((keep - 1) / 2) : 0;
    const short = `${text.slice(0, head)}…${text.slice(text.length - (keep - 1 - head))}`;
    if (ink.measureText(short).width <= width) return short;
  }
  return "…";
}
