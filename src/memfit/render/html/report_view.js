// A report in a page: its sections in order, and what is chosen in one of them shown in the others.

import { card, dataTable, make, stackList } from "./dom.js";
import { Run } from "./data.js";
import { Flame } from "./flame.js";
import { checkpoints, growthOfSteps, hero, idleMemory, messages, nextSteps, notes, outOfMemory, phases, programScopes, recordings, shares, temporaries } from "./sections.js";
import { Allocations } from "./table.js";
import { Timeline } from "./timeline.js";
import { shortOp, size } from "./words.js";

// `options`: those of the timeline; `tools`, shown above it; `below`, shown below it.
export class ReportView {
  constructor(main, data, options = {}) {
    const { report } = data;
    this.report = report;
    this.run = data.timeline ? new Run(data.timeline) : null;
    this.drawn = [];
    this.options = options;
    main.append(...[messages(report), outOfMemory(report), hero(report, this.run)].filter(Boolean));
    if (this.run) main.append(...this.pictures(data));
    main.append(...[checkpoints(report.log), nextSteps(report)].filter(Boolean));
    const details = [
      shares(report, "by_code_line", "By line of code"), shares(report, "by_module", "By module"), shares(report, "by_op", "By op"), phases(report),
      temporaries(report), idleMemory(report), growthOfSteps(report), programScopes(report), recordings(report),
    ].filter(Boolean);
    if (details.length) main.append(make("div", { class: "columns" }, details));
    main.append(notes(report));
    this.redraw = () => this.drawn.forEach((each) => each.schedule());
    addEventListener("resize", this.redraw);
    document.addEventListener("themechange", this.redraw);
    this.redraw();
  }

  close() {
    removeEventListener("resize", this.redraw);
    document.removeEventListener("themechange", this.redraw);
  }

  pictures(data) {
    const { report, run } = this;
    this.chosen = make("div");
    this.timeline = new Timeline(run, (found) => this.showFound(found), this.options);
    this.flame = new Flame(data.timeline, report.peak.allocated_bytes);
    this.table = new Allocations(run, (block) => this.showBlock(this.table.run, block, true));
    this.table.onSearch = (query) => this.flame.search(query);
    this.timeline.ooms = report.ooms;
    if (report.category_source === "none" && run.groupings.length > 1) this.timeline.useGrouping(1);
    this.drawn.push(this.timeline, this.flame);
    return [
      make("section", { class: "card", id: "timeline" }, make("h2", { text: "Timeline" }), this.options.tools, this.timeline.element, this.options.below, this.chosen),
      card("flame", "Flame graph of the peak", "from the outside in; as wide as its bytes. Click to enlarge.", this.flame.element),
      card("allocations", "Allocations", null, this.table.element),
    ];
  }

  // Other blocks of the same run: all that is drawn is drawn of them.
  use(data) {
    this.run = new Run(data);
    this.timeline.useRun(this.run, this.run);
    this.table.useRun(this.run);
    this.flame.use(data, this.report.peak.allocated_bytes);
  }

  facts(run, block) {
    const { line, module, op } = run.text(block);
    const when = (at, event) => [at, run.phaseAt(event)].filter(Boolean).join(", ");
    return [
      ["size", size(run.bytes(block))], ["asked for", size(run.bytes(block) - run.waste[block])], ["category", run.categoryName(block)],
      ["module", module], ["made by", line ? "" : op],
      ["made", run.birth[block] < 0 ? "before the recording" : when(run.made(block), run.birth[block])],
      ["freed", run.death[block] >= run.events ? "never" : when(run.freed(block), run.death[block])],
    ].filter(([, value]) => value);
  }

  showBlock(run, block, fromTable = false) {
    const stack = run.stack(block);
    const words = this.facts(run, block).flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]);
    this.chosen.replaceChildren(make("div", { class: "chosen", id: "chosen" },
      make("div", {}, make("h3", { text: run.where(block) }), make("dl", {}, words)),
      stack.length ? stackList(stack, run.text(block).line) : make("p", { class: "muted", text: "No stack was recorded for it." })));
    this.timeline.select(run.number[block]);
    this.table.select(run.number[block]);
    if (fromTable) this.timeline.toBlock(run, block);
  }

  showFound(found) {
    const { timeline } = this, { run } = timeline;
    if (!found) {
      this.chosen.replaceChildren();
      return this.table.select(-1);
    }
    this.table.setMoment(found.event);
    if (found.block >= 0) return this.showBlock(run, found.block);
    if (found.group < 0) return this.chosen.replaceChildren();
    const group = timeline.grouping;
    const rows = [];
    for (let block = 0; block < run.blocks && rows.length < 8; block++) {
      if (group.ofBlock[block] === found.group && run.alive(block, found.event)) rows.push(block);
    }
    const list = dataTable([["", "num"], ["", "where"]], rows.map((block) => [size(run.bytes(block)), run.where(block)]), { rowClass: () => "pick" });
    list.querySelectorAll("tbody tr").forEach((row, i) => row.addEventListener("click", () => this.showBlock(run, rows[i])));
    this.chosen.replaceChildren(make("div", { class: "chosen", id: "chosen" },
      make("div", {}, make("h3", { text: shortOp(group.names[found.group]) }), make("p", { class: "muted", text: `${size(group.sums[found.group][found.sample] * run.unit)} at ${found.event < 0 ? "the start" : run.when(found.event)}; its largest allocations then:` })), list));
  }
}
