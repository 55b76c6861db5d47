// Cards against models: `memfit table` as a heat map. Rows appear as they are planned; a cell opens the planner.

import { make, size } from "./dom.js";
import { SIGNS } from "./plan_view.js";
import { field, segments } from "./controls.js";
import { KIND_WORDS } from "./job_form.js";

export async function show(container, texts, shell) {
  const names = await shell.get("/api/table");
  const models = texts.models ? texts.models.split(",") : names.models, gpus = texts.gpus ? texts.gpus.split(",") : names.gpus;
  const workloads = names.workloads.includes("qlora") ? names.workloads : [...names.workloads, "qlora"];
  let workload = workloads.includes(texts.workload) ? texts.workload : "lora";
  let length = Number(texts.seq_len) || names.seq_len;
  let turn = null;
  const body = make("tbody");
  const status = make("span", { class: "muted", role: "status" });
  const settings = make("p", { class: "sub" });
  const head = make("tr", {}, make("th", { scope: "col", text: "model" }), make("th", { scope: "col", class: "num", text: "needs" }), gpus.map((gpu) => make("th", { scope: "col", text: gpu })));
  const table = make("table", { class: "heat" }, make("thead", {}, head), body);

  const fill = async () => {
    turn?.abort();
    turn = new AbortController();
    const { signal } = turn;
    shell.keep({ ...texts, workload, seq_len: length });
    const rows = models.map((model) => make("tr", {}, make("th", { scope: "row", text: model }), make("td", { class: "num muted", text: "…" }), gpus.map(() => make("td"))));
    body.replaceChildren(...rows);
    for (const [i, model] of models.entries()) {
      status.textContent = `planning ${model} …`;
      try {
        const made = await shell.post("/api/table", { models: [model], workloads: [workload], gpus, seq_len: length }, { signal });
        rows[i].replaceWith(...made.rows.map((row) => line(row, gpus, workload, shell)));
        settings.textContent = said(made.rows[0]);
      } catch (error) {
        if (error.name === "AbortError") return;
        rows[i].replaceChildren(make("th", { scope: "row", text: model }), make("td", { class: "muted", colspan: gpus.length + 1 }, make("span", { class: "why", text: [error.message, error.hint].filter(Boolean).join("; ") })));
      }
    }
    status.textContent = "";
    table.dataset.done = workload;
  };
  const again = () => {
    delete table.dataset.done;
    fill();
  };
  container.append(make("section", { class: "card" }, make("h2", { text: "Which model fits which card" }), settings,
    segments("job", workloads.map((name) => [name, KIND_WORDS[name] || name]), workload, (name) => { workload = name; again(); }),
    make("div", { class: "settings length" }, field("length", "number", length, (text) => { length = Math.round(Number(text)) || names.seq_len; again(); }, { name: "seq_len" })),
    make("div", { class: "scroll" }, table),
    make("p", { class: "key" }, Object.entries({ safe: "fits, a tenth of the card stays free", tight: "fits, with less to spare", fails: "does not fit" }).map(([name, text]) => make("span", { class: `cell ${name}` }, `${SIGNS[name]} ${name}: ${text}`)), status)));
  fill();
  return () => turn?.abort();
}

function line(row, gpus, workload, shell) {
  const job = Object.fromEntries(Object.entries(row.settings).filter(([name, value]) => ["seq_len", "rank", "grad_checkpointing", "optimizer", "new_tokens"].includes(name) && value !== null));
  const cells = gpus.map((gpu) => {
    const cell = row.cells[gpu];
    const words = `${row.model} on ${gpu}: ${cell.verdict}${cell.device_bytes ? `, ${size(cell.device_bytes)}` : ""}`;
    const href = shell.link("planner", { ...job, kind: workload, model: row.model, gpu });
    return make("td", { class: `cell ${cell.verdict}` }, row.way === "whole" ? make("span", { title: words, text: `${SIGNS[cell.verdict]} ${cell.verdict}` }) : make("a", { href, title: words, "aria-label": words, text: `${SIGNS[cell.verdict]} ${cell.verdict}` }));
  });
  return make("tr", {}, make("th", { scope: "row", text: `${row.model}${row.way ? ` (${row.way})` : ""}` }), make("td", { class: "num", text: size(row.total_bytes) }), cells);
}

function said(row) {
  const { settings } = row;
  const words = [`batch ${settings.batch_size ?? 1}`, `${settings.seq_len} tokens`, settings.precision, settings.rank ? `rank ${settings.rank}` : "", settings.grad_checkpointing ? "checkpointing" : "", settings.optimizer || ""].filter(Boolean);
  return `Every figure is predicted: ${words.join(", ")}. A cell opens the planner.`;
}
