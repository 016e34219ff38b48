// Calls to the coordinator. Why one failed is said where it was made, until another one from there works.

const $ = (id) => document.getElementById(id);

/** Set an element's text where it is another: what is read out to a user is read out at each change. */
export function put(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

/** The answer, or null where there is none: then the element ``where`` says why. */
export async function call(method, path, { body, where = "error" } = {}) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  try {
    const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
    if (answer.ok) mended(where);
    else fail(await reason(answer), where);
    return answer.ok ? answer : null;
  } catch (error) {
    if (method !== "GET") fail("The coordinator did not answer: look whether this was changed before you try again.", where);
    return null;
  }
}

/** Why a call was refused. */
export async function reason(answer) {
  const problem = await answer.json().catch(() => ({}));
  return problem.detail ?? `${answer.url}: ${answer.status}`;
}

export function fail(text, where = "error") {
  put(where, text);
  $(where).hidden = false;
}

export function mended(where = "error") {
  $(where).hidden = true;
}
