// A few shapes of SVG. Every chart says in words what it shows.

const SPACE = "http://www.w3.org/2000/svg";

export function shape(name, attributes = {}, children = []) {
  const found = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

export function text(x, y, words, attributes = {}) {
  return shape("text", { x, y, ...attributes }, [String(words)]);
}

// A round number at or above the value, for the end of an axis.
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((end) => end >= value);
}

export function format(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  return value >= 100 ? value.toFixed(0) : value >= 9.95 ? value.toFixed(1) : value.toFixed(2);
}

// A frame with two axes: pixels of data values, and the shapes of the axes.
export class Frame {
  constructor({ width = 260, height = 180, xEnd, yEnd, xStart = 0, xName, yName, left = 34, whole = false }) {
    Object.assign(this, { width, height, xEnd, yEnd, xStart });
    this.box = { left, right: width - 12, top: 22, bottom: height - 30 };
    const { right, top, bottom } = this.box;
    this.shapes = [
      shape("line", { class: "axis", x1: left, y1: bottom, x2: right, y2: bottom }),
      shape("line", { class: "axis", x1: left, y1: top, x2: left, y2: bottom }),
      text(right, height - 4, xName, { "text-anchor": "end" }),
      text(2, 9, yName),
    ];
    for (const share of [0, 0.5, 1]) {
      const between = xStart + share * (xEnd - xStart);
      const x = whole ? Math.floor(between) : between;
      this.shapes.push(
        text(this.x(x), bottom + 13, short(x), { "text-anchor": "middle" }),
        text(left - 5, this.y(share * yEnd) + 4, short(share * yEnd), { "text-anchor": "end" }),
      );
    }
  }

  x(value) {
    const { left, right } = this.box;
    return left + ((value - this.xStart) / (this.xEnd - this.xStart)) * (right - left);
  }

  y(value) {
    const { top, bottom } = this.box;
    return bottom - Math.min(1, value / this.yEnd) * (bottom - top);
  }

  add(...shapes) {
    this.shapes.push(...shapes);
  }

  line(points, kind = "curve") {
    const path = points.map(([x, y]) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join(" ");
    this.add(shape("polyline", { class: kind, points: path }));
  }

  dot(x, y, kind = "dot", r = 3.5) {
    this.add(shape("circle", { class: kind, cx: this.x(x), cy: this.y(y), r }));
  }

  show(place, words) {
    const picture = shape(
      "svg",
      { viewBox: `0 0 ${this.width} ${this.height}`, role: "img", "aria-label": words },
      this.shapes,
    );
    place.replaceChildren(picture);
  }
}

function short(value) {
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 1 : 0);
}
