// Dark or light: as the system has it, until the button is pressed. Whatever is drawn in colours listens to `themechange`.

import { Theme } from "./chart.js";
import { make, svg } from "./dom.js";

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  Theme.forget();
  document.dispatchEvent(new Event("themechange"));
}

export function followTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => setTheme(system.matches ? "dark" : "light");
  system.addEventListener("change", follow);
  follow();
}

export function themeButton() {
  const picture = svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("circle", { cx: 8, cy: 8, r: 5.5 }), svg("path", { d: "M8 2.5 A5.5 5.5 0 0 1 8 13.5 Z", fill: "currentColor", stroke: "none" }));
  const other = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  return make("button", { class: "plain icon theme", type: "button", id: "theme", "aria-label": "Dark or light", title: "Dark or light", on: { click: other } }, picture);
}
