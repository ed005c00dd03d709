// The network and ACNML, as exported by `acnml.export_onnx`, run by onnxruntime-web.

import * as ort from "onnxruntime-web/wasm";
import runtimeGlue from "../../node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.mjs?url";
import runtimeUrl from "../../build/runtime.bin?url";
import infoUrl from "../../model/model.json?url";
import modelUrl from "../../model/model.onnx?url";
import { type Image, PIXELS, SIDE } from "./strokes";

export const CLASSES = 10;
export const METHODS = ["network", "temperature", "acnml"] as const;
export type Method = (typeof METHODS)[number];

/** Something for every method. */
export function each<T>(make: (method: Method) => T): Record<Method, T> {
  return { network: make("network"), temperature: make("temperature"), acnml: make("acnml") };
}

/** What `playground/model.py` writes beside the ONNX file. */
export interface Info {
  readonly data: string;
  readonly variants: number; // distorted copies of every training image
  readonly images: { readonly train: number; readonly validation: number };
  readonly accuracy: number;
  readonly temperature: number;
  readonly alpha: number;
  readonly price: number;
  readonly shares: readonly number[];
  readonly thresholds: Readonly<Record<Method | "regret", readonly number[]>>;
  readonly examples: readonly { readonly label: number; readonly pixels: string }[];
}

/** Everything that is loaded once, and can be handed on to a worker. */
export interface Files {
  readonly runtime: Uint8Array;
  readonly glue: string;
  readonly model: Uint8Array;
  readonly info: Info;
}

/** The answers for one image. */
export interface Answer {
  readonly probabilities: Readonly<Record<Method, Float64Array>>;
  readonly regret: number;
}

export async function loadFiles(): Promise<Files> {
  const [runtime, model, info] = await Promise.all([
    download(runtimeUrl).then((response) => decompressed(response)),
    download(modelUrl).then(async (response) => new Uint8Array(await response.arrayBuffer())),
    download(infoUrl).then((response) => response.json() as Promise<Info>),
  ]);
  return { runtime, glue: new URL(runtimeGlue, import.meta.url).href, model, info };
}

async function download(url: string): Promise<Response> {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url} could not be loaded: ${response.status}`);
  return response;
}

/** Decompress a response, unless the server or the browser has done so already. */
async function decompressed(response: Response): Promise<Uint8Array> {
  const bytes = new Uint8Array(await response.arrayBuffer());
  const isZipped = bytes[0] === 0x1f && bytes[1] === 0x8b;
  if (!isZipped) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export class Model {
  private constructor(
    private readonly session: ort.InferenceSession,
    private readonly temperature: number,
  ) {}

  static async start(files: Files): Promise<Model> {
    ort.env.wasm.numThreads = 1; // more threads need headers that static hosts do not send
    ort.env.wasm.wasmBinary = files.runtime;
    ort.env.wasm.wasmPaths = { mjs: files.glue };
    const session = await ort.InferenceSession.create(files.model);
    return new Model(session, files.info.temperature);
  }

  /** Answer for all images in one run. */
  async predict(images: readonly Image[]): Promise<Answer[]> {
    const pixels = new Float32Array(images.length * PIXELS);
    images.forEach((image, i) => pixels.set(image, i * PIXELS));
    const input = new ort.Tensor("float32", pixels, [images.length, 1, SIDE, SIDE]);
    const found = await this.session.run({ input });
    const [logits, logProbs, regret] = ["logits", "log_probs", "regret"].map(
      (name) => found[name].data as Float32Array,
    );
    return images.map((_, i) => {
      const own = logits.subarray(i * CLASSES, (i + 1) * CLASSES);
      const acnml = logProbs.subarray(i * CLASSES, (i + 1) * CLASSES);
      return {
        probabilities: {
          network: softmax(own, 1),
          temperature: softmax(own, this.temperature),
          acnml: Float64Array.from(acnml, Math.exp),
        },
        regret: regret[i],
      };
    });
  }
}

function softmax(logits: Float32Array, temperature: number): Float64Array {
  const largest = Math.max(...logits);
  const weights = Float64Array.from(logits, (logit) => Math.exp((logit - largest) / temperature));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.map((weight) => weight / total);
}

/** The pixels of an example in the model's JSON. */
export function decodeImage(base64: string): Image {
  return Float64Array.from(atob(base64), (character) => character.charCodeAt(0) / 255);
}
