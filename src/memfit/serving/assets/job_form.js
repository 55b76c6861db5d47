// The settings of a job as a form. What there is to set comes from the server, which has it from memfit's own settings; the
// state holds only what is not as it would be by itself.

import { Picker, Slider, choice, field, keepingFocus, segments, toggle } from "./controls.js";
import { make, size } from "./dom.js";

export const KIND_WORDS = { lora: "LoRA", qlora: "QLoRA" };  // others are called as they are
const BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];
const LENGTHS = [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072];
const RANKS = [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512];
const COUNTS = [1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048];
const SLIDERS = { batch_size: ["batch", BATCHES], seq_len: ["length", LENGTHS], rank: ["rank", RANKS], nsamples: ["samples", COUNTS], new_tokens: ["new tokens", COUNTS] };
const BY_SLIDER = [...Object.keys(SLIDERS), "grad_accum", "num_beams"];

export class JobForm {
  constructor(options, models, changed) {
    this.options = options;
    this.changed = changed;
    this.element = make("form", { class: "card job", "aria-label": "The job" });
    this.element.addEventListener("submit", (event) => event.preventDefault());
    this.model = new Picker("model", models.map((each) => ({
      value: each.name, more: each.parameters ? `${(each.parameters / 1e9).toFixed(each.parameters < 1e10 ? 2 : 0)} B` : each.from, also: [...each.also, ...each.quantised],
    })).concat(models.flatMap((each) => [...each.also, ...each.quantised].map((name) => ({ value: name, more: `${each.name}${each.quantised.includes(name) ? ", quantised" : ""}` })))),
    (value) => this.set({ model: value }), { placeholder: "preset, hub id or ./folder" });
    this.card = new Picker("card", [
      ...options.cards.map((card) => ({ value: card.name, more: size(card.capacity_bytes) })), ...options.labels.map((label) => ({ value: label, more: "any card of that label" })),
    ], (value) => this.set({ gpu: value }), { placeholder: "none: no verdict" });
    this.kinds = make("div");
    this.sliders = make("div");
    this.levers = make("div", { class: "levers" });
    this.rest = make("div", { class: "settings" });
    this.slider = {};
    this.element.append(this.model.element, this.kinds, this.card.element, this.sliders,
      make("details", { open: innerWidth > 860 }, make("summary", { text: "levers" }), this.levers),
      make("details", {}, make("summary", { text: "every setting" }), this.rest),
      make("button", { class: "plain", type: "button", text: "start over", on: { click: () => this.reset() } }));
  }

  // -- the state: kind, model, gpu, and settings

  get names() {
    return this.options.of_kind[this.state.kind];
  }

  usual(name) {
    const { state, options } = this;
    return state.kind === "qlora" && name in options.qlora ? options.qlora[name] : options.settings[name].default;
  }

  // From the address, where all is text.
  read(texts) {
    const state = {};
    for (const [name, text] of Object.entries(texts)) {
      const setting = Object.hasOwn(this.options.settings, name) ? this.options.settings[name] : null;
      if (["kind", "model", "gpu"].includes(name)) state[name] = text;
      else if (setting) state[name] = parsed(setting.type, text);
    }
    if (!this.options.kinds.includes(state.kind)) state.kind = "lora";
    return this.tidy(state);
  }

  tidy(state) {
    const before = this.state;
    this.state = state;
    const kept = Object.entries(state).filter(([name, value]) => ["kind", "model", "gpu"].includes(name)
      || (this.names.includes(name) && value !== null && value !== undefined && value !== "" && !same(value, this.usual(name))));
    this.state = before;
    return Object.fromEntries(kept);
  }

  set(changes) {
    this.use(this.tidy({ ...this.state, ...changes }));
    this.changed(this.state);
  }

  reset() {
    this.set(Object.fromEntries(Object.keys(this.state).filter((name) => !["kind", "model", "gpu"].includes(name)).map((name) => [name, null])));
  }

  // -- drawn

  use(state) {
    const otherKind = !this.state || this.state.kind !== state.kind;
    this.state = state;
    this.model.value = state.model;
    this.card.value = state.gpu || "";
    if (otherKind) this.drawKind();
    for (const [name, slider] of Object.entries(this.slider)) slider.value = state[name] ?? this.usual(name) ?? this.told?.[name] ?? 16;
    this.drawRest();
  }

  // What the plan says of settings that nobody has set, and which levers there are.
  tell(workload, levers) {
    this.told = workload;
    this.lever = levers;
    for (const [name, slider] of Object.entries(this.slider)) if (workload[name]) slider.value = workload[name];
    this.drawLevers();
    this.drawRest();
  }

