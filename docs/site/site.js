// What the theme leaves open for people who use a keyboard or a screen reader.
"use strict";

/** What scrolls is reached by the keyboard. */
function makeScrollable() {
  for (const box of document.querySelectorAll("pre, .output, .table-wrapper, .toc-scroll, .sidebar-scroll")) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
  }
}

/** Landmarks and headings of the theme say what they are. */
function nameParts() {
  for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = 2;
  document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "Contents of the site");
  document.querySelector(".toc-drawer")?.setAttribute("aria-label", "On this page");
  // The words on a folded cell say what it does; the label beside them says something else.
  for (const summary of document.querySelectorAll("summary[aria-label]")) summary.removeAttribute("aria-label");
  for (const heading of document.querySelectorAll("th")) {
    if (!heading.textContent.trim()) heading.replaceWith(document.createElement("td"));
  }
  if (!document.querySelector("h1")) {
    const title = document.createElement("h1");
    title.textContent = document.title.split(" - ")[0];
    document.querySelector("#furo-main-content")?.prepend(title);
  }
}

addEventListener("load", makeScrollable);
addEventListener("resize", makeScrollable);
addEventListener("DOMContentLoaded", nameParts);
