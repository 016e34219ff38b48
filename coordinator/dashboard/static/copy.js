// Copy the text of an element to the clipboard.

/** Return whether the browser has copied it. */
export async function copy(element) {
  // Over plain HTTP from other machines browsers have no clipboard, but they copy a selection.
  const written = await navigator.clipboard?.writeText(element.textContent).then(() => true, () => false);
  if (written) return true;
  getSelection().selectAllChildren(element);
  return document.execCommand("copy");
}
