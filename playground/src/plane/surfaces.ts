// What the page and its worker say to each other about decision surfaces.

import type { Sample } from "./logistic";

export const EXTENT = 6; // the plane reaches from -EXTENT to EXTENT in both directions
export const RESOLUTION = 64; // grid points along a side
export const PANELS = ["plain", "acnml", "cnml"] as const;
export type Panel = (typeof PANELS)[number];

export interface SurfaceRequest {
  readonly samples: readonly Sample[];
  readonly penalty: number;
}

/** Probabilities of class 1 on the grid, rows from the top. */
export type Surfaces = Readonly<Record<Panel, Float32Array>>;

/** The coordinate of a column of the grid, at the centre of its cell; rows have its negative. */
export const coordinate = (index: number) => EXTENT * ((2 * index + 1) / RESOLUTION - 1);
