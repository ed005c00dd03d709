// What the sliders do to an image. `playground/drawing.py` is the reference; the tests compare both.

import { CENTRE, type Image, PIXELS, SIDE } from "./strokes";

export interface Distortion {
  readonly rotation: number; // degrees, counter-clockwise
  readonly scale: number; // factor around the centre
  readonly right: number; // shift in pixels
  readonly down: number;
  readonly blur: number; // standard deviation of a Gaussian in pixels
  readonly noise: number; // standard deviation of Gaussian noise
}

export const NONE: Distortion = { rotation: 0, scale: 1, right: 0, down: 0, blur: 0, noise: 0 };

const NOISE_SEED = 7;

/** Turn, scale and shift with linear interpolation, then blur and add noise. */
export function distort(image: Image, how: Distortion): Image {
  const moved = move(image, how);
  const blurred = how.blur > 0 ? blur(moved, how.blur) : moved;
  if (how.noise <= 0) return blurred;
  return blurred.map((v, i) => Math.min(1, Math.max(0, v + how.noise * NOISE_PATTERN[i])));
}

/** The image at p ↦ R⁻¹(p - centre - shift) / scale + centre; outside is paper. */
function move(image: Image, how: Distortion): Image {
  const angle = (how.rotation / 180) * Math.PI;
  const [cos, sin] = [Math.cos(angle) / how.scale, Math.sin(angle) / how.scale];
  const moved = new Float64Array(PIXELS);
  const at = (row: number, column: number): number =>
    row >= 0 && row < SIDE && column >= 0 && column < SIDE ? image[row * SIDE + column] : 0;
  for (let row = 0, pixel = 0; row < SIDE; row++) {
    for (let column = 0; column < SIDE; column++, pixel++) {
      const [x, y] = [column - CENTRE - how.right, row - CENTRE - how.down];
      const [fromX, fromY] = [cos * x - sin * y + CENTRE, sin * x + cos * y + CENTRE];
      const [left, top] = [Math.floor(fromX), Math.floor(fromY)];
      const [right, down] = [fromX - left, fromY - top];
      const above = (1 - right) * at(top, left) + right * at(top, left + 1);
      const below = (1 - right) * at(top + 1, left) + right * at(top + 1, left + 1);
      moved[pixel] = (1 - down) * above + down * below;
    }
  }
  return moved;
}

/** Convolve with a Gaussian that is cut off at three standard deviations; outside is paper. */
function blur(image: Image, deviation: number): Image {
  const radius = Math.ceil(3 * deviation);
  const offsets = Array.from({ length: 2 * radius + 1 }, (_, k) => k - radius);
  const weights = offsets.map((offset) => Math.exp(-0.5 * (offset / deviation) ** 2));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  const kernel = weights.map((weight) => weight / total);
  return along(along(image, SIDE, 1), 1, SIDE);

  /** Convolve along one axis: pixels of a line are `step` apart, lines `next`. */
  function along(source: Image, step: number, next: number): Image {
    const result = new Float64Array(PIXELS);
    for (let line = 0; line < SIDE; line++) {
      for (let place = 0; place < SIDE; place++) {
        const first = Math.max(0, place - radius);
        const last = Math.min(SIDE - 1, place + radius);
        let sum = 0;
        for (let from = first; from <= last; from++) {
          sum += kernel[from - place + radius] * source[line * next + from * step];
        }
        result[line * next + place * step] = sum;
      }
    }
    return result;
  }
}

/** Standard normal numbers, always the same: Mulberry32 and Box-Muller. */
function noisePattern(): Float64Array {
  let state = NOISE_SEED;
  const uniform = (): number => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  return Float64Array.from({ length: PIXELS }, () => {
    const radius = Math.sqrt(-2 * Math.log(1 - uniform()));
    return radius * Math.cos(2 * Math.PI * uniform());
  });
}

const NOISE_PATTERN = noisePattern();
