// Any recording as a report shows it. What is drawn comes from the server a window at a time; what was drawn stays until then.

import { Run } from "./data.js";
import { category, dataTable, duration, make, number, plural, size } from "./dom.js";
import { ReportView } from "./report_view.js";
import { Refused } from "./shell.js";

const REST = 120; // milliseconds without a movement, after which the server is asked
const POLL = 300;
const MARGIN = 0.5; // of what is in view, on both sides: a short way can be gone without asking

export async function show(container, state, shell) {
  const viewer = new Viewer(container, shell);
  addEventListener("dragover", viewer.over);
  addEventListener("drop", viewer.drop);
  await viewer.begin(state);
  return () => {
    removeEventListener("dragover", viewer.over);
    removeEventListener("drop", viewer.drop);
    viewer.close();
  };
}

class Viewer {
  constructor(container, shell) {
    this.shell = shell;
    this.container = container;
    this.over = (event) => event.preventDefault();
    this.drop = (event) => {
      event.preventDefault();
      if (event.dataTransfer.files.length) this.upload(event.dataTransfer.files[0]);
    };
  }

  async begin(state) {
    this.filter = new FilterBar(state, () => this.filtered());
    if (state.file) return this.open(() => this.shell.post("/api/viewer/open", { path: state.file }), { file: state.file });
    if (state.key) return this.open(() => this.shell.get(`/api/viewer/${encodeURIComponent(state.key)}/state`).then((found) => ({ key: state.key, ...found })), { key: state.key });
    return this.list();
  }

  close() {
    this.closed = true;
    this.view?.close();
    this.request?.abort();
    clearTimeout(this.waiting);
  }

  // -- which file

  async list() {
    const picker = make("input", { type: "file", id: "file", class: "unseen", on: { change: () => picker.files.length && this.upload(picker.files[0]) } });
    const choose = make("button", { class: "plain", type: "button", text: "choose a file", on: { click: () => picker.click() } });
    this.container.replaceChildren(make("section", { class: "card drop" }, make("h2", { text: "Drop a snapshot here" }),
      make("p", { class: "sub", text: "A snapshot of torch (pickle or JSON, gzipped or not), a trace or a memory log, up to 1 GiB. It goes to this server alone, is read without running anything in it, and is deleted once it is read." }),
      make("div", { class: "tools" }, choose, picker)));
    const { files, more } = await this.shell.get("/api/viewer/files");
    const search = make("input", { class: "search", type: "search", placeholder: "Search by name", "aria-label": "Search files", on: { input: () => fill() } });
    const holder = make("div");
    const fill = () => {
      const found = files.filter((each) => each.name.toLowerCase().includes(search.value.toLowerCase()));
      holder.replaceChildren(dataTable([["file", "where"], ["size", "num"], ["written", "num"]], found.slice(0, 200).map((each) => [
        make("a", { href: this.shell.link("viewer", { file: each.path }), text: each.name }), size(each.bytes), ago(each.changed)])));
    };
    fill();
    this.container.append(make("section", { class: "card", id: "files" }, make("h2", { text: "In the folder that is served" }),
      make("p", { class: "sub", text: files.length ? `${plural(files.length, "recording")}${more ? "; there are more, of which the newest are listed" : ""}` : "No recording in it: snapshots (.pickle, .json) and traces (.npz) are listed here." }),
      files.length > 8 ? make("div", { class: "tools" }, search) : null, files.length ? holder : null));
  }

  upload(file) {
    const name = file.name;
    this.open(() => new Promise((done, failed) => {
      const request = (this.request = new XMLHttpRequest());
      request.open("POST", `/api/viewer/upload?${new URLSearchParams({ name })}`);
      request.upload.onprogress = (event) => this.tell(`sending ${name}`, `${size(event.loaded)} of ${size(event.total)}`, event.loaded / event.total);
      request.onload = () => {
        const said = parsed(request.responseText);
        if (request.status === 200) done(said); else failed(new Refused(request.status, said.error || `the server answered ${request.status}`, said.hint));
      };
      request.onerror = () => failed(new Refused(0, "the file could not be sent", "was it changed meanwhile, or is it larger than 1 GiB?"));
      request.send(file);
    }), null);
  }

