// Distributions: small pictures in cells, drawn when they come into view; under a row, on demand, the same with axes, and curves.
const HEIGHT = 48, STEP = 4; // of the small pictures; bars are 4 units wide

const distribution = (picture) => {
  const number = (name) => (picture.dataset[name] === undefined ? null : Number(picture.dataset[name]));
  return { counts: floats(picture.dataset.counts), low: number("low"), high: number("high"), first: number("first"), last: number("last") };
};

// The picture: logarithms of counts; bars whose middle is outside of the grid in another color.
const draw = (picture) => {
  if (picture.querySelector("path")) return;
  const { counts, low, high, first, last } = distribution(picture);
  const width = counts.length * STEP;
  picture.setAttribute("viewBox", `-2 0 ${width + 4} ${HEIGHT}`);
  picture.setAttribute("preserveAspectRatio", "none");
  const tallest = Math.log1p(Math.max(...counts));
  const heights = counts.map((count) => Math.round((HEIGHT * Math.log1p(count)) / tallest));
  const place = (value) => Math.min(Math.max((value - low) / (high - low), 0), 1) * width;
  const [left, right] = first === null || last === null ? [0, width] : [place(first), place(last)];
  const add = (tag, attributes) => {
    const made = document.createElementNS(picture.namespaceURI, tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    picture.append(made);
  };
  const within = (i) => left <= (i + 0.5) * STEP && (i + 0.5) * STEP <= right;
  const outline = (bars) => `M0 ${HEIGHT}${bars.map((bar) => `V${HEIGHT - bar}h${STEP}`).join("")}V${HEIGHT}z`;
  if (first !== null) add("rect", { class: "range", x: left, width: right - left, height: HEIGHT });
  add("path", { class: "inside", d: outline(heights.map((height, i) => (within(i) ? height : 0))) });
  add("path", { class: "outside", d: outline(heights.map((height, i) => (within(i) ? 0 : height))) });
  if (low < 0 && high > 0) add("path", { class: "zero", d: `M${place(0)} 0V${HEIGHT}` });
  if (first !== null) add("path", { class: "edge", d: `M${left} 0V${HEIGHT}M${right} 0V${HEIGHT}` });
};

const pictures = document.querySelectorAll("svg.histogram");
const seen = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      draw(target);
      seen.unobserve(target);
    }
  },
  { rootMargin: "600px" },
);
pictures.forEach((picture) => seen.observe(picture));
addEventListener("beforeprint", () => pictures.forEach(draw));

const upright = (u, value, name) => { // a line across the plot
  const x = u.valToPos(value, "x", true);
  if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
  u.ctx.strokeStyle = color(name);
  u.ctx.lineWidth = 1.5 * uPlot.pxRatio;
  u.ctx.beginPath();
  u.ctx.moveTo(x, u.bbox.top);
  u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
  u.ctx.stroke();
};

const figure = (under) => under.appendChild(Object.assign(document.createElement("figure"), { className: "plot" }));

const large = (under, picture) => { // the distribution, with axes
  const { counts, low, high, first, last } = distribution(picture);
  const step = (high - low) / counts.length;
  const middles = counts.map((_, i) => low + (i + 0.5) * step);
  const shown = counts.map((count) => (count >= 0.5 ? count : null));
  const options = {
    scales: { x: { time: false, range: () => [low, high] }, y: { distr: 3, range: () => [0.5, 1.5 * Math.max(...counts)] } },
    axes: [{ ...axis("value", false), size: 34 }, { ...axis("number of values", false), size: 58 }],
    series: [{}, { stroke: () => color("inside"), fill: () => color("shade"), width: 1.5, paths: uPlot.paths.bars({ size: [1] }), points: { show: false } }],
    hooks: {
      draw: [
        (u) => {
          u.ctx.save();
          [first, last].forEach((end) => end !== null && upright(u, end, "edge"));
          u.ctx.restore();
        },
      ],
    },
  };
  const told = (i) => [
    `${short(middles[i] - step / 2)} to ${short(middles[i] + step / 2)}`,
    `about ${short(counts[i], 2)} values`,
    ...(first === null || last === null ? [] : [middles[i] < first || middles[i] > last ? "outside of the grid" : "within the grid"]),
  ];
  return plot(figure(under), 220, options, [middles, shown], told);
};

const curves = (under, holder) => { // numbers over what is counted: channels of a weight, steps of a log
  const { along, first, each, values } = JSON.parse(holder.dataset.curves);
  const names = Object.keys(values);
  const drawn = names.map((name) => floats(values[name]));
  const count = Math.max(...drawn.map((one) => one.length));
  const where = Array.from({ length: count }, (_, i) => first + i * each);
  const pen = (label, i) => ({ label, stroke: () => color(["inside", "edge"][i]), width: 1.5, points: { show: count < 100, size: 5 } });
  const kind = each > 1 ? `, the largest of ${each} each` : "";
  const options = {
    scales: { x: { time: false, ...(count > 1 ? {} : { range: () => [first - 0.5, first + 0.5] }) }, y: { distr: 3 } },
    axes: [{ ...axis(`${along}${kind}`, true), size: 34 }, { ...axis(names[0], false), size: 58 }],
    series: [{}, ...names.map(pen)],
  };
  const told = (i) => [
    each > 1 ? `${along} ${where[i]} to ${where[i] + each - 1}` : `${along} ${where[i]}`,
    ...names.map((name, k) => `${name}: about ${short(drawn[k][i], 2)}`),
  ];
  return plot(figure(under), 220, options, [where, ...drawn.map((one) => one.map((value) => (value > 0 ? value : null)))], told);
};

// A button in each row that has a picture opens it below; sorting and filtering close what is open.
for (const section of document.querySelectorAll("section.table")) {
  const open = new Map();
  const close = (row) => {
    const { detail, drawn } = open.get(row);
    drawn.forEach((each) => each.leave());
    detail.remove();
    open.delete(row);
    row.querySelector("button.more").setAttribute("aria-expanded", "false");
  };
  const show = (row) => {
    const detail = document.createElement("tr");
    detail.className = "detail";
    const under = detail.appendChild(Object.assign(document.createElement("td"), { colSpan: row.cells.length, className: "wide" }));
    row.after(detail);
    const [picture, holder] = [row.querySelector("svg.histogram"), row.querySelector("[data-curves]")];
    open.set(row, { detail, drawn: [...(picture ? [large(under, picture)] : []), ...(holder ? [curves(under, holder)] : [])] });
    row.querySelector("button.more").setAttribute("aria-expanded", "true");
  };
  for (const row of section.querySelectorAll("tbody tr")) {
    if (!row.querySelector("svg.histogram, [data-curves]")) continue;
    const button = Object.assign(document.createElement("button"), { className: "more", ariaExpanded: "false", ariaLabel: "show more" });
    row.cells[0].prepend(button);
  }
  section.addEventListener("click", (event) => {
    if (!event.target.closest("button.more, svg.histogram")) return;
    const row = event.target.closest("tr");
    (open.has(row) ? close : show)(row);
  });
  section.addEventListener("arranged", () => [...open.keys()].forEach(close));
}
