// The table of answers: a column for each method, a row for each digit.

import { element, percent } from "../dom";
import { type Answer, CLASSES, each, type Info, METHODS, type Method } from "./model";

export const NAMES: Readonly<Record<Method, string>> = {
  network: "Network",
  temperature: "Temperature",
  closed: "Closed form",
  acnml: "ACNML",
};

/** What a method says about an image. */
export interface Verdict {
  readonly digit: number;
  readonly confidence: number;
  readonly abstains: boolean;
}

export type Limits = Readonly<Record<Method, number>>;

export function verdict(answer: Answer, method: Method, limit: number): Verdict {
  const probabilities = answer.probabilities[method];
  const confidence = Math.max(...probabilities);
  // A comparison with NaN is false: an image without an answer is one to abstain on.
  return { digit: probabilities.indexOf(confidence), confidence, abstains: !(confidence >= limit) };
}

interface Column {
  readonly head: HTMLElement;
  readonly digit: HTMLElement;
  readonly confidence: HTMLElement;
  readonly decision: HTMLElement;
  readonly cells: readonly { readonly cell: HTMLElement; readonly value: HTMLElement }[];
}

export class AnswerTable {
  private readonly columns: Readonly<Record<Method, Column>>;

  constructor(table: HTMLTableElement, info: Info) {
    const notes: Readonly<Record<Method, string>> = {
      network: "as trained",
      temperature: `of equal price, T = ${info.temperatureOfEqualPrice.toFixed(2)}`,
      closed: `NML, α = ${Number(info.alphaOfClosedForm.toPrecision(2))}`,
      acnml: `α = ${Number(info.alpha.toPrecision(2))}`,
    };
    this.columns = each((method) => makeColumn(method, notes[method]));
    const columns = METHODS.map((method) => this.columns[method]);
    const rows = Array.from({ length: CLASSES }, (_, digit) =>
      element(
        "tr",
        {},
        element("th", { scope: "row" }, String(digit)),
        ...columns.map((column) => column.cells[digit].cell),
      ),
    );
    const corner = element("th", { scope: "col" }, element("span", { class: "unseen" }, "Digit"));
    const says = element("th", { scope: "row" }, element("span", { class: "unseen" }, "Answer"));
    table.append(
      element("thead", {}, element("tr", {}, corner, ...columns.map((column) => column.head))),
      element(
        "tbody",
        {},
        element(
          "tr",
          { class: "verdicts" },
          says,
          ...columns.map((c) =>
            element("td", {}, c.digit, element("span", { class: "says" }, c.confidence, c.decision)),
          ),
        ),
        ...rows,
      ),
    );
  }

  show(answer: Answer, limits: Limits): void {
    for (const method of METHODS) {
      const column = this.columns[method];
      const { digit, confidence, abstains } = verdict(answer, method, limits[method]);
      column.digit.textContent = digit < 0 ? "–" : String(digit);
      column.confidence.textContent = Number.isNaN(confidence) ? "no answer" : percent(confidence);
      column.decision.textContent = abstains ? "abstains" : "answers";
      column.decision.dataset.abstains = String(abstains);
      column.cells.forEach(({ cell, value }, label) => {
        const probability = answer.probabilities[method][label];
        const share = Number.isNaN(probability) ? "0" : probability.toFixed(4);
        const text = Number.isNaN(probability) ? "–" : percent(probability);
        const likeliest = String(label === digit);
        // Most cells stay as they are while a slider moves, and a change costs layout and paint.
        if (cell.style.getPropertyValue("--p") !== share) cell.style.setProperty("--p", share);
        if (cell.dataset.likeliest !== likeliest) cell.dataset.likeliest = likeliest;
        if (value.textContent !== text) value.textContent = text;
      });
    }
  }
}

function makeColumn(method: Method, note: string): Column {
  return {
    head: element(
      "th",
      { scope: "col", class: method },
      element("span", { class: "dot", "aria-hidden": "true" }),
      NAMES[method],
      element("small", {}, note),
    ),
    digit: element("span", { class: "digit" }, "–"),
    confidence: element("span", { class: "confidence", "data-method": method }),
    decision: element("span", { class: "decision", "data-method": method }),
    cells: Array.from({ length: CLASSES }, (_, label) => {
      const value = element("span", { class: "value" });
      const bar = element("span", { class: "bar", "aria-hidden": "true" });
      const names = { class: method, "data-method": method, "data-label": String(label) };
      return { cell: element("td", names, bar, value), value };
    }),
  };
}
