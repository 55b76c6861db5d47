// A plan (memfit.plan/1) as the planner shows it: verdict, the bar against the card, what is alive, phases, largest tensors; what
// makes the job fit (memfit.fit/1), one button a change; and a picture of all that, as a PNG.

import { Theme } from "./chart.js";
import { card, category, cssKey, dataTable, duration, make, number, percent, shortOp, size, sizesIn, swatch } from "./dom.js";

export const SIGNS = { safe: "✓", tight: "!", fails: "✕" };
const WAYS = {
  traced: "every block and step was traced", extended: "a part was traced, which the rest repeats", interpolated: "lies between batch sizes and lengths that were traced",
};

// [name, bytes, colour], from the bottom up: what is alive, what torch holds beyond it, what CUDA itself takes
function barParts(plan) {
  const alive = Object.entries(plan.breakdown).filter(([, bytes]) => bytes > 0).map(([name, bytes]) => [name.replace("_", " "), bytes, `--c-${cssKey(name)}`]);
  const held = plan.peak.reserved_bytes - plan.peak.allocated_bytes;
  const padding = plan.peak.device_bytes - plan.peak.reserved_bytes - plan.peak.context_bytes; // the card decides on it
  return [...alive, ["held, idle", held, "--c-idle"], ["CUDA context", plan.peak.context_bytes, "--c-context"], ["padding, at most", padding, "--c-idle"]].filter(([, bytes]) => bytes > 0);
}

export function verdictCard(answer, pinned, tools) {
  const { plan } = answer;
  const verdict = plan.verdict;
  const parts = barParts(plan);
  const rows = [[pinned ? "now" : "", plan], ...(pinned ? [["pinned", pinned.plan]] : [])];
  const scale = Math.max(...rows.flatMap(([, each]) => [each.peak.device_bytes, each.gpu ? each.gpu.capacity_bytes : 0]));
  const unmodelled = plan.notes.filter((note) => note.startsWith("not modelled:"));
  return make("section", { class: `card verdict ${verdict || "none"}`, id: "verdict" },
    make("h2", {}, verdict ? make("span", { class: "sign", "aria-hidden": "true", text: SIGNS[verdict] }) : null, make("span", { id: "verdict-line", text: answer.verdict })),
    unmodelled.length ? make("div", { class: "message" }, make("div", {}, unmodelled.map((note) => make("p", { text: note })))) : null,
    make("p", { class: "sub", text: `${answer.why}.` }),
    rows.map(([label, each]) => bar(each, scale, label)),
    scaleLine(plan, scale),
    legend(parts, plan),
    make("p", { class: "origin" }, make("span", { class: "badge predicted", text: `predicted: ${answer.how}`, title: WAYS[plan.how.way] }), make("span", { id: "time", class: "badge" })),
    tools);
}

function bar(plan, scale, label) {
  const parts = barParts(plan);
  const words = `${label ? `${label}: ` : ""}${size(plan.peak.device_bytes)} at the peak${plan.gpu ? ` of ${size(plan.gpu.capacity_bytes)}` : ""}`;
  return make("div", { class: "against" }, label ? make("span", { class: "which", text: label }) : null,
    make("div", { class: "track", role: "img", "aria-label": words },
      plan.gpu ? make("span", { class: "room", css: { width: `${(100 * plan.gpu.capacity_bytes) / scale}%` } }) : null,
      make("span", { class: "stack" }, parts.map(([name, bytes, color]) => make("i", { title: `${name} ${size(bytes)}`, css: { background: `var(${color})`, width: `${(100 * bytes) / scale}%` } }))),
      plan.gpu && plan.peak.device_bytes > plan.gpu.capacity_bytes ? make("span", { class: "over", title: "more than the card has", css: { left: `${(100 * plan.gpu.capacity_bytes) / scale}%`, width: `${(100 * (plan.peak.device_bytes - plan.gpu.capacity_bytes)) / scale}%` } }) : null,
      plan.gpu ? make("b", { class: "limit", css: { left: `${(100 * plan.gpu.capacity_bytes) / scale}%` } }) : null));
}

// The card's name stands at its end of the bar.
function scaleLine(plan, scale) {
  const end = plan.gpu ? (100 * plan.gpu.capacity_bytes) / scale : 100;
  return make("p", { class: "scale muted" }, make("span", { text: `device ${size(plan.peak.device_bytes)}` }),
    make("span", { class: "card-end", text: plan.gpu ? `${plan.gpu.name}: ${size(plan.gpu.capacity_bytes)}` : "no card named", css: { "margin-right": `${Math.min(100 - end, 55)}%` } }));
}

function legend(parts, plan) {
  const inUnit = sizesIn(plan.peak.device_bytes);
  const free = plan.gpu ? plan.gpu.capacity_bytes - plan.peak.device_bytes : 0;
  const rows = [...parts, ...(free > 0 ? [["free", free, "--c-free"]] : [])];
  return make("ul", { class: "parts" }, rows.map(([name, bytes, color]) => make("li", {}, swatch(`var(${color})`), make("span", { text: name }), make("span", { class: "num", text: inUnit(bytes) }))));
}

