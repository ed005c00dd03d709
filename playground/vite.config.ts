// Builds the page into `dist`: relative links, so that it works in any folder of any site, and
// nothing from other hosts.
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { compress, init } from "@bokuweb/zstd-wasm";
import { defineConfig, type Plugin } from "vite";

const here = (path: string) => fileURLToPath(new URL(path, import.meta.url));

// The runtime has 14 MB and is a sixth of that when compressed. Static hosts rarely compress files
// of this kind, and browsers cannot unpack Zstandard, so the page does (src/digits/model.ts).
async function compressRuntime(): Promise<void> {
  const source = here("node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded.wasm");
  const target = here("build/runtime.bin");
  mkdirSync(here("build"), { recursive: true });
  const version = here("build/runtime.version");
  const wanted = readFileSync(here("package-lock.json"), "utf8");
  if (existsSync(target) && existsSync(version) && readFileSync(version, "utf8") === wanted) return;
  await init();
  writeFileSync(target, compress(readFileSync(source), 19));
  writeFileSync(version, wanted);
}

/** The licence of what is bundled goes with it. */
const licences: Plugin = {
  name: "licences",
  generateBundle() {
    const source = readFileSync(here("licences.txt"), "utf8");
    this.emitFile({ type: "asset", fileName: "licences.txt", source });
  },
};

await compressRuntime();

export default defineConfig({
  base: "./",
  publicDir: false,
  plugins: [licences],
  // The variant of onnxruntime-web that leaves it to the page where its files come from.
  resolve: { conditions: ["onnxruntime-web-use-extern-wasm", "browser", "module", "import"] },
  assetsInclude: ["**/*.onnx", "**/*.bin"],
  build: { target: "es2022", assetsInlineLimit: 0, chunkSizeWarningLimit: 1000 },
  worker: { format: "es" },
});
