// Memory over time, as one looks at it: which part is shown and how, what lies under the pointer, hands and keys.

import { make, number, shortOp, size, swatch } from "./dom.js";
import { onNextFrame } from "./chart.js";
import { BOTTOM, Drawing, LEFT, RIGHT, TOP } from "./timeline_drawing.js";

export class Timeline extends Drawing {
  // `onRange`: what to do with a stretch that was selected; `detail`: the share of allocations that is shown one by one.
  constructor(run, choose, { onRange = null, detail = 10 } = {}) {
    super();
    this.run = this.whole = run;
    this.onRange = onRange;
    this.range = null;
    this.choose = choose;
    this.axis = run.seconds === null ? "event" : "time";
    this.grouping = run.groupings[0];
    this.detail = detail;
    this.reservedShown = run.reserved !== null;
    this.selected = -1;
    this.heights = null; // from which size to which; null: all of it
    this.schedule = onNextFrame(() => this.draw());
    this.build();
    this.reset();
  }

  // -- the parts of it

  build() {
    this.canvas = make("canvas", {
      class: "main", tabindex: 0, role: "img",
      "aria-label": "Allocated memory over time, stacked. Left and right pan, plus and minus zoom in time, up and down in size, p goes to the peak, 0 shows all, Escape lets go of a choice.",
    });
    this.overview = make("canvas", { class: "overview", "aria-hidden": "true" });
    this.hair = make("div", { class: "hair" });
    this.tip = make("div", { class: "tip", role: "status" });
    this.key = make("div", { class: "key" });
    this.plot = make("div", { class: "plot" }, this.canvas, this.overview, this.hair, this.tip);
    this.tools = this.buildTools();
    this.element = make("div", {}, this.tools, this.plot, this.key, this.buildHelp());
    this.listen();
  }

  buildTools() {
    const picker = (label, values, change, id) => {
      const select = make("select", { class: "plain", id }, values.map(([value, text]) => make("option", { value, text })));
      select.addEventListener("change", () => change(select.value));
      return make("label", {}, label, select);
    };
    const groups = this.run.groupings.map((each, i) => [i, each.id]);
    const axes = [...(this.run.seconds === null ? [] : [["time", "time"]]), ["event", "events"]];
    this.shown = make("output");
    const slider = make("input", { type: "range", min: 0, max: 100, step: 1, value: this.detail, id: "detail", "aria-label": "Share of the allocations that is shown one by one" });
    slider.addEventListener("input", () => {
      this.detail = Number(slider.value);
      this.schedule();
    });
    this.slider = slider;
    const reserved = make("input", { type: "checkbox", checked: true });
    reserved.addEventListener("change", () => {
      this.reservedShown = reserved.checked;
      this.schedule();
    });
    const button = (text, run, id) => make("button", { class: "plain", type: "button", id, text, on: { click: run } });
    return make("div", { class: "tools" },
      picker("stacked by", groups, (value) => { this.grouping = this.run.groupings[Number(value)]; this.schedule(); }, "grouping"),
      axes.length > 1 ? picker("axis", axes, (value) => { this.axis = value; this.reset(); }, "axis") : null,
      make("label", {}, "one by one: the largest", slider, this.shown),
      this.run.reserved === null ? null : make("label", {}, reserved, "reserved"),
      make("div", { class: "right" }, this.onRange ? this.buildRange(button) : null, button("to the peak", () => this.toPeak(), "to-peak"), button("show all", () => this.reset(), "show-all")));
  }

  buildRange(button) {
    this.selecting = false;
    this.rangeButton = button("select a range", () => this.setSelecting(!this.selecting), "select-range");
    return [this.rangeButton, button("sum what is in view", () => this.setRange(this.from, this.to), "sum-view")];
  }

  setSelecting(on) {
    this.selecting = on;
    this.rangeButton.setAttribute("aria-pressed", String(on));
  }

