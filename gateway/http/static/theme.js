// Runs before the page is drawn, so that a chosen theme does not flash. Without a choice the system's theme holds.
"use strict";

(() => {
  const root = document.documentElement;
  const saved = localStorage.getItem("baton-theme");
  if (saved === "light" || saved === "dark") root.dataset.theme = saved;

  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme-button").addEventListener("click", () => {
      const systemIsDark = matchMedia("(prefers-color-scheme: dark)").matches;
      const shown = root.dataset.theme ?? (systemIsDark ? "dark" : "light");
      root.dataset.theme = shown === "dark" ? "light" : "dark";
      localStorage.setItem("baton-theme", root.dataset.theme);
    });
  });
})();
