// The allocations themselves, with search: alive at the peak, alive at the moment that was clicked, or all.

import { category, make, number, place, plural, size } from "./dom.js";
import { onNextFrame } from "./chart.js";

const PAGE_ROWS = 60;

export class Allocations {
  constructor(run, choose) {
    this.run = run;
    this.choose = choose;
    this.scope = "peak";
    this.together = true;
    this.query = "";
    this.sort = "total";
    this.rows = PAGE_ROWS;
    this.moment = null;
    this.selected = -1;
    this.schedule = onNextFrame(() => this.draw());
    this.build();
    this.draw();
  }

  build() {
    this.search = make("input", { class: "search", type: "search", placeholder: "Search lines, modules, ops, categories", "aria-label": "Search allocations", id: "search" });
    this.search.addEventListener("input", () => {
      this.query = this.search.value.trim().toLowerCase();
      this.rows = PAGE_ROWS;
      this.onSearch(this.query);
      this.schedule();
    });
    const scopes = [["peak", "alive at the peak"], ["moment", "alive at the chosen moment"], ["all", "all that were made"]];
    this.scopes = make("select", { class: "plain", "aria-label": "Which allocations", id: "scope" }, scopes.map(([value, text]) => make("option", { value, text })));
    this.scopes.addEventListener("change", () => this.setScope(this.scopes.value));
    const together = make("input", { type: "checkbox", checked: true });
    together.addEventListener("change", () => {
      this.together = together.checked;
      this.schedule();
    });
    this.note = make("p", { class: "sub muted" });
    this.holder = make("div");
    this.element = make("div", {}, make("div", { class: "tools" }, this.search, this.scopes, make("label", {}, together, "equal ones together")), this.note, this.holder);
  }

  onSearch() {}

  setScope(scope) {
    this.scope = scope;
    this.scopes.value = scope;
    this.rows = PAGE_ROWS;
    this.schedule();
  }

  setMoment(event) {
    this.moment = event;
    if (this.scope === "moment") this.schedule();
  }

  // By its number in the whole run.
  select(number) {
    this.selected = number;
    this.schedule();
  }

  useRun(run) {
    this.run = run;
    this.schedule();
  }

  found() {
    const { run, query } = this;
    const event = this.scope === "peak" ? run.data.peak_event : this.moment;
    const matches = query ? this.kindsThatMatch(query) : null;
    const rows = new Map();
    for (let block = 0; block < run.blocks; block++) {
      if (this.scope !== "all" && (event === null || !run.alive(block, event))) continue;
      if (matches && !matches[run.kind[block]] && !run.categoryName(block).includes(query)) continue;
      const key = this.together ? `${run.kind[block]} ${run.size[block]} ${run.category[block]}` : block;
      const row = rows.get(key);
      if (row) row.count++; else rows.set(key, { block, count: 1 });
    }
    const list = [...rows.values()];
    for (const row of list) row.total = row.count * run.size[row.block];
    const by = { total: (row) => -row.total, size: (row) => -run.size[row.block], count: (row) => -row.count, born: (row) => run.birth[row.block] };
    const value = by[this.sort];
    return list.sort((a, b) => value(a) - value(b) || a.block - b.block);
  }

  kindsThatMatch(query) {
    const { words, kinds } = this.run.data;
    const hit = words.map((word) => word.toLowerCase().includes(query));
    return kinds.map(([line, module, op]) => hit[line] || hit[module] || hit[op]);
  }

  draw() {
    const { run } = this;
    const list = this.found();
    const shown = list.slice(0, this.rows);
    const bytes = list.reduce((sum, row) => sum + row.total, 0) * run.unit;
    const count = list.reduce((sum, row) => sum + row.count, 0);
    const missing = run.leftOut > 0 ? `; ${number(run.leftOut)} others are not listed one by one` : "";
    const when = this.scope === "moment" ? (this.moment === null ? " (click into the timeline to choose one)" : ` (${run.when(Math.max(this.moment, 0))})`) : "";
    this.note.textContent = `${plural(count, "allocation")}, ${size(bytes)}${when}${missing}`;
    const head = (title, sort, kind) => make("th", { class: kind, scope: "col" }, sort ? make("button", { type: "button", text: `${title}${this.sort === sort ? " ▾" : ""}`, on: { click: () => { this.sort = sort; this.schedule(); } } }) : title);
    const body = shown.map((row) => this.row(row));
    const table = make("table", { class: "data" },
      make("thead", {}, make("tr", {}, head("total", "total", "num"), head("times", "count", "num"), head("each", "size", "num"), head("category"), head("made", "born", "num"), head("freed", "", "num"), head("where", "", ""))),
      make("tbody", {}, body));
    const more = list.length > shown.length ? make("button", { class: "plain more", type: "button", text: `show more (${number(list.length - shown.length)})`, on: { click: () => { this.rows += 4 * PAGE_ROWS; this.draw(); } } }) : null;
    this.holder.replaceChildren(...[make("div", { class: "scroll" }, table), more].filter(Boolean));
  }

  row({ block, count, total }) {
    const { run } = this;
    const cells = [
      make("td", { class: "num", text: size(total * run.unit) }), make("td", { class: "num muted", text: count > 1 ? `${number(count)} ×` : "" }),
      make("td", { class: "num", text: size(run.bytes(block)) }), make("td", {}, category(run.categoryName(block))),
      make("td", { class: "num muted", text: run.made(block) }), make("td", { class: "num muted", text: run.freed(block) }), make("td", { class: "where" }, place(run.where(block))),
    ];
    const pick = () => this.choose(block);
    return make("tr", { class: run.number[block] === this.selected ? "pick chosen-row" : "pick", tabindex: 0, on: { click: pick, keydown: (event) => event.key === "Enter" && pick() } }, cells);
  }
}
