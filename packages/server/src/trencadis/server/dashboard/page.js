// The dashboard: reads the server's events and draws them. No library, nothing from another host.
"use strict";

const MAX_POINTS = 600;
const SILENT_SECONDS = 5;
const OLD_SECONDS = 3; // of a map; the core answers late while it compiles
const LOST_SECONDS = 15; // an event comes every second: a stream without one for so long is dead
const byId = (id) => document.getElementById(id);
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

// Elements.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text; // a screen reader hears changes alone
}

// Numbers.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function short(value) {
  if (!isNumber(value)) return "–";
  const units = [[1e9, "G"], [1e6, "M"], [1e4, "k"]];
  for (const [size, unit] of units) {
    if (Math.abs(value) >= size) return `${(value / (unit === "k" ? 1e3 : size)).toPrecision(3)}${unit}`;
  }
  return Number.isInteger(value) ? String(value) : value.toFixed(Math.abs(value) < 10 ? 2 : 1);
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  return value < 1 ? `${(value * 1000).toPrecision(3)} ms` : `${value.toPrecision(3)} s`;
}

const percent = (share) => (isNumber(share) ? `${(share * 100).toFixed(1)} %` : "–");
const clock = (time) => new Date(time * 1000).toLocaleTimeString();

// The figures: each can be focused, says in words what it shows, and has a table behind it.

class Figure {
  constructor(parent, id, title, legend, header) {
    this.plot = shape("svg", { class: "plot", id: `${id}-plot`, role: "img", tabindex: 0 });
    this.plot.setAttribute("aria-labelledby", `${id}-title ${id}-text`);
    this.text = element("p", { id: `${id}-text` });
    this.body = element("tbody");
    this.asOf = element("caption");
    const heads = header.map((name) => element("th", { scope: "col" }, name));
    const table = element("table", {}, this.asOf, element("thead", {}, element("tr", {}, ...heads)), this.body);
    this.details = element("details", {}, element("summary", {}, `Table: ${title}`),
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table: ${title}` }, table));
    this.details.addEventListener("toggle", () => this.fill());
    this.caption = element("figcaption", {}, element("h3", { id: `${id}-title` }, title), this.text);
    if (legend.length) this.caption.append(legendOf(legend));
    this.node = element("figure", { id }, this.caption, this.plot, this.details);
    parent.append(this.node);
    this.rows = () => [];
    this.drawnWidth = 0;
    new ResizeObserver(() => requestAnimationFrame(() => {
      if (this.width !== this.drawnWidth) this.redraw(); // drawing changes the height, too
    })).observe(this.node);
  }

  get width() { return Math.max(this.plot.getBoundingClientRect().width, 100); }

  size(height) {
    this.drawnWidth = this.width;
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.plot.setAttribute("height", height);
  }

  // The table has the values of the moment at which it was opened, so that it can be read in peace.
  fill() {
    if (!this.details.open) return;
    this.asOf.textContent = `As of ${new Date().toLocaleTimeString()}. Close and open for newer values.`;
    this.body.replaceChildren(...this.rows().map((cells) =>
      element("tr", {}, ...cells.map((cell) => element("td", {}, String(cell))))));
  }

  redraw() {}
}

function legendOf(items) {
  return element("ul", { class: "legend" }, ...items.map(([drawn, name]) => {
    const sample = shape("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" });
    sample.append(...drawn());
    return element("li", {}, sample, name);
  }));
}

const lineSample = (kind) => () => [shape("path", { class: `line ${kind}`, d: "M0 6H24" })];

// Lines over time.

class Lines extends Figure {
  // series: [name, kind of line, value of a point]. fromZero: else from some units below the lowest.
  constructor(parent, id, title, unit, series, { isShown = () => true, fromZero = true } = {}) {
    const legend = series.map(([name, kind]) => [lineSample(kind), name]);
    super(byId(parent), id, title, legend, ["Time", ...series.map(([name]) => name)]);
    Object.assign(this, { unit, series, isShown, fromZero, points: [] });
    this.rows = () => this.points.slice(-60).reverse().map((point) =>
      [clock(point.time_s), ...this.series.map(([, , read]) => short(read(point)))]);
  }

  show(points) {
    this.points = points;
    this.node.hidden = !points.some(this.isShown);
    if (!this.node.hidden) this.redraw();
  }

  redraw() {
    const points = this.points;
    if (!points.length || this.node.hidden) return;
    const [width, height, left, bottom, top] = [this.width, 170, 40, 18, 6];
    this.size(height);
    const values = this.series.map(([, , read]) => points.map(read));
    const seen = values.flat().filter(isNumber);
    const lowest = this.fromZero || !seen.length ? 0 : Math.floor((Math.min(...seen) - 2) / 10) * 10;
    const highest = this.fromZero ? niceCeiling(Math.max(...seen, 0)) : Math.ceil((Math.max(...seen, lowest) + 2) / 10) * 10;
    const first = points[0].time_s;
    const span = Math.max(points.at(-1).time_s - first, 1);
    const x = (time) => left + ((time - first) / span) * (width - left - 6);
    const y = (value) => height - bottom - ((value - lowest) / (highest - lowest)) * (height - bottom - top);
    const drawn = [lowest, (lowest + highest) / 2, highest].flatMap((value) => [
      shape("path", { class: "rule", d: `M${left} ${y(value)}H${width - 6}` }),
      shape("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)),
    ]);
    drawn.push(shape("text", { x: left, y: height - 3 }, clock(first)),
      shape("text", { x: width - 6, y: height - 3, "text-anchor": "end" }, clock(points.at(-1).time_s)));
    this.series.forEach(([, kind], number) =>
      drawn.push(shape("path", { class: `line ${kind}`, d: pathOf(points, values[number], x, y) })));
    this.plot.replaceChildren(...drawn);
    setText(this.text, this.series.map(([name], number) => {
      const known = values[number].filter(isNumber);
      const now = values[number].at(-1);
      const range = known.length ? ` (${short(Math.min(...known))} to ${short(Math.max(...known))})` : "";
      return `${name} ${short(now)}${isNumber(now) ? this.unit : ""}${range}`;
    }).join("; "));
  }
}

function pathOf(points, values, x, y) {
  let path = "";
  let gap = true;
  points.forEach((point, i) => {
    if (!isNumber(values[i])) { gap = true; return; }
    path += `${gap ? "M" : "L"}${x(point.time_s).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    gap = false;
  });
  return path;
}

function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].find((step) => step * power >= value) * power;
}

