// Copy the text of an element to the clipboard.

/** Copy at a click, and confirm it. */
export function copies(button, element, confirmation) {
  button.addEventListener("click", () => copy(element, confirmation));
}

/** Copy once. */
export async function copy(element, confirmation) {
  const copied = await navigator.clipboard?.writeText(element.value ?? element.textContent).then(() => true, () => false);
  // Over plain HTTP from other machines browsers have no clipboard, but they copy a selection.
  if (!copied && element.select) element.select();
  else if (!copied) getSelection().selectAllChildren(element);
  confirmation.textContent = copied || document.execCommand("copy") ? "Copied." : "The browser did not allow it: copy the selected text.";
}
