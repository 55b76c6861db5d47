// Explain: a message or a log is pasted, and the answer is that of `memfit explain`: what happened, the numbers added up, the
// tensor, what helps and what does not.

import { Picker, field, segments } from "./controls.js";
import { card, dataTable, make, percent, size } from "./dom.js";

const MOST_TEXT = 6 * 2 ** 20;
const COLORS = { allocated: "--s0", "private pools": "--s3", cached: "--s5", "outside torch": "--s1", "other processes": "--s4", "not told apart": "--s6", free: "--c-free", rest: "--s9" };
const ENOUGH = { safe: "fits", tight: "fits, tightly", fails: "not enough" };
const kept = { text: "", told: null, job: {}, kind: "", gpu: "" }; // of the last visit: who comes back finds the text and its answer
const SIZES = [["batch_size", "batch"], ["seq_len", "length"], ["rank", "rank"]];

export async function show(container, texts, shell) {
  const [options, { models }] = await Promise.all([shell.get("/api/planner"), shell.get("/api/models")]);
  const { job } = kept;
  const area = make("textarea", { id: "oom", rows: 9, placeholder: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate …  (the message, or the end of the log)", "aria-label": "The message or the log", spellcheck: "false" });
  const file = make("input", { type: "file", id: "log-file", "aria-label": "A log from this machine" });
  file.addEventListener("change", async () => {
    const chosen = file.files[0];
    if (chosen) area.value = await chosen.slice(Math.max(0, chosen.size - MOST_TEXT)).text();
  });
  const model = new Picker("model", models.map((each) => ({ value: each.name, more: each.from, also: each.also })), (value) => { job.model = value || null; }, { placeholder: "as the text tells" });
  const cards = new Picker("card", options.cards.map((each) => ({ value: each.name, more: size(each.capacity_bytes) })), (value) => { kept.gpu = value; }, { placeholder: "as the message tells" });
  const answer = make("div", { class: "view" });
  const status = make("span", { class: "muted", role: "status" });
  const ask = async () => {
    shell.say();
    status.textContent = "explaining …";
    button.disabled = true;
    try {
      kept.told = await shell.post("/api/explain", { text: area.value.slice(-MOST_TEXT), job: { ...job, kind: kept.kind || null }, gpu: kept.gpu || null });
      answer.replaceChildren(...explanation(kept.told, shell));
    } catch (error) {
      shell.complain(error);
    }
    button.disabled = false;
    status.textContent = "";
  };
  const button = make("button", { class: "plain primary", type: "button", id: "explain", text: "explain", on: { click: ask } });
  const numbers = SIZES.map(([name, label]) => field(label, "number", job[name] ?? "", (text) => { job[name] = text === "" ? null : Number(text); }, { name, help: options.settings[name].help }));
  container.append(
    make("section", { class: "card ask" }, make("h2", { text: "Out of memory?" }),
      make("p", { class: "sub", text: "Paste the message or the end of the log. It is read on this machine; nothing in it is run, and no file that it names is opened." }),
      area,
      make("details", {}, make("summary", { text: "what is known of the job: every fix is then predicted on it" }),
        make("div", { class: "known" }, model.element, cards.element,
          segments("job", [["", "as told"], ...options.kinds.map((each) => [each, each])], kept.kind, (value) => { kept.kind = value; }), make("div", { class: "settings" }, numbers))),
      make("div", { class: "tools" }, button, status, make("label", { class: "right" }, "or a log file", file))),
    answer);
  area.value = texts.text || kept.text;
  model.value = job.model || "";
  cards.value = kept.gpu;
  if (kept.told) answer.replaceChildren(...explanation(kept.told, shell));
  return () => { kept.text = area.value; };
}

function explanation(told, shell) {
  const known = told.cause.kind !== "none";
  const where = [told.phase.name ? `in ${told.phase.name}` : "", told.phase.detail, told.phase.code_line ? `at ${told.phase.code_line}` : ""].filter(Boolean).join(", ");
  const parts = [make("section", { class: `card ${known ? "oom" : ""}`, id: "answer" },
    make("h2", { text: `${known ? "Out of memory: " : ""}${told.answer}` }), where ? make("p", { class: "sub mono", text: where }) : null, told.phase.code ? make("p", { class: "mono", text: told.phase.code }) : null,
    told.found && told.found.count > 1 ? make("p", { class: "sub", text: `${told.found.count} messages: the first at line ${told.found.first.line}, the last at line ${told.found.last.line}` }) : null,
    told.traps.map((trap) => make("p", { class: "more", text: trap.text })))];
  parts.push(account(told.account), tensor(told.tensor), fixes(told, shell), withheld(told));
  if (told.notes.length) parts.push(card(null, "How to read it", null, make("ul", { class: "notes" }, told.notes.map((note) => make("li", { text: note })))));
  if (told.next.length) parts.push(make("section", { class: "card next" }, make("h2", { text: "What next" }), told.next.map((each) => make("p", { text: each.replace(/once the job is known: add .*/, "once the job above is filled in") }))));
  return parts.filter(Boolean);
}

function account({ rows, capacity_bytes: capacity }) {
  if (!rows.length) return null;
  const whole = capacity || rows.reduce((sum, row) => sum + Math.max(row.bytes, 0), 0);
  const bar = capacity ? make("div", { class: "split tall", role: "img", "aria-label": "The card's memory, by who holds it" },
    rows.filter((row) => row.bytes > 0).map((row) => make("i", { title: `${row.name} ${size(row.bytes)}`, css: { background: `var(${COLORS[row.name] || "--s9"})`, width: `${(100 * row.bytes) / whole}%` } }))) : null;
  return card("account", capacity ? `The card's ${size(capacity)}, added up` : "The numbers", null, bar,
    dataTable([["", ""], ["", "num"], ["", "num"], ["", "wide"]], rows.map((row) => [
      make("span", {}, make("span", { class: "swatch", css: { background: `var(${COLORS[row.name] || "--s9"})` } }), row.name), size(row.bytes), capacity ? percent(Math.max(row.bytes, 0), whole) : "", make("span", { class: "muted", text: row.says }),
    ])));
}

function tensor({ readings, why_none: none, request_bytes: asked }) {
  if (!readings.length) return none && asked.length ? card("tensor", "The tensor that failed", null, make("p", { class: "muted", text: none })) : null;
  return card("tensor", "The tensor that failed", "which tensors have just that size", dataTable([["", ""], ["bytes", "num"], ["", "wide"]],
    readings.slice(0, 4).map((each) => [`${each.tensor}${each.likeliest ? " (likeliest)" : ""}`, size(each.bytes), make("span", { class: "muted", text: each.product + (each.models.length && !each.known ? ` in ${each.models.slice(0, 3).join(", ")}${each.models.length > 3 ? " and others" : ""}` : "") })])));
}

function fixes(told, shell) {
  if (!told.fixes.length) return null;
  const { job } = told;
  const planned = job.settings.kind && job.settings.model;
  const state = (changes) => Object.fromEntries(Object.entries({ ...job.settings, ...changes, gpu: job.gpu ? job.gpu.name : "" }).filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && !value.length))); // a no may be what a fix is
  const predicted = told.fixes.some((each) => each.basis === "predicted");
  return card("fixes", "What helps", predicted ? "savings are predicted on this very job" : "in words: with the job, every saving is predicted", dataTable(
    [["", ""], ["", "wide"], [predicted ? "saves" : "", "num"], [predicted ? "then" : "", ""], ["", ""]], told.fixes.slice(0, 10).map((each) => [
      make("span", {}, each.name, " ", each.cost ? make("span", { class: `cost ${each.cost}`, text: each.cost }) : null),
      make("div", {}, each.says, each.price && each.price !== "none" ? make("span", { class: "muted", text: ` (${each.price})` }) : null, how(each.how)),
      each.saved_bytes === null ? "" : size(each.saved_bytes), ENOUGH[each.verdict] || each.verdict || "",
      planned && Object.keys(each.changes).length ? make("a", { class: "whole", href: shell.link("planner", state(each.changes)), text: "plan it" }) : "",
    ])));
}

function how(ways) {
  const named = Object.entries(ways);
  return named.length ? make("details", {}, make("summary", { text: "how" }), named.map(([who, what]) => make("p", {}, make("span", { class: "muted", text: `${who} ` }), make("code", { text: what })))) : null;
}

function withheld(told) {
  if (!told.withheld.length) return null;
  return card("withheld", "What does not help here", null, dataTable([["", ""], ["", "wide"]], told.withheld.map((each) => [each.advice, make("span", { class: "muted", text: each.why })])));
}
