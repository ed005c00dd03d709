// Confidence against rotation: a line for each method, solid where it answers, dotted where it
// abstains, and a marker at the angle of the slider.

import { element, percent, setAll, svg } from "../dom";
import { type Limits, NAMES } from "./answers";
import { each, METHODS, type Method } from "./model";
import { ANGLES, limits as limitAngles, type Sweep } from "./rotations";

// As wide as the page shows it, so that text is not shrunk on a phone.
const WIDTH = Math.min(640, Math.max(340, document.documentElement.clientWidth - 32));
const HEIGHT = 250;
const FRAME = { left: 44, right: 12, top: 10, bottom: 30 };

const x = (angle: number) =>
  FRAME.left + ((angle + 180) / 360) * (WIDTH - FRAME.left - FRAME.right);
const y = (confidence: number) =>
  FRAME.top + (1 - confidence) * (HEIGHT - FRAME.top - FRAME.bottom);

interface Line {
  readonly all: SVGPathElement; // the whole line, dotted
  readonly answered: SVGPathElement; // the parts above the limit
  readonly limit: SVGLineElement;
  readonly dot: SVGCircleElement;
  readonly ends: SVGPathElement; // where the method begins to abstain
  readonly text: HTMLElement;
}

export class Chart {
  private readonly lines: Readonly<Record<Method, Line>>;
  private readonly marker = svg("line", { class: "marker", y1: FRAME.top, y2: y(0) });
  private sweep: Sweep | null = null;
  private rotation = 0;

  constructor(
    picture: SVGSVGElement,
    legend: HTMLElement,
    private readonly description: HTMLElement,
    private limits: Limits,
  ) {
    setAll(picture, { viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
    picture.append(...axes(), this.marker);
    this.lines = each(makeLine);
    for (const method of METHODS) {
      const { all, answered, limit, dot, ends, text } = this.lines[method];
      picture.append(limit, all, answered, ends, dot);
      const swatch = element("span", { class: "dot", "aria-hidden": "true" });
      legend.append(element("li", { class: method }, swatch, NAMES[method], text));
    }
  }

  show(sweep: Sweep): void {
    this.sweep = sweep;
    this.draw();
  }

  setLimits(limits: Limits): void {
    this.limits = limits;
    this.draw();
  }

  /** Move the marker; the dots show the confidences that the bars show. */
  mark(rotation: number, confidences: Readonly<Record<Method, number>>): void {
    this.rotation = rotation;
    setAll(this.marker, { x1: x(rotation), x2: x(rotation) });
    for (const method of METHODS) {
      const confidence = confidences[method];
      const { dot } = this.lines[method];
      dot.style.display = Number.isNaN(confidence) ? "none" : "";
      if (Number.isNaN(confidence)) continue;
      setAll(dot, { cx: x(this.rotation), cy: y(confidence) });
    }
  }

  private draw(): void {
    if (!this.sweep) return;
    const sentences = METHODS.map((method) => {
      const { all, answered, limit, ends, text } = this.lines[method];
      const [confidences, least] = [this.sweep![method], this.limits[method]];
      all.setAttribute("d", path(confidences));
      answered.setAttribute("d", partsAbove(confidences, least));
      setAll(limit, { y1: y(least), y2: y(least) });
      const { left, right } = limitAngles(confidences, least);
      const places = [left, right].filter((angle) => angle !== null);
      ends.setAttribute("d", places.map((angle) => tick(angle, least)).join(""));
      const where = sentence(left, right);
      text.textContent = ` below ${percent(least)}: ${where}`;
      return `${NAMES[method]} abstains below ${percent(least)} confidence, ${where}.`;
    });
    this.description.textContent = `Confidence against rotation. ${sentences.join(" ")}`;
  }
}

function sentence(left: number | null, right: number | null): string {
  if (left === null && right === null) return "at no rotation";
  if (left === 0 || right === 0) return "already upright";
  const degrees = (angle: number) => `${angle < 0 ? "−" : "+"}${Math.abs(angle).toFixed(0)}°`;
  return `from ${[left, right].filter((angle) => angle !== null).map(degrees).join(" and ")}`;
}

function makeLine(method: Method): Line {
  return {
    all: svg("path", { class: `line abstained ${method}` }),
    answered: svg("path", { class: `line ${method}` }),
    limit: svg("line", { class: `limit ${method}`, x1: x(-180), x2: x(180) }),
    dot: svg("circle", { class: `now ${method}`, r: 5 }),
    ends: svg("path", { class: `end ${method}` }),
    text: element("span", { class: "where" }),
  };
}

/** The whole line, with gaps where there is no answer (NaN). */
function path(confidences: readonly number[]): string {
  const place = (i: number) => `${x(ANGLES[i]).toFixed(1)} ${y(confidences[i]).toFixed(1)}`;
  return confidences
    .map((confidence, i) => {
      if (Number.isNaN(confidence)) return "";
      const goesOn = i > 0 && !Number.isNaN(confidences[i - 1]);
      return `${goesOn ? "L" : "M"}${place(i)}`;
    })
    .join("");
}

const tick = (angle: number, confidence: number) =>
  `M${x(angle).toFixed(1)} ${(y(confidence) - 6).toFixed(1)}v12`;

/** The pieces of the line at and above a limit, cut where it crosses. */
function partsAbove(confidences: readonly number[], limit: number): string {
  let pieces = "";
  for (let i = 1; i < confidences.length; i++) {
    const [before, after] = [confidences[i - 1], confidences[i]];
    if (Number.isNaN(before + after) || (before < limit && after < limit)) continue;
    const crossing = (limit - before) / (after - before);
    const from = before >= limit ? 0 : crossing;
    const to = after >= limit ? 1 : crossing;
    const at = (share: number) => {
      const angle = ANGLES[i - 1] + share * (ANGLES[i] - ANGLES[i - 1]);
      return `${x(angle).toFixed(1)} ${y(before + share * (after - before)).toFixed(1)}`;
    };
    const goesOn = from === 0 && i > 1 && confidences[i - 2] >= limit;
    pieces += `${goesOn ? "L" : "M"}${at(from)}L${at(to)}`;
  }
  return pieces;
}

function axes(): SVGElement[] {
  const made: SVGElement[] = [];
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    made.push(svg("line", { class: "grid", x1: x(-180), x2: x(180), y1: y(share), y2: y(share) }));
    made.push(label(FRAME.left - 8, y(share) + 4, "end", percent(share, 0)));
  }
  for (const angle of [-180, -90, 0, 90, 180]) {
    const anchor = angle === 180 ? "end" : angle === -180 ? "start" : "middle";
    made.push(label(x(angle), HEIGHT - 8, anchor, `${angle < 0 ? "−" : ""}${Math.abs(angle)}°`));
  }
  return made;
}

function label(atX: number, atY: number, anchor: string, text: string): SVGTextElement {
  const made = svg("text", { x: atX, y: atY, "text-anchor": anchor });
  made.textContent = text;
  return made;
}
