// Folders of recorded runs, those that are still going too: what each took, beside its plan and beside the others.

import { keepingFocus } from "./controls.js";
import { curves } from "./chart.js";
import { card, dataTable, eventTicks, make, niceStep, number, percent, plural, size, sizeTicks, swatch, timeTicks } from "./dom.js";
import { checkpoints } from "./report_view.js";
import { ago } from "./viewer.js";

const POLL = 2000;
const MOST = 6; // runs side by side
const STATES = { running: "running", ended: "ended", broke: "broke", silent: "no longer written to" };

export async function show(container, state, shell) {
  const runs = new Runs(container, state, shell);
  await runs.look();
  return () => runs.close();
}

class Runs {
  constructor(container, state, shell) {
    this.shell = shell;
    this.chosen = chosenRuns(state.runs);
    this.list = make("div");
    this.details = make("div", { class: "view", id: "details" });
    container.append(this.list, this.details);
  }

  close() {
    this.closed = true;
    clearTimeout(this.waiting);
  }

  // Once now, and again as long as something is running.
  async look() {
    const [{ runs, more }, ...details] = await Promise.all([this.shell.get("/api/runs"), ...this.chosen.map((name) => this.shell.get("/api/runs/run", { name }).catch((error) => ({ path: name, error: error.message })))]);
    if (this.closed) return;
    const shown = JSON.stringify([runs.map((run) => ({ ...run, written: Math.round(run.written) })), details, this.chosen]);
    if (shown !== this.shown) {
      this.shown = shown;
      this.drawList(runs, more);
      this.drawDetails(details);
    }
    clearTimeout(this.waiting);
    const going = [...runs, ...details].some((run) => run.state === "running");
    this.waiting = setTimeout(() => this.look().catch((error) => this.failed(error)), going ? POLL : 5 * POLL);
  }

  failed(error) {
    if (this.closed) return;
    this.shell.complain(error);
    this.waiting = setTimeout(() => this.look().then(() => this.shell.say(), (again) => this.failed(again)), 3 * POLL);
  }

  choose(names) {
    this.chosen = names.slice(-MOST);
    this.shell.keep({ runs: this.chosen.length ? JSON.stringify(this.chosen) : "" });
    this.look().catch((error) => this.failed(error));
  }

  color(path) {
    return `--s${this.chosen.indexOf(path)}`;
  }

  // -- all of them

  drawList(runs, more) {
    const said = runs.length ? `${plural(runs.length, "run")}${more ? ", the newest" : ""}; tick several to see them side by side` : "No run in the folder that is served: memory_log.csv, result.json or train.log make one.";
    keepingFocus(this.list, () => this.list.replaceChildren(make("section", { class: "card", id: "runs" }, make("h2", { text: "Runs" }), make("p", { class: "sub", text: said }), runs.length ? dataTable(
      [["", ""], ["run", "where"], ["", ""], ["at", ""], ["GPU peak", "num"], ["planned", "num"], ["host", "num"], ["loss", "num"], ["written", "num"]],
      runs.map((run) => this.row(run)), { rowClass: (i) => (this.chosen.includes(runs[i].path) ? "chosen-row" : "") }) : null)));
  }

  row(run) {
    const on = this.chosen.includes(run.path);
    const tick = make("input", { type: "checkbox", checked: on, "data-name": run.path, "aria-label": `Show ${run.name}`, on: { change: () => this.choose(on ? this.chosen.filter((each) => each !== run.path) : [...this.chosen, run.path]) } });
    const peak = (name) => run.peaks.find((each) => each.name === name) || {};
    const link = make("a", { href: this.shell.link("runs", { runs: JSON.stringify([run.path]) }), text: run.name });
    return [tick, link, stateBadge(run.state), make("span", { class: "num", text: where(run) }), size(peak("GPU allocated").measured_bytes), size(peak("GPU allocated").predicted_bytes), size(peak("host").measured_bytes), run.loss === null ? "" : run.loss.toFixed(4), ago(run.written)];
  }

  // -- those that are chosen

  drawDetails(details) {
    const found = details.filter((each) => !each.error);
    const missing = details.filter((each) => each.error).map((each) => make("div", { class: "message bad" }, make("p", { text: `${each.path}: ${each.error}` })));
    if (!found.length) return this.details.replaceChildren(...missing);
    this.details.replaceChildren(...[
      ...missing, this.heads(found), this.peaks(found), this.phases(found), this.memory(found), this.losses(found), this.facts(found),
      ...(found.length === 1 ? [checkpoints(found[0].log), this.said(found[0])] : []),
    ].filter(Boolean));
  }

  heads(runs) {
    return make("div", { class: "heads" }, runs.map((run) => make("section", { class: "card head", css: { "border-top-color": `var(${this.color(run.path)})` } },
      make("h2", {}, run.name, " ", stateBadge(run.state)), make("p", { class: "sub", text: [where(run), `written ${ago(run.written)}`].filter(Boolean).join(" · ") }),
      run.growth ? make("p", { class: run.growth.kind === "none" ? "" : "warn", text: `Growth: ${run.growth.text}` }) : null,
      run.messages.map((text) => make("p", { class: "muted", text })),
      run.recordings.length ? make("p", {}, "Recordings: ", run.recordings.flatMap((name, i) => [i ? ", " : "", make("a", { href: this.shell.link("viewer", { file: run.path === "." ? name : `${run.path}/${name}` }), text: name })])) : null)));
  }