  async open(start, state) {
    this.shell.say();
    this.view?.close();
    this.tell("opening");
    try {
      let found = await start();
      if (!state) this.shell.keep({ key: found.key });
      this.state = state || { key: found.key };
      this.key = found.key;
      while (found.state === "reading" && !this.closed) {
        const stage = { starting: "starting", reading: `reading ${size(found.bytes)}`, placing: `${number(found.events || 0)} events read; finding where each block lay` }[found.stage];
        this.tell(found.title, [stage, duration(found.seconds), found.resident_bytes ? `${size(found.resident_bytes)} of memory` : ""].filter(Boolean).join(" · "));
        await new Promise((done) => setTimeout(done, POLL));
        found = await this.shell.get(`/api/viewer/${this.key}/state`);
      }
      if (this.closed) return;
      if (found.state === "refused") throw new Refused(422, found.error, found.hint);
      this.draw(await this.ask("page"));
    } catch (error) {
      this.container.replaceChildren();
      await this.list().catch(() => null);
      this.shell.complain(error);
    }
  }

  tell(title, words = "", share = null) {
    this.container.replaceChildren(make("section", { class: "card", id: "reading", role: "status" }, make("h2", { text: title }), make("p", { class: "sub", text: words || "…" }),
      make("progress", { max: 1, value: share, "aria-label": title })));
  }

  async ask(question, about = {}) {
    try {
      return await this.shell.post(`/api/viewer/${this.key}/${question}`, about);
    } catch (error) {
      if (error.status !== 410 || !this.state.file) throw error; // other files came, and this one went: it is there still
      this.key = (await this.shell.post("/api/viewer/open", { path: this.state.file })).key;
      return this.shell.post(`/api/viewer/${this.key}/${question}`, about);
    }
  }

  // -- what is drawn

  draw(data) {
    this.below = make("div", { id: "sums" });
    const title = make("div", { class: "opened" }, make("a", { class: "plain", href: this.shell.link("viewer"), text: "‹ all files" }), make("h1", { text: data.report.source.path }),
      make("span", { class: `badge ${data.report.origin}`, text: data.report.origin }));
    this.container.replaceChildren(title);
    this.view = new ReportView(this.container, data, { tools: this.filter.element, below: this.below, detail: 100, onRange: (range, axis) => this.sum(range, axis) });
    if (!this.view.timeline) return;
    this.filter.offer(data.timeline.groupings[0].palette.filter((name) => name !== "before"));
    this.covered = null;
    this.view.timeline.onDrawn = () => this.moved();
    if (this.filter.given) this.filtered();
  }

  // Closer than what is here, or beyond it: asked for when the movement rests.
  moved() {
    const { timeline } = this.view, { whole, from, to, axis, end } = timeline;
    const exact = whole.data.stride === 1 && whole.leftOut === 0;
    const { covered } = this;
    const inside = covered && covered.axis === axis && covered.from <= from && covered.to >= to;
    const near = exact || (inside ? covered.to - covered.from <= 3 * (to - from) : to - from > end / 1.5);
    const wanted = inside ? covered.run : whole;
    if (timeline.run !== wanted) timeline.useRun(wanted);
    clearTimeout(this.waiting);
    if (!near) this.waiting = setTimeout(() => this.fetch().catch((error) => this.shell.complain(error)), REST);
  }

  async fetch() {
    const { timeline } = this.view, { axis } = timeline;
    const span = timeline.to - timeline.from;
    const from = Math.max(timeline.from - MARGIN * span, 0), to = Math.min(timeline.to + MARGIN * span, timeline.end);
    const columns = Math.ceil(timeline.plotWidth * ((to - from) / span));
    const turn = (this.turn = {});
    const { timeline: data } = await this.ask("stretch", { axis, from, to, columns, filter: this.filter.value });
    if (this.closed || turn !== this.turn) return;
    this.covered = { axis, from, to, run: new Run(data) };
    timeline.schedule();
  }

  async filtered() {
    this.shell.keep({ ...this.state, ...this.filter.state });
    const turn = (this.turn = {});
    try {
      const { timeline, matching } = await this.ask("whole", { filter: this.filter.value });
      if (this.closed || turn !== this.turn) return;
      this.covered = null;
      this.view.use(timeline);
      this.filter.tell(matching);
      if (this.view.timeline.range) this.sum(this.view.timeline.range, this.view.timeline.axis);
    } catch (error) {
      this.shell.complain(error);
    }
  }

  // -- a stretch, summed up

  async sum(range, axis) {
    if (!range) return this.below.replaceChildren();
    try {
      const sums = await this.ask("sums", { axis, from: range[0], to: range[1], filter: this.filter.value });
      this.below.replaceChildren(this.sums(sums));
    } catch (error) {
      this.shell.complain(error);
    }
  }

