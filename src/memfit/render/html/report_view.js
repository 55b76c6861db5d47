// A report in a page: its sections in order, first what changes the meaning of the numbers, then the peak, then the rest; and
// what is chosen in one of them shown in the others.

import { curves, followTheme, themeButton } from "./chart.js";
import { Run } from "./data.js";
import { card, category, cssKey, dataTable, duration, make, number, percent, shortOp, size, sizeParts, sizesIn, sizeTicks, stackList, swatch } from "./dom.js";
import { Flame } from "./flame.js";
import { Allocations } from "./table.js";
import { Timeline } from "./timeline.js";

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

function messages(report) {
  if (!report.messages.length) return null;
  return make("div", { class: "message", role: "note" }, make("b", { text: "Before you read on" }), make("div", {}, report.messages.map((each) => make("p", { text: each.text }))));
}

function hero(report, run) {
  const peak = report.peak.allocated_bytes;
  const [figure, unit] = peak === null ? ["n/a", ""] : sizeParts(peak);
  const tile = (label, value) => make("div", { class: "tile" }, make("div", { class: "label", text: label }), make("div", { class: "value", text: value }));
  const idle = report.idle && report.idle.reserved_peak;
  const least = report.peak.reserved_at_least_bytes; // of a memory log: nobody looked between checkpoints
  const reserved = least === undefined || least === null ? size(report.peak.reserved_bytes) : `at least ${size(least)}`;
  const tiles = [tile("reserved, at its peak", reserved)];
  if (idle) tiles.push(tile("of that idle", `${size(idle.idle_bytes)}`));
  if (report.events) tiles.push(tile("allocations", number(report.events.allocations)));
  const lasted = report.log ? report.log.seconds : report.seconds;
  if (lasted !== null && lasted !== undefined) tiles.push(tile("time", duration(lasted)));
  const left = make("div", {}, make("div", { class: "label", text: "peak of allocated memory" }),
    make("div", { class: "figure" }, figure, make("small", { text: unit })), make("p", { class: "why", text: why(report) }), make("div", { class: "tiles" }, tiles));
  const right = report.breakdown ? breakdown(report) : null;
  return make("section", { class: "card hero", id: "peak" }, left, right);
}

function why(report) {
  const at = report.at_peak;
  if (!at || !report.peak.allocated_bytes) return "Nothing was allocated on a GPU.";
  if (!report.breakdown) return `Reached ${at.phase}.`;
  const parts = [];
  if (at.phase) parts.push(`in ${at.phase === "step" ? "the optimizer" : at.phase}${at.step ? ` of step ${at.step}` : ""}`);
  parts.push(at.event < 0 ? "before the first event" : at.seconds === null ? `at event ${number(at.event)}` : `after ${duration(at.seconds)}`);
  const made = at.code_line || [shortOp(at.op), at.module].filter(Boolean).join(" in ");
  const [most, bytes] = Object.entries(report.breakdown).sort((a, b) => b[1] - a[1])[0];
  const share = percent(bytes, report.peak.allocated_bytes);
  const before = report.there_before.allocated_bytes;
  const tells = most !== "unknown" ? `${share} of it ${most.replace("_", " ")}.` : before ? `${percent(before, report.peak.allocated_bytes)} of it was there before the recording began.` : "Categories are not known.";
  return `Reached ${parts.join(", ")}${made ? `, when ${made} asked for memory` : ""}. ${tells[0].toUpperCase()}${tells.slice(1)}`;
}

