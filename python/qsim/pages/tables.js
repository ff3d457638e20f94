// Sorting and filtering of tables. A cell's data-value is what it is sorted by; without one its name, or its text. Nothing there is last.
for (const section of document.querySelectorAll("section.table")) {
  const body = section.querySelector("tbody");
  const heads = [...section.querySelectorAll("th")];
  const rows = [...body.rows];
  const filter = section.querySelector("input");
  const chosen = section.querySelector("select");
  const shown = section.querySelector("output");
  const widths = heads.map(({ classList }) => (classList.contains("wide") ? "minmax(10rem, 2.6fr)" : classList.contains("number") ? "minmax(6rem, 1.3fr)" : "minmax(6rem, 1.4fr)"));
  section.querySelector("table").style.setProperty("--columns", widths.join(" "));

  const value = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? (cell.querySelector(".name") ?? cell).textContent;
    return heads[column].classList.contains("number") ? (text === "" ? NaN : Number(text)) : text;
  };
  const isNothing = (v) => v === "" || Number.isNaN(v);
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a < b ? -1 : a > b ? 1 : 0);

  const sort = (column, descending) => {
    const keyed = rows.map((row, index) => ({ row, index, v: value(row, column) }));
    keyed.sort((a, b) => isNothing(a.v) - isNothing(b.v) || (isNothing(a.v) ? 0 : compare(a.v, b.v) * (descending ? -1 : 1)) || a.index - b.index);
    section.dispatchEvent(new Event("arranged"));
    body.append(...keyed.map(({ row }) => row));
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
    chosen.value = `${column} ${descending ? "down" : "up"}`;
  };
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      sort(column, now ? now === "ascending" : head.classList.contains("number") && !head.classList.contains("ascending"));
    });
  });
  chosen.addEventListener("change", () => {
    const [column, way] = chosen.value.split(" ");
    sort(Number(column), way === "down");
  });

  const texts = new Map(); // what the filter searches, from its first use on
  const text = (row) => {
    if (!texts.has(row)) texts.set(row, [...[...row.cells].map((cell) => cell.textContent), row.dataset.text ?? ""].join(" ").toLowerCase());
    return texts.get(row);
  };
  const look = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    section.dispatchEvent(new Event("arranged"));
    for (const row of rows) {
      row.hidden = !words.every((word) => text(row).includes(word));
      count += !row.hidden;
    }
    shown.textContent = count === rows.length ? `${count} rows` : `${count} of ${rows.length} rows`;
  };
  filter.addEventListener("input", look);
  look();

  const narrow = matchMedia("(max-width: 74rem)"); // then rows are cards, in which cells have the heads of their columns
  const label = () => {
    if (!narrow.matches) return;
    narrow.removeEventListener("change", label);
    const told = heads.map((head) => (head.classList.contains("wide") ? "" : head.textContent));
    for (const row of rows) told.forEach((head, i) => head && row.cells[i].firstChild && (row.cells[i].dataset.head = head));
  };
  narrow.addEventListener("change", label);
  label();
}