  sums({ events, begin_seconds, end_seconds, first_event, last_event, peak, categories, total, made }) {
    const when = begin_seconds === null ? `events ${number(first_event)} to ${number(last_event)}` : `${duration(begin_seconds)} to ${duration(end_seconds)}`;
    const cells = (row) => ["before", "allocated", "freed", "after"].flatMap((name) => [size(row[`${name}_bytes`]), number(row[`${name}_count`])]);
    const columns = [["", ""], ...["there before", "allocated", "freed", "there after"].flatMap((name) => [[name, "num"], ["blocks", "num"]])];
    const rows = [...categories.map((row) => [category(row.category), ...cells(row)]), ["all", ...cells(total)]];
    const places = made.filter((share) => share.name);
    return make("div", { class: "summed" }, make("h3", { text: `${when}: ${plural(events, "event")}, ${size(peak.allocated_bytes)} at its highest` }),
      dataTable(columns, rows, { rowClass: (i) => (i === rows.length - 1 ? "peak" : "") }),
      places.length ? dataTable([["made in it", "num"], ["times", "num"], ["", "where"]], places.map((share) => [size(share.allocated_bytes), number(share.count), share.name])) : null,
      this.filter.given ? make("p", { class: "sub", text: "of the allocations that the filter lets through" }) : null);
  }
}

// Which allocations: by category, module, text and size.
class FilterBar {
  constructor(state, changed) {
    this.chosen = new Set((state.categories || "").split(",").filter(Boolean));
    const input = (name, label, more = {}) => make("input", { class: "search", id: `filter-${name}`, value: state[name] || "", placeholder: label, "aria-label": label, ...more, on: { input: () => this.later() } });
    this.inputs = { text: input("text", "name contains", { type: "search" }), module: input("module", "module contains", { type: "search" }), least: input("least", "at least, as 1 MiB"), most: input("most", "at most, as 1 GiB") };
    this.changed = changed;
    this.chips = make("div", { class: "chips", role: "group", "aria-label": "Categories" });
    this.said = make("p", { class: "sub", role: "status" });
    this.element = make("div", { class: "filter" }, make("div", { class: "tools" }, Object.values(this.inputs), make("button", { class: "plain", type: "button", id: "filter-none", text: "no filter", on: { click: () => this.reset() } })), this.chips, this.said);
  }

  offer(categories) {
    this.chips.replaceChildren(...categories.map((key) => {
      const chip = make("button", { class: "chip", type: "button", "aria-pressed": String(this.chosen.has(key)), on: { click: () => {
        if (!this.chosen.delete(key)) this.chosen.add(key);
        chip.setAttribute("aria-pressed", String(this.chosen.has(key)));
        this.changed();
      } } }, category(key));
      return chip;
    }));
  }

  later() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.changed(), 200);
  }

  reset() {
    Object.values(this.inputs).forEach((each) => { each.value = ""; });
    this.chosen.clear();
    this.chips.querySelectorAll("button").forEach((chip) => chip.setAttribute("aria-pressed", "false"));
    this.changed();
  }

  get state() {
    return { categories: [...this.chosen].join(","), ...Object.fromEntries(Object.entries(this.inputs).map(([name, each]) => [name, each.value.trim()])) };
  }

  get given() {
    return Object.values(this.state).some(Boolean);
  }

  get value() {
    const { text, module, least, most } = this.state;
    return { categories: [...this.chosen], text, module, least_bytes: bytes(least), most_bytes: bytes(most) };
  }

  tell({ count, of }) {
    this.said.textContent = this.given ? `${number(count)} of ${plural(of, "allocation")} are let through; what was reserved is not theirs alone, and is not drawn` : "";
  }
}

const POWERS = { "": 0, k: 1, m: 2, g: 3, t: 4 };

// "1.5 MiB", "2G" or "512": null for nothing, or what is no size.
function bytes(text) {
  const found = /^([\d.]+)\s*([kmgt]?)(i?b)?$/i.exec(text);
  return found ? Math.round(Number(found[1]) * 1024 ** POWERS[found[2].toLowerCase()]) : null;
}

export function ago(seconds) {
  const gone = Math.max(Date.now() / 1000 - seconds, 0);
  for (const [length, word] of [[86400, "day"], [3600, "hour"], [60, "minute"]]) if (gone >= length) return `${plural(Math.floor(gone / length), word)} ago`;
  return "just now";
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return {};
  }
}
