// How memory over time is drawn. Each column of pixels shows the moment at which most was allocated in it, so no peak is
// lost; what is shown one by one is solid, and what is too small for that is the pale rest of its group.

import { eventTicks, sizeTicks, timeTicks } from "./dom.js";
import { phaseName, upperBound } from "./data.js";
import { fitted, FONT, Surface, Theme } from "./chart.js";

export const LEFT = 74, RIGHT = 12, TOP = 30, BOTTOM = 26;
const LEAST_HEIGHT = 0.8; // of a block that is drawn by itself, in pixels
const LEAST_EDGE = 4; // of one that has a line around it
const MOST_MOVING = 1000; // blocks drawn by themselves while the picture moves; the others come when it rests

export class Drawing {
  // -- columns of pixels

  columns() {
    const { run } = this;
    const positions = run.positions[this.axis];
    const count = Math.floor(this.plotWidth);
    const samples = new Int32Array(count);
    let last = Math.max(upperBound(positions, this.from) - 1, 0);
    for (let column = 0; column < count; column++) {
      const right = this.from + ((column + 1) / count) * (this.to - this.from);
      let best = last;
      for (let next = last + 1; next < run.count && positions[next] < right; next++) {
        if (run.allocated[next] > run.allocated[best]) best = next;
        last = next;
      }
      samples[column] = Math.max(best, column ? samples[column - 1] : 0);
    }
    return samples;
  }

