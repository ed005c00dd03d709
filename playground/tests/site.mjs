// Opens every page of the built documentation in Chromium and writes down what is wrong with it.
//
//     node site.mjs <address of the site> <file for the observations> <page> <page> ...
//
// It judges nothing: `tests/site/test_site.py` reads the observations.

import { observe } from "./browser.mjs";

/** Pictures without content, and what sticks out of the page and cannot be scrolled to. */
async function look() {
  const width = document.documentElement.clientWidth;
  const scrolls = (element) =>
    element.tagName !== "ARTICLE" &&
    (["auto", "scroll"].includes(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
  const outside = [...document.querySelectorAll("article *")].filter(
    (element) => element.getBoundingClientRect().right > width + 1 && !scrolls(element.parentElement),
  );
  // Pictures of the gallery are loaded when they come into view.
  const pictures = [...document.images];
  for (const image of pictures) image.loading = "eager";
  await Promise.all(pictures.map((image) => image.decode().catch(() => {})));
  return {
    scrollWidth: document.documentElement.scrollWidth - width,
    outside: outside.map((element) => `${element.tagName}: ${element.textContent.slice(0, 60)}`),
    broken: pictures.filter((image) => image.naturalWidth === 0).map((image) => image.src),
    title: document.querySelector("h1")?.textContent ?? "",
  };
}

/** The titles that a visitor sees who types a word into the search box. */
async function search(page, word) {
  await page.fill("input[name=q]", word);
  await page.press("input[name=q]", "Enter");
  await page.waitForSelector("ul.search li a");
  await page.waitForFunction(() => /found|finished/i.test(document.querySelector(".search-summary")?.textContent ?? ""));
  return page.$$eval("ul.search li a", (links) => links.map((link) => link.textContent));
}

await observe(async ({ address, open, seen, words: names }) => {
  const phone = await open({ viewport: { width: 390, height: 800 } });
  seen.pages = [];
  for (const name of names) {
    await phone.goto(address + name);
    seen.pages.push({ name, ...(await phone.evaluate(look)) });
  }
  const page = await open({ viewport: { width: 1280, height: 900 } });
  await page.goto(address + "index.html");
  seen.found = await search(page, "temperature");
});