export function timeWords(told) {
  if (!told) return "";
  const { least, likely, most } = told.step_seconds;
  return `estimated: ${duration(likely)} a step (${duration(least)} to ${duration(most)})`;
}

// -- compared with what is pinned

export function comparison(now, pinned, unpin) {
  const [a, b] = [pinned.plan, now.plan];
  const settings = [...new Set([...Object.keys(a.workload), ...Object.keys(b.workload)])]
    .filter((name) => JSON.stringify(a.workload[name]) !== JSON.stringify(b.workload[name]))
    .map((name) => [name.replaceAll("_", " "), shown(a.workload[name]), shown(b.workload[name]), ""]);
  const bytes = [["allocated", a.peak.allocated_bytes, b.peak.allocated_bytes], ["reserved", a.peak.reserved_bytes, b.peak.reserved_bytes], ["device", a.peak.device_bytes, b.peak.device_bytes],
    ...Object.keys({ ...a.breakdown, ...b.breakdown }).map((name) => [`alive: ${name.replace("_", " ")}`, a.breakdown[name] || 0, b.breakdown[name] || 0])];
  const rows = bytes.filter(([, one, other]) => one || other).map(([name, one, other]) => [name, size(one), size(other), one === other ? "same" : `${other > one ? "+" : "−"}${size(Math.abs(other - one))}`]);
  const verdicts = [["verdict", a.verdict || "none", b.verdict || "none", ""]];
  return make("section", { class: "card", id: "comparison" }, make("h2", { text: "Pinned, and now" }),
    dataTable([["", ""], ["pinned", "num"], ["now", "num"], ["difference", "num"]], [...verdicts, ...settings, ...rows]),
    make("button", { class: "plain more", type: "button", id: "unpin", text: "let go of the pin", on: { click: unpin } }));
}

function shown(value) {
  return value === undefined || value === null ? "–" : Array.isArray(value) ? value.join(", ") || "none" : String(value);
}

// -- the rest

export function phasesCard(plan) {
  if (!plan.phases.length) return null;
  const at = plan.at_peak, top = Math.max(...plan.phases.map((phase) => phase.reserved_bytes), 1);
  const isPeak = (phase) => phase.name === at.phase && phase.step === at.step;
  return card("phases", "Phases", "the peak in each",
    dataTable([["step", ""], ["phase", ""], ["allocated", "num"], ["reserved", "num"], ["", "wide"]],
      plan.phases.map((phase) => [phase.step ? String(phase.step) : "start", phase.name, size(phase.allocated_bytes), size(phase.reserved_bytes), make("span", { class: "meter", css: { width: `${(100 * phase.allocated_bytes) / top}%` } })]),
      { rowClass: (i) => (isPeak(plan.phases[i]) ? "peak" : "") }));
}

export function largestCard(plan) {
  if (!plan.largest || !plan.largest.length) return null;
  const total = plan.peak.allocated_bytes, inUnit = sizesIn(total);
  return card("largest", "Largest at the peak", "by module and op", dataTable([["bytes", "num"], ["share", "num"], ["times", "num"], ["category", ""], ["", "where"]],
    plan.largest.map((each) => [inUnit(each.allocated_bytes), percent(each.allocated_bytes, total), number(each.count), category(each.category), `${each.module}  ${shortOp(each.op)}`])));
}

export function assumedCard(plan) {
  const host = Object.entries(plan.host || {}).filter(([, bytes]) => typeof bytes === "number" && bytes > 0);
  return card("assumed", "Assumed", `${number(plan.model.parameters)} parameters, ${number(plan.model.trainable_parameters)} of them trained; planned in ${duration(plan.seconds)}`,
    host.length ? dataTable([["host memory", ""], ["", "num"]], host.map(([name, bytes]) => [name.replaceAll("_", " "), size(bytes)])) : null,
    make("ul", { class: "notes" }, plan.notes.filter((note) => !note.startsWith("not modelled:")).map((note) => make("li", { text: note }))));
}

