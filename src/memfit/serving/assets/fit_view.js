// What makes the job fit (memfit.fit/1): the changes with what each saves and costs, one button a change.

import { dataTable, make } from "./dom.js";
import { size } from "./words.js";

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
