// What the page and its worker say to each other about confidence against rotation.

import type { Distortion } from "./distort";
import type { Files, Method } from "./model";
import type { Image } from "./strokes";

export const ANGLES: readonly number[] = Array.from({ length: 73 }, (_, i) => 5 * i - 180);

export type SweepRequest =
  | { readonly files: Files }
  | { readonly image: Image; readonly distortion: Distortion };

/** Confidence at every angle. */
export type Sweep = Readonly<Record<Method, readonly number[]>>;

/** The angles next to upright where the confidence falls below a limit; null if it does not. */
export function limits(
  confidences: readonly number[],
  limit: number,
): { readonly left: number | null; readonly right: number | null } {
  const upright = ANGLES.indexOf(0);
  const search = (step: 1 | -1): number | null => {
    for (let i = upright; i >= 0 && i < ANGLES.length; i += step) {
      if (confidences[i] >= limit) continue;
      if (i === upright) return 0;
      const [inside, outside] = [confidences[i - step], confidences[i]];
      if (Number.isNaN(outside)) return ANGLES[i]; // no answer there
      const share = (inside - limit) / (inside - outside);
      return ANGLES[i - step] + share * (ANGLES[i] - ANGLES[i - step]);
    }
    return null;
  };
  return { left: search(-1), right: search(1) };
}
