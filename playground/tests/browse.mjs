// Uses the built page in Chromium as a visitor would, and writes down what it saw.
//
//     node browse.mjs <address of the page> <file for the observations>
//
// It judges nothing: `tests/site/test_playground.py` reads the observations and compares them with
// Python.

import { observe } from "./browser.mjs";

let seen; // the observations
let visit; // opens a page in a context of its own

/** Open the page in a new context and wait until the model answers. */
async function open(settings, hash = "") {
  const page = await visit({ viewport: { width: 1280, height: 1000 }, ...settings }, hash);
  await page.waitForSelector("body[data-ready]", { state: "attached" });
  return page;
}

/** What the bars say, once they are about what is drawn now. */
async function bars(page) {
  await settled(page, "digits");
  return page.evaluate(() => {
    const read = (method) =>
      [...document.querySelectorAll(`td[data-method=${method}]`)].map((cell) => ({
        width: Number(cell.style.getPropertyValue("--p")),
        text: cell.textContent,
      }));
    const text = (kind, method) =>
      document.querySelector(`.${kind}[data-method=${method}]`).textContent;
    const methods = ["network", "temperature", "closed", "acnml"];
    const each = (f) => Object.fromEntries(methods.map((method) => [method, f(method)]));
    return {
      bars: each(read),
      confidence: each((method) => text("confidence", method)),
      decision: each((method) => text("decision", method)),
      regret: Number(document.getElementById("regret").getAttribute("aria-valuenow")),
      pixels: Array.from(window.digits.view.seen),
    };
  });
}

/** Wait until a view shows what is there now. */
async function settled(page, view) {
  await page.waitForFunction((name) => window[name].view.isIdle, view);
}

/** Wait until the text for screen readers is about the image of the bars, and return it. */
async function spoken(page, confidence) {
  const live = page.locator("#digits-live").filter({ hasText: `ACNML: ` }).filter({ hasText: confidence });
  await live.waitFor({ state: "attached" });
  return live.textContent();
}

async function draw(page, strokes) {
  const box = await page.locator("#pad").boundingBox();
  for (const stroke of strokes) {
    const places = stroke.map(([x, y]) => [box.x + x * box.width, box.y + y * box.height]);
    await page.mouse.move(...places[0]);
    await page.mouse.down();
    for (const place of places.slice(1)) await page.mouse.move(...place);
    await page.mouse.up();
  }
}

const turn = (page, degrees) => page.locator("#slide-rotation").fill(String(degrees));

async function useDigits() {
  const page = await open({});
  seen.requests = await page.evaluate(() =>
    [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")].map(
      (entry) => ({ name: entry.name, bytes: entry.encodedBodySize }),
    ),
  );
  const drawings = await page.evaluate(() => window.digits.drawings);

  await page.click("#clear");
  seen.empty = await bars(page);
  await draw(page, drawings["7"]);
  seen.seven = await bars(page);
  seen.turned = [];
  for (const degrees of [30, 45, 60, 75, 90, 105, -60, -75, -90]) {
    await turn(page, degrees);
    seen.turned.push({ degrees, ...(await bars(page)) });
  }
  await page.waitForFunction(() => document.querySelector(".line.acnml").getAttribute("d"));
  seen.chart = await page.evaluate(() => document.getElementById("chart-text").textContent);
  await page.click("#reset");
  await page.click("#clear");
  await draw(page, drawings["3"]);
  seen.three = await bars(page);
  await page.getByRole("button", { name: "Letter A" }).click();
  seen.letter = await bars(page);
  for (const name of ["scale", "right", "down", "blur", "noise"]) {
    await page.locator(`#slide-${name}`).fill({ scale: "0.7", noise: "0.3" }[name] ?? "2");
  }
  await page.getByRole("button", { name: "Digit 4" }).click();
  seen.example = await bars(page);
  seen.live = await spoken(page, seen.example.confidence.acnml);
  await page.locator("#share").selectOption("0.2");
  seen.stricter = await bars(page);

  seen.images = await page.evaluate(imagesOf, HOW);
  seen.speed = await measured(page, 400);
  await page.context().close();
}

// Distortions that the images of all drawings are compared at.
const HOW = [
  { rotation: 0, scale: 1, right: 0, down: 0, blur: 0, noise: 0 },
  { rotation: 37, scale: 1, right: 0, down: 0, blur: 0, noise: 0 },
  { rotation: -110, scale: 0.6, right: 3.3, down: -2.7, blur: 0, noise: 0 },
  { rotation: 90, scale: 1.5, right: -9, down: 8.5, blur: 1.35, noise: 0.25 },
];

async function imagesOf(how) {
  const { digits } = window;
  const rows = [];
  for (const [name, strokes] of Object.entries(digits.drawings)) {
    const upright = digits.render(strokes);
    const images = how.map((each) => digits.distort(upright, each));
    const answers = await digits.predict(images);
    images.forEach((image, i) => {
      const probabilities = Object.fromEntries(
        Object.entries(answers[i].probabilities).map(([method, p]) => [method, Array.from(p)]),
      );
      const { regret } = answers[i];
      rows.push({ name, distortion: how[i], pixels: Array.from(image), probabilities, regret });
    });
  }
  return rows;
}

