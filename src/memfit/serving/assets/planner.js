// The planner: a job is set on the left, what it will take is seen on the right, and the old picture stays until the new one
// is there.

import { Run } from "./data.js";
import { make } from "./dom.js";
import { assumedCard, comparison, fitCard, largestCard, phasesCard, pictureOf, timeWords, verdictCard } from "./plan_view.js";
import { JobForm } from "./job_form.js";
import { Timeline } from "./timeline.js";

const FIRST = { kind: "lora", model: "qwen2.5-7b", gpu: "RTX 4090" };
const SETTLE_MS = 30; // a slider that is dragged passes through many values

export async function show(container, texts, shell) {
  const [options, { models }] = await Promise.all([shell.get("/api/planner"), shell.get("/api/models")]);
  const planner = new Planner(container, options, models, shell);
  planner.open(texts);
  return () => planner.close();
}

class Planner {
  constructor(container, options, models, shell) {
    this.shell = shell;
    this.form = new JobForm(options, models, () => this.changed());
    this.status = make("p", { class: "status", role: "status", "aria-live": "polite" });
    this.problem = make("div", { class: "problem", role: "alert" });
    this.verdict = make("div");
    this.compared = make("div");
    this.fit = make("div");
    this.drawn = make("div");
    this.details = make("div", { class: "columns" });
    this.results = make("div", { class: "results" }, this.verdict, this.compared, this.fit, this.drawn, this.details);
    container.append(make("div", { class: "planner" }, make("div", { class: "side" }, this.form.element), make("div", {}, this.status, this.problem, this.results)));
    this.redraw = () => this.timeline?.schedule();
    addEventListener("resize", this.redraw);
    document.addEventListener("themechange", this.redraw);
  }

  close() {
    clearTimeout(this.timer);
    this.turn?.abort();
    removeEventListener("resize", this.redraw);
    document.removeEventListener("themechange", this.redraw);
  }

  open({ pin, ...texts }) {
    this.pinnedTexts = pin ? Object.fromEntries(new URLSearchParams(pin)) : null;
    this.form.use(this.form.read({ ...FIRST, ...texts }));
    this.ask();
    if (this.pinnedTexts) this.askPinned();
  }

  // -- the state and the address