// A second's growth of a total; a restarted core begins at 0 again.
function rate(name) {
  return (point) => {
    const growth = point.before && point[name] - point.before[name];
    return point.before && growth >= 0 ? growth / Math.max(point.time_s - point.before.time_s, 0.1) : null;
  };
}

// Cells with a cursor: arrow keys and the pointer choose the cell that is told in words.

class Cells extends Figure {
  constructor(parent, id, title, legend, header) {
    super(parent, id, title, legend, header);
    this.plot.setAttribute("role", "application"); // so that a screen reader passes the arrow keys on
    this.plot.setAttribute("aria-roledescription", "map of cells, arrow keys move");
    this.age = element("p", { class: "old" });
    this.caption.append(this.age);
    // The values change every second; only a move is spoken.
    this.told = element("p", { class: "cell-text", "aria-hidden": "true" });
    this.spoken = element("output", { class: "spoken", for: `${id}-plot` });
    this.plot.after(this.told, this.spoken);
    this.cursor = null;
    this.plot.addEventListener("keydown", (event) => this.move(event));
    this.plot.addEventListener("focus", () => { if (this.cursor === null) this.mark(this.firstCell()); });
    this.plot.addEventListener("blur", () => this.mark(null));
    // A tap moves no pointer. It comes before the focus, which keeps the cell.
    for (const name of ["pointermove", "pointerdown"]) {
      this.plot.addEventListener(name, (event) => {
        const cell = event.target.dataset?.cell;
        if (cell !== undefined) this.mark(Number(cell));
      });
    }
  }

  firstCell() { return 0; }

  move(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const step = steps[event.key];
    if (step === undefined || !this.numCells) return;
    event.preventDefault();
    const next = (this.cursor ?? 0) + step;
    if (next >= 0 && next < this.numCells) this.mark(next);
  }

  mark(cell) {
    this.cursor = cell !== null && cell < this.numCells ? cell : null;
    this.drawCursor();
    setText(this.spoken, this.told.textContent);
  }

