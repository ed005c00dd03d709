// Opens every page of the built documentation in Chromium and writes down what is wrong with it.
//
//     node site.mjs <address of the site> <file for the observations> <page> <page> ...
//
// It judges nothing: `tests/test_site.py` reads the observations.

import { writeFileSync } from "node:fs";
import { chromium } from "playwright-core";

const [address, target, ...pages] = process.argv.slice(2);
const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync",
];

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: FLAGS,
});
const seen = { console: [], foreign: [], pages: [] };

async function open(width, height) {
  const context = await browser.newContext({ viewport: { width, height } });
  await context.route("**/*", (route) => {
    const { origin } = new URL(route.request().url());
    if (origin === new URL(address).origin) return route.continue();
    seen.foreign.push(route.request().url());
    return route.abort();
  });
  const page = await context.newPage();
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) {
      seen.console.push(`${page.url()}: ${message.text()}`);
    }
  });
  page.on("pageerror", (error) => seen.console.push(`${page.url()}: ${error.message}`));
  return page;
}

/** Pictures without content, and what sticks out of the page and cannot be scrolled to. */
function look() {
  const width = document.documentElement.clientWidth;
  const scrolls = (element) =>
    element.tagName !== "ARTICLE" &&
    (["auto", "scroll"].includes(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
  const outside = [...document.querySelectorAll("article *")].filter(
    (element) => element.getBoundingClientRect().right > width + 1 && !scrolls(element.parentElement),
  );
  return {
    scrollWidth: document.documentElement.scrollWidth - width,
    outside: outside.map((element) => `${element.tagName}: ${element.textContent.slice(0, 60)}`),
    broken: [...document.images].filter((image) => image.naturalWidth === 0).map((image) => image.src),
    title: document.querySelector("h1")?.textContent ?? "",
  };
}

const phone = await open(390, 800);
for (const name of pages) {
  await phone.goto(address + name);
  seen.pages.push({ name, ...(await phone.evaluate(look)) });
}

// A visitor types a word into the search box.
const page = await open(1280, 900);
await page.goto(address + "index.html");
await page.fill("input[name=q]", "temperature");
await page.press("input[name=q]", "Enter");
await page.waitForSelector("ul.search li a");
await page.waitForFunction(() => /found|finished/i.test(document.querySelector(".search-summary")?.textContent ?? ""));
seen.found = await page.$$eval("ul.search li a", (links) => links.map((link) => link.textContent));

await browser.close();
writeFileSync(target, JSON.stringify(seen));
