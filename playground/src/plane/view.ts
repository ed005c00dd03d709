// The view of the plane: three pictures of the same points, dragged, added and removed in any.

import { announcer, byId, element, percent, warning } from "../dom";
import { Latest } from "../latest";
import { onTheme } from "../theme";
import { type Judgement, Logistic, type Sample } from "./logistic";
import { Picture } from "./picture";
import { PRESETS } from "./presets";
import { EXTENT, type Panel, PANELS, type SurfaceRequest, type Surfaces } from "./surfaces";

const NAMES: Readonly<Record<Panel, readonly [name: string, description: string]>> = {
  plain: ["Plain", "the trained model"],
  acnml: ["ACNML", "a Gaussian for the training points"],
  cnml: ["CNML", "a refit for every label"],
};
const TOOLS = {
  blue: "adds blue",
  orange: "adds orange",
  query: "moves ◇",
  remove: "removes",
} as const;
type Tool = keyof typeof TOOLS;

const CLASS_NAMES = ["Blue", "Orange"] as const;
const REACH = { mouse: 0.35, finger: 0.5 }; // how far from a mark a pointer still takes it
const [STEP, LEAP] = [0.1, 0.5]; // of the arrow keys
const MOST_POINTS = 80;

interface Place {
  readonly x: number;
  readonly y: number;
}

export function startPlane(): void {
  const view = new PlaneView();
  Object.assign(window, {
    plane: {
      judge: (samples: readonly Sample[], penalty: number, queries: readonly Place[]) => {
        const logistic = new Logistic(samples, penalty);
        return queries.map(({ x, y }) => logistic.judge(x, y));
      },
      view,
    },
  });
}

class PlaneView {
  samples: Sample[] = [...PRESETS.Apart];
  query: Place = { x: 3.6, y: -4.6 };
  private chosen = 0; // the mark that the keyboard moves; the query comes after all points
  private dragged: number | null = null;
  private wasDragged = false; // whether the last press was on a mark
  private readonly pictures: Readonly<Record<Panel, Picture>>;
  private readonly surfaces: Latest<SurfaceRequest, Surfaces>;
  private readonly say = announcer(byId("plane-live"));
  private readonly penaltyInput = byId<HTMLInputElement>("penalty");

  constructor() {
    this.pictures = Object.fromEntries(
      PANELS.map((panel) => [panel, new Picture(...NAMES[panel])]),
    ) as Record<Panel, Picture>;
    const worker = new Worker(new URL("./surface.worker.ts", import.meta.url), { type: "module" });
    this.surfaces = new Latest(
      worker,
      (found) => {
        for (const panel of PANELS) this.pictures[panel].show(found[panel]);
      },
      (reason) => byId("panels").before(warning(`The maps could not be computed: ${reason}`)),
    );
    for (const panel of PANELS) {
      const { figure, overlay } = this.pictures[panel];
      byId("panels").append(figure);
      this.listen(overlay);
    }
    this.makeKeyboard(this.pictures.plain.overlay);
    for (const panel of PANELS.slice(1)) {
      this.pictures[panel].overlay.setAttribute("aria-hidden", "true");
    }
    this.fillTools();
    this.fillPresets();
    this.penaltyInput.addEventListener("input", () => this.update());
    onTheme(() => PANELS.forEach((panel) => this.pictures[panel].draw()));
    this.update();
  }

  /** Whether the surfaces are about the points that are there now. */
  get isIdle(): boolean {
    return this.surfaces.isIdle;
  }

  get penalty(): number {
    return 10 ** Number(this.penaltyInput.value);
  }

  private get tool(): Tool {
    return document.querySelector<HTMLInputElement>('input[name="tool"]:checked')!.value as Tool;
  }

  private update(): void {
    for (const panel of PANELS) this.pictures[panel].place(this.samples, this.query);
    this.chosen = Math.min(this.chosen, this.samples.length);
    this.nameMarks();
    const text = this.penalty.toPrecision(2);
    byId("penalty-value").textContent = text;
    this.penaltyInput.setAttribute("aria-valuetext", text);
    this.surfaces.ask({ samples: this.samples, penalty: this.penalty });
    this.showQuery();
  }

