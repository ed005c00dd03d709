// The drawing pad: mouse, touch and pen by pointer events, and a pen that the keyboard moves.

import { onTheme } from "../theme";
import type { Image, Point, Stroke } from "./strokes";
import { drawImage } from "./picture";

const SIZE = 280; // pixels of the canvas, before the screen's pixel ratio
const LINE_WIDTH = 0.075; // of the pad's side
const [STEP, LEAP] = [0.02, 0.1]; // of the keyboard's pen, as a share of the side
const CLOSEST = 0.004; // points nearer than this to the last one are not kept

export class Pad {
  private strokes: Point[][] = [];
  private example: Image | null = null;
  private isDown = false;
  private cursor: Point | null = null; // of the keyboard

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly changed: () => void,
  ) {
    const ratio = Math.max(1, window.devicePixelRatio);
    canvas.width = canvas.height = Math.round(SIZE * ratio);
    canvas.addEventListener("pointerdown", (event) => this.begin(event));
    canvas.addEventListener("pointermove", (event) => this.go(event));
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, () => this.lift());
    }
    canvas.addEventListener("keydown", (event) => this.press(event));
    canvas.addEventListener("blur", () => {
      this.lift();
      this.cursor = null;
      this.draw();
    });
    onTheme(() => this.draw());
  }

  /** Show strokes, or the pixels of an example, in place of what is there. */
  show(what: readonly Stroke[] | Image): void {
    this.lift();
    this.example = what instanceof Float64Array ? what : null;
    this.strokes = what instanceof Float64Array ? [] : what.map((stroke) => [...stroke]);
    this.update();
  }

  /** What is drawn: strokes, or the pixels of an example. */
  get content(): readonly Stroke[] | Image {
    return this.example ?? this.strokes;
  }

  undo(): void {
    this.lift();
    this.example = null;
    this.strokes.pop();
    this.update();
  }

  clear(): void {
    this.show([]);
  }

  private begin(event: PointerEvent): void {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.cursor = null;
    this.lower(this.place(event));
  }

  private go(event: PointerEvent): void {
    if (!this.isDown || this.cursor) return;
    const all = event.getCoalescedEvents?.() ?? [];
    for (const each of all.length ? all : [event]) this.add(this.place(each));
    this.update();
  }

  private lower(at: Point): void {
    this.example = null;
    this.isDown = true;
    this.strokes.push([at]);
    this.update();
  }

  private add([x, y]: Point): void {
    const stroke = this.strokes.at(-1)!;
    const [lastX, lastY] = stroke.at(-1)!;
    if (Math.hypot(x - lastX, y - lastY) >= CLOSEST) stroke.push([x, y]);
  }

  private lift(): void {
    this.isDown = false;
  }

  private press(event: KeyboardEvent): void {
    const directions: Record<string, Point> = {
      ArrowLeft: [-1, 0],
      ArrowRight: [1, 0],
      ArrowUp: [0, -1],
      ArrowDown: [0, 1],
    };
    const direction = directions[event.key];
    if (direction) this.moveCursor(direction, event.shiftKey ? LEAP : STEP);
    else if (event.key === " ") this.togglePen();
    else if (event.key === "Delete" || event.key === "Backspace") this.clear();
    else return;
    event.preventDefault();
  }

  private moveCursor([dx, dy]: Point, step: number): void {
    const [x, y] = this.cursor ?? [0.5, 0.5];
    const inside = (value: number) => Math.min(1, Math.max(0, value));
    this.cursor = [inside(x + step * dx), inside(y + step * dy)];
    if (this.isDown) {
      this.add(this.cursor);
      this.update();
    } else {
      this.draw();
    }
  }

  private togglePen(): void {
    this.cursor ??= [0.5, 0.5];
    if (this.isDown) this.lift();
    else this.lower(this.cursor);
    this.draw();
  }

  private place(event: PointerEvent): Point {
    const box = this.canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  private update(): void {
    this.draw();
    this.changed();
  }

  private draw(): void {
    const context = this.canvas.getContext("2d")!;
    const side = this.canvas.width;
    context.clearRect(0, 0, side, side);
    if (this.example) drawImage(context, this.example);
    context.strokeStyle = context.fillStyle = "#000"; // dark themes invert the canvas
    context.lineWidth = LINE_WIDTH * side;
    context.lineCap = context.lineJoin = "round";
    for (const stroke of this.strokes) {
      context.beginPath();
      stroke.forEach(([x, y]) => context.lineTo(x * side, y * side));
      if (stroke.length === 1) context.lineTo(stroke[0][0] * side, stroke[0][1] * side);
      context.stroke();
    }
    if (this.cursor) this.drawCursor(context, this.cursor);
  }

  private drawCursor(context: CanvasRenderingContext2D, [x, y]: Point): void {
    const side = this.canvas.width;
    context.lineWidth = side / 140;
    context.strokeStyle = this.isDown ? "#c85400" : "#0072b2";
    context.beginPath();
    context.arc(x * side, y * side, 0.03 * side, 0, 2 * Math.PI);
    context.stroke();
  }
}
