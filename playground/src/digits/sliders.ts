// The sliders that distort the image.

import { element } from "../dom";
import { type Distortion, NONE } from "./distort";

interface Kind {
  readonly name: keyof Distortion;
  readonly label: string;
  readonly min: number;
  readonly max: number;
  readonly step: number;
  readonly text: (value: number) => string;
}

const minus = (text: string) => text.replace("-", "−");
const pixels = (value: number) => minus(`${value.toFixed(1)} px`);

const KINDS: readonly Kind[] = [
  { name: "rotation", label: "Rotate", min: -180, max: 180, step: 1, text: (v) => minus(`${v}°`) },
  { name: "scale", label: "Scale", min: 0.4, max: 1.6, step: 0.01, text: (v) => `× ${v.toFixed(2)}` },
  { name: "right", label: "Shift right", min: -10, max: 10, step: 0.1, text: pixels },
  { name: "down", label: "Shift down", min: -10, max: 10, step: 0.1, text: pixels },
  { name: "blur", label: "Blur", min: 0, max: 3, step: 0.05, text: (v) => `${v.toFixed(2)} px` },
  { name: "noise", label: "Noise", min: 0, max: 0.8, step: 0.01, text: (v) => v.toFixed(2) },
];

export class Sliders {
  private readonly inputs: ReadonlyMap<keyof Distortion, HTMLInputElement>;
  private readonly outputs: ReadonlyMap<keyof Distortion, HTMLOutputElement>;

  constructor(place: HTMLElement, changed: (name: keyof Distortion) => void) {
    const made = KINDS.map((kind) => ({ kind, ...makeSlider(kind) }));
    this.inputs = new Map(made.map(({ kind, input }) => [kind.name, input]));
    this.outputs = new Map(made.map(({ kind, output }) => [kind.name, output]));
    for (const { kind, row, input } of made) {
      place.lastElementChild!.before(row); // the button that resets them comes last
      input.addEventListener("input", () => {
        this.describe(kind);
        changed(kind.name);
      });
    }
    this.reset();
  }

  get values(): Distortion {
    const value = (name: keyof Distortion) => Number(this.inputs.get(name)!.value);
    return {
      rotation: value("rotation"),
      scale: value("scale"),
      right: value("right"),
      down: value("down"),
      blur: value("blur"),
      noise: value("noise"),
    };
  }

  reset(): void {
    for (const kind of KINDS) {
      this.inputs.get(kind.name)!.value = String(NONE[kind.name]);
      this.describe(kind);
    }
  }

  private describe(kind: Kind): void {
    const input = this.inputs.get(kind.name)!;
    const text = kind.text(Number(input.value));
    input.setAttribute("aria-valuetext", text);
    this.outputs.get(kind.name)!.textContent = text;
  }
}

function makeSlider({ name, label, min, max, step }: Kind) {
  const id = `slide-${name}`;
  const range = { min: String(min), max: String(max), step: String(step) };
  const input = element("input", { type: "range", id, ...range });
  const output = element("output", { for: id });
  const row = element("div", { class: "slider" }, element("label", { for: id }, label), output, input);
  return { row, input, output };
}