  setRange(from, to, done = true) {
    this.hideTip();
    this.range = from === null ? null : [Math.max(Math.min(from, to), 0), Math.min(Math.max(from, to), this.end)];
    this.schedule();
    if (done) this.onRange(this.range, this.axis);
  }

  // The same run, looked at more closely or as a whole; what was chosen stays chosen.
  useRun(run, whole = this.whole) {
    const index = this.run.groupings.indexOf(this.grouping);
    [this.run, this.whole] = [run, whole];
    this.grouping = run.groupings[index] || run.groupings[0];
    this.schedule();
  }

  buildHelp() {
    const key = (name) => make("kbd", { text: name });
    return make("p", { class: "help" }, "Wheel or ", key("+"), " ", key("−"), " zooms in time, with ", key("Alt"), " or ", key("↑"), " ", key("↓"), " in size; dragging or ", key("←"), " ", key("→"),
      " pans, a click chooses an allocation, ", key("p"), " goes to the peak, ", key("0"), " shows all, ", key("Esc"), " lets go.",
      this.onRange ? [" Dragging with ", key("Shift"), " selects a range and sums it up; ", key("s"), " sums what is in view."] : null);
  }

  useGrouping(index) {
    this.grouping = this.run.groupings[index];
    this.tools.querySelector("#grouping").value = String(index);
  }

  // -- where we are

  get end() {
    return this.run.ends[this.axis];
  }

  get plotWidth() {
    return Math.max(this.surface ? this.surface.width - LEFT - RIGHT : 800, 50);
  }

  reset() {
    [this.from, this.to] = [0, this.end];
    this.heights = null;
    this.schedule();
  }

  // In size: around the top of what is shown, or around the pointer.
  zoomHeight(factor, around = Math.min(this.most, this.high)) {
    const low = around - (around - this.low) * factor, high = around + (this.high - around) * factor;
    this.moveHeight(Math.max(low, 0), high);
  }

  moveHeight(low, high) {
    const span = Math.max(high - low, 64);
    this.heights = low <= 0 && high >= this.top ? null : [Math.max(low, 0), Math.max(low, 0) + span];
    [this.low, this.high] = this.heights || [0, this.top]; // at once: the next key may come before the next frame
    this.schedule();
  }

