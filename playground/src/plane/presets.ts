// Samples to start from. Blue is class 0, orange is class 1.

import type { Sample } from "./logistic";

const sample = (label: 0 | 1, places: readonly (readonly [number, number])[]): Sample[] =>
  places.map(([x, y]) => ({ x, y, label }));

const BLUE: readonly (readonly [number, number])[] = [
  [-3.1, 0.6], [-2.4, 1.5], [-2.0, -0.3], [-3.4, -0.9], [-2.7, -1.6],
  [-1.7, 0.9], [-2.2, 2.4], [-3.8, 1.7], [-1.6, -1.2], [-2.9, 0.0],
];
const ORANGE: readonly (readonly [number, number])[] = [
  [2.6, -0.4], [3.3, 0.8], [1.9, 0.5], [2.2, -1.5], [3.0, 1.9],
  [1.7, 1.4], [3.6, -1.2], [2.4, -2.3], [1.8, -0.8], [2.9, 0.2],
];
const closer = (places: readonly (readonly [number, number])[], shift: number) =>
  places.map(([x, y]) => [x + shift, y] as const);

export const PRESETS: Readonly<Record<string, readonly Sample[]>> = {
  Apart: [...sample(0, BLUE), ...sample(1, ORANGE)],
  Overlapping: [...sample(0, closer(BLUE, 1.7)), ...sample(1, closer(ORANGE, -1.7))],
  "Few points": [...sample(0, [[-2, 1], [-1.5, -1]]), ...sample(1, [[2, -1], [1.5, 1]])],
  Outlier: [...sample(0, BLUE), ...sample(1, ORANGE), { x: 4.2, y: 3.6, label: 0 }],
};
