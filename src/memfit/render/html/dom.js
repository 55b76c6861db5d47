// Elements are made here, and text is only ever put into them as text.

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

export function cssKey(name) {
  const key = name.replace(" ", "_");
  const known = ["weights", "gradients", "optimizer", "activations", "loss", "calibration", "kv_cache", "temporaries", "workspaces", "other", "unknown", "before"];
  return known.includes(key) ? key : "unknown";
}

export function stackList(lines, here) {
  const items = lines.map((line, i) => {
    const library = line.startsWith("torch/");
    return make("li", { class: line === here || (i === 0 && !here) ? "here" : library ? "library" : "", text: line });
  });
  return make("ul", { class: "stack" }, items);
}