  drawCursor() {
    this.plot.querySelector(".marked")?.remove();
    setText(this.told, this.cursor === null ? "" : this.describe(this.cursor));
    if (this.cursor === null) return;
    const [x, y, width, height] = this.place(this.cursor);
    this.plot.append(shape("rect", { class: "marked", x, y, width, height, "pointer-events": "none" }));
  }
}

const usedSample = () => [shape("rect", { class: "used", x: 6, width: 12, height: 12 })];
const cachedSample = () => [shape("rect", { class: "cached", x: 6, width: 12, height: 12 }),
  shape("path", { class: "stripe", d: "M6 8L14 0M10 12L18 4" })];
const freeSample = () => [shape("rect", { class: "free", x: 6.5, y: 0.5, width: 11, height: 11 })];

class BlockMap extends Cells {
  constructor() {
    super(byId("maps"), "blocks", "KV block map",
      [[usedSample, "used"], [cachedSample, "cached prefix"], [freeSample, "empty"]],
      ["Blocks", "Used", "Cached", "Empty"]);
    this.numCells = 0;
    this.columns = 1;
    this.drawn = "";
    this.rows = () => Array.from({ length: this.numCells }, (_, cell) => {
      const [first, last] = this.range(cell);
      return [`${first} to ${last}`, this.map.used[cell], this.map.cached[cell],
        last - first + 1 - this.map.used[cell] - this.map.cached[cell]];
    });
  }

  show(map) {
    this.map = map;
    this.numCells = map.used.length;
    const used = map.used.reduce((sum, count) => sum + count, 0);
    const cached = map.cached.reduce((sum, count) => sum + count, 0);
    const holes = map.highest_used_block - used;
    const fragmentation = map.highest_used_block ? holes / map.highest_used_block : 0;
    setText(this.text, `${short(used)} of ${short(map.num_blocks)} blocks used in ${short(map.num_used_runs)} run${map.num_used_runs === 1 ? "" : "s"}, ` +
      `${short(cached)} cached; highest used block ${map.highest_used_block}; fragmentation ${percent(fragmentation)} ` +
      `(blocks below it that are not used). A cell is ${map.blocks_per_cell} block${map.blocks_per_cell > 1 ? "s" : ""}.`);
    this.redraw();
  }

  range(cell) {
    const first = 1 + cell * this.map.blocks_per_cell;
    return [first, Math.min(first + this.map.blocks_per_cell - 1, this.map.num_blocks)];
  }

  describe(cell) {
    const [first, last] = this.range(cell);
    const [used, cached] = [this.map.used[cell], this.map.cached[cell]];
    const name = first === last ? `Block ${first}` : `Blocks ${first} to ${last}`;
    return `${name}: ${used} used, ${cached} cached, ${last - first + 1 - used - cached} empty`;
  }

  place(cell) {
    const pitch = this.width / this.columns;
    return [(cell % this.columns) * pitch + 1, Math.floor(cell / this.columns) * pitch + 1, pitch - 2, pitch - 2];
  }

  redraw() {
    if (!this.map) return;
    this.columns = Math.max(8, Math.min(Math.floor(this.width / 15), Math.max(this.numCells, 16)));
    const state = JSON.stringify([this.width, this.map]);
    if (state === this.drawn) return;
    this.drawn = state;
    this.size(Math.ceil(this.numCells / this.columns) * (this.width / this.columns) + 1);
    const drawn = [];
    for (let cell = 0; cell < this.numCells; cell++) {
      const [x, y, width, height] = this.place(cell);
      const [first, last] = this.range(cell);
      const usedHeight = (height * this.map.used[cell]) / (last - first + 1);
      const cachedHeight = (height * this.map.cached[cell]) / (last - first + 1);
      if (cachedHeight) {
        const above = y + height - usedHeight - cachedHeight;
        drawn.push(shape("rect", { class: "cached", x, y: above, width, height: cachedHeight }));
        if (cachedHeight > 4) drawn.push(shape("path", { class: "stripe", d: `M${x} ${above + cachedHeight}L${x + width} ${above}` }));
      }
      if (usedHeight) drawn.push(shape("rect", { class: "used", x, y: y + height - usedHeight, width, height: usedHeight }));
      drawn.push(shape("rect", { class: "free", x, y, width, height, "data-cell": cell, "pointer-events": "all" }));
    }
    this.plot.replaceChildren(...drawn);
    this.drawCursor();
  }
}

