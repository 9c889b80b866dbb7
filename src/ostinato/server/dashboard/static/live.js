// Live parts ask again and again, but not while nobody looks, and not while they are paused.
"use strict";
(() => {
  const rests = () => window.ostinato.isPaused || document.hidden;
  document.addEventListener("htmx:before:request", (event) => {
    const source = event.detail?.ctx?.sourceElement;
    if (source?.hasAttribute("data-poll") && rests()) event.preventDefault();
  });
  // A figure that somebody is reading in a selection is not to be taken away.
  document.addEventListener("htmx:before:swap", (event) => {
    const source = event.detail?.ctx?.sourceElement;
    const selection = document.getSelection();
    if (source?.hasAttribute("data-poll") && selection && !selection.isCollapsed && source.contains(selection.anchorNode)) {
      event.preventDefault();
    }
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