  draw() {
    const began = performance.now();
    this.surface = this.surface || new Surface(this.canvas);
    this.surface.resize(420);
    this.samples = this.columns();
    this.eventOf = Int32Array.from(this.samples, (sample) => this.run.event[sample]);
    this.measure();
    const { context, width, height } = this.surface;
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    this.drawPhases(context);
    this.drawGrid(context);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP, this.plotWidth, this.plotHeight);
    context.clip();
    this.drawGroups(context);
    this.drawBlocks(context);
    this.drawReserved(context);
    context.restore();
    this.drawRange(context);
    this.drawMarks(context);
    this.drawOverview();
    this.describe();
    Object.assign(this.canvas.dataset, {
      from: this.from, to: this.to, first: this.run.first, last: this.run.last, end: this.end, low: this.low, high: this.high, drawn: this.drawn, there: this.there, milliseconds: (performance.now() - began).toFixed(2),
    });
    this.onDrawn?.();
  }

  measure() {
    let top = 1;
    this.most = 1;
    for (const sample of this.samples) {
      top = this.most = Math.max(this.most, this.run.allocated[sample], 1);
    }
    for (const sample of this.samples) {
      if (this.reservedShown && this.run.reserved) top = Math.max(top, this.run.reserved[sample]);
    }
    this.top = top * 1.06;
    [this.low, this.high] = this.heights || [0, this.top];
    this.bases = [];
    let below = new Float64Array(this.samples.length);
    for (const sums of this.grouping.sums) {
      this.bases.push(below);
      const above = new Float64Array(below.length);
      for (let i = 0; i < above.length; i++) above[i] = below[i] + sums[this.samples[i]];
      below = above;
    }
    this.bases.push(below);
  }

  x(position) {
    return LEFT + ((position - this.from) / (this.to - this.from)) * this.plotWidth;
  }

  y(value) {
    return this.surface.height - BOTTOM - ((value - this.low) / (this.high - this.low)) * this.plotHeight;
  }

  get plotHeight() {
    return this.surface.height - TOP - BOTTOM;
  }

  drawGrid(context) {
    const { width, height } = this.surface;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.strokeStyle = Theme.get("--line");
    context.fillStyle = Theme.get("--muted");
    context.lineWidth = 1;
    for (const [value, label] of sizeTicks(this.low * this.run.unit, this.high * this.run.unit, 6)) {
      const y = Math.round(this.y(value / this.run.unit)) + 0.5;
      if (y < TOP || y > height - BOTTOM + 1) continue;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(width - RIGHT, y);
      context.stroke();
      context.fillText(label, LEFT - 10, y);
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    const wanted = this.plotWidth / 110;
    const ticks = this.axis === "time" ? timeTicks(this.from, this.to, wanted) : eventTicks(this.from, this.to, wanted);
    let free = LEFT - 40;
    for (const [position, label] of ticks) {
      const x = Math.round(this.x(position)) + 0.5, half = context.measureText(label).width / 2;
      if (x < LEFT || x > width - RIGHT + 1 || x - half < free || x + half > width) continue;
      free = x + half + 12;
      context.beginPath();
      context.moveTo(x, height - BOTTOM);
      context.lineTo(x, height - BOTTOM + 4);
      context.stroke();
      context.fillText(label, x, height - BOTTOM + 8);
    }
  }

  // Bands above the plot; where they are too narrow to be told apart, whole steps.
  drawPhases(context) {
    const bands = this.bands();
    context.textBaseline = "middle";
    context.textAlign = "center";
    bands.forEach(([label, from, to, tint], i) => {
      const left = Math.max(this.x(from), LEFT), right = Math.min(this.x(to), LEFT + this.plotWidth);
      if (right <= left) return;
      context.globalAlpha = tint === null ? (i % 2 ? 0.1 : 0.18) : 0.24;
      context.fillStyle = tint === null ? Theme.get("--muted") : Theme.get(tint);
      context.fillRect(left, 4, Math.max(right - left - 1, 0.5), TOP - 10);
      context.globalAlpha = tint === null ? 0 : 0.05;
      context.fillRect(left, TOP, right - left, this.surface.height - TOP - BOTTOM);
      context.globalAlpha = 1;
      context.fillStyle = Theme.get("--text");
      const text = fitted(context, label, right - left - 8);
      if (text) context.fillText(text, (left + right) / 2, 4 + (TOP - 10) / 2 + 0.5);
    });
  }

  bands() {
    const { phases } = this.run.data;
    const span = this.to - this.from;
    const seen = [];
    const steps = new Map();
    for (const phase of phases) {
      const from = this.position(phase[2], phase[4]), to = phase[3] >= this.run.events ? this.end : this.position(phase[3], phase[5]);
      if (to < this.from || from > this.to) continue;
      seen.push([phaseName(phase), from, to, PHASE_TINTS[phase[0]] || "--s9"]);
      const step = steps.get(phase[1]);
      if (step) step[2] = to; else steps.set(phase[1], [phase[1] ? `step ${phase[1]}` : phase[0], from, to, null]);
    }
    const narrow = seen.length > 12 && (span / seen.length / span) * this.plotWidth < 26;
    return narrow ? [...steps.values()] : seen;
  }

  drawGroups(context) {
    this.grouping.sums.forEach((_, group) => {
      context.fillStyle = Theme.get(this.grouping.colors[group]);
      context.globalAlpha = 0.56;
      this.fillBetween(context, this.bases[group], this.bases[group + 1], 0, this.samples.length);
    });
    context.globalAlpha = 1;
  }

  fillBetween(context, below, above, first, last) {
    context.beginPath();
    let value = NaN;
    for (let i = first; i < last; i++) {
      if (above[i] !== value) {
        if (i > first) context.lineTo(LEFT + i, this.y(value));
        value = above[i];
        context.lineTo(LEFT + i, this.y(value));
      }
    }
    context.lineTo(LEFT + last, this.y(value));
    value = NaN;
    for (let i = last - 1; i >= first; i--) {
      if (below[i] !== value) {
        if (i < last - 1) context.lineTo(LEFT + i + 1, this.y(value));
        value = below[i];
        context.lineTo(LEFT + i + 1, this.y(value));
      }
    }
    context.lineTo(LEFT + first, this.y(value));
    context.closePath();
    context.fill();
  }

  // Blocks lie in order of size, so the largest share of them are the first ones.
  get wanted() {
    const share = Math.ceil((this.run.blocks * this.detail) / 100);
    const least = (LEAST_HEIGHT / this.plotHeight) * (this.high - this.low);
    let low = 0, high = this.run.blocks;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.run.size[middle] >= least) low = middle + 1; else high = middle;
    }
    return Math.min(share, low, this.moving ? MOST_MOVING : low);
  }

  drawBlocks(context) {
    const { run, eventOf } = this;
    const wanted = this.wanted, columns = eventOf.length;
    const heights = this.bases.slice(0, -1).map((base) => Float64Array.from(base));
    const firstEvent = eventOf[0], lastEvent = eventOf[columns - 1];
    const below = new Float64Array(columns), above = new Float64Array(columns);
    const shades = this.grouping.colors.map((name) => [Theme.get(name), shaded(Theme.get(name), 0.14), shaded(Theme.get(name), -0.1)]);
    const edge = (LEAST_EDGE / this.plotHeight) * (this.high - this.low);
    let drawn = 0, there = 0, budget = 6e6;
    this.chosenArea = null;
    for (let i = 0; i < run.blocks; i++) {
      const block = run.byBirth[i];
      if (run.birth[block] > lastEvent || run.death[block] <= firstEvent) continue;
      there++;
      if (block >= wanted || budget <= 0) continue;
      const first = upperBound(eventOf, run.birth[block] - 1), last = upperBound(eventOf, run.death[block] - 1);
      if (last <= first) continue;
      const group = this.grouping.ofBlock[block], stacked = heights[group], size = run.size[block];
      for (let column = first; column < last; column++) {
        below[column] = stacked[column];
        stacked[column] = above[column] = stacked[column] + size;
      }
      budget -= last - first;
      context.fillStyle = shades[group][run.kind[block] % 3];
      this.fillBetween(context, below, above, first, last);
      if (size >= edge) {
        context.strokeStyle = Theme.get("--surface");
        context.lineWidth = 0.7;
        context.stroke();
      }
      if (run.number[block] === this.selected) this.chosenArea = [below.slice(first, last), above.slice(first, last), first];
      drawn++;
    }
    this.drawn = drawn;
    this.there = there;
    if (this.chosenArea) this.outline(context, ...this.chosenArea);
  }

  outline(context, below, above, first) {
    context.strokeStyle = Theme.get("--text");
    context.lineWidth = 1.6;
    context.beginPath();
    for (let i = 0; i < above.length; i++) {
      context.lineTo(LEFT + first + i, this.y(above[i]));
      context.lineTo(LEFT + first + i + 1, this.y(above[i]));
    }
    for (let i = below.length - 1; i >= 0; i--) {
      context.lineTo(LEFT + first + i + 1, this.y(below[i]));
      context.lineTo(LEFT + first + i, this.y(below[i]));
    }
    context.closePath();
    context.stroke();
  }

  drawReserved(context) {
    if (!this.reservedShown || !this.run.reserved) return;
    context.strokeStyle = Theme.get("--muted");
    context.lineWidth = 1.25;
    context.setLineDash([5, 4]);
    context.beginPath();
    for (let i = 0; i < this.samples.length; i++) {
      const y = Math.round(this.y(this.run.reserved[this.samples[i]])) + 0.5;
      context.lineTo(LEFT + i, y);
      context.lineTo(LEFT + i + 1, y);
    }
    context.stroke();
    context.setLineDash([]);
  }

  drawRange(context) {
    if (!this.range) return;
    const [left, right] = this.range.map((position) => Math.min(Math.max(this.x(position), LEFT), LEFT + this.plotWidth));
    context.fillStyle = context.strokeStyle = Theme.get("--accent");
    context.globalAlpha = 0.14;
    context.fillRect(left, TOP, right - left, this.plotHeight);
    context.globalAlpha = 1;
    context.lineWidth = 1;
    for (const x of [left, right]) {
      context.beginPath();
      context.moveTo(Math.round(x) + 0.5, TOP);
      context.lineTo(Math.round(x) + 0.5, this.surface.height - BOTTOM);
      context.stroke();
    }
  }

  drawMarks(context) {
    const peak = this.position(this.run.data.peak_event, this.run.data.peak_seconds);
    const marks = [[peak, "peak", "--text"], ...(this.ooms || []).map((oom) => [this.position(oom.event, oom.seconds), "out of memory", "--bad"])];
    context.textBaseline = "top";
    for (const [position, label, color] of marks) {
      if (position < this.from || position > this.to) continue;
      const x = Math.round(Math.min(Math.max(this.x(position), LEFT), LEFT + this.plotWidth)) + 0.5;
      context.strokeStyle = context.fillStyle = Theme.get(color);
      context.globalAlpha = 0.55;
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(x, TOP - 4);
      context.lineTo(x, this.surface.height - BOTTOM);
      context.stroke();
      context.globalAlpha = 1;
      const wide = context.measureText(label).width, leftwards = x + wide + 12 > this.surface.width;
      context.textAlign = leftwards ? "right" : "left";
      const at = leftwards ? x - 5 : x + 5;
      context.fillStyle = Theme.get("--surface");
      context.globalAlpha = 0.8;
      context.fillRect(leftwards ? at - wide - 3 : at - 3, TOP, wide + 6, 16);
      context.globalAlpha = 1;
      context.fillStyle = Theme.get(color);
      context.fillText(label, at, TOP + 2);
    }
  }

  drawOverview() {
    this.small = this.small || new Surface(this.overview);
    this.small.resize(44);
    const { context, width, height } = this.small;
    const run = this.whole, positions = run.positions[this.axis], columns = Math.floor(this.plotWidth);
    context.clearRect(0, 0, width, height);
    const key = `${this.axis} ${columns} ${Theme.get("--muted")}`;
    if (this.overviewKey !== key || this.overviewOf !== run) {
      [this.overviewKey, this.overviewOf] = [key, run];
      this.overviewColumn = new Float64Array(columns);
      let held = 0;
      for (let i = 0, column = 0; column < columns; column++) {
        const right = ((column + 1) / columns) * this.end;
        let most = held;
        for (; i < run.count && positions[i] < right; i++) most = Math.max(most, (held = run.allocated[i]));
        this.overviewColumn[column] = most;
      }
      this.overviewTop = this.overviewColumn.reduce((a, b) => Math.max(a, b), 1);
    }
    context.fillStyle = Theme.get("--sunken");
    context.fillRect(LEFT, 0, columns, height);
    context.fillStyle = Theme.get("--faint");
    context.globalAlpha = 0.55;
    context.beginPath();
    context.moveTo(LEFT, height);
    for (let i = 0; i < columns; i++) context.lineTo(LEFT + i, height - (this.overviewColumn[i] / this.overviewTop) * (height - 6));
    context.lineTo(LEFT + columns, height);
    context.fill();
    const left = LEFT + (this.from / this.end) * columns, wide = Math.max(((this.to - this.from) / this.end) * columns, 3);
    context.globalAlpha = 0.16;
    context.fillStyle = Theme.get("--accent");
    context.fillRect(left, 0, wide, height);
    context.globalAlpha = 1;
    context.strokeStyle = Theme.get("--accent");
    context.strokeRect(left + 0.5, 0.5, wide - 1, height - 1);
  }
}

const PHASE_TINTS = { load: "--s9", forward: "--s5", backward: "--s7", step: "--s3" };

// A colour a little lighter (above 0) or darker (below).
function shaded(color, amount) {
  const match = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(color);
  if (!match) return color;
  const towards = amount > 0 ? 255 : 0;
  const parts = match.slice(1).map((part) => Math.round(parseInt(part, 16) + (towards - parseInt(part, 16)) * Math.abs(amount)));
  return `rgb(${parts.join(" ")})`;
}