/** Milliseconds of slider movements, and what the page's thread computed for one on average. */
async function measured(page, movements) {
  const client = await page.context().newCDPSession(page);
  await client.send("Performance.enable", { timeDomain: "threadTicks" });
  const busy = async () => {
    const { metrics } = await client.send("Performance.getMetrics");
    return 1000 * metrics.find(({ name }) => name === "TaskDuration").value;
  };
  const before = await busy();
  const times = await page.evaluate(slide, movements);
  return { times, computing: ((await busy()) - before) / movements };
}

/** Move all sliders in turn; measure from each input event until all bars are updated. */
async function slide(movements) {
  const { view } = window.digits;
  const sliders = [...document.querySelectorAll("#sliders input")];
  const times = [];
  for (let i = 0; i < movements; i++) {
    const slider = sliders[i % sliders.length];
    const [low, high] = [Number(slider.min), Number(slider.max)];
    slider.value = String(low + (high - low) * ((i * 0.618) % 1));
    const before = view.updates;
    const start = performance.now();
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    while (view.updates === before) await null;
    times.push(performance.now() - start);
    await new Promise(requestAnimationFrame); // as a hand does: one movement a frame
  }
  return times;
}

async function useKeyboard() {
  const page = await open({});
  await page.click("#clear");
  seen.keyboard = { order: [] };
  await page.locator("#pad").focus();
  // To clear while the pen is down lifts it.
  for (const key of ["Space", "Delete", "ArrowRight", "ArrowLeft"]) await page.keyboard.press(key);
  // A line from the top to the bottom: a one.
  for (let i = 0; i < 4; i++) await page.keyboard.press("Shift+ArrowUp");
  await page.keyboard.press("Space");
  for (let i = 0; i < 7; i++) await page.keyboard.press("Shift+ArrowDown");
  await page.keyboard.press("Space");
  seen.keyboard.line = await bars(page);
  await page.locator("#slide-rotation").focus();
  for (let i = 0; i < 20; i++) await page.keyboard.press("ArrowRight");
  seen.keyboard.turned = await bars(page);
  seen.keyboard.rotation = await page.locator("#slide-rotation").getAttribute("aria-valuetext");
  await page.evaluate(() => document.activeElement.blur());
  await page.locator(".skip").focus();
  for (let i = 0; i < 40; i++) {
    seen.keyboard.order.push(await page.evaluate(focused));
    await page.keyboard.press("Tab");
  }
  seen.unnamed = await page.evaluate(unnamedControls);
  await page.locator("#tab-digits").focus();
  await page.keyboard.press("ArrowRight");
  seen.keyboard.plane = await page.locator("#plane").isVisible();
  await page.context().close();
}

/** The focused element, and whether the focus can be seen. */
function focused() {
  const element = document.activeElement;
  const { outlineStyle, outlineWidth } = getComputedStyle(element);
  const isVisible = outlineStyle !== "none" && parseFloat(outlineWidth) > 0;
  return { element: element.id || element.getAttribute("aria-label") || element.className, isVisible };
}

/** Controls without a name for screen readers. */
function unnamedControls() {
  const controls = document.querySelectorAll("button, input, select, canvas[tabindex], [role=tab]");
  const named = (control) =>
    control.getAttribute("aria-label") ||
    document.getElementById(control.getAttribute("aria-labelledby"))?.textContent ||
    [...(control.labels ?? [])].map((label) => label.textContent).join("") ||
    (control.tagName === "BUTTON" && control.textContent.trim());
  return [...controls].filter((control) => !named(control)).map((control) => control.outerHTML);
}

/** The box of an element; a picture that is drawn again has none for a moment. */
async function boxOf(locator) {
  for (;;) {
    await locator.waitFor();
    const box = await locator.boundingBox();
    if (box) return box;
  }
}

async function touch() {
  const page = await open({ viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true });
  await page.locator("#clear").tap();
  const blank = await bars(page);
  const box = await page.locator("#pad").boundingBox();
  const client = await page.context().newCDPSession(page);
  const at = (share) => ({ x: box.x + box.width * 0.5, y: box.y + box.height * share });
  const send = (type, points) =>
    client.send("Input.dispatchTouchEvent", { type, touchPoints: points });
  await send("touchStart", [at(0.2)]);
  for (const share of [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]) await send("touchMove", [at(share)]);
  await send("touchEnd", []);
  const drawn = await bars(page);
  const widths = await page.evaluate(() => [document.documentElement.scrollWidth, window.innerWidth]);
  const scrolled = await page.evaluate(() => window.scrollY);
  seen.touch = { blank, drawn, widths, scrolled };
  // Not a tap: so soon after a stroke, Chromium may take it for a part of the last gesture.
  await page.locator("#tab-plane").click();
  await settled(page, "plane");
  const before = await planeState(page);
  const plane = await boxOf(page.locator("#panels svg").first());
  const spot = ({ x, y }) => ({
    x: plane.x + (plane.width * (x + 6)) / 12,
    y: plane.y + (plane.height * (6 - y)) / 12,
  });
  const target = before.samples[0];
  await send("touchStart", [spot(target)]);
  for (const step of [0.5, 1, 1.5, 2]) await send("touchMove", [spot({ x: target.x, y: target.y - step })]);
  await send("touchEnd", []);
  await settled(page, "plane");
  seen.touch.plane = { before, after: await planeState(page) };
  await page.context().close();
}

