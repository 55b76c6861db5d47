// What views are built of: elements, which are made here with text only ever put into them as text, and numbers as people
// read them. GiB is 2^30 bytes, and the unit is always spelled out.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

export function sizeParts(count) {
  for (const [name, unit] of UNITS) if (Math.abs(count) >= unit) return [(count / unit).toFixed(2), name];
  return [String(Math.round(count)), "B"];
}

export function size(count) {
  return count === null || count === undefined ? "n/a" : sizeParts(count).join(" ");
}

// All in the unit of the whole, so that a column of them lines up; something is never shown as nothing.
export function sizesIn(whole) {
  const [name, unit] = UNITS.find(([, each]) => whole >= each) || ["B", 1];
  return (count) => {
    if (count === null || count === undefined) return "n/a";
    const text = (count / unit).toFixed(unit === 1 ? 0 : 2);
    return count > 0 && Number(text) === 0 ? `< 0.01 ${name}` : `${text} ${name}`;
  };
}

export function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "n/a";
}

export function number(count) {
  return count.toLocaleString("en-US");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "n/a";
  const magnitude = Math.abs(seconds);
  if (magnitude >= 120) return `${(seconds / 60).toFixed(1)} min`;
  if (magnitude >= 1) return `${seconds.toFixed(3)} s`;
  if (magnitude >= 1e-3) return `${(seconds * 1e3).toFixed(2)} ms`;
  return `${(seconds * 1e6).toFixed(0)} µs`;
}

// 1, 2 or 5 times a power of ten, so that about `wanted` of them make up the span
export function niceStep(span, wanted) {
  const rough = span / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  for (const factor of [1, 2, 5]) if (rough <= factor * power) return factor * power;
  return 10 * power;
}

export function sizeTicks(low, high, wanted) {
  const [name, unit] = UNITS.find(([, each]) => high >= 1.5 * each) || ["B", 1];
  const step = niceStep((high - low) / unit, wanted);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / unit / step); i * step * unit <= high * 1.0001; i++) ticks.push([i * step * unit, `${(i * step).toFixed(digits)} ${name}`]);
  return ticks;
}

export function timeTicks(from, to, wanted) {
  const step = niceStep(to - from, wanted);
  const [name, scale] = to >= 1 && step >= 1e-3 ? ["s", 1] : step >= 1e-5 ? ["ms", 1e3] : ["µs", 1e6];
  const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) ticks.push([i * step, `${(i * step * scale).toFixed(digits)} ${name}`]);
  return ticks;
}

export function eventTicks(from, to, wanted) {
  const step = Math.max(1, niceStep(to - from, wanted));
  const ticks = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) ticks.push([i * step, number(Math.round(i * step))]);
  return ticks;
}

export function shortOp(op) {
  return op.replace(/^aten\./, "").replace(/\.default$/, "");
}

export function plural(count, word) {
  return count === 1 ? `1 ${word}` : `${number(count)} ${word}s`;
}

export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "css") for (const [property, each] of Object.entries(value)) element.style.setProperty(property, each);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) element.append(child);
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children.flat());
  return element;
}

export function card(id, title, sub, ...children) {
  return make("section", { class: "card", id }, make("h2", { text: title }), sub ? make("p", { class: "sub", text: sub }) : null, ...children);
}

// columns: [title, "num" | "where" | ""]
export function dataTable(columns, rows, options = {}) {
  const head = make("tr", {}, columns.map(([title, kind]) => make("th", { class: kind === "num" ? "num" : "", scope: "col", text: title })));
  const body = rows.map((cells, i) => {
    const classes = options.rowClass ? options.rowClass(i) : "";
    return make("tr", { class: classes || null }, cells.map((cell, j) => {
      const kind = columns[j][1];
      return make("td", { class: kind }, cell instanceof Node ? cell : kind === "where" ? place(cell) : cell);
    }));
  });
  return make("div", { class: "scroll" }, make("table", { class: "data" }, make("thead", {}, head), make("tbody", {}, body)));
}

// A path that breaks where it may, with its folders stepping back.
export function place(text) {
  const cut = text.lastIndexOf("/", text.indexOf(" ") < 0 ? text.length : text.indexOf(" ")) + 1;
  const folders = text.slice(0, cut).split(/(?<=\/)/).flatMap((part) => [part, make("wbr")]);
  return make("span", { class: "place" }, cut ? make("span", { class: "faint" }, folders) : null, text.slice(cut));
}

export function swatch(color) {
  return make("span", { class: "swatch", css: { background: color } });
}

export function category(name) {
  return make("span", { class: "cat" }, swatch(`var(--c-${cssKey(name)})`), name.replace("_", " "));
}

export const CATEGORIES = ["weights", "gradients", "optimizer", "activations", "loss", "calibration", "kv_cache", "temporaries", "workspaces", "other", "unknown"];

export function cssKey(name) {
  const key = name.replace(" ", "_");
  return CATEGORIES.includes(key) || key === "before" ? key : "unknown";
}

export function stackList(lines, here) {
  const items = lines.map((line, i) => {
    const library = line.startsWith("torch/");
    return make("li", { class: line === here || (i === 0 && !here) ? "here" : library ? "library" : "", text: line });
  });
  return make("ul", { class: "stack" }, items);
}
