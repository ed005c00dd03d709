// Computes the three decision surfaces beside the page.

import { Logistic, share } from "./logistic";
import { coordinate, RESOLUTION, type SurfaceRequest, type Surfaces } from "./surfaces";

self.onmessage = (event: MessageEvent<SurfaceRequest>) => {
  const { samples, penalty } = event.data;
  const logistic = new Logistic(samples, penalty);
  const surface = (probability: (x: number, y: number) => number) =>
    Float32Array.from({ length: RESOLUTION * RESOLUTION }, (_, i) =>
      probability(coordinate(i % RESOLUTION), -coordinate(Math.floor(i / RESOLUTION))),
    );
  const surfaces: Surfaces = {
    plain: surface((x, y) => logistic.plain(x, y)),
    acnml: surface((x, y) => share(logistic.acnml(x, y))),
    cnml: surface((x, y) => share(logistic.cnml(x, y))),
  };
  self.postMessage(surfaces);
};
