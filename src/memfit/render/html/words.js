// Numbers as people read them. GiB is 2^30 bytes, and the unit is always spelled out.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

export function sizeParts(count) {
  for (const [name, unit] of UNITS) if (Math.abs(count) >= unit) return [(count / unit).toFixed(2), name];
  return [String(Math.round(count)), "B"];
}

export function size(count) {
  return count === null || count === undefined ? "n/a" : sizeParts(count).join(" ");
}

// All in the unit of the whole, so that a column of them lines up; something is never shown as nothing.
export function sizesIn(whole) {
  const [name, unit] = UNITS.find(([, each]) => whole >= each) || ["B", 1];
  return (count) => {
    if (count === null || count === undefined) return "n/a";
    const text = (count / unit).toFixed(unit === 1 ? 0 : 2);
    return count > 0 && Number(text) === 0 ? `< 0.01 ${name}` : `${text} ${name}`;
  };
}

export function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(1)} %` : "n/a";
}

export function number(count) {
  return count.toLocaleString("en-US");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "n/a";
  const magnitude = Math.abs(seconds);
  if (magnitude >= 120) return `${(seconds / 60).toFixed(1)} min`;
  if (magnitude >= 1) return `${seconds.toFixed(3)} s`;
  if (magnitude >= 1e-3) return `${(seconds * 1e3).toFixed(2)} ms`;
  return `${(seconds * 1e6).toFixed(0)} µs`;
}

// 1, 2 or 5 times a power of ten, so that about `wanted` of them make up the span
export function niceStep(span, wanted) {
  const rough = span / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  for (const factor of [1, 2, 5]) if (rough <= factor * power) return factor * power;
  return 10 * power;
}

export function sizeTicks(low, high, wanted) {
  const [name, unit] = UNITS.find(([, each]) => high >= 1.5 * each) || ["B", 1];
  const step = niceStep((high - low) / unit, wanted);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / unit / step); i * step * unit <= high * 1.0001; i++) ticks.push([i * step * unit, `${(i * step).toFixed(digits)} ${name}`]);
  return ticks;
}

export function timeTicks(from, to, wanted) {
  const step = niceStep(to - from, wanted);
  const [name, scale] = to >= 1 && step >= 1e-3 ? ["s", 1] : step >= 1e-5 ? ["ms", 1e3] : ["µs", 1e6];
  const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  const ticks = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) ticks.push([i * step, `${(i * step * scale).toFixed(digits)} ${name}`]);
  return ticks;
}

export function eventTicks(from, to, wanted) {
  const step = Math.max(1, niceStep(to - from, wanted));
  const ticks = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) ticks.push([i * step, number(Math.round(i * step))]);
  return ticks;
}

export function shortOp(op) {
  return op.replace(/^aten\./, "").replace(/\.default$/, "");
}

export function plural(count, word) {
  return count === 1 ? `1 ${word}` : `${number(count)} ${word}s`;
}
