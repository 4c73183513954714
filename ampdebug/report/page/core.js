// Data and helpers. Whatever text a run holds becomes a text node or an attribute, never markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SITES = DATA.sites;
const MAP = DATA.map;
const BIAS = 127;
const WORDS = { nan: NaN, inf: Infinity, "-inf": -Infinity };

const $ = (id) => document.getElementById(id);
const real = (value) => (typeof value === "string" ? WORDS[value] : value);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const count = (value) => value.toLocaleString("en-US");

// Five significant digits, as a reader wants them; the exact number is in the store and in the cell's data-value.
function show(value) {
  const number = real(value);
  if (number === null || number === undefined) return "–";
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  if (number === 0) return "0";
  const size = Math.abs(number);
  if (Number.isInteger(number) && size < 1e7) return String(number);
  const [digits, exponent] = number.toExponential(4).split("e");
  if (exponent >= -4 && exponent < 6) return String(Number(number.toPrecision(5)));
  return `${digits.includes(".") ? digits.replace(/\.?0+$/, "") : digits}e${exponent}`;
}

// 0 % and 100 % only where it is exactly that: the rule of watchlist.share.
function share(part, whole) {
  if (!whole) return "";
  const percent = (100 * part) / whole;
  if (percent > 0 && percent < 0.1) return "<0.1 %";
  if (percent > 99.9 && percent < 100) return ">99.9 %";
  return `${Number(percent.toPrecision(3))} %`;
}

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => `2${[...String(exponent)].map((c) => SUPERSCRIPT[c]).join("")}`;
const steps = (first, last) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function bytes(base64) {
  const text = atob(base64);
  const result = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) result[i] = text.charCodeAt(i);
  return result;
}
const bit = (plane, place) => (plane[place >> 3] >> (place & 7)) & 1;

// LEB128. Multiplied, not shifted: shifts of numbers end at 32 bits.
function integers(data) {
  const result = [];
  for (let at = 0; at < data.length; at++) {
    let value = 0;
    let unit = 1;
    for (; data[at] & 128; at++, unit *= 128) value += (data[at] & 127) * unit;
    result.push(value + data[at] * unit);
  }
  return result;
}

// --- places ---
const CELL_KINDS = new Set(["input", "output", "output_gradient"]);
const kindOf = (site) => DATA.kinds[SITES.kind[site]];
const pathOf = (site) => SITES.path[site] || "(network)";
const keyOf = (site) => (CELL_KINDS.has(kindOf(site)) ? "cell " : "parameter ") + SITES.path[site];
const nonfinite = (site) => SITES.nan[site] + SITES.pos_inf[site] + SITES.neg_inf[site];

function whatOf(site) {
  const call = SITES.call[site] ? ` call ${SITES.call[site]}` : "";
  const slot = SITES.slot[site] ? ` ${SITES.slot[site]}` : "";
  return kindOf(site).replace("_", " ") + call + slot;
}

const GROUPS = new Map(); // all sites of one cell or one parameter
for (let site = 0; site < SITES.path.length; site++) {
  if (!GROUPS.has(keyOf(site))) GROUPS.set(keyOf(site), []);
  GROUPS.get(keyOf(site)).push(site);
}
const ROWS = new Map(DATA.rows.map((row) => [keyOf(row.site), row]));
const CELLS = new Map(DATA.cells.map((cell) => [cell.path, cell]));

// --- the map of exponent ranges ---
const COLUMNS = MAP.first.length;
const LOWEST = bytes(MAP.lowest);
const HIGHEST = bytes(MAP.highest);
const NONFINITE = bytes(MAP.nonfinite);
const SEEN = bytes(MAP.seen);

// {seen, bad, low, high}: low and high are null where the place had no finite nonzero value in these steps.
function rangeOf(site, column) {
  const place = site * COLUMNS + column;
  const some = LOWEST[place] <= HIGHEST[place];
  return {
    seen: !!bit(SEEN, place),
    bad: !!bit(NONFINITE, place),
    low: some ? LOWEST[place] - BIAS : null,
    high: some ? HIGHEST[place] - BIAS : null,
  };
}

function sayRange(range) {
  if (!range.seen) return "not measured";
  const parts = [];
  if (range.bad) parts.push("NaN or infinity");
  if (range.high !== null) parts.push(`${power(range.low)} to ${power(range.high)}`);
  else if (!range.bad) parts.push("every value is 0");
  return parts.join(", ");
}

// --- drawing ---
const printing = { now: false, then: [] };

// Calls back with true before the page is printed and with false afterwards.
function onPrint(callback) {
  printing.then.push(callback);
}
function print(now) {
  if (printing.now === now) return;
  printing.now = now;
  for (const callback of printing.then) callback(now);
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
matchMedia("print").addEventListener("change", (event) => print(event.matches)); // printed by a program

const LIGHT = el("i", { class: "light", hidden: true }); // paper is light, whatever the screen is
document.body.append(LIGHT);
const color = (name) => getComputedStyle(printing.now ? LIGHT : document.documentElement).getPropertyValue(`--${name}`).trim();

// Round numbers between low and high, about as many as asked for.
function ticks(low, high, wanted, whole) {
  if (!(high > low)) return [low];
  let unit = 10 ** Math.floor(Math.log10((high - low) / wanted));
  unit *= [1, 2, 5, 10].find((factor) => (high - low) / (unit * factor) <= wanted);
  if (whole) unit = Math.max(1, Math.round(unit));
  const result = [];
  for (let k = Math.ceil(low / unit - 1e-9); k * unit <= high + unit * 1e-9; k++) result.push(Number((k * unit).toPrecision(12)));
  return result;
}

// Redraw when the width changes or colours do.
function redraw(node, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (node.clientWidth !== width) {
      width = node.clientWidth;
      draw();
    }
  }).observe(node);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
