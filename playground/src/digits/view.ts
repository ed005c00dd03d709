// The view of digits: what is drawn is distorted, predicted and shown, at every change.

import { announcer, byId, element, percent, warning } from "../dom";
import { Latest } from "../latest";
import { AnswerTable, type Limits, NAMES, verdict } from "./answers";
import { Chart } from "./chart";
import { distort } from "./distort";
import drawings from "./drawings.json";
import { type Answer, decodeImage, each, type Info, loadFiles, METHODS, Model } from "./model";
import { Pad } from "./pad";
import { showImage } from "./picture";
import type { Sweep, SweepRequest } from "./rotations";
import { Sliders } from "./sliders";
import { type Image, render, type Stroke } from "./strokes";

const DRAWINGS = drawings as unknown as Readonly<Record<string, readonly Stroke[]>>;
const FIRST = "7"; // the drawing that is there at the start
const OTHERS: Readonly<Record<string, string>> = {
  A: "Letter A",
  star: "Star",
  heart: "Heart",
  spiral: "Spiral",
  scribble: "Scribble",
  question: "Question mark",
};
const USUAL_SHARE = 0.05;
const CHART_PAUSE = 150; // ms between two charts: bars come first

export async function startDigits(): Promise<void> {
  const files = await loadFiles();
  const model = await Model.start(files);
  const view = new DigitsView(model, files.info);
  view.attachSweeps((receive) => {
    const worker = new Worker(new URL("./sweep.worker.ts", import.meta.url), { type: "module" });
    worker.postMessage({ files } satisfies SweepRequest);
    const fail = (reason: string) => {
      byId("chart").replaceWith(
        warning(`The confidence at other rotations could not be computed: ${reason}`),
      );
    };
    return new Latest<SweepRequest, Sweep>(worker, receive, fail, CHART_PAUSE);
  });
  // For the console, and for the tests.
  Object.assign(window, {
    digits: {
      info: files.info,
      drawings: DRAWINGS,
      render,
      distort,
      predict: (images: readonly Image[]) => model.predict(images),
      view,
    },
  });
  await view.start();
}

class DigitsView {
  private readonly pad: Pad;
  private readonly sliders: Sliders;
  private readonly table: AnswerTable;
  private readonly chart: Chart;
  private readonly share = byId<HTMLSelectElement>("share");
  private readonly say = announcer(byId("digits-live"));
  private sweeps: Latest<SweepRequest, Sweep> | null = null;
  private upright: Image = render([]); // what is drawn, before the sliders
  private answer: Answer | null = null;
  private isPredicting = false;
  private isStale = false;
  /** The image that the bars are about, and how often they have been updated. */
  seen: Image = this.upright;
  updates = 0;

  /** Whether bars and chart are about what is drawn now. */
  get isIdle(): boolean {
    return !this.isPredicting && (this.sweeps?.isIdle ?? true);
  }

  constructor(
    private readonly model: Model,
    private readonly info: Info,
  ) {
    this.table = new AnswerTable(byId("answers"), info);
    this.fillShares();
    this.chart = new Chart(byId("chart"), byId("legend"), byId("chart-text"), this.limits);
    this.sliders = new Sliders(byId("sliders"), (name) => {
      void this.predict();
      if (name !== "rotation") this.sweep();
    });
    this.pad = new Pad(byId("pad"), () => this.redraw());
    byId("undo").addEventListener("click", () => this.pad.undo());
    byId("clear").addEventListener("click", () => this.pad.clear());
    byId("reset").addEventListener("click", () => {
      this.sliders.reset();
      this.redraw();
    });
    this.fillExamples();
    byId("about").textContent = about(info);
  }

  attachSweeps(start: (receive: (sweep: Sweep) => void) => Latest<SweepRequest, Sweep>): void {
    this.sweeps = start((sweep) => this.chart.show(sweep));
  }

  async start(): Promise<void> {
    this.pad.show(DRAWINGS[FIRST]);
    await this.predict();
    document.body.dataset.ready = "true";
  }

  private get limits(): Limits {
    const at = this.share.selectedIndex;
    return each((method) => this.info.thresholds[method][at]);
  }