  show(from, to) {
    const least = this.axis === "event" ? 8 : this.end / 1e6;
    const span = Math.min(Math.max(to - from, least), this.end);
    this.from = Math.min(Math.max(from, 0), this.end - span);
    this.to = this.from + span;
    this.schedule();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  positionAt(x) {
    return this.from + ((x - LEFT) / this.plotWidth) * (this.to - this.from);
  }

  // `seconds`: where somebody knows them; samples tell the time about.
  position(event, seconds = null) {
    if (this.axis === "event") return event + 1;
    return seconds === null ? this.whole.secondsAt(event) || 0 : seconds;
  }

  toPeak() {
    const peak = this.position(this.run.data.peak_event, this.run.data.peak_seconds);
    const span = this.end / 20;
    this.show(peak - span / 2, peak + span / 2);
  }

  toBlock(run, block) {
    const times = run.madeAt ? [run.madeAt[block], run.freedAt[block]] : [null, null];
    const from = this.position(Math.max(run.birth[block], 0), times[0]), to = this.position(Math.min(run.death[block], run.events), times[1]);
    if (to < this.from || from > this.to) {
      const span = Math.max((to - from) * 1.6, this.end / 200);
      this.show((from + to - span) / 2, (from + to + span) / 2);
    }
  }

  // By its number in the whole run.
  select(number) {
    this.selected = number;
    this.schedule();
  }

  describe() {
    const { run, grouping } = this;
    const most = run.leftOut > 0 ? "up to " : ""; // those came as a sum, some perhaps of moments beside what is in view
    this.shown.textContent = `${number(this.drawn)} of ${most}${number(this.there + run.leftOut)} in view`;
    if (this.described === grouping) return; // a window of the run has groupings of its own
    this.described = grouping;
    const present = grouping.names.map((_, i) => grouping.sums[i].some((sum) => sum > 0));
    this.key.replaceChildren(
      ...grouping.names.map((name, i) => present[i] && make("span", { title: name }, swatch(`var(${grouping.colors[i]})`), make("em", { text: shortOp(name) }))).filter(Boolean),
      make("span", { class: "faint", text: run.data.stride > 1 ? `of every ${number(run.data.stride)} events the highest and the last are drawn` : "" }),
    );
  }

  // -- what lies under the pointer

  at(x, y) {
    const column = Math.floor(x - LEFT);
    if (column < 0 || column >= this.samples.length || y < TOP || y > this.surface.height - BOTTOM) return null;
    const value = this.valueAt(y);
    const sample = this.samples[column], event = this.eventOf[column];
    const found = { column, sample, event, group: -1, block: -1 };
    for (let group = 0; group + 1 < this.bases.length; group++) {
      if (value >= this.bases[group][column] && value < this.bases[group + 1][column]) {
        found.group = group;
        found.block = this.blockAt(group, event, value - this.bases[group][column]);
      }
    }
    return found;
  }

  valueAt(y) {
    return this.low + ((this.surface.height - BOTTOM - y) / this.plotHeight) * (this.high - this.low);
  }

  blockAt(group, event, height) {
    const { run } = this;
    const wanted = this.wanted;
    let stacked = 0;
    for (let i = 0; i < run.blocks; i++) {
      const block = run.byBirth[i];
      if (block >= wanted || this.grouping.ofBlock[block] !== group || !run.alive(block, event)) continue;
      stacked += run.size[block];
      if (height < stacked) return block;
    }
    return -1;
  }

  showTip(x, y) {
    const found = this.samples ? this.at(x, y) : null;
    this.tip.style.display = this.hair.style.display = found ? "block" : "none";
    if (!found) return;
    const { run } = this;
    const row = (name, value, color) => make("div", { class: "row" }, make("span", {}, color ? swatch(color) : null, name), make("span", { class: "num", text: value }));
    const phase = run.phaseAt(found.event);
    const rows = [make("div", { class: "head" }, make("span", { text: size(run.allocated[found.sample] * run.unit) }), make("span", { class: "muted num", text: found.event < 0 ? "before" : run.when(found.event) }))];
    if (phase) rows.push(row("phase", phase));
    if (run.reserved) rows.push(row("reserved", size(run.reserved[found.sample] * run.unit)));
    if (found.group >= 0) {
      const sum = this.grouping.sums[found.group][found.sample] * run.unit;
      rows.push(make("hr"), row(shortOp(this.grouping.names[found.group]), size(sum), `var(${this.grouping.colors[found.group]})`));
      if (found.block >= 0) {
        rows.push(row("this allocation", size(run.bytes(found.block))), make("div", { class: "where mono muted", text: run.where(found.block) }));
      } else rows.push(make("div", { class: "muted", text: "smaller ones, summed up; move the slider to see more of them" }));
    }
    this.tip.replaceChildren(...rows);
    this.hair.style.left = `${LEFT + found.column}px`;
    this.hair.style.height = `${this.surface.height - BOTTOM}px`;
    const wide = this.tip.offsetWidth, right = x + 18 + wide > this.surface.width;
    this.tip.style.left = `${right ? Math.max(x - wide - 14, 0) : x + 16}px`;
    this.tip.style.top = `${Math.min(y + 14, this.surface.height - this.tip.offsetHeight - 4)}px`;
  }

  hideTip() {
    this.tip.style.display = this.hair.style.display = "none";
  }

  // -- hands and keys

  listen() {
    const { canvas, overview } = this;
    this.held = null; // what a pressed pointer does: it selects, or it drags
    canvas.addEventListener("wheel", (event) => this.turn(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.grab(event));
    canvas.addEventListener("pointermove", (event) => this.drag(event));
    canvas.addEventListener("pointerup", (event) => this.letGo(event));
    canvas.addEventListener("pointerleave", () => this.hideTip());
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.positionAt(event.offsetX)));
    canvas.addEventListener("keydown", (event) => this.press(event));
    overview.addEventListener("pointerdown", (event) => {
      overview.setPointerCapture(event.pointerId);
      this.jump(event);
    });
    overview.addEventListener("pointermove", (event) => event.buttons && this.jump(event));
  }

