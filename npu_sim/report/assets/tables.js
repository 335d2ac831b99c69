// Tables that sort by a column and show many rows in steps.

const ROWS_AT_ONCE = 200;

// columns: [{title, value(row), text(row), number}]; `value` sorts, `text` is shown. options: {caption, sort, filter, onrow}.
function dataTable(columns, rows, options = {}) {
  const state = { column: options.sort ?? null, descending: true, shown: ROWS_AT_ONCE, words: "" };
  const body = element("tbody");
  const more = element("button", { type: "button", onclick: () => { state.shown = Infinity; update(); } });
  const heads = columns.map((column, index) => element("th", { scope: "col", class: column.number ? "number" : null },
    element("button", { type: "button", onclick: () => sortBy(index) }, column.title)));
  const status = element("span", { class: "note", role: "status" });
  const table = element("table", {},
    options.caption ? element("caption", {}, options.caption) : null,
    element("thead", {}, element("tr", {}, heads)), body);
  const filter = options.filter && rows.length > 10 ? element("input", {
    type: "search", placeholder: "Filter", "aria-label": "Filter the rows",
    oninput: (event) => { state.words = event.target.value.toLowerCase(); update(); },
  }) : null;

  function sortBy(index) {
    state.descending = state.column === index ? !state.descending : Boolean(columns[index].number);
    state.column = index;
    update();
  }

  function update() {
    let chosen = state.words ? rows.filter((row) => columns.some((c) => String(c.text(row)).toLowerCase().includes(state.words))) : rows;
    if (state.column !== null) {
      const value = columns[state.column].value ?? columns[state.column].text;
      chosen = d3.sort(chosen, (a, b) => (state.descending ? d3.descending : d3.ascending)(value(a), value(b)));
    }
    heads.forEach((head, index) => {
      if (index === state.column) head.setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...chosen.slice(0, state.shown).map((row) => {
      const cells = columns.map((column) => element("td", { class: column.number ? "number" : null }, column.text(row)));
      const made = element("tr", options.rowClass ? { class: options.rowClass(row) } : {}, cells);
      if (options.onrow) {
        const link = element("button", { type: "button", class: "link", onclick: () => options.onrow(row) }, ...cells[0].childNodes);
        cells[0].replaceChildren(link);
      }
      return made;
    }));
    more.hidden = chosen.length <= state.shown;
    more.textContent = `Show all ${formatCount(chosen.length)} rows`;
    status.textContent = state.words ? `${formatCount(chosen.length)} of ${formatCount(rows.length)} rows` : "";
  }

  update();
  return element("div", { class: "table" }, filter, status, table, more);
}