  private redraw(): void {
    const content = this.pad.content;
    this.upright = content instanceof Float64Array ? content : render(content);
    void this.predict();
    this.sweep();
  }

  private sweep(): void {
    this.sweeps?.ask({ image: this.upright, distortion: this.sliders.values });
  }

  /** Predict what is there now; changes during a run lead to one more run. */
  private async predict(): Promise<void> {
    this.isStale = true;
    if (this.isPredicting) return;
    this.isPredicting = true;
    while (this.isStale) {
      this.isStale = false;
      this.seen = distort(this.upright, this.sliders.values);
      [this.answer] = await this.model.predict([this.seen]);
      this.show();
    }
    this.isPredicting = false;
  }

  private show(): void {
    if (!this.answer) return;
    const { answer, limits } = this;
    showImage(byId("seen"), this.seen);
    this.table.show(answer, limits);
    this.showRegret(answer.regret);
    const verdicts = each((method) => verdict(answer, method, limits[method]));
    this.chart.mark(this.sliders.values.rotation, each((method) => verdicts[method].confidence));
    const sentences = METHODS.map((method) => {
      const { digit, confidence, abstains } = verdicts[method];
      const said = digit < 0 ? "no answer" : `${digit}, ${percent(confidence)}`;
      return `${NAMES[method]}: ${said}${abstains ? ", abstains" : ""}.`;
    });
    if (!Number.isNaN(answer.regret)) sentences.push(`Regret ${answer.regret.toFixed(2)}.`);
    this.say(sentences.join(" "));
    this.updates += 1;
  }

  private showRegret(found: number): void {
    const meter = byId("regret");
    const largest = Math.log(10);
    const regret = Number.isNaN(found) ? largest : found; // no answer: as uncertain as can be
    meter.style.setProperty("--p", String(regret / largest));
    meter.style.setProperty("--limit", String(this.regretLimit / largest));
    meter.setAttribute("aria-valuenow", regret.toFixed(3));
    byId("regret-mark").title = `${this.share.selectedOptions[0].text} of ordinary digits lie above`;
    byId("regret-value").textContent = Number.isNaN(found) ? "–" : found.toFixed(3);
  }

  private get regretLimit(): number {
    return this.info.thresholds.regret[this.share.selectedIndex];
  }

  private fillShares(): void {
    for (const share of this.info.shares) {
      this.share.append(element("option", { value: String(share) }, percent(share, 0)));
    }
    this.share.value = String(USUAL_SHARE);
    this.share.addEventListener("change", () => {
      this.chart.setLimits(this.limits);
      this.show();
    });
  }

  private fillExamples(): void {
    const names = { type: "button", class: "example" };
    for (const { label, pixels } of this.info.examples) {
      const image = decodeImage(pixels);
      const picture = element("canvas", { width: "28", height: "28", "aria-hidden": "true" });
      showImage(picture, image);
      const button = element("button", { ...names, "aria-label": `Digit ${label}` }, picture);
      button.addEventListener("click", () => this.pad.show(image));
      byId("examples").append(button);
    }
    for (const [key, name] of Object.entries(OTHERS)) {
      const picture = element("canvas", { width: "28", height: "28", "aria-hidden": "true" });
      showImage(picture, render(DRAWINGS[key]));
      const button = element("button", { ...names, "aria-label": name, title: name }, picture);
      button.addEventListener("click", () => this.pad.show(DRAWINGS[key]));
      byId("others").append(button);
    }
  }
}

function about(info: Info): string {
  const count = info.images.train.toLocaleString("en");
  const copies = info.variants ? `, with ${info.variants} slightly distorted copies of each` : "";
  const undistorted = info.variants ? "" : "No distorted image was used. ";
  return (
    `A small convolutional network, trained on ${count} upright images of ${info.data}${copies}; ` +
    `accuracy on test images ${percent(info.accuracy)}. The temperature, α and all thresholds were ` +
    `chosen by acnml.calibrate on ${info.images.validation.toLocaleString("en")} held-out upright ` +
    `images, at a price of ${info.price} nats. ${undistorted}Everything runs in ` +
    "this page; nothing that you draw leaves it."
  );
}
