// The report as a page of its own: its data lie in the page.

import { make } from "./dom.js";
import { ReportView } from "./report_view.js";
import { followTheme, themeButton } from "./theme.js";

function topBar(data) {
  const { report, title } = data;
  const links = [["timeline", "Timeline"], ["flame", "Flame graph"], ["allocations", "Allocations"], ["details", "Details"]];
  const known = links.filter(([id]) => id === "details" || data.timeline);
  const device = report.device === null || report.device === undefined ? "" : `, GPU ${report.device}`;
  return make("header", { class: "bar" },
    make("span", { class: "brand", text: "memfit" }), make("span", { class: "file", text: title, title: report.source.path }),
    make("span", { class: `badge ${report.origin === "predicted" ? "predicted" : ""}`, text: `${report.origin}${device}` }),
    make("nav", { "aria-label": "Sections" }, known.map(([id, text]) => make("a", { href: `#${id}`, text }))),
    themeButton());
}

const data = JSON.parse(document.getElementById("data").textContent);
document.title = `${data.title} · memfit`;
followTheme();
const main = make("main");
document.getElementById("page").append(topBar(data), main);
new ReportView(main, data);
main.append(make("footer", { text: "Made by memfit. This file holds everything it shows and loads nothing." }));
document.documentElement.dataset.ready = "yes";
