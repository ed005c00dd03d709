// Predicts an image at many rotations, beside the page, so that bars never wait for the chart.

import { distort } from "./distort";
import { each, Model } from "./model";
import { ANGLES, type Sweep, type SweepRequest } from "./rotations";

let model: Promise<Model>;

// The page hears of errors, but not of rejected promises.
self.addEventListener("unhandledrejection", (event) => {
  throw event.reason;
});

self.onmessage = async (event: MessageEvent<SweepRequest>) => {
  const request = event.data;
  if ("files" in request) {
    model = Model.start(request.files);
    return;
  }
  const { image, distortion } = request;
  const images = ANGLES.map((rotation) => distort(image, { ...distortion, rotation }));
  const answers = await (await model).predict(images);
  const sweep: Sweep = each((method) =>
    answers.map((answer) => Math.max(...answer.probabilities[method])),
  );
  self.postMessage(sweep);
};
