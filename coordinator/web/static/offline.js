// The page without a network: keeping it, and asking the browser to keep its storage.

import { $, put } from "./words.js";

const BASE = new URL("..", import.meta.url);
const KEPT = "This page also opens without a network, and predicts if it has a model.";
const INSTALL = ' To install it, choose "Install" or "Add to Home screen" in the browser\'s menu.';
const PREVENTION = " Installing the page can prevent that.";
const PERSISTENT = "This browser keeps your data and model until you delete them.";
const TEMPORARY = "This browser may delete your data and model when it needs space.";

/** Keep the page for visits without a network, and show whether the browser keeps it and its storage. */
export async function keepPage() {
  const { serviceWorker, storage } = navigator;
  if (!serviceWorker) return; // over plain HTTP
  try {
    await serviceWorker.register(new URL("./service-worker.js", import.meta.url), { scope: BASE.pathname });
  } catch (error) {
    put($("offline"), `This page needs a network, because the browser did not keep it: ${error.message}`);
    return;
  }
  await serviceWorker.ready;
  put($("offline"), KEPT + (isInstalled() ? "" : INSTALL));
  showStorage(await storage.persisted());
}

const isInstalled = () => matchMedia("(display-mode: standalone)").matches;

function showStorage(persistent) {
  put($("stored"), persistent ? PERSISTENT : TEMPORARY + (isInstalled() ? "" : PREVENTION));
}

/** Ask the browser to keep the page's storage, and show its answer. */
export async function askToPersist() {
  const { storage } = navigator;
  if (storage?.persist) showStorage(await storage.persist());
}

/** Delete the kept files. */
export async function forgetPage() {
  const { serviceWorker } = navigator;
  if (!serviceWorker) return;
  await (await serviceWorker.getRegistration(BASE))?.unregister();
  const names = (await caches.keys()).filter((name) => name.startsWith("sparrow "));
  await Promise.all(names.map((name) => caches.delete(name)));
  put($("offline"), "");
}
