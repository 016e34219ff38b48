// The capabilities that training needs, checked before a person takes part.

const PAGE = 65536, MEBIBYTE = 2 ** 20;
const RUNTIME_BYTES = 64 * MEBIBYTE; // code, stacks and graphs of onnxruntime-web
const COPIES = 6; // of the model's float32 values: weights, gradients, the optimiser's state, and copies at the border
const MOST_PAGES = 65536; // the maximum that onnxruntime-web reserves

/** A module whose only function returns a vector: () => i8x16.splat(0). */
const SIMD = Uint8Array.of(
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 8, 1, 6, 0, 65, 0, 253, 15, 11,
);

let checked = null; // { parameters, lacks }: the last answer

/** Return what this browser lacks to train a federation's model and the remedy, in one line; null if it lacks nothing. */
export function lacking({ parameters }) {
  if (checked?.parameters !== parameters) checked = { parameters, lacks: look(parameters) };
  return checked.lacks;
}

function look(parameters) {
  if (typeof WebAssembly !== "object") {
    return "This browser has no WebAssembly, which training needs: switch off its lockdown mode or JIT-less mode for " +
      "this site, or use another browser.";
  }
  if (!WebAssembly.validate(SIMD)) {
    return "This browser has no WebAssembly SIMD, which training needs: update the browser (Chrome 91, Firefox 89, " +
      "Safari 16.4 or later), or use another device.";
  }
  const bytes = RUNTIME_BYTES + 4 * COPIES * parameters;
  try {
    // Allocate as onnxruntime-web does. The memory is freed at once.
    new WebAssembly.Memory({ initial: Math.min(Math.ceil(bytes / PAGE), MOST_PAGES), maximum: MOST_PAGES, shared: true });
  } catch {
    return `This browser has too little memory: training needs about ${Math.ceil(bytes / MEBIBYTE)} MiB. Close other apps ` +
      "and tabs and reload this page, or use another device.";
  }
  return null;
}
