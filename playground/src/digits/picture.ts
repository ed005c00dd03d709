// Images as black ink on a transparent canvas; the stylesheet inverts them in dark themes.

import { type Image, SIDE } from "./strokes";

function asPixels(image: Image): ImageData {
  const pixels = new ImageData(SIDE, SIDE);
  image.forEach((value, i) => {
    pixels.data[4 * i + 3] = Math.round(255 * value);
  });
  return pixels;
}

const small = new OffscreenCanvas(SIDE, SIDE);

/** Draw an image over the whole canvas, whatever its size. */
export function drawImage(context: CanvasRenderingContext2D, image: Image): void {
  const { width, height } = context.canvas;
  small.getContext("2d")!.putImageData(asPixels(image), 0, 0);
  context.clearRect(0, 0, width, height);
  context.imageSmoothingEnabled = true;
  context.drawImage(small, 0, 0, width, height);
}

/** Show an image on a canvas of its own size. */
export function showImage(canvas: HTMLCanvasElement, image: Image): void {
  canvas.getContext("2d")!.putImageData(asPixels(image), 0, 0);
}
