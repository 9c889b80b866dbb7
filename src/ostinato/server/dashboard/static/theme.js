// Before anything is drawn: the colours that were chosen here.
"use strict";
(() => {
  const chosen = () => {
    try {
      return localStorage.getItem("ostinato-theme") || "";
    } catch {
      return ""; // storage may be forbidden
    }
  };
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  apply(chosen());

  // A colour of the style sheet as canvases take it: "rgb(…)", of the theme that holds now.
  const colour = (name) => {
    const probe = document.createElement("i");
    probe.hidden = true;
    probe.style.color = `var(--${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  window.ostinato = { isPaused: false, colour };

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (!button) return;
    const names = { "": "as the system has them", light: "light", dark: "dark" };
    const say = (theme) => button.setAttribute("aria-label", `Colours: ${names[theme]}`);
    say(chosen());
    button.addEventListener("click", () => {
      const next = { "": "light", light: "dark", dark: "" }[chosen()] ?? "";
      try {
        localStorage.setItem("ostinato-theme", next);
      } catch {
        // then it holds for this page only
      }
      apply(next);
      say(next);
      document.dispatchEvent(new Event("ostinato:theme"));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      document.dispatchEvent(new Event("ostinato:theme"));
    });
  });
})();
