// The plan as a PNG: the verdict, the bar against the card, the timeline as it is drawn now.

import { Theme } from "./chart.js";
import { barParts } from "./plan_view.js";
import { size } from "./words.js";

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