async function usePlane() {
  const page = await open({}, "#plane");
  await settled(page, "plane");
  seen.plane = { start: await planeState(page) };
  // Drag the first point of the second picture.
  const overlay = page.locator("#panels svg").nth(1);
  const box = await overlay.boundingBox();
  const spot = ({ x, y }) => [box.x + (box.width * (x + 6)) / 12, box.y + (box.height * (6 - y)) / 12];
  await page.mouse.move(...spot(seen.plane.start.samples[0]));
  await page.mouse.down();
  await page.mouse.move(...spot({ x: 3, y: 3 }), { steps: 5 });
  await page.mouse.up();
  await settled(page, "plane");
  seen.plane.dragged = await planeState(page);
  await page.mouse.click(...spot({ x: -4.5, y: -4.5 }));
  await settled(page, "plane");
  seen.plane.added = await planeState(page);
  await page.getByLabel("removes").check();
  await page.mouse.click(...spot({ x: -4.5, y: -4.5 }));
  await settled(page, "plane");
  seen.plane.removed = await planeState(page);
  await page.locator("#panels svg").first().locator("[tabindex='0']").focus();
  for (const key of ["ArrowRight", "Shift+ArrowUp", "Space"]) await page.keyboard.press(key);
  seen.plane.moved = await planeState(page);
  for (const key of ["n", "Delete", "b"]) await page.keyboard.press(key);
  seen.plane.keys = await planeState(page);
  seen.plane.focus = await page.evaluate(() => document.activeElement.getAttribute("aria-label"));
  await page.locator("#penalty").fill("0.5");
  await settled(page, "plane");
  seen.plane.penalty = await planeState(page);
  seen.judgements = await page.evaluate(judgements);
  await page.context().close();
}

function planeState(page) {
  return page.evaluate(() => ({
    samples: structuredClone(window.plane.view.samples),
    query: window.plane.view.query,
    penalty: window.plane.view.penalty,
    rows: Object.fromEntries(
      [...document.querySelectorAll("#query-table tr[data-panel]")].map((row) => [
        row.dataset.panel,
        [...row.querySelectorAll("td")].map((cell) => cell.textContent),
      ]),
    ),
    notes: [...document.querySelectorAll(".panel small")].map((note) => note.textContent),
  }));
}

/** The mathematics on samples of several kinds, for Python to repeat. */
function judgements() {
  const { samples } = window.plane.view;
  const apart = samples.map((each, i) => ({ ...each, x: each.x + (each.label ? 1 : -1), y: each.y + 0.1 * i }));
  const kinds = { samples, apart, few: apart.slice(9, 12), single: samples.slice(0, 4), none: [] };
  const places = [-6, -3.5, -1, 0, 0.7, 2.5, 6];
  const queries = places.flatMap((x) => places.map((y) => ({ x, y: y + 0.05 })));
  return Object.entries(kinds).flatMap(([kind, points]) =>
    [0.001, 0.1, 10].map((penalty) => ({
      kind, penalty, samples: points, queries, found: window.plane.judge(points, penalty, queries),
    })),
  );
}

/** What the page says when its workers fail: both at once, or one while it starts its model. */
async function failWorkers() {
  const noScript = (page) =>
    page.route(/(sweep|surface)\.worker/, (route) =>
      route.fulfill({ contentType: "text/javascript", body: 'throw new Error("no script")' }),
    );
  const noModel = (page) =>
    page.addInitScript(() => {
      const post = Worker.prototype.postMessage;
      Worker.prototype.postMessage = function (message) {
        const torn = { files: { ...message.files, model: new Uint8Array(3) } };
        post.call(this, message.files ? torn : message);
      };
    });
  seen.failures = {};
  for (const [kind, fail] of Object.entries({ noScript, noModel })) {
    const page = await visit({}, "", async (page) => {
      for (const event of ["console", "pageerror"]) page.removeAllListeners(event); // they are meant
      await fail(page);
    });
    await page.locator("#digits [role=alert]").waitFor({ state: "attached" });
    await page.waitForSelector("body[data-ready]", { state: "attached" });
    seen.failures[kind] = {
      alerts: await page.locator("[role=alert]").allTextContents(),
      confidence: (await bars(page)).confidence.acnml, // bars do not depend on the workers
    };
    await page.context().close();
  }
}

await observe(async (browser) => {
  seen = browser.seen;
  visit = async (settings, hash, prepare = () => {}) => {
    const page = await browser.open(settings);
    await prepare(page);
    await page.goto(browser.address + hash);
    return page;
  };
  await useDigits();
  await useKeyboard();
  await touch();
  await usePlane();
  await failWorkers();
});