  private showQuery(): void {
    const { x, y } = this.query;
    const found = new Logistic(this.samples, this.penalty).judge(x, y);
    byId("query-caption").textContent = `At the query ◇ (${coordinates(this.query)})`;
    byId("query-table").replaceChildren(byId("query-caption"), ...queryRows(found));
    const text = PANELS.map((panel) => `${NAMES[panel][0]} ${percent(found[panel])}`).join(", ");
    this.say(`Probability of orange at the query: ${text}.`);
  }

  private listen(overlay: SVGSVGElement): void {
    // Marks are dragged. Free places are clicked, so that a finger can scroll over them.
    overlay.addEventListener("pointerdown", (event) => {
      const found = this.nearest(place(overlay, event), event.pointerType);
      this.dragged = this.tool === "remove" || event.button !== 0 ? null : found;
      this.wasDragged = this.dragged !== null;
      if (this.wasDragged) overlay.setPointerCapture(event.pointerId);
    });
    // A touch that begins on a mark drags it and does not scroll.
    const hold = (event: TouchEvent) => {
      const isOnMark = this.nearest(place(overlay, event.changedTouches[0]), "touch") !== null;
      if (isOnMark && this.tool !== "remove") event.preventDefault();
    };
    overlay.addEventListener("touchstart", hold, { passive: false });
    overlay.addEventListener("pointermove", (event) => {
      if (this.dragged !== null) this.move(this.dragged, place(overlay, event));
    });
    for (const end of ["pointerup", "pointercancel"]) {
      overlay.addEventListener(end, () => {
        this.dragged = null;
      });
    }
    overlay.addEventListener("click", (event) => {
      if (!this.wasDragged) this.click(place(overlay, event), (event as PointerEvent).pointerType);
    });
  }

  private click(at: Place, pointer: string): void {
    const found = this.nearest(at, pointer);
    if (this.tool === "query") this.move(this.samples.length, at);
    else if (this.tool !== "remove") this.add(at, this.tool === "blue" ? 0 : 1);
    else if (found !== null) this.remove(found);
  }

  private add(at: Place, label: 0 | 1): number | null {
    if (this.samples.length >= MOST_POINTS) {
      this.say(`There can be at most ${MOST_POINTS} points.`);
      return null;
    }
    this.samples.push({ ...at, label });
    this.update();
    return this.samples.length - 1;
  }

  private nearest(at: Place, pointer: string): number | null {
    const all = [...this.samples, this.query];
    const gaps = all.map(({ x, y }) => Math.hypot(x - at.x, y - at.y));
    const closest = Math.min(...gaps);
    return closest < (pointer === "touch" ? REACH.finger : REACH.mouse) ? gaps.indexOf(closest) : null;
  }

  private move(index: number, to: Place): void {
    const inside = (value: number) => Math.min(EXTENT, Math.max(-EXTENT, value));
    const at = { x: inside(to.x), y: inside(to.y) };
    if (index >= this.samples.length) this.query = at;
    else this.samples[index] = { ...this.samples[index], ...at };
    this.update();
  }

  private remove(index: number): void {
    if (index >= this.samples.length) return; // the query stays
    this.samples.splice(index, 1);
    this.update();
  }

  /** Make the marks of a picture reachable: one of them is in the order of Tab at a time. */
  private makeKeyboard(overlay: SVGSVGElement): void {
    overlay.setAttribute("role", "application");
    overlay.setAttribute("aria-label", "Points of two classes and a query");
    overlay.setAttribute("aria-describedby", "plane-help");
    overlay.addEventListener("keydown", (event) => {
      if (this.press(event)) event.preventDefault();
    });
    overlay.addEventListener("focusin", (event) => {
      const all = this.samples.length + 1;
      const marks = Array.from({ length: all }, (_, i) => this.pictures.plain.mark(i));
      this.chosen = Math.max(0, marks.indexOf(event.target as SVGGElement));
      this.nameMarks();
    });
  }

