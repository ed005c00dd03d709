// One picture of the plane: a decision surface with the points and the query on it.

import { element, setAll, svg } from "../dom";
import { isDark } from "../theme";
import type { Sample } from "./logistic";
import { EXTENT, RESOLUTION } from "./surfaces";

const FINE = 256; // pixels along a side; the grid is interpolated between its points
const BANDS = 20; // steps of colour between the classes
const SHAPES = { 0: "circle", 1: "square" } as const; // told apart without colour, too
const COLOURS = {
  light: { blue: [53, 126, 189], middle: [250, 250, 250], orange: [226, 122, 44] },
  dark: { blue: [38, 110, 176], middle: [30, 32, 36], orange: [201, 104, 32] },
} as const;

export class Picture {
  readonly figure: HTMLElement;
  readonly overlay: SVGSVGElement;
  private readonly canvas = element("canvas", { width: `${FINE}`, height: `${FINE}` });
  private readonly query = svg("path", { class: "query-mark", d: "M0-.32L.32 0 0 .32-.32 0Z" });
  private readonly note = element("small");
  private readonly marks: SVGGElement[] = [];
  private surface: Float32Array | null = null;

  constructor(name: string, description: string) {
    const box = [-EXTENT, -EXTENT, 2 * EXTENT, 2 * EXTENT].join(" ");
    this.overlay = svg("svg", { viewBox: box });
    this.overlay.append(this.query);
    const caption = element("figcaption", {}, element("b", {}, name), ` ${description} `, this.note);
    const stage = element("div", { class: "stage" }, this.canvas, this.overlay);
    this.figure = element("figure", { class: "panel" }, caption, stage);
  }

  /** Put the marks where the points are; there are as many as points, in their order. */
  place(samples: readonly Sample[], query: { readonly x: number; readonly y: number }): void {
    while (this.marks.length > samples.length) this.marks.pop()!.remove();
    while (this.marks.length < samples.length) {
      const mark = svg("g", { class: "point" });
      const square = { x: -0.16, y: -0.16, width: 0.32, height: 0.32 };
      mark.append(svg("circle", { r: 0.17 }), svg("rect", square));
      this.marks.push(mark);
      this.overlay.insertBefore(mark, this.query);
    }
    samples.forEach(({ x, y, label }, i) => {
      setAll(this.marks[i], { transform: `translate(${x} ${-y})`, "data-class": SHAPES[label] });
    });
    setAll(this.query, { transform: `translate(${query.x} ${-query.y})` });
  }

  mark(index: number): SVGGElement | SVGPathElement {
    return this.marks[index] ?? this.query;
  }

  show(surface: Float32Array): void {
    this.surface = surface;
    const unsure = surface.reduce((count, p) => count + Number(Math.abs(p - 0.5) < 0.1), 0);
    const share = Math.round((100 * unsure) / surface.length);
    this.note.textContent = `unsure on ${share} % of the plane`;
    this.draw();
  }

  draw(): void {
    if (!this.surface) return;
    const pixels = new ImageData(FINE, FINE);
    const palette = colours();
    for (let row = 0, i = 0; row < FINE; row++) {
      for (let column = 0; column < FINE; column++, i++) {
        const p = interpolated(this.surface, row, column);
        const band = Math.min(BANDS - 1, Math.floor(p * BANDS));
        pixels.data.set(palette[band], 4 * i);
      }
    }
    this.canvas.getContext("2d")!.putImageData(pixels, 0, 0);
  }
}

/** Bilinear interpolation of the grid at the centre of a fine pixel. */
function interpolated(surface: Float32Array, row: number, column: number): number {
  const at = (index: number) => {
    const place = ((index + 0.5) * RESOLUTION) / FINE - 0.5;
    return Math.min(RESOLUTION - 1, Math.max(0, place));
  };
  const [y, x] = [at(row), at(column)];
  const [top, left] = [Math.floor(y), Math.floor(x)];
  const [bottom, right] = [Math.min(top + 1, RESOLUTION - 1), Math.min(left + 1, RESOLUTION - 1)];
  const value = (r: number, c: number) => surface[r * RESOLUTION + c];
  const above = value(top, left) + (x - left) * (value(top, right) - value(top, left));
  const below = value(bottom, left) + (x - left) * (value(bottom, right) - value(bottom, left));
  return above + (y - top) * (below - above);
}

/** The colour of every band, as red, green, blue and opacity. */
function colours(): number[][] {
  const { blue, middle, orange } = COLOURS[isDark() ? "dark" : "light"];
  return Array.from({ length: BANDS }, (_, band) => {
    const towards = (2 * band + 1) / BANDS - 1; // from -1, blue, to 1, orange
    const end = towards < 0 ? blue : orange;
    return [...middle.map((from, i) => from + Math.abs(towards) * (end[i] - from)), 255];
  });
}
