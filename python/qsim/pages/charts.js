// Curves over the rows of the table in the same section: the cursor names a row, a click leads to it.
const LONGEST = 60; // of a name in the box beside the cursor, from its end
for (const figure of document.querySelectorAll("figure.chart")) {
  const given = JSON.parse(figure.dataset.chart);
  const section = figure.closest("section");
  const rows = [...section.querySelectorAll("tbody tr")]; // before anybody sorts them
  const count = given.rows.length;
  const along = given.along ?? Array.from({ length: count }, (_, i) => i + 1);
  const order = Array.from(along.keys()).sort((a, b) => along[a] - along[b]); // uPlot wants them to ascend
  const row = (point) => (given.rows[point] === null ? null : rows[given.rows[point]]);
  const title = (point) => {
    const name = row(point)?.querySelector(".name")?.textContent ?? row(point)?.cells[0].textContent ?? given.only;
    return name.length > LONGEST ? `…${name.slice(1 - LONGEST)}` : name;
  };
  const told = (index) => {
    const point = order[index];
    const values = given.series.map(({ name, values }) => [name, values[point]]).filter(([, value]) => value !== null);
    const place = given.along ? [`${given.x}: ${short(along[point])}`] : [];
    return [title(point), ...place, ...values.map(([name, value]) => `${name}: ${short(value)}${given.unit ? ` ${given.unit}` : ""}`)];
  };
  const dot = (u, at, value, name, size) => {
    const context = u.ctx;
    context.fillStyle = color(name);
    context.beginPath();
    context.arc(u.valToPos(at, "x", true), u.valToPos(value, "y", true), size * uPlot.pxRatio, 0, 2 * Math.PI);
    context.fill();
  };
  const marks = (u) => {
    const context = u.ctx;
    context.save();
    context.beginPath();
    context.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    context.clip();
    const levels = [...given.limits].sort((a, b) => a.value - b.value);
    for (const { value, severity } of levels) {
      const y = u.valToPos(value, "y", true);
      context.strokeStyle = color(severity);
      context.setLineDash([4 * uPlot.pxRatio, 4 * uPlot.pxRatio]);
      context.lineWidth = uPlot.pxRatio;
      context.beginPath();
      context.moveTo(u.bbox.left, y);
      context.lineTo(u.bbox.left + u.bbox.width, y);
      context.stroke();
    }
    context.setLineDash([]);
    for (const { values } of given.series) {
      for (const [point, value] of values.entries()) {
        const level = value === null ? undefined : levels.find((limit) => value < limit.value);
        if (level) dot(u, along[point], value, level.severity, 3.5);
      }
    }
    if (given.picked !== null && given.series[0].values[given.picked] !== null) {
      dot(u, along[given.picked], given.series[0].values[given.picked], "outside", 6);
    }
    context.restore();
  };
  const whole = !given.along;
  const range = (_, low, high) => { // nothing at the edge, and something where all values are one
    const room = high > low ? 0.02 * (high - low) : 0.5;
    return [low - room, high + room];
  };
  const options = {
    scales: { x: { time: false, ...(whole && count > 1 ? {} : { range }) }, y: given.log ? { distr: 3 } : {} },
    axes: [{ ...axis(given.x, whole), size: 34 }, { ...axis(given.y, false), size: 58 }],
    series: [
      {},
      ...given.series.map(({ name, color: pen }) => ({
        label: name,
        stroke: () => color(pen),
        width: 1.75,
        ...(given.points ? { points: { show: true, size: 7, fill: () => color(pen) } } : {}),
      })),
    ],
    hooks: { draw: [marks] },
  };
  const data = [order.map((i) => along[i]), ...given.series.map(({ values }) => order.map((i) => values[i]))];
  const drawn = plot(figure, 260, options, data, told);
  const lead = (found) => {
    if (found.hidden) {
      const filter = section.querySelector("input");
      filter.value = "";
      filter.dispatchEvent(new Event("input"));
    }
    section.querySelector("tr.found")?.classList.remove("found");
    found.classList.add("found");
    found.tabIndex = -1;
    found.scrollIntoView({ block: "center" });
    found.focus({ preventScroll: true });
  };
  let pressed = 0;
  let waiting = 0; // a second click means something else
  drawn.over.addEventListener("mousedown", (event) => (pressed = event.clientX));
  drawn.over.addEventListener("dblclick", () => clearTimeout(waiting));
  drawn.over.addEventListener("click", (event) => {
    const index = drawn.cursor.idx;
    if (Math.abs(event.clientX - pressed) > 4 || index === null || index === undefined) return; // a drag
    const found = row(order[index]);
    clearTimeout(waiting);
    if (found) waiting = setTimeout(lead, 250, found);
  });
}