function breakdown(report) {
  const total = report.peak.allocated_bytes;
  const before = report.there_before.allocated_bytes;
  const rows = Object.entries(report.breakdown).filter(([, bytes]) => bytes > 0).map(([name, bytes]) => [name, bytes]);
  const unknown = rows.find(([name]) => name === "unknown");
  if (unknown && before && report.origin === "measured") {
    const old = Math.min(before, unknown[1]);
    unknown[1] -= old;
    rows.push(["before", old]);
  }
  const shown = rows.filter(([, bytes]) => bytes > 0).sort((a, b) => b[1] - a[1]);
  const inUnit = sizesIn(total);
  const label = (name) => (name === "before" ? "before the recording" : name.replace("_", " "));
  const bar = make("div", { class: "split", role: "img", "aria-label": "What is alive at the peak, by category" },
    shown.map(([name, bytes]) => make("i", { title: `${label(name)} ${size(bytes)}`, css: { background: `var(--c-${cssKey(name)})`, width: `${(100 * bytes) / total}%` } })));
  const table = make("table", { class: "legend" }, make("tbody", {}, shown.map(([name, bytes]) => make("tr", {},
    make("td", {}, swatch(`var(--c-${cssKey(name)})`), label(name)), make("td", { class: "num", text: inUnit(bytes) }), make("td", { class: "num muted", text: percent(bytes, total) })))));
  const derived = { derived: "derived from stacks and lifetimes", both: "labelled, the rest derived", labels: "", none: "not known" }[report.category_source];
  return make("div", {}, make("div", { class: "label", text: `alive at the peak, by category${derived ? ` (${derived})` : ""}` }), bar, table);
}

function outOfMemory(report) {
  const oom = report.ooms && report.ooms[report.ooms.length - 1];
  if (!oom) return null;
  const facts = [
    ["asked for", size(oom.requested_bytes), ""], ["allocated then", size(oom.allocated_bytes), "in live blocks"],
    ["cached", size(oom.cached_bytes), oom.largest_hole_bytes === null ? "" : `free inside the allocator, in pieces of at most ${size(oom.largest_hole_bytes)}`],
    ["reserved", size(oom.reserved_bytes), "both together"], ["free on the device", size(oom.device_free_bytes), "a limit of the process may be lower"],
  ];
  const section = make("section", { class: "card oom", id: "oom" }, make("h2", { text: `Out of memory: a request of ${size(oom.requested_bytes)} failed` }),
    oom.code_line ? make("p", { class: "sub mono", text: oom.code_line }) : null);
  const lines = oom.by_code_line.filter((share) => share.name).slice(0, 6);
  section.append(make("div", { class: "pair" },
    make("div", {}, dataTable([["", ""], ["", "num"], ["", "wide"]], facts.map(([name, value, meaning]) => [name, value, make("span", { class: "muted", text: meaning })])),
      lines.length ? dataTable([["alive then", "num"], ["", "where"]], lines.map((share) => [size(share.allocated_bytes), share.name])) : null),
    stackList(oom.stack, oom.code_line)));
  return section;
}

function shares(report, key, title) {
  const rows = report[key] || [];
  if (!rows.some((row) => row.name)) return null;
  const total = report.peak.allocated_bytes, inUnit = sizesIn(total);
  const known = report.category_source !== "none";
  const columns = [["bytes", "num"], ["share", "num"], ["times", "num"], known && ["category", ""], ["", "where"]].filter(Boolean);
  return card(null, title, "alive at the peak", dataTable(columns, rows.slice(0, 14).map((row) => [
    inUnit(row.allocated_bytes), percent(row.allocated_bytes, total), number(row.count), known && category(row.category), shortOp(row.name) || "(no name)",
  ].filter((cell) => cell !== false))));
}

function phases(report) {
  if (!report.phases || !report.phases.length) return null;
  const at = report.at_peak, many = report.phases.length > 24;
  const rows = many ? report.phases.filter((each, i) => i < 12 || i >= report.phases.length - 9 || (each.step === at.step && each.name === at.phase)) : report.phases;
  const isPeak = (each) => each.name === at.phase && each.step === at.step;
  return card(null, "Phases", report.phase_source === "derived" ? "told from the stacks; the peak in each" : "the peak in each",
    dataTable([["step", ""], ["phase", ""], ["allocated", "num"], ["reserved", "num"]],
      rows.map((each) => [each.step ? String(each.step) : "start", each.name, size(each.allocated_bytes), size(each.reserved_bytes)]),
      { rowClass: (i) => (isPeak(rows[i]) ? "peak" : "") }),
    many ? make("p", { class: "sub", text: `${number(report.phases.length - rows.length)} in the middle are left out here` }) : null);
}

