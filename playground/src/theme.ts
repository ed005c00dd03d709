// Light, dark, or as the system has it. The documentation keeps its choice under the same key, so
// that a visitor chooses once.

const KEY = "theme";
const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

const system = window.matchMedia("(prefers-color-scheme: dark)");
const listeners: (() => void)[] = [];

function stored(): Theme {
  try {
    const found = localStorage.getItem(KEY) as Theme | null;
    return found && THEMES.includes(found) ? found : "auto";
  } catch {
    return "auto"; // storage can be forbidden
  }
}

function apply(theme: Theme, button: HTMLElement): void {
  document.body.dataset.theme = theme;
  button.textContent = `Theme: ${theme}`;
  for (const listener of listeners) listener();
}

export function startTheme(button: HTMLElement): void {
  let current = stored();
  apply(current, button);
  button.addEventListener("click", () => {
    current = THEMES[(THEMES.indexOf(current) + 1) % THEMES.length];
    try {
      localStorage.setItem(KEY, current);
    } catch {
      // storage can be forbidden; the choice then holds for this visit
    }
    apply(current, button);
  });
  system.addEventListener("change", () => apply(current, button));
}

export function isDark(): boolean {
  const theme = document.body.dataset.theme;
  return theme === "dark" || (theme !== "light" && system.matches);
}

/** Call a function whenever colours change. */
export function onTheme(listener: () => void): void {
  listeners.push(listener);
}