  drawKind() {
    const { settings } = this.options;
    const focused = this.kinds.contains(document.activeElement);
    this.kinds.replaceChildren(segments("job", this.options.kinds.map((kind) => [kind, KIND_WORDS[kind] || kind]), this.state.kind, (kind) => this.set({ kind })));
    if (focused) this.kinds.querySelector("input:checked").focus();
    this.slider = {};
    for (const [name, [label, stops]] of Object.entries(SLIDERS)) {
      if (this.names.includes(name)) this.slider[name] = new Slider(name, label, stops, (value) => this.set({ [name]: value }), settings[name].help);
    }
    this.sliders.replaceChildren(...Object.values(this.slider).map((each) => each.element));
  }

  drawLevers() {
    const shown = this.lever.filter((lever) => !Object.keys(lever.settings).every((name) => BY_SLIDER.includes(name)));
    keepingFocus(this.levers, () => this.levers.replaceChildren(...shown.map((lever) => toggle(lever.name, lever.on, (on) => this.pull(lever, on), {
      name: lever.name, disabled: lever.missing !== null && !lever.on,
      help: `${lever.says}. Price: ${lever.price}; ${lever.risk}.${lever.missing ? ` Needs ${lever.missing}, which is not installed here.` : ""}`,
      badge: make("span", { class: `cost ${lever.cost}`, text: lever.cost }),
    }))));
  }

  // Levers of one group replace each other.
  pull(lever, on) {
    let state = { ...this.state };
    for (const other of this.lever) if (other.on && other.group === lever.group && other !== lever && on) state = this.without(state, other);
    state = on ? this.with(state, lever.settings) : this.without(state, lever);
    this.use(this.tidy(state));
    this.changed(this.state);
  }

  with(state, settings) {
    const changed = { ...state };
    for (const [name, value] of Object.entries(settings)) {
      changed[name] = Array.isArray(value) ? [...new Set([...(state[name] || this.usual(name) || []), ...value])] : value;
    }
    return changed;
  }

  without(state, lever) {
    const changed = { ...state };
    for (const [name, value] of Object.entries(lever.settings)) {
      if (Array.isArray(value)) changed[name] = (state[name] || []).filter((each) => !value.includes(each));
      else if (this.state.kind === "qlora" && same(value, this.options.qlora[name])) changed[name] = typeof value === "boolean" ? !value : this.options.settings[name].default;
      else delete changed[name];
      if (Array.isArray(changed[name]) && !changed[name].length) delete changed[name];
    }
    return changed;
  }

  drawRest() {
    const names = this.names.filter((name) => !(name in this.slider));
    keepingFocus(this.rest, () => this.rest.replaceChildren(...names.map((name) => this.control(name))));
  }

  control(name) {
    const { type, choices, help, flag } = this.options.settings[name];
    const label = flag.replace(/^--/, "").replaceAll("-", " ");
    const set = (value) => this.set({ [name]: value });
    const value = this.state[name] ?? this.usual(name);
    const told = this.told && this.told[name] !== undefined ? this.told[name] : null;
    const by = told === null || Array.isArray(told) ? "default" : `default (${told === true ? "yes" : told === false ? "no" : told})`;
    if (type === "yes or no" && this.usual(name) !== null) return toggle(label, value, set, { name, help });
    if (type === "yes or no") return choice(label, [["", by], ["true", "yes"], ["false", "no"]], value === null ? "" : String(value), (text) => set(text === "" ? null : text === "true"), { name, help });
    if (type === "choice") return choice(label, [...(this.usual(name) === null ? [["", by]] : []), ...choices.map((each) => [each, each])], value ?? "", set, { name, help });
    if (type === "names" && choices) {
      const has = value || [];
      return make("fieldset", { class: "control many", title: help }, make("legend", { text: label }),
        choices.map((each) => toggle(each, has.includes(each), (on) => set(on ? [...has, each] : has.filter((other) => other !== each)), { name: `${name} ${each}` })));
    }
    const number = type === "whole" || type === "number";
    const text = value === null ? "" : Array.isArray(value) ? value.join(",") : String(value);
    return field(label, number ? "number" : "text", text, (typed) => set(typed === "" ? null : parsed(type, typed)), { name, help, placeholder: told === null ? "" : String(told) });
  }
}

function parsed(type, text) {
  if (type === "yes or no") return text === "true";
  if (type === "whole" || type === "number") return Number.isFinite(Number(text)) ? Number(text) : text;
  return type === "names" ? text.split(",").map((each) => each.trim()).filter(Boolean) : text;
}

function same(a, b) {
  return JSON.stringify(a) === JSON.stringify(b);
}
