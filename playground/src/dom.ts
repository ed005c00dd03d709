// Small helpers to make and find elements.

/** The element with an id, which must be there. */
export function byId<T extends Element = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no #${id}`);
  return found as unknown as T;
}

/** A new HTML element with attributes and children. */
export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Readonly<Record<string, string>> = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A new SVG element with attributes. */
export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Readonly<Record<string, string | number>> = {},
): SVGElementTagNameMap[K] {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAll(made, attributes);
  return made;
}

export function setAll(target: Element, attributes: Readonly<Record<string, string | number>>): void {
  for (const [name, value] of Object.entries(attributes)) target.setAttribute(name, String(value));
}

/** A paragraph that says what went wrong; screen readers read it at once. */
export function warning(text: string, kind = ""): HTMLParagraphElement {
  return element("p", { class: `${kind} error`.trim(), role: "alert" }, text);
}

export const percent = (share: number, digits = 1) => `${(100 * share).toFixed(digits)} %`;

/** A function that says a text to screen readers once nothing has changed for a moment. */
export function announcer(region: HTMLElement): (text: string) => void {
  let timer = 0;
  return (text) => {
    window.clearTimeout(timer);
    timer = window.setTimeout(() => {
      region.textContent = text;
    }, 500);
  };
}