  turn(event) {
    const whole = this.from <= 0 && this.to >= this.end;
    const factor = Math.exp(Math.max(-60, Math.min(60, event.deltaY || event.deltaX)) * 0.008);
    const sideways = !event.altKey && (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey);
    if (!event.altKey && !sideways && whole && event.deltaY > 0) return; // nothing further out: the page may scroll
    event.preventDefault();
    if (event.altKey) return this.zoomHeight(factor, this.valueAt(event.offsetY));
    if (!sideways) return this.zoom(factor, this.positionAt(event.offsetX));
    const by = ((event.deltaX || event.deltaY) / this.plotWidth) * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  grab(event) {
    if (this.onRange && (event.shiftKey || this.selecting)) this.held = { selects: this.positionAt(event.offsetX) };
    else this.held = { x: event.offsetX, y: event.offsetY, from: this.from, to: this.to, low: this.low, high: this.high, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const { held } = this;
    if (!held) return this.showTip(event.offsetX, event.offsetY);
    if (held.selects !== undefined) return this.setRange(held.selects, this.positionAt(event.offsetX), false);
    if (Math.abs(held.x - event.offsetX) > 3 || (this.heights && Math.abs(held.y - event.offsetY) > 3)) held.moved = true;
    if (!held.moved) return;
    if (this.heights) {
      const low = Math.max(held.low + ((event.offsetY - held.y) / this.plotHeight) * (held.high - held.low), 0);
      this.moveHeight(low, low + held.high - held.low);
    }
    this.canvas.classList.add("dragging");
    this.moving = true;
    this.hideTip();
    const by = ((held.x - event.offsetX) / this.plotWidth) * (held.to - held.from);
    this.show(held.from + by, held.to + by);
  }

  letGo(event) {
    const { held } = this;
    this.held = null;
    if (held && held.selects !== undefined) return this.setRange(held.selects, this.positionAt(event.offsetX));
    this.canvas.classList.remove("dragging");
    if (this.moving) this.schedule();
    this.moving = false;
    if (held && !held.moved) this.click(event.offsetX, event.offsetY);
  }

  // In the picture of the whole below: what is in view goes there.
  jump(event) {
    const middle = ((event.offsetX - LEFT) / this.plotWidth) * this.end, half = (this.to - this.from) / 2;
    this.show(middle - half, middle + half);
  }

  click(x, y) {
    const found = this.at(x, y);
    if (!found) return;
    this.select(found.block < 0 ? -1 : this.run.number[found.block]);
    this.choose(found, this.grouping);
  }

  press(event) {
    const by = (this.to - this.from) * 0.15;
    const actions = {
      ArrowLeft: () => this.show(this.from - by, this.to - by),
      ArrowRight: () => this.show(this.from + by, this.to + by),
      ArrowUp: () => this.zoomHeight(0.7),
      ArrowDown: () => this.zoomHeight(1 / 0.7),
      "+": () => this.zoom(0.7),
      "=": () => this.zoom(0.7),
      "-": () => this.zoom(1 / 0.7),
      Home: () => this.show(0, this.to - this.from),
      End: () => this.show(this.end - (this.to - this.from), this.end),
      0: () => this.reset(),
      p: () => this.toPeak(),
      Escape: () => { this.select(-1); this.choose(null); if (this.range) this.setRange(null); },
    };
    if (this.onRange) actions.s = () => this.setRange(this.from, this.to);
    if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    actions[event.key]();
  }
}
