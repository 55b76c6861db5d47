// The numbers of the page: columns, unpacked from base64 once.

import { cssKey, duration, number, shortOp } from "./dom.js";

function unpack(text, Kind) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Kind(bytes.buffer);
}

export class Run {
  constructor(data) {
    const { samples, blocks } = data;
    this.data = data;
    this.unit = data.unit;
    [this.first, this.last] = [data.first, data.last]; // events that it shows; there may be others
    this.events = data.events;
    this.count = samples.count;
    this.event = unpack(samples.event, Int32Array);
    this.seconds = samples.seconds === null ? null : unpack(samples.seconds, Float64Array);
    this.allocated = unpack(samples.allocated, Uint32Array);
    this.reserved = samples.reserved === null ? null : unpack(samples.reserved, Uint32Array);
    this.groupings = data.groupings.map((each) => ({
      id: each.id,
      names: each.names,
      colors: each.names.map((name, i) => (each.palette.length ? `--c-${cssKey(each.palette[i])}` : `--s${name === "the rest" ? 9 : i}`)),
      sums: each.sums.map((sum) => unpack(sum, Uint32Array)),
      ofBlock: unpack(each.of_block, Uint8Array),
    }));
    this.blocks = blocks.count;
    this.leftOut = blocks.left_out;
    this.number = blocks.number ? unpack(blocks.number, Int32Array) : Int32Array.from({ length: this.blocks }, (_, i) => i); // in the whole run
    this.birth = unpack(blocks.birth, Int32Array);
    this.death = unpack(blocks.death, Int32Array);
    this.size = unpack(blocks.size, Uint32Array);
    this.waste = unpack(blocks.waste, Uint32Array);
    this.category = unpack(blocks.category, Uint8Array);
    this.kind = unpack(blocks.kind, Uint32Array);
    this.madeAt = blocks.made ? unpack(blocks.made, Float64Array) : null;
    this.freedAt = blocks.freed ? unpack(blocks.freed, Float64Array) : null;
    this.byBirth = Uint32Array.from({ length: this.blocks }, (_, i) => i).sort((a, b) => this.birth[a] - this.birth[b] || a - b);
    this.positions = { event: Float64Array.from(this.event, (event) => event + 1), time: this.seconds };
    this.ends = { event: this.events + 1, time: Math.max(data.end_seconds || 0, 1e-6) };
  }

  text(block) {
    const [line, module, op] = this.data.kinds[this.kind[block]].map((word) => this.data.words[word]);
    return { line, module, op: shortOp(op) };
  }

  where(block) {
    const { line, module, op } = this.text(block);
    return line || [module, op].filter(Boolean).join("  ") || "(no name)";
  }

  stack(block) {
    const number = this.data.kinds[this.kind[block]][3];
    return number < 0 ? [] : this.data.stacks[number].map((word) => this.data.words[word]);
  }

  categoryName(block) {
    return this.data.categories[this.category[block]];
  }

  bytes(block) {
    return this.size[block] * this.unit;
  }

  alive(block, event) {
    return this.birth[block] <= event && event < this.death[block];
  }

  // The sample that holds at an event: the last one that is not after it.
  sampleAt(event) {
    return Math.max(upperBound(this.event, event) - 1, 0);
  }

  secondsAt(event) {
    return this.seconds === null ? null : this.seconds[this.sampleAt(event)];
  }

  made(block) {
    if (this.birth[block] < 0) return "before";
    return this.madeAt ? duration(this.madeAt[block]) : this.when(this.birth[block]);
  }

  freed(block) {
    if (this.death[block] >= this.events) return "never";
    return this.freedAt ? duration(this.freedAt[block]) : this.when(this.death[block]);
  }

  phaseAt(event) {
    const phases = this.data.phases;
    let low = 0, high = phases.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (phases[middle][2] <= event) low = middle + 1; else high = middle;
    }
    const found = phases[low - 1];
    return found && event < found[3] ? phaseName(found) : "";
  }

  when(event) {
    const at = this.secondsAt(event);
    return at === null ? `event ${number(event)}` : duration(at);
  }
}

export function phaseName([name, step]) {
  return step ? `${name} ${step}` : name;
}

// How many entries are not above a value; the column rises.
export function upperBound(column, value) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}
