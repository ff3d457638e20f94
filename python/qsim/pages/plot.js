"use strict";
// What all drawings share: the page's colors, which follow the scheme, axes, sizes, numbers.
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const short = (value, digits = 4) => {
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e6 || size < 1e-3) ? value.toExponential(Math.max(0, digits - 2)).replace(/\.?0*e/, "e") : String(Number(value.toPrecision(digits)));
};
const floats = (text) => { // bfloat16 in base64
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const halves = new Uint16Array(bytes.buffer);
  return [...new Float32Array(Uint32Array.from(halves, (half) => half << 16).buffer)];
};
const plots = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.redraw(false)));

// An axis of uPlot with a label; `whole`: of numbers that count something.
const axis = (label, whole) => ({
  label,
  labelSize: 22,
  labelFont: "12px system-ui, sans-serif",
  font: "12px system-ui, sans-serif",
  stroke: () => color("quiet"),
  grid: { stroke: () => color("line"), width: 1 },
  ticks: { stroke: () => color("line"), width: 1, size: 5 },
  values: (_, splits) => splits.map((value) => (value === null ? "" : short(value))),
  ...(whole ? { incrs: [1, 2, 5].flatMap((step) => [0, 1, 2, 3, 4].map((power) => step * 10 ** power)).sort((a, b) => a - b) } : {}),
});

// A plot in `holder`, as wide as it is, with a box beside the cursor that says what `told(index)` has: lines of text, the first a title.
const plot = (holder, height, options, data, told) => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  const place = (u) => {
    const index = u.cursor.idx;
    const lines = index === null || index === undefined || u.cursor.left < 0 ? [] : told(index);
    tip.hidden = lines.length === 0;
    if (tip.hidden) return;
    tip.replaceChildren(...lines.map((line, i) => Object.assign(document.createElement(i ? "div" : "strong"), { textContent: line })));
    const x = u.valToPos(u.data[0][index], "x");
    const width = u.over.clientWidth;
    tip.style.left = `${Math.max(0, Math.min(x + 12, width - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, Math.min(u.cursor.top + 12, u.over.clientHeight - tip.offsetHeight))}px`;
  };
  const made = new uPlot(
    {
      width: holder.clientWidth || 600,
      height,
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false } },
      ...options,
      hooks: { ...options.hooks, ready: [(u) => u.over.append(tip)], setCursor: [place] },
    },
    data,
    holder,
  );
  plots.add(made);
  const follow = new ResizeObserver(() => {
    if (holder.clientWidth && holder.clientWidth !== made.width) made.setSize({ width: holder.clientWidth, height });
  });
  follow.observe(holder);
  made.leave = () => {
    follow.disconnect();
    plots.delete(made);
    made.destroy();
  };
  return made;
};
