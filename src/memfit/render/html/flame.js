// What is alive at the peak, from the outside in: each row is called by the one above it, and as wide as its bytes.

import { CATEGORIES, make, percent, plural, shortOp, size } from "./dom.js";
import { fitted, onNextFrame, Surface, Theme } from "./chart.js";

const ROW = 21;

export class Flame {
  constructor(data, peak) {
    this.query = "";
    this.schedule = onNextFrame(() => this.draw());
    this.build();
    this.use(data, peak);
  }

  use(data, peak) {
    const { word, parent, bytes, count } = data.flame;
    this.peak = peak;
    this.nodes = word.map((each, i) => ({ name: data.words[each], parent: parent[i], bytes: bytes[i], count: count[i], depth: 0, from: 0 }));
    const used = new Float64Array(this.nodes.length);
    this.nodes.forEach((node) => {
      if (node.parent < 0) return;
      const above = this.nodes[node.parent];
      node.depth = above.depth + 1;
      node.from = above.from + used[node.parent];
      used[node.parent] += node.bytes;
    });
    this.root = 0;
    this.schedule();
  }

  build() {
    this.canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": "Flame graph of what is alive at the peak. Click a part to enlarge it, Escape goes back." });
    this.tip = make("div", { class: "tip" });
    this.trail = make("p", { class: "trail" });
    this.element = make("div", {}, make("div", { class: "flame" }, this.canvas, this.tip), this.trail);
    this.canvas.addEventListener("click", (event) => this.enter(this.at(event.offsetX, event.offsetY)));
    this.canvas.addEventListener("mousemove", (event) => this.showTip(event.offsetX, event.offsetY));
    this.canvas.addEventListener("mouseleave", () => (this.tip.style.display = "none"));
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key === "Escape" || event.key === "Backspace") this.enter(Math.max(this.nodes[this.root].parent, 0));
    });
  }

  enter(node) {
    if (node < 0) return;
    this.root = node === this.root ? Math.max(this.nodes[node].parent, 0) : node;
    this.schedule();
  }

  inside(node) {
    const { from, bytes } = this.nodes[this.root];
    return node.from + node.bytes > from && node.from < from + bytes;
  }

  draw() {
    const root = this.nodes[this.root];
    const visible = this.nodes.filter((node) => this.inside(node));
    const depth = visible.reduce((most, node) => Math.max(most, node.depth), 0) + 1;
    this.canvas.style.height = `${depth * ROW + 2}px`;
    this.surface = this.surface || new Surface(this.canvas);
    this.surface.resize(depth * ROW + 2);
    const { context, width } = this.surface;
    context.clearRect(0, 0, width, depth * ROW + 2);
    context.font = '11.5px ui-monospace, "SF Mono", Menlo, Consolas, monospace';
    context.textBaseline = "middle";
    this.scale = width / Math.max(root.bytes, 1);
    for (const node of visible) {
      const above = node.depth < root.depth;
      const left = above ? 0 : Math.max((node.from - root.from) * this.scale, 0);
      const right = above ? width : Math.min((node.from + node.bytes - root.from) * this.scale, width);
      if (right - left < 0.4) continue;
      const found = this.query && node.name.toLowerCase().includes(this.query);
      context.globalAlpha = above ? 0.45 : this.query && !found ? 0.3 : 1;
      context.fillStyle = this.color(node);
      context.fillRect(left, node.depth * ROW, Math.max(right - left - 1, 0.4), ROW - 1);
      context.globalAlpha = 1;
      context.fillStyle = Theme.get("--text");
      const label = node.depth ? shortOp(node.name) : `${size(node.bytes)} alive at the peak`;
      const room = right - left - 10, name = label.slice(label.lastIndexOf("/", label.indexOf(":") + 1) + 1);
      const text = fitted(context, context.measureText(label).width <= room ? label : name, room);
      if (text) context.fillText(text, left + 5, node.depth * ROW + ROW / 2);
    }
    const path = [];
    for (let i = this.root; i > 0; i = this.nodes[i].parent) path.unshift(this.nodes[i].name);
    this.trail.textContent = path.length ? `${size(root.bytes)} (${percent(root.bytes, this.peak)})  ${path.slice(-3).join("  ›  ")}   ·   Esc goes back` : "";
  }

  color(node) {
    if (node.depth === 0) return Theme.get("--sunken");
    const name = node.name.split(" ")[0];
    let top = node;
    while (top.depth > 1) top = this.nodes[top.parent];
    const category = top.name.replace(" ", "_");
    if (CATEGORIES.includes(category)) return shadedFor(Theme.get(`--c-${category}`), node.depth);
    if (name.startsWith("(")) return shadedFor(Theme.get("--c-before"), 1);
    const packages = name.includes("/") ? name.split("/")[0] : "own code";
    const tint = packages === "torch" ? "--s9" : packages === "own code" ? "--s2" : `--s${[0, 1, 5, 7][hash(packages) % 4]}`;
    return shadedFor(Theme.get(tint), node.depth);
  }

  at(x, y) {
    const depth = Math.floor(y / ROW), root = this.nodes[this.root];
    return this.nodes.findIndex((node) => {
      if (node.depth !== depth || !this.inside(node)) return false;
      if (depth <= root.depth) return true;
      const left = (node.from - root.from) * this.scale;
      return x >= left && x < left + node.bytes * this.scale;
    });
  }

  showTip(x, y) {
    const found = this.at(x, y);
    this.tip.style.display = found < 0 ? "none" : "block";
    if (found < 0) return;
    const node = this.nodes[found];
    this.tip.replaceChildren(
      make("div", { class: "head" }, make("span", { text: size(node.bytes) }), make("span", { class: "muted", text: percent(node.bytes, this.peak) })),
      make("div", { class: "where mono", text: node.depth ? shortOp(node.name) : "everything" }),
      make("div", { class: "muted", text: plural(node.count, "allocation") }));
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(Math.min(x + 14, this.surface.width - wide), 0)}px`;
    this.tip.style.top = `${y + 18}px`;
  }

  search(query) {
    this.query = query.toLowerCase();
    this.schedule();
  }
}

// A pale wash, in two strengths so that neighbours are told apart.
function shadedFor(color, depth) {
  const match = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(color);
  if (!match) return color;
  const share = depth % 2 ? 0.42 : 0.32;
  return `rgb(${match.slice(1).map((part) => parseInt(part, 16)).join(" ")} / ${share})`;
}

function hash(text) {
  let sum = 7;
  for (let i = 0; i < text.length; i++) sum = (sum * 31 + text.charCodeAt(i)) >>> 0;
  return sum;
}