  peaks(runs) {
    const names = [...new Set(runs.flatMap((run) => run.peaks.map((each) => each.name)))];
    if (!names.length) return null;
    const rows = names.flatMap((name) => runs.map((run, i) => {
      const { measured_bytes, predicted_bytes } = run.peaks.find((each) => each.name === name) || {};
      return [i ? "" : name, ...this.mark(run, runs), size(measured_bytes), size(predicted_bytes), off(predicted_bytes, measured_bytes)];
    }));
    return card("run-peaks", "Peaks", "measured, and what the plan said", dataTable([["", ""], ...this.markColumn(runs), ["measured", "num"], ["predicted", "num"], ["off by", "num"]], rows));
  }

  phases(runs) {
    const names = [...new Set(runs.flatMap((run) => run.phases.map((each) => each.phase)))];
    if (!names.length) return null;
    const rows = names.flatMap((name) => runs.map((run, i) => {
      const each = run.phases.find((phase) => phase.phase === name) || {};
      return [i ? "" : name, ...this.mark(run, runs), ...["allocated", "reserved"].flatMap((kind) => [size(each[`measured_${kind}_bytes`]), size(each[`predicted_${kind}_bytes`])]), off(each.predicted_allocated_bytes, each.measured_allocated_bytes)];
    }));
    return card("run-phases", "Peaks by phase", "of the first steps", dataTable([["", ""], ...this.markColumn(runs), ["allocated", "num"], ["predicted", "num"], ["reserved", "num"], ["predicted", "num"], ["off by", "num"]], rows));
  }

  memory(runs) {
    const onGpu = runs.some((run) => run.log && run.log.checkpoints.some((each) => each.allocated_bytes !== null));
    if (runs.length === 1 && onGpu) return null; // its checkpoints are drawn below
    const keys = onGpu ? [["allocated_bytes", "", ""], ["peak_bytes", ", peak so far", "2 4"]] : [["cpu_used_bytes", "", ""]];
    const lines = runs.flatMap((run) => keys.map(([key, more, dash]) => ({ name: `${run.name}${more}`, color: this.color(run.path), dash, points: along(run.log ? run.log.checkpoints : [], key) })));
    const drawn = curves(lines, { ticks: sizeTicks, words: size, places: timeTicks });
    return drawn && card("run-memory", onGpu ? "GPU memory at checkpoints" : "Host memory at checkpoints", "over the time since each run began", drawn);
  }

  losses(runs) {
    const lines = runs.map((run) => ({ name: run.name, color: this.color(run.path), points: run.losses }));
    const drawn = curves(lines, { ticks: lossTicks, words: (value) => value.toFixed(4), places: eventTicks, from: null });
    return drawn && card("run-loss", "Loss", "by step", drawn);
  }

  facts(runs) {
    const names = [...new Set(runs.flatMap((run) => run.facts.map(([name]) => name)))];
    if (!names.length) return null;
    const value = (run, name) => (run.facts.find(([each]) => each === name) || [])[1];
    const text = (found) => (found === undefined ? "" : typeof found === "number" ? number(Number.isInteger(found) ? found : Number(found.toPrecision(6))) : found);
    const rows = names.map((name) => [name, ...runs.map((run) => text(value(run, name)))]);
    const differ = (cells) => new Set(cells.slice(1).filter(Boolean)).size > 1;
    return card("run-facts", "Results", runs.length > 1 ? "what differs is bold" : null, dataTable([["", ""], ...runs.map((run) => [run.name, "num"])], rows, { rowClass: (i) => (differ(rows[i]) ? "peak" : "") }));
  }

  said(run) {
    return run.said.length ? card("run-said", "Its log, at the end", null, make("pre", { class: "said", text: run.said.join("\n") })) : null;
  }

  // Which of several it is.
  mark(run, runs) {
    return runs.length > 1 ? [make("span", { class: "cat" }, swatch(`var(${this.color(run.path)})`), make("span", { class: "of-run", text: run.name }))] : [];
  }

  markColumn(runs) {
    return runs.length > 1 ? [["", "where"]] : [];
  }
}

function chosenRuns(text) {
  try {
    const found = JSON.parse(text || "[]");
    return Array.isArray(found) ? found.filter((each) => typeof each === "string").slice(0, MOST) : [];
  } catch {
    return [];
  }
}

function stateBadge(state) {
  return make("span", { class: `badge state ${state}`, text: STATES[state] || state });
}

function where(run) {
  const { done, total } = run.steps;
  if (done) return total ? `step ${number(done)} of ${number(total)}` : `step ${number(done)}`;
  const points = run.log && run.log.checkpoints;
  return run.at || (points && points.length ? points[points.length - 1].name : "");
}

function off(predicted, measured) {
  if (predicted === null || predicted === undefined || !measured) return "";
  const by = predicted - measured, sign = by > 0 ? "+" : "−";
  if (by === 0) return "0";
  return sign + (Math.abs(by) < measured / 1000 ? size(Math.abs(by)) : percent(Math.abs(by), measured));
}

function along(points, key) {
  const timed = points.every((each) => each.seconds !== null);
  return points.flatMap((each, i) => (each[key] === null ? [] : [[timed ? each.seconds : i, each[key], each.name]]));
}

function lossTicks(low, high, wanted) {
  const step = niceStep(high - low, wanted), digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push([i * step, (i * step).toFixed(digits)]);
  return ticks;
}