function idleMemory(report) {
  const idle = report.idle;
  if (!idle || !(idle.reserved_peak || idle.end)) return null;
  const rows = [["when most was reserved", idle.reserved_peak], ["at the end", idle.end]].filter(([, each]) => each);
  const table = dataTable([["", ""], ["reserved", "num"], ["idle", "num"], ["largest hole", "num"], ["could go back", "num"], ["rounding", "num"]],
    rows.map(([name, each]) => [name, ...[each.reserved_bytes, each.idle_bytes, each.largest_hole_bytes, each.releasable_bytes, each.rounding_bytes].map(size)]));
  const groups = report.segments && report.segments.length > 1 ? dataTable([["pool at the end", ""], ["stream", ""], ["segments", "num"], ["reserved", "num"], ["used", "num"]],
    report.segments.map((each) => [`${each.kind}${each.expandable ? ", expandable" : ""}${each.pool.join("") === "00" ? "" : `, private ${each.pool.join(":")}`}`, String(each.stream), number(each.segments), size(each.reserved_bytes), size(each.used_bytes)])) : null;
  return card(null, "Held but idle", "memory that torch keeps from the driver without a live tensor in it", table, groups);
}

function temporaries(report) {
  if (!report.temporaries || !report.temporaries.length) return null;
  return card(null, "Temporaries", report.phases.length ? "made and gone within one phase: the most that one place needs at once" : "made and freed again: the most that one place needs at once",
    dataTable([["at once", "num"], ["largest", "num"], ["times", "num"], ["", "where"]],
      report.temporaries.map((each) => [size(each.at_once_bytes), size(each.largest_bytes), number(each.count), shortOp(each.name) || "(no name)"])));
}

function growthOfSteps(report) {
  const growth = report.growth;
  if (!growth || growth.steps.length < 2) return null;
  const top = Math.max(...growth.steps.map((step) => step.left_bytes), 1);
  const steps = growth.steps.length > 120 ? growth.steps.slice(-120) : growth.steps;
  const bars = make("div", { class: "steps", role: "img", "aria-label": "What each step leaves behind" },
    steps.map((step) => make("i", { title: `step ${step.step}: ${size(step.left_bytes)} left, peak ${size(step.peak_bytes)}`, css: { height: `${(100 * step.left_bytes) / top}%` } })));
  const said = growth.grows === null ? "Too few steps to tell whether it grows." : growth.grows ? `Every step leaves ${size(growth.per_step_bytes)} more behind.` : "It does not grow from step to step.";
  const survivors = growth.survivors.length ? dataTable([["left behind", "num"], ["times", "num"], ["", "where"]], growth.survivors.map((each) => [size(each.allocated_bytes), number(each.count), each.name || "(no name)"])) : null;
  return card(null, "Growth between steps", `what is still allocated when a step ends; ${growth.steps.length} steps`, bars, make("p", { text: said }), survivors);
}

function programScopes(report) {
  if (!report.annotations || !report.annotations.length) return null;
  const rows = [...report.annotations].sort((a, b) => b.allocated_bytes - a.allocated_bytes).slice(0, 12);
  return card(null, "Named by the program", "scopes of record_function, with the peak in each",
    dataTable([["peak", "num"], ["from", "num"], ["to", "num"], ["", "where"]], rows.map((each) => [size(each.allocated_bytes), duration(each.begin_seconds), duration(each.end_seconds), each.name])));
}

