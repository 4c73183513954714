const detail = new Detail();
const open = (key, site, column) => detail.open(key, site, column);
chart();
new Heat(open);
if (DATA.rows.length) {
  $("cells").hidden = false;
  cellsTable(open);
}
for (const table of document.querySelectorAll("table.sortable")) enhance(table);
let folded = [];
onPrint((now) => {
  if (now) folded = [...document.querySelectorAll("details:not([open])")];
  for (const part of folded) part.open = now;
});
document.documentElement.dataset.ready = "yes";
