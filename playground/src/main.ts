// Starts the page: the theme, the two views and the tabs between them.

import { byId, warning } from "./dom";
import { startDigits } from "./digits/view";
import { startPlane } from "./plane/view";
import { startTabs } from "./tabs";
import { startTheme } from "./theme";

startTheme(byId("theme"));
startTabs();
startPlane();
startDigits().catch((error: unknown) => {
  console.error(error);
  const text = error instanceof Error ? error.message : String(error);
  byId("about").replaceWith(warning(`The model could not be started: ${text}`, "about"));
});