const coldSample = () => [shape("rect", { class: "cold", x: 6.5, y: 0.5, width: 11, height: 11 })];
const warmSample = () => [shape("rect", { class: "warm", x: 6.5, y: 0.5, width: 11, height: 11 })];
const capturedSample = () => [...warmSample(), shape("path", { class: "captured", d: "M12 1H17V6Z" })];
const hitSample = () => [shape("rect", { class: "hit", x: 6, width: 12, height: 12 })];

// Red, green and blue of a colour of the style, each from 0 to 255.
function colourOf(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

// Whether black has the higher contrast: WCAG 2.2, "contrast ratio". The better
// of black and white always has 4.5:1.
function isLight(colour) {
  const linear = colour.map((part) => part / 255)
    .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179;
}

class Buckets extends Cells {
  constructor(phase) {
    super(byId("maps"), phase, `Buckets of ${phase}`,
      [[coldSample, "cold"], [warmSample, "warm"], [capturedSample, "captured graph"], [hitSample, "hits, stronger for more"]],
      ["Batch", "Length", "Buckets", "Warm", "Captured", "Hits"]);
    this.numCells = 0;
    this.columns = 1;
    this.drawn = "";
    this.rows = () => this.cells().map((cell) => {
      const usage = this.usage;
      return [this.row(cell), this.column(cell), usage.num_buckets[cell], usage.num_warm[cell],
        usage.num_captured[cell], usage.num_hits[cell]];
    });
  }

  row(cell) { return this.usage.rows[Math.floor(cell / this.columns)]; }
  column(cell) { return this.usage.columns[cell % this.columns]; }
  cells() {
    return this.usage.num_hits.map((_, cell) => cell)
      .filter((cell) => this.usage.num_buckets[cell] || this.usage.num_hits[cell]);
  }
  firstCell() { return this.usage ? this.cells()[0] ?? null : null; }

  show(usage) {
    this.usage = usage;
    this.columns = Math.max(usage.columns.length, 1);
    this.numCells = usage.num_hits.length;
    const sum = (counts) => counts.reduce((total, count) => total + count, 0);
    const hits = `${short(sum(usage.num_hits))} forward passes`;
    setText(this.text, usage.is_padded
      ? `${sum(usage.num_buckets)} buckets: ${sum(usage.num_buckets) - sum(usage.num_warm)} cold, ${sum(usage.num_warm)} warm, ` +
        `${sum(usage.num_captured)} of them captured; ${hits}. Across: ${usage.axes[1]}, down: ${usage.axes[0]}.`
      : `${hits}. This device runs each batch in its own size, without padding to a bucket: these are the sizes, rounded up ` +
        `to powers of two. Across: ${usage.axes[1]}, down: ${usage.axes[0]}.`);
    this.redraw();
  }

  describe(cell) {
    const usage = this.usage;
    const size = `${usage.axes[0]} ${this.row(cell)}, ${usage.axes[1]} ${this.column(cell)}`;
    if (!usage.is_padded) return `${size}: ${usage.num_hits[cell]} forward passes`;
    if (!usage.num_buckets[cell]) return `${size}: no bucket`;
    return `${size}: ${usage.num_buckets[cell]} bucket${usage.num_buckets[cell] > 1 ? "s" : ""}, ${usage.num_warm[cell]} warm, ` +
      `${usage.num_captured[cell]} captured, ${usage.num_hits[cell]} hits`;
  }

  place(cell) {
    const width = Math.min((this.width - 44) / this.columns, 72);
    return [44 + (cell % this.columns) * width + 1, Math.floor(cell / this.columns) * 20 + 1, width - 2, 18];
  }

  redraw() {
    if (!this.usage) return;
    const usage = this.usage;
    this.colours = Object.fromEntries(["hit", "back", "panel"].map((name) => [name, colourOf(`--${name}`)]));
    const state = JSON.stringify([this.width, usage, this.colours]);
    if (state === this.drawn) return;
    this.drawn = state;
    this.size(usage.rows.length * 20 + 18);
    const most = Math.max(...usage.num_hits, 1);
    const drawn = [];
    usage.rows.forEach((size, row) => drawn.push(
      shape("text", { x: 38, y: row * 20 + 14, "text-anchor": "end" }, short(size))));
    const [, , width] = this.place(0);
    const every = Math.max(1, Math.ceil(30 / (width + 2)));
    usage.columns.forEach((size, column) => {
      if (column % every) return;
      const [x] = this.place(column);
      drawn.push(shape("text", { x: x + width / 2, y: usage.rows.length * 20 + 13, "text-anchor": "middle" }, short(size)));
    });
    for (const cell of this.cells()) drawn.push(...this.cellShapes(cell, most));
    this.plot.replaceChildren(...drawn);
    this.drawCursor();
  }

  cellShapes(cell, most) {
    const usage = this.usage;
    const [x, y, width, height] = this.place(cell);
    const hits = usage.num_hits[cell];
    const isWarm = !usage.is_padded || usage.num_warm[cell] === usage.num_buckets[cell];
    const drawn = [shape("rect", { class: isWarm ? "warm" : "cold", x, y, width, height, "data-cell": cell, "pointer-events": "all" })];
    const strength = hits ? 0.15 + 0.85 * (Math.log1p(hits) / Math.log1p(most)) : 0;
    if (hits) drawn.push(shape("rect", { class: "hit", x, y, width, height, "fill-opacity": strength, "pointer-events": "none" }));
    if (usage.num_captured[cell]) {
      drawn.push(shape("path", { class: "captured", d: `M${x + width - 6} ${y}H${x + width}V${y + 6}Z`, "pointer-events": "none" }));
    }
    if (hits && width > 28) {
      const below = isWarm ? this.colours.back : this.colours.panel;
      const blend = this.colours.hit.map((part, i) => part * strength + below[i] * (1 - strength));
      drawn.push(shape("text", { class: isLight(blend) ? "on-light" : "on-dark", x: x + width / 2, y: y + 13,
        "text-anchor": "middle", "pointer-events": "none" }, short(hits)));
    }
    return drawn;
  }
}

// The page.

const lines = [
  new Lines("lines", "temperature", "Temperature of the hottest device", " °C", [
    ["temperature", "first", (point) => point.hottest_c],
    ["target", "second", (point) => point.target_temp_c],
  ], { isShown: (point) => isNumber(point.hottest_c), fromZero: false }),
  new Lines("lines", "running", "Running sequences and the queue", "", [
    ["running", "first", (point) => point.num_running_seqs],
    ["limit", "second", (point) => point.max_running_seqs],
    ["waiting", "third", (point) => point.num_waiting_reqs],
  ]),
  new Lines("lines", "power", "Power of all devices", " W", [
    ["power", "first", (point) => point.power_w],
  ], { isShown: (point) => isNumber(point.power_w) }),
  new Lines("lines", "tokens", "Tokens a second", "/s", [
    ["generated", "first", rate("num_generation_tokens")],
    ["prefilled", "second", rate("num_prefill_tokens")],
  ]),
  new Lines("maps", "usage", "KV cache in use", " %", [
    ["in use", "first", (point) => point.cache_usage * 100],
  ]),
];
const blockMap = new BlockMap();
const buckets = [new Buckets("prefill"), new Buckets("decode")];

let points = [];
let latest = null;
let lastEvent = 0;
let isPaused = false;
let skipped = 0;

function addPoint(point) {
  const before = points.at(-1);
  // A core that began again: no rate across it. What is kept of a point is no chain of points.
  points.push({ ...point, before: before && { ...before, before: undefined } });
  if (points.length > MAX_POINTS) points.shift();
}

const handlers = {
  history(columns) {
    points = [];
    const names = Object.keys(columns);
    columns.time_s.forEach((_, i) => addPoint(Object.fromEntries(names.map((name) => [name, columns[name][i]]))));
  },
  snapshot(snapshot) {
    if (points.at(-1)?.time_s !== snapshot.point.time_s) addPoint(snapshot.point);
    const isFirst = latest === null;
    latest = snapshot;
    skipped += 1;
    showStatus(); // also while the page is paused, and at once with reduced motion
    if (isFirst || (!isPaused && skipped >= (reducedMotion.matches ? 5 : 1))) show();
  },
  end({ reason }) {
    showState("no connection", reason);
  },
};

function show() {
  skipped = 0;
  const { stats, latency } = latest;
  setText(byId("model"), latest.models.length > 1
    ? `${latest.model} (${latest.models.filter((name) => name !== latest.model).join(", ")} not active)` : latest.model);
  showTiles(stats, latency, points.at(-1));
  showWarmUp(stats, latest.inspection);
  lines.forEach((figure) => figure.show(points));
  const span = points.at(-1).time_s - points[0].time_s;
  setText(byId("over-time"), span < 90 ? `Last ${Math.round(span)} seconds` : `Last ${Math.round(span / 60)} minutes`);
  if (latest.inspection) {
    blockMap.show(latest.inspection.blocks);
    latest.inspection.grids.forEach((usage, i) => buckets[i].show(usage));
  }
  const age = latest.inspection_age_s;
  for (const figure of [blockMap, ...buckets]) {
    figure.node.hidden = !latest.inspection;
    setText(figure.age, age >= OLD_SECONDS ? `As of ${Math.round(age)} s ago: the core has not answered since.` : "");
  }
}

// Without a warm-up, a bar would promise that the rest comes by itself.
function showWarmUp(stats, inspection) {
  const isReady = stats.num_ready_buckets === stats.num_buckets;
  const isPadded = !inspection || inspection.grids.some((usage) => usage.is_padded);
  byId("warm-up").hidden = !stats.num_buckets || !(stats.is_warming_up || isReady || isPadded);
  byId("warm-up-bar").hidden = !stats.is_warming_up;
  byId("warm-up-bar").value = stats.num_ready_buckets / Math.max(stats.num_buckets, 1);
  const ready = `${stats.num_ready_buckets} of ${stats.num_buckets} buckets`;
  const graphs = `${stats.num_graphs} graphs`;
  setText(byId("warm-up-text"), stats.is_warming_up ? `Warm-up: ${ready}, ${graphs}`
    : `${ready} ready, ${graphs}${isReady ? "" : "; no warm-up is under way"}`);
}

function showStatus() {
  showState(latest.state.replaceAll("_", " "), latest.reason, latest.state === "serving");
}

function showState(state, reason, isGood = false) {
  document.title = `${latest?.model ?? "Trencadís"}: ${state}`;
  setText(byId("state"), state);
  byId("state").className = `badge ${isGood ? "good" : "bad"}`;
  setText(byId("reason"), reason);
  byId("reason").hidden = !reason;
}

function showTiles(stats, latency, point) {
  const { thermal } = stats;
  const spread = (figures) => (figures.count
    ? [`${seconds(figures.p50)} / ${seconds(figures.p99)}`, `p50 / p99 of ${short(figures.count)} lately`]
    : [`${seconds(figures.total_p50)} / ${seconds(figures.total_p99)}`, "p50 / p99 since the start"]);
  const tiles = [
    ["Running sequences", `${stats.num_running_seqs} / ${stats.max_running_seqs}`, "of the limit"],
    ["Queue", `${point.num_waiting_reqs}`,
      `${stats.num_waiting_reqs} new, ${stats.num_swapped_reqs} swapped, ${stats.num_preempted_reqs} preempted`],
    ["Requests in progress", `${latest.num_active_requests}`, ""],
    ["TTFT", ...spread(latency.ttft)],
    ["ITL", ...spread(latency.itl)],
    ["Tokens a second", short(rate("num_generation_tokens")(point)), `${short(rate("num_prefill_tokens")(point))} prefilled`],
    ["KV cache", percent(point.cache_usage), `${short(stats.num_used_blocks)} of ${short(stats.num_total_blocks)} blocks`],
    ["Prefix hits", percent(stats.num_prefix_query_tokens ? stats.num_prefix_hit_tokens / stats.num_prefix_query_tokens : null), "of prompt tokens"],
    ["Prefill limit", short(stats.max_prefill_tokens), "tokens a step"],
    ["Preemptions", short(stats.num_preemptions), `${short(stats.num_swaps)} swapped`],
    ["Bucket misses", short(stats.num_bucket_misses), `${short(stats.num_compilations)} compilations`],
    ["Restarts of the core", String(stats.num_core_restarts), ""],
  ];
  if (thermal) {
    const isOver = isNumber(thermal.hottest_c) && isNumber(thermal.target_temp_c) && thermal.hottest_c > thermal.target_temp_c;
    const target = isNumber(thermal.target_temp_c) ? `target ${thermal.target_temp_c} °C` : `sensor ${thermal.sensor}`;
    const first = [
      ["Temperature", isNumber(thermal.hottest_c) ? `${thermal.hottest_c.toFixed(1)} °C` : "–", isOver ? `over ${target}` : target, isOver],
      ["Thermal policy", thermal.policy || "none", thermal.fault || (thermal.policy_active ? "active" : `sensor ${thermal.sensor}`)],
    ];
    if (isNumber(thermal.power_w)) first.push(["Power", `${thermal.power_w.toFixed(0)} W`, "all devices"]);
    tiles.unshift(...first);
  }
  const list = byId("tiles");
  while (list.children.length > tiles.length) list.lastChild.remove();
  tiles.forEach(([name, value, note, isOver = false], i) => {
    const tile = list.children[i] ?? list.appendChild(element("div", {}, element("dt"), element("dd", {}, element("span"), " ", element("small"))));
    tile.className = isOver ? "over" : "";
    setText(tile.children[0], name);
    setText(tile.querySelector("span"), value);
    setText(tile.querySelector("small"), note);
  });
}

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  if (!isPaused && latest) show();
});