export function checkpoints(log) {
  if (!log || !log.checkpoints.length) return null;
  const columns = [["checkpoint", ""], ["allocated", "num"], ["reserved", "num"], ["peak", "num"], ["host", "num"], ["", ""]];
  const row = (each) => [each.name, size(each.allocated_bytes), size(each.reserved_bytes), size(each.peak_bytes), size(each.cpu_used_bytes), each.failed ? "the run broke here" : ""];
  const highest = [...log.parts].sort((a, b) => (b.peak_bytes || 0) - (a.peak_bytes || 0)).slice(0, 10);
  return make("section", { class: "card", id: "log" }, make("h2", { text: "Checkpoints" }), make("p", { class: "sub", text: "what the run's memory log says; its figures have three decimals of GiB" }),
    logChart(log.checkpoints), dataTable(columns, log.checkpoints.slice(0, 200).map(row)),
    highest.length ? make("div", {}, make("h3", { class: "inner", text: "Parts with the highest peaks" }), dataTable(columns, highest.map(row))) : null);
}

function logChart(points) {
  const known = points.filter((each) => each.allocated_bytes !== null);
  const timed = known.every((each) => each.seconds !== null) && known.length > 1 && known[known.length - 1].seconds > known[0].seconds;
  const line = (name, color, key, dash, dots) => ({
    name, color, dash, dots,
    points: known.flatMap((each, i) => (each[key] === null ? [] : [[timed ? each.seconds - known[0].seconds : i, each[key], each.name]])),
  });
  const lines = [line("reserved", "--s1", "reserved_bytes", "6 4"), line("peak so far", "--s4", "peak_bytes", "2 4"), line("allocated", "--s0", "allocated_bytes", "", true)];
  return curves(lines, { ticks: sizeTicks, words: size, names: true });
}

function recordings(report) {
  const { files, reported } = report.source;
  if (!files || !files.length) return null;
  return card(null, "Recordings in the folder", "the one that needed most is shown", dataTable([["", "where"], ["", ""], ["allocated", "num"], ["reserved", "num"]],
    files.map((each) => [each.name, each.origin, size(each.allocated_bytes), size(each.reserved_bytes)]), { rowClass: (i) => (files[i].name === reported ? "peak" : "") }));
}

function nextSteps(report) {
  if (!report.next.length) return null;
  return make("section", { class: "card next", id: "next" }, make("h2", { text: "What next" }), report.next.map((each) => make("p", { text: `${each[0].toUpperCase()}${each.slice(1)}.` })));
}

function notes(report) {
  const settings = Object.entries(report.settings || {}).filter(([, value]) => typeof value !== "object" && value !== "" && value !== null);
  const result = Object.entries(report.result || {});
  return card("details", "How to read it", null, make("ul", { class: "notes" }, report.notes.map((note) => make("li", { text: note }))),
    settings.length ? dataTable([["allocator setting", "where"], ["", ""]], settings.map(([name, value]) => [name, String(value)])) : null,
    result.length ? dataTable([["result", "where"], ["", ""]], result.map(([name, value]) => [name, String(value)])) : null);
}

// The page of its own: its data lie in it.
export function openReport() {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.title = `${data.title} · memfit`;
  followTheme();
  const main = make("main");
  document.getElementById("page").append(topBar(data), main);
  new ReportView(main, data);
  main.append(make("footer", { text: "Made by memfit. This file holds everything it shows and loads nothing." }));
  document.documentElement.dataset.ready = "yes";
}

function topBar(data) {
  const { report, title } = data;
  const links = [["timeline", "Timeline"], ["flame", "Flame graph"], ["allocations", "Allocations"], ["details", "Details"]];
  const known = links.filter(([id]) => id === "details" || data.timeline);
  const device = report.gpu ? `, ${report.gpu}` : report.device === null || report.device === undefined ? "" : `, GPU ${report.device}`;
  return make("header", { class: "bar" },
    make("span", { class: "brand", text: "memfit" }), make("span", { class: "file", text: title, title: report.source.path }),
    make("span", { class: `badge ${report.origin === "predicted" ? "predicted" : ""}`, text: `${report.origin}${device}` }),
    make("nav", { "aria-label": "Sections" }, known.map(([id, text]) => make("a", { href: `#${id}`, text }))),
    themeButton());
}