export function fitCard(fitted, apply) {
  const { changes, after, gpu } = fitted;
  const all = merged(changes.map((change) => change.settings));
  const title = { "fits already": "It fits already", fits: "What makes it fit", "nothing fits": "Nothing makes it fit" }[fitted.answer];
  const sub = fitted.answer === "fits already" ? `a tenth of ${gpu.name} stays free`
    : `each change is predicted on this very job; with all of them ${size(after.device_bytes)} of ${size(gpu.capacity_bytes)}${fitted.answer === "fits" ? ", a tenth of the card stays free" : `: the nearest set; it needs a card of ${size(fitted.smallest_gpu_bytes)}`}`;
  return make("section", { class: "card", id: "fit" }, make("h2", { text: title }), make("p", { class: "sub", text: sub }),
    changes.length ? dataTable([["", ""], ["change", ""], ["saves", "num"], ["then", "num"], ["price", "wide"]], changes.map((change) => [
      button("apply", () => apply(change.settings), change.name),
      make("span", {}, change.name, " ", make("span", { class: `cost ${change.cost}`, text: change.cost })), size(change.saved_bytes), size(change.after_bytes),
      make("span", {}, make("span", { text: change.says }), make("br"), make("span", { class: "muted", text: `${change.price}; ${change.risk}` })),
    ])) : null,
    changes.length > 1 ? make("p", { class: "more" }, button(`apply all ${changes.length}`, () => apply(all), "all")) : null,
    fitted.alternatives.map((each) => make("p", { class: "more" }, `Or, without ${each.instead_of}: ${each.changes.map((change) => change.name).join(", ")}; ${size(each.device_bytes)}, ${each.verdict} `,
      button("apply", () => apply(each.settings), `instead of ${each.instead_of}`))),
    fitted.smaller_model ? make("p", { class: "more" }, `A smaller model: ${fitted.smaller_model.name}, ${size(fitted.smaller_model.device_bytes)}, ${fitted.smaller_model.verdict} `,
      button("apply", () => apply({ model: fitted.smaller_model.name }), "smaller model")) : null,
    fitted.set_aside.length ? make("details", { class: "more" }, make("summary", { text: "what was left out, and why" }),
      dataTable([["change", ""], ["why", ""], ["", "wide"]], fitted.set_aside.map((each) => [each.name, each.why, make("span", { class: "muted", text: each.reason })]))) : null,
    fitted.notes.length ? make("ul", { class: "notes" }, fitted.notes.map((note) => make("li", { text: note }))) : null);
}

function button(text, click, name) {
  return make("button", { class: "plain", type: "button", text, "data-change": name, "aria-label": `${text}: ${name}`, on: { click } });
}

// Lists of names add up, as what is offloaded does.
function merged(all) {
  const made = {};
  for (const settings of all) {
    for (const [name, value] of Object.entries(settings)) made[name] = Array.isArray(value) ? [...new Set([...(made[name] || []), ...value])] : value;
  }
  return made;
}

const WIDE = 1200, EDGE = 28, BAR = 34;
const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

export function pictureOf(answer, timeline) {
  const { plan } = answer;
  const drawn = timeline ? timeline.canvas : null;
  const tall = drawn ? (drawn.height / drawn.width) * (WIDE - 2 * EDGE) : 0;
  const canvas = document.createElement("canvas");
  const parts = barParts(plan);
  [canvas.width, canvas.height] = [WIDE, Math.round(250 + tall)];
  const context = canvas.getContext("2d");
  context.fillStyle = Theme.get("--surface");
  context.fillRect(0, 0, canvas.width, canvas.height);
  write(context, `${plan.workload.kind} of ${plan.model.name}${plan.gpu ? ` on ${plan.gpu.name}` : ""}`, EDGE, 46, `600 24px ${SANS}`, "--text");
  write(context, answer.verdict, EDGE, 78, `18px ${SANS}`, "--text");
  write(context, `predicted by memfit: ${answer.how}`, EDGE, 104, `14px ${SANS}`, "--muted");
  const scale = Math.max(plan.peak.device_bytes, plan.gpu ? plan.gpu.capacity_bytes : 0), room = WIDE - 2 * EDGE;
  context.fillStyle = Theme.get("--sunken");
  context.fillRect(EDGE, 122, room, BAR);
  let x = EDGE;
  for (const [, bytes, color] of parts) {
    context.fillStyle = Theme.get(color);
    context.fillRect(x, 122, (bytes / scale) * room, BAR);
    x += (bytes / scale) * room;
  }
  if (plan.gpu) {
    context.fillStyle = Theme.get("--text");
    context.fillRect(EDGE + (plan.gpu.capacity_bytes / scale) * room - 2, 116, 2, BAR + 12);
  }
  let at = EDGE, line = 186;
  for (const [name, bytes, color] of parts) {
    const text = `${name} ${size(bytes)}`;
    context.font = `14px ${SANS}`;
    const wide = context.measureText(text).width + 38;
    if (at + wide > WIDE - EDGE) [at, line] = [EDGE, line + 24];
    context.fillStyle = Theme.get(color);
    context.fillRect(at, line - 10, 11, 11);
    write(context, text, at + 17, line, `14px ${SANS}`, "--text");
    at += wide;
  }
  if (drawn) context.drawImage(drawn, EDGE, 236, room, tall);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function write(context, text, x, y, font, color) {
  context.font = font;
  context.fillStyle = Theme.get(color);
  context.fillText(text, x, y, WIDE - 2 * EDGE);
}
