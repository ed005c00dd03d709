// Chromium for the scripts of this folder.

import { writeFileSync } from "node:fs";
import { chromium } from "playwright-core";

const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];

/**
 * Run `use({ address, open, seen, words })` with Chromium, and write down what it saw.
 *
 * The command line has the address of the pages, the file for the observations, and the words.
 * `open(settings)` returns a page of a new context. Requests to any other host than that of the
 * address are blocked and written down, and so is what pages write to the console.
 */
export async function observe(use) {
  const [address, target, ...words] = process.argv.slice(2);
  const seen = { console: [], foreign: [] };
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: FLAGS,
  });

  async function open(settings) {
    const context = await browser.newContext(settings);
    await context.route("**/*", (route) => {
      const { origin } = new URL(route.request().url());
      if (origin === new URL(address).origin) return route.continue();
      seen.foreign.push(route.request().url());
      return route.abort();
    });
    const page = await context.newPage();
    page.on("console", (message) => seen.console.push(`${page.url()}: ${message.type()}: ${message.text()}`));
    page.on("pageerror", (error) => seen.console.push(`${page.url()}: error: ${error.message}`));
    return page;
  }

  try {
    await use({ address, open, seen, words });
    seen.finished = true;
  } finally {
    await browser.close();
    writeFileSync(target, JSON.stringify(seen));
  }
}
