"""The playground: a page that runs a calibrated network in the browser.

`drawing` turns strokes into images and distorts them, exactly as the page does in TypeScript.
`model` trains the page's network, calibrates it and exports it. `python -m playground` runs this.
`server` serves the built page to this machine.
`browser` looks at the built page, and at the site, with Chromium. The page itself is in
`index.html` and `src`. `docs/howto/playground.md` is for its users.
"""
