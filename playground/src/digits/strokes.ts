// Strokes become images by the rules of MNIST: the ink fits into a square of 20 pixels, and its
// centre of mass is at the centre of 28 x 28 pixels. `playground/drawing.py` is the reference; the
// tests compare both.

export type Point = readonly [x: number, y: number]; // in a unit square, y down
export type Stroke = readonly Point[];
export type Image = Float64Array; // 28 x 28, from 0 (paper) to 1 (ink), rows from the top

export const SIDE = 28;
export const PIXELS = SIDE * SIDE;
export const CENTRE = (SIDE - 1) / 2;
const BOX = 20; // pixels that the ink covers, along its longer side

// The pen, in pixels: where the ink is half as strong as in the middle of a line, and over how many
// pixels it fades.
const PEN_RADIUS = 1.25;
const PEN_EDGE = 1.5;

// A drawing is not enlarged as if it were smaller than this: a dot stays a dot.
const SMALLEST = 0.15;

/** Draw strokes into a box of 20 pixels, centred by their mass. */
export function render(strokes: readonly Stroke[]): Image {
  const lines = strokes.filter((stroke) => stroke.length > 0);
  if (lines.length === 0) return new Float64Array(PIXELS);
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (const [x, y] of lines.flat()) {
    left = Math.min(left, x);
    right = Math.max(right, x);
    top = Math.min(top, y);
    bottom = Math.max(bottom, y);
  }
  const scale = (BOX - 2 * PEN_RADIUS) / Math.max(right - left, bottom - top, SMALLEST);
  const [middleX, middleY] = [(left + right) / 2, (top + bottom) / 2];
  const place = (shiftX: number, shiftY: number): Stroke[] =>
    lines.map((line) =>
      line.map(([x, y]): Point => [(x - middleX) * scale + shiftX, (y - middleY) * scale + shiftY]),
    );
  const [massX, massY] = centreOfMass(ink(place(CENTRE, CENTRE)));
  return ink(place(2 * CENTRE - massX, 2 * CENTRE - massY));
}

/** 1 near a line, falling to 0 around a distance of PEN_RADIUS. */
function ink(lines: readonly Stroke[]): Image {
  const squared = new Float64Array(PIXELS).fill(Infinity);
  for (const line of lines) {
    for (let k = 0; k < Math.max(1, line.length - 1); k++) {
      const [x, y] = line[k];
      const [toX, toY] = line[Math.min(k + 1, line.length - 1)];
      keepNearest(squared, x, y, toX - x, toY - y);
    }
  }
  const strength = (distance: number) => (PEN_RADIUS - distance) / PEN_EDGE + 0.5;
  return squared.map((value) => Math.min(1, Math.max(0, strength(Math.sqrt(value)))));
}

/** Lower every pixel's squared distance to that from a segment, if it is closer. */
function keepNearest(squared: Image, x: number, y: number, dx: number, dy: number): void {
  const length = dx * dx + dy * dy;
  for (let row = 0, pixel = 0; row < SIDE; row++) {
    for (let column = 0; column < SIDE; column++, pixel++) {
      const along = length > 0 ? ((column - x) * dx + (row - y) * dy) / length : 0;
      const share = Math.min(1, Math.max(0, along));
      const [gapX, gapY] = [column - x - share * dx, row - y - share * dy];
      squared[pixel] = Math.min(squared[pixel], gapX * gapX + gapY * gapY);
    }
  }
}

function centreOfMass(image: Image): Point {
  let [total, x, y] = [0, 0, 0];
  image.forEach((value, pixel) => {
    total += value;
    x += value * (pixel % SIDE);
    y += value * Math.floor(pixel / SIDE);
  });
  return [x / total, y / total];
}
