// What both canvases share: sharp pixels, and colours that follow the theme.

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
