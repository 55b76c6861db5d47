// What pictures share: sharp pixels on a canvas, colours that follow the theme (dark or light, as the system has it, until
// the button is pressed: what is drawn in colours listens to `themechange`), and lines over time or steps as SVG.

import { make, svg, swatch } from "./dom.js";

export class Surface {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.resize();
  }

  resize(height = this.canvas.clientHeight) {
    const ratio = window.devicePixelRatio || 1;
    this.width = Math.max(this.canvas.clientWidth, 50);
    this.height = Math.max(height, 20);
    const [wide, high] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      this.canvas.width = wide;
      this.canvas.height = high;
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }
}

export const Theme = {
  colors: new Map(),
  get(name) {
    if (!this.colors.has(name)) this.colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#888");
    return this.colors.get(name);
  },
  forget() {
    this.colors.clear();
  },
};

export const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';

// The text if it fits, a beginning of it if that says something, or nothing.
export function fitted(context, text, room) {
  if (room < 14) return "";
  const wide = context.measureText(text).width;
  if (wide <= room) return text;
  const letters = Math.floor((text.length * room) / wide) - 1;
  return letters > 2 ? `${text.slice(0, letters)}…` : "";
}

// One drawing a frame, however many things ask for it.
export function onNextFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

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

const HIGH = 260, LEFT_EDGE = 74, RIGHT_EDGE = 20, LOWER = 30, UPPER = 12;

// A line is { name, color, dash, dots, points: [[x, y, title], ...] }; `ticks` and `words` are of its values, `names`
// puts the points' own names below them, `places` are ticks of x.
export function curves(lines, { ticks, words, names = false, places = null, from = 0 }) {
  const all = lines.flatMap((line) => line.points);
  const wide = Math.max(320, Math.min(1200, innerWidth - 60)); // on a phone it is not a small picture of a large one
  if (lines.every((line) => line.points.length < 2)) return null;
  const [first, last] = [Math.min(...all.map(([x]) => x)), Math.max(...all.map(([x]) => x))];
  const highest = Math.max(...all.map(([, y]) => y)), low = from === null ? Math.min(...all.map(([, y]) => y)) : from;
  const most = low + ((highest - low) * 1.08 || 1);
  const at = (x) => LEFT_EDGE + ((x - first) / (last - first || 1)) * (wide - LEFT_EDGE - RIGHT_EDGE);
  const up = (y) => HIGH - LOWER - ((y - low) / (most - low)) * (HIGH - LOWER - UPPER);
  const grid = ticks(low, most, 4).filter(([value]) => value >= low).flatMap(([value, label]) => [
    svg("line", { x1: LEFT_EDGE, x2: wide - RIGHT_EDGE, y1: up(value), y2: up(value), stroke: "var(--line)" }), textAt(label, LEFT_EDGE - 10, up(value) + 4, "end")]);
  const paths = lines.filter((line) => line.points.length).map((line) => svg("path", {
    d: `M${line.points.map(([x, y]) => `${at(x).toFixed(1)},${up(y).toFixed(1)}`).join("L")}`, fill: "none", stroke: `var(${line.color})`, "stroke-width": 2, "stroke-dasharray": line.dash || "",
  }));
  const dots = lines.filter((line) => line.dots).flatMap((line) => line.points.map(([x, y, title]) => {
    const dot = svg("circle", { cx: at(x), cy: up(y), r: 4, fill: `var(${line.color})` }), told = svg("title");
    told.textContent = `${title || line.name}: ${words(y)}`;
    dot.append(told);
    return dot;
  }));
  const below = names ? named(lines[lines.length - 1].points, at, wide) : (places ? places(first, last, wide / 130) : []).map(([x, label]) => textAt(label, at(x), HIGH - 10, "middle"));
  const key = make("div", { class: "key" }, lines.filter((line) => line.points.length).map((line) => make("span", { title: line.name }, swatch(`var(${line.color})`), make("em", { text: line.name }))));
  return make("figure", {}, svg("svg", { class: "log", viewBox: `0 0 ${wide} ${HIGH}`, role: "img", "aria-label": lines.map((line) => line.name).join(", ") }, ...grid, ...paths, ...dots, ...below), key);
}

function named(points, at, wide) {
  let free = 0;
  return points.flatMap(([x, , name], i) => {
    const place = at(x);
    if (place < free) return [];
    free = place + 9 * Math.min(name.length, 18) + 14;
    return [textAt(name.length > 18 ? `${name.slice(0, 17)}…` : name, Math.min(place, wide - RIGHT_EDGE), HIGH - 10, i ? (place > wide - 120 ? "end" : "middle") : "start")];
  });
}

function textAt(label, x, y, anchor) {
  const text = svg("text", { x, y, "text-anchor": anchor });
  text.textContent = label;
  return text;
}