  changed() {
    this.keep();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), SETTLE_MS);
  }

  keep() {
    const pin = this.pinnedTexts ? new URLSearchParams(this.pinnedTexts).toString() : null;
    this.shell.keep({ ...asTexts(this.form.state), pin });
  }

  question(state) {
    const { gpu, ...job } = state;
    return { job, gpu: gpu || null, client: this.shell.client };
  }

  // -- asked and shown

  async ask() {
    this.turn?.abort();
    const turn = (this.turn = new AbortController());
    const state = this.form.state, question = this.question(state), options = { signal: turn.signal };
    this.busy("planning …");
    const patience = setTimeout(() => turn === this.turn && this.results.classList.contains("stale") && this.busy("tracing … the first trace also loads torch"), 2500);
    try {
      const answer = await this.shell.post("/api/plan", question, options);
      this.show(answer, state);
      this.busy(null);
      document.documentElement.dataset.planned = String(Number(document.documentElement.dataset.planned || 0) + 1);
      this.draw(await this.shell.post("/api/plan/timeline", question, options));
      await this.askMore(answer, question, options);
    } catch (error) {
      if (turn === this.turn) this.refuse(error);
    } finally {
      clearTimeout(patience);
    }
  }

  // What takes longer comes later: what would make it fit, and how long a step takes.
  async askMore({ plan }, question, options) {
    this.fit.replaceChildren();
    if (plan.verdict === "fails" || plan.verdict === "tight") await this.askFit(question, options);
    if (plan.gpu && plan.verdict !== "fails" && ["train", "lora"].includes(plan.workload.kind)) {
      const told = await this.shell.post("/api/plan/duration", question, options);
      const place = this.verdict.querySelector("#time");
      if (told && place) place.textContent = timeWords(told);
    }
  }

  async askFit(question, options) {
    this.fit.replaceChildren(make("p", { class: "card muted", text: "looking for the smallest change that makes it fit …" }));
    try {
      const fitted = await this.shell.post("/api/fit", question, options);
      this.fit.replaceChildren(fitCard(fitted, (settings) => this.apply(settings)));
    } catch (error) {
      if (error.name !== "AbortError") this.fit.replaceChildren(make("p", { class: "card muted", text: error.message }));
      if (error.name === "AbortError" || !error.status) throw error;
    }
  }

  apply(settings) {
    this.form.use(this.form.tidy(this.form.with(this.form.state, settings)));
    this.changed();
  }

  busy(what) {
    this.results.classList.toggle("stale", what !== null);
    this.status.textContent = what || "";
    this.holdCopies();
  }

  // What is copied is the job that is set: of an older one nothing is.
  holdCopies() {
    for (const button of this.verdict.querySelectorAll("button[id^=copy-]")) button.disabled = this.results.classList.contains("stale");
  }

  refuse(error) {
    this.status.textContent = "";
    if (error.name === "AbortError" || error.status === 409) return;
    if (!error.status) return this.shell.complain(error);
    this.problem.replaceChildren(make("div", { class: "message bad" }, make("div", {}, make("b", { text: error.message }), error.hint ? make("p", { text: error.hint }) : null, this.answer ? make("p", { text: "What stands below is the last job that had a plan." }) : null)));
  }

  show(answer, state) {
    this.answer = answer;
    this.shown = state; // the form may be ahead of it
    this.problem.replaceChildren();
    this.form.tell(answer.plan.workload, answer.levers);
    this.showVerdict();
    this.details.replaceChildren(...[assumedCard(answer.plan), phasesCard(answer.plan), largestCard(answer.plan)].filter(Boolean));
  }

  showVerdict() {
    const { answer, pinned } = this;
    this.verdict.replaceChildren(verdictCard(answer, pinned, this.tools()));
    this.holdCopies();
    this.compared.replaceChildren(...(pinned ? [comparison(answer, pinned, () => this.pin(null))] : []));
  }

  draw(data) {
    const grouping = this.timeline ? this.timeline.run.groupings.indexOf(this.timeline.grouping) : 0;
    const run = new Run(data);
    const chosen = make("p", { class: "muted", "aria-live": "polite" });
    this.timeline = new Timeline(run, (found) => { chosen.textContent = found ? foundWords(run, this.timeline, found) : ""; });
    if (run.groupings[grouping]) this.timeline.useGrouping(grouping);
    this.drawn.replaceChildren(make("section", { class: "card", id: "timeline" }, make("h2", { text: "The predicted steps" }), this.timeline.element, chosen));
    this.timeline.schedule();
  }

  // -- pinned

  pin(texts) {
    this.pinnedTexts = texts;
    this.pinned = texts ? this.answer : null;
    this.keep();
    this.showVerdict();
  }

  async askPinned() {
    try {
      this.pinned = await this.shell.post("/api/plan", { ...this.question(this.form.read(this.pinnedTexts)), client: null });
      if (this.answer) this.showVerdict();
    } catch (error) {
      this.refuse(error);
    }
  }

  // -- taken elsewhere

  tools() {
    const button = (text, id, click) => make("button", { class: "plain", type: "button", id, text, on: { click } });
    const { copies } = this.answer;
    const out = make("div", { class: "copied" });
    const copy = (text) => this.copy(text, out);
    return make("div", {}, make("div", { class: "tools" },
      button("pin", "pin", () => this.pin(asTexts(this.shown))),
      make("span", { class: "muted", text: "copy as" }),
      button("command", "copy-command", () => copy(copies.command)),
      copies.yaml ? button("YAML", "copy-yaml", () => copy(copies.yaml)) : null,
      button("Python", "copy-python", () => copy(copies.python)),
      button("link", "copy-link", () => copy(location.href)),
      button("PNG", "copy-png", () => this.savePicture())), out);
  }

  async copy(text, out) {
    const area = make("textarea", { readonly: true, rows: Math.min(text.split("\n").length, 14), "aria-label": "the copy" });
    area.value = text;
    out.replaceChildren(area);
    area.select();
    const done = await (navigator.clipboard?.writeText(text).then(() => true, () => false) ?? false);
    this.status.textContent = done ? "copied" : "selected: press Ctrl-C";
  }

  async savePicture() {
    const address = URL.createObjectURL(await pictureOf(this.answer, this.timeline));
    const link = make("a", { href: address, download: `memfit-${this.answer.plan.workload.kind}-${this.answer.plan.model.name.replace(/[^\w.-]+/g, "-")}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }
}

function asTexts(state) {
  return Object.fromEntries(Object.entries(state).map(([name, value]) => [name, Array.isArray(value) ? value.join(",") : String(value)]));
}

function foundWords(run, timeline, found) {
  const when = found.event < 0 ? "at the start" : run.when(found.event);
  if (found.block >= 0) return `${run.where(found.block)}: ${(run.bytes(found.block) / 2 ** 20).toFixed(2)} MiB of ${run.categoryName(found.block)}`;
  return found.group >= 0 ? `${timeline.grouping.names[found.group]}, ${when}` : when;
}
