// Sorting and searching, for the tables that are in the page already and for the one of all cells.

// "nan" sorts last, as unknown does; infinities by their size.
function compare(a, b, direction) {
  const numbers = typeof a === "number" || typeof b === "number";
  const missing = (value) => value === null || value === "" || Number.isNaN(value);
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  const order = numbers ? a - b || 0 : String(a).localeCompare(String(b), "en", { numeric: true });
  return direction * order;
}

class Table {
  // rows: [{values: [one a column, to sort by], text: what a search looks at, node: () => tr, keep: any}]
  // columns: [{name, kind: "number" | "text", first: 1 | -1}]
  constructor(table, columns, rows, options = {}) {
    this.body = table.tBodies[0];
    this.rows = rows;
    this.order = rows.map((_, index) => index);
    this.options = options;
    this.limit = options.limit || Infinity;
    this.words = [];
    this.headers = columns.map((column, index) => this.header(table.tHead.rows[0].cells[index], column, index));
    this.show();
  }

  header(cell, column, index) {
    const button = el("button", { type: "button", onclick: () => this.sort(index, column) }, column.name);
    cell.replaceChildren(button);
    cell.setAttribute("aria-sort", "none");
    return cell;
  }

  sort(index, column) {
    const now = this.headers[index].getAttribute("aria-sort");
    const first = column.kind === "number" ? -1 : 1;
    const direction = now === "none" ? first : now === "ascending" ? -1 : 1;
    this.headers.forEach((header) => header.setAttribute("aria-sort", "none"));
    this.headers[index].setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    this.order.sort(
      (a, b) => compare(this.rows[a].values[index], this.rows[b].values[index], direction) || a - b
    );
    this.show();
  }

  search(text) {
    this.words = text.toLowerCase().split(/\s+/).filter(Boolean);
    this.show();
  }

  more() {
    this.limit = Infinity;
    this.show();
  }

  show() {
    const accept = this.options.accept || (() => true);
    const found = this.order.filter(
      (index) => accept(this.rows[index].keep) && this.words.every((word) => this.rows[index].text.includes(word))
    );
    this.body.replaceChildren(...found.slice(0, this.limit).map((index) => this.rows[index].node()));
    if (this.options.shown) this.options.shown(found.length, Math.max(0, found.length - this.limit));
  }
}

// A table of the page as it stands: numbers are the cells' data-value.
function enhance(table) {
  const headers = [...table.tHead.rows[0].cells];
  const columns = headers.map((cell) => ({
    name: cell.textContent,
    kind: cell.classList.contains("number") ? "number" : "text",
  }));
  const rows = [...table.tBodies[0].rows].map((row) => ({
    node: () => row,
    text: row.textContent.toLowerCase(),
    values: [...row.cells].map((cell, index) => {
      if (columns[index].kind === "text") return cell.textContent;
      if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
      return cell.textContent in WORDS ? WORDS[cell.textContent] : null;
    }),
  }));
  const made = new Table(table, columns, rows);
  if (rows.length > 8) {
    const search = el("input", { type: "search", size: 22, oninput: (event) => made.search(event.target.value) });
    const box = el("div", { class: "controls" }, el("label", null, "search ", search));
    table.parentElement.before(box);
  }
}

const CELL_COLUMNS = [
  { name: "cell or parameter", kind: "text", value: (s) => pathOf(s) },
  { name: "what", kind: "text", value: (s) => whatOf(s) },
  { name: "dtype", kind: "text", value: (s) => SITES.dtypes[s].join("/") },
  { name: "absmax", kind: "number", value: (s) => real(SITES.absmax[s]), text: (s) => (SITES.absmax[s] === "nan" ? "" : show(SITES.absmax[s])) },
  { name: "not finite", kind: "number", value: (s) => nonfinite(s) / Math.max(1, SITES.count[s]), exact: nonfinite, text: (s) => (nonfinite(s) ? share(nonfinite(s), SITES.count[s]) : "") },
  { name: "zero", kind: "number", value: (s) => SITES.zeros[s] / Math.max(1, SITES.count[s]), exact: (s) => SITES.zeros[s], text: (s) => share(SITES.zeros[s], SITES.count[s]) },
  { name: "to 0 in fp16", kind: "number", value: (s) => SITES.flushed[s] / Math.max(1, SITES.count[s]), exact: (s) => SITES.flushed[s], text: (s) => share(SITES.flushed[s], SITES.count[s]) },
  { name: "steps", kind: "number", value: (s) => SITES.steps[s], text: (s) => count(SITES.steps[s]) },
  { name: "why", kind: "text", value: null },
];

function cellsTable(open) {
  const table = $("cells-table");
  table.tHead.append(
    el("tr", { role: "row" }, ...CELL_COLUMNS.map((c) => el("th", { scope: "col", role: "columnheader", class: c.kind === "number" ? "number" : null }))),
  );
  for (const [part, role] of [[table, "table"], [table.tHead, "rowgroup"], [table.tBodies[0], "rowgroup"]]) part.setAttribute("role", role);
  const rows = DATA.rows.map((row) => {
    const why = row.reasons.slice(0, 2).map(([, text]) => text).join("; ");
    const values = CELL_COLUMNS.map((column) => (column.value ? column.value(row.site) : why));
    const text = [pathOf(row.site), SITES.type[row.site], values[1], values[2], why].join(" ").toLowerCase();
    let made = null; // a row is made when it is first shown
    return { values, text, keep: row, node: () => (made = made || cellRow(row, values, why, open)) };
  });
  const alarm = $("cells-alarm");
  const more = $("cells-more");
  const said = $("cells-count");
  const made = new Table(table, CELL_COLUMNS, rows, {
    limit: 100,
    accept: (row) => !alarm.checked || row.alarm,
    shown: (found, left) => {
      said.textContent = `${count(found)} of ${count(rows.length)}${left ? `, the first ${count(found - left)} shown` : ""}`;
      more.hidden = !left;
      more.textContent = `Show ${count(left)} more`;
    },
  });
  $("cells-search").addEventListener("input", (event) => made.search(event.target.value));
  alarm.addEventListener("change", () => made.show());
  more.addEventListener("click", () => made.more());
}

function cellRow(row, values, why, open) {
  const site = row.site;
  const type = SITES.type[site];
  const name = el("button", { type: "button", class: "link path" }, pathOf(site));
  const cells = CELL_COLUMNS.map((column, index) => {
    if (index === 0) return el("td", { class: "name", role: "cell" }, name, type ? el("span", { class: "type" }, ` ${type}`) : null);
    if (!column.value) return el("td", { class: "why", role: "cell" }, why);
    const exact = column.kind === "number" ? (column.exact ? column.exact(site) : column.value(site)) : null;
    const label = index > 2 ? column.name : null;
    const attributes = { role: "cell", class: column.kind === "number" ? "number" : null, "data-value": exact, "data-label": label };
    return el("td", attributes, (column.text || column.value)(site));
  });
  return el("tr", { role: "row", class: row.alarm ? "alarm" : null, "data-site": site, onclick: () => open(keyOf(site), site, null) }, ...cells);
}
