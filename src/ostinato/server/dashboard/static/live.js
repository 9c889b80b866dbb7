// Live parts ask again and again, but not while nobody looks, and not while they are paused.
"use strict";
(() => {
  const rests = () => window.ostinato.isPaused || document.hidden;
  document.addEventListener("htmx:before:request", (event) => {
    const source = event.detail?.ctx?.sourceElement;
    if (source?.hasAttribute("data-poll") && rests()) event.preventDefault();
  });
  // A figure that somebody is reading in a selection is not to be taken away, nor a request that somebody is about to
  // open: its row would be another's by then.
  const HELD = "table.requests a:hover, table.requests a:focus-visible";
  document.addEventListener("htmx:before:swap", (event) => {
    const source = event.detail?.ctx?.sourceElement;
    const selection = document.getSelection();
    if (!source?.hasAttribute("data-poll")) return;
    const isRead = selection && !selection.isCollapsed && source.contains(selection.anchorNode);
    if (isRead || source.querySelector(HELD)) event.preventDefault();
  });
  document.addEventListener("DOMContentLoaded", () => {
    const pause = document.getElementById("pause");
    pause?.addEventListener("click", () => {
      window.ostinato.isPaused = !window.ostinato.isPaused;
      pause.setAttribute("aria-pressed", String(window.ostinato.isPaused));
    });
  });
  window.ostinato.rests = rests;
})();
