/**
 * Opens the page without a network. It keeps the page's files in a cache of their version; the coordinator fills in both.
 * It answers with kept files only if the coordinator does not answer. Files of the runtime have their version in their
 * address, so a kept one comes first; `engine.js` keeps them. Calls of the API are left to the browser.
 */
const PAGE = "sparrow page {version}", RUNTIME = "sparrow {runtime}", FILES = "{files}".split(" ");
const BASE = new URL("..", location.href).href; // a proxy may serve the coordinator below a path

self.addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(keepPage());
});

self.addEventListener("activate", (event) => event.waitUntil(Promise.all([deleteOld(), clients.claim()])));

self.addEventListener("fetch", (event) => {
  const { request } = event, { method, mode, url } = request;
  if (method !== "GET" || !url.startsWith(BASE)) return;
  const path = url.slice(BASE.length);
  if (path.startsWith("web/runtime/")) event.respondWith(keptFirst(request));
  else if (path.startsWith("web/")) event.respondWith(networkFirst(request, url));
  else if (path.startsWith("join/") && mode === "navigate") event.respondWith(networkFirst(request, `${BASE}web/join.html`));
});

async function keepPage() {
  await (await caches.open(PAGE)).addAll(FILES.map((name) => `${BASE}web/${name}`));
}

async function deleteOld() {
  const old = (await caches.keys()).filter((name) => name.startsWith("sparrow ") && ![PAGE, RUNTIME].includes(name));
  await Promise.all(old.map((name) => caches.delete(name)));
}

async function keptFirst(request) {
  return (await caches.match(request.url, { cacheName: RUNTIME, ignoreVary: true })) ?? fetch(request);
}

/** Return the coordinator's answer, or the kept file if it gives none. */
async function networkFirst(request, address) {
  const answer = await fetch(request).catch(() => null);
  if (answer && answer.status < 500) return answer;
  const kept = await caches.match(address, { cacheName: PAGE, ignoreSearch: true, ignoreVary: true });
  return kept ?? answer ?? Response.error();
}