  /** Do what a key says; return whether it says something. */
  private press(event: KeyboardEvent): boolean {
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    const length = event.shiftKey ? LEAP : STEP;
    const arrows: Record<string, Place> = {
      ArrowLeft: { x: -length, y: 0 },
      ArrowRight: { x: length, y: 0 },
      ArrowUp: { x: 0, y: length },
      ArrowDown: { x: 0, y: -length },
    };
    const all = this.samples.length + 1;
    const here = this.samples[this.chosen] ?? this.query;
    const arrow = arrows[event.key];
    const key = event.key.toLowerCase();
    if (arrow) this.move(this.chosen, { x: here.x + arrow.x, y: here.y + arrow.y });
    else if (key === "n") this.choose((this.chosen + 1) % all);
    else if (key === "p") this.choose((this.chosen + all - 1) % all);
    else if (key === " ") this.changeClass(this.chosen);
    else if (key === "delete" || key === "backspace") this.removeChosen();
    else if (key === "b" || key === "o") this.addBeside(here, key === "b" ? 0 : 1);
    else return false;
    return true;
  }

  private choose(index: number): void {
    this.chosen = index;
    this.nameMarks();
    this.pictures.plain.mark(index).focus();
  }

  private changeClass(index: number): void {
    const sample = this.samples[index];
    if (!sample) return;
    this.samples[index] = { ...sample, label: sample.label ? 0 : 1 };
    this.update();
  }

  private removeChosen(): void {
    if (this.chosen >= this.samples.length) return;
    this.remove(this.chosen);
    this.choose(this.chosen);
  }

  private addBeside({ x, y }: Place, label: 0 | 1): void {
    const index = this.add({ x: x > 0 ? x - LEAP : x + LEAP, y }, label);
    if (index !== null) this.choose(index);
  }

  private nameMarks(): void {
    const all = [...this.samples, this.query];
    all.forEach((at, i) => {
      const mark = this.pictures.plain.mark(i);
      const kind = i < this.samples.length ? `${CLASS_NAMES[this.samples[i].label]} point` : "Query";
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", `${kind} at ${coordinates(at)}`);
      mark.setAttribute("tabindex", i === this.chosen ? "0" : "-1");
    });
  }

  private fillTools(): void {
    for (const [tool, text] of Object.entries(TOOLS)) {
      const radio = element("input", { type: "radio", name: "tool", value: tool });
      radio.checked = tool === "orange";
      byId("tools").append(element("label", { class: "chip" }, radio, text));
    }
  }

  private fillPresets(): void {
    for (const [name, samples] of Object.entries(PRESETS)) {
      const button = element("button", { type: "button" }, name);
      button.addEventListener("click", () => {
        this.samples = [...samples];
        this.update();
      });
      byId("presets").append(button);
    }
  }
}

function queryRows(found: Judgement): HTMLElement[] {
  const heads = ["Method", "Blue", "Orange", "Regret"];
  const regrets: Readonly<Record<Panel, string>> = {
    plain: "",
    acnml: found.acnmlRegret.toFixed(3),
    cnml: found.cnmlRegret.toFixed(3),
  };
  const rows = PANELS.map((panel) =>
    element(
      "tr",
      { "data-panel": panel },
      element("th", { scope: "row" }, NAMES[panel][0]),
      ...[percent(1 - found[panel]), percent(found[panel]), regrets[panel]].map((text) =>
        element("td", {}, text),
      ),
    ),
  );
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  return [element("thead", {}, head), element("tbody", {}, ...rows)];
}

function coordinates({ x, y }: Place): string {
  return `${x.toFixed(1)}, ${y.toFixed(1)}`.replaceAll("-", "−");
}

function place(
  overlay: SVGSVGElement,
  event: { readonly clientX: number; readonly clientY: number },
): Place {
  const box = overlay.getBoundingClientRect();
  const share = (offset: number, size: number) => EXTENT * ((2 * offset) / size - 1);
  return {
    x: share(event.clientX - box.left, box.width),
    y: -share(event.clientY - box.top, box.height),
  };
}
