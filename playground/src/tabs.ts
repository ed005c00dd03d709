// Two tabs: arrow keys move between them, and the address keeps the choice.

const tabs = [...document.querySelectorAll<HTMLElement>('[role="tab"]')];
const panelOf = (tab: HTMLElement) =>
  document.getElementById(tab.getAttribute("aria-controls")!) as HTMLElement;

function choose(chosen: HTMLElement): void {
  for (const tab of tabs) {
    const isChosen = tab === chosen;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
    panelOf(tab).hidden = !isChosen;
  }
}

export function startTabs(): void {
  const named = () => tabs.find((tab) => `#${panelOf(tab).id}` === location.hash);
  choose(named() ?? tabs[0]);
  window.addEventListener("hashchange", () => {
    const tab = named();
    if (tab) choose(tab);
  });
  tabs.forEach((tab, i) => {
    const go = (to: HTMLElement) => {
      choose(to);
      history.replaceState(null, "", `#${panelOf(to).id}`);
    };
    tab.addEventListener("click", () => go(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(i + step + tabs.length) % tabs.length];
      go(next);
      next.focus();
    });
  });
}
