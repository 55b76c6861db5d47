// Controls that a form of settings is made of: a field with suggestions, a slider with its number, a switch, a choice.

import { make } from "./dom.js";

let made = 0;
const newId = (name) => `${name}-${++made}`;

const MOST_SHOWN = 60;

// A text field with suggestions: items are { value, text, more, also }; every word that is typed must occur in one.
export class Picker {
  constructor(label, items, choose, options = {}) {
    this.items = items;
    this.choose = choose;
    this.at = -1;
    const id = newId("picker");
    this.input = make("input", {
      class: "field", type: "text", id, role: "combobox", autocomplete: "off", spellcheck: "false", "aria-expanded": "false", "aria-controls": `${id}-list`,
      "aria-autocomplete": "list", placeholder: options.placeholder,
    });
    this.list = make("ul", { class: "suggestions", role: "listbox", id: `${id}-list`, "aria-label": label });
    this.list.hidden = true;
    this.element = make("div", { class: "control picker" }, make("label", { for: id, text: label }), this.input, this.list);
    this.input.addEventListener("focus", () => this.input.select());
    this.input.addEventListener("click", () => this.open(""));
    this.input.addEventListener("input", () => this.open(this.input.value));
    this.input.addEventListener("keydown", (event) => this.press(event));
    this.input.addEventListener("blur", () => this.leave());
    this.list.addEventListener("pointerdown", (event) => event.preventDefault()); // the field keeps the focus
    this.list.addEventListener("click", (event) => {
      const item = event.target.closest("li");
      if (item) this.take(item.dataset.value);
    });
  }

  set value(text) {
    this.chosen = text;
    if (document.activeElement !== this.input || this.list.hidden) this.input.value = text;
  }

  found(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const scored = this.items.map((item) => [item, [item.value, item.more, ...(item.also || [])].join(" ").toLowerCase()]);
    const hits = scored.filter(([, all]) => words.every((word) => all.includes(word))).map(([item]) => item);
    return hits.sort((a, b) => starts(b, words[0]) - starts(a, words[0])).slice(0, MOST_SHOWN);
  }

  open(text) {
    const hits = this.found(text);
    this.at = -1;
    this.list.replaceChildren(...hits.map((item, i) => make("li", { role: "option", id: `${this.list.id}-${i}`, "data-value": item.value, "aria-selected": "false" },
      make("span", { text: item.text || item.value }), item.more ? make("span", { class: "muted", text: item.more }) : null)));
    this.list.hidden = !hits.length;
    this.input.setAttribute("aria-expanded", String(!this.list.hidden));
  }

  close() {
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
  }

  press(event) {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (this.list.hidden) this.open("");
      this.move(event.key === "ArrowDown" ? 1 : -1);
    } else if (event.key === "Enter") {
      const item = this.list.hidden ? null : this.list.children[this.at];
      this.take(item ? item.dataset.value : this.input.value.trim());
    } else if (event.key === "Escape" && !this.list.hidden) {
      this.close();
      this.input.value = this.chosen;
    }
  }

  move(by) {
    const items = [...this.list.children];
    if (!items.length) return;
    this.at = (this.at + by + items.length) % items.length;
    items.forEach((item, i) => item.setAttribute("aria-selected", String(i === this.at)));
    items[this.at].scrollIntoView({ block: "nearest" });
    this.input.setAttribute("aria-activedescendant", items[this.at].id);
  }

  leave() {
    if (this.list.hidden) return this.input.value.trim() === this.chosen ? undefined : this.take(this.input.value.trim());
    this.close();
    if (this.input.value.trim() !== this.chosen) this.take(this.input.value.trim());
  }

  take(value) {
    this.close();
    this.input.value = value;
    if (value === this.chosen) return;
    this.chosen = value;
    this.choose(value);
  }
}

function starts(item, word) {
  return word && item.value.toLowerCase().startsWith(word) ? 1 : 0;
}

// A slider over stops that lie closer together where they are small, and the exact number beside it.
export class Slider {
  constructor(name, label, stops, change, help) {
    this.stops = stops;
    const id = newId("slider");
    this.range = make("input", { type: "range", min: 0, max: stops.length - 1, step: 1, id, "data-setting": name, title: help });
    this.number = make("input", { class: "field number", type: "number", min: 1, step: 1, "aria-label": `${label}, exactly` });
    this.element = make("div", { class: "control slider" }, make("label", { for: id, text: label }), this.range, this.number);
    this.range.addEventListener("input", () => {
      const value = this.stops[Number(this.range.value)];
      this.current = this.number.value = value;
      this.range.setAttribute("aria-valuetext", String(value));
      change(value);
    });
    this.number.addEventListener("change", () => {
      const value = Math.round(Number(this.number.value));
      this.number.value = value >= 1 ? value : this.current; // what is shown is what is planned
      if (value >= 1) change(value);
    });
  }

  set value(value) {
    this.current = value;
    const nearest = this.stops.reduce((best, stop, i) => (Math.abs(stop - value) < Math.abs(this.stops[best] - value) ? i : best), 0);
    if (document.activeElement !== this.range) this.range.value = nearest;
    if (document.activeElement !== this.number) this.number.value = value;
    this.range.setAttribute("aria-valuetext", String(value));
  }
}

export function toggle(label, on, change, options = {}) {
  const id = newId("switch");
  const input = make("input", { type: "checkbox", role: "switch", id, disabled: options.disabled, "data-name": options.name });
  input.checked = on;
  input.addEventListener("change", () => change(input.checked));
  return make("div", { class: "control switch", title: options.help }, input, make("label", { for: id }, label, options.badge || null));
}

export function choice(label, choices, value, change, options = {}) {
  const id = newId("choice");
  const select = make("select", { class: "plain", id, "data-setting": options.name }, choices.map(([each, text]) => make("option", { value: each, text })));
  select.value = value;
  select.addEventListener("change", () => change(select.value));
  return make("div", { class: "control choice", title: options.help }, make("label", { for: id, text: label }), select);
}

export function field(label, kind, value, change, options = {}) {
  const id = newId("field");
  const input = make("input", { class: "field", type: kind, id, "data-setting": options.name, placeholder: options.placeholder, step: kind === "number" ? "any" : null, spellcheck: "false" });
  input.value = value;
  input.addEventListener("change", () => change(input.value.trim()));
  return make("div", { class: "control choice", title: options.help }, make("label", { for: id, text: label }), input);
}

// One of several, side by side; arrow keys move, as among radio buttons they do.
export function segments(label, names, value, change) {
  const group = newId("segments");
  return make("fieldset", { class: "control segments" }, make("legend", { text: label }), make("div", {}, names.map(([name, text]) => {
    const input = make("input", { type: "radio", name: group, value: name, id: `${group}-${name}` });
    input.checked = name === value;
    input.addEventListener("change", () => change(name));
    return [input, make("label", { for: `${group}-${name}`, text })];
  }).flat()));
}

// What is drawn anew keeps the focus: a switch that was pressed can be pressed again.
export function keepingFocus(holder, draw) {
  const had = holder.contains(document.activeElement) ? document.activeElement.dataset : null;
  draw();
  if (had && (had.name || had.setting)) {
    const again = [...holder.querySelectorAll("input, select")].find((each) => each.dataset.name === had.name && each.dataset.setting === had.setting);
    again?.focus();
  }
}
