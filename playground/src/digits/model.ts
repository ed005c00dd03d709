// The network and ACNML, as exported by `acnml.export_onnx`, run by onnxruntime-web.

import { decompress } from "fzstd";
import * as ort from "onnxruntime-web/wasm";
import runtimeGlue from "../../node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.mjs?url";
import runtimeUrl from "../../build/runtime.bin?url";
import infoUrl from "../../model/model.json?url";
import modelUrl from "../../model/model.onnx?url";
import { type Image, PIXELS, SIDE } from "./strokes";

export const CLASSES = 10;
export const METHODS = ["network", "temperature", "closed", "acnml"] as const;
export type Method = (typeof METHODS)[number];

/** Something for every method. */
export function each<T>(make: (method: Method) => T): Record<Method, T> {
  const [network, temperature, closed, acnml] = METHODS.map(make);
  return { network, temperature, closed, acnml };
}

/** What `playground/model.py` writes beside the ONNX file. */
export interface Info {
  readonly data: string;
  readonly variants: number; // distorted copies of every training image
  readonly images: { readonly train: number; readonly validation: number };
  readonly accuracy: number;
  readonly temperature: number; // of least NLL; both rules use it
  readonly temperatureOfEqualPrice: number;
  readonly alpha: number;
  readonly alphaOfClosedForm: number;
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
    download(runtimeUrl).then(async (response) => decompress(await bytes(response))),
    download(modelUrl).then(bytes),
    download(infoUrl).then((response) => response.json() as Promise<Info>),
  ]);
  return { runtime, glue: new URL(runtimeGlue, import.meta.url).href, model, info };
}

async function download(url: string): Promise<Response> {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url} could not be loaded: ${response.status}`);
  return response;
}

async function bytes(response: Response): Promise<Uint8Array> {
  return new Uint8Array(await response.arrayBuffer());
}

export class Model {
  private constructor(
    private readonly session: ort.InferenceSession,
    private readonly info: Info,
  ) {}

  static async start(files: Files): Promise<Model> {
    ort.env.wasm.numThreads = 1; // more threads need headers that static hosts do not send
    ort.env.wasm.wasmBinary = files.runtime;
    ort.env.wasm.wasmPaths = { mjs: files.glue };
    const session = await ort.InferenceSession.create(files.model);
    return new Model(session, files.info);
  }

  /** Answer for all images in one run. */
  async predict(images: readonly Image[]): Promise<Answer[]> {
    const pixels = new Float32Array(images.length * PIXELS);
    images.forEach((image, i) => pixels.set(image, i * PIXELS));
    const input = new ort.Tensor("float32", pixels, [images.length, 1, SIDE, SIDE]);
    const found = await this.session.run({ input });
    const [logits, logProbs, regret, score] = ["logits", "log_probs", "regret", "score"].map(
      (name) => found[name].data as Float32Array,
    );
    const { temperature, temperatureOfEqualPrice, alphaOfClosedForm } = this.info;
    return images.map((_, i) => {
      const own = logits.subarray(i * CLASSES, (i + 1) * CLASSES);
      const acnml = logProbs.subarray(i * CLASSES, (i + 1) * CLASSES);
      return {
        probabilities: {
          network: softmax(own, 1),
          temperature: softmax(own, temperatureOfEqualPrice),
          closed: closedForm(softmax(own, temperature), alphaOfClosedForm * score[i] ** 2),
          acnml: Float64Array.from(acnml, Math.exp),
        },
        regret: regret[i],
      };
    });
  }
}

function softmax(logits: Float32Array, temperature: number): Float64Array {
  const largest = Math.max(...logits);
  return normalised(Float64Array.from(logits, (logit) => Math.exp((logit - largest) / temperature)));
}

/** Closed-form NML, `acnml.calibration.calibrator.closed_form`: p / (p + p^h (1 - p)), h = v / (1 + v). */
function closedForm(probabilities: Float64Array, spread: number): Float64Array {
  const exponent = -1 / (1 + spread); // h - 1
  return normalised(probabilities.map((p) => (p > 0 ? 1 / (1 + p ** exponent * (1 - p)) : 0)));
}

function normalised(weights: Float64Array): Float64Array {
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.map((weight) => weight / total);
}

/** The pixels of an example in the model's JSON. */
export function decodeImage(base64: string): Image {
  return Float64Array.from(atob(base64), (character) => character.charCodeAt(0) / 255);
}