setInterval(() => {
  const silent = Math.round((Date.now() - lastEvent) / 1000);
  const isSilent = lastEvent && silent >= SILENT_SECONDS;
  setText(byId("age"), isPaused ? "paused" : isSilent ? `no event for ${silent} s` : lastEvent ? "live" : "");
}, 1000);

// Events. Fetched rather than by EventSource, which sends no header. The key stays in memory.

const address = new URL("dashboard/events", document.baseURI);
const login = document.documentElement.dataset.login;
let key = null;

function askForKey(note) {
  key = null;
  byId("login").hidden = false;
  setText(byId("login-note"), note);
  showState("needs an admin key", "");
  byId("key").focus();
  return new Promise((resolve) => {
    byId("login").onsubmit = (event) => {
      event.preventDefault();
      key = byId("key").value;
      byId("key").value = "";
      byId("login").hidden = true;
      showState("connecting", "");
      resolve();
    };
  });
}

async function proof() {
  if (login === "none") return {};
  if (login === "bearer") return { Authorization: `Bearer ${key}` };
  const bytes = (text) => new TextEncoder().encode(text);
  const sent = (Date.now() / 1000).toFixed(3);
  const signed = bytes(`GET\n${address.host}\n${address.pathname}\n${sent}\n`);
  const secret = await crypto.subtle.importKey("raw", bytes(key), { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  const digest = new Uint8Array(await crypto.subtle.sign("HMAC", secret, signed));
  const hex = Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { Authorization: `Signature ${hex}`, "X-Admin-Time": sent };
}

async function readEvents() {
  // A server that hangs, and a network that is gone, close no connection.
  const lost = new AbortController();
  const giveUp = () => lost.abort(new Error(`no event for ${LOST_SECONDS} s`));
  let timer = setTimeout(giveUp, LOST_SECONDS * 1000);
  try {
    const response = await fetch(address, {
      headers: await proof(), cache: "no-store", credentials: "omit", signal: lost.signal,
    });
    if (!response.ok) {
      const { error } = await response.json();
      if (response.status === 401) return askForKey(error.message);
      throw new Error(error.message);
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return null;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const [, name, content] = event.match(/^event: (\w+)\ndata: (.*)$/);
        lastEvent = Date.now();
        handlers[name](JSON.parse(content));
        clearTimeout(timer);
        timer = setTimeout(giveUp, LOST_SECONDS * 1000);
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

async function watch() {
  if (login === "signature" && !window.crypto?.subtle) {
    showState("cannot sign", "This server accepts only signed calls, and browsers sign only on pages of https or localhost.");
    return;
  }
  if (login !== "none") await askForKey("");
  for (let failures = 0; ;) {
    const began = Date.now();
    try {
      await readEvents();
      if (Date.now() - began > 10000) failures = 0;
    } catch (error) {
      showState("no connection", error.message);
    }
    failures += 1;
    await new Promise((resolve) => setTimeout(resolve, Math.min(500 * 2 ** (failures - 1), 15000)));
  }
}

watch();
